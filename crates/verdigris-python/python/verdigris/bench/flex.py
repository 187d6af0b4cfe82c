"""FlexAttention beside PyTorch's (suite ``flex``): masks and functions of scores that a seed draws, forward and backward.

Peers are ``torch.compile(flex_attention)`` by itself (``compile``) and with ``max-autotune-no-cudagraphs`` (``max_autotune``), with dynamo's memory
emptied in front of each, since behind eight graphs of one line of code a peer would be eager; on the CPU PyTorch's dense ``eager`` one. A forward row is a
call without gradients, a backward row the gradients of queries, keys and values from a forward call that was made before.

Every row is right before it is timed: for the first head of keys of the first batch and the last of the last, with the heads of queries that read them,
results and gradients are held against dense scores in f64. The norm of the difference over the norm is at most ``ROUNDOFFS`` of the type, or
``MOST_ERROR`` times that of the nearest other side.

Sides take turns as a program calls them, without CUDA graphs: what a captured call computes again, an eager one may have kept, and the other way round. A row
says how long the host takes to start a launch (``host_us``); where that is near the time of the launch, the host was measured. Queries, keys, values and the gradient that comes in rotate
through twice the L2; masks and tables are the same ones for all copies.

The work of a row counts the pairs that its mask leaves, 4 operations an element of a head forward and 10 backward. A function of scores that hides pairs
(``document_score``) counts those that it leaves, though nobody can know before scores are computed.
"""

import dataclasses
import math
import random
import time
import zlib
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch

from . import machine, ours, record, summary
from .layers import MOST_ERROR, TYPES, error
from .measure import CudaTimer, HostTimer, Side, _loop, interleave
from .problems import DRAWN, ListError
from .row import first_line
from .tensors import MOST_COPIES, cache_bytes, fill

SUITE = "flex"
DIRECTIONS = ("forward", "backward")
#: What a row may be compared with, and how PyTorch's function is made into it.
PEERS: Dict[str, Optional[dict]] = {"eager": None, "compile": {}, "max_autotune": {"mode": "max-autotune-no-cudagraphs"}}

#: Errors in roundoffs of the type that always pass: results, probabilities and gradients of scores are rounded once each.
ROUNDOFFS = 4.0
#: Pairs that the reference holds at a time, in f64.
MOST_PAIRS = 1 << 23


@dataclasses.dataclass(frozen=True)
class Flex:
    """One row. ``settings`` are what was drawn for its kind: cuts of documents, a prefix, steps."""

    kind: str
    b: int
    h: int
    kv_h: int
    s: int
    d: int
    dtype: str
    direction: str
    settings: Tuple[Tuple[str, object], ...] = ()

    @property
    def cls(self) -> str:
        return f"{DRAWN}{self.kind}"

    @property
    def name(self) -> str:
        told = "".join(f"-{name}{'+'.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in self.settings)
        return f"{self.kind}-b{self.b}h{self.h}of{self.kv_h}s{self.s}d{self.d}{told}-{self.direction}"

    @property
    def key(self) -> str:
        return f"{self.cls}/{self.dtype}/rows/{self.name}"

    def get(self, name: str):
        return dict(self.settings)[name]


# What is drawn: masks and functions of scores. A kind gives its settings by a generator, and its functions, with the tensors that they capture, on a device.


def _cuts(s: int, rng: random.Random) -> Dict[str, object]:
    """Lengths of documents that fill the positions: as many as are drawn, cut anywhere."""
    count = 2 + int(rng.random() * 15)
    cuts = sorted({1 + int(rng.random() * (s - 1)) for _ in range(count - 1)})
    return {"lengths": tuple(end - start for start, end in zip([0, *cuts], [*cuts, s]))}


def _documents_of(row: Flex, device) -> torch.Tensor:
    lengths = torch.tensor(row.get("lengths"), device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)


def _causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _documents(row, device):
    document = _documents_of(row, device)
    return None, lambda b, h, q_idx, kv_idx: (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)


def _prefix(row, device):
    prefix = row.get("prefix")
    return None, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < prefix)


def _steps(row, device):
    step, back = row.get("step"), row.get("back")
    return None, lambda b, h, q_idx, kv_idx: (q_idx // step >= kv_idx // step) & (q_idx // step - kv_idx // step <= back)


def _dilated(row, device):
    block, stride = row.get("block"), row.get("stride")
    return None, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx // block - kv_idx // block) % stride == 0)


def _relative(row, device):
    generator = torch.Generator(device=device).manual_seed(row.get("table"))
    table, last = torch.randn(row.h, 2 * row.s - 1, device=device, generator=generator), row.s - 1
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + last], _causal


def _capped(row, device):
    cap = row.get("cap")
    slopes = 2.0 ** (-8.0 * torch.arange(1, row.h + 1, device=device) / row.h)
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes[h] * (q_idx - kv_idx), _causal


def _document_score(row, device):
    document = _documents_of(row, device)
    return lambda score, b, h, q_idx, kv_idx: torch.where(document[q_idx] == document[kv_idx], score, -math.inf), None


#: By kind: what is drawn for it, of so many positions, and its `(score_mod, mask_mod)`.
KINDS: Dict[str, Tuple[Callable, Callable]] = {
    "documents": (_cuts, _documents),
    "prefix": (lambda s, rng: {"prefix": 1 + int(s * (0.1 + 0.6 * rng.random()))}, _prefix),
    "steps": (lambda s, rng: {"step": max(1, int(s * (0.01 + 0.04 * rng.random()))), "back": 1 + int(rng.random() * 6)}, _steps),
    "dilated": (lambda s, rng: {"block": 128 * (1 + int(rng.random() * 2)), "stride": 2 + int(rng.random() * 4)}, _dilated),
    "relative": (lambda s, rng: {"table": int(rng.random() * (1 << 16))}, _relative),
    "capped": (lambda s, rng: {"cap": 10 + int(rng.random() * 40)}, _capped),
    "document_score": (_cuts, _document_score),
}
#: Elements of a head.
HEADS = (64, 96, 128)


def draw(seed: int, count: int, is_small: bool = False, dtype: str = "bf16") -> List[Flex]:
    """The first rows that a seed draws, so that more of them begin with the same. Kinds take turns, and both directions of one follow each other."""
    made: List[Flex] = []
    kinds = list(KINDS)
    for place in range(-(-count // len(DIRECTIONS))):
        kind, turn = kinds[place % len(kinds)], place // len(kinds)
        # A generator a row: a kind that is new changes none of the others' draws.
        rng = random.Random(f"{seed} {SUITE} {kind} {turn}")
        any_of = lambda values: values[int(rng.random() * len(values))]  # noqa: B023
        d = HEADS[(kinds.index(kind) + turn + seed) % len(HEADS)]
        if is_small:
            b, h, s = 1 + int(rng.random() * 2), 2, 160 + int(rng.random() * 100)
        else:
            b, h, s = any_of(((1, 32, 8192), (2, 16, 8192), (4, 16, 4096), (2, 32, 4096), (1, 16, 16384)))
            # Not only what blocks of 128 fill.
            s -= 0 if rng.random() < 0.5 else int(rng.random() * 1000)
        kv_h = h if rng.random() < 0.5 else h // 2 if is_small else h // 4
        settings = tuple(sorted(KINDS[kind][0](s, rng).items()))
        made += [Flex(kind, b, h, kv_h, s, d, dtype, direction, settings) for direction in DIRECTIONS]
    return made[:count]


# The two sides and the reference.


class Operands:
    """A row's functions, its block mask, and copies of its tensors."""

    def __init__(self, row: Flex, device: torch.device):
        from torch.nn.attention.flex_attention import create_block_mask

        self.row, self.device = row, device
        self.score_mod, self.mask_mod = KINDS[row.kind][1](row, device)
        self.block_mask = None if self.mask_mod is None else create_block_mask(self.mask_mod, None, None, row.s, row.s, device=str(device))
        generator = torch.Generator(device=device).manual_seed(zlib.crc32(row.key.encode()))
        new = lambda heads: fill(row.b * heads * row.s * row.d, TYPES[row.dtype], device, generator).reshape(row.b, heads, row.s, row.d)
        self.first = {"q": new(row.h), "k": new(row.kv_h), "v": new(row.kv_h), "d_o": new(row.h)}

    def copy(self) -> Dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.first.items()}

    @property
    def bytes(self) -> int:
        """Operands once and results once; of a gradient what its formula reads and writes."""
        q, k = (self.first[name].nbytes for name in ("q", "k"))
        return 2 * q + 2 * k if self.row.direction == "forward" else 4 * q + 4 * k

    def prepared(self, attend: Callable, tensors: Dict[str, torch.Tensor]) -> Callable[[], List[torch.Tensor]]:
        """A launch of the row on one copy."""
        given = dict(score_mod=self.score_mod, block_mask=self.block_mask, enable_gqa=self.row.h != self.row.kv_h)
        if self.row.direction == "forward":

            def launch():
                with torch.no_grad():
                    return [attend(tensors["q"], tensors["k"], tensors["v"], **given)]

            return launch
        wanted = [tensors[name].detach().requires_grad_() for name in "qkv"]
        o, d_o = attend(*wanted, **given), tensors["d_o"]
        return lambda: list(torch.autograd.grad(o, wanted, d_o, retain_graph=True))

    def parts(self) -> List[Tuple[int, int]]:
        """The batches and heads of keys that are held against the reference."""
        return list(dict.fromkeys([(0, 0), (self.row.b - 1, self.row.kv_h - 1)]))

    def taken(self, found: Sequence[torch.Tensor], b: int, head: int) -> List[torch.Tensor]:
        """Of results those of a batch and a head of keys: `[heads, positions, elements]`."""
        group = self.row.h // self.row.kv_h
        return [x[b, head * group : (head + 1) * group] if x.shape[1] == self.row.h and place == 0 else x[b, head : head + 1] for place, x in enumerate(found)]

    def exact(self, b: int, head: int) -> List[torch.Tensor]:
        """The same in f64, of dense scores, as many queries at a time as `MOST_PAIRS` say."""
        row, group = self.row, self.row.h // self.row.kv_h
        heads = slice(head * group, (head + 1) * group)
        q, d_o = (self.first[name][b, heads].double() for name in ("q", "d_o"))
        k, v = (self.first[name][b, head].double().requires_grad_() for name in ("k", "v"))
        step = max(MOST_PAIRS // (group * row.s), 1)
        results, of_q, of_k, of_v = [], [], torch.zeros_like(k), torch.zeros_like(v)
        for first in range(0, row.s, step):
            rows = slice(first, min(first + step, row.s))
            own = q[:, rows].requires_grad_()
            scores, attended = self._scores(own @ k.mT * row.d**-0.5, b, heads, rows)
            if attended is not None:
                scores = torch.where(attended, scores, -math.inf)
            o = torch.softmax(scores, -1) @ v
            results.append(o.detach())
            if row.direction == "backward":
                d_q, d_k, d_v = torch.autograd.grad(o, (own, k, v), d_o[:, rows])
                of_q.append(d_q)
                of_k, of_v = of_k + d_k, of_v + d_v
        return [torch.cat(results, 1)] if row.direction == "forward" else [torch.cat(of_q, 1), of_k[None], of_v[None]]

    def _scores(self, scores: torch.Tensor, b: int, heads: slice, rows: slice):
        """What the functions say of `[heads, queries, keys]`; the second tells which pairs are attended, or is None."""
        device = self.device
        places = (
            torch.tensor(b, device=device),
            torch.arange(heads.start, heads.stop, device=device)[:, None, None],
            torch.arange(rows.start, rows.stop, device=device)[:, None],
            torch.arange(self.row.s, device=device),
        )
        made = scores if self.score_mod is None else self.score_mod(scores, *places)
        return made, None if self.mask_mod is None else self.mask_mod(*places)

    def pairs(self) -> int:
        """Pairs of a query and a key that are attended, of one head: of no kind they differ between heads."""
        found, step = 0, max(MOST_PAIRS // self.row.s, 1)
        for first in range(0, self.row.s, step):
            rows = slice(first, min(first + step, self.row.s))
            scores, attended = self._scores(torch.zeros(1, rows.stop - rows.start, self.row.s, device=self.device), 0, slice(0, 1), rows)
            shown = scores > -math.inf
            found += int((shown if attended is None else shown & attended).sum())
        return found


def _peer(name: str) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if PEERS[name] is None:
        return flex_attention
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False, **PEERS[name])


class _Called(CudaTimer):
    """Launches as a program makes them, and no graphs."""

    def __init__(self):
        super().__init__(0.0)

    def blocks(self, sides, launches, copies):
        return [_loop(side, count, copies) for side, count in zip(sides, launches)], False


def judged(exact: Sequence[Sequence[torch.Tensor]], found: Sequence[Sequence[torch.Tensor]]) -> List[float]:
    """Of each result the greatest error of its parts."""
    return [max(errors) for errors in zip(*(error(right, mine) for right, mine in zip(exact, found)))]


def wrong(errors: Dict[str, List[float]], name: str, dtype: str) -> Optional[str]:
    """Why a side is wrong, beside the others; None where it is right."""
    always = ROUNDOFFS * torch.finfo(TYPES[dtype]).eps / 2
    others = [theirs for side, theirs in errors.items() if side != name]
    for place, one in enumerate(errors[name]):
        nearest = min((theirs[place] for theirs in others), default=0.0)
        if not one <= max(always, MOST_ERROR * nearest if math.isfinite(nearest) else 0.0):
            return f"error {one:.3g} of result {place}, beyond {always:.3g} and {MOST_ERROR:g} times the nearest other's {nearest:.3g}"
    return None


def measure(row: Flex, device: torch.device, timer, door, peers: Sequence[str], seconds: float, limits: dict, row_seconds: float = math.inf) -> dict:
    """One row as the records have it. Whatever goes wrong stands in it; peers for whose compilation the row's time is spent are left out."""
    facts = {
        "key": row.key,
        "class": row.cls,
        "drawn": True,
        "name": row.name,
        "bar_kind": row.kind,
        "direction": row.direction,
        "dtype": row.dtype,
        "layout": "rows",
        "sizes": {"b": row.b, "h": row.h, "kv_h": row.kv_h, "s": row.s, "d": row.d, **dict(row.settings)},
        "remarks": [],
        "sides": {},
    }
    started = time.monotonic()
    try:
        _measure(row, device, timer, door, peers, seconds, limits, facts, started + row_seconds)
    except Exception as trouble:  # whatever a library raises, the next row is another matter
        facts["refused"] = first_line(trouble)
        if "CUDA error" in facts["refused"]:
            facts["fatal"] = True
    facts["took_s"] = round(time.monotonic() - started, 3)
    return facts


def _measure(row, device, timer, door, peers, seconds, limits, facts, until) -> None:
    import torch._functorch.config as functorch

    operands = Operands(row, device)
    facts["pairs"] = operands.pairs()
    facts["bytes"], facts["flops"] = operands.bytes, (4.0 if row.direction == "forward" else 10.0) * facts["pairs"] * row.d * row.b * row.h
    exact = [operands.exact(*part) for part in operands.parts()]
    copies = max(1, min(-(-2 * cache_bytes(device) // facts["bytes"]) + 1, MOST_COPIES))
    tensors = [operands.first, *(operands.copy() for _ in range(copies - 1))]
    launches, errors = {}, {}
    for name in ("instant", *peers):
        mine = facts["sides"].setdefault(name, {})
        if name != "instant" and time.monotonic() > until:
            mine["refused"] = "left out: the time of --row-seconds was spent"
            continue
        begun = time.monotonic()
        try:
            # A gradient is taken again and again from one forward call, whose tensors stay.
            with functorch.patch(donated_buffer=False):
                attend = door.functions().flex_attention if name == "instant" else _peer(name)
                if name == "instant":
                    operands.prepared(attend, tensors[0])()
                    door.settle()
                made = [operands.prepared(attend, one) for one in tensors]
                found = [operands.taken(made[0](), *part) for part in operands.parts()]
            errors[name] = judged(exact, found)
        except Exception as trouble:
            if device.type == "cuda":
                torch.cuda.synchronize()
            mine["refused"] = first_line(trouble)
            continue
        mine["error"], mine["prepared_s"] = max(errors[name]), round(time.monotonic() - begun, 3)
        launches[name] = made
    sides = []
    for name, made in launches.items():
        fault = wrong(errors, name, row.dtype)
        if fault:
            facts["sides"][name]["fault"] = fault
        else:
            sides.append(_side(name, made))
    for field in ("refused", "fault"):
        if facts["sides"]["instant"].get(field):
            facts[field] = facts["sides"]["instant"][field]
    if not sides:
        return
    timing = interleave(timer, sides, copies, seconds)
    facts.update(graph=timing.is_captured, copies=copies, timed_s=timing.seconds, blocks=len(timing.samples[0].us), rotated_bytes=copies * facts["bytes"])
    times = dict(zip((side.name for side in sides), timing.samples))
    for side in sides:
        us = times[side.name].median
        facts["sides"][side.name].update(us=us, spread=times[side.name].spread, tflop_per_s=facts["flops"] / us * 1e-6, host_us=side.host_us)
    mine = facts["sides"]["instant"]
    if device.type == "cuda" and mine.get("us") and mine["host_us"] > 0.8 * mine["us"]:
        facts["remarks"].append(f"the host takes {mine['host_us']:.0f} µs to start a launch of {mine['us']:.0f} µs")
    theirs = {name: samples for name, samples in times.items() if name != "instant"}
    best = min(theirs, key=lambda name: theirs[name].median, default=None)
    if best is not None:
        facts["best_peer"], facts["peer"], facts["peer_us"] = best, best, theirs[best].median
    if "instant" in times:
        facts["tflop_per_s"] = mine["tflop_per_s"]
        facts["of_ceiling"] = mine["tflop_per_s"] / limits["gemm_tflops"] if limits.get("gemm_tflops") else None
        if best is not None:
            ratios = theirs[best].over(times["instant"])
            facts["ratio_best_instant"], facts["ratio_spread_instant"] = ratios.median, ratios.spread
        for name in theirs:
            facts["sides"][name]["ratio"] = theirs[name].over(times["instant"]).median


def _side(name: str, launches: Sequence[Callable]) -> Side:
    held: List[object] = [None] * len(launches)

    def launch(i):
        held[i] = None
        held[i] = launches[i]()

    return Side(name, launch)


# The command.


def add_options(commands) -> None:
    """The words of the suite on the command line."""
    one = commands.add_parser(SUITE, help="flex_attention: masks and functions of scores that a seed draws, beside PyTorch's compiled one")
    one.add_argument("--rows", type=int, default=8, metavar="N", help="rows: kinds in turn, forward and backward of each (8; 14 see each kind once)")
    one.add_argument("--seed", type=int, help="the seed that rows are drawn by; default a new one")
    one.add_argument("--filter", default="", help="only rows of those whose key contains this")
    one.add_argument("--small", action="store_true", help="small sizes, to see that everything runs")
    one.add_argument("--dtype", default="bf16", choices=list(TYPES))
    one.add_argument("--dry-run", action="store_true", help="names the rows in their order, and measures nothing")
    one.add_argument("--seconds", type=float, default=1.0, help="time of measuring for a row, all sides together (1.0)")
    one.add_argument("--row-seconds", type=float, default=60.0, help="begins to compile no peer of a row behind so many seconds (60)")
    one.add_argument("--time-limit", type=float, default=7.5, help="begins no row that would end behind so many minutes, were it as long as the longest (7.5)")
    one.add_argument("--peers", type=lambda text: [part for part in text.split(",") if part], default=None, help=", ".join(PEERS) + ", or none")


def asked_peers(named: Optional[Sequence[str]], device: torch.device) -> List[str]:
    """Whom rows are compared with."""
    named = (["compile", "max_autotune"] if device.type == "cuda" else ["eager"]) if named is None else [name for name in named if name != "none"]
    for name in named:
        if name not in PEERS:
            raise ListError(f"--peers {name}: there are {', '.join(PEERS)}")
    return list(named)


def run(arguments, device: torch.device, seed: int, say: Callable[[str], None]) -> int:
    """Carries out the suite. Returns 1 if a result was wrong."""
    from .cli import record_path

    begun = time.monotonic()
    if arguments.rows < 1:
        raise ListError(f"--rows {arguments.rows}: at least 1")
    rows = [row for row in draw(seed, arguments.rows, arguments.small, arguments.dtype) if arguments.filter in row.key]
    if not rows:
        raise ListError("no row is left by --filter")
    peers = asked_peers(arguments.peers, device)
    say(f"seed of the drawn rows: {seed}")
    if arguments.dry_run:
        for row in rows:
            say(row.key)
        return 0
    door, started = ours.open_door(device), machine.now()
    timer = _Called() if device.type == "cuda" else HostTimer()
    path = record_path(arguments, device, started, SUITE)
    writer = record.Writer(path)
    limits = machine.ceilings(CudaTimer(0.0) if device.type == "cuda" else timer, device)
    head = {"suite": SUITE, "method": record.METHOD, "date": started, "machine": machine.describe(device)}
    head.update(software=machine.software(door.versions()), source=door.source(), ceilings=limits, clocks=machine.clocks(device))
    head["options"] = {"seconds": arguments.seconds, "row_seconds": arguments.row_seconds, "peers": peers, "small": arguments.small}
    head["drawn"] = {"seed": seed, "rows": len(rows)}
    writer.line("head", head)
    found, longest = [], 0.0
    for row in rows:
        if time.monotonic() - begun + longest > 60 * arguments.time_limit:
            say(f"{len(rows) - len(found)} rows were not measured: the time of --time-limit was spent")
            break
        facts = measure(row, device, timer, door, peers, arguments.seconds, limits, arguments.row_seconds)
        writer.line("row", facts)
        found.append(facts)
        longest = max(longest, facts["took_s"])
        say(line(facts))
        if facts.get("fatal"):
            say("the device answers no more")
            break
        if device.type == "cuda":
            torch.cuda.empty_cache()
    writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": len(found)})
    say("")
    say(table(found))
    if path is not None:
        say(f"\nrecord: {path}")
    return 1 if any(row.get("fault") for row in found) else 0


def line(facts: dict) -> str:
    """A row as soon as it is there: it may be the last one of a lease."""
    told = [f"{name} {side['us']:.1f} µs ± {100 * side['spread']:.1f} %" for name, side in facts["sides"].items() if side.get("us")]
    return f"{facts['key']} ({facts['took_s']:.0f} s): {', '.join(told) or facts.get('fault') or facts.get('refused') or 'no side was timed'}"


HEAD = ["row", "ours µs", "±", "TFLOP/s", *(f"{name} µs" for name in PEERS), "ratio", "error", "its"]
MEANS_HEAD = ["kind", "rows", "mean", "worst", "TFLOP/s"]


def lines(rows: Sequence[dict]) -> List[List[str]]:
    """A line for each row."""
    made, number = [], summary.number
    for row in rows:
        side = lambda name: row["sides"].get(name, {})  # noqa: B023
        ratio = "wrong" if row.get("fault") else "refused" if row.get("refused") else number(row.get("ratio_best_instant"))
        cells = [number(side("instant").get("us"), 4), summary.percent(side("instant").get("spread")), number(row.get("tflop_per_s"))]
        cells += [number(side(name).get("us"), 4) for name in PEERS]
        made.append([row["key"], *cells, ratio, number(side("instant").get("error")), number(side(row.get("best_peer")).get("error"))])
    return made


def mean_lines(rows: Sequence[dict]) -> List[List[str]]:
    """Geometric mean and worst ratio by kind and direction."""
    from .bars import geometric_mean

    found: Dict[str, List[dict]] = {}
    for row in rows:
        if row.get("ratio_best_instant"):
            found.setdefault(f"{row['bar_kind']} {row['direction']}", []).append(row)
    made = []
    for name, members in found.items():
        ratios, speeds = ([row[field] for row in members] for field in ("ratio_best_instant", "tflop_per_s"))
        made.append([name, str(len(members)), *map(summary.number, (geometric_mean(ratios), min(ratios), geometric_mean(speeds)))])
    return made


def table(rows: Sequence[dict]) -> str:
    """Rows, means and troubles, for a terminal."""
    return summary.rows_and_means(rows, (HEAD, lines(rows)), (MEANS_HEAD, mean_lines(rows)))
