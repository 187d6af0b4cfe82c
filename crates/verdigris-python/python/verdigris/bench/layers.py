"""What lies between the products: normalization, softmax and losses, pooling and pointwise functions (suites ``norm``, ``memory``, ``fused``).

A row is one function of ``torch.nn.functional`` in one direction, over the rows of ``bench/lists/layers.toml`` and rows drawn from its ``[[drawn]]``
tables. ``pytorch`` is eager mode, ``compile`` what ``torch.compile`` makes of the same call with ``max-autotune``; ours is the function of the same name in
``verdigris.torch``, planned by estimate. A backward row is the gradient of all tensors that a training step asks for, from a forward call that was made
before; of what is one step (``Op.is_step``) the forward call too. ``bytes`` are those that have to move: operands read once and results written once, of a backward row the incoming gradient, what its formula
reads, and the gradients.

All sides are captured and replayed, since host time is another matter (suites ``latency`` and ``nets``); operands rotate through twice the L2. Each
tensor is judged against the same function in f64: its error, the norm of the difference over the norm, is at most 1.25 times PyTorch's own.
"""

import dataclasses
import math
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch

from . import ahead, bars, drawn, machine, ours, record, summary
from .measure import CudaTimer, HostTimer, Side, interleave
from .problems import CHANNELS_FIRST, CHANNELS_LAST, DRAWN, ListError, _table
from .row import first_line
from .suites import lists_folder
from .tensors import MOST_COPIES, cache_bytes, fill
from .theirs import Quack, Theirs

SUITES = ("norm", "memory", "fused")
DIRECTIONS = ("forward", "backward")
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
LAYOUTS = (CHANNELS_LAST, CHANNELS_FIRST, "rows")
#: quack is asked where it is installed (`asked_peers`), for the functions that it has.
PEERS = ("pytorch", "compile", "quack")

functional = Theirs()

#: Our error that passes over PyTorch's, or over that of the exact result rounded once where it is larger; and the error in units of the result's roundoff that always does.
MOST_ERROR, ROUNDOFFS = 1.25, 1.0


@dataclasses.dataclass(frozen=True)
class Layer:
    """One row. ``settings`` are the function's own, such as the window of a pooling."""

    suite: str
    cls: str
    op: str
    shape: Tuple[int, ...]
    dtype: str
    layout: str
    direction: str
    settings: Tuple[Tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        extra = "".join(f"-{name}{value}" for name, value in self.settings)
        return f"{self.op}-{'x'.join(map(str, self.shape))}{extra}-{self.direction}"

    @property
    def key(self) -> str:
        return f"{self.cls}/{self.dtype}/{self.layout}/{self.name}"

    def get(self, name: str, default):
        return dict(self.settings).get(name, default)


@dataclasses.dataclass(frozen=True)
class Op:
    """A function of either side. ``call(of, row, tensors)`` is it, with ``of`` PyTorch's functions or ours; ``make`` gives the tensors beside ``x``.
    ``wants`` are those whose gradients a backward row asks for, ``keeps`` what its formula has to read (``y``: the result)."""

    call: Callable
    make: Callable = lambda row, new: {}
    wants: Tuple[str, ...] = ("x",)
    keeps: Tuple[str, ...] = ()
    #: Of what draws random numbers: `(where dropped, where kept, p)`, the two values that each element may have, in f64.
    either: Optional[Callable] = None
    #: Whether it has a backward row.
    has_backward: bool = True
    #: Whether a backward row is the forward call and the gradients together: where a side computes gradients with the result, neither is comparable alone.
    is_step: bool = False


def _affine(dims: Callable):
    def make(row, new):
        return {"w": 1 + 0.1 * new(dims(row)), "b": new(dims(row))}

    return make


def _last(row):
    return (row.shape[-1],)


def _channel(row):
    return (row.shape[1],)


def _batch_statistics(row, new):
    # Parameters and statistics are f32 beside narrow activations: what autocast leaves of a network.
    of_channels = {name: tensor.float() for name, tensor in _affine(_channel)(row, new).items()}
    return {**of_channels, "rm": torch.zeros_like(of_channels["b"]), "rv": torch.ones_like(of_channels["b"])}


def _batch_norm(of, row, t):
    return of.batch_norm(t["x"], t["rm"], t["rv"], t["w"], t["b"], True, 0.1, 1e-5)


def _norm_act(activation):
    def run(of, row, t):
        add = t.get("add")
        if of is not functional and hasattr(of, "batch_norm_act"):
            return of.batch_norm_act(t["x"], t["rm"], t["rv"], t["w"], t["b"], training=True, add=add, activation=activation)
        y = _batch_norm(of, row, t)
        return getattr(of, activation)(y if add is None else y + add)

    return run


def _labels(row, new):
    return {"labels": torch.randint(0, row.shape[-1], row.shape[:-1], device=new((1,)).device)}


def _gate(row, new):
    return {"gate": new(row.shape, row.layout)}


def _other(row, new):
    return {"other": new(row.shape, row.layout)}


def _state(new):
    return torch.tensor([11, 0, 0, 0], dtype=torch.int32, device=new((1,)).device)


def _dropped_behind(row, new):
    return {"b": new((row.shape[-1],)), "add": new(row.shape), "state": _state(new)}


def _layer_behind(row, new):
    wide = row.get("width", row.shape[-1])
    weight = new((row.shape[-1], wide)) / math.sqrt(row.shape[-1])
    return {"w": weight, "b": new((wide,)), "add": new((*row.shape[:-1], wide)), "state": _state(new)}


def _linear_loss(of, row, t):
    if hasattr(of, "linear_cross_entropy"):
        return of.linear_cross_entropy(t["x"], t["w"], t["labels"])
    return of.cross_entropy(of.linear(t["x"], t["w"]), t["labels"])


def _vocabulary(row, new):
    classes = row.get("classes", 32000)
    weight = new((classes, row.shape[-1])) / math.sqrt(row.shape[-1])
    return {"w": weight, "labels": torch.randint(0, classes, row.shape[:-1], device=weight.device)}


#: Of every dropout.
P = 0.1


def _either_of_dropout(row, t):
    return torch.zeros_like(t["x"]), t["x"] / (1 - P), P


def _either_behind(row, t):
    kept = functional.gelu(t["x"] @ t["w"] + t["b"] if "w" in t else t["x"] + t["b"]) / (1 - P)
    return t["add"], t["add"] + kept, P


def _block(row, new):
    """Weights of attention with the products around it, and angles of x's positions; of a step behind a cache the cache, full but for them."""
    heads, kv_heads, d = row.get("heads", 32), row.get("kv_heads", 8), row.get("d", 128)
    (batch, count, features), room = row.shape, row.get("room", 0)
    made = {"w": new(((heads + 2 * kv_heads) * d, features)) / math.sqrt(features), "last": new((features, heads * d)) / math.sqrt(heads * d)}
    device, dtype = made["w"].device, made["w"].dtype
    places = torch.arange(count, device=device, dtype=torch.float64) + (room - count if room else 0)
    angle = places[:, None] * 10000.0 ** (-torch.arange(d // 2, device=device, dtype=torch.float64) / (d // 2))
    made.update(cos=angle.cos().to(dtype)[None], sin=angle.sin().to(dtype)[None])
    if room:
        made.update(k=new((batch, room, kv_heads, d)), v=new((batch, room, kv_heads, d)))
        made["lengths"] = torch.full((batch,), room, dtype=torch.int32, device=device)
    return made


def _attention_block(of, row, t):
    beside = {"k_cache": t["k"], "v_cache": t["v"], "kv_lengths": t["lengths"]} if "k" in t else {}
    return of.attention_block(
        t["x"],
        t["w"],
        t["last"],
        heads=row.get("heads", 32),
        kv_heads=row.get("kv_heads", 8),
        residual=t["x"],
        rope=(t["cos"], t["sin"]),
        is_causal=True,
        **beside,
    )


def _resized(mode):
    return lambda of, row, t: of.interpolate(t["x"], scale_factor=row.get("factor", 2), mode=mode)


OPS: Dict[str, Op] = {
    "layer_norm": Op(lambda of, row, t: of.layer_norm(t["x"], row.shape[-1:], t["w"], t["b"]), _affine(_last), ("x", "w", "b"), ("x", "w")),
    "rms_norm": Op(lambda of, row, t: of.rms_norm(t["x"], row.shape[-1:], t["w"], 1e-6), lambda row, new: {"w": 1 + 0.1 * new(_last(row))}, ("x", "w"), ("x", "w")),
    "group_norm": Op(lambda of, row, t: of.group_norm(t["x"], row.get("groups", 32), t["w"], t["b"]), _affine(_channel), ("x", "w", "b"), ("x", "w")),
    "instance_norm": Op(lambda of, row, t: of.instance_norm(t["x"], None, None, t["w"], t["b"]), _affine(_channel), ("x", "w", "b"), ("x", "w")),
    "batch_norm": Op(_batch_norm, _batch_statistics, ("x", "w", "b"), ("x", "w")),
    "batch_norm_relu": Op(_norm_act("relu"), _batch_statistics, ("x", "w", "b"), ("x", "w", "y")),
    "batch_norm_silu": Op(_norm_act("silu"), _batch_statistics, ("x", "w", "b"), ("x", "w")),
    "batch_norm_hardswish": Op(_norm_act("hardswish"), _batch_statistics, ("x", "w", "b"), ("x", "w")),
    "batch_norm_add_relu": Op(
        _norm_act("relu"), lambda row, new: {**_batch_statistics(row, new), "add": new(row.shape, row.layout)}, ("x", "w", "b", "add"), ("x", "w", "y")
    ),
    "softmax": Op(lambda of, row, t: of.softmax(t["x"], -1), keeps=("y",)),
    "log_softmax": Op(lambda of, row, t: of.log_softmax(t["x"], -1), keeps=("y",)),
    "cross_entropy": Op(lambda of, row, t: of.cross_entropy(t["x"], t["labels"]), _labels, keeps=("x",)),
    "max_pool": Op(
        lambda of, row, t: of.max_pool2d(t["x"], row.get("window", 3), row.get("stride", 2), row.get("pad", 1)),
    ),
    "avg_pool": Op(lambda of, row, t: of.avg_pool2d(t["x"], row.get("window", 2), row.get("stride", 2), row.get("pad", 0))),
    "global_avg_pool": Op(lambda of, row, t: of.adaptive_avg_pool2d(t["x"], 1)),
    "relu": Op(lambda of, row, t: of.relu(t["x"]), keeps=("y",)),
    "gelu": Op(lambda of, row, t: of.gelu(t["x"]), keeps=("x",)),
    "silu": Op(lambda of, row, t: of.silu(t["x"]), keeps=("x",)),
    "hardswish": Op(lambda of, row, t: of.hardswish(t["x"]), keeps=("x",)),
    "linear_cross_entropy": Op(_linear_loss, _vocabulary, ("x", "w"), ("x", "w"), is_step=True),
    "nearest": Op(_resized("nearest")),
    "bilinear": Op(_resized("bilinear")),
    "bicubic": Op(_resized("bicubic")),
    "reflect_pad": Op(lambda of, row, t: of.pad(t["x"], (row.get("pad", 1),) * 4, "reflect")),
    "pixel_shuffle": Op(lambda of, row, t: of.pixel_shuffle(t["x"], row.get("factor", 2))),
    "local_response_norm": Op(lambda of, row, t: of.local_response_norm(t["x"], row.get("size", 5)), keeps=("x",)),
    "cumsum": Op(lambda of, row, t: of.cumsum(t["x"], row.get("dim", 1))),
    "sum_rows": Op(lambda of, row, t: of.sum(t["x"], (1,)), has_backward=False),
    "sum_columns": Op(lambda of, row, t: of.sum(t["x"], (0,)), has_backward=False),
    "sum_all": Op(lambda of, row, t: of.sum(t["x"], (0, 1)), has_backward=False),
    "transpose": Op(lambda of, row, t: of.transposed(t["x"]), has_backward=False),
    "change_format": Op(lambda of, row, t: of.in_format(t["x"], row.layout != CHANNELS_LAST), has_backward=False),
    "concat": Op(lambda of, row, t: of.concat(t["x"], t["other"]), _other, has_backward=False),
    "swiglu": Op(lambda of, row, t: of.swiglu(t["x"], t["gate"]), _gate, has_backward=False),
    "dropout": Op(lambda of, row, t: of.dropout(t["x"], P), either=_either_of_dropout, has_backward=False),
    "quantize": Op(lambda of, row, t: of.quantize(t["x"]), has_backward=False),
    "add_rms_norm": Op(
        lambda of, row, t: of.add_rms_norm(t["x"], t["add"], t["w"]),
        lambda row, new: {"add": new(row.shape), "w": 1 + 0.1 * new(_last(row))},
        has_backward=False,
    ),
    "rms_norm_quantize": Op(
        lambda of, row, t: of.rms_norm_quantize(t["x"], t["w"]), lambda row, new: {"w": 1 + 0.1 * new(_last(row))}, has_backward=False
    ),
    "bias_gelu_dropout_add": Op(
        lambda of, row, t: of.bias_gelu_dropout_add(t["x"], t["b"], t["add"], P, t["state"]),
        _dropped_behind,
        either=_either_behind,
        has_backward=False,
    ),
    "linear_gelu_dropout_add": Op(
        lambda of, row, t: of.linear_gelu_dropout_add(t["x"], t["w"], t["b"], t["add"], P, t["state"]),
        _layer_behind,
        either=_either_behind,
        has_backward=False,
    ),
    "attention_block": Op(_attention_block, _block, has_backward=False),
}


def _directions(group: dict, op: str) -> Sequence[str]:
    return [direction for direction in group.get("directions", DIRECTIONS) if direction == "forward" or OPS[op].has_backward]


def asked_peers(named: Optional[Sequence[str]]) -> Sequence[str]:
    """The peers that are named, or all that are installed."""
    return named or [name for name in PEERS if name != "quack" or Quack.is_installed()]


def load(path: Path, suite: str, seed: Optional[int]) -> List[Layer]:
    """The fixed rows of a suite, and those that a seed draws."""
    table, found = _table(path), {}
    for group in table.get("group", []):
        if group["suite"] != suite:
            continue
        for op in group["ops"]:
            if op not in OPS:
                raise ListError(f"{path.name}: op {op}: {', '.join(OPS)}")
            for shape in group["shapes"]:
                for dtype in group.get("dtypes", ["bf16"]):
                    for layout in group.get("layouts", ["rows"]):
                        for direction in _directions(group, op):
                            row = Layer(suite, group["class"], op, tuple(shape), dtype, layout, direction, tuple(sorted(group.get("settings", {}).items())))
                            found[row.key] = row
    if seed is not None:
        rng = random.Random(seed)
        for group in table.get("drawn", []):
            directions = [direction for direction in DIRECTIONS if any(direction in _directions(group, op) for op in group["ops"])]
            rows = [_draw(group, direction, rng) for _ in range(group["rows"]) for direction in directions]
            if group["suite"] == suite:
                found.update({row.key: row for row in rows})
    return list(found.values())


def _draw(group: dict, direction: str, rng: random.Random) -> Layer:
    get = lambda value: drawn.value_of(value, rng)
    for _ in range(drawn.MOST_DRAWS):
        ops = [op for op in group["ops"] if direction in _directions(group, op)]
        op, dtype, layout = get({"any": ops}), get({"any": group["dtypes"]}), get({"any": group["layouts"]})
        shape = tuple(get(extent) for extent in group["shape"])
        mib = math.prod(shape) * TYPES[dtype].itemsize / 2**20
        if group.get("least_mib", 0) <= mib <= group["most_mib"]:
            return Layer(group["suite"], f"{DRAWN}{group['class']}", op, shape, dtype, layout, direction, tuple(sorted(group.get("settings", {}).items())))
    raise ListError(f"drawn class {group['class']}: no row within its limits in {drawn.MOST_DRAWS} draws")


def identity(row: Layer) -> dict:
    """What is known of a row of the list before it is measured, as a record's row has it; of the bytes, those of x and of what is like it."""
    like_x = math.prod(row.shape) * TYPES[row.dtype].itemsize
    facts = {"key": row.key, "class": row.cls, "bar_kind": row.op, "direction": row.direction, "dtype": row.dtype, "layout": row.layout}
    return {**facts, "sizes": {"shape": list(row.shape), **dict(row.settings)}, "bytes": like_x * (2 if row.direction == "forward" else 3)}


class Operands:
    """Copies of a row's tensors, and calls of either side on them."""

    def __init__(self, row: Layer, device: torch.device):
        self.row, self.op, self.device = row, OPS[row.op], device
        self._generator = torch.Generator(device=device).manual_seed(zlib.crc32(row.key.encode()))
        self.first = {"x": self._new(row.shape, row.layout), **self.op.make(row, self._new)}

    def _new(self, shape, layout: str = "rows") -> torch.Tensor:
        values = fill(math.prod(shape), TYPES[self.row.dtype], self.device, self._generator).reshape(tuple(shape))
        return values.to(memory_format=torch.channels_last) if layout == CHANNELS_LAST and values.dim() == 4 else values

    def copy(self) -> Dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.first.items()}

    def forward(self, of, tensors: Dict[str, torch.Tensor]):
        return self.op.call(of, self.row, tensors)

    def prepared(self, of, call: Callable, tensors: Dict[str, torch.Tensor]) -> Callable[[], list]:
        """A launch of the row on one copy: its results as a list."""
        if self.row.direction == "forward":

            def launch():
                with torch.no_grad():
                    return _all(call(of, tensors))

            return launch
        wanted = [tensors[name].detach().requires_grad_() for name in self.op.wants]
        # What a call changes in place, such as running statistics, is its own.
        beside = {name: tensor.clone() for name, tensor in tensors.items() if name not in self.op.wants}
        y = call(of, {**beside, **dict(zip(self.op.wants, wanted))})
        dy = self._dy(y)
        if self.op.is_step:
            return lambda: list(torch.autograd.grad(call(of, {**beside, **dict(zip(self.op.wants, wanted))}), wanted, dy))
        return lambda: list(torch.autograd.grad(y, wanted, dy, retain_graph=True))

    def _dy(self, y: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(device=self.device).manual_seed(99)
        values = torch.randn(y.shape, device=self.device, generator=generator, dtype=torch.float32).to(y.dtype)
        return torch.empty_like(y).copy_(values)

    def exact(self) -> List[torch.Tensor]:
        wide = {name: t.double() if t.is_floating_point() else t for name, t in self.first.items()}
        inner = Operands.__new__(Operands)
        inner.row, inner.op, inner.device, inner.first = self.row, self.op, self.device, wide
        narrow = TYPES[self.row.dtype]
        dy = inner._dy
        # The gradient that comes in is the narrow one, as the sides have it.
        inner._dy = lambda y: dy(torch.empty(y.shape, dtype=narrow if self.row.op != "cross_entropy" else torch.float32, device=self.device)).double()
        return [tensor.double() for tensor in inner.prepared(functional, lambda of, t: inner.forward(of, t), wide)()]

    def bytes(self) -> int:
        """What has to move."""
        size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
        with torch.no_grad():
            y = self.forward(functional, self.copy())
        if self.row.direction == "forward":
            return size(self.first.values()) + size(_all(y))
        kept = [y if name == "y" else self.first[name] for name in self.op.keeps]
        return size([y]) + size(kept) + size(self.first[name] for name in self.op.wants)


def _all(y) -> list:
    return list(y) if isinstance(y, (list, tuple)) else [y]


def seen(row: Layer, exact: "Operands", found: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Results as the judge has them. An element that may have been dropped stands for the value that it has when it is kept, as far off as it is from the
    nearer of its two values; where another share than `p` was dropped, nothing is right."""
    either = OPS[row.op].either
    if either is None:
        return list(found)
    dropped, kept, p = either(row, {name: t.double() if t.is_floating_point() else t for name, t in exact.first.items()})
    (y,) = (value.double() for value in found)
    if y.shape != kept.shape:
        return [y]
    is_dropped = (y - dropped).abs() < (y - kept).abs()
    told = (dropped - kept).abs() > 2**-4 * kept.abs()
    share = float(is_dropped[told].double().mean()) if bool(told.any()) else p
    if abs(share - p) > 6 * math.sqrt(p * (1 - p) / max(int(told.sum()), 1)):
        return [torch.full_like(y, math.inf)]
    return [kept + torch.where(is_dropped, y - dropped, y - kept)]


def error(exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> List[float]:
    """Of each tensor the norm of the difference over the norm; infinite where it is no number or of another shape."""
    errors = []
    for right, value in zip(exact, found):
        if right.shape != value.shape:
            errors.append(math.inf)
            continue
        off = float((value.double() - right).norm()) / max(float(right.norm()), 1e-30)
        errors.append(off if math.isfinite(off) else math.inf)
    return errors


def allowed(peers: Sequence[float], exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor], least: float) -> List[float]:
    """The most error of each tensor. Where a tensor is much of one value, as the gradient of a mean of losses is, one rounding costs up to a whole roundoff, and who rounds
    twice may by chance be nearer."""
    rounded = error(exact, [right.to(value.dtype) for right, value in zip(exact, found)])
    return [max(MOST_ERROR * max(peer, once), least) for peer, once in zip(peers, rounded)]


def _compiled(operands: Operands) -> Callable:
    # Rows share a line of code, and of one line dynamo compiles eight graphs; what comes behind them would be eager.
    torch._dynamo.reset()
    call = torch.compile(lambda t: operands.forward(functional, t), mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda of, tensors: call(tensors)


def _sampled(rows: List[Layer], count: Optional[int]) -> List[Layer]:
    """So many of the rows, the same at every call, in their order."""
    if count is None or count >= len(rows):
        return rows
    if count < 1:
        raise ListError(f"--sample {count}: at least 1")
    return [rows[place] for place in sorted(random.Random(f"{count} of {len(rows)}").sample(range(len(rows)), count))]


def _compile(row: Layer, device: torch.device) -> None:
    """Leaves in Inductor's cache what the peer `compile` needs of a row."""
    try:
        operands = Operands(row, device)
        operands.prepared(functional, _compiled(operands), operands.first)()
    except Exception as trouble:  # the row itself says so when it is measured
        print(f"{row.key}: {first_line(trouble)}", file=sys.stderr)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _selection(arguments, device: torch.device, seed: Optional[int]) -> List[str]:
    """The command line that selects the same rows."""
    command = [arguments.command, "--filter", arguments.filter, "--device", str(device)]
    command += [] if arguments.sample is None else ["--sample", str(arguments.sample)]
    command += ["--class", ",".join(arguments.classes)] if arguments.classes else []
    command += ["--only-drawn"] if arguments.only_drawn else []
    return command + (["--no-drawn"] if seed is None else ["--seed", str(seed)])


def measure(row: Layer, device: torch.device, timer, door, peers: Sequence[str], seconds: float, limits: dict) -> dict:
    """One row as the records have it. Whatever goes wrong stands in it."""
    facts = {
        "key": row.key,
        "class": row.cls,
        **({"drawn": True} if row.cls.startswith(DRAWN) else {}),
        "name": row.name,
        "bar_kind": row.op,
        "direction": row.direction,
        "dtype": row.dtype,
        "layout": row.layout,
        "sizes": {"shape": list(row.shape), **dict(row.settings)},
        "remarks": [],
        "sides": {},
    }
    started = time.monotonic()
    try:
        _measure(row, device, timer, door, peers, seconds, limits, facts)
    except Exception as trouble:  # whatever a library raises, the next row is another matter
        facts["refused"] = first_line(trouble)
        if "CUDA error" in facts["refused"]:
            facts["fatal"] = True
    facts["took_s"] = round(time.monotonic() - started, 3)
    return facts


def _measure(row: Layer, device, timer, door, peers, seconds, limits, facts) -> None:
    operands = Operands(row, device)
    facts["bytes"], facts["flops"] = operands.bytes(), 0.0
    exact = seen(row, operands, operands.exact())
    calls = {
        "instant": (door.functions(), operands.forward),
        "pytorch": (functional, operands.forward),
        "compile": (functional, None),
        "quack": (Quack(), operands.forward),
    }
    asked = ["pytorch", "instant", *(name for name in peers if name != "pytorch")]
    held_bytes = 2 * facts["bytes"] * len(asked)
    copies = max(1, min(-(-2 * cache_bytes(device) // facts["bytes"]) + 1, MOST_COPIES, (24 << 30) // held_bytes or 1))
    stream = getattr(timer, "stream", None)
    tensors = [operands.first, *(operands.copy() for _ in range(copies - 1))]
    sides, errors, least = [], {}, ROUNDOFFS * torch.finfo(TYPES[row.dtype]).eps / 4
    for name in asked:
        mine = facts["sides"].setdefault(name, {})
        try:
            namespace, call = calls[name]
            call = call or _compiled(operands)
            # The backward pass runs on the stream of the forward pass, and that has to be the one that is captured.
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if name == "instant":
                    operands.prepared(namespace, call, tensors[0])()
                    door.settle()
                launches = [operands.prepared(namespace, call, one) for one in tensors]
                found = seen(row, operands, launches[0]())
                errors[name] = error(exact, found)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        except Exception as trouble:
            if device.type == "cuda":
                torch.cuda.synchronize()
            mine["refused"] = first_line(trouble)
            continue
        mine["error"] = max(errors[name])
        most_allowed = allowed(errors["pytorch"], exact, found, least) if "pytorch" in errors else []
        wrong = [f"{one:.3g}" for one, most in zip(errors[name], most_allowed) if not one <= most]
        if name != "pytorch" and wrong:
            mine["fault"] = f"errors {', '.join(wrong)} beyond {MOST_ERROR:g} times PyTorch's {', '.join(f'{one:.3g}' for one in errors['pytorch'])}"
            continue
        sides.append(_side(name, launches))
    for field in ("refused", "fault"):
        if facts["sides"]["instant"].get(field):
            facts[field] = facts["sides"]["instant"][field]
    if not sides:
        return
    timing = interleave(timer, sides, copies, seconds)
    if timer.trouble:
        facts["remarks"].append(timer.trouble)
    facts.update(graph=timing.is_captured, copies=copies, timed_s=timing.seconds, blocks=len(timing.samples[0].us), rotated_bytes=copies * facts["bytes"])
    times = dict(zip((side.name for side in sides), timing.samples))
    for name, samples in times.items():
        facts["sides"][name].update(us=samples.median, spread=samples.spread, gb_per_s=facts["bytes"] / samples.median * 1e-3)
    theirs = {name: samples for name, samples in times.items() if name != "instant"}
    best = min(theirs, key=lambda name: theirs[name].median, default=None)
    if best is not None:
        facts["best_peer"], facts["peer"] = best, "pytorch"
        facts["peer_us"] = times["pytorch"].median if "pytorch" in times else None
    if "instant" in times:
        us = times["instant"].median
        facts["gb_per_s"] = facts["bytes"] / us * 1e-3
        facts["of_copy"] = facts["gb_per_s"] / limits["copy_gb_per_s"] if limits else None
        if best is not None:
            ratios = theirs[best].over(times["instant"])
            facts["ratio_best_instant"], facts["ratio_spread_instant"] = ratios.median, ratios.spread
            facts["ratio_instant"] = times["pytorch"].over(times["instant"]).median if "pytorch" in times else None


def _side(name: str, launches: Sequence[Callable]) -> Side:
    held = [None] * len(launches)

    def launch(i):
        held[i] = None
        held[i] = launches[i]()

    return Side(name, launch, True)


def run(arguments, device: torch.device, seed: Optional[int], say: Callable[[str], None]) -> int:
    """Carries out a suite. Returns 1 if a result was wrong."""
    from .cli import record_path

    folder = lists_folder()
    if folder is None:
        raise ListError("no bench/lists in this folder or above it: run in a checkout")
    rows = [row for row in load(folder / "layers.toml", arguments.command, seed) if arguments.filter in row.key]
    rows = [row for row in rows if not (arguments.only_drawn and not row.cls.startswith(DRAWN))]
    if arguments.classes:
        rows = [row for row in rows if row.cls in arguments.classes or row.op in arguments.classes]
    rows = _sampled(rows, arguments.sample)
    if not rows:
        raise ListError("no row is left by --filter and --class")
    if arguments.dry_run:
        for row in rows:
            say(row.key)
        return 0
    if arguments.compile_share:
        for row in ahead.share(rows, arguments.compile_share):
            _compile(row, device)
        return 0
    if arguments.workers and "compile" in asked_peers(arguments.peers):
        ahead.compile_in(min(arguments.workers, len(rows)), _selection(arguments, device, seed), say)
    torch.backends.cudnn.benchmark = True
    door, started = ours.open_door(device), machine.now()
    timer = CudaTimer(math.inf) if device.type == "cuda" else HostTimer()
    path = record_path(arguments, device, started, arguments.command)
    writer = record.Writer(path)
    # A captured copy is another than the one that users' calls make, and half as fast.
    limits = machine.ceilings(CudaTimer(0.0) if device.type == "cuda" else timer, device)
    head = {"suite": arguments.command, "method": record.METHOD, "date": started, "machine": machine.describe(device)}
    head.update(software=machine.software(door.versions()), source=door.source(), ceilings=limits, clocks=machine.clocks(device))
    peers = asked_peers(arguments.peers)
    head["options"] = {"seconds": arguments.seconds, "peers": list(peers)}
    head["drawn"] = None if seed is None else {"seed": seed, "rows": sum(1 for row in rows if row.cls.startswith(DRAWN))}
    writer.line("head", head)
    if seed is not None:
        say(f"seed of the drawn rows: {seed}")
    found, begun = [], time.monotonic()
    for row in rows:
        if arguments.time_limit is not None and time.monotonic() - begun > 60 * arguments.time_limit:
            say(f"{len(rows) - len(found)} rows were not measured: the time of --time-limit was spent")
            break
        facts = measure(row, device, timer, door, peers, arguments.seconds, limits)
        writer.line("row", facts)
        found.append(facts)
        if facts.get("fatal"):
            say("the device answers no more")
            break
        if device.type == "cuda":
            torch.cuda.empty_cache()
    writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": len(found)})
    say(table(found))
    if path is not None:
        say(f"\nrecord: {path}")
    return 1 if any(row.get("fault") for row in found) else 0


HEAD = ["row", "MB", "ours µs", "GB/s", "of copy", "pytorch µs", "compile µs", "quack µs", "ratio"]
MEANS_HEAD = ["op", "rows", "mean", "worst", "of copy"]


def lines(rows: Sequence[dict]) -> List[List[str]]:
    """A line for each row."""
    made, number = [], summary.number
    for row in rows:
        side = lambda name: row["sides"].get(name, {})
        cells = [number(row.get("gb_per_s"), 4), summary.percent(row.get("of_copy"))]
        cells += [number(side(name).get("us"), 4) for name in PEERS]
        ratio = "wrong" if row.get("fault") else "refused" if row.get("refused") else number(row.get("ratio_best_instant"))
        made.append([row["key"], number(row.get("bytes", 0) / 1e6, 3), number(side("instant").get("us"), 4), *cells, ratio])
    return made


def mean_lines(rows: Sequence[dict]) -> List[List[str]]:
    """Geometric mean, worst row and share of the copy bandwidth, by op, direction and layout."""
    found: Dict[str, List[dict]] = {}
    for row in rows:
        if row.get("ratio_best_instant"):
            layout = "" if row["layout"] == "rows" else f" {row['layout']}"
            found.setdefault(f"{row['bar_kind']} {row['direction']}{layout}", []).append(row)
    made = []
    for name, members in found.items():
        ratios, shares = ([row[field] for row in members if row.get(field)] for field in ("ratio_best_instant", "of_copy"))
        cells = [summary.number(bars.geometric_mean(ratios)), summary.number(min(ratios)), summary.percent(bars.geometric_mean(shares) if shares else None)]
        made.append([name, str(len(members)), *cells])
    return made


def table(rows: Sequence[dict]) -> str:
    """Rows, means and troubles, for a terminal."""
    return summary.rows_and_means(rows, (HEAD, lines(rows)), (MEANS_HEAD, mean_lines(rows)))
