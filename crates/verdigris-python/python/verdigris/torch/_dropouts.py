"""Dropout of elements and of channels, which `functional` shows."""

import warnings

import torch

from .._errors import GraphError
from . import _ops


def drawn_state(device):
    """A random state by PyTorch's default generator of the device: four int32."""
    return torch.empty(4, dtype=torch.int32, device=device).random_()


def _dropped(input, p, training, state, words, theirs):
    """Dropout of the kind that the words say; `theirs` is PyTorch's own."""
    if not 0.0 <= p <= 1.0:
        raise GraphError(f"the probability of dropout is {p}; it is from 0 to 1")
    if "channels" in words and input.dim() < 2:
        raise GraphError(f"dropout of channels of {tuple(input.shape)}; a channel is an index of the first two dims")
    if not training or p == 0.0:
        return input
    if state is None:
        if torch.compiler.is_compiling():
            return theirs(input, p, True)
        state = drawn_state(input.device)
    return _ops.dropout(input, state, f"p={float(p)!r}{words}")


def dropout(input, p=0.5, training=True, inplace=False, *, state=None):
    """`input` with each element 0 with probability `p`, and the others divided by `1 - p`; without `training`, and with `p` 0, `input` itself.

    Which elements are dropped follows from `state`, four int32 on the tensor's device (seed and offset, low halves first), and from an element's
    number in row-major order: the same in every memory format, on every device, and again in the gradient, which keeps those 16 bytes in place of a mask.
    Without a state PyTorch's default generator of the device draws one, by `Tensor.random_`: `torch.manual_seed`, `fork_rng` and checkpointing hold,
    and a captured CUDA graph draws anew in every replay, as PyTorch's generator does there. The mask is another than PyTorch's own of that seed. What
    `torch.compile` compiles is PyTorch's own dropout unless a state is given. `inplace` is taken and the result is new all the same.
    """
    return _dropped(input, p, training, state, "", torch.nn.functional.dropout)


def _of_channels(input, p, training, state, theirs):
    return _dropped(input, p, training, state, " channels=1", theirs)


def _of_one_without_batch(input, p, training, state, theirs, spatial):
    """Dropout of channels, of a batch or of one without its dim."""
    if input.dim() == spatial + 1:
        return _of_channels(input.unsqueeze(0), p, training, state, theirs).squeeze(0)
    return _of_channels(input, p, training, state, theirs)


def _warn_of_dims(name, input, usual):
    warnings.warn(f"{name} of an input of {tuple(input.shape)}; it has {usual} dims most often. A channel is an index of the first two", stacklevel=3)


def dropout1d(input, p=0.5, training=True, inplace=False, *, state=None):
    """Dropout of channels of `[n, c, l]` or `[c, l]`: all elements of a channel are 0 with probability `p`, or none. Channel `i` of image `n` is dropped as element
    `[n, i]` of a tensor `[n, c]` is by `dropout` under the same state."""
    if input.dim() not in (2, 3):
        raise GraphError(f"dropout1d of an input of {tuple(input.shape)}; it is [n, c, l] or [c, l]")
    return _of_one_without_batch(input, p, training, state, torch.nn.functional.dropout1d, 1)


def dropout2d(input, p=0.5, training=True, inplace=False, *, state=None):
    """Dropout of channels of `[n, c, h, w]`, as `dropout1d`. Of other dims a channel is an index of the first two, as in PyTorch, which warns of them."""
    if input.dim() not in (3, 4) and not torch.compiler.is_compiling():
        _warn_of_dims("dropout2d", input, "4")
    elif input.dim() == 3 and not torch.compiler.is_compiling():
        _warn_of_dims("dropout2d", input, "4; dropout1d is for 3")
    return _of_channels(input, p, training, state, torch.nn.functional.dropout2d)


def dropout3d(input, p=0.5, training=True, inplace=False, *, state=None):
    """Dropout of channels of `[n, c, d, h, w]` or `[c, d, h, w]`, as `dropout1d`. Of other dims a channel is an index of the first two, as in PyTorch, which warns of them."""
    if input.dim() not in (4, 5) and not torch.compiler.is_compiling():
        _warn_of_dims("dropout3d", input, "4 or 5")
    return _of_one_without_batch(input, p, training, state, torch.nn.functional.dropout3d, 3)


def alpha_dropout(input, p=0.5, training=False, inplace=False, *, state=None):
    """Dropout behind SELU: each element becomes the least value of SELU with probability `p`, and the result is scaled and moved so that mean 0 and variance 1 stay.
    Which elements follows from `state`, as in `dropout`."""
    return _dropped(input, p, training, state, " moments=1", torch.nn.functional.alpha_dropout)


def feature_alpha_dropout(input, p=0.5, training=False, inplace=False, *, state=None):
    """`alpha_dropout` of whole channels, indices of the first two dims; see `dropout1d`."""
    return _dropped(input, p, training, state, " channels=1 moments=1", torch.nn.functional.feature_alpha_dropout)
