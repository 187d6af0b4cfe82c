"""The operators: definitions, kernels, shapes without data, gradients, autocast.

Each operator takes tensors, then its attributes as words (`stride=1,1 padding=0,0`; the native half documents them), then dims that are
no attribute because they may be symbolic. Words and not lists of integers, since the dispatcher takes more time over four lists than a kernel
takes to start.

A call goes one of two ways. Plain tensors outside of every mode go straight to the native half, and with a gradient through an
`autograd.Function`: that is what a model's eager step does, and it costs least; autocast's casts happen on that way too. Everything else (compilation,
fake tensors, subclasses, modes, transforms) goes through the dispatcher to the same kernels and the same formulas.
"""

import contextlib
import functools
import itertools
import operator
import types

import torch
from torch._functorch.utils import enable_single_level_autograd_function as _single_level
from torch._prims_common import suggest_memory_format
from torch.nn import functional

from .. import _native
from .._errors import ConstantError, OutOfRangeError, UnsupportedError
from . import _decompositions, _policy
from . import _hooks  # noqa: F401

_library = torch.library.Library("verdigris", "DEF")
_namespace = torch.ops.verdigris
#: By name: the number, the most tensors read, what gradients are computed from, and what autocast casts to.
_FUNCTIONS = {name: (code, *rest) for code, (name, *rest) in enumerate(_native.functions())}
_eager, _eager_past_autocast, _plain, _run = _native.eager, _native.eager_past_autocast, _native.plain, _native.run
_differentiated = _native.differentiated
_current_policy = _native.current_policy
_is_compiling, _is_tracing = torch.compiler.is_compiling, torch._C._is_tracing
_forward_ad = torch.autograd.forward_ad
_is_transformed = torch._C._are_functorch_transforms_active
#: The places of the tensors that autocast casts, by its word; of others all.
_LOWERED = {"lower operands": range(2), "lower layers": (0, 1, 3), "lower attended": range(4)}
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


#: Operators that take sizes which may be symbols beside their attributes (`with_lists`).
_OF_SIZES = {"gradient", "max_pool", "max_pool_values", "avg_pool", "resample", "pad"}
#: By name: what results are like without data, and the tensors that are read.
_FAKES, _TENSORS = {}, {}
#: By name: what the dispatcher calls in the end, in a range of PyTorch's profiler. Code that a compiler generates calls it by `torch.ops.verdigris.kernels`.
kernels = _namespace.kernels = types.SimpleNamespace()


def operator_number(name):
    """The number by which the native half knows an operator."""
    return _FUNCTIONS[name][0]


def cached(function):
    """Remembers results, but lets the compiler see the function itself."""
    remembered = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def call(*arguments):
        if _is_compiling():
            return function(*arguments)
        try:
            return remembered(*arguments)
        except TypeError:
            # Symbols have no hash. What else is wrong is said again.
            return function(*arguments)

    return call


def integers(name, value):
    """A size, or one for each dim, as Python's integers and a tuple: as PyTorch takes them, whatever is an integer by `__index__` (of NumPy, tensors of one element) and no
    truth value. `None` and sizes that are symbols stay. Not where results are kept, which know 2 and 2.0 for the same."""
    kind = type(value)
    if kind is int or value is None:
        return value
    if isinstance(value, (tuple, list)):
        is_plain = kind is tuple
        for one in value:
            is_plain = is_plain and type(one) is int
        return value if is_plain else tuple(_integer(name, one, value) for one in value)
    return _integer(name, value, value)


def _integer(name, one, value):
    if type(one) is int or one is None or isinstance(one, torch.SymInt):
        return one
    is_truth = isinstance(one, bool) or getattr(one, "dtype", None) == torch.bool
    if not is_truth and hasattr(one, "__index__"):
        with contextlib.suppress(TypeError):
            return operator.index(one)
    raise TypeError(f"{name} is {value!r}; it is an integer, or one for each dim")


def is_empty(dims):
    """Whether one of a tensor's dims is 0. In a trace of `torch.jit` dims are tensors, which are not asked: it would warn that the answer becomes a constant."""
    for dim in dims:
        if type(dim) is int and dim == 0:
            return True
    return False


def axis(tensor, dim):
    """A dim of a tensor, counted from the first; one without dims has a dim of one element."""
    rank = max(tensor.dim(), 1)
    if not -rank <= dim < rank:
        raise OutOfRangeError(f"dim is {dim} for a tensor of {tensor.dim()} dims; it is from {-rank} to {rank - 1}")
    return dim % rank


def has_no_outputs(weight):
    """Whether a filter's first dim, its output channels, is 0; as above."""
    dims = weight.shape
    return len(dims) > 0 and type(dims[0]) is int and dims[0] == 0


@cached
def parse(attributes, sizes=()):
    """Attributes by name; lists of integers as tuples. `sizes` stand in the places of `with_lists`."""
    words, left = dict(word.split("=", 1) for word in attributes.split()), iter(sizes)
    lists = ("stride", "padding", "after", "before", "dilation", "window", "adaptive", "fractional", "within", "out")
    number = lambda text: next(left) if text == "?" else int(text)
    return {name: tuple(map(number, value.split(","))) if name in lists else value for name, value in words.items()}


def _are_numbers(values):
    for value in values:
        if type(value) is not int:
            return False
    return True


def are_open(values):
    """Whether numbers may be symbols: what a compiler is told of a tensor's dims, and what follows from these."""
    return _is_compiling() or not _are_numbers(values)


def with_lists(words, **lists):
    """Attributes with lists of integers in front of words: their text, and the numbers for its places. Of symbols there is no text: each number has a place in it then, `?`,
    and goes to the operator beside it, which has a text of numbers where they are known."""
    sizes = tuple(value for values in lists.values() for value in values)
    is_open = are_open(sizes)
    text = " ".join([f"{name}={','.join('?' * len(values) if is_open else map(str, values))}" for name, values in lists.items()])
    return f"{text} {words}".strip(), sizes if is_open else ()


def filled(attributes, sizes):
    """Attributes with numbers in their places."""
    first, *rest = attributes.split("?")
    return first + "".join([f"{size}{text}" for size, text in zip(sizes, rest)])


def _register_fake(name, fake):
    """As `torch.library.register_fake`, which would look up the line of source of each, and so take most of the time of the import."""
    try:
        entry = torch._library.simple_registry.singleton.find(f"verdigris::{name}")
        entry.fake_impl.register(fake, __name__, lib=_library)
    except (AttributeError, TypeError):
        torch.library.register_fake(f"verdigris::{name}", fake, lib=_library)


def _gradients(name, places, saves, has_one_result, arity):
    """What an operator of so many arguments, and sizes where it has some, keeps of a call, and what it does with the gradient of its first result."""
    # The gradient of a tensor that is not saved needs the tensor's dims, unless a result of the same dims is saved.
    is_told = places not in saves
    told = tuple(place for place in range(places) if is_told and place not in saves)
    is_activation, is_gradient, is_norm = name == "activation", name == "gradient", name == "norm"

    def save_some(ctx, inputs, used, output):
        ctx.attributes, ctx.policy, ctx.sizes = inputs[places], _current_policy(), inputs[arity:]
        if is_activation:
            # ReLU's derivative follows from its result too, which the next layer saves anyway.
            ctx.save_for_backward(output if inputs[1] == "f=relu" else inputs[0])
            return output
        every = (*inputs[:places], *_each_result(output))
        ctx.save_for_backward(*[every[place] for place in saves])
        if told:
            ctx.shapes = {place: every[place].shape for place in told if every[place] is not None}
        if len(every) > places + 1:
            ctx.mark_non_differentiable(*every[places + 1 :])
        return output

    first = len(saves)
    # The attributes of gradients in front of the function's, by the places that are asked for and the types that autocast rounded.
    heads = {}

    def head(asked, types):
        return heads.get((asked, types)) or heads.setdefault((asked, types), f"of={name} wrt={','.join(map(str, asked))}{types}|")

    def save_first(ctx, inputs, used, output):
        # As `save_some`, of a single result and the first of its operands: each layer of a network comes by here.
        if ctx.types:
            # Parameters as they were given, so that the gradient of a gradient reaches them, and behind them what was computed with.
            own = [given if given is not None and given.requires_grad else value for given, value in zip(inputs[:first], used)]
            ctx.save_for_backward(*own, *used[:first])
        else:
            ctx.save_for_backward(*inputs[:first])
        ctx.attributes, ctx.policy, ctx.sizes = inputs[places], _current_policy(), inputs[arity:]
        return output

    is_first = not told and not is_activation and saves == list(range(first)) and first <= places
    setup = save_first if is_first and has_one_result else save_some

    def backward(ctx, dy, *_):
        saved, attributes, policy, needs, types = ctx.saved_tensors, ctx.attributes, ctx.policy, ctx.needs_input_grad, ctx.types
        gradients = [None] * len(needs)
        if types:
            saved = _as_used(saved)
        if is_norm and dy.is_cuda and dy.stride() != saved[0].stride() and dy.dim() > 3:
            # Engines that sum what is side by side read one memory format: a pass over memory costs less than going element by element.
            dy = torch.empty_like(saved[0], dtype=dy.dtype).copy_(dy)
        if is_gradient and " as" in attributes.split("|", 1)[0]:
            # The gradient that was taken is one of a tensor before it was rounded; what it came from is of the type behind that.
            dy = dy.to(saved[0].dtype)
        asked = tuple(place for place in range(places) if needs[place])
        if len(asked) > 1 and not told and not ctx.sizes:
            together = _together(policy, dy, *saved, head(asked, types) + attributes, ())
            if together is not None:
                for place, value in zip(asked, together):
                    gradients[place] = value
                return tuple(gradients)
        for place in asked:
            dims = ctx.shapes[place] if place in told else ()
            words = head((place,), types) + attributes
            gradients[place] = gradient.of_sizes(dy, *saved, words, dims, *ctx.sizes) if ctx.sizes else gradient.again(policy, dy, *saved, words, dims)
        return tuple(gradients)

    return setup, backward


def _as_used(saved):
    """Of tensors as they were given, and as they were computed with: the latter, reached by gradients of gradients where those are recorded."""
    own, used = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    if not torch.is_grad_enabled():
        return used
    return tuple(value if given is value else given.to(value.dtype) for given, value in zip(own, used))


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


def _operator(name, tensors, results, has_dims, fake, decomposed=None, gradients=None, recorded=None):
    """Defines an operator, and returns the function that calls it by whichever way is open.

    `gradients`: what it keeps of a call and what it does with the gradients of its results, where that is not by the operator `gradient`. `recorded`: of an operator that keeps
    nothing for gradients, what computes the same where they are recorded.

    Its gradients are one native call, and where the dispatcher is asked, calls of the operator `gradient`, one for each tensor that wants its
    own; from what the native half says that they are computed from. Of `gradient` itself, `again` computes one under the policy of the forward call, and takes the tensors
    that there are. `decomposed` says the function in PyTorch's own: what a compiler is given, which fuses it with what stands around it.
    """
    code, places, saves, autocast = _FUNCTIONS[name]
    _FAKES[name], _TENSORS[name] = fake, tensors
    arity, has_sizes = places + 1 + has_dims, name in _OF_SIZES
    arguments = ", ".join([*tensors, "str attributes", *["SymInt[] dims"] * has_dims, *["SymInt[] sizes=[]"] * has_sizes])
    _library.define(f"{name}({arguments}) -> {results}")
    setup, backward = gradients or _gradients(name, places, saves, results == "Tensor", arity)

    def settled(inputs):
        """The arguments of a call without its sizes, where these are numbers."""
        if len(inputs) == arity or not _are_numbers(inputs[arity]):
            return inputs
        return *inputs[:places], filled(inputs[places], inputs[arity]), *inputs[places + 1 : arity]

    def op(*inputs):
        # Looked up when it is wanted: an overload takes a tenth of a millisecond to make, and a process wants few of them.
        return getattr(_namespace, name).default(*inputs)

    def is_of_numbers(inputs):
        # The native half would ask a symbol for its number, and so make a graph for each.
        return len(inputs) == arity and not (has_dims and not _are_numbers(inputs[-1]))

    def below_autograd(*inputs):
        try:
            output = _plain(code, None, *inputs) if is_of_numbers(inputs) else NotImplemented
        except ConstantError:
            output = NotImplemented
        if output is NotImplemented:
            with torch._C._AutoDispatchBelowAutograd(), _levels_below():
                output = op(*inputs)
        return output, inputs, ""

    def differentiable(compute):
        def forward(ctx, *inputs):
            output, used, ctx.types = compute(*inputs)
            return setup(ctx, inputs, used, output)

        def forward_of_several(ctx, *inputs):
            # Else autograd fills a tensor of zeros, as large as each further result, for a gradient that nobody reads.
            ctx.set_materialize_grads(False)
            return forward(ctx, *inputs)

        def backward_of_several(ctx, dy, *others):
            return (None,) * len(ctx.needs_input_grad) if dy is None else backward(ctx, dy, *others)

        # The class of its node in the graph of autograd is named after it when it is made.
        both = (forward, backward) if results == "Tensor" else (forward_of_several, backward_of_several)
        body = {"forward": staticmethod(both[0]), "backward": staticmethod(both[1]), "__module__": __name__}
        Call = type(torch.autograd.Function)(f"Verdigris_{name}", (torch.autograd.Function,), body)
        # The method of the base alone: what `Function.apply` adds serves transforms, which do not come here.
        return super(torch.autograd.Function, Call).apply

    # The first where the question whether the tensors are plain was asked before. Both are made when a gradient is first wanted.
    apply_plain = apply_any = recorded

    def make_plain():
        nonlocal apply_plain
        apply_plain = differentiable(functools.partial(_differentiated, code))
        return apply_plain

    def make_any():
        nonlocal apply_any
        apply_any = differentiable(below_autograd)
        return apply_any

    def call(*inputs):
        if _is_compiling():
            return op(*inputs) if decomposed is None else decomposed(*inputs)
        if has_sizes and len(inputs) > arity:
            return op(*inputs)
        output = _eager(code, *inputs)
        if output is None:
            return (apply_plain or make_plain())(*inputs)
        if type(output) is list:
            return (apply_plain or make_plain())(*output)
        return op(*inputs) if output is NotImplemented else output

    def again(policy, *inputs):
        if not torch.is_grad_enabled() and not (has_dims and not _are_numbers(inputs[-1])):
            try:
                output = _plain(code, policy, *inputs)
            except ConstantError:
                output = NotImplemented
            if output is not NotImplemented:
                return output
        if not has_dims:
            return op(*inputs)
        # The dispatcher wants a place for each tensor.
        return op(*inputs[:-2], *[None] * (places + 2 - len(inputs)), *inputs[-2:])

    def of_sizes(*inputs):
        *given, attributes, dims, sizes = inputs
        return op(*given, *[None] * (places - len(given)), attributes, dims, sizes)

    def autograd(*inputs):
        refuse_tangents(name, inputs)
        inputs = settled(inputs)
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            if _is_transformed() and recorded is None:
                # A transform asks for one level of itself at a time, and `apply` is that of one level.
                with _single_level():
                    return (apply_any or make_any())(*inputs)
            return (apply_any or make_any())(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def under_autocast(kind, *inputs):
        wanted = torch.float32 if autocast == "float32" else torch.get_autocast_dtype(kind)
        lowered = _LOWERED.get(autocast, range(len(inputs)))
        inputs = [_cast(value, wanted, kind) if place in lowered else value for place, value in enumerate(settled(inputs))]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            if len(inputs) > arity:
                return op(*inputs)
            output = _eager_past_autocast(code, *inputs)
            if output is None:
                return (apply_plain or make_plain())(*inputs)
            return op(*inputs) if output is NotImplemented else output

    def kernel(run):
        """What the dispatcher calls in the end, by one of the native halves that run a call."""

        # Generated code gives an argument that has a default by its name.
        def of_gradient(*inputs, sizes=()):
            inputs = settled((*inputs, sizes) if sizes else inputs)
            try:
                return run(code, *inputs)
            except ConstantError:
                # A gradient does not depend on every tensor that it is given; with respect to the others its own gradient is 0.
                return fake(*inputs).zero_()

        def listed(*inputs):
            return list(_each_result(run(code, *inputs)))

        def of_numbers(*inputs, sizes=()):
            return run(code, *settled((*inputs, sizes) if sizes else inputs))

        if name == "gradient":
            return of_gradient
        return of_numbers if has_sizes else listed if results == "Tensor[]" else functools.partial(run, code)

    own = kernel(_run)
    setattr(kernels, name, kernel(_native.run_in_range))
    for key in ("CPU", "CUDA"):
        _library.impl(name, own, key)
        if autocast is not None:
            _library.impl(name, functools.partial(under_autocast, key.lower()), f"Autocast{key}")
    _library.impl(name, autograd, "Autograd")
    _register_fake(name, fake)
    call.again, call.of_sizes = again, of_sizes
    return call


@contextlib.contextmanager
def _levels_below():
    """Within the forward half of a differentiable call, which records nothing: a transform's levels below record what they differentiate."""
    if not _is_transformed():
        yield
        return
    with torch.enable_grad(), _forward_ad._set_fwd_grad_enabled(True):
        yield


def refuse_tangents(name, inputs):
    """Raises where a tensor of a call has a tangent, which its result would not have."""
    if _forward_ad._current_level < 0:
        return
    if any(isinstance(value, torch.Tensor) and _forward_ad.unpack_dual(value).tangent is not None for value in inputs):
        rule = "this package has gradients of reverse mode alone (backward, torch.func.grad, vjp, jacrev)"
        raise UnsupportedError(f"forward-mode differentiation of `{name}` (jvp, jacfwd, hessian, make_dual); {rule}")


def apply(name, function, *inputs):
    """Calls an `autograd.Function` that is no operator's."""
    refuse_tangents(name, inputs)
    if _is_transformed():
        raise UnsupportedError(f"the gradient of `{name}` within a transform of torch.func; outside of one it has gradients (backward, torch.autograd.grad)")
    return function.apply(*inputs)


def _cast(value, dtype, kind):
    is_wide_enough = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if is_wide_enough and value.device.type == kind else value


def widened(tensor):
    """A tensor as autocast for GPUs hands it to the functions that it computes in f32 and those for CPUs do not: softplus, and `interpolate`."""
    is_narrow = tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_narrow and torch.is_autocast_enabled("cuda") else tensor


def told(function, tensor, attributes):
    """An operator of one tensor, by attributes as text or as `with_lists` has them."""
    if type(attributes) is str or not attributes[1]:
        return function(tensor, attributes if type(attributes) is str else attributes[0])
    return function(tensor, *attributes)


def of_bits(function, tensor, attributes):
    """An operator that moves elements, of truth values too: they are bytes."""
    if tensor.dtype != torch.bool:
        return told(function, tensor, attributes)
    return told(function, tensor.view(torch.uint8), attributes).view(torch.bool)


def _is_channels_last(tensor):
    """Whether PyTorch calls a tensor so; of three dims, for which it has no word, by the same rule."""
    if tensor.dim() != 3:
        return tensor.dim() in (4, 5) and suggest_memory_format(tensor) != torch.contiguous_format
    (images, channels, _), (image, channel, pixel) = tensor.shape, tensor.stride()
    is_inside = channel != 0 and pixel >= channel * max(channels, 1) and image >= pixel * max(tensor.shape[2], 1)
    return is_inside and images != 0 and tensor.numel() != 0 and pixel * max(tensor.shape[2], 1) != channel


def _differentiable(name, function):
    """What an operator is to autograd whose one tensor with a gradient is the first, and whose forward and backward are those of a `torch.autograd.Function`."""

    def autograd(x, *others):
        refuse_tangents(name, (x, *others))
        if torch.is_grad_enabled() and x.requires_grad:
            return apply(name, function, x, *others)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(_namespace, name).default(x, *others)

    return autograd


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


def pool_out(x_spatial, attributes, sizes=()):
    """The spatial dims of a pooling's result."""
    a = parse(attributes, sizes)
    if "adaptive" in a:
        return a["adaptive"]
    if "fractional" in a:
        return tuple(a["fractional"])
    window, padding = a["window"], a.get("padding", (0,) * len(a["window"]))
    stride, after, dilation = a.get("stride", window), a.get("after", padding), a.get("dilation", (1,) * len(window))
    reach = [dilation[i] * (window[i] - 1) + 1 for i in range(len(window))]
    return tuple((x_spatial[i] + padding[i] + after[i] - reach[i]) // stride[i] + 1 for i in range(len(window)))


def _max_pool_fake(x, attributes, sizes=()):
    shape = (*x.shape[:2], *pool_out(x.shape[2:], attributes, sizes))
    index = torch.int64 if parse(attributes, sizes).get("index") == "i64" else torch.int32
    y = _like(x, shape)
    return y, torch.empty_like(y, dtype=index)


def _fractional_max_pool_fake(x, samples, attributes):
    return _max_pool_fake(x, attributes)


def _avg_pool_fake(x, attributes, sizes=()):
    return _like(x, (*x.shape[:2], *pool_out(x.shape[2:], attributes, sizes)))


def _resample_fake(x, attributes, sizes=()):
    a = parse(attributes, sizes)
    if "out" in a:
        return _like(x, (*x.shape[:2], *a["out"]))
    return _like(x, (*x.shape[:2], *(sum(sizes) for sizes in zip(x.shape[2:], a["before"], a["after"]))))


def _pad_fake(x, attributes, sizes=()):
    a = parse(attributes, sizes)
    return _like(x, tuple(sum(sizes) for sizes in zip(x.shape, a["before"], a["after"])))


def _shuffle_fake(x, attributes):
    a = parse(attributes)
    if "groups" in a:
        return _like(x, x.shape)
    factor, grows = int(a.get("pixels", a.get("channels"))), "pixels" in a
    *lead, channels, height, width = x.shape
    if grows:
        return _like(x, (*lead, channels // factor**2, height * factor, width * factor))
    return _like(x, (*lead, channels * factor**2, height // factor, width // factor))


def _elements_fake(x, attributes):
    return torch.empty_like(x)


def _norm_fake(x, scale, bias, attributes):
    return torch.empty_like(x)


def _cross_entropy_fake(logits, labels, attributes):
    rows = labels.shape if parse(attributes).get("reduction", "mean") == "none" else ()
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(rows), logits.new_empty(labels.shape, dtype=wide)


def _class_loss_fake(logits, targets, weights, attributes):
    a = parse(attributes)
    axis = int(a["axis"])
    return logits.new_empty((*logits.shape[:axis], *logits.shape[axis + 1 :]) if a.get("reduction", "mean") == "none" else ())


_WIDTHS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def _gradient_fake(dy, a, b, c, d, e, attributes, dims, sizes=()):
    head = parse(attributes.split("|", 1)[0])
    like, wide = _gradient_like(dy, a, b, c, d, e, attributes, dims), head.get(f"as{head['wrt']}")
    return like if wide is None else torch.empty_like(like, dtype=_WIDTHS[wide])


def _gradient_like(dy, a, b, c, d, e, attributes, dims):
    # Behind the function's own attributes may stand those of an activation.
    heads, kept = [part for part in attributes.split("|") if part.startswith("of=")], (a, b, c, d, e)
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
    if innermost in ("conv_fprop", "conv_dgrad", "max_pool", "fractional_max_pool", "avg_pool", "resample", "pad", "shuffle"):
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
    "selu": lambda x, a: functional.selu(x),
    "celu": lambda x, a: functional.celu(x, float(a["alpha"])),
    "log_sigmoid": lambda x, a: functional.logsigmoid(x),
    "hard_shrink": lambda x, a: functional.hardshrink(x, float(a["lambda"])),
    "soft_shrink": lambda x, a: functional.softshrink(x, float(a["lambda"])),
    "tanh_shrink": lambda x, a: functional.tanhshrink(x),
    "soft_sign": lambda x, a: functional.softsign(x),
    "threshold": lambda x, a: functional.threshold(x, float(a["bound"]), float(a["value"])),
}


def _activation_decomposed(x, attributes):
    a = parse(attributes)
    return _ACTIVATIONS[a["f"]](x, a)


def _softmax_decomposed(x, attributes):
    a = parse(attributes)
    if a.get("negative") == "1":
        return functional.softmin(x, int(a["axis"]))
    return (functional.log_softmax if a["log"] == "1" else functional.softmax)(x, int(a["axis"]))


def _pad_decomposed(x, attributes, sizes=()):
    return _decompositions.pad(x, parse(attributes, sizes))


def _element_loss_decomposed(x, target, weight, positive, attributes):
    a = parse(attributes)
    if a["loss"] == "likelihood":
        # At 0 and 1 a composition has a gradient of 0 times infinity, where the operator's is 0.
        return _namespace.element_loss.default(x, target, weight, positive, attributes)
    return _decompositions.element_loss(x, target, weight, positive, a)


gradient = _operator(
    "gradient",
    ["Tensor dy", "Tensor? a", "Tensor? b", "Tensor? c", "Tensor? d", "Tensor? e"],
    "Tensor",
    True,
    _gradient_fake,
)
conv_fprop = _operator("conv_fprop", ["Tensor x", "Tensor w", "Tensor? bias"], "Tensor", False, _conv_fprop_fake)


def _conv_norm_recorded(x, w, bias, mean, variance, scale, shift, addend, attributes):
    """The parts of a chain one by one: a gradient reads what is between them."""
    words, _, word = attributes.partition("|")
    conv, _, epsilon = words.rpartition(" eps=")
    y = batch_norm_inference(conv_fprop(x, w, bias, conv), mean, variance, scale, shift, addend, f"eps={epsilon} momentum=0.0 relu=0")
    return activation(y, word) if word else y


#: A convolution with what inference puts behind it.
conv_norm = _operator(
    "conv_norm",
    ["Tensor x", "Tensor w", "Tensor? bias", "Tensor mean", "Tensor variance", "Tensor? scale", "Tensor? shift", "Tensor? addend"],
    "Tensor",
    False,
    lambda x, w, bias, mean, variance, scale, shift, addend, attributes: _conv_fprop_fake(x, w, bias, attributes.split("|")[0]),
    recorded=_conv_norm_recorded,
)
conv_dgrad = _operator("conv_dgrad", ["Tensor y", "Tensor w", "Tensor? bias"], "Tensor", True, _conv_dgrad_fake)
linear = _operator("linear", ["Tensor x", "Tensor w", "Tensor? bias"], "Tensor", False, _linear_fake)
max_pool = _operator("max_pool", ["Tensor x"], "(Tensor, Tensor)", False, _max_pool_fake)
fractional_max_pool = _operator("fractional_max_pool", ["Tensor x", "Tensor samples"], "(Tensor, Tensor)", False, _fractional_max_pool_fake)
avg_pool = _operator("avg_pool", ["Tensor x"], "Tensor", False, _avg_pool_fake)
resample = _operator("resample", ["Tensor x"], "Tensor", False, _resample_fake)
pad = _operator("pad", ["Tensor x"], "Tensor", False, _pad_fake, _pad_decomposed)
shuffle = _operator("shuffle", ["Tensor x"], "Tensor", False, _shuffle_fake)
local_response_norm = _operator("local_response_norm", ["Tensor x"], "Tensor", False, _elements_fake)
activation = _operator("activation", ["Tensor x"], "Tensor", False, _elements_fake, _activation_decomposed)
prelu = _operator(
    "prelu", ["Tensor x", "Tensor weight"], "Tensor", False, lambda x, weight, attributes: torch.empty_like(x), lambda x, weight, attributes: functional.prelu(x, weight)
)
#: As PReLU, by slopes that a state draws, again in the gradient.
rrelu = _operator("rrelu", ["Tensor x", "Tensor state"], "Tensor", False, lambda x, state, attributes: torch.empty_like(x))
softmax = _operator("softmax", ["Tensor x"], "Tensor", False, _elements_fake, _softmax_decomposed)
norm = _operator("norm", ["Tensor x", "Tensor? scale", "Tensor? bias"], "Tensor", False, _norm_fake)
cross_entropy = _operator("cross_entropy", ["Tensor logits", "Tensor labels"], "(Tensor, Tensor)", False, _cross_entropy_fake)


# Batch normalization. Its gradients come of one pass, so they are an operator of their own.


def _channels_fake(x):
    return x.new_empty(x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _batch_norm_fake(x, scale, bias, add, running_mean, running_var, attributes):
    return torch.empty_like(x), _channels_fake(x), _channels_fake(x)


def _batch_norm_inference_fake(x, mean, var, scale, bias, add, attributes):
    return torch.empty_like(x)


def _batch_norm_backward_fake(dy, x, scale, mean, inv, last, attributes):
    of_bias = last if last is not None and last.dim() == 1 else scale
    likes = (x, x if scale is None else scale, x if of_bias is None else of_bias, x)
    vector = x.shape[1:2]
    made = [torch.empty_like(x), likes[1].new_empty(vector), likes[2].new_empty(vector), torch.empty_like(x, dtype=dy.dtype)]
    return [result for result, wanted in zip(made, parse(attributes.partition("|")[0])["wanted"]) if wanted == "1"]


def _last_of_batch_norm(ctx, y, bias, add, attributes):
    """What tells what passed ReLU: the result where something was added, and else the bias, which takes no reading of the result. So it is of other activations, whose slope follows
    from what is normalized once more."""
    own, ctx.bar, ctx.behind = attributes.partition("|")
    ctx.relu, ctx.adds, ctx.policy = " relu=1" in own, add is not None, _current_policy()
    return bias if ctx.behind else None if not ctx.relu else y if ctx.adds else bias


def _keep_of_batch_norm(ctx, inputs, used, output):
    x, scale, bias, add, _, _, attributes = inputs
    y, mean, inv = output
    ctx.save_for_backward(x, scale, mean, inv, _last_of_batch_norm(ctx, y, bias, add, attributes))
    ctx.mark_non_differentiable(mean, inv)
    return output


def _batch_norm_gradients(ctx, dy, *_):
    needs = ctx.needs_input_grad
    of_add = ctx.relu and ctx.adds and needs[3]
    wanted = (needs[0], needs[1], needs[2], of_add)
    gradients = [None] * len(needs)
    if any(wanted):
        words = f"relu={int(ctx.relu)} result={int(ctx.relu and ctx.adds)} wanted={''.join('01'[want] for want in wanted)}{ctx.bar}{ctx.behind}"
        found = iter(_each_result(batch_norm_backward.again(ctx.policy, dy, *ctx.saved_tensors, words)))
        gradients[:4] = [next(found) if want else None for want in wanted]
    if needs[3] and not of_add:
        gradients[3] = dy
    return tuple(gradients)


def _each_result(output):
    return output if isinstance(output, (tuple, list)) else (output,)


def _keep_nothing(ctx, inputs, used, output):
    return output


def is_traced():
    """Whether `torch.jit` traces this call. `torch.compile` cannot follow the question, and never asks it: what it compiles is not traced."""
    return not _is_compiling() and _is_tracing()


def is_recorded():
    """Whether a call is recorded for gradients. A trace of `torch.jit` is run in either mode, whichever it was made in: what it records is the operator for inference, which sees at each
    run whether gradients are wanted."""
    return torch.is_grad_enabled() and not is_traced()


#: For calls whose gradient nobody asks for: no index is written.
max_pool_values = _operator(
    "max_pool_values",
    ["Tensor x"],
    "Tensor",
    False,
    lambda *inputs: _max_pool_fake(*inputs)[0],
    recorded=lambda *inputs: max_pool(*inputs)[0],
)


def _refuse_gradients(ctx, *_):
    raise UnsupportedError("the gradient of batch normalization has no gradient; compose the normalization from means to have one")


batch_norm = _operator(
    "batch_norm",
    ["Tensor x", "Tensor? scale", "Tensor? bias", "Tensor? add", "Tensor(a!)? running_mean", "Tensor(b!)? running_var"],
    "(Tensor, Tensor, Tensor)",
    False,
    _batch_norm_fake,
    gradients=(_keep_of_batch_norm, _batch_norm_gradients),
)
batch_norm_backward = _operator(
    "batch_norm_backward",
    ["Tensor dy", "Tensor x", "Tensor? scale", "Tensor mean", "Tensor inv", "Tensor? last"],
    "Tensor[]",
    False,
    _batch_norm_backward_fake,
    gradients=(_keep_nothing, _refuse_gradients),
)
batch_norm_inference = _operator(
    "batch_norm_inference",
    ["Tensor x", "Tensor mean", "Tensor var", "Tensor? scale", "Tensor? bias", "Tensor? add"],
    "Tensor",
    False,
    _batch_norm_inference_fake,
)


# A convolution and the batch normalization of training behind it: one call and one node, whose gradients are one call too.


def _conv_batch_norm_fake(x, w, scale, bias, add, running_mean, running_var, attributes):
    y = _conv_fprop_fake(x, w, None, attributes)
    return y, _channels_fake(y), _channels_fake(y), torch.empty_like(y)


def _conv_batch_norm_backward_fake(dy, x, w, z, scale, mean, inv, last, attributes):
    a = parse(attributes.partition("|")[0])
    of_bias = last if last is not None and last.dim() == 1 else scale
    likes = (z if scale is None else scale, z if of_bias is None else of_bias)
    made = [
        _in_format(x, x.shape, _is_channels_last(x)),
        _in_format(w.to(_WIDTHS[a["filter"]]) if "filter" in a else w, w.shape, _is_channels_last(w)),
        *(like.new_empty(z.shape[1:2]) for like in likes),
        torch.empty_like(z, dtype=dy.dtype),
    ]
    return [result for result, wanted in zip(made, a["wanted"]) if wanted == "1"]


def _keep_of_conv_batch_norm(ctx, inputs, used, output):
    x, w, scale, bias, add, _, _, attributes = used
    y, mean, inv, z = output
    ctx.save_for_backward(x, w, z, scale, mean, inv, _last_of_batch_norm(ctx, y, bias, add, attributes))
    ctx.attributes = attributes
    ctx.mark_non_differentiable(mean, inv, z)
    return output


@functools.lru_cache(maxsize=4096)
def _words_of_conv_batch_norm(attributes, types, adds, wanted):
    """The attributes of the gradients of a call, from those of the call."""
    filters = [word.split("=")[1] for word in types.split() if word.startswith("as1=")]
    wide = f" filter={filters[0]}" if filters else ""
    own, bar, behind = attributes.partition("|")
    return f"{own} result={int(adds)} wanted={''.join('01'[want] for want in wanted)}{wide}{bar}{behind}"


def _conv_batch_norm_gradients(ctx, dy, *_):
    needs = ctx.needs_input_grad
    of_add = needs[4] and ctx.relu
    wanted = (*needs[:4], of_add)
    gradients = [None] * len(needs)
    if any(wanted):
        words = _words_of_conv_batch_norm(ctx.attributes, ctx.types, ctx.adds, wanted)
        found = iter(_each_result(conv_batch_norm_backward.again(ctx.policy, dy, *ctx.saved_tensors, words)))
        gradients[:5] = [next(found) if want else None for want in wanted]
    if needs[4] and not of_add:
        gradients[4] = dy
    return tuple(gradients)


conv_batch_norm = _operator(
    "conv_batch_norm",
    ["Tensor x", "Tensor w", "Tensor? scale", "Tensor? bias", "Tensor? add", "Tensor(a!)? running_mean", "Tensor(b!)? running_var"],
    "(Tensor, Tensor, Tensor, Tensor)",
    False,
    _conv_batch_norm_fake,
    gradients=(_keep_of_conv_batch_norm, _conv_batch_norm_gradients),
)
conv_batch_norm_backward = _operator(
    "conv_batch_norm_backward",
    ["Tensor dy", "Tensor x", "Tensor w", "Tensor z", "Tensor? scale", "Tensor mean", "Tensor inv", "Tensor? last"],
    "Tensor[]",
    False,
    _conv_batch_norm_backward_fake,
    gradients=(_keep_nothing, _refuse_gradients),
)


# Two linear layers with an activation between them: one call and one node, whose gradients are one call too.


def _mlp_fake(x, up, up_bias, down, down_bias, attributes):
    hidden = x.new_empty((*x.shape[:-1], up.shape[0]))
    return x.new_empty((*x.shape[:-1], down.shape[0])), hidden, torch.empty_like(hidden)


def _mlp_backward_fake(dy, x, up, down, pre, hidden, attributes):
    a = parse(attributes.split("|", 1)[0])
    made = (x.new_empty(x.shape), up, up[:, 0], down, down[:, 0])
    made = [like.new_empty(like.shape, dtype=_WIDTHS[a[f"as{place}"]] if f"as{place}" in a else x.dtype) for place, like in enumerate(made)]
    return [result for result, wanted in zip(made, a["wanted"]) if wanted == "1"]


def _keep_of_mlp(ctx, inputs, used, output):
    x, up, up_bias, down, down_bias, attributes = used
    _, pre, hidden = output
    biases = (bias is not None and bias.dtype != x.dtype and bias.dtype for bias in (up_bias, down_bias))
    ctx.types += _words_of_biases(*biases)
    # What the call was given is kept for the gradients of gradients, which are those of the layers one by one.
    ctx.save_for_backward(x, up, down, pre, hidden, *inputs[:5])
    ctx.attributes, ctx.policy = attributes, _current_policy()
    ctx.mark_non_differentiable(pre, hidden)
    return output


@functools.lru_cache(maxsize=64)
def _words_of_biases(*dtypes):
    """The types of biases' gradients, where they are not those of the other operands."""
    names = {dtype: name for name, dtype in _WIDTHS.items()}
    return "".join(f" as{place}={names[dtype]}" for place, dtype in zip((2, 4), dtypes) if dtype)


@functools.lru_cache(maxsize=4096)
def _words_of_mlp(attributes, types, wanted):
    """The attributes of the gradients of a call, from those of the call."""
    return f"wanted={''.join('01'[want] for want in wanted)}{types}|{attributes}"


def _mlp_gradients(ctx, dy, *_):
    wanted = ctx.needs_input_grad[:5]
    gradients = [None] * 6
    if not any(wanted):
        return tuple(gradients)
    x, up, down, pre, hidden, *given = ctx.saved_tensors
    if torch.is_grad_enabled():
        with _policy.policy(_native.numbered_policy(ctx.policy)):
            found = _mlp_gradients_to_differentiate(given, dy, ctx.attributes, wanted)
    else:
        found = _each_result(mlp_backward.again(ctx.policy, dy, x, up, down, pre, hidden, _words_of_mlp(ctx.attributes, ctx.types, wanted)))
    found = iter(found)
    gradients[:5] = [next(found) if want else None for want in wanted]
    return tuple(gradients)


def _mlp_gradients_to_differentiate(given, dy, attributes, wanted):
    """The gradients that are wanted, as functions of `dy` and of the tensors that have gradients themselves."""
    x, up, up_bias, down, down_bias = given
    x, up, down = (value.to(dy.dtype) for value in (x, up, down))
    y = linear(activation(linear(x, up, up_bias, ""), attributes), down, down_bias, "")
    return torch.autograd.grad(y, [value for value, want in zip(given, wanted) if want], dy, create_graph=True)


def _refuse_gradients_of_mlp(ctx, *_):
    raise UnsupportedError("this gradient of two linear layers has no gradient; call the layers one by one to have one")


_MLP = ["Tensor x", "Tensor up", "Tensor? up_bias", "Tensor down", "Tensor? down_bias"]
mlp = _operator("mlp", _MLP, "(Tensor, Tensor, Tensor)", False, _mlp_fake, gradients=(_keep_of_mlp, _mlp_gradients))
mlp_inference = _operator("mlp_inference", _MLP, "Tensor", False, lambda *inputs: _mlp_fake(*inputs)[0], recorded=lambda *inputs: mlp(*inputs)[0])
mlp_backward = _operator(
    "mlp_backward",
    ["Tensor dy", "Tensor x", "Tensor up", "Tensor down", "Tensor pre", "Tensor hidden"],
    "Tensor[]",
    False,
    _mlp_backward_fake,
    gradients=(_keep_nothing, _refuse_gradients_of_mlp),
)


def mlp_in_mode(*inputs):
    """What `mlp` computes, by the operator for inference where gradients are not recorded."""
    return mlp(*inputs)[0] if is_recorded() else mlp_inference(*inputs)


# Attention. Its gradients share their scores' sums, so they are an operator of their own.


def _in_order_of(x, shape):
    """An empty tensor of that shape, its dims in memory as those of `x` are."""
    if x.is_contiguous():
        return x.new_empty(shape)
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


def _attention_fake(q, k, v, beside, slopes, q_offsets, kv_offsets, kv_lengths, page_table, state, q_descale, k_descale, v_descale, block_map, mask_blocks, sinks, attributes):
    wide = torch.float64 if torch.float64 in (q.dtype, beside.dtype if beside is not None else None) else torch.float32
    elements = int(parse(attributes)["values"]) if v is None else v.shape[3]
    o = _in_order_of(q, (*q.shape[:3], elements))
    o = o.to(torch.bfloat16) if q.dtype in OF_8_BITS else o
    return o, q.new_empty((*q.shape[:3], 1), dtype=wide)


#: What attributes say of attention to a cache, which has no gradient: what is written into a cache, and turned before, is so behind autograd's back.
OF_CACHE = " cache=1"
#: What attention takes without giving it back: results beside queries of these are bf16, and there are no gradients.
OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def _attention_backward_fake(d_o, q, k, v, o, total, beside, slopes, q_offsets, kv_offsets, kv_lengths, state, block_map, mask_blocks, sinks, attributes):
    return [_in_order_of(of, of.shape) for of, wanted in zip((q, k, v, beside, sinks), parse(attributes)["wanted"]) if wanted == "1"]


def _keep_of_attention(ctx, inputs, used, output):
    q, k, v, beside, slopes, q_offsets, kv_offsets, kv_lengths, page_table, state, *_, block_map, mask_blocks, sinks, attributes = inputs
    # The state draws the same mask again.
    ctx.save_for_backward(q, k, v, *output, beside, slopes, q_offsets, kv_offsets, kv_lengths, state, block_map, mask_blocks, sinks)
    ctx.attributes, ctx.policy = attributes, _current_policy()
    ctx.is_of_8_bits = k.dtype in OF_8_BITS
    ctx.is_paged, ctx.is_latent, ctx.is_of_cache = page_table is not None, v is None, OF_CACHE in attributes
    ctx.mark_non_differentiable(output[1])
    return output


@functools.lru_cache(maxsize=64)
def _made_deterministic(policy):
    """The number of the same policy with results that repeat bit for bit."""
    return _native.policy_number(_native.numbered_policy(policy).made_deterministic())


def _attention_gradients(ctx, d_o, *_):
    needs = ctx.needs_input_grad
    if ctx.is_of_8_bits:
        raise UnsupportedError("attention of 8-bit floats has no gradient; queries, keys and values are of 16 bits or more where one is wanted")
    if ctx.is_latent:
        raise UnsupportedError("attention to keys that hold their values has no gradient in this package; use flash_attn_func where one is wanted")
    if ctx.is_paged:
        raise UnsupportedError("attention to pages of keys and values has no gradient in this package; use flash_attn_func or flash_attn_varlen_func, which take keys side by side, where one is wanted")
    if ctx.is_of_cache:
        raise UnsupportedError("attention to a cache of keys and values, which is written to in place, has no gradient in this package; use flash_attn_func where one is wanted")
    if needs[4]:
        raise UnsupportedError("the slopes of attention have no gradient in this package; they are no variables")
    # Queries, keys, values, the bias, and the sinks.
    wanted, places = (*needs[:4], needs[15]), (0, 1, 2, 3, 15)
    gradients = [None] * len(needs)
    if any(wanted):
        words = f"{ctx.attributes} wanted={''.join('01'[want] for want in wanted)}"
        policy = _made_deterministic(ctx.policy) if torch.are_deterministic_algorithms_enabled() else ctx.policy
        found = iter(_each_result(attention_backward.again(policy, d_o, *ctx.saved_tensors, words)))
        for place in itertools.compress(places, wanted):
            gradients[place] = next(found)
    return tuple(gradients)


def _refuse_gradients_of_attention(ctx, *_):
    raise UnsupportedError("the gradient of attention has no gradient; compose attention from products and softmax to have one")


attention = _operator(
    "attention",
    [
        "Tensor q",
        "Tensor k",
        "Tensor? v",
        "Tensor? beside",
        "Tensor? slopes",
        "Tensor? q_offsets",
        "Tensor? kv_offsets",
        "Tensor? kv_lengths",
        "Tensor? page_table",
        "Tensor? state",
        "Tensor? q_descale",
        "Tensor? k_descale",
        "Tensor? v_descale",
        "Tensor? block_map",
        "Tensor? mask_blocks",
        "Tensor? sinks",
    ],
    "(Tensor, Tensor)",
    False,
    _attention_fake,
    gradients=(_keep_of_attention, _attention_gradients),
)
attention_backward = _operator(
    "attention_backward",
    [
        "Tensor d_o",
        "Tensor q",
        "Tensor k",
        "Tensor v",
        "Tensor o",
        "Tensor total",
        "Tensor? beside",
        "Tensor? slopes",
        "Tensor? q_offsets",
        "Tensor? kv_offsets",
        "Tensor? kv_lengths",
        "Tensor? state",
        "Tensor? block_map",
        "Tensor? mask_blocks",
        "Tensor? sinks",
    ],
    "Tensor[]",
    False,
    _attention_backward_fake,
    gradients=(_keep_nothing, _refuse_gradients_of_attention),
)


# Dropout. The state draws the same mask again, so its gradient is the same function of dy.


def _dropout_fake(x, state, attributes):
    return torch.empty_like(x)


def _keep_of_dropout(ctx, inputs, used, output):
    _, state, attributes = inputs
    ctx.save_for_backward(state)
    ctx.attributes, ctx.policy = attributes, _current_policy()
    return output


def _gradient_of_dropout(ctx, dy, *_):
    (state,) = ctx.saved_tensors
    # The same mask and factor, without what is added.
    words = ctx.attributes + " gradient=1" if " moments=1" in ctx.attributes and " gradient=1" not in ctx.attributes else ctx.attributes
    return dropout.again(ctx.policy, dy, state, words), None, None


# Gated linear units. The gradient of both halves is one pass, which no rule of differentiation gives.


def _glu_fake(x, attributes):
    axis = int(parse(attributes)["axis"])
    return _in_order_of(x, (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :]))


def _keep_of_glu(ctx, inputs, used, output):
    x, attributes = inputs
    ctx.save_for_backward(x)
    ctx.attributes, ctx.policy = attributes, _current_policy()
    return output


def _gradient_of_glu(ctx, dy, *_):
    return glu_backward.again(ctx.policy, dy, *ctx.saved_tensors, ctx.attributes), None


def _refuse_gradients_of_glu(ctx, *_):
    raise UnsupportedError("the gradient of a gated linear unit has no gradient; compose the unit from a sigmoid and a product to have one")


glu = _operator(
    "glu",
    ["Tensor x"],
    "Tensor",
    False,
    _glu_fake,
    lambda x, attributes: functional.glu(x, int(parse(attributes)["axis"])),
    gradients=(_keep_of_glu, _gradient_of_glu),
)
glu_backward = _operator(
    "glu_backward",
    ["Tensor dy", "Tensor x"],
    "Tensor",
    False,
    lambda dy, x, attributes: torch.empty_like(x),
    gradients=(_keep_nothing, _refuse_gradients_of_glu),
)


def _scan_decomposed(x, attributes):
    a = parse(attributes)
    axis, flips = int(a["axis"]), a.get("reverse") == "1" and x.dim() > 0
    x = x.flip(axis) if flips else x
    y = {"add": torch.cumsum, "mul": torch.cumprod, "log_sum_exp": torch.logcumsumexp}[a["f"]](x, axis)
    return y.flip(axis) if flips else y


def _keep_of_scan(ctx, inputs, used, output):
    # The gradient of a sum is the sum of `dy` the other way, which needs nothing of the call.
    x, attributes = inputs
    ctx.save_for_backward(*(() if attributes.startswith("f=add ") else (x,)))
    ctx.attributes, ctx.policy = attributes, _current_policy()
    return output


def _gradient_of_scan(ctx, dy, *_):
    if not ctx.saved_tensors:
        forward, is_reversed, _ = ctx.attributes.partition(" reverse=1")
        return scan.again(ctx.policy, dy, forward if is_reversed else forward + " reverse=1"), None
    return gradient.again(ctx.policy, dy, *ctx.saved_tensors, "of=scan wrt=0|" + ctx.attributes, ()), None


scan = _operator(
    "scan", ["Tensor x"], "Tensor", False, _elements_fake, _scan_decomposed, gradients=(_keep_of_scan, _gradient_of_scan)
)



def _scan_with_place_fake(x, attributes):
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def _keep_of_scan_with_place(ctx, inputs, used, output):
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.axis = int(parse(inputs[1])["axis"])
    return output


def _gradient_of_scan_with_place(ctx, dy, *_):
    # By an operator of PyTorch's: no op of the library gathers or scatters along an axis.
    (places,) = ctx.saved_tensors
    return torch.zeros_like(dy).scatter_add(ctx.axis, places, dy), None


scan_with_place = _operator(
    "scan_with_place",
    ["Tensor x"],
    "(Tensor, Tensor)",
    False,
    _scan_with_place_fake,
    gradients=(_keep_of_scan_with_place, _gradient_of_scan_with_place),
)

dropout = _operator(
    "dropout",
    ["Tensor x", "Tensor state"],
    "Tensor",
    False,
    _dropout_fake,
    gradients=(_keep_of_dropout, _gradient_of_dropout),
)
class_loss = _operator(
    "class_loss", ["Tensor logits", "Tensor targets", "Tensor? weights"], "Tensor", False, _class_loss_fake
)


def _element_loss_fake(x, target, weight, positive, attributes):
    return torch.empty_like(x) if parse(attributes).get("reduction", "mean") == "none" else x.new_empty(())


# A function with steps behind it, which the compiler's pass makes (`_fusion`) where gradients have been taken already.


def _fused_fake(*inputs):
    *tensors, attributes, dims = inputs
    head, own = attributes.split(";", 1)[0], attributes.rsplit(";", 1)[1]
    a = parse(head)
    name, count = a["of"], int(a["tensors"])
    places, has_dims = len(_TENSORS[name]), name in ("gradient", "conv_dgrad")
    given = [*tensors[:count], *[None] * (places - count)]
    first = _each_result(_FAKES[name](*given, own, *([dims] if has_dims else [])))[0]
    return torch.empty_like(first, dtype=_WIDTHS[a["type"]]), first


def _refuse_gradients_of_fused(ctx, *_):
    raise UnsupportedError("a call with steps behind it is made where gradients have been taken, and has none; call function and steps by themselves")


_FUSED = ["Tensor a", *(f"Tensor? {name}" for name in "bcdefghijklm")]
fused = _operator(
    "fused", _FUSED, "Tensor", True, lambda *inputs: _fused_fake(*inputs)[0], gradients=(_keep_nothing, _refuse_gradients_of_fused)
)
fused_keeping = _operator("fused_keeping", _FUSED, "(Tensor, Tensor)", True, _fused_fake, gradients=(_keep_nothing, _refuse_gradients_of_fused))

element_loss = _operator(
    "element_loss",
    ["Tensor x", "Tensor target", "Tensor? weight", "Tensor? positive"],
    "Tensor",
    False,
    _element_loss_fake,
    _element_loss_decomposed,
)
