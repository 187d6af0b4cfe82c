"""Attention beside its peers: `python bench/attention.py OUT.jsonl SECONDS [FILTER]`, with the Python package installed, on a GPU.

Sides are `verdigris.torch.functional`, planned by estimate; PyTorch's `scaled_dot_product_attention` with cuDNN and with FlashAttention-2; and FlashAttention-4
(`flash_attn.cute`) where it can be imported and takes the row. One head of the last batch is held against f64 (relative norm of the difference, of the result
and of each gradient) before anything is timed; then all sides take turns, in blocks of about 8 ms, and medians are kept. Operands rotate where they would stay
in the L2. Calls shorter than 60 µs are replayed as CUDA graphs on every side that can be captured. A causal row counts half of the products and a row with
a window what lies inside of it, a gradient two and a half times those of its forward call; decoding counts the bytes of keys and values.
"""

import dataclasses
import json
import re
import statistics
import sys
import time

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import verdigris.torch.functional as ours

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

    def __str__(self):
        words = [f"{self.b}", f"{self.h}/{self.h_kv}", f"{self.s}x{self.s_kv}", f"{self.d}/{self.d_v}", self.dtype]
        marks = [(self.causal, "causal"), (self.window, f"window{self.window}"), (self.cap, "cap"), (self.bias, "bias")]
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
        return 2.0 * self.b * self.h_kv * self.s_kv * (self.d + self.d_v)

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
]


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
    """Which keys each query attends to: a causal diagonal ends at the last query and the last key of decoding, and begins at the first of both elsewhere."""
    if not row.causal:
        return None
    i = torch.arange(row.s, device=device)[:, None] + (row.s_kv - row.s if row.decodes or row.window is not None else 0)
    j = torch.arange(row.s_kv, device=device)[None]
    return (j <= i) & (j >= i - row.window) if row.window is not None else j <= i


def exact(row, q, k, v, d_o, bias):
    """Result and gradients of the last head of the last batch, in f64."""
    kv_head = (row.h - 1) * row.h_kv // row.h
    own = [x.detach()[-1, head].double().requires_grad_() for x, head in ((q, row.h - 1), (k, kv_head), (v, kv_head))]
    scores = own[0] @ own[1].T * row.d**-0.5
    if row.cap:
        scores = row.cap * (scores / row.cap).tanh()
    if bias is not None:
        scores = scores + bias[-1, -1].double()
    if row.causal:
        scores = scores.masked_fill(~allowed(row, q.device), float("-inf"))
    result = scores.softmax(-1) @ own[2]
    gradients = torch.autograd.grad(result, own, d_o[-1, -1].double()) if row.backward else []
    return [result.detach(), *gradients]


def errors(row, side, operands, d_o, truth):
    result = side(0)
    found = [result.detach(), *(torch.autograd.grad(result, operands, d_o) if row.backward else [])]
    # Of grouped heads the gradients of keys and values are sums over a group.
    names = ("o", "dq", "dk", "dv") if row.h == row.h_kv else ("o", "dq")
    return {name: float((x[-1, -1].double() - t).norm() / t.norm()) for name, x, t in zip(names, found, truth)}


def sides_of(row, copies, bias, facts):
    """A call for each side, of a number that picks the operands."""
    words = dict(is_causal=row.causal, enable_gqa=row.h != row.h_kv)
    flash = dict(causal=row.causal, window_size=(row.window, 0) if row.window is not None else (-1, -1), softcap=row.cap or 0.0)
    of_flash = row.window is not None or row.cap or (row.decodes and row.causal)
    heads_last = lambda i: [x.transpose(1, 2) for x in copies[i % len(copies)]]

    def own(i):
        if of_flash:
            return ours.flash_attn_func(*heads_last(i), **flash).transpose(1, 2)
        return ours.scaled_dot_product_attention(*copies[i % len(copies)], attn_mask=bias, **words)

    def peer(backend):
        def call(i):
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(*copies[i % len(copies)], attn_mask=bias, **words)

        return call

    def of_frontier(i):
        options = {**flash, "window_size": (row.window, 0) if row.window is not None else (None, None)}
        found = frontier(*heads_last(i), **options)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    sides = {"ours": own}
    peers = {} if of_flash else {name: peer(backend) for name, backend in PEERS.items()}
    if frontier is not None and bias is None:
        peers["fa4"] = of_frontier
    for name, call in peers.items():
        try:
            call(0)
            torch.cuda.synchronize()
            sides[name] = call
        except Exception as refusal:  # Whatever a peer throws is its refusal.
            facts[f"{name}_refused"] = (str(refusal) or repr(refusal)).splitlines()[0][:80]
    return sides


def measure(row, device):
    facts = dataclasses.asdict(row)
    new = lambda *dims: torch.randn(*dims, device=device, dtype=TYPES[row.dtype])
    extents = ((row.b, row.h, row.s, row.d), (row.b, row.h_kv, row.s_kv, row.d), (row.b, row.h_kv, row.s_kv, row.d_v))
    once_bytes = row.cache_bytes + 4.0 * row.b * row.h * row.s * row.d
    count = max(1, min(64, int(ROTATED_BYTES / once_bytes) + 1))
    copies = [[new(*dims).requires_grad_(row.backward) for dims in extents] for _ in range(count)]
    d_o = new(row.b, row.h, row.s, row.d_v)
    bias = new(1, row.h, row.s, row.s_kv) if row.bias else None
    sides = sides_of(row, copies, bias, facts)
    truth = exact(row, *copies[0], d_o, bias)
    facts["error"] = {name: errors(row, side, copies[0], d_o, truth) for name, side in sides.items()}
    del truth
    torch.cuda.empty_cache()
    with torch.no_grad():
        facts["forward_us"], facts["forward_replayed"] = timed_us(sides, 8)
    ways = [("forward", row.flops)]
    if row.backward:
        results = {name: [side(i) for i in range(count)] for name, side in sides.items()}
        gradients = {
            name: (lambda i, y=y: torch.autograd.grad(y[i % count], copies[i % count], d_o, retain_graph=True)) for name, y in results.items()
        }
        times, replayed = {}, False
        try:
            times, replayed = timed_us(gradients, 5)
        except RuntimeError as refusal:
            facts["backward_refused"] = str(refusal).splitlines()[0][:80]
        facts["backward_us"], facts["backward_replayed"] = times, replayed
        ways.append(("backward", 2.5 * row.flops))
    for way, flops in ways:
        facts[f"{way}_tflops"] = {name: flops / us / 1e6 for name, us in facts[f"{way}_us"].items()}
        peers = [us for name, us in facts[f"{way}_us"].items() if name != "ours"]
        facts[f"{way}_ratio"] = min(peers) / facts[f"{way}_us"]["ours"] if peers else None
    if row.decodes:
        facts["cache_gbs"] = {name: row.cache_bytes / us / 1e3 for name, us in facts["forward_us"].items()}
    return facts


def told(facts, way, digits=0):
    if not facts.get(f"{way}_us"):
        return "–", float("nan")
    rates = facts["cache_gbs"] if way == "forward" and "cache_gbs" in facts else facts[f"{way}_tflops"]
    return ", ".join(f"{name} {x:.{digits}f}" for name, x in rates.items()), facts[f"{way}_ratio"] or float("nan")


def main():
    out, seconds = sys.argv[1], float(sys.argv[2])
    wanted = re.compile(sys.argv[3] if len(sys.argv) > 3 else "")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    begun = time.monotonic()
    print(f"{'b h/h_kv s x s_kv d/d_v':38} {'forward, TFLOP/s (decoding: GB/s)':>46} {'ratio':>6} {'backward, TFLOP/s':>46} {'ratio':>6}  worst error over the peers'")
    with open(out, "a") as record:
        for row in ROWS:
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
            peers = [facts["error"][name] for name in facts["error"] if name != "ours"]
            worst = max((x / min(peer[name] for peer in peers) for name, x in facts["error"]["ours"].items()), default=0.0) if peers else float("nan")
            (forward, ahead), (backward, behind) = told(facts, "forward"), told(facts, "backward")
            print(f"{row!s:38} {forward:>46} {ahead:6.3f} {backward:>46} {behind:6.3f}  {worst:.2f}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
