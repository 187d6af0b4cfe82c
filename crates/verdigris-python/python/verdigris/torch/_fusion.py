"""The pass that makes what stands behind a convolution or a product in a compiler's graph a part of its call.

It runs on graphs of ATen that are functional, with forward and backward in one where there is a backward, before they are cut apart: no tensor is written twice there, and
what a backward needs of a forward is a reader like any other. A chain of steps (`_steps`) of which each is the only reader of the one before becomes one call of
`torch.ops.verdigris.fused`. Where others read the product's own result too, as gradients of activations do, that is a second result (`fused_keeping`). A chain is
taken as far as the library's own cut makes one part of it, which it is asked for (`parts_of_call`): what it would take apart again, PyTorch fuses better.
"""

import dataclasses
import math
import operator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import _native
from .._errors import Error
from . import _ops, _steps

_ours = torch.ops.verdigris

#: Most steps of a call, most tensors, and most integers of the key that its plan is found by (`call/key.rs`).
_MOST_STEPS, _MOST_TENSORS, _MOST_WORDS = 8, 13, 128

#: Operators behind which steps may stand, with the place of their attributes among their arguments.
_ANCHORS = {"conv_fprop": 3, "conv_norm": 8, "conv_dgrad": 3, "linear": 3, "gradient": 6}
#: What gradients are taken of, with respect to their first tensor, so that steps may stand behind them.
_DIFFERENTIATED = ("conv_fprop", "conv_dgrad", "linear")

#: What a pass over memory takes on the chip that estimates are for: its launch, and bytes read and written a microsecond.
_LAUNCH_US, _BYTES_PER_US = 2.0, 4.0e6
#: How much longer a call may take by estimate before that is believed.
_DOUBT = 1.25

_NAMES = {dtype: name for name, dtype in _ops._WIDTHS.items()}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """A call that steps were looked for behind: the name of its node, its operator, the steps that are part of it now, whether its own result is kept beside
    theirs, and why there are no more."""

    node: str
    operator: str
    steps: tuple
    keeps: bool
    stops: str

    def __str__(self):
        kept = ", its own result kept" if self.keeps else ""
        return f"{self.operator} `{self.node}`: {' + '.join(self.steps) or 'nothing'}{kept}; no more because {self.stops}"


def _operator_of(node):
    """The name of an operator that steps may stand behind, with what it is the gradient of; None of other nodes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "verdigris":
        return None
    name = node.target._schema.name.split("::")[1]
    if name not in _ANCHORS or node.kwargs:
        return None
    if name == "gradient":
        head = _ops.parse(node.args[_ANCHORS[name]].split("|", 1)[0])
        return (name, head["of"]) if head["of"] in _DIFFERENTIATED and head["wrt"] == "0" else None
    return name, None


def _value(node):
    return node.meta.get("val")


def _same(left, right):
    return left is right or statically_known_true(left == right)


def _same_all(left, right):
    return len(left) == len(right) and all(map(_same, left, right))


def _readers(node):
    return list(node.users)


def _broadcasts(dims, result):
    behind = len(result) - len(dims)
    return behind >= 0 and all(_same(dim, 1) or _same(dim, wide) for dim, wide in zip(dims, result[behind:]))


#: Views, and ops whose results compilers leave to libraries: what they give lies in memory whoever reads it.
_VIEWS = {"view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "squeeze", "unsqueeze", "slice", "select", "alias"}
_LIBRARY = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_to_copy", "copy_"}


def _is_made_for(node):
    """Whether a tensor has one reader and is made by ops that a compiler would fuse with it, so that it never lies in memory but for a call."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and len(node.users) == 1:
        name = node.target._schema.name.split("::")
        if name[0] not in ("aten", "prims"):
            return False
        if name[1] not in _VIEWS:
            return name[1] not in _LIBRARY
        node = node.args[0]
    return False


class _Unknown(Exception):
    """A size without a number that it had in the example."""


def _hint(size):
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise _Unknown("a size is not known before it runs")
    return int(hint)


def _described(node):
    if node is None:
        return None
    value = _value(node)
    # Masks are read as the numbers 0 and 1.
    name = "u8" if value.dtype == torch.bool else _NAMES.get(value.dtype)
    if name is None:
        raise _Unknown(f"`{node}` is of {value.dtype}")
    return name, [_hint(dim) for dim in value.shape], [_hint(stride) for stride in value.stride()]


class _Chain:
    """A call with the steps that were found behind it."""

    def __init__(self, node, name):
        self.node, self.name = node, name
        place = _ANCHORS[name]
        tensors = list(node.args[:place])
        while tensors and tensors[-1] is None:
            tensors.pop()
        self.tensors, self.attributes = tensors, node.args[place]
        self.dims = list(node.args[place + 1]) if len(node.args) > place + 1 else []
        self.nodes, self.steps, self.operands = [], [], []
        self.keeps, self.stops = False, ""

    def last(self):
        return self.nodes[-1]

    def cut(self, count):
        """Without the steps behind so many."""
        gone = self.steps[count:]
        self.steps, self.nodes = self.steps[:count], self.nodes[:count]
        self.operands = self.operands[: len(self.operands) - sum(other is not None for _, other in gone)]

    def words(self):
        kind = f"of={self.name} tensors={len(self.tensors)} type={_NAMES[_value(self.last()).dtype]}"
        return ";".join([kind, *(words for words, _ in self.steps), self.attributes])

    def call(self):
        """The arguments of the call with its steps."""
        tensors = [*self.tensors, *self.operands]
        return *tensors, *[None] * (_MOST_TENSORS - len(tensors)), self.words(), self.dims

    def key_words(self):
        """How long the key of the call is: attributes by eight letters, dims, and of each tensor its type, dims and strides."""
        tensors = [*self.tensors, *self.operands]
        ranks = [0 if node is None else len(_value(node).shape) for node in tensors]
        return 2 + len(self.words()) // 8 + len(self.dims) + _MOST_TENSORS + 2 * sum(ranks)

    def parts(self, steps):
        """What the library would cut the call into, with its steps or without."""
        dims = [_hint(dim if not isinstance(dim, torch.fx.Node) else _value(dim)) for dim in self.dims]
        name = (self.name, "fused_keeping" if self.keeps else "fused")[steps]
        tensors = [*self.tensors, *(self.operands if steps else ())]
        words = self.words() if steps else self.attributes
        return _native.parts_of_call(_ops.operator_number(name), [_described(node) for node in tensors], words, dims)


def _depends(nodes, on, order):
    """Whether one of the nodes is computed from `on`."""
    seen, wanted = set(), list(nodes)
    while wanted:
        node = wanted.pop()
        if node is on:
            return True
        if node not in seen and order.get(node, -1) > order[on]:
            seen.add(node)
            wanted.extend(node.all_input_nodes)
    return False


def _writes(node):
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def slower(alone_us, together_us, pass_bytes):
    """Why a call with steps would take longer than without them and a pass behind it that moves so many bytes, by estimate; None if it would not.

    An engine that takes the product may refuse the steps, and what another one loses may be more than the pass."""
    pass_us = _LAUNCH_US + pass_bytes / _BYTES_PER_US
    alone_us, together_us = sum(alone_us), sum(together_us)
    if together_us <= _DOUBT * (alone_us + pass_us):
        return None
    return f"with it the call would take {together_us:.1f} us by estimate, {alone_us:.1f} us without it, and a pass behind it {pass_us:.1f} us"


class _Search:
    """Of one graph."""

    def __init__(self, graph):
        self.graph = graph
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        # What is computed from the gradients of results runs in the backward, all else before it.
        self.is_backward = {}
        for node in graph.nodes:
            is_tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
            self.is_backward[node] = is_tangent or any(self.is_backward[given] for given in node.all_input_nodes)

    def chain(self, node, name):
        """The steps behind a call, as far as the graph has them."""
        found = _Chain(node, name)
        value, result = node, _value(node)
        if not isinstance(result, FakeTensor) or result.dtype not in _steps.FLOATS:
            found.stops = "its result is no floating-point tensor"
            return found
        while not found.stops:
            following, found.stops = self._next(found, value, result)
            if following is not None:
                node, words, other = following
                found.nodes.append(node)
                found.steps.append((words, other))
                found.operands += [] if other is None else [other]
                value = node
        return found

    def _next(self, found, value, result):
        """The step behind a value, and else why there is none."""
        readers = _readers(value)
        steps = [(reader, *told) for reader in readers if (told := _steps.step(reader, value)) is not None]
        steps = [one for one in steps if self.is_backward[one[0]] == self.is_backward[found.node]]
        if len(readers) > 1 and found.steps:
            return None, f"{len(readers)} ops read `{value}`"
        if len(steps) != 1:
            if len(readers) > 1:
                return None, f"{len(readers)} ops read it, and {len(steps)} of them are steps"
            return None, f"`{readers[0]}` is no step of an epilogue" if readers else "nothing reads it"
        (node, words, other) = steps[0]
        told = self._why_not(found, node, words, other, result)
        if told:
            return None, told
        found.keeps = found.keeps or len(readers) > 1
        return steps[0], ""

    def _why_not(self, found, node, words, other, result):
        made = _value(node)
        if len(found.steps) == _MOST_STEPS or len(found.tensors) + len(found.operands) == _MOST_TENSORS:
            return f"a call has at most {_MOST_STEPS} steps and {_MOST_TENSORS} tensors"
        if not isinstance(made, FakeTensor) or not _same_all(made.shape, result.shape):
            return f"`{node}` has other dims"
        if made.dtype not in _steps.FLOATS or (made.dtype == torch.float64) != (result.dtype == torch.float64):
            return f"`{node}` is of {made.dtype}"
        if node.meta.get("recompute") != found.node.meta.get("recompute"):
            return f"`{node}` is checkpointed otherwise"
        if other is None:
            return ""
        beside = _value(other)
        is_mask = words == "b=mul" and getattr(beside, "dtype", None) == torch.bool
        if not isinstance(beside, FakeTensor) or not (is_mask or beside.dtype in _steps.FLOATS) or beside.device != result.device:
            return f"`{other}`, which `{node}` reads, is no floating-point tensor of the device"
        if _same_all(beside.shape, result.shape) and _is_made_for(other):
            return f"`{other}` is made for `{node}` alone, by what a compiler fuses with it and would have to write for a call"
        if (beside.dtype == torch.float64) != (result.dtype == torch.float64):
            return f"`{other}`, which `{node}` reads, is of {beside.dtype}"
        if not _broadcasts(beside.shape, result.shape):
            return f"`{other}`, which `{node}` reads, does not broadcast to the result by sizes that are known"
        return ""

    def fit(self, found):
        """Cuts the chain down to what one part of the library's computes and what stands where the last step stands."""
        while found.steps:
            told = self._unfit(found)
            if told is None:
                return
            found.stops = told
            found.cut(len(found.steps) - 1)
        found.keeps = False

    def _unfit(self, found):
        last, result = _value(found.last()), _value(found.node)
        if not _same_all(last.stride(), result.stride()):
            return f"`{found.last()}` lies in another memory format"
        if all(words == "f=identity" for words, _ in found.steps):
            return "a cast alone is none"
        if found.key_words() > _MOST_WORDS:
            return f"a call with it has a key of {found.key_words()} integers; there is room for {_MOST_WORDS}"
        if found.keeps and _depends(found.operands, found.node, self.order):
            return f"`{found.last()}` reads what is computed from the product beside the chain"
        between = (node for node, place in self.order.items() if self.order[found.node] < place < self.order[found.last()])
        writer = next(filter(_writes, between), None)
        if writer is not None:
            return f"`{writer}` writes to memory between them"
        try:
            (alone, _), (together, account) = found.parts(False), found.parts(True)
        except (_Unknown, Error) as reason:
            return str(reason)
        if len(together) > len(alone):
            said = [line for line in account.splitlines() if " only if " in line]
            return f"the library would cut it into {' + '.join(kind for kind, _ in together)}" + (f" ({said[-1]})" if said else "")
        if result.device.type != "cuda":
            return None
        # The pass that would stand behind the call reads its result and the operands, and writes.
        values = [result, result, *map(_value, found.operands)]
        passes = sum(math.prod(_hint(dim) for dim in value.shape) * value.element_size() for value in values)
        return slower([us for _, us in alone], [us for _, us in together], passes)

    def _as_numbers(self, node, before):
        """A mask as the numbers 0 and 1; other tensors as they are. A conversion, which Inductor fuses with what makes the mask: it cannot lower a view of bool as another type."""
        value = _value(node)
        if value.dtype != torch.bool:
            return node
        with self.graph.inserting_before(before):
            made = self.graph.call_function(torch.ops.prims.convert_element_type.default, (node, torch.uint8))
        with value.fake_mode:
            made.meta = {**node.meta, "val": value.to(torch.uint8)}
        self.order[made], self.is_backward[made] = self.order[before], self.is_backward[node]
        return made

    def rewrite(self, found):
        """Puts the call with its steps where the last of them stands."""
        last, first = found.last(), found.node
        found.operands = [self._as_numbers(node, last) for node in found.operands]
        target = _ours.fused_keeping.default if found.keeps else _ours.fused.default
        arguments = found.call()
        with self.graph.inserting_before(last):
            call = self.graph.call_function(target, arguments)
        fake = torch.fx.node.map_arg(arguments, _value)
        with _value(first).fake_mode:
            made = target(*fake)
        call.meta = {**last.meta, "val": made}
        result, kept = call, None
        if found.keeps:
            with self.graph.inserting_before(last):
                result, kept = (self.graph.call_function(operator.getitem, (call, place)) for place in (0, 1))
            result.meta, kept.meta = {**last.meta, "val": made[0]}, {**first.meta, "val": made[1]}
        last.replace_all_uses_with(result)
        for node in reversed(found.nodes):
            self.graph.erase_node(node)
        if kept is not None:
            first.replace_all_uses_with(kept)
        self.graph.erase_node(first)
        for node in (call, result, kept):
            if node is not None:
                self.order[node], self.is_backward[node] = self.order[last], self.is_backward[last]


def fuse(graph):
    """Fuses a graph in place, and says of each call that steps were looked for behind what became of it."""
    search, report, taken = _Search(graph), [], set()
    for node in list(graph.nodes):
        told = None if node in taken else _operator_of(node)
        if told is None or not node.users:
            continue
        found = search.chain(node, told[0])
        search.fit(found)
        name = f"gradient of {told[1]}" if told[1] else told[0]
        report.append(Fusion(node.name, name, tuple(words for words, _ in found.steps), found.keeps, found.stops))
        if found.steps:
            taken.update(found.nodes)
            search.rewrite(found)
            # What is kept may be read by ops in front of the last step.
            _sort(graph) if found.keeps else None
            search.order = {node: number for number, node in enumerate(graph.nodes)} if found.keeps else search.order
    graph.lint()
    return report


def _sort(graph):
    """Moves each node behind what it reads, and leaves the order as it is elsewhere."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
