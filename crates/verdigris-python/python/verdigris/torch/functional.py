"""Functions of PyTorch's tensors, with the signatures of `torch.nn.functional` and its results' dims, types and memory formats.

Shapes are `[n, c, spatial...]` for convolution and pooling (`[c, spatial...]` is taken too), `[..., features]` for `linear`. Tensors may be
contiguous, channels-last, or have any strides. Each function has gradients; those of convolution, `linear` and average pooling are
differentiable again, those of the others raise `UnsupportedError` when they are differentiated once more. What a function does not take raises
`UnsupportedError` or `GraphError`; nothing falls back to PyTorch.
"""

from .._errors import GraphError, UnsupportedError
from . import _ops



def _each(value, spatial):
    values = (value,) * spatial if isinstance(value, int) else tuple(value)
    if len(values) == 1 and spatial > 1:
        values *= spatial
    if len(values) != spatial:
        raise GraphError(f"{values} for {spatial} spatial dims; there is one number, or one for each")
    return values


def _words(**lists):
    return " ".join(f"{name}={','.join(map(str, values))}" for name, values in lists.items())


@_ops.cached
def conv_attributes(spatial, stride, padding, dilation, groups, filter_dims=None):
    """The attributes of a convolution as the operators take them. `padding` may be `"valid"`, or `"same"` with the filter's spatial dims."""
    stride, dilation = _each(stride, spatial), _each(dilation, spatial)
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
        before = _each(padding, spatial)
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


def conv(x, weight, bias, attributes, spatial):
    """Convolution with attributes made before."""
    if x.dim() == spatial + 1:
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
    return conv_transpose(x, weight, bias, attributes, spatial, _each(_tuple(output_padding), spatial))


def conv_transpose(x, weight, bias, attributes, spatial, output_padding):
    """Transposed convolution with attributes made before: the gradient of a convolution whose filter is `weight [c, k / groups, ...]`."""
    if x.dim() == spatial + 1:
        return conv_transpose(x.unsqueeze(0), weight, bias, attributes, spatial, output_padding).squeeze(0)
    a = _ops.parse(attributes)
    stride, padding, dilation = a["stride"], a["padding"], a["dilation"]
    for i, extra in enumerate(output_padding):
        if extra >= max(stride[i], dilation[i]):
            raise GraphError(f"output_padding {output_padding} with stride {stride} and dilation {dilation}; it is less than one of them")
    dims = [
        (x.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[i + 2] - 1) + output_padding[i] + 1
        for i in range(spatial)
    ]
    if all(extra < step for extra, step in zip(output_padding, stride)):
        return _ops.conv_dgrad(x, weight, bias, attributes, dims)
    # More is asked for than any output of the convolution reaches: what lies beyond is the bias alone.
    raise UnsupportedError(f"output_padding {output_padding} with stride {stride}; it is less than the stride here")


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
    return _ops.linear(input, weight, bias, "")


# Pooling.


@_ops.cached
def pool_attributes(spatial, window, stride, padding, dilation, ceil_mode, x_dims, words):
    """The attributes of a sliding pooling. With `ceil_mode` the padding after the last element depends on `x_dims`."""
    window = _each(window, spatial)
    stride = window if stride is None or stride == () else _each(stride, spatial)
    padding, dilation = _each(padding, spatial), _each(dilation, spatial)
    if any(2 * pad > size for pad, size in zip(padding, window)):
        raise GraphError(f"padding {padding} for windows of {window}; it is at most half the window")
    after = padding
    if ceil_mode:
        after = []
        for i, extent in enumerate(x_dims):
            reach = dilation[i] * (window[i] - 1) + 1
            out = -(-(extent + 2 * padding[i] - reach) // stride[i]) + 1
            # The last window begins inside of the tensor or of the padding before it.
            if (out - 1) * stride[i] >= extent + padding[i]:
                out -= 1
            after.append(max((out - 1) * stride[i] + reach - extent - padding[i], padding[i]))
        after = tuple(after)
    text = _words(window=window, stride=stride, padding=padding, dilation=dilation)
    if after != padding:
        if "pad=1" in words:
            raise UnsupportedError("average pooling with ceil_mode and count_include_pad, where a window reaches beyond the padding")
        text += " " + _words(after=after)
    return f"{text} {words}".strip()


def _pooled(operator, spatial, x, attributes):
    if x.dim() == spatial + 1:
        result = operator(x.unsqueeze(0), attributes)
        return tuple(part.squeeze(0) for part in result) if isinstance(result, tuple) else result.squeeze(0)
    return operator(x, attributes)


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
    if divisor_override is not None:
        raise UnsupportedError("average pooling with divisor_override; scale the result of a sum")
    dims = tuple(x.shape[-spatial:]) if ceil_mode else None
    words = f"pad={int(count_include_pad)}"
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


def _adaptive(spatial, x, output_size, words):
    sizes = (output_size,) * spatial if output_size is None or isinstance(output_size, int) else tuple(output_size)
    sizes = tuple(x.shape[i - spatial] if size is None else size for i, size in enumerate(sizes))
    return f"{_words(adaptive=_each(sizes, spatial))} {words}"


def adaptive_avg_pool1d(input, output_size):
    """See `torch.nn.functional.adaptive_avg_pool1d`."""
    return _pooled(_ops.avg_pool, 1, input, _adaptive(1, input, output_size, "pad=0"))


def adaptive_avg_pool2d(input, output_size):
    """See `torch.nn.functional.adaptive_avg_pool2d`."""
    return _pooled(_ops.avg_pool, 2, input, _adaptive(2, input, output_size, "pad=0"))


def adaptive_avg_pool3d(input, output_size):
    """See `torch.nn.functional.adaptive_avg_pool3d`."""
    return _pooled(_ops.avg_pool, 3, input, _adaptive(3, input, output_size, "pad=0"))


def _adaptive_max(spatial, x, output_size, return_indices):
    words = "index=i64" if return_indices else "index=i32"
    y, index = _pooled(_ops.max_pool, spatial, x, _adaptive(spatial, x, output_size, words))
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
    return _ops.activation(input, f"f=clamp lower={float(min_val)!r} upper={float(max_val)!r}")


def relu6(input, inplace=False):
    """`min(max(x, 0), 6)`."""
    return hardtanh(input, 0.0, 6.0)


def mish(input, inplace=False):
    """`x * tanh(ln(1 + e^x))`."""
    return _ops.activation(input, "f=mish")


def sigmoid(input):
    """`1 / (1 + e^-x)`."""
    return _ops.activation(input, "f=sigmoid")


def tanh(input):
    """`tanh(x)`."""
    return _ops.activation(input, "f=tanh")


def elu(input, alpha=1.0, inplace=False):
    """`x` if `x > 0`, else `alpha * (e^x - 1)`."""
    return _ops.activation(input, f"f=elu alpha={float(alpha)!r}")


def softplus(input, beta=1.0):
    """`ln(1 + e^(beta * x)) / beta`, without PyTorch's threshold, beyond which it takes `x`: the same to rounding in f32 and narrower types."""
    return _ops.activation(input, f"f=softplus beta={float(beta)!r}")


# Softmax and losses.


def _axis(x, dim):
    if dim is None:
        raise GraphError("dim is missing; name the axis that sums to 1")
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise GraphError(f"dim {dim} of a tensor of {x.dim()} dims; it is one of its dims")
    return dim % rank


def softmax(input, dim=None, dtype=None):
    """Softmax along `dim`; of the input as `dtype` where that is given."""
    input = input if dtype is None else input.to(dtype)
    return _ops.softmax(input, f"axis={_axis(input, dim)} log=0")


def log_softmax(input, dim=None, dtype=None):
    """The logarithm of softmax along `dim`."""
    input = input if dtype is None else input.to(dtype)
    return _ops.softmax(input, f"axis={_axis(input, dim)} log=1")


def cross_entropy(input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """The cross-entropy of logits `[n, classes, ...]` or `[classes]` and integer labels without the class axis.

    Weights of classes and targets that are probabilities raise `UnsupportedError`. A label that is neither a class nor ignored gives NaN.
    """
    if weight is not None:
        raise UnsupportedError("cross-entropy with weights of classes")
    if target.is_floating_point():
        raise UnsupportedError("cross-entropy with probabilities as targets; labels are integers")
    if reduction not in ("none", "sum", "mean"):
        raise GraphError(f"the reduction is '{reduction}'; it is 'none', 'sum' or 'mean'")
    axis = 0 if input.dim() == 1 else 1
    words = f"axis={axis} smoothing={float(label_smoothing)!r} ignore={int(ignore_index)} reduction={reduction}"
    return _ops.cross_entropy(input, target, words)[0]


__all__ = [name for name, value in list(globals().items()) if callable(value) and getattr(value, "__module__", None) == __name__ and name[0] != "_"]
