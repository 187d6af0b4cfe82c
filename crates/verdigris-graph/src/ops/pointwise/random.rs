//! Random numbers by Philox4x32-10, and what is composed of them.
//!
//! **Counter scheme.** The state is a tensor of four i32 in memory: the low and high 32 bits of `seed`, then those of `offset`, both read as
//! unsigned. Element number `n` of a result, counted row-major over its dims whatever its strides, is word `n mod 4` of
//!
//! ```text
//! Philox4x32-10(counter = [low(b), high(b), 0, 0], key = [low(seed), high(seed)]),   b = offset + n / 4 mod 2⁶⁴
//! ```
//!
//! as Salmon, Moraes, Dror and Shaw define it ("Parallel random numbers: as easy as 1, 2, 3", 2011). So a value depends on seed, offset and
//! `n` alone: not on tiles, vectors, engines or the device. A result of `N` elements uses `⌈N / 4⌉` blocks; whoever draws again with the
//! same seed adds so many to the offset. In memory the state can be changed between two launches of a captured CUDA graph.
//!
//! **By value** the state is two host scalars of i64, seed and offset, whose bits are those of the unsigned numbers ([`RandomState::by_value`]): the same
//! numbers as from memory. A captured CUDA graph keeps the values that it was captured with.
//!
//! **Uniform.** The upper 24 bits of the word, divided by 2²⁴: each of 2²⁴ numbers in [0, 1) equally often, exact in f32. A narrower type of
//! the result rounds it, possibly to 1.
//!
//! **Normal** (mean 0, variance 1), by Box and Muller: elements `2j` and `2j + 1` have the words that they would have as uniform numbers, `a` and `b`,
//! between them, and with
//!
//! ```text
//! u = a · 2⁻³² + 2⁻³³  (in f32: a and the sum are rounded to nearest)     v = ⌊b / 2⁸⌋ / 2²⁴     r = √(−2 ln u)
//! y[2j] = r · cos 2πv                                                     y[2j + 1] = r · sin 2πv
//! ```
//!
//! `u` is from 2⁻³³ to 1 and never 0, so that `|y|` is at most 6.77. The words are exact everywhere; logarithm, root, sine and cosine are rounded, so that
//! results of devices differ by a few units of f32 (2⁻²⁰ of `r` at the most).

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::{BinaryOp, Pointwise, UnaryOp};
use crate::error::Error;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{HostScalar, Op, Real};
use crate::tensor::Uid;
use crate::validate::{attribute, data, of_type, same_dims};

/// How random numbers are distributed; the module's head has the formulas.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Drawn {
    /// In [0, 1), each of 2²⁴ numbers equally likely.
    #[default]
    Uniform,
    /// Mean 0, variance 1.
    Normal,
}

impl Drawn {
    /// Every one.
    pub const ALL: [Drawn; 2] = [Drawn::Uniform, Drawn::Normal];

    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            Drawn::Uniform => "uniform",
            Drawn::Normal => "normal",
        }
    }
}

/// Where the state of random numbers comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RandomState {
    /// Four i32 in memory; with an `offset`, a host scalar of i64: the seed.
    pub state: Uid,
    /// A host scalar of i64, where the state is given by value.
    pub offset: Option<Uid>,
}

impl RandomState {
    /// Seed and offset from the host at each execution: two host scalars of i64.
    pub const fn by_value(seed: Uid, offset: Uid) -> RandomState {
        RandomState { state: seed, offset: Some(offset) }
    }
}

/// In memory.
impl From<Uid> for RandomState {
    fn from(state: Uid) -> Self {
        RandomState { state, offset: None }
    }
}

/// What must hold of a random state.
pub(in crate::ops) fn check(op: &str, graph: &Graph, RandomState { state, offset }: RandomState) -> Result<(), Error> {
    if let Some(offset) = offset {
        for uid in [state, offset] {
            let tensor = graph.tensor_of(op, uid)?;
            if !tensor.by_value {
                let rule = "a random state with an offset is given by value: two host scalars";
                return Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
            }
            of_type(op, tensor, |dtype| dtype == DType::I64, "seed and offset by value are of i64")?;
        }
        return Ok(());
    }
    let tensor = data(graph, op, state)?;
    of_type(op, tensor, |dtype| dtype == DType::I32, "a random state is of i32")?;
    same_dims(op, tensor, &[4], "a random state is four numbers: seed low, seed high, offset low, offset high")?;
    if graph.nodes.iter().any(|node| node.op.outputs().contains(&state)) {
        let rule = "a random state is bound by whoever executes, not written by an op";
        return Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
    }
    Ok(())
}

/// The probability as f32 has it, with which random numbers are compared.
pub(in crate::ops) fn probability(op: &str, name: &'static str, p: f64) -> Result<f32, Error> {
    // Between 0 and 1 nothing but digits is lost.
    if (0.0..=1.0).contains(&p) { Ok(p as f32) } else { attribute(op, name, p, "a probability is from 0 to 1") }
}

impl GraphBuilder {
    fn drawn(&mut self, name: &str, dims: &[u64], distribution: Drawn, state: RandomState) -> Result<Uid, Error> {
        let y = self.virtual_tensor(name, DType::F32, dims)?;
        let RandomState { state, offset } = state;
        self.push(name, Op::Pointwise(Pointwise::Random { distribution, state, offset, y }));
        Ok(y)
    }

    /// Random numbers in [0, 1), each of 2²⁴ equally likely, as a virtual f32 tensor: [`Pointwise::Random`]. `state` is four i32 in memory, or a
    /// [`RandomState`] by value.
    ///
    /// # Errors
    /// Dims too large. The state is checked by [`GraphBuilder::finish`].
    pub fn random_uniform(&mut self, name: &str, dims: &[u64], state: impl Into<RandomState>) -> Result<Uid, Error> {
        self.drawn(name, dims, Drawn::Uniform, state.into())
    }

    /// Random numbers of mean 0 and variance 1, normally distributed, as a virtual f32 tensor; from the words of which
    /// [`GraphBuilder::random_uniform`] makes its numbers. `state` is four i32 in memory, or a
    /// [`RandomState`] by value.
    ///
    /// # Errors
    /// Dims too large. The state is checked by [`GraphBuilder::finish`].
    pub fn random_normal(&mut self, name: &str, dims: &[u64], state: impl Into<RandomState>) -> Result<Uid, Error> {
        self.drawn(name, dims, Drawn::Normal, state.into())
    }

    /// `max(p − u, 0)` for random `u` in [0, 1): above 0 with probability `p`. The sign of the difference is exact.
    fn below(&mut self, name: &str, dims: &[u64], state: impl Into<RandomState>, p: f64) -> Result<Uid, Error> {
        let p = probability(name, "p", p)?;
        let u = self.random_uniform(name, dims, state)?;
        let below = self.unary(name, UnaryOp::Affine { scale: Real(-1.0), shift: Real(p.into()) }, u)?;
        self.unary(name, UnaryOp::Relu, below)
    }

    /// 1 with probability `p`, else 0, as a virtual f32 tensor: 1 where [`GraphBuilder::random_uniform`] of the same state is below `p`
    /// (rounded to f32). Three further pointwise ops.
    ///
    /// # Errors
    /// `p` outside of [0, 1], dims too large.
    pub fn bernoulli(&mut self, name: &str, dims: &[u64], state: impl Into<RandomState>, p: f64) -> Result<Uid, Error> {
        let below = self.below(name, dims, state, p)?;
        self.unary(name, UnaryOp::Sign, below)
    }

    /// Dropout: `y[i] = x[i] · keep[i] / (1 − p)` with `keep[i]` 0 where [`GraphBuilder::random_uniform`] of the same state is below `p`
    /// (rounded to f32), else 1; as a virtual tensor. `p = 1` drops everything. A NaN or ∞ that is dropped gives NaN, as in PyTorch.
    ///
    /// The gradient is the same op on dy: with the same state it draws the same mask, which need not be stored.
    ///
    /// # Errors
    /// `p` outside of [0, 1], an unknown uid.
    pub fn dropout(&mut self, name: &str, x: Uid, state: impl Into<RandomState>, p: f64) -> Result<Uid, Error> {
        let dims = self.result_of(name, &[x])?.1;
        let below = self.below(name, &dims, state, p)?;
        let keep = self.unary(name, UnaryOp::Not, below)?;
        let kept = self.binary(name, BinaryOp::Mul, x, keep)?;
        let factor = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        self.scale(name, kept, HostScalar::Fixed(Real(factor)))
    }
}
