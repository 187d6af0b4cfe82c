//! Convolution over one, two or three spatial dims, and its two gradients.
//!
//! Three tensors take part: `x` `[n, c, spatial…]`, `w` `[k, c / groups, filter…]` and `y` `[n, k, out…]`. The direction says which of
//! them is written; the other two are read. Per spatial dim, with stride `s`, dilation `d`, `p` elements of padding before and `q` after,
//!
//! ```text
//! out = ⌊(spatial + p + q − (d · (filter − 1) + 1)) / s⌋ + 1          the dilated filter must fit into the padded input
//! i   = o · s − p + f · d                                            the input element that output o meets with filter tap f
//!
//! fprop  y[n, k, o] = Σ over c, f of x[n, g(k)·C + c, i(o, f)] · w[k, c, f̂]
//! dgrad  x[n, g·C + c, i] = Σ over k of group g and all (o, f) with i(o, f) = i of y[n, k, o] · w[k, c, f̂]
//! wgrad  w[k, c, f̂] = Σ over n, o of x[n, g(k)·C + c, i(o, f)] · y[n, k, o]
//! ```
//!
//! where `C = c / groups`, `g(k) = ⌊k / (k_total / groups)⌋`, elements of `x` outside of the tensor are 0 (and not read), and `f̂` is `f`
//! for cross-correlation and `filter − 1 − f` for convolution. Padding may exceed the filter. Strides, dilations and padding are below 2³¹. Several sizes of `x` can give one `y`; in
//! dgrad `x` may be any of them, and elements that no output meets become 0. **Transposed convolution is dgrad**: its input is `y` here,
//! its output is `x`.
//!
//! Sums are formed as [`Precision`] says, with the two tensors read as its operands; an empty sum is 0. What is written is rounded once,
//! to the type of its tensor.
//!
//! **Infinities and NaN.** An element gets from what it depends on what IEEE arithmetic says. Beyond that, an infinity or a NaN in an operand may make
//! NaN of elements near it that do not depend on it: of other groups, at the padding, in dgrad at other residues of the stride and of the dilation, and in wgrad at taps
//! that would meet it only in outputs behind the ends of `y`. Engines that gather such elements into one product multiply by zeros what another
//! would leave out.

use serde::{Deserialize, Serialize};

use super::matmul::Precision;
use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{Operation, Role};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{STEP_LIMIT, attribute, data};

/// Which of the three tensors is computed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConvDirection {
    /// `y` from `x` and `w`.
    Fprop,
    /// `x` from `y` and `w`: the gradient with respect to the input, and transposed convolution.
    Dgrad,
    /// `w` from `x` and `y`: the gradient with respect to the filter.
    Wgrad,
}

impl ConvDirection {
    /// Every direction.
    pub const ALL: [ConvDirection; 3] = [ConvDirection::Fprop, ConvDirection::Dgrad, ConvDirection::Wgrad];

    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            ConvDirection::Fprop => "fprop",
            ConvDirection::Dgrad => "dgrad",
            ConvDirection::Wgrad => "wgrad",
        }
    }
}

/// Whether the filter is flipped.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConvMode {
    /// Not flipped: what deep learning calls convolution.
    #[default]
    CrossCorrelation,
    /// Flipped along every spatial dim: what mathematics calls convolution.
    Convolution,
}

/// Convolution or one of its gradients; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conv {
    /// Which tensor is written.
    pub direction: ConvDirection,
    /// The input, `[n, c, spatial…]`.
    pub x: Uid,
    /// The filter, `[k, c / groups, filter…]`.
    pub w: Uid,
    /// The output, `[n, k, out…]`.
    pub y: Uid,
    /// Elements of padding before the first, one for each spatial dim.
    pub pads_before: Vec<u64>,
    /// Elements of padding after the last.
    pub pads_after: Vec<u64>,
    /// Elements of `x` from one output to the next; at least 1.
    pub strides: Vec<u64>,
    /// Elements of `x` from one filter tap to the next; at least 1.
    pub dilations: Vec<u64>,
    /// Channels of `x` and of `y` are cut into this many equal groups, each convolved by itself.
    pub groups: u64,
    /// Whether the filter is flipped.
    #[serde(default)]
    pub mode: ConvMode,
    /// How products are formed and summed.
    pub precision: Precision,
}

impl Conv {
    /// A cross-correlation of stride 1, dilation 1, no padding and one group, over `spatial` dims.
    pub fn new(direction: ConvDirection, x: Uid, w: Uid, y: Uid, spatial: usize, precision: Precision) -> Conv {
        Conv {
            direction,
            x,
            w,
            y,
            pads_before: vec![0; spatial],
            pads_after: vec![0; spatial],
            strides: vec![1; spatial],
            dilations: vec![1; spatial],
            groups: 1,
            mode: ConvMode::CrossCorrelation,
            precision,
        }
    }

    /// The number of spatial dims.
    pub fn spatial(&self) -> usize {
        self.strides.len()
    }

    /// The two tensors read, left and right operand of the products.
    pub fn operands(&self) -> [Uid; 2] {
        match self.direction {
            ConvDirection::Fprop => [self.x, self.w],
            ConvDirection::Dgrad => [self.y, self.w],
            ConvDirection::Wgrad => [self.x, self.y],
        }
    }

    /// The tensor written.
    pub fn output(&self) -> Uid {
        match self.direction {
            ConvDirection::Fprop => self.y,
            ConvDirection::Dgrad => self.x,
            ConvDirection::Wgrad => self.w,
        }
    }

    /// The attributes that have an entry for each spatial dim, by name.
    fn steps(&self) -> [(&'static str, &Vec<u64>); 4] {
        let Conv { strides, dilations, pads_before, pads_after, .. } = self;
        [("strides", strides), ("dilations", dilations), ("pads_before", pads_before), ("pads_after", pads_after)]
    }

    /// The size of `y` along spatial dim `i` for an input of `extent` and a filter of `filter` taps; `None` where the dilated filter does
    /// not fit into the padded input, the stride is 0 or a number leaves 64 bits.
    pub fn out_extent(&self, i: usize, extent: u64, filter: u64) -> Option<u64> {
        let padded = extent.checked_add(self.pads_before[i])?.checked_add(self.pads_after[i])?;
        let reach = filter.checked_sub(1)?.checked_mul(self.dilations[i])?.checked_add(1)?;
        padded.checked_sub(reach)?.checked_div(self.strides[i])?.checked_add(1)
    }

    /// The least size of `x` along spatial dim `i` that gives `out` outputs: `(out − 1) · s + d · (filter − 1) + 1 − p − q`. Every size
    /// from there to `s − 1` more gives the same. `None` where it would be below 0, `out` or `filter` is 0 or a number leaves 64 bits.
    pub fn least_extent(&self, i: usize, out: u64, filter: u64) -> Option<u64> {
        self.signed_least_extent(i, out, filter).and_then(|least| u64::try_from(least).ok())
    }

    /// As [`Conv::least_extent`], and below 0 where padding alone holds more than the outputs read.
    pub fn signed_least_extent(&self, i: usize, out: u64, filter: u64) -> Option<i128> {
        let reach = filter.checked_sub(1)?.checked_mul(self.dilations[i])?.checked_add(1)?;
        let padded = out.checked_sub(1)?.checked_mul(self.strides[i])?.checked_add(reach)?;
        Some(i128::from(padded) - i128::from(self.pads_before[i]) - i128::from(self.pads_after[i]))
    }

    /// The dims of `y`, from the dims of `x` and `w`; the attributes are checked on the way.
    ///
    /// # Errors
    /// Attributes out of range or not one for each spatial dim, channels that do not divide or agree, a filter that does not fit.
    pub fn infer(&self, op: &str, x: &TensorDesc, w: &TensorDesc) -> Result<Vec<u64>, Error> {
        let mismatch = |tensor: &TensorDesc, quantity: String, got, want, rule| {
            Err(Error::Mismatch { op: op.to_owned(), tensor: tensor.name.clone(), quantity, got, want, rule })
        };
        let spatial = self.spatial();
        if !(1..=3).contains(&spatial) {
            return attribute(op, "strides", &self.strides, "a convolution has 1, 2 or 3 spatial dims, and one stride for each");
        }
        for (name, list) in self.steps() {
            if list.len() != spatial {
                return attribute(op, name, list, "there is one entry for each spatial dim, as many as strides");
            }
        }
        if self.strides.contains(&0) {
            return attribute(op, "strides", &self.strides, "a stride is at least 1");
        }
        if self.dilations.contains(&0) {
            return attribute(op, "dilations", &self.dilations, "a dilation is at least 1");
        }
        for (name, list) in self.steps() {
            if list.iter().any(|&value| value >= STEP_LIMIT) {
                return attribute(op, name, list, "strides, dilations and padding are below 2^31");
            }
        }
        if self.groups == 0 {
            return attribute(op, "groups", self.groups, "there is at least one group");
        }
        for tensor in [x, w] {
            if tensor.layout.rank() != spatial + 2 {
                let rule = "x, w and y have two dims before the spatial ones, which the strides count";
                return mismatch(tensor, "the number of dims".to_owned(), tensor.layout.rank() as u64, spatial as u64 + 2, rule);
            }
        }
        let (x_dims, w_dims) = (x.layout.dims(), w.layout.dims());
        let (channels, filters) = (x_dims[1], w_dims[0]);
        if !channels.is_multiple_of(self.groups) {
            let rule = "the channels of x are cut into equal groups";
            return mismatch(x, format!("dim 1 (c) modulo {} groups", self.groups), channels % self.groups, 0, rule);
        }
        if !filters.is_multiple_of(self.groups) {
            let rule = "the filters are cut into equal groups";
            return mismatch(w, format!("dim 0 (k) modulo {} groups", self.groups), filters % self.groups, 0, rule);
        }
        if w_dims[1] != channels / self.groups {
            let rule = "a filter spans the channels of one group of x";
            return mismatch(w, "dim 1 (c / groups)".to_owned(), w_dims[1], channels / self.groups, rule);
        }
        let mut dims = vec![x_dims[0], filters];
        for i in 0..spatial {
            let (extent, filter) = (x_dims[i + 2], w_dims[i + 2]);
            if filter == 0 {
                return mismatch(w, format!("dim {}", i + 2), 0, 1, "a filter has at least one tap along each dim");
            }
            dims.push(match self.out_extent(i, extent, filter) {
                Some(out) => out,
                None => {
                    let reach = (filter - 1).saturating_mul(self.dilations[i]).saturating_add(1);
                    let want = reach.saturating_sub(self.pads_before[i]).saturating_sub(self.pads_after[i]);
                    let rule = "the dilated filter fits into the padded input; the size expected is the least";
                    return mismatch(x, format!("dim {}", i + 2), extent, want, rule);
                }
            });
        }
        Ok(dims)
    }
}

impl Operation for Conv {
    const SPEC: OpSpec = OpSpec {
        name: "conv",
        summary: "Convolution over one to three spatial dims, and its gradients; transposed convolution is `dgrad`.",
        forms: &[Form {
            name: "",
            formula: "y[n, k, o] = Σ over c, f of x[n, g(k)·C + c, o·s − p + f·d] · w[k, c, f]     (dgrad, wgrad: its transposes)",
            operands: &[
                OperandSpec::either("x", "`[n, c, spatial…]`; written by `dgrad`"),
                OperandSpec::either("w", "`[k, c / groups, filter…]`; written by `wgrad`"),
                OperandSpec::either("y", "`[n, k, out…]`; written by `fprop`"),
            ],
            attributes: &[
                AttributeSpec::new("direction", "`fprop dgrad wgrad`", "which tensor is written", "\"forward\""),
                AttributeSpec::new("pads_before", "list, one for each spatial dim", "below 2³¹", "[1]"),
                AttributeSpec::new("pads_after", "list, one for each spatial dim", "below 2³¹", "[1]"),
                AttributeSpec::new("strides", "list, one for each spatial dim", "at least 1, below 2³¹", "[0, 1]"),
                AttributeSpec::new("dilations", "list, one for each spatial dim", "at least 1, below 2³¹", "[1, 0]"),
                AttributeSpec::new("groups", "number", "at least 1; divides `c` and `k`", "0"),
                AttributeSpec::new("mode", "`cross_correlation convolution`", "whether the filter is flipped", "\"flipped\"")
                    .or("\"cross_correlation\""),
                AttributeSpec::new("precision", "as of `matmul`", "it takes the types of the two tensors read", "\"i32\""),
            ],
            shape: "`out = ⌊(spatial + pads − (d · (filter − 1) + 1)) / s⌋ + 1`",
            gradient: "of each tensor read, the direction that writes it, with the gradient of what was written in its place",
            methods: &[
                Method::new(
                    "conv_fprop",
                    "x: Uid, w: Uid, *, stride: Each = 1, padding: Each = 0, \
                     padding_after: Each | None = None, dilation: Each = 1, groups: int = 1, flip: bool = False, precision: str | None = None, name: str = \"conv\"",
                ),
                Method::new(
                    "conv_dgrad",
                    "dy: Uid, w: Uid, x_dims: Sequence[int], *, stride: Each = 1, padding: Each = 0, \
                     padding_after: Each | None = None, dilation: Each = 1, groups: int = 1, flip: bool = False, precision: str | None = None, name: str = \"dgrad\"",
                ),
                Method::new(
                    "conv_wgrad",
                    "x: Uid, dy: Uid, w_dims: Sequence[int], *, stride: Each = 1, padding: Each = 0, \
                     padding_after: Each | None = None, dilation: Each = 1, groups: int = 1, flip: bool = False, precision: str | None = None, name: str = \"wgrad\"",
                ),
            ],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        let (left, right, output) = match self.direction {
            ConvDirection::Fprop => (&mut self.x, &mut self.w, &mut self.y),
            ConvDirection::Dgrad => (&mut self.y, &mut self.w, &mut self.x),
            ConvDirection::Wgrad => (&mut self.x, &mut self.y, &mut self.w),
        };
        visit(Role::Input, left);
        visit(Role::Input, right);
        visit(Role::Output, output);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let x = data(graph, op, self.x)?;
        let w = data(graph, op, self.w)?;
        let y = data(graph, op, self.y)?;
        let dims = self.infer(op, x, w)?;
        crate::validate::same_dims(op, y, &dims, "y has the dims [n, k, out…] that x, w and the attributes give")?;
        let [left, right] = self.operands().map(|uid| {
            if uid == self.x {
                x
            } else if uid == self.w {
                w
            } else {
                y
            }
        });
        match self.precision.rule_broken_by(left.dtype, right.dtype) {
            Some(rule) => Err(Error::DType { op: op.to_owned(), tensor: left.name.clone(), got: left.dtype, rule }),
            None => Ok(()),
        }
    }

    /// Each direction is linear in both of its operands, and their gradients are the other two directions, with the gradient of what is
    /// written in its place.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(gradient) = at.of(self.output()) else { return Ok(()) };
        let [left, _] = self.operands();
        let is_fp8 = at.tensor(left)?.dtype.is_fp8();
        let precision = if is_fp8 && self.precision != Precision::Ieee { Precision::Fp32 } else { self.precision };
        let dtype = Backward::operand_dtype(at.tensor(left)?.dtype);
        let gradient = if self.operands().iter().any(|&uid| at.wants(uid)) { at.round(gradient, dtype)? } else { gradient };
        let mut filled = Conv { precision, ..self.clone() };
        match self.direction {
            ConvDirection::Fprop => filled.y = gradient,
            ConvDirection::Dgrad => filled.x = gradient,
            ConvDirection::Wgrad => filled.w = gradient,
        }
        for direction in ConvDirection::ALL.into_iter().filter(|&direction| direction != self.direction) {
            let of = Conv { direction, ..self.clone() }.output();
            if !at.wants(of) {
                continue;
            }
            let dims = at.dims(of)?;
            let mut conv = filled.clone();
            let given = match direction {
                ConvDirection::Fprop => {
                    (conv.x, conv.w) = (at.round(conv.x, dtype)?, at.round(conv.w, dtype)?);
                    at.graph.conv_fprop(&at.named("y"), conv)?
                }
                ConvDirection::Dgrad => {
                    (conv.y, conv.w) = (at.round(conv.y, dtype)?, at.round(conv.w, dtype)?);
                    at.graph.conv_dgrad(&at.named("x"), conv, &dims)?
                }
                ConvDirection::Wgrad => {
                    (conv.x, conv.y) = (at.round(conv.x, dtype)?, at.round(conv.y, dtype)?);
                    at.graph.conv_wgrad(&at.named("w"), conv, &dims)?
                }
            };
            at.give(of, given)?;
        }
        Ok(())
    }
}
