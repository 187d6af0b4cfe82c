"""Un-pooling: elements back to where a max pooling found them, which `functional` shows.

Each element of the result looks through the windows that see it for those whose index names it, as the gradient of max pooling does (it is the same op): no two threads
write one element, and results repeat bit for bit. An element that several windows name, as overlapping ones may, is the mean of what they hold: the value itself where that came of
a pooling; PyTorch writes one of them, whichever comes last. The gradient picks for each window the element that its index names.
"""

import math

import torch

from .._errors import GraphError, OutOfRangeError, UnsupportedError
from . import _ops

_GRADIENT, _PICK, _PAD = (_ops.operator_number(name) for name in ("gradient", "window_pick", "pad"))
#: Positions are compared as numbers of f32, which holds integers up to here.
_MOST_POSITIONS = 1 << 24


def _told(attributes):
    a = _ops.parse(attributes)
    return a["window"], a["stride"], a["padding"], a["after"]


def _overlaps(attributes):
    window, stride, *_ = _told(attributes)
    return any(taps > step for taps, step in zip(window, stride))


def _apart(x):
    """A tensor whose elements have places of their own."""
    return x.contiguous() if any(step == 0 and extent > 1 for step, extent in zip(x.stride(), x.shape)) else x


def _placed(x, index, attributes, size):
    x, index = _apart(x), _apart(index)
    kind = "i32" if index.dtype == torch.int32 else "i64"
    return _ops._run(_GRADIENT, x, index, f"of=max_pool wrt=0|{attributes} index={kind}", (*x.shape[:2], *size))


def _windows(x, attributes, out):
    """The windows of a tensor `[n, c, spatial...]` as a strided view of it, padded with zeros: `[n, c, out..., window...]`."""
    window, stride, padding, after = _told(attributes)
    if any(padding) or any(after):
        before, behind = (",".join(map(str, (0, 0, *pads))) for pads in (padding, after))
        x = _ops._run(_PAD, x, f"before={before} after={behind} value=0.0")
    (image, channel, *steps) = x.stride()
    strides = (image, channel, *(step * far for step, far in zip(steps, stride)), *steps)
    return x.as_strided((*x.shape[:2], *out, *window), strides, x.storage_offset())


def _picked(dy, index, attributes):
    """For each window the element of `dy` that its index names, 0 where the index names none of its own."""
    out, spatial = tuple(index.shape[2:]), dy.shape[2:]
    # Padding has position 0 less one.
    positions = torch.arange(1, math.prod(spatial) + 1, device=dy.device).view(1, 1, *spatial)
    view, where = _windows(dy, attributes, out), _windows(positions, attributes, out)
    return _ops._run(_PICK, view, index + 1, where.expand(view.shape), f"sum={len(out)}")


def _wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sharers(index, attributes, size, wide):
    """For each window how many windows name the element that it names, itself among them."""
    ones = torch.ones(index.shape, dtype=wide, device=index.device)
    return _picked(_placed(ones, index, attributes, size), index, attributes).clamp_min_(1)


def _check(index, attributes, size):
    """On the CPU, where indices can be looked at before anything is computed."""
    window, stride, padding, _ = _told(attributes)
    rest, is_inside = index, (index >= 0) & (index < math.prod(size))
    for dim in reversed(range(len(size))):
        at, rest = rest % size[dim], rest.div(size[dim], rounding_mode="floor")
        first = torch.arange(index.shape[dim + 2]).view(-1, *[1] * (len(size) - 1 - dim)) * stride[dim] - padding[dim]
        is_inside = is_inside & (at >= first) & (at < first + window[dim])
    if not is_inside.all():
        place = tuple(int(i) for i in (~is_inside).nonzero()[0])
        raise OutOfRangeError(f"index {int(index[place])} at {place} of an output of {tuple(size)}; an index names an element of its own window")


def _unpool(x, index, attributes, dims, sizes=()):
    attributes, size = _ops.filled(attributes, sizes), tuple(map(int, dims))
    if x.numel() == 0:
        return x.new_zeros((*x.shape[:2], *size))
    if index.device.type == "cpu":
        _check(index, attributes, size)
    if not _overlaps(attributes):
        return _placed(x, index, attributes, size)
    wide = _wide(x)
    shared = x.to(wide) / _sharers(index, attributes, size, wide)
    return _placed(shared, index, attributes, size).to(x.dtype)


def _unpool_gradient(dy, index, attributes, sizes=()):
    attributes = _ops.filled(attributes, sizes)
    if index.numel() == 0:
        return dy.new_zeros(index.shape)
    dx = _picked(dy, index, attributes)
    if not _overlaps(attributes):
        return dx
    wide = _wide(dy)
    return (dx.to(wide) / _sharers(index, attributes, dy.shape[2:], wide)).to(dy.dtype)


class _Unpool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, attributes, dims, sizes=()):
        ctx.save_for_backward(index)
        ctx.told = attributes, sizes
        with torch._C._AutoDispatchBelowAutograd():
            return _ops._namespace.max_unpool.default(x, index, attributes, dims, sizes)

    @staticmethod
    def backward(ctx, dy):
        return _ops._namespace.max_unpool_backward.default(dy, *ctx.saved_tensors, *ctx.told), *[None] * (len(ctx.needs_input_grad) - 1)


class _UnpoolGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dy, index, attributes, sizes=()):
        ctx.save_for_backward(index)
        ctx.told = attributes, dy.shape[2:], sizes
        with torch._C._AutoDispatchBelowAutograd():
            return _ops._namespace.max_unpool_backward.default(dy, index, attributes, sizes)

    @staticmethod
    def backward(ctx, dx):
        return _ops._namespace.max_unpool.default(dx, *ctx.saved_tensors, *ctx.told), *[None] * (len(ctx.needs_input_grad) - 1)


_ops._library.define("max_unpool(Tensor x, Tensor index, str attributes, SymInt[] dims, SymInt[] sizes=[]) -> Tensor")
_ops._library.define("max_unpool_backward(Tensor dy, Tensor index, str attributes, SymInt[] sizes=[]) -> Tensor")
for _key in ("CPU", "CUDA"):
    _ops._library.impl("max_unpool", _unpool, _key)
    _ops._library.impl("max_unpool_backward", _unpool_gradient, _key)
_ops._library.impl("max_unpool", _ops._differentiable("max_unpool", _Unpool), "Autograd")
_ops._library.impl("max_unpool_backward", _ops._differentiable("max_unpool_backward", _UnpoolGradient), "Autograd")
_ops._register_fake(
    "max_unpool", lambda x, index, attributes, dims, sizes=(): _ops._in_format(x, (*x.shape[:2], *dims), _ops._is_channels_last(index))
)
_ops._register_fake("max_unpool_backward", lambda dy, index, attributes, sizes=(): dy.new_empty(index.shape))


@_ops.cached
def _attributes(shape, spatial, kernel_size, stride, padding, output_size):
    """The pooling that has such a result, as `with_lists` has it, and the size of its input."""
    each = []
    for name, value, least in (("kernel_size", kernel_size, 1), ("stride", kernel_size if stride is None or stride == () else stride, 1), ("padding", padding, 0)):
        values = value if isinstance(value, tuple) else (value,) * spatial
        if len(values) != spatial or any(value < least for value in values):
            raise GraphError(f"{name} is {values} for {spatial} spatial dims; there is one number of at least {least}, or one for each")
        each.append(values)
    window, stride, padding = each
    inputs = shape[-spatial:]
    usual = tuple((many - 1) * step - 2 * pad + taps for many, taps, step, pad in zip(inputs, window, stride, padding))
    size = usual if output_size is None else tuple(output_size)[-spatial:]
    if output_size is not None and len(output_size) not in (spatial, spatial + 2):
        raise GraphError(f"output_size is {tuple(output_size)} for {spatial} spatial dims; it has the spatial dims, or all")
    for got, want, step in zip(size, usual, stride):
        if output_size is not None and not want - step < got < want + step or got < 1:
            raise GraphError(f"output_size is {size} where {usual} is usual; each is less than the stride {stride} from that, and at least 1")
    # What lies behind the last element for the last window to be whole.
    after = tuple(max((many - 1) * step + taps - got - pad, 0) for many, taps, step, pad, got in zip(inputs, window, stride, padding, size))
    if any(pad >= taps for taps, pads in zip(window, zip(padding, after)) for pad in pads):
        raise UnsupportedError(f"un-pooling of {shape} to {size} by windows of {window}, stride {stride} and padding {padding}: a window lies outside")
    if math.prod(size) >= _MOST_POSITIONS:
        raise UnsupportedError(f"un-pooling to {size}; planes have less than 2^24 elements")
    return _ops.with_lists("", window=window, stride=stride, padding=padding, after=after), size


def _max_unpool(spatial, input, indices, kernel_size, stride, padding, output_size):
    if input.dim() != spatial + 1 and input.dim() != spatial + 2:
        raise GraphError(f"un-pooling over {spatial} spatial dims of {tuple(input.shape)}; it is [n, c, spatial...] or [c, spatial...]")
    if indices.shape != input.shape or indices.dtype not in (torch.int64, torch.int32):
        raise GraphError(f"indices of {indices.dtype} and {tuple(indices.shape)} for an input of {tuple(input.shape)}; there is an int64 or int32 one for each element")
    if not input.is_floating_point():
        raise UnsupportedError(f"un-pooling of {input.dtype}; it takes floating-point numbers")
    if 0 in input.shape[-spatial - 1 :]:
        raise GraphError(f"un-pooling of {tuple(input.shape)}; dims behind the batch are not empty")
    named = (("kernel_size", kernel_size), ("stride", stride), ("padding", padding), ("output_size", output_size))
    (words, sizes), size = _attributes(tuple(input.shape), spatial, *(_ops.integers(name, value) for name, value in named))
    if input.dim() == spatial + 1:
        return _ops._namespace.max_unpool.default(input.unsqueeze(0), indices.unsqueeze(0), words, size, sizes).squeeze(0)
    return _ops._namespace.max_unpool.default(input, indices, words, size, sizes)


def max_unpool1d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Elements back to where `max_pool1d` found them, zeros elsewhere; see `torch.nn.functional.max_unpool1d`, and `max_unpool2d` for the differences."""
    return _max_unpool(1, input, indices, kernel_size, stride, padding, output_size)


def max_unpool2d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Elements back to where `max_pool2d` found them, zeros elsewhere; see `torch.nn.functional.max_unpool2d`.

    An index names an element of its own window, as those of `max_pool2d` with the same windows do. Others raise `OutOfRangeError` on the CPU, and place nothing on a GPU, where
    PyTorch places any. What several windows name is the mean of what they hold, and the gradient is that of the mean. Planes have less than 2^24 elements.
    """
    return _max_unpool(2, input, indices, kernel_size, stride, padding, output_size)


def max_unpool3d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Elements back to where `max_pool3d` found them, zeros elsewhere; see `torch.nn.functional.max_unpool3d`, and `max_unpool2d` for the differences."""
    return _max_unpool(3, input, indices, kernel_size, stride, padding, output_size)
