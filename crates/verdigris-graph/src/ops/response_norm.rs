//! Local response normalization across channels (Krizhevsky and others, 2012; cuDNN's LRN), composed of maps.
//!
//! ```text
//! y[n, c, …] = x[n, c, …] · (k + alpha / size · Σ x[n, c', …]²)^−beta     over c − ⌊size / 2⌋ ≤ c' ≤ c + ⌊(size − 1) / 2⌋ within the channels
//! ```
//!
//! The power is `e^(−beta · ln d)`, computed in f32 (f64 for f64) and rounded with the product once; `d` is at least `k`. The sum is one load for each channel
//! of the window, of shifted views of `x` in one map; the gradient is two maps, and sums in a fixed order.

use crate::error::Error;
use crate::graph::GraphBuilder;
use crate::op::{HostScalar, Real};
use crate::ops::pointwise::{BinaryOp, UnaryOp};
use crate::tensor::Uid;
use crate::validate::attribute;

/// The attributes of a local response normalization; the module's head has the formula.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ResponseNorm {
    /// Channels of a window; at least 1.
    pub size: u64,
    /// Factor of the mean of squares.
    pub alpha: Real,
    /// The power.
    pub beta: Real,
    /// What is added to it.
    pub k: Real,
}

/// The widest window: each of its channels is a load.
const MOST_CHANNELS: u64 = 64;

impl GraphBuilder {
    /// Local response normalization of `x [n, c, …]`, as a virtual tensor.
    ///
    /// ```
    /// use verdigris_graph::ops::response_norm::ResponseNorm;
    /// use verdigris_graph::{GraphBuilder, Real};
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let mut g = GraphBuilder::new("normalize");
    /// let x = g.tensor("x", DType::F32, Layout::row_major(&[2, 8, 5, 5])?);
    /// let y = g.local_response_norm("lrn", x, ResponseNorm { size: 5, alpha: Real(1e-4), beta: Real(0.75), k: Real(1.0) })?;
    /// assert_eq!(g.dims(y), Some(vec![2, 8, 5, 5]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A window of no channels or of more than 64, numbers that are not finite, fewer than two dims, an unknown uid.
    pub fn local_response_norm(&mut self, name: &str, x: Uid, norm: ResponseNorm) -> Result<Uid, Error> {
        let ResponseNorm { size, alpha, beta, k } = norm;
        if !(1..=MOST_CHANNELS).contains(&size) {
            return attribute(name, "size", size, "a window has 1 to 64 channels");
        }
        for (which, value) in [("alpha", alpha), ("beta", beta), ("k", k)] {
            if !value.0.is_finite() {
                return attribute(name, which, value.0, "it is finite");
            }
        }
        let dims = self.dims(x).ok_or_else(|| Error::UnknownTensor { op: name.to_owned(), uid: x })?;
        let Some(&channels) = dims.get(1) else {
            return attribute(name, "x", format!("{dims:?}"), "channels are the second dim");
        };
        let (below, above) = (size / 2, (size - 1) / 2);
        let mut sum = self.binary(name, BinaryOp::Mul, x, x)?;
        for distance in 1..=below.max(above) {
            for (is_below, reach) in [(true, below), (false, above)] {
                if distance <= reach && distance < channels {
                    let neighbour = self.shifted(name, x, &dims, distance, is_below)?;
                    let square = self.binary(name, BinaryOp::Mul, neighbour, neighbour)?;
                    sum = self.binary(name, BinaryOp::Add, sum, square)?;
                }
            }
        }
        let divisor = self.unary(name, UnaryOp::Affine { scale: Real(alpha.0 / size as f64), shift: k }, sum)?;
        let logarithm = self.unary(name, UnaryOp::Log, divisor)?;
        let power = self.scale(name, logarithm, HostScalar::Fixed(Real(-beta.0)))?;
        let factor = self.unary(name, UnaryOp::Exp, power)?;
        self.binary(name, BinaryOp::Mul, x, factor)
    }

    /// `y[n, c] = x[n, c − distance]`, or `x[n, c + distance]`, and 0 where there is no such channel.
    fn shifted(&mut self, name: &str, x: Uid, dims: &[u64], distance: u64, is_below: bool) -> Result<Uid, Error> {
        let none = vec![0; dims.len()];
        let (mut starts, mut stops, mut before, mut after) = (none.clone(), dims.to_vec(), none.clone(), none);
        if is_below {
            (stops[1], before[1]) = (dims[1] - distance, distance);
        } else {
            (starts[1], after[1]) = (distance, distance);
        }
        let part = self.slice(name, x, &starts, &stops, &vec![1; dims.len()])?;
        self.pad(name, part, &before, &after, 0.0)
    }
}
