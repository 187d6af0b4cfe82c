"""The operators: definitions, kernels, shapes without data, gradients, autocast.

Each operator takes tensors, then its attributes as words (`stride=1,1 padding=0,0`; the native half documents them), then dims that are
no attribute because they may be symbolic. Words and not lists of integers, since the dispatcher takes more time over four lists than a kernel
takes to start.

A call goes one of two ways. Plain tensors outside of every mode go straight to the native half, and with a gradient through an
`autograd.Function`: that is what a model's eager step does, and it costs least. Everything else (compilation, fake tensors, subclasses, modes,
transforms, autocast, the profiler) goes through the dispatcher to the same kernels and the same formulas.
"""

import functools

import torch
from torch._prims_common import suggest_memory_format

from .. import _native
from .._errors import UnsupportedError
from . import _hooks  # noqa: F401

_library = torch.library.Library("verdigris", "DEF")
_namespace = torch.ops.verdigris
_CODES = {name: code for code, name in enumerate(_native.functions())}
_eager, _eager_past_autocast, _plain, _run = _native.eager, _native.eager_past_autocast, _native.plain, _native.run
_is_compiling = torch.compiler.is_compiling
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def cached(function):
    """Remembers results, but lets the compiler see the function itself."""
    remembered = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments) if _is_compiling() else remembered(*arguments)

    return call


@cached
def parse(attributes):
    """Attributes by name; lists of integers as tuples."""
    words = dict(word.split("=", 1) for word in attributes.split())
    lists = ("stride", "padding", "after", "dilation", "window", "adaptive")
    return {name: tuple(map(int, value.split(","))) if name in lists else value for name, value in words.items()}


def _register_fake(name, fake):
    """As `torch.library.register_fake`, which would look up the line of source of each, and so take most of the time of the import."""
    try:
        entry = torch._library.simple_registry.singleton.find(f"verdigris::{name}")
        entry.fake_impl.register(fake, __name__, lib=_library)
    except (AttributeError, TypeError):
        torch.library.register_fake(f"verdigris::{name}", fake, lib=_library)


def _operator(name, tensors, results, has_dims, fake, setup, backward, autocast=None):
    """Defines an operator, and returns the function that calls it by whichever way is open.

    The function's `again` computes a part of a gradient under the policy of the forward call.
    """
    code = _CODES[name]
    arguments = ", ".join([*tensors, "str attributes", *(["SymInt[] dims"] if has_dims else [])])
    _library.define(f"{name}({arguments}) -> {results}")

    def op(*inputs):
        # Looked up when it is wanted: an overload takes a tenth of a millisecond to make, and a process wants few of them.
        return getattr(_namespace, name).default(*inputs)

    def below_autograd(*inputs):
        output = _plain(code, None, *inputs)
        if output is NotImplemented:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
        return output

    def differentiable(compute):
        class Call(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                output = compute(*inputs)
                setup(ctx, inputs, output)
                return output

        Call.__name__ = Call.__qualname__ = f"Verdigris_{name}"
        Call.backward = staticmethod(backward)
        # The method of the base alone: what `Function.apply` adds serves transforms, which do not come here.
        return super(torch.autograd.Function, Call).apply

    # The first where the question whether the tensors are plain was asked before. Both are made when a gradient is first wanted.
    apply_plain = apply_any = None

    def make_plain():
        nonlocal apply_plain
        apply_plain = differentiable(functools.partial(_run, code))
        return apply_plain

    def make_any():
        nonlocal apply_any
        apply_any = differentiable(below_autograd)
        return apply_any

    def call(*inputs):
        if _is_compiling():
            return op(*inputs)
        output = _eager(code, *inputs)
        if output is None:
            return (apply_plain or make_plain())(*inputs)
        return op(*inputs) if output is NotImplemented else output

    def again(policy, *inputs):
        if not torch.is_grad_enabled():
            output = _plain(code, policy, *inputs)
            if output is not NotImplemented:
                return output
        return op(*inputs)

    def autograd(*inputs):
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            return (apply_any or make_any())(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def under_autocast(kind, *inputs):
        wanted = torch.float32 if autocast == "float32" else torch.get_autocast_dtype(kind)
        inputs = [_cast(value, wanted, kind) for value in inputs]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            output = _eager_past_autocast(code, *inputs)
            if output is None:
                return (apply_plain or make_plain())(*inputs)
            return op(*inputs) if output is NotImplemented else output

    for key in ("CPU", "CUDA"):
        _library.impl(name, functools.partial(_run, code), key)
        if autocast is not None:
            _library.impl(name, functools.partial(under_autocast, key.lower()), f"Autocast{key}")
    _library.impl(name, autograd, "Autograd")
    _register_fake(name, fake)
    call.again = again
    return call


def _cast(value, dtype, kind):
    is_wide_enough = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if is_wide_enough and value.device.type == kind else value


def _no_backward(ctx, *_):
    raise UnsupportedError(f"the gradient of verdigris::{ctx.what} is not differentiable once more")


def _setup_none(what):
    def setup(ctx, inputs, output):
        ctx.what = what

    return setup


def _is_channels_last(tensor):
    """Whether PyTorch calls a tensor so; of three dims, for which it has no word, by the same rule."""
    if tensor.dim() != 3:
        return tensor.dim() in (4, 5) and suggest_memory_format(tensor) != torch.contiguous_format
    (images, channels, _), (image, channel, pixel) = tensor.shape, tensor.stride()
    is_inside = channel != 0 and pixel >= channel * max(channels, 1) and image >= pixel * max(tensor.shape[2], 1)
    return is_inside and images != 0 and tensor.numel() != 0 and pixel * max(tensor.shape[2], 1) != channel


def _in_format(x, shape, is_last):
    """An empty tensor of that shape beside `x`."""
    if is_last and len(shape) == 3:
        return x.new_empty((shape[0], shape[2], shape[1])).transpose(1, 2)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    return x.new_empty(shape).to(memory_format=last if is_last else torch.contiguous_format)


def _like(x, shape, others=()):
    """An empty tensor of that shape, channels-last where one of the tensors is."""
    return _in_format(x, shape, any(tensor.dim() == len(shape) and _is_channels_last(tensor) for tensor in (x, *others)))


# Convolution: three functions, of which each is made of the other two when it is differentiated.


def _conv_fprop_fake(x, w, bias, attributes):
    a = parse(attributes)
    after = a.get("after", a["padding"])
    out = [
        (x.shape[i + 2] + a["padding"][i] + after[i] - (a["dilation"][i] * (w.shape[i + 2] - 1) + 1)) // a["stride"][i] + 1
        for i in range(x.dim() - 2)
    ]
    return _like(x, (x.shape[0], w.shape[0], *out), (w,))


def _conv_dgrad_fake(y, w, bias, attributes, dims):
    return _like(y, (y.shape[0], w.shape[1] * int(parse(attributes)["groups"]), *dims), (w,))


def _conv_wgrad_fake(x, y, attributes, dims):
    a = parse(attributes)
    shape = (y.shape[1], x.shape[1] // int(a["groups"]), *dims)
    if "format" not in a:
        return _like(x, shape, (y,))
    return _in_format(x, shape, a["format"] == "channels_last")


def _with_format(attributes, w):
    return f"{attributes} format={'channels_last' if _is_channels_last(w) else 'contiguous'}"


def _setup_conv(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.attributes, ctx.policy = inputs[3], _native.current_policy()


def _conv_fprop_backward(ctx, dy):
    x, w = ctx.saved_tensors
    needs, attributes, policy = ctx.needs_input_grad, ctx.attributes, ctx.policy
    dx = conv_dgrad.again(policy, dy, w, None, attributes, x.shape[2:]) if needs[0] else None
    dw = conv_wgrad.again(policy, x, dy, _with_format(attributes, w), w.shape[2:]) if needs[1] else None
    db = sum_to_axis.again(policy, dy, "axis=1") if needs[2] else None
    return dx, dw, db, None


def _conv_dgrad_backward(ctx, dx):
    y, w = ctx.saved_tensors
    needs, attributes, policy = ctx.needs_input_grad, ctx.attributes, ctx.policy
    dy = conv_fprop.again(policy, dx, w, None, attributes) if needs[0] else None
    dw = conv_wgrad.again(policy, dx, y, _with_format(attributes, w), w.shape[2:]) if needs[1] else None
    db = sum_to_axis.again(policy, dx, "axis=1") if needs[2] else None
    return dy, dw, db, None, None


def _setup_wgrad(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.attributes, ctx.policy = inputs[2].split(" format=")[0], _native.current_policy()


def _conv_wgrad_backward(ctx, dw):
    x, y = ctx.saved_tensors
    needs, attributes, policy = ctx.needs_input_grad, ctx.attributes, ctx.policy
    dx = conv_dgrad.again(policy, y, dw, None, attributes, x.shape[2:]) if needs[0] else None
    dy = conv_fprop.again(policy, x, dw, None, attributes) if needs[1] else None
    return dx, dy, None, None


def _sum_fake(x, attributes):
    return x.new_empty((x.shape[int(parse(attributes)["axis"])],))


def _setup_sum(ctx, inputs, output):
    ctx.shape, ctx.axis = inputs[0].shape, int(parse(inputs[1])["axis"])


def _sum_backward(ctx, g):
    return g.view([-1 if axis == ctx.axis else 1 for axis in range(len(ctx.shape))]).expand(ctx.shape), None


conv_fprop = _operator(
    "conv_fprop", ["Tensor x", "Tensor w", "Tensor? bias"], "Tensor", False, _conv_fprop_fake, _setup_conv, _conv_fprop_backward, "lower"
)
conv_dgrad = _operator(
    "conv_dgrad", ["Tensor y", "Tensor w", "Tensor? bias"], "Tensor", True, _conv_dgrad_fake, _setup_conv, _conv_dgrad_backward, "lower"
)
conv_wgrad = _operator("conv_wgrad", ["Tensor x", "Tensor y"], "Tensor", True, _conv_wgrad_fake, _setup_wgrad, _conv_wgrad_backward)
sum_to_axis = _operator("sum_to_axis", ["Tensor x"], "Tensor", False, _sum_fake, _setup_sum, _sum_backward)


# Linear layers: the same of products.


def _setup_pair(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.policy = _native.current_policy()


def _linear_fake(x, w, bias, attributes):
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _linear_backward(ctx, dy):
    x, w = ctx.saved_tensors
    needs, policy = ctx.needs_input_grad, ctx.policy
    dx = linear_input.again(policy, dy, w, "") if needs[0] else None
    dw = linear_weight.again(policy, dy, x, "") if needs[1] else None
    db = sum_to_axis.again(policy, dy, f"axis={dy.dim() - 1}") if needs[2] else None
    return dx, dw, db, None


def _linear_input_fake(dy, w, attributes):
    return dy.new_empty((*dy.shape[:-1], w.shape[1]))


def _linear_input_backward(ctx, dx):
    dy, w = ctx.saved_tensors
    needs, policy = ctx.needs_input_grad, ctx.policy
    ddy = linear.again(policy, dx, w, None, "") if needs[0] else None
    dw = linear_weight.again(policy, dy, dx, "") if needs[1] else None
    return ddy, dw, None


def _linear_weight_fake(dy, x, attributes):
    return dy.new_empty((dy.shape[-1], x.shape[-1]))


def _linear_weight_backward(ctx, dw):
    dy, x = ctx.saved_tensors
    needs, policy = ctx.needs_input_grad, ctx.policy
    ddy = linear.again(policy, x, dw, None, "") if needs[0] else None
    dx = linear_input.again(policy, dy, dw, "") if needs[1] else None
    return ddy, dx, None


linear = _operator(
    "linear", ["Tensor x", "Tensor w", "Tensor? bias"], "Tensor", False, _linear_fake, _setup_pair, _linear_backward, "lower"
)
linear_input = _operator("linear_input", ["Tensor dy", "Tensor w"], "Tensor", False, _linear_input_fake, _setup_pair, _linear_input_backward)
linear_weight = _operator(
    "linear_weight", ["Tensor dy", "Tensor x"], "Tensor", False, _linear_weight_fake, _setup_pair, _linear_weight_backward
)


# Pooling.


def pool_out(x_spatial, attributes):
    """The spatial dims of a pooling's result."""
    a = parse(attributes)
    if "adaptive" in a:
        return a["adaptive"]
    window, padding = a["window"], a.get("padding", (0,) * len(a["window"]))
    stride, after, dilation = a.get("stride", window), a.get("after", padding), a.get("dilation", (1,) * len(window))
    reach = [dilation[i] * (window[i] - 1) + 1 for i in range(len(window))]
    return tuple((x_spatial[i] + padding[i] + after[i] - reach[i]) // stride[i] + 1 for i in range(len(window)))


def _max_pool_fake(x, attributes):
    shape = (*x.shape[:2], *pool_out(x.shape[2:], attributes))
    index = torch.int64 if parse(attributes).get("index") == "i64" else torch.int32
    y = _like(x, shape)
    return y, torch.empty_like(y, dtype=index)


def _setup_max_pool(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.dims, ctx.attributes, ctx.policy = inputs[0].shape[2:], inputs[1], _native.current_policy()


def _max_pool_backward(ctx, dy, _):
    (index,) = ctx.saved_tensors
    return max_pool_backward.again(ctx.policy, dy, index, ctx.attributes, ctx.dims), None


def _max_pool_backward_fake(dy, index, attributes, dims):
    return _like(index, (*dy.shape[:2], *dims)).to(dy.dtype)


def _avg_pool_fake(x, attributes):
    return _like(x, (*x.shape[:2], *pool_out(x.shape[2:], attributes)))


def _setup_avg_pool(ctx, inputs, output):
    ctx.dims, ctx.attributes, ctx.policy = inputs[0].shape[2:], inputs[1], _native.current_policy()


def _avg_pool_backward(ctx, dy):
    return avg_pool_backward.again(ctx.policy, dy, ctx.attributes, ctx.dims), None


def _avg_pool_backward_fake(dy, attributes, dims):
    return _like(dy, (*dy.shape[:2], *dims))


def _avg_pool_backward_backward(ctx, g):
    return avg_pool.again(ctx.policy, g, ctx.attributes), None, None


max_pool = _operator("max_pool", ["Tensor x"], "(Tensor, Tensor)", False, _max_pool_fake, _setup_max_pool, _max_pool_backward)
max_pool_backward = _operator(
    "max_pool_backward",
    ["Tensor dy", "Tensor index"],
    "Tensor",
    True,
    _max_pool_backward_fake,
    _setup_none("max_pool_backward"),
    _no_backward,
)
avg_pool = _operator("avg_pool", ["Tensor x"], "Tensor", False, _avg_pool_fake, _setup_avg_pool, _avg_pool_backward)
avg_pool_backward = _operator(
    "avg_pool_backward", ["Tensor dy"], "Tensor", True, _avg_pool_backward_fake, _setup_avg_pool, _avg_pool_backward_backward
)


# Functions of elements.


def _activation_fake(x, attributes):
    return torch.empty_like(x)


def _setup_activation(ctx, inputs, output):
    # ReLU's derivative is told by its result as well, which the next layer keeps anyhow.
    ctx.save_for_backward(output if inputs[1] == "f=relu" else inputs[0])
    ctx.attributes, ctx.policy = inputs[1], _native.current_policy()


def _activation_backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return activation_backward.again(ctx.policy, dy, x, ctx.attributes), None


def _activation_backward_fake(dy, x, attributes):
    return torch.empty_like(x)


activation = _operator("activation", ["Tensor x"], "Tensor", False, _activation_fake, _setup_activation, _activation_backward)
activation_backward = _operator(
    "activation_backward",
    ["Tensor dy", "Tensor x"],
    "Tensor",
    False,
    _activation_backward_fake,
    _setup_none("activation_backward"),
    _no_backward,
)


# Softmax and cross-entropy.


def _setup_softmax(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.attributes, ctx.policy = inputs[1], _native.current_policy()


def _softmax_backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return softmax_backward.again(ctx.policy, y, dy, ctx.attributes), None


def _softmax_backward_fake(y, dy, attributes):
    return torch.empty_like(y)


def _cross_entropy_fake(logits, labels, attributes):
    rows = labels.shape if parse(attributes).get("reduction", "mean") == "none" else ()
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(rows), logits.new_empty(labels.shape, dtype=wide)


def _setup_cross_entropy(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.attributes, ctx.policy = inputs[2], _native.current_policy()


def _cross_entropy_backward(ctx, dloss, _):
    logits, labels, lse = ctx.saved_tensors
    return cross_entropy_backward.again(ctx.policy, logits, labels, dloss, lse, ctx.attributes), None, None


def _cross_entropy_backward_fake(logits, labels, dloss, lse, attributes):
    return torch.empty_like(logits)


softmax = _operator("softmax", ["Tensor x"], "Tensor", False, _activation_fake, _setup_softmax, _softmax_backward, "float32")
softmax_backward = _operator(
    "softmax_backward",
    ["Tensor y", "Tensor dy"],
    "Tensor",
    False,
    _softmax_backward_fake,
    _setup_none("softmax_backward"),
    _no_backward,
)
cross_entropy = _operator(
    "cross_entropy",
    ["Tensor logits", "Tensor labels"],
    "(Tensor, Tensor)",
    False,
    _cross_entropy_fake,
    _setup_cross_entropy,
    _cross_entropy_backward,
    "float32",
)
cross_entropy_backward = _operator(
    "cross_entropy_backward",
    ["Tensor logits", "Tensor labels", "Tensor dloss", "Tensor? lse"],
    "Tensor",
    False,
    _cross_entropy_backward_fake,
    _setup_none("cross_entropy_backward"),
    _no_backward,
)
