"""The operators: definitions, kernels, shapes without data, gradients, autocast.

Each operator takes tensors, then its attributes as words (`stride=1,1 padding=0,0`; the native half documents them), then dims that are
no attribute because they may be symbolic. Words and not lists of integers, since the dispatcher takes more time over four lists than a kernel
takes to start.

A call goes one of two ways. Plain tensors outside of every mode go straight to the native half, and with a gradient through an
`autograd.Function`: that is what a model's eager step does, and it costs least; autocast's casts happen on that way too. Everything else (compilation,
fake tensors, subclasses, modes, transforms, the profiler) goes through the dispatcher to the same kernels and the same formulas.
"""

import functools

import torch
from torch._prims_common import suggest_memory_format
from torch.nn import functional

from .. import _native
from .._errors import ConstantError
from . import _hooks  # noqa: F401

_library = torch.library.Library("verdigris", "DEF")
_namespace = torch.ops.verdigris
#: By name: the number, the most tensors read, what gradients are computed from, and what autocast casts to.
_FUNCTIONS = {name: (code, *rest) for code, (name, *rest) in enumerate(_native.functions())}
_eager, _eager_past_autocast, _plain, _run = _native.eager, _native.eager_past_autocast, _native.plain, _native.run
_current_policy = _native.current_policy
_is_compiling = torch.compiler.is_compiling
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def operator_number(name):
    """The number by which the native half knows an operator."""
    return _FUNCTIONS[name][0]


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
    lists = ("stride", "padding", "after", "dilation", "window", "adaptive", "within")
    return {name: tuple(map(int, value.split(","))) if name in lists else value for name, value in words.items()}


def _register_fake(name, fake):
    """As `torch.library.register_fake`, which would look up the line of source of each, and so take most of the time of the import."""
    try:
        entry = torch._library.simple_registry.singleton.find(f"verdigris::{name}")
        entry.fake_impl.register(fake, __name__, lib=_library)
    except (AttributeError, TypeError):
        torch.library.register_fake(f"verdigris::{name}", fake, lib=_library)


def _gradients(name, places, saves, has_one_result):
    """What an operator keeps of a call, and what it does with the gradient of its first result."""
    # The gradient of a tensor that is not saved needs the tensor's dims, unless a result of the same dims is saved.
    is_told = places not in saves
    wanted = [(place, f"of={name} wrt={place}|", is_told and place not in saves) for place in range(places)]
    told = tuple(place for place, _, is_told in wanted if is_told)
    is_activation = name == "activation"

    def save_some(ctx, inputs, output):
        ctx.attributes, ctx.policy = inputs[places], _current_policy()
        if is_activation:
            # ReLU's derivative follows from its result too, which the next layer saves anyway.
            ctx.save_for_backward(output if inputs[1] == "f=relu" else inputs[0])
            return
        every = inputs[:places] + (output if isinstance(output, tuple) else (output,))
        ctx.save_for_backward(*[every[place] for place in saves])
        if told:
            ctx.shapes = {place: every[place].shape for place in told if every[place] is not None}
        if len(every) > places + 1:
            ctx.mark_non_differentiable(*every[places + 1 :])

    first = len(saves)
    # Attributes of the gradients that are computed together, by their places.
    heads = {}

    def save_first(ctx, inputs, output):
        # As `save_some`, of a single result and the first of its operands: each layer of a network comes by here.
        ctx.save_for_backward(*inputs[:first])
        ctx.attributes, ctx.policy = inputs[places], _current_policy()

    is_first = not told and not is_activation and saves == list(range(first)) and first <= places
    setup = save_first if is_first and has_one_result else save_some

    def backward(ctx, dy, *_):
        saved, attributes, policy, needs = ctx.saved_tensors, ctx.attributes, ctx.policy, ctx.needs_input_grad
        gradients = [None] * len(needs)
        if not told:
            asked = tuple(place for place in range(places) if needs[place])
            if len(asked) > 1:
                head = heads.get(asked) or heads.setdefault(asked, f"of={name} wrt={','.join(map(str, asked))}|")
                together = _together(policy, dy, *saved, head + attributes, ())
                if together is not None:
                    for place, value in zip(asked, together):
                        gradients[place] = value
                    return tuple(gradients)
        for place, head, is_told in wanted:
            if needs[place]:
                dims = ctx.shapes[place] if is_told else ()
                gradients[place] = gradient.again(policy, dy, *saved, head + attributes, dims)
        return tuple(gradients)

    return setup, backward


def _together(policy, *inputs):
    """Several gradients of a call by one native call and one plan; None where the dispatcher has to be asked, which knows one at a time."""
    if torch.is_grad_enabled():
        return None
    try:
        output = _plain(operator_number("gradient"), policy, *inputs)
    except ConstantError:
        # One of them may be another matter without the rest.
        return None
    return None if output is NotImplemented else output


def _operator(name, tensors, results, has_dims, fake, decomposed=None):
    """Defines an operator, and returns the function that calls it by whichever way is open.

    Its gradients are one native call, and where the dispatcher is asked, calls of the operator `gradient`, one for each tensor that wants its
    own; from what the native half says that they are computed from. Of `gradient` itself, `again` computes one under the policy of the forward call, and takes the tensors
    that there are. `decomposed` says the function in PyTorch's own: what a compiler is given, which fuses it with what stands around it.
    """
    code, places, saves, autocast = _FUNCTIONS[name]
    arguments = ", ".join([*tensors, "str attributes", *(["SymInt[] dims"] if has_dims else [])])
    _library.define(f"{name}({arguments}) -> {results}")
    setup, backward = _gradients(name, places, saves, results == "Tensor")

    def op(*inputs):
        # Looked up when it is wanted: an overload takes a tenth of a millisecond to make, and a process wants few of them.
        return getattr(_namespace, name).default(*inputs)

    def below_autograd(*inputs):
        try:
            output = _plain(code, None, *inputs)
        except ConstantError:
            output = NotImplemented
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
            return op(*inputs) if decomposed is None else decomposed(*inputs)
        output = _eager(code, *inputs)
        if output is None:
            return (apply_plain or make_plain())(*inputs)
        if type(output) is list:
            return (apply_plain or make_plain())(*output)
        return op(*inputs) if output is NotImplemented else output

    def again(policy, *inputs):
        if not torch.is_grad_enabled():
            try:
                output = _plain(code, policy, *inputs)
            except ConstantError:
                output = NotImplemented
            if output is not NotImplemented:
                return output
        # The dispatcher wants a place for each tensor.
        return op(*inputs[:-2], *[None] * (places + 2 - len(inputs)), *inputs[-2:])

    def autograd(*inputs):
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            return (apply_any or make_any())(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def under_autocast(kind, *inputs):
        wanted = torch.float32 if autocast == "float32" else torch.get_autocast_dtype(kind)
        count = 2 if autocast == "lower operands" else len(inputs)
        inputs = [*(_cast(value, wanted, kind) for value in inputs[:count]), *inputs[count:]]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            output = _eager_past_autocast(code, *inputs)
            if output is None:
                return (apply_plain or make_plain())(*inputs)
            return op(*inputs) if output is NotImplemented else output

    def kernel(*inputs):
        try:
            return _run(code, *inputs)
        except ConstantError:
            # A gradient does not depend on every tensor that it is given; with respect to the others its own gradient is 0.
            return fake(*inputs).zero_()

    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel if name == "gradient" else functools.partial(_run, code), key)
        if autocast is not None:
            _library.impl(name, functools.partial(under_autocast, key.lower()), f"Autocast{key}")
    _library.impl(name, autograd, "Autograd")
    _register_fake(name, fake)
    call.again = again
    return call


def _cast(value, dtype, kind):
    is_wide_enough = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if is_wide_enough and value.device.type == kind else value


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


# What each operator's result is like, without data.


def conv_out(x_dims, w_dims, attributes):
    """The dims of a convolution's result."""
    a = parse(attributes)
    padding, dilation, stride = a["padding"], a["dilation"], a["stride"]
    after = a.get("after", padding)
    spatial = ((x_dims[i + 2] + padding[i] + after[i] - (dilation[i] * (w_dims[i + 2] - 1) + 1)) // stride[i] + 1 for i in range(len(x_dims) - 2))
    return (x_dims[0], w_dims[0], *spatial)


def _conv_fprop_fake(x, w, bias, attributes):
    return _like(x, conv_out(x.shape, w.shape, attributes), (w,))


def _conv_dgrad_fake(y, w, bias, attributes, dims):
    return _like(y, (y.shape[0], w.shape[1] * int(parse(attributes)["groups"]), *dims), (w,))


def _linear_fake(x, w, bias, attributes):
    return x.new_empty((*x.shape[:-1], w.shape[0]))


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


def _avg_pool_fake(x, attributes):
    return _like(x, (*x.shape[:2], *pool_out(x.shape[2:], attributes)))


def _elements_fake(x, attributes):
    return torch.empty_like(x)


def _cross_entropy_fake(logits, labels, attributes):
    rows = labels.shape if parse(attributes).get("reduction", "mean") == "none" else ()
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(rows), logits.new_empty(labels.shape, dtype=wide)


def _class_loss_fake(logits, targets, weights, attributes):
    a = parse(attributes)
    axis = int(a["axis"])
    return logits.new_empty((*logits.shape[:axis], *logits.shape[axis + 1 :]) if a.get("reduction", "mean") == "none" else ())


def _gradient_fake(dy, a, b, c, d, e, attributes, dims):
    heads, kept = attributes.split("|")[:-1], (a, b, c, d, e)
    head = parse(heads[0])
    _, places, saves, _ = _FUNCTIONS[head["of"]]
    saved = dict(zip(saves, kept))
    tensor = saved.get(int(head["wrt"]), saved.get(places) if not dims else None)
    if tensor is None:
        told = [tensor for place, tensor in saved.items() if place >= places] or [dy, *kept]
        is_last = any(tensor is not None and tensor.dim() == len(dims) and _is_channels_last(tensor) for tensor in told)
        return _in_format(dy, dims, is_last)
    innermost = parse(heads[-1])["of"]
    if innermost == "linear":
        return tensor.new_empty(tensor.shape)
    if innermost in ("conv_fprop", "conv_dgrad", "max_pool", "avg_pool"):
        return _in_format(tensor, tensor.shape, _is_channels_last(tensor))
    return torch.empty_like(tensor)


# What a compiler is given in place of operators that it fuses better than an opaque call allows.

_ACTIVATIONS = {
    "relu": lambda x, a: functional.relu(x),
    "leaky_relu": lambda x, a: functional.leaky_relu(x, float(a["slope"])),
    "gelu_erf": lambda x, a: functional.gelu(x),
    "gelu_tanh": lambda x, a: functional.gelu(x, approximate="tanh"),
    "silu": lambda x, a: functional.silu(x),
    "hard_swish": lambda x, a: functional.hardswish(x),
    "hard_sigmoid": lambda x, a: functional.hardsigmoid(x),
    "clamp": lambda x, a: functional.hardtanh(x, float(a["lower"]), float(a["upper"])),
    "mish": lambda x, a: functional.mish(x),
    "sigmoid": lambda x, a: torch.sigmoid(x),
    "tanh": lambda x, a: torch.tanh(x),
    "elu": lambda x, a: functional.elu(x, float(a["alpha"])),
    "softplus": lambda x, a: functional.softplus(x, float(a["beta"]), float(a["threshold"])),
}


def _activation_decomposed(x, attributes):
    a = parse(attributes)
    return _ACTIVATIONS[a["f"]](x, a)


def _softmax_decomposed(x, attributes):
    a = parse(attributes)
    return (functional.log_softmax if a["log"] == "1" else functional.softmax)(x, int(a["axis"]))


gradient = _operator(
    "gradient",
    ["Tensor dy", "Tensor? a", "Tensor? b", "Tensor? c", "Tensor? d", "Tensor? e"],
    "Tensor",
    True,
    _gradient_fake,
)
conv_fprop = _operator("conv_fprop", ["Tensor x", "Tensor w", "Tensor? bias"], "Tensor", False, _conv_fprop_fake)
#: A convolution with what inference puts behind it; no gradient.
conv_norm = _operator(
    "conv_norm",
    ["Tensor x", "Tensor w", "Tensor? bias", "Tensor mean", "Tensor variance", "Tensor? scale", "Tensor? shift", "Tensor? addend"],
    "Tensor",
    False,
    lambda x, w, bias, mean, variance, scale, shift, addend, attributes: _conv_fprop_fake(x, w, bias, attributes.split("|")[0]),
)
conv_dgrad = _operator("conv_dgrad", ["Tensor y", "Tensor w", "Tensor? bias"], "Tensor", True, _conv_dgrad_fake)
linear = _operator("linear", ["Tensor x", "Tensor w", "Tensor? bias"], "Tensor", False, _linear_fake)
max_pool = _operator("max_pool", ["Tensor x"], "(Tensor, Tensor)", False, _max_pool_fake)
avg_pool = _operator("avg_pool", ["Tensor x"], "Tensor", False, _avg_pool_fake)
activation = _operator("activation", ["Tensor x"], "Tensor", False, _elements_fake, _activation_decomposed)
softmax = _operator("softmax", ["Tensor x"], "Tensor", False, _elements_fake, _softmax_decomposed)
cross_entropy = _operator("cross_entropy", ["Tensor logits", "Tensor labels"], "(Tensor, Tensor)", False, _cross_entropy_fake)
class_loss = _operator(
    "class_loss", ["Tensor logits", "Tensor targets", "Tensor? weights"], "Tensor", False, _class_loss_fake
)
