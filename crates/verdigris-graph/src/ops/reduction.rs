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
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{Operation, Role};
use crate::ops::pointwise::gradient::masked;
use crate::ops::pointwise::{BinaryOp, UnaryOp};
use crate::ops::scan::ScanOp;
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
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
}

impl Operation for Reduction {
    const SPEC: OpSpec = OpSpec {
        name: "reduction",
        summary: "A sum, product, extremum, mean or norm over axes. Of integers it is computed in f32, or in f64 beside an operand of it: exact up to 2^24.",
        forms: &[Form {
            name: "",
            formula: "y[…, 0, …] = f over all indices of the axes of x[…]",
            operands: &[OperandSpec::read("x", "any stored type"), OperandSpec::written("y", "any stored type")],
            attributes: &[
                AttributeSpec::new("f", "`add mul min max amax avg norm1 norm2 mul_no_zeros`", "", "\"median\""),
                AttributeSpec::new("axes", "list", "at least one, ascending, axes of `x`", "[2, 0]"),
            ],
            shape: "those of `x` with 1 at each axis",
            gradient: "`dy · ∂y/∂x`; extrema share among equals, a product gives the product of the others (of those before times of those behind), a norm of 0 gives 0",
            methods: &[Method::new("reduction", "f: str, x: Uid, axes: Sequence[int], *, name: str = \"reduce\"")],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Output, &mut self.y);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let dims = Reduction::infer(op, &self.axes, data(graph, op, self.x)?)?;
        same_dims(op, data(graph, op, self.y)?, &dims, "a reduced axis has extent 1, the others are those of x")
    }

    /// `∂y / ∂x` of each function; of a product it is the product of the others, also where some are 0.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let (x, Some(dy)) = (self.x, at.of(self.y)) else { return Ok(()) };
        if !at.wants(x) {
            return Ok(());
        }
        // The result as the arithmetic had it, where what is stored is rounded further.
        let result = |at: &mut Backward<'_>, f: ReductionOp| {
            if f == self.f && at.is_exact(self.y, x)? {
                return Ok(self.y);
            }
            at.graph.reduction(&at.name, f, x, &self.axes)
        };
        let dx = match self.f {
            ReductionOp::Add => dy,
            ReductionOp::Avg => {
                let dims = at.dims(x)?;
                let count: u64 = self.axes.iter().map(|&axis| dims[axis as usize]).product();
                // A mean of nothing has no element to pass a gradient to.
                at.scale(dy, 1.0 / count.max(1) as f64)?
            }
            ReductionOp::Min | ReductionOp::Max | ReductionOp::Amax => {
                let y = result(at, self.f)?;
                let compared = if self.f == ReductionOp::Amax { at.unary(UnaryOp::Abs, x)? } else { x };
                let is_it = at.binary(BinaryOp::Eq, compared, y)?;
                let ties = at.graph.reduction(&at.name, ReductionOp::Add, is_it, &self.axes)?;
                let share = at.binary(BinaryOp::Div, dy, ties)?;
                let share = if self.f == ReductionOp::Amax {
                    let sign = at.unary(UnaryOp::Sign, x)?;
                    at.mul(share, sign)?
                } else {
                    share
                };
                masked(at, share, is_it)?
            }
            ReductionOp::Norm1 => {
                let sign = at.unary(UnaryOp::Sign, x)?;
                at.mul(sign, dy)?
            }
            ReductionOp::Norm2 => {
                // x / y, and 0 where the norm is 0.
                let y = result(at, ReductionOp::Norm2)?;
                let share = at.binary(BinaryOp::Div, dy, y)?;
                let product = at.mul(x, share)?;
                masked(at, product, y)?
            }
            ReductionOp::Mul => {
                let others = self.others(at, x)?;
                at.mul(others, dy)?
            }
            ReductionOp::MulNoZeros => {
                // A zero counts as a 1 that stays one.
                let is_zero = at.unary(UnaryOp::Not, x)?;
                let counted = at.binary(BinaryOp::Add, x, is_zero)?;
                let others = self.others(at, counted)?;
                let counts = at.unary(UnaryOp::Not, is_zero)?;
                let product = at.mul(others, dy)?;
                masked(at, product, counts)?
            }
        };
        at.give(x, dx)
    }
}

impl Reduction {
    /// Of each element the product of the others: of those before it times of those behind it, one axis after the other, so that nothing is divided. It
    /// leaves the range of the arithmetic no sooner than these products do.
    fn others(&self, at: &mut Backward<'_>, x: Uid) -> Result<Uid, Error> {
        let (mut factors, mut others) = (x, None);
        for &axis in &self.axes {
            let before = at.graph.scan(&at.name, ScanOp::Mul, factors, axis, true, false)?;
            let behind = at.graph.scan(&at.name, ScanOp::Mul, factors, axis, true, true)?;
            let along = at.mul(before, behind)?;
            others = Some(match others {
                Some(others) => at.mul(others, along)?,
                None => along,
            });
            if Some(&axis) != self.axes.last() {
                factors = at.graph.reduction(&at.name, ReductionOp::Mul, factors, &[axis])?;
            }
        }
        Ok(others.unwrap_or(x))
    }
}
