"""Chains of a network's modules that are computed together: what `convert` finds, and what it makes of them.

A chain is a convolution, the batch normalization behind it, and where they follow, the addition of a residual and an activation. In inference it is one
call (`torch.ops.verdigris.conv_norm`): the normalization is a product and a sum in the convolution's epilogue. Where the normalization trains and
gradients are recorded, it is one call too (`conv_batch_norm`), with one node of autograd, if what is behind the normalization is an activation, or a sum of like tensors with
ReLU or nothing behind it, and the convolution has no bias. Else the convolution is a call, and the normalization with what is behind it another, or the modules are called as they stand.

What a chain is made of is read at each call: classes, options, hooks, a `forward` that was set on an instance. Where a part is not what it was, the modules are called
one by one.

Two linear layers with an activation between them, and dropout that drops nothing, are a chain too: the feed-forward half of a transformer's block. It is one
call, in training one node of autograd, and the activation is a step of the products.

A chain is found in the `forward` of the module that holds its parts, which is read from its source (`_forwards`) with all modules below it opaque; one that has something else than
what is read stays as it is. All but the chains is called as it stands, in its order. A chain is computed where its last node stands: what stands between its nodes must be known to neither
write what it reads nor read what it writes, or the chain ends before. Module tree, parameters and `state_dict` stay as they are; what changes is the `forward` of the holding module, by a class
of its own that is derived from the former one.
"""

import abc
import ast
import collections
import contextlib
import importlib
import operator
import types

import torch
from torch import fx

from . import _forwards, _ops, functional, nn

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_ADDS = {operator.add, torch.add}

#: Functions that are activations, with what the operators call them.
_FUNCTIONS = {
    **dict.fromkeys((torch.relu, torch.relu_, torch.nn.functional.relu, torch.nn.functional.relu_, functional.relu), "f=relu"),
    **dict.fromkeys((torch.nn.functional.relu6, functional.relu6), "f=clamp lower=0.0 upper=6.0"),
    **dict.fromkeys((torch.nn.functional.silu, functional.silu), "f=silu"),
    **dict.fromkeys((torch.nn.functional.hardswish, functional.hardswish), "f=hard_swish"),
}

#: Modules that are activations, with what the operators call them; None where a function that has a kernel of its own computes what the module's options say.
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
    torch.nn.CELU: lambda m: "f=elu alpha=1.0" if m.alpha == 1 else None,
    torch.nn.Threshold: lambda m: "f=relu" if m.threshold == 0 and m.value == 0 else None,
    torch.nn.RReLU: lambda m: None if m.training else f"f=leaky_relu slope={(m.lower + m.upper) / 2!r}",
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
    if not isinstance(addend, torch.Tensor):
        return False
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


def _is_behind(word, addend):
    """Whether a normalization that trains takes what stands behind it: any activation, behind a sum ReLU alone."""
    return word is not None and (addend is None or word in ("", "f=relu"))


def _activated(y, activation, word, is_fresh):
    """The activation of a value. With `is_fresh` nobody else has the value, so that what works in place may as well make a new one: in place PyTorch first copies what a
    gradient needs."""
    if isinstance(activation, str):
        word = activation
    elif not (word and is_fresh and isinstance(y, torch.Tensor)):
        return activation(y)
    return _ops.activation(y, word) if word else y


def conv_norm(conv, norm, activation, x, addend=None, is_in_place=False):
    """A chain: `f(norm(conv(x)) + addend)`, `activation` being f as a module, or what the operators call it, or empty. A sum in place has the dims and the type of what it is added to."""
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
        # Without output channels it is an error that the convolution raises.
        and not _ops.has_no_outputs(conv.weight)
        and conv.padding_mode == "zeros"
        and conv._attributes
        and not (is_eager and (_is_watched(conv) or _is_watched(norm)))
    )
    if is_whole:
        takes_gradient = _ops.is_recorded()
        is_one_call = not (norm.training or takes_gradient) and norm.running_mean is not None
        if is_one_call and (addend is None or _is_alike(conv, x, addend)):
            norm._check_input_dim(x)
            attributes = _attributes(conv._attributes, norm.eps, word)
            return _ops.conv_norm(x, conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias, addend, attributes)
        is_one_node = (
            norm.training
            and takes_gradient
            and norm.__class__ in _OWN_NORMS
            and _is_behind(word, addend)
            and norm.momentum is not None
            and conv.bias is None
            and x.shape[0] != 0
        )
        if is_one_node and (addend is None or _is_alike(conv, x, addend)):
            return functional.conv_batch_norm_modules(conv, norm, x, addend, word)
    y = conv(x)
    is_two_calls = norm.__class__ in _OWN_NORMS and _is_behind(word, addend) and isinstance(y, torch.Tensor) and not (is_eager and _is_watched(norm))
    if is_two_calls and (addend is None or isinstance(addend, torch.Tensor) and addend.dtype == y.dtype and addend.shape == y.shape):
        return functional.batch_norm_module(norm, y, addend, word)
    y = norm(y)
    if addend is not None:
        y = operator.iadd(y, addend) if is_in_place else y + addend
    return _activated(y, activation, word, addend is not None or norm.__class__ in _NORMS)


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


def _sequence(module):
    """The graph of a `Sequential`, whose own forward is a loop, and what holds as long as it is."""
    graph = fx.Graph()
    value = graph.placeholder("input")
    # A module that stands in it twice is called twice.
    for name in module._modules:
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph, [f"tuple(self._modules) == {tuple(module._modules)!r}"]


def _read(module, files):
    """The graph of a module's forward with its conditions, or None."""
    if type(module).forward is torch.nn.Sequential.forward:
        return _sequence(module)
    reader = _forwards.read(module, files)
    return None if reader is None else (reader.graph, list(reader.conditions))


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
    word = _FUNCTIONS.get(node.target) if node.op == "call_function" else None
    if node.op == "call_method" and node.target in ("relu", "relu_"):
        word = "f=relu"
    # An attribute's name is no activation, and neither is a value that tells whether it works in place.
    is_plain = isinstance(node.args[0], fx.Node) and not any(isinstance(one, fx.Node) for one in node.args[1:])
    return word if is_plain and set(node.kwargs) <= {"inplace"} else None


def _addend(node, value):
    """What a node adds to a value, and whether in place; None if it is no plain sum of two values."""
    if node is None or node.kwargs:
        return None
    arguments, is_in_place = node.args, node.target == "add_"
    is_sum = node.op == "call_function" and node.target in _ADDS or node.op == "call_method" and node.target in ("add", "add_")
    if node.target is _forwards.augmented:
        is_sum, is_in_place, arguments = arguments[0] == "iadd", True, arguments[1:]
    if not is_sum or len(arguments) != 2 or is_in_place and arguments[0] is not value:
        # In place of the addend it is that which is written, and others may read it.
        return None
    others = [one for one in arguments if one is not value]
    # Another way to the value may not be through the sum itself, and a number is no tensor.
    return (others[0], is_in_place) if len(others) == 1 and isinstance(others[0], fx.Node) else None


def _mlp_chain(holder, node):
    """The chains of two linear layers that begin at a node, the longest first: (its nodes, what is called, its arguments before and behind the input)."""
    if type(holder.part(node)) is not nn.Linear:
        return
    nodes, dropped = [node, _only_reader(node)], None
    activation = _activation(holder, nodes[1])
    if activation is None:
        return
    after = _only_reader(nodes[1])
    if type(holder.part(after)) in _DROPOUTS:
        dropped, after = after, _only_reader(after)
        nodes.append(dropped)
    if type(holder.part(after)) is nn.Linear:
        nodes.append(after)
        yield nodes, mlp, (_held(node), activation, None if dropped is None else _held(dropped), _held(after)), ()


def _held(node):
    """A module that a chain takes, by its name."""
    return ("get_attr", node.target)


def _conv_chain(holder, node):
    """The chains that begin with a convolution, the longest first: (its nodes, what is called, its arguments before and behind the input)."""
    conv = holder.part(node)
    if type(conv) not in _CONVS or conv.padding_mode != "zeros":
        return
    second = _only_reader(node)
    norm = holder.part(second)
    if type(norm) not in _NORMS or not norm.track_running_stats:
        return
    before = _held(node), _held(second)
    nodes, behind, after = [node, second], (), _only_reader(second)
    added = _addend(after, second)
    if added is not None:
        # The sum alone is worth it too: it is one pass less over the result.
        nodes, behind, after = [*nodes, after], added if added[1] else added[:1], _only_reader(after)
    found = _activation(holder, after)
    if found is not None:
        yield [*nodes, after], conv_norm, (*before, found), behind
    yield nodes, conv_norm, (*before, ""), behind
    if behind:
        yield nodes[:2], conv_norm, (*before, ""), ()


def _name(node):
    if node.op == "call_module":
        return node.target
    return node.args[0][1:] if node.target is _forwards.augmented else getattr(node.target, "__name__", str(node.target))


def _place(value):
    """Where a global of generated code is found again: a module, something in one, or the value itself."""
    if isinstance(value, types.ModuleType):
        return "module", value.__name__, ""
    room, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(room, str) and isinstance(name, str):
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            if _found("name", room, name) is value:
                return "name", room, name
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


#: How generated code names the forward that it stands for.
_AS_WRITTEN = "__as_written"


def _class_of(kind, source, places):
    """The class derived from one, with the forward whose source this is."""
    scope = {name: _found(*place) for name, place in places.items()}
    scope[_AS_WRITTEN] = kind.forward
    exec(compile(source, f"<chains of {kind.__qualname__}>", "exec"), scope)
    body = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    body.update(forward=scope["forward"], _chained=(kind, source, places), __reduce_ex__=_reduce)
    if kind.forward is torch.nn.Sequential.forward:
        body["__getitem__"] = _item
    return _unannounced(kind, body)


class _Unannounced(torch.nn.Module):
    """In front of a class of modules it keeps what that does with each class derived from it from being done. A module, so that instances are laid out in memory as those are."""

    def __init_subclass__(cls, **words):
        pass


def _unannounced(kind, body):
    """A class derived from one, of which neither that nor its metaclass is told: it stands in the other's place, and in a program's registry of its classes it would be one
    too many."""
    metaclass = type(kind)
    # Of metaclasses the first whose instances need what it makes of each; a program's own stand in front of it.
    maker = next(base for base in metaclass.__mro__ if base in (abc.ABCMeta, type))
    derived = maker.__new__(metaclass, kind.__name__, (_Unannounced, kind), body)
    derived.__bases__ = (kind,)
    return derived


def _item(self, index):
    """As `Sequential` has it. A part of it is of the class that it was before: chains are those of the whole."""
    kind = self._chained[0]
    return kind(collections.OrderedDict(list(self._modules.items())[index])) if isinstance(index, slice) else kind.__getitem__(self, index)


def _restored(*chained):
    derived = _class_of(*chained)
    return derived.__new__(derived)


def _derived(module, graph, conditions):
    """The module's class with the graph's forward, which as soon as a condition no longer holds is the one that was read."""
    code = graph.python_code("self")
    tree = ast.parse(code.src)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if conditions:
        forward = next(one for one in tree.body if isinstance(one, ast.FunctionDef))
        given = ", ".join(one.arg for one in forward.args.args)
        holds = " and ".join(f"({condition})" for condition in conditions)
        forward.body[:0] = ast.parse(f"if not ({holds}):\n    return {_AS_WRITTEN}({given})").body
    places = {name: _place(value) for name, value in code.globals.items() if name in used}
    return _class_of(type(module), ast.unparse(ast.fix_missing_locations(tree)), places)


# What stands between the first and the last node of a chain comes before all of it then. It may be no more than what is known to write nothing that the chain reads, and to read
# nothing that the chain writes.

_F = torch.nn.functional
_PURE_MODULES = {*nn.CLASSES, *nn.CLASSES.values(), torch.nn.Sequential, torch.nn.Identity, torch.nn.Flatten, torch.nn.Unflatten}
_PURE_FUNCTIONS = {
    *_forwards.OPERATORS,
    *(getattr, _forwards.unpacked, _forwards.listed),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.cat, torch.concat, torch.stack, torch.flatten, torch.reshape, torch.permute, torch.transpose),
    *(torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, torch.mean, torch.sum, torch.relu, torch.sigmoid, torch.tanh, torch.softmax),
    *(_F.avg_pool2d, _F.adaptive_avg_pool2d, _F.interpolate, _F.pad, _F.gelu, _F.softmax, _F.linear),
}
#: Functions whose other arguments say that they work in place.
_PURE_BY_DEFAULT = {_F.relu, _F.relu6, _F.silu, _F.hardswish, _F.hardsigmoid, _F.leaky_relu, _F.elu, _F.mish}
_PURE_METHODS = {
    *("add", "sub", "mul", "div", "matmul", "flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "chunk", "split", "expand", "contiguous"),
    *("mean", "sum", "relu", "sigmoid", "tanh", "softmax", "float", "half", "bfloat16", "to", "size", "dim", "append"),
}


def _memory(tensors):
    """What identifies the memory of tensors; of one that has none of its own, None."""
    found = set()
    for tensor in tensors:
        try:
            found.add(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError, AttributeError):
            found.add(None)
    return found


def _state(parts):
    """The memory of modules: what they write, and all that they read."""
    written = _memory(buffer for part in parts for buffer in part.buffers())
    return written, written | _memory(parameter for part in parts for parameter in part.parameters())


def _meets(one, other):
    return bool(one & other) or None in one and bool(other) or None in other and bool(one)


def _parts_of(module, node):
    """The modules that a node calls, or those that a chain takes."""
    if node.op == "call_module":
        return [module.get_submodule(node.target)]
    if node.op == "call_function" and node.target in (conv_norm, mlp):
        return [module.get_submodule(one.target) for one in node.args if isinstance(one, fx.Node) and one.op == "get_attr" and one.meta.get("chained")]
    return []


def _is_pure(module, node):
    """Whether a node writes nothing but statistics of modules that it calls, and reads nothing but its arguments and them."""
    parts = _parts_of(module, node)
    if parts:
        every = [inner for part in parts for inner in part.modules()]
        kinds = [getattr(type(inner), "_chained", (type(inner),))[0] for inner in every]
        return all(kind in _PURE_MODULES for kind in kinds) and not any(getattr(inner, "inplace", False) or _is_watched(inner) for inner in every)
    if "out" in node.kwargs or node.kwargs.get("inplace", False) is not False:
        return False
    if node.op == "call_method":
        return node.target in _PURE_METHODS
    if node.op == "call_function":
        return node.target in _PURE_FUNCTIONS or node.target in _PURE_BY_DEFAULT and len(node.args) == 1
    return node.op == "get_attr"


def _is_disturbed(module, graph, nodes):
    """Whether a chain computed where its last node stands may see, or show others, something else than its nodes do where they stand."""
    order = list(graph.nodes)
    between = [node for node in order[order.index(nodes[0]) + 1 : order.index(nodes[-1])] if node not in nodes]
    if not between:
        return False
    if not all(_is_pure(module, node) for node in between) or any(node.op == "call_module" and type(module.get_submodule(node.target)) in _DROPOUTS for node in nodes):
        return True
    own = _state([part for node in nodes for part in _parts_of(module, node)])
    theirs = _state([part for node in between for part in _parts_of(module, node)])
    if _meets(own[0], theirs[1]) or _meets(own[1], theirs[0]):
        return True
    # Somebody may have a statistic by its name.
    for node in order:
        if node.op == "get_attr" and not node.meta.get("chained"):
            value = operator.attrgetter(node.target)(module)
            if isinstance(value, torch.Tensor) and _meets(own[0], _memory([value])):
                return True
            if not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
                return True
    return False


def chain(model, skip=(), left=frozenset()):
    """Makes each chain of a network's modules one call, but those that hold a module of `left`. Returns them by the name of the module that holds them."""
    found, files = {}, {}
    for name, module in model.named_modules():
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in skip) or not any(True for _ in module.children()):
            continue
        if "forward" in vars(module) or hasattr(module, "_chained") or isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
            continue
        kinds = [type(child) for child in module.children()]
        if not any(kind in _NORMS for kind in kinds) and kinds.count(nn.Linear) < 2:
            continue
        read = _read(module, files)
        if read is None:
            continue
        graph, conditions = read
        chains, taken, holder = [], set(), _Holder(module, left)
        for node in list(graph.nodes):
            if node in taken:
                continue
            one = next((one for one in (*_conv_chain(holder, node), *_mlp_chain(holder, node)) if not _is_disturbed(module, graph, one[0])), None)
            if one is None:
                continue
            nodes, function, before, behind = one
            chains.append(" + ".join(map(_name, nodes)))
            taken.update(nodes)
            last = nodes[-1]
            with graph.inserting_before(last):
                before = [graph.create_node(*part) if isinstance(part, tuple) else part for part in before]
                together = graph.call_function(function, (*before, nodes[0].args[0], *behind))
            for part in before:
                if isinstance(part, fx.Node):
                    part.meta["chained"] = True
            last.replace_all_uses_with(together)
            for node in reversed(nodes):
                graph.erase_node(node)
        if not chains:
            continue
        try:
            derived = _derived(module, graph, conditions)
        except (RuntimeError, AttributeError, TypeError, SyntaxError):
            # A function that no code finds a name for: the module stays as it is.
            continue
        module.__class__ = derived
        found[name] = chains
    return found
