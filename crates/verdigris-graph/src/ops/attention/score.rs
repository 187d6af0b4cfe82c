//! The function of a score: straight-line steps that make the score of a pair of a query and a key.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::read::Read;
use crate::error::Error;
use crate::graph::Graph;
use crate::op::{HostScalar, Real};
use crate::ops::pointwise::{BinaryOp, Pointwise, TernaryOp, UnaryOp};
use crate::problem::{Chain, ChainStep, View};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{attribute, broadcasts_to, data, of_type};

/// A coordinate of a score. Queries and keys of ragged tensors count from the first of their sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScorePlace {
    /// The batch.
    Batch,
    /// The head of queries.
    Head,
    /// The query.
    Query,
    /// The key.
    Key,
}

impl ScorePlace {
    /// Each of them, in the order of dims.
    pub const ALL: [ScorePlace; 4] = [ScorePlace::Batch, ScorePlace::Head, ScorePlace::Query, ScorePlace::Key];
}

/// One step of a [`ScoreFunction`]; `x`, `z` and `t` are positions of earlier steps.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ScoreStep {
    /// The scaled product of the query and the key.
    Given,
    /// A number; −∞ and ∞ are some.
    Number(Real),
    /// The element that belongs to the pair, of the score operand of this number.
    Operand(u32),
    /// The element of a score operand at the pair's batch, head and query, and along its last dim at the place that a step says: `table[q_idx - kv_idx + last]`.
    Gather {
        /// The number of the score operand, a table of any extent along its last dim.
        operand: u32,
        /// The place, of coordinates, numbers and operands and not of the score; rounded to a whole number, ties to even. Below the first element it is the first, behind the last the last.
        x: u32,
    },
    /// A coordinate of the pair, as a number.
    Place(ScorePlace),
    /// `f(x)`.
    Unary {
        /// The function.
        f: UnaryOp,
        /// Its operand.
        x: u32,
    },
    /// `f(x, z)`.
    Binary {
        /// The function.
        f: BinaryOp,
        /// Left.
        x: u32,
        /// Right.
        z: u32,
    },
    /// `f(x, z, t)`.
    Ternary {
        /// The function.
        f: TernaryOp,
        /// First.
        x: u32,
        /// Second.
        z: u32,
        /// Third.
        t: u32,
    },
    /// `x`, as if it had been stored as f16, bf16 or f32 and read again.
    Round {
        /// The type.
        dtype: DType,
        /// The value.
        x: u32,
    },
}

impl ScoreStep {
    /// The positions of what it is made of.
    pub fn operands(&self) -> Vec<u32> {
        match *self {
            ScoreStep::Given | ScoreStep::Number(_) | ScoreStep::Operand(_) | ScoreStep::Place(_) => Vec::new(),
            ScoreStep::Unary { x, .. } | ScoreStep::Round { x, .. } | ScoreStep::Gather { x, .. } => vec![x],
            ScoreStep::Binary { x, z, .. } => vec![x, z],
            ScoreStep::Ternary { x, z, t, .. } => vec![x, z, t],
        }
    }

    /// The number of the score operand that it reads.
    pub fn operand(&self) -> Option<u32> {
        match *self {
            ScoreStep::Operand(number) | ScoreStep::Gather { operand: number, .. } => Some(number),
            _ => None,
        }
    }

    pub(super) fn operands_mut(&mut self) -> Vec<&mut u32> {
        match self {
            ScoreStep::Given | ScoreStep::Number(_) | ScoreStep::Operand(_) | ScoreStep::Place(_) => Vec::new(),
            ScoreStep::Unary { x, .. } | ScoreStep::Round { x, .. } | ScoreStep::Gather { x, .. } => vec![x],
            ScoreStep::Binary { x, z, .. } => vec![x, z],
            ScoreStep::Ternary { x, z, t, .. } => vec![x, z, t],
        }
    }
}

/// The score of a pair as steps, of which the last one gives it. Each step has a value that later ones name by its position, and every one but the last is
/// named by a later one. Arithmetic is in the type that attention computes in, and what is read is converted to it.
///
/// ```
/// use verdigris_graph::{BinaryOp, ScoreFunction, ScorePlace, ScoreStep};
///
/// // t + t · (query − key)
/// let mut score = ScoreFunction::default();
/// let t = score.push(ScoreStep::Given);
/// let query = score.push(ScoreStep::Place(ScorePlace::Query));
/// let key = score.push(ScoreStep::Place(ScorePlace::Key));
/// let apart = score.push(ScoreStep::Binary { f: BinaryOp::Sub, x: query, z: key });
/// let product = score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: t, z: apart });
/// score.push(ScoreStep::Binary { f: BinaryOp::Add, x: t, z: product });
/// assert_eq!(score.steps.len(), 6);
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ScoreFunction {
    /// The steps, at most [`ScoreFunction::MOST_STEPS`].
    pub steps: Vec<ScoreStep>,
}

impl ScoreFunction {
    /// The most steps: each is computed for every pair, and a kernel holds them once for each score of a thread.
    pub const MOST_STEPS: usize = 64;
    /// The most operands.
    pub const MOST_OPERANDS: usize = 4;
    /// From so many on, a dim has coordinates that are no numbers of f32.
    pub const MOST_PLACES: u64 = 1 << 24;
    /// The most elements along the last dim of a table: places up to there are numbers of f32 with a sum that tells them apart.
    pub const MOST_ENTRIES: u64 = 1 << 23;

    /// Adds a step and returns its position.
    pub fn push(&mut self, step: ScoreStep) -> u32 {
        self.steps.push(step);
        self.steps.len() as u32 - 1
    }

    /// Checks what an op `op` reads with it, whose scores have these dims.
    pub(super) fn check(&self, op: &str, graph: &Graph, read: &Read, dims: [u64; 4]) -> Result<(), Error> {
        if let Some(cap) = read.spec.soft_cap {
            return attribute(op, "soft_cap", cap.0, "a score function comes in place of a soft cap, which would be one of its steps");
        }
        let operands = &read.score_operands;
        if operands.len() > Self::MOST_OPERANDS {
            return attribute(op, "the number of score operands", operands.len(), "a score function reads at most 4 tensors");
        }
        let wide = Pointwise::compute_dtype(read.floats().map(|uid| Ok(data(graph, op, uid)?.dtype)).collect::<Result<Vec<_>, Error>>()?);
        let loaded: Vec<u32> = self.steps.iter().filter_map(ScoreStep::operand).collect();
        if let Some(step) = self.steps.iter().find(|step| step.operand().is_some_and(|of| of as usize >= operands.len())) {
            return attribute(op, "score", step, "a step reads a score operand that there is, by its number from 0");
        }
        for (number, &uid) in (0..).zip(operands) {
            let tensor = data(graph, op, uid)?;
            if loaded.iter().filter(|&&of| of == number).count() != 1 {
                let rule = "each score operand is read by one step of the score function, which later steps name";
                return Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
            }
            of_type(op, tensor, is_operand, OPERANDS)?;
            match self.is_table(number) {
                false => broadcasts_to(op, tensor, &dims, "a score operand broadcasts to the scores, `[b, h, s_q, s_kv]`")?,
                true => {
                    let [b, h, s_q, _] = dims;
                    let rule = "a table broadcasts to the scores but for its last dim, `[b, h, s_q, any]`";
                    broadcasts_to(op, tensor, &[b, h, s_q, entries_of(tensor)], rule)?;
                }
            }
        }
        // The rest is asked of the problem's steps, which are the same.
        check_steps(
            op,
            &self.over(|number| {
                let entries = operands.get(number as usize).and_then(|&uid| data(graph, op, uid).ok()).map_or(1, entries_of);
                (View { slot: crate::Slot(number), dtype: DType::F32, offset: 0, strides: vec![0; 4] }, entries)
            }),
            wide,
            dims,
        )
    }

    /// The function whose steps over scores these are, as [`check_steps`] has them; operands are numbered as they are loaded.
    pub(crate) fn under(chain: &Chain) -> ScoreFunction {
        let mut loaded = 0..;
        let step = |step: &ChainStep| match *step {
            ChainStep::Scalar(HostScalar::Fixed(number)) => ScoreStep::Number(number),
            ChainStep::Load { .. } => ScoreStep::Operand(loaded.next().unwrap_or(0)),
            ChainStep::Gather { x, .. } => ScoreStep::Gather { operand: loaded.next().unwrap_or(0), x },
            ChainStep::Index { ref strides } => ScoreStep::Place(place_of(strides).unwrap_or(ScorePlace::Batch)),
            ChainStep::Unary { f, x } => ScoreStep::Unary { f, x },
            ChainStep::Binary { f, x, z } => ScoreStep::Binary { f, x, z },
            ChainStep::Ternary { f, x, z, t } => ScoreStep::Ternary { f, x, z, t },
            ChainStep::Round { dtype, x } => ScoreStep::Round { dtype, x },
            _ => ScoreStep::Given,
        };
        ScoreFunction { steps: chain.steps.iter().map(step).collect() }
    }

    /// Whether a score operand is a table, and not over the scores.
    pub fn is_table(&self, number: u32) -> bool {
        self.steps.iter().any(|step| matches!(step, ScoreStep::Gather { operand, .. } if *operand == number))
    }

    /// The steps over scores. `operand` says where an operand lies, and how many elements it has along its last dim.
    pub(crate) fn over(&self, operand: impl Fn(u32) -> (View, u64)) -> Chain {
        let step = |step: &ScoreStep| match *step {
            ScoreStep::Given => ChainStep::Given,
            ScoreStep::Number(number) => ChainStep::Scalar(HostScalar::Fixed(number)),
            ScoreStep::Operand(number) => ChainStep::Load { from: operand(number).0, window: None },
            ScoreStep::Gather { operand: number, x } => {
                let (from, extent) = operand(number);
                ChainStep::Gather { from, extent, x }
            }
            ScoreStep::Place(place) => ChainStep::Index { strides: (0..4).map(|axis| u64::from(axis == place as u64)).collect() },
            ScoreStep::Unary { f, x } => ChainStep::Unary { f, x },
            ScoreStep::Binary { f, x, z } => ChainStep::Binary { f, x, z },
            ScoreStep::Ternary { f, x, z, t } => ChainStep::Ternary { f, x, z, t },
            ScoreStep::Round { dtype, x } => ChainStep::Round { dtype, x },
        };
        Chain { steps: self.steps.iter().map(step).collect() }
    }
}

/// Elements along the last dim of a tensor.
pub(crate) fn entries_of(tensor: &TensorDesc) -> u64 {
    tensor.layout.dims().last().copied().unwrap_or(1)
}

/// What score operands are.
pub(crate) const OPERANDS: &str = "score operands are u8, i32, f16, bf16, f32 or f64";

/// Whether a score operand may be of this type.
pub(crate) fn is_operand(dtype: DType) -> bool {
    super::is_taken(dtype) || matches!(dtype, DType::U8 | DType::I32)
}

/// The coordinate that an index of scores is.
pub(crate) fn place_of(strides: &[u64]) -> Option<ScorePlace> {
    ScorePlace::ALL.into_iter().find(|&place| strides.len() == 4 && (0..4).all(|axis| strides[axis] == u64::from(axis == place as usize)))
}

/// Checks the steps of a score function over scores of these dims, computed in `compute`.
pub(crate) fn check_steps(op: &str, chain: &Chain, compute: DType, dims: [u64; 4]) -> Result<(), Error> {
    let (steps, count) = (&chain.steps, chain.steps.len());
    let told = ScoreFunction::under(chain);
    if !(1..=ScoreFunction::MOST_STEPS).contains(&count) {
        return attribute(op, "the number of steps of the score", count, "a score function has 1 to 64 steps");
    }
    let (mut is_used, mut reads_score) = (vec![false; count], vec![false; count]);
    for (i, step) in steps.iter().enumerate() {
        for x in step.operands() {
            if x as usize >= i {
                return attribute(op, "score", &told.steps[i], "a step of a score function names values of earlier steps");
            }
            is_used[x as usize] = true;
            reads_score[i] |= reads_score[x as usize];
        }
        reads_score[i] |= *step == ChainStep::Given;
        match step {
            ChainStep::Given | ChainStep::Load { window: None, .. } | ChainStep::Ternary { .. } => {}
            ChainStep::Scalar(HostScalar::Fixed(number)) if !number.0.is_nan() => {}
            ChainStep::Scalar(HostScalar::Fixed(number)) => {
                return attribute(op, "score", number.0, "a number of a score function is one");
            }
            ChainStep::Index { strides } => {
                let Some(place) = place_of(strides) else {
                    return attribute(
                        op,
                        "score",
                        &told.steps[i],
                        "an index of a score function is the batch, the head, the query or the key",
                    );
                };
                let extent = dims[place as usize];
                if compute == DType::F32 && extent > ScoreFunction::MOST_PLACES {
                    let rule = "coordinates that a score function reads are numbers of f32, each exact";
                    let (quantity, want) = (format!("the extent of dim {} of the scores", place as usize), ScoreFunction::MOST_PLACES);
                    return Err(Error::Mismatch { op: op.to_owned(), tensor: "score".to_owned(), quantity, got: extent, want, rule });
                }
            }
            ChainStep::Gather { extent, x, .. } => {
                if reads_score[*x as usize] {
                    return attribute(
                        op,
                        "score",
                        &told.steps[i],
                        "the place of what is gathered is of coordinates, numbers and operands, not of the score",
                    );
                }
                if !(1..=ScoreFunction::MOST_ENTRIES).contains(extent) {
                    return attribute(
                        op,
                        "the last dim of a table of the score",
                        extent,
                        "a table has 1 to 8388608 elements along its last dim",
                    );
                }
            }
            ChainStep::Unary { f, .. } => f.check(op)?,
            ChainStep::Binary { f, .. } => f.check(op)?,
            ChainStep::Round { dtype, .. } => {
                if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32) {
                    let rule = "a value of a score function is rounded to f16, bf16 or f32";
                    return Err(Error::DType { op: op.to_owned(), tensor: "score".to_owned(), got: *dtype, rule });
                }
            }
            _ => {
                return attribute(
                    op,
                    "score",
                    step,
                    "a score function reads scores, numbers, operands and coordinates, and stores nothing",
                );
            }
        }
    }
    match is_used.iter().rev().skip(1).rev().position(|is_used| !is_used) {
        Some(unused) => attribute(op, "score", &told.steps[unused], "every step of a score function but the last is named by a later one"),
        None => Ok(()),
    }
}

/// The tensors that a function reads, where there is none.
pub(super) fn check_none(op: &str, graph: &Graph, operands: &[Uid]) -> Result<(), Error> {
    let Some(&uid) = operands.first() else { return Ok(()) };
    let rule = "score operands are read by a score function";
    Err(Error::Structure { op: op.to_owned(), tensor: data(graph, op, uid)?.name.clone(), rule })
}
