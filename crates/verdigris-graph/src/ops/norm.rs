//! Normalization of rows by statistics of their own, and its gradient: layer, root-mean-square, group and instance norm.
//!
//! A row is all elements that share the indices of the dims that are no axes. With `K` its elements and `s = x + residual` (`x` itself where there is
//! no residual):
//!
//! ```text
//! layer     μ = Σ s / K        v = Σ (s − μ)² / K
//! rms       μ = 0              v = Σ s² / K
//! forward   r = 1 / √(v + eps)       h = (s − μ) · r        y = h · γ + bias
//! backward  g = dy · γ               dx = r · (g − Σ g / K − h · Σ g·h / K) + dsum
//!           dscale = Σ dy · h        dbias = Σ dy           over what `scale` and `bias` were repeated over
//! ```
//!
//! `γ` is `scale`, `scale + 1` with `zero_centred`, or 1 where there is no scale; of `rms` the term `Σ g / K` is absent. `scale` and `bias` broadcast
//! to `x` from the right, so that one op is many:
//!
//! | | axes | scale, bias |
//! |---|---|---|
//! | layer norm, root-mean-square norm | the last ones | the dims of the axes |
//! | instance norm | the spatial ones | `[c, 1, …]` |
//! | group norm | channels and the spatial ones, with `groups` | `[c, 1, …]` |
//! | adaptive layer norm | the last one | `[n, 1, c]` |
//!
//! With `groups` above 1 the first of the axes is cut into so many equal parts, which have statistics of their own. (That is the op on a view with a
//! dim more; as an attribute it also writes its result where it belongs, which nothing behind a reshape does.)
//!
//! Data are floating-point. Arithmetic is in f32, in f64 if a tensor that is read is f64, and each result is rounded once: `y` is that of the unrounded
//! sum. Deviations are squared after the mean is known, or by what is as good: `Σ s² / K − μ²` is no answer of a wide row. A row without elements has
//! no result, and NaN for its statistics. A row of equal elements with an eps of 0 has `0 · ∞`.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{Op, Operation, Real, Role};
use crate::ops::pointwise::{BinaryOp, Pointwise};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{attribute, axis, broadcasts_to, data, of_type, same_dims};

const ATTRIBUTES: &[AttributeSpec] = &[
    AttributeSpec::new("spec.kind", "`layer rms`", "", "\"batch\""),
    AttributeSpec::new("spec.axes", "list", "at least one, ascending, axes of `x`", "[2, 1]"),
    AttributeSpec::new("spec.groups", "number", "at least 1, divides the first of the axes", "0").or("1"),
    AttributeSpec::new("spec.eps", "number", "finite, not negative", "-1.0"),
    AttributeSpec::new("spec.zero_centred", "true or false", "", "2").or("false"),
];

const FLOAT: &str = "normalization is of floating-point data";

fn float(op: &str, graph: &Graph, uid: Uid) -> Result<TensorDesc, Error> {
    let tensor = data(graph, op, uid)?;
    of_type(op, tensor, DType::is_float, FLOAT)?;
    Ok(tensor.clone())
}

/// Which statistics a row is normalized by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Mean and deviation.
    Layer,
    /// The root of the mean square.
    Rms,
}

/// What the forward and the backward op have in common.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormSpec {
    /// Which statistics.
    pub kind: NormKind,
    /// The axes that a row's elements lie along, ascending, each once; at least one.
    pub axes: Vec<u32>,
    /// Equal parts of the first of the axes, each with statistics of its own.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub groups: u64,
    /// What is added to the variance or the mean square; finite, not negative.
    pub eps: Real,
    /// Whether the scale is stored less 1.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub zero_centred: bool,
}

const fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's skip_serializing_if passes a reference")]
const fn is_one(groups: &u64) -> bool {
    *groups == 1
}

impl NormSpec {
    /// One group, a scale that is stored as it is.
    pub fn new(kind: NormKind, axes: &[u32], eps: f64) -> NormSpec {
        NormSpec { kind, axes: axes.to_vec(), groups: 1, eps: Real(eps), zero_centred: false }
    }

    /// The dims of statistics: those of `x` with 1 at each axis, the groups at the first.
    ///
    /// # Errors
    /// No axes, axes out of order or listed twice, one that `x` does not have; groups that do not divide the first.
    pub fn statistics_dims(&self, op: &str, x: &TensorDesc) -> Result<Vec<u64>, Error> {
        if self.axes.is_empty() || !self.axes.is_sorted_by(|a, b| a < b) {
            return attribute(op, "axes", &self.axes, "a row lies along at least one axis; they ascend, each named once");
        }
        let mut dims = x.layout.dims().to_vec();
        for &reduced in &self.axes {
            dims[axis(op, x, reduced)?] = 1;
        }
        let first = self.axes[0] as usize;
        let extent = x.layout.dims()[first];
        if self.groups == 0 || !extent.is_multiple_of(self.groups) {
            let value = format!("{} of an axis of {extent}", self.groups);
            return attribute(op, "groups", value, "groups are equal parts of the first of the axes, at least one");
        }
        dims[first] = self.groups;
        Ok(dims)
    }

    /// Elements of a row.
    ///
    /// # Errors
    /// As [`NormSpec::statistics_dims`].
    pub fn row_elements(&self, op: &str, x: &TensorDesc) -> Result<u64, Error> {
        self.statistics_dims(op, x)?;
        let all: u64 = self.axes.iter().map(|&axis| x.layout.dims()[axis as usize]).product();
        Ok(all / self.groups)
    }

    fn check(&self, op: &str, x: &TensorDesc) -> Result<Vec<u64>, Error> {
        if !(self.eps.0.is_finite() && self.eps.0 >= 0.0) {
            return attribute(op, "eps", self.eps.0, "eps is finite and not negative");
        }
        self.statistics_dims(op, x)
    }

    /// Checks the statistics that an op reads or writes.
    fn check_statistics(&self, op: &str, graph: &Graph, dims: &[u64], mean: Option<Uid>, inv: Option<Uid>) -> Result<(), Error> {
        let rule = "statistics have the dims of x with 1 at each axis, and the groups at the first";
        for uid in [mean, inv].into_iter().flatten() {
            same_dims(op, &float(op, graph, uid)?, dims, rule)?;
        }
        match mean {
            Some(mean) if self.kind == NormKind::Rms => Err(Error::Structure {
                op: op.to_owned(),
                tensor: data(graph, op, mean)?.name.clone(),
                rule: "root-mean-square norm has no mean",
            }),
            _ => Ok(()),
        }
    }
}

/// Normalization; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Normalize {
    /// Statistics, axes, eps.
    pub spec: NormSpec,
    /// Read.
    pub x: Uid,
    /// Read; the dims of `x`. Added to it first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual: Option<Uid>,
    /// Read; broadcasts to `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Uid>,
    /// Read; broadcasts to `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Uid>,
    /// Written; the dims of `x`.
    pub y: Uid,
    /// Written where asked for: `x + residual`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sum: Option<Uid>,
    /// Written where asked for: `μ` of each row; not of `rms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<Uid>,
    /// Written where asked for: `r` of each row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inv: Option<Uid>,
}

impl Normalize {
    /// Of `x` alone; what is written is put in by [`GraphBuilder::normalize`].
    pub fn new(spec: NormSpec, x: Uid) -> Normalize {
        Normalize { spec, x, residual: None, scale: None, bias: None, y: Uid(0), sum: None, mean: None, inv: None }
    }
}

impl Operation for Normalize {
    const SPEC: OpSpec = OpSpec {
        name: "normalize",
        summary: "Rows normalized by their own statistics: layer, root-mean-square, group and instance norm.",
        forms: &[Form {
            name: "",
            formula: "s = x + residual          y = (s − μ) · r · γ + bias          r = 1 / √(v + eps)\n\
                      layer   μ = Σ s / K, v = Σ (s − μ)² / K          rms   μ = 0, v = Σ s² / K          γ = scale, or scale + 1",
            operands: &[
                OperandSpec::read("x", "floating-point"),
                OperandSpec::read("residual", "the dims of `x`").optional(),
                OperandSpec::read("scale", "broadcasts to `x`").optional(),
                OperandSpec::read("bias", "broadcasts to `x`").optional(),
                OperandSpec::written("y", "floating-point"),
                OperandSpec::written("sum", "`s`, with a `residual` alone").optional(),
                OperandSpec::written("mean", "`μ` of each row, of `layer` alone").optional(),
                OperandSpec::written("inv", "`r` of each row").optional(),
            ],
            attributes: ATTRIBUTES,
            shape: "those of `x`; statistics have 1 at each axis, and `groups` at the first, whose equal parts have statistics of their own",
            gradient: "`normalize_backward`; of `mean` `1 / K`, of `inv` `−r³ · (s − μ) / K`",
            methods: &[Method::new(
                "normalize",
                "x: Uid, axes: Sequence[int], eps: float, *, kind: Literal[\"layer\", \"rms\"] = \"layer\", groups: int = 1, \
                 residual: Uid | None = None, scale: Uid | None = None, bias: Uid | None = None, zero_centred: bool = False, \
                 name: str = \"normalize\"",
            )
            .giving("tuple[Uid, Uid | None, Uid | None, Uid]")],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        for input in [&mut self.residual, &mut self.scale, &mut self.bias].into_iter().flatten() {
            visit(Role::Input, input);
        }
        visit(Role::Output, &mut self.y);
        for output in [&mut self.sum, &mut self.mean, &mut self.inv].into_iter().flatten() {
            visit(Role::Output, output);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let x = float(op, graph, self.x)?;
        let statistics = self.spec.check(op, &x)?;
        let dims = x.layout.dims();
        if let Some(residual) = self.residual {
            same_dims(op, &float(op, graph, residual)?, dims, "the residual has the dims of x")?;
        }
        for vector in [self.scale, self.bias].into_iter().flatten() {
            broadcasts_to(op, &float(op, graph, vector)?, dims, "scale and bias broadcast to x")?;
        }
        same_dims(op, &float(op, graph, self.y)?, dims, "y has the dims of x")?;
        if let Some(sum) = self.sum {
            let sum = float(op, graph, sum)?;
            same_dims(op, &sum, dims, "the sum has the dims of x")?;
            if self.residual.is_none() {
                let rule = "there is a sum where there is a residual";
                return Err(Error::Structure { op: op.to_owned(), tensor: sum.name, rule });
            }
        }
        self.spec.check_statistics(op, graph, &statistics, self.mean, self.inv)
    }

    /// One backward op for `x`, `scale` and `bias` together, from the sum and the statistics where the forward op stores them; those are differentiated by
    /// their formulas.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let &Normalize { ref spec, x, residual, scale, bias, y, sum, mean, inv } = self;
        let mut through_sum = sum.and_then(|sum| at.of(sum));
        let added: Vec<Uid> = [Some(x), residual].into_iter().flatten().filter(|&uid| at.wants(uid)).collect();
        let compute = at.graph.compute_of(&at.name, &[Some(x), residual, scale, bias].into_iter().flatten().collect::<Vec<_>>())?;
        // What was normalized, made again where it is not kept as the arithmetic had it.
        let normalized = |at: &mut Backward<'_>| match (residual, sum) {
            (None, _) => Ok(x),
            (Some(_), Some(sum)) if at.keeps(sum, compute)? || compute != DType::F64 && at.is_exact(sum, x)? => Ok(sum),
            (Some(residual), _) => at.binary(BinaryOp::Add, x, residual),
        };
        // Statistics that are stored as arithmetic had them are read; others are made again, out of what the backward op holds anyway.
        let kept = |at: &Backward<'_>, statistic: Option<Uid>| match statistic {
            Some(uid) if !at.tensor(uid)?.is_virtual && at.keeps(uid, compute)? => Ok::<_, Error>(Some(uid)),
            _ => Ok(None),
        };
        if let Some(dy) = at.of(y) {
            let normalized = normalized(at)?;
            let (mean, inv) = (kept(at, mean)?, kept(at, inv)?);
            let has_statistics = inv.is_some() && (mean.is_some() || spec.kind == NormKind::Rms);
            let back = NormalizeBackward {
                scale,
                mean: mean.filter(|_| has_statistics),
                inv: inv.filter(|_| has_statistics),
                dsum: through_sum.take().filter(|_| !added.is_empty()),
                ..NormalizeBackward::new(spec.clone(), normalized, dy)
            };
            let bias_dims = bias.filter(|&bias| at.wants(bias)).map(|bias| at.dims(bias)).transpose()?;
            let wanted =
                NormGradients { dx: !added.is_empty(), dscale: scale.is_some_and(|scale| at.wants(scale)), dbias: bias_dims.as_deref() };
            let name = at.name.clone();
            let made = at.graph.normalize_backward(&name, back, wanted)?;
            for &uid in &added {
                if let Some(dx) = made.dx {
                    at.give(uid, dx)?;
                }
            }
            for (uid, gradient) in [(scale, made.dscale), (bias, made.dbias)] {
                if let (Some(uid), Some(gradient)) = (uid, gradient) {
                    at.give(uid, gradient)?;
                }
            }
        }
        if let Some(dsum) = through_sum {
            for &uid in &added {
                at.give(uid, dsum)?;
            }
        }
        let (dmean, dinv) = (mean.and_then(|mean| at.of(mean)), inv.and_then(|inv| at.of(inv)));
        if added.is_empty() || (dmean.is_none() && dinv.is_none()) {
            return Ok(());
        }
        self.statistics_differentiated(at, &added, dmean, dinv, normalized)
    }
}

impl Normalize {
    /// What the gradients of the statistics add to that of what was summed.
    fn statistics_differentiated(
        &self,
        at: &mut Backward<'_>,
        added: &[Uid],
        dmean: Option<Uid>,
        dinv: Option<Uid>,
        normalized: impl Fn(&mut Backward<'_>) -> Result<Uid, Error>,
    ) -> Result<(), Error> {
        let elements = self.spec.row_elements(&at.name, at.tensor(self.x)?)?.max(1) as f64;
        let dims = at.dims(self.x)?;
        if let Some(dmean) = dmean {
            let wide = self.repeated(at, dmean, &dims)?;
            let gradient = at.scale(wide, 1.0 / elements)?;
            for &uid in added {
                at.give(uid, gradient)?;
            }
        }
        if let Some(dinv) = dinv {
            // −r³ · (s − μ) / K, which is −r² · h / K, of what is normalized again as the arithmetic has it.
            let normalized = normalized(at)?;
            let name = at.name.clone();
            let Normalized { y: h, inv, .. } = at.graph.normalize(&name, Normalize::new(self.spec.clone(), normalized))?;
            let inv = self.repeated(at, inv, &dims)?;
            let wide = self.repeated(at, dinv, &dims)?;
            let square = at.mul(inv, inv)?;
            let slope = at.mul(square, h)?;
            let product = at.mul(slope, wide)?;
            let gradient = at.scale(product, -1.0 / elements)?;
            for &uid in added {
                at.give(uid, gradient)?;
            }
        }
        Ok(())
    }

    /// A statistic, repeated over the rows that it is of.
    fn repeated(&self, at: &mut Backward<'_>, statistic: Uid, dims: &[u64]) -> Result<Uid, Error> {
        if self.spec.groups == 1 {
            return Ok(statistic);
        }
        // Groups stand beside what they are groups of for a moment.
        let first = self.spec.axes[0] as usize;
        let mut narrow = at.dims(statistic)?;
        narrow.insert(first + 1, 1);
        let mut wide = narrow.clone();
        wide[first + 1] = dims[first] / self.spec.groups;
        let name = at.name.clone();
        let split = at.graph.reshape(&name, statistic, &narrow)?;
        let repeated = at.graph.broadcast(&name, split, &wide)?;
        let mut merged = at.dims(statistic)?;
        merged[first] = dims[first];
        at.graph.reshape(&name, repeated, &merged)
    }
}

/// The gradient of normalization; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormalizeBackward {
    /// The spec of the forward op.
    pub spec: NormSpec,
    /// What was normalized, read: the forward op's `x`, or its `sum`.
    pub x: Uid,
    /// Read; the dims of `x`.
    pub dy: Uid,
    /// Read; broadcasts to `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<Uid>,
    /// The means that the forward op wrote, read, of `layer` alone; with `inv` or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<Uid>,
    /// The `r` that the forward op wrote, read; without it, statistics are computed again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inv: Option<Uid>,
    /// Read; the dims of `x`: another gradient of what was normalized, which is added to `dx`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dsum: Option<Uid>,
    /// Written where asked for; the dims of `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dx: Option<Uid>,
    /// Written where asked for; the dims of `scale`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dscale: Option<Uid>,
    /// Written where asked for; the dims of the forward op's `bias`, which broadcast to `x`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dbias: Option<Uid>,
}

impl NormalizeBackward {
    /// Of `x` and `dy` alone; what is written is put in by [`GraphBuilder::normalize_backward`].
    pub fn new(spec: NormSpec, x: Uid, dy: Uid) -> NormalizeBackward {
        NormalizeBackward { spec, x, dy, scale: None, mean: None, inv: None, dsum: None, dx: None, dscale: None, dbias: None }
    }
}

impl Operation for NormalizeBackward {
    const SPEC: OpSpec = OpSpec {
        name: "normalize_backward",
        summary: "The gradient of `normalize`, with those of scale and bias.",
        forms: &[Form {
            name: "",
            formula: "h = (x − μ) · r          g = dy · γ          dx = r · (g − Σ g / K − h · Σ g·h / K) + dsum\n\
                      dscale = Σ dy · h          dbias = Σ dy          rms: without Σ g / K",
            operands: &[
                OperandSpec::read("x", "what was normalized, floating-point"),
                OperandSpec::read("dy", "the dims of `x`"),
                OperandSpec::read("scale", "broadcasts to `x`").optional(),
                OperandSpec::read("mean", "what the forward op wrote, of `layer`; with `inv` or computed again").optional(),
                OperandSpec::read("inv", "what the forward op wrote; computed again without it").optional(),
                OperandSpec::read("dsum", "the dims of `x`; another gradient of `x`, added to `dx`").optional(),
                OperandSpec::written("dx", "the dims of `x`").optional(),
                OperandSpec::written("dscale", "the dims of `scale`").optional(),
                OperandSpec::written("dbias", "dims that broadcast to `x`").optional(),
            ],
            attributes: ATTRIBUTES,
            shape: "those of `x`, of `scale`, and of the forward op's `bias`; at least one of the three is written",
            gradient: "refused",
            methods: &[Method::new(
                "normalize_backward",
                "x: Uid, dy: Uid, axes: Sequence[int], eps: float, *, kind: Literal[\"layer\", \"rms\"] = \"layer\", groups: int = 1, \
                 scale: Uid | None = None, mean: Uid | None = None, inv: Uid | None = None, dsum: Uid | None = None, \
                 bias_dims: Sequence[int] | None = None, zero_centred: bool = False, name: str = \"normalize_backward\"",
            )
            .giving("tuple[Uid, Uid | None, Uid | None]")],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Input, &mut self.dy);
        for input in [&mut self.scale, &mut self.mean, &mut self.inv, &mut self.dsum].into_iter().flatten() {
            visit(Role::Input, input);
        }
        for output in [&mut self.dx, &mut self.dscale, &mut self.dbias].into_iter().flatten() {
            visit(Role::Output, output);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let x = float(op, graph, self.x)?;
        let statistics = self.spec.check(op, &x)?;
        let dims = x.layout.dims();
        let structure = |tensor: &TensorDesc, rule| Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
        same_dims(op, &float(op, graph, self.dy)?, dims, "dy has the dims of x")?;
        if let Some(scale) = self.scale {
            broadcasts_to(op, &float(op, graph, scale)?, dims, "scale and bias broadcast to x")?;
        }
        self.spec.check_statistics(op, graph, &statistics, self.mean, self.inv)?;
        match (self.mean, self.inv) {
            (Some(mean), None) => return structure(data(graph, op, mean)?, "the statistics are given all or not at all"),
            (None, Some(inv)) if self.spec.kind == NormKind::Layer => {
                return structure(data(graph, op, inv)?, "the statistics are given all or not at all");
            }
            _ => {}
        }
        if let Some(dsum) = self.dsum {
            let dsum = float(op, graph, dsum)?;
            same_dims(op, &dsum, dims, "dsum has the dims of x")?;
            if self.dx.is_none() {
                return structure(&dsum, "the gradient of the sum is added to dx");
            }
        }
        if let Some(dx) = self.dx {
            same_dims(op, &float(op, graph, dx)?, dims, "dx has the dims of x")?;
        }
        if let Some(dscale) = self.dscale {
            let dscale = float(op, graph, dscale)?;
            let Some(scale) = self.scale else { return structure(&dscale, "there is a gradient of the scale where there is a scale") };
            let wanted = data(graph, op, scale)?.layout.dims().to_vec();
            same_dims(op, &dscale, &wanted, "dscale has the dims of scale")?;
        }
        if let Some(dbias) = self.dbias {
            broadcasts_to(op, &float(op, graph, dbias)?, dims, "scale and bias broadcast to x")?;
        }
        if self.dx.is_none() && self.dscale.is_none() && self.dbias.is_none() {
            return structure(&x, "at least one of dx, dscale and dbias is written");
        }
        Ok(())
    }

    /// Refused: the sums over rows are inside of the op.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let inputs = [Some(self.x), Some(self.dy), self.scale, self.mean, self.inv, self.dsum];
        match inputs.into_iter().flatten().find(|&uid| at.wants(uid)) {
            Some(uid) => at.refuse(uid, "the gradient of normalization has no gradient as an op; compose the norm from reductions"),
            None => Ok(()),
        }
    }
}

/// What [`GraphBuilder::normalize`] makes: virtual tensors, of which those that nothing reads or stores are left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Normalized {
    /// The result.
    pub y: Uid,
    /// `x + residual`, where there is a residual.
    pub sum: Option<Uid>,
    /// The means, of [`NormKind::Layer`].
    pub mean: Option<Uid>,
    /// `1 / √(v + eps)`.
    pub inv: Uid,
}

/// Which gradients [`GraphBuilder::normalize_backward`] makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NormGradients<'d> {
    /// With respect to `x`.
    pub dx: bool,
    /// With respect to `scale`.
    pub dscale: bool,
    /// With respect to a bias of these dims.
    pub dbias: Option<&'d [u64]>,
}

/// What [`GraphBuilder::normalize_backward`] made: virtual tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NormGradientUids {
    /// With respect to `x`.
    pub dx: Option<Uid>,
    /// With respect to `scale`.
    pub dscale: Option<Uid>,
    /// With respect to the bias.
    pub dbias: Option<Uid>,
}

impl GraphBuilder {
    /// Normalization, as virtual tensors of the type that it is computed in. What `norm` writes is replaced.
    ///
    /// # Errors
    /// An unknown uid, axes that `x` does not have, groups that do not divide the first of them.
    pub fn normalize(&mut self, name: &str, norm: Normalize) -> Result<Normalized, Error> {
        let read: Vec<Uid> = [Some(norm.x), norm.residual, norm.scale, norm.bias].into_iter().flatten().collect();
        let dtype = self.normalized_in(name, &read)?;
        let x = self.graph.tensor_of(name, norm.x)?;
        let (dims, statistics) = (x.layout.dims().to_vec(), norm.spec.statistics_dims(name, x)?);
        let y = self.virtual_tensor(name, dtype, &dims)?;
        let sum = norm.residual.map(|_| self.virtual_tensor(&format!("{name}.sum"), dtype, &dims)).transpose()?;
        let has_mean = norm.spec.kind == NormKind::Layer;
        let mean = has_mean.then(|| self.virtual_tensor(&format!("{name}.mean"), dtype, &statistics)).transpose()?;
        let inv = self.virtual_tensor(&format!("{name}.inv"), dtype, &statistics)?;
        self.push(name, Op::Normalize(Normalize { y, sum, mean, inv: Some(inv), ..norm }));
        Ok(Normalized { y, sum, mean, inv })
    }

    /// The gradients of normalization that are wanted, as virtual tensors. What `back` writes is replaced.
    ///
    /// # Errors
    /// An unknown uid, or dims too large. That the dims fit is checked by [`GraphBuilder::finish`].
    pub fn normalize_backward(
        &mut self,
        name: &str,
        back: NormalizeBackward,
        wanted: NormGradients<'_>,
    ) -> Result<NormGradientUids, Error> {
        let read: Vec<Uid> = [Some(back.x), Some(back.dy), back.scale, back.mean, back.inv, back.dsum].into_iter().flatten().collect();
        let dtype = self.normalized_in(name, &read)?;
        let dims_of = |graph: &GraphBuilder, uid: Uid| Ok::<_, Error>(graph.graph.tensor_of(name, uid)?.layout.dims().to_vec());
        let dx = wanted.dx.then(|| dims_of(self, back.x)).transpose()?;
        let dscale = back.scale.filter(|_| wanted.dscale).map(|scale| dims_of(self, scale)).transpose()?;
        let dx = dx.map(|dims| self.virtual_tensor(name, dtype, &dims)).transpose()?;
        let dscale = dscale.map(|dims| self.virtual_tensor(&format!("{name}.scale"), dtype, &dims)).transpose()?;
        let dbias = wanted.dbias.map(|dims| self.virtual_tensor(&format!("{name}.bias"), dtype, dims)).transpose()?;
        self.push(name, Op::NormalizeBackward(NormalizeBackward { dx, dscale, dbias, ..back }));
        Ok(NormGradientUids { dx, dscale, dbias })
    }

    /// Layer norm over `axes`, as a virtual tensor. `scale` and `bias` broadcast to `x`: those of PyTorch's have the dims of the axes.
    ///
    /// # Errors
    /// As [`GraphBuilder::normalize`].
    pub fn layer_norm(&mut self, name: &str, x: Uid, axes: &[u32], eps: f64, scale: Option<Uid>, bias: Option<Uid>) -> Result<Uid, Error> {
        let spec = NormSpec::new(NormKind::Layer, axes, eps);
        Ok(self.normalize(name, Normalize { scale, bias, ..Normalize::new(spec, x) })?.y)
    }

    /// Root-mean-square norm over `axes`, as a virtual tensor.
    ///
    /// # Errors
    /// As [`GraphBuilder::normalize`].
    pub fn rms_norm(&mut self, name: &str, x: Uid, axes: &[u32], eps: f64, scale: Option<Uid>) -> Result<Uid, Error> {
        let spec = NormSpec::new(NormKind::Rms, axes, eps);
        Ok(self.normalize(name, Normalize { scale, ..Normalize::new(spec, x) })?.y)
    }

    /// Group norm of `x [n, c, …]` with vectors `scale [c]` and `bias [c]`, as a virtual tensor.
    ///
    /// # Errors
    /// As [`GraphBuilder::normalize`].
    pub fn group_norm(&mut self, name: &str, x: Uid, groups: u64, eps: f64, scale: Option<Uid>, bias: Option<Uid>) -> Result<Uid, Error> {
        self.norm_of_channels(name, x, 1, groups, eps, [scale, bias])
    }

    /// Instance norm of `x [n, c, …]` with vectors `scale [c]` and `bias [c]`, as a virtual tensor.
    ///
    /// # Errors
    /// As [`GraphBuilder::normalize`].
    pub fn instance_norm(&mut self, name: &str, x: Uid, eps: f64, scale: Option<Uid>, bias: Option<Uid>) -> Result<Uid, Error> {
        self.norm_of_channels(name, x, 2, 1, eps, [scale, bias])
    }

    fn norm_of_channels(&mut self, name: &str, x: Uid, first: u32, groups: u64, eps: f64, vectors: [Option<Uid>; 2]) -> Result<Uid, Error> {
        let rank = self.graph.tensor_of(name, x)?.layout.rank();
        let axes: Vec<u32> = (first..rank as u32).collect();
        let spec = NormSpec { groups, ..NormSpec::new(NormKind::Layer, &axes, eps) };
        let mut seen = [None; 2];
        for (seen, vector) in seen.iter_mut().zip(vectors) {
            let Some(vector) = vector else { continue };
            let mut dims = vec![self.graph.tensor_of(name, vector)?.layout.elements()];
            dims.resize(rank.saturating_sub(1).max(1), 1);
            *seen = Some(self.reshape(name, vector, &dims)?);
        }
        let [scale, bias] = seen;
        Ok(self.normalize(name, Normalize { scale, bias, ..Normalize::new(spec, x) })?.y)
    }

    fn normalized_in(&self, op: &str, read: &[Uid]) -> Result<DType, Error> {
        let dtypes = read.iter().map(|&uid| Ok(self.graph.tensor_of(op, uid)?.dtype)).collect::<Result<Vec<_>, Error>>()?;
        Ok(Pointwise::compute_dtype(dtypes))
    }
}
