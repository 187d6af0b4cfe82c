//! Functions of tensors as graphs: what the tensors are goes in, a graph comes out, no memory is touched.
//!
//! Every door that offers functions draws them here, and runs the graph as a [`Plan`](crate::Plan) on the memory that it has:
//! [`crate::functional`] on [`Tensor`](crate::Tensor)s, the Python package on PyTorch's.
//!
//! A function's gradient is a function too ([`Gradient`]): its graph comes from the ops' rules of differentiation
//! ([`verdigris_graph::gradient`]), and it has a gradient of its own where the rules give one.
//!
//! **Where results lie.** Those of convolution and pooling are channels-last where the first tensor (or the filter) is, else packed
//! row-major; those of functions of elements lie as their first tensor does, without gaps. They have the element type of the first tensor
//! unless the function says otherwise. A gradient lies as its tensor does.
//!
//! ```
//! use verdigris::recipe::{Convolution, Divisor, Extents, Function, Gradient, Input, LossForm, Outcome, Recipe, Saved, Targets, draw, draw_together};
//! use verdigris::{CrossEntropySpec, DType, Layout, LossReduction, NormKind, NormSpec, Precision, UnaryOp};
//!
//! let x = Input { dtype: DType::F16, layout: Layout::row_major(&[2, 3])?, alignment_bytes: None };
//! let recipe = draw(&Function::Activation(UnaryOp::Relu), &[Some(x)])?;
//! assert_eq!(recipe.graph.nodes.len(), 1);
//! assert_eq!((recipe.results[0].dtype, &recipe.results[0].layout), (DType::F16, &x.layout));
//!
//! let input = |dtype, dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype, layout, alignment_bytes: None }));
//! let spec = CrossEntropySpec::new(1, LossReduction::Mean);
//! let loss = Function::CrossEntropy(spec.clone(), LossForm::WithLse);
//! let Recipe { results, .. } = draw(&loss, &[input(DType::F16, &[8, 10])?, input(DType::I32, &[8])?])?;
//! let dims: Vec<&[u64]> = results.iter().map(|Outcome { layout, .. }| layout.dims()).collect();
//! assert_eq!((loss.name(), dims), ("cross_entropy", vec![&[][..], &[8][..]]));
//!
//! // Against a probability for each class.
//! let loss = Function::ClassLoss(spec, Targets::Probabilities);
//! assert_eq!(draw(&loss, &[input(DType::F32, &[8, 10])?, input(DType::F32, &[8, 10])?])?.results[0].layout.dims(), [0; 0]);
//!
//! // Layer norm over the last dim, and the gradients of its input and its scale: one op.
//! let spec = NormSpec::new(NormKind::Layer, &[1], 1e-5);
//! let norm = Function::Norm { spec, per_channel: false };
//! let (rows, scale) = (input(DType::F16, &[8, 10])?, input(DType::F16, &[10])?);
//! assert_eq!(draw(&norm, &[rows, scale, scale])?.results[0].layout.dims(), [8, 10]);
//! let gradients = [0, 1].map(|with_respect_to| {
//!     let saved = vec![Saved::Tensor(0), Saved::Tensor(1), Saved::Tensor(2)];
//!     Function::Gradient(Box::new(Gradient { of: norm.clone(), with_respect_to, saved, dims: None, dtype: None }))
//! });
//! assert_eq!(draw_together(&gradients, &[rows, rows, scale, scale])?.graph.nodes.len(), 1);
//!
//! // The gradient of ReLU: dy, and what was saved of the call.
//! let gradient = Gradient { of: Function::Activation(UnaryOp::Relu), with_respect_to: 0, saved: vec![Saved::Tensor(0)], dims: None, dtype: None };
//! let recipe = draw(&Function::Gradient(Box::new(gradient)), &[Some(x), Some(x)])?;
//! assert_eq!(recipe.results[0].layout.dims(), [2, 3]);
//!
//! // Transposed convolution: what its result's extents are, its tensors do not tell.
//! let conv =
//!     Convolution { strides: vec![2, 2], pads_before: vec![], pads_after: vec![], dilations: vec![], groups: 1, precision: Precision::Fp32 };
//! let up = Function::ConvDgrad(conv, Extents::Spatial(vec![9, 9]));
//! let recipe = draw(&up, &[input(DType::F32, &[1, 4, 4, 4])?, input(DType::F32, &[4, 2, 3, 3])?])?;
//! assert_eq!(recipe.results[0].layout.dims(), [1, 2, 9, 9]);
//! assert_ne!(Divisor::Taps, Divisor::Fixed(4));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod activation;
mod attention;
mod attention_block;
mod batch_norm;
mod conv_batch_norm;
mod element_loss;
mod fused;
mod gated;
mod gradient;
mod linear_loss;
mod loss;
mod mlp;
mod pool;
mod products;
mod resample;
mod rotary;
mod view;
mod windows;

use std::collections::HashMap;

use verdigris_graph::{
    AttentionSpec, BinaryOp, CrossEntropySpec, Graph, GraphBuilder, LossReduction, NormSpec, Normalize, PoolWindows, Precision, Real,
    ReductionOp, ResponseNorm, Sampling, ScanOp, TernaryOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

use crate::error::Error;
pub use activation::{ComposedActivation, Dropout};
pub use attention::AttentionGradient;
pub use attention_block::AttentionBlock;
pub use batch_norm::{BatchNormGradient, BatchNormSpec};
pub use conv_batch_norm::ConvBatchNormGradient;
pub use element_loss::ElementLoss;
pub use fused::{Fused, Step};
pub use gated::GatedMlpGradient;
pub use linear_loss::LinearLoss;
pub use mlp::MlpGradient;
pub(crate) use view::layout_error;
use view::{View, in_format, in_order_of, is_channels_last, like};

/// Most tensors that a function reads.
pub const MAX_INPUTS: usize = 16;

/// A function of tensors, with its attributes.
#[derive(Clone, PartialEq, Debug)]
pub enum Function {
    /// `a, b` → `a · b` over the last two dims; those before them are batch dims.
    Matmul(Precision),
    /// `x [..., k], w [n, k], bias?` → `f(x · wᵀ + bias)`, `[..., n]`.
    Linear(Precision, UnaryOp),
    /// `x, w, bias?` → `f(conv(x, w) + bias)`.
    ConvFprop(Convolution, UnaryOp),
    /// `x, w, bias?, mean, variance, scale?, shift?, addend?` → `f((conv(x, w) + bias − mean) / √(variance + ε) · scale + shift + addend)`: a convolution with the
    /// normalization behind it that inference has, a residual and an activation, rounded once. Statistics, scale and shift are one a channel, of the
    /// type that is computed in (f32, or f64) or of x's; the addend has the dims of the result. It has no gradient.
    ConvNorm {
        /// The convolution.
        conv: Convolution,
        /// ε.
        epsilon: Real,
        /// f.
        activation: UnaryOp,
    },
    /// `y, w, bias?` → x, of these extents. Transposed convolution. Extents beyond those of any input that gives y hold the bias alone.
    ConvDgrad(Convolution, Extents),
    /// `x` → its maxima, and the index of each in this type, where one is given.
    MaxPool(PoolWindows, Option<DType>),
    /// `x, samples` → the maxima of fractional windows of so many elements, as many as the second list says, and the index of each in this type.
    FractionalMaxPool(Vec<u64>, Vec<u64>, DType),
    /// `x` → the sum of each window over its divisor.
    AveragePool(PoolWindows, Divisor),
    /// `x` → x in another resolution, or with a border made of itself.
    Resample(Sampling),
    /// `x` → x with so many elements of the value before and after it along each dim; below 0, so many of its own are left out.
    Pad {
        /// One for each dim.
        before: Vec<i64>,
        /// One for each dim.
        after: Vec<i64>,
        /// Finite.
        value: Real,
    },
    /// `x` → `f(x)`.
    Activation(UnaryOp),
    /// `x` → `ln(1 + e^(beta · x)) / beta`, and x itself where `beta · x` is above the threshold.
    Softplus {
        /// How sharp the bend is; not 0.
        beta: Real,
        /// From where on the result is x.
        threshold: Real,
    },
    /// `x` → an activation of it that is composed of ops.
    Composed(ComposedActivation),
    /// `x, weight` → `x` if `x > 0`, else the weight times x. The weight has one element, or one for each index of dim 1.
    Prelu,
    /// `x, state` → `x` if `x > 0`, else x times a random slope between both bounds. The state is that of [`Function::Dropout`]; slopes depend on state and index
    /// alone, and are drawn again in the gradient.
    RandomPrelu {
        /// The least slope.
        lower: Real,
        /// Slopes are below it.
        upper: Real,
    },
    /// `x` → `a · sigmoid(b)` of the first half of x along an axis, a, and the second one, b.
    Glu(u32),
    /// `dy, x` → the gradient of x of the same. It has no gradient.
    GluBackward(u32),
    /// `x, state` → x with each element, or each channel, 0 with a probability p, and the others over `1 − p`. The state is four i32, seed and offset with their low
    /// halves first ([`verdigris_graph::Pointwise::Random`]). Which elements are dropped depends on state and index alone: the gradient is the same function of dy, of
    /// [`Dropout::is_gradient`].
    Dropout(Dropout),
    /// `x, z` → `f(x, z)`, broadcast.
    Binary(BinaryOp),
    /// `x, z, t` → x where t is not 0, else z; broadcast.
    Select,
    /// `x` → x in another type.
    Cast(DType),
    /// `x` → its reduction over these axes, which stay with extent 1.
    Reduce(ReductionOp, Vec<u32>),
    /// `x` → its inclusive scan along the axis, from the last element to the first where that is said. A tensor without dims is a row of one element.
    Scan(ScanOp, u32, bool),
    /// `x` → its running minimum or maximum along the axis, and where along it each stands, the last of equals, in i64: [`GraphBuilder::scan_with_place`]. A
    /// tensor without dims is a row of one element. It has no gradient.
    ScanWithPlace(ScanOp, u32),
    /// `x` → its elements in other places.
    Shuffle(Shuffle),
    /// `x [n, c, …]` → x over a power of the mean of squares of neighbouring channels: [`GraphBuilder::local_response_norm`].
    ResponseNorm(ResponseNorm),
    /// `x` → softmax along the axis; its logarithm, where that is said. A tensor without dims is a row of one element.
    Softmax(u32, bool),
    /// `x` → softmax of −x along the axis, as [`Function::Softmax`].
    Softmin(u32),
    /// `x, scale?, bias?` → x normalized by the statistics of its rows. With `per_channel` scale and bias are vectors over dim 1; else they broadcast
    /// to x. The gradients of several of its tensors, drawn together, are one op.
    Norm {
        /// Statistics, axes, eps.
        spec: NormSpec,
        /// Whether scale and bias have an element for each channel.
        per_channel: bool,
    },
    /// `logits, labels` → the loss. Labels have the dims of the logits with 1 at the class axis, or without it.
    CrossEntropy(CrossEntropySpec, LossForm),
    /// `logits, targets, weights?` → the loss in the type of the logits, without the class axis; a mean or sum without dims. Weights are one a
    /// class. Composed of other ops.
    ClassLoss(CrossEntropySpec, Targets),
    /// `x [rows, k], w [classes, k], bias?, labels [rows] or probabilities [rows, classes], share? [rows], weights? [classes], dloss? [rows]`, then where the losses and the
    /// gradients of `x`, `w`, the bias and the probabilities are written ([`Outcome::in_place_of`]) → those that are wanted. It has no gradient.
    LinearLoss(LinearLoss),
    /// `x, factor` → x times a factor of one element, rounded once to this type.
    Scaled(DType),
    /// `x, target, weight?, positive weight?` → the loss of each element, or their sum or mean without dims, in the type of x. A target has the dims of
    /// x; a weight broadcasts to them and multiplies the loss; the weight of positives is of binary cross-entropy alone. Composed of other ops.
    ElementLoss(ElementLoss, LossReduction),
    /// `x [n, c, …], scale?, bias?, add?, running_mean?, running_var?` → y, and of each channel its mean and `1 / √(variance + eps)` in f32 or f64. The
    /// running statistics are replaced where they lie ([`Outcome::in_place_of`]). What belongs to channels has the dims `[c]`.
    BatchNorm(BatchNormSpec),
    /// `dy, x, scale?, mean, inv, y or bias` → the gradients that are wanted.
    BatchNormBackward(BatchNormGradient),
    /// `x, mean, var, scale?, bias?, add?` → `(x − mean) / √(var + eps) · scale + bias + add`, with an activation behind it. Composed of other ops.
    BatchNormInference {
        /// Added to the variance before its root.
        eps: Real,
        /// What stands behind it.
        activation: Option<UnaryOp>,
    },
    /// `x, w, scale?, bias?, add?, running_mean?, running_var?` → y, mean, inv and the convolution's result, as `ConvFprop` without a bias and `BatchNorm`
    /// behind it compute them.
    ConvBatchNorm {
        /// The convolution.
        conv: Convolution,
        /// The normalization.
        norm: BatchNormSpec,
    },
    /// `dy, x, w, the convolution's result, scale?, mean, inv, y or bias` → the gradients that are wanted.
    ConvBatchNormBackward(ConvBatchNormGradient),
    /// `x [..., k], w [h, k], bias?, w' [n, h], bias'?` → `f(x · wᵀ + bias) · w'ᵀ + bias'`, and with `keeps` the hidden values `[..., h]` before and behind f,
    /// from which gradients are computed.
    Mlp {
        /// How products are formed and summed.
        precision: Precision,
        /// f.
        activation: UnaryOp,
        /// Whether the hidden values are results too.
        keeps: bool,
    },
    /// `dy, x, w, w', the hidden values before and behind f` → the gradients that are wanted.
    MlpBackward(MlpGradient),
    /// `x [..., k], w [h, k], w' [h, k], w'' [n, h], addend?` → `(f(x · wᵀ) ⊙ (x · w'ᵀ)) · w''ᵀ + addend`, and with `keeps` both products with x `[..., h]` and what the last weight multiplies,
    /// from which gradients are computed.
    GatedMlp {
        /// How products are formed and summed.
        precision: Precision,
        /// f.
        activation: UnaryOp,
        /// Whether the hidden values are results too.
        keeps: bool,
    },
    /// `dy, x, w, w', w''`, and what was kept of the call in its order → the gradients that are wanted.
    GatedMlpBackward(GatedMlpGradient),
    /// `x, cos, sin` → `x · cos + r(x) · sin`, r being the second half of the last dim, negated, in front of the first; or the gradient of x from that of the result. Cosines
    /// and sines broadcast. The result lies as x does, without gaps. It has no gradient.
    Rotary {
        /// Whether x is the gradient of the result.
        is_gradient: bool,
    },
    /// `q, k, v, bias or mask?, slopes?, q_offsets?, kv_offsets?, kv_lengths?, page_table?, dropout state?, q_descale?, k_descale?, v_descale?, block_map?, mask_blocks?` → o, laid out as q (in bf16, of queries of 8 bits), and the log-sum-exp of each query in f32 or f64. A mask is of u8; dims are those of the op.
    Attention(AttentionSpec),
    /// The same, of values that are so many elements of the keys, the first ones: the third tensor is not given.
    LatentAttention(AttentionSpec, u64),
    /// `d_o, q, k, v, o, log_sum_exp, bias or mask?, slopes?, q_offsets?, kv_offsets?, dropout state?, block_map?, mask_blocks?` → the gradients that are wanted.
    AttentionBackward(AttentionGradient),
    /// `x [b, s, c], w [(h + 2 h_kv) · d, c], bias?, w' [n, h · d], bias'?, residual?, cos?, sin?, k_cache?, v_cache?, kv_lengths?, bias or mask of the scores?, slopes?` →
    /// `attention(x · wᵀ + bias) · w'ᵀ + bias' + residual`, `[b, s, n]`: heads of queries come first among the outputs of `w`, those of keys and of values behind them. With
    /// angles, `[b or 1, s, d or d / 2]`, queries and keys are turned by them. With caches, `[b, room, h_kv, d]`, new keys and values are appended in their place
    /// ([`Outcome::in_place_of`]; they are further results), and attention reads the caches; lengths, i32 `[b]`, count the new ones. It has no gradient as a function: the
    /// graph has one where it has no cache.
    AttentionBlock(AttentionBlock),
    /// `x` → its elements in row-major order under other dims.
    Reshape(Vec<u64>),
    /// `x` → the sums of its elements over so many of its last dims, which the result does not have, row-major; over none, x itself. Elements of x may share
    /// memory, as those of windows that overlap do.
    WindowSums(u32),
    /// `x [o…, w…], index [o…], positions [o…, w…]` → for each o the sum of those elements of x whose position is the index; so many last dims are those of a
    /// window. Integers are compared as the type that x is computed in, which is exact below 2^24. Elements of x, and of the positions, may share memory.
    WindowPick(u32),
    /// `dy, …` → the gradient of a function.
    Gradient(Box<Gradient>),
    /// The tensors of a function, and behind them those of the steps behind its first result → what the steps make of it.
    Fused(Box<Fused>),
}

/// The gradient of a function's first result with respect to one of its tensors, from the gradient of that result.
///
/// The call gives the gradient of the result first and behind it what is saved. Drawing it is refused where the rules of differentiation
/// refuse ([`verdigris_graph::Error::Gradient`]), where the result does not vary with the tensor ([`verdigris_graph::Error::Constant`]) and where
/// a tensor is read that is not saved.
#[derive(Clone, PartialEq, Debug)]
pub struct Gradient {
    /// The function.
    pub of: Function,
    /// The place of the tensor among those that the function reads.
    pub with_respect_to: usize,
    /// What was saved of the function's call, in the order in which it is given.
    pub saved: Vec<Saved>,
    /// The dims of the tensor if it is not saved; `None` stands for the dims of the result. A tensor that is not saved has the type of `dy`.
    pub dims: Option<Vec<u64>>,
    /// The element type of the gradient; `None` stands for the tensor's. Where the tensor was rounded for the call, the type that it had before: its
    /// gradient is then rounded once.
    pub dtype: Option<DType>,
}

/// A tensor of a function's call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Saved {
    /// One that it reads.
    Tensor(usize),
    /// One that it writes.
    Result(usize),
}

/// What the sum of an average pooling's window is divided by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Divisor {
    /// The elements of the tensor that the window meets.
    Elements,
    /// The taps of the window, those in padding included.
    Taps,
    /// The taps that lie at most this many elements behind the last one, one number a spatial dim. Taps beyond it exist only because
    /// `pads_after` is enlarged to keep the last window (PyTorch's `ceil_mode`), and do not count.
    Within(Vec<u64>),
    /// A number; not 0.
    Fixed(i64),
}

/// What [`Function::Shuffle`] does.
///
/// ```
/// use verdigris::recipe::{Function, Input, Shuffle, draw};
/// use verdigris::{DType, Layout};
///
/// let x = Input { dtype: DType::Bf16, layout: Layout::row_major(&[2, 12, 5, 7])?, alignment_bytes: None };
/// let recipe = draw(&Function::Shuffle(Shuffle::ToPixels { factor: 2 }), &[Some(x)])?;
/// assert_eq!(recipe.results[0].layout.dims(), [2, 3, 10, 14]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shuffle {
    /// Channels to pixels: [`GraphBuilder::pixel_shuffle`].
    ToPixels {
        /// Pixels of the result along each side of one of x.
        factor: u64,
    },
    /// Pixels to channels: [`GraphBuilder::pixel_unshuffle`].
    ToChannels {
        /// Pixels of x along each side of one of the result.
        factor: u64,
    },
    /// Channels among groups: [`GraphBuilder::channel_shuffle`].
    Channels {
        /// How many groups.
        groups: u64,
    },
}

/// What [`Function::ClassLoss`] compares with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Targets {
    /// An integer for each row; dims as of [`Function::CrossEntropy`].
    Labels,
    /// The same, where the logits are logarithms of probabilities already: negative log-likelihood.
    LabelsOfLogarithms,
    /// A probability for each class; the dims of the logits.
    Probabilities,
}

/// How a loss is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LossForm {
    /// In f32 (f64 for f64 logits), with the class axis of extent 1.
    Wide,
    /// In the type of the logits and without the class axis, a mean or sum without dims; behind it each row's log-sum-exp, in f32 or f64.
    WithLse,
}

/// Attributes of a convolution; lists have one entry a spatial dim, or none, which stands for strides and dilations of 1 and no padding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Convolution {
    /// Elements of the input from one output to the next.
    pub strides: Vec<u64>,
    /// Elements of padding before the first.
    pub pads_before: Vec<u64>,
    /// Elements of padding behind the last.
    pub pads_after: Vec<u64>,
    /// Elements of the input from one filter tap to the next.
    pub dilations: Vec<u64>,
    /// Groups of channels.
    pub groups: u64,
    /// How products are formed and summed.
    pub precision: Precision,
}

/// Dims of a result that its function's tensors do not tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Extents {
    /// All.
    Whole(Vec<u64>),
    /// Those behind the first two, which follow.
    Spatial(Vec<u64>),
}

impl Extents {
    fn dims(&self, first: u64, second: u64) -> Vec<u64> {
        match self {
            Extents::Whole(dims) => dims.clone(),
            Extents::Spatial(spatial) => [first, second].into_iter().chain(spatial.iter().copied()).collect(),
        }
    }
}

impl Function {
    /// Its name, which is its graph's.
    pub const fn name(&self) -> &'static str {
        match self {
            Function::Matmul(_) => "matmul",
            Function::Linear(..) => "linear",
            Function::ConvFprop(..) => "conv_fprop",
            Function::ConvNorm { .. } => "conv_norm",
            Function::ConvDgrad(..) => "conv_dgrad",
            Function::MaxPool(..) => "max_pool",
            Function::FractionalMaxPool(..) => "fractional_max_pool",
            Function::AveragePool(..) => "avg_pool",
            Function::Resample(_) => "resample",
            Function::Pad { .. } => "pad",
            Function::Activation(_) => "activation",
            Function::Softplus { .. } => "softplus",
            Function::Composed(f) => f.name(),
            Function::Prelu => "prelu",
            Function::RandomPrelu { .. } => "rrelu",
            Function::Glu(_) => "glu",
            Function::GluBackward(_) => "glu_backward",
            Function::Dropout(_) => "dropout",
            Function::Binary(_) => "binary",
            Function::Select => "select",
            Function::Cast(_) => "cast",
            Function::Reduce(..) => "reduce",
            Function::Scan(..) => "scan",
            Function::ScanWithPlace(..) => "scan_with_place",
            Function::Shuffle(_) => "shuffle",
            Function::ResponseNorm(_) => "local_response_norm",
            Function::Softmax(..) => "softmax",
            Function::Softmin(_) => "softmin",
            Function::Norm { .. } => "norm",
            Function::CrossEntropy(..) => "cross_entropy",
            Function::ClassLoss(..) => "class_loss",
            Function::ElementLoss(..) => "element_loss",
            Function::LinearLoss(_) => "linear_loss",
            Function::Scaled(_) => "scaled",
            Function::BatchNorm(_) => "batch_norm",
            Function::BatchNormBackward(_) => "batch_norm_backward",
            Function::BatchNormInference { .. } => "batch_norm_inference",
            Function::ConvBatchNorm { .. } => "conv_batch_norm",
            Function::ConvBatchNormBackward(_) => "conv_batch_norm_backward",
            Function::Mlp { .. } => "mlp",
            Function::MlpBackward(_) => "mlp_backward",
            Function::GatedMlp { .. } => "gated_mlp",
            Function::GatedMlpBackward(_) => "gated_mlp_backward",
            Function::Rotary { .. } => "rotary",
            Function::Attention(_) => "attention",
            Function::LatentAttention(..) => "latent_attention",
            Function::AttentionBackward(_) => "attention_backward",
            Function::AttentionBlock(_) => "attention_block",
            Function::Reshape(_) => "reshape",
            Function::WindowSums(_) => "window_sums",
            Function::WindowPick(_) => "window_pick",
            Function::Gradient(_) => "gradient",
            Function::Fused(_) => "fused",
        }
    }
}

/// A tensor that is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Input {
    /// Its element type.
    pub dtype: DType,
    /// Its dims and strides.
    pub layout: Layout,
    /// What its address is a multiple of, in bytes, where that is to be declared.
    pub alignment_bytes: Option<u64>,
}

/// A tensor that is written, as the caller is to see it: the graph may know its memory under other dims.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Its uid in the graph.
    pub uid: Uid,
    /// Its element type.
    pub dtype: DType,
    /// Its dims and strides.
    pub layout: Layout,
    /// The place of the tensor read in whose memory it is to lie, on a device that allows it; elsewhere it is copied there.
    pub in_place_of: Option<usize>,
}

/// A function's graph, and which of its tensors is which.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The graph.
    pub graph: Graph,
    /// What is bound to the tensors that the function reads: a uid, and the place of the tensor. One that several functions read stands once for each
    /// of them ([`draw_together`]).
    pub inputs: Vec<(Uid, usize)>,
    /// What it writes, in order.
    pub results: Vec<Outcome>,
}

/// The graph of a function of such tensors, in the order in which the function names them; those behind the last are missing.
///
/// # Errors
/// [`Error::Graph`] where an op refuses, [`Error::Operand`] for a tensor that the function cannot take.
pub fn draw(function: &Function, given: &[Option<Input>]) -> Result<Recipe, Error> {
    Drawing::of(function, given, None)?.finish()
}

/// Several functions of the same tensors as one graph, whose results stand one behind the other: one plan, one execution, one workspace. A layer's
/// gradients with respect to its input, its filter and its bias are such.
///
/// ```
/// use verdigris::recipe::{Function, Gradient, Input, Saved, draw_together};
/// use verdigris::{DType, Layout, Precision, UnaryOp};
///
/// let tensor = |dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype: DType::F32, layout, alignment_bytes: None }));
/// let (dy, x, w) = (tensor(&[8, 4])?, tensor(&[8, 3])?, tensor(&[4, 3])?);
/// let gradients = [0, 1].map(|with_respect_to| {
///     let saved = vec![Saved::Tensor(0), Saved::Tensor(1)];
///     let of = Function::Linear(Precision::Fp32, UnaryOp::Identity);
///     Function::Gradient(Box::new(Gradient { of, with_respect_to, saved, dims: None, dtype: None }))
/// });
/// let recipe = draw_together(&gradients, &[dy, x, w])?;
/// assert_eq!(recipe.results.iter().map(|result| result.layout.dims().to_vec()).collect::<Vec<_>>(), [[8, 3], [4, 3]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`draw`], of the first function that has one; no function at all.
pub fn draw_together(functions: &[Function], given: &[Option<Input>]) -> Result<Recipe, Error> {
    let Some((first, others)) = functions.split_first() else { return Err(Error::NoResult) };
    if let Some(drawing) = gradient::draw_as_one(functions, given)? {
        return drawing.finish();
    }
    others.iter().try_fold(draw(first, given)?, |together, function| {
        let Recipe { graph, inputs, results } = draw(function, given)?;
        let (graph, renamed) = together.graph.beside(graph);
        let new: HashMap<Uid, Uid> = renamed.into_iter().collect();
        let rename = |uid: Uid| new.get(&uid).copied().unwrap_or(uid);
        let inputs = inputs.into_iter().map(|(uid, place)| (rename(uid), place));
        let results = results.into_iter().map(|result| Outcome { uid: rename(result.uid), ..result });
        Ok(Recipe {
            graph,
            inputs: together.inputs.into_iter().chain(inputs).collect(),
            results: together.results.into_iter().chain(results).collect(),
        })
    })
}

/// The operands do not suit.
fn unfit(what: impl std::fmt::Display, rule: &'static str) -> Error {
    Error::Operand { what: what.to_string(), rule }
}

/// A tensor of the caller as the graph sees it.
#[derive(Clone, Copy)]
struct Seen {
    uid: Uid,
    view: View,
}

/// A result, and how the graph sees what the caller gets.
struct Stored {
    outcome: Outcome,
    view: View,
}

/// A function's graph while it is drawn.
struct Drawing {
    g: GraphBuilder,
    given: [Option<Input>; MAX_INPUTS],
    inputs: [Option<Seen>; MAX_INPUTS],
    results: Vec<Stored>,
    /// The tensor whose gradient is asked for.
    wanted: Option<usize>,
}

/// A vector over the channels of a tensor.
fn channels(vector: Input, of: Input, name: &str) -> Result<View, Error> {
    let (dims, rank) = (vector.layout.dims(), of.layout.rank());
    if of.layout.dims().get(1).is_none_or(|channels| dims != [*channels]) {
        return Err(unfit(
            format_args!("a {name} of dims {dims:?} for {:?}", of.layout.dims()),
            "it has one dim, with an element for each channel",
        ));
    }
    Ok(View::Channel { rank, axis: 1 })
}

impl Drawing {
    /// The graph, what is bound and what it writes.
    fn finish(self) -> Result<Recipe, Error> {
        let inputs = self.inputs.iter().enumerate().filter_map(|(place, input)| Some((input.as_ref()?.uid, place))).collect();
        let results = self.results.into_iter().map(|result| result.outcome).collect();
        Ok(Recipe { graph: self.g.finish()?, inputs, results })
    }

    /// The drawing of a function; `wanted` is the tensor whose gradient is taken through it.
    fn of(function: &Function, given: &[Option<Input>], wanted: Option<usize>) -> Result<Drawing, Error> {
        let mut room = [None; MAX_INPUTS];
        let Some(places) = room.get_mut(..given.len()) else {
            return Err(unfit(format_args!("{} tensors", given.len()), "a function reads at most 15"));
        };
        places.copy_from_slice(given);
        let g = GraphBuilder::new(function.name());
        let mut d = Drawing { g, given: room, inputs: [None; MAX_INPUTS], results: Vec::new(), wanted };
        match function {
            Function::Matmul(_) | Function::Linear(..) => d.products(function)?,
            Function::ConvFprop(..) | Function::ConvNorm { .. } | Function::ConvDgrad(..) => d.convolutions(function)?,
            Function::MaxPool(..) | Function::FractionalMaxPool(..) | Function::AveragePool(..) => d.pools(function)?,
            Function::WindowSums(_) | Function::WindowPick(_) => d.windows(function)?,
            Function::Resample(sampling) => d.resample(sampling)?,
            Function::Pad { before, after, value } => d.pad(before, after, value.0)?,
            Function::CrossEntropy(spec, form) => d.loss(*spec, *form)?,
            Function::ClassLoss(spec, targets) => d.class_loss(*spec, *targets)?,
            Function::LinearLoss(spec) => d.linear_loss(spec)?,
            Function::Scaled(dtype) => d.scaled(*dtype)?,
            Function::ElementLoss(loss, reduction) => d.element_loss(*loss, *reduction)?,
            Function::BatchNorm(_) | Function::BatchNormBackward(_) | Function::BatchNormInference { .. } => d.batch_norms(function)?,
            Function::ConvBatchNorm { .. } | Function::ConvBatchNormBackward(_) => d.conv_batch_norms(function)?,
            Function::Mlp { .. } | Function::MlpBackward(_) => d.mlps(function)?,
            Function::GatedMlp { precision, activation, keeps } => d.gated_mlp(*precision, *activation, *keeps)?,
            Function::GatedMlpBackward(spec) => d.gated_mlp_backward(spec)?,
            Function::Rotary { is_gradient } => d.rotary(*is_gradient)?,
            Function::Attention(_) | Function::LatentAttention(..) | Function::AttentionBackward(_) => d.attentions(function)?,
            Function::AttentionBlock(block) => d.attention_block(block)?,
            Function::Composed(f) => d.composed(*f)?,
            Function::Prelu => d.prelu()?,
            Function::RandomPrelu { lower, upper } => d.random_prelu(lower.0, upper.0)?,
            Function::Glu(axis) => d.glu(*axis as usize)?,
            Function::GluBackward(axis) => d.glu_backward(*axis as usize)?,
            Function::Dropout(spec) => d.dropout(*spec)?,
            Function::Gradient(gradient) => d = gradient::draw(gradient, d.given)?,
            Function::Fused(fused) => d = fused::draw(fused, given)?,
            _ => d.elements(function)?,
        }
        Ok(d)
    }

    fn given(&self, place: usize) -> Result<Input, Error> {
        self.given[place].ok_or_else(|| unfit(format_args!("tensor {place} of the call is missing"), "only a bias may be"))
    }

    /// The tensor as it is given.
    fn input(&mut self, place: usize, name: &str) -> Result<Uid, Error> {
        self.input_as(place, name, View::Same)
    }

    /// The tensor under a view; with a copy where its strides do not have it.
    fn input_as(&mut self, place: usize, name: &str, view: View) -> Result<Uid, Error> {
        let given = self.given(place)?;
        let (seen, uid) = self.tensor_as(given, name, view)?;
        self.inputs[place] = Some(seen);
        Ok(uid)
    }

    /// A tensor of the caller under a view: what is bound, and the tensor that has the view's dims.
    fn tensor_as(&mut self, given: Input, name: &str, view: View) -> Result<(Seen, Uid), Error> {
        let Input { dtype, layout, alignment_bytes } = given;
        let seen = view.of(&layout)?;
        let uid = self.g.tensor(name, dtype, seen.unwrap_or(layout));
        if let Some(bytes) = alignment_bytes {
            self.g.align(uid, bytes.max(dtype.bytes() as u64))?;
        }
        if seen.is_some() {
            return Ok((Seen { uid, view }, uid));
        }
        let whole = in_format(layout.dims(), false)?;
        let dims = View::Matrix { is_turned: false }.of(&whole)?.unwrap_or(whole);
        let mut matrix = self.g.reshape("fold", uid, dims.dims())?;
        self.g.round_to(matrix, dtype)?;
        if view == (View::Matrix { is_turned: true }) {
            matrix = self.g.transpose("turned", matrix, &[1, 0])?;
        }
        Ok((Seen { uid, view: View::Same }, matrix))
    }

    /// Adds a bias of one element a channel, where there is one, and applies an activation.
    fn biased(&mut self, place: usize, y: Uid, axis: usize, activation: UnaryOp) -> Result<Uid, Error> {
        // The gradient of a sum is the same for both terms, so gradients of other tensors do not need the bias. With it, dy would be cast to
        // the accumulator's type and back to the operands' type: one more launch.
        let is_passed_by = activation == UnaryOp::Identity && self.wanted.is_some_and(|wanted| wanted != place);
        if self.given[place].is_none() || is_passed_by {
            return self.activated(activation, y);
        }
        let rank = self.dims_of(y).len();
        let bias = self.input_as(place, "bias", View::Channel { rank, axis })?;
        let sum = self.g.binary("bias", BinaryOp::Add, y, bias)?;
        self.activated(activation, sum)
    }

    fn activated(&mut self, f: UnaryOp, y: Uid) -> Result<Uid, Error> {
        Ok(if f == UnaryOp::Identity { y } else { self.g.unary("activation", f, y)? })
    }

    fn dims_of(&self, uid: Uid) -> Vec<u64> {
        self.g.dims(uid).unwrap_or_default()
    }

    /// Stores a result, which the caller sees as the graph does.
    fn store(&mut self, uid: Uid, name: &str, dtype: DType, layout: Layout) -> Result<(), Error> {
        self.store_as(uid, name, dtype, layout, View::Same)
    }

    /// Stores a result that the caller sees in this layout, and the graph under a view.
    fn store_as(&mut self, uid: Uid, name: &str, dtype: DType, layout: Layout, view: View) -> Result<(), Error> {
        let stored = view.of(&layout)?.ok_or_else(|| unfit(format_args!("`{name}` of {layout}"), "a result is packed"))?;
        self.g.store_as(uid, name, dtype, stored)?;
        self.results.push(Stored { outcome: Outcome { uid, dtype, layout, in_place_of: None }, view });
        Ok(())
    }

    /// Stores a result in the place of a tensor that is read under a view.
    fn store_in_place_of(&mut self, uid: Uid, place: usize, name: &str, view: View) -> Result<(), Error> {
        let Input { dtype, layout, alignment_bytes } = self.given(place)?;
        self.store_as(uid, name, dtype, layout, view)?;
        if let Some(bytes) = alignment_bytes {
            self.g.align(uid, bytes.max(dtype.bytes() as u64))?;
        }
        if let Some(stored) = self.results.last_mut() {
            stored.outcome.in_place_of = Some(place);
        }
        Ok(())
    }

    /// In channels-last order if asked for, else row-major.
    fn store_in(&mut self, uid: Uid, name: &str, dtype: DType, channels_last: bool) -> Result<(), Error> {
        let layout = in_format(&self.dims_of(uid), channels_last)?;
        self.store(uid, name, dtype, layout)
    }

    /// In the order of another tensor's dims.
    fn store_like(&mut self, uid: Uid, name: &str, dtype: DType, like: &Layout) -> Result<(), Error> {
        let layout = in_order_of(like, &self.dims_of(uid))?;
        self.store(uid, name, dtype, layout)
    }

    fn elements(&mut self, function: &Function) -> Result<(), Error> {
        let given = self.given(0)?;
        match *function {
            Function::Activation(f) => {
                let x = self.input(0, "x")?;
                let y = self.g.unary("activation", f, x)?;
                self.store(y, "y", given.dtype, like(&given.layout)?)
            }
            Function::Softplus { beta, threshold } => {
                let x = self.input(0, "x")?;
                let y = self.softplus(x, given.dtype, beta.0, threshold.0)?;
                self.store(y, "y", given.dtype, like(&given.layout)?)
            }
            Function::Binary(f) => {
                let (x, z) = (self.input(0, "x")?, self.input(1, "z")?);
                let y = self.g.binary("binary", f, x, z)?;
                self.store_like(y, "y", given.dtype, &given.layout)
            }
            Function::Select => {
                let (x, z, t) = (self.input(0, "x")?, self.input(1, "z")?, self.input(2, "t")?);
                let y = self.g.ternary("select", TernaryOp::Select, x, z, t)?;
                self.store_like(y, "y", given.dtype, &given.layout)
            }
            Function::Cast(dtype) => {
                let x = self.input(0, "x")?;
                let y = self.g.unary("cast", UnaryOp::Identity, x)?;
                self.store(y, "y", dtype, like(&given.layout)?)
            }
            Function::Reduce(f, ref axes) => {
                let x = self.input(0, "x")?;
                let y = self.g.reduction("reduce", f, x, axes)?;
                self.store_like(y, "y", given.dtype, &given.layout)
            }
            Function::Scan(f, axis, reverse) => {
                let view = if given.layout.rank() == 0 { View::One { rank: 1 } } else { View::Same };
                let x = self.input_as(0, "x", view)?;
                let y = self.g.scan("scan", f, x, axis, false, reverse)?;
                self.store_as(y, "y", given.dtype, like(&given.layout)?, view)
            }
            Function::ScanWithPlace(f, axis) => {
                let view = if given.layout.rank() == 0 { View::One { rank: 1 } } else { View::Same };
                let x = self.input_as(0, "x", view)?;
                let (y, place) = self.g.scan_with_place("scan", f, x, axis)?;
                self.store_as(y, "y", given.dtype, like(&given.layout)?, view)?;
                self.store_as(place, "place", DType::I64, like(&given.layout)?, view)
            }
            Function::Shuffle(shuffle) => {
                let x = self.input(0, "x")?;
                let y = match shuffle {
                    Shuffle::ToPixels { factor } => self.g.pixel_shuffle("shuffle", x, factor)?,
                    Shuffle::ToChannels { factor } => self.g.pixel_unshuffle("shuffle", x, factor)?,
                    Shuffle::Channels { groups } => self.g.channel_shuffle("shuffle", x, groups)?,
                };
                self.store_in(y, "y", given.dtype, is_channels_last(&given.layout))
            }
            Function::ResponseNorm(norm) => {
                let x = self.input(0, "x")?;
                let y = self.g.local_response_norm("norm", x, norm)?;
                self.store(y, "y", given.dtype, like(&given.layout)?)
            }
            Function::Softmax(axis, log) => {
                let view = if given.layout.rank() == 0 { View::One { rank: 1 } } else { View::Same };
                let x = self.input_as(0, "x", view)?;
                let y = self.g.softmax("softmax", x, axis, log)?;
                self.store_as(y, "y", given.dtype, like(&given.layout)?, view)
            }
            Function::Softmin(axis) => {
                let view = if given.layout.rank() == 0 { View::One { rank: 1 } } else { View::Same };
                let x = self.input_as(0, "x", view)?;
                // Which is exact, so that the gradient follows from the result.
                let turned = self.g.unary("turned", UnaryOp::Neg, x)?;
                self.g.round_to(turned, given.dtype)?;
                let y = self.g.softmax("softmin", turned, axis, false)?;
                self.store_as(y, "y", given.dtype, like(&given.layout)?, view)
            }
            Function::Norm { ref spec, per_channel } => {
                let x = self.input(0, "x")?;
                let mut vectors = [None; 2];
                for (place, (vector, name)) in vectors.iter_mut().zip(["scale", "bias"]).enumerate() {
                    if let Some(given_vector) = self.given[place + 1] {
                        let view = if per_channel { channels(given_vector, given, name)? } else { View::Same };
                        *vector = Some(self.input_as(place + 1, name, view)?);
                    }
                }
                let [scale, bias] = vectors;
                let y = self.g.normalize("norm", Normalize { scale, bias, ..Normalize::new(spec.clone(), x) })?.y;
                self.store(y, "y", given.dtype, like(&given.layout)?)
            }
            Function::Reshape(ref dims) => {
                let x = self.input(0, "x")?;
                let y = self.g.reshape("reshape", x, dims)?;
                self.store_in(y, "y", given.dtype, false)
            }
            _ => Ok(()),
        }
    }

    /// Softplus with its threshold. In types narrower than f64 a threshold of 17 or more is left out: beyond it the result and its derivative
    /// change by less than e⁻¹⁷ < 2⁻²⁴ of their value, which rounding hides.
    fn softplus(&mut self, x: Uid, dtype: DType, beta: f64, threshold: f64) -> Result<Uid, Error> {
        if beta == 0.0 || !beta.is_finite() || threshold.is_nan() {
            let what = format!("softplus of beta {beta} and threshold {threshold}");
            return Err(unfit(what, "beta is finite and not 0, the threshold is a number"));
        }
        // f(x; −b) = −f(−x; b).
        let bend = UnaryOp::Softplus { beta: Real(beta.abs()) };
        let mut y = if beta > 0.0 {
            self.g.unary("softplus", bend, x)?
        } else {
            let turned = self.g.unary("softplus", UnaryOp::Neg, x)?;
            let below = self.g.unary("softplus", bend, turned)?;
            self.g.unary("softplus", UnaryOp::Neg, below)?
        };
        if threshold.is_finite() && (dtype == DType::F64 || threshold < 17.0) || threshold == f64::NEG_INFINITY {
            let is_above = if threshold.is_finite() {
                let above = self.g.unary("threshold", UnaryOp::Affine { scale: Real(beta), shift: Real(-threshold) }, x)?;
                let zero = self.g.unary("threshold", UnaryOp::Affine { scale: Real(0.0), shift: Real(0.0) }, above)?;
                self.g.binary("threshold", BinaryOp::Gt, above, zero)?
            } else {
                self.g.binary("threshold", BinaryOp::Eq, x, x)?
            };
            y = self.g.ternary("softplus", TernaryOp::Select, x, y, is_above)?;
        }
        Ok(y)
    }
}
