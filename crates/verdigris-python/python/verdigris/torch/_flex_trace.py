"""What a function of scores or of a mask computes, as an expression: the function is called once, with symbols for its arguments.

The symbols are classes of this file, and not those of `torch.fx` or `make_fx`, for three reasons. A function is traced whenever what it captures (a number of Python, a
tensor of other dims) may have changed (`_flex_guards`), and `make_fx` takes milliseconds over what takes a tenth of one here. `torch.fx` does not see
`table[h]`, where a tensor is indexed by a symbol, and a tensor of PyTorch indexed by one of no dims would be read by the host: here a mode of PyTorch's functions catches it. And
whatever is not in the tables below stops the trace with the name of the operation and of the function, where a trace by example values would go on with the example's.

Types follow PyTorch's rules of promotion, which are asked with tensors of no dims: so is what a compiled `flex_attention` sees of a score and of indices.
"""

import functools
import operator

import torch
from torch.overrides import TorchFunctionMode

from .._errors import GraphError, UnsupportedError

#: What an expression reads, as bits: places of the pair, its score, tensors that the function captured.
BATCH, HEAD, QUERY, KEY, SCORE, CAPTURED = 1, 2, 4, 8, 16, 32


class Value:
    """One value of an expression. Equal values of a trace are one object, so that a number names a value."""

    __slots__ = ("op", "args", "dtype", "reads", "number")

    def __init__(self, op, args, dtype, reads, number):
        self.op, self.args, self.dtype, self.reads, self.number = op, args, dtype, reads, number

    @property
    def is_number(self):
        return self.op == "number"

    def holds(self, number):
        """Whether this is that number, whatever its type."""
        return self.op == "number" and self.args[0] == number


def _promoted(x, z):
    """The type of what is made of two values, each told by its type or, if it is a number of Python, by that of the number."""
    return _promoted_by(x, z, torch.get_default_dtype())


@functools.lru_cache(maxsize=1024)
def _promoted_by(x, z, default):
    """The same, under the type that PyTorch gives numbers of Python."""
    with torch._C.DisableTorchFunction():
        like = [torch.empty((), dtype=kind, device="cpu") if isinstance(kind, torch.dtype) else kind(1) for kind in (x, z)]
        return torch.result_type(*like)


def _kind(value):
    return type(value.args[0]) if value.dtype is None else value.dtype


def _real(dtype):
    """What functions of real numbers give of this type."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


#: Functions of one value, by what their type is: that of the value, a real one, or bool. Behind each the names that PyTorch has for it.
_SAME = {
    **{name: () for name in ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "relu", "square", "positive")},
    "neg": ("negative",),
    "abs": ("absolute",),
    "trunc": ("fix",),
}
_REAL = {
    **{name: () for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "tanh")},
    **{name: () for name in ("sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "deg2rad", "rad2deg")},
    **{"sigmoid": ("expit",), "atan": ("arctan",), "asin": ("arcsin",), "acos": ("arccos",), "silu": (), "softsign": ()},
}
_TRUTH = {"logical_not": (), "isnan": (), "isinf": (), "isfinite": (), "signbit": ()}
#: Functions of two values: of their common type, of a real one, of bool.
_PAIR = {
    **{name: () for name in ("add", "sub", "mul", "maximum", "minimum", "floor_divide", "remainder", "fmod", "pow")},
    **{name: () for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")},
    **{"sub": ("subtract",), "mul": ("multiply",)},
}
_REAL_PAIR = {"div": ("divide", "true_divide"), "atan2": ("arctan2",), "hypot": ()}
_COMPARED = {
    **{name: () for name in ("logical_and", "logical_or", "logical_xor")},
    **{"eq": (), "ne": ("not_equal",), "lt": ("less",), "le": ("less_equal",), "gt": ("greater",), "ge": ("greater_equal",)},
}
_INTEGERS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")


class Trace:
    """The expressions of one call, which share their values and the tensors that they captured."""

    def __init__(self, device, score_dtype):
        self.device, self.score_dtype = device, score_dtype
        self.values, self.captured, self.function = [], [], ""
        #: Whether functions looked into no tensor and asked nothing of PyTorch beside values.
        self.is_closed = True
        self._known, self._slots, self._keys = {}, {}, {}

    def of_call(self, captured):
        """A trace with the values of this one, and these tensors in place of its own; what is made in it is not in this one."""
        other = Trace(self.device, self.score_dtype)
        other.values, other.captured, other.is_closed = self.values.copy(), captured, self.is_closed
        other._known, other._slots, other._keys = self._known.copy(), {id(tensor): slot for slot, tensor in enumerate(captured)}, self._keys.copy()
        return other

    def of_tensors(self, captured):
        """A trace to read, with these tensors in place of its own: no values are made in it."""
        other = Trace(self.device, self.score_dtype)
        other.values, other.captured, other.function, other._keys = self.values, captured, self.function, self._keys
        return other

    # Making values.

    def made(self, op, args, dtype, reads=None):
        key = (op, dtype, *(arg.number if isinstance(arg, Value) else (type(arg), repr(arg)) for arg in args))
        found = self._known.get(key)
        if found is None:
            if reads is None:
                reads = functools.reduce(operator.or_, (arg.reads for arg in args if isinstance(arg, Value)), 0)
            found = self._known[key] = Value(op, args, dtype, reads, len(self.values))
            self.values.append(found)
        return found

    def number(self, number, dtype=None):
        """A number of Python, or one with a type of PyTorch's, as a tensor of no dims has."""
        if dtype == torch.bool:
            number = bool(number)
        elif dtype is not None:
            # As it is in that type: without its fraction in an integer one, rounded in a narrow one.
            exact = torch.float64 if isinstance(number, float) else torch.uint64 if dtype == torch.uint64 and number >= 0 else None
            with torch._C.DisableTorchFunction():
                number = torch.tensor(number, dtype=exact, device="cpu").to(dtype).item()
        return self.made("number", (number,), dtype)

    def place(self, name, reads):
        """A place of the pair: its batch, head, query or key."""
        return self.made(name, (), torch.int64, reads)

    def ranks(self, x, z):
        """Two whole values, one of queries and one of keys, as the places of their numbers among all numbers of both: they compare alike, and are fewer than queries and keys together."""
        both = self.made("ranks", (x, z), torch.int32)
        of_pair = QUERY | KEY
        return tuple(self.made("ranked", (both, number), torch.int32, both.reads & ~of_pair | at.reads & of_pair) for number, at in enumerate((x, z)))

    def gathered(self, index, args, axis, first, end):
        """A tensor that is indexed, as an entry of a table: what it has along a dim from `first` to before `end`, and the place there."""
        place = args[1 + axis]
        # One table for each place: an operand is read by one step.
        entries = self.made("entries", (first, end, place.number), torch.int64, 0)
        args = (*args[: 1 + axis], entries, *args[2 + axis :])
        place = self.binary("sub", place, self.number(first)) if first else place
        reads = functools.reduce(operator.or_, (arg.reads for arg in args))
        return self.made("gather", (self.made("index", args, index.dtype, reads), place), index.dtype, index.reads)

    def score(self):
        return self.made("score", (), self.score_dtype, SCORE)

    def tensor(self, tensor):
        """A tensor that the function captured, or that this package gives an expression beside it."""
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = len(self.captured)
            self.captured.append(tensor)
        return self.made("captured", (slot,), tensor.dtype, CAPTURED)

    def cast(self, value, dtype):
        if value.dtype == dtype:
            return value
        if value.is_number and value.dtype is None:
            return self.number(value.args[0], dtype)
        return self.made("cast", (value,), dtype)

    def common(self, x, z):
        """The type of what is made of two values."""
        try:
            dtype = _promoted(_kind(x), _kind(z))
        except RuntimeError:
            # Of an unsigned type beside another PyTorch says so.
            kinds = " and ".join(str(_promoted(_kind(value), _kind(value))) for value in (x, z))
            return self.refuse(f"values of {kinds} together", "PyTorch has no type for both; a cast of one makes them alike")
        if not dtype.is_floating_point:
            for value in (x, z):
                if value.is_number and value.dtype is None and not -(1 << 63) <= value.args[0] < 1 << 63:
                    raise GraphError(f"{self.function} has the number {value.args[0]} beside a value of {dtype}; whole numbers are of 64 bits")
        return dtype

    def where(self, condition, x, z):
        dtype = self.common(x, z)
        if condition.is_number:
            return self.cast(x if condition.args[0] else z, dtype)
        return self.cast(x, dtype) if x is z else self.made("where", (condition, x, z), dtype)

    def both(self, x, z):
        """The truth of two values of bool."""
        for one, other in ((x, z), (z, x)):
            if one.is_number:
                return other if one.args[0] else one
        return x if x is z else self.made("bitwise_and", (x, z), torch.bool)

    def unary(self, op, x):
        if op == "positive":
            return x
        if op == "logical_not" and x.is_number:
            return self.number(not x.args[0], torch.bool)
        dtype = _promoted(_kind(x), _kind(x))
        if op == "neg" and dtype == torch.bool:
            raise GraphError(f"{self.function} negates a value of bool; `~` or `logical_not` say what is meant")
        return self.made(op, (x,), torch.bool if op in _TRUTH else _real(dtype) if op in _REAL else dtype)

    def binary(self, op, x, z):
        dtype = self.common(x, z)
        if op in _INTEGERS and dtype.is_floating_point:
            self.refuse(f"{op} of {dtype}", "bits are those of bool and integers")
        if op == "bitwise_and" and dtype == torch.bool:
            return self.both(x, z)
        if op in _REAL_PAIR:
            dtype = _real(dtype)
        elif op in _COMPARED:
            dtype = torch.bool
        elif op == "sub" and dtype == torch.bool:
            raise GraphError(f"{self.function} subtracts values of bool; `~`, `^` or `logical_xor` say what is meant")
        return self.made(op, (x, z), dtype)

    def index(self, tensor, places):
        return self.made("index", (self.tensor(tensor), *places), tensor.dtype)

    def key(self, value):
        """What the value is computed by, whatever it captured: equal for equal expressions of any trace."""
        found = self._keys.get(value.number)
        if found is None:
            found = self._keys[value.number] = self._key(value)
        return found

    def _key(self, value):
        order = self.reached([value])
        place = {at.number: number for number, at in enumerate(order)}
        told = []
        for at in order:
            args = (place[arg.number] if isinstance(arg, Value) else (type(arg), repr(arg)) for arg in at.args)
            told.append((at.op, at.dtype, *args))
        return tuple(told)

    def reached(self, values, stop=None):
        """What the values are computed by, and they themselves, each behind what it is computed of; not beyond those for which `stop` is true."""
        found, stack = set(), list(values)
        while stack:
            at = stack.pop()
            if at.number not in found:
                found.add(at.number)
                if stop is None or not stop(at):
                    stack.extend(arg for arg in at.args if isinstance(arg, Value))
        return [self.values[number] for number in sorted(found)]

    # Calling functions.

    def refuse(self, what, why):
        raise UnsupportedError(f"{self.function} uses {what}, which has no form in this package: {why}")

    def value_of(self, given):
        """An argument of an operation as a value."""
        if isinstance(given, Symbol):
            if given.trace is not self:
                raise GraphError(f"{self.function} uses an argument of another call, which it kept")
            return given.value
        if isinstance(given, Part):
            self.refuse("a part of a tensor", f"{given.rest} dims are left; a tensor is indexed in each of its dims")
        if isinstance(given, (bool, int, float)):
            return self.number(given)
        if isinstance(given, torch.Tensor):
            return self._value_of_tensor(given)
        try:
            # A number of another library, or a symbol of a size.
            return self.number(operator.index(given))
        except TypeError:
            return self.refuse(f"a value of {type(given).__name__}", "values are numbers and tensors")

    def _value_of_tensor(self, tensor):
        if tensor.dim() != 0:
            self.refuse(f"a tensor of {tuple(tensor.shape)}", "a tensor is indexed by batch, head, query and key, or has no dims")
        if tensor.is_complex():
            self.refuse("a complex number", "scores are real")
        if tensor.device.type == "cpu" and not tensor.requires_grad:
            # Its value, so that what changes it changes the expression.
            self.is_closed = False
            return self.number(tensor.item(), tensor.dtype)
        return self.tensor(tensor)

    def call(self, function, kind, with_score):
        """What the function computes. `kind` is the word of its argument, for messages."""
        code = getattr(function, "__code__", None)
        where = f" (line {code.co_firstlineno} of {code.co_filename})" if code else ""
        self.function = f"{kind} `{getattr(function, '__qualname__', type(function).__name__)}`{where}"
        places = [self.place(*place) for place in (("batch", BATCH), ("head", HEAD), ("query", QUERY), ("key", KEY))]
        arguments = [Symbol(self, value) for value in ([self.score()] if with_score else []) + places]
        with _Indexing(self):
            try:
                given = function(*arguments)
            except TypeError as error:
                # What PyTorch says of a symbol that it has no way to ask.
                raise UnsupportedError(f"{self.function} cannot be traced: {error}") from error
        if not isinstance(given, (Symbol, bool, int, float, torch.Tensor)):
            raise GraphError(f"{self.function} gives {type(given).__name__}; it gives a value of no dims")
        value = self.value_of(given)
        if not with_score and _promoted(_kind(value), _kind(value)) != torch.bool:
            raise GraphError(f"{self.function} gives {_promoted(_kind(value), _kind(value))}; a mask gives bool, True where a key is attended")
        return value

    def indexed(self, base, places):
        """`base[places]`, where `base` is a tensor or a part of one."""
        tensor, before = (base.tensor, base.places) if isinstance(base, Part) else (base, ())
        for place in places:
            if isinstance(place, (slice, type(None), type(Ellipsis), bool, list)):
                self.refuse(f"an index of {type(place).__name__}", "a tensor is indexed in each of its dims by a value or a number")
        values = [self.value_of(place) for place in places]
        for value in values:
            dtype = _promoted(_kind(value), _kind(value))
            if dtype == torch.bool or dtype.is_floating_point:
                raise GraphError(f"{self.function} indexes a tensor by a value of {dtype}; indices are integers")
        every = (*before, *values)
        if len(every) > tensor.dim():
            raise GraphError(f"{self.function} indexes a tensor of {tuple(tensor.shape)} by {len(every)} values; it has {tensor.dim()} dims")
        if tensor.device != self.device:
            raise GraphError(f"{self.function} indexes a tensor on {tensor.device}; queries are on {self.device}, where it has to be")
        if tensor.is_complex():
            self.refuse("complex numbers", "scores are real")
        return Part(self, tensor, every) if len(every) < tensor.dim() else Symbol(self, self.index(tensor, every))


class _Indexing(TorchFunctionMode):
    """Within, a tensor that is indexed by a symbol gives a symbol."""

    def __init__(self, trace):
        self.trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(place, Symbol) for place in places):
                return self.trace.indexed(args[0], places)
        kwargs = kwargs or {}
        if func not in _ASKED and not any(isinstance(given, _Traced) for given in (*args, *kwargs.values())):
            self.trace.is_closed = False
        return func(*args, **kwargs)


#: What may be asked of a tensor without looking into it.
_ASKED = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
        *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    )
)


def _refused_call(func, args, kwargs):
    every = (*args, *(kwargs or {}).values())
    trace = next(given.trace for given in (*every, *(x for given in every if isinstance(given, (tuple, list)) for x in given)) if isinstance(given, _Traced))
    name = getattr(func, "__name__", str(func))
    trace.refuse(f"`{name}`", "functions of a score and of places work on values one by one, by the operations that docs/python.md lists")


class _Traced:
    """What stands for a tensor while a function is traced."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = _FUNCTIONS.get(func)
        if made is None:
            return _refused_call(func, args, kwargs)
        return _applied(made, args, kwargs or {})


class Part(_Traced):
    """A tensor that was indexed in some of its dims."""

    __slots__ = ("trace", "tensor", "places")

    def __init__(self, trace, tensor, places):
        self.trace, self.tensor, self.places = trace, tensor, places

    @property
    def rest(self):
        return self.tensor.dim() - len(self.places)

    @property
    def shape(self):
        return self.tensor.shape[len(self.places) :]

    @property
    def dtype(self):
        return self.tensor.dtype

    @property
    def device(self):
        return self.tensor.device

    def __getitem__(self, places):
        return self.trace.indexed(self, places if isinstance(places, tuple) else (places,))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.trace.refuse(f"`{name}` of a part of a tensor", "a tensor is indexed in each of its dims")


class Symbol(_Traced):
    """A value, with what a tensor of no dims would offer."""

    __slots__ = ("trace", "value")

    def __init__(self, trace, value):
        self.trace, self.value = trace, value

    @property
    def dtype(self):
        return _promoted(_kind(self.value), _kind(self.value))

    @property
    def device(self):
        return self.trace.device

    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    requires_grad = property(lambda self: False)
    is_cuda = property(lambda self: self.trace.device.type == "cuda")

    def size(self):
        return torch.Size(())

    def dim(self):
        return 0

    def numel(self):
        return 1

    def is_floating_point(self):
        return self.dtype.is_floating_point

    def __getattr__(self, name):
        made = METHODS.get(name)
        if made is not None:
            return functools.partial(_method, made, self)
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("item", "tolist", "numpy", "cpu"):
            return self._refuse_host(f"`{name}`")
        return self.trace.refuse(f"`{name}`", "functions of a score and of places work on values one by one, by the operations that docs/python.md lists")

    def _refuse_host(self, what):
        return self.trace.refuse(what, "it wants a number of Python where the value differs from pair to pair; torch's functions take such values")

    def __bool__(self):
        return self._refuse_host("the truth of a value (`if`, `and`, `or`, `not`, `min`, `max`; `torch.where`, `&`, `|`, `~` take values)")

    def __int__(self):
        return self._refuse_host("`int`")

    def __float__(self):
        return self._refuse_host("`float` or a function of `math`")

    def __index__(self):
        return self._refuse_host("a value as an index of Python's, or in `range`")

    def __iter__(self):
        return self._refuse_host("iteration over a value")

    def __len__(self):
        return self._refuse_host("`len`")

    def __getitem__(self, places):
        return self.trace.refuse("an index of a value", "it has no dims")

    def __repr__(self):
        return f"<a value of {self.value.dtype} of {self.trace.function}>"

    __hash__ = object.__hash__


def _method(made, symbol, *args, **kwargs):
    return _applied(made, (symbol, *args), kwargs)


def _applied(made, args, kwargs):
    trace = next((given.trace for given in (*args, *kwargs.values()) if isinstance(given, _Traced)), None)
    if trace is None:
        raise GraphError("a traced function was called without a value of its trace")
    try:
        return Symbol(trace, made(trace, *args, **kwargs))
    except TypeError as error:
        raise UnsupportedError(f"{trace.function} calls {getattr(made, 'told', 'a function')} in a form that this package does not take: {error}") from error


# What the operations make.


def _told(name, made):
    made.told = f"`{name}`"
    return made


def _unary(op):
    return _told(op, lambda trace, input: trace.unary(op, trace.value_of(input)))


def _binary(op):
    return _told(op, lambda trace, input, other: trace.binary(op, trace.value_of(input), trace.value_of(other)))


def _swapped(made):
    return _told(made.told.strip("`"), lambda trace, input, other: made(trace, other, input))


def _sum_of(op):
    def made(trace, input, other, *, alpha=1):
        other = trace.value_of(other)
        if alpha != 1:
            other = trace.binary("mul", other, trace.value_of(alpha))
        return trace.binary(op, trace.value_of(input), other)

    return _told(op, made)


def _quotient(trace, input, other, *, rounding_mode=None):
    x, z = trace.value_of(input), trace.value_of(other)
    if rounding_mode is None:
        return trace.binary("div", x, z)
    if rounding_mode == "floor":
        return trace.binary("floor_divide", x, z)
    if rounding_mode != "trunc":
        raise GraphError(f"{trace.function} divides with rounding_mode={rounding_mode!r}; it is None, 'floor' or 'trunc'")
    dtype = trace.common(x, z)
    if dtype.is_floating_point:
        return trace.unary("trunc", trace.binary("div", x, z))
    # Of integers: exact by the remainder, which has the sign of the dividend.
    return trace.binary("floor_divide", trace.binary("sub", x, trace.binary("fmod", x, z)), z)


def _power(trace, input, exponent):
    return trace.binary("pow", trace.value_of(input), trace.value_of(exponent))


def _not(trace, input):
    x = trace.value_of(input)
    if x.dtype == torch.bool:
        return trace.unary("logical_not", x)
    if x.dtype is not None and x.dtype.is_floating_point:
        trace.refuse(f"`~` of {x.dtype}", "bits are those of bool and integers")
    return trace.made("bitwise_not", (x,), x.dtype)


def _where(trace, condition, input, other):
    condition = trace.value_of(condition)
    if _promoted(_kind(condition), _kind(condition)) != torch.bool:
        raise GraphError(f"{trace.function} calls where with a condition of {condition.dtype}; it is bool")
    return trace.where(condition, trace.value_of(input), trace.value_of(other))


def _where_method(trace, input, condition, other):
    return _where(trace, condition, input, other)


def _masked_fill(trace, input, mask, value):
    x = trace.value_of(input)
    return trace.cast(_where(trace, mask, value, input), x.dtype)


def _clamp(trace, input, min=None, max=None):
    x = trace.value_of(input)
    if min is None and max is None:
        raise GraphError(f"{trace.function} calls clamp without a bound; it has at least one")
    for op, beyond, given in (("maximum", "lt", min), ("minimum", "gt", max)):
        if given is None:
            continue
        bound = trace.value_of(given)
        dtype = trace.common(x, bound)
        if not dtype.is_floating_point:
            x = trace.binary(op, x, bound)
            continue
        # A maximum halves its gradient between equals, where a clamp gives all to what is clamped. A bound that is NaN is the result.
        x, bound = trace.cast(x, dtype), trace.cast(bound, dtype)
        if bound.is_number:
            is_beyond = trace.number(True, torch.bool) if bound.args[0] != bound.args[0] else trace.binary(beyond, x, bound)
        else:
            is_beyond = trace.binary("bitwise_or", trace.binary(beyond, x, bound), trace.unary("isnan", bound))
        x = trace.where(is_beyond, bound, x)
    return x


def _relu(trace, input, inplace=False):
    return trace.unary("relu", trace.value_of(input))


def _silu(trace, input, inplace=False):
    return trace.unary("silu", trace.value_of(input))


def _round(trace, input, *, decimals=0):
    if decimals:
        trace.refuse("round with decimals", "values are rounded to whole numbers")
    return trace.unary("round", trace.value_of(input))


def _same(trace, input, **memory_format):
    return trace.value_of(input)


def _detached(trace, input):
    x = trace.value_of(input)
    if x.reads & (SCORE | CAPTURED):
        trace.refuse("`detach`", "the gradients of a score and of captured tensors go through all that is computed of them")
    return x


def _cast(trace, input, *args, dtype=None, device=None, other=None, copy=False, non_blocking=False, memory_format=None):
    x = trace.value_of(input)
    for given in (*args, dtype, device, other):
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, (Symbol, torch.Tensor)):
            dtype = given.dtype
        elif isinstance(given, (str, torch.device)) and torch.device(given).type != trace.device.type:
            trace.refuse(f"a value on {given}", f"values are on {trace.device}, as queries are")
    if dtype is not None and dtype.is_complex:
        trace.refuse("a complex number", "scores are real")
    return x if dtype is None else trace.cast(x, dtype)


def _cast_to(name, dtype):
    return _told(name, lambda trace, input: trace.cast(trace.value_of(input), dtype))


def _filled(name, number=None, has_size=False):
    """A new number: `zeros_like(x)`, `x.new_zeros(())`, `x.new_full((), 2)`."""

    def made(trace, input, *args, size=None, fill_value=None, dtype=None, device=None, **rest):
        args = list(args)
        if has_size:
            size = args.pop(0) if args else size
            if size is None or (tuple(size) if isinstance(size, (tuple, list)) else (size,)) != ():
                trace.refuse(f"`{name}` of {size}", "values have no dims")
        filled = number if number is not None else args.pop(0) if args else fill_value
        if args or isinstance(filled, (Symbol, torch.Tensor)) or filled is None:
            trace.refuse(f"`{name}`", "it fills with a number of Python")
        return trace.number(filled, trace.value_of(input).dtype if dtype is None else dtype)

    return _told(name, made)


def _new_tensor(trace, input, data, dtype=None, device=None, **rest):
    if not isinstance(data, (bool, int, float)):
        trace.refuse("`new_tensor`", "it makes a tensor of a number of Python")
    return trace.number(data, trace.value_of(input).dtype if dtype is None else dtype)


#: By the functions of PyTorch, and by the names of methods: what makes a value of them.
_FUNCTIONS, METHODS = {}, {}
_HOMES = (torch, torch.special, torch.nn.functional)


def _enter(made, *names):
    for name in names:
        METHODS.setdefault(name, made)
        for home in (*_HOMES, torch.Tensor):
            found = getattr(home, name, None)
            if callable(found):
                _FUNCTIONS.setdefault(found, made)


def _enter_all():
    for table in (_SAME, _REAL, _TRUTH):
        for op, others in table.items():
            _enter(_round if op == "round" else _relu if op == "relu" else _silu if op == "silu" else _unary(op), op, *others)
    for table in (_PAIR, _REAL_PAIR, _COMPARED):
        for op, others in table.items():
            _enter(_sum_of(op) if op in ("add", "sub") else _quotient if op == "div" else _power if op == "pow" else _binary(op), op, *others)
    _enter(_binary("maximum"), "max")
    _enter(_binary("minimum"), "min")
    _enter(_not, "bitwise_not")
    _enter(_clamp, "clamp", "clip")
    _enter(_told("clamp_min", lambda trace, input, min: _clamp(trace, input, min=min)), "clamp_min")
    _enter(_told("clamp_max", lambda trace, input, max: _clamp(trace, input, max=max)), "clamp_max")
    _enter(_masked_fill, "masked_fill")
    _enter(_same, "clone", "contiguous")
    _enter(_detached, "detach")
    _enter(_told("rsub", lambda trace, input, other, alpha=1: _FUNCTIONS[torch.sub](trace, other, input, alpha=alpha)), "rsub")
    # The order of `where` differs between the function and the method.
    _FUNCTIONS[torch.where], _FUNCTIONS[torch.Tensor.where], METHODS["where"] = _where, _where_method, _where_method
    for name in ("to", "type", "type_as"):
        _enter(_cast, name)
    for name in ("float", "double", "half", "bfloat16", "int", "long", "short", "bool"):
        _enter(_cast_to(name, torch.tensor((), dtype=torch.int32).to(getattr(torch, name)).dtype), name)
    _enter(_cast_to("byte", torch.uint8), "byte")
    _enter(_cast_to("char", torch.int8), "char")
    for name, number in (("zeros", 0), ("ones", 1), ("full", None)):
        _enter(_filled(f"{name}_like", number), f"{name}_like")
        _enter(_filled(f"new_{name}", number, True), f"new_{name}")
    _enter(_new_tensor, "new_tensor")
    for name, made in (("where", _where), ("clamp", _clamp), ("div", _quotient), ("pow", _power), ("to", _cast), ("masked_fill", _masked_fill)):
        _told(name, made)


def _enter_operators():
    """Python's operators, of symbols and of tensors beside symbols."""
    both = {
        "add": "add",
        "sub": "sub",
        "mul": "mul",
        "truediv": "div",
        "floordiv": "floor_divide",
        "mod": "remainder",
        "pow": "pow",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "lshift": "bitwise_left_shift",
        "rshift": "bitwise_right_shift",
    }
    for name, op in both.items():
        made = _binary(op)
        for spelled, entry in ((f"__{name}__", made), (f"__r{name}__", _swapped(made))):
            setattr(Symbol, spelled, functools.partialmethod(_operator, entry))
            found = getattr(torch.Tensor, spelled, None)
            if found is not None:
                _FUNCTIONS.setdefault(found, entry)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Symbol, f"__{name}__", functools.partialmethod(_operator, _binary(name)))
        _FUNCTIONS.setdefault(getattr(torch.Tensor, f"__{name}__"), _binary(name))
    for name, made in (("neg", _unary("neg")), ("abs", _unary("abs")), ("pos", _same), ("invert", _not)):
        setattr(Symbol, f"__{name}__", functools.partialmethod(_operator, made))


def _operator(symbol, made, *others):
    return _applied(made, (symbol, *others), {})


_enter_all()
_enter_operators()


# Computing values that read no score.

#: What computes an op on tensors, where it is not the function of its name in `torch`.
_COMPUTED = {"silu": torch.nn.functional.silu, "softsign": torch.nn.functional.softsign}


def _ranks(x, z):
    """Of each of two tensors of four dims the places of its numbers among the different ones of both, for each batch and head. Nothing is waited for."""
    batches = torch.broadcast_shapes(x.shape[:2], z.shape[:2])
    rows = [given.long().expand(*batches, *given.shape[2:]).flatten(2) for given in (x, z)]
    in_order, order = torch.cat(rows, -1).sort(-1)
    is_new = in_order[..., 1:] != in_order[..., :-1]
    counted = torch.nn.functional.pad(is_new.cumsum(-1, dtype=torch.int32), (1, 0))
    ranks = torch.empty_like(counted).scatter_(-1, order, counted)
    return tuple(part.reshape(*batches, *given.shape[2:]) for part, given in zip(ranks.split([row.shape[-1] for row in rows], -1), (x, z)))


def is_transient():
    """Whether tensors that are made now are of a transform of `torch.func` or of a mode, such as that of tensors without data, and mean nothing once it ends."""
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


class Computed:
    """Values as tensors that broadcast to `[batch, heads, queries, keys]`, by PyTorch on the device, with its gradients of captured tensors."""

    def __init__(self, trace, dims, first_query=0):
        self.trace, self.dims, self.first_query, self.known = trace, dims, first_query, {}

    def in_rows(self, most_elements):
        """The same for some queries after others, with the first of each, so that no tensor has many more elements."""
        b, h, queries, keys = self.dims
        step = max(most_elements // max(b * h * keys, 1), 1)
        for first in range(0, queries, step):
            yield first, Computed(self.trace, (b, h, min(step, queries - first), keys), first)

    def of(self, value):
        """The value as a tensor of four dims, 1 where it does not differ."""
        for at in self.trace.reached([value], lambda at: at.number in self.known or at.op == "index"):
            if at.op == "index":
                # Its tensor is not computed, its places are.
                for place in at.args[1:]:
                    self.of(place)
            if at.number not in self.known:
                self.known[at.number] = self._made(at)
        made = self.known[value.number]
        # A number is filled in and not copied over, which a capture refuses.
        return made if made.dim() == 4 else torch.full((1, 1, 1, 1), made.item(), dtype=made.dtype, device=self.trace.device)

    def _made(self, value):
        op, device = value.op, self.trace.device
        if op == "number":
            number = value.args[0]
            # Without a type it has no dims either, so that it yields to what it meets. Beyond 64 bits it meets real numbers alone.
            return torch.tensor(number if -(1 << 63) <= number < 1 << 63 else float(number), device="cpu") if value.dtype is None else torch.full((1, 1, 1, 1), number, dtype=value.dtype, device=device)
        if op == "entries":
            first, end, _ = value.args
            return torch.arange(first, end, device=device).reshape(1, 1, 1, -1)
        if op in AXES:
            axis = AXES[op]
            shape = [1] * 4
            shape[axis] = self.dims[axis]
            first = self.first_query if op == "query" else 0
            return torch.arange(first, first + self.dims[axis], device=device).reshape(shape)
        if op == "captured":
            tensor = self.trace.captured[value.args[0]]
            # With dims, as every operand has here: of tensors without, PyTorch's promotion thinks less.
            return tensor.to(device).reshape(1, 1, 1, 1)
        if op == "index":
            tensor = self.trace.captured[value.args[0].args[0]]
            places = tuple(place.args[0] if place.is_number else self.known[place.number] for place in value.args[1:])
            made = tensor[places]
            return made if made.dim() == 4 else made.reshape(1, 1, 1, 1)
        if op == "ranked":
            return self.known[value.args[0].number][value.args[1]]
        args = [self._operand(arg, value.args) for arg in value.args]
        if op == "ranks":
            return _ranks(*args)
        if op == "gather":
            # Where what is made of the entry is no step.
            table, place = args
            dims = torch.broadcast_shapes(table.shape[:3], place.shape[:3])
            return table.expand(*dims, -1).gather(3, place.long().expand(*dims, -1))
        if op == "cast":
            return args[0].to(value.dtype)
        try:
            made = (_COMPUTED.get(op) or getattr(torch, op))(*args)
        except NotImplementedError as error:
            types = " and ".join(str(arg.dtype) for arg in args)
            raise UnsupportedError(f"{self.trace.function} computes `{op}` of {types}, which PyTorch does not: {error}") from error
        return made if made.dtype == value.dtype else made.to(value.dtype)

    def _operand(self, arg, every):
        made = self.known[arg.number]
        if arg.dtype is None and isinstance(arg.args[0], float) and any(other.dtype == torch.float64 for other in every):
            return torch.tensor(arg.args[0], dtype=torch.float64, device="cpu")
        return made


AXES = {"batch": 0, "head": 1, "query": 2, "key": 3}
