"""Engines of attention beside each other: `python bench/attention_engines.py OUT.jsonl [FILTER]`, with the Python package installed, on a GPU.

Each engine that takes a row is pinned, with every config of `attention.mma` that the row has; the one that the estimate chooses is marked. The last head of the last batch is held
against f64, and all results against the first engine's (relative norms of the difference), before they are timed. Calls are captured as CUDA graphs of about 4 ms, operands rotate past the L2, engines take turns, and
medians are kept.

Rows are layouts that TMA takes and layouts that it does not: rows that are 4 bytes apart, heads of which all share one, keys in pages of few.
"""

import dataclasses
import itertools
import json
import re
import statistics
import sys

import torch

import verdigris as vd

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
ENGINES = ("attention.forward", "attention.decode", "attention.simt")
ROTATED_BYTES = 160e6
BLOCK_MS = 4.0
BLOCKS = 7
MOST_ERROR = 2e-2
KNOBS = [{"rows": rows, "keys": keys} for rows, keys in ((128, 64), (64, 64), (128, 32), (64, 32))]
PARTS = [1, 2, 4, 8, 16, 32, 64, 128]


@dataclasses.dataclass(frozen=True)
class Row:
    b: int
    h: int
    kv_h: int
    s: int
    kv_s: int
    d: int
    causal: str = "none"
    #: Elements between rows beyond those of a head: TMA takes none that are not multiples of 8.
    gap: int = 0
    page: int = 0
    cap: float | None = None
    dtype: str = "bf16"

    def __str__(self):
        marks = [self.causal != "none" and self.causal, self.gap and f"gap{self.gap}", self.page and f"paged{self.page}", self.cap and "cap"]
        return " ".join([f"{self.b}", f"{self.h}/{self.kv_h}", f"{self.s}x{self.kv_s}", f"{self.d}", self.dtype, *filter(None, marks)])


ROWS = [
    *(Row(4, 16, 16, s, s, d, causal, gap) for s, d, causal, gap in itertools.product((512, 2048), (64, 128), ("none", "top_left"), (0, 2))),
    *(Row(1, 16, 16, 1024, 1024, d, "none", gap) for d, gap in itertools.product((80, 256), (0, 2))),
    *(Row(b, 32, 8, 1, 8192, 128, "none", gap) for b, gap in itertools.product((1, 8, 32), (0, 2))),
    *(Row(b, 32, 8, 1, 4096, 128, "none", 0, page) for b, page in itertools.product((1, 16), (4, 16))),
    Row(16, 16, 16, 197, 197, 64, "none", 0),
    Row(16, 16, 16, 197, 197, 64, "none", 2),
    Row(1, 8, 1, 4, 32768, 64, "none", 2),
    # Where tiles of 128 queries are mostly empty, or blocks few.
    *(Row(32, 16, 16, 64, 64, d, "none") for d in (64, 96, 128)),
    *(Row(32, 16, 16, s, kv_s, d, "none", 0, 0, 30.0) for (s, kv_s), d in itertools.product(((1, 40), (1, 8192), (17, 4000), (64, 64)), (64, 128))),
    Row(32, 16, 16, 130, 300, 128, "top_left"),
]


def strided(heads, positions, d, gap):
    """Of `[b, h, s, d]`: rows of a position have `gap` elements more than its heads."""
    row = heads * d + gap
    return (positions * row, d, row, 1)


def graph_of(row):
    g = vd.Graph("attention")
    q = g.tensor("q", row.dtype, (row.b, row.h, row.s, row.d), strided(row.h, row.s, row.d, row.gap))
    words = dict(causal=row.causal, soft_cap=row.cap)
    if row.page:
        of_sequence = -(-row.kv_s // row.page)
        kv = [(name, (row.b * of_sequence, row.kv_h, row.page, row.d), strided(row.kv_h, row.page, row.d, row.gap)) for name in "kv"]
        words.update(page_table=g.tensor("table", "i32", (row.b, of_sequence, 1, 1)), kv_lengths=g.tensor("lengths", "i32", (row.b, 1, 1, 1)))
    else:
        kv = [(name, (row.b, row.kv_h, row.kv_s, row.d), strided(row.kv_h, row.kv_s, row.d, row.gap)) for name in "kv"]
    k, v = (g.tensor(name, row.dtype, dims, strides) for name, dims, strides in kv)
    o, _ = g.attention(q, k, v, **words)
    g.store(o, "o", row.dtype)
    return g, [("q", (row.b, row.h, row.s, row.d), strided(row.h, row.s, row.d, row.gap)), *kv]


def operands_of(row, extents):
    one_bytes = sum(2 * dims[0] * strides[0] for _, dims, strides in extents)
    copies = []
    for _ in range(max(2, min(64, int(ROTATED_BYTES / one_bytes) + 1))):
        flat = {name: torch.randn(dims[0] * strides[0], device="cuda", dtype=TYPES[row.dtype]) for name, dims, strides in extents}
        tensors = {name: torch.as_strided(flat[name], dims, strides) for name, dims, strides in extents}
        tensors["o"] = torch.full((row.b, row.h, row.s, row.d), float("nan"), device="cuda", dtype=TYPES[row.dtype])
        if row.page:
            of_sequence = -(-row.kv_s // row.page)
            tensors["table"] = torch.randperm(row.b * of_sequence, device="cuda", dtype=torch.int32).view(row.b, of_sequence, 1, 1)
            tensors["lengths"] = torch.full((row.b, 1, 1, 1), row.kv_s, device="cuda", dtype=torch.int32)
        copies.append(tensors)
    return copies


def plans_of(row, g, device):
    """Plans by the name of engine and config, the chosen one's name and why others refuse."""
    plans, refused = {}, {}
    for engine in ENGINES:
        if engine == "attention.simt" and row.s * row.kv_s * row.b * row.h > 1 << 24:
            continue
        try:
            plans[engine] = device.plan(g, policy=vd.Policy(mode="pinned", engines=[engine]))
        except vd.Error as error:
            refused[engine] = str(error).splitlines()[0]
    try:
        plans["attention.mma"] = device.plan(g, policy=vd.Policy(mode="pinned", engines=["attention.mma"]))
    except vd.Error as error:
        refused["attention.mma"] = str(error).splitlines()[0]
    for knobs, parts in itertools.product(KNOBS, PARTS):
        knobs = {**knobs, "parts": parts}
        try:
            pinned = vd.Policy(mode="pinned", engines=[(None, "attention.mma", knobs)])
            plans["attention.mma " + ",".join(f"{k}={v}" for k, v in knobs.items())] = device.plan(g, policy=pinned)
        except vd.Error:
            pass  # not a config of this row's
    return plans, refused


def elapsed_ms(run, count):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def captured(plan, copies):
    stream = torch.cuda.Stream()
    plan.execute(copies[0], stream=stream)
    stream.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    plan.execute(copies[1], stream=stream)
    end.record(stream)
    end.synchronize()
    count = max(2, min(4 * len(copies), int(BLOCK_MS / max(1e-3, begin.elapsed_time(end)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            plan.execute(copies[i % len(copies)], stream=torch.cuda.current_stream())
    return graph, count


def exact(row, tensors):
    """The result of the last head of the last batch, in f64."""
    q, k, v = (tensors[name].double() for name in "qkv")
    if row.page:
        pages = tensors["table"][-1].flatten().long()
        k, v = (x[pages, -1].flatten(0, 1)[: row.kv_s] for x in (k, v))
    else:
        k, v = k[-1, -1], v[-1, -1]
    scores = q[-1, -1] @ k.T * row.d**-0.5
    if row.cap:
        scores = row.cap * (scores / row.cap).tanh()
    if row.causal == "top_left":
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


def measure(row, device):
    g, extents = graph_of(row)
    copies = operands_of(row, extents)
    plans, refused = plans_of(row, g, device)
    chosen = re.search(r"attention\.\w+", device.plan(g).explain())
    results, errors = {}, {}
    for name, plan in plans.items():
        copies[0]["o"].fill_(float("nan"))
        plan.execute(copies[0], stream=torch.cuda.current_stream())
        torch.cuda.synchronize()
        results[name] = copies[0]["o"].double()
    first, truth = results[next(iter(results))], exact(row, copies[0])
    for name, result in results.items():
        errors[name] = max(float((result - first).norm() / first.norm()), float((result[-1, -1] - truth).norm() / truth.norm()))
        if not errors[name] <= MOST_ERROR:
            raise SystemExit(f"{row}: {name} differs by {errors[name]:.2e} from f64, or from {next(iter(results))}")
    graphs = {name: captured(plan, copies) for name, plan in plans.items()}
    times = {name: [] for name in graphs}
    for _ in range(BLOCKS):
        for name, (graph, count) in graphs.items():
            times[name].append(elapsed_ms(graph.replay, 1) * 1e3 / count)
    found = {name: statistics.median(us) for name, us in times.items()}
    return dict(row=str(row), chosen=chosen and chosen.group(), us=found, error=errors, refused=refused)


def main():
    out, *rest = sys.argv[1:]
    device = vd.Device("cuda:0")
    with open(out, "a") as record:
        record.write(json.dumps(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, verdigris=vd.__version__)) + "\n")
        for row in ROWS:
            if rest and rest[0] not in str(row):
                continue
            found = measure(row, device)
            record.write(json.dumps(found) + "\n")
            record.flush()
            best = {}
            for name, us in sorted(found["us"].items(), key=lambda item: item[1]):
                best.setdefault(name.split()[0], (us, name))
            told = "  ".join(f"{name} {us:.1f}" + ("*" if engine == found["chosen"] else "") for engine, (us, name) in best.items())
            print(f"{found['row']:44} {told}  (unpinned mma {found['us'].get('attention.mma', float('nan')):.1f})", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
