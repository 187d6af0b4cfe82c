//! Batch normalization in training, its gradient, and the statistics of channels by themselves.
//!
//! Tensors are `[n, c, spatial…]`; what belongs to a channel has the dims of `x` with 1 in all but the second. Of the `N` elements of a channel
//! (all but the second dim), with `scale` 1 and `bias` and `add` 0 where they are left out:
//!
//! ```text
//! μ = Σ x / N        M2 = Σ (x − μ)²        inv = 1 / √(M2 / N + eps)        x̂ = (x − μ) · inv
//! batch_norm             y = x̂ · scale + bias + add, and max(y, 0) with `relu`, f(y) with an activation f
//!                        next_mean = (1 − momentum) · running_mean + momentum · μ
//!                        next_var  = (1 − momentum) · running_var  + momentum · M2 / (N − 1)
//! batch_norm_backward    g = dy, with `relu` dy where the result was above 0 and 0 elsewhere, with an activation dy · f′(x̂ · scale + bias)
//!                        dbias = Σ g        dscale = Σ g · x̂        dadd = g
//!                        dx = scale · inv · (g − dbias / N − x̂ · dscale / N)
//! ```
//!
//! Whether the result was above 0 is read from `y` where the backward op has it, else worked out again from `x̂ · scale + bias`, which takes no
//! memory and reads nothing further; what was added can only be told from `y`.
//!
//! Any other activation (SiLU, a hard swish, a clamp) stands behind the normalization alone, with nothing added: its gradient is taken at `x̂ · scale + bias`, worked out again, so that
//! what is kept for it is `x` and what belongs to channels. A result does not tell where a SiLU was, and a sum would have to be kept beside `x`.
//!
//! A channel that holds NaN or ∞ has NaN for `inv` and all its results. Data are floating-point; arithmetic is in f32, in f64 if an input is
//! f64, sums are of differences from a value near the mean, and results are rounded once.
//!
//! **Several devices** join their statistics, and each normalizes with the whole's: [`Moments::beside`] has the formula. **Inference** needs
//! no op of its own ([`GraphBuilder::batch_norm_inference`]). A tensor whose elements are normalized each by itself over the batch
//! ("per activation") is one of dims `[n, c · spatial]`.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{Op, Operation, Real, Role};
use crate::ops::pointwise::{BinaryOp, Pointwise, UnaryOp};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{attribute, data, of_type, same_dims};

const CHANNEL: &str = "`[1, c, 1…]`, floating-point";
const ACTIVATION: AttributeSpec = AttributeSpec::new(
    "activation",
    "a name of `UnaryOp`, or `{name: {attribute: number}}`, or null",
    "an activation other than ReLU, without `relu`",
    "\"relu\"",
)
.or("null");

fn float<'g>(op: &str, graph: &'g Graph, uid: Uid) -> Result<&'g TensorDesc, Error> {
    let tensor = data(graph, op, uid)?;
    of_type(op, tensor, DType::is_float, "batch normalization is of floating-point data")?;
    Ok(tensor)
}

/// The dims of what belongs to a channel of a tensor of these dims.
fn of_channels(dims: &[u64]) -> Vec<u64> {
    dims.iter().enumerate().map(|(i, &dim)| if i == 1 { dim } else { 1 }).collect()
}

/// Elements of a channel.
fn count(dims: &[u64]) -> u64 {
    dims.iter().enumerate().filter(|&(i, _)| i != 1).fold(1, |all, (_, &dim)| all.saturating_mul(dim))
}

/// Checks the tensor that is normalized, gives its dims.
fn normalized(op: &str, graph: &Graph, x: Uid) -> Result<Vec<u64>, Error> {
    let x = float(op, graph, x)?;
    let dims = x.layout.dims();
    if dims.len() < 2 {
        return Err(Error::Mismatch {
            op: op.to_owned(),
            tensor: x.name.clone(),
            quantity: "the number of dims".to_owned(),
            got: dims.len() as u64,
            want: 2,
            rule: "x has the dims [n, c, spatial…], at least two",
        });
    }
    if count(dims) == 0 {
        return Err(Error::Structure {
            op: op.to_owned(),
            tensor: x.name.clone(),
            rule: "a channel has at least one element to take a mean of",
        });
    }
    Ok(dims.to_vec())
}

/// Checks tensors of a channel's values, and those of the dims of `x`.
fn check_dims(op: &str, graph: &Graph, dims: &[u64], of_channel: &[Option<Uid>], whole: &[Option<Uid>]) -> Result<(), Error> {
    for &uid in of_channel.iter().flatten() {
        same_dims(
            op,
            float(op, graph, uid)?,
            &of_channels(dims),
            "what belongs to a channel has the dims of x with 1 in all but the second",
        )?;
    }
    for &uid in whole.iter().flatten() {
        same_dims(op, float(op, graph, uid)?, dims, "tensors of elements have the dims of x")?;
    }
    Ok(())
}

/// The rule that an activation behind a normalization breaks, if there is one: `alone` says that nothing was added, and no result is read.
pub(crate) fn broken_by(activation: Option<UnaryOp>, relu: bool, alone: bool) -> Option<&'static str> {
    let f = activation?;
    if !f.is_activation() || f == UnaryOp::Relu {
        Some("behind a normalization stands a function that has a gradient, and ReLU is said by `relu`")
    } else if relu {
        Some("there is ReLU or another activation, not both")
    } else if !alone {
        Some(
            "behind a sum stands no activation but ReLU: the gradient of others would keep the sum, or its result; add before an op of its own",
        )
    } else {
        None
    }
}

/// Checks an activation.
fn check_activation(op: &str, graph: &Graph, x: Uid, activation: Option<UnaryOp>, relu: bool, alone: bool) -> Result<(), Error> {
    if let Some(rule) = broken_by(activation, relu, alone) {
        let tensor = data(graph, op, x)?.name.clone();
        return Err(Error::Structure { op: op.to_owned(), tensor, rule });
    }
    activation.map_or(Ok(()), |f| f.check(op))
}

/// Batch normalization in training; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchNorm {
    /// Added to the variance before its root; finite and not negative.
    pub eps: Real,
    /// The part of the new running statistics that is this batch's.
    #[serde(default = "tenth")]
    pub momentum: Real,
    /// Whether the result is max(y, 0).
    #[serde(default)]
    pub relu: bool,
    /// The activation of the result: any but ReLU, which `relu` says. With nothing added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<UnaryOp>,
    /// Read; `[n, c, spatial…]`.
    pub x: Uid,
    /// Read; 1 where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Uid>,
    /// Read; 0 where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Uid>,
    /// Read: what is added to the normalized tensor, before `relu`; the dims of `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add: Option<Uid>,
    /// Read; where and only where `next_mean` is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_mean: Option<Uid>,
    /// Read; where and only where `next_var` is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_var: Option<Uid>,
    /// Written; the dims of `x`.
    pub y: Uid,
    /// Written where asked for: μ of each channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<Uid>,
    /// Written where asked for: `1 / √(variance + eps)` of each channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inv: Option<Uid>,
    /// Written; may lie in the place of `running_mean`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_mean: Option<Uid>,
    /// Written; may lie in the place of `running_var`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_var: Option<Uid>,
}

fn tenth() -> Real {
    Real(0.1)
}

impl BatchNorm {
    /// Of `x` alone: no scale, bias or running statistics. Results are filled in by [`GraphBuilder::batch_norm`].
    pub fn new(x: Uid, eps: f64) -> BatchNorm {
        BatchNorm {
            eps: Real(eps),
            momentum: tenth(),
            relu: false,
            activation: None,
            x,
            scale: None,
            bias: None,
            add: None,
            running_mean: None,
            running_var: None,
            y: Uid(0),
            mean: None,
            inv: None,
            next_mean: None,
            next_var: None,
        }
    }

    fn inputs(&self) -> impl Iterator<Item = Uid> {
        [Some(self.x), self.scale, self.bias, self.add, self.running_mean, self.running_var].into_iter().flatten()
    }
}

/// What [`GraphBuilder::batch_norm`] gives, as virtual tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchNormed {
    /// The result.
    pub y: Uid,
    /// The mean of each channel.
    pub mean: Uid,
    /// `1 / √(variance + eps)` of each channel.
    pub inv: Uid,
    /// The new running mean, if there is one to update.
    pub next_mean: Option<Uid>,
    /// The new running variance, if there is one to update.
    pub next_var: Option<Uid>,
}

impl Operation for BatchNorm {
    const SPEC: OpSpec = OpSpec {
        name: "batch_norm",
        summary: "Batch normalization in training, with the running statistics, an addend and ReLU or another activation where asked for.",
        forms: &[Form {
            name: "",
            formula: "y = f((x − μ) · inv · scale + bias + add), f = max(·, 0) with `relu`          inv = 1 / √(variance + eps) of each channel\n\
                      next_mean = (1 − momentum) · running_mean + momentum · μ          next_var: the same of the variance over N − 1",
            operands: &[
                OperandSpec::read("x", "`[n, c, spatial…]`, floating-point"),
                OperandSpec::read("scale", CHANNEL).optional(),
                OperandSpec::read("bias", CHANNEL).optional(),
                OperandSpec::read("add", "the dims of `x`; with no activation but ReLU").optional(),
                OperandSpec::read("running_mean", CHANNEL).optional(),
                OperandSpec::read("running_var", CHANNEL).optional(),
                OperandSpec::written("y", "the dims of `x`"),
                OperandSpec::written("mean", "μ of each channel").optional(),
                OperandSpec::written("inv", "`inv` of each channel").optional(),
                OperandSpec::written("next_mean", "with `running_mean`, in whose place it may lie").optional(),
                OperandSpec::written("next_var", "with `running_var`, in whose place it may lie").optional(),
            ],
            attributes: &[
                AttributeSpec::new("eps", "number", "finite, not negative", "-1.0"),
                AttributeSpec::new("momentum", "number", "finite", "\"much\"").or("0.1"),
                AttributeSpec::new("relu", "true or false", "", "2").or("false"),
                ACTIVATION,
            ],
            shape: "those of `x`; `[1, c, 1…]` of what belongs to a channel",
            gradient: "`batch_norm_backward`; of the statistics refused",
            methods: &[Method {
                name: "batch_norm",
                parameters: "x: Uid, scale: Uid | None = None, bias: Uid | None = None, *, add: Uid | None = None, \
                             running_mean: Uid | None = None, running_var: Uid | None = None, momentum: float = 0.1, eps: float = 1e-5, \
                             relu: bool = False, activation: str | None = None, name: str = \"batch_norm\", \
                             **attributes: float",
                returns: "tuple[Uid, Uid, Uid, Uid | None, Uid | None]",
            }],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        for input in [&mut self.scale, &mut self.bias, &mut self.add, &mut self.running_mean, &mut self.running_var].into_iter().flatten() {
            visit(Role::Input, input);
        }
        visit(Role::Output, &mut self.y);
        for output in [&mut self.mean, &mut self.inv, &mut self.next_mean, &mut self.next_var].into_iter().flatten() {
            visit(Role::Output, output);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        if !(self.eps.0.is_finite() && self.eps.0 >= 0.0) {
            return attribute(op, "eps", self.eps.0, "eps is finite and not negative");
        }
        if !self.momentum.0.is_finite() {
            return attribute(op, "momentum", self.momentum.0, "momentum is finite");
        }
        check_activation(op, graph, self.x, self.activation, self.relu, self.add.is_none())?;
        let dims = normalized(op, graph, self.x)?;
        let of_channel = [self.scale, self.bias, self.running_mean, self.running_var, self.mean, self.inv, self.next_mean, self.next_var];
        check_dims(op, graph, &dims, &of_channel, &[self.add, Some(self.y)])?;
        for (running, next) in [(self.running_mean, self.next_mean), (self.running_var, self.next_var)] {
            if let (Some(uid), None) | (None, Some(uid)) = (running, next) {
                let tensor = data(graph, op, uid)?.name.clone();
                return Err(Error::Structure {
                    op: op.to_owned(),
                    tensor,
                    rule: "a running statistic is read and its next value written, or neither",
                });
            }
        }
        if let (Some(uid), 1) = (self.running_var, count(&dims)) {
            let tensor = data(graph, op, uid)?.name.clone();
            let rule = "a running variance is over N − 1: a channel has more than one element";
            return Err(Error::Structure { op: op.to_owned(), tensor, rule });
        }
        Ok(())
    }

    /// The backward op. Statistics that were not written wide enough are formed again.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(wanted) = self.inputs().find(|&uid| at.wants(uid)) else { return Ok(()) };
        if [self.mean, self.inv, self.next_mean, self.next_var].into_iter().flatten().any(|uid| at.of(uid).is_some()) {
            return at.refuse(wanted, "the statistics of batch normalization pass no gradient; those of `batch_norm_statistics` do");
        }
        let Some(dy) = at.of(self.y) else { return Ok(()) };
        let compute = at.graph.compute_of(&at.name, &self.inputs().collect::<Vec<_>>())?;
        let (mean, inv) = match (self.mean, self.inv) {
            (Some(mean), Some(inv)) if at.keeps(mean, compute)? && at.keeps(inv, compute)? => (mean, inv),
            _ => {
                let name = at.named("statistics");
                let (mean, m2) = at.graph.batch_norm_statistics(&name, self.x)?;
                let share = 1.0 / count(&at.dims(self.x)?) as f64;
                let variance = at.unary(UnaryOp::Affine { scale: Real(share), shift: self.eps }, m2)?;
                (mean, at.unary(UnaryOp::Rsqrt, variance)?)
            }
        };
        // What was added is in the result alone.
        let y = self.add.filter(|_| self.relu).map(|_| self.y);
        let bias = self.bias.filter(|_| (self.relu || self.activation.is_some()) && y.is_none());
        let (relu, activation) = (self.relu, self.activation);
        let back = BatchNormBackward { y, bias, relu, activation, scale: self.scale, ..BatchNormBackward::new(dy, self.x, mean, inv) };
        let is_wanted = |uid: Option<Uid>, at: &Backward<'_>| uid.is_some_and(|uid| at.wants(uid));
        let asked = [at.wants(self.x), is_wanted(self.scale, at), is_wanted(self.bias, at), self.relu && is_wanted(self.add, at)];
        if asked.contains(&true) {
            let name = at.name.clone();
            let given = at.graph.batch_norm_backward_of(&name, back, asked)?;
            for (of, gradient) in [Some(self.x), self.scale, self.bias, self.add].into_iter().zip(given) {
                if let (Some(of), Some(gradient)) = (of, gradient) {
                    at.give(of, gradient)?;
                }
            }
        }
        match self.add {
            Some(add) if !self.relu => at.give(add, dy),
            _ => Ok(()),
        }
    }
}

/// The gradient of batch normalization; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchNormBackward {
    /// Whether the forward result is max(y, 0).
    #[serde(default)]
    pub relu: bool,
    /// The activation of the forward result: any but ReLU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<UnaryOp>,
    /// Read; the dims of `x`.
    pub dy: Uid,
    /// The forward input, read.
    pub x: Uid,
    /// The forward result, read: with `relu`, where something was added; elsewhere without need.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub y: Option<Uid>,
    /// Read; 1 where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Uid>,
    /// Read with an activation and without `y`; 0 where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Uid>,
    /// The mean of each channel, read.
    pub mean: Uid,
    /// `1 / √(variance + eps)` of each channel, read.
    pub inv: Uid,
    /// Written where asked for; the dims of `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dx: Option<Uid>,
    /// Written where asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dscale: Option<Uid>,
    /// Written where asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dbias: Option<Uid>,
    /// Written where asked for, with `relu`: without it, what was added has `dy` itself for its gradient. The dims of `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dadd: Option<Uid>,
}

impl BatchNormBackward {
    /// Without activation and scale. Results are filled in by [`GraphBuilder::batch_norm_backward`].
    pub fn new(dy: Uid, x: Uid, mean: Uid, inv: Uid) -> BatchNormBackward {
        BatchNormBackward {
            relu: false,
            activation: None,
            dy,
            x,
            y: None,
            scale: None,
            bias: None,
            mean,
            inv,
            dx: None,
            dscale: None,
            dbias: None,
            dadd: None,
        }
    }

    fn inputs(&self) -> impl Iterator<Item = Uid> {
        [Some(self.dy), Some(self.x), self.y, self.scale, self.bias, Some(self.mean), Some(self.inv)].into_iter().flatten()
    }
}

impl Operation for BatchNormBackward {
    const SPEC: OpSpec = OpSpec {
        name: "batch_norm_backward",
        summary: "The gradient of batch normalization.",
        forms: &[Form {
            name: "",
            formula: "dbias = Σ g          dscale = Σ g · x̂          dx = scale · inv · (g − dbias / N − x̂ · dscale / N)          dadd = g\n\
                      g = dy, with `relu` 0 where the forward result was not above 0, with an activation f dy · f′(x̂ · scale + bias)          \
                      x̂ = (x − mean) · inv",
            operands: &[
                OperandSpec::read("dy", "the dims of `x`"),
                OperandSpec::read("x", "`[n, c, spatial…]`, floating-point"),
                OperandSpec::read("y", "the forward result; with `relu`, and needed where something was added").optional(),
                OperandSpec::read("scale", CHANNEL).optional(),
                OperandSpec::read("bias", "with an activation and without `y`").optional(),
                OperandSpec::read("mean", CHANNEL),
                OperandSpec::read("inv", CHANNEL),
                OperandSpec::written("dx", "the dims of `x`").optional(),
                OperandSpec::written("dscale", CHANNEL).optional(),
                OperandSpec::written("dbias", CHANNEL).optional(),
                OperandSpec::written("dadd", "with `relu`; the dims of `x`").optional(),
            ],
            attributes: &[AttributeSpec::new("relu", "true or false", "", "2").or("false"), ACTIVATION],
            shape: "those of `x`; `[1, c, 1…]` of what belongs to a channel",
            gradient: "refused",
            methods: &[Method {
                name: "batch_norm_backward",
                parameters: "dy: Uid, x: Uid, mean: Uid, inv: Uid, *, scale: Uid | None = None, bias: Uid | None = None, \
                             y: Uid | None = None, relu: bool = False, activation: str | None = None, \
                             name: str = \"batch_norm_backward\", **attributes: float",
                returns: "tuple[Uid, Uid, Uid, Uid | None]",
            }],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.dy);
        visit(Role::Input, &mut self.x);
        for input in [&mut self.y, &mut self.scale, &mut self.bias].into_iter().flatten() {
            visit(Role::Input, input);
        }
        visit(Role::Input, &mut self.mean);
        visit(Role::Input, &mut self.inv);
        for output in [&mut self.dx, &mut self.dscale, &mut self.dbias, &mut self.dadd].into_iter().flatten() {
            visit(Role::Output, output);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        check_activation(op, graph, self.x, self.activation, self.relu, self.y.is_none() && self.dadd.is_none())?;
        let dims = normalized(op, graph, self.x)?;
        let of_channel = [self.scale, self.bias, Some(self.mean), Some(self.inv), self.dscale, self.dbias];
        check_dims(op, graph, &dims, &of_channel, &[Some(self.dy), self.y, self.dx, self.dadd])?;
        let structure = |uid: Uid, rule| {
            let tensor = data(graph, op, uid)?.name.clone();
            Err(Error::Structure { op: op.to_owned(), tensor, rule })
        };
        match (self.relu || self.activation.is_some(), self.y, self.bias, self.dadd) {
            (false, Some(uid), ..) | (false, _, Some(uid), _) => {
                structure(uid, "without an activation, neither the result nor the bias is read")
            }
            (false, .., Some(uid)) => structure(uid, "without an activation, the gradient of what was added is dy itself"),
            (true, Some(_), Some(uid), _) => structure(uid, "where the result is read, the bias is not"),
            _ if [self.dx, self.dscale, self.dbias, self.dadd].iter().all(Option::is_none) => {
                structure(self.x, "at least one gradient is written")
            }
            _ => Ok(()),
        }
    }

    /// Refused: no op expresses it in one pass.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        match self.inputs().find(|&uid| at.wants(uid)) {
            Some(uid) => {
                at.refuse(uid, "the gradient of batch normalization has no gradient as an op; compose it from `batch_norm_statistics`")
            }
            None => Ok(()),
        }
    }
}

/// Mean and squared deviations of channels; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchNormStatistics {
    /// Read; `[n, c, spatial…]`.
    pub x: Uid,
    /// Written: μ of each channel.
    pub mean: Uid,
    /// Written where asked for: `Σ (x − μ)²` of each channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub m2: Option<Uid>,
}

impl Operation for BatchNormStatistics {
    const SPEC: OpSpec = OpSpec {
        name: "batch_norm_statistics",
        summary: "The mean of each channel and the sum of squared deviations from it, which several devices can join.",
        forms: &[Form {
            name: "",
            formula: "mean = Σ x / N          m2 = Σ (x − mean)², over all but the second dim",
            operands: &[
                OperandSpec::read("x", "`[n, c, spatial…]`, floating-point"),
                OperandSpec::written("mean", CHANNEL),
                OperandSpec::written("m2", CHANNEL).optional(),
            ],
            attributes: &[],
            shape: "`[1, c, 1…]`",
            gradient: "`dx = dmean / N + 2 · dm2 · (x − mean)`",
            methods: &[Method::new("batch_norm_statistics", "x: Uid, *, name: str = \"batch_norm_statistics\"").two()],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Output, &mut self.mean);
        if let Some(m2) = &mut self.m2 {
            visit(Role::Output, m2);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let dims = normalized(op, graph, self.x)?;
        check_dims(op, graph, &dims, &[Some(self.mean), self.m2], &[])
    }

    /// `dx = dmean / N + 2 · dm2 · (x − mean)`.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        if !at.wants(self.x) {
            return Ok(());
        }
        let dims = at.dims(self.x)?;
        if let Some(dmean) = at.of(self.mean) {
            let share = at.scale(dmean, 1.0 / count(&dims) as f64)?;
            let name = at.name.clone();
            let dx = at.graph.broadcast(&name, share, &dims)?;
            at.give(self.x, dx)?;
        }
        if let Some(m2) = self.m2
            && let Some(dm2) = at.of(m2)
        {
            let deviation = at.binary(BinaryOp::Sub, self.x, self.mean)?;
            let doubled = at.scale(dm2, 2.0)?;
            let dx = at.mul(deviation, doubled)?;
            at.give(self.x, dx)?;
        }
        Ok(())
    }
}

/// What is known of some elements of a channel: how many, their mean, and the sum of squared deviations from it.
///
/// ```
/// use verdigris_graph::Moments;
///
/// let of = |values: &[f64]| {
///     let mean = values.iter().sum::<f64>() / values.len() as f64;
///     Moments { count: values.len() as f64, mean, m2: values.iter().map(|x| (x - mean).powi(2)).sum() }
/// };
/// let whole = of(&[1.0, 2.0]).beside(of(&[6.0]));
/// assert_eq!((whole.count, whole.mean, whole.m2), (3.0, 3.0, 14.0));
/// ```
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Moments {
    /// `N`.
    pub count: f64,
    /// `μ = Σ x / N`.
    pub mean: f64,
    /// `Σ (x − μ)²`.
    pub m2: f64,
}

impl Moments {
    /// Those of both sets of elements, such as those of two devices: with `δ = μ₂ − μ₁` and `N = N₁ + N₂`
    ///
    /// ```text
    /// μ = μ₁ + δ · N₂ / N          M2 = M2₁ + M2₂ + δ² · N₁ · N₂ / N
    /// ```
    #[must_use]
    pub fn beside(self, other: Moments) -> Moments {
        let count = self.count + other.count;
        if count == 0.0 {
            return self;
        }
        let (apart, share) = (other.mean - self.mean, other.count / count);
        Moments { count, mean: self.mean + apart * share, m2: self.m2 + other.m2 + apart * apart * self.count * share }
    }
}

impl GraphBuilder {
    /// Batch normalization in training, as virtual tensors. The results of `norm` are replaced; with running statistics there are new ones, which
    /// have to be stored.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn batch_norm(&mut self, name: &str, norm: BatchNorm) -> Result<BatchNormed, Error> {
        let compute = self.compute_of(name, &norm.inputs().collect::<Vec<_>>())?;
        let dims = self.graph.tensor_of(name, norm.x)?.layout.dims().to_vec();
        let channels = of_channels(&dims);
        let y = self.virtual_tensor(name, compute, &dims)?;
        let mean = self.virtual_tensor(&format!("{name}.mean"), compute, &channels)?;
        let inv = self.virtual_tensor(&format!("{name}.inv"), compute, &channels)?;
        let mut next =
            |of: Option<Uid>, what: &str| of.map(|_| self.virtual_tensor(&format!("{name}.{what}"), compute, &channels)).transpose();
        let (next_mean, next_var) = (next(norm.running_mean, "next_mean")?, next(norm.running_var, "next_var")?);
        self.push(name, Op::BatchNorm(BatchNorm { y, mean: Some(mean), inv: Some(inv), next_mean, next_var, ..norm }));
        Ok(BatchNormed { y, mean, inv, next_mean, next_var })
    }

    /// The gradients of batch normalization with respect to `x`, the scale, the bias and, with ReLU, what was added, as virtual tensors. The results of
    /// `back` are replaced; those that are neither stored nor read are not computed.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn batch_norm_backward(&mut self, name: &str, back: BatchNormBackward) -> Result<(Uid, Uid, Uid, Option<Uid>), Error> {
        let asked = [true, true, true, back.relu];
        match self.batch_norm_backward_of(name, back, asked)? {
            [Some(dx), Some(dscale), Some(dbias), dadd] => Ok((dx, dscale, dbias, dadd)),
            _ => unreachable!("what is asked for is given"),
        }
    }

    /// As [`GraphBuilder::batch_norm_backward`], those asked for alone.
    pub(crate) fn batch_norm_backward_of(
        &mut self,
        name: &str,
        back: BatchNormBackward,
        asked: [bool; 4],
    ) -> Result<[Option<Uid>; 4], Error> {
        let compute = self.compute_of(name, &back.inputs().collect::<Vec<_>>())?;
        let dims = self.graph.tensor_of(name, back.x)?.layout.dims().to_vec();
        let channels = of_channels(&dims);
        let mut given = [None; 4];
        let results = [("dx", &dims), ("dscale", &channels), ("dbias", &channels), ("dadd", &dims)];
        for ((given, asked), (what, dims)) in given.iter_mut().zip(asked).zip(results) {
            if asked {
                *given = Some(self.virtual_tensor(&format!("{name}.{what}"), compute, dims)?);
            }
        }
        let [dx, dscale, dbias, dadd] = given;
        self.push(name, Op::BatchNormBackward(BatchNormBackward { dx, dscale, dbias, dadd, ..back }));
        Ok(given)
    }

    /// The mean of each channel of `x` and the sum of squared deviations from it: two virtual tensors.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn batch_norm_statistics(&mut self, name: &str, x: Uid) -> Result<(Uid, Uid), Error> {
        let tensor = self.graph.tensor_of(name, x)?;
        let (compute, channels) = (Pointwise::compute_dtype([tensor.dtype]), of_channels(tensor.layout.dims()));
        let mean = self.virtual_tensor(&format!("{name}.mean"), compute, &channels)?;
        let m2 = self.virtual_tensor(&format!("{name}.m2"), compute, &channels)?;
        self.push(name, Op::BatchNormStatistics(BatchNormStatistics { x, mean, m2: Some(m2) }));
        Ok((mean, m2))
    }

    /// Batch normalization with statistics that are given, as in inference: `y = (x − mean) / √(var + eps) · scale + bias`, of pointwise ops, as a
    /// virtual tensor. Behind a convolution it becomes a part of it.
    ///
    /// All but `x` have its dims with 1 in all but the second.
    ///
    /// # Errors
    /// An unknown uid; dims that do not broadcast.
    pub fn batch_norm_inference(
        &mut self,
        name: &str,
        x: Uid,
        [mean, var]: [Uid; 2],
        scale: Option<Uid>,
        bias: Option<Uid>,
        eps: f64,
    ) -> Result<Uid, Error> {
        let named = |what: &str| format!("{name}.{what}");
        let shifted = self.unary(&named("var"), UnaryOp::Affine { scale: Real(1.0), shift: Real(eps) }, var)?;
        let mut factor = self.unary(&named("inv"), UnaryOp::Rsqrt, shifted)?;
        if let Some(scale) = scale {
            factor = self.binary(&named("factor"), BinaryOp::Mul, factor, scale)?;
        }
        let centred = self.binary(&named("centred"), BinaryOp::Sub, x, mean)?;
        let y = self.binary(name, BinaryOp::Mul, centred, factor)?;
        match bias {
            Some(bias) => self.binary(&named("bias"), BinaryOp::Add, y, bias),
            None => Ok(y),
        }
    }

    /// The type that arithmetic on these tensors is done in.
    pub(crate) fn compute_of(&self, op: &str, read: &[Uid]) -> Result<DType, Error> {
        let types = read.iter().map(|&uid| Ok(self.graph.tensor_of(op, uid)?.dtype)).collect::<Result<Vec<_>, Error>>()?;
        Ok(Pointwise::compute_dtype(types))
    }
}
