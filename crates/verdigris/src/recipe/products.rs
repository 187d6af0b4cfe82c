//! Products and convolutions.

use verdigris_graph::{Conv, ConvDirection, Matmul, Uid, UnaryOp};

use super::view::{View, in_format, is_channels_last};
use super::{Drawing, Function, unfit};
use crate::error::Error;

/// The place of a weight or filter among a function's tensors.
const WEIGHT: usize = 1;

impl Drawing {
    pub(super) fn products(&mut self, function: &Function) -> Result<(), Error> {
        let (a, b) = (self.given(0)?, self.given(1)?);
        match *function {
            Function::Linear(precision, activation) => {
                if b.layout.rank() != 2 {
                    return Err(unfit(format_args!("a weight of dims {:?}", b.layout.dims()), "a weight is [out, in]"));
                }
                // The rule gives the gradient of a left operand as [rows, columns] of that operand. The weight is [out, in], so for its gradient
                // the product is drawn as yᵀ = w · xᵀ: the gradient is then one product with a row-major result.
                let is_turned = self.wanted == Some(WEIGHT);
                let x = self.input_as(0, "x", View::Matrix { is_turned })?;
                let w = self.input_as(1, "w", View::Matrix { is_turned: !is_turned })?;
                let (left, right) = if is_turned { (w, x) } else { (x, w) };
                let y = self.g.matmul_with("linear", Matmul::new(left, right, Uid(0), precision))?;
                let y = self.biased(2, y, usize::from(!is_turned), activation)?;
                let mut dims = a.layout.dims().to_vec();
                dims.pop();
                dims.push(b.layout.dims()[0]);
                self.store_as(y, "y", a.dtype, in_format(&dims, false)?, View::Matrix { is_turned })
            }
            Function::Matmul(precision) => {
                let (left, right) = (self.input(0, "a")?, self.input(1, "b")?);
                let d = self.g.matmul_with("matmul", Matmul::new(left, right, Uid(0), precision))?;
                self.store_like(d, "d", a.dtype, &a.layout)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn convolutions(&mut self, function: &Function) -> Result<(), Error> {
        let (a, b) = (self.given(0)?, self.given(1)?);
        let spatial = a.layout.rank().saturating_sub(2);
        let whole = |list: &[u64], default: u64| if list.is_empty() { vec![default; spatial] } else { list.to_vec() };
        let (Function::ConvFprop(c, _) | Function::ConvDgrad(c, _)) = function else { return Ok(()) };
        let conv = |x, w, y| Conv {
            pads_before: whole(&c.pads_before, 0),
            pads_after: whole(&c.pads_after, 0),
            strides: whole(&c.strides, 1),
            dilations: whole(&c.dilations, 1),
            groups: c.groups,
            ..Conv::new(ConvDirection::Fprop, x, w, y, spatial, c.precision)
        };
        let last = is_channels_last(&a.layout) || is_channels_last(&b.layout);
        match function {
            Function::ConvFprop(_, activation) => {
                let (x, w) = (self.input(0, "x")?, self.input(WEIGHT, "w")?);
                let y = self.g.conv_fprop("conv", conv(x, w, Uid(0)))?;
                let y = self.biased(2, y, 1, *activation)?;
                self.store_in(y, "y", a.dtype, last)
            }
            Function::ConvDgrad(_, extents) => {
                let (y, w) = (self.input(0, "y")?, self.input(WEIGHT, "w")?);
                let (&[n, _, ref out @ ..], &[_, channels, ref filter @ ..]) = (a.layout.dims(), b.layout.dims()) else {
                    let rule = "they are [n, k, out…] and [k, c / groups, filter…]";
                    return Err(unfit(format_args!("y {} and w {}", a.layout, b.layout), rule));
                };
                let mut conv = conv(Uid(0), w, y);
                let x_dims = extents.dims(n, channels.saturating_mul(c.groups));
                // `greatest` is the largest input that gives y. A larger result first takes away padding at the end; elements beyond that are
                // seen by no output, so they are 0.
                let mut reached = x_dims.clone();
                let mut beyond = vec![0; x_dims.len()];
                let is_whole = filter.len() == out.len() && x_dims.len() == out.len() + 2 && conv.spatial() == out.len();
                for i in (0..out.len()).filter(|_| is_whole) {
                    let Some(least) = conv.least_extent(i, out[i], filter[i]) else { continue };
                    let greatest = least.saturating_add(conv.strides[i].saturating_sub(1));
                    let excess = x_dims[i + 2].saturating_sub(greatest);
                    let unpadded = excess.min(conv.pads_after[i]);
                    conv.pads_after[i] -= unpadded;
                    beyond[i + 2] = excess - unpadded;
                    reached[i + 2] = x_dims[i + 2] - beyond[i + 2];
                }
                let mut x = self.g.conv_dgrad("conv", conv, &reached)?;
                if reached != x_dims {
                    x = self.g.pad("beyond", x, &vec![0; x_dims.len()], &beyond, 0.0)?;
                    // A movement does not round; what follows it does.
                    x = self.g.unary("beyond", UnaryOp::Identity, x)?;
                }
                let x = self.biased(2, x, 1, UnaryOp::Identity)?;
                self.store_in(x, "x", a.dtype, last)
            }
            _ => Ok(()),
        }
    }
}
