//! Max and average pooling over one, two or three spatial dims, and their gradients.
//!
//! `x` is `[n, c, spatial…]`, `y` is `[n, c, out…]`. Output `o` sees the elements of `x` in its window:
//!
//! ```text
//! sliding    i = o · stride − pad_before + t · dilation,  t in 0 .. window       those with 0 ≤ i < spatial
//!            out = ⌊(spatial + pad_before + pad_after − (dilation · (window − 1) + 1)) / stride⌋ + 1
//! adaptive   i in ⌊o · spatial / out⌋ .. ⌈(o + 1) · spatial / out⌉              out is given
//! fractional i = first + t,  t in 0 .. window                                   out is given
//!            α = (spatial − window) / (out − 1)      first = ⌊(o + u) · α⌋ − ⌊u · α⌋,  of the last window spatial − window
//!
//! max        y = the greatest element of the window; padding plays no part
//! average    y = Σ / count, count = the elements in the window, or with count_include_pad the taps of the window, padding and all
//! ```
//!
//! Windows, strides, dilations and padding are below 2³¹. Padding is smaller than the dilated window, so that no window lies outside as a whole; a dilated one can still meet no element. Its
//! maximum is −∞ (the least value of an integer type) with index −1 and it passes no gradient; its average is 0.
//!
//! **Fractional windows** (Graham, "Fractional Max-Pooling") are those of maxima alone, whose index is written. Each plane (one `n`, one `c`) has a sample `u` for each spatial dim, from 0 to 1; others are taken as the nearer of the
//! two, and NaN as 0. α, the sum and the products are each rounded to the type that is computed in, which is how PyTorch lays windows on a GPU; windows fit,
//! `out + window − 1 ≤ spatial`, and spatial dims are at most 2²⁰, so that rounding moves no window by more than one element.
//!
//! **The index** of a maximum is its flat position in the spatial dims of `x`, row-major (`h · W + w`), within its own `n` and `c`. The
//! first maximum in the window's row-major order wins; the first NaN wins over all (in PyTorch the last one does, which is seen in the index, and in the element that a gradient goes to).
//!
//! **Backward**, `dx` from `dy`: max gives each `dy` to the element that won (told by the index tensor, or found again in `x`), average
//! gives `dy / count` to each element of the window; what several windows give is added, what none gives is 0. The gradient of fractional windows reads the index, and no samples: each
//! index is an element that a window of some sample has.
//!
//! Element types: any stored type. Arithmetic is in f32, in f64 if `x` (`dy`) is f64, and the result is rounded once. A maximum is exact
//! before that rounding. Indices are i32 or i64.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{Operation, Role};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{STEP_LIMIT, attribute, data, of_type, same_dims};

/// What is made of a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PoolMode {
    /// The greatest element.
    Max,
    /// The mean.
    Average {
        /// Whether padding counts, as zeros. Adaptive windows have no padding.
        count_include_pad: bool,
    },
}

/// Where the windows lie.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PoolWindows {
    /// Windows of one size at equal distances. Each list has one entry for each spatial dim.
    Sliding {
        /// Taps of a window; at least 1.
        window: Vec<u64>,
        /// Elements from one window to the next; at least 1.
        strides: Vec<u64>,
        /// Elements from one tap to the next; at least 1.
        dilations: Vec<u64>,
        /// Elements of padding before the first.
        pads_before: Vec<u64>,
        /// Elements of padding after the last.
        pads_after: Vec<u64>,
    },
    /// As many windows as asked for, evenly over `x`.
    Adaptive {
        /// Size of `y`, one for each spatial dim.
        out: Vec<u64>,
    },
    /// As many windows of one size as asked for, which begin where samples say. Each list has one entry for each spatial dim.
    Fractional {
        /// Elements of a window; at least 1.
        window: Vec<u64>,
        /// Size of `y`.
        out: Vec<u64>,
    },
}

impl PoolWindows {
    /// Sliding windows without dilation or padding, side by side: the stride is the window.
    pub fn tiles(window: &[u64]) -> PoolWindows {
        PoolWindows::Sliding {
            window: window.to_vec(),
            strides: window.to_vec(),
            dilations: vec![1; window.len()],
            pads_before: vec![0; window.len()],
            pads_after: vec![0; window.len()],
        }
    }

    /// The number of spatial dims.
    pub fn spatial(&self) -> usize {
        match self {
            PoolWindows::Sliding { window, .. } => window.len(),
            PoolWindows::Adaptive { out } => out.len(),
            PoolWindows::Fractional { window, .. } => window.len(),
        }
    }

    /// Whether samples say where windows begin.
    pub fn are_fractional(&self) -> bool {
        matches!(self, PoolWindows::Fractional { .. })
    }

    /// The taps of window `o` along spatial dim `i` of `extent` elements: positions in `x`, those in padding included, ascending. Of fractional windows, whose first
    /// elements samples tell, those that the window has if all samples are 0.
    pub fn taps(&self, i: usize, o: u64, extent: u64) -> Vec<i64> {
        match self {
            PoolWindows::Sliding { window, strides, dilations, pads_before, .. } => {
                let first = (o * strides[i]) as i64 - pads_before[i] as i64;
                (0..window[i]).map(|tap| first + (tap * dilations[i]) as i64).collect()
            }
            PoolWindows::Adaptive { out } => {
                let begin = o * extent / out[i];
                let end = ((o + 1) * extent).div_ceil(out[i]);
                (begin as i64..end as i64).collect()
            }
            PoolWindows::Fractional { window, out } => {
                let span = extent.saturating_sub(window[i]);
                let first = if o + 1 >= out[i] { span } else { o * span / (out[i] - 1) };
                (first as i64..(first + window[i]) as i64).collect()
            }
        }
    }

    /// The dims of `y` for an `x`; the attributes are checked on the way.
    ///
    /// # Errors
    /// Attributes out of range or not one for each spatial dim; a window that does not fit.
    pub fn infer(&self, op: &str, x: &TensorDesc) -> Result<Vec<u64>, Error> {
        let mismatch = |quantity: String, got, want, rule| {
            Err(Error::Mismatch { op: op.to_owned(), tensor: x.name.clone(), quantity, got, want, rule })
        };
        let spatial = self.spatial();
        if !(1..=3).contains(&spatial) {
            return attribute(op, "windows", self, "pooling has 1, 2 or 3 spatial dims, and one entry for each");
        }
        if x.layout.rank() != spatial + 2 {
            let rule = "x has two dims before the spatial ones, which the windows count";
            return mismatch("the number of dims".to_owned(), x.layout.rank() as u64, spatial as u64 + 2, rule);
        }
        let x_dims = x.layout.dims();
        let mut dims = x_dims[..2].to_vec();
        match self {
            PoolWindows::Adaptive { out } => {
                for (i, &out) in out.iter().enumerate() {
                    let extent = x_dims[i + 2];
                    if out == 0 {
                        return attribute(op, "out", 0, "an adaptive output has at least one element");
                    }
                    if extent == 0 {
                        return mismatch(format!("dim {}", i + 2), 0, 1, "adaptive windows need at least one element");
                    }
                    if out.checked_mul(extent).is_none_or(|product| product > 1 << 62) {
                        return attribute(op, "out", out, "out times the size of x is at most 2^62");
                    }
                    dims.push(out);
                }
            }
            PoolWindows::Fractional { window, out } => {
                if out.len() != spatial {
                    return attribute(op, "out", out, "there is one entry for each spatial dim, as many as in window");
                }
                for (i, (&taps, &out)) in window.iter().zip(out).enumerate() {
                    if taps == 0 || out == 0 {
                        return attribute(op, "windows", self, "fractional windows have at least one element, and there is at least one");
                    }
                    let extent = x_dims[i + 2];
                    let least = out.saturating_add(taps - 1);
                    if extent < least {
                        let rule = "fractional windows fit: the size is at least out + window - 1, which is what is expected";
                        return mismatch(format!("dim {}", i + 2), extent, least, rule);
                    }
                    if extent > FRACTIONAL_LIMIT {
                        let rule = "fractional windows are of at most 2^20 elements a dim: beyond, rounding would move them";
                        return mismatch(format!("dim {}", i + 2), extent, FRACTIONAL_LIMIT, rule);
                    }
                    dims.push(out);
                }
            }
            PoolWindows::Sliding { window, strides, dilations, pads_before, pads_after } => {
                let lists = [("strides", strides), ("dilations", dilations), ("pads_before", pads_before), ("pads_after", pads_after)];
                for (name, list) in lists {
                    if list.len() != spatial {
                        return attribute(op, name, list, "there is one entry for each spatial dim, as many as in window");
                    }
                }
                for (name, list) in [("window", window), ("strides", strides), ("dilations", dilations)] {
                    if list.contains(&0) {
                        return attribute(op, name, list, "windows, strides and dilations are at least 1");
                    }
                }
                for (name, list) in lists.into_iter().chain([("window", window)]) {
                    if list.iter().any(|&value| value >= STEP_LIMIT) {
                        return attribute(op, name, list, "windows, strides, dilations and padding are below 2^31");
                    }
                }
                for i in 0..spatial {
                    let extent = x_dims[i + 2];
                    let reach = (window[i] - 1) * dilations[i] + 1;
                    for (name, pad) in [("pads_before", pads_before[i]), ("pads_after", pads_after[i])] {
                        if pad >= reach {
                            return attribute(op, name, pad, "padding is smaller than the dilated window");
                        }
                    }
                    let padded = extent.saturating_add(pads_before[i]).saturating_add(pads_after[i]);
                    if padded < reach {
                        let want = reach - pads_before[i].saturating_add(pads_after[i]).min(reach);
                        let rule = "the dilated window fits into the padded input; the size expected is the least";
                        return mismatch(format!("dim {}", i + 2), extent, want, rule);
                    }
                    dims.push((padded - reach) / strides[i] + 1);
                }
            }
        }
        Ok(dims)
    }
}

/// The most elements along a dim of fractional windows.
const FRACTIONAL_LIMIT: u64 = 1 << 20;

const POOL_ATTRIBUTES: &[AttributeSpec] = &[
    AttributeSpec::new("mode", "`max` or `{average: {count_include_pad}}`", "", "\"least\""),
    AttributeSpec::new(
        "windows",
        "`{sliding: {window, strides, dilations, pads_before, pads_after}}`, `{adaptive: {out}}` or `{fractional: {window, out}}`, one for each spatial dim",
        "at least 1, below 2³¹; padding below the dilated window, which fits",
        r#"{"sliding":{"window":[0,1],"strides":[1,1],"dilations":[1,1],"pads_before":[0,0],"pads_after":[0,0]}}"#,
    ),
];

/// Pooling; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// What is made of a window.
    pub mode: PoolMode,
    /// Where the windows lie.
    pub windows: PoolWindows,
    /// Read, `[n, c, spatial…]`.
    pub x: Uid,
    /// Read by fractional windows, absent otherwise: `[n, c, spatial dims]`, of a floating-point type, the sample of each plane along each spatial dim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<Uid>,
    /// Written, `[n, c, out…]`.
    pub y: Uid,
    /// Written where asked for: the index of each maximum, i32 or i64, with the dims of `y`. For [`PoolMode::Max`] only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<Uid>,
}

impl Operation for Pool {
    const SPEC: OpSpec = OpSpec {
        name: "pool",
        summary: "The greatest element or the mean of each window, over one to three spatial dims. Of integers it is computed in f32, or in f64 beside an operand of it: exact up to 2^24.",
        forms: &[Form {
            name: "",
            formula: "y[n, c, o] = the greatest of, or the mean of, x[n, c, i] over the i of window o",
            operands: &[
                OperandSpec::read("x", "`[n, c, spatial…]`, any stored type"),
                OperandSpec::read("samples", "`[n, c, spatial dims]`, floating-point, from 0 to 1; of fractional windows alone").optional(),
                OperandSpec::written("y", "`[n, c, out…]`, any stored type"),
                OperandSpec::written("index", "i32 or i64: where each maximum is, the first of equals and of several NaNs; of `max` alone")
                    .optional(),
            ],
            attributes: POOL_ATTRIBUTES,
            shape: "`out = ⌊(spatial + pads − (dilation · (window − 1) + 1)) / stride⌋ + 1`, or as given if adaptive",
            gradient: "`pool_backward`",
            methods: &[
                Method::new(
                    "pool",
                    "mode: Literal[\"max\", \"average\"], x: Uid, window: Sequence[int] | None = None, *, \
                     stride: Sequence[int] | None = None, padding: Sequence[int] | None = None, \
                     padding_after: Sequence[int] | None = None, dilation: Sequence[int] | None = None, \
                     adaptive: Sequence[int] | None = None, count_include_pad: bool = True, name: str = \"pool\"",
                ),
                Method::new(
                    "max_pool_with_index",
                    "x: Uid, window: Sequence[int] | None = None, *, \
                     stride: Sequence[int] | None = None, padding: Sequence[int] | None = None, \
                     padding_after: Sequence[int] | None = None, dilation: Sequence[int] | None = None, \
                     adaptive: Sequence[int] | None = None, index_dtype: str = \"i32\", name: str = \"max_pool\"",
                )
                .two(),
                Method::new(
                    "fractional_max_pool",
                    "x: Uid, samples: Uid, window: Sequence[int], out: Sequence[int], *, index_dtype: str = \"i32\", \
                     name: str = \"fractional_max_pool\"",
                )
                .two(),
            ],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        if let Some(samples) = &mut self.samples {
            visit(Role::Input, samples);
        }
        visit(Role::Output, &mut self.y);
        if let Some(index) = &mut self.index {
            visit(Role::Output, index);
        }
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let x = data(graph, op, self.x)?;
        let dims = self.windows.infer(op, x)?;
        same_dims(op, data(graph, op, self.y)?, &dims, "y has the dims [n, c, out…] that x and the windows give")?;
        let structure = |tensor: &TensorDesc, rule| Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
        match (self.windows.are_fractional(), self.samples) {
            (false, None) => {}
            (false, Some(samples)) => return structure(data(graph, op, samples)?, "only fractional windows begin where samples say"),
            (true, None) => return structure(x, "fractional windows begin where samples say, and there are none"),
            (true, Some(_)) if self.mode != PoolMode::Max || self.index.is_none() => {
                return structure(x, "fractional windows are those of max pooling that writes the index");
            }
            (true, Some(samples)) => {
                let samples = data(graph, op, samples)?;
                of_type(op, samples, DType::is_float, "samples are floating-point")?;
                let wanted = [dims[0], dims[1], self.windows.spatial() as u64];
                same_dims(op, samples, &wanted, "each plane has a sample for each spatial dim: [n, c, spatial dims]")?;
            }
        }
        match self.index {
            Some(index) => check_index(op, self.mode, data(graph, op, index)?, x, &dims),
            None => Ok(()),
        }
    }

    /// The backward op; it reads the index where the forward op writes one, else `x`.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(dy) = at.of(self.y).filter(|_| at.wants(self.x)) else { return Ok(()) };
        let x = (self.mode == PoolMode::Max && self.index.is_none()).then_some(self.x);
        let back = PoolBackward { mode: self.mode, windows: self.windows.clone(), dy, x, index: self.index, dx: self.x };
        let dims = at.dims(self.x)?;
        let dx = at.graph.pool_backward(&at.name, back, &dims)?;
        at.give(self.x, dx)
    }
}

fn check_index(op: &str, mode: PoolMode, index: &TensorDesc, x: &TensorDesc, dims: &[u64]) -> Result<(), Error> {
    if mode != PoolMode::Max {
        return Err(Error::Structure {
            op: op.to_owned(),
            tensor: index.name.clone(),
            rule: "max pooling has an index, average pooling has none",
        });
    }
    of_type(op, index, |dtype| matches!(dtype, DType::I32 | DType::I64), "an index is i32 or i64")?;
    same_dims(op, index, dims, "there is an index for each element of y")?;
    let positions: u64 = x.layout.dims()[2..].iter().fold(1, |all, &dim| all.saturating_mul(dim));
    if index.dtype == DType::I32 && positions > i32::MAX as u64 {
        return Err(Error::Mismatch {
            op: op.to_owned(),
            tensor: index.name.clone(),
            quantity: "the number of spatial positions of x".to_owned(),
            got: positions,
            want: i32::MAX as u64,
            rule: "an i32 index names at most 2^31 - 1 positions; use i64",
        });
    }
    Ok(())
}

/// The gradient of pooling; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolBackward {
    /// The mode of the forward op.
    pub mode: PoolMode,
    /// The windows of the forward op.
    pub windows: PoolWindows,
    /// Read, `[n, c, out…]`.
    pub dy: Uid,
    /// The forward input: read by max pooling that has no index, absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x: Option<Uid>,
    /// The index that the forward op wrote: read by max pooling that has no `x`, absent otherwise. An index outside of `x` passes no
    /// gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<Uid>,
    /// Written, `[n, c, spatial…]`.
    pub dx: Uid,
}

impl Operation for PoolBackward {
    const SPEC: OpSpec = OpSpec {
        name: "pool_backward",
        summary: "The gradient of pooling. Of integers it is computed in f32, or in f64 beside an operand of it: exact up to 2^24.",
        forms: &[Form {
            name: "",
            formula: "dx[n, c, i] = Σ of dy[n, c, o] over the o whose maximum i is, or of dy[n, c, o] / count over the o that see i",
            operands: &[
                OperandSpec::read("dy", "`[n, c, out…]`"),
                OperandSpec::read("x", "the forward input; of `max` without `index`").optional(),
                OperandSpec::read("index", "what the forward op wrote; of `max` without `x`").optional(),
                OperandSpec::written("dx", "`[n, c, spatial…]`"),
            ],
            attributes: POOL_ATTRIBUTES,
            shape: "those of the forward input",
            gradient: "of `average`: `pool`; of `max` refused, since no op gathers",
            methods: &[Method::new(
                "pool_backward",
                "mode: Literal[\"max\", \"average\"], dy: Uid, x_dims: Sequence[int], window: Sequence[int] | None = None, *, \
                 x: Uid | None = None, index: Uid | None = None, stride: Sequence[int] | None = None, \
                 padding: Sequence[int] | None = None, padding_after: Sequence[int] | None = None, \
                 dilation: Sequence[int] | None = None, adaptive: Sequence[int] | None = None, fractional: Sequence[int] | None = None, \
                 count_include_pad: bool = True, name: str = \"pool_backward\"",
            )],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.dy);
        for input in [&mut self.x, &mut self.index].into_iter().flatten() {
            visit(Role::Input, input);
        }
        visit(Role::Output, &mut self.dx);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let dx = data(graph, op, self.dx)?;
        let dims = self.windows.infer(op, dx)?;
        let dy = data(graph, op, self.dy)?;
        same_dims(op, dy, &dims, "dy has the dims [n, c, out…] that dx and the windows give")?;
        let structure = |tensor: &TensorDesc, rule| Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
        match (self.mode, self.x, self.index) {
            _ if self.windows.are_fractional() && (self.mode != PoolMode::Max || self.index.is_none() || self.x.is_some()) => {
                structure(dx, "the gradient of fractional windows is that of a maximum, and reads the index")
            }
            (PoolMode::Average { .. }, None, None) => Ok(()),
            (PoolMode::Average { .. }, Some(uid), _) | (PoolMode::Average { .. }, None, Some(uid)) => {
                structure(data(graph, op, uid)?, "the gradient of average pooling reads dy only")
            }
            (PoolMode::Max, Some(x), None) => same_dims(op, data(graph, op, x)?, dx.layout.dims(), "dx has the dims of x"),
            (PoolMode::Max, None, Some(index)) => check_index(op, self.mode, data(graph, op, index)?, dx, &dims),
            (PoolMode::Max, ..) => structure(dx, "the gradient of max pooling reads either x or the index"),
        }
    }

    /// Average pooling is its own gradient's gradient. That of a maximum would gather elements, which no op does.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(gradient) = at.of(self.dx).filter(|_| at.wants(self.dy)) else { return Ok(()) };
        if self.mode == PoolMode::Max {
            return at.refuse(self.dy, "the gradient of max pooling has no gradient: it would gather elements, which no op does");
        }
        let ddy = at.graph.pool(&at.name, self.mode, self.windows.clone(), gradient)?;
        at.give(self.dy, ddy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::GraphBuilder;
    use verdigris_tensor::Layout;

    #[test]
    fn an_index_that_is_too_narrow() -> Result<(), Error> {
        let mut g = GraphBuilder::new("g");
        let x = g.tensor("x", DType::I8, Layout::row_major(&[1, 1, 1 << 16, 1 << 15]).unwrap());
        let (y, index) = g.max_pool_with_index("max", PoolWindows::tiles(&[2, 2]), x, DType::I32)?;
        g.store(y, "y", DType::I8)?;
        g.store(index, "index", DType::I32)?;
        let text = g.finish().unwrap_err().to_string();
        assert!(text.contains("is 2147483648, expected 2147483647"), "{text}");
        Ok(())
    }
}
