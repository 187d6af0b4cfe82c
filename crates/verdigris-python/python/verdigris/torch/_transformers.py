"""Modules of Hugging Face's transformers: RMS norms, activations, gated feed-forward layers, attention with rotary positions or without, and the layers of both, whose
residuals are added by the products in front of them.

Each family of models has classes of its own, which differ little or not at all. A module is taken where a trial shows that it computes what ours does: its own
`forward` and ours are called with small layers, angles, a cache and an attention that record what they are given. Ours then calls what transformers would: its cache, and
the attention that the model is set to (`register_transformers`).

The weights of queries, keys and values are moved one behind the other in memory, so that they are one product; they stay three parameters of the same names. Where
something moves them apart again, three products are computed.
"""

import functools
import inspect
import sys
import threading

import torch

from . import _block, _chains, _decoder, _ops, _sdpa, nn
from . import functional as F

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
#: What the forwards of attention take by these names alone.
_DECODER = ("self", "hidden_states", "position_embeddings", "attention_mask")
_ENCODER = ("self", "hidden_states", "attention_mask")
#: What the forward of a decoder's layer takes beside its input and the cache, all of which attention is given.
_LAYER = {"attention_mask", "position_ids", "use_cache", "position_embeddings"}
#: What forwards call the cache: today's tell it what they were given, those of older transformers, which have the second name, do not.
_CACHES = ("cache", "past_key_values")
_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_LINEARS = (torch.nn.Linear, nn.Linear)
#: What a trial's results may differ by.
_CLOSE = 1e-9
#: What activations may be, as the operators call them.
_WORDS = ("f=silu", "f=gelu_erf", "f=gelu_tanh", "f=relu", "f=mish", "f=sigmoid", "f=tanh", "f=hard_swish")


def _is_left(*modules):
    """Whether modules are to be called by themselves: a compiler looks at them, or somebody wants to see what they are given."""
    return _ops._is_compiling() or any(map(_chains._is_watched, modules))


def _is_cast(x):
    return torch.is_autocast_enabled(x.device.type)


@functools.lru_cache(maxsize=None)
def _cache_of(kind):
    """What the forward of a class calls the cache; None if it takes none."""
    return next((name for name in _CACHES if name in _parameters_of(kind.forward)), None)


# What the modules compute. `theirs` is the forward that transformers has.


def _norm(m, theirs, x):
    if x.dtype != m.weight.dtype or x.shape[-1:] != m.weight.shape:
        return theirs(m, x)
    y = F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _gated_mlp(m, theirs, x, residual=None):
    layers = (m.gate_proj, m.up_proj, m.down_proj)
    if x.dim() == 0 or any(type(layer) is not nn.Linear for layer in layers) or _is_left(*layers, m.act_fn):
        return _plus(residual, theirs(m, x))
    is_step = residual is not None and _is_step(residual, x, layers[-1])
    y = _decoder.gated_in_mode(x, *(layer.weight for layer in layers), residual if is_step else None, m._word)
    return y if is_step else _plus(residual, y)


def _plus(residual, y):
    return y if residual is None else residual + y


def _is_step(residual, x, layer):
    """Whether the sum of a residual and the result of a layer of `x` may be a step of the product: nothing is cast or broadcast."""
    return x.dtype == residual.dtype == layer.weight.dtype and residual.shape == (*x.shape[:-1], layer.weight.shape[0]) and not _is_cast(x)


def _decoder_layer(m, theirs, *inputs, **options):
    if _ops._is_compiling() or len(inputs) + ("hidden_states" in options) != 1 or not {*_LAYER, _cache_of(m._theirs)} <= options.keys():
        return theirs(m, *inputs, **options)
    x = inputs[0] if inputs else options.pop("hidden_states")
    attention, mlp = m.self_attn, m.mlp
    normed = m.input_layernorm(x)
    if _computes(attention, _decoder_attention):
        x = _decoder_attention(attention, attention._theirs.forward, normed, residual=x, **options)[0]
    else:
        x = x + attention(hidden_states=normed, **options)[0]
    normed = m.post_attention_layernorm(x)
    return _gated_mlp(mlp, mlp._theirs.forward, normed, x) if _computes(mlp, _gated_mlp) else x + mlp(normed)


def _computes(module, compute):
    """Whether a module computes by one of these functions, and nobody asks to see it."""
    return getattr(type(module), "_compute", None) is compute and "forward" not in vars(module) and not _chains._is_watched(module)


def _decoder_attention(m, theirs, hidden_states, position_embeddings=None, attention_mask=None, cache=None, residual=None, **kwargs):
    x, layers, called = hidden_states, [getattr(m, name) for name in _PROJECTIONS], _cache_of(m._theirs)
    cache = kwargs.pop(called, cache)
    # A cache under another name is theirs to understand.
    is_other = position_embeddings is None or any(name in kwargs for name in _CACHES) or x.dim() != 3 or _ops._is_compiling()
    if is_other or not _are_taken(m, x, *position_embeddings):
        y, weights = theirs(m, x, position_embeddings=position_embeddings, attention_mask=attention_mask, **{called: cache}, **kwargs)
        return _plus(residual, y), weights
    cos, sin = (angles.unsqueeze(2) for angles in position_embeddings)
    packed = None if _is_left(*layers) or _is_cast(x) else m._packed()
    y = _in_one_plan(m, x, packed, position_embeddings, attention_mask, cache, kwargs, residual)
    if y is not None:
        return y, None
    if packed is not None:
        q, k, v = _decoder.projections(x, *packed, _counts(m), m.head_dim, cos, sin)
    else:
        q, k, v = (layer(x).unflatten(-1, (-1, m.head_dim)) for layer in layers)
        q, k = (_decoder.rotary(heads, cos, sin, "") for heads in (q, k))
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    if cache is not None:
        k, v = cache.update(k, v, m.layer_idx, **({"kwargs": kwargs} if called == "cache" else {}))
    return _attended(m, x, q, k, v, attention_mask, kwargs, residual)


def _encoder_attention(m, theirs, hidden_states, attention_mask=None, **kwargs):
    x, layers = hidden_states, [getattr(m, name) for name in _PROJECTIONS]
    packed = None if x.dim() != 3 or _is_left(*layers) or _is_cast(x) else m._packed()
    if packed is None:
        return theirs(m, x, attention_mask, **kwargs)
    y = _in_one_plan(m, x, packed, (None, None), attention_mask, None, kwargs)
    if y is not None:
        return y, None
    q, k, v = (heads.transpose(1, 2) for heads in _decoder.projections(x, *packed, _counts(m), m.head_dim))
    return _attended(m, x, q, k, v, attention_mask, kwargs)


def _are_taken(m, x, cos, sin):
    """Whether angles are one for each element of a head, and of the type of heads."""
    is_typed = _is_cast(x) or x.dtype == cos.dtype == sin.dtype == m.q_proj.weight.dtype
    is_whole = cos.dim() == sin.dim() == 3 and cos.shape[-1] == sin.shape[-1] == m.head_dim and m.head_dim % 2 == 0
    return is_typed and is_whole and not (cos.requires_grad or sin.requires_grad)


def _in_one_plan(m, x, packed, angles, mask, cache, kwargs, residual=None):
    """Projections, rotary positions, the cache, attention and the last layer as one call, in inference, where the model is set to attention of this package; `None` where
    they are several. A cache is one of fixed size behind which one new token stands: others make new tensors, which is theirs to do."""
    layer, room = m.o_proj, sys.modules[m._theirs.__module__]
    if packed is None or type(layer) is not nn.Linear or _is_left(layer) or m.training and m.attention_dropout:
        return None
    attend = room.ALL_ATTENTION_FUNCTIONS.get(m.config._attn_implementation)
    weight, bias, parameters = packed
    last = (layer.weight, layer.bias)
    if attend is not _sdpa.transformers_attention or F._wants_gradient([x, residual, *parameters, *last]):
        return None
    # A bias of queries, keys and values of another type, or what attention would refuse, goes the other way.
    words = {**vars(m).get("_words", {}), **kwargs}
    if not _block.is_one_type(x, weight, *last, *angles) or any(words.get(name) is not None for name in ("s_aux", "position_bias")):
        return None
    caches = lengths = causal = None
    if cache is not None:
        caches, lengths, count = _fixed_cache(cache, m.layer_idx, x, mask)
        if caches is None:
            return None
        mask = None
    elif mask is not None:
        keys = x.shape[1]
        padding = _sdpa.padding_of(mask, keys, keys)
        mask, causal = (mask[..., :keys], None) if padding is None else (padding, "top_left")
        mask = F._rows_of_keys(mask.view(torch.uint8) if mask.dtype == torch.bool else mask, keys)
    else:
        is_causal = words.get("is_causal")
        causal = "top_left" if x.shape[1] > 1 and (getattr(m, "is_causal", True) if is_causal is None else is_causal) else None
    heads, kv_heads, _ = _counts(m)
    scale = m.head_dim**-0.5 if m.scaling is None else m.scaling
    attention = F._attention_words(scale, causal, None, None, words.get("softcap"))
    is_step = residual is not None and _is_step(residual, x, layer)
    tensors = (x, weight, bias, *last, residual if is_step else None, *angles, *(caches or (None, None)), lengths, mask, None)
    y = _block.one_plan(*tensors, _block.words(attention, heads, kv_heads))
    if caches is not None:
        # What the cache would have counted itself.
        count.add_(x.shape[1])
    return y if is_step else _plus(residual, y)


def _fixed_cache(cache, number, x, mask):
    """Keys and values `[batch, room, heads, elements]` of a layer of a static cache, how many there are with one new token, and the layer's own count; `None` where the cache
    is another one."""
    nothing = None, None, None
    lengths = _sdpa.lengths_of(mask)
    layers = getattr(cache, "layers", None)
    if lengths is None or x.shape[1] != 1 or not layers or number is None or number >= len(layers) or getattr(cache, "offloading", False):
        return nothing
    kinds = sys.modules.get("transformers.cache_utils")
    layer, count = layers[number], getattr(layers[number], "cumulative_length", None)
    known = getattr(kinds, "StaticLayer", None), getattr(kinds, "StaticCache", None)
    if (type(layer), type(cache)) != known or not layer.is_initialized or not isinstance(count, torch.Tensor) or layer.keys.shape[2] != mask.shape[-1]:
        return nothing
    if not _block.is_one_type(x, layer.keys, layer.values) or layer.keys.shape != layer.values.shape or layer.keys.shape[0] != x.shape[0]:
        return nothing
    return (layer.keys.transpose(1, 2), layer.values.transpose(1, 2)), lengths, count


def _counts(m):
    return tuple(getattr(m, name).weight.shape[0] // m.head_dim for name in _PROJECTIONS)


def _attended(m, x, q, k, v, mask, kwargs, residual=None):
    """The attention that the model is set to, the last layer, and the residual."""
    room = sys.modules[m._theirs.__module__]
    attend = room.ALL_ATTENTION_FUNCTIONS.get_interface(m.config._attn_implementation, room.eager_attention_forward)
    dropout = m.attention_dropout if m.training else 0.0
    words = {**vars(m).get("_words", {}), **kwargs}
    o, weights = attend(m, q, k, v, mask, dropout=dropout, scaling=m.scaling, **words)
    o, layer = o.reshape(*x.shape[:-1], -1).contiguous(), m.o_proj
    if residual is not None and type(layer) is nn.Linear and not _is_left(layer) and _is_step(residual, o, layer):
        return _decoder.linear_add(o, layer.weight, layer.bias, residual), weights
    return _plus(residual, layer(o)), weights


# Weights one behind the other.


def _is_whole(tensor):
    """Whether a parameter has memory of its own alone."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _joined(tensors, may_move):
    """One tensor of all along the first dim, in whose memory they are then; None where they are not and may not be moved, or cannot."""
    first = tensors[0]
    if any(type(t) is not torch.nn.Parameter or t.dtype != first.dtype or t.device != first.device or t.shape[1:] != first.shape[1:] or t.is_meta for t in tensors):
        return None
    sizes = [t.shape[0] for t in tensors]
    places = [t.data_ptr() for t in tensors]
    is_joined = all(
        t.is_contiguous() and t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for t in tensors
    ) and all(place + t.numel() * t.element_size() == after for place, after, t in zip(places, places[1:], tensors))
    with torch.no_grad():
        if is_joined:
            return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
        if not all(map(may_move, tensors)):
            return None
        joined = torch.cat([t.detach() for t in tensors])
        for tensor, part in zip(tensors, joined.split(sizes)):
            tensor.data = part
    return joined


class _Packed:
    """What attention modules share: the weights of queries, keys and values as one."""

    def _pack(self, may_move=_is_whole):
        """Moves the weights together. Where they may not be, as views of somebody's buffer may not, they are used one by one."""
        self.__dict__.pop("_pack_of", None)
        layers = [getattr(self, name) for name in _PROJECTIONS]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        is_alike = all(bias is None for bias in biases) or all(bias is not None for bias in biases)
        if not (is_alike and all(type(layer) in _LINEARS for layer in layers)):
            return
        weight = _joined(weights, may_move)
        bias = None if weight is None or biases[0] is None else _joined(biases, may_move)
        if weight is None or biases[0] is not None and bias is None:
            return
        parameters = [*weights, *(biases if bias is not None else ())]
        self.__dict__["_pack_of"] = ([t.data_ptr() for t in parameters], weight, bias)

    def _packed(self):
        """The weight of all three, their bias, and the parameters; None where they are not one behind the other any more. What is kept holds their memory, so that an
        address is that of nothing else."""
        found = self.__dict__.get("_pack_of")
        if found is None:
            return None
        places, weight, bias = found
        layers = [getattr(self, name) for name in _PROJECTIONS]
        parameters = [layer.weight for layer in layers] + ([] if bias is None else [layer.bias for layer in layers])
        if any(t is None or t.data_ptr() != place for t, place in zip(parameters, places)):
            # Their former memory is not to be held for nobody.
            self.__dict__.pop("_pack_of", None)
            return None
        if any(type(layer) is not nn.Linear or bias is None and layer.bias is not None for layer in layers):
            return None
        return weight, bias, parameters

    def _apply(self, fn, *arguments, **keywords):
        result = super()._apply(fn, *arguments, **keywords)
        self._pack()
        return result

    def __setstate__(self, state):
        super().__setstate__(state)
        # Tensors that were just made are nobody's views, but may have come with all of the memory that they were in.
        self._pack(lambda tensor: True)


# Trials.


class _Config:
    """A module's configuration, but for the attention."""

    def __init__(self, of):
        self._of = of

    def __getattr__(self, name):
        return _TRIAL if name == "_attn_implementation" else getattr(self._of, name)


class _Cache:
    """A cache that records what it is given."""

    def __init__(self):
        self.seen = []

    def update(self, *arguments, **keywords):
        self.seen.append((arguments, keywords))
        return 2 * arguments[0], 3 * arguments[1]


_TRIAL = "verdigris trial"
_trying = threading.Lock()


def _stand_in(module, layers, **attributes):
    """The module with small layers in place of its own."""
    made = object.__new__(type(module))
    made.__dict__ = {**module.__dict__, "_modules": {**module._modules, **layers}, **attributes}
    return made


def _layers(has_bias, **shapes):
    """Small layers of f64 by name, from a generator of their own."""
    generator, made = torch.Generator().manual_seed(3), {}
    for name, (inputs, outputs) in shapes.items():
        layer = made[name] = torch.nn.Linear(inputs, outputs, bias=has_bias, device="meta", dtype=torch.float64)
        for which, parameter in list(layer.named_parameters()):
            setattr(layer, which, torch.nn.Parameter(torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")))
    return made


def _is_same(a, b, most=_CLOSE):
    """Whether two results are alike: tensors by their values, containers by what is in them."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a - b).abs() <= most * (1 + b.abs())).all())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_is_same(x, y, most) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[name], b[name], most) for name in a)
    return a is b or type(a) is type(b) and a == b


def _tried(function, *arguments, **keywords):
    """What a function gives, or that it raises."""
    try:
        return function(*arguments, **keywords)
    except Exception:  # whatever a forward of others raises, it is not what ours computes
        return None


_DIFFERS = "a trial of its forward gives another result"


def _draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64, device="cpu").to(dtype)


def _try_norm(module):
    weight = module.weight
    if list(module._parameters) != ["weight"] or module._modules or module._buffers or weight is None or weight.dim() != 1:
        return "it has other tensors than a weight"
    x, small = _draw(3, 8, dtype=torch.float32), torch.nn.Parameter(_draw(8, dtype=torch.float32) + 2)
    # Rows so small that what is added to their mean square matters.
    x = x * torch.tensor([[1.0], [1e-3], [1e-5]])
    stand_in = _stand_in(module, {}, _parameters={"weight": small})
    with torch.no_grad():
        right = small.double() * x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        found = _tried(type(module).forward, stand_in, x)
    return None if _is_same(found, right.float(), 1e-5) else _DIFFERS


def _word_of(activation):
    """What the operators call an activation; None if it is none that they have."""
    word = vars(activation).get("_word")
    if word is not None:
        return word
    x = torch.linspace(-6.0, 6.0, 97, dtype=torch.float64, device="cpu")
    found = _tried(activation, x)
    return next((word for word in _WORDS if _is_same(found, _ops._activation_decomposed(x, word))), None)


def _try_activation(module):
    if list(module._parameters) or module._buffers or module._modules:
        return "it has parameters or modules"
    return None if _word_of(module) is not None else "it is no activation that this package has"


def _try_gated_mlp(module):
    layers = [getattr(module, name) for name in _GATED]
    if set(module._modules) != {*_GATED, "act_fn"} or any(type(layer) not in _LINEARS for layer in layers):
        return "its layers are not PyTorch's Linear, or it has others"
    if any(layer.bias is not None for layer in layers):
        return "its layers have biases"
    word = _word_of(module.act_fn)
    if word is None:
        return "its activation is none that this package has"
    small = _layers(False, gate_proj=(6, 5), up_proj=(6, 5), down_proj=(5, 7))
    x = _draw(2, 3, 6)
    with torch.no_grad():
        gate, up, down = small.values()
        right = down(_ops._activation_decomposed(gate(x), word) * up(x))
        found = _tried(type(module).forward, _stand_in(module, small), x)
    return None if _is_same(found, right) else _DIFFERS


def _try_attention(module, compute):
    layers = [getattr(module, name, None) for name in (*_PROJECTIONS, "o_proj")]
    if set(module._modules) != {*_PROJECTIONS, "o_proj"} or any(type(layer) not in _LINEARS for layer in layers):
        return "its projections are not PyTorch's Linear, or it has modules beside them"
    is_decoder = compute is _decoder_attention
    called = _cache_of(type(module))
    if _parameters_of(type(module).forward) != ((*_DECODER, called) if is_decoder else _ENCODER):
        return "its forward takes other arguments"
    room = sys.modules[type(module).__module__]
    if not hasattr(room, "ALL_ATTENTION_FUNCTIONS") or not hasattr(room, "eager_attention_forward") or not all(
        hasattr(module, name) for name in ("config", "head_dim", "scaling", "attention_dropout")
    ):
        return "it is made for another transformers"
    small = _layers(layers[0].bias is not None, q_proj=(6, 16), k_proj=(6, 8), v_proj=(6, 8), o_proj=(16, 6))
    stand_in = _stand_in(module, small, head_dim=4, config=_Config(module.config), _theirs=type(module), _words={}, attention_dropout=0.25)
    stand_in.__dict__["_packed"] = lambda: None
    seen = []

    def attend(of, q, k, v, mask, **keywords):
        seen.append((q, k, v, mask, keywords))
        return q.transpose(1, 2).contiguous() * 5, 7

    x, angles, mask = _draw(2, 3, 6), (_draw(2, 3, 4), _draw(2, 3, 4) + 1), _draw(2, 1, 3, 3)
    with _trying, torch.no_grad():
        room.ALL_ATTENTION_FUNCTIONS[_TRIAL] = attend
        try:
            for training in (False, True):
                stand_in.__dict__["training"] = training
                results = []
                for forward in (type(module).forward, functools.partial(compute, theirs=_other) if is_decoder else _unpacked):
                    cache = _Cache()
                    given = dict(position_embeddings=angles, **{called: cache if training else None}) if is_decoder else {}
                    call = functools.partial(forward, stand_in, hidden_states=x, attention_mask=mask if training else None, **given, note=11)
                    results.append((_tried(call), seen[:], cache.seen))
                    seen.clear()
                    if not training and len(results) == 1 and results[0][1]:
                        # What their attention is told beside: a window, for one.
                        told = results[0][1][0][-1]
                        stand_in.__dict__["_words"] = {name: told[name] for name in told if name not in ("dropout", "scaling", "note")}
                if results[0][0] is None or not _is_same(*results):
                    return _DIFFERS
        finally:
            del room.ALL_ATTENTION_FUNCTIONS[_TRIAL]
    words = stand_in.__dict__["_words"]
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in words.values()):
        return "its attention is told what may change"
    return None, words


class _Part(torch.nn.Module):
    """A part of a layer that records what it is given."""

    def __init__(self, factor, seen):
        super().__init__()
        self.factor, self.seen = factor, seen

    def forward(self, *inputs, **options):
        self.seen.append((self.factor, inputs, options))
        y = self.factor * (inputs[0] if inputs else options["hidden_states"]) + 1
        return (y, None) if options else y


def _try_decoder_layer(module):
    if set(module._modules) != set(_PARTS):
        return "it has other modules than attention, two norms and a feed-forward half"
    names = {*_LAYER, _cache_of(type(module))}
    if set(_parameters_of(type(module).forward)) != {"self", "hidden_states", *names}:
        return "its forward takes other arguments"
    results, x, options = [], _draw(2, 3, 6), {name: object() for name in (*names, "note")}
    for forward in (type(module).forward, functools.partial(_decoder_layer, theirs=_other)):
        seen = []
        parts = {name: _Part(2.0 + number, seen) for number, name in enumerate(_PARTS)}
        results.append((_tried(forward, _stand_in(module, parts, _theirs=type(module)), hidden_states=x, **options), seen))
    return None if results[0][0] is not None and _is_same(*results) else _DIFFERS


def _other(*arguments, **keywords):
    raise NotImplementedError


def _unpacked(m, hidden_states, attention_mask=None, **kwargs):
    """What `_encoder_attention` computes, of layers that are not together."""
    q, k, v = (getattr(m, name)(hidden_states).unflatten(-1, (-1, m.head_dim)).transpose(1, 2) for name in _PROJECTIONS)
    return _attended(m, hidden_states, q, k, v, attention_mask, kwargs)


# Classes.


def _role_of(module):
    """What a module of transformers may be, by the names of what it has: the function that computes it; None where it is nothing that we have."""
    names = set(module._modules)
    if names >= {*_PROJECTIONS, "o_proj"}:
        has_angles = "position_embeddings" in _parameters_of(type(module).forward)
        return _decoder_attention if has_angles else _encoder_attention
    if names >= set(_PARTS) and "position_embeddings" in _parameters_of(type(module).forward):
        return _decoder_layer
    if names >= set(_GATED) and "act_fn" in names:
        return _gated_mlp
    if hasattr(module, "variance_epsilon") and "weight" in module._parameters:
        return _norm
    return _activation if type(module).__module__ == "transformers.activations" else None


def _parameters_of(function):
    code = inspect.unwrap(function).__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _activation(m, theirs, x):
    return _ops.activation(x, m._word)


@functools.lru_cache(maxsize=None)
def _class_of(base, compute):
    """The class derived from one of transformers' that computes by this package."""
    compute = globals()[compute]
    is_attention = compute in (_decoder_attention, _encoder_attention)

    class Module(*((_Packed,) if is_attention else ()), base):
        _theirs, _compute = base, staticmethod(compute)

        def _prepare(self):
            if is_attention:
                self._pack()

        def forward(self, *inputs, **options):
            return compute(self, base.forward, *inputs, **options)

        def __reduce_ex__(self, protocol):
            # The class has no name that a reader could find it by: it is made anew there.
            return _restored, (base, compute.__name__), {name: value for name, value in self.__dict__.items() if name != "_pack_of"}

    Module.__name__, Module.__qualname__, Module.__module__ = base.__name__, base.__qualname__, nn.__name__
    Module.__doc__ = f"`{base.__module__}.{base.__name__}`, computed by this package."
    return Module


def _restored(base, compute):
    derived = _class_of(base, compute)
    return derived.__new__(derived)


def is_known(kind):
    """Whether a class is of transformers."""
    return kind.__module__.split(".")[0] == "transformers"


def take(module):
    """Makes a module of transformers one of ours: None, or why it stays; False where it is nothing that this package computes by itself."""
    kind, compute = type(module), _role_of(module)
    if compute is None:
        return False
    if "forward" in vars(module):
        return "its forward is another one's"
    why, words = None, {}
    if compute in (_decoder_attention, _encoder_attention):
        found = _try_attention(module, compute)
        why, words = found if isinstance(found, tuple) else (found, {})
    else:
        tries = {_norm: _try_norm, _gated_mlp: _try_gated_mlp, _activation: _try_activation, _decoder_layer: _try_decoder_layer}
        why = tries[compute](module)
    if why is not None:
        return why
    if compute is _gated_mlp or compute is _activation:
        module.__dict__["_word"] = _word_of(module.act_fn if compute is _gated_mlp else module)
    elif words:
        module.__dict__["_words"] = words
    module.__class__ = _class_of(kind, compute.__name__)
    module._prepare()
    return None
