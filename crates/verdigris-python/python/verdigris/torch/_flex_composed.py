"""Attention with a score function that the op of attention has no options for: products, steps of the pointwise language and a softmax between them, as one graph.

So are gradients of all functions of that kind, and results where the op takes no such steps (`_flex_steps`). Scores are stored then, `batch · heads · queries · keys` numbers of f32 at a time and a few
times over in the gradient, as PyTorch's own does without a compiler. What the function computes of
places and captured tensors alone is an operand of the steps, over the dims in which it differs; gradients reach it from there.

A plan is kept by the steps, types, dims, strides, policy and device: never by the function, whose captured numbers stand in the steps, or in operands that are computed at each call.
"""

import collections
import functools
import math
import threading

import torch

from .. import _native
from .._errors import UnsupportedError
from . import _policy
from ._flex_trace import SCORE, Value

_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", torch.uint8: "u8"}
#: Of ops by the name that PyTorch gives them: that of the graph's.
_UNARY = {
    **{name: name for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf", "sin", "cos", "tan", "tanh", "sigmoid", "silu", "relu")},
    **{"floor": "floor", "ceil": "ceil", "round": "round", "sign": "sign", "logical_not": "not", "isnan": "is_nan", "isfinite": "is_finite"},
}
_BINARY = {
    **{"add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "max", "minimum": "min", "fmod": "mod", "remainder": "floor_mod"},
    **{"pow": "pow", "atan2": "atan2", **{name: name for name in ("eq", "ne", "lt", "le", "gt", "ge")}},
    **{"logical_and": "and", "logical_or": "or", "logical_xor": "ne"},
}
#: Steps between whose jumps nothing varies; so are all that give truths.
_CONSTANT = ("floor", "ceil", "round", "trunc", "sign", "floor_divide")
_OF_TRUTHS = {"add": "or", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "ne"}


class Steps:
    """The score function as ops of a graph, and the values that are its operands."""

    def __init__(self, trace, value, is_operand=lambda at: not at.reads & SCORE and not at.is_number):
        # Steps outlive the call whose tensors the trace has.
        self.trace, self.value = trace.of_tensors([]), value
        self.order = trace.reached([value], is_operand)
        self.operands = [at for at in self.order if is_operand(at)]
        # What an operand was computed by is no part of the steps.
        place = {at.number: number for number, at in enumerate(self.order)}
        of_operands = {at.number for at in self.operands}
        told = [() if at.number in of_operands else [place[arg.number] if isinstance(arg, Value) else repr(arg) for arg in at.args] for at in self.order]
        self.key = tuple(("operand" if at.number in of_operands else at.op, at.dtype, *args) for at, args in zip(self.order, told))

        # What the value varies with: the graph refuses the gradient of what steps are constant in.
        self.varying, stack = set(), [value]
        while stack:
            at = stack.pop()
            is_truth = at.dtype == torch.bool
            if at.number not in self.varying and not is_truth and at.op not in _CONSTANT:
                self.varying.add(at.number)
                if at.number not in of_operands:
                    stack.extend(arg for arg in at.args if isinstance(arg, Value))
        self.varies_with_score = any(at.op == "score" and at.number in self.varying for at in self.order)

    def emitted(self, g, score, operands):
        """The function's value in the graph `g`, of the scores and the operands in it."""
        made, constants = self._entered(g, score, operands), self._constants(g)
        for at in self.order:
            if at.is_number:
                made[at.number] = constants.later(at.args[0])
            elif at.number not in made:
                made[at.number] = self._op(g, at, [made.get(arg.number) for arg in at.args if isinstance(arg, Value)], constants)
        return _there(made[self.value.number])

    def _constants(self, g):
        return _Constants(g, self.trace.score_dtype)

    def _entered(self, g, score, operands):
        """What the graph has of it: the scores, and the operands."""
        made = {at.number: uid for at, uid in zip(self.operands, operands)}
        made.update((at.number, score) for at in self.order if at.op == "score")
        return made

    def _op(self, g, at, args, constants):
        op = at.op
        if op in ("add", "sub", "mul") and at.dtype != torch.bool and any(isinstance(arg, _Later) for arg in args):
            x, z = args
            number = next(arg.number for arg in args if isinstance(arg, _Later))
            if math.isfinite(number) and not (isinstance(x, _Later) and isinstance(z, _Later)):
                if isinstance(x, _Later):
                    scale, shift = (number, 0.0) if op == "mul" else (-1.0 if op == "sub" else 1.0, number)
                    return g.unary("affine", z, scale=scale, shift=shift)
                scale, shift = (number, 0.0) if op == "mul" else (1.0, -number if op == "sub" else number)
                return g.unary("affine", x, scale=scale, shift=shift)
        args = [_there(arg) for arg in args]
        if op in _UNARY:
            return g.unary(_UNARY[op], args[0])
        if op in _OF_TRUTHS and at.dtype == torch.bool:
            return g.binary(_OF_TRUTHS[op], *args)
        if op == "pow":
            exponent = at.args[1]
            if not exponent.is_number and exponent.dtype.is_floating_point:
                return self._power(g, *args, constants)
            if exponent.holds(0) or not exponent.is_number:
                # Of an exponent 0 the result is 1 and the gradient 0, and not 0 · 0⁻¹.
                args[0] = g.ternary("select", constants.of(1.0), args[0], g.binary("eq", args[1], constants.of(0.0)))
        if op in _BINARY:
            if op == "logical_xor":
                args = [g.unary("not", arg) for arg in args]
            return g.binary(_BINARY[op], *args)
        if op == "where":
            condition, x, z = args
            return g.ternary("select", x, z, condition)
        if op == "cast":
            return self._cast(g, at, args[0])
        if op == "square":
            return g.binary("mul", args[0], args[0])
        if op == "floor_divide":
            return self._whole_quotient(g, *args, constants)
        if op == "trunc":
            return self._truncated(g, args[0], constants)
        if op == "exp2":
            return g.unary("exp", g.unary("affine", args[0], scale=math.log(2.0), shift=0.0))
        if op in ("log2", "log10"):
            return g.unary("affine", g.unary("log", args[0]), scale=1.0 / math.log(2.0 if op == "log2" else 10.0), shift=0.0)
        # Near 0 these lose what is far below the rounding of the scores that they are added to.
        if op == "expm1":
            return g.unary("affine", g.unary("exp", args[0]), scale=1.0, shift=-1.0)
        if op == "log1p":
            return g.unary("log", g.unary("affine", args[0], scale=1.0, shift=1.0))
        return self.trace.refuse(f"`{op}` of a score", "it is no step of the pointwise language; of places and captured tensors alone it is computed")

    @staticmethod
    def _truncated(g, x, constants):
        return g.ternary("select", g.unary("ceil", x), g.unary("floor", x), g.binary("lt", x, constants.of(0.0)))

    def _whole_quotient(self, g, x, z, constants):
        """`x // z` by the remainder, as PyTorch has it: a quotient that was rounded up to a whole number is one too large (1 // 0.1)."""
        zero = constants.of(0.0)
        rest = g.binary("mod", x, z)
        whole = g.binary("div", g.binary("sub", x, rest), z)
        is_beyond = g.binary("and", g.binary("ne", rest, zero), g.binary("ne", g.binary("lt", z, zero), g.binary("lt", rest, zero)))
        whole = g.ternary("select", g.unary("affine", whole, scale=1.0, shift=-1.0), whole, is_beyond)
        return g.ternary("select", g.binary("div", x, z), g.unary("round", whole), g.binary("eq", z, zero))

    def _power(self, g, x, z, constants):
        """`x ^ z`, of which the exponent may have a gradient too.

        At x = 0 that is 0 for exponents from 0 on, as PyTorch's is, and not 0ᶻ · log 0; and that of x at an exponent 0 is 0, and not 0 · 0⁻¹.
        """
        is_zero = g.binary("eq", x, constants.of(0.0))
        one = constants.of(1.0)
        at_zero = g.binary("and", is_zero, g.binary("gt", z, constants.of(0.0)))
        # What 0ᶻ varies with is x alone: by ∞ below an exponent 1, by 1 at it, not at all beyond.
        alike = g.ternary("select", constants.of(0.5), constants.of(2.0), g.binary("lt", z, one))
        alike = g.ternary("select", one, alike, g.binary("eq", z, one))
        of_zero = g.binary("pow", g.ternary("select", x, one, at_zero), alike)
        elsewhere = g.ternary("select", one, x, g.binary("and", is_zero, g.binary("ge", z, constants.of(0.0))))
        return g.ternary("select", of_zero, g.binary("pow", elsewhere, z), at_zero)

    def _cast(self, g, at, x):
        dtype = at.dtype
        if dtype == torch.bool:
            # Not of not: 1 for whatever is not 0.
            return g.unary("not", g.unary("not", x))
        if dtype in (torch.float16, torch.bfloat16):
            if self.trace.score_dtype == torch.float64:
                return self.trace.refuse(f"a score of float64 as {dtype}", "scores of float64 are not rounded to 16 bits")
            x = g.unary("identity", x)
            g.round_to(x, _NAMES[dtype])
            return x
        if dtype == torch.float32 and at.args[0].dtype == torch.float64:
            x = g.unary("identity", x)
            g.round_to(x, "f32")
        if dtype.is_floating_point:
            return x
        return self.trace.refuse(f"a score as {dtype}", "scores are real numbers")


class _Later:
    """A number that becomes a tensor of the graph where an op wants one."""

    __slots__ = ("constants", "number")

    def __init__(self, constants, number):
        self.constants, self.number = constants, float(number)


def _there(value):
    return value.constants.of(value.number) if isinstance(value, _Later) else value


class _Constants:
    """Numbers as tensors of one element, made of an index that is 0, in the type that scores are computed in."""

    def __init__(self, g, wide):
        self.g, self.wide, self.known = g, wide, {}

    def zero(self):
        """An index is f32 where nothing says otherwise, and what is made of it too: a number beside scores of f64 would lose half its digits."""
        zero = self.g.gen_index((1, 1, 1, 1, 1), 0)
        if self.wide == torch.float64:
            self.g.round_to(zero, "f64")
        return zero

    def later(self, number):
        return _Later(self, number)

    def of(self, number):
        key = repr(float(number))
        if key not in self.known:
            zero = self.zero()
            if math.isfinite(number):
                made = self.g.unary("affine", zero, scale=1.0, shift=float(number))
            elif math.isnan(number):
                made = self.g.unary("log", self.g.unary("affine", zero, scale=1.0, shift=-1.0))
            else:
                made = self.g.unary("log", zero)
                made = made if number < 0 else self.g.unary("neg", made)
            self.known[key] = made
        return self.known[key]


# Plans.

_MOST_PLANS = 256
_plans, _lock = collections.OrderedDict(), threading.Lock()
#: Those that a graph was captured with, which may be replayed as long as the process lives: what their kernels read stays.
_captured = {}


def clear_plans():
    """Forgets the plans of this file."""
    with _lock:
        _plans.clear()
        _captured.clear()


def plan_count():
    return len({id(plan) for plan in (*_plans.values(), *_captured.values())})


@functools.lru_cache(maxsize=64)
def _device(index):
    return _native.Device("cpu" if index is None else f"cuda:{index}")


def _laid(tensor):
    """How a tensor lies: what its plan is made for."""
    # No engine asks for more than 16 bytes but of what it makes itself, and addresses of more are no other plan.
    bits = tensor.data_ptr() | 16
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), bits & -bits


def _planned(key, device, draw):
    policy = _policy.get_policy()
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_capturing:
        # Nothing can be measured meanwhile.
        policy = policy.made_unmeasured() or policy
    key = (*key, device, _native.policy_number(policy))
    with _lock:
        found = _plans.get(key)
        if found is not None:
            _plans.move_to_end(key)
    if found is None:
        found = _device(device.index if device.type == "cuda" else None).plan(draw(), policy)
    with _lock:
        _plans[key] = found
        while len(_plans) > _MOST_PLANS:
            _plans.popitem(last=False)
        if is_capturing:
            _captured[id(found)] = found
    return found


def _execute(plan, tensors, device):
    if device.type == "cpu":
        return plan.execute(tensors)
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
    return plan.execute(tensors, stream=torch.cuda.current_stream(device), workspace=workspace)


def _entered(g, tensors):
    made = {}
    for name, tensor in tensors.items():
        dtype, dims, strides, alignment = _laid(tensor)
        made[name] = g.tensor(name, _NAMES[dtype], dims, strides, alignment)
    return made


# The graphs. Heads of queries that share keys are a dim of their own: `[b, h_kv, group, s, d]`.


class _Call:
    """One call: what it reads, and the scores of both graphs."""

    def __init__(self, steps, scale, q, k, v, mask, operands):
        self.steps, self.scale, self.kv_heads = steps, scale, k.shape[1]
        self.precision = _policy.get_policy().product_precision(_NAMES[q.dtype])
        self.wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        self.read = {"q": self.grouped(q), "k": k.unsqueeze(2), "v": v.unsqueeze(2)}
        if mask is not None:
            self.read["mask"] = self.grouped(mask.view(torch.uint8))
        for number, operand in enumerate(operands):
            self.read[f"operand{number}"] = self.grouped(operand)
        self.operands = [f"operand{number}" for number in range(len(operands))]

    def grouped(self, x):
        heads = x.shape[1]
        return x.unsqueeze(2) if heads == 1 and self.kv_heads * self.group != 1 else x.unflatten(1, (self.kv_heads, self.group))

    def varies_with(self, name):
        """Whether the result varies with what is read by this name."""
        if name == "v":
            return True
        if name in ("q", "k"):
            return self.steps.varies_with_score
        return self.steps.operands[self.operands.index(name)].number in self.steps.varying

    def scores(self, g, named):
        """The score function's values, and those with −∞ where the mask hides a pair."""
        product = g.matmul(named["q"], g.transpose(named["k"], (0, 1, 2, 4, 3)), alpha=self.scale, precision=self.precision)
        made = self.steps.emitted(g, product, [named[name] for name in self.operands])
        if "mask" not in named:
            return made, made
        return made, g.ternary("select", made, _Constants(g, self.wide).of(-math.inf), named["mask"])

    def rounded(self, g, x):
        """A factor of a product, as the values beside it are."""
        if self.read["q"].dtype not in (torch.float16, torch.bfloat16):
            return x
        x = g.unary("identity", x)
        g.round_to(x, _NAMES[self.read["q"].dtype])
        return x

    def key(self, *others):
        return (self.steps.key, self.scale, *((name, _laid(tensor)) for name, tensor in self.read.items()), *others)


def _forward(call, o, total, greatest):
    def draw():
        g = _native.Graph("flex_attention")
        named = _entered(g, call.read)
        constants = _Constants(g, call.wide)
        _, s = call.scores(g, named)
        # A row of which everything is hidden has the sum 0, and not one of numbers less ∞.
        most = g.reduction("max", s, [4])
        if greatest is not None:
            g.store(most, "greatest", _NAMES[call.wide])
        most = g.ternary("select", most, constants.of(0.0), g.binary("ne", most, constants.of(-math.inf)))
        p = g.unary("exp", g.binary("sub", s, most))
        total = g.reduction("add", p, [4])
        product = g.matmul(call.rounded(g, p), named["v"], precision=call.precision)
        g.store(g.binary("div", product, g.ternary("select", total, constants.of(1.0), total)), "o", _NAMES[o.dtype], o.stride())
        g.store(g.binary("add", g.unary("log", total), most), "total", _NAMES[call.wide])
        return g

    plan = _planned(("forward", *call.key(_laid(o), greatest is not None)), o.device, draw)
    _execute(plan, {**call.read, "o": o, "total": total, **({} if greatest is None else {"greatest": greatest})}, o.device)


def _backward(call, o, total, d_o, d_total, wanted):
    """Gradients of q, k, v and the operands, those that are wanted by name."""
    constant = [name for name in wanted if not call.varies_with(name)]
    if constant:
        rest = tuple(name for name in wanted if name not in constant)
        found = _backward(call, o, total, d_o, d_total, rest) if rest else {}
        return {**found, **{name: torch.zeros_like(call.read[name]) for name in constant}}
    read = {**call.read, "o": call.grouped(o), "total": call.grouped(total), "d_o": call.grouped(d_o)}
    if d_total is not None:
        read["d_total"] = call.grouped(d_total)
    if not (set(wanted) - {"v"}):
        read = {name: tensor for name, tensor in read.items() if name not in ("v", "o", "d_total")}

    def draw():
        g = _native.Graph("flex_attention_backward")
        named = _entered(g, read)
        constants = _Constants(g, call.wide)
        made, s = call.scores(g, named)
        # Of a row of which everything is hidden: e^(−∞ − 0).
        shown = g.binary("ne", named["total"], constants.of(-math.inf))
        p = g.unary("exp", g.binary("sub", s, g.ternary("select", named["total"], constants.of(0.0), shown)))
        found = {}
        if "v" in wanted:
            d_v = g.matmul(g.transpose(call.rounded(g, p), (0, 1, 2, 4, 3)), named["d_o"], precision=call.precision)
            found["v"] = g.reduction("add", d_v, [2]) if call.group != 1 else d_v
        others = [name for name in wanted if name != "v"]
        if others:
            d_p = g.matmul(named["d_o"], g.transpose(named["v"], (0, 1, 2, 4, 3)), precision=call.precision)
            less = g.reduction("add", g.binary("mul", named["d_o"], named["o"]), [4])
            if "d_total" in named:
                less = g.binary("sub", less, named["d_total"])
            d_s = g.binary("mul", p, g.binary("sub", d_p, less))
            found.update(zip(others, g.gradient_from([(made, d_s)], [named[name] for name in others])))
        for name, uid in found.items():
            g.store(uid, f"d_{name}", _NAMES[given[name].dtype], given[name].stride())
        return g

    given = {name: torch.empty(call.read[name].shape, dtype=call.read[name].dtype, device=o.device) for name in wanted}
    key = ("backward", *call.key(*((name, _laid(tensor)) for name, tensor in read.items() if name not in call.read), tuple(read), tuple(wanted)))
    plan = _planned(key, o.device, draw)
    _execute(plan, {**read, **{f"d_{name}": tensor for name, tensor in given.items()}}, o.device)
    return given


class _Gradient(torch.autograd.Function):
    """The gradients as a function of their own, which has none."""

    @staticmethod
    def forward(ctx, told, wanted, d_o, d_total, *tensors):
        (steps, scale, has_mask), (q, k, v, o, total, *rest) = told, tensors
        call = _Call(steps, scale, q, k, v, rest[0] if has_mask else None, rest[has_mask:])
        found = _backward(call, o, total, d_o, d_total, wanted)
        like = {"q": q, "k": k, "v": v, **dict(zip(call.operands, rest[has_mask:]))}
        return tuple(found[name].reshape(like[name].shape) for name in wanted)

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError("the gradient of flex_attention has no gradient; compose attention from products and softmax to have one")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, told, q, k, v, mask, *operands):
        steps, scale, by_op, wants_most = told
        if by_op is not None:
            o, total, most = by_op(q, k, v, wants_most)
        else:
            call = _Call(steps, scale, q, k, v, mask, operands)
            o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
            total, most = (torch.empty((*q.shape[:3], 1), dtype=call.wide, device=q.device) if is_there else None for is_there in (True, wants_most))
            _forward(call, call.grouped(o), call.grouped(total), None if most is None else call.grouped(most))
        ctx.set_materialize_grads(False)
        ctx.told, ctx.has_mask = (steps, scale, mask is not None), mask is not None
        ctx.save_for_backward(q, k, v, o, total, *([] if mask is None else [mask]), *operands)
        ctx.policy = _native.current_policy()
        if most is not None:
            ctx.mark_non_differentiable(most)
        return o, total, most

    @staticmethod
    def backward(ctx, d_o, d_total, _):
        needs = ctx.needs_input_grad
        places = {"q": 1, "k": 2, "v": 3, **{f"operand{number}": 5 + number for number in range(len(needs) - 5)}}
        wanted = tuple(name for name, place in places.items() if needs[place])
        gradients = [None] * len(needs)
        if d_o is None and d_total is None:
            return tuple(gradients)
        saved = ctx.saved_tensors
        # What is summed has one number for all its elements: a tensor that lies nowhere twice is what plans are made for.
        d_o = torch.zeros_like(saved[3]) if d_o is None else d_o if all(d_o.stride()) else d_o.contiguous()
        d_total = None if d_total is None else d_total.contiguous()
        policy = _native.numbered_policy(ctx.policy)
        with _policy.policy(policy.made_deterministic() if torch.are_deterministic_algorithms_enabled() else policy):
            found = _Gradient.apply(ctx.told, wanted, d_o, d_total, *saved)
        for name, gradient in zip(wanted, found):
            gradients[places[name]] = gradient
        return tuple(gradients)


def attention(steps, scale, q, k, v, mask, operands, by_op=None, wants_most=False):
    """The result, the log-sum-exp `[b, h, s_q, 1]`, and as large the greatest scores if they are wanted, else None; where `by_op` gives these of `q`, `k` and `v`, their gradients alone are composed."""
    return _Attention.apply((steps, scale, by_op, wants_most), q, k, v, mask, *operands)
