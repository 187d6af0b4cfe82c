"""What a decoder's block has beside attention: the gated feed-forward half, rotary positions, and projections that share their input."""

import functools

import torch

from .._errors import GraphError, UnsupportedError
from . import _ops, _policy

# Two linear layers of the same input, one through an activation times the other, and a linear layer of that: one call and one node.


def _gated_fake(x, gate, up, down, addend, attributes):
    hidden = x.new_empty((*x.shape[:-1], gate.shape[0]))
    return x.new_empty((*x.shape[:-1], down.shape[0])), hidden, torch.empty_like(hidden), torch.empty_like(hidden)


def _gated_backward_fake(dy, x, gate, up, down, pre, values, hidden, attributes):
    a = _ops.parse(attributes.split("|", 1)[0])
    made = [
        like.new_empty(like.shape, dtype=_ops._WIDTHS[a[f"as{place}"]] if f"as{place}" in a else x.dtype)
        for place, like in enumerate((x, gate, up, down))
    ]
    return [result for result, wanted in zip(made, a["wanted"]) if wanted == "1"]


def _keep_of_gated(ctx, inputs, used, output):
    x, gate, up, down, _, attributes = used
    # What the call was given is kept for the gradients of gradients, which are those of the layers one by one.
    ctx.save_for_backward(x, gate, up, down, *output[1:], *inputs[:4])
    ctx.attributes, ctx.policy = attributes, _ops._current_policy()
    ctx.mark_non_differentiable(*output[1:])
    return output


def _gated_gradients(ctx, dy, *_):
    wanted = ctx.needs_input_grad[:4]
    gradients = [None] * 6
    gradients[4] = dy if ctx.needs_input_grad[4] else None
    if not any(wanted):
        return tuple(gradients)
    *used, x, gate, up, down = ctx.saved_tensors
    if torch.is_grad_enabled():
        with _policy.policy(_ops._native.numbered_policy(ctx.policy)):
            found = _gated_gradients_to_differentiate((x, gate, up, down), dy, ctx.attributes, wanted)
    else:
        words = _ops._words_of_mlp(ctx.attributes, ctx.types, wanted)
        found = _ops._each_result(gated_mlp_backward.again(ctx.policy, dy, *used, words))
    found = iter(found)
    gradients[:4] = [next(found) if want else None for want in wanted]
    return tuple(gradients)


def _gated_gradients_to_differentiate(given, dy, attributes, wanted):
    """The gradients that are wanted, as functions of `dy` and of the tensors that have gradients themselves."""
    x, gate, up, down = (value.to(dy.dtype) for value in given)
    hidden = _ops.activation(_ops.linear(x, gate, None, ""), attributes) * _ops.linear(x, up, None, "")
    y = _ops.linear(hidden, down, None, "")
    return torch.autograd.grad(y, [value for value, want in zip(given, wanted) if want], dy, create_graph=True)


def _gated_recorded(*inputs):
    return _gated(*inputs)[0]


def _refuse_gradients_of_gated(ctx, *_):
    raise UnsupportedError("this gradient of gated layers has no gradient; call the layers one by one to have one")


_GATED = ["Tensor x", "Tensor gate", "Tensor up", "Tensor down", "Tensor? addend"]
_gated = _ops._operator(
    "gated_mlp", _GATED, "(Tensor, Tensor, Tensor, Tensor)", False, _gated_fake, gradients=(_keep_of_gated, _gated_gradients)
)
_gated_inference = _ops._operator(
    "gated_mlp_inference",
    _GATED,
    "Tensor",
    False,
    lambda *inputs: _gated_fake(*inputs)[0],
    recorded=_gated_recorded,
)
gated_mlp_backward = _ops._operator(
    "gated_mlp_backward",
    ["Tensor dy", "Tensor x", "Tensor gate", "Tensor up", "Tensor down", "Tensor pre", "Tensor values", "Tensor hidden"],
    "Tensor[]",
    False,
    _gated_backward_fake,
    gradients=(_ops._keep_nothing, _refuse_gradients_of_gated),
)


def gated_in_mode(x, gate, up, down, addend, words):
    """What `gated_mlp` computes, and the addend; by the operator for inference where gradients are not recorded. `words` say the activation."""
    return _gated(x, gate, up, down, addend, words)[0] if _ops.is_recorded() else _gated_inference(x, gate, up, down, addend, words)


_WORDS = {"silu": "f=silu", "gelu": "f=gelu_erf", "gelu_tanh": "f=gelu_tanh", "relu": "f=relu", "sigmoid": "f=sigmoid"}


def gated_mlp(input, gate, up, down, activation="silu"):
    """`linear(f(linear(x, gate)) * linear(x, up), down)`: `x [..., in]`, weights `[hidden, in]` twice and `[out, hidden]`; f is "silu" (SwiGLU), "gelu", "gelu_tanh"
    (GeGLU), "relu" or "sigmoid".

    One call, with one node of autograd, whose gradients are one call too: activation and product are steps of the second layer. Both layers' results and what
    `down` is given are kept for the gradients, rounded to the type of x."""
    if activation not in _WORDS:
        raise GraphError(f"the activation is {activation!r}; it is one of {', '.join(_WORDS)}")
    return gated_in_mode(input, gate, up, down, None, _WORDS[activation])


# Rotary positions.


def _keep_of_rotary(ctx, inputs, used, output):
    _, cos, sin, attributes = inputs
    ctx.save_for_backward(cos, sin)
    ctx.attributes, ctx.policy = attributes, _ops._current_policy()
    return output


def _gradient_of_rotary(ctx, dy, *_):
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise UnsupportedError("the angles of rotary positions have no gradient in this package; they are no variables")
    turned = "" if ctx.attributes else "gradient=1"
    return rotary.again(ctx.policy, dy, *ctx.saved_tensors, turned), None, None, None


def _across(x):
    """The second half of the last dim, negated, in front of the first."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def _rotary_decomposed(x, cos, sin, attributes):
    if not attributes:
        return x * cos + _across(x) * sin
    return x * cos - _across(x * sin)


rotary = _ops._operator(
    "rotary",
    ["Tensor x", "Tensor cos", "Tensor sin"],
    "Tensor",
    False,
    lambda x, cos, sin, attributes: torch.empty_like(x),
    _rotary_decomposed,
    gradients=(_keep_of_rotary, _gradient_of_rotary),
)


def rotary_embedding(query, key, cos, sin):
    """`x * cos + r(x) * sin` of `query` and `key`, where r puts the second half of the last dim, negated, in front of the first one: rotary positions as Llama has them.

    Both are `[..., elements]` of an even number of elements, `cos` and `sin` broadcast to them but for that dim: to `[batch, heads, positions, elements]` angles
    of `[positions, elements]` or `[batch, 1, positions, elements]`. Computed in f32 (f64) and rounded once. Angles have no gradient."""
    return tuple(rotary(x, *(angle[(None,) * (x.dim() - angle.dim())] for angle in (cos, sin)), "") for x in (query, key))


# Linear layers of the same input whose weights stand one behind the other in memory: one product.


class _Projections(torch.autograd.Function):
    """Heads of queries and keys, turned, and of values, `[batch, positions, heads, elements]`: one node for the product and the turn, which keeps neither's result."""

    @staticmethod
    def forward(ctx, x, weight, bias, cos, sin, counts, elements, *parameters):
        made = _ops.linear(x, weight, bias, "").unflatten(-1, (-1, elements))
        # The parameters with them, which an optimizer writes: the packed weight is their memory, but counts no versions of theirs.
        ctx.save_for_backward(x, weight, bias, cos, sin, *parameters)
        ctx.counts, ctx.policy = counts, _ops._current_policy()
        q, k, v = _turned(made, cos, sin, counts)
        # Whoever keeps the values is not to keep all of the product.
        return q, k, v.contiguous()

    @staticmethod
    def backward(ctx, dq, dk, dv):
        if torch.is_grad_enabled():
            raise UnsupportedError("the gradient of packed projections has no gradient; convert with `skip` the attention that needs one")
        x, weight, bias, cos, sin, *_ = ctx.saved_tensors
        turn = lambda dy: dy if cos is None else rotary.again(ctx.policy, dy, cos, sin, "gradient=1")
        dy = torch.cat((turn(dq), turn(dk), dv), dim=2).flatten(2)
        count = len(ctx.counts)
        of_x, of_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[7 : 7 + count]
        of_biases = ctx.needs_input_grad[7 + count : 7 + 2 * count]
        asked = tuple(place for place, wanted in enumerate((of_x, any(of_weights), any(of_biases))) if wanted)
        found = dict(zip(asked, _linear_gradients(ctx.policy, asked, dy, x, weight, bias)))
        sizes = [heads * dq.shape[-1] for heads in ctx.counts]

        def split(place, wanted):
            parts = found[place].split(sizes) if place in found else [None] * len(wanted)
            return [part if want else None for part, want in zip(parts, wanted)]

        return (found.get(0), *[None] * 6, *split(1, of_weights), *split(2, of_biases))


class _LinearAdd(torch.autograd.Function):
    """A linear layer's result and an addend: what is added has the gradient of the sum."""

    @staticmethod
    def forward(ctx, x, weight, bias, addend):
        ctx.save_for_backward(x, weight, bias)
        ctx.policy = _ops._current_policy()
        return _sum(x, weight, bias, addend)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        asked = tuple(place for place in range(3) if ctx.needs_input_grad[place])
        found = dict(zip(asked, _linear_gradients(ctx.policy, asked, dy, x, weight, bias)))
        return found.get(0), found.get(1), found.get(2), dy if ctx.needs_input_grad[3] else None


def _sum(x, weight, bias, addend):
    return _ops.fused(x, weight, bias, addend, *[None] * (len(_ops._FUSED) - 4), f"of=linear tensors=3 type={_NAMES[x.dtype]};b=add;", ())


_NAMES = {dtype: name for name, dtype in _ops._WIDTHS.items()}


def linear_add(x, weight, bias, addend):
    """`linear(x, weight, bias) + addend`, all of one type: the sum is a step of the product, and rounded once."""
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in (x, weight, bias, addend)):
        return _ops.apply("linear_add", _LinearAdd, x, weight, bias, addend)
    return _sum(x, weight, bias, addend)


def _linear_gradients(policy, asked, dy, x, weight, bias):
    """The gradients of a linear layer with respect to some of input, weight and bias, together."""
    words = lambda places: f"of=linear wrt={','.join(map(str, places))}|"
    if len(asked) > 1:
        together = _ops._together(policy, dy, x, weight, bias, words(asked), ())
        if together is not None:
            return together
    return [_ops.gradient.again(policy, dy, x, weight, bias, words((place,)), ()) for place in asked]


def _turned(made, cos, sin, counts):
    """The heads of queries and keys turned by their angles, and those of values."""
    q, k, v = made.split(counts, dim=2) if cos is None else (None, None, made[:, :, -counts[2] :])
    if cos is not None:
        # Queries and keys stand beside each other: one pass turns both.
        q, k = rotary(made[:, :, : -counts[2]], cos, sin, "").split(counts[:2], dim=2)
    return q, k, v


def projections(x, packed, bias, parameters, counts, elements, cos=None, sin=None):
    """Queries, keys and values of `x`, each `[batch, positions, heads, elements]`, by one product of weights that stand one behind the other in `packed`, and so `bias`;
    `counts` says how many heads each has. With cosines and sines of `[batch, positions, 1, elements]` queries and keys are turned by them."""
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in (x, *parameters)):
        return _ops.apply("projections", _Projections, x, packed, bias, cos, sin, counts, elements, *parameters)
    return _turned(_ops.linear(x, packed, bias, "").unflatten(-1, (-1, elements)), cos, sin, counts)
