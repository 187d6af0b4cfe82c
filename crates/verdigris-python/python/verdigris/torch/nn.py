"""Modules that compute by this package: PyTorch's own, with another `forward`. Parameters, buffers, names and `state_dict` are PyTorch's.

`inplace` is taken and the result is new all the same, as in `functional`; `convert` leaves such modules to PyTorch. To `torch.fx` each is one node, as PyTorch's are.
"""

import functools
import importlib
import sys

import torch
from torch.fx import Proxy

from .._errors import GraphError
from . import _multihead, _window
from ._channels import MAX_RESPONSES
from . import functional as F


def _node(module, *inputs, **options):
    """The call of a module in a graph that `torch.fx` traces: one node, where it would look into modules that are not PyTorch's."""
    tracer = next(value for value in (*inputs, *options.values()) if isinstance(value, Proxy)).tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, options)


class _Conv:
    """What the convolutions share: attributes are made when the module is, and again when an option of it is set. They are empty while its options do not go together."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name in _OPTIONS and "_attributes" in self.__dict__:
            try:
                self._prepare()
            except GraphError:
                # Another option may follow, and else the call says what is wrong.
                self._attributes = ""

    def _spatial(self):
        return len(self.kernel_size)

    def _prepare(self):
        dims = tuple(self.kernel_size) if self.padding == "same" else None
        self._attributes = F.conv_attributes(self._spatial(), self.stride, self.padding, self.dilation, self.groups, dims)

    def _filtered(self, x):
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            attributes = F.conv_attributes(self._spatial(), self.stride, 0, self.dilation, self.groups)
            return F.conv(x, self.weight, self.bias, attributes, self._spatial())
        if not self._attributes:
            self._prepare()
        return F.conv(x, self.weight, self.bias, self._attributes, self._spatial())


#: What the attributes of a convolution are made of.
_OPTIONS = {"stride", "padding", "dilation", "groups", "kernel_size"}


class _ConvTranspose(_Conv):
    def _unfiltered(self, x, output_size):
        padding = self.output_padding
        if not self._attributes:
            self._prepare()
        if output_size is not None:
            padding = self._output_padding(
                x, output_size, self.stride, self.padding, self.kernel_size, self._spatial(), self.dilation
            )
        return F.conv_transpose(x, self.weight, self.bias, self._attributes, self._spatial(), tuple(padding))


def _conv_class(base):
    class Module(_Conv, base):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self._prepare()

        def forward(self, input):
            return _node(self, input) if isinstance(input, Proxy) else self._filtered(input)

    return _named(Module, base)


def _conv_transpose_class(base):
    class Module(_ConvTranspose, base):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self._prepare()

        def forward(self, input, output_size=None):
            return _node(self, input, output_size) if isinstance(input, Proxy) else self._unfiltered(input, output_size)

    return _named(Module, base)


def _module(base, compute, forward=None):
    """The class of modules of one input whose forward is `compute(module, input)`, or `forward` of those that take more."""

    def of_one(self, input):
        return _node(self, input) if isinstance(input, Proxy) else compute(self, input)

    class Module(base):
        def _prepare(self):
            pass

    Module.forward = forward or of_one
    return _named(Module, base)


def _module_of_more(base, compute):
    """As `_module`, of those that take more than one input; `compute` calls them as PyTorch does."""

    @functools.wraps(compute)
    def forward(self, *inputs, **options):
        is_traced = any(isinstance(value, Proxy) for value in (*inputs, *options.values()))
        return _node(self, *inputs, **options) if is_traced else compute(self, *inputs, **options)

    return _module(base, compute, forward)


def _named(module, base):
    module.__name__ = module.__qualname__ = base.__name__
    room = "torchvision" if base.__module__.startswith("torchvision.") else "torch.nn"
    module.__doc__ = f"`{room}.{base.__name__}`, computed by this package."
    module.__module__ = __name__
    return module


_nn = torch.nn
Conv1d, Conv2d, Conv3d = (_conv_class(base) for base in (_nn.Conv1d, _nn.Conv2d, _nn.Conv3d))
ConvTranspose1d, ConvTranspose2d, ConvTranspose3d = (
    _conv_transpose_class(base) for base in (_nn.ConvTranspose1d, _nn.ConvTranspose2d, _nn.ConvTranspose3d)
)
Linear = _module(_nn.Linear, lambda m, x: F.linear(x, m.weight, m.bias))


def _max(function):
    return lambda m, x: function(x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)


def _avg(function):
    return lambda m, x: function(x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)


MaxPool1d = _module(_nn.MaxPool1d, _max(F.max_pool1d))
MaxPool2d = _module(_nn.MaxPool2d, _max(F.max_pool2d))
MaxPool3d = _module(_nn.MaxPool3d, _max(F.max_pool3d))


def _unpool(function):
    return lambda self, input, indices, output_size=None: function(
        input, indices, self.kernel_size, self.stride, self.padding, output_size
    )


MaxUnpool1d = _module_of_more(_nn.MaxUnpool1d, _unpool(F.max_unpool1d))
MaxUnpool2d = _module_of_more(_nn.MaxUnpool2d, _unpool(F.max_unpool2d))
MaxUnpool3d = _module_of_more(_nn.MaxUnpool3d, _unpool(F.max_unpool3d))


def _fractional(function):
    return lambda m, x: function(x, m.kernel_size, m.output_size, m.output_ratio, m.return_indices, m._random_samples)


FractionalMaxPool2d = _module(_nn.FractionalMaxPool2d, _fractional(F.fractional_max_pool2d))
FractionalMaxPool3d = _module(_nn.FractionalMaxPool3d, _fractional(F.fractional_max_pool3d))
AvgPool1d = _module(_nn.AvgPool1d, lambda m, x: F.avg_pool1d(x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad))
AvgPool2d = _module(_nn.AvgPool2d, _avg(F.avg_pool2d))
AvgPool3d = _module(_nn.AvgPool3d, _avg(F.avg_pool3d))
AdaptiveAvgPool1d = _module(_nn.AdaptiveAvgPool1d, lambda m, x: F.adaptive_avg_pool1d(x, m.output_size))
AdaptiveAvgPool2d = _module(_nn.AdaptiveAvgPool2d, lambda m, x: F.adaptive_avg_pool2d(x, m.output_size))
AdaptiveAvgPool3d = _module(_nn.AdaptiveAvgPool3d, lambda m, x: F.adaptive_avg_pool3d(x, m.output_size))
AdaptiveMaxPool1d = _module(_nn.AdaptiveMaxPool1d, lambda m, x: F.adaptive_max_pool1d(x, m.output_size, m.return_indices))
AdaptiveMaxPool2d = _module(_nn.AdaptiveMaxPool2d, lambda m, x: F.adaptive_max_pool2d(x, m.output_size, m.return_indices))
AdaptiveMaxPool3d = _module(_nn.AdaptiveMaxPool3d, lambda m, x: F.adaptive_max_pool3d(x, m.output_size, m.return_indices))
Upsample = _module(
    _nn.Upsample, lambda m, x: F.interpolate(x, m.size, m.scale_factor, m.mode, m.align_corners, m.recompute_scale_factor)
)
UpsamplingNearest2d = _module(_nn.UpsamplingNearest2d, lambda m, x: F.interpolate(x, m.size, m.scale_factor, m.mode))
UpsamplingBilinear2d = _module(
    _nn.UpsamplingBilinear2d, lambda m, x: F.interpolate(x, m.size, m.scale_factor, m.mode, m.align_corners)
)
ReflectionPad1d, ReflectionPad2d, ReflectionPad3d = (
    _module(base, lambda m, x: F.pad(x, m.padding, "reflect")) for base in (_nn.ReflectionPad1d, _nn.ReflectionPad2d, _nn.ReflectionPad3d)
)
ReplicationPad1d, ReplicationPad2d, ReplicationPad3d = (
    _module(base, lambda m, x: F.pad(x, m.padding, "replicate"))
    for base in (_nn.ReplicationPad1d, _nn.ReplicationPad2d, _nn.ReplicationPad3d)
)


def _circular(m, x):
    m._check_input_dim(x)
    return F.pad(x, m.padding, "circular")


CircularPad1d, CircularPad2d, CircularPad3d = (
    _module(base, _circular) for base in (_nn.CircularPad1d, _nn.CircularPad2d, _nn.CircularPad3d)
)
ConstantPad1d, ConstantPad2d, ConstantPad3d, ZeroPad1d, ZeroPad2d, ZeroPad3d = (
    _module(base, lambda m, x: F.pad(x, m.padding, "constant", m.value))
    for base in (_nn.ConstantPad1d, _nn.ConstantPad2d, _nn.ConstantPad3d, _nn.ZeroPad1d, _nn.ZeroPad2d, _nn.ZeroPad3d)
)
PixelShuffle = _module(_nn.PixelShuffle, lambda m, x: F.pixel_shuffle(x, m.upscale_factor))
PixelUnshuffle = _module(_nn.PixelUnshuffle, lambda m, x: F.pixel_unshuffle(x, m.downscale_factor))
ChannelShuffle = _module(_nn.ChannelShuffle, lambda m, x: F.channel_shuffle(x, m.groups))
LocalResponseNorm = _module(_nn.LocalResponseNorm, lambda m, x: F.local_response_norm(x, m.size, m.alpha, m.beta, m.k))
Unfold = _module(_nn.Unfold, lambda m, x: F.unfold(x, m.kernel_size, m.dilation, m.padding, m.stride))
Fold = _module(_nn.Fold, lambda m, x: F.fold(x, m.output_size, m.kernel_size, m.dilation, m.padding, m.stride))
ReLU = _module(_nn.ReLU, lambda m, x: F.relu(x))
ReLU6 = _module(_nn.ReLU6, lambda m, x: F.relu6(x))
LeakyReLU = _module(_nn.LeakyReLU, lambda m, x: F.leaky_relu(x, m.negative_slope))
GELU = _module(_nn.GELU, lambda m, x: F.gelu(x, m.approximate))
SiLU = _module(_nn.SiLU, lambda m, x: F.silu(x))
Hardswish = _module(_nn.Hardswish, lambda m, x: F.hardswish(x))
Hardsigmoid = _module(_nn.Hardsigmoid, lambda m, x: F.hardsigmoid(x))
Hardtanh = _module(_nn.Hardtanh, lambda m, x: F.hardtanh(x, m.min_val, m.max_val))
Mish = _module(_nn.Mish, lambda m, x: F.mish(x))
Sigmoid = _module(_nn.Sigmoid, lambda m, x: F.sigmoid(x))
Tanh = _module(_nn.Tanh, lambda m, x: F.tanh(x))
ELU = _module(_nn.ELU, lambda m, x: F.elu(x, m.alpha))
Softplus = _module(_nn.Softplus, lambda m, x: F.softplus(x, m.beta, m.threshold))
PReLU = _module(_nn.PReLU, lambda m, x: F.prelu(x, m.weight))
RReLU = _module(_nn.RReLU, lambda m, x: F.rrelu(x, m.lower, m.upper, m.training))
SELU = _module(_nn.SELU, lambda m, x: F.selu(x))
CELU = _module(_nn.CELU, lambda m, x: F.celu(x, m.alpha))
GLU = _module(_nn.GLU, lambda m, x: F.glu(x, m.dim))
LogSigmoid = _module(_nn.LogSigmoid, lambda m, x: F.logsigmoid(x))
Hardshrink = _module(_nn.Hardshrink, lambda m, x: F.hardshrink(x, m.lambd))
Softshrink = _module(_nn.Softshrink, lambda m, x: F.softshrink(x, m.lambd))
Tanhshrink = _module(_nn.Tanhshrink, lambda m, x: F.tanhshrink(x))
Softsign = _module(_nn.Softsign, lambda m, x: F.softsign(x))
Threshold = _module(_nn.Threshold, lambda m, x: F.threshold(x, m.threshold, m.value))
Dropout, Dropout1d, Dropout2d, Dropout3d, AlphaDropout, FeatureAlphaDropout = (
    _module(base, lambda m, x, function=function: function(x, m.p, m.training))
    for base, function in (
        (_nn.Dropout, F.dropout),
        (_nn.Dropout1d, F.dropout1d),
        (_nn.Dropout2d, F.dropout2d),
        (_nn.Dropout3d, F.dropout3d),
        (_nn.AlphaDropout, F.alpha_dropout),
        (_nn.FeatureAlphaDropout, F.feature_alpha_dropout),
    )
)
LayerNorm = _module(_nn.LayerNorm, lambda m, x: F.layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps))
# PyTorch calls its input x.
RMSNorm = _module_of_more(_nn.RMSNorm, lambda self, x: F.rms_norm(x, self.normalized_shape, self.weight, self.eps))
GroupNorm = _module(_nn.GroupNorm, lambda m, x: F.group_norm(x, m.num_groups, m.weight, m.bias, m.eps))


def _instance(m, x):
    m._check_input_dim(x)
    # One image without the dim of a batch.
    if x.dim() == m._get_no_batch_dim():
        return _instance(m, x.unsqueeze(0)).squeeze(0)
    run = dict(use_input_stats=m.training or not m.track_running_stats, momentum=m.momentum or 0.0, eps=m.eps)
    return F.instance_norm(x, m.running_mean, m.running_var, m.weight, m.bias, **run)


InstanceNorm1d, InstanceNorm2d, InstanceNorm3d = (
    _module(base, _instance) for base in (_nn.InstanceNorm1d, _nn.InstanceNorm2d, _nn.InstanceNorm3d)
)
BatchNorm1d, BatchNorm2d, BatchNorm3d = (
    _module(base, F.batch_norm_module) for base in (_nn.BatchNorm1d, _nn.BatchNorm2d, _nn.BatchNorm3d)
)
MultiheadAttention = _module_of_more(_nn.MultiheadAttention, _multihead.multi_head_attention)
Softmax = _module(_nn.Softmax, lambda m, x: F.softmax(x, m.dim))
Softmin = _module(_nn.Softmin, lambda m, x: F.softmin(x, m.dim))


def _softmax_of_channels(m, x):
    if x.dim() not in (3, 4):
        raise GraphError(f"Softmax2d of an input of {tuple(x.shape)}; it is [n, c, h, w] or [c, h, w]")
    return F.softmax(x, -3)


Softmax2d = _module(_nn.Softmax2d, _softmax_of_channels)
LogSoftmax = _module(_nn.LogSoftmax, lambda m, x: F.log_softmax(x, m.dim))
CrossEntropyLoss = _module_of_more(
    _nn.CrossEntropyLoss,
    lambda self, input, target: F.cross_entropy(
        input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction, label_smoothing=self.label_smoothing
    ),
)


def _loss(base, function, *names):
    """A loss whose options have these names, in the module and in the function."""
    return _module_of_more(base, lambda self, input, target: function(input, target, **{name: getattr(self, name) for name in names}))


# `BCELoss` stays PyTorch's, which raises where a probability is outside of 0 and 1; ours would have to wait for the device to do so.
MSELoss = _loss(_nn.MSELoss, F.mse_loss, "reduction")
L1Loss = _loss(_nn.L1Loss, F.l1_loss, "reduction")
HuberLoss = _loss(_nn.HuberLoss, F.huber_loss, "reduction", "delta")
SmoothL1Loss = _loss(_nn.SmoothL1Loss, F.smooth_l1_loss, "reduction", "beta")
BCEWithLogitsLoss = _loss(_nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, "reduction", "weight", "pos_weight")
SoftMarginLoss = _loss(_nn.SoftMarginLoss, F.soft_margin_loss, "reduction")
KLDivLoss = _loss(_nn.KLDivLoss, F.kl_div, "reduction", "log_target")
NLLLoss = _loss(_nn.NLLLoss, F.nll_loss, "reduction", "weight", "ignore_index")

#: Each module of PyTorch with ours in its place.
CLASSES = {
    getattr(_nn, name): value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, _nn.Module) and value.__module__ == __name__
}


class LinearCrossEntropyLoss(_nn.Module):
    """`functional.linear_cross_entropy` as a module, called with the layer's input, its weight, labels or probabilities, and its bias; options are the function's, `weight` one number a class."""

    def __init__(self, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, **options):
        super().__init__()
        self.register_buffer("weight", weight)
        self.options = dict(options, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)

    def forward(self, input, weight, target, bias=None):
        return F.linear_cross_entropy(input, weight, target, bias, class_weight=self.weight, **self.options)

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


# Options that this package refuses.


def _is_finite(*values):
    return all(value - value == 0.0 for value in map(float, values))


def _refused_constant(m):
    return None if _is_finite(m.value) else f"it pads with {m.value}, and ours with finite numbers"


def _refused_clamp(m):
    return None if _is_finite(m.min_val, m.max_val) else f"its bounds are {m.min_val} and {m.max_val}, and those of ours finite"


def _refused_alpha(m):
    return None if _is_finite(m.alpha) else f"its alpha is {m.alpha}, and that of ours finite"


def _refused_slope(m):
    return None if _is_finite(m.negative_slope) else f"its slope is {m.negative_slope}, and that of ours finite"


def _refused_softplus(m):
    is_taken = _is_finite(m.beta) and m.beta > 0 and _is_finite(m.threshold)
    return None if is_taken else f"its beta is {m.beta} and its threshold {m.threshold}, and ours takes finite ones, beta above 0"


def _refused_celu(m):
    return None if _is_finite(m.alpha) and m.alpha > 0 else f"its alpha is {m.alpha}, and that of ours finite and above 0"


def _refused_lambda(m):
    return None if _is_finite(m.lambd) else f"its lambda is {m.lambd}, and that of ours finite"


def _refused_threshold(m):
    is_taken = _is_finite(m.threshold, m.value)
    return None if is_taken else f"its threshold is {m.threshold} and its value {m.value}, and those of ours finite"


def _refused_size(m):
    return None if 1 <= m.size <= MAX_RESPONSES else f"its size is {m.size}, and that of ours at most {MAX_RESPONSES}"


for _kinds, _refused in (
    ((ConstantPad1d, ConstantPad2d, ConstantPad3d), _refused_constant),
    ((Hardtanh,), _refused_clamp),
    ((ELU,), _refused_alpha),
    ((LeakyReLU,), _refused_slope),
    ((CELU,), _refused_celu),
    ((Hardshrink, Softshrink), _refused_lambda),
    ((Threshold,), _refused_threshold),
    ((Softplus,), _refused_softplus),
    ((LocalResponseNorm,), _refused_size),
):
    for _kind in _kinds:
        _kind._why_not = staticmethod(_refused)

#: Modules of torchvision that have one of ours, and where they are.
_WINDOWS = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2")
_WINDOWS_ROOM = "torchvision.models.swin_transformer"


def _window_class(base):
    # torchvision calls its input x.
    module = _module_of_more(base, lambda self, x: _window.window_attention(self, x, base.forward))
    module._why_not = staticmethod(_window.why_not)
    return module


def classes():
    """`CLASSES`, with those of torchvision where the program has imported it."""
    room = sys.modules.get(_WINDOWS_ROOM)
    for name in _WINDOWS if room is not None else ():
        base = getattr(room, name, None)
        if base is not None and base not in CLASSES:
            CLASSES[base] = globals()[name] = _window_class(base)
    return CLASSES


def __getattr__(name):
    # A network that was saved with such modules, in a program that has not converted one.
    if name in _WINDOWS:
        importlib.import_module(_WINDOWS_ROOM)
        classes()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
