"""Attention of new tokens to a cache of keys and values, paged or not, into which it may write them first."""

import torch

from .._errors import GraphError, UnsupportedError
from . import _ops
from .functional import _NO_BLOCKS, _NO_DESCALES, _descales, _flash_words, _sinks


def _rotated(x, cos, sin, positions, interleaved):
    """`x [batch, positions, heads, elements]` with its first elements turned by the angles of `positions`, in f32."""
    cos, sin = (table[positions.clamp(0, table.shape[0] - 1)].unsqueeze(2).float() for table in (cos, sin))
    turned, rest = x[..., : 2 * cos.shape[-1]].float(), x[..., 2 * cos.shape[-1] :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _told(name, tensor, shape, batch, device):
    """An int32 tensor of one number, or one line, for each sequence."""
    if tensor.dtype != torch.int32 or tensor.dim() != len(shape) or tensor.shape[0] != batch:
        raise GraphError(f"{name} of {tensor.dtype} and {tuple(tensor.shape)} for {batch} sequences; it is int32, [{', '.join(shape)}]")
    if tensor.device != device:
        raise GraphError(f"{name} is on {tensor.device}, queries are on {device}")


def _as_rows(k_cache, v_cache):
    """Caches `[batch, positions, heads, elements]` as views `[1, heads, rows, elements]`, and how many rows lie from one batch to the next."""
    batch, positions = k_cache.shape[:2]
    pitches = [positions if batch < 2 or not cache.numel() else cache.stride(0) / (cache.stride(1) or 1) for cache in (k_cache, v_cache)]
    pitch = int(pitches[0])
    if pitches != [pitch, pitch] or pitch < positions:
        strides = f"{k_cache.stride()} and {v_cache.stride()} for {positions} positions"
        rule = "with cache_leftpad the batches of both lie as many whole positions apart, and not over each other"
        raise GraphError(f"k_cache and v_cache with strides of {strides}; {rule}")
    rows = (batch - 1) * pitch + positions if batch else 0
    views = (cache.as_strided((rows, *cache.shape[2:]), cache.stride()[1:]).transpose(0, 1)[None] for cache in (k_cache, v_cache))
    return (*views, pitch)


def _behind_padding(q, k_cache, v_cache, lengths, index, leftpad, slopes, descales, sinks, words):
    """Attention to what is behind the padding of each cache: rows of sequences that begin where their padding ends."""
    (batch, count), positions, device = q.shape[:2], k_cache.shape[1], q.device
    k, v, pitch = _as_rows(k_cache, v_cache)
    numbers = torch.arange(batch + 1, device=device, dtype=torch.int32)
    of_cache = numbers[:-1] if index is None else index.clamp(0, k_cache.shape[0] - 1)
    begin = of_cache * pitch + leftpad.clamp(0, positions)
    used = (positions if lengths is None else lengths.clamp(0, positions)) - leftpad.clamp(0, positions)
    if index is None:
        # Caches behind each other: a sequence ends in front of the next one, and has as many keys as are used.
        last = torch.full((1,), (batch - 1) * pitch + positions, dtype=torch.int32, device=device)
        of_q, of_k = numbers * count, torch.cat((begin, last))
    else:
        # Caches in any order: between two sequences stands one without queries, whose keys are those in between, if any.
        of_q = torch.stack((numbers[:-1], numbers[1:]), 1).flatten() * count
        of_k = torch.stack((begin, begin + used.clamp(min=0)), 1).flatten()
        used = None
        slopes, *descales = (x if x is None or x.shape[0] == 1 else x.repeat_interleave(2, 0)[:-1] for x in (slopes, *descales))
    given = (x if x is None else x[:, None, None, None] for x in (of_q, of_k, used))
    rows = q.reshape(batch * count, *q.shape[2:]).transpose(0, 1)[None]
    o, total = _ops.attention(rows, k, v, None, slopes, *given, None, None, *descales, *_NO_BLOCKS, sinks, f"{words} longest_q={count} longest_kv={positions}")
    o = o[0].transpose(0, 1).reshape(batch, count, *o.shape[1::2])
    return o, total.reshape(total.shape[1], batch, count, 1).transpose(0, 1)


def _as_kept(new, dtype, descale):
    """New positions `[batch, positions, heads, elements]` as a cache of that type has them."""
    if dtype not in _ops.OF_8_BITS or new.dtype in _ops.OF_8_BITS:
        return new.to(dtype)
    new = new.float()
    if descale is not None:
        new = new / (descale if descale.numel() == 1 else descale[:, None, :, None])
    largest = torch.finfo(dtype).max
    return new.clamp(-largest, largest).to(dtype)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    learnable_sink=None,
):
    """Attention of `q [batch, positions, heads, elements]` to a cache of keys and values, as the function of this name in the package flash-attn.

    Caches are `[batch of the cache, positions, heads of keys, elements]`, of which `cache_batch_idx` (int32 `[batch]`) names the one of each sequence; or with
    `block_table` (int32 `[batch, pages of a sequence]`) pages `[pages, page size, heads of keys, elements]` of any size, those of multiples of 8 positions on
    tensor cores. `cache_seqlens` (int32 `[batch]`, or one number) says how many positions of each sequence count; all without it. `k` and `v`
    `[batch, new positions, heads of keys, elements]` are written into the caches behind those, in place, and count too; `rotary_cos` and `rotary_sin`
    `[positions, half of the elements that are turned]` turn them and `q` before, `q` by its own position where `causal` or `window_size` is given and by the first new
    one elsewhere. `causal` and `window_size` count from the diagonal that ends at the last query and the last key. `softcap`, `alibi_slopes` and
    `softmax_scale`, and `learnable_sink`, are as in `flash_attn_func`. `num_splits` is taken and not used: the plan chooses. With `return_softmax_lse`: `(o, log_sum_exp)`, the second
    `[batch, heads, positions]`. `cache_leftpad` (int32 `[batch]`) says how many positions at the begin of each sequence's cache are padding, which is not attended: a sequence
    begins behind them, and `cache_seqlens` counts them. With a `block_table` it is refused.

    Caches may be of `torch.float8_e4m3fn` or `float8_e5m2`, with `k_descale` and `v_descale` (f32 `[batch, heads of keys]`, or one number) as what their numbers are
    multiplied by; `q` of 16 bits stays as it is, so that nothing is lost but in what the caches hold, and `q` of 8 bits has a `q_descale`. New positions of other types are
    divided by these factors, clamped to what the type of the caches holds, and rounded to it.

    Values may be a part of the keys, as of latent attention: `v_cache = k_cache[..., :512]` is read where it lies; `flash_mla_with_kvcache` reads it once.

    Nothing waits for the device, and all of it may be captured in a CUDA graph. What stands in tensors is not trusted: pages and positions beyond what
    there is count as the last, so that new positions behind a cache's end overwrite its last one, and nothing outside of caches is read or written; padding counts from 0
    up to the positions of a cache. There are no gradients.
    """
    if cache_leftpad is not None and block_table is not None:
        raise UnsupportedError("flash_attn_with_kvcache with cache_leftpad and a block_table is not computed by this package; sequences begin at the first position of their pages")
    tensors = [("q", q), ("k_cache", k_cache), ("v_cache", v_cache)] + [(name, x) for name, x in (("k", k), ("v", v)) if x is not None]
    for name, x in tensors:
        if x.dim() != 4:
            raise GraphError(f"{name} of {tuple(x.shape)}; it has four dims: [batch, positions, heads, elements]")
    if (k is None) != (v is None):
        raise GraphError("k without v, or v without k; both are written, or none")
    if (rotary_cos is None) != (rotary_sin is None):
        raise GraphError("rotary_cos without rotary_sin, or the other way round; both are given, or none")
    if rotary_cos is not None and k is None:
        raise GraphError("rotary_cos without k and v; what is in the cache already has been turned")
    if block_table is not None and cache_batch_idx is not None:
        raise GraphError("block_table with cache_batch_idx; the table says where each sequence is")
    if k is not None and cache_seqlens is None:
        raise GraphError("k and v without cache_seqlens, which says where they are written")
    batch, device = q.shape[0], q.device
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise GraphError(f"k_cache of {tuple(k_cache.shape)} and v_cache of {tuple(v_cache.shape)}; they have the same positions and heads")
    page_size = k_cache.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    if cache_seqlens is not None:
        _told("cache_seqlens", cache_seqlens, ["batch"], batch, device)
    if cache_leftpad is not None:
        _told("cache_leftpad", cache_leftpad, ["batch"], batch, device)
    table = block_table
    if block_table is not None:
        _told("block_table", block_table, ["batch", "pages of a sequence"], batch, device)
    elif cache_batch_idx is not None:
        # A cache of one long page for each sequence.
        _told("cache_batch_idx", cache_batch_idx, ["batch"], batch, device)
        table = cache_batch_idx[:, None]
    elif k_cache.shape[0] < batch:
        raise GraphError(f"k_cache of {tuple(k_cache.shape)} for {batch} sequences; there is a cache for each")
    else:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]

    descales = _descales(q, k_cache, (q_descale, k_descale, v_descale))
    lengths = cache_seqlens
    if k is not None:
        if k.shape[:2] != v.shape[:2] or k.shape[0] != batch or k.shape[2:] != k_cache.shape[2:] or v.shape[2:] != v_cache.shape[2:]:
            rule = "there are as many of both as caches have heads and elements"
            raise GraphError(f"k of {tuple(k.shape)} and v of {tuple(v.shape)} for caches of {tuple(k_cache.shape)} and {tuple(v_cache.shape)}; {rule}")
        with torch.no_grad():
            first = cache_seqlens.long()[:, None]
            positions = first + torch.arange(k.shape[1], device=device)
            if rotary_cos is not None:
                if rotary_cos.dim() != 2 or rotary_cos.shape != rotary_sin.shape or not 0 < 2 * rotary_cos.shape[1] <= q.shape[-1] or not rotary_cos.shape[0]:
                    shapes = f"{tuple(rotary_cos.shape)} and {tuple(rotary_sin.shape)}"
                    raise GraphError(f"rotary_cos and rotary_sin of {shapes}; both are [positions, up to half of {q.shape[-1]} elements]")
                moves = causal or any(bound >= 0 for bound in window_size)
                of_q = first + torch.arange(q.shape[1], device=device) * int(moves)
                q = _rotated(q, rotary_cos, rotary_sin, of_q, rotary_interleaved)
                k = _rotated(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
            if k.shape[1] and k_cache.numel():
                entries = 1 if table is None else table.shape[1]
                place = positions.clamp(0, max(entries * page_size - 1, 0))
                if table is None:
                    page = torch.arange(batch, device=device)[:, None]
                else:
                    page = table.long().gather(1, place // page_size).clamp(0, k_cache.shape[0] - 1)
                for cache, new, descale in ((k_cache, k, k_descale), (v_cache, v, v_descale)):
                    new = _as_kept(new, cache.dtype, descale)
                    if cache.dtype in _ops.OF_8_BITS:
                        # As bytes, which are stored by position on every device.
                        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
                    cache.index_put_((page, place % page_size), new)
            lengths = cache_seqlens + k.shape[1]

    words, alibi_slopes = _flash_words(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    words += _ops.OF_CACHE if cache_seqlens is not None or cache_leftpad is not None else ""
    sinks = _sinks(q, q.shape[2], learnable_sink)
    if cache_leftpad is not None and batch and k_cache.shape[0]:
        o, total = _behind_padding(q, k_cache, v_cache, lengths, cache_batch_idx, cache_leftpad, alibi_slopes, descales, sinks, words)
        return (o, total.squeeze(-1)) if return_softmax_lse else o
    beside = (None, alibi_slopes, None, None)
    lengths = None if lengths is None else lengths[:, None, None, None]
    table = None if table is None else table[:, :, None, None]
    o, total = _ops.attention(*(x.transpose(1, 2) for x in (q, k_cache, v_cache)), *beside, lengths, table, None, *descales, *_NO_BLOCKS, sinks, words)
    o = o.transpose(1, 2)
    return (o, total.squeeze(-1)) if return_softmax_lse else o


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale=None, causal=False):
    """Latent attention in its absorbed form, of `q [batch, positions, heads, elements]` to a cache whose values are the first `head_dim_v` elements of its
    keys, as the function of this name in the package FlashMLA: `(o, log_sum_exp)`.

    `k_cache` is `[pages, page size, heads of keys, elements]`, of which `block_table` (int32 `[batch, pages of a sequence]`) names those of each sequence, or
    without a table `[batch, positions, heads of keys, elements]`. `cache_seqlens` (int32 `[batch]`) says how many positions of each sequence count, all of
    them if it is None. `causal` counts from the diagonal that ends at the last query and the last key. The result is `[batch, positions, heads, head_dim_v]`, the
    log-sum-exp f32 `[batch, heads, positions]`. On Hopper's tensor cores bf16 and f16 keys of up to 576 elements are read once for both. As in
    `flash_attn_with_kvcache` nothing waits for the device, entries and lengths are not trusted, and there are no gradients.
    """
    for name, x in (("q", q), ("k_cache", k_cache)):
        if x.dim() != 4:
            raise GraphError(f"{name} of {tuple(x.shape)}; it has four dims: [batch, positions, heads, elements]")
    batch, device = q.shape[0], q.device
    if not 0 < head_dim_v <= k_cache.shape[3]:
        raise GraphError(f"head_dim_v of {head_dim_v} for keys of {k_cache.shape[3]} elements; values are the first elements of keys")
    if cache_seqlens is not None:
        _told("cache_seqlens", cache_seqlens, ["batch"], batch, device)
        cache_seqlens = cache_seqlens[:, None, None, None]
    if block_table is not None:
        _told("block_table", block_table, ["batch", "pages of a sequence"], batch, device)
        block_table = block_table[:, :, None, None]
    words, _ = _flash_words(q, softmax_scale, causal, (-1, -1), 0.0, None)
    tensors = (q.transpose(1, 2), k_cache.transpose(1, 2), None, None, None, None, None, cache_seqlens, block_table, None, *_NO_DESCALES, *_NO_BLOCKS, None)
    o, total = _ops.attention(*tensors, f"{words} values={int(head_dim_v)}")
    return o.transpose(1, 2), total.squeeze(-1)
