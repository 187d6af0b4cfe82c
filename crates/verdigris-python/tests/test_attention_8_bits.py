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
    given = (q, q, q, *[None] * 7, descale, descale, descale, None, None, "scale=0.5")
    # PyTorch compares no tensors of 8 bits, which the check of the schema would do.
    fake = torch.library.opcheck(torch.ops.verdigris.attention.default, given, test_utils="test_faketensor")
    assert set(fake.values()) == {"SUCCESS"}
