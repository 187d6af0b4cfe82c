//! Pooling.

use verdigris_graph::{BinaryOp, HostScalar, PoolMode, PoolWindows, Real, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::view::is_channels_last;
use super::{Divisor, Drawing, Function, Input, unfit};
use crate::error::Error;

impl Drawing {
    pub(super) fn pools(&mut self, function: &Function) -> Result<(), Error> {
        let given = self.given(0)?;
        let last = is_channels_last(&given.layout);
        let x = self.input(0, "x")?;
        match function {
            Function::MaxPool(windows, Some(index_dtype)) => {
                let (y, index) = self.g.max_pool_with_index("max pool", windows.clone(), x, *index_dtype)?;
                self.store_in(y, "y", given.dtype, last)?;
                self.store_in(index, "index", *index_dtype, last)
            }
            Function::MaxPool(windows, None) => {
                let y = self.g.pool("max pool", PoolMode::Max, windows.clone(), x)?;
                self.store_in(y, "y", given.dtype, last)
            }
            Function::FractionalMaxPool(window, out, index_dtype) => {
                let samples = self.input(1, "samples")?;
                let (y, index) = self.g.fractional_max_pool("fractional max pool", x, samples, (window, out), *index_dtype)?;
                self.store_in(y, "y", given.dtype, last)?;
                self.store_in(index, "index", *index_dtype, last)
            }
            Function::AveragePool(windows, divisor) => {
                let mode = PoolMode::Average { count_include_pad: *divisor != Divisor::Elements };
                let mean = self.g.pool("average pool", mode, windows.clone(), x)?;
                let y = self.divided(mean, windows, divisor, given)?;
                self.store_in(y, "y", given.dtype, last)
            }
            _ => Ok(()),
        }
    }

    /// A mean over all taps of each window, as one over what the divisor says.
    fn divided(&mut self, mean: Uid, windows: &PoolWindows, divisor: &Divisor, given: Input) -> Result<Uid, Error> {
        let PoolWindows::Sliding { window, strides, dilations, pads_before, .. } = windows else { return Ok(mean) };
        match divisor {
            Divisor::Elements | Divisor::Taps => Ok(mean),
            Divisor::Fixed(0) => Err(unfit("average pooling with a divisor of 0", "a divisor is not 0")),
            Divisor::Fixed(divisor) => {
                let taps: f64 = window.iter().map(|&taps| taps as f64).product();
                Ok(self.g.scale("divided", mean, HostScalar::Fixed(Real(taps / *divisor as f64)))?)
            }
            Divisor::Within(after) => {
                let (dims, x_dims) = (self.dims_of(mean), given.layout.dims());
                let mut y = mean;
                for (i, (&taps, &after)) in window.iter().zip(after).enumerate() {
                    let end = x_dims[i + 2].saturating_add(pads_before[i]).saturating_add(after);
                    // Later windows have fewer taps before the end: the loop runs from the last window back to the first whole one.
                    for o in (0..dims[i + 2]).rev() {
                        let counted = end.saturating_sub(o * strides[i]).div_ceil(dilations[i]);
                        if counted >= taps {
                            break;
                        }
                        if counted == 0 {
                            let what = format!("window {o} of spatial dim {i}");
                            return Err(unfit(what, "each window begins before the end of the padding"));
                        }
                        let mut line = vec![1; dims.len()];
                        line[i + 2] = dims[i + 2];
                        let at = self.g.gen_index("window", &line, i as u32 + 2)?;
                        // An op computes in f64 where an operand is of it; by numbers of windows alone the factor would be of f32.
                        if given.dtype == DType::F64 {
                            self.g.set_dtype(at, DType::F64)?;
                        }
                        let beyond = self.g.unary("window", UnaryOp::Affine { scale: Real(1.0), shift: Real(-(o as f64)) }, at)?;
                        let is_it = self.g.unary("window", UnaryOp::Not, beyond)?;
                        let factor = taps as f64 / counted as f64;
                        let factor = self.g.unary("divided", UnaryOp::Affine { scale: Real(factor - 1.0), shift: Real(1.0) }, is_it)?;
                        y = self.g.binary("divided", BinaryOp::Mul, y, factor)?;
                    }
                }
                Ok(y)
            }
        }
    }
}
