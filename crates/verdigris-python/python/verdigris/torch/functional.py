"""Functions of PyTorch's tensors, with the signatures of `torch.nn.functional` and its results' dims, types and memory formats.

Shapes are `[n, c, spatial...]` for convolution and pooling (`[c, spatial...]` is taken too), `[..., features]` for `linear`. Tensors may be
contiguous, channels-last, or have any strides. Each function has gradients, which are differentiable again where the ops' rules of
differentiation say so; where they do not, `UnsupportedError` is raised.

What PyTorch refuses is refused, by an exception of PyTorch's kind: `GraphError` and `BindingError` are `ValueError`s and `RuntimeError`s,
`OutOfRangeError` is an `IndexError`. What PyTorch takes and this package does not raises `UnsupportedError`; nothing falls back to PyTorch.
"""

import contextlib
import functools
import math
import operator
import warnings

import torch

from .._errors import GraphError, OutOfRangeError, UnsupportedError
from . import _ops, _policy
from ._activations import celu, glu, hardshrink, logsigmoid, prelu, rrelu, selu, softshrink, softsign, tanhshrink, threshold
from ._channels import channel_shuffle, local_response_norm, pixel_shuffle, pixel_unshuffle
from ._decoder import gated_mlp, rotary_embedding
from ._dropouts import alpha_dropout, drawn_state, dropout, dropout1d, dropout2d, dropout3d, feature_alpha_dropout
from ._fold import fold, unfold
from ._linear_loss import linear_cross_entropy
from ._resample import interpolate, pad
from ._unpool import max_unpool1d, max_unpool2d, max_unpool3d


def _each(value, spatial, name="a value", least=None):
    values = value if isinstance(value, tuple) else (value,) * spatial
    if len(values) == 1 and spatial > 1:
        values *= spatial
    if len(values) != spatial:
        raise GraphError(f"{name} is {values} for {spatial} spatial dims; there is one number, or one for each")
    if least is not None and any(value < least for value in values):
        raise GraphError(f"{name} is {values}; each is at least {least}")
    return values


def _words(**lists):
    return " ".join(f"{name}={','.join(map(str, values))}" for name, values in lists.items())


def conv_attributes(spatial, stride, padding, dilation, groups, filter_dims=None):
    """The attributes of a convolution as the operators take them. `padding` may be `"valid"`, or `"same"` with the filter's spatial dims."""
    padding = padding if isinstance(padding, str) else _ops.integers("padding", padding)
    stride, dilation, groups = _ops.integers("stride", stride), _ops.integers("dilation", dilation), _ops.integers("groups", groups)
    return _conv_attributes(spatial, stride, padding, dilation, groups, filter_dims)


@_ops.cached
def _conv_attributes(spatial, stride, padding, dilation, groups, filter_dims):
    stride, dilation = _each(stride, spatial, "stride", 1), _each(dilation, spatial, "dilation", 1)
    if groups < 1:
        raise GraphError(f"groups is {groups}; there is at least one group")
    after = None
    if padding == "valid":
        before = (0,) * spatial
    elif padding == "same":
        if any(step != 1 for step in stride):
            raise GraphError(f"padding 'same' with stride {stride}; it is for stride 1")
        total = [step * (size - 1) for step, size in zip(dilation, filter_dims)]
        before = tuple(pad // 2 for pad in total)
        after = tuple(pad - first for pad, first in zip(total, before))
    elif isinstance(padding, str):
        raise GraphError(f"padding is '{padding}'; it is a number, numbers, 'same' or 'valid'")
    else:
        before = _each(padding, spatial, "padding", 0)
    words = _words(stride=stride, padding=before, dilation=dilation)
    if after is not None and after != before:
        words += " " + _words(after=after)
    return f"{words} groups={groups}"


def _conv(spatial, x, weight, bias, stride, padding, dilation, groups):
    # By its number even where it is a symbol: the taps of a filter are what its network is.
    filter_dims = tuple(map(operator.index, weight.shape[2:])) if padding == "same" else None
    attributes = conv_attributes(spatial, stride, padding, dilation, groups, filter_dims)
    return conv(x, weight, bias, attributes, spatial)


def _batched(x, spatial, leading, what):
    """Whether there is a batch; `leading` dims stand before the spatial ones then."""
    # No `in` a tuple: of numbers that a compiler took for symbols it finds none.
    if x.dim() != spatial + leading and x.dim() != spatial + leading - 1:
        rule = f"it has {leading} dims before them, or one less"
        raise OutOfRangeError(f"{what} of {spatial} spatial dims and an input of {tuple(x.shape)}; {rule}")
    return x.dim() == spatial + leading


def conv(x, weight, bias, attributes, spatial):
    """Convolution with attributes made before."""
    if _ops.has_no_outputs(weight):
        # As PyTorch; the library's own op has a result without channels.
        raise GraphError(f"a filter of {tuple(weight.shape)}; there is at least one output channel, dim 0 of the filter")
    if not _batched(x, spatial, 2, "convolution"):
        return _ops.conv_fprop(x.unsqueeze(0), weight, bias, attributes).squeeze(0)
    return _ops.conv_fprop(x, weight, bias, attributes)


def conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """`y [n, k, out]` from `x [n, c, length]` and `w [k, c / groups, taps]`; see `torch.nn.functional.conv1d`."""
    return _conv(1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """`y [n, k, out_h, out_w]` from `x [n, c, h, w]` and `w [k, c / groups, r, s]`; see `torch.nn.functional.conv2d`."""
    return _conv(2, input, weight, bias, stride, padding, dilation, groups)


def conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """`y [n, k, out...]` from `x [n, c, d, h, w]` and `w [k, c / groups, t, r, s]`; see `torch.nn.functional.conv3d`."""
    return _conv(3, input, weight, bias, stride, padding, dilation, groups)


def _conv_transpose(spatial, x, weight, bias, stride, padding, output_padding, groups, dilation):
    attributes = conv_attributes(spatial, stride, padding, dilation, groups)
    output_padding = _each(_ops.integers("output_padding", output_padding), spatial, "output_padding", 0)
    return conv_transpose(x, weight, bias, attributes, spatial, output_padding)


def conv_transpose(x, weight, bias, attributes, spatial, output_padding):
    """Transposed convolution with attributes made before: the gradient of a convolution whose filter is `weight [c, k / groups, ...]`."""
    if not _batched(x, spatial, 2, "transposed convolution"):
        return conv_transpose(x.unsqueeze(0), weight, bias, attributes, spatial, output_padding).squeeze(0)
    if weight.dim() != spatial + 2:
        raise GraphError(f"a filter of {tuple(weight.shape)} for {spatial} spatial dims; it is [c, k / groups, filter...]")
    if _ops.is_empty(weight.shape[:2]):
        raise GraphError(f"a filter of {tuple(weight.shape)}; a transposed convolution has at least one input and one output channel, dims 0 and 1 of the filter")
    a = _ops.parse(attributes)
    stride, padding, dilation = a["stride"], a["padding"], a["dilation"]
    for i, extra in enumerate(output_padding):
        if extra >= max(stride[i], dilation[i]):
            raise GraphError(f"output_padding {output_padding} with stride {stride} and dilation {dilation}; it is less than one of them")
    dims = [
        (x.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[i + 2] - 1) + output_padding[i] + 1
        for i in range(spatial)
    ]
    if any(dim < 1 for dim in dims):
        raise GraphError(f"the result would have the spatial dims {dims}; each is at least 1")
    return _ops.conv_dgrad(x, weight, bias, attributes, _ops.integers("a dim of the result", dims))


def conv_transpose1d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """See `torch.nn.functional.conv_transpose1d`."""
    return _conv_transpose(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """See `torch.nn.functional.conv_transpose2d`."""
    return _conv_transpose(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """See `torch.nn.functional.conv_transpose3d`."""
    return _conv_transpose(3, input, weight, bias, stride, padding, output_padding, groups, dilation)


def linear(input, weight, bias=None):
    """`x [..., in]`, `w [out, in]`, `bias [out]` give `[..., out]`: `x @ w.T + bias`. Beside 16-bit operands the bias may be f32."""
    if weight.dim() == 1:
        # One output feature, without a dim of its own.
        return _ops.linear(input, weight.unsqueeze(0), None if bias is None else bias.reshape(1), "").squeeze(-1)
    return _ops.linear(input, weight, bias, "")


def mlp(input, weight1, bias1, weight2, bias2, activation="gelu"):
    """`linear(f(linear(x)))`: `x [..., in]`, weights `[hidden, in]` and `[out, hidden]`, biases of one dim or None; f is "gelu", "gelu_tanh", "relu" or "silu".

    One call, with one node of autograd, whose gradients are one call too: the activation and its gradient are steps of the products. The hidden values before
    and behind f are kept for the gradients, rounded to the type of x."""
    words = {"gelu": "f=gelu_erf", "gelu_tanh": "f=gelu_tanh", "relu": "f=relu", "silu": "f=silu"}
    if activation not in words:
        raise GraphError(f"the activation is {activation!r}; it is one of {', '.join(words)}")
    return _ops.mlp_in_mode(input, weight1, bias1, weight2, bias2, words[activation])



# Pooling.


def pool_attributes(spatial, window, stride, padding, dilation, ceil_mode, x_dims, words):
    """The attributes of a sliding pooling, as `with_lists` has them. With `ceil_mode` the padding after the last element depends on `x_dims`."""
    window, stride = _ops.integers("kernel_size", window), _ops.integers("stride", stride)
    padding, dilation = _ops.integers("padding", padding), _ops.integers("dilation", dilation)
    return _pool_attributes(spatial, window, stride, padding, dilation, ceil_mode, _ops.integers("size", x_dims), words)


@_ops.cached
def _pool_attributes(spatial, window, stride, padding, dilation, ceil_mode, x_dims, words):
    window = _each(window, spatial, "kernel_size", 1)
    stride = window if stride is None or stride == () else _each(stride, spatial, "stride", 1)
    padding, dilation = _each(padding, spatial, "padding", 0), _each(dilation, spatial, "dilation", 1)
    reach = [dilation[i] * (window[i] - 1) + 1 for i in range(spatial)]
    if any(2 * pad > size for pad, size in zip(padding, reach)):
        raise GraphError(f"padding {padding} for windows that reach over {tuple(reach)} elements; it is at most half of that")
    lists = dict(window=window, stride=stride, padding=padding, dilation=dilation)
    if ceil_mode:
        after = tuple(_padding_after(*each) for each in zip(x_dims, reach, stride, padding))
        # Symbols are compared with nothing: each answer would be a graph of its own.
        if _ops.are_open(after) or after != padding:
            lists.update(after=after, **(dict(within=padding) if "pad=1" in words else {}))
    return _ops.with_lists(words, **lists)


def _padding_after(extent, reach, stride, padding):
    """With `ceil_mode`, of one dim: as many windows as begin inside of the tensor or of the padding before it, the last of which may reach beyond the padding behind it."""
    out = torch.sym_min(-(-(extent + 2 * padding - reach) // stride) + 1, -(-(extent + padding) // stride))
    return torch.sym_max((out - 1) * stride + reach - extent - padding, padding)


def _pooled(function, spatial, x, attributes, may_be_empty=None):
    """Pooling of a batch, or of one without its dim. The first `may_be_empty` dims may be: that of a batch unless more is said."""
    is_batch = _batched(x, spatial, 2, "pooling")
    if _ops.is_empty(x.shape[is_batch if may_be_empty is None else may_be_empty :]):
        raise GraphError(f"pooling of {tuple(x.shape)}; dims behind the batch are not empty")
    if is_batch:
        return _ops.told(function, x, attributes)
    result = _ops.told(function, x.unsqueeze(0), attributes)
    return tuple(part.squeeze(0) for part in result) if isinstance(result, tuple) else result.squeeze(0)


def _max_pool(spatial, x, window, stride, padding, dilation, ceil_mode, return_indices):
    dims = tuple(x.shape[-spatial:]) if ceil_mode else None
    words = "index=i64" if return_indices else ""
    attributes = pool_attributes(spatial, window, stride, padding, dilation, ceil_mode, dims, words)
    return _maxima(spatial, x, attributes, return_indices)


def _maxima(spatial, x, attributes, return_indices, may_be_empty=None):
    """The maxima, with their places where these are returned. Places are half of the bytes that are written, or more: they are left out where neither the caller nor a gradient reads them."""
    if not (return_indices or _ops.is_recorded() and x.requires_grad):
        return _pooled(_ops.max_pool_values, spatial, x, attributes, may_be_empty)
    y, index = _pooled(_ops.max_pool, spatial, x, attributes, may_be_empty)
    return (y, index) if return_indices else y


def max_pool1d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """See `torch.nn.functional.max_pool1d`."""
    return _max_pool(1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """See `torch.nn.functional.max_pool2d`."""
    return _max_pool(2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """See `torch.nn.functional.max_pool3d`."""
    return _max_pool(3, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _avg_pool(spatial, x, window, stride, padding, ceil_mode, count_include_pad, divisor_override):
    dims = tuple(x.shape[-spatial:]) if ceil_mode else None
    if spatial == 3 and any(size > extent for size, extent in zip(_each(_ops.integers("kernel_size", window), 3), x.shape[-3:])):
        raise GraphError(f"kernel_size is {window} for an input of {tuple(x.shape)}; in 3 dims it is at most the input without its padding")
    if divisor_override is None:
        words = f"pad={int(count_include_pad)}"
    elif divisor_override == 0:
        raise GraphError("divisor_override is 0; it is another number")
    else:
        words = f"divisor={_ops.integers('divisor_override', divisor_override)}"
    attributes = pool_attributes(spatial, window, stride, padding, 1, ceil_mode, dims, words)
    return _pooled(_ops.avg_pool, spatial, x, attributes)


def avg_pool1d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """See `torch.nn.functional.avg_pool1d`."""
    return _avg_pool(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad, None)


def avg_pool2d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """See `torch.nn.functional.avg_pool2d`."""
    return _avg_pool(2, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool3d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """See `torch.nn.functional.avg_pool3d`."""
    return _avg_pool(3, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _adaptive(spatial, x, output_size):
    output_size = _ops.integers("output_size", output_size)
    sizes = output_size if isinstance(output_size, tuple) else (output_size,) * spatial
    if len(sizes) != spatial:
        raise GraphError(f"output_size is {sizes} for {spatial} spatial dims; there is one number, or one for each")
    sizes = _ops.integers("output_size", tuple(x.shape[i - spatial] if size is None else size for i, size in enumerate(sizes)))
    return _each(sizes, spatial, "output_size", 0)


@_ops.cached
def _adaptive_attributes(sizes, words):
    return _ops.with_lists(words, adaptive=sizes)


def _adaptive_avg(spatial, x, output_size):
    sizes = _adaptive(spatial, x, output_size)
    if any(size == 0 for size in sizes):
        return _nothing(x, spatial, sizes)
    return _pooled(_ops.avg_pool, spatial, x, _adaptive_attributes(sizes, "pad=0"), 1 if spatial == 3 else x.dim() - spatial)


def _nothing(x, spatial, sizes):
    """A result without elements, of which the gradient is 0."""
    _batched(x, spatial, 2, "pooling")
    return x.flatten()[:0].reshape(*x.shape[:-spatial], *sizes)


def adaptive_avg_pool1d(input, output_size):
    """See `torch.nn.functional.adaptive_avg_pool1d`."""
    return _adaptive_avg(1, input, output_size)


def adaptive_avg_pool2d(input, output_size):
    """See `torch.nn.functional.adaptive_avg_pool2d`."""
    return _adaptive_avg(2, input, output_size)


def adaptive_avg_pool3d(input, output_size):
    """See `torch.nn.functional.adaptive_avg_pool3d`."""
    return _adaptive_avg(3, input, output_size)


def _adaptive_max(spatial, x, output_size, return_indices):
    sizes = _adaptive(spatial, x, output_size)
    if any(size == 0 for size in sizes):
        y = _nothing(x, spatial, sizes)
        return (y, torch.empty_like(y, dtype=torch.int64)) if return_indices else y
    return _maxima(spatial, x, _adaptive_attributes(sizes, "index=i64" if return_indices else ""), return_indices, 1)


def adaptive_max_pool1d(input, output_size, return_indices=False):
    """See `torch.nn.functional.adaptive_max_pool1d`."""
    return _adaptive_max(1, input, output_size, return_indices)


def adaptive_max_pool2d(input, output_size, return_indices=False):
    """See `torch.nn.functional.adaptive_max_pool2d`."""
    return _adaptive_max(2, input, output_size, return_indices)


def adaptive_max_pool3d(input, output_size, return_indices=False):
    """See `torch.nn.functional.adaptive_max_pool3d`."""
    return _adaptive_max(3, input, output_size, return_indices)


def _fractional_max_pool(spatial, x, kernel_size, output_size, output_ratio, return_indices, samples):
    name = f"fractional_max_pool{spatial}d"
    is_batch = _batched(x, spatial, 2, name)
    if 0 in x.shape[is_batch:]:
        raise GraphError(f"{name} of {tuple(x.shape)}; dims behind the batch are not empty")
    window = _each(_ops.integers("kernel_size", kernel_size), spatial, "kernel_size", 1)
    extents = tuple(x.shape[-spatial:])
    if output_size is None:
        if output_ratio is None:
            raise GraphError(f"{name} has neither an output_size nor an output_ratio; it has one of them")
        ratios = (output_ratio,) * spatial if isinstance(output_ratio, (int, float)) else tuple(output_ratio)
        if len(ratios) != spatial or not all(0 < ratio < 1 for ratio in ratios):
            raise GraphError(f"output_ratio is {ratios} for {spatial} spatial dims; there is one number between 0 and 1, or one for each")
        output_size = tuple(int(extent * ratio) for extent, ratio in zip(extents, ratios))
    out = _each(_ops.integers("output_size", output_size), spatial, "output_size", 1)
    if any(many + taps - 1 > extent for many, taps, extent in zip(out, window, extents)):
        raise GraphError(f"{name} of {extents} by windows of {window} to {out}; output_size + kernel_size - 1 is at most the size")
    planes = (x.shape[0] if is_batch else 1, x.shape[-spatial - 1])
    if samples is None:
        samples = torch.rand(*planes, spatial, dtype=x.dtype, device=x.device)
    if tuple(samples.shape) != (*planes, spatial) or not samples.is_floating_point() or samples.device != x.device:
        rule = f"each plane has one for each dim, floating-point {(*planes, spatial)} on {x.device}"
        raise GraphError(f"_random_samples of {samples.dtype} and {tuple(samples.shape)} on {samples.device} for {tuple(x.shape)}; {rule}")
    # PyTorch's order is width, height of two dims, and depth, height, width of three.
    samples = samples.detach().flip(-1) if spatial == 2 else samples.detach()
    attributes = _words(window=window, fractional=out) + (" index=i64" if return_indices else "")
    y, index = _ops.fractional_max_pool(x if is_batch else x.unsqueeze(0), samples, attributes)
    y, index = (y, index) if is_batch else (y.squeeze(0), index.squeeze(0))
    return (y, index) if return_indices else y


def fractional_max_pool2d(input, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None):
    """Max pooling by windows of `kernel_size` that begin where random samples say; see `torch.nn.functional.fractional_max_pool2d`.

    There are `output_size` windows, or `output_ratio` (below 1) times the size. Each plane has samples of its own, drawn by PyTorch's generator as PyTorch draws them, so that results
    are PyTorch's under the same seed. Where windows begin is worked out in float32 (float64 of float64), as PyTorch does on a GPU; on the CPU it rounds in the type of the
    input, and lays windows of 16-bit floats elsewhere. Where a window holds several NaN the first has the index. Dims have at most 2^20 elements.
    """
    return _fractional_max_pool(2, input, kernel_size, output_size, output_ratio, return_indices, _random_samples)


def fractional_max_pool3d(input, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None):
    """See `torch.nn.functional.fractional_max_pool3d`, and `fractional_max_pool2d` for what is the same and what differs."""
    return _fractional_max_pool(3, input, kernel_size, output_size, output_ratio, return_indices, _random_samples)


# Functions of elements.


def relu(input, inplace=False):
    """`max(x, 0)`. `inplace` is taken and the result is new all the same."""
    return _ops.activation(input, "f=relu")


def leaky_relu(input, negative_slope=0.01, inplace=False):
    """`x` if `x > 0`, else `negative_slope * x`."""
    return _ops.activation(input, f"f=leaky_relu slope={float(negative_slope)!r}")


def gelu(input, approximate="none"):
    """GELU by the error function, or with `approximate="tanh"` by the hyperbolic tangent."""
    if approximate not in ("none", "tanh"):
        raise GraphError(f"approximate is '{approximate}'; it is 'none' or 'tanh'")
    return _ops.activation(input, "f=gelu_tanh" if approximate == "tanh" else "f=gelu_erf")


def silu(input, inplace=False):
    """`x * sigmoid(x)`."""
    return _ops.activation(input, "f=silu")


def hardswish(input, inplace=False):
    """`x * min(max(x + 3, 0), 6) / 6`."""
    return _ops.activation(input, "f=hard_swish")


def hardsigmoid(input, inplace=False):
    """`min(max(x + 3, 0), 6) / 6`."""
    return _ops.activation(input, "f=hard_sigmoid")


def hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False):
    """`min(max(x, min_val), max_val)`."""
    if min_val > max_val:
        raise GraphError(f"min_val is {min_val} and max_val {max_val}; it is not greater")
    return _ops.activation(input, f"f=clamp lower={float(min_val)!r} upper={float(max_val)!r}")


def relu6(input, inplace=False):
    """`min(max(x, 0), 6)`."""
    return hardtanh(input, 0.0, 6.0)


def mish(input, inplace=False):
    """`x * tanh(ln(1 + e^x))`."""
    return _ops.activation(input, "f=mish")


def sigmoid(input):
    """`1 / (1 + e^-x)`."""
    input = input if input.is_floating_point() else input.to(torch.get_default_dtype())
    return _ops.activation(input, "f=sigmoid")


def tanh(input):
    """`tanh(x)`."""
    input = input if input.is_floating_point() else input.to(torch.get_default_dtype())
    return _ops.activation(input, "f=tanh")


def elu(input, alpha=1.0, inplace=False):
    """`x` if `x > 0`, else `alpha * (e^x - 1)`."""
    return _ops.activation(input, f"f=elu alpha={float(alpha)!r}")


def softplus(input, beta=1.0, threshold=20.0):
    """`ln(1 + e^(beta * x)) / beta`, and `x` where `beta * x > threshold`."""
    input = _ops.widened(input)
    return _ops.activation(input, f"f=softplus beta={float(beta)!r} threshold={float(threshold)!r}")


# Normalization.


@_ops.cached
def norm_attributes(kind, first, rank, groups, eps, channel):
    """The attributes of a normalization of the dims from `first` on."""
    words = f"kind={kind} axes={','.join(map(str, range(first, rank)))} eps={float(eps)!r}"
    return words + (f" groups={groups}" if groups != 1 else "") + (" channel=1" if channel else "")


def _over_last(kind, input, normalized_shape, weight, bias, eps):
    shape = _ops.integers("normalized_shape", normalized_shape)
    shape = shape if isinstance(shape, tuple) else (shape,)
    if not shape or tuple(input.shape[-len(shape) :]) != shape or input.dim() < len(shape):
        raise GraphError(f"normalized_shape is {shape} for an input of {tuple(input.shape)}; it is the input's last dims, at least one")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and tuple(vector.shape) != shape:
            raise GraphError(f"{name} has the dims {tuple(vector.shape)}; it has those of normalized_shape, {shape}")
    if torch.compiler.is_compiling():
        # In the compiler's own words, so that it fuses what stands around.
        plain = torch.nn.functional
        return plain.rms_norm(input, shape, weight, eps) if kind == "rms" else plain.layer_norm(input, shape, weight, bias, eps)
    return _ops.norm(input, weight, bias, norm_attributes(kind, input.dim() - len(shape), input.dim(), 1, eps, False))


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dims; see `torch.nn.functional.layer_norm`."""
    return _over_last("layer", input, normalized_shape, weight, bias, eps)


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dims. Without an `eps` it is that of the type that is computed in: float64 of a float64, else float32."""
    if eps is None:
        eps = torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps
    return _over_last("rms", input, normalized_shape, weight, None, eps)


def _of_channels(x, groups, first, weight, bias, eps):
    channels = x.shape[1]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and tuple(vector.shape) != (channels,):
            raise GraphError(f"{name} has the dims {tuple(vector.shape)} for {channels} channels; it has an element for each")
    attributes = norm_attributes("layer", first, x.dim(), groups, eps, True)
    if torch.compiler.is_compiling():
        if first == 1:
            return torch.nn.functional.group_norm(x, groups, weight, bias, eps)
        return torch.nn.functional.instance_norm(x, weight=weight, bias=bias, eps=eps)
    return _ops.norm(x, weight, bias, attributes)


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-05):
    """Layer norm of each of `num_groups` equal parts of the channels of `[n, c, ...]`; see `torch.nn.functional.group_norm`."""
    if input.dim() < 2:
        raise GraphError(f"group_norm of an input of {tuple(input.shape)}; it is [n, c, ...]")
    num_groups = _ops.integers("num_groups", num_groups)
    if num_groups < 1 or input.shape[1] % num_groups:
        raise GraphError(f"num_groups is {num_groups} for {input.shape[1]} channels; it divides them")
    # As PyTorch: it is all images together that have to have more than one.
    if input.shape[0] * (input.shape[1] // num_groups) * math.prod(input.shape[2:]) == 1:
        raise GraphError(f"group_norm of {tuple(input.shape)} in {num_groups} groups, which has one value per group; there have to be more")
    return _of_channels(input, num_groups, 1, weight, bias, eps)


def instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-05
):
    """Layer norm of each channel of each image of `[n, c, ...]`; see `torch.nn.functional.instance_norm`.

    `running_mean` and `running_var` take the part `momentum` of the mean over the images of their statistics, in place; without `use_input_stats` they are what is normalized with.
    """
    if input.dim() < 3 and use_input_stats:
        raise GraphError(f"instance_norm of an input of {tuple(input.shape)}; it is [n, c, ...] with spatial dims")
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise GraphError("running_mean and running_var are missing; without use_input_stats they are what is normalized with")
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if math.prod(input.shape[2:]) == 1:
        raise GraphError(f"instance_norm of an input of {tuple(input.shape)}; a channel has more than one element")
    if (running_mean is None) != (running_var is None):
        raise GraphError("one of running_mean and running_var is missing; they are kept together")
    if running_mean is not None:
        return _tracked_instance_norm(input, running_mean, running_var, weight, bias, momentum, eps)
    # Autocast leaves the input's type alone.
    if torch.is_autocast_enabled(input.device.type):
        with torch.autocast(input.device.type, enabled=False):
            return _of_channels(input, 1, 2, weight, bias, eps)
    return _of_channels(input, 1, 2, weight, bias, eps)


def _tracked_instance_norm(input, running_mean, running_var, weight, bias, momentum, eps):
    """Batch normalization of one image that has the channels of all: its statistics are those of each channel of each image."""
    n, c = input.shape[:2]
    if tuple(running_mean.shape) != (c,) or tuple(running_var.shape) != (c,):
        raise GraphError(f"running_mean and running_var of {tuple(running_mean.shape)} and {tuple(running_var.shape)} for {c} channels; there is one number a channel")
    if not n:
        # Of no image there are no statistics, and those that run stay.
        return batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    statistics = [statistic.detach().repeat(n) for statistic in (running_mean, running_var)]
    scales = [None if one is None else one.repeat(n) for one in (weight, bias)]
    y = batch_norm(input.reshape(1, n * c, *input.shape[2:]), *statistics, *scales, True, momentum, eps)
    with torch.no_grad():
        for running, own in zip((running_mean, running_var), statistics):
            running.copy_(own.view(n, c).mean(0))
    return y.view(input.shape)


# Batch normalization.


#: Activations that may stand behind a normalization, by the names that their functions have, with the operators' words.
_BEHIND_NORM = {
    "relu": "f=relu",
    "relu6": "f=clamp lower=0.0 upper=6.0",
    "silu": "f=silu",
    "hardswish": "f=hard_swish",
    "hardsigmoid": "f=hard_sigmoid",
    "mish": "f=mish",
}


@_ops.cached
def _norm_words(eps, momentum, activation):
    """The attributes of a normalization; of its activation, which may be empty, the operators' words."""
    is_relu = activation == "f=relu"
    behind = f"|{activation}" if activation and not is_relu else ""
    return f"eps={float(eps)!r} momentum={float(momentum)!r} relu={int(is_relu)}{behind}"


def _check_norm(x, statistics, training):
    if x.dim() < 2:
        raise GraphError(f"batch normalization of {tuple(x.shape)}; it has the dims [n, c, ...]")
    if training and (statistics[0] is None) != (statistics[1] is None):
        raise GraphError("one of running_mean and running_var is missing; they are kept together, or neither is")
    if training:
        # As PyTorch: a channel of one value has no deviation.
        if x.shape[0] * math.prod(x.shape[2:]) == 1:
            raise GraphError(f"training on {tuple(x.shape)}, which has one value per channel; there have to be more")
    elif any(statistic is None for statistic in statistics):
        raise GraphError("running_mean and running_var are missing; without training they are what is normalized with")


def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """`(x - mean) / sqrt(var + eps) * weight + bias` of each channel of `x [n, c, ...]`; see `torch.nn.functional.batch_norm`.

    With `training` by the batch's own statistics, of which `running_mean` and `running_var` take the part `momentum`, in place and without a wait; else by
    the running ones.
    """
    return batch_norm_act(input, running_mean, running_var, weight, bias, training=training, momentum=momentum, eps=eps)


def batch_norm_act(
    input, running_mean, running_var, weight=None, bias=None, *, training=False, momentum=0.1, eps=1e-5, add=None, activation=None
):
    """Batch normalization with what often stands behind it, in the same pass over memory: `activation(batch_norm(x) + add)`.

    `activation`: `"relu"`, `"relu6"`, `"silu"`, `"hardswish"`, `"hardsigmoid"`, `"mish"` or `None`. `add`: a tensor of the dims of `x`, with no activation but ReLU behind it. The
    gradient is one call too; it reads the result only where something was added, and works out again what any other activation was of.
    """
    if activation is not None and activation not in _BEHIND_NORM:
        raise GraphError(f"activation is '{activation}'; it is one of {', '.join(_BEHIND_NORM)}, or None")
    if add is not None and activation not in (None, "relu"):
        raise GraphError(f"{activation} behind a sum; what is added has ReLU behind it, or nothing: call the function on the sum")
    behind = _BEHIND_NORM[activation] if activation else ""
    return _normalized(input, running_mean, running_var, weight, bias, training, momentum, eps, add, behind)


def _normalized(input, running_mean, running_var, weight, bias, training, momentum, eps, add, behind):
    """As `batch_norm_act`, the activation in the operators' words or empty."""
    _check_norm(input, (running_mean, running_var), training)
    if torch.compiler.is_compiling():
        y = torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        y = y if add is None else y + add
        return _ops.activation(y, behind) if behind else y
    words = _norm_words(eps, momentum, behind)
    if training and input.numel():
        return _ops.batch_norm(input, weight, bias, add, running_mean, running_var, words)[0]
    if training:
        # Of no elements there are no statistics, and those that run stay.
        running_mean, running_var = (torch.zeros(input.shape[1], device=input.device) for _ in range(2))
    tensors = (input, running_mean, running_var, weight, bias, add)
    if not behind or add is None or not _wants_gradient(tensors):
        return _ops.batch_norm_inference(*tensors, words)
    # Of what was added the gradient needs the result, which that of ReLU by itself keeps.
    return relu(_ops.batch_norm_inference(*tensors, _norm_words(eps, momentum, "")))


def _wants_gradient(tensors):
    """Whether gradients of one of these are recorded. A trace of `torch.jit` counts as if they were: it is run in either mode, whichever it was made in."""
    return _ops.is_traced() or torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def batch_norm_module(module, x, add=None, behind=""):
    """The forward of `torch.nn.BatchNorm1d` to `BatchNorm3d`, with what `batch_norm_act` puts behind it; an activation in the operators' words."""
    module._check_input_dim(x)
    training = module.training or module.running_mean is None and module.running_var is None
    statistics = (module.running_mean, module.running_var) if not module.training or module.track_running_stats else (None, None)
    momentum, count, is_counted = module.momentum, module.num_batches_tracked, _count_batch(module)
    if momentum is None and is_counted and x.numel():
        # The mean of all batches so far: the new one's part is one in their number, which stays where it is.
        batch = [torch.zeros_like(statistic) for statistic in statistics]
        y = _normalized(x, *batch, module.weight, module.bias, True, 1.0, module.eps, add, behind)
        for statistic, value in zip(statistics, batch):
            statistic.lerp_(value, count.reciprocal().to(statistic.dtype))
        return y
    return _normalized(x, *statistics, module.weight, module.bias, training, momentum or 0.0, module.eps, add, behind)


def _count_batch(module):
    """Counts the batch where the module does; says whether it does."""
    is_counted = module.training and module.track_running_stats and module.num_batches_tracked is not None
    if is_counted:
        module.num_batches_tracked.add_(1)
    return is_counted


@_ops.cached
def _chain_words(conv, eps, momentum, activation):
    return f"{conv} {_norm_words(eps, momentum, activation)}"


def conv_batch_norm_modules(conv, norm, x, add=None, behind=""):
    """The forward of a convolution without a bias and the batch normalization behind it, in training, with what `batch_norm_act` puts behind it, an activation
    in the operators' words: one call, and one node of autograd. The normalization has a momentum."""
    norm._check_input_dim(x)
    if x.shape[0] == 1 and x.dim() == conv.weight.dim() and max(dims := _ops.conv_out(x.shape, conv.weight.shape, conv._attributes)[2:]) == 1:
        raise GraphError(f"training on {(1, conv.weight.shape[0], *dims)}, which has one value per channel; there have to be more")
    _count_batch(norm)
    statistics = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
    words = _chain_words(conv._attributes, norm.eps, norm.momentum, behind)
    return _ops.conv_batch_norm(x, conv.weight, norm.weight, norm.bias, add, *statistics, words)[0]


# Softmax and losses.


def _axis(x, dim, name):
    if dim is None:
        dim = 0 if x.dim() in (0, 1, 3) else 1
        warnings.warn(f"{name} of a tensor of {x.dim()} dims takes dim {dim}, since none is named; name it", stacklevel=3)
    return _ops.axis(x, dim)


def softmax(input, dim=None, _stacklevel=3, dtype=None):
    """Softmax along `dim`; of the input as `dtype` where that is given."""
    input = input if dtype is None else input.to(dtype)
    return _ops.softmax(input, f"axis={_axis(input, dim, 'softmax')} log=0")


def log_softmax(input, dim=None, _stacklevel=3, dtype=None):
    """The logarithm of softmax along `dim`."""
    input = input if dtype is None else input.to(dtype)
    return _ops.softmax(input, f"axis={_axis(input, dim, 'log_softmax')} log=1")


def softmin(input, dim=None, _stacklevel=3, dtype=None):
    """Softmax of `-x` along `dim`; of the input as `dtype` where that is given."""
    input = input if dtype is None else input.to(dtype)
    return _ops.softmax(input, f"axis={_axis(input, dim, 'softmin')} log=0 negative=1")


# Scans.


def _scan(f, name, input, dim, dtype):
    input = input if dtype is None else input.to(dtype)
    if not input.is_floating_point():
        raise UnsupportedError(f"{name} of {input.dtype}; scans are computed in f32, which does not hold all integers: name a floating-point dtype")
    return _ops.scan(input, f"f={f} axis={_axis(input, dim, name)}")


def cumsum(input, dim, dtype=None):
    """`y[i] = x[0] + ... + x[i]` along `dim`, of the input as `dtype` where that is given; floating-point alone.

    Summed in float32 (float64 for float64) in an order that follows from the dims and strides, so that results repeat bit for bit, and rounded once.
    """
    return _scan("add", "cumsum", input, dim, dtype)


def cumprod(input, dim, dtype=None):
    """`y[i] = x[0] * ... * x[i]` along `dim`, of the input as `dtype` where that is given; floating-point alone. As `cumsum`; its gradient is right where
    factors are 0, too."""
    return _scan("mul", "cumprod", input, dim, dtype)


def logcumsumexp(input, dim):
    """`y[i] = ln(e^x[0] + ... + e^x[i])` along `dim`; floating-point alone. As `cumsum`."""
    return _scan("log_sum_exp", "logcumsumexp", input, dim, None)


def _extremum(f, name, input, dim):
    if not input.is_floating_point():
        raise UnsupportedError(f"{name} of {input.dtype}; it takes floating-point numbers")
    return getattr(torch.return_types, name)(_ops.scan_with_place(input, f"f={f} axis={_axis(input, dim, name)}"))


def cummax(input, dim):
    """The greatest of `x[0], ..., x[i]` along `dim`, and where the last of them stands that is it, as `torch.cummax`; floating-point alone.

    A NaN is the greatest from there on. The gradient goes to the places, added up by PyTorch's `scatter_add`.
    """
    return _extremum("max", "cummax", input, dim)


def cummin(input, dim):
    """The least of `x[0], ..., x[i]` along `dim`, and where it stands. As `cummax`."""
    return _extremum("min", "cummin", input, dim)


_REDUCTIONS = {(True, True): "mean", (True, False): "sum", (False, True): "none", (False, False): "none"}


def cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    """The cross-entropy of logits `[n, classes, ...]` or `[classes]`, and labels without the class axis or probabilities with it.

    A label that is neither a class nor ignored raises `OutOfRangeError` on the CPU, and gives NaN on a GPU.
    """
    reduction = _reduction(reduction, size_average, reduce)
    if not 0.0 <= label_smoothing <= 1.0:
        raise GraphError(f"label_smoothing is {label_smoothing}; it is from 0 to 1")
    axis = 0 if input.dim() == 1 else 1
    words = f"axis={axis} smoothing={float(label_smoothing)!r} reduction={reduction}"
    dims = input.shape
    if not dims:
        raise GraphError("the logits have no dims; they are [n, classes, ...] or [classes]")
    classes = dims[axis]
    is_probable = target.is_floating_point() and target.shape == dims
    if weight is not None and weight.dim() != 1 and weight.numel() == classes and (is_probable or len(dims) > 2):
        weight = weight.reshape(-1)
    if weight is not None and tuple(weight.shape) != (classes,):
        raise GraphError(f"weight has the dims {tuple(weight.shape)} for {classes} classes; there is one weight a class")
    if is_probable:
        if ignore_index >= 0:
            raise GraphError(f"ignore_index is {ignore_index} with probabilities as targets; only labels are ignored")
        wide = torch.promote_types(input.dtype, target.dtype)
        wide = wide if weight is None else torch.promote_types(wide, weight.dtype)
        input, target, weight = (tensor if tensor is None else tensor.to(wide) for tensor in (input, target, weight))
        return _ops.class_loss(input, target, weight, f"{words} targets=probabilities")
    rows = dims[:axis] + dims[axis + 1 :]
    if not rows and len(dims) == 1 and target.shape == (1,) and not label_smoothing:
        target = target.reshape(())
    if target.shape != rows:
        raise GraphError(f"the target has the dims {tuple(target.shape)} for logits of {tuple(dims)}; labels have {tuple(rows)}, probabilities {tuple(dims)}")
    if target.dtype != torch.int64 and (target.dtype != torch.uint8 or len(dims) > 2):
        raise GraphError(f"labels of {target.dtype} for logits of {tuple(dims)}; they are of torch.int64, in up to 2 dims also of torch.uint8")
    words += f" ignore={int(ignore_index)}"
    if weight is None:
        return _ops.cross_entropy(input, target, words)[0]
    if weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
        raise GraphError(f"weight is of {weight.dtype} beside logits of {input.dtype}; they are of one type")
    if weight.requires_grad and torch.is_grad_enabled():
        raise GraphError("weight requires a gradient; beside labels it has none")
    return _ops.class_loss(input, target, weight, f"{words} targets=labels")


# Losses of elements, and of log-probabilities.


def _reduction(reduction, size_average=None, reduce=None):
    if size_average is not None or reduce is not None:
        reduction = _REDUCTIONS[reduce is None or bool(reduce), size_average is None or bool(size_average)]
    if reduction not in ("none", "sum", "mean"):
        raise GraphError(f"the reduction is '{reduction}'; it is 'none', 'sum' or 'mean'")
    return reduction


def _element_loss(name, input, target, words, reduction, weight=None, positive=None):
    if input.shape != target.shape:
        input, target = _broadcast(name, input, target)
    wide = torch.promote_types(input.dtype, target.dtype)
    for beside in (weight, positive):
        if beside is not None and beside.requires_grad:
            raise UnsupportedError(f"{name} with a weight that wants a gradient; weights have none in this package")
        wide = wide if beside is None else torch.promote_types(wide, beside.dtype)
    input, target = input.to(wide), target.to(wide)
    weights = [None if beside is None else _beside(name, beside, input).to(wide) for beside in (weight, positive)]
    return _ops.element_loss(input, target, *weights, f"loss={words} reduction={reduction}")


def _broadcast(name, input, target):
    """Both by the dims of both together, where PyTorch's loss takes them; it warns of four, and so do these."""
    shapes = f"{name} of an input of {tuple(input.shape)} and a target of {tuple(target.shape)}"
    if name not in _BROADCAST:
        raise GraphError(f"{shapes}; they are of the same dims")
    try:
        dims = torch.broadcast_shapes(input.shape, target.shape)
    except RuntimeError as error:
        raise GraphError(f"{shapes}; they broadcast to the same dims") from error
    if name == "soft_margin_loss" and dims != input.shape:
        raise GraphError(f"{shapes}; the target broadcasts to the input")
    if _BROADCAST[name] and not torch.compiler.is_compiling():
        warnings.warn(f"{shapes}, which are broadcast to {tuple(dims)}; a loss of tensors of the same dims is what is meant, most often", stacklevel=5)
    return input.expand(dims), target.expand(dims)


#: Losses of which PyTorch takes an input and a target that broadcast, and whether it warns.
_BROADCAST = {"mse_loss": True, "l1_loss": True, "huber_loss": True, "smooth_l1_loss": True, "soft_margin_loss": False, "kl_div": False}


def _beside(name, weight, input):
    """A weight with as many dims as the input, to which it broadcasts."""
    missing = input.dim() - weight.dim()
    if missing < 0 or any(own not in (1, dim) for own, dim in zip(weight.shape, input.shape[missing:])):
        raise GraphError(f"{name} of an input of {tuple(input.shape)} with a weight of {tuple(weight.shape)}, which broadcasts to it")
    return weight[(None,) * missing]


def _weighted_loss(name, input, target, words, reduction, weight, is_mean_of_weights):
    """A loss whose weights have the dims of the input. Their gradient is the losses', which are kept where it is wanted; the mean is over the sum of the weights, or over the elements."""
    if weight is None:
        return _element_loss(name, input, target, words, reduction)
    if weight.shape != input.shape:
        raise GraphError(f"{name} of an input of {tuple(input.shape)} with a weight of {tuple(weight.shape)}; there is one for each element")
    if weight.requires_grad and torch.is_grad_enabled():
        losses = _element_loss(name, input, target, words, "none") * weight
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / weight.sum() if is_mean_of_weights else losses.mean()
    weighted = functools.partial(_element_loss, name, input, target, words, weight=weight.detach())
    return weighted("sum") / weight.sum() if reduction == "mean" and is_mean_of_weights else weighted(reduction)


def mse_loss(input, target, size_average=None, reduce=None, reduction="mean", weight=None):
    """`weight * (input - target)²`, whose mean is over the sum of the weights. An input and a target of other dims are broadcast with a warning, as PyTorch's are; so are those of `l1_loss`,
    `huber_loss` and `smooth_l1_loss`."""
    return _weighted_loss("mse_loss", input, target, "squared", _reduction(reduction, size_average, reduce), weight, True)


def l1_loss(input, target, size_average=None, reduce=None, reduction="mean", weight=None):
    """`weight * |input - target|`, whose mean is over the sum of the weights."""
    return _weighted_loss("l1_loss", input, target, "absolute", _reduction(reduction, size_average, reduce), weight, True)


def huber_loss(input, target, reduction="mean", delta=1.0, weight=None):
    """`weight * a² / 2` for `a = |input - target|` up to `delta`, `weight * delta * (a - delta / 2)` beyond. Its mean is over the elements."""
    return _weighted_loss("huber_loss", input, target, f"huber bend={float(delta)!r}", _reduction(reduction), weight, False)


def smooth_l1_loss(input, target, size_average=None, reduce=None, reduction="mean", beta=1.0):
    """`a² / (2 * beta)` for `a = |input - target|` up to `beta`, `a - beta / 2` beyond."""
    words = f"smooth_l1 bend={float(beta)!r}"
    return _weighted_loss("smooth_l1_loss", input, target, words, _reduction(reduction, size_average, reduce), None, False)


def binary_cross_entropy_with_logits(
    input, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None
):
    """`weight * ((1 + (pos_weight - 1) * target) * ln(1 + e^input) - pos_weight * target * input)`."""
    reduction = _reduction(reduction, size_average, reduce)
    return _element_loss("binary_cross_entropy_with_logits", input, target, "binary_cross_entropy", reduction, weight, pos_weight)


def binary_cross_entropy(input, target, weight=None, size_average=None, reduce=None, reduction="mean"):
    """`-weight * (target * ln(input) + (1 - target) * ln(1 - input))` of probabilities, each logarithm at least -100.

    At 0 and at 1 the logarithm of 0 has no gradient, where PyTorch has one of up to 1e12. Probabilities outside of [0, 1] give NaN and are not looked for.
    """
    return _element_loss("binary_cross_entropy", input, target, "likelihood", _reduction(reduction, size_average, reduce), weight)


def soft_margin_loss(input, target, size_average=None, reduce=None, reduction="mean"):
    """`ln(1 + e^(-target * input))`."""
    return _element_loss("soft_margin_loss", input, target, "soft_margin", _reduction(reduction, size_average, reduce))


def kl_div(input, target, size_average=None, reduce=None, reduction="mean", log_target=False):
    """`target * (ln target - input)` of log-probabilities `input`; with `log_target`, `e^target * (target - input)`. `reduction="batchmean"` divides the sum by the
    first dim."""
    if reduction == "batchmean" and size_average is None and reduce is None:
        total = kl_div(input, target, reduction="sum", log_target=log_target)
        return total / input.shape[0] if input.dim() > 0 else total
    return _element_loss("kl_div", input, target, f"divergence log={int(log_target)}", _reduction(reduction, size_average, reduce))


def nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """Minus the log-probability `input [n, classes, ...]` or `[classes]` of each label, as `cross_entropy` of one that is normalized already."""
    reduction = _reduction(reduction, size_average, reduce)
    dims = tuple(input.shape)
    if not dims:
        raise GraphError("the log-probabilities have no dims; they are [n, classes, ...] or [classes]")
    axis = 0 if len(dims) == 1 else 1
    rows = dims[:axis] + dims[axis + 1 :]
    if tuple(target.shape) != rows:
        raise GraphError(f"labels of the dims {tuple(target.shape)} for log-probabilities of {dims}; they have the dims {rows}")
    if target.dtype not in (torch.int64, torch.uint8):
        raise GraphError(f"labels are of {target.dtype}; they are int64 or uint8")
    if weight is not None and tuple(weight.shape) != (dims[axis],):
        raise GraphError(f"weight has the dims {tuple(weight.shape)} for {dims[axis]} classes; there is one weight a class")
    if weight is not None and weight.dtype != input.dtype:
        raise GraphError(f"weight is of {weight.dtype}, and the log-probabilities of {input.dtype}; they are of one type")
    words = f"axis={axis} smoothing=0.0 reduction={reduction} ignore={ignore_index} targets=log_labels"
    return _ops.class_loss(input, target, weight, words)


# Attention.


@_ops.cached
def _attention_words(scale, causal, left, right, cap, dropout=None):
    words = f"scale={float(scale)!r}"
    for name, value in (("causal", causal), ("left", left), ("right", right), ("cap", cap), ("dropout", dropout)):
        words += "" if value is None else f" {name}={value}"
    return words


def _dropout_of(dropout_p, state, q):
    """The probability as the operator takes it, and the state that it is drawn from."""
    if not 0.0 <= dropout_p <= 1.0:
        raise GraphError(f"dropout_p is {dropout_p}; it is from 0 to 1")
    if dropout_p == 0.0:
        return None, None
    return float(dropout_p), drawn_state(q.device) if state is None else state


def attention_dropout_mask(state, dims, dropout_p):
    """Which pairs of a query and a key attention keeps under `dropout_p`, drawing from `state`: bool `[batch, heads, queries, keys]`, the given `dims`.

    Of `flash_attn_varlen_func` the batch is the sequence. It is computed as attention of zeros to the rows of a unit matrix: it takes `batch * heads * queries * keys`
    numbers of f32, and as many steps for each key. For tests and for programs that compose attention from products.
    """
    b, h, s_q, s_kv = dims
    if dropout_p == 0.0 or 0 in dims:
        return torch.ones(dims, dtype=torch.bool, device=state.device)
    q, k = (torch.zeros(shape, device=state.device) for shape in ((b, h, s_q, 1), (b, h, s_kv, 1)))
    v = torch.eye(s_kv, device=state.device).expand(b, h, s_kv, s_kv)
    words = _attention_words(1.0, None, None, None, None, float(dropout_p))
    return _ops.attention(q, k, v, None, None, None, None, None, None, state, *_NO_DESCALES, *_NO_BLOCKS, None, words)[0] != 0


def _in_heads(x):
    """`[..., s, d]` as `[b, h, s, d]`."""
    if x.dim() < 2:
        raise GraphError(f"attention of a tensor of {tuple(x.shape)}; it is [..., positions, elements]")
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x.unsqueeze(1) if x.dim() == 3 else x[None, None] if x.dim() == 2 else x


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, state=None, sinks=None, kv_lengths=None
):
    """`softmax(query @ key.mT * scale + mask) @ value`; see `torch.nn.functional.scaled_dot_product_attention`.

    Tensors are `[..., positions, elements]`, with heads in front of positions. `attn_mask` is of bool (False leaves a key out) or added to the scores, and broadcasts
    to them; a query that attends no key gives 0. With `enable_gqa`, several heads of `query` read one of `key` and `value`. The gradients of all tensors are one
    call; on a GPU those of `query` repeat bit for bit under a `deterministic` policy and where `torch.use_deterministic_algorithms` is on.

    With `dropout_p` each probability is 0 with that probability, and the others are divided by `1 - dropout_p`; which ones follows from `state` and the place of query
    and key alone (`attention_dropout_mask`), and is drawn again in the gradient. States are as in `dropout`: without one PyTorch's generator draws it, in
    a captured CUDA graph anew in every replay. `sinks` `[heads]`, of any floating-point type, are one more score of each query of a head, that of no key: it takes its share of the probabilities
    and adds nothing to the result. They have a gradient. Of three dims without `enable_gqa` there is one head, the first dim being the batch. What `torch.compile` compiles is PyTorch's own
    attention where there is dropout and no state, sinks or lengths.

    With `kv_lengths` the first so many keys of each batch count (int32 on the device of `query`, of the dims in front of those of heads, positions and elements: `[batch]`), beside a mask too. What is behind them
    has no part in the result, and has the gradient 0. Lengths are not trusted: one counts as 0 below 0 and as all keys above that, and the host does not read them.
    `is_causal` counts from the first query and the first key, as without. The gradient of an `attn_mask` beside them is computed without tensor cores, and so are the others of that call. A batch that is padded at its end needs no mask so:

        lengths = attention_mask.sum(1, dtype=torch.int32)  # of a mask [batch, positions] with its ones in front
        o = vt.scaled_dot_product_attention(q, k, v, is_causal=True, kv_lengths=lengths)
    """
    if dropout_p > 0.0 and state is None and sinks is None and kv_lengths is None and torch.compiler.is_compiling():
        return _their_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise GraphError("attn_mask with is_causal; one of both says which keys are attended")
    rank = query.dim()
    if not key.dim() == value.dim() == rank:
        raise GraphError(f"attention of {rank}, {key.dim()} and {value.dim()} dims; query, key and value have as many")
    if not enable_gqa and not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    lead = query.shape[:-2]
    if attn_mask is not None:
        if attn_mask.dim() > rank:
            raise GraphError(f"attn_mask of {tuple(attn_mask.shape)} for a query of {tuple(query.shape)}; it has no more dims")
        if rank > 4 and attn_mask.dim() > 2:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-2:]).flatten(0, -4)
        elif rank == 3 and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(0 if enable_gqa else 1)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise GraphError(f"attn_mask of {attn_mask.dtype}; it is of bool or added to the scores")
    # Of three dims the first is that of heads where heads are shared, and else whatever it is.
    heads = [x.unsqueeze(0) if enable_gqa and rank == 3 else _in_heads(x) for x in (query, key, value)]
    if kv_lengths is not None:
        kv_lengths = _lengths_of_batches(kv_lengths, () if enable_gqa and rank == 3 else lead[: max(rank - 3, 1)], query.device)
    o = attention_of_heads(*heads, attn_mask, is_causal, scale, dropout_p=dropout_p, state=state, sinks=sinks, kv_lengths=kv_lengths)
    return o if rank == 4 else o.reshape(*lead, *o.shape[-2:])


def _lengths_of_batches(lengths, batches, device):
    """How many keys count, a number for each of `batches` (their dims, of which there may be several, or none), as the operator takes them."""
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != tuple(batches):
        raise GraphError(f"kv_lengths of {lengths.dtype} and {tuple(lengths.shape)}; it is int32, {list(batches)}: a number of keys for each batch")
    if lengths.device != device:
        raise GraphError(f"kv_lengths is on {lengths.device}, queries are on {device}")
    return lengths.reshape(-1, 1, 1, 1)


def attention_of_heads(query, key, value, mask=None, is_causal=False, scale=None, soft_cap=None, dropout_p=0.0, state=None, sinks=None, kv_lengths=None):
    """Attention of `[batch, heads, positions, elements]`, heads of `query` being a multiple of the others': with a mask of bool or one that is added to the
    scores, and scores kept below `soft_cap` before. Dropout and sinks are as in `scaled_dot_product_attention`; `kv_lengths`, `[batch, 1, 1, 1]`, are those of the operator."""
    dropout, state = _dropout_of(dropout_p, state, query)
    if mask is not None:
        mask = _rows_of_keys(mask.view(torch.uint8) if mask.dtype == torch.bool else mask, key.shape[-2])
    scale = query.shape[-1] ** -0.5 if scale is None and query.shape[-1] else scale
    causal, cap = "top_left" if is_causal else None, float(soft_cap) if soft_cap else None
    words = _attention_words(1.0 if scale is None else scale, causal, None, None, cap, dropout)
    sinks = _sinks(query, query.shape[1], sinks)
    return _ops.attention(query, key, value, mask, None, None, None, kv_lengths, None, state, *_NO_DESCALES, *_NO_BLOCKS, sinks, words)[0]


#: PyTorch's own, whose name within `sdpa_kernel` is ours.
_their_attention = torch.nn.functional.scaled_dot_product_attention
#: Of attention without factors of queries, keys and values.
_NO_DESCALES = (None, None, None)
#: No map of blocks, and no masks of them.
_NO_BLOCKS = (None, None)


def _descales(q, k, given):
    """The factors of queries, keys and values of 8 bits as the operator takes them; `k` is `[batch of the cache, positions, heads, elements]`."""
    if all(descale is None for descale in given):
        return _NO_DESCALES
    shape, made = (q.shape[0], k.shape[2]), []
    for name, of, descale in zip(("q_descale", "k_descale", "v_descale"), (q, k, k), given):
        if descale is not None and of.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise GraphError(f"{name} of tensors of {of.dtype}; queries, keys and values of 8 bits have such factors")
        if descale is not None and descale.numel() == 1:
            descale = descale.reshape(1, 1)
        if descale is not None and (descale.dim() != 2 or any(own not in (1, whole) for own, whole in zip(descale.shape, shape))):
            raise GraphError(f"{name} of {tuple(descale.shape)}; it is f32, [batch, heads of keys] = {list(shape)}, or one number")
        made.append(None if descale is None else descale[:, :, None, None])
    return tuple(made)


def _sinks(q, heads, sinks):
    """The sinks of each head as the operator takes them, in f32 (f64 beside queries of f64) where kernels do not read them as they are."""
    if sinks is None:
        return None
    if tuple(sinks.shape) != (heads,) or not sinks.is_floating_point():
        raise GraphError(f"sinks of {sinks.dtype} and {tuple(sinks.shape)} for {heads} heads of queries; there is one of a floating-point type for each head")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Autocast may change the type of the queries, and what is compiled is called with other tensors. Kernels read them where a word of 4 bytes begins, which the
    # first element of a part of another tensor need not.
    is_read = sinks.dtype == q.dtype and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(q.device.type)
    if sinks.dtype != wide and not (is_read and sinks.storage_offset() * sinks.element_size() % 4 == 0):
        sinks = sinks.to(wide)
    return sinks[None, :, None, None]


def _rows_of_keys(mask, keys):
    """The mask with its keys side by side, as kernels for tensor cores read it. One number for all keys of a query, such as transformers makes while a graph is
    captured, becomes a row; what else is broadcast stays one."""
    if mask.dim() == 0 or keys < 2 or mask.shape[-1] not in (1, keys) or (mask.shape[-1] == keys and mask.stride(-1) == 1):
        return mask
    own = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()[:-1])]
    return own.expand(*own.shape[:-1], keys).contiguous()


def _flash_words(q, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout=None):
    """The attributes of a call, and the slopes as the operator takes them."""
    left, right = (None if bound < 0 else int(bound) for bound in window_size)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes[None] if alibi_slopes.dim() == 1 else alibi_slopes
        alibi_slopes = alibi_slopes[:, :, None, None]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None and q.shape[-1] else softmax_scale
    cap = float(softcap) if softcap else None
    return _attention_words(1.0 if scale is None else scale, "bottom_right" if causal else None, left, right, cap, dropout), alibi_slopes


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    state=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    learnable_sink=None,
):
    """Attention of `q [batch, positions, heads, elements]`, as the function of this name in the package flash-attn.

    Heads of `q` are a multiple of those of `k` and `v`. `causal` and `window_size` (left, right; -1 for no bound) count from the diagonal that ends at the last
    query and the last key. `softcap` above 0 keeps scores below it. `alibi_slopes` are f32, `[heads]` or `[batch, heads]`. With `deterministic` the gradients
    repeat bit for bit, as all else does. With `return_attn_probs`: `(o, log_sum_exp, None)`, the second `[batch, heads, positions]`.
    `dropout_p` and `state` are as in `scaled_dot_product_attention`, and `learnable_sink` as `sinks` there.

    Of `torch.float8_e4m3fn` or `float8_e5m2` the result is bf16, and there are no gradients. `q_descale`, `k_descale` and `v_descale` (f32 `[batch, heads of keys]`, or
    one number, on the device; above 0) are what such tensors are multiplied by, a head of `q` by that of the head of keys that it reads. On Hopper's tensor cores:
    e4m3, without `softcap`, `alibi_slopes` and dropout; probabilities are rounded to e4m3 as well.
    """
    if any(x.dim() != 4 for x in (q, k, v)):
        raise GraphError("flash_attn_func of tensors that have not four dims: [batch, positions, heads, elements]")
    dropout, state = _dropout_of(dropout_p, state, q)
    words, alibi_slopes = _flash_words(q, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout)
    sinks = _sinks(q, q.shape[-2], learnable_sink)
    with _policy.policy(_policy.get_policy().made_deterministic()) if deterministic else contextlib.nullcontext():
        descales = _descales(q, k, (q_descale, k_descale, v_descale))
        o, total = _ops.attention(*(x.transpose(1, 2) for x in (q, k, v)), None, alibi_slopes, None, None, None, None, state, *descales, *_NO_BLOCKS, sinks, words)
    o = o.transpose(1, 2)
    return (o, total.squeeze(-1), None) if return_attn_probs else o


def _sequence_ends(name, offsets):
    """Where sequences begin and end."""
    if offsets.dim() != 1 or offsets.dtype != torch.int32 or offsets.shape[0] < 1:
        raise GraphError(f"{name} of {offsets.dtype} and {tuple(offsets.shape)}; it is int32, [sequences + 1]")
    return offsets[:, None, None, None]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    seqused_k=None,
    state=None,
    learnable_sink=None,
):
    """Attention of sequences of different lengths behind each other, as the function of this name in the package flash-attn.

    `q` is `[rows, heads, elements]`, `k` and `v` likewise with rows of their own. Sequence `n` has the rows from `cu_seqlens_q[n]` to below
    `cu_seqlens_q[n + 1]` (and of keys those of `cu_seqlens_k`): int32 `[sequences + 1]` on the device of `q`, which the host does not read. No sequence has more than
    `max_seqlen_q` queries and `max_seqlen_k` keys: rows beyond belong to none. What belongs to no sequence is not written on a GPU, whatever the offsets; a
    sequence without keys gives 0. `causal`, `window_size`, `softcap`, `alibi_slopes` and `deterministic` are as in `flash_attn_func`, the diagonal
    ending at the last query and key of each sequence. With `return_attn_probs`: `(o, log_sum_exp, None)`, the second `[heads, rows]`. `dropout_p` and `state`
    are as in `scaled_dot_product_attention`, a sequence being a batch, and `learnable_sink` as `sinks` there. With `seqused_k` (int32 `[sequences]`) the first so many of a sequence's keys count, at which its diagonal ends; the others have the gradient 0.

    With a `block_table` (int32 `[sequences, pages of a sequence]`) keys are paged, as a serving engine keeps them: `k` and `v` are
    `[pages, page size, heads of keys, elements]`, pages of multiples of 8 positions on tensor cores. How many keys a sequence has is told by `seqused_k` or by the
    differences of `cu_seqlens_k`, one of both, the other one being None. `max_seqlen_k` is taken and not used then: no sequence has more keys than its line of the table
    holds. Entries and lengths are not trusted, as in `flash_attn_with_kvcache`, and nothing waits for the device.

    There are gradients where no `block_table` is given; with one they raise `UnsupportedError`.
    """
    rank, dims = (3, "[rows, heads, elements]") if block_table is None else (4, "[pages, page size, heads, elements]")
    if q.dim() != 3 or k.dim() != rank or v.dim() != rank:
        given = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise GraphError(f"flash_attn_varlen_func of {given}; q has three dims: [rows, heads, elements], k and v have {'three' if rank == 3 else 'four'}: {dims}")
    of_q = _sequence_ends("cu_seqlens_q", cu_seqlens_q)
    of_k = None if cu_seqlens_k is None else _sequence_ends("cu_seqlens_k", cu_seqlens_k)
    if of_k is not None and cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise GraphError(f"cu_seqlens of {cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]} elements; there are as many sequences of queries as of keys")
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not 0 <= int(longest) < 1 << 32:
            raise GraphError(f"{name} is {longest}; it is from 0 to below 2^32")
    sequences = cu_seqlens_q.shape[0] - 1
    for name, told, shape in (("seqused_k", seqused_k, "[sequences]"), ("block_table", block_table, "[sequences, pages of a sequence]")):
        if told is not None and (told.dtype != torch.int32 or told.dim() != shape.count(",") + 1 or told.shape[0] != sequences):
            raise GraphError(f"{name} of {told.dtype} and {tuple(told.shape)} for {sequences} sequences; it is int32, {shape}")
    longest, table = f" longest_q={int(max_seqlen_q)}", None
    if block_table is not None:
        if (cu_seqlens_k is None) == (seqused_k is None):
            raise GraphError("cu_seqlens_k and seqused_k with a block_table, or neither; one of both tells how many keys a sequence has")
        lengths, of_k, table = (torch.diff(cu_seqlens_k) if seqused_k is None else seqused_k), None, block_table[:, :, None, None]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    elif of_k is None:
        raise GraphError("cu_seqlens_k is None without a block_table; it tells where the keys of each sequence are")
    else:
        lengths, longest = seqused_k, f"{longest} longest_kv={int(max_seqlen_k)}"
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    lengths = None if lengths is None else lengths[:, None, None, None]
    dropout, state = _dropout_of(dropout_p, state, q)
    words, alibi_slopes = _flash_words(q, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout)
    sinks = _sinks(q, q.shape[-2], learnable_sink)
    with _policy.policy(_policy.get_policy().made_deterministic()) if deterministic else contextlib.nullcontext():
        q = q.transpose(0, 1)[None]
        o, total = _ops.attention(q, k, v, None, alibi_slopes, of_q, of_k, lengths, table, state, *_NO_DESCALES, *_NO_BLOCKS, sinks, words + longest)
    o = o[0].transpose(0, 1)
    return (o, total[0].squeeze(-1), None) if return_attn_probs else o


__all__ = [name for name, value in list(globals().items()) if callable(value) and getattr(value, "__module__", None) == __name__ and name[0] != "_"]
#: What stands in files of its own.
_ELSEWHERE = (
    *(celu, glu, hardshrink, logsigmoid, prelu, rrelu, selu, softshrink, softsign, tanhshrink, threshold),
    *(alpha_dropout, dropout, dropout1d, dropout2d, dropout3d, feature_alpha_dropout),
    *(channel_shuffle, local_response_norm, pixel_shuffle, pixel_unshuffle),
    *(gated_mlp, rotary_embedding),
    *(fold, interpolate, linear_cross_entropy, max_unpool1d, max_unpool2d, max_unpool3d, pad, unfold),
)
__all__ += [function.__name__ for function in _ELSEWHERE]
