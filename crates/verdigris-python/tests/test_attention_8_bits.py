"""Attention of 8-bit floats with factors of heads, with PyTorch in f64 as the other opinion."""

import pytest
import torch
from test_attention import naive

import verdigris as vd
import verdigris.torch as vt

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
BATCH, HEADS, OF_KEYS, ELEMENTS = 2, 4, 2, 16


def drawn(dtype, *shape):
    return torch.randn(shape).to(dtype)


def factors(shape):
    return [torch.rand(shape) + 0.5 for _ in range(3)]


def wide(tensors, descales):
    """Queries, keys and values in f64, times their factors `[batch, heads of keys]`; `[batch, positions, heads, elements]`."""
    spread = lambda descale, x: descale.double().expand(BATCH, OF_KEYS).repeat_interleave(x.shape[2] // OF_KEYS, 1)[:, None, :, None]
    return [x.double() * spread(descale, x) for x, descale in zip(tensors, descales)]


def near(got, truth):
    """Probabilities may be rounded to four bits, and sums keep about 14."""
    assert got.dtype == torch.bfloat16 and got.shape == truth.shape
    assert (got.double() - truth).abs().max() <= 0.1 * truth.abs().max()


def named(descales):
    return dict(zip(("q_descale", "k_descale", "v_descale"), descales))


@pytest.mark.parametrize("run", [{}, {"causal": True}, {"window_size": (2, 1)}, {"softcap": 2.0}])
@pytest.mark.parametrize("dtype", TYPES)
def test_flash_attn_func(dtype, run):
    tensors = [drawn(dtype, BATCH, 5, HEADS, ELEMENTS), *(drawn(dtype, BATCH, 9, OF_KEYS, ELEMENTS) for _ in range(2))]
    plain = {{"window_size": "window", "softcap": "cap"}.get(name, name): value for name, value in run.items()}
    for shape in ((BATCH, OF_KEYS), (1, OF_KEYS), (1,), ()):
        descales = factors(shape)
        near(vt.flash_attn_func(*tensors, **run, **named(descales)), naive(*wide(tensors, descales), **plain))
    near(vt.flash_attn_func(*tensors, **run), naive(*(x.double() for x in tensors), **plain))
    alone = [torch.ones(1), torch.ones(1), torch.full((1,), 3.0)]
    near(vt.flash_attn_func(*tensors, **run, v_descale=alone[2]), naive(*wide(tensors, alone), **plain))


@pytest.mark.parametrize("dtype", TYPES)
def test_flash_attn_with_kvcache(dtype):
    q, descales = drawn(dtype, BATCH, 1, HEADS, ELEMENTS), factors((BATCH, OF_KEYS))
    k, v = (drawn(dtype, BATCH, 8, OF_KEYS, ELEMENTS) for _ in range(2))
    lengths = torch.tensor([8, 8], dtype=torch.int32)
    truth = naive(*wide((q, k, v), descales))
    near(vt.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **named(descales)), truth)
    pages = [x.reshape(BATCH * 2, 4, OF_KEYS, ELEMENTS) for x in (k, v)]
    table = torch.arange(4, dtype=torch.int32).reshape(BATCH, 2)
    near(vt.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table, **named(descales)), truth)


def test_what_is_refused():
    q = torch.randn(1, 3, 2, 16)
    with pytest.raises(vd.GraphError, match="8 bits have such factors"):
        vt.flash_attn_func(q, q, q, q_descale=torch.ones(1))
    q = q.to(TYPES[0])
    with pytest.raises(vd.GraphError, match="heads of keys"):
        vt.flash_attn_func(q, q, q, k_descale=torch.ones(1, 3))
    with pytest.raises(vd.GraphError, match="f32"):
        vt.flash_attn_func(q, q, q, k_descale=torch.ones(1, 2, dtype=torch.float64))


def test_operators_are_what_they_declare():
    q, descale = drawn(TYPES[0], 1, 2, 3, 16), torch.ones(1, 2, 1, 1)
    given = (q, q, q, *[None] * 7, descale, descale, descale, None, None, None, "scale=0.5")
    # PyTorch compares no tensors of 8 bits, which the check of the schema would do.
    fake = torch.library.opcheck(torch.ops.verdigris.attention.default, given, test_utils="test_faketensor")
    assert set(fake.values()) == {"SUCCESS"}


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", TYPES)
def test_caches_of_8_bits_beside_other_queries(dtype, of):
    """Keys and values are widened exactly, so that results are as near as those of tensors that hold the same numbers in the type of the queries."""
    q, descales = drawn(of, BATCH, 3, HEADS, ELEMENTS), factors((BATCH, OF_KEYS))
    k, v = (drawn(dtype, BATCH, 8, OF_KEYS, ELEMENTS) for _ in range(2))
    lengths = torch.tensor([5, 8], dtype=torch.int32)
    unit = torch.finfo(of).eps
    given = {"k_descale": descales[1], "v_descale": descales[2]}
    for run in ({}, {"causal": True}, {"window_size": (2, 0)}):
        plain = {{"window_size": "window"}.get(name, name): value for name, value in run.items()}
        wide_k, wide_v = wide((q, k, v), [torch.ones(1), *descales[1:]])[1:]
        truth = torch.cat([naive(q[b : b + 1].double(), wide_k[b : b + 1, :n], wide_v[b : b + 1, :n], **plain) for b, n in enumerate(lengths.tolist())])
        got = vt.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **run, **given)
        assert got.dtype == of and (got.double() - truth).abs().max() <= 4 * unit * truth.abs().max() + 1e-6
        pages = [x.reshape(BATCH * 2, 4, OF_KEYS, ELEMENTS) for x in (k, v)]
        table = torch.arange(4, dtype=torch.int32).reshape(BATCH, 2)
        paged = vt.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table, **run, **given)
        assert (paged.double() - truth).abs().max() <= 4 * unit * truth.abs().max() + 1e-6


@pytest.mark.parametrize("dtype", TYPES)
def test_new_positions_are_divided_by_the_factors_of_a_cache_of_8_bits(dtype):
    q = drawn(torch.bfloat16, BATCH, 1, HEADS, ELEMENTS)
    k_cache, v_cache = (torch.zeros(BATCH, 8, OF_KEYS, ELEMENTS, dtype=dtype) for _ in range(2))
    k, v = (10 * drawn(torch.bfloat16, BATCH, 2, OF_KEYS, ELEMENTS) for _ in range(2))
    # Beyond what the type holds: the largest number, and not what is none.
    k[0, 0, 0, 0], v[1, 1, 1, 1] = 1e6, -1e6
    k_descale, v_descale = factors((BATCH, OF_KEYS))[:2]
    lengths = torch.tensor([3, 6], dtype=torch.int32)
    got = vt.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, k_descale=k_descale, v_descale=v_descale)
    largest = torch.finfo(dtype).max
    for cache, new, descale in ((k_cache, k, k_descale), (v_cache, v, v_descale)):
        for b, first in enumerate(lengths.tolist()):
            wanted = (new[b].float() / descale[b, None, :, None]).clamp(-largest, largest).to(dtype)
            assert torch.equal(cache[b, first : first + 2].view(torch.uint8), wanted.view(torch.uint8))
            assert not cache[b, first + 2 :].view(torch.uint8).any() and not cache[b, :first].view(torch.uint8).any()
    assert got.isfinite().all()
    # The same without new positions.
    again = vt.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths + 2, k_descale=k_descale, v_descale=v_descale)
    assert torch.equal(got, again)


def test_what_caches_of_8_bits_do_not_have():
    q = drawn(torch.bfloat16, BATCH, 1, HEADS, ELEMENTS).requires_grad_()
    k, v = (drawn(torch.float8_e4m3fn, BATCH, 8, OF_KEYS, ELEMENTS) for _ in range(2))
    with pytest.raises(vd.GraphError, match="q_descale of tensors of torch.bfloat16"):
        vt.flash_attn_with_kvcache(q, k, v, q_descale=torch.ones(1))
    with pytest.raises(vd.GraphError, match="k_descale of tensors of torch.bfloat16"):
        vt.flash_attn_with_kvcache(q, k.bfloat16(), v.bfloat16(), k_descale=torch.ones(1))
    with pytest.raises(vd.GraphError, match="keys and values of one of 8 bits beside queries"):
        vt.flash_attn_with_kvcache(q, k, v.bfloat16())
    with pytest.raises(vd.UnsupportedError, match="gradient"):
        vt.flash_attn_with_kvcache(q, k, v).sum().backward()
