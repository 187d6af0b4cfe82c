"""FlexAttention: the functions that people write, against dense scores in f64, and against PyTorch's own; which of them are options of the op; what is refused."""

import itertools
import json
import math
import os
import types
from pathlib import Path

import pytest
import torch
from conftest import TOLERANCES, close

import verdigris as vd
import verdigris.torch as vt
from verdigris.torch import _flex, _flex_blocks, _flex_composed, _flex_forms, _flex_steps, _flex_trace
from verdigris.torch._flex_trace import Trace

flex = pytest.importorskip("torch.nn.attention.flex_attention")
create_block_mask, and_masks, or_masks = flex.create_block_mask, flex.and_masks, flex.or_masks


def places(dims):
    return [torch.arange(size).reshape([size if axis == own else 1 for axis in range(4)]) for own, size in enumerate(dims)]


def reference(q, k, v, score_mod=None, mask_mod=None, scale=None, attended=None):
    """Dense scores in f64. The functions are called with tensors of all places, and know nothing of a trace."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).expand(q.shape[0], -1, -1, -1) for x in (k, v))
    dims = (*q.shape[:3], k.shape[2])
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    at = places(dims)
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if mask_mod is not None:
        attended = mask_mod(*at)
    if attended is not None:
        scores = torch.where(attended, scores, -math.inf)
    scores = scores.to(q.dtype).expand(dims)
    if not dims[3]:
        return scores @ v, scores.new_full(dims[:3], -math.inf)
    # Rows of which everything is hidden have no gradient, and not that of ∞ less ∞.
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    scores = torch.where(hidden, 0.0, scores)
    total = scores.logsumexp(-1, keepdim=True)
    return torch.where(hidden, 0.0, (scores - total).exp()) @ v, torch.where(hidden, -math.inf, total).squeeze(-1)


def drawn(dims, dtype=torch.float32, kv_heads=None, keys=None, value=None, requires_grad=True):
    b, h, s, d = dims
    shapes = (dims, (b, kv_heads or h, keys or s, d), (b, kv_heads or h, keys or s, value or d))
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


def whole(mask_mod, queries, keys):
    """A block mask of one block: nothing but its function says what is attended, and it is asked at each call."""
    return flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=1 << 30,
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


def check(inputs, score_mod=None, mask_mod=None, *, captured=(), block_mask=None, block=None, wide_mods=None, slack=4.0, **options):
    """Results, log-sum-exp and all gradients, of both, against the reference; gives what ours returned. With `block` PyTorch makes the mask, in blocks of that size."""
    q, k, _ = inputs
    if mask_mod is not None and block_mask is None:
        dims = (*q.shape[:3], k.shape[2])
        block_mask = create_block_mask(mask_mod, *dims, device="cpu", BLOCK_SIZE=block) if block else whole(mask_mod, *dims[2:])
    o, total = vt.flex_attention(*inputs, score_mod, block_mask, return_lse=True, **options)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    truth, of_total = reference(*wide, *(wide_mods or (score_mod, mask_mod)), options.get("scale"))
    close(o, truth, slack)
    hidden = of_total == -math.inf
    assert (total == -math.inf).eq(hidden).all() and (o[hidden] == 0).all()
    assert total.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    allowed = 1e-11 if total.dtype == torch.float64 else 2e-5
    assert ((total.double() - of_total).abs() <= allowed * (1 + of_total.abs()))[~hidden].all()
    if not any(x.requires_grad for x in (*inputs, *captured)):
        return o, total
    d_o, d_total = torch.randn_like(truth).to(o.dtype), torch.where(hidden, 0.0, torch.randn_like(of_total)).to(total.dtype)
    loss = (o * d_o).sum(dtype=total.dtype) + (torch.where(hidden, 0.0, total) * d_total).sum()
    of = [x for x in inputs if x.requires_grad]
    own = torch.autograd.grad(loss, [*of, *captured])
    loss = (truth * d_o).sum() + (torch.where(hidden, 0.0, of_total) * d_total).sum()
    theirs = torch.autograd.grad(loss, [*(x for x in wide if x.requires_grad), *captured], allow_unused=True)
    for one, other, of in zip(own, theirs, [*of, *captured]):
        assert one.dtype == of.dtype and one.shape == of.shape
        if other is None:
            assert (one == 0).all()
        else:
            assert one.isfinite().all() and other.isfinite().all()
            tolerance = TOLERANCES[str(q.dtype).removeprefix("torch.")]
            # Where nothing depends on it, what there is is rounding.
            error = (one.double() - other).abs().max() / other.abs().max().clamp(min=1e-2)
            assert error <= 2 * slack * tolerance, f"error {error:.3g} of a gradient of {tuple(of.shape)}"
    return o, total


# Functions that people write, after PyTorch's collection of examples (attention-gym): each makes a score function and a mask of b, h, queries and keys.


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(width):
    return and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= width)


def prefix_lm(prefix):
    return or_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx < prefix)


def dilated(width, step):
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= width) & (distance % step == 0)

    return mask


def natten_1d(size, kernel):
    def mask(b, h, q_idx, kv_idx):
        center = q_idx.clamp(kernel // 2, (size - 1) - kernel // 2)
        return (center - kv_idx).abs() <= kernel // 2

    return mask


def natten_2d(rows, columns, kernel):
    def mask(b, h, q_idx, kv_idx):
        q_x, q_y = q_idx // columns, q_idx % columns
        kv_x, kv_y = kv_idx // columns, kv_idx % columns
        center_x = q_x.clamp(kernel // 2, (rows - 1) - kernel // 2)
        center_y = q_y.clamp(kernel // 2, (columns - 1) - kernel // 2)
        return ((center_x - kv_x).abs() <= kernel // 2) & ((center_y - kv_y).abs() <= kernel // 2)

    return mask


def documents(lengths):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])

    def mask(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx]
        return same & causal(b, h, q_idx - offsets[ids[q_idx]], kv_idx - offsets[ids[kv_idx]])

    return mask


def alibi(heads):
    def score_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * scale

    return score_mod


def soft_cap(cap):
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def checkerboard(score, b, h, q_idx, kv_idx):
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)


B, H, S = 2, 4, 67
LENGTHS = torch.tensor([40, 61])
TABLE = torch.randn(H, 2 * S - 1, generator=torch.Generator().manual_seed(3))
BIAS = torch.randn(B, H, S, S, generator=torch.Generator().manual_seed(4))
ADDED = torch.zeros(B, 1, S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
ADDED[1, 0, :, :9] = -math.inf
GYM = {
    "nothing": (None, None),
    "causal": (None, causal),
    "causal score": (lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")), None),
    "sliding window": (None, sliding_window(9)),
    "both sides": (None, lambda b, h, q, kv: (q - kv).abs() <= 6),
    "prefix lm": (None, prefix_lm(12)),
    "prefix of a batch": (None, lambda b, h, q, kv: (kv < LENGTHS[b] // 2) | (q >= kv)),
    "documents": (None, documents([20, 1, 30, 16])),
    "alibi": (alibi(H), None),
    "causal alibi": (alibi(H), causal),
    "relative": (lambda s, b, h, q, kv: s + (q - kv), None),
    "relative table": (lambda s, b, h, q, kv: s + TABLE[h, q - kv + S - 1], None),
    "full bias": (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], causal),
    "full bias in parts": (lambda s, b, h, q, kv: s + BIAS[b][h][q, kv], None),
    "a mask added, as of transformers": (lambda s, b, h, q, kv: s + ADDED[b][0][q][kv], None),
    "soft cap": (soft_cap(2.0), causal),
    "soft cap of alibi": (lambda s, b, h, q, kv: torch.tanh((s + 0.1 * (kv - q)) / 3) * 3, causal),
    "checkerboard": (checkerboard, None),
    "natten 1d": (None, natten_1d(S, 7)),
    "natten 2d": (None, natten_2d(8, 9, 3)),
    "dilated": (None, dilated(16, 4)),
    "padding": (None, lambda b, h, q, kv: kv < LENGTHS[b]),
    "padding of both": (None, lambda b, h, q, kv: (kv < LENGTHS[b]) & (q < LENGTHS[b])),
    "heads apart": (None, lambda b, h, q, kv: (q - kv <= 4 * (h + 1)) & (q >= kv)),
    "global keys": (None, or_masks(sliding_window(5), lambda b, h, q, kv: kv % 16 == 0)),
    "xor": (None, lambda b, h, q, kv: (q >= kv) ^ ((q // 8) == (kv // 8)) | (kv == 0)),
    "a leaky score": (lambda s, b, h, q, kv: torch.where(s > 0, s, 0.1 * s) + torch.sigmoid(s) * (h % 2), causal),
    "a temperature": (lambda s, b, h, q, kv: s * torch.log1p(q / 3).clamp(min=1.0) + torch.exp(-s.abs()), None),
}


#: What the reference computes where a function indexes a tensor twice, which tensors of places do not.
AT_ONCE = {
    "full bias in parts": (lambda s, b, h, q, kv: s + BIAS[b, h, q, kv], None),
    "a mask added, as of transformers": (lambda s, b, h, q, kv: s + ADDED[b, 0, q, kv], None),
}


@pytest.mark.parametrize("name", GYM)
def test_functions_that_people_write(name):
    score_mod, mask_mod = GYM[name]
    size = 72 if name == "natten 2d" else S
    check(drawn((B, H, size, 16)), score_mod, mask_mod, block=32, wide_mods=AT_ONCE.get(name))


@pytest.mark.parametrize("name", ["causal", "documents", "relative table", "soft cap", "checkerboard", "a leaky score"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(name, dtype):
    # The wide functions see the same numbers, which 16 bits hold.
    check(drawn((B, H, S, 16), dtype), *GYM[name], slack=6.0)


@pytest.mark.parametrize("name", ["causal", "alibi", "checkerboard", "padding", "full bias"])
def test_grouped_heads(name):
    for kv_heads in (1, 2):
        check(drawn((B, H, S, 8), kv_heads=kv_heads), *GYM[name], enable_gqa=True)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 33), (33, 1), (5, 70), (70, 5), (129, 31)])
def test_lengths_of_queries_and_keys(sizes):
    queries, keys = sizes
    offset = keys - queries
    inputs = drawn((2, 2, queries, 8), keys=keys, value=24)
    for mask in (causal, lambda b, h, q, kv: q + offset >= kv, lambda b, h, q, kv: (q + offset >= kv) & (q + offset - kv < 7), None):
        check(inputs, None, mask, scale=0.3)
    check(inputs, lambda s, b, h, q, kv: s - 0.25 * (h + 1) * (q + offset - kv).abs(), None)
    check(inputs, checkerboard, causal)


def test_rows_of_which_nothing_is_attended():
    inputs = drawn((2, 2, 40, 8))
    for hidden in (lambda b, h, q, kv: (q >= kv) & (q % 5 != 2), lambda b, h, q, kv: q < kv, lambda b, h, q, kv: kv < 0):
        for score_mod in (None, checkerboard, soft_cap(1.5)):
            check(inputs, score_mod, hidden)
    # The same by a score of −∞.
    check(inputs, lambda s, b, h, q, kv: torch.where(q % 3 == 0, -math.inf, s))
    check(inputs, lambda s, b, h, q, kv: torch.where(q % 3 == 0, -math.inf, s * s))
    check(inputs, lambda s, b, h, q, kv: s.masked_fill(q % 3 == 0, -math.inf) + BIAS[0, 0, q, kv])


def test_captured_tensors_have_gradients():
    inputs = drawn((B, H, S, 8))
    slopes, table = torch.rand(H, requires_grad=True), torch.randn(2 * S - 1, requires_grad=True)
    gate, factor = torch.randn(B, H, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    for score_mod, captured in (
        (lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs(), [slopes]),
        (lambda s, b, h, q, kv: s + slopes[h] * (kv - q), [slopes]),
        (lambda s, b, h, q, kv: s + table[q - kv + S - 1] * factor, [table, factor]),
        (lambda s, b, h, q, kv: s * torch.sigmoid(gate[b, h]) + factor.exp(), [gate, factor]),
        (lambda s, b, h, q, kv: torch.maximum(s, table[q]) * factor, [table, factor]),
    ):
        check(inputs, score_mod, causal, captured=captured)
        # Of a captured tensor alone.
        check([x.detach() for x in inputs], score_mod, causal, captured=captured)


def test_what_steps_are_constant_in_has_the_gradient_0():
    inputs, table = drawn((1, 2, 12, 8)), torch.randn(12, requires_grad=True)
    for score_mod in (
        lambda s, b, h, q, kv: torch.where(s > 0, 1.0, 2.0),
        lambda s, b, h, q, kv: s.floor() + s.sign() * table[kv],
        lambda s, b, h, q, kv: torch.where(s > table[q], s * s, s),
        lambda s, b, h, q, kv: torch.where(s > table[q], table[kv], table[q] * 2),
        lambda s, b, h, q, kv: (s > 0) * table[kv] + (table[q] > 0).float() * s * s,
    ):
        o = vt.flex_attention(*inputs, score_mod)
        own = torch.autograd.grad(o.sum() + o.square().sum(), [*inputs, table], allow_unused=True)
        # The reference has no gradient at all where everything is constant.
        truth = reference(*(x.double() for x in inputs), lambda s, *at: score_mod(s, *at) + 0.0 * s)[0]  # noqa: B023
        theirs = torch.autograd.grad(truth.sum() + truth.square().sum(), [*inputs, table], allow_unused=True)
        for one, other in zip(own, theirs):
            one, other = (torch.zeros(()) if x is None else x for x in (one, other))
            assert (one - other).abs().max() <= 1e-4 * (1 + other.abs().max())


SPELLINGS = {
    "numbers": lambda s, b, h, q, kv: 2 - s / 3 + (-s) * 0.5 - 1 + True,
    "division": lambda s, b, h, q, kv: s + 0.01 * (q // 7 + q % 7 - torch.div(q, 3, rounding_mode="trunc") + (q - kv) // 4 + (q - kv) % 4),
    "remainders": lambda s, b, h, q, kv: s + 0.01 * (torch.fmod(q - kv, 5) + torch.remainder(q - kv, 5) + torch.div(kv - q, 5, rounding_mode="trunc")),
    "bits": lambda s, b, h, q, kv: s + 0.01 * ((q & 12) + (kv | 1) - (q ^ kv) + (q << 1) - (kv >> 1) + ~h),
    "logic": lambda s, b, h, q, kv: torch.where(torch.logical_and(q > 3, kv != 5) | ~(q == kv) & torch.logical_not(h < 1), s, s + 0.5),
    "xor": lambda s, b, h, q, kv: torch.where(torch.logical_xor(q > 3, kv > 5), s, s * 2) + torch.where(torch.logical_xor(s.relu(), q - 3), s, 0.5),
    "methods": lambda s, b, h, q, kv: s.mul(2).add(1).sub(q.float(), alpha=0.01).where(q.ge(kv), s.neg()),
    "casts": lambda s, b, h, q, kv: s + (q > kv).to(s.dtype) + (q / 2).int() * 0.01 + kv.to(torch.float32).long() * 0.02 + h.type_as(s) + b.double(),
    "numbers made": lambda s, b, h, q, kv: s + torch.zeros_like(s) + s.new_full((), 0.25) + torch.where(q.new_ones(()) > 0, 1.0, 2.0) + torch.tensor(3) * 0.1,
    "functions": lambda s, b, h, q, kv: s + torch.exp(-(q / 9)) + torch.log(kv + 1.0) + torch.sin(q * 0.1) + torch.sqrt(kv + h) + torch.special.expit(q - kv),
    "functions of a score": lambda s, b, h, q, kv: s.exp().log() + torch.sin(s) + torch.cos(s) * s.abs().sqrt() - (s * s + 1).rsqrt() + s.pow(2) + s**3 * 0.1,
    "more of a score": lambda s, b, h, q, kv: s.square() + s.relu() - s.sigmoid() + torch.nn.functional.silu(s) + s.erf() + (s.abs() + 1).log2() + s.exp2() + s.expm1(),
    "steps of a score": lambda s, b, h, q, kv: s + 0.1 * (s.floor() + s.ceil() + s.round() + s.trunc() + s.sign() + s % 0.7),
    "comparisons of a score": lambda s, b, h, q, kv: torch.where((s > 0.1) & (s.abs() <= 1.5) | (s == 0) | ~(s < 1), s, 0.5 * s) + (s > 0).float(),
    "bounds": lambda s, b, h, q, kv: s.clamp(-1, 1) + s.clamp_min(0.2) + torch.minimum(s, q * 0.1) + torch.max(s, s.new_tensor(0.1)) + q.clamp(max=9) * 0.1,
    "powers": lambda s, b, h, q, kv: s + 2.0 ** (-h) + (q + 1) ** -0.5 + 1.01**q + torch.pow(0.9, kv),
    "reflected": lambda s, b, h, q, kv: 1 - s + 2 * s + 3 / (s.abs() + 1) + (7 % (q + 1)) * 0.1 + (100 // (kv + 1)) * 0.01,
    "atan2": lambda s, b, h, q, kv: torch.atan2(s, q + 1.0) + torch.reciprocal(s.abs() + 2) + torch.where(torch.isfinite(s), s, 0.0) + torch.tan(s * 0.1),
    "nothing of the score": lambda s, b, h, q, kv: (q - kv) * 0.1,
    "a number": lambda s, b, h, q, kv: s * 0 + 1.0,
    "the negative": lambda s, b, h, q, kv: -torch.tanh(-s * 0.5) * 4,
    "two ways": lambda s, b, h, q, kv: torch.where(q > kv, s + 0.1 * q, s - 0.1 * kv),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    check(drawn((2, 2, 19, 8)), SPELLINGS[name], slack=16.0)


def test_whole_quotients_of_a_score():
    # Not differentiated: PyTorch has no derivative of them.
    check(drawn((2, 2, 19, 8), requires_grad=False), lambda s, b, h, q, kv: s // 0.5 + s // 1 + torch.div(s, 0.3, rounding_mode="trunc"))


def test_against_pytorch(monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    inputs = drawn((B, H, S, 16), requires_grad=False)
    for name in ("causal", "prefix of a batch", "documents", "causal alibi", "relative table", "soft cap", "checkerboard", "padding", "a temperature"):
        score_mod, mask_mod = GYM[name]
        mask = None if mask_mod is None else create_block_mask(mask_mod, B, H, S, S, device="cpu")
        for more in ({}, {"scale": 0.5}):
            o, total = vt.flex_attention(*inputs, score_mod, mask, return_lse=True, **more)
            theirs, of_theirs = flex.flex_attention(*inputs, score_mod, mask, return_lse=True, **more)
            close(o, theirs.double(), 4.0)
            assert (total - of_theirs).abs().max() < 1e-5
    q, k, v = drawn((B, H, S, 16), kv_heads=2, requires_grad=False)
    close(vt.flex_attention(q, k, v, alibi(H), enable_gqa=True), flex.flex_attention(q, k, v, alibi(H), enable_gqa=True).double(), 4.0)
    # Keys of batch 1, read by all; what is returned beside the result.
    mask = create_block_mask(lambda b, h, q, kv: kv < LENGTHS[b], B, None, S, S, device="cpu")
    k, v = k[:1], v[:1]
    o, aux = vt.flex_attention(q, k, v, None, mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    theirs, of_theirs = flex.flex_attention(q, k, v, None, mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    close(o, theirs.double(), 4.0)
    assert (aux.lse - of_theirs.lse).abs().max() < 1e-5 and aux.max_scores is None


# What the op has options for.


@pytest.fixture
def calls(monkeypatch):
    """The calls of the op: its words by name, and which tensors stand beside queries, keys and values."""
    made, own = [], _flex._ops.attention

    def attention(q, k, v, beside, slopes, *rest):
        words = dict(word.split("=") for word in rest[-1].split())
        made.append({**words, "beside": beside, "slopes": slopes, "lengths": rest[2], "blocks": rest[8:10]})
        return own(q, k, v, beside, slopes, *rest)

    monkeypatch.setattr(_flex._ops, "attention", attention)
    return made


def run_quietly(score_mod=None, mask_mod=None, queries=S, keys=S):
    inputs = drawn((B, H, queries, 16), keys=keys, requires_grad=False)
    check(inputs, score_mod, mask_mod)


def test_windows_are_options(calls):
    offset = 20
    for mask, queries, keys, want in (
        (causal, S, S, {"causal": "top_left"}),
        (causal, S, S + offset, {"causal": "top_left"}),
        (lambda b, h, q, kv: ~(kv > q), S, S, {"causal": "top_left"}),
        (lambda b, h, q, kv: 0 <= q - kv, S, S, {"causal": "top_left"}),
        (sliding_window(9), S, S, {"causal": "top_left", "left": "9"}),
        (lambda b, h, q, kv: (kv <= q) & (kv > q - 9), S, S, {"causal": "top_left", "left": "8"}),
        (lambda b, h, q, kv: q + offset >= kv, S, S + offset, {"right": "0"}),
        (lambda b, h, q, kv: (q - kv).abs() < 6, S, S, {"left": "5", "right": "5"}),
        (lambda b, h, q, kv: torch.logical_and(kv - q < 4.5, -3 <= kv - q), S, S, {"left": "3", "right": "4"}),
    ):
        run_quietly(None, mask, queries, keys)
        told = calls.pop()
        assert told["beside"] is None and {name: told[name] for name in ("causal", "left", "right") if name in told} == want
    run_quietly(lambda s, b, h, q, kv: torch.where(q >= kv, s, -math.inf))
    assert calls.pop()["causal"] == "top_left"
    # One that lets nothing through.
    for nothing in (lambda b, h, q, kv: (q >= kv) & (kv - q >= 3), lambda b, h, q, kv: (q - kv).abs() < 0):
        run_quietly(None, nothing)
        assert "left" not in calls.pop()
    # A window whose diagonal the op cannot place is a mask.
    run_quietly(None, lambda b, h, q, kv: q - 5 >= kv)
    told = calls.pop()
    assert told["beside"].dtype == torch.uint8 and tuple(told["beside"].shape) == (1, 1, S, S) and "causal" not in told


def test_scores_are_options(calls):
    run_quietly(soft_cap(2.0), causal)
    told = calls.pop()
    assert float(told["cap"]) == 2.0 and math.isclose(float(told["scale"]), 0.25) and told["beside"] is None
    run_quietly(lambda s, b, h, q, kv: s * 0.5)
    assert math.isclose(float(calls.pop()["scale"]), 0.125)
    for score_mod in (alibi(H), lambda s, b, h, q, kv: s - torch.rand(H, generator=torch.Generator().manual_seed(1))[h] * (q - kv)):
        run_quietly(score_mod, causal)
        told = calls.pop()
        assert told["beside"] is None and tuple(told["slopes"].shape) == (1, H, 1, 1)
    run_quietly(lambda s, b, h, q, kv: s - 0.1 * (h + 1) * (q - kv).abs())
    assert calls.pop()["slopes"] is not None
    # Keys behind the query would be nearer by the formula and farther by the slope. Without gradients it is a function, which stores nothing.
    run_quietly(alibi(H))
    assert not calls
    check(drawn((B, H, S, 16)), alibi(H))
    told = calls.pop()
    assert told["slopes"] is None and tuple(told["beside"].shape) == (1, H, S, S)


# Block masks that are the op's map of blocks.

#: Ragged at both ends.
LONG_Q, LONG_KV = 300, 420


def documents(sizes, batch):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 4, (batch, sizes), generator=generator).sort(1)[0]


def block_masks():
    of_q, of_kv = documents(LONG_Q, B), documents(LONG_KV, B)
    return {
        "documents": ((B, None), lambda b, h, q, kv: of_q[b, q] == of_kv[b, kv]),
        "causal documents": ((B, H), lambda b, h, q, kv: (of_q[b, q] == of_kv[b, kv]) & (q >= kv)),
        "prefix": ((None, None), lambda b, h, q, kv: (kv < 100) | (q >= kv)),
        "steps": ((None, None), lambda b, h, q, kv: (q - kv) % 3 == 0),
        "by head": ((None, H), lambda b, h, q, kv: (kv // 128) % H == h),
        "rows without keys": ((None, None), lambda b, h, q, kv: (q > 150) & (kv > 290)),
        "nothing": ((None, None), lambda b, h, q, kv: (q < 0) | (kv < 0)),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(block_masks()))
def test_blocks_of_a_mask_are_a_map(calls, name, dtype):
    dims, mask_mod = block_masks()[name]
    mask = create_block_mask(mask_mod, *dims, LONG_Q, LONG_KV, device="cpu")
    q, k, v = drawn((B, H, LONG_Q, 32), keys=LONG_KV, dtype=dtype)
    o = vt.flex_attention(q, k, v, soft_cap(2.0), mask, enable_gqa=True)
    told = calls.pop()
    block_map, masks = told["blocks"]
    assert told["beside"] is None and block_map.dtype == torch.int32 and masks.dtype == torch.uint8
    assert tuple(masks.shape[1:]) == (1, 128, 16) and tuple(block_map.shape[2:]) == (3, 4)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = reference(*wide, soft_cap(2.0), mask_mod)
    want = want[0] if isinstance(want, tuple) else want
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    given, wanted = torch.autograd.grad(o, (q, k, v), d_o), torch.autograd.grad(want, wide, d_o.double())
    for one, other in zip((o, *given), (want, *wanted)):
        scale = other.abs().max().clamp(min=1e-3)
        assert (one.double() - other).abs().max() <= 8.0 * torch.finfo(dtype).eps * scale, name


def test_a_map_of_blocks_is_kept_and_made_again_where_its_tensors_changed(calls):
    of = documents(LONG_Q, 1)[0]
    mask = create_block_mask(lambda b, h, q, kv: of[q] == of[kv], None, None, LONG_Q, LONG_Q, device="cpu")
    q, k, v = (x.detach() for x in drawn((B, H, LONG_Q, 32), keys=LONG_Q, dtype=torch.bfloat16))
    first = vt.flex_attention(q, k, v, None, mask, enable_gqa=True)
    vt.flex_attention(q, k, v, None, mask, enable_gqa=True)
    assert calls[0]["blocks"][0] is calls[1]["blocks"][0] and calls[0]["blocks"][1] is calls[1]["blocks"][1]
    # Blocks stay where they were, as PyTorch's do; within them the function says what it now says.
    of[:LONG_Q // 2] = 0
    again = vt.flex_attention(q, k, v, None, mask, enable_gqa=True)
    assert calls[2]["blocks"][0] is not calls[0]["blocks"][0] and not torch.equal(first, again)


def test_a_map_of_blocks_that_was_made_in_inference_mode_is_made_again_for_gradients(calls):
    mask = create_block_mask(block_masks()["prefix"][1], None, None, LONG_Q, LONG_KV, device="cpu")
    q, k, v = drawn((B, H, LONG_Q, 32), keys=LONG_KV, dtype=torch.bfloat16)
    with torch.inference_mode():
        first = vt.flex_attention(q.detach(), k.detach(), v.detach(), None, mask, enable_gqa=True)
    o = vt.flex_attention(q, k, v, None, mask, enable_gqa=True)
    assert calls[0]["blocks"][0] is not calls[1]["blocks"][0] and torch.equal(o, first)
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.float().sum(), (q, k, v)))


def test_masks_that_kernels_do_not_go_through_by_blocks_are_tensors(calls):
    prefix = block_masks()["prefix"][1]
    def run(dtype=torch.bfloat16, elements=32, size=128, trained=False):
        mask = create_block_mask(prefix, None, None, LONG_Q, LONG_KV, device="cpu", BLOCK_SIZE=size)
        q, k, v = drawn((B, H, LONG_Q, elements), keys=LONG_KV, dtype=dtype, requires_grad=trained)
        vt.flex_attention(q, k, v, None, mask, enable_gqa=True)
        return calls.pop()
    assert run()["blocks"][0] is not None
    assert all(run(**given)["beside"] is not None for given in ({"dtype": torch.float32}, {"size": 64}, {"elements": 136, "trained": True}))
    assert run(elements=136)["blocks"][0] is not None
    torch.use_deterministic_algorithms(True)
    try:
        assert run(trained=True)["beside"] is not None and run()["blocks"][0] is not None
    finally:
        torch.use_deterministic_algorithms(False)


def test_infinities_that_hide_nothing_are_no_conditions():
    for score_mod, want in (
        (lambda s, b, h, q, kv: 2 * torch.where(q >= kv, s, -math.inf), True),
        (lambda s, b, h, q, kv: -torch.where(q >= kv, s, -math.inf), False),
        (lambda s, b, h, q, kv: torch.where(q >= kv, s, math.inf), False),
        (lambda s, b, h, q, kv: s + torch.where(q >= kv, 0, -math.inf), True),
        (lambda s, b, h, q, kv: s - torch.where(q >= kv, 0, math.inf), False),
        (lambda s, b, h, q, kv: s - torch.where(q >= kv, 0, -math.inf), False),
    ):
        trace = Trace(torch.device("cpu"), torch.float32)
        form = _flex_forms.form_of(trace, trace.call(score_mod, "score_mod", True))
        conditions = [] if form is None else [*form.conditions, *_flex_forms.without_hiding(trace, form.biases)[1]]
        assert bool(conditions) == want


def test_lengths_are_options(calls):
    mask = lambda b, h, q, kv: kv < LENGTHS[b]  # noqa: E731
    # The blocks of a mask of captured tensors are asked too, and are a mask; one block hides nothing.
    check(drawn((B, H, S, 16), requires_grad=False), None, mask, block_mask=whole(mask, S, S))
    told = calls.pop()
    assert told["beside"] is None and told["lengths"].flatten().tolist() == LENGTHS.tolist()
    # Where there are gradients too, that of the log-sum-exp among them.
    for dtype in (torch.float32, torch.bfloat16):
        check(drawn((B, H, S, 16), dtype), None, mask, block_mask=whole(mask, S, S))
        told = calls.pop()
        assert told["beside"] is None and told["lengths"].flatten().tolist() == LENGTHS.tolist()
    run_quietly(lambda s, b, h, q, kv: torch.where(kv <= LENGTHS[b], s, -math.inf))
    assert calls.pop()["lengths"].flatten().tolist() == (LENGTHS + 1).tolist()
    # Not beside a bias that wants a gradient, which no kernel of tensor cores gives with lengths.
    bias = torch.randn(S, S, requires_grad=True)
    check(drawn((B, H, S, 16)), lambda s, b, h, q, kv: s + bias[q, kv], mask, captured=[bias], block_mask=whole(mask, S, S))
    assert calls.pop()["lengths"] is None
    # Beside a window that counts from the last key, which lengths would move.
    run_quietly(lambda s, b, h, q, kv: torch.where((kv < LENGTHS[b]) & ((q - kv).abs() < 9), s, -math.inf))
    assert calls.pop()["lengths"] is None


def test_every_window_is_the_mask_it_says():
    """Comparisons of places in many spellings, against the places themselves."""
    at = torch.arange(9)
    queries, keys = at[:, None], at[None]
    found = 0
    forms = [
        lambda q, kv, n: q - kv,
        lambda q, kv, n: kv - q + n,
        lambda q, kv, n: -(q + n) + kv,
        lambda q, kv, n: (q - kv + n).abs(),
        lambda q, kv, n: n - (q - kv),
        lambda q, kv, n: q + 2 * kv - 3 * kv,
        lambda q, kv, n: q + kv,
        lambda q, kv, n: 2 * q - 2 * kv,
        lambda q, kv, n: (q // 2) - (kv // 2),
    ]
    names = ["lt", "le", "gt", "ge", "eq"]
    for form, name, n, bound, is_negated, is_turned in itertools.product(forms, names, (-2, 0, 3), (-3, 0, 2, 2.5, -1.0), (False, True), (False, True)):
        def mask(b, h, q, kv):
            x, z = form(q, kv, n), bound
            made = getattr(torch, name)(x, z) if not is_turned else {"lt": z < x, "le": z <= x, "gt": z > x, "ge": z >= x, "eq": z == x}[name]
            return ~made if is_negated else made

        trace = Trace(torch.device("cpu"), torch.float32)
        parts = _flex_forms.parts_of([(trace.call(mask, "mask_mod", False), True)])
        band = _flex_forms.band_of(trace, *parts[0])
        if band is not None:
            found += 1
            low, high = (-99 if band[0] is None else band[0]), (99 if band[1] is None else band[1])
            assert ((keys - queries >= low) & (keys - queries <= high)).equal(mask(None, None, queries, keys)), (name, n, bound, is_negated, is_turned)
    assert found > 900


# Block masks.


def test_blocks_say_what_is_attended(calls):
    q, k, v = drawn((2, 2, 100, 8))
    # Made by hand, without a function: the listed blocks are attended, and no others.
    count = torch.tensor([1, 2, 0, 1], dtype=torch.int32).expand(1, 1, 4).contiguous()
    indices = torch.tensor([[0, 1, 2, 3], [3, 1, 0, 2], [0, 1, 2, 3], [2, 0, 1, 3]], dtype=torch.int32)[None, None]
    by_hand = flex.BlockMask.from_kv_blocks(count, indices, BLOCK_SIZE=32, seq_lengths=(100, 100))
    blocks = torch.zeros(4, 4, dtype=torch.bool)
    blocks[0, 0] = blocks[1, 3] = blocks[1, 1] = blocks[3, 2] = True
    attended = blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)[:100, :100]
    for score_mod in (None, checkerboard):
        o = vt.flex_attention(q, k, v, score_mod, by_hand)
        close(o, reference(q.double(), k.double(), v.double(), score_mod, attended=attended)[0], 4.0)
    # Full blocks are not asked, partial ones are.
    mixed = flex.BlockMask.from_kv_blocks(
        count, indices, torch.tensor([0, 0, 1, 0], dtype=torch.int32)[None, None], indices, BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(100, 100)
    )
    full = torch.zeros(4, 4, dtype=torch.bool)
    full[2, 0] = True
    at = torch.arange(100)
    want = attended & (at[:, None] >= at) | full.repeat_interleave(32, 0).repeat_interleave(32, 1)[:100, :100]
    close(vt.flex_attention(q, k, v, None, mixed), reference(q.double(), k.double(), v.double(), attended=want)[0], 4.0)
    # One that was made by its function says no more than that, and is not looked at again.
    calls.clear()
    mask = create_block_mask(causal, 2, 2, 100, 100, device="cpu", BLOCK_SIZE=32)
    for _ in range(2):
        vt.flex_attention(q, k, v, None, mask)
        assert calls.pop()["beside"] is None
    # Changed in place, it is.
    mask.kv_num_blocks.zero_()
    vt.flex_attention(q, k, v, None, mask)
    assert calls.pop()["beside"] is not None


def test_blocks_stay_where_they_were_made():
    """Of a function whose tensors have changed since: a pair is attended where its block was listed and the function holds now, as in PyTorch's kernels."""
    q, k, v = drawn((1, 1, 64, 8), requires_grad=False)
    document = torch.arange(64) // 16

    def same(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    mask = create_block_mask(same, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    wide = [x.double() for x in (q, k, v)]
    for documents_now in (document.clone(), document * 0, torch.arange(64) // 8):
        document.copy_(documents_now)
        # All listed blocks are full ones, which are not asked.
        at = torch.arange(64) // 16
        close(vt.flex_attention(q, k, v, None, mask), reference(*wide, attended=at[:, None] == at)[0], 4.0)
    document.copy_(torch.arange(64) // 9)
    mask = create_block_mask(same, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    first = document[:, None] == document
    listed = torch.nn.functional.max_pool2d(first[None].float(), 16)[0].bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
    close(vt.flex_attention(q, k, v, None, mask), reference(*wide, attended=first)[0], 4.0)
    document.zero_()
    assert not listed.all()
    close(vt.flex_attention(q, k, v, None, mask), reference(*wide, attended=listed)[0], 4.0)


def test_blocks_of_windows_are_held_against_the_window(calls):
    """Whether the blocks of a mask made by hand, of whole random blocks, let through what a window does: by distances, and by the pairs themselves."""
    q, k, v = drawn((1, 1, 50, 8), keys=37, requires_grad=False)
    generator, answers = torch.Generator().manual_seed(9), set()
    at = torch.arange(50)[:, None], torch.arange(37)[None]
    for trial in range(60):
        low, high = sorted(torch.randint(-40, 40, (2,), generator=generator).tolist())

        def window(b, h, q_idx, kv_idx, low=low, high=high):
            return (kv_idx - q_idx >= low) & (kv_idx - q_idx <= high)

        mask = create_block_mask(window, None, None, 50, 37, device="cpu", BLOCK_SIZE=(16, 8))
        if trial % 3:
            # A block less, or a full one more.
            row = int(torch.randint(4, (1,), generator=generator))
            changed = mask.kv_num_blocks if trial % 3 == 1 else mask.full_kv_num_blocks
            changed[0, 0, row] = (changed[0, 0, row] - 1).clamp(min=0) if trial % 3 == 1 else (changed[0, 0, row] + 1).clamp(max=5)
        count, listed = mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0]
        full_count, full = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
        attended = torch.zeros(64, 40, dtype=torch.bool)
        for row in range(4):
            for column in listed[row, : count[row]]:
                attended[16 * row : 16 * row + 16, 8 * column : 8 * column + 8] |= window(0, 0, torch.arange(16 * row, 16 * row + 16)[:, None], torch.arange(8 * column, 8 * column + 8))
            for column in full[row, : full_count[row]]:
                attended[16 * row : 16 * row + 16, 8 * column : 8 * column + 8] = True
        attended = attended[:50, :37]
        is_said = attended.equal(window(0, 0, *at))
        answers.add(is_said)
        close(vt.flex_attention(q, k, v, None, mask), reference(*(x.double() for x in (q, k, v)), attended=attended)[0], 4.0)
        is_option = calls.pop()["beside"] is None
        # A window that the op cannot say is a mask in any case.
        assert is_option <= is_said and (is_option or not is_said or high < 37 - 50 or low > 37 - 50), (trial, low, high)
    assert answers == {True, False}


def test_many_pairs_are_computed_in_rows(monkeypatch):
    monkeypatch.setattr(_flex, "_MOST_AT_ONCE", 500)
    vt.clear_plans()
    for name in ("natten 1d", "documents", "relative table", "checkerboard", "heads apart"):
        check(drawn((B, H, S, 8)), *GYM[name])
    vt.clear_plans()


# Functions that are steps of the op.


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that calls draw, as JSON."""
    drawn_graphs, own = [], _flex_composed._planned
    monkeypatch.setattr(_flex_composed, "_planned", lambda key, device, draw: drawn_graphs.append(json.loads(draw().to_json())) or own(key, device, draw))
    return drawn_graphs


def ops_of(graph):
    return [next(iter(node["op"])) for node in graph["nodes"]]


SCALES = torch.rand(H, generator=torch.Generator().manual_seed(11))
SIGNS = torch.randint(0, 2, (S,), generator=torch.Generator().manual_seed(12), dtype=torch.bool)
STEPS = {
    "a power": (lambda s, b, h, q, kv: s * s * 0.5, 0),
    "powers": (lambda s, b, h, q, kv: s**2 + 0.1 * s**3.0 - ((q - kv) * 0.05) ** 2 + 0.001 * ((q - kv) ** 3 // 7), 0),
    "a distance": (lambda s, b, h, q, kv: s * (1 + 0.125 * (q - kv).abs()), 0),
    "near and far": (lambda s, b, h, q, kv: torch.where((q - kv).abs() <= 5, s * s, -math.inf), 0),
    "whole quotients": (lambda s, b, h, q, kv: s.abs() + (q - kv) // 7 - (kv - q) % 5 + torch.fmod(q - 2 * kv, 3), 1),
    "truncated": (lambda s, b, h, q, kv: torch.trunc(4 * s) / 4 + torch.div(q - kv, 4, rounding_mode="trunc"), 0),
    "by head and key": (lambda s, b, h, q, kv: torch.sigmoid(s) * SCALES[h] + torch.where(SIGNS[kv], s, -s), 2),
    "of one of them alone": (lambda s, b, h, q, kv: s * s + torch.log1p(kv / 3) - torch.sqrt(q * 1.0), 2),
    "rounded": (lambda s, b, h, q, kv: (s.abs() + (q + kv)).to(torch.bfloat16).float(), 0),
    "logic": (lambda s, b, h, q, kv: torch.where(((q > kv) ^ (s > 0)) & ~(q == 3), torch.relu(s), torch.exp(s.clamp(max=1.0))), 1),
    "gathered by both": (lambda s, b, h, q, kv: s * s + TABLE[h, q - kv + S - 1], 1),
    "batch": (lambda s, b, h, q, kv: s * s * (b + 1) + h, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["f32", "f64", "bf16"])
@pytest.mark.parametrize("name", STEPS)
def test_functions_are_steps_of_the_op(graphs, name, dtype):
    score_mod, operands = STEPS[name]
    if name == "rounded" and dtype == torch.float64:
        pytest.skip("scores of float64 are not rounded to 16 bits")
    q, k, v = drawn((B, H, S, 16), dtype, kv_heads=2, requires_grad=False)
    for mask in (None, causal, lambda b, h, i, j: (i * 7 + j * 5) % 3 != 0):
        o = vt.flex_attention(q, k, v, score_mod, None if mask is None else whole(mask, S, S), enable_gqa=True)
        # A number that is rounded to 16 bits within is another one where the product was on the other side.
        slack = 40.0 if name in ("rounded", "truncated", "logic") and dtype != torch.float64 else 6.0
        close(o, reference(*(x.double() for x in (q, k, v)), score_mod, mask)[0], slack)
    assert [ops_of(graph) for graph in graphs] == [["attention"]] * 3
    # Reals of places are f32, whose roundings steps in f64 would not have.
    if dtype != torch.float64:
        assert [len(graph["nodes"][0]["op"]["attention"].get("score_operands", [])) for graph in graphs] == [operands] * 3
    # A window is an option, and reads no mask.
    assert "mask" not in graphs[1]["nodes"][0]["op"]["attention"] and "mask" in graphs[2]["nodes"][0]["op"]["attention"]


def test_nothing_of_the_size_of_the_scores_is_stored(graphs):
    queries, keys = 1500, 1300
    q, k, v = drawn((1, 2, queries, 8), keys=keys, requires_grad=False)
    weights, seen = torch.rand(keys), []

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx % 16 >= kv_idx % 16, score * score - 0.001 * (q_idx - kv_idx).abs() * (h + 1), score) + weights[kv_idx]

    own = torch.utils._python_dispatch.TorchDispatchMode

    class Sizes(own):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(x, torch.Tensor))
            return made

    with Sizes():
        o = vt.flex_attention(q, k, v, score_mod, whole(causal, queries, keys))
    close(o, reference(*(x.double() for x in (q, k, v)), score_mod, causal)[0], 6.0)
    (graph,) = graphs
    sizes = [math.prod(tensor["layout"]["dims"]) for tensor in graph["tensors"]]
    assert ops_of(graph) == ["attention"] and seen and max(sizes + seen) <= 2 * queries * 8, (max(sizes), max(seen))


#: What is added, and words of the op's window that hides what the function does.
OF_BOTH = {
    "a distance": (lambda s, b, h, q, kv: s - 0.1 * (q - kv), {}),
    "a parabola": (lambda s, b, h, q, kv: torch.where(q >= kv, s - 0.01 * (q - kv) ** 2, -math.inf), {"causal": "top_left"}),
    "steps of distance": (lambda s, b, h, q, kv: torch.where((q - kv).abs() <= 9, s + (q - kv) // 4 * 0.25, -math.inf), {"left": 9, "right": 9}),
    "blocks": (lambda s, b, h, q, kv: torch.where(q // 8 == kv // 8, s, -math.inf) + 0.01 * (q * kv), {}),
    "by head": (lambda s, b, h, q, kv: torch.tanh(s) * 2 + SCALES[h] * torch.sqrt((q - kv).abs() + 1.0), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", OF_BOTH)
def test_biases_of_queries_and_keys_are_steps_where_nobody_wants_gradients(graphs, calls, name, dtype):
    score_mod, window = OF_BOTH[name]
    q, k, v = drawn((B, H, S, 16), dtype, kv_heads=2, requires_grad=False)
    for mask in (None, lambda b, h, i, j: (i * 7 + j * 5) % 3 != 0):
        o = vt.flex_attention(q, k, v, score_mod, None if mask is None else whole(mask, S, S), enable_gqa=True)
        close(o, reference(*(x.double() for x in (q, k, v)), score_mod, mask)[0], 6.0)
    assert [ops_of(graph) for graph in graphs] == [["attention"]] * 2 and not calls
    for graph, is_masked in zip(graphs, (False, True)):
        told = graph["nodes"][0]["op"]["attention"]
        assert "score" in told and "bias" not in told and ("mask" in told) == is_masked
        assert {name: told["spec"].get(name) if "spec" in told else told.get(name) for name in window} == window
    # With gradients they are a bias.
    check(drawn((B, H, S, 16)), score_mod)
    assert calls and calls[-1]["beside"] is not None


def _hidden_by_captured(document, length):
    """Functions that hide pairs by tensors that they captured, which may be other ones at the next call."""

    def same(s, b, h, i, j):
        return torch.where(document[i] == document[j], s, -math.inf)

    def same_and_near(s, b, h, i, j):
        return torch.where((document[i] == document[j]) & (i >= j), s * 0.5, -math.inf)

    def up_to(s, b, h, i, j):
        return torch.where(document[i] + length[b, h] >= document[j] * 2, s, -math.inf)

    return {"same": same, "same_and_near": same_and_near, "up_to": up_to}


@pytest.mark.parametrize("is_trained", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", list(_hidden_by_captured(None, None)))
def test_pairs_that_a_function_hides_by_captured_tensors_are_steps(graphs, calls, name, is_trained):
    # Numbers that f32 does not tell apart.
    many = 1 << 40
    document, length = torch.randint(many, many + 4, (40,)), torch.randint(many, many + 4, (B, H))
    score_mod = _hidden_by_captured(document, length)[name]
    inputs = drawn((B, H, 40, 8), requires_grad=is_trained)
    for _ in range(2):
        close(vt.flex_attention(*inputs, score_mod), reference(*(x.double() for x in inputs), score_mod)[0], 8.0)
        # In place, as another batch has other documents.
        document.copy_(torch.randint(many, many + 3, (40,)))
    assert not calls and [ops_of(graph) for graph in graphs] == [["attention"]] * 2
    told = graphs[0]["nodes"][0]["op"]["attention"]
    assert told["score"] and "mask" not in told
    if is_trained:
        trained(inputs, score_mod)
        assert ops_of(graphs[-1]) == ["attention_backward"]


@pytest.mark.parametrize("sizes", [((1, 1, 5, 1), (1, 1, 1, 7)), ((2, 1, 1, 1), (2, 3, 1, 4)), ((1, 3, 6, 1), (2, 1, 1, 6)), ((1, 1, 1, 1), (1, 1, 1, 1))])
def test_ranks_compare_as_the_numbers_do(sizes):
    for low, high in ((0, 3), (-(1 << 62), 1 << 62)):
        x, z = (torch.randint(low, high, size) for size in sizes)
        z.flatten()[0] = x.flatten()[0]
        of_x, of_z = _flex_trace._ranks(x, z)
        for compared in (torch.eq, torch.lt, torch.ge):
            assert torch.equal(compared(of_x, of_z), compared(x, z).expand(torch.broadcast_shapes(of_x.shape, of_z.shape)))
        assert min(of_x.min(), of_z.min()) >= 0 and max(of_x.max(), of_z.max()) < sum(math.prod(size[2:]) for size in sizes)


NEAR = torch.randn(H, 2 * S - 1, generator=torch.Generator().manual_seed(13))
BY_DISTANCE = torch.randn(S, H, generator=torch.Generator().manual_seed(14)).to(torch.bfloat16)
IS_SHOWN = torch.randint(0, 2, (B, 2 * S - 1), generator=torch.Generator().manual_seed(15), dtype=torch.bool)
OF_QUERY = torch.randn(S, 9, generator=torch.Generator().manual_seed(16))


def _bucket(distance):
    """As relative positions are put into buckets: near ones by themselves, far ones by eights."""
    distance = distance.abs()
    return torch.where(distance < 8, distance, torch.minimum(8 + (distance - 8) // 8, distance * 0 + 15))


#: What is read of tables at places of both queries and keys, and whether it is a bias alone.
TABLES = {
    "relative": (lambda s, b, h, q, kv: s + NEAR[h, q - kv + S - 1], True),
    "relative, the other way round": (lambda s, b, h, q, kv: torch.where(q >= kv, s - NEAR[h, kv - q + S - 1] * 0.5, -math.inf), True),
    "by distance and head": (lambda s, b, h, q, kv: s + BY_DISTANCE[(q - kv).abs(), h], True),
    "buckets": (lambda s, b, h, q, kv: s * NEAR[h, _bucket(q - kv)], False),
    "shown": (lambda s, b, h, q, kv: torch.where(IS_SHOWN[b, q - kv + S - 1], s, -math.inf), True),
    "of each query": (lambda s, b, h, q, kv: torch.tanh(s) + OF_QUERY[q, (q + kv) % 9], False),
    "two of one": (lambda s, b, h, q, kv: s * s + NEAR[h, q - kv + S - 1] * NEAR[0, (q - kv).abs()], False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read_at_places_of_both(graphs, calls, name, dtype):
    score_mod, _ = TABLES[name]
    q, k, v = drawn((B, H, S, 16), dtype, kv_heads=2, requires_grad=False)
    for mask in (None, lambda b, h, i, j: (i * 7 + j * 5) % 3 != 0):
        o = vt.flex_attention(q, k, v, score_mod, None if mask is None else whole(mask, S, S), enable_gqa=True)
        close(o, reference(*(x.double() for x in (q, k, v)), score_mod, mask)[0], 8.0)
    assert [ops_of(graph) for graph in graphs] == [["attention"]] * 2 and not calls
    for graph in graphs:
        told = graph["nodes"][0]["op"]["attention"]
        assert "bias" not in told and any("gather" in step for step in told["score"])
        read = {tensor["uid"]: math.prod(tensor["layout"]["dims"]) for tensor in graph["tensors"]}
        assert max(read[uid] for uid in told["score_operands"]) <= max(NEAR.numel(), OF_QUERY.numel())


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read_in_gradients_too(graphs, calls, name):
    score_mod, _ = TABLES[name]
    trained(drawn((B, H, S, 16)), score_mod, slack=10.0)
    assert [ops_of(graph) for graph in graphs] == [["attention"], ["attention_backward"]] and not calls


SMALL = torch.randint(0, 256, (S,), generator=torch.Generator().manual_seed(17), dtype=torch.uint8)
SIGNED = torch.randint(-128, 128, (S,), generator=torch.Generator().manual_seed(18), dtype=torch.int8)
LONG = torch.randn(H, 1000, generator=torch.Generator().manual_seed(19))
#: What is made of entries by more than steps, tables that are read at two places, and whole numbers that wrap around in their type.
BESIDE_TABLES = {
    "of 16 bits": lambda s, b, h, q, kv: s * s + BY_DISTANCE[(q - kv).abs(), h] * 0.5,
    "rounded": lambda s, b, h, q, kv: s * s + LONG[h, q - kv + S].to(torch.bfloat16),
    "as float64": lambda s, b, h, q, kv: s * s + LONG[h, q - kv + S].double() * 0.5,
    "as whole numbers": lambda s, b, h, q, kv: s * s + (LONG[h, q - kv + S] * 4).to(torch.int64),
    "a remainder": lambda s, b, h, q, kv: s * s + LONG[h, q - kv + S] % 0.3,
    "a power": lambda s, b, h, q, kv: s * s + LONG[h, q - kv + S].abs() ** 1.5,
    "a question": lambda s, b, h, q, kv: torch.where(torch.isinf(LONG[h, q - kv + S]), s, s * s),
    "at two places": lambda s, b, h, q, kv: s + LONG[h, q - kv + S] + LONG[h, (q - kv).abs()],
    "at five places": lambda s, b, h, q, kv: s + sum(LONG[h, (q - kv).abs() + n] for n in range(5)),
    "far behind the first": lambda s, b, h, q, kv: s + LONG[h, (q - kv).abs() + 900],
    "bytes that wrap": lambda s, b, h, q, kv: s + LONG[h, (SMALL[q] + SMALL[kv]).to(torch.int64)],
    "signed bytes that wrap": lambda s, b, h, q, kv: s + LONG[h, (SIGNED[q] - SIGNED[kv]).to(torch.int64) + 128],
    "a product that wraps": lambda s, b, h, q, kv: torch.where(SIGNED[q].to(torch.int16) * 300 * SIGNED[kv] > 0, s, -math.inf),
    "a sum that wraps": lambda s, b, h, q, kv: torch.where((SMALL[q] + SMALL[kv]) > 100, s, -math.inf),
    "a cast that wraps": lambda s, b, h, q, kv: s + LONG[h, (q * 3 + kv + 64).to(torch.int8).to(torch.int64) + 128] + (q * 3 + kv).to(torch.int8) * 0.01,
}


@pytest.mark.parametrize("is_trained", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", BESIDE_TABLES)
def test_what_stands_beside_tables(name, is_trained):
    score_mod, inputs = BESIDE_TABLES[name], drawn((B, H, S, 16), requires_grad=is_trained)
    if is_trained:
        return trained(inputs, score_mod, slack=10.0)
    close(vt.flex_attention(*inputs, score_mod), reference(*(x.double() for x in inputs), score_mod)[0], 10.0)


def test_tables_are_no_larger_than_what_is_read_of_them(graphs):
    """Of a long tensor the part that may be read, and of one of which each query has a line no more than there are pairs."""
    long, lines, row = torch.randn(4, 1 << 16), torch.randn(S, 1 << 12), torch.arange(S) % 4

    def read(score_mod):
        graphs.clear()
        inputs = drawn((1, 1, S, 16), requires_grad=False)
        close(vt.flex_attention(*inputs, score_mod), reference(*(x.double() for x in inputs), score_mod)[0], 8.0)
        (told,) = [graph["nodes"][0]["op"]["attention"] for graph in graphs]
        return max(math.prod(tensor["layout"]["dims"]) for tensor in graphs[0]["tensors"] if tensor["uid"] in told["score_operands"])

    assert read(lambda s, b, h, i, j: s * s + long[1, i + j]) == 2 * S - 1
    assert read(lambda s, b, h, i, j: s * s + long[1, i + j + 50000]) == 2 * S - 1
    # Lines of each query are as many entries as twice the pairs; pairs are fewer.
    assert read(lambda s, b, h, i, j: s * s + long[row[i], i + j]) == S * S
    assert read(lambda s, b, h, i, j: s * s + lines[i, (i + j) % 7]) == 7 * S


def test_what_is_no_table_is_an_operand_of_all_pairs(graphs, calls):
    def of(score_mod):
        graphs.clear()
        run_quietly(score_mod)
        return graphs[-1]["nodes"][0]["op"]["attention"]

    pairs = torch.randn(S, S)
    # By both apart; a place that wraps around; one that nobody knows; numbers that f32 does not hold.
    places, whole_numbers = torch.randint(0, S, (S,)), torch.randint(1 << 40, 1 << 41, (2 * S,))
    for score_mod in (
        lambda s, b, h, q, kv: s * s + pairs[q, kv],
        lambda s, b, h, q, kv: s * s + NEAR[h, q - kv],
        lambda s, b, h, q, kv: s * s + NEAR[h, places[q] + kv],
        lambda s, b, h, q, kv: s * s + torch.where(whole_numbers[q - kv + S] == 0, s, 1.0),
    ):
        assert not any("gather" in step for step in of(score_mod)["score"])
    assert not calls


READ = {
    "a relative table": lambda s, b, h, q, kv, of: s + of["table"][h, q - kv + S - 1],
    "a bucket": lambda s, b, h, q, kv, of: s * s + of["buckets"][(q - kv).abs() // 4],
    "a factor": lambda s, b, h, q, kv, of: s * torch.sigmoid(of["table"][h, q - kv + S - 1]) + of["row"][kv],
    "by query": lambda s, b, h, q, kv, of: torch.tanh(s) * of["row"][q] + (q - kv) * 0.01,
    "by head": lambda s, b, h, q, kv, of: s - of["head"][h] * (q - kv).abs() * 0.1 + torch.where(q == kv, s * s, 0.0),
    "hidden": lambda s, b, h, q, kv, of: torch.where((q - kv) % 3 == 0, -math.inf, s + of["table"][h, q - kv + S - 1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", READ)
def test_the_op_gives_the_gradients_of_what_functions_read(graphs, name, dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = {"table": (H, 2 * S - 1), "buckets": ((S + 3) // 4,), "row": (S,), "head": (H,)}
    of = {key: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for key, shape in shapes.items()}
    q, k, v = drawn((B, H, S, 8))
    o = vt.flex_attention(q, k, v, lambda *at: READ[name](*at, of), whole(causal, S, S))
    read = [x for x in of.values() if torch.autograd.grad(o.sum(), x, retain_graph=True, allow_unused=True)[0] is not None]
    d_o = torch.randn(o.shape, generator=generator)
    found = torch.autograd.grad(o, [q, *read], d_o)
    (back,) = [graph["nodes"][0]["op"]["attention_backward"] for graph in graphs[-1:]]
    assert read and sum(uid is not None for uid in back["d_score_operands"]) == len(read)
    # The same by a reference that reads what these types hold.
    wide = {key: x.detach().double().requires_grad_() for key, x in of.items()}
    (q_wide, k_wide, v_wide) = (x.detach().double().requires_grad_() for x in (q, k, v))
    truth = reference(q_wide, k_wide, v_wide, lambda *at: READ[name](*at, wide), causal)[0]
    of_read = [wide[key] for key, x in of.items() if any(x is one for one in read)]
    for one, other in zip(found, torch.autograd.grad(truth, [q_wide, *of_read], d_o.double())):
        # What is computed of bf16 before it meets the score is rounded to it, as PyTorch says.
        slack = 2.0**-5 if dtype == torch.bfloat16 else 1e-5
        assert (one - other).abs().max() <= slack * (1 + other.abs().max()), name


@pytest.mark.parametrize("name", ["plain", "causal", "options", "steps", "composed", "blocks", "lengths"])
@pytest.mark.parametrize("is_trained", [False, True], ids=["forward", "backward"])
def test_greatest_scores(name, is_trained):
    score_mod, mask_mod = {
        "plain": (None, None),
        "causal": (None, causal),
        "options": (lambda s, b, h, q, kv: torch.tanh(s / 2) * 2 + BIAS[0, 0, q, kv], lambda b, h, q, kv: (q - kv < 9) & (q != 3)),
        "steps": (lambda s, b, h, q, kv: s * s * 0.5 - (q - kv).abs() * 0.1, lambda b, h, q, kv: (q >= kv) & (q != 7)),
        "composed": (lambda s, b, h, q, kv: s + torch.sin(s), causal),
        "blocks": (None, lambda b, h, q, kv: (q // 5) == (kv // 5)),
        "lengths": (None, lambda b, h, q, kv: kv < LENGTHS[b]),
    }[name]
    inputs = drawn((B, H, S, 8), requires_grad=is_trained)
    mask = None if mask_mod is None else create_block_mask(mask_mod, B, H, S, S, device="cpu")
    o, aux = vt.flex_attention(*inputs, score_mod, mask, return_aux=flex.AuxRequest(max_scores=True))
    both = vt.flex_attention(*inputs, score_mod, mask, return_aux=flex.AuxRequest(lse=True, max_scores=True))[1]
    alone, total = vt.flex_attention(*inputs, score_mod, mask, return_lse=True)
    assert aux.lse is None and torch.equal(aux.max_scores, both.max_scores) and (both.lse - total).nan_to_num(0, 0, 0).abs().max() < 1e-5
    assert not aux.max_scores.requires_grad and (o - alone).abs().max() < 1e-5
    # Behind function and mask, as PyTorch says.
    b, h, q_idx, kv_idx = torch.meshgrid(*map(torch.arange, (B, H, S, S)), indexing="ij")
    scores = torch.einsum("bhid,bhjd->bhij", *(x.detach().double() for x in inputs[:2])) / 8**0.5
    scores = scores if score_mod is None else score_mod(scores, b, h, q_idx, kv_idx)
    scores = scores if mask_mod is None else torch.where(mask_mod(b, h, q_idx, kv_idx), scores, -math.inf)
    wanted = scores.amax(-1)
    assert aux.max_scores.shape == (B, H, S) and torch.equal(aux.max_scores == -math.inf, wanted == -math.inf)
    is_there = wanted != -math.inf
    assert (aux.max_scores[is_there] - wanted[is_there]).abs().max() < 1e-5
    if is_trained:
        for one, other in zip(torch.autograd.grad(o.square().sum(), inputs), torch.autograd.grad(alone.square().sum(), inputs)):
            assert (one - other).abs().max() <= 1e-5 * (1 + other.abs().max())


def test_what_the_op_takes_no_steps_for_is_composed(graphs):
    q, k, v = drawn((B, H, S, 8), requires_grad=False)
    five = [torch.rand(S) for _ in range(5)]

    def many(score, b, h, q_idx, kv_idx):
        for number in range(70):
            score = torch.tanh(score) + 0.01 * number
        return score

    for score_mod in (
        lambda s, b, h, i, j: torch.sin(s),
        lambda s, b, h, i, j: s.abs() ** 1.5,
        lambda s, b, h, i, j: torch.fmod(s, 0.75),
        lambda s, b, h, i, j: sum((own[j] * s for own in five), s),
        many,
    ):
        close(vt.flex_attention(q, k, v, score_mod), reference(*(x.double() for x in (q, k, v)), score_mod)[0], 40.0)
        assert "attention" not in ops_of(graphs.pop())


def test_whole_numbers_that_f32_does_not_hold_are_operands():
    trace = Trace(torch.device("cpu"), torch.float32)
    near, far = torch.zeros(40, dtype=torch.int16), torch.zeros(40, dtype=torch.int64)

    def steps(score_mod, dims=(1, 1, 40, 40)):
        own = _flex_steps.OpSteps(trace, trace.cast(trace.call(score_mod, "score_mod", True), torch.float32), dims)
        return [at.op for at in own.operands], [step[0] for step in own.steps]

    assert steps(lambda s, b, h, i, j: s * s + (i - j))[0] == []
    assert steps(lambda s, b, h, i, j: s * s + (i - j) * 1000000) == (["mul"], ["given", "operand", "mul", "add"])
    assert steps(lambda s, b, h, i, j: torch.where(near[i] == near[j], s * s, s))[0] == ["index", "index"]
    # Compared by their ranks, and otherwise an operand of all pairs.
    assert steps(lambda s, b, h, i, j: torch.where(far[i] == far[j], s * s, s))[0] == ["ranked", "ranked"]
    assert steps(lambda s, b, h, i, j: torch.where(far[i] + j == far[j], s * s, s))[0] == ["eq"]
    assert steps(lambda s, b, h, i, j: s * s + (i - j) % 3)[1].count("div") == 1
    # By 0 nobody says, and reals of fewer digits are rounded at each step.
    assert steps(lambda s, b, h, i, j: s * s + i % (j + 0))[0] == ["remainder"]
    assert steps(lambda s, b, h, i, j: s * s + (i - j).to(torch.bfloat16) * 0.1)[0] == ["mul"]
    with pytest.raises(_flex_steps._Untaken):
        steps(lambda s, b, h, i, j: s * s + j, (1, 1, 1, (1 << 24) + 1))


def test_chips_with_tensor_cores_take_steps_and_hopper_alone_goes_through_blocks(monkeypatch):
    trace = Trace(torch.device("cpu"), torch.float32)
    score = trace.cast(trace.call(lambda s, b, h, i, j: s * s, "score_mod", True), torch.float32)
    mask = trace.call(lambda b, h, i, j: i // 8 == j // 8, "mask_mod", False)
    block_mask = types.SimpleNamespace(BLOCK_SIZE=(128, 128))

    def on(capability, dtype=torch.bfloat16, head=64):
        monkeypatch.setattr(_flex_blocks, "capability", lambda device: capability)
        tensors = [types.SimpleNamespace(shape=(1, 1, 300, head), dtype=dtype, device=torch.device("cuda", 0))] * 3
        takes_steps = _flex_steps.of_function(trace, score, (1, 1, 300, 300), tensors) is not None
        return takes_steps, *(_flex_blocks.takes(block_mask, trace, mask, tensors, is_trained) for is_trained in (False, True))

    assert on((9, 0)) == (True, True, True)
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert on(capability) == (True, False, True)
    assert on((7, 5)) == (False, False, True)
    assert on((8, 0), torch.float32)[0] is False and on((8, 0), head=260)[0] is False and on((8, 0), head=20)[0] is False


def test_steps_go_through_blocks_of_a_mask(graphs):
    q, k, v = drawn((B, H, 300, 16), torch.bfloat16, keys=420, requires_grad=False)
    ids = [torch.arange(size) // 90 for size in (300, 420)]

    def same(b, h, i, j):
        return ids[0][i] == ids[1][j]

    mask = create_block_mask(same, None, None, 300, 420, device="cpu")
    o = vt.flex_attention(q, k, v, lambda s, b, h, i, j: s * s, mask)
    close(o, reference(*(x.double() for x in (q, k, v)), lambda s, b, h, i, j: s * s, same)[0], 6.0)
    told = graphs[0]["nodes"][0]["op"]["attention"]
    assert {"block_map", "mask_blocks", "score"} <= set(told) and "mask" not in told


# Gradients of functions that are steps.


def trained(inputs, score_mod, mask_mod=None, block_mask=None, wide_mod=None, slack=6.0, **options):
    """The result and its gradients by PyTorch in f64 beside ours."""
    queries, keys = inputs[0].shape[2], inputs[1].shape[2]
    block_mask = whole(mask_mod, queries, keys) if mask_mod is not None and block_mask is None else block_mask
    o = vt.flex_attention(*inputs, score_mod, block_mask, **options)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    truth, _ = reference(*wide, wide_mod or score_mod, mask_mod)
    close(o, truth, slack)
    d_o = torch.randn_like(truth).to(o.dtype)
    asked = [number for number, x in enumerate(inputs) if x.requires_grad]
    own = torch.autograd.grad(o, [inputs[number] for number in asked], d_o)
    theirs = torch.autograd.grad(truth, [wide[number] for number in asked], d_o.double())
    for one, other, number in zip(own, theirs, asked):
        of = inputs[number]
        assert one.dtype == of.dtype and one.shape == of.shape and one.isfinite().all() and other.isfinite().all()
        error = (one.double() - other).abs().max() / other.abs().max().clamp(min=1e-2)
        assert error <= 2 * slack * TOLERANCES[str(of.dtype).removeprefix("torch.")], f"error {error:.3g} of a gradient of {tuple(of.shape)}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["f32", "f64", "bf16"])
@pytest.mark.parametrize("name", STEPS)
def test_functions_are_trained_as_steps_of_the_op(graphs, name, dtype):
    score_mod, _ = STEPS[name]
    if name == "rounded" and dtype == torch.float64:
        pytest.skip("scores of float64 are not rounded to 16 bits")
    # PyTorch rounds gradients as it does numbers; by the op they are passed on.
    def passed_on(s, b, h, i, j):
        made = s.abs() + (i + j)
        return made + (made.to(torch.bfloat16).double() - made).detach()

    # A number that is rounded within is another one where the product was on the other side.
    slack = 40.0 if name in ("rounded", "truncated", "logic") and dtype != torch.float64 else 6.0
    for mask in (None, causal, lambda b, h, i, j: (i * 7 + j * 5) % 3 != 0):
        trained(drawn((B, H, S, 16), dtype, kv_heads=2), score_mod, mask, wide_mod=passed_on if name == "rounded" else None, slack=slack, enable_gqa=True)
    assert [ops_of(graph) for graph in graphs] == [["attention"], ["attention_backward"]] * 3
    for forward, backward in zip(graphs[::2], graphs[1::2]):
        one, other = forward["nodes"][0]["op"]["attention"], backward["nodes"][0]["op"]["attention_backward"]
        assert one["score"] == other["score"] and one["spec"] == other["spec"] and ("mask" in one) == ("mask" in other)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)])
def test_gradients_of_some_of_queries_keys_and_values(graphs, wanted):
    inputs = [x.detach().requires_grad_(want) for x, want in zip(drawn((B, H, S, 8)), wanted)]
    trained(inputs, lambda s, b, h, i, j: torch.tanh(s) * 2 + 0.01 * (i - j) + s * s)
    told = graphs[1]["nodes"][0]["op"]["attention_backward"]
    assert tuple(name in told for name in ("dq", "dk", "dv")) == wanted


def test_nothing_of_the_size_of_the_scores_is_stored_where_gradients_are_wanted(graphs):
    queries, keys = 700, 900
    inputs = drawn((1, 2, queries, 8), keys=keys)
    weights, seen = torch.rand(keys), []

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx % 16 >= kv_idx % 16, score * score - 0.001 * (q_idx - kv_idx).abs() * (h + 1), score) + weights[kv_idx]

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(x, torch.Tensor))
            return made

    with Sizes():
        o = vt.flex_attention(*inputs, score_mod, whole(causal, queries, keys))
        o.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)
    sizes = [math.prod(tensor["layout"]["dims"]) for graph in graphs for tensor in graph["tensors"]]
    assert [ops_of(graph) for graph in graphs] == [["attention"], ["attention_backward"]]
    assert seen and max(sizes + seen) <= 2 * keys * 8, (max(sizes), max(seen))


def test_a_score_that_is_hidden_gives_nothing_whatever_its_slope():
    # log(0) = −∞ with the slope ∞ · 0, which PyTorch multiplies by a probability of 0.
    def score_mod(s, b, h, i, j):
        return torch.log(torch.relu(s) * s)

    def wide_mod(s, b, h, i, j):
        positive = torch.where(s > 0, s, 1.0)
        return torch.where(s > 0, torch.log(positive * positive), -math.inf)

    trained(drawn((B, H, S, 8)), score_mod, wide_mod=wide_mod, slack=20.0)


def test_gradients_that_the_op_does_not_give_are_composed(graphs):
    def composed_after(score_mod, **options):
        graphs.clear()
        inputs = drawn((B, H, S, 8))
        made = vt.flex_attention(*inputs, score_mod, **options)
        (made[0] if options else made).sum().backward()
        return "attention_backward" not in ops_of(graphs[-1])

    assert not composed_after(lambda s, b, h, i, j: s * s)
    # What is captured has a gradient by the op; the log-sum-exp has none there.
    table = torch.rand(S, requires_grad=True)
    assert not composed_after(lambda s, b, h, i, j: s * s * table[j]) and table.grad is not None
    assert composed_after(lambda s, b, h, i, j: s * s, return_lse=True)

    # Of no more than 64 steps, and of more than 256 with those of the slope.
    def long(score, b, h, q_idx, kv_idx):
        for _ in range(12):
            score = torch.maximum(score / 1.5, torch.minimum(score * score, torch.sigmoid(score)))
        return score

    assert composed_after(long)
    q, k, v = drawn((B, H, S, 8), requires_grad=False)
    graphs.clear()
    vt.flex_attention(q, k, v, long)
    assert ops_of(graphs[0]) == ["attention"]


def test_trained_steps_go_through_blocks_of_a_mask(graphs):
    inputs = drawn((B, H, 300, 16), torch.bfloat16, keys=420)
    ids = [torch.arange(size) // 90 for size in (300, 420)]

    def same(b, h, i, j):
        return ids[0][i] == ids[1][j]

    mask = create_block_mask(same, None, None, 300, 420, device="cpu")
    trained(inputs, lambda s, b, h, i, j: s * s, same, mask)
    for graph, name in zip(graphs, ("attention", "attention_backward")):
        told = graph["nodes"][0]["op"][name]
        assert {"block_map", "mask_blocks", "score"} <= set(told) and "mask" not in told


@pytest.mark.parametrize("mask", ["lengths", "causal", "left", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_stand_beside_steps(graphs, dtype, mask):
    lengths = torch.tensor([0, 61, 99])
    mask_mod, is_length = {
        "lengths": (lambda b, h, q, kv: kv < lengths[b], True),
        "causal": (lambda b, h, q, kv: (kv <= lengths[b]) & (q >= kv), True),
        "left": (lambda b, h, q, kv: (kv < lengths[b] + 1) & (q >= kv) & (q - kv < 70), True),
        # Such a window counts from the last key, which lengths would move.
        "window": (lambda b, h, q, kv: (kv <= lengths[b]) & ((q - kv).abs() < 70), False),
    }[mask]
    inputs, options = drawn((3, H, S, 8), dtype, kv_heads=2), {"enable_gqa": True}
    score_mod = lambda s, b, h, q, kv: s * s * 0.5 - (q - kv).abs() * 0.1  # noqa: E731
    trained(inputs, score_mod, mask_mod, **options)
    for graph, name in zip(graphs, ("attention", "attention_backward")):
        told = graph["nodes"][0]["op"][name]
        assert told["score"] and ("kv_lengths" in told, "mask" in told) == (is_length, not is_length)
    graphs.clear()
    with torch.no_grad():
        vt.flex_attention(*inputs, score_mod, whole(mask_mod, S, S), **options)
    assert ("kv_lengths" in graphs[0]["nodes"][0]["op"]["attention"]) == is_length


def test_no_key_counts_beside_steps():
    lengths = torch.tensor([0, 5])
    q, k, v = drawn((2, 2, 9, 8))
    o = vt.flex_attention(q, k, v, lambda s, b, h, i, j: s * s, whole(lambda b, h, i, j: j < lengths[b], 9, 9))
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert (o[0] == 0).all() and all((x[0] == 0).all() and x.isfinite().all() for x in gradients)
    assert all((x[1, :, 5:] == 0).all() for x in gradients[1:])


def test_chips_on_which_functions_are_trained_as_steps(monkeypatch):
    trace = Trace(torch.device("cpu"), torch.float32)
    score = trace.cast(trace.call(lambda s, b, h, i, j: s * s, "score_mod", True), torch.float32)

    def on(capability, head=64, of_operands=False):
        monkeypatch.setattr(_flex_blocks, "capability", lambda device: capability)
        tensors = [types.SimpleNamespace(shape=(1, 1, 300, head), dtype=torch.bfloat16, device=torch.device("cuda", 0))] * 3
        return _flex_steps.has_gradient(_flex_steps.of_function(trace, score, (1, 1, 300, 300), tensors), tensors, of_operands)

    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert on(capability) and on(capability, 136) and on(capability, 256)
    # Gradients of what a function reads are Hopper's alone, for heads of up to 128 elements.
    assert on((9, 0), of_operands=True) and on((9, 0), 128, True)
    assert not on((9, 0), 136, True) and not on((8, 0), 64, True) and not on((10, 0), 64, True)


def test_a_second_derivative_of_steps_is_refused():
    q, k, v = drawn((1, 1, 6, 8))
    o = vt.flex_attention(q, k, v, lambda s, b, h, i, j: s * s)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(vd.UnsupportedError, match="the gradient of flex_attention has no gradient"):
        dq.sum().backward()


# What a function captured.


def test_captured_numbers_are_those_of_the_call():
    q, k, v = drawn((1, 2, 40, 8), requires_grad=False)
    wide = [x.double() for x in (q, k, v)]
    width, cap, factor, tensor = 3, 1.0, 1.0, torch.tensor(0.5)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= width

    def of_score(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap) + tensor * h

    def nonlinear(score, b, h, q_idx, kv_idx):
        return score * score * factor + tensor

    for width, cap, factor, value in ((3, 1.0, 1.0, 0.5), (9, 1.0, -0.5, 0.5), (9, 3.0, 2.0, 0.5), (9, 3.0, 2.0, -1.0), (9, 3.0, -2.0, -1.0)):  # noqa: B007
        tensor.fill_(value)
        block_mask = whole(mask, 40, 40)
        for score_mod in (None, of_score, nonlinear):
            close(vt.flex_attention(q, k, v, score_mod, block_mask), reference(*wide, score_mod, mask)[0], 4.0)


def test_one_function_made_twice_has_one_plan():
    q, k, v = drawn((1, 2, 24, 8), requires_grad=False)
    vt.clear_plans()
    for _ in range(3):
        vt.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx: s * s * 0.5)
    assert _flex_composed.plan_count() == 1
    for number in (0.25, 0.5, 0.75):
        vt.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx, number=number: s * s * number)
    assert _flex_composed.plan_count() == 3
    # Numbers beside places alone, and tensors, are operands of one plan.
    for number in (0.25, 0.5, 0.75):
        o = vt.flex_attention(q, k, v, lambda s, b, h, q_idx, kv_idx, number=number: s * s + number * h)
        close(o, reference(*(x.double() for x in (q, k, v)), lambda s, b, h, i, j: s * s + number * h)[0], 4.0)  # noqa: B023
    assert _flex_composed.plan_count() == 4
    count = vt.plan_count()
    vt.clear_plans()
    assert vt.plan_count() < count and _flex_composed.plan_count() == 0


def test_masks_are_kept_by_what_they_say():
    vt.clear_plans()
    q, k, v = drawn((1, 1, 48, 8), requires_grad=False)

    def masked(step):
        return create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0, None, None, 48, 48, device="cpu")

    for step in (2, 3, 2):
        vt.flex_attention(q, k, v, None, masked(step))
    assert len(_flex._kept) == 2
    # Not of captured tensors, which may change.
    flags = torch.rand(48) < 0.5
    mask = whole(lambda b, h, q_idx, kv_idx: flags[kv_idx], 48, 48)
    before = vt.flex_attention(q, k, v, None, mask)
    flags.logical_not_()
    assert len(_flex._kept) == 2
    close(vt.flex_attention(q, k, v, None, mask), reference(q.double(), k.double(), v.double(), None, lambda b, h, i, j: flags[j])[0], 4.0)
    assert not torch.equal(before, vt.flex_attention(q, k, v, None, mask))


# Refused.


def refused(score_mod, *words, error=vd.UnsupportedError, **options):
    inputs = drawn((1, 2, 8, 8), requires_grad=False)
    with pytest.raises(error) as told:
        vt.flex_attention(*inputs, score_mod, **options)
    for word in words:
        assert word in str(told.value), (word, str(told.value))


def test_what_has_no_form_is_refused_by_name():
    def decides(score, b, h, q_idx, kv_idx):
        return score if q_idx > 3 else -score

    refused(decides, "decides", "torch.where")
    refused(lambda s, b, h, q, kv: s + int(q), "`int`", "test_flex_attention.py")
    refused(lambda s, b, h, q, kv: s + math.exp(q), "`float`")
    refused(lambda s, b, h, q, kv: s + q.item(), "`item`")
    refused(lambda s, b, h, q, kv: s + torch.lgamma(q + 1), "`lgamma`")
    refused(lambda s, b, h, q, kv: s.lgamma(), "`lgamma`")
    refused(lambda s, b, h, q, kv: s.sinh(), "`sinh` of a score")
    refused(lambda s, b, h, q, kv: s.add_(1), "`add_`")
    refused(lambda s, b, h, q, kv: s.detach(), "`detach`")
    refused(lambda s, b, h, q, kv: s.to(torch.int32), "int32")
    refused(lambda s, b, h, q, kv: torch.stack([s, s]).sum(), "`stack`")
    refused(lambda s, b, h, q, kv: s + BIAS, "a tensor of (2, 4, 67, 67)")
    refused(lambda s, b, h, q, kv: s + BIAS[b, h], "a part of a tensor")
    refused(lambda s, b, h, q, kv: s + BIAS[b, h, q, :], "an index of slice")
    refused(lambda s, b, h, q, kv: s + TABLE[h, q, kv], "2 dims", error=vd.GraphError)
    refused(lambda s, b, h, q, kv: s + TABLE[h, q / 2], "integers", error=vd.GraphError)
    refused(lambda s, b, h, q, kv: "s", "str", error=vd.GraphError)
    refused(lambda s, b, h, q, kv: torch.where(q, s, 0.0), "bool", error=vd.GraphError)
    refused(lambda s, b, h, q, kv: s + 1j, "complex")
    refused(lambda s, b, h, q, kv: s + torch.full((), q), "`full`")
    refused(lambda s, b, h, q, kv: s @ q, "cannot be traced")
    refused(lambda s, b, h, q, kv: s + [1.0], "list")


def test_calls_that_are_refused():
    q, k, v = drawn((2, 4, 16, 8), requires_grad=False)

    def raises(error, word, *inputs, **options):
        with pytest.raises(error) as told:
            vt.flex_attention(*inputs, **options)
        assert isinstance(told.value, vd.Error) and word in str(told.value), str(told.value)

    raises(ValueError, "[batch, heads", q[0], k, v)
    raises(ValueError, "enable_gqa", q, k[:, :2], v[:, :2])
    raises(ValueError, "multiple", q, k[:, :3], v[:, :3], enable_gqa=True)
    raises(ValueError, "elements", q, k[..., :4], v)
    raises(ValueError, "positions", q, k, v[:, :, :4])
    raises(ValueError, "batch", q, k[:1], v[:1])
    raises(ValueError, "float64", q, k.double(), v)
    raises(NotImplementedError, "int64", *(x.long() for x in (q, k, v)))
    raises(NotImplementedError, "FLASH", q, k, v, kernel_options={"BACKEND": "FLASH"})
    raises(ValueError, "BLOCK_X", q, k, v, kernel_options={"BLOCK_X": 3})
    raises(ValueError, "return_aux", q, k, v, return_lse=True, return_aux=flex.AuxRequest(lse=True))
    raises(ValueError, "BlockMask", q, k, v, block_mask=torch.ones(16, 16, dtype=torch.bool))
    raises(ValueError, "17", q, k, v, block_mask=create_block_mask(causal, None, None, 17, 16, device="cpu"))
    raises(ValueError, "batch and heads", q, k, v, block_mask=create_block_mask(causal, None, 3, 16, 16, device="cpu"))
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx - kv_idx
    raises(ValueError, "bool", q, k, v, block_mask=mask)
    close(vt.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "fwd_num_warps": 4, "BACKEND": "AUTO"}), reference(*(x.double() for x in (q, k, v)))[0], 4.0)


def test_a_second_derivative_is_refused():
    for score_mod in (None, checkerboard, lambda s, b, h, q, kv: s * s):
        for options in ({}, {"return_lse": True}):
            q, k, v = drawn((1, 2, 8, 8))
            o = vt.flex_attention(q, k, v, score_mod, **options)
            o = o[0].sum() + o[1].sum() if options else o.square().sum()
            (found,) = torch.autograd.grad(o, q, create_graph=True)
            with pytest.raises(vd.UnsupportedError, match="no gradient"):
                found.sum().backward()


# Around a call.


@pytest.mark.parametrize("score_mod", [None, soft_cap(2.0), lambda s, b, h, q, kv: s * s], ids=["plain", "cap", "square"])
def test_autocast(score_mod):
    inputs = drawn((1, 2, 33, 8))
    with torch.autocast("cpu", torch.bfloat16):
        o, total = vt.flex_attention(*inputs, score_mod, return_lse=True)
    assert o.dtype == torch.bfloat16 and total.dtype == torch.float32
    rounded = [x.detach().bfloat16() for x in inputs]
    close(o, reference(*(x.double() for x in rounded), score_mod)[0], 6.0)
    o.sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("score_mod", [alibi(2), lambda s, b, h, q, kv: s * s], ids=["alibi", "square"])
def test_compiled(score_mod):
    inputs = drawn((1, 2, 24, 8))
    mask = create_block_mask(causal, None, None, 24, 24, device="cpu")

    def function(q, k, v):
        return vt.flex_attention(q * 2, k, v, score_mod, mask).relu()

    compiled = torch.compile(function, backend="aot_eager")
    for run in (compiled, function):
        y = run(*inputs)
        found = torch.autograd.grad(y.sum(), inputs)
        truth = reference(*(x.double() for x in (inputs[0] * 2, *inputs[1:])), score_mod, causal)[0].relu()
        close(y, truth, 4.0)
        for one, other in zip(found, torch.autograd.grad(truth.sum(), inputs)):
            close(one, other, 8.0)


def test_what_lies_otherwise():
    for score_mod in (None, lambda s, b, h, q, kv: s * s):
        q, k, v = (torch.randn(2, 30, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
        check([q, k, v], score_mod, causal)
        packed = torch.randn(2, 30, 3, 4, 8)
        check([x.transpose(1, 2).requires_grad_() for x in packed.unbind(2)], score_mod, causal)
        # A gradient of one number for all.
        q, k, v = drawn((2, 4, 9, 8))
        vt.flex_attention(q, k, v, score_mod).sum().backward()
        truth = [x.detach().double().requires_grad_() for x in (q, k, v)]
        reference(*truth, score_mod)[0].sum().backward()
        for one, other in zip((q, k, v), truth):
            close(one.grad, other.grad, 16.0)


def test_no_batch_and_no_keys():
    for score_mod in (None, lambda s, b, h, q, kv: s * s):
        assert vt.flex_attention(*drawn((0, 2, 5, 8), requires_grad=False), score_mod).shape == (0, 2, 5, 8)
        q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8)
        o, total = vt.flex_attention(q, k, k, score_mod, return_lse=True)
        assert (o == 0).all() and (total == -math.inf).all()


def test_transforms():
    q, k, v = (x.detach() for x in drawn((1, 2, 9, 8)))
    found = torch.func.grad(lambda q: vt.flex_attention(q, k, v, soft_cap(2.0)).sum())(q)
    wide = q.double().requires_grad_()
    reference(wide, k.double(), v.double(), soft_cap(2.0))[0].sum().backward()
    close(found, wide.grad, 8.0)
    with pytest.raises(vd.UnsupportedError, match="torch.func"):
        torch.func.grad(lambda q: vt.flex_attention(q, k, v, lambda s, *at: s * s).sum())(q)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", GYM)
def test_on_a_gpu(name):
    score_mod, mask_mod = GYM[name]
    size = 72 if name == "natten 2d" else S
    for dtype in (torch.float32, torch.bfloat16):
        inputs = drawn((B, H, size, 64), dtype)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        truth, of_total = reference(*wide, *AT_ONCE.get(name, (score_mod, mask_mod)))
        own = [x.detach().cuda().requires_grad_() for x in inputs]
        moved = _moved(score_mod), _moved(mask_mod)
        mask = None if mask_mod is None else create_block_mask(moved[1], B, H, size, size, device="cuda")
        o, total = vt.flex_attention(*own, moved[0], mask, return_lse=True)
        close(o, truth, 8.0)
        hidden = of_total == -math.inf
        assert ((total.cpu() == -math.inf) == hidden).all()
        assert ((total.cpu().double() - of_total).abs() <= 1e-4 * (1 + of_total.abs()))[~hidden].all()
        gradient = torch.randn_like(truth).to(dtype)
        found = torch.autograd.grad(o, own, gradient.cuda())
        for one, other in zip(found, torch.autograd.grad(truth, wide, gradient.double())):
            close(one, other, 24.0)
    if mask_mod is None or name == "causal":
        _capture_and_replay(own, moved[0], mask)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", [*TABLES, *BESIDE_TABLES, *_hidden_by_captured(None, None)])
def test_tables_and_ranks_on_a_gpu(name):
    """Results, gradients without a log-sum-exp, and a captured graph, in which what is sorted and gathered for an operand is made again."""
    many = 1 << 40
    hidden = _hidden_by_captured(torch.randint(many, many + 4, (S,)), torch.randint(many, many + 4, (B, H)))
    score_mod = hidden.get(name) or BESIDE_TABLES.get(name) or TABLES[name][0]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = drawn((B, H, S, 64), dtype)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        truth, _ = reference(*wide, score_mod)
        own, moved = [x.detach().cuda().requires_grad_() for x in inputs], _moved(score_mod)
        o = vt.flex_attention(*own, moved)
        close(o, truth, 12.0)
        gradient = torch.randn_like(truth).to(dtype)
        found = torch.autograd.grad(o, own, gradient.cuda())
        for one, other in zip(found, torch.autograd.grad(truth, wide, gradient.double())):
            close(one, other, 24.0)
    with torch.no_grad():
        _capture_and_replay(own, moved, None)


def _moved(function):
    """The function with the tensors that it captured on the GPU."""
    if function is None:
        return None
    moved = {}

    def on_gpu(value):
        if isinstance(value, torch.Tensor) and value.dim():
            return moved.setdefault(id(value), value.cuda())
        return _moved(value) if callable(value) and getattr(value, "__closure__", None) else tuple(map(on_gpu, value)) if isinstance(value, tuple) else value

    closure = tuple(type(cell)(on_gpu(cell.cell_contents)) for cell in function.__closure__ or ())
    names = {name: on_gpu(value) if isinstance(value, torch.Tensor) else value for name, value in function.__globals__.items()}
    return type(function)(function.__code__, names, function.__name__, function.__defaults__, closure)


def _capture_and_replay(inputs, score_mod, mask):
    still = [x.detach().clone() for x in inputs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        vt.flex_attention(*still, score_mod, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        o = vt.flex_attention(*still, score_mod, mask)
    for x in still:
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    close(o, vt.flex_attention(*still, score_mod, mask).double(), 2.0)


#: Graphs of both directions as calls draw them, which a test of the engines' crate runs on the interpreter of their kernels, under the rules of a chip.
GRAPHS = Path(__file__).resolve().parents[2] / "verdigris-engines" / "tests" / "flex_graphs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_graphs_that_are_interpreted_are_those_that_calls_draw(dtype, monkeypatch):
    drawn_graphs, own = [], _flex_composed._planned
    monkeypatch.setattr(_flex_composed, "_planned", lambda key, device, draw: drawn_graphs.append(draw()) or own(key, device, draw))
    table = torch.randn(4, 9, 13, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(score > 0, 3 * torch.tanh(score / 3), 0.5 * score * (h + 1)) + table[h, q_idx, kv_idx] * torch.sigmoid(score)

    inputs = drawn((2, 4, 9, 16), dtype, kv_heads=2, keys=13)
    o, total = vt.flex_attention(*inputs, score_mod, whole(lambda b, h, q, kv: q + 4 >= kv, 9, 13), enable_gqa=True, return_lse=True)
    torch.autograd.grad((o * torch.randn_like(o)).sum() + (total * total).sum(), [*inputs, table])
    for direction, graph in zip(("forward", "backward"), drawn_graphs, strict=True):
        path = GRAPHS / f"{direction}_{'f32' if dtype == torch.float32 else 'bf16'}.json"
        if os.environ.get("VERDIGRIS_BLESS") == "1":
            path.write_text(json.dumps(json.loads(graph.to_json()), separators=(",", ":")) + "\n")
        assert json.loads(path.read_text()) == json.loads(graph.to_json()), f"{path} is another graph; VERDIGRIS_BLESS=1 writes it anew"


# Numbers, types and gradients at edges.


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_lengths_at_the_greatest_number_of_a_type(dtype):
    q, k, v = drawn((1, 2, 4, 8), requires_grad=False, keys=300)
    last = torch.tensor([torch.iinfo(dtype).max], dtype=dtype)
    check((q, k, v), None, lambda b, h, i, j: j <= last[b])


EDGES = {
    "full_like of integers": lambda s, b, h, i, j: s * torch.full_like(i, 2.5) + s * s * torch.full_like(j, 0.5, dtype=torch.bool),
    "a sum of truths": lambda s, b, h, i, j: s * s + ((s > -1) + (s < 1)) * 1.0 + ((s > 0) + True) * 1.0,
    "an exponent 0": lambda s, b, h, i, j: s * s + s**0 + s ** (j % 3),
    "clamp at its bound": lambda s, b, h, i, j: s.clamp(min=0.0) + s.clamp(max=0.0) * 0.25,
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_numbers(name):
    q, k, v = drawn((1, 2, 5, 4), torch.float64)
    # A query of zeros has the score 0, where ties and powers are.
    with torch.no_grad():
        q[:, :, 3] = 0
    check((q, k, v), EDGES[name])


def test_the_default_type_is_that_of_the_call():
    q, k, v = drawn((1, 2, 5, 4), torch.float64, requires_grad=False)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            check((q, k, v), lambda s, b, h, i, j: s * s + i * 0.1)
        finally:
            torch.set_default_dtype(torch.float32)


def test_refusals_name_the_function_of_scores():
    def own_score(s, b, h, i, j):
        return s.sinh()

    refused(own_score, "own_score", block_mask=whole(causal, 8, 8))
    refused(lambda s, b, h, i, j: s * s + -(s > 0), "negates", error=vd.GraphError)
    with pytest.raises(vd.UnsupportedError, match="float16"):
        vt.flex_attention(*drawn((1, 2, 8, 8), torch.float64, requires_grad=False), lambda s, b, h, i, j: s.half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("magnitude", [1.0, 3e4, 1e6, 1e9])
def test_gradients_of_the_log_sum_exp_are_not_rounded_to_16_bits(dtype, magnitude):
    # As many keys as keep the gradients of queries and keys numbers of f16 where that of the log-sum-exp is none.
    if dtype == torch.float16 and magnitude > 1e6:
        inputs, score_mod = drawn((1, 2, 40, 16), dtype, keys=300), lambda s, b, h, q, kv: s * 1e-4
    else:
        inputs, score_mod = drawn((1, 2, 40, 16), dtype, keys=300), lambda s, b, h, q, kv: s * 0.05
    d_total = magnitude * (1 + 0.01 * torch.randn(1, 2, 40))
    _, total = vt.flex_attention(*inputs, score_mod, return_lse=True)
    own = torch.autograd.grad((total * d_total).sum(), inputs[:2])
    wide = [x.detach().double().requires_grad_() for x in inputs]
    theirs = torch.autograd.grad((reference(*wide, score_mod)[1] * d_total).sum(), wide[:2])
    for one, other in zip(own, theirs):
        close(one, other, 4.0)


def test_parts_of_a_number_are_the_number():
    x = torch.cat([sign * torch.rand(4096) * 10.0**power for sign in (-1, 1) for power in range(-3, 10)] + [torch.tensor([2.0**31 - 2.0**20, 65504.0, 65520.0])])
    for dtype, of_it in ((torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-23), (torch.float32, 0.0)):
        factors, parts = _flex._in_parts(x, dtype)
        assert all(part.dtype == dtype and part.isfinite().all() for part in parts)
        whole_again = sum(part.double() * factor for part, factor in zip(parts, factors))
        # What is far below the least number of a part is held to that.
        assert ((whole_again - x.double()).abs() <= of_it * x.double().abs() + 2.0**-40).all()
    # What no part holds stays infinite, and is not NaN.
    factors, parts = _flex._in_parts(torch.tensor([math.inf, -math.inf, 1e30]), torch.float16)
    assert sum(part.double() * factor for part, factor in zip(parts, factors)).tolist() == [math.inf, -math.inf, math.inf]


NUMBERS_OF_F64 = {
    "chosen": lambda s, b, h, i, j: torch.where(s > 0.1, s, 0.3),
    "compared": lambda s, b, h, i, j: torch.where(s > 0.30000000001, s, 0.1),
    "a power": lambda s, b, h, i, j: (s * s + 0.1) ** 1.3,
    "a quotient": lambda s, b, h, i, j: s * s / 0.3 + 0.3 / (s * s + 0.7),
    "a maximum": lambda s, b, h, i, j: torch.maximum(s * s, torch.tensor(0.1, dtype=torch.float64)),
    "a remainder": lambda s, b, h, i, j: s * s % 0.7,
    "other steps": lambda s, b, h, i, j: torch.exp2(s * 1.1) + torch.log2(s * s + 1.1) + torch.trunc(s * 3.3) * 0.1,
    "a table": lambda s, b, h, i, j: torch.where(s > 0.1, s, 0.1 * (i - j)) * 0.7,
}


@pytest.mark.parametrize("name", NUMBERS_OF_F64)
def test_numbers_beside_scores_of_f64_have_all_their_digits(name):
    score_mod = NUMBERS_OF_F64[name]
    inputs = drawn((1, 2, 9, 8), torch.float64)
    scores = inputs[0] @ inputs[1].mT * 8**-0.5
    truth = torch.softmax(score_mod(scores, *places((1, 2, 9, 9))), -1) @ inputs[2]
    o = vt.flex_attention(*inputs, score_mod)
    assert (o - truth).abs().max() <= 1e-12
    d_o = torch.randn_like(o)
    for one, other in zip(torch.autograd.grad(o, inputs, d_o), torch.autograd.grad(truth, inputs, d_o)):
        assert (one - other).abs().max() <= 1e-12 * (1 + other.abs().max())


def test_a_score_of_f64_as_f32_is_rounded():
    inputs = drawn((1, 2, 9, 8), torch.float64)
    # Behind 2¹⁹ there are steps of 1/32.
    score_mod = lambda s, *at: (s * 2 + 2.0**19).float().double() - 2.0**19  # noqa: E731
    o, scores = vt.flex_attention(*inputs, score_mod), inputs[0] @ inputs[1].mT * 8**-0.5
    truth = torch.softmax(score_mod(scores), -1) @ inputs[2]
    assert (truth - torch.softmax(scores * 2, -1) @ inputs[2]).abs().max() > 1e-3
    assert (o - truth).abs().max() <= 1e-12
    assert torch.autograd.grad(o.sum(), inputs[0])[0].isfinite().all()


def test_powers_of_0():
    q, k, v = drawn((1, 2, 9, 8), torch.float64)
    with torch.no_grad():
        q[:, :, 3] = 0
    exponents = torch.tensor([0.0, 1.0, 2.0, 1.5, 3.0, 0.0, 1.0, 2.5, 1.25], dtype=torch.float64, requires_grad=True)
    whole_numbers = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])
    for score_mod, captured in (
        (lambda s, b, h, i, j: s.abs() ** exponents[j], [exponents]),
        (lambda s, b, h, i, j: s.relu() ** exponents[j] + s, [exponents]),
        (lambda s, b, h, i, j: s.abs() ** exponents.detach()[j], []),
        (lambda s, b, h, i, j: s.abs() ** whole_numbers[j].double(), []),
        (lambda s, b, h, i, j: s ** whole_numbers[j], []),
        (lambda s, b, h, i, j: s.abs() ** s.relu() + s, []),
        (lambda s, b, h, i, j: (exponents[j] + 0.5) ** s.abs() + 0.0 ** s.abs(), [exponents]),
        (lambda s, b, h, i, j: 2.0**s + s ** (h * 0.0), []),
    ):
        check((q, k, v), score_mod, captured=captured)
    # The result is 1 below 0 too.
    z = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    o = vt.flex_attention(q, k, v, lambda s, b, h, i, j: s ** z[j])
    assert (o - v.mean(2, keepdim=True)).abs().max() <= 1e-14


def test_types_that_do_not_meet_are_refused():
    lengths = torch.tensor([3, 2**64 - 1], dtype=torch.uint64)
    inputs = drawn((2, 2, 9, 8), requires_grad=False)
    for requires_grad in (False, True):
        for x in inputs:
            x.requires_grad_(requires_grad)
        for mask in (lambda b, h, i, j: j < lengths[b], lambda b, h, i, j: lengths[b] >= j, lambda b, h, i, j: (j < lengths[b]) | (i == j)):
            with pytest.raises(vd.UnsupportedError, match="int64 and torch.u?int64 together"):
                vt.flex_attention(*inputs, None, whole(mask, 9, 9))
        with pytest.raises(vd.UnsupportedError, match="`lt` of torch.uint64"):
            vt.flex_attention(*inputs, None, whole(lambda b, h, i, j: j.to(torch.uint64) < lengths[b], 9, 9))
        with pytest.raises(vd.UnsupportedError, match="int64 and torch.u?int64 together"):
            vt.flex_attention(*inputs, lambda s, b, h, i, j: torch.where(j < torch.tensor(2**64 - 1, dtype=torch.uint64), s, 0.0))
    # Those of a cast, which are there.
    short = torch.tensor([3, 7], dtype=torch.uint64)
    check(inputs, None, lambda b, h, i, j: j < short[b].to(torch.int64))
    check(inputs, None, lambda b, h, i, j: j <= lengths[b].to(torch.float64), wide_mods=(None, lambda b, h, i, j: (j <= 3) | (b == 1)))


def test_numbers_beyond_64_bits():
    refused(lambda s, b, h, i, j: torch.where(j < 2**63, s, 0.0), "9223372036854775808", "64 bits", error=vd.GraphError)
    refused(lambda s, b, h, i, j: s + (j - 2**70), "64 bits", error=vd.GraphError)
    refused(lambda s, b, h, i, j: s + torch.where(j > 3, j, -(2**63) - 1), "64 bits", error=vd.GraphError)
    # Beside real numbers they are one.
    inputs = drawn((1, 2, 9, 8), torch.float64)
    check(inputs, lambda s, b, h, i, j: torch.where(s < 2**63, s * s, s), wide_mods=(lambda s, b, h, i, j: s * s, None))


def test_no_heads_of_queries():
    for score_mod in (None, lambda s, b, h, i, j: s * s):
        q, k, v = drawn((2, 0, 5, 8)), *drawn((2, 2, 7, 8))[1:]
        o = vt.flex_attention(q[0], k, v, score_mod, enable_gqa=True)
        assert o.shape == (2, 0, 5, 8)
        for gradient in torch.autograd.grad(o.sum(), (k, v)):
            assert (gradient == 0).all()


BYTES, NARROW = torch.arange(100, 256, 9, dtype=torch.uint8), torch.linspace(-40000.0, 40000.0, 18).half()
SUMS = {
    "truths": lambda s, b, h, i, j: s + (i > j) + (j > 3),
    "truths on one side": lambda s, b, h, i, j: torch.where(i > 3, s + (i > j) + (j > 3), s + (j > 5)),
    "bytes": lambda s, b, h, i, j: s + BYTES[i] + BYTES[j] - BYTES[i] / 2,
    "bytes and their difference": lambda s, b, h, i, j: torch.where(i > 3, s + BYTES[j] + BYTES[i] - 300, s + (j > 5)),
    "halves": lambda s, b, h, i, j: (s + NARROW[j] + NARROW[i] + NARROW[j] - NARROW[i]) - NARROW[j] - NARROW[j],
    "halves times a number": lambda s, b, h, i, j: (s * 0.01 + NARROW[j]) * 100 - NARROW[j].float() * 100,
    "whole numbers": lambda s, b, h, i, j: s + i * 1000000 - j * 1000000 + (j - i) * 1000000,
}


@pytest.mark.parametrize("name", SUMS)
def test_biases_are_added_in_the_type_of_scores(name):
    inputs = drawn((2, 2, 18, 8))
    with torch.no_grad():
        # Of scores of this size nothing is lost beside biases of 2¹⁶.
        inputs[0].mul_(0.5)
    o = vt.flex_attention(*inputs, SUMS[name])
    close(o, reference(*(x.detach().double() for x in inputs), SUMS[name])[0], 8.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_lengths_of_a_type_that_does_not_hold_as_many_as_there_are_keys(dtype):
    lengths = torch.tensor([5, 120], dtype=dtype)
    inputs = drawn((2, 2, 4, 8), requires_grad=False, keys=300)
    for mask in (lambda b, h, i, j: j < lengths[b], lambda b, h, i, j: lengths[b] >= j, lambda b, h, i, j: lengths[b] > j):
        check(inputs, None, mask)


QUOTIENTS = [0.1, -0.1, 0.3, 7.0, math.inf, -math.inf, 0.0]


@pytest.mark.parametrize("divisor", QUOTIENTS)
def test_whole_quotients_are_pytorchs(divisor):
    inputs = drawn((1, 2, 9, 8), torch.float64)
    # 0.3 // 0.1 is 2, and 1 // 0.1 is 9.
    check(inputs, lambda s, b, h, i, j: torch.where(((s * 0 + i) / 10) // divisor > j, s, 0.5 * s))
    check(inputs, lambda s, b, h, i, j: torch.where(((s * 0 - i) / 10) // divisor < -j, s, 0.5 * s))


def test_whole_parts_of_infinities():
    inputs = drawn((1, 2, 9, 8), torch.float64, requires_grad=False)
    check(inputs, lambda s, b, h, i, j: torch.trunc(torch.where((s > 0.5) & (i != j), -math.inf, s * 3)))
    check(drawn((1, 2, 9, 8), torch.float64), lambda s, b, h, i, j: torch.trunc(s * 3) * 0.25 + s + torch.fix(-s * 2))
