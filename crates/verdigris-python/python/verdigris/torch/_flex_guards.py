"""Traces that are kept: a function is traced once for all calls at which its trace would come out the same.

What a trace says follows from the function's code and from what that reads: cells of its closure, defaults, globals, and of functions among these the same again. All of it is read at each call and is the key
of a kept trace: numbers by their value, tensors by their dims, type and device, since a trace takes tensors for places to read from and never looks into them. So no tensor is kept alive, a tensor that was
filled or replaced needs no new trace, and a number that changed has another key.

Where that is not all, nothing is kept and the function is traced at every call: where it reads an object of another kind (a module of its own, `self`), an attribute of which nobody knows what is behind it,
imports, writes anything but its own variables, or calls a function of PyTorch on tensors alone (`table.max()`, `torch.rand(())`, `scale.item()`). What is taken for fixed are PyTorch's own functions and those of
`math`. PyTorch's compiler checks the same before it runs what it compiled.
"""

import builtins
import collections
import dis
import functools
import inspect
import math
import threading
import types

import torch

from ._flex_forms import form_of
from ._flex_trace import METHODS, Trace


class _Unknown(Exception):
    """What a function computes does not follow from what can be read here."""


#: Most traces that are kept, of which each is some dozens of values.
_MOST_KEPT = 256
#: Most elements of a list or a dict that a function captures.
_MOST_ELEMENTS = 64

_PLAIN = frozenset((types.NoneType, types.EllipsisType, bool, int, str, bytes, torch.dtype, torch.device))
_MODULES = {id(module): module.__name__ for module in (torch, torch.nn, torch.nn.functional, torch.special, math)}
_BUILTINS = {
    id(found): name
    for name in ("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min", "pow", "range", "reversed", "round", "sum", "tuple", "zip")
    for found in (getattr(builtins, name),)
}
#: Attributes behind which stands the same at every call, whatever of the above has them.
_ATTRIBUTES = frozenset(
    (
        *METHODS,
        *dir(math),
        *("nn", "functional", "special", "shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "finfo", "iinfo", "eps", "tiny", "smallest_normal"),
        *("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)
_WRITTEN = ("IMPORT_", "STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "STORE_SLICE", "DELETE_", "YIELD", "SEND", "LOAD_BUILD_CLASS", "LOAD_LOCALS", "LOAD_FROM_DICT")


@functools.lru_cache(maxsize=1024)
def _globals_of(code):
    """The globals that code reads, with that of functions it makes; None where it does more than a trace follows from."""
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return None
    names = {}
    for at in dis.get_instructions(code):
        if at.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[at.argval] = None
        elif at.opname.startswith(_WRITTEN) or (at.opname == "STORE_DEREF" and at.argval in code.co_freevars):
            return None
        elif ("ATTR" in at.opname or "METHOD" in at.opname) and isinstance(at.argval, str) and at.argval not in _ATTRIBUTES:
            return None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            own = _globals_of(inner)
            if own is None:
                return None
            names.update(dict.fromkeys(own))
    return tuple(names)


class _Read:
    """What functions read, as a key, and the tensors among it in the order in which they were met."""

    def __init__(self):
        self.tensors, self._slots, self._functions = [], {}, {}

    def key(self, value):
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            # Zeros of both signs are equal, and NaN is not.
            return value.hex()
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is tuple or kind is list:
            if len(value) > _MOST_ELEMENTS:
                raise _Unknown
            return kind, *map(self.key, value)
        if kind is dict:
            if len(value) > _MOST_ELEMENTS:
                raise _Unknown
            return kind, *(self.key(part) for item in value.items() for part in item)
        told = _MODULES.get(id(value)) or _BUILTINS.get(id(value))
        if told is None:
            raise _Unknown
        return kind, told

    def _tensor(self, tensor):
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._slots[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return torch.Tensor, slot, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad

    def _function(self, function):
        # Functions may name themselves and each other.
        place = self._functions.get(id(function))
        if place is not None:
            return types.FunctionType, place
        self._functions[id(function)] = len(self._functions)
        code = function.__code__
        names = _globals_of(code)
        if names is None:
            raise _Unknown
        read = [code, code.co_filename, function.__qualname__]
        for given in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            read.append(self.key(given) if given else None)
        for cell in function.__closure__ or ():
            try:
                given = cell.cell_contents
            except ValueError:
                raise _Unknown from None
            read.append(self.key(given))
        home = function.__globals__
        for name in names:
            read.append(self.key(home[name] if name in home else getattr(builtins, name, None)))
        return tuple(read)


class Traced:
    """What a score function and a mask's function say, of a call."""

    __slots__ = ("trace", "score", "form", "mask", "of_score", "of_mask", "decided")

    def __init__(self, trace, score, form, mask, of_score, of_mask, decided):
        #: The expressions, that of the score also in the op's form, if it has one; `mask` is None where there is no function.
        self.trace, self.score, self.form, self.mask = trace, score, form, mask
        #: The words for either function in messages; empty where there is none.
        self.of_score, self.of_mask = of_score, of_mask
        #: What was decided about calls of the functions, by their kind; that of a kept trace is all calls' own.
        self.decided = decided

    def of_call(self, captured):
        return Traced(self.trace.of_call(captured), self.score, self.form, self.mask, self.of_score, self.of_mask, self.decided)


def _traced(device, score_dtype, score_mod, mask_mod):
    trace = Trace(device, score_dtype)
    score = trace.score() if score_mod is None else trace.call(score_mod, "score_mod", True)
    of_score, mask, of_mask = trace.function, None, ""
    if mask_mod is not None:
        mask = trace.cast(trace.call(mask_mod, "mask_mod", False), torch.bool)
        of_mask = trace.function
        # It is asked for at every call with a mask.
        trace.key(mask)
    return Traced(trace, score, form_of(trace, score), mask, of_score, of_mask, {})


#: By what functions read: what they say, without tensors, and for each tensor of the trace its place among those that are read.
_kept, _kept_lock = collections.OrderedDict(), threading.Lock()


def clear():
    with _kept_lock:
        _kept.clear()


def traced(device, score_dtype, score_mod, mask_mod):
    """What the functions say at this call, each of which may be None: `Traced`, whose trace is the call's own."""
    read = _Read()
    try:
        key = (device, score_dtype, torch.get_default_dtype(), read.key(score_mod), read.key(mask_mod))
    except (_Unknown, RecursionError):
        # The latter of a list that is among its own elements.
        return _traced(device, score_dtype, score_mod, mask_mod)
    with _kept_lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
    if found is not None:
        own, slots = found
        return own.of_call([read.tensors[slot] for slot in slots])
    made = _traced(device, score_dtype, score_mod, mask_mod)
    slots = [next((slot for slot, tensor in enumerate(read.tensors) if tensor is captured), None) for captured in made.trace.captured]
    if made.trace.is_closed and None not in slots:
        with _kept_lock:
            _kept[key] = (made.of_call([]), slots)
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
    return made
