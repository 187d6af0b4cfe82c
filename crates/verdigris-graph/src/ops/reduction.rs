//! Reductions over any set of axes.
//!
//! `y[…, 0, …] = f over all indices of the axes of x[…]`; a reduced axis stays, with extent 1. Inputs and results are of any stored
//! type; arithmetic is in f32, in f64 if `x` is f64, as for pointwise ops, and the result is rounded once. The order of a sum is the
//! engine's. NaN in gives NaN out, for `min` and `max` too.
//!
//! | | formula | of nothing |
//! |---|---|---|
//! | add | `Σ x` | 0 |
//! | mul | `Π x` | 1 |
//! | min, max | the least, the greatest | ∞, −∞ |
//! | amax | the greatest `\|x\|` | 0 |
//! | avg | `Σ x / count` | NaN |
//! | norm1 | `Σ \|x\|` | 0 |
//! | norm2 | `√(Σ x²)` | 0 |
//! | mul_no_zeros | the product of those that are not 0 | 1 |
//!
//! `norm2` is the formula as it stands: squares that leave the range of the arithmetic give ∞ or 0.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::graph::Graph;
use crate::op::Role;
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{attribute, axis, data, same_dims};

/// What is made of the elements; the module's head has the formulas.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReductionOp {
    /// The sum.
    Add,
    /// The product.
    Mul,
    /// The least.
    Min,
    /// The greatest.
    Max,
    /// The greatest magnitude.
    Amax,
    /// The mean.
    Avg,
    /// The sum of magnitudes.
    Norm1,
    /// The square root of the sum of squares.
    Norm2,
    /// The product of those that are not 0.
    MulNoZeros,
}

impl ReductionOp {
    /// Every one.
    pub const ALL: [ReductionOp; 9] = [
        ReductionOp::Add,
        ReductionOp::Mul,
        ReductionOp::Min,
        ReductionOp::Max,
        ReductionOp::Amax,
        ReductionOp::Avg,
        ReductionOp::Norm1,
        ReductionOp::Norm2,
        ReductionOp::MulNoZeros,
    ];

    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            ReductionOp::Add => "add",
            ReductionOp::Mul => "mul",
            ReductionOp::Min => "min",
            ReductionOp::Max => "max",
            ReductionOp::Amax => "amax",
            ReductionOp::Avg => "avg",
            ReductionOp::Norm1 => "norm1",
            ReductionOp::Norm2 => "norm2",
            ReductionOp::MulNoZeros => "mul_no_zeros",
        }
    }
}

/// A reduction; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reduction {
    /// What is made of the elements.
    pub f: ReductionOp,
    /// The axes reduced, ascending, each once; at least one.
    pub axes: Vec<u32>,
    /// Read.
    pub x: Uid,
    /// Written: the dims of `x` with 1 at each axis.
    pub y: Uid,
}

impl Reduction {
    pub(crate) fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Output, &mut self.y);
    }

    /// The dims of `y`.
    ///
    /// # Errors
    /// No axes, axes out of order or listed twice, or one that `x` does not have.
    pub fn infer(op: &str, axes: &[u32], x: &TensorDesc) -> Result<Vec<u64>, Error> {
        if axes.is_empty() || !axes.is_sorted_by(|a, b| a < b) {
            return attribute(op, "axes", axes, "at least one axis is reduced; they ascend, each named once");
        }
        let mut dims = x.layout.dims().to_vec();
        for &reduced in axes {
            dims[axis(op, x, reduced)?] = 1;
        }
        Ok(dims)
    }

    pub(crate) fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let dims = Reduction::infer(op, &self.axes, data(graph, op, self.x)?)?;
        same_dims(op, data(graph, op, self.y)?, &dims, "a reduced axis has extent 1, the others are those of x")
    }
}
