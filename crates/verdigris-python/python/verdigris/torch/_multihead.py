"""`torch.nn.MultiheadAttention` by this package: projections of queries, keys and values that share their input are one product, heads are views."""

import torch

from . import _block, _ops
from . import functional as F


def _is_ours(module, query, need_weights):
    """Whether the call asks for nothing that only PyTorch's forward has: weights, keys added to the sequence, nested tensors."""
    return not (
        need_weights
        or module.bias_k is not None
        or module.add_zero_attn
        or query.is_nested
        or query.dim() not in (2, 3)
    )


def _projected(module, query, key, value):
    """Queries, keys and values, each `[..., embedding]`."""
    bias = module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases)]
    weight, size = module.in_proj_weight, module.embed_dim
    if query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, dim=-1)
    first, rest = weight.split([size, 2 * size])
    first_bias, rest_bias = (None, None) if bias is None else bias.split([size, 2 * size])
    if key is value:
        return [F.linear(query, first, first_bias), *F.linear(key, rest, rest_bias).chunk(2, dim=-1)]
    biases = (None, None) if bias is None else rest_bias.chunk(2)
    return [F.linear(query, first, first_bias), *(F.linear(x, w, b) for x, w, b in zip((key, value), rest.chunk(2), biases))]


def _kept(mask):
    """A mask in the sense of attention: True where a key is attended to, or added to the scores. PyTorch's module has it the other way round."""
    return ~mask if mask.dtype == torch.bool else mask


def _mask(module, attn_mask, key_padding_mask, batch):
    """One mask that broadcasts to `[batch, heads, queries, keys]`."""
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(batch, module.num_heads, *attn_mask.shape[1:])
    padding = None if key_padding_mask is None else _kept(key_padding_mask).view(batch, 1, 1, -1)
    if attn_mask is None:
        return padding
    attn_mask = _kept(attn_mask)
    if padding is None:
        return attn_mask
    if attn_mask.dtype == padding.dtype == torch.bool:
        return attn_mask & padding
    added = [mask if mask.dtype != torch.bool else torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf")) for mask in (attn_mask, padding)]
    return added[0] + added[1]


def _is_one_plan(module, query, key, value, dropout_p):
    """Whether the whole module is one call: self-attention of a batch in inference, all of one type."""
    layer = module.out_proj
    parameters = (module.in_proj_weight, module.in_proj_bias, layer.weight, layer.bias)
    return (
        query is key is value
        and query.dim() == 3
        and module._qkv_same_embed_dim
        and not dropout_p
        and _block.is_one_type(query, *parameters)
        and not torch.is_autocast_enabled(query.device.type)
        and not F._wants_gradient([query, *parameters])
        and not _ops._is_compiling()
    )


def _one_plan(module, x, mask, is_causal):
    layer, heads = module.out_proj, module.num_heads
    if mask is not None:
        mask = F._rows_of_keys(mask.view(torch.uint8) if mask.dtype == torch.bool else mask, x.shape[1 if module.batch_first else 0])
    attention = F._attention_words(module.head_dim**-0.5, "top_left" if is_causal else None, None, None, None)
    words = _block.words(attention, heads, heads, first=not module.batch_first)
    beside = (None, None, None, None, None, None, mask, None)
    return _block.one_plan(x, module.in_proj_weight, module.in_proj_bias, layer.weight, layer.bias, *beside, words)


def multi_head_attention(
    module, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True, is_causal=False
):
    """The forward of `torch.nn.MultiheadAttention`. PyTorch's own where weights are asked for, and with `bias_k` or `add_zero_attn`.

    A query to which every key is masked gives the output projection of 0, where PyTorch gives NaN.
    """
    if is_causal and attn_mask is None or not _is_ours(module, query, need_weights):
        # The former is PyTorch's to refuse.
        return torch.nn.MultiheadAttention.forward(
            module, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    is_batched, first = query.dim() == 3, module.batch_first
    batch = (query.shape[0] if first else query.shape[1]) if is_batched else 1

    def in_heads(x):
        x = x.unflatten(-1, (module.num_heads, module.head_dim))
        if not is_batched:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if first else x.permute(1, 2, 0, 3)

    dropout_p = module.dropout if module.training else 0.0
    if is_causal and key_padding_mask is not None and dropout_p and _ops._is_compiling():
        # A compiled graph has PyTorch's own function for dropout, which takes a mask or the word.
        is_causal = False
    # The mask that comes with the word is the causal one, and need not be read.
    mask = _mask(module, None if is_causal else attn_mask, key_padding_mask, batch)
    if mask is not None and mask.is_floating_point() and mask.dtype not in (query.dtype, torch.float32):
        mask = mask.to(query.dtype)
    if _is_one_plan(module, query, key, value, dropout_p):
        return _one_plan(module, query, mask, is_causal), None
    q, k, v = map(in_heads, _projected(module, query, key, value))
    if is_causal and mask is not None:
        # PyTorch's function takes one of both.
        o = F.attention_of_heads(q, k, v, mask, True, dropout_p=dropout_p)
    else:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal)
    o = o[0].transpose(0, 1) if not is_batched else o.transpose(1, 2) if first else o.permute(2, 0, 1, 3)
    return F.linear(o.flatten(-2), module.out_proj.weight, module.out_proj.bias), None
