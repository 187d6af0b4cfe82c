//! Functions by number, and what their attributes say in the library's words.
//!
//! Attributes are words `name=value` with spaces between; lists have commas. Each function's line says which it has. What it computes and
//! how its results lie is told by [`verdigris::recipe`].

use pyo3::PyResult;
use verdigris::recipe::{
    self, AttentionBlock, AttentionGradient, BatchNormGradient, BatchNormSpec, ConvBatchNormGradient, Convolution, Divisor, Dropout,
    ElementLoss, Extents, GatedMlpGradient, Gradient, Input, LinearLoss, LossForm, MAX_INPUTS, MlpGradient, Saved, Shuffle, Targets,
};
use verdigris_graph::{
    AttentionSpec, Causal, CrossEntropySpec, LossReduction, NormKind, NormSpec, PoolWindows, Precision, Real, ResponseNorm, Sampling,
    ScanOp, UnaryOp,
};
use verdigris_tensor::DType;

use super::activation::{activation_of, unary};
use super::autocast::Autocast;
use super::{MAX_GRADIENTS, fused};
use crate::errors::{Kind, raise};
use crate::memory::unfit;
use crate::policy::Policy;

/// A function of tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Function {
    /// `x, w, bias?` → y. `stride= padding= dilation= groups=`, `after=` where the padding's sides differ.
    ConvFprop,
    /// `x, w, bias?, mean, variance, scale?, shift?, addend?` → y. As `ConvFprop` with `eps=`, then `|` and the attributes of an activation, if there is
    /// one. For inference: it has no gradient.
    ConvNorm,
    /// `y, w, bias?` → x; extra: the spatial dims of x. As `ConvFprop`. Transposed convolution.
    ConvDgrad,
    /// `x [..., k], w [n, k], bias?` → `[..., n]`.
    Linear,
    /// `x` → y and the index of each maximum. `window= stride= padding= after= dilation=` or `adaptive=`; `index=i32|i64`.
    MaxPool,
    /// `x` → y. As `MaxPool` without an index, and what is divided by: `pad=0|1`, whether padding counts, within `within=` behind the last
    /// element; or `divisor=`.
    AveragePool,
    /// `x` → f(x). `f=` and its attributes: a function of the graph's, `softplus` with a `threshold=`, or one that is composed (`selu`, `celu alpha=`, `log_sigmoid`,
    /// `hard_shrink lambda=`, `soft_shrink lambda=`, `tanh_shrink`, `soft_sign`, `threshold bound= value=`).
    Activation,
    /// `x` → softmax along `axis=`, its logarithm with `log=1`; that of −x with `negative=1`.
    Softmax,
    /// `x, scale?, bias?` → x normalized. `kind=layer|rms axes= groups= eps=`; `channel=1`: scale and bias have an element for each channel.
    Norm,
    /// `logits, labels` → loss, and each row's log-sum-exp in f32 or f64. `axis= smoothing= ignore= reduction=`.
    CrossEntropy,
    /// `logits, targets, weights?` → loss. As `CrossEntropy`, and `targets=labels|log_labels|probabilities`.
    ClassLoss,
    /// `dy, …` → the gradient of a function with respect to one of its tensors, from what [`Function::saves`] says; extra: the dims of that
    /// tensor where it is not saved. `of= wrt=`, then `|` and the attributes of the function. With several places behind `wrt=` as many gradients,
    /// computed together; each of those tensors is saved. `as1=` names the element type of the gradient of tensor 1 where it is not the tensor's.
    Gradient,
    /// `x, scale?, bias?, add?, running_mean?, running_var?` → y, and of each channel its mean and `1 / √(variance + eps)`; the running statistics are
    /// replaced. `eps= momentum= relu=0|1`, then `|` and the attributes of another activation than ReLU, if there is one.
    BatchNorm,
    /// `dy, x, scale?, mean, inv, y or bias` → the gradients of `x`, the scale, the bias and what was added, each with a 1 in `wanted=1110`. `relu=0|1`,
    /// `result=1` where the last tensor is y, and an activation as `BatchNorm` has it.
    BatchNormBackward,
    /// `x, mean, var, scale?, bias?, add?` → y. `eps= relu=0|1`, and an activation as `BatchNorm` has it.
    BatchNormInference,
    /// `x, w, scale?, bias?, add?, running_mean?, running_var?` → y, of each channel its mean and `1 / √(variance + eps)`, and the convolution's result; the
    /// running statistics are replaced. As `ConvFprop`, and as `BatchNorm`.
    ConvBatchNorm,
    /// `dy, x, w, the convolution's result, scale?, mean, inv, y or bias` → the gradients of `x`, the filter, the scale, the bias and what was added, each with
    /// a 1 in `wanted=11110`. As `ConvBatchNorm`, `result=1` where the last tensor is y, and `filter=` with the element type of the filter's gradient where it is
    /// not the filter's.
    ConvBatchNormBackward,
    /// `q [b, h, s_q, d], k [b, h_kv, s_kv, d], v [b, h_kv, s_kv, d_v], bias or mask?, slopes?, q_offsets?, kv_offsets?, kv_lengths?, page_table?, dropout state?, q_descale?, k_descale?, v_descale?, block_map?, mask_blocks?, sinks?` → o, in bf16 of queries of 8 bits, and each
    /// query's log-sum-exp. Paged keys and values are `[pages, h_kv, page_size, …]`.
    /// `scale=`, `causal=none|top_left|bottom_right left= right= cap= longest_q= longest_kv= dropout=`, each left out where there is none. With `values=` in
    /// the place of `v`, values are so many elements of the keys, the first ones. `cache=1` says that they are a cache's, which changes no result: there is no gradient then.
    Attention,
    /// `d_o, q, k, v, o, log_sum_exp, bias or mask?, slopes?, q_offsets?, kv_offsets?, kv_lengths?, dropout state?, block_map?, mask_blocks?, sinks?` → the gradients of `q`, `k`, `v`, the bias and the sinks, each with a 1 in `wanted=11100`. As `Attention`.
    AttentionBackward,
    /// `x, state` → x with elements dropped. `p=`, `channels=1` for whole channels, `moments=1` where mean and variance stay. Its gradient is the same call with dy in the
    /// place of x and `gradient=1`.
    Dropout,
    /// `x, target, weight?, positive weight?` → loss. `loss=squared|absolute|huber|smooth_l1|binary_cross_entropy|likelihood|soft_margin|divergence`, `bend=` of the two that have one,
    /// `log=1` for targets of a divergence that are logarithms; `reduction=`.
    ElementLoss,
    /// `x [..., k], w [h, k], bias?, w' [n, h], bias'?` → `[..., n]`: two linear layers with an activation between them. `f=` and its attributes. For inference:
    /// it has no gradient.
    MlpInference,
    /// As `MlpInference`, and the hidden values before and behind the activation.
    Mlp,
    /// `dy, x, w, w', the hidden values before and behind the activation` → the gradients of `x`, `w`, the bias, `w'` and its bias, each with a 1 behind `wanted=11111`,
    /// then `as1=` with the element type of the gradient of tensor 1 where it is not that of `x`, then `|` and the attributes of `Mlp`.
    MlpBackward,
    /// `x [..., k], w [h, k], w' [h, k], w'' [n, h], addend [..., n]?` → `[..., n]`: two linear layers of x, the first one's result through an activation times the
    /// other's, and a linear layer of that, to which the addend is added. `f=` and its attributes. For inference: it has no gradient.
    GatedMlpInference,
    /// As `GatedMlpInference`, and what the first two layers gave and the third was given.
    GatedMlp,
    /// `dy, x, w, w', w''`, and what was kept of the call → the gradients of `x` and of the weights, each with a 1 behind `wanted=1111`, then `as1=` with the element type of
    /// the gradient of tensor 1 where it is not that of `x`, then `|` and the attributes of `GatedMlp`.
    GatedMlpBackward,
    /// `x, cos, sin` → x with each pair of elements, one of each half of the last dim, turned by its angle; with `gradient=1` the gradient of x from that of the result.
    Rotary,
    /// `x [b, s, c], w [(h + 2 h_kv) · d, c], bias?, w' [n, h · d], bias'?, residual?, cos?, sin?, k_cache?, v_cache?, kv_lengths?, bias or mask?, slopes?` → `[b, s, n]`, with
    /// caches these too, in their place. As `Attention`, and `heads= kv_heads= interleaved=0|1 first=0|1`, the latter 1 where positions stand before the batch. For
    /// inference: it has no gradient.
    AttentionBlock,
    /// `x` → y. `mode=nearest|nearest-exact|linear|cubic corners=0|1 out= factors=`, the latter left out where coordinates follow from the sizes; or
    /// `border=reflect|replicate|circular before= after=`.
    Resample,
    /// `x` → y. `before= after= value=`: one number for each dim, below 0 for elements that are left out.
    Pad,
    /// `x` → its scan along `axis=`. `f=add|mul|log_sum_exp`, `reverse=1` from the last element to the first.
    Scan,
    /// `x` → its running extremum along `axis=`, and where each stands, in i64. `f=min|max`.
    ScanWithPlace,
    /// `x` → y. `pixels=`, `channels=` (a factor, the dims that grow) or `groups=`.
    Shuffle,
    /// `x` → y. `size= alpha= beta= k=`.
    ResponseNorm,
    /// The tensors of a function, then one for each step that reads one → what the steps make of the function's first result; extra: the dims of the function
    /// where it has them. `of= tensors= type=` (the function, how many tensors are its, the element type of the result), then `;` and a step, as often as there
    /// are steps, then `;` and the attributes of the function. A step is a function of one (`f=` and its attributes), of two (`b=`, with `value=right` where the
    /// value is the right operand) or the gradient of a function of one (`d=` and its attributes; the value is dy). It has no gradient.
    Fused,
    /// As `Fused`, and the function's own result.
    FusedKeeping,
    /// `x [rows, k], w [classes, k], bias?, labels [rows] or probabilities [rows, classes], share?, weights?, dloss?`, then where the losses and the gradients of `x`, `w`,
    /// the bias and the probabilities go, the latter four each with a 1 in `wanted=1111` → nothing. `targets= smoothing= ignore= z= cap= add=`, the latter 1 where gradients are
    /// added to what is there.
    LinearLoss,
    /// `x, factor` → x times the factor. `as=` names the element type.
    Scaled,
    /// `x` → the sums over its last `sum=` dims, row-major.
    WindowSums,
    /// `x, index, positions` → the sums over the last `sum=` dims of what has the position that the index says, row-major.
    WindowPick,
    /// `x` → y, as `MaxPool` without an index: for calls whose gradient nobody asks for.
    MaxPoolValues,
    /// `x, samples` → y and the index of each maximum. `window= fractional=`, the latter the size of y, `index=i32|i64`.
    FractionalMaxPool,
    /// `x, weight` → x where it is above 0, else the weight times x.
    Prelu,
    /// `x, state` → x where it is above 0, else a random slope times x. `lower= upper=`.
    Rrelu,
    /// `x` → the first half along `axis=` times the sigmoid of the second one.
    Glu,
    /// `dy, x` → the gradient of x of the same. `axis=`.
    GluBackward,
}

impl Function {
    pub(crate) const ALL: [Function; 47] = [
        Function::ConvFprop,
        Function::ConvNorm,
        Function::ConvDgrad,
        Function::Linear,
        Function::MaxPool,
        Function::AveragePool,
        Function::Activation,
        Function::Softmax,
        Function::Norm,
        Function::CrossEntropy,
        Function::ClassLoss,
        Function::Gradient,
        Function::BatchNorm,
        Function::BatchNormBackward,
        Function::BatchNormInference,
        Function::ConvBatchNorm,
        Function::ConvBatchNormBackward,
        Function::Attention,
        Function::AttentionBackward,
        Function::Dropout,
        Function::ElementLoss,
        Function::MlpInference,
        Function::Mlp,
        Function::MlpBackward,
        Function::GatedMlpInference,
        Function::GatedMlp,
        Function::GatedMlpBackward,
        Function::Rotary,
        Function::AttentionBlock,
        Function::Resample,
        Function::Pad,
        Function::Scan,
        Function::ScanWithPlace,
        Function::Shuffle,
        Function::ResponseNorm,
        Function::Fused,
        Function::FusedKeeping,
        Function::LinearLoss,
        Function::Scaled,
        Function::WindowSums,
        Function::WindowPick,
        Function::MaxPoolValues,
        Function::FractionalMaxPool,
        Function::Prelu,
        Function::Rrelu,
        Function::Glu,
        Function::GluBackward,
    ];

    pub(crate) fn numbered(number: u8) -> Option<Function> {
        Function::ALL.get(usize::from(number)).copied()
    }

    /// How many tensors it reads at the most, and whether dims come behind its attributes.
    pub(crate) const fn signature(self) -> (usize, bool) {
        match self {
            Function::MaxPool
            | Function::MaxPoolValues
            | Function::AveragePool
            | Function::Activation
            | Function::Softmax
            | Function::Resample
            | Function::Pad
            | Function::Scan
            | Function::ScanWithPlace
            | Function::Shuffle
            | Function::WindowSums
            | Function::Glu
            | Function::ResponseNorm => (1, false),
            Function::CrossEntropy | Function::Dropout | Function::Scaled | Function::FractionalMaxPool => (2, false),
            Function::Prelu | Function::Rrelu | Function::GluBackward => (2, false),
            Function::ConvFprop | Function::Linear | Function::ClassLoss | Function::Norm | Function::WindowPick | Function::Rotary => {
                (3, false)
            }
            Function::ConvNorm | Function::ConvBatchNormBackward | Function::GatedMlpBackward => (8, false),
            Function::ConvBatchNorm => (7, false),
            Function::Attention => (16, false),
            Function::AttentionBlock => (13, false),
            Function::AttentionBackward => (15, false),
            Function::LinearLoss => (12, false),
            Function::ElementLoss => (4, false),
            Function::MlpInference | Function::Mlp | Function::GatedMlpInference | Function::GatedMlp => (5, false),
            Function::ConvDgrad => (3, true),
            Function::MlpBackward | Function::BatchNorm | Function::BatchNormBackward | Function::BatchNormInference => (6, false),
            // What comes in, and five tensors that were saved.
            Function::Gradient => (6, true),
            Function::Fused | Function::FusedKeeping => (fused::TENSORS, true),
        }
    }

    /// What autocast makes of its floating-point tensors; `None` where they stay as they are. PyTorch's own lists.
    pub(crate) const fn autocast(self) -> Option<Autocast> {
        match self {
            Function::ConvFprop | Function::ConvDgrad | Function::Linear | Function::ConvNorm | Function::ConvBatchNorm => {
                Some(Autocast::LowerOperands)
            }
            Function::Prelu => Some(Autocast::LowerOperands),
            Function::MlpInference | Function::Mlp => Some(Autocast::LowerLayers),
            Function::GatedMlpInference | Function::GatedMlp => Some(Autocast::LowerAttended),
            Function::Attention => Some(Autocast::LowerAttended),
            Function::Softmax
            | Function::Norm
            | Function::CrossEntropy
            | Function::ClassLoss
            | Function::ElementLoss
            | Function::Scan
            | Function::ResponseNorm => Some(Autocast::F32),
            Function::MaxPool | Function::AveragePool | Function::Activation | Function::Dropout | Function::Gradient => None,
            Function::Resample | Function::Pad | Function::Shuffle | Function::ScanWithPlace => None,
            Function::MaxPoolValues | Function::FractionalMaxPool | Function::Rrelu | Function::Glu | Function::GluBackward => None,
            // Statistics are f32 whatever the input is.
            Function::BatchNorm | Function::BatchNormBackward | Function::BatchNormInference => None,
            // Its tensors are what the forward call kept, cast already.
            Function::ConvBatchNormBackward | Function::AttentionBackward | Function::MlpBackward | Function::GatedMlpBackward => None,
            // Angles are of the type of what is turned; what a block is given has been cast.
            Function::Rotary | Function::AttentionBlock => None,
            // Compilers make such calls, of what autocast has cast already.
            Function::Fused | Function::FusedKeeping => None,
            // Of rows that its caller has cast.
            Function::LinearLoss | Function::Scaled | Function::WindowSums | Function::WindowPick => None,
        }
    }

    /// Whether its differentiable call casts parameters itself, so that their gradients come in their own types without a node for each cast.
    pub(crate) const fn casts_parameters(self) -> bool {
        matches!(
            self,
            Function::ConvFprop
                | Function::ConvDgrad
                | Function::Linear
                | Function::Norm
                | Function::Prelu
                | Function::ConvBatchNorm
                | Function::Mlp
                | Function::GatedMlp
        )
    }

    /// What the gradients of its first result are computed from, beside the gradient of that.
    pub(crate) const fn saves(self) -> &'static [Saved] {
        use Saved::{Result, Tensor};
        match self {
            Function::ConvFprop | Function::ConvDgrad | Function::Linear | Function::ClassLoss | Function::Norm => {
                &[Tensor(0), Tensor(1), Tensor(2)]
            }
            Function::MaxPool => &[Result(1)],
            // The gradient reads no samples, but is drawn from the call.
            Function::FractionalMaxPool => &[Tensor(1), Result(1)],
            Function::AveragePool | Function::ConvNorm | Function::Resample | Function::Pad | Function::Shuffle => &[],
            // Their gradients are functions of their own, or none.
            Function::BatchNorm | Function::BatchNormBackward | Function::ConvBatchNorm | Function::ConvBatchNormBackward => &[],
            Function::Attention | Function::AttentionBackward | Function::Dropout | Function::ScanWithPlace => &[],
            Function::Glu | Function::GluBackward => &[],
            Function::MlpInference | Function::Mlp | Function::MlpBackward => &[],
            Function::GatedMlpInference | Function::GatedMlp | Function::GatedMlpBackward | Function::Rotary | Function::AttentionBlock => {
                &[]
            }
            Function::Fused | Function::FusedKeeping => &[],
            Function::LinearLoss | Function::Scaled | Function::WindowSums | Function::WindowPick | Function::MaxPoolValues => &[],
            Function::BatchNormInference => &[Tensor(0), Tensor(1), Tensor(2), Tensor(3), Tensor(4)],
            Function::ElementLoss => &[Tensor(0), Tensor(1), Tensor(2), Tensor(3)],
            Function::Activation | Function::Scan | Function::ResponseNorm => &[Tensor(0)],
            Function::Prelu | Function::Rrelu => &[Tensor(0), Tensor(1)],
            Function::Softmax => &[Result(0)],
            Function::CrossEntropy => &[Tensor(0), Tensor(1), Result(1)],
            // The gradient of a gradient has one more tensor in front, so the last place is not saved.
            Function::Gradient => &[Tensor(0), Tensor(1), Tensor(2), Tensor(3), Tensor(4)],
        }
    }

    /// The operator's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Function::ConvFprop => "conv_fprop",
            Function::ConvNorm => "conv_norm",
            Function::ConvDgrad => "conv_dgrad",
            Function::Linear => "linear",
            Function::MaxPool => "max_pool",
            Function::AveragePool => "avg_pool",
            Function::Activation => "activation",
            Function::Softmax => "softmax",
            Function::Norm => "norm",
            Function::CrossEntropy => "cross_entropy",
            Function::ClassLoss => "class_loss",
            Function::Gradient => "gradient",
            Function::BatchNorm => "batch_norm",
            Function::BatchNormBackward => "batch_norm_backward",
            Function::BatchNormInference => "batch_norm_inference",
            Function::ConvBatchNorm => "conv_batch_norm",
            Function::ConvBatchNormBackward => "conv_batch_norm_backward",
            Function::Attention => "attention",
            Function::AttentionBackward => "attention_backward",
            Function::Dropout => "dropout",
            Function::ElementLoss => "element_loss",
            Function::MlpInference => "mlp_inference",
            Function::Mlp => "mlp",
            Function::MlpBackward => "mlp_backward",
            Function::GatedMlpInference => "gated_mlp_inference",
            Function::GatedMlp => "gated_mlp",
            Function::GatedMlpBackward => "gated_mlp_backward",
            Function::Rotary => "rotary",
            Function::AttentionBlock => "attention_block",
            Function::Resample => "resample",
            Function::Pad => "pad",
            Function::Scan => "scan",
            Function::ScanWithPlace => "scan_with_place",
            Function::Shuffle => "shuffle",
            Function::ResponseNorm => "local_response_norm",
            Function::Fused => "fused",
            Function::FusedKeeping => "fused_keeping",
            Function::LinearLoss => "linear_loss",
            Function::Scaled => "scaled",
            Function::WindowSums => "window_sums",
            Function::WindowPick => "window_pick",
            Function::MaxPoolValues => "max_pool_values",
            Function::FractionalMaxPool => "fractional_max_pool",
            Function::Prelu => "prelu",
            Function::Rrelu => "rrelu",
            Function::Glu => "glu",
            Function::GluBackward => "glu_backward",
        }
    }
}

/// Attributes by name.
pub(super) struct Attributes<'a>(pub(super) &'a str);

impl<'a> Attributes<'a> {
    pub(super) fn get(&self, name: &str) -> Option<&'a str> {
        self.0.split_ascii_whitespace().filter_map(|word| word.split_once('=')).find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    pub(super) fn parse<T: std::str::FromStr>(&self, name: &'static str, text: &str) -> PyResult<T> {
        text.parse()
            .map_err(|_| raise(Kind::Graph, format!("attribute `{name}` is `{text}`; it is a number, or numbers with commas between")))
    }

    pub(super) fn one<T: std::str::FromStr>(&self, name: &'static str, default: T) -> PyResult<T> {
        self.get(name).map_or(Ok(default), |text| self.parse(name, text))
    }

    /// One of `0` and `1` for each; those that are not said are not set.
    fn flags<const N: usize>(&self, name: &str) -> [bool; N] {
        let said = self.get(name).unwrap_or_default().as_bytes();
        std::array::from_fn(|i| said.get(i) == Some(&b'1'))
    }

    fn list<T: std::str::FromStr>(&self, name: &'static str) -> PyResult<Option<Vec<T>>> {
        self.get(name).map(|text| text.split(',').map(|part| self.parse(name, part)).collect()).transpose()
    }
}

fn precision(policy: &Policy, a: Input, b: Input) -> PyResult<Precision> {
    policy.precision(a.dtype, b.dtype).ok_or_else(|| {
        let what = format!("products of {} and {}", a.dtype, b.dtype);
        unfit(what, "operands are of one type: f64, f32, f16, bf16, or two of the 8-bit ones")
    })
}

fn windows(attributes: &Attributes<'_>) -> PyResult<PoolWindows> {
    if let Some(out) = attributes.list("adaptive")? {
        return Ok(PoolWindows::Adaptive { out });
    }
    let window = attributes.list("window")?.unwrap_or_default();
    let pads_before = attributes.list("padding")?.unwrap_or_else(|| vec![0; window.len()]);
    Ok(PoolWindows::Sliding {
        strides: attributes.list("stride")?.unwrap_or_else(|| window.clone()),
        dilations: attributes.list("dilation")?.unwrap_or_else(|| vec![1; window.len()]),
        pads_after: attributes.list("after")?.unwrap_or_else(|| pads_before.clone()),
        pads_before,
        window,
    })
}

fn sampling(attributes: &Attributes<'_>) -> PyResult<Sampling> {
    if let Some(border) = attributes.get("border") {
        let (before, after) = (attributes.list("before")?.unwrap_or_default(), attributes.list("after")?.unwrap_or_default());
        return Ok(Sampling::Pad { border: crate::spatial::border(border)?, before, after });
    }
    let factors: Option<Vec<f64>> = attributes.list("factors")?;
    let filter = crate::spatial::filter(attributes.get("mode").unwrap_or("nearest"), attributes.one("corners", 0_u8)? != 0)?;
    let factors = factors.unwrap_or_default().into_iter().map(Real).collect();
    Ok(Sampling::Interpolate { filter, out: attributes.list("out")?.unwrap_or_default(), factors })
}

fn reduction(attributes: &Attributes<'_>) -> PyResult<LossReduction> {
    match attributes.get("reduction") {
        Some("none") => Ok(LossReduction::None),
        Some("sum") => Ok(LossReduction::Sum),
        None | Some("mean") => Ok(LossReduction::Mean),
        Some(other) => Err(raise(Kind::Graph, format!("the reduction is `{other}`; it is `none`, `sum` or `mean`"))),
    }
}

fn scan(attributes: &Attributes<'_>) -> PyResult<ScanOp> {
    match attributes.get("f") {
        Some("add") => Ok(ScanOp::Add),
        Some("mul") => Ok(ScanOp::Mul),
        Some("log_sum_exp") => Ok(ScanOp::LogSumExp),
        other => Err(raise(Kind::Graph, format!("the scan is `{}`; it is `add`, `mul` or `log_sum_exp`", other.unwrap_or_default()))),
    }
}

fn extremum(attributes: &Attributes<'_>) -> PyResult<ScanOp> {
    match attributes.get("f") {
        Some("min") => Ok(ScanOp::Min),
        Some("max") => Ok(ScanOp::Max),
        other => Err(raise(Kind::Graph, format!("the extremum is `{}`; it is `min` or `max`", other.unwrap_or_default()))),
    }
}

fn shuffle(attributes: &Attributes<'_>) -> PyResult<Shuffle> {
    if let Some(text) = attributes.get("pixels") {
        return Ok(Shuffle::ToPixels { factor: attributes.parse("pixels", text)? });
    }
    if let Some(text) = attributes.get("channels") {
        return Ok(Shuffle::ToChannels { factor: attributes.parse("channels", text)? });
    }
    Ok(Shuffle::Channels { groups: attributes.one("groups", 1)? })
}

fn response_norm(attributes: &Attributes<'_>) -> PyResult<ResponseNorm> {
    let [alpha, beta, k] = [("alpha", 1e-4), ("beta", 0.75), ("k", 1.0)].map(|(name, usual)| attributes.one(name, usual).map(Real));
    Ok(ResponseNorm { size: attributes.one("size", 5)?, alpha: alpha?, beta: beta?, k: k? })
}

fn element_loss(attributes: &Attributes<'_>) -> PyResult<ElementLoss> {
    let bend = Real(attributes.one("bend", 1.0)?);
    match attributes.get("loss") {
        Some("squared") => Ok(ElementLoss::Squared),
        Some("absolute") => Ok(ElementLoss::Absolute),
        Some("huber") => Ok(ElementLoss::Huber { delta: bend }),
        Some("smooth_l1") => Ok(ElementLoss::SmoothL1 { beta: bend }),
        Some("binary_cross_entropy") => Ok(ElementLoss::BinaryCrossEntropy),
        Some("likelihood") => Ok(ElementLoss::Likelihood),
        Some("soft_margin") => Ok(ElementLoss::SoftMargin),
        Some("divergence") => Ok(ElementLoss::Divergence { log_target: attributes.one("log", 0_u8)? != 0 }),
        other => Err(raise(Kind::Graph, format!("the loss is `{}`; it names a loss of elements", other.unwrap_or_default()))),
    }
}

fn loss(attributes: &Attributes<'_>) -> PyResult<CrossEntropySpec> {
    let reduction = reduction(attributes)?;
    let ignore_index = attributes.get("ignore").map(|text| attributes.parse("ignore", text)).transpose()?;
    Ok(CrossEntropySpec {
        axis: attributes.one("axis", 1)?,
        label_smoothing: Real(attributes.one("smoothing", 0.0)?),
        ignore_index,
        reduction,
    })
}

fn targets(attributes: &Attributes<'_>) -> Targets {
    match attributes.get("targets") {
        Some("probabilities") => Targets::Probabilities,
        Some("log_labels") => Targets::LabelsOfLogarithms,
        _ => Targets::Labels,
    }
}

fn linear_loss(attributes: &Attributes<'_>, precision: Precision) -> PyResult<LinearLoss> {
    Ok(LinearLoss {
        precision,
        loss: CrossEntropySpec { axis: 1, reduction: LossReduction::None, ..loss(attributes)? },
        z_loss: Real(attributes.one("z", 0.0)?),
        soft_cap: attributes.get("cap").map(|text| attributes.parse("cap", text).map(Real)).transpose()?,
        targets: targets(attributes),
        wanted: attributes.flags("wanted"),
        accumulates: attributes.one("add", 0_u8)? != 0,
    })
}

/// What stands behind a normalization: ReLU by `relu=1`, another activation by its attributes behind `|`.
fn behind_norm(attributes: &Attributes<'_>, behind: Option<PyResult<UnaryOp>>) -> PyResult<Option<UnaryOp>> {
    let relu = (attributes.one("relu", 0_u8)? != 0).then_some(UnaryOp::Relu);
    behind.map_or(Ok(relu), |f| f.map(Some))
}

fn batch_norm(attributes: &Attributes<'_>, behind: Option<PyResult<UnaryOp>>) -> PyResult<BatchNormSpec> {
    Ok(BatchNormSpec {
        eps: Real(attributes.one("eps", 1e-5)?),
        momentum: Real(attributes.one("momentum", 0.1)?),
        activation: behind_norm(attributes, behind)?,
    })
}

fn norm(attributes: &Attributes<'_>) -> PyResult<NormSpec> {
    let kind = match attributes.get("kind") {
        None | Some("layer") => NormKind::Layer,
        Some("rms") => NormKind::Rms,
        Some(other) => return Err(raise(Kind::Graph, format!("the kind of norm is `{other}`; it is `layer` or `rms`"))),
    };
    let axes: Vec<u64> = attributes.list("axes")?.unwrap_or_default();
    let axes: Vec<u32> = axes.into_iter().map(|axis| u32::try_from(axis).unwrap_or(u32::MAX)).collect();
    Ok(NormSpec { groups: attributes.one("groups", 1)?, ..NormSpec::new(kind, &axes, attributes.one("eps", 1e-5)?) })
}

fn attention(attributes: &Attributes<'_>) -> PyResult<AttentionSpec> {
    let causal = match attributes.get("causal") {
        None | Some("none") => Causal::None,
        Some("top_left") => Causal::TopLeft,
        Some("bottom_right") => Causal::BottomRight,
        Some(other) => return Err(raise(Kind::Graph, format!("causal is `{other}`; it is `none`, `top_left` or `bottom_right`"))),
    };
    let bound = |name| attributes.get(name).map(|text| attributes.parse::<u32>(name, text)).transpose();
    let soft_cap = attributes.get("cap").map(|text| attributes.parse("cap", text).map(Real)).transpose()?;
    let dropout = attributes.get("dropout").map(|text| attributes.parse("dropout", text).map(Real)).transpose()?;
    let plain = AttentionSpec { dropout, ..AttentionSpec::new(attributes.one("scale", 1.0)?) };
    let (longest_q, longest_kv) = (bound("longest_q")?, bound("longest_kv")?);
    Ok(AttentionSpec { causal, left: bound("left")?, right: bound("right")?, soft_cap, longest_q, longest_kv, ..plain })
}

/// Dims behind the attributes.
fn dims(extra: &[i64]) -> PyResult<Vec<u64>> {
    let dim = |&dim: &i64| u64::try_from(dim).map_err(|_| unfit(format_args!("dims {extra:?}"), "dims are not negative"));
    extra.iter().map(dim).collect()
}

fn divisor(attributes: &Attributes<'_>) -> PyResult<Divisor> {
    if let Some(text) = attributes.get("divisor") {
        return Ok(Divisor::Fixed(attributes.parse("divisor", text)?));
    }
    if attributes.one("pad", 1_u8)? == 0 || attributes.get("adaptive").is_some() {
        return Ok(Divisor::Elements);
    }
    Ok(attributes.list("within")?.map_or(Divisor::Taps, Divisor::Within))
}

impl Function {
    /// The function with its attributes, as the library draws it; several where several gradients are asked for.
    pub(crate) fn told(self, attributes: &str, given: &[Option<Input>], extra: &[i64], policy: &Policy) -> PyResult<Vec<recipe::Function>> {
        let extents = dims(extra)?;
        if matches!(self, Function::Fused | Function::FusedKeeping) {
            let told = fused::fused(attributes, given, extra, policy, self == Function::FusedKeeping)?;
            return Ok(vec![recipe::Function::Fused(Box::new(told))]);
        }
        if self != Function::Gradient {
            return Ok(vec![self.plainly_told(attributes, given, Extents::Spatial(extents), policy)?]);
        }
        let places = Attributes(attributes.split_once('|').map_or("", |(head, _)| head)).list("wrt")?.unwrap_or_else(|| vec![0]);
        if !(1..=MAX_GRADIENTS).contains(&places.len()) || places.len() > 1 && !extents.is_empty() {
            let what = format!("{} gradients of tensors of dims {extents:?}", places.len());
            return Err(unfit(what, "a call computes up to three; of several, every tensor is saved and tells its dims"));
        }
        places.into_iter().map(|place| gradient(attributes, place, given, extents.clone(), policy)).collect()
    }

    fn plainly_told(self, attributes: &str, given: &[Option<Input>], extents: Extents, policy: &Policy) -> PyResult<recipe::Function> {
        use recipe::Function as F;
        // An activation behind a convolution has its attributes behind `|`.
        let (own, behind) = attributes.split_once('|').map_or((attributes, None), |(own, behind)| (own, Some(behind)));
        let activation = behind.map(|text| unary(&Attributes(text)));
        let between = |attributes: &Attributes<'_>| if attributes.get("f").is_some() { unary(attributes) } else { Ok(UnaryOp::Identity) };
        let attributes = &Attributes(own);
        let tensor = |place: usize| {
            let tensor = given.get(place).copied().flatten();
            tensor.ok_or_else(|| unfit(format_args!("tensor {place} of the call is missing"), "only a bias may be"))
        };
        let precision = || precision(policy, tensor(0)?, tensor(1)?);
        self.check(attributes, given)?;
        Ok(match self {
            Function::ConvFprop => F::ConvFprop(convolution(attributes, precision()?)?, UnaryOp::Identity),
            Function::ConvNorm => {
                let epsilon = Real(attributes.one("eps", 1e-5)?);
                F::ConvNorm {
                    conv: convolution(attributes, precision()?)?,
                    epsilon,
                    activation: activation.unwrap_or(Ok(UnaryOp::Identity))?,
                }
            }
            Function::ConvDgrad => F::ConvDgrad(convolution(attributes, precision()?)?, extents),
            Function::Linear => F::Linear(precision()?, UnaryOp::Identity),
            Function::MaxPool => {
                let index = if attributes.get("index") == Some("i64") { DType::I64 } else { DType::I32 };
                F::MaxPool(windows(attributes)?, Some(index))
            }
            Function::MaxPoolValues => F::MaxPool(windows(attributes)?, None),
            Function::FractionalMaxPool => {
                let index = if attributes.get("index") == Some("i64") { DType::I64 } else { DType::I32 };
                let [window, out] = ["window", "fractional"].map(|name| attributes.list(name).map(Option::unwrap_or_default));
                F::FractionalMaxPool(window?, out?, index)
            }
            Function::AveragePool => F::AveragePool(windows(attributes)?, divisor(attributes)?),
            Function::Resample => F::Resample(sampling(attributes)?),
            Function::Pad => F::Pad {
                before: attributes.list("before")?.unwrap_or_default(),
                after: attributes.list("after")?.unwrap_or_default(),
                value: Real(attributes.one("value", 0.0)?),
            },
            Function::Activation => activation_of(attributes)?,
            Function::Softmax if attributes.one("negative", 0_u8)? != 0 => F::Softmin(attributes.one("axis", 0)?),
            Function::Softmax => F::Softmax(attributes.one("axis", 0)?, attributes.one("log", 0_u8)? != 0),
            Function::Scan => F::Scan(scan(attributes)?, attributes.one("axis", 0)?, attributes.one("reverse", 0_u8)? != 0),
            Function::ScanWithPlace => F::ScanWithPlace(extremum(attributes)?, attributes.one("axis", 0)?),
            Function::Shuffle => F::Shuffle(shuffle(attributes)?),
            Function::ResponseNorm => F::ResponseNorm(response_norm(attributes)?),
            Function::Norm => F::Norm { spec: norm(attributes)?, per_channel: attributes.one("channel", 0_u8)? != 0 },
            Function::CrossEntropy => F::CrossEntropy(loss(attributes)?, LossForm::WithLse),
            Function::ClassLoss => F::ClassLoss(loss(attributes)?, targets(attributes)),
            Function::BatchNorm => F::BatchNorm(batch_norm(attributes, activation)?),
            Function::BatchNormBackward => F::BatchNormBackward(BatchNormGradient {
                activation: behind_norm(attributes, activation)?,
                reads_result: attributes.one("result", 0_u8)? != 0,
                wanted: attributes.flags("wanted"),
            }),
            Function::ConvBatchNorm => {
                F::ConvBatchNorm { conv: convolution(attributes, precision()?)?, norm: batch_norm(attributes, activation)? }
            }
            Function::ConvBatchNormBackward => F::ConvBatchNormBackward(ConvBatchNormGradient {
                // The operands of the forward product stand behind the gradient of the result.
                conv: convolution(attributes, self::precision(policy, tensor(1)?, tensor(2)?)?)?,
                activation: behind_norm(attributes, activation)?,
                reads_result: attributes.one("result", 0_u8)? != 0,
                wanted: attributes.flags("wanted"),
                filter_dtype: attributes.get("filter").map(|text| attributes.parse("filter", text)).transpose()?,
            }),
            Function::BatchNormInference => {
                F::BatchNormInference { eps: Real(attributes.one("eps", 1e-5)?), activation: behind_norm(attributes, activation)? }
            }
            Function::Attention => {
                let spec = attention(attributes)?;
                match attributes.get("values") {
                    None => F::Attention(spec),
                    Some(text) => F::LatentAttention(spec, attributes.parse("values", text)?),
                }
            }
            Function::AttentionBackward => {
                F::AttentionBackward(AttentionGradient { spec: attention(attributes)?, wanted: attributes.flags("wanted") })
            }
            Function::MlpInference | Function::Mlp => {
                F::Mlp { precision: precision()?, activation: between(attributes)?, keeps: self == Function::Mlp }
            }
            Function::MlpBackward => {
                let mut dtypes = [None; 5];
                for (name, dtype) in ["as0", "as1", "as2", "as3", "as4"].into_iter().zip(&mut dtypes) {
                    *dtype = attributes.get(name).map(|text| attributes.parse("as", text)).transpose()?;
                }
                F::MlpBackward(MlpGradient {
                    precision: self::precision(policy, tensor(1)?, tensor(2)?)?,
                    activation: activation.unwrap_or(Ok(UnaryOp::Identity))?,
                    wanted: attributes.flags("wanted"),
                    dtypes,
                })
            }
            Function::GatedMlpInference | Function::GatedMlp => {
                F::GatedMlp { precision: precision()?, activation: between(attributes)?, keeps: self == Function::GatedMlp }
            }
            Function::GatedMlpBackward => {
                let mut dtypes = [None; 4];
                for (name, dtype) in ["as0", "as1", "as2", "as3"].into_iter().zip(&mut dtypes) {
                    *dtype = attributes.get(name).map(|text| attributes.parse("as", text)).transpose()?;
                }
                F::GatedMlpBackward(GatedMlpGradient {
                    precision: self::precision(policy, tensor(1)?, tensor(2)?)?,
                    activation: activation.unwrap_or(Ok(UnaryOp::Identity))?,
                    wanted: attributes.flags("wanted"),
                    dtypes,
                })
            }
            Function::Rotary => F::Rotary { is_gradient: attributes.one("gradient", 0_u8)? != 0 },
            Function::AttentionBlock => F::AttentionBlock(AttentionBlock {
                precision: precision()?,
                spec: attention(attributes)?,
                heads: attributes.one("heads", 1)?,
                kv_heads: attributes.one("kv_heads", 1)?,
                is_interleaved: attributes.one("interleaved", 0_u8)? != 0,
                has_positions_first: attributes.one("first", 0_u8)? != 0,
            }),
            Function::Dropout => F::Dropout(Dropout {
                p: Real(attributes.one("p", 0.5)?),
                of_channels: attributes.one("channels", 0_u8)? != 0,
                keeps_moments: attributes.one("moments", 0_u8)? != 0,
                is_gradient: attributes.one("gradient", 0_u8)? != 0,
            }),
            Function::Prelu => F::Prelu,
            Function::Rrelu => {
                F::RandomPrelu { lower: Real(attributes.one("lower", 1.0 / 8.0)?), upper: Real(attributes.one("upper", 1.0 / 3.0)?) }
            }
            Function::Glu => F::Glu(attributes.one("axis", 0)?),
            Function::GluBackward => F::GluBackward(attributes.one("axis", 0)?),
            Function::LinearLoss => F::LinearLoss(linear_loss(attributes, precision()?)?),
            Function::WindowSums => F::WindowSums(attributes.one("sum", 0)?),
            Function::WindowPick => F::WindowPick(attributes.one("sum", 0)?),
            Function::Scaled => {
                let dtype = attributes.get("as").map(|text| attributes.parse("as", text)).transpose()?;
                F::Scaled(dtype.unwrap_or(tensor(0)?.dtype))
            }
            Function::ElementLoss => F::ElementLoss(element_loss(attributes)?, reduction(attributes)?),
            Function::Gradient => return Err(raise(Kind::Graph, "a gradient has its function's attributes behind its own")),
            Function::Fused | Function::FusedKeeping => {
                return Err(raise(Kind::Graph, "steps stand behind a function that has none itself"));
            }
        })
    }
}

const BIAS_RULE: &str = "they are of one floating-point type, and a bias is of that or, beside 16-bit operands, of f32";

/// Whether a bias of this type may be added to products of the other.
fn is_bias_of(bias: DType, operands: DType) -> bool {
    bias == operands || bias == DType::F32 && matches!(operands, DType::Bf16 | DType::F16)
}

impl Function {
    /// Refuses what PyTorch refuses and the library's ops take: a bias that would broadcast or be of another type, functions of integers.
    fn check(self, attributes: &Attributes<'_>, given: &[Option<Input>]) -> PyResult<()> {
        let tensor = |place: usize| given.get(place).copied().flatten();
        match (self, tensor(0), tensor(1), tensor(2)) {
            (Function::ConvFprop | Function::ConvDgrad | Function::Linear, Some(x), Some(w), Some(bias)) => {
                if !is_bias_of(bias.dtype, x.dtype) {
                    return Err(unfit(format_args!("a bias of {} beside {}", bias.dtype, x.dtype), BIAS_RULE));
                }
                let (dims, filter) = (bias.layout.dims(), w.layout.dims());
                let groups: u64 = attributes.one("groups", 1)?;
                let channels = match self {
                    Function::ConvDgrad => filter.get(1).map(|channels| channels.saturating_mul(groups)),
                    _ => filter.first().copied(),
                };
                // A linear layer's may be one for all.
                if self != Function::Linear && (dims.len() != 1 || dims.first() != channels.as_ref()) {
                    let what = format!("a bias of dims {dims:?} for {} channels", channels.unwrap_or(0));
                    return Err(unfit(what, "a bias has one dim, with an element for each channel"));
                }
                Ok(())
            }
            (Function::MlpInference | Function::Mlp, Some(x), ..) => {
                let is_vector = |bias: usize, weight: usize| {
                    let (Some(bias), Some(weight)) = (tensor(bias), tensor(weight)) else { return true };
                    bias.layout.rank() == 1 && bias.layout.dims().first() == weight.layout.dims().first()
                };
                let is_other = |place: usize, tensor: Input| match place {
                    2 | 4 => !is_bias_of(tensor.dtype, x.dtype),
                    _ => tensor.dtype != x.dtype || !x.dtype.is_float(),
                };
                let other = given.iter().enumerate().find_map(|(place, tensor)| tensor.filter(|tensor| is_other(place, *tensor)));
                match other {
                    Some(other) => Err(unfit(format_args!("linear layers of {} and {}", x.dtype, other.dtype), BIAS_RULE)),
                    None if is_vector(2, 1) && is_vector(4, 3) => Ok(()),
                    None => {
                        Err(unfit("a bias of other dims than its weight's outputs", "a bias has one dim, with an element for each output"))
                    }
                }
            }
            (Function::GatedMlpInference | Function::GatedMlp, Some(x), ..) => {
                let other = given.iter().flatten().find(|tensor| tensor.dtype != x.dtype || !x.dtype.is_float());
                other.map_or(Ok(()), |other| {
                    let what = format!("linear layers of {} and {}", x.dtype, other.dtype);
                    Err(unfit(what, "input and weights are of one floating-point type"))
                })
            }
            (Function::ElementLoss, Some(x), ..) => {
                let other = given.iter().flatten().find(|tensor| tensor.dtype != x.dtype || !x.dtype.is_float());
                other.map_or(Ok(()), |other| {
                    let what = format!("a loss of {} and {}", x.dtype, other.dtype);
                    Err(unfit(what, "input, target and weights are of one floating-point type"))
                })
            }
            (Function::Dropout, Some(x), ..) if !x.dtype.is_float() => {
                Err(unfit(format_args!("dropout of elements of {}", x.dtype), "they are floating-point"))
            }
            (Function::Prelu | Function::GluBackward, Some(x), Some(other), _) if x.dtype != other.dtype || !x.dtype.is_float() => {
                Err(unfit(format_args!("{} of {} and {}", self.name(), x.dtype, other.dtype), "they are of one floating-point type"))
            }
            (Function::Rrelu | Function::Glu, Some(x), ..) if !x.dtype.is_float() => {
                Err(unfit(format_args!("{} of elements of {}", self.name(), x.dtype), "they are floating-point"))
            }
            (Function::Activation, Some(x), ..) if !x.dtype.is_float() => match activation_of(attributes)? {
                recipe::Function::Activation(UnaryOp::Relu) => Ok(()),
                recipe::Function::Activation(UnaryOp::Clamp { lower, .. }) if x.dtype != DType::U8 || lower.0 >= 0.0 => Ok(()),
                _ => {
                    let name = attributes.get("f").unwrap_or_default();
                    Err(unfit(format_args!("`{name}` of elements of {}", x.dtype), "they are floating-point"))
                }
            },
            _ => Ok(()),
        }
    }
}

/// The gradient that `of=…|…` names, with respect to the tensor at a place.
fn gradient(attributes: &str, place: u64, given: &[Option<Input>], extents: Vec<u64>, policy: &Policy) -> PyResult<recipe::Function> {
    let (head, rest) = attributes.split_once('|').ok_or_else(|| {
        raise(Kind::Graph, format!("the attributes `{attributes}` of a gradient; those of its function stand behind `|`"))
    })?;
    let head = Attributes(head);
    let name = head.get("of").unwrap_or_default();
    let of = Function::ALL
        .into_iter()
        .find(|function| function.name() == name)
        .ok_or_else(|| raise(Kind::Graph, format!("attribute `of` is `{name}`; it names a function")))?;
    if let Function::ConvNorm | Function::AttentionBlock = of {
        return Err(raise(Kind::Unsupported, format!("{name} is of inference and has no gradient; call its functions one by one")));
    }
    if let Function::MlpInference | Function::GatedMlpInference = of {
        let with = name.trim_end_matches("_inference");
        return Err(raise(Kind::Unsupported, format!("{name} has no gradient; call {with}")));
    }
    if matches!(of, Function::Glu | Function::GluBackward) {
        return Err(raise(Kind::Unsupported, format!("the gradient of {name} is a function of its own")));
    }
    if matches!(of, Function::Fused | Function::FusedKeeping) {
        return Err(raise(
            Kind::Unsupported,
            "a call with steps behind it is made where gradients have been taken, and has none; call function and steps by themselves",
        ));
    }
    if matches!(of, Function::LinearLoss | Function::Scaled | Function::WindowSums | Function::WindowPick | Function::MaxPoolValues) {
        return Err(raise(Kind::Unsupported, format!("{name} has no gradient of its own; the function that calls it has")));
    }
    let with_respect_to = usize::try_from(place).unwrap_or(usize::MAX);
    let saved = of.saves().to_vec();
    // What the function read, as far as it is saved.
    let mut read = [None; MAX_INPUTS];
    for (saved, given) in saved.iter().zip(given.iter().skip(1)) {
        if let Saved::Tensor(place) = *saved {
            read[place] = *given;
        }
    }
    // The precision asks for the types of both operands; an operand that is not saved has the type of dy.
    if with_respect_to < 2 && read[with_respect_to].is_none() {
        read[with_respect_to] = given.first().copied().flatten();
    }
    // The result of a transposed convolution, or of a gradient, has the dims of its gradient.
    let result_dims = given.first().copied().flatten().map(|dy| dy.layout.dims().to_vec()).unwrap_or_default();
    let function = if of == Function::Gradient {
        // A gradient of several gradients at once is nothing that a graph asks for: each has a gradient of its own.
        let inner = Attributes(rest.split_once('|').map_or("", |(head, _)| head)).one("wrt", 0)?;
        gradient(rest, inner, &read, result_dims, policy)?
    } else {
        of.plainly_told(rest, &read, Extents::Whole(result_dims), policy)?
    };
    let dims = (!extents.is_empty()).then_some(extents);
    let dtype = head.get(["as0", "as1", "as2"].get(with_respect_to).copied().unwrap_or_default());
    let dtype = dtype.map(|text| head.parse("as", text)).transpose()?;
    Ok(recipe::Function::Gradient(Box::new(Gradient { of: function, with_respect_to, saved, dims, dtype })))
}

fn convolution(attributes: &Attributes<'_>, precision: Precision) -> PyResult<Convolution> {
    let list = |name| Ok::<Vec<u64>, pyo3::PyErr>(attributes.list(name)?.unwrap_or_default());
    let pads_before = list("padding")?;
    Ok(Convolution {
        strides: list("stride")?,
        pads_after: attributes.list("after")?.unwrap_or_else(|| pads_before.clone()),
        pads_before,
        dilations: list("dilation")?,
        groups: attributes.one("groups", 1)?,
        precision,
    })
}
