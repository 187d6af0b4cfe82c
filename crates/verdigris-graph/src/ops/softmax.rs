//! Softmax, log-softmax and cross-entropy over one axis, and their gradients.
//!
//! Along the axis, with `M = max x` and `S = Σ e^(x − M)`:
//!
//! ```text
//! softmax       y = e^(x − M) / S               dx = y · (dy − Σ dy · y)
//! log-softmax   y = x − M − ln S                dx = dy − e^y · Σ dy
//! ```
//!
//! A row that holds NaN or ∞, or only −∞, gives NaN. Rows are all that the other dims index. Data are floating-point; arithmetic is in
//! f32, in f64 if an input is f64, and results are rounded once.
//!
//! **Cross-entropy** of a row of logits `x` over `C` classes with an integer label `t`, label smoothing `ε` and `L = M + ln S` (the
//! log-sum-exp):
//!
//! ```text
//! row loss      l = L − (1 − ε) · x[t] − ε / C · Σ x
//! none          loss[row] = l           sum   loss = Σ l           mean   loss = Σ l / rows that are not ignored
//! backward      dx[c] = g · (e^(x[c] − L) − (1 − ε) · [c = t] − ε / C)       g = dloss of the row, of all, or dloss / rows not ignored
//! ```
//!
//! A row whose label equals `ignore_index` has loss 0 and gradient 0, whatever it holds. A label outside of `0 .. C` that is not
//! ignored gives NaN for its row's loss and gradient (and counts as a row). The mean of no rows is NaN. Labels are of any integer type, have the dims of the
//! logits with 1 at the class axis, as do the row losses and the log-sum-exp; the loss of `sum` and `mean` has all dims 1.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{Operation, Real, Role};
use crate::ops::pointwise::{BinaryOp, UnaryOp};
use crate::ops::reduction::ReductionOp;
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{attribute, axis, data, of_type, same_dims};

const SOFTMAX_ATTRIBUTES: &[AttributeSpec] =
    &[AttributeSpec::new("axis", "number", "below the number of dims", "5"), AttributeSpec::new("log", "true or false", "", "2")];

const LOSS_ATTRIBUTES: &[AttributeSpec] = &[
    AttributeSpec::new("spec.axis", "number", "below the number of dims", "5"),
    AttributeSpec::new("spec.label_smoothing", "number", "from 0 to 1", "1.5").or("0.0"),
    AttributeSpec::new("spec.ignore_index", "an integer or null", "", "\"none\"").or("null"),
    AttributeSpec::new("spec.reduction", "`none sum mean`", "", "\"max\""),
];

const FLOAT: &str = "softmax and cross-entropy are of floating-point data";

fn float(op: &str, graph: &Graph, uid: Uid) -> Result<TensorDesc, Error> {
    let tensor = data(graph, op, uid)?;
    of_type(op, tensor, DType::is_float, FLOAT)?;
    Ok(tensor.clone())
}

/// Softmax or log-softmax; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Softmax {
    /// The axis that sums to 1.
    pub axis: u32,
    /// Whether the logarithm is wanted.
    pub log: bool,
    /// Read.
    pub x: Uid,
    /// Written; the dims of `x`.
    pub y: Uid,
}

impl Operation for Softmax {
    const SPEC: OpSpec = OpSpec {
        name: "softmax",
        summary: "Softmax, or its logarithm, along an axis.",
        forms: &[Form {
            name: "",
            formula: "y = e^(x − max x) / Σ e^(x − max x), or its logarithm",
            operands: &[OperandSpec::read("x", "floating-point"), OperandSpec::written("y", "floating-point")],
            attributes: SOFTMAX_ATTRIBUTES,
            shape: "those of `x`",
            gradient: "`softmax_backward`",
            methods: &[Method::new("softmax", "x: Uid, axis: int, log: bool = False, *, name: str = \"softmax\"")],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Output, &mut self.y);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let x = float(op, graph, self.x)?;
        axis(op, &x, self.axis)?;
        same_dims(op, &float(op, graph, self.y)?, x.layout.dims(), "y has the dims of x")
    }

    /// The backward op, from the result.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(dy) = at.of(self.y).filter(|_| at.wants(self.x)) else { return Ok(()) };
        let y = if at.is_exact(self.y, self.x)? { self.y } else { at.graph.softmax(&at.name, self.x, self.axis, self.log)? };
        let dx = at.graph.softmax_backward(&at.name, y, dy, self.axis, self.log)?;
        at.give(self.x, dx)
    }
}

/// The gradient of softmax or log-softmax; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftmaxBackward {
    /// The axis of the forward op.
    pub axis: u32,
    /// Whether `y` is the logarithm.
    pub log: bool,
    /// The forward result, read.
    pub y: Uid,
    /// Read; the dims of `y`.
    pub dy: Uid,
    /// Written; the dims of `y`.
    pub dx: Uid,
}

impl Operation for SoftmaxBackward {
    const SPEC: OpSpec = OpSpec {
        name: "softmax_backward",
        summary: "The gradient of softmax, or of its logarithm, from the result.",
        forms: &[Form {
            name: "",
            formula: "dx = y · (dy − Σ dy · y), or dx = dy − e^y · Σ dy",
            operands: &[
                OperandSpec::read("y", "the forward result, floating-point"),
                OperandSpec::read("dy", "floating-point"),
                OperandSpec::written("dx", "floating-point"),
            ],
            attributes: SOFTMAX_ATTRIBUTES,
            shape: "those of `y`",
            gradient: "with `u` the gradient of `dx`: `ddy = y · (u − Σ u · y)`, `d(y) = u · (dy − Σ dy · y) − dy · Σ u · y`; \
                       of the logarithm `ddy = u − Σ u · e^y`, `d(y) = −u · e^y · Σ dy`",
            methods: &[Method::new(
                "softmax_backward",
                "y: Uid, dy: Uid, axis: int, log: bool = False, *, name: str = \"softmax_backward\"",
            )],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.y);
        visit(Role::Input, &mut self.dy);
        visit(Role::Output, &mut self.dx);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let y = float(op, graph, self.y)?;
        axis(op, &y, self.axis)?;
        same_dims(op, &float(op, graph, self.dy)?, y.layout.dims(), "dy has the dims of y")?;
        same_dims(op, &float(op, graph, self.dx)?, y.layout.dims(), "dx has the dims of y")
    }

    /// With `u` the gradient of `dx`: softmax `ddy = y · (u − Σ u · y)`, `d(y) = u · (dy − Σ dy · y) − dy · Σ u · y`; log-softmax
    /// `ddy = u − Σ u · e^y`, `d(y) = −u · e^y · Σ dy`.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let (y, dy, Some(u)) = (self.y, self.dy, at.of(self.dx)) else { return Ok(()) };
        let sum = |at: &mut Backward<'_>, x: Uid| at.graph.reduction(&at.name, ReductionOp::Add, x, &[self.axis]);
        if self.log {
            let exp = at.unary(UnaryOp::Exp, y)?;
            let weighted = at.mul(u, exp)?;
            if at.wants(dy) {
                let total = sum(at, weighted)?;
                let ddy = at.binary(BinaryOp::Sub, u, total)?;
                at.give(dy, ddy)?;
            }
            if at.wants(y) {
                let total = sum(at, dy)?;
                let product = at.mul(weighted, total)?;
                let given = at.unary(UnaryOp::Neg, product)?;
                at.give(y, given)?;
            }
            return Ok(());
        }
        if at.wants(dy) {
            let ddy = at.graph.softmax_backward(&at.name, y, u, self.axis, false)?;
            at.give(dy, ddy)?;
        }
        if at.wants(y) {
            let (own, other) = (at.mul(dy, y)?, at.mul(u, y)?);
            let (own, other) = (sum(at, own)?, sum(at, other)?);
            let centered = at.binary(BinaryOp::Sub, dy, own)?;
            let (left, right) = (at.mul(u, centered)?, at.mul(dy, other)?);
            let given = at.binary(BinaryOp::Sub, left, right)?;
            at.give(y, given)?;
        }
        Ok(())
    }
}

/// What is made of the row losses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossReduction {
    /// One loss for each row.
    None,
    /// Their sum.
    Sum,
    /// Their sum over the number of rows that are not ignored.
    Mean,
}

/// What the forward and the backward op have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropySpec {
    /// The axis of the classes.
    pub axis: u32,
    /// ε: the part of the target that is spread over all classes; from 0 to 1.
    #[serde(default = "zero", skip_serializing_if = "is_zero")]
    pub label_smoothing: Real,
    /// The label of rows that play no part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignore_index: Option<i64>,
    /// What is made of the row losses.
    pub reduction: LossReduction,
}

fn zero() -> Real {
    Real(0.0)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's skip_serializing_if passes a reference")]
fn is_zero(real: &Real) -> bool {
    *real == Real(0.0)
}

impl CrossEntropySpec {
    /// The plain loss: no smoothing, nothing ignored.
    pub fn new(axis: u32, reduction: LossReduction) -> CrossEntropySpec {
        CrossEntropySpec { axis, label_smoothing: zero(), ignore_index: None, reduction }
    }

    /// The dims of labels, row losses and log-sum-exp.
    ///
    /// # Errors
    /// An axis that the logits do not have.
    pub fn row_dims(&self, op: &str, logits: &TensorDesc) -> Result<Vec<u64>, Error> {
        let mut dims = logits.layout.dims().to_vec();
        dims[axis(op, logits, self.axis)?] = 1;
        Ok(dims)
    }

    /// The dims of the loss.
    ///
    /// # Errors
    /// An axis that the logits do not have.
    pub fn loss_dims(&self, op: &str, logits: &TensorDesc) -> Result<Vec<u64>, Error> {
        let dims = self.row_dims(op, logits)?;
        Ok(if self.reduction == LossReduction::None { dims } else { vec![1; dims.len()] })
    }

    /// Checks attributes, logits, labels, loss (or its gradient) and log-sum-exp.
    fn check(&self, op: &str, graph: &Graph, logits: Uid, labels: Uid, loss: Uid, lse: Option<Uid>) -> Result<(), Error> {
        if !(0.0..=1.0).contains(&self.label_smoothing.0) {
            return attribute(op, "label_smoothing", self.label_smoothing.0, "label smoothing is from 0 to 1");
        }
        let logits = float(op, graph, logits)?;
        let rows = self.row_dims(op, &logits)?;
        let labels = data(graph, op, labels)?;
        of_type(op, labels, DType::is_integer, "labels are integers: i8, u8, i32 or i64")?;
        same_dims(op, labels, &rows, "labels have the dims of the logits, with 1 at the class axis")?;
        let rule = "the loss has the dims of the labels, or all dims 1 if it is reduced";
        same_dims(op, &float(op, graph, loss)?, &self.loss_dims(op, &logits)?, rule)?;
        match lse {
            Some(lse) => same_dims(op, &float(op, graph, lse)?, &rows, "the log-sum-exp has the dims of the labels"),
            None => Ok(()),
        }
    }
}

/// Cross-entropy; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropy {
    /// Axis, smoothing, ignored label, reduction.
    pub spec: CrossEntropySpec,
    /// Read.
    pub logits: Uid,
    /// Read; integers.
    pub labels: Uid,
    /// Written.
    pub loss: Uid,
    /// Written where asked for: the log-sum-exp of each row, of ignored ones too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lse: Option<Uid>,
}

impl Operation for CrossEntropy {
    const SPEC: OpSpec = OpSpec {
        name: "cross_entropy",
        summary: "The cross-entropy of logits and integer labels, with label smoothing ε.",
        forms: &[Form {
            name: "",
            formula: "loss = L − (1 − ε) · x[t] − ε / C · Σ x of each row, summed, or their mean          L = ln Σ e^x",
            operands: &[
                OperandSpec::read("logits", "floating-point"),
                OperandSpec::read("labels", "integers, 1 at the class axis"),
                OperandSpec::written("loss", "the dims of `labels`, or all 1"),
                OperandSpec::written("lse", "`L` of each row").optional(),
            ],
            attributes: LOSS_ATTRIBUTES,
            shape: "those of the logits with 1 at the class axis; all 1 for `sum` and `mean`",
            gradient: "`cross_entropy_backward`; of `lse`, `e^(x − L)`",
            methods: &[Method::new(
                "cross_entropy",
                "logits: Uid, labels: Uid, axis: int, *, label_smoothing: float = 0.0, \
                 ignore_index: int | None = None, reduction: Literal[\"none\", \"sum\", \"mean\"] = \"mean\", \
                 name: str = \"cross_entropy\"",
            )
            .two()],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.logits);
        visit(Role::Input, &mut self.labels);
        visit(Role::Output, &mut self.loss);
        if let Some(lse) = &mut self.lse {
            visit(Role::Output, lse);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        self.spec.check(op, graph, self.logits, self.labels, self.loss, self.lse)
    }

    /// The backward op for the loss; `dx = dlse · e^(x − lse)` for the log-sum-exp. One that was not written wide enough is formed again.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let CrossEntropy { spec, logits, labels, loss, lse } = *self;
        if !at.wants(logits) {
            return Ok(());
        }
        let compute = at.graph.compute_of(&at.name, &[logits])?;
        let kept = match lse {
            Some(lse) if at.keeps(lse, compute)? => Some(lse),
            _ => None,
        };
        if let Some(dloss) = at.of(loss) {
            let back = CrossEntropyBackward { spec, logits, labels, dloss, lse: kept, dlogits: logits };
            let dlogits = at.graph.cross_entropy_backward(&at.name, back)?;
            at.give(logits, dlogits)?;
        }
        if let Some(dlse) = lse.and_then(|lse| at.of(lse)) {
            let share = match kept {
                Some(lse) => {
                    let below = at.binary(BinaryOp::Sub, logits, lse)?;
                    at.unary(UnaryOp::Exp, below)?
                }
                None => at.graph.softmax(&at.name, logits, spec.axis, false)?,
            };
            let dlogits = at.mul(share, dlse)?;
            at.give(logits, dlogits)?;
        }
        Ok(())
    }
}

/// The gradient of cross-entropy; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossEntropyBackward {
    /// The spec of the forward op.
    pub spec: CrossEntropySpec,
    /// Read.
    pub logits: Uid,
    /// Read; integers.
    pub labels: Uid,
    /// Read; the dims of the loss.
    pub dloss: Uid,
    /// The log-sum-exp that the forward op wrote, read; without it, it is computed again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lse: Option<Uid>,
    /// Written; the dims of the logits.
    pub dlogits: Uid,
}

impl Operation for CrossEntropyBackward {
    const SPEC: OpSpec = OpSpec {
        name: "cross_entropy_backward",
        summary: "The gradient of cross-entropy.",
        forms: &[Form {
            name: "",
            formula: "dx[c] = g · (e^(x[c] − L) − (1 − ε) · [c = t] − ε / C)          g = dloss, over the rows that count for `mean`",
            operands: &[
                OperandSpec::read("logits", "floating-point"),
                OperandSpec::read("labels", "integers, 1 at the class axis"),
                OperandSpec::read("dloss", "the dims of the loss"),
                OperandSpec::read("lse", "what the forward op wrote; computed again without it").optional(),
                OperandSpec::written("dlogits", "the dims of the logits"),
            ],
            attributes: LOSS_ATTRIBUTES,
            shape: "those of the logits",
            gradient: "refused",
            methods: &[Method::new(
                "cross_entropy_backward",
                "logits: Uid, labels: Uid, dloss: Uid, axis: int, *, lse: Uid | None = None, label_smoothing: float = 0.0, \
                 ignore_index: int | None = None, reduction: Literal[\"none\", \"sum\", \"mean\"] = \"mean\", \
                 name: str = \"cross_entropy_backward\"",
            )],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.logits);
        visit(Role::Input, &mut self.labels);
        visit(Role::Input, &mut self.dloss);
        if let Some(lse) = &mut self.lse {
            visit(Role::Input, lse);
        }
        visit(Role::Output, &mut self.dlogits);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        self.spec.check(op, graph, self.logits, self.labels, self.dloss, self.lse)?;
        let dims = data(graph, op, self.logits)?.layout.dims().to_vec();
        same_dims(op, &float(op, graph, self.dlogits)?, &dims, "dlogits has the dims of the logits")
    }

    /// Refused: the count of rows that a mean divides by is inside of the op.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let inputs = [Some(self.logits), Some(self.dloss), self.lse];
        match inputs.into_iter().flatten().find(|&uid| at.wants(uid)) {
            Some(uid) => at.refuse(uid, "the gradient of cross-entropy has no gradient as an op; compose the loss from log-softmax"),
            None => Ok(()),
        }
    }
}
