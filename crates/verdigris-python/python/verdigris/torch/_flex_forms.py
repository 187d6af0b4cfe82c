"""Which functions of scores and masks the op of attention has options for, read off their expressions and not off their names.

A score function is in the op's form if it is `cap · tanh(scale · score / cap) + bias`, or the same without the cap, with −∞ where a condition does not hold; what bias and condition are is
free, as long as they read no score. A mask is cut into what holds together; of these the ones that bound `key − query` are the op's window, the ones that bound `key` by something of the
batch its lengths. What is left of both is a tensor over the dims in which it differs.
"""

import math

import torch

from ._flex_trace import BATCH, CAPTURED, KEY, QUERY, SCORE


class Form:
    """`outer · tanh(inner · score) + Σ factor · bias`, or `inner · score + …` where `outer` is None; −∞ where one of `conditions` is not what it says."""

    __slots__ = ("inner", "outer", "biases", "conditions")

    def __init__(self, inner, outer=None, biases=(), conditions=()):
        self.inner, self.outer, self.biases, self.conditions = inner, outer, biases, conditions

    @property
    def is_bare(self):
        return not self.biases and not self.conditions

    def times(self, factor):
        """The form of this one times a number; None where −∞ would not stay what it is."""
        if not math.isfinite(factor) or factor == 0 or (self.conditions and factor < 0):
            return None
        biases = tuple((factor * own, bias) for own, bias in self.biases)
        if self.outer is None:
            return Form(factor * self.inner, None, biases, self.conditions)
        return Form(self.inner, factor * self.outer, biases, self.conditions)

    def beside(self, factor, bias):
        return Form(self.inner, self.outer, (*self.biases, (factor, bias)), self.conditions)

    def scale_and_cap(self, scale):
        """The op's scale and soft cap, of products that are scaled by `scale`."""
        if self.outer is None:
            return scale * self.inner, None
        # A tangent is odd: a factor below 0 goes to the other side.
        sign, cap = math.copysign(1.0, self.outer), abs(self.outer)
        return scale * self.inner * cap * sign, cap


def _is_hidden(value):
    return value.is_number and value.args[0] == -math.inf


def form_of(trace, value):
    """The form of a score function, or None where it has another."""
    forms = {}
    for at in trace.reached([value], lambda at: not at.reads & SCORE):
        if at.reads & SCORE:
            forms[at.number] = _form(trace, at, forms)
    if value.reads & SCORE:
        return forms[value.number]
    # Nothing of the score is left.
    return Form(0.0, None, ((1.0, value),))


def _form(trace, value, forms):
    def of(arg):
        return forms.get(arg.number)

    def reads(arg):
        return bool(arg.reads & SCORE)

    op, args = value.op, value.args
    if op == "score":
        return Form(1.0)
    if op in ("add", "sub"):
        x, z = args
        if reads(x) and not reads(z):
            return None if of(x) is None else of(x).beside(1.0 if op == "add" else -1.0, z)
        if reads(z) and not reads(x):
            own = of(z) if op == "add" or of(z) is None else of(z).times(-1.0)
            return None if own is None else own.beside(1.0, x)
    elif op == "neg":
        return None if of(args[0]) is None else of(args[0]).times(-1.0)
    elif op in ("mul", "div"):
        x, z = args
        if op == "mul" and x.is_number:
            x, z = z, x
        if z.is_number and of(x) is not None:
            number = float(z.args[0])
            return of(x).times(number if op == "mul" else 1.0 / number) if number else None
    elif op == "tanh":
        own = of(args[0])
        return Form(own.inner, 1.0) if own is not None and own.is_bare and own.outer is None else None
    elif op == "cast":
        # To a wider type: a score is as wide as it was computed.
        wide = value.dtype == torch.float64 or value.dtype == torch.float32 == args[0].dtype
        return of(args[0]) if wide else None
    elif op == "where":
        condition, x, z = args
        if reads(condition):
            return None
        for one, other, sense in ((x, z, True), (z, x, False)):
            if _is_hidden(other):
                own = of(one)
                return None if own is None else Form(own.inner, own.outer, own.biases, (*own.conditions, (condition, sense)))
        one, other = of(x), of(z)
        if one is None or other is None or (one.inner, one.outer) != (other.inner, other.outer) or one.conditions or other.conditions:
            return None
        sums = [_sum(trace, own.biases) for own in (one, other)]
        return Form(one.inner, one.outer, ((1.0, trace.where(condition, *sums)),))
    return None


def _wide(trace, bias):
    """A bias in a type that sums and factors of it stay in, as beside a score: by themselves two truths would be one, and narrow numbers wrap around, are rounded or infinite."""
    if bias.dtype is None or bias.dtype in (torch.float32, torch.float64, torch.int64):
        return bias
    return trace.cast(bias, trace.score_dtype if bias.dtype.is_floating_point else torch.int64)


def _sum(trace, biases):
    total = trace.number(0.0)
    for factor, bias in biases:
        bias = _wide(trace, bias)
        scaled = bias if factor == 1.0 else trace.binary("mul", bias, trace.number(factor))
        total = scaled if total.holds(0) else trace.binary("add", total, scaled)
    return total


def without_hiding(trace, biases):
    """The biases, and the conditions that they are −∞ where they do not hold, taken out of them."""
    kept, conditions = [], []
    for factor, bias in biases:
        while bias.op == "where" and factor > 0:
            condition, x, z = bias.args
            if _is_hidden(z):
                conditions.append((condition, True))
                bias = x
            elif _is_hidden(x):
                conditions.append((condition, False))
                bias = z
            else:
                break
        if not bias.holds(0):
            kept.append((factor, bias))
    return kept, conditions


def parts_of(conditions):
    """Conditions cut into what has to hold together: pairs of a value and whether it has to be true."""
    parts, stack = [], list(reversed(conditions))
    while stack:
        value, sense = stack.pop()
        is_bool = value.dtype == torch.bool
        if value.op == "logical_not" and value.args[0].dtype == torch.bool:
            stack.append((value.args[0], not sense))
        elif sense and is_bool and value.op in ("bitwise_and", "logical_and") and all(arg.dtype == torch.bool for arg in value.args):
            stack.extend((arg, True) for arg in reversed(value.args))
        elif not sense and is_bool and value.op in ("bitwise_or", "logical_or") and all(arg.dtype == torch.bool for arg in value.args):
            stack.extend((arg, False) for arg in reversed(value.args))
        elif value.is_number and bool(value.args[0]) == sense:
            continue
        else:
            parts.append((value, sense))
    return parts


# Places as whole numbers: Σ factor · value + number, of values that are no sums themselves.

#: What a sum of places may come to and still be exact in the 64 bits that PyTorch computes it in.
_LARGEST = 1 << 52


def _linear(value):
    """The terms by number of their value, with their factors, and the number beside them; None where it is no sum of whole numbers."""
    if value.is_number:
        number = value.args[0]
        return ({}, int(number)) if not isinstance(number, float) and abs(number) < _LARGEST else None
    if value.dtype != torch.int64:
        return None
    if value.op in ("add", "sub"):
        one, other = _linear(value.args[0]), _linear(value.args[1])
        if one is None or other is None:
            return None
        sign = 1 if value.op == "add" else -1
        terms = dict(one[0])
        for key, (factor, at) in other[0].items():
            terms[key] = (terms.get(key, (0, at))[0] + sign * factor, at)
        return {key: term for key, term in terms.items() if term[0]}, one[1] + sign * other[1]
    if value.op == "neg":
        own = _linear(value.args[0])
        return None if own is None else ({key: (-factor, at) for key, (factor, at) in own[0].items()}, -own[1])
    if value.op == "mul":
        for one, other in (value.args, value.args[::-1]):
            own = _linear(other)
            if one.is_number and own is not None and not isinstance(one.args[0], float):
                number = int(one.args[0])
                return ({key: (number * factor, at) for key, (factor, at) in own[0].items()} if number else {}, number * own[1])
    return {value.number: (1, value)}, 0


def difference_of(value):
    """`(sign, number)` where the value is `sign · (key − query) + number`, or None."""
    own = _linear(value)
    if own is None or len(own[0]) != 2:
        return None
    factors = {at.op: factor for factor, at in own[0].values()}
    if set(factors) != {"query", "key"} or factors["key"] != -factors["query"] or abs(factors["key"]) != 1:
        return None
    return factors["key"], own[1]


_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


def _compared(value, sense):
    """A comparison `op, x, z` that holds where the value is what it has to be."""
    if sense and value.op in _TURNED:
        return (value.op, *value.args)
    if not sense and value.op in _OPPOSITE and all(arg.dtype is None or not arg.dtype.is_floating_point for arg in value.args):
        return (_OPPOSITE[value.op], *value.args)
    return None


def _bound(value):
    """A number that whole numbers are compared with."""
    number = value.args[0] if value.is_number else None
    return number if number is not None and not isinstance(number, bool) and abs(number) < _LARGEST else None


def _whole(op, number):
    """`x op number` of whole numbers x as bounds of x, least and greatest."""
    if op == "eq":
        return (number, number) if number == math.floor(number) else (0, -1)
    if op in ("lt", "le"):
        return None, math.floor(number) - (op == "lt" and number == math.floor(number))
    return math.ceil(number) + (op == "gt" and number == math.ceil(number)), None


def band_of(trace, value, sense):
    """What of `key − query` a condition lets through, `(least, greatest)` with None for no bound; None where it is no such condition."""
    compared = _compared(value, sense)
    if compared is None:
        return None
    op, x, z = compared
    if _bound(x) is not None:
        op, x, z = _TURNED[op], z, x
    if x.op == "abs" and _bound(z) is not None and op in ("lt", "le"):
        told, (_, bound) = difference_of(x.args[0]), _whole(op, _bound(z))
        if told is None:
            return None
        sign, number = told
        # |sign · d + number| ≤ bound
        return -sign * number - bound, -sign * number + bound
    if _bound(z) is not None:
        told, bounds = difference_of(x), _whole(op, _bound(z))
    elif x.dtype == torch.int64 == z.dtype:
        told, bounds = difference_of(trace.binary("sub", x, z)), _whole(op, 0)
    else:
        return None
    if told is None:
        return None
    sign, number = told
    least, greatest = (None if bound is None else bound - number for bound in bounds)
    return (least, greatest) if sign > 0 else (None if greatest is None else -greatest, None if least is None else -least)


def narrower(one, other):
    """What two bands both let through."""
    pairs = zip(one, other)
    return tuple(given[0] if len(given) == 1 else pick(given) if given else None for pick, given in zip((max, min), ([x for x in pair if x is not None] for pair in pairs)))


def words_of_band(band, queries, keys):
    """A band as `(causal, left, right)` of the op, or None where it has no such window."""
    least, greatest = band
    shift = keys - queries
    if greatest == 0 and (least is None or least <= 0):
        return "top_left", None if least is None else -least, None
    # The diagonal of a window without `causal` ends at the last query and the last key.
    left, right = None if least is None else shift - least, None if greatest is None else greatest - shift
    if any(bound is not None and not 0 <= bound < 1 << 32 for bound in (left, right)):
        return None
    return None, left, right


def length_of(trace, value, sense):
    """How many keys a condition lets through, the first ones, as a value of the batch; None where it is no such condition."""
    compared = _compared(value, sense)
    if compared is None:
        return None
    op, x, z = compared
    if z.op == "key":
        op, x, z = _TURNED[op], z, x
    if x.op != "key" or op not in ("lt", "le") or z.reads & ~(BATCH | CAPTURED) or z.dtype is None or z.dtype.is_floating_point or z.dtype in (torch.bool, torch.uint64):
        return None
    if op == "lt":
        return z
    # One more than the greatest number of a type is its least.
    return trace.binary("add", trace.binary("minimum", trace.cast(z, torch.int64), trace.number(_LARGEST)), trace.number(1))


def slope_of(trace, factor, bias, band, shift):
    """The slope of a bias that falls by so much with each position between query and key (ALiBi), as a value of batch and head; None for another bias."""
    factors, stack, distance = [], [bias], None
    while stack:
        at = stack.pop()
        if at.op == "mul":
            stack.extend(at.args)
        elif at.op == "neg" and at.dtype.is_floating_point:
            stack.append(at.args[0])
            factor = -factor
        elif at.op == "cast" and at.dtype == torch.float32 and at.args[0].dtype == torch.int64:
            stack.append(at.args[0])
        elif not at.reads & (QUERY | KEY):
            factors.append(at)
        elif distance is not None:
            return None
        else:
            distance = at
    if distance is None:
        return None
    told = difference_of(distance.args[0] if distance.op == "abs" else distance)
    # |query + shift − key|
    if told is None or told[0] * told[1] != -shift:
        return None
    if distance.op == "abs":
        factor = -factor
    else:
        # Behind the diagonal the sign would be another, if keys there were attended.
        if band[1] is None or band[1] > shift:
            return None
        factor *= told[0]
    slope = trace.number(float(factor))
    for own in factors:
        slope = trace.binary("mul", own, slope)
    return trace.cast(slope, torch.float32)
