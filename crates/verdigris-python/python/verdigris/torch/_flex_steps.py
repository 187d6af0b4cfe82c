"""Score functions as steps of the op of attention and of its gradient: nothing of the size of the scores is stored, and tensor cores multiply on both sides of them.

A step is an op of the pointwise language on one score. What reads no score and is of queries, or of keys, or of batch and head alone is an operand, a tensor over the dims in which it differs; arithmetic
of both queries and keys (`q_idx - kv_idx`) is steps too, of which nothing is stored. It is so where it comes to the same: whole numbers that f32 holds, and reals of the type that scores are computed in.
Whole numbers of queries that are compared with some of keys (`document[q_idx] == document[kv_idx]`) are so by their ranks among both, which are few, whatever they are themselves.
What is gathered at a place of both that is steps and lies within the tensor (`table[q_idx - kv_idx + last]`, `table[h, (q_idx - kv_idx).abs()]`) is read at that place of a table, an operand of all that the tensor has there; what is gathered otherwise
by both (`table[q_idx, kv_idx]`) stays an operand.
"""

import functools
import math

import torch

from .._errors import GraphError, UnsupportedError
from . import _flex_blocks as block_maps
from . import _flex_composed as composed
from ._flex_trace import AXES, KEY, QUERY, SCORE, Value

#: Most steps and operands of the op.
_MOST_STEPS, _MOST_OPERANDS = 64, 4
#: The most entries of a table.
_MOST_ENTRIES = 1 << 23
#: The longest heads of the kernel of tensor cores, and what their elements are a multiple of.
_MOST_ELEMENTS, _STEP_OF_ELEMENTS = 256, 8
#: Functions that kernels of tensor cores have no room for, once for each score of a thread.
_LONG = ("sin", "cos", "tan", "mod", "floor_mod", "pow", "atan2")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isfinite")
_BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")
#: Of whole numbers, what whole numbers come of.
_WHOLE = ("add", "sub", "mul", "neg", "abs", "square", "minimum", "maximum", "floor_divide", "remainder", "fmod")
_REAL = (
    *("add", "sub", "mul", "div", "neg", "abs", "square", "minimum", "maximum", "exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "silu", "relu", "erf"),
    *("floor", "ceil", "round", "trunc", "sign"),
)


#: Powers that are products of steps.
_MOST_FACTORS = 4


def _factors(at):
    """The exponent of a power that is a product; None of others."""
    exponent = at.args[1].args[0] if at.op == "pow" and at.args[1].is_number else None
    return int(exponent) if exponent in range(1, _MOST_FACTORS + 1) else None


class _Untaken(Exception):
    """The op has no steps for this."""


class _StepGraph:
    """What `composed.Steps` asks of a graph, as steps of a score function."""

    def __init__(self):
        self.steps, self.known = [], {}

    def _pushed(self, *step):
        # Steps that are equal are one, of which each is named.
        key = repr(step)
        if key not in self.known:
            self.known[key] = len(self.steps)
            self.steps.append(step)
        return self.known[key]

    def given(self):
        return self._pushed("given")

    def operand(self, number):
        return self._pushed("operand", number)

    def place(self, name):
        return self._pushed("place", name)

    def gather(self, table, place):
        return self._pushed("gather", table, place)

    def number(self, number):
        if math.isnan(number):
            raise _Untaken
        return self._pushed("number", float(number))

    def unary(self, f, x, **attributes):
        if f == "identity":
            # In front of a rounding, which is a step.
            return x
        if f in _LONG or not all(map(math.isfinite, attributes.values())):
            raise _Untaken
        return self._pushed(f, x, attributes) if attributes else self._pushed(f, x)

    def binary(self, f, x, z):
        if f in _LONG:
            raise _Untaken
        return self._pushed(f, x, z)

    def ternary(self, f, x, z, t):
        return self._pushed(f, x, z, t)

    def rounded(self, x, dtype):
        return self._pushed("round", dtype, x)


class _Numbers:
    """As `composed._Constants`, each of them a step."""

    def __init__(self, g):
        self.g = g

    def later(self, number):
        return composed._Later(self, number)

    def of(self, number):
        return self.g.number(number)


class OpSteps(composed.Steps):
    """The score function as steps of the op, and the values that are its operands. Raises `_Untaken` where it has none."""

    def __init__(self, trace, value, dims):
        self.wide = torch.float64 if trace.score_dtype == torch.float64 else torch.float32
        #: Whole numbers up to this are numbers of the type that scores are computed in.
        self.largest, self.dims = 1 << (53 if self.wide == torch.float64 else 24), dims
        self.bounds = {}
        if max(dims) > self.largest:
            raise _Untaken
        super().__init__(trace, self._in_kernels_terms(trace, value), self._is_operand)
        if len(self.operands) > _MOST_OPERANDS:
            raise _Untaken
        g = _StepGraph()
        self.last = self.emitted(g, None, list(range(len(self.operands))))
        self.steps = g.steps
        #: The same as a key.
        self.told = repr(self.steps)
        if not self.steps or len(self.steps) > _MOST_STEPS or self.last != len(self.steps) - 1:
            raise _Untaken

    @functools.cached_property
    def has_slope(self):
        """Whether the op has a gradient of these steps: of more than 256 with those of their slope it has none."""
        return self._has_gradients(False)

    @functools.cached_property
    def has_operand_slopes(self):
        """Whether it has one of all that they read too."""
        return self._has_gradients(True)

    def _has_gradients(self, of_operands):
        g = composed._native.Graph("flex_attention_slope")
        one, total = (g.tensor(name, "f32", (1, 1, 1, 1)) for name in ("x", "total"))
        read = [one] * len(self.operands)
        try:
            dq, _, _, _, _, *of_read = g.attention_backward(one, one, one, one, total, one, scale=1.0, score=self.steps, score_operands=read, score_gradients=of_operands)
            for number, uid in enumerate((dq, *of_read)):
                g.store(uid, f"d_{number}", "f32")
            g.to_json()
        except GraphError:
            return False
        return True

    def _in_kernels_terms(self, trace, value):
        """The function with what kernels take in place of tensors of all pairs: ranks of whole numbers, where some of queries are compared with some of keys and the type of scores may not
        hold them, and entries of tables."""
        made = {}
        for at in trace.reached([value]):
            args = tuple(made.get(arg.number, arg) if isinstance(arg, Value) else arg for arg in at.args)
            if self._is_by_ranks(at):
                args = trace.ranks(*at.args)
            table = self._table(trace, at, args)
            if table is not None:
                made[at.number] = trace.gathered(at, args, *table)
            elif any(one is not other for one, other in zip(args, at.args)):
                made[at.number] = trace.made(at.op, args, at.dtype, at.reads)
        return made.get(value.number, value)

    def _table(self, trace, at, args):
        """Of a tensor that is gathered by queries and keys, the dim whose place is of both and is steps, where that is the only one of keys and lies within, with the first entry that may be
        read and the one behind the last; else None."""
        if at.op != "index" or not (at.reads & QUERY and at.reads & KEY) or at.reads & SCORE:
            return None
        tensor = trace.captured[at.args[0].args[0]]
        if at.dtype != torch.bool and at.dtype not in (torch.float16, torch.bfloat16, self.wide):
            return None
        of_keys = [axis for axis, place in enumerate(args[1:]) if place.reads & KEY]
        if len(of_keys) != 1:
            return None
        (axis,) = of_keys
        place = args[1 + axis]
        # A key alone is a place of an operand over keys.
        if place.op in AXES or place.is_number or not self._is_step(place):
            return None
        bounds = self._bounds(place)
        if bounds is None or bounds[0] < 0 or bounds[1] >= tensor.shape[axis]:
            return None
        first, end = bounds[0], bounds[1] + 1
        # What is in front is left out where it is more than what is read.
        first = first if first > end - first else 0
        *_, queries, keys = self.dims
        of_queries = any(own.reads & QUERY for number, own in enumerate(args[1:]) if number != axis)
        is_less = (end - first) * (queries if of_queries else 1) <= queries * keys
        return (axis, first, end) if is_less and end - first <= _MOST_ENTRIES else None

    def _is_by_ranks(self, at):
        if at.op not in _COMPARED:
            return False
        are_whole = all(arg.dtype is not None and not arg.dtype.is_floating_point and arg.dtype not in (torch.bool, torch.uint64) for arg in at.args)
        sides = [arg.reads & (QUERY | KEY | SCORE) for arg in at.args]
        return are_whole and sorted(sides) == [QUERY, KEY] and not all(self._is_exact(arg) for arg in at.args)

    # What is an operand.

    @functools.cached_property
    def _taken(self):
        return {}

    def _is_operand(self, at):
        return not at.reads & SCORE and not at.is_number and not self._is_step(at)

    def _is_step(self, at):
        """Whether a value that reads no score is steps: a place, or what is computed of queries and keys and comes to the same."""
        if at.op in AXES:
            return True
        known = self._taken.get(at.number)
        if known is None:
            known = self._taken[at.number] = self._comes_to_the_same(at)
        return known

    def _comes_to_the_same(self, at):
        if not (at.reads & QUERY and at.reads & KEY) or at.op in ("captured", "index"):
            return False
        args = [arg for arg in at.args if isinstance(arg, Value)]
        if not all(self._is_exact(arg) for arg in args) or not self._is_exact(at):
            return False
        kinds = [arg.dtype for arg in args if arg.dtype is not None]
        if at.op == "gather":
            return True
        if at.op == "cast":
            # Of a real number a whole one is what is in front of its point.
            return at.dtype in (self.wide, torch.bool) or not at.dtype.is_floating_point and not kinds[0].is_floating_point
        if at.op == "where":
            return True
        if at.dtype == torch.bool:
            return at.op in _COMPARED or at.op in _LOGICAL or at.op in _BITS
        if at.dtype == self.wide:
            return at.op in _REAL or _factors(at) is not None
        return not at.dtype.is_floating_point and (at.op in _WHOLE or _factors(at) is not None)

    def _is_exact(self, at):
        """Whether the type that scores are computed in holds what the value may be."""
        if at.is_number:
            number = at.args[0]
            return isinstance(number, bool) or (not math.isnan(number) if isinstance(number, float) else abs(number) <= self.largest)
        if at.dtype == torch.bool:
            return True
        if at.dtype.is_floating_point:
            return at.dtype == self.wide or at.op in ("captured", "index", "gather") or not (at.reads & QUERY and at.reads & KEY)
        bounds = self._bounds(at)
        return bounds is not None and max(map(abs, bounds)) <= self.largest

    def _bounds(self, at):
        """The least and the greatest that a whole number may be; None where nobody knows."""
        if at.number not in self.bounds:
            bounds = self._bounded(at)
            if bounds is not None and at.dtype is not None and not at.dtype.is_floating_point and at.dtype != torch.bool:
                # Beyond its type a number wraps around.
                told = torch.iinfo(at.dtype)
                bounds = bounds if told.min <= bounds[0] and bounds[1] <= told.max else None
            self.bounds[at.number] = bounds
        return self.bounds[at.number]

    def _bounded(self, at):
        op = at.op
        if at.is_number:
            number = at.args[0]
            return None if isinstance(number, float) else (int(number), int(number))
        if op in AXES:
            return 0, max(self.dims[AXES[op]] - 1, 0)
        if at.dtype == torch.bool:
            return 0, 1
        if op == "ranked":
            return 0, self.dims[AXES["query"]] + self.dims[AXES["key"]]
        if op in ("captured", "index") or (op == "cast" and at.args[0].dtype is not None and at.args[0].dtype.is_floating_point):
            info = None if at.dtype.is_floating_point else torch.iinfo(at.dtype)
            return None if info is None else (info.min, info.max)
        args = [self._bounds(arg) for arg in at.args[1 if op == "where" else 0 :]]
        if any(bounds is None for bounds in args):
            return None
        if op == "cast":
            return args[0]
        (low, high), *others = args
        least, greatest = others[0] if others else (0, 0)
        if op == "where":
            return min(low, least), max(high, greatest)
        if op == "add":
            return low + least, high + greatest
        if op == "sub":
            return low - greatest, high - least
        if op == "mul":
            corners = [x * z for x in (low, high) for z in (least, greatest)]
            return min(corners), max(corners)
        if op == "neg":
            return -high, -low
        if op in ("abs", "square"):
            most = max(abs(low), abs(high))
            return 0, most if op == "abs" else most * most
        if _factors(at) is not None:
            most = max(abs(low), abs(high)) ** _factors(at)
            return (-most if _factors(at) % 2 else 0), most
        if op in ("minimum", "maximum"):
            pick = min if op == "minimum" else max
            return pick(low, least), pick(high, greatest)
        if op in ("floor_divide", "remainder", "fmod") and (least > 0 or greatest < 0):
            # By 0, nobody says. A remainder is made of a product that is no larger than what is divided and the divisor.
            most = max(abs(low), abs(high)) + max(abs(least), abs(greatest))
            if most > self.largest:
                return -most, most
            if op == "floor_divide":
                corners = [x // z for x in (low, high) for z in (least, greatest)]
                return min(corners), max(corners)
            of_divisor = max(abs(least), abs(greatest)) - 1
            if op == "remainder":
                # With the sign of the divisor.
                return (0, of_divisor) if least > 0 else (-of_divisor, 0)
            return (-of_divisor if low < 0 else 0), (of_divisor if high > 0 else 0)
        return None

    # The steps.

    def _constants(self, g):
        return _Numbers(g)

    def _entered(self, g, score, operands):
        made = {at.number: number for at, number in zip(self.operands, operands)}
        tables = {at.args[0].number for at in self.order if at.op == "gather"}
        for at in self.order:
            if at.number in made:
                # A table is named by its number, and read where its places are.
                made[at.number] = made[at.number] if at.number in tables else g.operand(made[at.number])
            elif at.op in AXES:
                made[at.number] = g.place(at.op)
            elif at.op == "score":
                made[at.number] = g.given()
        return made

    def _op(self, g, at, args, constants):
        if at.op == "gather":
            return g.gather(args[0], composed._there(args[1]))
        there = functools.partial(map, composed._there)
        if at.op in ("floor_divide", "remainder", "fmod"):
            # Exact, of whole numbers that the type holds; of others a quotient may be rounded up to a whole one.
            if at.dtype.is_floating_point:
                raise _Untaken
            x, z = there(args)
            quotient = g.binary("div", x, z)
            whole = self._truncated(g, quotient, constants) if at.op == "fmod" else g.unary("floor", quotient)
            return whole if at.op == "floor_divide" else g.binary("sub", x, g.binary("mul", whole, z))
        if _factors(at) is not None:
            x = made = composed._there(args[0])
            for _ in range(_factors(at) - 1):
                made = g.binary("mul", made, x)
            return made
        source = at.args[0].dtype if at.op == "cast" else None
        if source is not None and not at.dtype.is_floating_point and at.dtype != torch.bool and not source.is_floating_point:
            # From one whole type to another, of which the bounds are known.
            return next(there(args))
        if source == torch.float64 and at.dtype == torch.float32 or (self.wide == torch.float32 and at.dtype in (torch.float16, torch.bfloat16) and at.op == "cast"):
            return g.rounded(next(there(args)), composed._NAMES[at.dtype])
        return super()._op(g, at, args, constants)


def of_function(trace, value, dims, tensors):
    """The steps of a score function, where the op's kernels take it; else None, and scores are composed."""
    q, _, v = tensors
    if 0 in q.shape or 0 in v.shape or 0 in dims:
        return None
    if q.device.type == "cuda":
        widths = (q.shape[3], v.shape[3])
        is_short = all(width <= _MOST_ELEMENTS and width % _STEP_OF_ELEMENTS == 0 for width in widths) and widths[1] <= widths[0]
        # Without tensor cores a product that is stored is quicker than one that is not.
        if q.dtype not in (torch.float16, torch.bfloat16) or not is_short or block_maps.capability(q.device) < (8, 0):
            return None
    try:
        return OpSteps(trace, value, dims)
    except _Untaken:
        return None


#: The chip whose kernel of tensor cores gives the gradients of what a function reads, and the longest heads that it has registers for beside a function.
_CHIP_OF_OPERANDS, _MOST_ELEMENTS_BESIDE_OPERANDS = (9, 0), 128


def has_gradient(function, tensors, of_operands=False):
    """Whether the op gives the gradients of queries, keys and values, and of what the function reads if they are wanted, and a kernel takes it that is no slower than products with
    steps between them: those that add to tables do not repeat bit for bit."""
    q, _, v = tensors
    if of_operands and q.device.type == "cuda":
        is_short = max(q.shape[3], v.shape[3]) <= _MOST_ELEMENTS_BESIDE_OPERANDS
        if torch.are_deterministic_algorithms_enabled() or block_maps.capability(q.device) != _CHIP_OF_OPERANDS or not is_short:
            return False
    # The others are given wherever the op takes the function (`of_function`).
    return function.has_operand_slopes if of_operands else function.has_slope


def as_operand(tensor, wide):
    """An operand as the op takes it: of one that wants a gradient, of the type that this is summed in."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.to(wide)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    is_taken = tensor.dtype in (torch.uint8, torch.int32, wide) or (tensor.dtype in (torch.float16, torch.bfloat16))
    return tensor if is_taken else tensor.to(wide)


_TYPES = {**composed._NAMES, torch.int32: "i32"}


def _of_op(g, named, function, words, beside):
    """What both graphs say of the op beside its tensors."""
    of_score = {} if function is None else {"score": function.steps, "score_operands": [named[name] for name in named if name.startswith("score_")]}
    return {**of_score, **{name: named[name] for name in beside}, **words}


def _drawn(name, read):
    g, named = composed._native.Graph(name), {}
    for tensor_name, tensor in read.items():
        dtype, dims, strides, alignment = composed._laid(tensor)
        named[tensor_name] = g.tensor(tensor_name, _TYPES[dtype], dims, strides, alignment)
    return g, named


def _read(q, k, v, beside, operands):
    return {"q": q, "k": k, "v": v, **beside, **{f"score_{number}": operand for number, operand in enumerate(operands)}}


def _key(name, function, words, tensors):
    return (name, None if function is None else function.told, repr(words), *((tensor_name, composed._laid(tensor)) for tensor_name, tensor in tensors.items()))


def forward(function, words, q, k, v, beside, operands, wants_most=False):
    """The result, the log-sum-exp `[b, h, s_q, 1]`, and as large the greatest scores if they are wanted, else None. `words` are options of the op by their names, `beside` its
    masks by theirs, `function` the steps of a score function, or None."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    total, most = (torch.empty((*q.shape[:3], 1), dtype=wide, device=q.device) if is_there else None for is_there in (True, wants_most))
    read = _read(q, k, v, beside, operands)
    given = {"o": o, "total": total, **({"most": most} if wants_most else {})}

    def draw():
        g, named = _drawn("flex_attention_steps", read)
        made = g.attention(named["q"], named["k"], named["v"], **_of_op(g, named, function, words, beside), max_scores=wants_most)
        for uid, (name, tensor) in zip(made, given.items()):
            g.store(uid, name, composed._NAMES[tensor.dtype], tensor.stride())
        return g

    plan = composed._planned((*_key("steps", function, words, read), composed._laid(o), wants_most), q.device, draw)
    composed._execute(plan, {**read, **given}, q.device)
    return o, total, most


def _backward(function, words, q, k, v, beside, operands, o, total, d_o, wanted):
    """The gradients that are wanted of queries, keys and values, and of operands, by name: `score_0` of the first."""
    read = {**_read(q, k, v, beside, operands), "o": o, "total": total, "d_o": d_o}
    given = {name: torch.empty(read[name].shape, dtype=read[name].dtype, device=q.device) for name in wanted}

    def draw():
        g, named = _drawn("flex_attention_steps_backward", read)
        of_op = {**_of_op(g, named, function, words, beside), "score_gradients": True}
        dq, dk, dv, _, _, *of_read = g.attention_backward(*(named[name] for name in ("q", "k", "v", "o", "total", "d_o")), **of_op)
        real = [f"score_{number}" for number, operand in enumerate(operands) if operand.is_floating_point()]
        found = {"q": dq, "k": dk, "v": dv, **dict(zip(real, of_read))}
        for name, gradient in given.items():
            g.store(found[name], f"d_{name}", composed._NAMES[gradient.dtype], gradient.stride())
        return g

    plan = composed._planned((*_key("steps backward", function, words, read), wanted), q.device, draw)
    composed._execute(plan, {**read, **{f"d_{name}": tensor for name, tensor in given.items()}}, q.device)
    return given


class _Gradient(torch.autograd.Function):
    """The gradients as a function of their own, which has none."""

    @staticmethod
    def forward(ctx, told, wanted, d_o, q, k, v, o, total, *others):
        function, words, beside = told
        found = _backward(function, words, q, k, v, dict(zip(beside, others)), others[len(beside) :], o, total, d_o, wanted)
        return tuple(found[name] for name in wanted)

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError("the gradient of flex_attention has no gradient; compose attention from products and softmax to have one")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, told, q, k, v, *others):
        *told, wants_most = told
        function, words, beside = told
        o, total, most = forward(function, words, q, k, v, dict(zip(beside, others)), others[len(beside) :], wants_most)
        ctx.told = tuple(told)
        ctx.save_for_backward(q, k, v, o, total, *others)
        ctx.policy = composed._native.current_policy()
        ctx.mark_non_differentiable(*(x for x in (total, most) if x is not None))
        return o, total, most

    @staticmethod
    def backward(ctx, d_o, *_):
        needs = ctx.needs_input_grad
        names = ("q", "k", "v", *ctx.told[2], *(f"score_{number}" for number in range(len(needs) - 4 - len(ctx.told[2]))))
        wanted = tuple(name for name, need in zip(names, needs[1:]) if need)
        # What is summed has one number for all its elements: a tensor that lies nowhere twice is what plans are made for.
        d_o = d_o if all(d_o.stride()) else d_o.contiguous()
        policy = composed._native.numbered_policy(ctx.policy)
        with composed._policy.policy(policy.made_deterministic() if torch.are_deterministic_algorithms_enabled() else policy):
            found = dict(zip(wanted, _Gradient.apply(ctx.told, wanted, d_o, *ctx.saved_tensors)))
        return None, *(found.get(name) for name in names)


def attention(function, words, q, k, v, beside, operands, wants_most=False):
    """As `forward`, with gradients of queries, keys, values and operands by the op; the log-sum-exp and the greatest scores have none."""
    return _Attention.apply((function, words, tuple(beside), wants_most), q, k, v, *beside.values(), *operands)
