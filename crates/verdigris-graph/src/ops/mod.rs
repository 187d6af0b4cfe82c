//! The operations: one file each, with attributes, shape inference, checks, the rule of differentiation and the description.
//!
//! [`each_op`](crate::each_op) is the list of them, from which [`Op`](crate::Op) is made and what each crate must have for an op.

pub mod append;
pub mod attention;
pub mod batch_norm;
pub mod conv;
pub mod matmul;
pub mod movement;
pub mod norm;
pub mod pointwise;
pub mod pool;
pub mod reduction;
pub mod resample;
pub mod response_norm;
pub mod scan;
mod shuffle;
pub mod softmax;

/// What the crate shows of each op at its root.
pub(crate) mod names {
    pub use super::append::Append;
    pub use super::attention::{
        Attended, Attention, AttentionBackward, AttentionGradients, AttentionSpec, Causal, DropoutMask, ScoreFunction, ScorePlace,
        ScoreStep,
    };
    pub use super::batch_norm::{BatchNorm, BatchNormBackward, BatchNormStatistics, BatchNormed, Moments};
    pub use super::conv::{Conv, ConvDirection, ConvMode};
    pub use super::matmul::{Matmul, OperandScale, Precision};
    pub use super::movement::Movement;
    pub use super::norm::{NormGradientUids, NormGradients, NormKind, NormSpec, Normalize, NormalizeBackward, Normalized};
    pub use super::pointwise::{BinaryOp, Drawn, Pointwise, RandomState, TernaryOp, UnaryOp};
    pub use super::pool::{Pool, PoolBackward, PoolMode, PoolWindows};
    pub use super::reduction::{Reduction, ReductionOp};
    pub use super::resample::{Border, Filter, Resample, ResampleBackward, Sampling, Taps};
    pub use super::response_norm::ResponseNorm;
    pub use super::scan::{Scan, ScanOp};
    pub use super::softmax::{CrossEntropy, CrossEntropyBackward, CrossEntropySpec, LossReduction, Softmax, SoftmaxBackward};
}

/// The list of ops: `each_op!(then)` is `then! { … }` with each op's documentation and name, which is both the variant of
/// [`Op`](crate::Op) and the struct in it. A crate that does something with every op makes its dispatch from this list:
///
/// ```
/// use verdigris_graph::{Op, each_op};
///
/// macro_rules! variants {
///     ($($(#[$doc:meta])* $name:ident,)*) => {
///         fn variant(op: &Op) -> &'static str {
///             match op {
///                 $(Op::$name(_) => stringify!($name),)*
///             }
///         }
///     };
/// }
/// each_op!(variants);
/// # let _ = variant;
/// ```
#[macro_export]
macro_rules! each_op {
    ($then:ident) => {
        $then! {
            /// A function of up to three tensors, element by element.
            Pointwise,
            /// `D = alpha · A · B + beta · C`, batched.
            Matmul,
            /// Convolution, forward or a gradient of it.
            Conv,
            /// A sum, product, extremum, mean or norm over axes.
            Reduction,
            /// A running sum, product, extremum or log-sum-exp along an axis.
            Scan,
            /// Max or average pooling.
            Pool,
            /// The gradient of pooling.
            PoolBackward,
            /// Softmax or log-softmax.
            Softmax,
            /// The gradient of softmax or log-softmax.
            SoftmaxBackward,
            /// Cross-entropy of logits and integer labels.
            CrossEntropy,
            /// The gradient of cross-entropy.
            CrossEntropyBackward,
            /// Normalization of rows by their own statistics.
            Normalize,
            /// The gradient of normalization.
            NormalizeBackward,
            /// Batch normalization in training.
            BatchNorm,
            /// The gradient of batch normalization.
            BatchNormBackward,
            /// Mean and squared deviations of channels.
            BatchNormStatistics,
            /// Softmax of scaled products of queries and keys, times the values.
            Attention,
            /// The gradient of attention.
            AttentionBackward,
            /// The same values in other places.
            Movement,
            /// Rows behind those that a tensor has, in its place.
            Append,
            /// Another resolution, or a border made of the tensor itself.
            Resample,
            /// The gradient of resampling.
            ResampleBackward,
        }
    };
}
