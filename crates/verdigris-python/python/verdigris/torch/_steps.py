"""What PyTorch's ops are in the language of epilogues: a table of ops that may stand behind a product as a step of it.

A step reads one value, and beside it at most one tensor. What a compiler would write as several ops on one value (GELU, Mish) is a step only while it is one op: the
decompositions of `HELD` are held back until the steps are found.
"""

import math

import torch

aten = torch.ops.aten


def _number(value):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return repr(float(value)) if is_number and math.isfinite(value) else None


def _with(words, **numbers):
    """Words with numbers behind them; None where one is no finite number."""
    numbers = {name: _number(value) for name, value in numbers.items()}
    if None in numbers.values():
        return None
    return words + "".join(f" {name}={value}" for name, value in numbers.items())


def _gelu(a):
    return "gelu_tanh" if a["approximate"] == "tanh" else "gelu_erf"


def _leaky_relu(a):
    return _with("leaky_relu", slope=a["negative_slope"])


def _scaled(words, scale):
    """A function with a factor behind it, as two steps."""
    factor = _with("f=affine", scale=scale, shift=0.0)
    return words if scale == 1 or words is None else factor and f"{words};{factor}"


def _elu(a):
    """`scale * x` above 0, else `scale * alpha * (e^(input_scale * x) - 1)`: SELU has the first factor, CELU the second."""
    inner = a["input_scale"]
    if inner == 1:
        return _scaled(_with("elu", alpha=a["alpha"]), a["scale"])
    if _number(inner) is None or inner <= 0:
        return None
    narrow, bent = _with("affine", scale=inner, shift=0.0), _with("f=elu", alpha=a["alpha"] * inner)
    return narrow and bent and _scaled(f"{narrow};{bent}", a["scale"] / inner)


def _celu(a):
    alpha = a["alpha"]
    return _elu({"alpha": alpha, "scale": 1, "input_scale": 1 / alpha}) if _number(alpha) is not None and alpha > 0 else None


def _hardtanh(a):
    return _with("clamp", lower=a["min_val"], upper=a["max_val"])


def _softplus(a):
    # A step has no threshold. Where e^-threshold is lost beside 1 in the type that is computed in, neither the result nor the gradient, which is the sigmoid, shows it.
    wide = torch.float64 if a["self"].meta["val"].dtype == torch.float64 else torch.float32
    least = -math.log(torch.finfo(wide).eps / 2)
    is_bent = isinstance(a["threshold"], (int, float)) and a["threshold"] >= least and isinstance(a["beta"], (int, float)) and a["beta"] > 0
    return _with("softplus", beta=a["beta"]) if is_bent else None


def _plainly(name):
    return lambda a: name


#: Functions of one value: the name of the function with its attributes, from the op's arguments.
_UNARY = {
    **{getattr(aten, name).default: _plainly(name) for name in ("relu", "neg", "abs", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "reciprocal", "erf")},
    **{getattr(aten, name).default: _plainly(ours) for name, ours in (("silu", "silu"), ("hardswish", "hard_swish"), ("hardsigmoid", "hard_sigmoid"), ("mish", "mish"))},
    aten.gelu.default: _gelu,
    aten.leaky_relu.default: _leaky_relu,
    aten.elu.default: _elu,
    aten.celu.default: _celu,
    aten.hardtanh.default: _hardtanh,
    aten.softplus.default: _softplus,
}


def _threshold(a):
    # Whether a value of ReLU is above 0 is the same in front of it and behind it.
    return "relu" if a["threshold"] == 0 else None


def _leaky_relu_gradient(a):
    return None if a["self_is_result"] else _leaky_relu(a)


def _elu_gradient(a):
    # The slope is that of the tensor beside it, which no step stands in front of.
    return None if a["is_result"] or a["input_scale"] != 1 else _elu(a)


#: Gradients of such functions: the name of the argument beside the gradient, and the function.
_BACKWARD = {
    aten.threshold_backward.default: ("self", _threshold),
    aten.gelu_backward.default: ("self", _gelu),
    aten.silu_backward.default: ("self", _plainly("silu")),
    aten.hardswish_backward.default: ("self", _plainly("hard_swish")),
    aten.hardsigmoid_backward.default: ("self", _plainly("hard_sigmoid")),
    aten.mish_backward.default: ("self", _plainly("mish")),
    aten.leaky_relu_backward.default: ("self", _leaky_relu_gradient),
    aten.elu_backward.default: ("self_or_result", _elu_gradient),
    aten.hardtanh_backward.default: ("self", _hardtanh),
    aten.softplus_backward.default: ("self", _softplus),
}

#: Functions of two.
_BINARY = {aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div", aten._prelu_kernel.default: "prelu"}

#: What stands in decomposition tables and is a step while it is whole.
HELD = frozenset((*_UNARY, *_BACKWARD, aten._prelu_kernel.default)) - {aten.relu.default}

#: Element types that values may have.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def arguments(node):
    """The arguments of an op's node by name, those that are left out included."""
    named = {argument.name: argument.default_value for argument in node.target._schema.arguments if argument.has_default_value()}
    named.update((argument.name, value) for argument, value in zip(node.target._schema.arguments, node.args))
    named.update(node.kwargs)
    return named


def _affine(scale, shift):
    return _with("f=affine", scale=scale, shift=shift)


def _with_number(name, number, is_right):
    """A function of a value and a number; `is_right`: the value is the right operand."""
    if _number(number) is None:
        return None
    if name == "add":
        return _affine(1.0, number)
    if name == "mul":
        return _affine(number, 0.0)
    if name == "sub":
        return _affine(-1.0, number) if is_right else _affine(1.0, -number)
    if name == "div" and not is_right and number != 0 and math.isfinite(1.0 / number):
        return _affine(1.0 / number, 0.0)
    return None


def step(node, value):
    """The step that a node is behind a value: its words, and the node of the tensor beside it, or None where it reads no other; None if it is none."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    target = node.target
    if target is torch.ops.prims.convert_element_type.default:
        return ("f=identity", None) if node.args[0] is value and node.args[1] in FLOATS else None
    if target is aten.clone.default:
        # What dropout that drops nothing leaves behind; a copy into another memory format is none.
        is_alike = arguments(node)["memory_format"] in (None, torch.preserve_format)
        return ("f=identity", None) if node.args[0] is value and is_alike else None
    if target in _UNARY:
        words = _UNARY[target](arguments(node))
        return (f"f={words}", None) if words and node.args[0] is value else None
    if target in _BACKWARD:
        named = arguments(node)
        beside, told = _BACKWARD[target]
        words, other = told(named), named[beside]
        is_value = node.args[0] is value and other is not value
        return (f"d={words}", other) if words and is_value and isinstance(other, torch.fx.Node) else None
    if target in _BINARY:
        return _of_two(node, value, _BINARY[target])
    return None


def _of_two(node, value, name):
    left, right = node.args[:2]
    if arguments(node).get("alpha", 1) != 1 or left is right:
        return None
    is_right = right is value
    if is_right and name == "prelu":
        # Of slopes there is no such step.
        return None
    other = left if is_right else right
    if isinstance(other, torch.fx.Node):
        return f"b={name}" + (" value=right" if is_right and name in ("sub", "div") else ""), other
    words = _with_number(name, other, is_right)
    return None if words is None else (words, None)
