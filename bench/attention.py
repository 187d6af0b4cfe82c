"""Attention beside its peers: `python bench/attention.py OUT.jsonl SECONDS [FILTER | drawn:SEED:COUNT]`, with the Python package installed, on a GPU.

Sides are `verdigris.torch.functional`, planned by estimate; PyTorch's `scaled_dot_product_attention` with cuDNN and with FlashAttention-2, of ragged rows its
`varlen_attn` (FlashAttention-2's kernels); and FlashAttention-4 (`flash_attn.cute`) where it can be imported and takes the row. One head of the last batch is held against f64 (relative norm of the difference, of the result
and of each gradient; with dropout the difference from what our own mask says, of ours alone and up to 1,024 positions; peers of paged rows, whose caches are others, are not judged) before anything is timed; then all sides take turns, in blocks of about 8 ms, and medians are kept. Operands rotate where they would stay
in the L2. Calls shorter than 60 µs are replayed as CUDA graphs on every side that can be captured. A causal row counts half of the products and a row with
a window what lies inside of it, a gradient two and a half times those of its forward call; decoding counts the bytes of keys and values.

Of gradients `ordered` is ours under a deterministic policy: two calls of it have to agree bit for bit before it is timed, and `in_order` is its rate over that of ours.

Sequences of ragged and of paged rows have from a quarter of the row's positions to all of them, the last one all; their pages lie in the cache in random order. No
peer in PyTorch pages keys, so a paged row stands beside SDPA on caches of the same extents that are not paged, with a mask of lengths where lengths differ (`mask`).

Of rows that say `e4m3` our keys and values are of 8 bits beside queries of 16, and peers, none of which takes that, have the same numbers in 16 bits; so has `ours (16 bits)`.
"""

import dataclasses
import json
import random
import re
import statistics
import sys
import time

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import verdigris.torch
import verdigris.torch.functional as ours
from verdigris.torch import flash_attn_with_kvcache

try:
    from flash_attn.cute import flash_attn_func as frontier
except ImportError:
    frontier = None

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
BLOCK_MS = 8.0
REPLAYED_BELOW_US = 60.0
ROTATED_BYTES = 160e6


@dataclasses.dataclass(frozen=True)
class Row:
    b: int
    h: int
    h_kv: int
    s: int
    s_kv: int
    d: int
    d_v: int
    causal: bool = False
    dtype: str = "bf16"
    window: int | None = None
    cap: float | None = None
    bias: bool = False
    backward: bool = True
    dropout: float = 0.0
    page: int | None = None
    ragged: bool = False
    bias_gradient: bool = False
    kept: bool = False

    def __str__(self):
        words = [f"{self.b}", f"{self.h}/{self.h_kv}", f"{self.s}x{self.s_kv}", f"{self.d}/{self.d_v}", self.dtype]
        marks = [(self.causal, "causal"), (self.window, f"window{self.window}"), (self.cap, "cap"), (self.bias, "bias"), (self.bias_gradient, "dbias")]
        marks += [(self.dropout, f"dropout{self.dropout}"), (self.page, f"paged{self.page}"), (self.ragged, "ragged"), (self.kept, "e4m3")]
        return " ".join(words + [word for has, word in marks if has])

    @property
    def scores(self) -> float:
        if self.window is not None:
            return self.s * min(self.window + 1, self.s_kv)
        return self.s * self.s_kv * (0.5 if self.causal and self.s > 1 else 1.0)

    @property
    def flops(self) -> float:
        return 2.0 * self.b * self.h * self.scores * (self.d + self.d_v)

    @property
    def cache_bytes(self) -> float:
        return (1.0 if self.kept else 2.0) * self.b * self.h_kv * self.s_kv * (self.d + self.d_v)

    @property
    def decodes(self) -> bool:
        return self.s <= 64


def decoding(b, h, h_kv, s, s_kv, d=128, d_v=None, **options):
    return Row(b, h, h_kv, s, s_kv, d, d_v or d, backward=False, **options)


ROWS = [
    Row(4, 16, 16, 4096, 4096, 128, 128, True),
    Row(4, 16, 16, 4096, 4096, 128, 128),
    Row(4, 32, 32, 4096, 4096, 64, 64, True),
    Row(4, 32, 32, 4096, 4096, 64, 64),
    Row(1, 16, 16, 16384, 16384, 128, 128, True),
    Row(1, 16, 16, 16384, 16384, 128, 128),
    Row(2, 32, 8, 8192, 8192, 128, 128, True),
    Row(16, 16, 16, 1024, 1024, 128, 128, True),
    Row(4, 16, 16, 4096, 4096, 128, 128, True, "f16"),
    Row(32, 16, 16, 512, 512, 64, 64),
    Row(64, 12, 12, 197, 197, 64, 64),
    Row(4, 16, 16, 2048, 2048, 96, 96, True),
    Row(4, 16, 16, 2048, 2048, 80, 80),
    Row(4, 16, 16, 2048, 2048, 72, 72),
    Row(8, 8, 8, 777, 1234, 64, 64),
    Row(2, 8, 8, 8192, 8192, 256, 256),
    Row(2, 8, 8, 8192, 8192, 256, 256, True),
    Row(2, 16, 16, 4096, 4096, 192, 128, True),
    Row(2, 16, 16, 8192, 8192, 128, 128, True, window=1024),
    Row(4, 16, 16, 4096, 4096, 128, 128, True, cap=30.0),
    Row(4, 16, 16, 2048, 2048, 128, 128, bias=True),
    decoding(32, 32, 8, 1, 8192),
    decoding(8, 32, 8, 1, 2048),
    decoding(1, 32, 8, 1, 8192),
    decoding(1, 8, 1, 1, 131072),
    decoding(32, 32, 8, 4, 8192, causal=True),
    decoding(4, 16, 2, 1, 32768, 256),
    decoding(64, 32, 8, 1, 256),
    decoding(1, 16, 16, 1, 8192, 192, 128),
    decoding(1, 64, 8, 64, 8192, causal=True),
    decoding(32, 32, 8, 1, 8192, page=64),
    decoding(64, 32, 8, 1, 2048, page=16),
    decoding(8, 32, 8, 4, 8192, causal=True, page=64),
    decoding(32, 32, 8, 1, 8192, kept=True),
    decoding(32, 32, 8, 1, 8192, dtype="f16", kept=True),
    decoding(8, 32, 8, 1, 2048, kept=True),
    decoding(1, 32, 8, 1, 8192, kept=True),
    decoding(1, 8, 1, 1, 131072, kept=True),
    decoding(32, 32, 8, 4, 8192, causal=True, kept=True),
    decoding(32, 32, 8, 1, 8192, 64, kept=True),
    decoding(4, 16, 2, 1, 32768, 256, kept=True),
    decoding(64, 32, 8, 1, 2048, page=16, kept=True),
    decoding(32, 32, 8, 1, 8192, page=64, kept=True),
    Row(8, 32, 8, 2048, 2048, 128, 128, True, backward=False, page=64, ragged=True),
    Row(32, 32, 8, 512, 4096, 128, 128, True, backward=False, page=64, ragged=True),
    Row(8, 32, 8, 2048, 2048, 128, 128, True, ragged=True),
    Row(32, 16, 16, 512, 512, 64, 64, True, ragged=True),
    Row(4, 16, 16, 1024, 1024, 128, 128, True, dropout=0.1),
    Row(4, 16, 16, 4096, 4096, 128, 128, True, dropout=0.1),
    Row(4, 32, 32, 4096, 4096, 64, 64, dropout=0.1),
    Row(4, 16, 16, 1024, 1024, 128, 128, bias=True, bias_gradient=True),
    Row(256, 6, 6, 49, 49, 32, 32, bias=True, bias_gradient=True),
]


def drawn(seed, count):
    """So many rows that nothing was tuned on: 256 to 16,384 positions by their logarithm, most a multiple of 64, and batches of about half a million queries."""
    draws, rows = random.Random(seed), []
    while len(rows) < count:
        d = draws.choice([64, 64, 80, 96, 128, 128, 128, 128, 256])
        s = round(2 ** draws.uniform(8, 14))
        if draws.random() < 0.6:
            s = max(64, s // 64 * 64)
        h, group = draws.choice([8, 12, 16, 24, 32]), draws.choice([1, 1, 1, 2, 4])
        if h % group:
            continue
        b = max(1, round(2**19 * draws.uniform(0.5, 2.0) / (s * h) * 64 / max(64, d // 2)))
        causal = draws.random() < 0.5
        if 4 * b * h * s * s * d <= 6e12:
            rows.append(Row(b, h, h // group, s, s, d, d, causal))
    return rows


def _elapsed_ms(call, count):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(count):
        call(i)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _replayed(call, count):
    """A graph of so many calls, or None where the side cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(count):
                call(i)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def timed_us(calls, blocks):
    """Medians of all sides, which take turns; whether they were replayed."""
    for call in calls.values():
        call(0)
        call(1)
    torch.cuda.synchronize()
    once_us = {name: _elapsed_ms(call, 4) * 250 for name, call in calls.items()}
    counts = {name: max(1, min(50, int(BLOCK_MS * 1e3 / (us + 1)))) for name, us in once_us.items()}
    runs, replayed = {}, min(once_us.values()) < REPLAYED_BELOW_US
    for name, call in calls.items():
        graph = _replayed(call, counts[name]) if replayed else None
        runs[name] = (lambda i, graph=graph: graph.replay(), 1) if graph else (call, counts[name])
    found = {name: [] for name in calls}
    for _ in range(blocks):
        for name, (run, count) in runs.items():
            found[name].append(_elapsed_ms(run, count) * 1e3 / counts[name])
    return {name: statistics.median(times) for name, times in found.items()}, replayed


def allowed(row, device):
    """Which keys each query attends to: a causal diagonal ends at the last query and the last key of decoding, of windows and of sequences, and begins at the first of both elsewhere."""
    if not row.causal:
        return None
    i = torch.arange(row.s, device=device)[:, None] + (row.s_kv - row.s if row.decodes or row.window is not None or row.ragged or row.page else 0)
    j = torch.arange(row.s_kv, device=device)[None]
    return (j <= i) & (j >= i - row.window) if row.window is not None else j <= i


def exact(row, q, k, v, d_o, bias, mask):
    """Result and gradients of one head `[positions, elements]`, in f64."""
    own = [x.detach().double().requires_grad_() for x in ([q, k, v] if bias is None else [q, k, v, bias])]
    scores = own[0] @ own[1].T * row.d**-0.5
    if row.cap:
        scores = row.cap * (scores / row.cap).tanh()
    if bias is not None:
        scores = scores + own[3]
    if row.causal:
        scores = scores.masked_fill(~allowed(row, q.device), float("-inf"))
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights * mask / (1.0 - row.dropout)
    result = weights @ own[2]
    gradients = torch.autograd.grad(result, own, d_o.double()) if row.backward else []
    return [result.detach(), *gradients]


class Dense:
    """Sequences of one length, `[batch, heads, positions, elements]`."""

    def __init__(self, row, device):
        self.row = row
        new = lambda *dims: torch.randn(*dims, device=device, dtype=TYPES[row.dtype])
        extents = ((row.b, row.h, row.s, row.d), (row.b, row.h_kv, row.s_kv, row.d), (row.b, row.h_kv, row.s_kv, row.d_v))
        self.copies = [[new(*dims).requires_grad_(row.backward) for dims in extents] for _ in range(copies_of(row))]
        self.kept, self.one = kept_of(row, self.copies), torch.ones(1, device=device)
        self.d_o = new(row.b, row.h, row.s, row.d_v)
        self.bias = new(row.b if row.bias_gradient else 1, row.h, row.s, row.s_kv).requires_grad_(row.bias_gradient) if row.bias else None
        self.state = torch.tensor([7, 0, 0, 0], dtype=torch.int32, device=device) if row.dropout else None

    def operands(self, i):
        return self.copies[i % len(self.copies)] + ([self.bias] if self.row.bias_gradient else [])

    def own(self, i):
        row, operands = self.row, self.copies[i % len(self.copies)]
        if row.kept:
            return self.of_cache(*self.kept[i % len(self.kept)], k_descale=self.one, v_descale=self.one)
        return self.of_16_bits(i)

    def of_cache(self, q, k, v, **descales):
        return flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, k, v)), causal=self.row.causal, **descales).transpose(1, 2)

    def of_16_bits(self, i):
        row, operands = self.row, self.copies[i % len(self.copies)]
        if self.is_of_flash:
            return ours.flash_attn_func(*(x.transpose(1, 2) for x in operands), **self.flash).transpose(1, 2)
        words = dict(dropout_p=row.dropout, state=self.state) if row.dropout else {}
        return ours.scaled_dot_product_attention(*operands, attn_mask=self.bias, is_causal=row.causal, enable_gqa=row.h != row.h_kv, **words)

    @property
    def is_of_flash(self):
        return self.row.window is not None or self.row.cap or (self.row.decodes and self.row.causal)

    @property
    def flash(self):
        row = self.row
        return dict(causal=row.causal, window_size=(row.window, 0) if row.window is not None else (-1, -1), softcap=row.cap or 0.0)

    def peers(self):
        row = self.row

        def with_backend(backend):
            def call(i):
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(
                        *self.copies[i % len(self.copies)],
                        attn_mask=self.bias,
                        is_causal=row.causal,
                        enable_gqa=row.h != row.h_kv,
                        dropout_p=row.dropout,
                    )

            return call

        def of_frontier(i):
            options = {**self.flash, "window_size": (row.window, 0) if row.window is not None else (None, None)}
            found = frontier(*(x.transpose(1, 2) for x in self.copies[i % len(self.copies)]), **options)
            return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

        backends = {**PEERS, **({"efficient": SDPBackend.EFFICIENT_ATTENTION} if row.bias else {})}
        found = {} if self.is_of_flash else {name: with_backend(backend) for name, backend in backends.items()}
        if frontier is not None and self.bias is None and not row.dropout:
            found["fa4"] = of_frontier
        return found

    def judged(self):
        """Operands of the last head of the last batch, the gradient of its result, its bias, and what dropout keeps of it."""
        row = self.row
        q, k, v = self.copies[0]
        kv_head = (row.h - 1) * row.h_kv // row.h
        mask = None
        if row.dropout:
            mask = ours.attention_dropout_mask(self.state, (row.b, row.h, row.s, row.s_kv), row.dropout)[-1, -1] if row.s <= 1024 else None
        return (q[-1, -1], k[-1, kv_head], v[-1, kv_head]), self.d_o[-1, -1], None if self.bias is None else self.bias[-1, -1], mask

    def last(self, x):
        return x[-1, -1]


class Sequences:
    """Sequences of different lengths: behind each other (`ragged`), of pages (`page`), or queries behind each other that attend to paged keys."""

    def __init__(self, row, device):
        self.row = row
        chance = torch.Generator().manual_seed(row.b * row.s_kv)
        drawn = lambda most: [int(x) for x in torch.randint(max(1, most // 4), most + 1, (row.b - 1,), generator=chance)] + [most]
        self.keys = drawn(row.s_kv)
        own = self.keys if row.s == row.s_kv else [min(a, b) for a, b in zip(drawn(row.s), self.keys)]
        self.queries = own if row.ragged else [row.s] * row.b
        ends = lambda lengths: torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        self.of_q, self.of_k = ends(self.queries), ends(self.keys)
        self.lengths = torch.tensor(self.keys, dtype=torch.int32, device=device)
        new = lambda *dims: torch.randn(*dims, device=device, dtype=TYPES[row.dtype]).requires_grad_(row.backward)
        rows_q = (sum(self.queries),) if row.ragged else (row.b, row.s)
        if row.page:
            pages = -(-row.s_kv // row.page)
            self.table = torch.randperm(row.b * pages, generator=chance).to(torch.int32).view(row.b, pages).to(device)
            rows_kv = (row.b * pages, row.page)
        else:
            rows_kv = (sum(self.keys),)
        extents = ((*rows_q, row.h, row.d), (*rows_kv, row.h_kv, row.d), (*rows_kv, row.h_kv, row.d_v))
        self.copies = [[new(*dims) for dims in extents] for _ in range(copies_of(row))]
        self.kept, self.one = kept_of(row, self.copies), torch.ones(1, device=device)
        self.d_o = torch.randn(*rows_q, row.h, row.d_v, device=device, dtype=TYPES[row.dtype])

    def operands(self, i):
        return self.copies[i % len(self.copies)]

    def own(self, i):
        row = self.row
        if row.kept:
            return self.of_cache(*self.kept[i % len(self.kept)], k_descale=self.one, v_descale=self.one)
        return self.of_16_bits(i)

    def of_cache(self, q, k, v, **descales):
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=self.lengths, block_table=self.table, causal=self.row.causal, **descales)

    def of_16_bits(self, i):
        row, (q, k, v) = self.row, self.operands(i)
        if not row.ragged:
            return flash_attn_with_kvcache(q, k, v, cache_seqlens=self.lengths, block_table=self.table, causal=row.causal)
        if row.page:
            return ours.flash_attn_varlen_func(
                q, k, v, self.of_q, None, row.s, row.s_kv, causal=row.causal, block_table=self.table, seqused_k=self.lengths
            )
        return ours.flash_attn_varlen_func(q, k, v, self.of_q, self.of_k, row.s, row.s_kv, causal=row.causal)

    def peers(self):
        row = self.row
        if row.page:
            return {} if row.ragged else self._without_pages()

        def ragged(i):
            from torch.nn.attention.varlen import varlen_attn

            return varlen_attn(*self.operands(i), self.of_q, self.of_k, row.s, row.s_kv, window_size=(-1, 0 if row.causal else -1))

        return {"flash2": ragged}

    def _without_pages(self):
        """SDPA on caches that are not paged, with a mask of lengths."""
        row = self.row
        new = lambda heads, d: torch.randn(row.b, heads, row.s_kv, d, device=self.lengths.device, dtype=TYPES[row.dtype])
        caches = [(new(row.h_kv, row.d), new(row.h_kv, row.d_v)) for _ in self.copies]
        at = torch.arange(row.s_kv, device=self.lengths.device)[None, None, None]
        last = self.lengths[:, None, None, None] - (row.s - 1 - torch.arange(row.s, device=self.lengths.device)[:, None] if row.causal else 0)
        mask = at < last

        def with_backend(backend):
            def call(i):
                k, v = caches[i % len(caches)]
                with sdpa_kernel(backend):
                    q = self.operands(i)[0].transpose(1, 2)
                    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=row.h != row.h_kv).transpose(1, 2)

            return call

        return {"cudnn (mask)": with_backend(SDPBackend.CUDNN_ATTENTION), "efficient (mask)": with_backend(SDPBackend.EFFICIENT_ATTENTION)}

    def judged(self):
        row, (q, k, v) = self.row, self.copies[0]
        kv_head = (row.h - 1) * row.h_kv // row.h
        of_last = (lambda x: x[self.table[-1].long()].flatten(0, 1)[: row.s_kv]) if row.page else (lambda x: x[-row.s_kv :])
        return (self.last(q), of_last(k)[:, kv_head], of_last(v)[:, kv_head]), self.last(self.d_o), None, None

    def last(self, x):
        """The last head of the last sequence, which has all positions; of keys that are not paged too."""
        if x.dim() == 4:
            return x[-1, :, -1]
        return x[-self.queries[-1] if x.shape[0] == sum(self.queries) else -self.keys[-1] :, -1]


def copies_of(row):
    once_bytes = row.cache_bytes + 4.0 * row.b * row.h * row.s * row.d
    return max(1, min(64, int(ROTATED_BYTES / once_bytes) + 1))


def kept_of(row, copies):
    """The operands with keys and values of 8 bits, which those of 16 bits are rounded to."""
    if not row.kept:
        return None
    kept = [(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for q, k, v in copies]
    for (_, k, v), (_, few_k, few_v) in zip(copies, kept):
        k.copy_(few_k)
        v.copy_(few_v)
    return kept


def sides_of(case, facts):
    """A call for each side, of a number that picks the operands."""
    sides = {"ours": case.own}
    if case.row.kept:
        sides["ours (16 bits)"] = case.of_16_bits
    for name, call in case.peers().items():
        try:
            call(0)
            torch.cuda.synchronize()
            sides[name] = call
        except Exception as refusal:  # Whatever a peer throws is its refusal.
            facts[f"{name}_refused"] = (str(refusal) or repr(refusal)).splitlines()[0][:80]
    return sides


def errors(case, name, side, truth, kept):
    row = case.row
    if "mask" in name or (row.dropout and (name != "ours" or kept is None)):
        return {}
    result = side(0)
    found = [result.detach(), *(torch.autograd.grad(result, case.operands(0), case.d_o) if row.backward else [])]
    # Of grouped heads the gradients of keys and values are sums over a group.
    names = ("o", "dq", "dk", "dv", "dbias") if row.h == row.h_kv else ("o", "dq")
    return {name: float((case.last(x).double() - t).norm() / t.norm()) for name, x, t in zip(names, found, truth)}


def measure(row, device):
    facts = dataclasses.asdict(row)
    case = (Sequences if row.ragged or row.page else Dense)(row, device)
    count = len(case.copies)
    sides = sides_of(case, facts)
    heads, d_o, bias, kept = case.judged()
    truth = exact(row, *heads, d_o, bias, kept)
    facts["error"] = {name: errors(case, name, side, truth, kept) for name, side in sides.items()}
    del truth
    torch.cuda.empty_cache()
    with torch.no_grad():
        facts["forward_us"], facts["forward_replayed"] = timed_us(sides, 8)
    flops, cache_bytes = row.flops, row.cache_bytes
    if isinstance(case, Sequences):
        pairs = [q * k - (q * (q - 1) / 2 if row.causal else 0) for q, k in zip(case.queries, case.keys)]
        flops, cache_bytes = 2.0 * sum(pairs) * row.h * (row.d + row.d_v), cache_bytes * sum(case.keys) / (row.b * row.s_kv)
    ways = [("forward", flops)]
    if row.backward:
        results = {name: [side(i) for i in range(count)] for name, side in sides.items()}
        gradients = {
            name: (lambda i, y=y: torch.autograd.grad(y[i % count], case.operands(i), case.d_o, retain_graph=True)) for name, y in results.items()
        }
        with verdigris.torch.policy(deterministic=True):
            in_order = [case.own(i) for i in range(count)]
        gradients["ordered"] = lambda i: torch.autograd.grad(in_order[i % count], case.operands(i), case.d_o, retain_graph=True)
        if not all(torch.equal(one, other) for one, other in zip(gradients["ordered"](0), gradients["ordered"](0))):
            raise RuntimeError("two gradients under a deterministic policy differ")
        times, replayed = {}, False
        for name, call in list(gradients.items()):
            try:
                call(0)
            except RuntimeError as refusal:
                facts[f"{name}_backward_refused"] = str(refusal).splitlines()[0][:80]
                del gradients[name]
        try:
            times, replayed = timed_us(gradients, 5)
        except RuntimeError as refusal:
            facts["backward_refused"] = str(refusal).splitlines()[0][:80]
        facts["backward_us"], facts["backward_replayed"] = times, replayed
        ways.append(("backward", 2.5 * flops))
        if times.get("ours") and times.get("ordered"):
            facts["in_order"] = times["ours"] / times["ordered"]
    for way, flops in ways:
        facts[f"{way}_tflops"] = {name: flops / us / 1e6 for name, us in facts[f"{way}_us"].items()}
        peers = [us for name, us in facts[f"{way}_us"].items() if name not in ("ours", "ordered", "ours (16 bits)")]
        facts[f"{way}_ratio"] = min(peers) / facts[f"{way}_us"]["ours"] if peers and "ours" in facts[f"{way}_us"] else None
    if row.decodes:
        facts["cache_gbs"] = {name: cache_bytes * (2.0 if row.kept and name != "ours" else 1.0) / us / 1e3 for name, us in facts["forward_us"].items()}
    return facts


def told(facts, way, digits=0):
    if not facts.get(f"{way}_us"):
        return "–", float("nan")
    rates = facts["cache_gbs"] if way == "forward" and "cache_gbs" in facts else facts[f"{way}_tflops"]
    return ", ".join(f"{name} {x:.{digits}f}" for name, x in rates.items()), facts[f"{way}_ratio"] or float("nan")


def main():
    out, seconds = sys.argv[1], float(sys.argv[2])
    chosen = sys.argv[3] if len(sys.argv) > 3 else ""
    draws = re.fullmatch(r"drawn:(\d+):(\d+)", chosen)
    rows = drawn(*map(int, draws.groups())) if draws else ROWS
    wanted = re.compile("" if draws else chosen)
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    begun = time.monotonic()
    print(f"{'b h/h_kv s x s_kv d/d_v':38} {'forward, TFLOP/s (decoding: GB/s)':>46} {'ratio':>6} {'backward, TFLOP/s':>46} {'ratio':>6}  worst error over the peers'")
    with open(out, "a") as record:
        for row in rows:
            if not wanted.search(str(row)):
                continue
            if time.monotonic() - begun > seconds:
                break
            try:
                facts = measure(row, device)
            except Exception as fault:
                print(f"{row!s:38} {fault!r}"[:300], flush=True)
                record.write(json.dumps({**dataclasses.asdict(row), "fault": repr(fault)[:500]}) + "\n")
                continue
            record.write(json.dumps(facts) + "\n")
            record.flush()
            peers = [error for name, error in facts["error"].items() if name != "ours" and error]
            worst = max((x / min(peer[name] for peer in peers) for name, x in facts["error"]["ours"].items()), default=0.0) if peers else float("nan")
            (forward, ahead), (backward, behind) = told(facts, "forward"), told(facts, "backward")
            print(f"{row!s:38} {forward:>46} {ahead:6.3f} {backward:>46} {behind:6.3f}  {worst:.2f}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
