"""Latent attention on the CPU, whose values are the first elements of its keys, against PyTorch's own operators in f64."""

import pytest
import torch
from conftest import close

import verdigris as vd
import verdigris.torch as vt


def naive(q, keys, values, scale, causal):
    """One sequence: `q [positions, heads, elements]`, `keys [positions, heads of keys, elements]`."""
    q, keys = q.double().transpose(0, 1), keys.double().transpose(0, 1)
    keys = keys.repeat_interleave(q.shape[0] // keys.shape[0], 0)
    s = q @ keys.mT * scale
    if causal:
        apart = torch.arange(keys.shape[1]) - torch.arange(q.shape[1])[:, None] - (keys.shape[1] - q.shape[1])
        s = s.masked_fill(apart > 0, float("-inf"))
    return (s.softmax(-1).nan_to_num() @ keys[..., :values]).transpose(0, 1), s.logsumexp(-1)


@pytest.mark.parametrize("page_size", [1, 16, 64, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, of_keys, positions", [(16, 1, 1), (4, 2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_latent(page_size, dtype, heads, of_keys, positions, causal):
    lengths, elements, values = [0, 1, 63, 64, 90], 72, 64
    q = torch.randn(len(lengths), positions, heads, elements).to(dtype)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    own = [torch.randn(length, of_keys, elements).to(dtype) for length in lengths]
    if page_size is None:
        table = None
        cache = torch.full((len(lengths), 96, of_keys, elements), float("nan"), dtype=dtype)
        for n, keys in enumerate(own):
            cache[n, : len(keys)] = keys
    else:
        entries = -(-max(lengths) // page_size)
        table = torch.randperm(len(lengths) * entries).reshape(len(lengths), entries).to(torch.int32)
        cache = torch.full((len(lengths) * entries, page_size, of_keys, elements), float("nan"), dtype=dtype)
        for n, keys in enumerate(own):
            for j, key in enumerate(keys):
                cache[table[n, j // page_size], j % page_size] = key
    for scale in (None, 0.3):
        o, total = vt.flash_mla_with_kvcache(q, cache, table, seqlens, values, softmax_scale=scale, causal=causal)
        assert o.shape == (len(lengths), positions, heads, values) and o.dtype == dtype
        assert total.shape == (len(lengths), heads, positions) and total.dtype == torch.float32
        for n, keys in enumerate(own):
            right, of_rows = naive(q[n], keys, values, elements**-0.5 if scale is None else scale, causal)
            close(o[n], right, 4.0)
            close(total[n].exp(), of_rows.exp(), 4.0)


def test_latent_is_attention_to_a_part_of_the_keys():
    q, cache = torch.randn(2, 2, 8, 24), torch.randn(2, 9, 1, 24)
    seqlens = torch.tensor([9, 4], dtype=torch.int32)
    o, total = vt.flash_mla_with_kvcache(q, cache, None, seqlens, 16, causal=True)
    right = vt.flash_attn_with_kvcache(q, cache, cache[..., :16], cache_seqlens=seqlens, causal=True, return_softmax_lse=True)
    assert torch.equal(o, right[0]) and torch.equal(total, right[1])
    everything, _ = vt.flash_mla_with_kvcache(q, cache, None, None, 24)
    assert torch.equal(everything, vt.flash_attn_with_kvcache(q, cache, cache))


def test_what_is_refused():
    q, cache, table = torch.randn(2, 1, 4, 24), torch.randn(5, 8, 1, 24), torch.zeros(2, 2, dtype=torch.int32)
    seqlens = torch.tensor([9, 4], dtype=torch.int32)
    with pytest.raises(vd.GraphError, match="head_dim_v of 25"):
        vt.flash_mla_with_kvcache(q, cache, table, seqlens, 25)
    with pytest.raises(vd.GraphError, match="block_table"):
        vt.flash_mla_with_kvcache(q, cache, table.long(), seqlens, 16)
    with pytest.raises(vd.GraphError, match="cache_seqlens"):
        vt.flash_mla_with_kvcache(q, cache, table, seqlens[:1], 16)
    with pytest.raises(vd.UnsupportedError, match="no gradient"):
        vt.flash_mla_with_kvcache(q.requires_grad_(), cache, table, seqlens, 16)[0].sum().backward()
