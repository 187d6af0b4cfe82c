//! What one engine may take: one canonical, device-free subgraph.
//!
//! One file a kind, with its formula. What a problem reads and writes is known by slots, numbered from 0 in the order that the kind's page
//! gives; an operand that is used twice has one slot. What a slot is bound to is said beside the problem ([`crate::pattern::Subgraph`]).

mod attention;
mod batch_norm;
mod chain;
mod conv;
mod gemm;
mod map;
mod matrix;
mod norm;
mod pool;
mod reduce;
mod resample;
mod scan;
mod softmax;
mod tensor;
mod views;

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_tensor::{DType, Layout};

use crate::error::Error;
use crate::op::HostScalar;
use crate::ops::pointwise::{BinaryOp, Drawn, UnaryOp};

pub use crate::ops::conv::ConvDirection as Direction;
pub use attention::{AttentionPass, AttentionProblem, Corner};
pub(crate) use attention::{D_SCORE, trim};
pub use batch_norm::{BatchNormProblem, ChannelFunction};
pub use chain::{Chain, ChainStep, RowPlace, View, Window};
pub use conv::{ConvExtents, ConvProblem, GemmExtents, Statistics, output_extent};
pub(crate) use gemm::blocks;
pub use gemm::{GemmProblem, Scale};
pub use map::MapProblem;
pub use matrix::{Matrix, Order};
pub use norm::{NormPass, NormProblem};
pub use pool::{PoolPass, PoolProblem, Windows};
pub use reduce::ReduceProblem;
pub use resample::ResampleProblem;
pub use scan::ScanProblem;
pub use softmax::{Loss, RowFunction, SoftmaxProblem};
pub use tensor::{Channels, Tensor};

/// A buffer or a host scalar of a problem.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.0)
    }
}

/// One subgraph in canonical form. Engines match on it exhaustively.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "a problem is looked at far more often than moved")]
pub enum Problem {
    /// Matrix multiplication with an epilogue.
    Gemm(GemmProblem),
    /// Convolution in one of its directions, with a prologue and an epilogue.
    Conv(ConvProblem),
    /// A computation at each point of a space.
    Map(MapProblem),
    /// A reduction with what stands before and behind it.
    Reduce(ReduceProblem),
    /// Running sums, products and extrema along an axis.
    Scan(ScanProblem),
    /// Softmax, cross-entropy and their gradients.
    Softmax(SoftmaxProblem),
    /// Pooling and its gradient.
    Pool(PoolProblem),
    /// Normalization and its gradient.
    Norm(NormProblem),
    /// Batch normalization, its gradient, and statistics of channels.
    BatchNorm(BatchNormProblem),
    /// Attention and its gradient.
    Attention(AttentionProblem),
    /// Resampling, borders, and their gradients.
    Resample(ResampleProblem),
}

/// How a problem uses a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read, any element at any time.
    Read,
    /// Read, each element by what computes the output's element of the same index, and before that is written: an output of the same
    /// elements may lie in its place.
    ReadInPlace,
    /// As [`Access::ReadInPlace`], for the output of this slot alone: others are written earlier than this is read.
    ReadBefore(Slot),
    /// Written.
    Written,
}

/// What a problem reads or writes in one place: a buffer and the elements of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Operand {
    /// What it is, such as `a` or `epilogue operand`.
    pub name: &'static str,
    /// The buffer.
    pub slot: Slot,
    /// Its element type.
    pub dtype: DType,
    /// Elements of the buffer before the first one.
    pub offset: u64,
    /// The elements, from the first one on.
    pub layout: Layout,
    /// How it is used.
    pub access: Access,
}

impl Operand {
    /// Bytes from the start of the buffer to the end of the last element; 0 where there are no elements.
    pub fn span_bytes(&self) -> u128 {
        match self.layout.span_bytes(self.dtype) {
            0 => 0,
            bytes => u128::from(self.offset) * self.dtype.bytes() as u128 + bytes,
        }
    }

    /// Whether two operands are the same elements, index by index, where their buffers begin at one address.
    pub fn is_same_elements(&self, other: &Operand) -> bool {
        (self.dtype, self.offset, &self.layout) == (other.dtype, other.offset, &other.layout)
    }

    /// Whether an output of the same problem may lie in the place of this operand: the same elements, each read before its own is written.
    pub fn gives_way_to(&self, output: &Operand) -> bool {
        let is_read_before = match self.access {
            Access::ReadInPlace => true,
            Access::ReadBefore(slot) => slot == output.slot,
            Access::Read | Access::Written => false,
        };
        is_read_before && output.access == Access::Written && self.is_same_elements(output)
    }
}

impl Problem {
    /// The word for its kind, as it stands in serialized form.
    pub const fn kind(&self) -> &'static str {
        match self {
            Problem::Gemm(_) => "gemm",
            Problem::Conv(_) => "conv",
            Problem::Map(_) => "map",
            Problem::Reduce(_) => "reduce",
            Problem::Scan(_) => "scan",
            Problem::Softmax(_) => "softmax",
            Problem::Pool(_) => "pool",
            Problem::Norm(_) => "norm",
            Problem::BatchNorm(_) => "batch_norm",
            Problem::Attention(_) => "attention",
            Problem::Resample(_) => "resample",
        }
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// As the kind's own `canonical`.
    pub fn canonical(self) -> Result<Problem, Error> {
        match self {
            Problem::Gemm(problem) => problem.canonical().map(Problem::Gemm),
            Problem::Conv(problem) => problem.canonical().map(Problem::Conv),
            Problem::Map(problem) => problem.canonical().map(Problem::Map),
            Problem::Reduce(problem) => problem.canonical().map(Problem::Reduce),
            Problem::Scan(problem) => problem.canonical().map(Problem::Scan),
            Problem::Softmax(problem) => problem.canonical().map(Problem::Softmax),
            Problem::Pool(problem) => problem.canonical().map(Problem::Pool),
            Problem::Norm(problem) => problem.canonical().map(Problem::Norm),
            Problem::BatchNorm(problem) => problem.canonical().map(Problem::BatchNorm),
            Problem::Attention(problem) => problem.canonical().map(Problem::Attention),
            Problem::Resample(problem) => problem.canonical().map(Problem::Resample),
        }
    }

    /// Whether two executions must agree bit for bit.
    pub fn determinism(&self) -> Determinism {
        match self {
            Problem::Gemm(problem) => problem.determinism,
            Problem::Conv(problem) => problem.determinism,
            // Their engines repeat bit for bit whether asked to or not.
            Problem::Map(_)
            | Problem::Reduce(_)
            | Problem::Scan(_)
            | Problem::Softmax(_)
            | Problem::Pool(_)
            | Problem::Norm(_)
            | Problem::BatchNorm(_)
            | Problem::Resample(_) => Determinism::Repeatable,
            Problem::Attention(problem) => problem.determinism,
        }
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        match self {
            Problem::Gemm(problem) => problem.slots(),
            Problem::Conv(problem) => problem.slots(),
            Problem::Map(problem) => problem.slots(),
            Problem::Reduce(problem) => problem.slots(),
            Problem::Scan(problem) => problem.slots(),
            Problem::Softmax(problem) => problem.slots(),
            Problem::Pool(problem) => problem.slots(),
            Problem::Norm(problem) => problem.slots(),
            Problem::BatchNorm(problem) => problem.slots(),
            Problem::Attention(problem) => problem.slots(),
            Problem::Resample(problem) => problem.slots(),
        }
    }

    /// Arithmetic work.
    pub fn flops(&self) -> f64 {
        match self {
            Problem::Gemm(problem) => problem.flops(),
            Problem::Conv(problem) => problem.flops(),
            Problem::Map(problem) => problem.flops(),
            Problem::Reduce(problem) => problem.flops(),
            Problem::Scan(problem) => problem.flops(),
            Problem::Softmax(problem) => problem.flops(),
            Problem::Pool(problem) => problem.flops(),
            Problem::Norm(problem) => problem.flops(),
            Problem::BatchNorm(problem) => problem.flops(),
            Problem::Attention(problem) => problem.flops(),
            Problem::Resample(problem) => problem.flops(),
        }
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        match self {
            Problem::Gemm(problem) => problem.is_empty(),
            Problem::Conv(problem) => problem.is_empty(),
            Problem::Map(problem) => problem.is_empty(),
            Problem::Reduce(problem) => problem.is_empty(),
            Problem::Scan(problem) => problem.is_empty(),
            Problem::Softmax(problem) => problem.is_empty(),
            Problem::Pool(problem) => problem.is_empty(),
            Problem::Norm(problem) => problem.is_empty(),
            Problem::BatchNorm(problem) => problem.is_empty(),
            Problem::Attention(problem) => problem.is_empty(),
            Problem::Resample(problem) => problem.is_empty(),
        }
    }

    /// Every use of a buffer: a buffer that is used twice is listed twice. Host scalars are not listed.
    ///
    /// # Errors
    /// Strides that span more than memory can; a canonical problem has none.
    pub fn buffers(&self) -> Result<Vec<Operand>, Error> {
        match self {
            Problem::Gemm(problem) => problem.buffers(),
            Problem::Conv(problem) => problem.buffers(),
            Problem::Map(problem) => problem.buffers(),
            Problem::Reduce(problem) => problem.buffers(),
            Problem::Scan(problem) => problem.buffers(),
            Problem::Softmax(problem) => problem.buffers(),
            Problem::Pool(problem) => problem.buffers(),
            Problem::Norm(problem) => problem.buffers(),
            Problem::BatchNorm(problem) => problem.buffers(),
            Problem::Attention(problem) => problem.buffers(),
            Problem::Resample(problem) => problem.buffers(),
        }
    }

    /// The slots that are bound to host scalars.
    pub fn scalars(&self) -> Vec<Slot> {
        match self {
            Problem::Gemm(problem) => problem.scalars(),
            Problem::Conv(problem) => problem.scalars(),
            Problem::Map(problem) => problem.chain.scalars().collect(),
            Problem::Reduce(problem) => problem.scalars(),
            Problem::Attention(problem) => problem.scalars(),
            Problem::Scan(_) | Problem::Softmax(_) | Problem::Pool(_) | Problem::Norm(_) | Problem::BatchNorm(_) | Problem::Resample(_) => {
                Vec::new()
            }
        }
    }
}

/// Whether two executions must agree bit for bit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Determinism {
    /// They need not.
    #[default]
    Any,
    /// Same device, same inputs, same bits.
    Repeatable,
}

/// One step between a finished sum and the output. `v` is the value of one element, in the epilogue's type; `P` says where an operand's
/// elements lie, such as a [`Matrix`].
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpilogueStep<P = Matrix> {
    /// `v = f(v)`.
    Unary(UnaryOp),
    /// `v = f(v, operand[m, n])`, or `f(operand[m, n], v)`: bias (an operand that is per column or per row), residual, gate, mask.
    Binary {
        /// The function.
        f: BinaryOp,
        /// Read; strides of 0 broadcast it.
        operand: P,
        /// Whether `v` is the right argument. `false` for commutative functions.
        v_is_right: bool,
    },
    /// `v = f(v, g)`, or `f(g, v)`, with `g` what functions make of a random number, in f32: the mask of dropout. Of products alone.
    Random {
        /// The function.
        f: BinaryOp,
        /// Whether `v` is the right argument. `false` for commutative functions.
        v_is_right: bool,
        /// How the numbers are distributed: what [`crate::Pointwise::Random`] has.
        distribution: Drawn,
        /// Which number an element has, as strides tell it; in no memory, and so of u8. Its slot is the state's: four i32 in memory, or with
        /// an `offset` the seed, an integer of the host.
        number: P,
        /// The offset, an integer of the host, where the state is given by value.
        offset: Option<Slot>,
        /// What the number goes through, in order.
        through: Vec<UnaryOp>,
    },
    /// `v = factor · v`.
    Scale {
        /// The factor, from the host.
        factor: HostScalar<Slot>,
    },
    /// `v` rounded to a type, as if it had been stored and read again.
    Round {
        /// The type.
        dtype: DType,
    },
    /// Stores `v`, rounded to the target's type, and goes on with the unrounded `v`.
    Store {
        /// Written.
        target: P,
    },
}

pub(crate) fn finite(op: &str, attribute: &'static str, scalar: &HostScalar<Slot>) -> Result<(), Error> {
    match scalar {
        HostScalar::Fixed(real) if !real.0.is_finite() => {
            Err(Error::Attribute { op: op.to_owned(), attribute, value: real.to_string(), rule: "a fixed factor is finite" })
        }
        _ => Ok(()),
    }
}

impl<P> EpilogueStep<P> {
    /// The same step with its operand, if it has one, put through `f`; `None` where that says so.
    pub(crate) fn try_map<Q>(&self, f: impl Fn(&P) -> Option<Q>) -> Option<EpilogueStep<Q>> {
        Some(match self {
            EpilogueStep::Unary(function) => EpilogueStep::Unary(*function),
            EpilogueStep::Binary { f: function, operand, v_is_right } => {
                EpilogueStep::Binary { f: *function, operand: f(operand)?, v_is_right: *v_is_right }
            }
            EpilogueStep::Random { f: function, v_is_right, distribution, number, offset, through } => EpilogueStep::Random {
                f: *function,
                v_is_right: *v_is_right,
                distribution: *distribution,
                number: f(number)?,
                offset: *offset,
                through: through.clone(),
            },
            EpilogueStep::Scale { factor } => EpilogueStep::Scale { factor: *factor },
            EpilogueStep::Round { dtype } => EpilogueStep::Round { dtype: *dtype },
            EpilogueStep::Store { target } => EpilogueStep::Store { target: f(target)? },
        })
    }

    /// The factor from the host, if there is one.
    pub(crate) fn factor(&self) -> Option<HostScalar<Slot>> {
        if let EpilogueStep::Scale { factor } = self { Some(*factor) } else { None }
    }
}

/// Drops steps that do nothing: identities, factors of 1, rounding to the type that is computed in, and rounding last of all to the type
/// that is stored anyway. Operands of commutative functions come to stand on the right.
fn simplify<P>(steps: &mut Vec<EpilogueStep<P>>, computed: DType, stored: DType) {
    for step in steps.iter_mut() {
        if let EpilogueStep::Binary { f, v_is_right, .. } | EpilogueStep::Random { f, v_is_right, .. } = step {
            *v_is_right &= !f.is_commutative();
        }
    }
    steps.retain(|step| match step {
        EpilogueStep::Unary(UnaryOp::Identity) => false,
        EpilogueStep::Scale { factor } => !factor.is_fixed(1.0),
        EpilogueStep::Round { dtype } => *dtype != computed,
        _ => true,
    });
    if let Some(EpilogueStep::Round { dtype }) = steps.last()
        && *dtype == stored
    {
        steps.pop();
    }
}

/// Checks that epilogues take the function of a step, and the step's attributes.
fn check_step<P>(op: &str, step: &EpilogueStep<P>) -> Result<(), Error> {
    let not_taken = |name: &str| {
        let rule = "the function is none of those that an epilogue takes (`in_epilogue`)";
        Err(Error::Attribute { op: op.to_owned(), attribute: "epilogue", value: name.to_owned(), rule })
    };
    match step {
        EpilogueStep::Unary(f) if !f.in_epilogue() => not_taken(f.name()),
        EpilogueStep::Unary(f) => f.check(op),
        EpilogueStep::Binary { f, .. } if !f.in_epilogue() => not_taken(f.name()),
        EpilogueStep::Binary { f, .. } => f.check(op),
        EpilogueStep::Random { f, .. } if !f.in_epilogue() => not_taken(f.name()),
        EpilogueStep::Random { f, through, .. } => {
            f.check(op)?;
            through.iter().try_for_each(|f| if f.in_epilogue() { f.check(op) } else { not_taken(f.name()) })
        }
        EpilogueStep::Round { dtype } if !dtype.is_storage() || *dtype == DType::Bool => {
            let rule = "a value is rounded to a storage type";
            Err(Error::DType { op: op.to_owned(), tensor: "epilogue".to_owned(), got: *dtype, rule })
        }
        EpilogueStep::Scale { factor } => finite(op, "factor", factor),
        EpilogueStep::Round { .. } | EpilogueStep::Store { .. } => Ok(()),
    }
}

/// The slots that `visit_all` shows, each once.
fn slots_of(visit_all: impl FnOnce(&mut dyn FnMut(&mut Slot))) -> Vec<Slot> {
    let mut slots = Vec::new();
    visit_all(&mut |slot| {
        if !slots.contains(slot) {
            slots.push(*slot);
        }
    });
    slots
}

/// Gives a slot its position in `old`.
fn renumber(old: &[Slot], slot: &mut Slot) {
    if let Some(new) = old.iter().position(|known| known == slot) {
        *slot = Slot(new as u32);
    }
}

/// Checks that extents can be counted.
fn check_extents(op: &str, extents: &[u64]) -> Result<(), Error> {
    let points = extents.iter().try_fold(1u64, |all, &dim| all.checked_mul(dim.max(1)));
    if points.is_none_or(|count| count > 1 << 62) {
        return Err(Error::Attribute {
            op: op.to_owned(),
            attribute: "dims",
            value: format!("{extents:?}"),
            rule: "a space has at most 2^62 points",
        });
    }
    Ok(())
}
