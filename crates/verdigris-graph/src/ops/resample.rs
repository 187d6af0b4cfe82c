//! Resampling over one, two or three spatial dims, borders made of the tensor itself, and the gradients of both.
//!
//! `x` is `[n, c, spatial…]`, `y` is `[n, c, out…]`. Along each spatial dim output `o` reads a few elements of `x`, its *taps*, each with a weight; over
//! several dims taps and weights are the products of those of each dim:
//!
//! ```text
//! y[n, c, o] = Σ over taps of weight · x[n, c, i]
//!
//! scale      = 1 / factor where a factor is given, else spatial / out; with align_corners (spatial − 1) / (out − 1), 0 of one output
//! nearest        i = min(⌊o · scale⌋, spatial − 1)                     one tap of weight 1
//! nearest_exact  i = min(⌊(o + ½) · scale⌋, spatial − 1)
//! linear     at = max(scale · (o + ½) − ½, 0), with align_corners scale · o;  i = min(⌊at⌋, spatial − 1), t = at − ⌊at⌋
//!            taps i and min(i + 1, spatial − 1) with weights 1 − t and t
//! cubic      at = scale · (o + ½) − ½, with align_corners scale · o;  i = ⌊at⌋, t = at − i
//!            taps i − 1 .. i + 2, each held within x, with weights f(t + 1), g(t), g(1 − t), f(2 − t), where a = −¾ and
//!            g(s) = ((a + 2) · s − (a + 3)) · s · s + 1,  f(s) = ((a · s − 5 · a) · s + 8 · a) · s − 4 · a
//!
//! reflect    j = o − before;  i = −j where j < 0, 2 · (spatial − 1) − j where j ≥ spatial, else j    one tap of weight 1
//! replicate  i = j held within x
//! circular   i = j mod spatial
//! ```
//!
//! **Coordinates** are computed in f32, operation by operation as written, a scale from a factor as 1 / factor in f64 rounded once; those of linear and
//! cubic taps in f64 where `x` (`dy`) is f64. It is how PyTorch's kernels for GPUs compute them, which tells the ties of `nearest`. Taps of one output that
//! meet in one element are one, whose weight is their sum in that type. A tap whose weight is 0 is none: what the element holds, an infinity or a NaN,
//! does not reach the output. (PyTorch multiplies it by 0, so that a NaN comes of it.)
//!
//! **Backward**, `dx` from `dy`: each element adds up what the outputs that read it have, `weight · dy`, in their row-major order; what none reads is 0.
//!
//! Element types: any stored type. Arithmetic is in f32, in f64 if `x` (`dy`) is f64, and the result is rounded once. Where all taps have the
//! weight 1 (nearest and borders, forward), elements are moved: bit for bit where `y` has the type of `x`.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{Op, Operation, Real, Role};
use crate::ops::pointwise::Pointwise;
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{STEP_LIMIT, attribute, data, same_dims};

/// Which elements an output of resampling reads, and with which weights.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Filter {
    /// The element at or before the output's place: PyTorch's `nearest`.
    Nearest,
    /// The element in whose half the centre of the output lies: PyTorch's `nearest-exact`.
    NearestExact,
    /// The two elements around it.
    Linear {
        /// Whether the first and the last elements of `x` and `y` lie at the same places; else the edges of the tensors do.
        align_corners: bool,
    },
    /// The four elements around it, by the cubic convolution with a = −¾.
    Cubic {
        /// As of [`Filter::Linear`].
        align_corners: bool,
    },
}

/// What lies beside a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Border {
    /// The tensor in a mirror that stands in its outermost elements.
    Reflect,
    /// Its outermost elements again and again.
    Replicate,
    /// Its other end.
    Circular,
}

/// Where each output reads.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Sampling {
    /// The tensor in another resolution.
    Interpolate {
        /// Taps and weights.
        filter: Filter,
        /// Size of `y`, one for each spatial dim; at least 1.
        out: Vec<u64>,
        /// How many outputs there are for an element, one for each spatial dim, finite and above 0, from which coordinates then follow; empty where they
        /// follow from the sizes. `align_corners` does not look at them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        factors: Vec<Real>,
    },
    /// The tensor with a border.
    Pad {
        /// What the border holds.
        border: Border,
        /// Elements before the first, one for each spatial dim; below 0, so many of the first are left out, but of a circular border.
        before: Vec<i64>,
        /// Elements after the last; likewise.
        after: Vec<i64>,
    },
}

/// Taps along one spatial dim; [`Taps::of`] lists them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Taps {
    /// Output `o` is element `o`.
    Same,
    /// Those of a filter.
    Filter {
        /// Which.
        filter: Filter,
        /// Elements from one output to the next, as coordinates are computed from it.
        scale: Real,
    },
    /// Those of a border.
    Border {
        /// Which.
        border: Border,
        /// Elements before the first.
        before: i64,
    },
}

/// Up to four taps of a filter and their weights, those that meet joined, and how many they are.
fn filter_taps(filter: Filter, scale: f64, extent: u64, o: u64, double: bool) -> ([(u64, f64); 4], usize) {
    // A sum, difference or product of two values of f32 that is formed in f64 and rounded is the one that f32 arithmetic gives.
    let single = |value: f64| f64::from(value as f32);
    let rounded = |value: f64| if double { value } else { single(value) };
    let (place, last) = (o as f64, extent.saturating_sub(1));
    let held = |i: i64| (i.max(0) as u64).min(last);
    let at = |aligned: bool| {
        let place = rounded(place);
        if aligned { rounded(scale * place) } else { rounded(rounded(scale * rounded(place + 0.5)) - 0.5) }
    };
    let mut taps = [(0, 0.0); 4];
    let count = match filter {
        // Nearest elements are chosen in f32 whatever the type is.
        Filter::Nearest => {
            taps[0] = (held(single(single(place) * scale).floor() as i64), 1.0);
            1
        }
        Filter::NearestExact => {
            taps[0] = (held(single(single(single(place) + 0.5) * scale).floor() as i64), 1.0);
            1
        }
        Filter::Linear { align_corners } => {
            let at = at(align_corners).max(0.0);
            let (first, t) = (at.floor() as i64, rounded(at - at.floor()));
            taps[0] = (held(first), rounded(1.0 - t));
            taps[1] = (held(first + 1), t);
            2
        }
        Filter::Cubic { align_corners } => {
            const A: f64 = -0.75;
            let at = at(align_corners);
            let (first, t) = (at.floor() as i64, rounded(at - at.floor()));
            let near = |s: f64| {
                let inner = rounded(rounded((A + 2.0) * s) - (A + 3.0));
                rounded(rounded(rounded(inner * s) * s) + 1.0)
            };
            let far = |s: f64| {
                let inner = rounded(rounded(rounded(rounded(A * s) - 5.0 * A) * s) + 8.0 * A);
                rounded(rounded(inner * s) - 4.0 * A)
            };
            let rest = rounded(1.0 - t);
            for (k, weight) in [far(rounded(t + 1.0)), near(t), near(rest), far(rounded(rest + 1.0))].into_iter().enumerate() {
                taps[k] = (held(first - 1 + k as i64), weight);
            }
            4
        }
    };
    let mut joined = [(0, 0.0); 4];
    let mut many = 0;
    for &(i, weight) in &taps[..count] {
        match joined[..many].iter_mut().find(|(other, _)| *other == i) {
            Some((_, sum)) => *sum = rounded(*sum + weight),
            None => {
                joined[many] = (i, weight);
                many += 1;
            }
        }
    }
    (joined, many)
}

impl Taps {
    /// The elements that output `o` reads of a dim of `extent` elements, ascending, with their weights, of which none is 0. `double`: coordinates are
    /// computed in f64.
    pub fn of(&self, o: u64, extent: u64, double: bool) -> Vec<(u64, f64)> {
        match *self {
            Taps::Same => vec![(o, 1.0)],
            Taps::Filter { filter, scale } => {
                let (taps, count) = filter_taps(filter, scale.0, extent, o, double);
                taps[..count].iter().copied().filter(|(_, weight)| *weight != 0.0).collect()
            }
            Taps::Border { border, before } => {
                let (at, extent) = (o as i64 - before, extent as i64);
                let i = match border {
                    Border::Reflect if at < 0 => -at,
                    Border::Reflect if at >= extent => 2 * (extent - 1) - at,
                    Border::Reflect => at,
                    Border::Replicate => at.clamp(0, extent - 1),
                    Border::Circular => at.rem_euclid(extent),
                };
                vec![(i as u64, 1.0)]
            }
        }
    }

    /// Whether each output reads one element with the weight 1.
    pub fn moves(&self) -> bool {
        match self {
            Taps::Same | Taps::Border { .. } => true,
            Taps::Filter { filter, .. } => matches!(filter, Filter::Nearest | Filter::NearestExact),
        }
    }

    /// The most taps of an output.
    pub fn most(&self) -> u64 {
        match self {
            Taps::Filter { filter: Filter::Linear { .. }, .. } => 2,
            Taps::Filter { filter: Filter::Cubic { .. }, .. } => 4,
            _ => 1,
        }
    }

    /// The same taps of a dim with these extents in fewer words: [`Taps::Same`] where they are.
    pub fn simplest(self, extent: u64, out: u64) -> Taps {
        match self {
            _ if extent != out => self,
            Taps::Filter { scale, .. } if scale.0 == 1.0 => Taps::Same,
            Taps::Border { before: 0, .. } => Taps::Same,
            taps => taps,
        }
    }
}

impl Sampling {
    /// The number of spatial dims.
    pub fn spatial(&self) -> usize {
        match self {
            Sampling::Interpolate { out, .. } => out.len(),
            Sampling::Pad { before, .. } => before.len(),
        }
    }

    /// Whether elements are moved: each output reads one with the weight 1.
    pub fn moves(&self) -> bool {
        match self {
            Sampling::Interpolate { filter, .. } => matches!(filter, Filter::Nearest | Filter::NearestExact),
            Sampling::Pad { .. } => true,
        }
    }

    /// The taps along spatial dim `i` from `extent` elements to `out` outputs.
    pub fn taps(&self, i: usize, extent: u64, out: u64, double: bool) -> Taps {
        let taps = match self {
            Sampling::Pad { border, before, .. } => Taps::Border { border: *border, before: before[i] },
            Sampling::Interpolate { filter, factors, .. } => {
                let is_nearest = matches!(filter, Filter::Nearest | Filter::NearestExact);
                let aligned = matches!(filter, Filter::Linear { align_corners: true } | Filter::Cubic { align_corners: true });
                let (from, to, inverse) = match factors.get(i) {
                    _ if aligned && out > 1 => (extent - 1, out - 1, None),
                    _ if aligned => (0, 1, None),
                    factor => (extent, out, factor.map(|factor| 1.0 / factor.0)),
                };
                let scale = match inverse {
                    Some(scale) if double && !is_nearest => scale,
                    Some(scale) => f64::from(scale as f32),
                    None if double && !is_nearest => from as f64 / to as f64,
                    None => f64::from(from as f32 / to as f32),
                };
                Taps::Filter { filter: *filter, scale: Real(scale) }
            }
        };
        taps.simplest(extent, out)
    }

    /// The dims of `y` for an `x`; the attributes are checked on the way.
    ///
    /// # Errors
    /// Attributes out of range or not one for each spatial dim; a border that does not fit its tensor; a tensor without elements along a spatial dim.
    pub fn infer(&self, op: &str, x: &TensorDesc) -> Result<Vec<u64>, Error> {
        let mismatch = |quantity: String, got, want, rule| {
            Err(Error::Mismatch { op: op.to_owned(), tensor: x.name.clone(), quantity, got, want, rule })
        };
        let spatial = self.spatial();
        if !(1..=3).contains(&spatial) {
            return attribute(op, "sampling", self, "resampling has 1, 2 or 3 spatial dims, and one entry for each");
        }
        if x.layout.rank() != spatial + 2 {
            let rule = "x has two dims before the spatial ones, which the attributes count";
            return mismatch("the number of dims".to_owned(), x.layout.rank() as u64, spatial as u64 + 2, rule);
        }
        let x_dims = x.layout.dims();
        for (i, &extent) in x_dims.iter().enumerate().skip(2) {
            if extent == 0 {
                return mismatch(format!("dim {i}"), 0, 1, "there is something to read along each spatial dim");
            }
            if extent >= STEP_LIMIT {
                return mismatch(format!("dim {i}"), extent, STEP_LIMIT - 1, "spatial dims are below 2^31");
            }
        }
        let mut dims = x_dims[..2].to_vec();
        match self {
            Sampling::Interpolate { out, factors, .. } => {
                if !factors.is_empty() && factors.len() != spatial {
                    return attribute(op, "factors", factors, "there is one factor for each spatial dim, or none");
                }
                // Beyond these, a scale in f32 would be 0 or infinite.
                if factors.iter().any(|factor| !(1e-30..=1e30).contains(&factor.0)) {
                    return attribute(op, "factors", factors, "factors lie between 1e-30 and 1e30");
                }
                if out.iter().any(|out| *out == 0 || *out >= STEP_LIMIT) {
                    return attribute(op, "out", out, "an output has at least one element along each dim, and less than 2^31");
                }
                dims.extend(out);
            }
            Sampling::Pad { border, before, after } => {
                if after.len() != spatial {
                    return attribute(op, "after", after, "there is one entry for each spatial dim, as many as in before");
                }
                for (i, &extent) in x_dims[2..].iter().enumerate() {
                    let most = match border {
                        Border::Reflect => extent as i64 - 1,
                        Border::Circular => extent as i64,
                        Border::Replicate => STEP_LIMIT as i64 - 1,
                    };
                    for (name, list) in [("before", before), ("after", after)] {
                        if list[i] > most {
                            let rule = match border {
                                Border::Reflect => "a reflected border is smaller than the tensor",
                                Border::Circular => "a circular border is at most as large as the tensor",
                                Border::Replicate => "a border is below 2^31",
                            };
                            return attribute(op, name, list, rule);
                        }
                    }
                    let out = (extent as i64).saturating_add(before[i]).saturating_add(after[i]);
                    if out < 1 || out >= STEP_LIMIT as i64 {
                        return attribute(op, "before", before, "an element is left along each dim, and less than 2^31 are there");
                    }
                    if *border == Border::Circular && before[i].min(after[i]) < 0 {
                        return attribute(op, "before", before, "a circular border is not below 0: leave elements out before it is made");
                    }
                    // What a negative border leaves out on one side is not what the other one begins with.
                    if before[i].min(after[i]) <= -(extent as i64) {
                        return attribute(op, "before", before, "a border below 0 leaves an element of the tensor");
                    }
                    dims.push(out as u64);
                }
            }
        }
        Ok(dims)
    }
}

const ATTRIBUTES: &[AttributeSpec] = &[AttributeSpec::new(
    "sampling",
    "`{interpolate: {filter, out, factors}}` with the filter `nearest`, `nearest_exact`, `{linear: {align_corners}}` or `{cubic: {align_corners}}`, \
     or `{pad: {border, before, after}}` with the border `reflect`, `replicate` or `circular`; lists have one entry for each spatial dim",
    "out at least 1; factors finite and above 0, or none; a reflected border below the extent, a circular one at most the extent",
    r#"{"interpolate":{"filter":"nearest","out":[0,1]}}"#,
)];

/// Resampling, or a border; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resample {
    /// Where each output reads.
    pub sampling: Sampling,
    /// Read, `[n, c, spatial…]`.
    pub x: Uid,
    /// Written, `[n, c, out…]`.
    pub y: Uid,
}

impl Operation for Resample {
    const SPEC: OpSpec = OpSpec {
        name: "resample",
        summary: "The tensor in another resolution, or with a border made of itself, over one to three spatial dims.",
        forms: &[Form {
            name: "",
            formula: "y[n, c, o] = Σ weight · x[n, c, i] over the taps i of o",
            operands: &[
                OperandSpec::read("x", "`[n, c, spatial…]`, any stored type"),
                OperandSpec::written("y", "`[n, c, out…]`, any stored type"),
            ],
            attributes: ATTRIBUTES,
            shape: "`out` as given; of a border `spatial + before + after`",
            gradient: "`resample_backward`",
            methods: &[
                Method::new(
                    "resample",
                    "mode: Literal[\"nearest\", \"nearest-exact\", \"linear\", \"cubic\"], x: Uid, out: Sequence[int], *, \
                     align_corners: bool = False, factors: Sequence[float] | None = None, name: str = \"resample\"",
                ),
                Method::new(
                    "pad_border",
                    "border: Literal[\"reflect\", \"replicate\", \"circular\"], x: Uid, before: Sequence[int], after: Sequence[int], *, \
                     name: str = \"pad\"",
                ),
            ],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Output, &mut self.y);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let (x, y) = (data(graph, op, self.x)?, data(graph, op, self.y)?);
        let dims = self.sampling.infer(op, x)?;
        same_dims(op, y, &dims, "y has the dims [n, c, out…] that x and the sampling give")
    }

    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(dy) = at.of(self.y).filter(|_| at.wants(self.x)) else { return Ok(()) };
        let dims = at.dims(self.x)?;
        let dx = at.graph.resample_backward(&at.name, self.sampling.clone(), dy, &dims)?;
        at.give(self.x, dx)
    }
}

/// The gradient of resampling; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResampleBackward {
    /// That of the forward op.
    pub sampling: Sampling,
    /// Read, `[n, c, out…]`.
    pub dy: Uid,
    /// Written, `[n, c, spatial…]`.
    pub dx: Uid,
}

impl Operation for ResampleBackward {
    const SPEC: OpSpec = OpSpec {
        name: "resample_backward",
        summary: "The gradient of resampling and of borders.",
        forms: &[Form {
            name: "",
            formula: "dx[n, c, i] = Σ weight · dy[n, c, o] over the o that have i among their taps",
            operands: &[
                OperandSpec::read("dy", "`[n, c, out…]`, any stored type"),
                OperandSpec::written("dx", "`[n, c, spatial…]`, any stored type"),
            ],
            attributes: ATTRIBUTES,
            shape: "those of the forward input",
            gradient: "`resample`",
            methods: &[
                Method::new(
                    "resample_backward",
                    "mode: Literal[\"nearest\", \"nearest-exact\", \"linear\", \"cubic\"], dy: Uid, x_dims: Sequence[int], *, \
                     align_corners: bool = False, factors: Sequence[float] | None = None, name: str = \"resample_backward\"",
                ),
                Method::new(
                    "pad_border_backward",
                    "border: Literal[\"reflect\", \"replicate\", \"circular\"], dy: Uid, x_dims: Sequence[int], before: Sequence[int], after: Sequence[int], *, \
                     name: str = \"pad_backward\"",
                ),
            ],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.dy);
        visit(Role::Output, &mut self.dx);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let (dy, dx) = (data(graph, op, self.dy)?, data(graph, op, self.dx)?);
        let dims = self.sampling.infer(op, dx)?;
        same_dims(op, dy, &dims, "dy has the dims [n, c, out…] that dx and the sampling give")
    }

    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(gradient) = at.of(self.dx).filter(|_| at.wants(self.dy)) else { return Ok(()) };
        let ddy = at.graph.resample(&at.name, self.sampling.clone(), gradient)?;
        at.give(self.dy, ddy)
    }
}

impl GraphBuilder {
    /// Resampling of `x`, or `x` with a border, as a virtual tensor: of the type of `x` where elements are moved, else of the type that is computed in.
    ///
    /// ```
    /// use verdigris_graph::{Border, Filter, GraphBuilder, Sampling};
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let mut g = GraphBuilder::new("twice as wide");
    /// let x = g.tensor("x", DType::F32, Layout::row_major(&[2, 3, 8, 10])?);
    /// let linear = Filter::Linear { align_corners: false };
    /// let wide = g.resample("up", Sampling::Interpolate { filter: linear, out: vec![8, 20], factors: vec![] }, x)?;
    /// let y = g.resample("border", Sampling::Pad { border: Border::Reflect, before: vec![1, 1], after: vec![1, 2] }, wide)?;
    /// g.store(y, "y", DType::F32)?;
    /// let graph = g.finish()?;
    /// assert_eq!(graph.tensor(y).unwrap().layout.dims(), [2, 3, 10, 23]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// An unknown uid, or attributes that do not fit.
    pub fn resample(&mut self, name: &str, sampling: Sampling, x: Uid) -> Result<Uid, Error> {
        let x_desc = self.graph.tensor_of(name, x)?;
        let dtype = if sampling.moves() { x_desc.dtype } else { Pointwise::compute_dtype([x_desc.dtype]) };
        let dims = sampling.infer(name, x_desc)?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Resample(Resample { sampling, x, y }));
        Ok(y)
    }

    /// The gradient of resampling, of these dims, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or dims too large. That they fit is checked by [`GraphBuilder::finish`].
    pub fn resample_backward(&mut self, name: &str, sampling: Sampling, dy: Uid, x_dims: &[u64]) -> Result<Uid, Error> {
        let dtype = Pointwise::compute_dtype([self.graph.tensor_of(name, dy)?.dtype]);
        let dx = self.virtual_tensor(name, dtype, x_dims)?;
        self.push(name, Op::ResampleBackward(ResampleBackward { sampling, dy, dx }));
        Ok(dx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_tensor::{DType, Layout};

    const FILTERS: [Filter; 6] = [
        Filter::Nearest,
        Filter::NearestExact,
        Filter::Linear { align_corners: false },
        Filter::Linear { align_corners: true },
        Filter::Cubic { align_corners: false },
        Filter::Cubic { align_corners: true },
    ];

    fn infer(sampling: &Sampling) -> Result<Vec<u64>, String> {
        let x = TensorDesc::new(Uid(0), "x", DType::F32, Layout::row_major(&[2, 4, 9, 8]).unwrap());
        sampling.infer("resample", &x).map_err(|error| error.to_string())
    }

    #[test]
    fn attributes_that_break_a_rule() {
        let interpolate = |out: &[u64], factors: &[f64]| {
            let factors = factors.iter().map(|factor| Real(*factor)).collect();
            infer(&Sampling::Interpolate { filter: Filter::Nearest, out: out.to_vec(), factors })
        };
        let pad = |border, before: &[i64], after: &[i64]| infer(&Sampling::Pad { border, before: before.to_vec(), after: after.to_vec() });
        let huge = 1 << 31;
        for (told, part) in [
            (interpolate(&[], &[]), "1, 2 or 3 spatial dims"),
            (interpolate(&[13], &[]), "tensor `x`: the number of dims is 4, expected 3"),
            (interpolate(&[13, 0], &[]), "at least one element"),
            (interpolate(&[13, huge], &[]), "less than 2^31"),
            (interpolate(&[13, 3], &[1.0]), "one factor for each spatial dim"),
            (interpolate(&[13, 3], &[1.0, 0.0]), "factors lie between"),
            (interpolate(&[13, 3], &[1.0, f64::NAN]), "factors lie between"),
            (interpolate(&[13, 3], &[f64::INFINITY, 1.0]), "factors lie between"),
            (pad(Border::Reflect, &[9, 0], &[0, 0]), "before = [9, 0]; a reflected border is smaller"),
            (pad(Border::Reflect, &[0, 0], &[0, 8]), "after = [0, 8]; a reflected border is smaller"),
            (pad(Border::Circular, &[10, 0], &[0, 0]), "a circular border is at most as large"),
            (pad(Border::Circular, &[9, -1], &[0, 2]), "a circular border is not below 0"),
            (pad(Border::Replicate, &[1 << 31, 0], &[0, 0]), "a border is below 2^31"),
            (pad(Border::Replicate, &[-9, 0], &[0, 0]), "an element is left"),
            (pad(Border::Replicate, &[-9, 0], &[9, 0]), "a border below 0 leaves an element"),
            (pad(Border::Replicate, &[0, 0], &[0]), "as many as in before"),
        ] {
            let told = told.unwrap_err();
            assert!(told.contains(part), "{told}\nlacks {part}");
        }
        assert_eq!(pad(Border::Circular, &[9, 8], &[0, 0]), Ok(vec![2, 4, 18, 16]));
        assert_eq!(pad(Border::Reflect, &[-3, 7], &[8, -2]), Ok(vec![2, 4, 14, 13]));
    }

    #[test]
    fn taps_are_elements_and_weigh_one() {
        for (extent, out) in (1..24u64).flat_map(|extent| (1..40).map(move |out| (extent, out))) {
            for (filter, double) in FILTERS.into_iter().flat_map(|filter| [(filter, false), (filter, true)]) {
                for factors in [vec![], vec![Real(0.1 + (extent * out % 50) as f64 / 7.0)]] {
                    let taps = Sampling::Interpolate { filter, out: vec![out], factors }.taps(0, extent, out, double);
                    for o in 0..out {
                        let list = taps.of(o, extent, double);
                        let sum: f64 = list.iter().map(|(_, weight)| weight).sum();
                        assert!((sum - 1.0).abs() < 1e-5, "{taps:?} {o}: {list:?}");
                        assert!(list.is_sorted_by_key(|(i, _)| *i) && list.iter().all(|(i, weight)| *i < extent && *weight != 0.0));
                        assert!(list.len() as u64 <= taps.most());
                    }
                }
            }
        }
        // The same size is the same tensor, whatever the filter.
        for filter in FILTERS {
            let taps = Sampling::Interpolate { filter, out: vec![9], factors: vec![] }.taps(0, 9, 9, false);
            assert_eq!(taps, Taps::Same, "{filter:?}");
        }
    }
}
