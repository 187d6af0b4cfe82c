"""Functions of PyTorch's tensors, with the signatures of `torch.nn.functional` and its results' dims, types and memory formats.

Shapes are `[n, c, spatial...]` for convolution and pooling (`[c, spatial...]` is taken too), `[..., features]` for `linear`. Tensors may be
contiguous, channels-last, or have any strides. Each function has gradients, which are differentiable again where the ops' rules of
differentiation say so; where they do not, `UnsupportedError` is raised.

What PyTorch refuses is refused, by an exception of PyTorch's kind: `GraphError` and `BindingError` are `ValueError`s and `RuntimeError`s,
`OutOfRangeError` is an `IndexError`. What PyTorch takes and this package does not raises `UnsupportedError`; nothing falls back to PyTorch.
"""

import warnings

import torch

from .._errors import GraphError, OutOfRangeError
from . import _ops


def _each(value, spatial, name="a value", least=None):
    values = (value,) * spatial if isinstance(value, int) else tuple(value)
    if len(values) == 1 and spatial > 1:
        values *= spatial
    if len(values) != spatial:
        raise GraphError(f"{name} is {values} for {spatial} spatial dims; there is one number, or one for each")
    if least is not None and any(value < least for value in values):
        raise GraphError(f"{name} is {values}; each is at least {least}")
    return values


def _words(**lists):
    return " ".join(f"{name}={','.join(map(str, values))}" for name, values in lists.items())


@_ops.cached
def conv_attributes(spatial, stride, padding, dilation, groups, filter_dims=None):
    """The attributes of a convolution as the operators take them. `padding` may be `"valid"`, or `"same"` with the filter's spatial dims."""
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


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value


def _conv(spatial, x, weight, bias, stride, padding, dilation, groups):
    filter_dims = tuple(weight.shape[2:]) if padding == "same" else None
    attributes = conv_attributes(spatial, _tuple(stride), _tuple(padding), _tuple(dilation), groups, filter_dims)
    return conv(x, weight, bias, attributes, spatial)


def _batched(x, spatial, leading, what):
    """Whether there is a batch; `leading` dims stand before the spatial ones then."""
    if x.dim() not in (spatial + leading - 1, spatial + leading):
        rule = f"it has {leading} dims before them, or one less"
        raise OutOfRangeError(f"{what} of {spatial} spatial dims and an input of {tuple(x.shape)}; {rule}")
    return x.dim() == spatial + leading


def conv(x, weight, bias, attributes, spatial):
    """Convolution with attributes made before."""
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
    attributes = conv_attributes(spatial, _tuple(stride), _tuple(padding), _tuple(dilation), groups)
    return conv_transpose(x, weight, bias, attributes, spatial, _each(_tuple(output_padding), spatial, "output_padding", 0))


def conv_transpose(x, weight, bias, attributes, spatial, output_padding):
    """Transposed convolution with attributes made before: the gradient of a convolution whose filter is `weight [c, k / groups, ...]`."""
    if not _batched(x, spatial, 2, "transposed convolution"):
        return conv_transpose(x.unsqueeze(0), weight, bias, attributes, spatial, output_padding).squeeze(0)
    if weight.dim() != spatial + 2:
        raise GraphError(f"a filter of {tuple(weight.shape)} for {spatial} spatial dims; it is [c, k / groups, filter...]")
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
    return _ops.conv_dgrad(x, weight, bias, attributes, dims)


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
    """`x [..., in]`, `w [out, in]`, `bias [out]` give `[..., out]`: `x @ w.T + bias`."""
    if weight.dim() == 1:
        # One output feature, without a dim of its own.
        return _ops.linear(input, weight.unsqueeze(0), None if bias is None else bias.reshape(1), "").squeeze(-1)
    return _ops.linear(input, weight, bias, "")


# Pooling.


@_ops.cached
def pool_attributes(spatial, window, stride, padding, dilation, ceil_mode, x_dims, words):
    """The attributes of a sliding pooling. With `ceil_mode` the padding after the last element depends on `x_dims`."""
    window = _each(window, spatial, "kernel_size", 1)
    stride = window if stride is None or stride == () else _each(stride, spatial, "stride", 1)
    padding, dilation = _each(padding, spatial, "padding", 0), _each(dilation, spatial, "dilation", 1)
    reach = [dilation[i] * (window[i] - 1) + 1 for i in range(spatial)]
    if any(2 * pad > size for pad, size in zip(padding, reach)):
        raise GraphError(f"padding {padding} for windows that reach over {tuple(reach)} elements; it is at most half of that")
    after = padding
    if ceil_mode:
        after = []
        for i, extent in enumerate(x_dims):
            out = -(-(extent + 2 * padding[i] - reach[i]) // stride[i]) + 1
            # The last window begins inside of the tensor or of the padding before it.
            if (out - 1) * stride[i] >= extent + padding[i]:
                out -= 1
            after.append(max((out - 1) * stride[i] + reach[i] - extent - padding[i], padding[i]))
        after = tuple(after)
    text = _words(window=window, stride=stride, padding=padding, dilation=dilation)
    if after != padding:
        text += " " + _words(after=after)
        if "pad=1" in words:
            text += " " + _words(within=padding)
    return f"{text} {words}".strip()


def _pooled(operator, spatial, x, attributes, may_be_empty=None):
    """Pooling of a batch, or of one without its dim. The first `may_be_empty` dims may be: that of a batch unless more is said."""
    is_batch = _batched(x, spatial, 2, "pooling")
    if 0 in x.shape[is_batch if may_be_empty is None else may_be_empty :]:
        raise GraphError(f"pooling of {tuple(x.shape)}; dims behind the batch are not empty")
    if is_batch:
        return operator(x, attributes)
    result = operator(x.unsqueeze(0), attributes)
    return tuple(part.squeeze(0) for part in result) if isinstance(result, tuple) else result.squeeze(0)


def _max_pool(spatial, x, window, stride, padding, dilation, ceil_mode, return_indices):
    dims = tuple(x.shape[-spatial:]) if ceil_mode else None
    words = "index=i64" if return_indices else ""
    attributes = pool_attributes(spatial, _tuple(window), _tuple(stride), _tuple(padding), _tuple(dilation), ceil_mode, dims, words)
    y, index = _pooled(_ops.max_pool, spatial, x, attributes)
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
    if spatial == 3 and any(size > extent for size, extent in zip(_each(_tuple(window), 3), x.shape[-3:])):
        raise GraphError(f"kernel_size is {window} for an input of {tuple(x.shape)}; in 3 dims it is at most the input without its padding")
    if divisor_override is None:
        words = f"pad={int(count_include_pad)}"
    elif divisor_override == 0:
        raise GraphError("divisor_override is 0; it is another number")
    else:
        words = f"divisor={int(divisor_override)}"
    attributes = pool_attributes(spatial, _tuple(window), _tuple(stride), _tuple(padding), 1, ceil_mode, dims, words)
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
    sizes = (output_size,) * spatial if output_size is None or isinstance(output_size, int) else tuple(output_size)
    if len(sizes) != spatial:
        raise GraphError(f"output_size is {sizes} for {spatial} spatial dims; there is one number, or one for each")
    sizes = tuple(x.shape[i - spatial] if size is None else size for i, size in enumerate(sizes))
    return _each(sizes, spatial, "output_size", 0)


def _adaptive_avg(spatial, x, output_size):
    sizes = _adaptive(spatial, x, output_size)
    if 0 in sizes:
        return _nothing(x, spatial, sizes)
    return _pooled(_ops.avg_pool, spatial, x, f"{_words(adaptive=sizes)} pad=0", 1 if spatial == 3 else x.dim() - spatial)


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
    if 0 in sizes:
        y = _nothing(x, spatial, sizes)
        return (y, torch.empty_like(y, dtype=torch.int64)) if return_indices else y
    words = "index=i64" if return_indices else "index=i32"
    y, index = _pooled(_ops.max_pool, spatial, x, f"{_words(adaptive=sizes)} {words}", 1)
    return (y, index) if return_indices else y


def adaptive_max_pool1d(input, output_size, return_indices=False):
    """See `torch.nn.functional.adaptive_max_pool1d`."""
    return _adaptive_max(1, input, output_size, return_indices)


def adaptive_max_pool2d(input, output_size, return_indices=False):
    """See `torch.nn.functional.adaptive_max_pool2d`."""
    return _adaptive_max(2, input, output_size, return_indices)


def adaptive_max_pool3d(input, output_size, return_indices=False):
    """See `torch.nn.functional.adaptive_max_pool3d`."""
    return _adaptive_max(3, input, output_size, return_indices)


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
    return _ops.activation(input, f"f=softplus beta={float(beta)!r} threshold={float(threshold)!r}")


# Softmax and losses.


def _axis(x, dim, name):
    if dim is None:
        dim = 0 if x.dim() in (0, 1, 3) else 1
        warnings.warn(f"{name} of a tensor of {x.dim()} dims takes dim {dim}, since none is named; name it", stacklevel=3)
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise OutOfRangeError(f"dim is {dim} for a tensor of {x.dim()} dims; it is from {-rank} to {rank - 1}")
    return dim % rank


def softmax(input, dim=None, _stacklevel=3, dtype=None):
    """Softmax along `dim`; of the input as `dtype` where that is given."""
    input = input if dtype is None else input.to(dtype)
    return _ops.softmax(input, f"axis={_axis(input, dim, 'softmax')} log=0")


def log_softmax(input, dim=None, _stacklevel=3, dtype=None):
    """The logarithm of softmax along `dim`."""
    input = input if dtype is None else input.to(dtype)
    return _ops.softmax(input, f"axis={_axis(input, dim, 'log_softmax')} log=1")


_REDUCTIONS = {(True, True): "mean", (True, False): "sum", (False, True): "none", (False, False): "none"}


def cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    """The cross-entropy of logits `[n, classes, ...]` or `[classes]`, and labels without the class axis or probabilities with it.

    A label that is neither a class nor ignored raises `OutOfRangeError` on the CPU, and gives NaN on a GPU.
    """
    if size_average is not None or reduce is not None:
        reduction = _REDUCTIONS[reduce is None or bool(reduce), size_average is None or bool(size_average)]
    if reduction not in ("none", "sum", "mean"):
        raise GraphError(f"the reduction is '{reduction}'; it is 'none', 'sum' or 'mean'")
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


__all__ = [name for name, value in list(globals().items()) if callable(value) and getattr(value, "__module__", None) == __name__ and name[0] != "_"]
