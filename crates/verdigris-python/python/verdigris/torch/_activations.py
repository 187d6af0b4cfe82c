"""Activations beside those of `functional`, which shows them: composed ones, those with weights or random slopes, gated ones."""

import math

import torch

from .._errors import GraphError, UnsupportedError
from . import _ops
from ._dropouts import drawn_state


def _finite(name, **numbers):
    """The words for numbers that are finite."""
    for attribute, value in numbers.items():
        if not math.isfinite(value):
            raise UnsupportedError(f"{name} with {attribute} {value}; it is a finite number")
    return "".join(f" {attribute}={float(value)!r}" for attribute, value in numbers.items())


def prelu(input, weight):
    """`x` if `x > 0`, else `weight * x`. The weight has one element, or one for each index of dim 1."""
    if weight.dim() > 1:
        raise GraphError(f"a weight of {tuple(weight.shape)}; it is one number, or has one dim")
    if weight.numel() != 1:
        if input.dim() == 0:
            raise GraphError(f"a weight of {tuple(weight.shape)} for an input without dims; it has one element")
        channels = input.shape[1] if input.dim() > 1 else 1
        if weight.numel() != channels:
            raise GraphError(f"a weight of {tuple(weight.shape)} for an input of {tuple(input.shape)}; it has one element, or one for each of {channels} channels")
    return _ops.prelu(input, weight, "")


def rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False, inplace=False, *, state=None):
    """`x` if `x > 0`, else `slope * x`: by the mean of both bounds, and with `training` by a random slope between them for each element.

    Slopes follow from `state` and an element's number, as what `dropout` drops: they are the same in every memory format, and drawn again in the gradient. What
    `torch.compile` compiles is PyTorch's own function with `training` and without a state.
    """
    words = _finite("rrelu", lower=lower, upper=upper)
    if lower > upper:
        raise GraphError(f"lower is {lower} and upper {upper}; it is not greater")
    if not training:
        return _ops.activation(input, f"f=leaky_relu slope={(lower + upper) / 2!r}")
    if state is None:
        if torch.compiler.is_compiling():
            return torch.nn.functional.rrelu(input, lower, upper, True)
        state = drawn_state(input.device)
    return _ops.rrelu(input, state, words.strip())


def selu(input, inplace=False):
    """`1.0507... * elu(x, 1.6732...)`."""
    return _ops.activation(input, "f=selu")


def celu(input, alpha=1.0, inplace=False):
    """`x` if `x > 0`, else `alpha * (e^(x / alpha) - 1)`."""
    if alpha == 0:
        raise GraphError("alpha is 0; celu divides by it")
    if not 0 < alpha < math.inf:
        raise UnsupportedError(f"celu with alpha {alpha}; it is a finite number above 0")
    return _ops.activation(input, f"f=celu alpha={float(alpha)!r}" if alpha != 1 else "f=elu alpha=1.0")


def glu(input, dim=-1):
    """`a * sigmoid(b)` of both halves `a` and `b` of the input along `dim`. In one pass, and so is the gradient."""
    rank = input.dim()
    if rank == 0:
        raise GraphError("glu of a tensor without dims; it has halves along one")
    axis = _ops.axis(input, dim)
    if input.shape[axis] % 2:
        raise GraphError(f"glu of {tuple(input.shape)} along dim {axis}; its extent is even")
    return _ops.glu(input, f"axis={axis}")


def logsigmoid(input):
    """`-ln(1 + e^-x)`."""
    return _ops.activation(input, "f=log_sigmoid")


def hardshrink(input, lambd=0.5):
    """0 if `|x| <= lambd`, else `x`."""
    return _ops.activation(input, "f=hard_shrink" + _finite("hardshrink", **{"lambda": lambd}))


def softshrink(input, lambd=0.5):
    """0 if `|x| <= lambd`, else `x` nearer to 0 by `lambd`."""
    if lambd < 0:
        raise GraphError(f"lambd is {lambd}; it is at least 0")
    return _ops.activation(input, "f=soft_shrink" + _finite("softshrink", **{"lambda": lambd}))


def tanhshrink(input):
    """`x - tanh(x)`, rounded once."""
    return _ops.activation(input, "f=tanh_shrink")


def softsign(input):
    """`x / (1 + |x|)`; infinities give NaN, as PyTorch's."""
    return _ops.activation(input, "f=soft_sign")


def threshold(input, threshold, value, inplace=False):
    """`x` if `x > threshold`, else `value`."""
    if threshold == 0 and value == 0:
        return _ops.activation(input, "f=relu")
    return _ops.activation(input, "f=threshold" + _finite("threshold", bound=threshold, value=value))
