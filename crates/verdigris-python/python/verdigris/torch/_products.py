"""PyTorch's own convolutions and products in a compiler's graph, made this package's: what `Compiler(products=True)` asks for."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import _fusion, _ops, _steps

aten = torch.ops.aten
_ours = torch.ops.verdigris


def _suits(*nodes):
    """Whether tensors are of one type that products are computed in, and on one device."""
    values = [_fusion._value(node) for node in nodes if node is not None]
    first = values[0]
    is_known = all(isinstance(value, FakeTensor) and value.dtype in _steps.FLOATS for value in values)
    return is_known and all(value.dtype == first.dtype and value.device == first.device for value in values)


def _words(a):
    """The attributes of a convolution, from the arguments of ATen's; None where sizes are no numbers."""
    lists = (a["stride"], a["padding"], a["dilation"])
    spatial = len(_fusion._value(a["weight"]).shape) - 2
    if not all(isinstance(value, int) for one in lists for value in one):
        return None
    stride, padding, dilation = (tuple(one) * spatial if len(one) == 1 else tuple(one) for one in lists)
    from .functional import conv_attributes

    return conv_attributes(spatial, stride, padding, dilation, a["groups"])


def _call(graph, node, target, arguments):
    """A call of ours in front of a node, with what it gives."""
    with graph.inserting_before(node):
        made = graph.call_function(target, arguments)
    fake = torch.fx.node.map_arg(arguments, _fusion._value)
    with _fusion._value(arguments[0]).fake_mode:
        value = target(*fake)
    made.meta = {**node.meta, "val": value}
    return made


def _lies_alike(made, node):
    """Whether our result has the strides of ATen's: views behind it were traced with those."""
    return _fusion._same_all(_fusion._value(made).stride(), _fusion._value(node).stride())


def _convolution(graph, node):
    a = _steps.arguments(node)
    words = _words(a) if not a["transposed"] and _suits(a["input"], a["weight"], a["bias"]) else None
    if words is None:
        return None
    made = _call(graph, node, _ours.conv_fprop.default, (a["input"], a["weight"], a["bias"], words))
    return made if _lies_alike(made, node) else None


_ORDERS = (aten.permute.default, aten.transpose.int)


def _is_turn(node):
    """Whether an order of the two dims of a matrix is the other one than they have."""
    dims = node.args[1] if node.target is aten.permute.default else node.args[1:3]
    places = [dim % 2 for dim in dims]
    return places == [1, 0] if node.target is aten.permute.default else places[0] != places[1]


def _turned(graph, node, matrix):
    """A matrix's transpose: the tensor itself where it is one already."""
    if matrix.op == "call_function" and (matrix.target is aten.t.default or matrix.target in _ORDERS and _is_turn(matrix)):
        return matrix.args[0]
    return _call(graph, node, aten.permute.default, (matrix, [1, 0]))


def _product(graph, node):
    if node.kwargs:
        return None
    bias, a, b = node.args if node.target is aten.addmm.default else (None, *node.args)
    if not _suits(a, b, bias) or bias is not None and len(_fusion._value(bias).shape) != 1:
        return None
    if bias is not None and not _fusion._same(_fusion._value(bias).shape[0], _fusion._value(b).shape[1]):
        return None
    whole = _unfolded(a, node)
    if whole is not None:
        # A linear layer of several leading dims, which ATen computes as a matrix: the views around it go.
        shape, outer = whole
        made = _call(graph, outer, _ours.linear.default, (shape, _turned(graph, outer, b), bias, ""))
        return (made, outer) if _lies_alike(made, outer) else None
    return _call(graph, node, _ours.linear.default, (a, _turned(graph, node, b), bias, ""))


_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def _unfolded(a, node):
    """The tensor that a matrix is a view of, and the view of the product with its leading dims; None where there are none."""
    outer = next(iter(node.users)) if len(node.users) == 1 else None
    if a.op != "call_function" or a.target not in _VIEWS or outer is None or outer.target not in _VIEWS:
        return None
    tensor, made = _fusion._value(a.args[0]), _fusion._value(outer)
    is_whole = len(tensor.shape) > 2 and len(made.shape) == len(tensor.shape) and _fusion._same(tensor.shape[-1], _fusion._value(a).shape[-1])
    return (a.args[0], outer) if is_whole and _fusion._same_all(tensor.shape[:-1], made.shape[:-1]) else None


def _gradients(graph, node):
    """The gradients of a convolution, each where it is read."""
    a = _steps.arguments(node)
    if a["transposed"] or not _suits(a["grad_output"], a["input"], a["weight"]):
        return None
    words = _words(a)
    if words is None:
        return None
    readers = {reader.args[1]: reader for reader in node.users}
    if len(readers) != len(node.users):
        return None
    tensors, made = (a["grad_output"], a["input"], a["weight"], None, None, None), {}
    spatial = range(2, len(_fusion._value(a["weight"]).shape))
    for place, reader in readers.items():
        if place == 2:
            # Of the bias: what a compiler makes of it by itself, so that it is fused with what stands around.
            call = _call(graph, node, aten.sum.dim_IntList, (a["grad_output"], [0, *spatial]))
        else:
            call = _call(graph, node, _ours.gradient.default, (*tensors, f"of=conv_fprop wrt={place}|{words}", []))
        call.meta = {**reader.meta, "val": call.meta["val"]}
        if not _lies_alike(call, reader):
            return None
        made[place] = call
    for place, reader in readers.items():
        reader.replace_all_uses_with(made[place])
        graph.erase_node(reader)
    graph.erase_node(node)
    return made


def take(graph):
    """Takes over what can be, and says how many calls that were and which stay, with the reason."""
    count, stays = 0, []
    rules = {aten.convolution.default: _convolution, aten.mm.default: _product, aten.addmm.default: _product}
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.users:
            continue
        if node.target is aten.convolution_backward.default:
            made = _gradients(graph, node)
        elif node.target in rules:
            made = rules[node.target](graph, node)
            made, replaced = made if isinstance(made, tuple) else (made, node)
            if made is not None:
                replaced.replace_all_uses_with(made)
                graph.erase_node(replaced)
                if replaced is not node:
                    graph.erase_node(node)
        else:
            continue
        if made is None:
            stays.append(f"`{node}` ({node.target}) stays: its tensors are not of one floating-point type and device, or it is transposed, or its result would lie in another memory format")
        else:
            count += 1
    graph.eliminate_dead_code()
    return count, stays
