"""FlexAttention beside PyTorch's: `python bench/flex.py OUT.jsonl SECONDS [SEED [FILTER]]`, with the Python package installed, on a GPU.

Problems are drawn: kinds of masks (documents, causal documents, a prefix, steps of blocks, a window with sinks) and score functions (a table of relative positions,
a soft cap, slopes), heads of 64, 96 and 128 elements, grouped or not, a few thousand positions, bf16. The seed is printed and recorded; without one it is that of the clock.
Peers are `torch.compile(flex_attention)` and the same with `max-autotune-no-cudagraphs`, compiled anew for each row, given `torch.compile`'s own `create_block_mask`.
The result and the gradients of queries are compared with those of PyTorch's composite in f32 of the last head before anything is timed; then sides take turns, in blocks of four calls, with inputs
that rotate through more than twice the L2, and medians of the rounds are kept with their quartiles. Columns are µs and the faster peer over ours.
"""

import json
import random
import statistics
import sys
import time

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import verdigris.torch as vt

DEVICE = torch.device("cuda", 0)
ROTATED_BYTES = 160e6
ROUNDS, CALLS = 15, 4

# Gradients of one result are taken several times.
torch._functorch.config.donated_buffer = False


def documents(chance, s):
    cuts = sorted(chance.sample(range(1, s), chance.randint(2, 11)))
    lengths = torch.tensor([b - a for a, b in zip([0, *cuts], [*cuts, s])])
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(DEVICE, torch.int32)
    return lambda b, h, q, kv: number[q] == number[kv]


def kinds():
    """Of each kind what draws its mask, and its score function beside (None: the scores as they are)."""

    def causal_documents(chance, s):
        same = documents(chance, s)
        return lambda b, h, q, kv: (q >= kv) & same(b, h, q, kv)

    def prefix(chance, s):
        length = chance.randint(s // 16, s // 2)
        return lambda b, h, q, kv: (kv < length) | (q >= kv)

    def steps(chance, s):
        step = chance.choice([256, 384, 512])
        return lambda b, h, q, kv: (q >= kv) & ((q // step - kv // step) % 3 == 0)

    def sinks_and_window(chance, s):
        window = chance.randint(256, 1500)
        return lambda b, h, q, kv: (q >= kv) & ((q - kv <= window) | (kv < 64))

    def table(chance, s, h):
        own = torch.randn(h, 2 * s, device=DEVICE)
        return lambda score, b, h, q, kv: score + own[h, q - kv + s]

    def capped(chance, s, h):
        cap = chance.choice([20.0, 30.0, 50.0])
        return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)

    def slopes(chance, s, h):
        own = torch.exp2(-8.0 * torch.arange(1, h + 1, device=DEVICE) / h)
        return lambda score, b, h, q, kv: score - own[h] * (q - kv).abs()

    causal = lambda chance, s: lambda b, h, q, kv: q >= kv
    return {
        "documents": (documents, None),
        "causal documents": (causal_documents, None),
        "prefix": (prefix, None),
        "steps": (steps, None),
        "sinks and window": (sinks_and_window, None),
        "soft cap": (causal, capped),
        "slopes": (causal, slopes),
        "table": (causal, table),
    }


def drawn(chance, kind):
    h_kv = chance.choice([4, 8, 16])
    h = h_kv * chance.choice([1, 1, 4] if h_kv < 16 else [1])
    most = 3500 if kind == "table" else 9000
    return dict(kind=kind, b=chance.choice([1, 2]), h=h, h_kv=h_kv, s=chance.randint(1500, most), d=chance.choice([64, 96, 128, 128]))


def exact(row, mask, score_mod, q, k, v, d_o):
    """Result and the gradient of the queries of the last head of the last batch, in f32."""
    b, h, s = row["b"] - 1, row["h"] - 1, row["s"]
    q, k, v = q[b, h].detach().float().requires_grad_(), k[b, -1].detach().float(), v[b, -1].detach().float()
    i, j = torch.arange(s, device=DEVICE)[:, None], torch.arange(s, device=DEVICE)[None]
    scores = q @ k.T * row["d"] ** -0.5
    at = (torch.tensor(b, device=DEVICE), torch.tensor(h, device=DEVICE), i, j)
    scores = scores if score_mod is None else score_mod(scores, *at)
    o = scores.masked_fill(~mask(*at), -torch.inf).softmax(-1).nan_to_num(0.0) @ v
    return o.detach(), torch.autograd.grad(o, q, d_o[b, h].float())[0]


def timed_us(sides):
    """Medians and quartiles of the rounds; sides in turns, each call with the next inputs."""
    times, turn = {name: [] for name in sides}, 0
    for call in sides.values():
        call(0)
    for _ in range(ROUNDS):
        for name, call in sides.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for i in range(CALLS):
                call(turn + i)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
        turn += CALLS
    return {name: [statistics.median(found), *statistics.quantiles(found, n=4)[::2]] for name, found in times.items()}


def measure(row, mask, score_mod):
    torch._dynamo.reset()
    b, h, h_kv, s, d = (row[name] for name in ("b", "h", "h_kv", "s", "d"))
    new = lambda heads: torch.randn(b, heads, s, d, device=DEVICE, dtype=torch.bfloat16)
    once_bytes = 2.0 * b * s * d * (h + 2 * h_kv)
    copies = [[x.requires_grad_() for x in (new(h), new(h_kv), new(h_kv))] for _ in range(max(1, min(16, int(ROTATED_BYTES / once_bytes) + 1)))]
    d_o = new(h)
    blocks = torch.compile(create_block_mask)(mask, None, None, s, s, device=DEVICE)
    row["sparsity"], row["copies"] = float(blocks.sparsity()), len(copies)
    options = dict(score_mod=score_mod, block_mask=blocks, enable_gqa=h != h_kv)
    makers = {
        "ours": vt.flex_attention,
        "compiled": torch.compile(flex_attention, dynamic=False),
        "autotuned": torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs"),
    }
    sides = {name: (lambda i, f=f: f(*copies[i % len(copies)], **options)) for name, f in makers.items()}
    truth = exact(row, mask, score_mod, *copies[0], d_o)
    row["error"] = {}
    for name, call in list(sides.items()):
        try:
            o = call(0)
            dq = torch.autograd.grad(o, copies[0][0], d_o)[0]
            row["error"][name] = [float((x[-1, -1].float() - t).norm() / t.norm()) for x, t in zip((o, dq), truth)]
        except Exception as refusal:  # Whatever a side throws is its refusal.
            row[f"{name}_refused"] = (str(refusal) or repr(refusal)).splitlines()[0][:200]
            del sides[name]
    with torch.no_grad():
        row["forward_us"] = timed_us(sides)
    results = {name: [call(i) for i in range(len(copies))] for name, call in sides.items()}
    backward = {
        name: (lambda i, o=o: torch.autograd.grad(o[i % len(copies)], copies[i % len(copies)], d_o, retain_graph=True)) for name, o in results.items()
    }
    row["backward_us"] = timed_us(backward)
    for way in ("forward", "backward"):
        peers = [us[0] for name, us in row[f"{way}_us"].items() if name != "ours"]
        row[f"{way}_ratio"] = min(peers) / row[f"{way}_us"]["ours"][0] if peers and "ours" in sides else None
    return row


def main():
    out, seconds = sys.argv[1], float(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else int(time.time())
    wanted = sys.argv[4] if len(sys.argv) > 4 else ""
    chance, begun = random.Random(seed), time.monotonic()
    torch.manual_seed(seed)
    print(f"seed {seed}, {torch.cuda.get_device_name(DEVICE)}, PyTorch {torch.__version__}")
    print(f"{'':46} {'ours, compiled, autotuned: forward µs':>40} {'ratio':>6} {'backward µs':>30} {'ratio':>6}  errors of ours")
    with open(out, "a") as record:
        while time.monotonic() - begun < seconds:
            for kind, (mask_of, score_of) in kinds().items():
                row = {**drawn(chance, kind), "seed": seed}
                mask = mask_of(chance, row["s"])
                score_mod = None if score_of is None else score_of(chance, row["s"], row["h"])
                if wanted not in kind or time.monotonic() - begun > seconds:
                    continue
                try:
                    row = measure(row, mask, score_mod)
                except Exception as fault:
                    row["fault"] = repr(fault)[:400]
                    print(row, flush=True)
                else:
                    told = lambda way: ", ".join(f"{us[0]:.0f}" for us in row[f"{way}_us"].values())
                    name = f"{kind}, {row['b']}x{row['h']}/{row['h_kv']} x {row['s']} x {row['d']}, {row['sparsity']:.0f} %"
                    ratios = [row[f"{way}_ratio"] or float("nan") for way in ("forward", "backward")]
                    errors = " ".join(f"{x:.1e}" for x in row["error"].get("ours", []))
                    print(f"{name:46} {told('forward'):>40} {ratios[0]:6.3f} {told('backward'):>30} {ratios[1]:6.3f}  {errors}", flush=True)
                record.write(json.dumps(row) + "\n")
                record.flush()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
