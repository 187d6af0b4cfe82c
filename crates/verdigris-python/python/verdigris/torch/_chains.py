"""Chains of a network's modules that are computed together: what `convert` finds, and what it makes of them.

A chain is a convolution, the batch normalization behind it, and where they follow, the addition of a residual and an activation. In inference it is one
call (`torch.ops.verdigris.conv_norm`): the normalization is a product and a sum in the convolution's epilogue. Where the normalization trains and
gradients are recorded, it is one call too (`conv_batch_norm`), with one node of autograd, if what is behind the normalization is a sum of like tensors or
ReLU and the convolution has no bias. Else the convolution is a call, and the normalization with what is behind it another, or the modules are called as they stand.

What a chain is made of is read at each call: classes, options, hooks, a `forward` that was set on an instance. Where a part is not what it was, the modules are called
one by one.

Two linear layers with an activation between them, and dropout that drops nothing, are a chain too: the feed-forward half of a transformer's block. It is one
call, in training one node of autograd, and the activation is a step of the products.

A chain is found in the `forward` of the module that holds its parts, which is traced with all modules below it opaque. Only what a trace shows
exactly is traced: a `forward` whose decisions are about attributes of the module other than `training`. Module tree, parameters and `state_dict` stay
as they are; what changes is the `forward` of the holding module, by a class of its own that is derived from the former one.
"""

import ast
import collections
import importlib
import inspect
import operator
import textwrap
import types
import warnings

import torch
from torch import fx

from . import _ops, functional, nn

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_ADDS = {operator.add, operator.iadd, torch.add}
_RELUS = {torch.relu, torch.relu_, torch.nn.functional.relu, torch.nn.functional.relu_, functional.relu}

#: Modules that are activations, with what the operators call them.
_ACTIVATIONS = {
    torch.nn.ReLU: lambda m: "f=relu",
    torch.nn.ReLU6: lambda m: "f=clamp lower=0.0 upper=6.0",
    torch.nn.LeakyReLU: lambda m: f"f=leaky_relu slope={float(m.negative_slope)!r}",
    torch.nn.GELU: lambda m: "f=gelu_tanh" if m.approximate == "tanh" else "f=gelu_erf",
    torch.nn.SiLU: lambda m: "f=silu",
    torch.nn.Hardswish: lambda m: "f=hard_swish",
    torch.nn.Hardsigmoid: lambda m: "f=hard_sigmoid",
    torch.nn.Hardtanh: lambda m: f"f=clamp lower={float(m.min_val)!r} upper={float(m.max_val)!r}",
    torch.nn.Mish: lambda m: "f=mish",
    torch.nn.Sigmoid: lambda m: "f=sigmoid",
    torch.nn.Tanh: lambda m: "f=tanh",
    torch.nn.ELU: lambda m: f"f=elu alpha={float(m.alpha)!r}",
}


@_ops.cached
def _attributes(conv, epsilon, activation):
    return f"{conv} eps={float(epsilon)!r}" + (f"|{activation}" if activation else "")


def _is_watched(module):
    """Whether somebody wants to see the module's inputs, results or gradients, or has given it a `forward` of its own."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own.get("_backward_pre_hooks") or "forward" in own
    )


_modules = torch.nn.modules.module


def _is_all_watched():
    """Whether somebody wants to see every module that there is."""
    return bool(
        _modules._global_forward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
    )


_DROPOUTS = (torch.nn.Dropout, nn.Dropout)
_OWN_NORMS = tuple(nn.CLASSES[kind] for kind in _PLAIN_NORMS)
#: Normalizations that compute what PyTorch's do, PyTorch's own and ours.
_NORMS = (*_PLAIN_NORMS, *_OWN_NORMS)


def _is_alike(conv, x, addend):
    """Whether an addend has dims and type of a convolution's result: nothing is broadcast, and no type promoted."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
    return addend.dtype == dtype and tuple(addend.shape) == _ops.conv_out(x.shape, conv.weight.shape, conv._attributes)


def _word(activation, is_looked_at=True):
    """What the operators call an activation, which is a module or their word for it; None of one that has to be called. Hooks do not count where they are not looked at."""
    if isinstance(activation, str):
        return activation
    read = _READERS.get(type(activation)) or _reader(type(activation))
    return None if read is None or is_looked_at and _is_watched(activation) else read(activation)


def _reader(kind):
    """By what a class of modules says what the operators call it; None where it is no activation of theirs."""
    if getattr(getattr(kind, "_compute", None), "__name__", "") == "_activation":
        # Of transformers, which `convert` took.
        return lambda module: module._word
    base = next((base for base in kind.__mro__ if base in _ACTIVATIONS), None)
    is_plain = base is not None and kind.forward in (base.forward, nn.CLASSES[base].forward)
    return _ACTIVATIONS[base] if is_plain else None


#: By class: what says how the operators call a module of it. Of classes derived from these it is looked for.
_READERS = {kind: read for base, read in _ACTIVATIONS.items() for kind in (base, nn.CLASSES[base])}


def _activated(y, activation, word, is_fresh):
    """The activation of a value. With `is_fresh` nobody else has the value, so that what works in place may as well make a new one: in place PyTorch first copies what a
    gradient needs."""
    if isinstance(activation, str):
        word = activation
    elif not (word and is_fresh and isinstance(y, torch.Tensor)):
        return activation(y)
    return _ops.activation(y, word) if word else y


def conv_norm(conv, norm, activation, x, addend=None):
    """A chain: `f(norm(conv(x)) + addend)`, `activation` being f as a module, or what the operators call it, or empty."""
    # A compiler sees to hooks itself.
    is_eager = not _ops._is_compiling()
    is_all_watched = is_eager and _is_all_watched()
    word = None if is_all_watched else _word(activation, is_eager)
    is_whole = (
        word is not None
        and conv.__class__ in _CONVS
        and norm.__class__ in _NORMS
        and isinstance(x, torch.Tensor)
        and x.dim() == conv.weight.dim()
        and conv.padding_mode == "zeros"
        and conv._attributes
        and not (is_eager and (_is_watched(conv) or _is_watched(norm)))
    )
    if is_whole:
        takes_gradient = torch.is_grad_enabled()
        is_one_call = not (norm.training or takes_gradient) and norm.running_mean is not None
        if is_one_call and (addend is None or _is_alike(conv, x, addend)):
            attributes = _attributes(conv._attributes, norm.eps, word)
            return _ops.conv_norm(x, conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias, addend, attributes)
        is_one_node = (
            norm.training
            and takes_gradient
            and norm.__class__ in _OWN_NORMS
            and word in ("", "f=relu")
            and norm.momentum is not None
            and conv.bias is None
        )
        if is_one_node and (addend is None or _is_alike(conv, x, addend)):
            return functional.conv_batch_norm_modules(conv, norm, x, addend, "relu" if word else None)
    y = conv(x)
    is_two_calls = norm.__class__ in _OWN_NORMS and word in ("", "f=relu") and isinstance(y, torch.Tensor) and not (is_eager and _is_watched(norm))
    if is_two_calls and (addend is None or addend.dtype == y.dtype and addend.shape == y.shape):
        return functional.batch_norm_module(norm, y, addend, "relu" if word else None)
    y = norm(y)
    return _activated(y if addend is None else y + addend, activation, word, addend is not None or norm.__class__ in _NORMS)


def mlp(first, activation, dropout, second, x):
    """A chain: `second(dropout(f(first(x))))`, `activation` being f as a module, or what the operators call it; `dropout` may be None."""
    is_eager = not _ops._is_compiling()
    word = None if is_eager and _is_all_watched() else _word(activation, is_eager)
    is_one_call = (
        word
        and is_eager
        and first.__class__ is nn.Linear
        and second.__class__ is nn.Linear
        and (dropout is None or dropout.__class__ in _DROPOUTS and (not dropout.training or dropout.p == 0.0))
        and isinstance(x, torch.Tensor)
        and x.dim() > 0
        and not (_is_watched(first) or _is_watched(second) or dropout is not None and _is_watched(dropout))
    )
    if is_one_call:
        return _ops.mlp_in_mode(x, first.weight, first.bias, second.weight, second.bias, word)
    y = _activated(first(x), activation, word, first.__class__ is nn.Linear)
    return second(y if dropout is None else dropout(y))


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


def _about_self(test):
    """Whether a test is about attributes of `self` other than `training` alone."""
    if isinstance(test, ast.BoolOp):
        return all(map(_about_self, test.values))
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _about_self(test.operand)
    if isinstance(test, ast.Compare):
        is_none = [isinstance(other, ast.Constant) and other.value is None for other in test.comparators]
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops) and all(is_none) and _about_self(test.left)
    return isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == "self" and test.attr != "training"


_UNTRACED = (ast.For, ast.While, ast.Try, ast.With, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.Lambda, ast.FunctionDef)
#: Python's own functions that see no more of a tensor than what stands for it shows.
_BLIND = {"tuple", "list", "dict", "range"}
#: Functions that write their first argument, of which a trace makes new tensors.
_WRITERS = tuple(
    getattr(operator, f"i{name}")
    for name in ("add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
)
#: How far into functions of others a trace is followed.
_DEPTH = 4


def _is_exact(function, module, depth=_DEPTH):
    """Whether a trace of a function of the module shows all that it ever does."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return False
    if depth == 0 or not isinstance(tree, ast.FunctionDef) or tree.args.vararg or tree.args.kwarg:
        return False
    # What may be the caller's tensor, or one of two names of a tensor: `+=` changes it, and a trace has a new one instead.
    callers = {one.arg for one in tree.args.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            callers |= {node.value.id, *(target.id for target in node.targets if isinstance(target, ast.Name))}
    return all(_is_shown(node, tree, callers, function, module, depth) for node in ast.walk(tree))


def _is_shown(node, tree, callers, function, module, depth):
    """Whether a trace shows what one node of a function's source does."""
    if isinstance(node, _UNTRACED) and node is not tree:
        return False
    if isinstance(node, ast.AugAssign) and not (isinstance(node.target, ast.Name) and node.target.id not in callers):
        return False
    if isinstance(node, (ast.If, ast.IfExp)) and not _about_self(node.test):
        return False
    if isinstance(node, ast.Attribute) and (node.attr == "training" or isinstance(node.ctx, ast.Store)):
        return False
    return not isinstance(node, ast.Call) or _is_call_shown(node.func, function, module, depth)


def _is_call_shown(called, function, module, depth):
    path = []
    while isinstance(called, ast.Attribute):
        path.insert(0, called.attr)
        called = called.value
    if isinstance(called, ast.Subscript):
        # A module out of a list of them.
        inner = called.value
        is_own = isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
        return not path and is_own and isinstance(getattr(module, inner.attr, None), (torch.nn.ModuleList, torch.nn.Sequential))
    if not isinstance(called, ast.Name):
        # A method of what another call gave: a tensor's.
        return isinstance(called, ast.Call) and not (isinstance(called.func, ast.Name) and called.func.id == "super")
    name = called.id
    if name == "self":
        found = module
    elif name in function.__globals__:
        found = function.__globals__[name]
    else:
        # A method of a local value, which is a tensor, or one of Python's own functions.
        return bool(path) or name in _BLIND
    for part in path:
        found = getattr(found, part, None)
    # None is called nowhere: the call stands behind a question whether there is something.
    if found is None or isinstance(found, torch.nn.Module) and found is not module:
        return True
    if any(found is writer for writer in _WRITERS):
        return False
    room = getattr(found, "__module__", None) or ""
    if room.split(".")[0] == "torch" or inspect.isbuiltin(found) and room.startswith(("torch", "_operator")):
        return not isinstance(found, type)
    return inspect.isroutine(found) and not inspect.isbuiltin(found) and _is_exact(inspect.unwrap(getattr(found, "__func__", found)), module, depth - 1)


def _sequence(module):
    """The graph of a `Sequential`, whose own forward is a loop."""
    graph = fx.Graph()
    value = graph.placeholder("input")
    # A module that stands in it twice is called twice.
    for name in module._modules:
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph


def _traced(module):
    kind = type(module)
    if kind.forward is torch.nn.Sequential.forward:
        return _sequence(module)
    if not _is_exact(kind.forward, module):
        return None
    before = set(vars(module))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _Tracer().trace(module)
    except Exception:  # whatever a forward does with what is no tensor; it stays as it is
        graph = None
    # A tensor that the forward itself made, or took from elsewhere: the trace has that of the day, as an attribute of the module.
    constants = set(vars(module)) - before
    for name in constants:
        delattr(module, name)
    return None if constants else graph


def _only_reader(node):
    return next(iter(node.users)) if len(node.users) == 1 else None


class _Holder:
    """A module whose forward holds chains, without those below it that are to be left alone."""

    def __init__(self, module, left):
        self.module, self.left = module, left

    def part(self, node):
        """The module that a node calls, if it may be part of a chain."""
        if node is None or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        found = self.module.get_submodule(node.target)
        return None if found in self.left or _is_watched(found) else found


def _activation(holder, node):
    """The activation that a node is, as a chain takes it; None if it is none."""
    found = holder.part(node)
    if found is not None:
        return None if _word(found) is None else _held(node)
    if node is None or not node.args or len(node.args) > 2:
        return None
    is_relu = node.op == "call_function" and node.target in _RELUS or node.op == "call_method" and node.target in ("relu", "relu_")
    return "f=relu" if is_relu and set(node.kwargs) <= {"inplace"} else None


def _addend(node, value):
    """What a node adds to a value; None if it is no plain sum of two tensors."""
    if node is None or node.kwargs or len(node.args) != 2:
        return None
    is_sum = node.op == "call_function" and node.target in _ADDS or node.op == "call_method" and node.target in ("add", "add_")
    others = [one for one in node.args if one is not value]
    if (node.target is operator.iadd or node.target == "add_") and node.args[0] is not value:
        # It is the addend that is written, and others may read it.
        return None
    # Another way to the value may not be through the sum itself, and a number is no tensor.
    return others[0] if is_sum and len(others) == 1 and isinstance(others[0], fx.Node) else None


def _mlp_chain(holder, node):
    """The chain of two linear layers that begins at a node: (its nodes, what is called, its arguments before and behind the input), or None."""
    if type(holder.part(node)) is not nn.Linear:
        return None
    nodes, dropped = [node, _only_reader(node)], None
    activation = _activation(holder, nodes[1])
    if activation is None:
        return None
    after = _only_reader(nodes[1])
    if type(holder.part(after)) in _DROPOUTS:
        dropped, after = after, _only_reader(after)
        nodes.append(dropped)
    if type(holder.part(after)) is not nn.Linear:
        return None
    nodes.append(after)
    return nodes, mlp, (_held(node), activation, None if dropped is None else _held(dropped), _held(after)), ()


def _held(node):
    """A module that a chain takes, by its name."""
    return ("get_attr", node.target)


def _conv_chain(holder, node):
    """The chain that begins with a convolution: (its nodes, what is called, its arguments before and behind the input), or None."""
    conv = holder.part(node)
    if type(conv) not in _CONVS or conv.padding_mode != "zeros":
        return None
    second = _only_reader(node)
    norm = holder.part(second)
    if type(norm) not in _NORMS or not norm.track_running_stats:
        return None
    nodes, addend, activation = [node, second], None, ""
    after = _only_reader(second)
    added = _addend(after, second)
    if added is not None:
        behind = _only_reader(after)
        # The sum alone is worth it too: it is one pass less over the result.
        nodes, addend, after = [*nodes, after], added, behind
    found = _activation(holder, after)
    if found is not None:
        nodes, activation = [*nodes, after], found
    behind = () if addend is None else (addend,)
    return nodes, conv_norm, (_held(node), _held(second), activation), behind


def _names(nodes):
    words = [node.target if node.op == "call_module" else getattr(node.target, "__name__", str(node.target)) for node in nodes]
    return " + ".join(words)


def _place(value):
    """Where a global of generated code is found again: a module, something in one, or the value itself."""
    if isinstance(value, types.ModuleType):
        return "module", value.__name__, ""
    if hasattr(value, "__qualname__") and hasattr(value, "__module__"):
        return "name", value.__module__, value.__qualname__
    return "value", value, ""


def _found(kind, first, name):
    if kind == "value":
        return first
    found = importlib.import_module(first)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


def _reduce(self, protocol):
    # The class has no name that a reader could find it by: it is made anew there.
    return _restored, self._chained, self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__


def _class_of(kind, source, places, names=None):
    """The class derived from one, with the forward whose source this is. `names` are those of the modules of a `Sequential`, whose forward is another one's as soon as
    it holds others."""
    scope = {name: _found(*place) for name, place in places.items()}
    exec(compile(source, f"<chains of {kind.__qualname__}>", "exec"), scope)
    body = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    body.update(forward=scope["forward"], _chained=(kind, source, places, names), __reduce_ex__=_reduce)
    if names is not None:
        body.update(forward=_as_long_as_it_holds(names, scope["forward"], kind.forward), __getitem__=_item)
    return type(kind.__name__, (kind,), body)


def _as_long_as_it_holds(names, chained, plain):
    """The forward of a `Sequential` that may be edited."""

    def forward(self, input):
        return chained(self, input) if tuple(self._modules) == names else plain(self, input)

    return forward


def _item(self, index):
    """As `Sequential` has it. A part of it is of the class that it was before: chains are those of the whole."""
    kind = self._chained[0]
    return kind(collections.OrderedDict(list(self._modules.items())[index])) if isinstance(index, slice) else kind.__getitem__(self, index)


def _restored(*chained):
    derived = _class_of(*chained)
    return derived.__new__(derived)


def _derived(module, graph):
    """The module's class with the graph's forward."""
    code = graph.python_code("self")
    used = {node.id for node in ast.walk(ast.parse(code.src)) if isinstance(node, ast.Name)}
    names = tuple(module._modules) if type(module).forward is torch.nn.Sequential.forward else None
    return _class_of(type(module), code.src, {name: _place(value) for name, value in code.globals.items() if name in used}, names)


def _may_write(module, node):
    """Whether a node may change a tensor that it reads."""
    if node.op == "call_module":
        return any(getattr(inner, "inplace", False) for inner in module.get_submodule(node.target).modules())
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__") or name in ("iadd", "isub", "imul", "itruediv", "setitem")
    return node.op in ("call_method", "call_function") and (is_in_place or bool(node.kwargs.get("inplace")))


def _is_disturbed(module, graph, nodes):
    """Whether something between the first and the last node of a chain may change what the convolution reads: it reads it later then."""
    order = list(graph.nodes)
    between = order[order.index(nodes[0]) + 1 : order.index(nodes[-1])]
    return any(node not in nodes and _may_write(module, node) for node in between)


def chain(model, skip=(), left=frozenset()):
    """Makes each chain of a network's modules one call, but those that hold a module of `left`. Returns them by the name of the module that holds them."""
    found = {}
    for name, module in model.named_modules():
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in skip) or not any(True for _ in module.children()):
            continue
        if "forward" in vars(module) or hasattr(module, "_chained") or isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
            continue
        kinds = [type(child) for child in module.children()]
        if not any(kind in _NORMS for kind in kinds) and kinds.count(nn.Linear) < 2:
            continue
        graph = _traced(module)
        if graph is None:
            continue
        chains, taken, holder = [], set(), _Holder(module, left)
        for node in list(graph.nodes):
            one = None if node in taken else _conv_chain(holder, node) or _mlp_chain(holder, node)
            if one is None or _is_disturbed(module, graph, one[0]):
                continue
            nodes, function, before, behind = one
            chains.append(_names(nodes))
            taken.update(nodes)
            last = nodes[-1]
            with graph.inserting_before(last):
                before = [graph.create_node(*part) if isinstance(part, tuple) else part for part in before]
                together = graph.call_function(function, (*before, nodes[0].args[0], *behind))
            last.replace_all_uses_with(together)
            for node in reversed(nodes):
                graph.erase_node(node)
        if chains:
            module.__class__ = _derived(module, graph)
            found[name] = chains
    return found
