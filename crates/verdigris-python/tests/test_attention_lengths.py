"""Attention of which each batch has keys of its own number, and its gradients, on the CPU: against compositions of PyTorch's in f64. What is behind a length is NaN in ours: nothing reads it."""

import pytest
import torch
from conftest import TOLERANCES, close

import verdigris as vd
import verdigris.torch as vt

DTYPES = [torch.float32, torch.bfloat16]
#: By batch: none, one, some, all, and what stands for none and for all.
LENGTHS = [[0], [1], [6], [7], [-3, 5, 99], [7, 0, 1]]
KEYS = 7


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def composed(q, k, v, lengths, causal=None, window=(None, None), mask=None, sinks=None, slopes=None, cap=None, dropout=None):
    """Attention of `[batch, heads, positions, elements]` with all scores in memory. `causal` is `top_left` or `bottom_right`, the latter the end of the keys that count."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    counts = torch.as_tensor(lengths).clamp(0, k.shape[2]).reshape(-1, 1, 1, 1)
    at, of = torch.arange(k.shape[2]), torch.arange(q.shape[2])[:, None]
    shift = counts - q.shape[2]
    apart = at - of - (0 if causal == "top_left" else shift)
    out = at >= counts
    out = out | (apart > 0) if causal else out
    out = out | (apart < -window[0]) if window[0] is not None else out
    out = out | (apart > window[1]) if window[1] is not None else out
    s = q @ k.mT * q.shape[3] ** -0.5
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s if slopes is None else s - slopes.double().reshape(-1, q.shape[1], 1, 1) * (at - of - shift).abs()
    if mask is not None and mask.dtype == torch.bool:
        out = out | ~mask
    elif mask is not None:
        s = s + mask
    s = s.masked_fill(out, -torch.inf)
    column = torch.full_like(s[..., :1], -torch.inf) if sinks is None else sinks[None, :, None, None].expand(*s.shape[:-1], 1)
    s = torch.cat([s, column], -1)
    # Of a row from which nothing is attended the softmax is NaN, and so are its gradients: it is left out before.
    empty = (s == -torch.inf).all(-1, keepdim=True)
    p = s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :-1]
    return (p if dropout is None else p * dropout) @ v


def with_padding(x, lengths, value):
    """Rows of keys behind the lengths replaced."""
    is_there = torch.arange(x.shape[2]) < torch.as_tensor(lengths).reshape(-1, 1)
    return torch.where(is_there[:, None, :, None], x.detach(), value)


def judge(ours, theirs, given, lengths, more=(), slack=4.0):
    """Results and gradients: `given` are queries, keys and values, of which ours have NaN behind the lengths; `more` other variables."""
    q, k, v = given
    mine = [x.detach().clone().requires_grad_() for x in (q, *(with_padding(x, lengths, float("nan")) for x in (k, v)), *more)]
    wide = [x.detach().double().requires_grad_() for x in (q, *(with_padding(x, lengths, 0.0) for x in (k, v)), *more)]
    y, truth = ours(*mine), theirs(*wide)
    close(y, truth, slack)
    d = torch.randn_like(truth).to(y.dtype)
    y.backward(d)
    truth.backward(d.double())
    for one, other in zip(mine, wide):
        assert one.grad.isfinite().all() and one.grad.dtype == one.dtype
        if other.grad.abs().max() > 1e-9:
            close(one.grad, other.grad, slack)
        else:
            # Of one key nothing depends on the scores: what the truth has is rounding.
            assert one.grad.abs().max() <= slack * TOLERANCES[str(one.dtype).removeprefix("torch.")]
    for x in mine[1:3]:
        assert (with_padding(x.grad, lengths, 0.0) == x.grad).all(), "what is behind a length has the gradient 0"
    return mine


def drawn(lengths, dtype, queries=5, heads=(4, 2), elements=(8, 8)):
    b = len(lengths)
    shapes = ((b, heads[0], queries, elements[0]), (b, heads[1], KEYS, elements[0]), (b, heads[1], KEYS, elements[1]))
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(dtype, causal, lengths):
    told = {"is_causal": causal, "enable_gqa": True, "kv_lengths": int32(lengths)}
    attend = lambda *x: vt.scaled_dot_product_attention(*x, **told)
    theirs = lambda *x: composed(*x, lengths, "top_left" if causal else None)
    judge(attend, theirs, drawn(lengths, dtype), lengths)
    judge(attend, theirs, drawn(lengths, dtype, queries=1, heads=(2, 2), elements=(8, 4)), lengths)
    judge(attend, theirs, drawn(lengths, dtype, queries=9, heads=(6, 2)), lengths)


def test_lengths_are_those_of_a_padded_mask():
    """As the docstring says it: what a mask of padding gives, by rows that are attended to."""
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    q, k, v = (torch.randn(3, 2, 5, 8, requires_grad=True) for _ in range(3))
    lengths = padding.sum(1, dtype=torch.int32)
    o = vt.scaled_dot_product_attention(q, k, v, is_causal=True, kv_lengths=lengths)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() & padding.bool()[:, None, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    close(o, wanted, 4.0)
    d = torch.randn_like(o)
    for one, other in zip(torch.autograd.grad(o, (q, k, v), d), torch.autograd.grad(wanted, (q, k, v), d.double())):
        close(one, other.double(), 4.0)


@pytest.mark.parametrize("lengths", [[3, 0, 7], [1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_beside_other_operands(dtype, lengths):
    given, told = drawn(lengths, dtype), {"enable_gqa": True, "kv_lengths": int32(lengths)}
    kept = torch.rand(len(lengths), 1, 5, KEYS) < 0.7
    judge(lambda *x: vt.scaled_dot_product_attention(*x, kept, **told), lambda *x: composed(*x, lengths, mask=kept), given, lengths)
    bias, sinks = torch.randn(4, 5, KEYS).to(dtype), torch.randn(4).to(dtype)
    judge(lambda *x: vt.scaled_dot_product_attention(*x, **told), lambda q, k, v, bias: composed(q, k, v, lengths, mask=bias), given, lengths, [bias])
    for causal in (False, True):
        judge(
            lambda q, k, v, sinks: vt.scaled_dot_product_attention(q, k, v, is_causal=causal, sinks=sinks, **told),
            lambda q, k, v, sinks: composed(q, k, v, lengths, "top_left" if causal else None, sinks=sinks),
            given,
            lengths,
            [sinks],
        )
    state = int32([1, 2, 3, 4])
    dropped = vt.functional.attention_dropout_mask(state, (len(lengths), 4, 5, KEYS), 0.4) / 0.6
    judge(
        lambda *x: vt.scaled_dot_product_attention(*x, dropout_p=0.4, state=state, **told),
        lambda *x: composed(*x, lengths, dropout=dropped),
        given,
        lengths,
    )


def test_lengths_of_other_ranks():
    attend = vt.scaled_dot_product_attention
    for lead, batches in (((2, 3), (2,)), ((2, 2, 3), (2, 2)), ((3,), (3,)), ((), ())):
        q, k = torch.randn(*lead, 5, 8), torch.randn(*lead, KEYS, 8)
        lengths = torch.randint(0, KEYS + 1, batches or (1,), dtype=torch.int32)
        as_four = lambda x: x.reshape(-1, lead[-1] if len(lead) > 1 else 1, *x.shape[-2:]).double()
        wanted = composed(*map(as_four, (q, k, k)), lengths.reshape(-1).tolist())
        told = lengths if batches else lengths[0]
        if batches:
            close(attend(q, k, k, kv_lengths=told), wanted.reshape(*lead, 5, 8), 4.0)
        else:
            with pytest.raises(vd.GraphError, match="kv_lengths of"):
                attend(q, k, k, kv_lengths=lengths.repeat(2))
    # Of three dims with heads that are shared there is one batch.
    q, k = torch.randn(4, 5, 8), torch.randn(2, KEYS, 8)
    close(attend(q, k, k, enable_gqa=True, kv_lengths=torch.tensor(3, dtype=torch.int32)), composed(q[None].double(), k[None].double(), k[None].double(), [3])[0], 4.0)


def test_what_lengths_are_refused():
    q = torch.randn(2, 4, 5, 8)
    for wrong in (int32([1, 2, 3]), int32([[1], [2]]), torch.tensor([1, 2]), torch.tensor([1.0, 2.0])):
        with pytest.raises(vd.GraphError, match="kv_lengths of .*it is int32, .2.: a number of keys for each batch"):
            vt.scaled_dot_product_attention(q, q, q, kv_lengths=wrong)
    with pytest.raises(vd.GraphError, match="kv_lengths is on meta"):
        vt.scaled_dot_product_attention(q, q, q, kv_lengths=int32([1, 2]).to("meta"))


def test_gradients_of_lengths_are_those_of_differences():
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4, 3, 4), (3, 2, 5, 4), (3, 2, 5, 3)))
    for causal in (False, True):
        attend = lambda *x: vt.scaled_dot_product_attention(*x, enable_gqa=True, is_causal=causal, kv_lengths=int32([0, 2, 5]))
        assert torch.autograd.gradcheck(attend, (q, k, v))


def test_operators_with_lengths_are_what_they_declare():
    q, k = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 2, 5, 8, requires_grad=True)
    lengths = int32([2, 5]).reshape(2, 1, 1, 1)
    nothing, words = [None] * 5, "scale=0.5 causal=bottom_right"
    torch.library.opcheck(torch.ops.verdigris.attention.default, (q, k, k, None, None, None, None, lengths, None, None, *nothing, None, words))
    plain = [x.detach() for x in (q, k, k)]
    o, total = torch.ops.verdigris.attention(*plain, None, None, None, None, lengths, None, None, *nothing, None, words)
    given = (torch.randn_like(o), *plain, o, total, None, None, None, None, lengths, None, None, None, None, f"{words} wanted=11100")
    torch.library.opcheck(torch.ops.verdigris.attention_backward.default, given)


def test_lengths_compiled_and_under_autocast():
    lengths, given = [4, 0, 7], drawn([4, 0, 7], torch.float32)
    attend = lambda q, k, v, told: vt.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True, kv_lengths=told)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    judge(lambda *x: compiled(*x, int32(lengths)), lambda *x: composed(*x, lengths, "top_left"), given, lengths)
    # With dropout PyTorch's own stands in compiled code, but not with lengths, which it does not have.
    dropped = torch.compile(lambda q, k, v, told: vt.scaled_dot_product_attention(q, k, v, dropout_p=1.0, enable_gqa=True, kv_lengths=told), backend="aot_eager")
    assert (dropped(*given, int32(lengths)) == 0).all()
    q, k, v = (x.clone().requires_grad_() for x in given)
    with torch.autocast("cpu", torch.bfloat16):
        o = attend(q, k, v, int32(lengths))
    assert o.dtype == torch.bfloat16
    close(o, composed(*(x.detach().double() for x in given), lengths, "top_left"), 4.0)
    o.float().sum().backward()
    assert q.grad.dtype == k.grad.dtype == torch.float32 and (k.grad[0, :, 4:] == 0).all() and (k.grad[1] == 0).all()


def test_lengths_that_are_written_to_before_the_gradient():
    """A caller who counts on in the same tensor is told, and gets no gradient of other lengths."""
    q, lengths = torch.randn(1, 2, 3, 8, requires_grad=True), int32([2])
    o = vt.scaled_dot_product_attention(q, q, q, kv_lengths=lengths)
    lengths += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


# Sequences behind each other, of which the first keys are used.

#: A long one among short ones, one without queries, one without keys, and one of whose keys none is used.
SEQUENCES = ([3, 9, 0, 1, 4, 2], [5, 2, 4, 0, 11, 3])
USED = [3, 9, 1, 0, 4, 0]
RUNS = [
    ({}, {}),
    ({"causal": True}, {"causal": "bottom_right"}),
    ({"window_size": (2, 1)}, {"window": (2, 1)}),
    ({"window_size": (3, -1), "causal": True}, {"causal": "bottom_right", "window": (3, None)}),
    ({"softcap": 2.0}, {"cap": 2.0}),
    ({"deterministic": True, "causal": True}, {"causal": "bottom_right"}),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: " ".join(run[0]) or "plain")
@pytest.mark.parametrize("extra", ["", "slopes", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_first_keys_of_sequences(dtype, extra, run):
    told, by_formula = run
    ends = [int32([0, *lengths]).cumsum(0).to(torch.int32) for lengths in SEQUENCES]
    of_q, of_k = ([slice(*pair) for pair in zip(end[:-1].tolist(), end[1:].tolist())] for end in ends)
    slopes = torch.rand(4) if extra == "slopes" else None
    more = [torch.randn(4).to(dtype)] if extra == "sinks" else []
    q, k, v = (torch.randn(sum(lengths), heads, 8).to(dtype) for lengths, heads in zip((SEQUENCES[0], SEQUENCES[1], SEQUENCES[1]), (4, 2, 2)))
    unused = torch.cat([torch.arange(rows.stop - rows.start) >= used for rows, used in zip(of_k, USED)])
    mine = [x.clone().requires_grad_() for x in (q, *(x.masked_fill(unused[:, None, None], float("nan")) for x in (k, v)), *more)]
    wide = [x.double().requires_grad_() for x in (q, k, v, *more)]
    sinks = {"learnable_sink": mine[3]} if more else {}
    o = vt.flash_attn_varlen_func(*mine[:3], *ends, 9, 11, seqused_k=int32(USED), alibi_slopes=slopes, **told, **sinks)
    parts = []
    for rows, keys, used in zip(of_q, of_k, USED):
        of_heads = [x[part].transpose(0, 1)[None] for x, part in zip(wide, (rows, keys, keys))]
        parts.append(composed(*of_heads, [used], **by_formula, slopes=slopes, sinks=wide[3] if more else None)[0].transpose(0, 1))
    truth = torch.cat(parts)
    close(o, truth, 4.0)
    d = torch.randn_like(truth).to(o.dtype)
    o.backward(d)
    truth.backward(d.double())
    for one, other in zip(mine, wide):
        close(one.grad, other.grad, 4.0)
    for x in mine[1:3]:
        assert (x.grad[unused] == 0).all()


# What stays refused, with its reason.


def test_gradients_that_are_refused():
    q, pool, table = torch.randn(2, 1, 4, 8, requires_grad=True), torch.randn(3, 8, 2, 8), int32([[0, 1], [2, 1]])
    lengths, ends = int32([9, 4]), int32([0, 1, 2])
    cache = torch.randn(2, 16, 2, 8)
    for o, match in (
        (vt.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=lengths, block_table=table), "pages of keys and values has no gradient"),
        (vt.flash_attn_varlen_func(q[:, 0], pool, pool, ends, None, 1, 16, block_table=table, seqused_k=lengths), "pages of keys and values has no gradient"),
        (vt.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths), "written to in place, has no gradient"),
        (vt.flash_attn_with_kvcache(q, cache, cache, cache_leftpad=int32([1, 0])), "written to in place, has no gradient"),
        (vt.flash_mla_with_kvcache(q, cache[:, :, :1], None, lengths, 4)[0], "keys that hold their values has no gradient"),
        (vt.flash_attn_with_kvcache(q.bfloat16(), cache.to(torch.float8_e4m3fn), cache.to(torch.float8_e4m3fn), cache_seqlens=lengths), "8-bit floats has no gradient"),
    ):
        with pytest.raises(vd.UnsupportedError, match=match):
            o.sum().backward()
