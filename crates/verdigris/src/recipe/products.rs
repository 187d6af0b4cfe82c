//! Products and convolutions.

use verdigris_graph::{BinaryOp, Conv, ConvDirection, Matmul, Real, Uid, UnaryOp};

use super::view::{View, in_format, is_channels_last};
use super::{Convolution, Drawing, Function, unfit};
use crate::error::Error;

/// The place of a weight or filter among a function's tensors.
const WEIGHT: usize = 1;
/// The places of a convolution with normalization, behind those of a convolution.
const BIAS: usize = 2;
const MEAN: usize = 3;
const VARIANCE: usize = 4;
const SCALE: usize = 5;
const SHIFT: usize = 6;
const ADDEND: usize = 7;

impl Convolution {
    /// The op on tensors of so many dims.
    pub(super) fn op(&self, direction: ConvDirection, [x, w, y]: [Uid; 3], rank: usize) -> Conv {
        let spatial = rank.saturating_sub(2);
        let whole = |list: &[u64], default: u64| if list.is_empty() { vec![default; spatial] } else { list.to_vec() };
        Conv {
            pads_before: whole(&self.pads_before, 0),
            pads_after: whole(&self.pads_after, 0),
            strides: whole(&self.strides, 1),
            dilations: whole(&self.dilations, 1),
            groups: self.groups,
            ..Conv::new(direction, x, w, y, spatial, self.precision)
        }
    }
}

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
        let (Function::ConvFprop(c, _) | Function::ConvNorm { conv: c, .. } | Function::ConvDgrad(c, _)) = function else { return Ok(()) };
        let conv = |x, w, y| c.op(ConvDirection::Fprop, [x, w, y], a.layout.rank());
        let last = is_channels_last(&a.layout) || is_channels_last(&b.layout);
        match function {
            Function::ConvFprop(_, activation) => {
                let (x, w) = (self.input(0, "x")?, self.input(WEIGHT, "w")?);
                let y = self.g.conv_fprop("conv", conv(x, w, Uid(0)))?;
                let y = self.biased(2, y, 1, *activation)?;
                self.store_in(y, "y", a.dtype, last)
            }
            Function::ConvNorm { epsilon, activation, .. } => {
                let (x, w) = (self.input(0, "x")?, self.input(WEIGHT, "w")?);
                let y = self.g.conv_fprop("conv", conv(x, w, Uid(0)))?;
                let y = self.normalized(y, *epsilon)?;
                let y = match self.given[ADDEND] {
                    Some(addend) if addend.layout.dims() != self.dims_of(y) => {
                        let what = format!("an addend of dims {:?} to a result of {:?}", addend.layout.dims(), self.dims_of(y));
                        return Err(unfit(what, "they are the same"));
                    }
                    Some(_) => {
                        let addend = self.input(ADDEND, "addend")?;
                        self.g.binary("add", BinaryOp::Add, y, addend)?
                    }
                    None => y,
                };
                let y = self.activated(*activation, y)?;
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
                // `greatest` is the largest input that gives y, below 0 where padding alone holds more. A larger result first takes away padding at the
                // end; elements beyond that are seen by no output, so they are 0. Where those are all and more, outputs begin behind them: padding
                // before goes too.
                let mut reached = x_dims.clone();
                let mut beyond = vec![0; x_dims.len()];
                let is_whole = filter.len() == out.len() && x_dims.len() == out.len() + 2 && conv.spatial() == out.len();
                for i in (0..out.len()).filter(|_| is_whole) {
                    let Some(least) = conv.signed_least_extent(i, out[i], filter[i]) else { continue };
                    let greatest = least + i128::from(conv.strides[i].saturating_sub(1));
                    let Ok(excess) = u64::try_from(i128::from(x_dims[i + 2]) - greatest) else { continue };
                    let unpadded = excess.min(conv.pads_after[i]);
                    conv.pads_after[i] -= unpadded;
                    beyond[i + 2] = (excess - unpadded).min(x_dims[i + 2]);
                    conv.pads_before[i] -= (excess - unpadded - beyond[i + 2]).min(conv.pads_before[i]);
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

    /// `(y + bias − mean) / √(variance + ε) · scale + shift` over the channels of y, as one product and one sum an element: what is behind them is
    /// computed once a channel.
    fn normalized(&mut self, y: Uid, epsilon: Real) -> Result<Uid, Error> {
        let rank = self.dims_of(y).len();
        let of_channels = |d: &mut Self, place: usize, name: &str| match d.given[place] {
            Some(_) => d.input_as(place, name, View::Channel { rank, axis: 1 }).map(Some),
            None => Ok(None),
        };
        let (bias, scale, shift) =
            (of_channels(self, BIAS, "bias")?, of_channels(self, SCALE, "scale")?, of_channels(self, SHIFT, "shift")?);
        let mean = self.input_as(MEAN, "mean", View::Channel { rank, axis: 1 })?;
        let variance = self.input_as(VARIANCE, "variance", View::Channel { rank, axis: 1 })?;
        let wide = self.g.unary("variance", UnaryOp::Affine { scale: Real(1.0), shift: epsilon }, variance)?;
        let mut factor = self.g.unary("deviation", UnaryOp::Rsqrt, wide)?;
        if let Some(scale) = scale {
            factor = self.g.binary("factor", BinaryOp::Mul, factor, scale)?;
        }
        let center = match bias {
            Some(bias) => self.g.binary("center", BinaryOp::Sub, bias, mean)?,
            None => self.g.unary("center", UnaryOp::Neg, mean)?,
        };
        let mut offset = self.g.binary("offset", BinaryOp::Mul, center, factor)?;
        if let Some(shift) = shift {
            offset = self.g.binary("offset", BinaryOp::Add, offset, shift)?;
        }
        let y = self.g.binary("scaled", BinaryOp::Mul, y, factor)?;
        Ok(self.g.binary("shifted", BinaryOp::Add, y, offset)?)
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::{Precision, Problem};
    use verdigris_tensor::{DType, Layout};

    use super::super::{Input, draw};
    use super::*;

    fn conv_norm(groups: u64, activation: UnaryOp) -> Function {
        let conv = Convolution {
            strides: vec![2, 1],
            pads_before: vec![1, 1],
            pads_after: vec![1, 1],
            dilations: vec![],
            groups,
            precision: Precision::Fp32,
        };
        Function::ConvNorm { conv, epsilon: Real(1e-5), activation }
    }

    fn input(dtype: DType, dims: &[u64]) -> Option<Input> {
        let layout = in_format(dims, dims.len() == 4).expect("a packed layout");
        Some(Input { dtype, layout, alignment_bytes: None })
    }

    fn of_channels(channels: u64) -> Option<Input> {
        Some(Input { dtype: DType::F32, layout: Layout::row_major(&[channels]).expect("one dim"), alignment_bytes: None })
    }

    #[test]
    fn a_convolution_with_the_normalization_of_inference_is_one_convolution_and_some_work_a_channel() {
        let channel = of_channels(64);
        let (x, w, y) = (input(DType::Bf16, &[2, 32, 8, 8]), input(DType::Bf16, &[64, 32, 3, 3]), input(DType::Bf16, &[2, 64, 4, 8]));
        let whole = [x, w, channel, channel, channel, channel, channel, y];
        let plain = [x, w, None, channel, channel, None, None, None];
        for given in [whole, plain] {
            let graph = draw(&conv_norm(1, UnaryOp::Relu), &given).expect("drawn").graph;
            let parts = verdigris_graph::pattern::partition(&graph).expect("cut").parts;
            let elements = |part: &verdigris_graph::pattern::Subgraph| match &part.problem {
                Problem::Map(map) => map.dims.iter().product::<u64>(),
                _ => 0,
            };
            let kinds: Vec<&str> = parts.iter().map(|part| part.problem.kind()).collect();
            assert_eq!(kinds.iter().filter(|kind| **kind == "conv").count(), 1, "{kinds:?}");
            assert!(parts.iter().all(|part| elements(part) <= 64), "nothing passes over the result again: {kinds:?}");
            for part in &parts {
                assert!(verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok()));
            }
        }
    }

    #[test]
    fn an_addend_has_the_dims_of_the_result() {
        let channel = of_channels(64);
        let (x, w) = (input(DType::F32, &[2, 32, 8, 8]), input(DType::F32, &[64, 32, 3, 3]));
        let refused =
            draw(&conv_norm(1, UnaryOp::Identity), &[x, w, None, channel, channel, None, None, input(DType::F32, &[1, 64, 1, 1])]);
        assert!(refused.is_err_and(|error| error.to_string().contains("an addend of dims [1, 64, 1, 1] to a result of [2, 64, 4, 8]")));
        assert!(draw(&conv_norm(1, UnaryOp::Identity), &[x, w, None, channel, None]).is_err(), "the variance is missing");
    }
}
