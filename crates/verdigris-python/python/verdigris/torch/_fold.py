"""Windows of images as columns, and columns added up to images, which `functional` shows.

The elements of all windows are one strided view of the image, so `unfold` is one copy (and one before it, where there is padding). `fold` adds up for each pixel what the
windows around it hold, in the order of their taps, by one reduction over a strided view of the columns: with rows `h + padding = q * stride + r`, window `q - m` holds
the pixel at tap `r + m * stride`, and the memory of that element is linear in `q`, `r` and `m`. Where windows reach beyond the first or last, or their size is no
multiple of the stride, the columns are copied with zeros around them first. Each is the gradient of the other.
"""

import math

import torch

from .._errors import GraphError, UnsupportedError
from . import _ops

_WINDOWS, _PAD = (_ops.operator_number(name) for name in ("window_sums", "pad"))


@_ops.cached
def _both(name, value, least):
    values = value if isinstance(value, tuple) else (value,) * 2
    values = values * 2 if len(values) == 1 else values
    if len(values) != 2 or any(value < least for value in values):
        raise GraphError(f"{name} is {values}; it is a number, or two, of at least {least}")
    return values


def _taps(kernel_size, dilation, padding, stride):
    named = zip(("kernel_size", "dilation", "padding", "stride"), (kernel_size, dilation, padding, stride), (1, 1, 0, 1))
    window, dilation, padding, stride = (_both(name, _ops.integers(name, value), least) for name, value, least in named)
    return window, dilation, padding, stride


def _positions(image, window, dilation, padding, stride):
    """How many windows there are along each dim of an image."""
    return tuple(
        (size + 2 * pad - step * (taps - 1) - 1) // stride + 1 for size, taps, step, pad, stride in zip(image, window, dilation, padding, stride)
    )


def _words(window, dilation, padding, stride):
    named = (("window", window), ("dilation", dilation), ("padding", padding), ("stride", stride))
    return " ".join(f"{name}={values[0]},{values[1]}" for name, values in named)


def _told(attributes):
    a = _ops.parse(attributes)
    return a["window"], a["dilation"], a["padding"], a["stride"]


def _padded(x, before, after):
    if not any(before) and not any(after):
        return x
    return _ops._run(_PAD, x, f"before={','.join(map(str, before))} after={','.join(map(str, after))} value=0.0")


def _unfold(x, attributes):
    window, dilation, padding, stride = _told(attributes)
    images, channels, *image = x.shape
    out = _positions(image, window, dilation, padding, stride)
    columns = (images, channels * window[0] * window[1], out[0] * out[1])
    if 0 in columns:
        return x.new_empty(columns)
    x = _padded(x, (0, 0, *padding), (0, 0, *padding))
    image, channel, row, pixel = x.stride()
    strides = (image, channel, dilation[0] * row, dilation[1] * pixel, stride[0] * row, stride[1] * pixel)
    return _ops._run(_WINDOWS, x.as_strided((images, channels, *window, *out), strides), "sum=0").view(columns)


def _walk(size, taps, dilation, padding, stride, positions):
    """Of one dim: zeros behind the taps, zeros before and after the positions; then extents and, in taps and positions, strides of q, r and m, the position
    from which the walk starts, and the first row of what it gives that is one of the image's."""
    if stride == 1:
        before, after = max((taps - 1) * dilation - padding, 0), max(size + padding - positions, 0)
        return 0, before, after, (size, 1, taps), ((0, 1), (0, 0), (1, -dilation)), padding + before, 0
    most = -(-taps // stride)
    first, last = padding // stride, (padding + size - 1) // stride
    before, after = max(most - 1 - first, 0), max(last + 1 - positions, 0)
    return most * stride - taps, before, after, (last - first + 1, stride, most), ((0, 1), (1, 0), (stride, -1)), first + before, padding % stride


def _fold(columns, attributes, dims):
    window, dilation, padding, stride = _told(attributes)
    size = tuple(map(int, dims))
    images, rows, _ = columns.shape
    channels, out = rows // math.prod(window), _positions(size, window, dilation, padding, stride)
    if columns.numel() == 0 or 0 in size:
        return columns.new_zeros((images, channels, *size))
    x = columns.contiguous().view(images * channels, *window, *out)
    # Taps apart from each other under a stride: zeros between them make them neighbours.
    gaps = [step - 1 if step > 1 and stride > 1 and taps > 1 else 0 for step, stride, taps in zip(dilation, stride, window)]
    if any(gaps):
        x = _padded(x.view(-1, window[0], 1, window[1], 1, *out), (0,) * 7, (0, 0, gaps[0], 0, gaps[1], 0, 0))
        window = tuple(taps * (gap + 1) for taps, gap in zip(window, gaps))
        dilation = tuple(1 if gap else step for step, gap in zip(dilation, gaps))
        x = x.view(-1, *window, *out)
    walks = [_walk(*each) for each in zip(size, window, dilation, padding, stride, out)]
    (taps_h, before_h, after_h, *_), (taps_w, before_w, after_w, *_) = walks
    x = _padded(x, (0, 0, 0, before_h, before_w), (0, taps_h, taps_w, after_h, after_w))
    plane, strides = x.stride(0), ((x.stride(1), x.stride(3)), (x.stride(2), x.stride(4)))
    extents, steps, offset = [], [], 0
    for (_, _, _, extent, walk, start, _), (tap, position) in zip(walks, strides):
        extents.append(extent)
        steps.append([0 if many == 1 else of_tap * tap + of_position * position for many, (of_tap, of_position) in zip(extent, walk)])
        offset += start * position
    (h, w), (of_h, of_w) = extents, steps
    view = x.as_strided((images * channels, *h[:2], *w[:2], h[2], w[2]), (plane, *of_h[:2], *of_w[:2], of_h[2], of_w[2]), x.storage_offset() + offset)
    if h[2] * w[2] == 1:
        y = _ops._run(_WINDOWS, view[..., 0, 0], "sum=0")
    else:
        y = _ops._run(_WINDOWS, view, "sum=2")
    y = y.view(images, channels, h[0] * h[1], w[0] * w[1])
    first = (walks[0][-1], walks[1][-1])
    after = tuple(size - whole + start for size, whole, start in zip(size, y.shape[2:], first))
    return _padded(y, (0, 0, -first[0], -first[1]), (0, 0, *after))


def _unfold_fake(x, attributes):
    window, *others = _told(attributes)
    out = _positions(x.shape[2:], window, *others)
    return x.new_empty((x.shape[0], x.shape[1] * window[0] * window[1], out[0] * out[1]))


def _fold_fake(columns, attributes, dims):
    window, *_ = _told(attributes)
    return columns.new_empty((columns.shape[0], columns.shape[1] // (window[0] * window[1]), *dims))


class _Unfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, attributes):
        ctx.attributes, ctx.dims = attributes, x.shape[2:]
        with torch._C._AutoDispatchBelowAutograd():
            return _ops._namespace.unfold.default(x, attributes)

    @staticmethod
    def backward(ctx, dy):
        return _ops._namespace.fold.default(dy, ctx.attributes, ctx.dims), None


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, columns, attributes, dims):
        ctx.attributes = attributes
        with torch._C._AutoDispatchBelowAutograd():
            return _ops._namespace.fold.default(columns, attributes, dims)

    @staticmethod
    def backward(ctx, dy):
        return _ops._namespace.unfold.default(dy, ctx.attributes), None, None


_ops._library.define("unfold(Tensor x, str attributes) -> Tensor")
_ops._library.define("fold(Tensor x, str attributes, SymInt[] dims) -> Tensor")
for _key in ("CPU", "CUDA"):
    _ops._library.impl("unfold", _unfold, _key)
    _ops._library.impl("fold", _fold, _key)
_ops._library.impl("unfold", _ops._differentiable("unfold", _Unfold), "Autograd")
_ops._library.impl("fold", _ops._differentiable("fold", _Fold), "Autograd")
_ops._register_fake("unfold", _unfold_fake)
_ops._register_fake("fold", _fold_fake)


def unfold(input, kernel_size, dilation=1, padding=0, stride=1):
    """The windows of images as columns: `[n, c, h, w]` becomes `[n, c * kh * kw, windows]`, packed; without `n` likewise. See `torch.nn.functional.unfold`."""
    taps = _taps(kernel_size, dilation, padding, stride)
    if input.dim() not in (3, 4):
        raise GraphError(f"unfold of {tuple(input.shape)}; it is [n, c, h, w] or [c, h, w]")
    if not input.is_floating_point():
        raise UnsupportedError(f"unfold of {input.dtype}; it takes floating-point numbers")
    out = _positions(input.shape[-2:], *taps)
    if 0 in input.shape[-3:] or min(out) < 1:
        raise GraphError(f"unfold of {tuple(input.shape)} by windows of {taps[0]}, dilation {taps[1]}, padding {taps[2]} and stride {taps[3]}: {out} windows; there is one along each dim")
    if input.dim() == 3:
        return _ops._namespace.unfold.default(input.unsqueeze(0), _words(*taps)).squeeze(0)
    return _ops._namespace.unfold.default(input, _words(*taps))


def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Columns of windows added up to images: `[n, c * kh * kw, windows]` becomes `[n, c, *output_size]`; without `n` likewise. See `torch.nn.functional.fold`.

    Each pixel is summed in float32 (float64 of float64) in the order of the taps, without atomics, and rounded once: results repeat bit for bit.
    """
    taps = _taps(kernel_size, dilation, padding, stride)
    size = _both("output_size", _ops.integers("output_size", output_size), 1)
    if input.dim() not in (2, 3):
        raise GraphError(f"fold of {tuple(input.shape)}; it is [n, c * window, windows] or [c * window, windows]")
    if not input.is_floating_point():
        raise UnsupportedError(f"fold of {input.dtype}; it takes floating-point numbers")
    rows, columns = input.shape[-2:]
    out = _positions(size, *taps)
    if min(out) < 1 or columns != out[0] * out[1]:
        raise GraphError(f"fold of {columns} columns to {size} by windows of {taps[0]}, dilation {taps[1]}, padding {taps[2]} and stride {taps[3]}, which are {out}")
    if rows == 0 or rows % (taps[0][0] * taps[0][1]):
        raise GraphError(f"fold of {rows} rows by windows of {taps[0]}; rows are a multiple of a window's taps")
    if input.dim() == 2:
        return _ops._namespace.fold.default(input.unsqueeze(0), _words(*taps), size).squeeze(0)
    return _ops._namespace.fold.default(input, _words(*taps), size)
