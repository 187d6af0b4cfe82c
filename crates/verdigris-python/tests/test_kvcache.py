"""Attention to a cache of keys and values on the CPU, against PyTorch's own gathers in f64."""

import pytest
import torch
from conftest import close

import verdigris as vd
import verdigris.torch as vt

HEADS, OF_KEYS, ELEMENTS = 4, 2, 16


def paged(page_size, lengths, dtype, spare=-1, pages_of_each=None):
    """Pools of pages that hold so many positions of each sequence, in no order; what no sequence has is no number."""
    pages_of_each = pages_of_each or max(1, max(-(-length // page_size) for length in lengths) + 1)
    count = len(lengths) * pages_of_each + 2
    numbers = torch.randperm(count)[: len(lengths) * pages_of_each].reshape(len(lengths), -1).to(torch.int32)
    pools = [torch.full((count, page_size, OF_KEYS, ELEMENTS), float("nan"), dtype=dtype) for _ in range(2)]
    for n, length in enumerate(lengths):
        for j in range(length):
            for pool in pools:
                pool[numbers[n, j // page_size], j % page_size] = torch.randn(OF_KEYS, ELEMENTS).to(dtype)
        numbers[n, -(-length // page_size) :] = spare
    return (*pools, numbers)


def gathered(pool, table, n, length):
    """The positions of one sequence behind each other."""
    page_size = pool.shape[1]
    return torch.stack([pool[int(table[n, j // page_size]), j % page_size] for j in range(length)]) if length else pool[:0, 0]


def naive(q, keys, values, causal=False, window=(-1, -1), cap=0.0, slopes=None):
    """One sequence, `[positions, heads, elements]`, by the formula: the result, and the log-sum-exp."""
    q, keys, values = (x.double().transpose(0, 1) for x in (q, keys, values))
    keys, values = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (keys, values))
    s = q @ keys.mT * ELEMENTS**-0.5
    s = s if not cap else cap * torch.tanh(s / cap)
    apart = torch.arange(keys.shape[1]) - torch.arange(q.shape[1])[:, None] - (keys.shape[1] - q.shape[1])
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * apart.abs()
    out = torch.zeros_like(apart, dtype=torch.bool)
    out |= apart > 0 if causal else out
    out |= apart < -window[0] if window[0] >= 0 else out
    out |= apart > window[1] if window[1] >= 0 and not causal else out
    s = s.masked_fill(out, float("-inf"))
    p = s.softmax(-1).nan_to_num()
    return (p @ values).transpose(0, 1), s.logsumexp(-1)


def judge(o, total, q, k_pool, v_pool, table, lengths, **run):
    for n, length in enumerate(lengths):
        right, of_rows = naive(q[n], gathered(k_pool, table, n, length), gathered(v_pool, table, n, length), **run)
        close(o[n], right, 4.0)
        close(total[n].exp(), of_rows.exp(), 4.0)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages(page_size, dtype):
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 5]
    for spare in (-1, 2**31 - 1):
        k_pool, v_pool, table = paged(page_size, lengths, dtype, spare)
        q = torch.randn(len(lengths), 2, HEADS, ELEMENTS).to(dtype)
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        for run in ({}, {"causal": True}):
            o, total = vt.flash_attn_with_kvcache(
                q, k_pool, v_pool, cache_seqlens=seqlens, block_table=table, return_softmax_lse=True, **run
            )
            judge(o, total, q, k_pool, v_pool, table, lengths, **run)


@pytest.mark.parametrize(
    "run", [{"window": (5, 1)}, {"causal": True, "window": (3, -1)}, {"cap": 2.0}, {"slopes": True}, {"cap": 3.0, "slopes": True, "causal": True}]
)
def test_options(run):
    lengths = [9, 30, 16]
    k_pool, v_pool, table = paged(16, lengths, torch.float32)
    q = torch.randn(3, 4, HEADS, ELEMENTS)
    run = {**run, "slopes": torch.rand(HEADS)} if "slopes" in run else run
    names = {"causal": "causal", "window": "window_size", "cap": "softcap", "slopes": "alibi_slopes"}
    told = {names[name]: value for name, value in run.items()}
    o, total = vt.flash_attn_with_kvcache(
        q, k_pool, v_pool, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table, return_softmax_lse=True, **told
    )
    judge(o, total, q, k_pool, v_pool, table, lengths, **run)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("new", [1, 5])
def test_new_positions_are_written_into_pages(page_size, new):
    before = [0, 2, 15, 16, 31]
    after = [length + new for length in before]
    k_pool, v_pool, table = paged(page_size, after, torch.float32)
    expected = [k_pool.clone(), v_pool.clone()]
    k, v = torch.randn(2, 5, new, OF_KEYS, ELEMENTS)
    for n, length in enumerate(before):
        for j in range(new):
            place = int(table[n, (length + j) // page_size]), (length + j) % page_size
            expected[0][place], expected[1][place] = k[n, j], v[n, j]
    q = torch.randn(5, new, HEADS, ELEMENTS)
    seqlens = torch.tensor(before, dtype=torch.int32)
    o, total = vt.flash_attn_with_kvcache(
        q, k_pool, v_pool, k, v, cache_seqlens=seqlens, block_table=table, causal=True, return_softmax_lse=True
    )
    assert all(torch.equal(pool.nan_to_num(7.0), right.nan_to_num(7.0)) for pool, right in zip((k_pool, v_pool), expected))
    assert seqlens.tolist() == before
    judge(o, total, q, k_pool, v_pool, table, after, causal=True)


# Queries of sequences behind each other, with rows of none at the end, and their keys: a prompt, single new tokens, none of either.
QUERIES, KEYS = [7, 1, 0, 1, 3, 1], [7, 20, 4, 1, 33, 0]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [{}, {"causal": True}, {"causal": True, "window": (5, -1), "cap": 2.0}, {"window": (3, 2), "slopes": True}])
def test_ragged_queries_read_pages(page_size, dtype, run):
    k_pool, v_pool, table = paged(page_size, KEYS, dtype)
    ends = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0)], dtype=torch.int32)
    q = torch.randn(sum(QUERIES) + 2, HEADS, ELEMENTS).to(dtype)
    run = {**run, "slopes": torch.rand(HEADS)} if "slopes" in run else run
    names = {"causal": "causal", "window": "window_size", "cap": "softcap", "slopes": "alibi_slopes"}
    told = {names[name]: value for name, value in run.items()}
    lengths = torch.tensor(KEYS, dtype=torch.int32)
    of_keys = torch.tensor([0, *torch.tensor(KEYS).cumsum(0)], dtype=torch.int32)
    by_length, by_ends = (
        vt.flash_attn_varlen_func(
            q, k_pool, v_pool, ends, given, 7, 33, block_table=table, seqused_k=used, return_attn_probs=True, **told
        )
        for given, used in ((None, lengths), (of_keys, None))
    )
    assert all(torch.equal(a, b) for a, b in zip(by_length[:2], by_ends[:2]))
    o, total, _ = by_length
    assert o.shape == q.shape and total.shape == q.shape[1::-1]
    for n, length in enumerate(KEYS):
        rows = slice(int(ends[n]), int(ends[n + 1]))
        right, of_rows = naive(q[rows], gathered(k_pool, table, n, length), gathered(v_pool, table, n, length), **run)
        close(o[rows], right, 4.0)
        close(total[:, rows].exp(), of_rows.exp(), 4.0)


def test_what_nobody_checked_of_ragged_queries():
    """Offsets, lengths and entries that nobody checked stay within tensors."""
    pool, q = torch.randn(5, 4, OF_KEYS, ELEMENTS), torch.randn(6, HEADS, ELEMENTS)
    found = []
    for told in (([-3, 2, 2**31 - 1], [[-9, 2], [2**31 - 1, 1]], [99, -1]), ([0, 2, 6], [[0, 2], [4, 1]], [8, 0])):
        ends, table, used = (torch.tensor(numbers, dtype=torch.int32) for numbers in told)
        found.append(vt.flash_attn_varlen_func(q, pool, pool, ends, None, 6, 8, block_table=table, seqused_k=used))
    assert torch.equal(*found) and (found[0][2:] == 0).all()


def test_what_ragged_queries_of_pages_refuse():
    q, pool = torch.randn(4, HEADS, ELEMENTS), torch.randn(3, 8, OF_KEYS, ELEMENTS)
    ends, lengths = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
    table = torch.zeros(2, 2, dtype=torch.int32)
    for of_k, run, match in (
        (None, {"block_table": table}, "or neither"),
        (ends, {"block_table": table, "seqused_k": lengths}, "or neither"),
        (None, {"block_table": table.long(), "seqused_k": lengths}, "block_table of torch.int64"),
        (None, {"block_table": table[:1], "seqused_k": lengths}, "block_table of .* for 2 sequences"),
        (None, {"block_table": table, "seqused_k": ends}, "seqused_k of .* for 2 sequences"),
        (None, {"block_table": table[0], "seqused_k": lengths}, "pages of a sequence"),
        (ends[:2], {"block_table": table}, "as many sequences"),
    ):
        with pytest.raises(vd.GraphError, match=match):
            vt.flash_attn_varlen_func(q, pool, pool, ends, of_k, 3, 9, **run)
    with pytest.raises(vd.GraphError, match="four: .pages, page size"):
        vt.flash_attn_varlen_func(q, q, q, ends, None, 3, 9, block_table=table, seqused_k=lengths)
    o = vt.flash_attn_varlen_func(q.requires_grad_(), pool, pool, ends, None, 3, 9, block_table=table, seqused_k=lengths)
    with pytest.raises(vd.UnsupportedError, match="no gradient"):
        o.sum().backward()


def test_sequences_share_pages():
    k_pool, v_pool, table = paged(4, [8, 11], torch.float32)
    table[0, :2] = table[1, :2]
    q = torch.randn(2, 1, HEADS, ELEMENTS)
    o, total = vt.flash_attn_with_kvcache(
        q, k_pool, v_pool, cache_seqlens=torch.tensor([8, 11], dtype=torch.int32), block_table=table, return_softmax_lse=True
    )
    judge(o, total, q, k_pool, v_pool, table, [8, 11])


def test_caches_that_are_not_paged():
    k_cache, v_cache = torch.randn(2, 5, 20, OF_KEYS, ELEMENTS)
    q, (k, v) = torch.randn(3, 2, HEADS, ELEMENTS), torch.randn(2, 3, 2, OF_KEYS, ELEMENTS)
    before = [0, 7, 18]
    for index in (None, torch.tensor([4, 0, 2], dtype=torch.int32)):
        caches = k_cache.clone(), v_cache.clone()
        table = torch.arange(3)[:, None] if index is None else index[:, None]
        run = {"cache_seqlens": torch.tensor(before, dtype=torch.int32), "cache_batch_idx": index}
        o, total = vt.flash_attn_with_kvcache(q, *caches, k, v, causal=True, return_softmax_lse=True, **run)
        for cache, old, new in zip(caches, (k_cache, v_cache), (k, v)):
            right = old.clone()
            for n, length in enumerate(before):
                right[int(table[n, 0]), length : length + 2] = new[n]
            assert torch.equal(cache, right)
        judge(o, total, q, *caches, table, [length + 2 for length in before], causal=True)
    # One length for all, and all positions without one.
    alike = vt.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20)
    assert torch.equal(alike, vt.flash_attn_with_kvcache(q, k_cache, v_cache))
    close(alike, vt.flash_attn_func(q.double(), k_cache[:3].double(), v_cache[:3].double()), 4.0)


@pytest.mark.parametrize("index", [None, [4, 0, 2, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [{}, {"causal": True}, {"window": (4, 1), "cap": 2.0}, {"causal": True, "slopes": True}])
def test_padding_in_front_of_sequences(index, dtype, run):
    """None, some, all but one, and all of what a cache has; what is padding and what is behind a length is no number."""
    after, pads = [9, 20, 7, 12], [0, 5, 6, 12]
    caches = torch.full((2, 5, 20, OF_KEYS, ELEMENTS), float("nan"), dtype=dtype).unbind(0)
    at = index or range(4)
    for cache in caches:
        for n in range(4):
            # A cache of two sequences has what either reads.
            own = cache[at[n], pads[n] : after[n]]
            own.copy_(torch.where(own.isnan(), torch.randn(own.shape).to(dtype), own))
    q = torch.randn(4, 3, HEADS, ELEMENTS).to(dtype)
    run = {**run, "slopes": torch.rand(4, HEADS)} if "slopes" in run else run
    names = {"causal": "causal", "window": "window_size", "cap": "softcap", "slopes": "alibi_slopes"}
    told = {names[name]: value for name, value in run.items()}
    whole = {name: None if x is None else torch.tensor(x, dtype=torch.int32) for name, x in (("cache_seqlens", after), ("cache_leftpad", pads), ("cache_batch_idx", index))}
    o, total = vt.flash_attn_with_kvcache(q, *caches, return_softmax_lse=True, **whole, **told)
    assert o.shape == q.shape and total.shape == (4, HEADS, 3)
    for n in range(4):
        own = {**run, "slopes": run["slopes"][n]} if "slopes" in run else run
        right, of_rows = naive(q[n], *(cache[at[n], pads[n] : after[n]] for cache in caches), **own)
        close(o[n], right, 4.0)
        close(total[n].exp(), of_rows.exp(), 4.0)


def test_padding_in_front_of_new_positions():
    k_cache, v_cache = torch.randn(3, 2, 16, OF_KEYS, ELEMENTS)[:2].unbind(0)
    buffer = torch.randn(2, 3, 16, OF_KEYS, ELEMENTS)
    q, (k, v) = torch.randn(2, 2, HEADS, ELEMENTS), torch.randn(2, 2, 2, OF_KEYS, ELEMENTS)
    before, pads = [3, 14], [2, 9]
    # Batches that lie apart, a part of a larger buffer.
    for caches in ((k_cache.clone(), v_cache.clone()), (buffer[:, 0], buffer[:, 2])):
        seqlens, leftpad = (torch.tensor(x, dtype=torch.int32) for x in (before, pads))
        o = vt.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=seqlens, cache_leftpad=leftpad, causal=True)
        for n in range(2):
            assert torch.equal(caches[0][n, before[n] : before[n] + 2], k[n])
            close(o[n], naive(q[n], *(cache[n, pads[n] : before[n] + 2] for cache in caches), causal=True)[0], 4.0)
    # All positions count without lengths; padding that nobody checked ends with the cache, and begins with it.
    wild = vt.flash_attn_with_kvcache(q, k_cache, v_cache, cache_leftpad=torch.tensor([-5, 10**9], dtype=torch.int32))
    close(wild[0], naive(q[0], k_cache[0], v_cache[0])[0], 4.0)
    assert (wild[1] == 0).all()
    # Padding that ends behind the last position that counts leaves none.
    for index in (None, torch.arange(2, dtype=torch.int32)):
        short = dict(cache_seqlens=torch.tensor([3, 9], dtype=torch.int32), cache_leftpad=torch.tensor([7, 2], dtype=torch.int32), cache_batch_idx=index)
        o, total = vt.flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **short)
        assert (o[0] == 0).all() and (total[0] == -torch.inf).all()
        close(o[1], naive(q[1], k_cache[1, 2:9], v_cache[1, 2:9])[0], 4.0)
    assert vt.flash_attn_with_kvcache(q[:0], k_cache, v_cache, cache_leftpad=leftpad[:0]).shape == (0, 2, HEADS, ELEMENTS)
    assert vt.flash_attn_with_kvcache(q[:, :0], k_cache, v_cache, cache_leftpad=leftpad).shape == (2, 0, HEADS, ELEMENTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_a_part_of_latent_keys(dtype):
    """One head of keys of 512 + 64 elements, in pages, whose first 512 are the values of all heads."""
    pool, table = torch.randn(7, 8, 1, 576).to(dtype), torch.tensor([[3, 0, 5], [6, 1, 2]], dtype=torch.int32)
    q, lengths = torch.randn(2, 2, 16, 576).to(dtype), [24, 11]
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    scale = 192**-0.5
    o = vt.flash_attn_with_kvcache(q, pool, pool[..., :512], cache_seqlens=seqlens, block_table=table, softmax_scale=scale, causal=True)
    ends = torch.tensor([0, 2, 4], dtype=torch.int32)
    ragged = vt.flash_attn_varlen_func(
        q.flatten(0, 1), pool, pool[..., :512], ends, None, 2, 24, block_table=table, seqused_k=seqlens, softmax_scale=scale, causal=True
    )
    assert torch.equal(o.flatten(0, 1), ragged)
    for n, length in enumerate(lengths):
        keys = gathered(pool, table, n, length).double()[:, 0]
        s = torch.einsum("ihd,jd->hij", q[n].double(), keys) * scale
        s = s.masked_fill(torch.arange(length) > torch.arange(2)[:, None] + length - 2, float("-inf"))
        close(o[n], torch.einsum("hij,jd->ihd", s.softmax(-1), keys[:, :512]), 4.0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("run", [{"causal": True}, {"window_size": (4, -1)}, {}])
def test_rotary(interleaved, run):
    angles = torch.rand(40, 4) * 6
    cos, sin = angles.cos(), angles.sin()

    def turned(x, positions):
        x = x.double().clone()
        for i, position in enumerate(positions):
            for pair in range(4):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
                c, s = (table[position, pair].double() for table in (cos, sin))
                x[i, :, a], x[i, :, b] = x[i, :, a] * c - x[i, :, b] * s, x[i, :, a] * s + x[i, :, b] * c
        return x

    before, new = [3, 20], 3
    k_pool, v_pool, table = paged(8, [length + new for length in before], torch.float32)
    q, (k, v) = torch.randn(2, new, HEADS, ELEMENTS), torch.randn(2, 2, new, OF_KEYS, ELEMENTS)
    o, total = vt.flash_attn_with_kvcache(
        q, k_pool, v_pool, k, v, cos, sin, torch.tensor(before, dtype=torch.int32), block_table=table, rotary_interleaved=interleaved,
        return_softmax_lse=True, **run
    )
    queries = torch.stack([turned(q[n], range(b, b + new) if run else [b] * new) for n, b in enumerate(before)])
    for n, length in enumerate(before):
        close(gathered(k_pool, table, n, length + new)[length:], turned(k[n], range(length, length + new)), 4.0)
    names = {"window_size": "window"}
    judge(o, total, queries, k_pool, v_pool, table, [length + new for length in before], **{names.get(name, name): x for name, x in run.items()})


def test_what_nobody_checked():
    """Lengths beyond the cache and entries that are no pages stay within tensors."""
    k_pool, v_pool, table = paged(4, [8, 8], torch.float32, pages_of_each=2)
    q, (k, v) = torch.randn(2, 1, HEADS, ELEMENTS), torch.randn(2, 2, 3, OF_KEYS, ELEMENTS)
    lengths = torch.tensor([7, 1000], dtype=torch.int32)
    vt.flash_attn_with_kvcache(q, k_pool, v_pool, k, v, cache_seqlens=lengths, block_table=table)
    table[1] = torch.tensor([-5, 2**31 - 1])
    k_pool, v_pool = k_pool.nan_to_num(), v_pool.nan_to_num()
    clamped = table.clamp(0, k_pool.shape[0] - 1)
    seqlens = torch.tensor([8, 8], dtype=torch.int32)
    wild, tame = (vt.flash_attn_with_kvcache(q, k_pool, v_pool, cache_seqlens=seqlens, block_table=x) for x in (table, clamped))
    assert torch.equal(wild, tame)


def test_what_is_refused():
    q, cache = torch.randn(2, 1, HEADS, ELEMENTS), torch.randn(2, 8, OF_KEYS, ELEMENTS)
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(vd.UnsupportedError, match="cache_leftpad and a block_table"):
        vt.flash_attn_with_kvcache(q, cache, cache, cache_leftpad=lengths, block_table=table)
    wide = torch.randn(2, 12, OF_KEYS, ELEMENTS)[:, :8]
    for k_cache, v_cache in ((wide, cache), (cache.transpose(0, 1).contiguous().transpose(0, 1),) * 2, (cache[:1].expand(2, -1, -1, -1),) * 2):
        with pytest.raises(vd.GraphError, match="as many whole positions apart"):
            vt.flash_attn_with_kvcache(q, k_cache, v_cache, cache_leftpad=lengths)
    for run, match in (
        ({"k": cache[:, :1]}, "k without v"),
        ({"k": cache[:, :1], "v": cache[:, :1]}, "without cache_seqlens"),
        ({"k": cache[:, :1, :1], "v": cache[:, :1], "cache_seqlens": lengths}, "as many of both"),
        ({"rotary_cos": cache[0, :, 0]}, "without rotary_sin"),
        ({"rotary_cos": cache[0, :, 0], "rotary_sin": cache[0, :, 0]}, "without k and v"),
        ({"block_table": table, "cache_batch_idx": lengths}, "block_table with cache_batch_idx"),
        ({"block_table": table.long()}, "int32"),
        ({"block_table": table[:1]}, "block_table of"),
        ({"cache_seqlens": lengths.long()}, "cache_seqlens of"),
        ({"cache_batch_idx": table}, "cache_batch_idx of"),
        ({"cache_leftpad": lengths.long()}, "cache_leftpad of"),
        ({"cache_leftpad": lengths[:1]}, "cache_leftpad of"),
    ):
        with pytest.raises(vd.GraphError, match=match):
            vt.flash_attn_with_kvcache(q, cache, cache, **run)
    with pytest.raises(vd.GraphError, match="four dims"):
        vt.flash_attn_with_kvcache(q[0], cache, cache)
    with pytest.raises(vd.GraphError, match="a cache for each"):
        vt.flash_attn_with_kvcache(torch.cat([q, q]), cache, cache)
    o = vt.flash_attn_with_kvcache(q.requires_grad_(), cache, cache, cache_seqlens=8)
    with pytest.raises(vd.UnsupportedError, match="no gradient"):
        o.sum().backward()


def test_operators_are_what_they_declare():
    q, pool = torch.randn(2, HEADS, 1, ELEMENTS), torch.randn(5, OF_KEYS, 8, ELEMENTS)
    lengths, table = torch.tensor([3, 9], dtype=torch.int32).reshape(2, 1, 1, 1), torch.tensor([[4, 0], [1, 3]], dtype=torch.int32)
    given = (q, pool, pool, None, None, None, None, lengths, table[:, :, None, None], *[None] * 7, "scale=0.5 causal=bottom_right")
    torch.library.opcheck(torch.ops.verdigris.attention.default, given)
