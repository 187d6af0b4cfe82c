"""Attention with the products around it: one call and one plan where no gradient is wanted, the functions one by one where one is."""

import torch

from .._errors import BindingError, GraphError, UnsupportedError
from . import _decoder, _ops
from . import functional as F


def _fake(x, weight, bias, last_weight, *others):
    return x.new_empty((*x.shape[:-1], last_weight.shape[0]))


def _refuse(ctx, *_):
    raise UnsupportedError("attention_block as an operator is of inference and has no gradient; verdigris.torch.attention_block has one without a cache")


one_plan = _ops._operator(
    "attention_block",
    [
        "Tensor x",
        "Tensor weight",
        "Tensor? bias",
        "Tensor last_weight",
        "Tensor? last_bias",
        "Tensor? residual",
        "Tensor? cos",
        "Tensor? sin",
        "Tensor(a!)? k_cache",
        "Tensor(b!)? v_cache",
        "Tensor? kv_lengths",
        "Tensor? beside",
        "Tensor? slopes",
    ],
    "Tensor",
    False,
    _fake,
    gradients=(_ops._keep_nothing, _refuse),
)


def words(attention, heads, kv_heads, interleaved=False, first=False):
    """The attributes of a block, from those of its attention."""
    return f"{attention} heads={heads} kv_heads={kv_heads}" + " interleaved=1" * interleaved + " first=1" * first


def is_one_type(x, *others):
    """Whether all tensors that there are are of the type of `x`, a floating-point one of at least 16 bits."""
    return x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and all(y is None or y.dtype == x.dtype for y in others)


def _in_halves(x, interleaved):
    """Pairs of neighbours as pairs of one element of each half."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else x


def _turned(x, rope, interleaved):
    """Heads `[batch, positions, heads, elements]`, turned by their angles."""
    if rope is None:
        return x
    whole = x.shape[-1]
    # Of half as many elements there is one for both of a pair.
    cos, sin = (torch.cat((angle, angle), -1) if angle.shape[-1] < whole else _in_halves(angle, interleaved) for angle in rope)
    turned = _decoder.rotary(_in_halves(x, interleaved), *(angle.unsqueeze(2).to(x.dtype) for angle in (cos, sin)), "")
    return turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if interleaved else turned


def _composed(x, weight, bias, last_weight, last_bias, residual, rope, beside, slopes, heads, kv_heads, interleaved, attention):
    """The same by the functions one by one, each of which has its gradient."""
    all_heads = heads + 2 * kv_heads
    made = F.linear(x, weight, bias).unflatten(-1, (all_heads, -1))
    both, v = made.split((heads + kv_heads, kv_heads), dim=2)
    q, k = _turned(both, rope, interleaved).split((heads, kv_heads), dim=2)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    o = _ops.attention(q, k, v, beside, slopes, None, None, None, None, None, *F._NO_DESCALES, *F._NO_BLOCKS, None, attention)[0]
    y = F.linear(o.transpose(1, 2).flatten(2), last_weight, last_bias)
    return y if residual is None else y + residual


def _check_types(*tensors):
    if not is_one_type(*tensors):
        types = ", ".join(str(y.dtype) for y in tensors if y is not None)
        raise GraphError(f"an attention block of {types}; input, weights and caches are of one floating-point type of at least 16 bits")


def _check_dims(x, weight, bias, last_weight, last_bias, rope, beside, slopes, caches, heads, kv_heads, keys):
    """Refuses dims that do not fit, alike with gradients and without."""
    b, positions, features = x.shape
    for name, w, told in (("qkv_weight", weight, "[(heads + 2 * kv_heads) * d, features]"), ("out_weight", last_weight, "[outputs, heads * d]")):
        if w.dim() != 2:
            raise GraphError(f"{name} of {tuple(w.shape)}; it is {told}")
    if weight.shape[1] != features:
        raise GraphError(f"qkv_weight takes {weight.shape[1]} features and x has {features}; they are as many")
    if weight.shape[0] % (heads + 2 * kv_heads):
        raise GraphError(f"{weight.shape[0]} outputs for {heads} heads of queries and {kv_heads} of keys and values each; the first weight has as many for each head")
    if heads % kv_heads:
        raise GraphError(f"{heads} heads of queries and {kv_heads} of keys; heads of queries are a multiple of those of keys")
    d = weight.shape[0] // (heads + 2 * kv_heads)
    if last_weight.shape[1] != heads * d:
        raise GraphError(f"out_weight takes {last_weight.shape[1]} values and {heads} heads of {d} elements have {heads * d}; they are as many")
    for name, given, w in (("qkv_bias", bias, weight), ("out_bias", last_bias, last_weight)):
        if given is not None and tuple(given.shape) not in ((w.shape[0],), (1,), ()):
            raise GraphError(f"{name} of {tuple(given.shape)} for {w.shape[0]} outputs; it has a number for each")
    if rope is not None:
        if d % 2:
            raise GraphError(f"angles for heads of {d} elements; they turn pairs of elements")
        if any(angle.dim() != 3 or angle.shape[0] not in (1, b) or angle.shape[1] != positions or angle.shape[2] not in (d, d // 2) for angle in rope):
            shapes = " and ".join(str(tuple(angle.shape)) for angle in rope)
            told = f"{b} times {positions} positions of {d} elements"
            raise GraphError(f"angles of dims {shapes} for {told}; they are [batch or 1, positions, elements of a head or half of these]")
    # What is beside the scores broadcasts to them from the right.
    for name, given, dims in (("attn_mask", beside, (b, heads, positions, keys)), ("alibi_slopes", slopes, (b, heads, 1, 1))):
        if given is not None and (given.dim() > 4 or any(size not in (1, own) for size, own in zip(reversed(given.shape), reversed(dims)))):
            what = "the scores" if given is beside else "batch and heads"
            raise GraphError(f"{name} of {tuple(given.shape)} for {what} {dims}; each dim is 1 or as many")
    for name, cache in zip(("k_cache", "v_cache"), caches):
        if cache is not None and (cache.dim() != 4 or (cache.shape[0], *cache.shape[2:]) != (b, kv_heads, d)):
            raise GraphError(f"{name} of {tuple(cache.shape)} for {b} sequences, {kv_heads} heads and {d} elements; it is [batch, room, kv_heads, d]")


def attention_block(
    x,
    qkv_weight,
    out_weight,
    *,
    heads,
    kv_heads=None,
    qkv_bias=None,
    out_bias=None,
    residual=None,
    rope=None,
    rope_interleaved=False,
    attn_mask=None,
    is_causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    scale=None,
    k_cache=None,
    v_cache=None,
    kv_lengths=None,
):
    """`linear(attention(linear(x, qkv_weight, qkv_bias)), out_weight, out_bias) + residual` of `x [batch, positions, features]`, as one plan.

    `qkv_weight` is `[(heads + 2 * kv_heads) * d, features]`: the heads of queries first, then those of keys (`kv_heads`, as many as `heads` where it is left out;
    several heads of queries read one of them), then those of values. `out_weight` is `[outputs, heads * d]`. Where no gradient is wanted that is the product
    with its bias, attention, and the product with its bias and the residual, without a copy between them, in one workspace; it is captured, cached and pinned as one call.

    `rope`: cosines and sines, each `[batch or 1, positions, d]` or `[batch or 1, positions, d / 2]`, of the positions of `x`; they turn elements `i` and `i + d / 2`
    of queries and keys together, or `2 * i` and `2 * i + 1` with `rope_interleaved`. That is one pass more, over queries and keys.

    `is_causal` and `window_size` count from the diagonal that ends at the last query and the last key. `attn_mask` is of bool (False leaves a key out) or added to the
    scores, to whose dims `[batch, heads, positions, keys]` it broadcasts; `alibi_slopes` is f32, `[heads]` or `[batch, heads]`. `softcap` and `scale` are as in `flash_attn_func`.

    With `k_cache` and `v_cache`, `[batch, room, kv_heads, d]` in any strides, the new keys (turned) and values are appended there, in place and within the plan, and attention
    reads the caches. `kv_lengths`, int32 `[batch]`, says how many positions of each sequence there are *with* the new ones, which are its last; nothing waits for the
    device, so a captured step goes on as its caller counts lengths up. A position below 0 or behind the room is not stored, and lengths count as the room above it.

        y = vt.attention_block(x, wqkv, wo, heads=32, kv_heads=8, rope=(cos, sin), is_causal=True, k_cache=k, v_cache=v, kv_lengths=lengths)

    Where a gradient is wanted the functions run one by one, and have theirs; with a cache `UnsupportedError` says so. Pages, 8-bit floats and dropout are not
    taken: `flash_attn_with_kvcache` and `flash_attn_func` have them."""
    kv_heads = heads if kv_heads is None else kv_heads
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count < 1:
            raise GraphError(f"{name} is {count}; it is at least 1")
    if x.dim() != 3:
        raise GraphError(f"x of {tuple(x.shape)}; it has three dims: [batch, positions, features]")
    if rope is not None and len(rope) != 2:
        raise GraphError(f"rope of {len(rope)} tensors; it is cosines and sines")
    caches = (k_cache, v_cache)
    if any((given is None) != (k_cache is None) for given in (v_cache, kv_lengths)):
        raise GraphError("k_cache, v_cache and kv_lengths; all three are given, or none")
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise GraphError(f"attn_mask of {attn_mask.dtype}; it is of bool or added to the scores")
    beside, keys = attn_mask, x.shape[1] if k_cache is None else k_cache.shape[1]
    if beside is not None:
        beside = F._rows_of_keys(beside.view(torch.uint8) if beside.dtype == torch.bool else beside, keys)
    d = qkv_weight.shape[0] // max(heads + 2 * kv_heads, 1)
    scale = max(d, 1) ** -0.5 if scale is None else scale
    if alibi_slopes is not None and alibi_slopes.dim() not in (1, 2):
        raise GraphError(f"alibi_slopes of {tuple(alibi_slopes.shape)}; they are [heads] or [batch, heads]")
    attention, slopes = F._flash_words(x, scale, is_causal, window_size, softcap, alibi_slopes)
    if residual is not None and residual.shape != (*x.shape[:2], out_weight.shape[0]):
        try:
            torch.broadcast_shapes(residual.shape, (*x.shape[:2], out_weight.shape[0]))
        except RuntimeError as error:
            raise GraphError(f"residual of {tuple(residual.shape)} for a result of {(*x.shape[:2], out_weight.shape[0])}; they broadcast to each other") from error
    dims = (x, qkv_weight, qkv_bias, out_weight, out_bias, rope, beside, slopes, caches, heads, kv_heads, keys)
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if F._wants_gradient([x, qkv_weight, qkv_bias, out_weight, out_bias, residual, attn_mask]):
        if k_cache is not None and torch.is_grad_enabled():
            raise UnsupportedError("attention_block with a cache has no gradient in this package; call it within torch.no_grad(), or without a cache")
        if not is_autocast:
            _check_types(x, qkv_weight, out_weight)
        _check_dims(*dims)
        return _composed(x, qkv_weight, qkv_bias, out_weight, out_bias, residual, rope, beside, slopes, heads, kv_heads, rope_interleaved, attention)
    if is_autocast:
        lower = torch.get_autocast_dtype(x.device.type)
        x, qkv_weight, qkv_bias, out_weight, out_bias = (
            None if y is None else _ops._cast(y, lower, x.device.type) for y in (x, qkv_weight, qkv_bias, out_weight, out_bias)
        )
    _check_types(x, qkv_weight, out_weight, *caches)
    is_step = residual is not None and residual.dtype == x.dtype and residual.shape == (*x.shape[:2], out_weight.shape[0])
    cos, sin = (None, None) if rope is None else rope
    said = words(attention, heads, kv_heads, rope_interleaved)
    tensors = (x, qkv_weight, qkv_bias, out_weight, out_bias, residual if is_step else None, cos, sin, *caches, kv_lengths, beside, slopes)
    try:
        y = one_plan(*tensors, said)
    except (BindingError, GraphError):
        # The plan refuses by the op that meets them, which is not looked for before each step.
        _check_dims(*dims)
        raise
    return y if residual is None or is_step else y + residual
