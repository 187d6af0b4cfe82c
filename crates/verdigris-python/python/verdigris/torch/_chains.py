"""Chains of a network's modules that are computed together: what `convert` finds, and what it makes of them.

A chain is a convolution, the batch normalization behind it, and where they follow, the addition of a residual and an activation. In inference it is one
call (`torch.ops.verdigris.conv_norm`): the normalization is a product and a sum in the convolution's epilogue. Where the normalization trains and
gradients are recorded, it is one call too (`conv_batch_norm`), with one node of autograd, if what is behind the normalization is a sum of like tensors or
ReLU and the convolution has no bias. Else the convolution is a call, and the normalization with what is behind it another, or the modules are called as they stand.

Two linear layers with an activation between them, and dropout that drops nothing, are a chain too: the feed-forward half of a transformer's block. It is one
call, in training one node of autograd, and the activation is a step of the products.

A chain is found in the `forward` of the module that holds its parts, which is traced with all modules below it opaque. Only what a trace shows
exactly is traced: a `forward` whose decisions are about attributes of the module other than `training`. Module tree, parameters and `state_dict` stay
as they are; what changes is the `forward` of the holding module, by a class of its own that is derived from the former one.
"""

import ast
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
    """Whether somebody wants to see the module's inputs, results or gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or getattr(module, "_backward_pre_hooks", None)
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


def conv_norm(conv, norm, activation, x, addend=None):
    """A chain: `f(norm(conv(x)) + addend)`, `activation` being what the operators call f, or empty."""
    is_one_call = (
        not (norm.training or torch.is_grad_enabled())
        and conv.__class__ in _CONVS
        and norm.__class__ in _NORMS
        and norm.running_mean is not None
        and x.dim() == conv.weight.dim()
        and (_ops._is_compiling() or not (_is_watched(conv) or _is_watched(norm)))
    )
    if is_one_call and (addend is None or _is_alike(conv, x, addend)):
        attributes = _attributes(conv._attributes, norm.eps, activation)
        return _ops.conv_norm(x, conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias, addend, attributes)
    is_plain = norm.__class__ in _OWN_NORMS and activation in ("", "f=relu")
    is_one_node = (
        is_plain
        and norm.training
        and norm.momentum is not None
        and conv.bias is None
        and conv.__class__ in _CONVS
        and x.dim() == conv.weight.dim()
        and torch.is_grad_enabled()
        and (_ops._is_compiling() or not (_is_watched(conv) or _is_watched(norm)))
    )
    if is_one_node and (addend is None or _is_alike(conv, x, addend)):
        return functional.conv_batch_norm_modules(conv, norm, x, addend, "relu" if activation else None)
    y = conv(x)
    is_two_calls = is_plain and (_ops._is_compiling() or not _is_watched(norm))
    if is_two_calls and (addend is None or addend.dtype == y.dtype and addend.shape == y.shape):
        return functional.batch_norm_module(norm, y, addend, "relu" if activation else None)
    y = norm(y)
    if addend is not None:
        y = y + addend
    return _ops.activation(y, activation) if activation else y


def mlp(first, activation, dropout, second, x):
    """A chain: `second(dropout(f(first(x))))`, `activation` being what the operators call f; `dropout` may be None."""
    is_one_call = (
        first.__class__ is nn.Linear
        and second.__class__ is nn.Linear
        and (dropout is None or not dropout.training or dropout.p == 0.0)
        and x.dim() > 0
        and not (_ops._is_compiling() or _is_watched(first) or _is_watched(second) or dropout is not None and _is_watched(dropout))
    )
    if is_one_call:
        return _ops.mlp_in_mode(x, first.weight, first.bias, second.weight, second.bias, activation)
    y = _ops.activation(first(x), activation)
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
    # What may be the caller's tensor: `+=` changes it, and a trace has a new one instead.
    callers = {one.arg for one in tree.args.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            callers |= {target.id for target in node.targets if isinstance(target, ast.Name)}
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
    room = getattr(found, "__module__", None) or ""
    if room.split(".")[0] == "torch" or inspect.isbuiltin(found) and room.startswith(("torch", "_operator")):
        return not isinstance(found, type)
    return inspect.isroutine(found) and not inspect.isbuiltin(found) and _is_exact(inspect.unwrap(getattr(found, "__func__", found)), module, depth - 1)


def _sequence(module):
    """The graph of a `Sequential`, whose own forward is a loop."""
    graph = fx.Graph()
    value = graph.placeholder("input")
    for name, _ in module.named_children():
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph


def _traced(module):
    kind = type(module)
    if kind.forward is torch.nn.Sequential.forward:
        return _sequence(module)
    if not _is_exact(kind.forward, module):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer().trace(module)
    except Exception:  # whatever a forward does with what is no tensor; it stays as it is
        return None


def _only_reader(node):
    return next(iter(node.users)) if len(node.users) == 1 else None


def _module_of(module, node):
    if node is None or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return module.get_submodule(node.target)


def _activation(module, node):
    """What the operators call the activation that a node is; None if it is none."""
    found = _module_of(module, node)
    if found is not None:
        if type(found).__module__ == nn.__name__ and "_word" in vars(found) and not _is_watched(found):
            return found._word
        kind = next((kind for kind in type(found).__mro__ if kind in _ACTIVATIONS), None)
        is_plain = kind is not None and type(found).forward in (kind.forward, nn.CLASSES[kind].forward) and not _is_watched(found)
        return _ACTIVATIONS[kind](found) if is_plain else None
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
    # Another way to the value may not be through the sum itself, and a number is no tensor.
    return others[0] if is_sum and len(others) == 1 and isinstance(others[0], fx.Node) else None


def _mlp_chain(module, node):
    """The chain of two linear layers that begins at a node: (its nodes, what is called, its arguments before and behind the input), or None."""
    first = _module_of(module, node)
    if type(first) is not nn.Linear or _is_watched(first):
        return None
    nodes, dropped = [node, _only_reader(node)], None
    activation = _activation(module, nodes[1])
    if activation is None:
        return None
    after = _only_reader(nodes[1])
    if type(_module_of(module, after)) in _DROPOUTS:
        dropped, after = after, _only_reader(after)
        nodes.append(dropped)
    second = _module_of(module, after)
    if type(second) is not nn.Linear or _is_watched(second):
        return None
    nodes.append(after)
    return nodes, mlp, (_held(node), activation, None if dropped is None else _held(dropped), _held(after)), ()


def _held(node):
    """A module that a chain takes, by its name."""
    return ("get_attr", node.target)


def _conv_chain(module, node):
    """The chain that begins with a convolution: (its nodes, what is called, its arguments before and behind the input), or None."""
    conv = _module_of(module, node)
    if type(conv) not in _CONVS or conv.padding_mode != "zeros" or _is_watched(conv):
        return None
    second = _only_reader(node)
    norm = _module_of(module, second)
    if type(norm) not in _NORMS or not norm.track_running_stats or _is_watched(norm):
        return None
    nodes, addend, activation = [node, second], None, ""
    after = _only_reader(second)
    added = _addend(after, second)
    if added is not None:
        behind = _only_reader(after)
        # The sum alone is worth it too: it is one pass less over the result.
        nodes, addend, after = [*nodes, after], added, behind
    found = _activation(module, after)
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


def _class_of(kind, source, places):
    """The class derived from one, with the forward whose source this is."""
    scope = {name: _found(*place) for name, place in places.items()}
    exec(compile(source, f"<chains of {kind.__qualname__}>", "exec"), scope)
    body = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**body, "forward": scope["forward"], "_chained": (kind, source, places), "__reduce_ex__": _reduce})


def _restored(kind, source, places):
    derived = _class_of(kind, source, places)
    return derived.__new__(derived)


def _derived(module, graph):
    """The module's class with the graph's forward."""
    code = graph.python_code("self")
    used = {node.id for node in ast.walk(ast.parse(code.src)) if isinstance(node, ast.Name)}
    return _class_of(type(module), code.src, {name: _place(value) for name, value in code.globals.items() if name in used})


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


def chain(model, skip=()):
    """Makes each chain of a network's modules one call. Returns them by the name of the module that holds them."""
    found = {}
    for name, module in model.named_modules():
        if any(name == left or name.startswith(f"{left}.") for left in skip) or not any(True for _ in module.children()):
            continue
        if "forward" in vars(module) or hasattr(module, "_chained") or isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
            continue
        kinds = [type(child) for child in module.children()]
        if not any(kind in _NORMS for kind in kinds) and kinds.count(nn.Linear) < 2:
            continue
        graph = _traced(module)
        if graph is None:
            continue
        chains, taken = [], set()
        for node in list(graph.nodes):
            one = None if node in taken else _conv_chain(module, node) or _mlp_chain(module, node)
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
