"""Attention of programs that call PyTorch's: a context in which its function is ours, and an implementation for Hugging Face's transformers."""

import contextlib
import functools
import threading

import torch

from . import _ops, functional

_theirs = torch.nn.functional.scaled_dot_product_attention
_lock, _depth = threading.Lock(), 0
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _is_taken(query, key, value, attn_mask):
    tensors = (query, key, value)
    return (
        all(isinstance(x, torch.Tensor) and not x.is_nested and x.dim() >= 2 and x.dtype in _FLOATS for x in tensors)
        and (attn_mask is None or isinstance(attn_mask, torch.Tensor) and attn_mask.dtype in (torch.bool, *_FLOATS))
        and all(x.device.type in ("cpu", "cuda") for x in tensors)
    )


def _ours(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if not _is_taken(query, key, value, attn_mask):
        return _theirs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@contextlib.contextmanager
def sdpa_kernel():
    """Within, `torch.nn.functional.scaled_dot_product_attention` is computed by this package, as within `torch.nn.attention.sdpa_kernel` by one of PyTorch's.

    In the whole process, so also in other threads, until the outermost such context ends. Calls of nested tensors, or of types that
    this package does not take, stay PyTorch's; the mask of dropout is another than PyTorch's of the same seed. Programs that took the function out of its module before do not see it.

        with vt.sdpa_kernel():
            y = model(x)
    """
    global _depth
    with _lock:
        _depth += 1
        torch.nn.functional.scaled_dot_product_attention = _ours
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                torch.nn.functional.scaled_dot_product_attention = _theirs


def transformers_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **options):
    """What transformers calls of an attention implementation: tensors `[batch, heads, positions, elements]` give `[batch, positions, heads, elements]`."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    lengths, sinks = lengths_of(attention_mask), options.get("s_aux")
    position_bias = options.get("position_bias")
    if lengths is not None and query.shape[2] == 1 and key.shape[2] == attention_mask.shape[-1] and not dropout and position_bias is None:
        # The kernels that decode read no mask, and no keys behind the length.
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        words = functional._attention_words(scale, None, None, None, options.get("softcap"))
        none, sinks = (*functional._NO_DESCALES, *functional._NO_BLOCKS), functional._sinks(query, query.shape[1], sinks)
        o = _ops.attention(query, key, value, None, None, None, None, lengths[:, None, None, None], None, None, *none, sinks, words)[0]
        return o.transpose(1, 2).contiguous(), None
    # Without a mask, one query attends to all keys that there are.
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    padding = padding_of(attention_mask, query.shape[2], key.shape[2])
    if padding is not None:
        attention_mask, causal = padding, True
    elif attention_mask is not None:
        attention_mask = attention_mask[:, :, :, : key.shape[2]]
    if position_bias is not None:
        # As long as the mask may be: that of a cache's room.
        position_bias = position_bias[..., : key.shape[2]]
        attention_mask = _biased(attention_mask, position_bias)
    o = functional.attention_of_heads(query, key, value, attention_mask, causal, scaling, options.get("softcap"), dropout, sinks=sinks)
    return o.transpose(1, 2).contiguous(), None


def _biased(mask, position_bias):
    """What is added to scores where a mask stands beside learned biases of positions."""
    if mask is None:
        return position_bias
    return torch.where(mask, position_bias, -torch.inf) if mask.dtype == torch.bool else position_bias + mask


def _marked(mask, name):
    """What a mask was told to consist of when it was made, if it was not written to since. Tensors of inference do not tell when they are."""
    told, version = getattr(mask, name, (None, None))
    return told if told is not None and (version is None or mask._version == version) else None


def lengths_of(mask):
    """Of a mask of one new token behind a static cache, how many keys of each batch count; None of others, and of one that was written to since."""
    return _marked(mask, "verdigris_lengths")


def padding_of(mask, queries, keys):
    """Of a mask of so many queries and keys that is causal from the first of both and leaves out padding, what is left beside `causal`: `[batch, 1, 1, keys]`, of bool. None of others, and of one that was written to since."""
    padding = _marked(mask, "verdigris_padding")
    return padding if padding is not None and tuple(mask.shape[2:]) == (queries, keys) else None


def _is_from_the_first(words, made):
    """Whether a mask's queries begin with the first token. Versions of transformers that tell positions by `cache_position` alone do not say so without a read."""
    return type(words.get("q_offset")) is int and words["q_offset"] == 0 and words.get("q_length") == made.shape[2]


def _in_parts(theirs, causal):
    """The function of transformers that makes masks, which also tells what a causal one consists of: of one new token behind a static cache how many keys it attends to, the first ones,
    and of tokens from the first on, beside padding, which keys are none. The latter is so wherever the padding is; that it is at the end nobody knows without reading it."""

    @functools.wraps(theirs)
    def mask(*arguments, **words):
        made = theirs(*arguments, **words)
        is_causal = words.get("mask_function", causal) is causal and not words.get("kv_offset", 0)
        if arguments or made is None or not is_causal or torch.compiler.is_compiling():
            return made
        offset, kept = words.get("q_offset", 0), words.get("attention_mask")
        if kept is None and words.get("q_length") == 1:
            offset = offset if isinstance(offset, torch.Tensor) else torch.full((), offset, device=made.device)
            # On the device: nothing waits for it.
            lengths = (offset + 1).to(torch.int32).expand(made.shape[0]).contiguous()
            made.verdigris_lengths = lengths, None if made.is_inference() else made._version
        elif kept is not None and _is_from_the_first(words, made) and kept.dtype == torch.bool and kept.shape[:-1] == made.shape[:1] and not made.is_inference():
            # Tensors of inference do not tell when they are written to.
            keys = made.shape[3]
            # What a mask is shorter than the keys is padding.
            kept = kept[:, :keys] if kept.shape[1] >= keys else torch.nn.functional.pad(kept, (0, keys - kept.shape[1]))
            made.verdigris_padding = kept[:, None, None], made._version
        return made

    return mask


def register_transformers(name="verdigris"):
    """Makes attention of this package known to Hugging Face's transformers: `model.set_attn_implementation("verdigris")`, or `attn_implementation=` of
    `from_pretrained`. Grouped heads, masks, biases of positions, soft caps, sinks (`s_aux`) and dropout are computed as they are. One new token behind a static
    cache reads the keys before it alone where no mask of padding is given, and all keys with their mask where one is. Tokens from the first on that come with a mask of padding, on whichever
    side, in training too, are causal with a mask of keys, so that nothing of the size of the scores is read and what stands behind a query is not computed.

    Raises `ImportError` without transformers, or with one that has no attention interface (before 4.48).
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
    except ImportError as error:
        raise ImportError(f"transformers with an attention interface is needed ({error}); `pip install 'transformers>=4.53'`") from error
    AttentionInterface.register(name, transformers_attention)
    AttentionMaskInterface.register(name, _in_parts(sdpa_mask, causal_mask_function))
    return name
