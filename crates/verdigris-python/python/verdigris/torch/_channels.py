"""Shuffles of pixels and channels, and the norm over neighbouring channels, which `functional` shows."""

from .._errors import GraphError, UnsupportedError
from . import _ops


#: The most channels of a window of `local_response_norm`.
MAX_RESPONSES = 64


@_ops.cached
def _factor(shape, factor, name, is_up):
    """The attributes of a pixel shuffle, or of its way back."""
    if len(shape) < 3:
        raise GraphError(f"an input of {shape}; pixels are shuffled among the last three dims, channels, height and width")
    if factor < 1:
        raise GraphError(f"{name} is {factor}; it is at least 1")
    channels, height, width = shape[-3:]
    if is_up and channels % factor**2:
        raise GraphError(f"{name} is {factor} for {channels} channels; their number is a multiple of its square")
    if not is_up and (height % factor or width % factor):
        raise GraphError(f"{name} is {factor} for {height} x {width} pixels; both are multiples of it")
    return f"{'pixels' if is_up else 'channels'}={factor}"


def pixel_shuffle(input, upscale_factor):
    """Channels to pixels: `[..., c * r^2, h, w]` becomes `[..., c, h * r, w * r]`, in one copy; channels-last where the input is."""
    factor = _ops.integers("upscale_factor", upscale_factor)
    return _ops.of_bits(_ops.shuffle, input, _factor(tuple(input.shape), factor, "upscale_factor", True))


def pixel_unshuffle(input, downscale_factor):
    """Pixels to channels, the way back of `pixel_shuffle`: `[..., c, h * r, w * r]` becomes `[..., c * r^2, h, w]`."""
    factor = _ops.integers("downscale_factor", downscale_factor)
    return _ops.of_bits(_ops.shuffle, input, _factor(tuple(input.shape), factor, "downscale_factor", False))


def channel_shuffle(input, groups):
    """The channels of `[n, c, ...]` dealt out among groups: the first of each group, then the second of each, and so on; in one copy."""
    if input.dim() < 3:
        raise GraphError(f"an input of {tuple(input.shape)}; channels are shuffled in [n, c, ...] with at least three dims")
    groups = _ops.integers("groups", groups)
    if groups < 1 or input.shape[1] % groups:
        raise GraphError(f"groups is {groups} for {input.shape[1]} channels; their number is a multiple of it, and it is at least 1")
    return _ops.of_bits(_ops.shuffle, input, f"groups={groups}")


def local_response_norm(input, size, alpha=1e-4, beta=0.75, k=1.0):
    """`x / (k + alpha / size * sum of x^2 over size channels around)^beta`, of `[n, c, ...]`; see `torch.nn.functional.local_response_norm`.

    Computed in float32 (float64 for float64) and rounded once, where PyTorch rounds each step. Windows have up to 64 channels.
    """
    if input.dim() < 3:
        raise GraphError(f"an input of {tuple(input.shape)}; it is [n, c, ...] with at least three dims")
    if not input.is_floating_point():
        raise UnsupportedError(f"local_response_norm of {input.dtype}; it takes floating-point numbers")
    size = _ops.integers("size", size)
    if not 1 <= size <= MAX_RESPONSES:
        raise UnsupportedError(f"size is {size}; a window has 1 to {MAX_RESPONSES} channels")
    return _ops.local_response_norm(input, f"size={size} alpha={float(alpha)!r} beta={float(beta)!r} k={float(k)!r}")
