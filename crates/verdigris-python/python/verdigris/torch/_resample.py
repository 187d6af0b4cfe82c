"""`interpolate` and `pad`, which `functional` shows."""

import functools

import torch

from .._errors import GraphError, UnsupportedError
from . import _ops

#: PyTorch's modes with the library's filters, and the spatial dims that they are for; `None` stands for any.
_MODES = {
    "nearest": ("nearest", None),
    "nearest-exact": ("nearest-exact", None),
    "linear": ("linear", 1),
    "bilinear": ("linear", 2),
    "trilinear": ("linear", 3),
    "bicubic": ("cubic", 2),
}
_BORDERS = ("reflect", "replicate", "circular")


def _list(name, values):
    return f"{name}={','.join(map(str, values))}"


def _each(name, value, spatial, shape):
    if not isinstance(value, (list, tuple)):
        return (value,) * spatial
    if len(value) != spatial:
        raise GraphError(f"{name} is {tuple(value)} for an input of {shape}; there is one for each of {spatial} spatial dims")
    return tuple(value)


@_ops.cached
def _interpolation(shape, size, scale_factor, mode, align_corners, recompute):
    """The attributes of an interpolation, as `with_lists` has them, or with `area` the size that it averages to."""
    spatial = len(shape) - 2
    if mode in ("nearest", "nearest-exact", "area"):
        if align_corners is not None:
            raise GraphError(f"align_corners with mode '{mode}'; it is of linear, bilinear, bicubic and trilinear")
    elif mode not in _MODES:
        raise UnsupportedError(f"mode '{mode}' of an input of {shape}; it is {', '.join(_MODES)} or area")
    if not 1 <= spatial <= 3:
        raise UnsupportedError(f"interpolation of {shape}; it takes [n, c, spatial...] with one to three spatial dims")
    if mode in _MODES and _MODES[mode][1] not in (None, spatial):
        raise UnsupportedError(f"mode '{mode}' of an input of {shape}; it is for {_MODES[mode][1]} spatial dims")
    if size is not None and scale_factor is not None:
        raise GraphError("both size and scale_factor are given; one of them says how large the result is")
    if size is None and scale_factor is None:
        raise GraphError("neither size nor scale_factor is given; one of them says how large the result is")
    factors = None
    if size is not None:
        if recompute:
            raise GraphError("recompute_scale_factor with a size; it is of a scale_factor")
        out = _each("size", size, spatial, shape)
    else:
        factors = tuple(map(float, _each("scale_factor", scale_factor, spatial, shape)))
        if not all(0.0 < factor < float("inf") for factor in factors):
            raise GraphError(f"scale_factor is {factors}; each is finite and above 0")
        out = tuple(torch.sym_int(extent * factor) for extent, factor in zip(shape[2:], factors))
        # PyTorch copies an input of the same size, whatever the factors.
        is_copied = mode in ("linear", "bilinear", "trilinear") and out == tuple(shape[2:])
        if recompute or mode == "area" or align_corners or is_copied:
            factors = None
        elif mode == "nearest" and spatial == 2:
            # Of two spatial dims it leaves one alone that keeps its extent, and of one or three it does not.
            factors = tuple(1.0 if size == extent else factor for factor, size, extent in zip(factors, out, shape[2:]))
    if 0 in shape[1:] or any(extent < 1 for extent in out):
        raise GraphError(f"interpolation of {shape} to {out}; dims behind the batch, and those of the result, are not empty")
    if mode == "area":
        return out
    words = f"mode={_MODES[mode][0]} corners={int(bool(align_corners))}"
    return _ops.with_lists(words if factors is None else f"{words} {_list('factors', map(repr, factors))}", out=out)


def _hashed(value):
    """Factors as Python's numbers: PyTorch takes those of NumPy and tensors of one element too."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashed, value))
    return value.item() if isinstance(value, torch.Tensor) or hasattr(value, "dtype") else value


def interpolate(
    input, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None, antialias=False
):
    """`x [n, c, spatial...]` in another resolution; see `torch.nn.functional.interpolate`.

    Coordinates are computed in f32 (of linear and cubic modes in f64 for f64 tensors) as PyTorch's kernels for GPUs do; those for CPUs differ at ties of
    `nearest` in 16-bit types and where the result is twice as large by an uneven factor. A factor that leaves an extent as it is changes nothing along it in linear modes, if no extent
    changes, and in `nearest` of two spatial dims. An element of weight 0 does not reach the result, be it an infinity
    or a NaN; PyTorch multiplies it by 0. `area` is `adaptive_avg_pool`. `antialias=True` is refused.
    """
    if antialias:
        raise UnsupportedError("interpolate with antialias=True is not computed by this package")
    size = _ops.integers("size", size)
    told = _interpolation(tuple(input.shape), size, _hashed(scale_factor), mode, align_corners, bool(recompute_scale_factor))
    if mode == "area":
        from . import functional

        return getattr(functional, f"adaptive_avg_pool{len(told)}d")(input, told)
    if not input.dtype.is_floating_point and input.dtype != torch.uint8:
        raise UnsupportedError(f"interpolate of {input.dtype}; it takes floating-point numbers and uint8")
    return _ops.told(_ops.resample, _ops.widened(input), told)


@_ops.cached
def _padding(shape, pad, mode):
    """The attributes of a padding by its mode, and the spatial dims of one that is no constant: `(before, after, spatial)`."""
    if len(pad) % 2 or len(pad) > 2 * len(shape):
        raise GraphError(f"pad is {pad} for an input of {shape}; it has two numbers for each dim that is padded, the last dim first")
    count = len(pad) // 2
    before, after = pad[0::2][::-1], pad[1::2][::-1]
    out = [extent + low + high for extent, low, high in zip(shape[len(shape) - count :], before, after)]
    if any(extent < 0 for extent in out):
        raise GraphError(f"pad is {pad} for an input of {shape}; the result would have a dim below 0")
    if mode == "constant":
        if any(extent + min(low, 0) + min(high, 0) < 0 for extent, low, high in zip(shape[len(shape) - count :], before, after)):
            raise GraphError(f"pad is {pad} for an input of {shape}; of a dim no more is left out than there is")
        rest = (0,) * (len(shape) - count)
        return rest + before, rest + after, count
    if mode not in _BORDERS:
        raise UnsupportedError(f"padding mode '{mode}'; it is constant, {', '.join(_BORDERS)}")
    if not 1 <= count <= 3 or len(shape) not in (count + 1, count + 2):
        raise UnsupportedError(f"padding of {count} dims of {shape} by mode '{mode}'; the last one to three of [n, c, ...] or [c, ...] are padded")
    is_batch = len(shape) == count + 2
    if 0 in shape[is_batch:]:
        raise GraphError(f"padding of {shape} by mode '{mode}'; dims behind the batch are not empty")
    for extent, low, high in zip(shape[len(shape) - count :], before, after):
        if mode == "reflect" and max(low, high) >= extent:
            raise GraphError(f"pad is {pad} for an input of {shape}; a reflected border is smaller than its dim")
        if mode == "circular" and max(low, high) > extent:
            raise GraphError(f"pad is {pad} for an input of {shape}; a circular border wraps around once")
        if extent + low + high < 1 or min(low, high) <= -extent:
            raise UnsupportedError(f"pad is {pad} for an input of {shape}; an element is left along each dim")
    return before, after, count


def _constant(value, dtype):
    """A constant as a number of a type, as PyTorch makes it: without its fraction in integers, and refused beyond the type's range."""
    value = 0.0 if value is None else float(value)
    if value - value != 0.0:
        raise UnsupportedError(f"padding with {value}; this package pads with a finite number")
    if dtype == torch.bool:
        return float(value != 0.0)
    if dtype.is_complex:
        raise UnsupportedError(f"padding of {dtype}; it takes real numbers and truth values")
    bounds = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    # In f64 the greatest number of 64 bits is rounded up to the first one that is too large.
    is_within = float(bounds.min) <= value <= float(bounds.max) and value != 2.0**63
    if not is_within:
        raise GraphError(f"padding with {value} in {dtype}; it holds numbers from {bounds.min} to {bounds.max}")
    return value if dtype.is_floating_point else float(int(value))


def pad(input, pad, mode="constant", value=None):
    """A border around the last dims; see `torch.nn.functional.pad`. A constant is finite and in the range of the input's type; in integers it loses its fraction."""
    before, after, count = _padding(tuple(input.shape), _ops.integers("pad", tuple(pad)), mode)
    if mode == "constant":
        if not any(before) and not any(after):
            return input.clone()
        value = _constant(value, input.dtype)
        return _ops.of_bits(_ops.pad, input, _ops.with_lists(f"value={value!r}", before=before, after=after))
    if value is not None and value != 0:
        raise GraphError(f"padding mode '{mode}' with the value {value}; a value is of mode 'constant'")
    if mode == "circular" and min(*before, *after) < 0:
        # Elements that are left out are no part of the circle.
        for dim, (low, high) in enumerate(zip(before, after), input.dim() - count):
            input = input.narrow(dim, max(-low, 0), input.shape[dim] + min(low, 0) + min(high, 0))
        before, after = (tuple(max(side, 0) for side in sides) for sides in (before, after))
        if max(side - extent for sides in (before, after) for side, extent in zip(sides, input.shape[-count:])) > 0:
            raise UnsupportedError(f"pad is {tuple(pad)}; a circular border wraps around once what is left of the input")
    words = _ops.with_lists(f"border={mode}", before=before, after=after)
    # PyTorch wraps truth values around, and has no other border of them.
    border = functools.partial(_ops.of_bits if mode == "circular" else _ops.told, _ops.resample)
    if input.dim() == count + 1:
        return border(input.unsqueeze(0), words).squeeze(0)
    return border(input, words)
