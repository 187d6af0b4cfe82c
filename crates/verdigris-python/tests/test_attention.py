"""Attention for PyTorch on the CPU, with PyTorch as the other opinion (in f64, where rounding is judged)."""

import pytest
import torch
from conftest import TOLERANCES, close

import verdigris as vd
import verdigris.torch as vt

F = torch.nn.functional
# Of queries, keys and values.
NO_FACTORS = (None, None, None)
#: No map of blocks and no masks of them.
NO_BLOCKS = (None, None)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def compare(ours, theirs, inputs, slack=1.0):
    mine = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs]
    y, truth = ours(*mine), theirs(*wide)
    close(y, truth, slack)
    gradient = torch.randn_like(truth).to(y.dtype)
    y.backward(gradient)
    truth.backward(gradient.double())
    for one, other in zip(mine, wide):
        if one.is_floating_point() and other.grad.abs().max() > 1e-12:
            close(one.grad, other.grad, slack)
        elif one.is_floating_point():
            # Of one key nothing depends on the scores: what the truth has is rounding.
            assert one.grad.abs().max() <= slack * TOLERANCES[str(one.dtype).removeprefix("torch.")]


SHAPES = [
    [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
    [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)],
    [(3, 5, 8), (3, 7, 8), (3, 7, 8)],
    [(5, 8), (7, 8), (7, 3)],
    [(2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)],
    [(2, 3, 1, 8), (2, 3, 1, 8), (2, 3, 1, 8)],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES)
def test_attention(dtype, shapes):
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    for run in ({}, {"is_causal": True}, {"scale": 0.3}):
        compare(
            lambda *x: vt.scaled_dot_product_attention(*x, **run), lambda *x: F.scaled_dot_product_attention(*x, **run), inputs, 4.0
        )


@pytest.mark.parametrize("mask", [(5, 7), (1, 7), (2, 1, 5, 7), (2, 3, 5, 7), (3, 1, 7), (1, 1, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(mask, dtype):
    inputs = [torch.randn(shape).to(dtype) for shape in SHAPES[0]]
    truth = torch.rand(mask) < 0.6
    # A query that attends no key gives 0, which PyTorch's own path in f64 gives too.
    compare(lambda *x: vt.scaled_dot_product_attention(*x, truth), lambda *x: F.scaled_dot_product_attention(*x, truth), inputs, 4.0)
    bias = torch.randn(mask).to(dtype)
    compare(vt.scaled_dot_product_attention, F.scaled_dot_product_attention, [*inputs, bias], 4.0)


def test_masks_of_other_ranks():
    for query, mask in (((3, 5, 8), (3, 5, 7)), ((3, 5, 8), (5, 7)), ((2, 2, 3, 5, 8), (2, 1, 1, 5, 7)), ((5, 8), (5, 7))):
        q, k = torch.randn(query), torch.randn(*query[:-2], 7, 8)
        truth = torch.rand(mask) < 0.7
        close(vt.scaled_dot_product_attention(q, k, k, truth), F.scaled_dot_product_attention(q.double(), k.double(), k.double(), truth), 4.0)


def test_grouped_heads():
    inputs = [torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)]
    run = {"enable_gqa": True}
    compare(lambda *x: vt.scaled_dot_product_attention(*x, **run), lambda *x: F.scaled_dot_product_attention(*x, **run), inputs, 4.0)
    with pytest.raises(vd.GraphError, match="multiple"):
        vt.scaled_dot_product_attention(torch.randn(1, 5, 3, 4), *[torch.randn(1, 2, 3, 4)] * 2, enable_gqa=True)


@pytest.mark.parametrize("mask", [None, (5, 7), (6, 5, 7), (1, 5, 7)])
def test_grouped_heads_without_a_batch(mask):
    """Of three dims the first is that of heads."""
    inputs = [torch.randn(6, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)]
    truth = None if mask is None else torch.rand(mask) < 0.7
    of = lambda f: lambda *x: f(*x, truth, enable_gqa=True)
    # PyTorch takes them with a batch.
    wide = lambda *x: F.scaled_dot_product_attention(*(one[None] for one in x), truth, enable_gqa=True)[0]
    compare(of(vt.scaled_dot_product_attention), wide, inputs, 4.0)
    alike = [inputs[0], torch.randn(6, 7, 8), torch.randn(6, 7, 8)]
    compare(of(vt.scaled_dot_product_attention), of(F.scaled_dot_product_attention), alike, 4.0)


def naive(q, k, v, causal=False, window=(-1, -1), cap=0.0, slopes=None):
    """Attention with positions outside of heads, by its formula."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if not cap else cap * torch.tanh(s / cap)
    apart = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    if slopes is not None:
        s = s - slopes.double().reshape(-1, q.shape[1], 1, 1) * apart.abs()
    out = torch.zeros_like(apart, dtype=torch.bool)
    out |= apart > 0 if causal else out
    out |= apart < -window[0] if window[0] >= 0 else out
    out |= apart > window[1] if window[1] >= 0 and not causal else out
    p = s.masked_fill(out, float("-inf")).softmax(-1).nan_to_num()
    return (p @ v).transpose(1, 2)


@pytest.mark.parametrize("run", [{}, {"causal": True}, {"window": (2, 1)}, {"window": (3, -1), "causal": True}, {"cap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attn_func(run, dtype):
    inputs = [torch.randn(2, 5, 6, 8).to(dtype), torch.randn(2, 9, 2, 8).to(dtype), torch.randn(2, 9, 2, 8).to(dtype)]
    names = {"causal": "causal", "window": "window_size", "cap": "softcap"}
    told = {names[name]: value for name, value in run.items()}
    compare(lambda *x: vt.flash_attn_func(*x, **told), lambda *x: naive(*x, **run), inputs, 4.0)
    for slopes in (torch.rand(6), torch.rand(2, 6)):
        compare(
            lambda *x: vt.flash_attn_func(*x, alibi_slopes=slopes, **told), lambda *x: naive(*x, slopes=slopes, **run), inputs, 4.0
        )


def test_flash_attn_func_gives_rows():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 4, 8)
    o, total, probabilities = vt.flash_attn_func(q, k, k, return_attn_probs=True)
    assert probabilities is None and o.is_contiguous()
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 8**-0.5
    close(total, s.logsumexp(-1), 4.0)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


# A long one among short ones, one without queries and one without keys.
LENGTHS = ([3, 9, 0, 1, 4], [5, 2, 4, 0, 11])


def varlen(q, k, v, **run):
    """Each sequence by itself."""
    ends = [offsets(lengths).tolist() for lengths in LENGTHS]
    slopes = run.pop("slopes", None)
    parts = []
    for n in range(len(LENGTHS[0])):
        rows, keys = (slice(end[n], end[n + 1]) for end in ends)
        of_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[n]
        parts.append(naive(q[None, rows], k[None, keys], v[None, keys], slopes=of_slopes, **run)[0])
    return torch.cat(parts)


@pytest.mark.parametrize("run", [{}, {"causal": True}, {"window": (2, 1)}, {"window": (3, -1), "causal": True}, {"cap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attn_varlen_func(run, dtype):
    rows = [sum(lengths) for lengths in LENGTHS]
    inputs = [torch.randn(rows[0], 6, 8).to(dtype), torch.randn(rows[1], 2, 8).to(dtype), torch.randn(rows[1], 2, 8).to(dtype)]
    names = {"causal": "causal", "window": "window_size", "cap": "softcap"}
    told = {names[name]: value for name, value in run.items()}
    for longest in ((9, 11), (500, 11)):
        where = (*map(offsets, LENGTHS), *longest)
        compare(lambda *x: vt.flash_attn_varlen_func(*x, *where, **told), lambda *x: varlen(*x, **run), inputs, 4.0)
    for slopes in (torch.rand(6), torch.rand(5, 6)):
        compare(
            lambda *x: vt.flash_attn_varlen_func(*x, *where, alibi_slopes=slopes, **told), lambda *x: varlen(*x, slopes=slopes, **run), inputs, 4.0
        )


def test_flash_attn_varlen_func_gives_rows():
    q, k = torch.randn(17, 4, 8), torch.randn(22, 4, 8)
    where = [offsets(lengths) for lengths in LENGTHS]
    o, total, probabilities = vt.flash_attn_varlen_func(q, k, k, *where, 9, 11, return_attn_probs=True)
    assert probabilities is None and o.is_contiguous() and total.shape == (4, 17)
    s = torch.einsum("ihd,jhd->hij", q[3:12].double(), k[5:7].double()) * 8**-0.5
    close(total[:, 3:12], s.logsumexp(-1), 4.0)
    # A sequence without keys.
    assert (o[12:13] == 0).all() and (total[:, 12] == float("-inf")).all()
    # Offsets that reach beyond the rows end with them.
    beyond = torch.tensor([0, 17, 2**31 - 1], dtype=torch.int32)
    whole = vt.flash_attn_varlen_func(q, k, k, beyond, torch.tensor([0, 22, -5], dtype=torch.int32), 17, 22)
    assert torch.equal(whole, vt.flash_attn_func(q[None], k[None], k[None])[0])


def test_only_the_first_keys_of_sequences_are_used():
    q, k, v = torch.randn(17, 4, 8), *torch.randn(2, 22, 2, 8)
    ends, used = [offsets(lengths) for lengths in LENGTHS], torch.tensor([3, 9, 1, 0, 4], dtype=torch.int32)
    o = vt.flash_attn_varlen_func(q, k, v, *ends, 9, 11, causal=True, seqused_k=used)
    for n, (of_q, of_k) in enumerate(zip(*(torch.stack((end[:-1], end[1:]), 1).tolist() for end in ends))):
        count = min(int(used[n]), of_k[1] - of_k[0])
        rows, keys = slice(*of_q), slice(of_k[0], of_k[0] + count)
        close(o[rows], naive(q[None, rows], k[None, keys], v[None, keys], causal=True)[0], 4.0)


def test_what_flash_attn_varlen_func_refuses():
    q, ends = torch.randn(4, 2, 8), torch.tensor([0, 1, 4], dtype=torch.int32)
    with pytest.raises(vd.GraphError, match="cu_seqlens_k is None without a block_table"):
        vt.flash_attn_varlen_func(q, q, q, ends, None, 3, 3)
    for lengths in (ends[:2].long(), ends, ends[None, :2]):
        with pytest.raises(vd.GraphError, match="seqused_k of"):
            vt.flash_attn_varlen_func(q, q, q, ends, ends, 3, 3, seqused_k=lengths)
    for of_q, of_k, longest, match in (
        (ends.long(), ends, 3, "int32"),
        (ends, ends[:2], 3, "as many sequences"),
        (ends[None], ends, 3, "cu_seqlens_q"),
        (ends, ends, -1, "max_seqlen_q"),
    ):
        with pytest.raises(vd.GraphError, match=match):
            vt.flash_attn_varlen_func(q, q, q, of_q, of_k, longest, 3)
    with pytest.raises(vd.GraphError, match="three dims"):
        vt.flash_attn_varlen_func(q[None], q[None], q[None], ends, ends, 3, 3)


def test_results_lie_as_queries_do():
    q = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    o = vt.scaled_dot_product_attention(q, q, q)
    assert o.shape == q.shape and o.stride() == q.stride()
    o.sum().backward()
    assert q.grad.shape == q.shape


def test_gradcheck():
    q, k, v, bias = double(2, 4, 3, 4), double(2, 2, 5, 4), double(2, 2, 5, 3), double(4, 3, 5)
    attention = lambda *x: vt.scaled_dot_product_attention(*x, enable_gqa=True)
    assert torch.autograd.gradcheck(attention, (q, k, v, bias))
    assert torch.autograd.gradcheck(lambda q, k, v: vt.flash_attn_func(q, k, v, causal=True, softcap=1.5), (double(1, 3, 2, 4), *[double(1, 4, 2, 4) for _ in range(2)]))
    (first,) = torch.autograd.grad(attention(q, k, v, bias).square().sum(), [q], create_graph=True)
    with pytest.raises(vd.UnsupportedError, match="no gradient"):
        first.sum().backward()


def test_operators_are_what_they_declare():
    q, k = torch.randn(1, 4, 3, 8, requires_grad=True), torch.randn(1, 2, 5, 8, requires_grad=True)
    bias, slopes = torch.randn(3, 5), torch.rand(1, 4, 1, 1)
    torch.library.opcheck(torch.ops.verdigris.attention.default, (q, k, k, bias, slopes, None, None, None, None, None, *NO_FACTORS, *NO_BLOCKS, None, "scale=0.5 causal=bottom_right left=2 cap=3.0"))
    inside = torch.randn(1, 3, 4, 8).transpose(1, 2).requires_grad_()
    torch.library.opcheck(torch.ops.verdigris.attention.default, (inside, k, k, None, None, None, None, None, None, None, *NO_FACTORS, *NO_BLOCKS, None, "scale=0.5"))
    o, total = torch.ops.verdigris.attention(q.detach(), k.detach(), k.detach(), bias, None, None, None, None, None, None, *NO_FACTORS, *NO_BLOCKS, None, "scale=0.5")
    given = (torch.randn_like(o), q.detach(), k.detach(), k.detach(), o, total, bias, None, None, None, None, None, *NO_BLOCKS, None, "scale=0.5 wanted=11110")
    torch.library.opcheck(torch.ops.verdigris.attention_backward.default, given)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32).reshape(3, 1, 1, 1)
    words = "scale=0.5 longest_q=2 longest_kv=2"
    torch.library.opcheck(torch.ops.verdigris.attention.default, (q, q, q, None, None, offsets, offsets, None, None, None, *NO_FACTORS, *NO_BLOCKS, None, words))
    state = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    torch.library.opcheck(torch.ops.verdigris.attention.default, (q, k, k, None, None, None, None, None, None, state, *NO_FACTORS, *NO_BLOCKS, None, "scale=0.5 dropout=0.25"))


    sinks = torch.randn(1, 4, 1, 1, requires_grad=True)
    torch.library.opcheck(torch.ops.verdigris.attention.default, (q, k, k, None, None, None, None, None, None, None, *NO_FACTORS, *NO_BLOCKS, sinks, "scale=0.5"))
    given = (*given[:-2], sinks.detach(), "scale=0.5 wanted=00001")
    torch.library.opcheck(torch.ops.verdigris.attention_backward.default, given)


def with_sinks(q, k, v, sinks, scale, causal=False):
    """As a composition of PyTorch's: a column of sinks beside the scores, which is dropped behind the softmax."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2]), -torch.inf)
    column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_sinks(dtype, causal):
    inputs = [torch.randn(shape).to(dtype) for shape in ((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8), (4,))]
    run = {"is_causal": causal, "enable_gqa": True}
    compare(
        lambda q, k, v, sinks: vt.scaled_dot_product_attention(q, k, v, **run, sinks=sinks),
        lambda *x: with_sinks(*x, 8**-0.5, causal),
        inputs,
        4.0,
    )
    flash = lambda q, k, v, sinks: vt.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, learnable_sink=sinks).transpose(1, 2)
    compare(flash, lambda *x: with_sinks(*x, 8**-0.5, causal), inputs, 4.0)


def test_sinks_of_other_types_and_places():
    q, k = torch.randn(1, 4, 3, 8, dtype=torch.bfloat16), torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    run = {"enable_gqa": True}
    for sinks in (torch.randn(4), torch.randn(4, dtype=torch.float16), torch.randn(9, dtype=torch.bfloat16)[1:5], torch.randn(4, 2)[:, 1], torch.full((4,), -torch.inf)):
        sinks = sinks.detach().requires_grad_()
        y = vt.scaled_dot_product_attention(q, k, k, **run, sinks=sinks)
        wide = sinks.detach().double().requires_grad_()
        truth = with_sinks(q.double(), k.double(), k.double(), wide, 8**-0.5)
        close(y, truth, 4.0)
        d = torch.randn_like(truth)
        y.backward(d.to(y.dtype)), truth.backward(d.to(y.dtype).double())
        assert sinks.grad.dtype == sinks.dtype
        if wide.grad.abs().max() > 0:
            # Computed from results of bf16, whatever the sinks are of.
            close(sinks.grad.to(torch.bfloat16), wide.grad, 4.0)
        else:
            assert sinks.grad.abs().max() == 0
    for wrong in (torch.randn(2), torch.randn(1, 4), torch.ones(4, dtype=torch.int32)):
        with pytest.raises(vd.GraphError, match="for 4 heads of queries"):
            vt.scaled_dot_product_attention(q, k, k, **run, sinks=wrong)


def test_sinks_of_sequences_and_caches():
    rows, keys, sinks = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(4)
    of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 3, 7]))
    trained = [x.clone().requires_grad_() for x in (rows, keys, sinks)]
    o = vt.flash_attn_varlen_func(trained[0], trained[1], trained[1], of_q, of_k, 3, 4, learnable_sink=trained[2])
    wide = [x.double().requires_grad_() for x in (rows, keys, sinks)]
    parts = [(wide[0][a:b].transpose(0, 1)[None], wide[1][c:d].transpose(0, 1)[None]) for a, b, c, d in [(0, 2, 0, 3), (2, 5, 3, 7)]]
    truth = torch.cat([with_sinks(q, k, k, wide[2], 8**-0.5)[0].transpose(0, 1) for q, k in parts])
    close(o, truth, 4.0)
    d = torch.randn_like(truth)
    o.backward(d.float()), truth.backward(d)
    for one, right in zip(trained, wide):
        close(one.grad, right.grad, 4.0)
    cache = torch.zeros(2, 6, 2, 8)
    for n, (first, last, begin, end) in enumerate([(0, 2, 0, 3), (2, 5, 3, 7)]):
        q, k = rows[first:last].transpose(0, 1)[None].double(), keys[begin:end].transpose(0, 1)[None].double()
        close(o[first:last].transpose(0, 1)[None], with_sinks(q, k, k, sinks.double(), 8**-0.5), 4.0)
        cache[n, : end - begin] = keys[begin:end]
    one = torch.stack([rows[0], rows[2]])[:, None]
    told = {"cache_seqlens": torch.tensor([3, 4], dtype=torch.int32), "learnable_sink": sinks}
    o = vt.flash_attn_with_kvcache(one, cache, cache, **told)
    padded = vt.flash_attn_with_kvcache(one, cache, cache, cache_leftpad=torch.tensor([0, 1], dtype=torch.int32), **told)
    for n, length in enumerate((3, 4)):
        q, k = one[n].transpose(0, 1)[None].double(), cache[n, :length].transpose(0, 1)[None].double()
        close(o[n].transpose(0, 1)[None], with_sinks(q, k, k, sinks.double(), 8**-0.5), 4.0)
        close(padded[n].transpose(0, 1)[None], with_sinks(q, k[:, :, n:], k[:, :, n:], sinks.double(), 8**-0.5), 4.0)
    told["learnable_sink"] = sinks.clone().requires_grad_()
    with pytest.raises(vd.UnsupportedError, match="no gradient"):
        vt.flash_attn_with_kvcache(one, cache, cache, **told).sum().backward()


def test_sinks_under_autocast_and_compiled():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    attend = lambda q, k, sinks: vt.scaled_dot_product_attention(q, k, k, enable_gqa=True, sinks=sinks)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sinks = torch.randn(4).to(dtype).requires_grad_()
        truth = with_sinks(q.double(), k.double(), k.double(), sinks.detach().double(), 8**-0.5)
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, sinks)
        close(compiled, truth, 4.0)
        with torch.autocast("cpu", torch.bfloat16):
            y = attend(q.half(), k.half(), sinks)
        assert y.dtype == torch.bfloat16
        close(y, truth, 4.0)
        compiled.sum().backward()
        assert sinks.grad.dtype == dtype and sinks.grad.abs().max() > 0


def test_autocast():
    q, k = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        o = vt.scaled_dot_product_attention(q, k, k)
        biased = vt.scaled_dot_product_attention(q, k, k, torch.randn(5, 7))
        sloped = vt.flash_attn_func(q, *[torch.randn(2, 7, 5, 8)] * 2, alibi_slopes=torch.rand(5))
    assert o.dtype == biased.dtype == torch.bfloat16
    assert sloped.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_compiled():
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    compiled = torch.compile(lambda q, k: vt.scaled_dot_product_attention(q * 2, k, k, is_causal=True), backend="aot_eager", fullgraph=True)
    close(compiled(q, k), F.scaled_dot_product_attention(q.double() * 2, k.double(), k.double(), is_causal=True), 4.0)


def test_what_is_not_computed_is_told():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(vd.GraphError, match="dropout_p"):
        vt.scaled_dot_product_attention(q, q, q, dropout_p=1.5)
    with pytest.raises(vd.GraphError, match="dropout_p"):
        vt.flash_attn_func(q, q, q, dropout_p=-0.1)
    with pytest.raises(vd.GraphError, match="is_causal"):
        vt.scaled_dot_product_attention(q, q, q, torch.ones(3, 3, dtype=torch.bool), is_causal=True)
    with pytest.raises(vd.GraphError, match="bool"):
        vt.scaled_dot_product_attention(q, q, q, torch.ones(3, 3, dtype=torch.int32))
    slopes = torch.rand(3, requires_grad=True)
    with pytest.raises(vd.UnsupportedError, match="slopes"):
        vt.flash_attn_func(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2), alibi_slopes=slopes[:2]).sum().backward()
    with pytest.raises(vd.GraphError, match="as many elements"):
        vt.scaled_dot_product_attention(q, q[..., :3], q)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("dims", [(2, 1, 5, 1), (1, 1, 5, 1), (5, 1), (1, 1), (2, 3, 5, 7), (5, 7)])
@pytest.mark.parametrize("is_expanded", [False, True])
def test_one_number_for_all_keys_of_a_query(kind, dims, is_expanded):
    q, k, v = (torch.randn(2, 3, positions, 8) for positions in (5, 7, 7))
    mask = (torch.randn(dims) > -1.0) if kind == torch.bool else torch.randn(dims)
    if is_expanded:
        mask = mask.expand(2, 3, 5, 7)
    rows = vt.functional._rows_of_keys(mask, 7)
    assert rows.stride(-1) == 1 and rows.shape[-1] == 7, "engines for tensor cores read keys side by side"
    assert rows.numel() <= max(mask.untyped_storage().nbytes() // mask.element_size(), 1) * 7, "what is broadcast besides stays one"
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask if kind == torch.bool else mask.double())
    close(vt.scaled_dot_product_attention(q, k, v, mask), wanted.nan_to_num(0.0))
