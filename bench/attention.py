"""Attention beside PyTorch's: `python bench/attention.py OUT.jsonl SECONDS`, with the Python package installed, on a GPU.

Sides are `verdigris.torch.functional.scaled_dot_product_attention`, planned by estimate, and `torch.nn.functional.scaled_dot_product_attention` with cuDNN
and with FlashAttention-2. One head of the last batch is held against f64 (relative norm of the difference, of the result and of each gradient) before
anything is timed; then all sides take turns, in eager calls of about 8 ms a block, and medians are kept. A causal row counts half of the products, a gradient
two and a half times those of its forward call.
"""

import dataclasses
import json
import statistics
import sys
import time

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import verdigris.torch.functional as ours

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
BLOCK_MS = 8.0


@dataclasses.dataclass(frozen=True)
class Row:
    b: int
    h: int
    h_kv: int
    s: int
    s_kv: int
    d: int
    d_v: int
    causal: bool
    dtype: str = "bf16"

    @property
    def flops(self) -> float:
        return 2.0 * self.b * self.h * self.s * self.s_kv * (self.d + self.d_v) * (0.5 if self.causal else 1.0)


ROWS = [
    Row(4, 16, 16, 4096, 4096, 128, 128, True),
    Row(4, 16, 16, 4096, 4096, 128, 128, False),
    Row(4, 32, 32, 4096, 4096, 64, 64, True),
    Row(4, 32, 32, 4096, 4096, 64, 64, False),
    Row(1, 16, 16, 16384, 16384, 128, 128, True),
    Row(1, 16, 16, 16384, 16384, 128, 128, False),
    Row(2, 32, 8, 8192, 8192, 128, 128, True),
    Row(16, 16, 16, 1024, 1024, 128, 128, True),
    Row(4, 16, 16, 4096, 4096, 128, 128, True, "f16"),
    Row(32, 16, 16, 512, 512, 64, 64, False),
    Row(64, 12, 12, 197, 197, 64, 64, False),
    Row(4, 16, 16, 2048, 2048, 96, 96, True),
    Row(4, 16, 16, 2048, 2048, 80, 80, False),
    Row(4, 16, 16, 2048, 2048, 72, 72, False),
    Row(8, 8, 8, 777, 1234, 64, 64, False),
    Row(2, 8, 8, 8192, 8192, 256, 256, False),
    Row(2, 8, 8, 8192, 8192, 256, 256, True),
    Row(2, 16, 16, 4096, 4096, 192, 128, True),
]


def _elapsed_ms(call, count):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def timed_us(calls, blocks):
    """Medians of all sides, which take turns."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    counts = {name: max(1, min(50, int(BLOCK_MS / (_elapsed_ms(call, 2) / 2 + 1e-3)))) for name, call in calls.items()}
    found = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            found[name].append(_elapsed_ms(call, counts[name]) * 1e3 / counts[name])
    return {name: statistics.median(times) for name, times in found.items()}


def exact(row, q, k, v, d_o):
    """Result and gradients of the last head of the last batch, in f64."""
    kv_head = (row.h - 1) * row.h_kv // row.h
    own = [x.detach()[-1, head].double().requires_grad_() for x, head in ((q, row.h - 1), (k, kv_head), (v, kv_head))]
    scores = own[0] @ own[1].T * row.d**-0.5
    if row.causal:
        scores = scores.masked_fill(torch.ones(row.s, row.s_kv, device=q.device, dtype=torch.bool).triu(1), float("-inf"))
    result = scores.softmax(-1) @ own[2]
    return [result.detach(), *torch.autograd.grad(result, own, d_o[-1, -1].double())]


def errors(row, side, q, k, v, d_o, truth):
    result = side()
    found = [result.detach(), *torch.autograd.grad(result, (q, k, v), d_o)]
    # Of grouped heads the gradients of keys and values are sums over a group.
    names = ("o", "dq", "dk", "dv") if row.h == row.h_kv else ("o", "dq")
    return {name: float((x[-1, -1].double() - t).norm() / t.norm()) for name, x, t in zip(names, found, truth)}


def measure(row, device):
    facts = dataclasses.asdict(row)
    new = lambda *dims: torch.randn(*dims, device=device, dtype=TYPES[row.dtype])
    q, k, v = (x.requires_grad_() for x in (new(row.b, row.h, row.s, row.d), new(row.b, row.h_kv, row.s_kv, row.d), new(row.b, row.h_kv, row.s_kv, row.d_v)))
    d_o = new(row.b, row.h, row.s, row.d_v)
    words = dict(is_causal=row.causal, enable_gqa=row.h != row.h_kv)

    def peer(backend):
        def call():
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, **words)

        return call

    sides = {"ours": lambda: ours.scaled_dot_product_attention(q, k, v, **words)}
    for name, backend in PEERS.items():
        try:
            peer(backend)()
            sides[name] = peer(backend)
        except RuntimeError as refusal:
            facts[f"{name}_refused"] = str(refusal).splitlines()[0][:80]
    truth = exact(row, q, k, v, d_o)
    facts["error"] = {name: errors(row, side, q, k, v, d_o, truth) for name, side in sides.items()}
    del truth
    torch.cuda.empty_cache()
    with torch.no_grad():
        facts["forward_us"] = timed_us(sides, 8)
    results = {name: side() for name, side in sides.items()}
    gradients = {name: (lambda y=y: torch.autograd.grad(y, (q, k, v), d_o, retain_graph=True)) for name, y in results.items()}
    facts["backward_us"] = timed_us(gradients, 5)
    for direction, flops in (("forward", row.flops), ("backward", 2.5 * row.flops)):
        facts[f"{direction}_tflops"] = {name: flops / us / 1e6 for name, us in facts[f"{direction}_us"].items()}
        peers = [us for name, us in facts[f"{direction}_us"].items() if name != "ours"]
        facts[f"{direction}_ratio"] = min(peers) / facts[f"{direction}_us"]["ours"] if peers else None
    return facts


def main():
    out, seconds = sys.argv[1], float(sys.argv[2])
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    begun = time.monotonic()
    print(f"{'b h/h_kv s x s_kv d/d_v':34} {'forward, TFLOP/s':>36} {'ratio':>6} {'backward, TFLOP/s':>36} {'ratio':>6}  worst error over the peers'")
    with open(out, "a") as record:
        for row in ROWS:
            if time.monotonic() - begun > seconds:
                break
            facts = measure(row, device)
            record.write(json.dumps(facts) + "\n")
            record.flush()
            speeds = [", ".join(f"{name} {x:.0f}" for name, x in facts[f"{way}_tflops"].items()) for way in ("forward", "backward")]
            peers = [facts["error"][name] for name in facts["error"] if name != "ours"]
            worst = max((x / min(peer[name] for peer in peers) for name, x in facts["error"]["ours"].items()), default=0.0) if peers else float("nan")
            name = f"{row.b} {row.h}/{row.h_kv} {row.s}x{row.s_kv} {row.d}/{row.d_v} {row.dtype}{' causal' if row.causal else ''}"
            ratios = [facts[f"{way}_ratio"] or float("nan") for way in ("forward", "backward")]
            print(f"{name:34} {speeds[0]:>36} {ratios[0]:6.3f} {speeds[1]:>36} {ratios[1]:6.3f}  {worst:.2f}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
