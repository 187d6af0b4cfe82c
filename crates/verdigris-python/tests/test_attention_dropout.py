"""Dropout of attention: the mask against Philox in plain integers, results and gradients against PyTorch in f64 under that mask."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import verdigris.torch as vt
from test_dropout import STATES, philox

torch.set_num_threads(1)
F = vt.functional


def kept(state, dims, p):
    """Which pairs are kept, by the rule that the op documents."""
    seed_low, seed_high, low, high = (word & 0xFFFFFFFF for word in state)
    b, h, s_q, s_kv = dims
    p = torch.tensor(p, dtype=torch.float32).item()
    mask = torch.empty(dims, dtype=torch.bool)
    for batch, head, i, j in itertools.product(*map(range, dims)):
        at = ((high << 32 | low) + batch * h + head) % 2**64
        words = philox([at & 0xFFFFFFFF, at >> 32, 1 + i // 16 * 8 + i % 8, j // 16 * 8 + j % 8], [seed_low, seed_high], 7)
        mask[batch, head, i, j] = (words[i // 8 % 2 * 2 + j // 8 % 2] >> 8) / 2**24 >= p
    return mask


def composed(q, k, v, mask, p, causal=False):
    """In f64."""
    q, k, v = q.double(), k.double(), v.double()
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return (s.softmax(-1) * mask * (1 / (1 - p) if p < 1 else 0.0)) @ v


@pytest.mark.parametrize("state, p", list(itertools.product(STATES, [0.1, 0.5, 1.0])))
def test_the_mask_is_that_of_the_state(state, p):
    dims = (2, 3, 19, 35)
    words = torch.tensor(state, dtype=torch.int32)
    mask = kept(state, dims, p)
    assert torch.equal(F.attention_dropout_mask(words, dims, p), mask)
    # With fewer queries and keys, the same.
    assert torch.equal(F.attention_dropout_mask(words, (2, 3, 7, 9), p), mask[:, :, :7, :9])


def test_statistics_of_the_mask():
    state, dims, p = torch.tensor([11, 12, 13, 0], dtype=torch.int32), (2, 3, 128, 256), 0.25
    drops = 1.0 - F.attention_dropout_mask(state, dims, p).double() - p
    deviation = (p * (1 - p)) ** 0.5
    bound = lambda count: 5 * deviation / count**0.5
    assert drops.mean().abs() < bound(drops.numel())
    # Each head, row and column by itself, within five deviations and a half of so many.
    for dim, count in (((2, 3), 128 * 256), (3, 256), (2, 128)):
        assert drops.mean(dim).abs().max() < 1.1 * bound(count)
    # Neighbours in every direction, those that share a block and those of other heads, batches and offsets, do not go together.
    other = 1.0 - F.attention_dropout_mask(state + torch.tensor([0, 0, 6, 0], dtype=torch.int32), dims, p).double() - p
    pairs = [(drops[..., d:], drops[..., :-d]) for d in (1, 2, 8, 16)] + [(drops[:, :, d:], drops[:, :, :-d]) for d in (1, 2, 8, 16)]
    pairs += [(drops[:, :, 8:, 8:], drops[:, :, :-8, :-8]), (drops[:, 1:], drops[:, :-1]), (drops[1], drops[0]), (drops, other), (drops[..., :128], drops[..., :128].mT)]
    for a, b in pairs:
        if a is not b:
            size = a.numel()
            # The diagonal of a matrix and its transpose is one with itself.
            shared = a.shape[0] * a.shape[1] * 128 * deviation**2 if a.shape[-1] == 128 and a.shape[-2] == 128 else 0.0
            assert ((a * b).sum() - shared).abs() < 8 * deviation**2 * size**0.5


@pytest.mark.parametrize("dtype, p", [(torch.float32, 0.3), (torch.bfloat16, 0.1), (torch.float64, 0.5), (torch.float32, 1.0)])
def test_results_and_gradients(dtype, p):
    state = [5, 6, 7, 8]
    q = torch.randn(2, 4, 19, 8).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 4, 21, 8).to(dtype).requires_grad_() for _ in range(2))
    mask = kept(state, (2, 4, 19, 21), p)
    o = vt.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, state=torch.tensor(state, dtype=torch.int32))
    want = composed(q, k, v, mask, p, causal=True) if p < 1 else torch.zeros(2, 4, 19, 8, dtype=torch.float64, requires_grad=True) * q.double().sum()
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    assert (o.double() - want).abs().max() <= bound * max(1.0, want.abs().max().item())
    d_o = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), d_o)
    if p < 1:
        for gradient, right in zip(found, torch.autograd.grad(want, (q, k, v), d_o.double())):
            assert (gradient.double() - right.double()).abs().max() <= 2 * bound * max(1.0, right.abs().max().item())
    else:
        assert all((gradient == 0).all() for gradient in found)


def test_sequences_behind_each_other_draw_by_their_numbers():
    state, p = torch.tensor([1, 2, 3, 4], dtype=torch.int32), 0.4
    q, k = torch.randn(15, 2, 8), torch.randn(21, 2, 8)
    ends_q, ends_k = torch.tensor([0, 6, 15], dtype=torch.int32), torch.tensor([0, 13, 21], dtype=torch.int32)
    o = vt.flash_attn_varlen_func(q, k, k, ends_q, ends_k, 9, 13, dropout_p=p, state=state)
    mask = F.attention_dropout_mask(state, (2, 2, 9, 13), p)
    for n, (of_q, of_k) in enumerate(((slice(0, 6), slice(0, 13)), (slice(6, 15), slice(13, 21)))):
        a, b = (x[None].transpose(1, 2) for x in (q[of_q], k[of_k]))
        want = composed(a, b, b, mask[n : n + 1, :, : a.shape[2], : b.shape[2]], p)
        assert (o[of_q].transpose(0, 1)[None].double() - want).abs().max() < 1e-5


def test_the_generator_draws_states():
    q = torch.randn(2, 2, 9, 8)
    call = lambda: vt.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(7)
    first, second = call(), call()
    torch.manual_seed(7)
    assert torch.equal(call(), first) and torch.equal(call(), second) and not torch.equal(first, second)
    assert torch.equal(vt.scaled_dot_product_attention(q, q, q, dropout_p=0.0), vt.scaled_dot_product_attention(q, q, q))
    x = q.transpose(1, 2)
    assert vt.flash_attn_func(x, x, x, dropout_p=0.2).shape == x.shape


def test_compiled_with_a_state():
    q, state = torch.randn(1, 2, 9, 8), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    call = lambda q, state: vt.scaled_dot_product_attention(q * 2, q, q, dropout_p=0.5, state=state)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(q, state), call(q, state))
