"""Networks of Hugging Face's transformers, plain and with our layers: wall, host and device time, memory, errors against fp32.

Both sides are one network with the same random weights of bf16: plain it attends by ``attn_implementation="sdpa"``, that is PyTorch's fastest backend, and ours
by ``"verdigris"``, converted by ``verdigris.torch.convert``. A row is one network, one use of it and one way to run it: ``eager`` calls the step, ``graph``
replays it as one CUDA graph. Nothing is compiled.

- ``prefill`` fills a new ``DynamicCache``. ``decode`` puts one token into the last place of a ``StaticCache``, the cache that a graph can hold, which is then
  set back; its keys and values are random, and alike on both sides. ``training`` is the loss by labels and all gradients, without an optimizer; with the cache that transformers
  makes by default, since without one it asks the device for packed sequences, and in a graph takes them for given and makes masks.
- ``wall_ms``, ``host_ms``, ``device_ms`` are those of the suite ``nets``; ratios are plain over ours.
- ``peak_mib``: what a side holds before a step (parameters, cache, whatever was packed), and the most that the step took beside it; of a graph, while it was captured.
- ``error``: of the logits, or of all gradients together, as the norm of the difference from the same network in fp32 over the norm. A fault is an error above
  1.25 of plain's. ``worst_gradient`` names the parameter whose gradient has the greatest ratio of errors.

transformers is not needed by the package: where it is absent, every row says so.
"""

import contextlib
import copy
import dataclasses
import gc
import inspect
import math
from pathlib import Path
from typing import Callable, Dict, List, Optional

import torch

from . import machine, nets, ours, record
from .peers import Refused
from .problems import ListError
from .row import first_line

#: The networks, and how large they are: as they are measured, and small enough for a test on a CPU.
LLAMA = {
    "full": dict(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=32000,
        max_position_embeddings=4096,
    ),
    "tiny": dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=128,
        max_position_embeddings=64,
    ),
}
VIT = {
    "full": dict(num_labels=1000),
    "tiny": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=16, num_labels=10
    ),
}
SIZES = tuple(LLAMA)

#: The greatest error that is no fault, of plain's.
MOST_ERROR = 1.25


@dataclasses.dataclass(frozen=True)
class Use:
    """What a network is asked for: so many sequences of so many positions, or images."""

    net: str
    what: str
    batch: int
    positions: int = 0

    @property
    def name(self) -> str:
        return f"{self.net}/{self.what}_{self.batch}" + (f"x{self.positions}" if self.positions else "")

    def small(self) -> "Use":
        """The same for networks of the size ``tiny``."""
        return dataclasses.replace(self, batch=min(self.batch, 2 if self.positions else 8), positions=min(self.positions, 24))


USES = (
    Use("llama_1b", "prefill", 1, 2048),
    Use("llama_1b", "prefill", 4, 2048),
    Use("llama_1b", "decode", 8, 2048),
    Use("llama_1b", "training", 4, 1024),
    Use("vit_b_16", "inference", 32),
    Use("vit_b_16", "training", 32),
)
NETS, WAYS = tuple(dict.fromkeys(use.net for use in USES)), ("eager", "graph")
WHATS = tuple(dict.fromkeys(use.what for use in USES))


def make(net: str, size: str, device: torch.device) -> torch.nn.Module:
    """A network with weights drawn from a fixed seed, on the device: on a CPU a billion of them take a quarter of a minute."""
    try:
        import transformers
    except ImportError as error:
        raise Refused(f"transformers cannot be imported: {error}") from error
    torch.manual_seed(7)
    with device:
        if net == "llama_1b":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA[size], attn_implementation="sdpa"))
        return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT[size], attn_implementation="sdpa"))


def side(name: str, base: torch.nn.Module, door) -> torch.nn.Module:
    """A copy of the network as one side calls it: ``plain``, ``ours``, or ``exact`` in fp32."""
    network = copy.deepcopy(base)
    if name == "exact":
        return network.float()
    if name == "ours":
        network.set_attn_implementation(door.attention_of_transformers())
        network = door.convert(network)
    return network


class Step(nets.Step):
    """One side: a network and what is called again and again."""

    def __init__(self, network: torch.nn.Module, use: Use):
        self.is_training = use.what == "training"
        self.network = self.call = network.train(self.is_training)
        self.device = next(network.parameters()).device
        self.outputs = self.graph = self.lengths = self.peak = None
        dtype, generator = next(network.parameters()).dtype, torch.Generator(device=self.device).manual_seed(1)
        draw = {"device": self.device, "generator": generator}
        if use.net == "vit_b_16":
            pixels = network.config.image_size
            self.arguments = {"pixel_values": torch.randn(use.batch, 3, pixels, pixels, **draw).to(torch.bfloat16).to(dtype)}
            labels = torch.randint(network.config.num_labels, (use.batch,), **draw)
        else:
            labels = torch.randint(network.config.vocab_size, (use.batch, use.positions), **draw)
            self.arguments = {"input_ids": labels, "use_cache": True}
        if self.is_training:
            self.arguments["labels"] = labels
        if use.what == "decode":
            self._decodes(labels, dtype, draw)

    def _decodes(self, tokens: torch.Tensor, dtype: torch.dtype, draw: dict) -> None:
        """One token behind a cache that has all others."""
        from transformers import StaticCache

        config, (batch, positions) = self.network.config, tokens.shape
        cache = StaticCache(config=config, max_cache_len=positions)
        cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, dtype, self.device)
        for layer in cache.layers:
            for kept in (layer.keys, layer.values):
                kept.copy_(torch.randn(kept.shape, **draw).to(torch.bfloat16))
            layer.cumulative_length = torch.full_like(layer.cumulative_length, positions - 1, device=self.device)
        self.lengths = [layer.cumulative_length for layer in cache.layers]
        places = torch.full((batch, 1), positions - 1, device=self.device)
        # Under the name that this transformers has for it: any other is ignored.
        called = "cache" if "cache" in inspect.signature(self.network.forward).parameters else "past_key_values"
        self.arguments = {"input_ids": tokens[:, -1:], "position_ids": places, called: cache, "use_cache": True}

    def forward(self):
        made = self.call(**self.arguments)
        if self.lengths is not None:
            # The next step decodes the same token.
            torch._foreach_sub_(self.lengths, 1)
        return made

    def gradients(self) -> None:
        self.network.zero_grad(set_to_none=True)
        self.forward().loss.backward()

    def __call__(self) -> None:
        if self.is_training:
            self.gradients()
        else:
            with torch.no_grad():
                self.outputs = self.forward().logits

    def answers(self) -> Dict[str, torch.Tensor]:
        """The logits, or of each parameter its gradient."""
        if self.is_training:
            self.gradients()
            found = {name: parameter.grad for name, parameter in self.network.named_parameters() if parameter.grad is not None}
            self.free()
            return found
        with torch.no_grad():
            return {"logits": self.forward().logits}

    def free(self) -> None:
        """Forgets what a step made."""
        self.outputs = None
        self.network.zero_grad(set_to_none=True)

    def as_way(self, way: str) -> Callable[[], None]:
        """The step eager or as one CUDA graph; warm. ``peak`` is the most memory that was handed out while it ran, or was captured, as the device tells it."""
        is_graph = way == "graph"
        self.warm(torch.cuda.Stream() if is_graph else None)
        with self._watched():
            called = self.captured() if is_graph else self()
        return called if is_graph else self

    @contextlib.contextmanager
    def _watched(self):
        """Within, the most memory that is handed out is watched."""
        if self.device.type != "cuda":
            yield
            return
        self.free()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated(self.device)


def _norm_of_difference(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float((exact.double() - found.double()).norm())


def errors(exact: Dict[str, torch.Tensor], found: Dict[str, torch.Tensor]) -> Dict[str, float]:
    """By name, the norm of the difference; NaN where there is no such tensor."""
    is_there = {name: name in found and found[name].shape == value.shape for name, value in exact.items()}
    return {name: _norm_of_difference(value, found[name]) if is_there[name] else math.nan for name, value in exact.items()}


def _told_errors(exact: Dict[str, torch.Tensor], of_sides: Dict[str, Dict[str, float]], is_training: bool) -> dict:
    """The facts about errors: of all tensors together, and of gradients the one that is worst beside plain's."""
    norm = math.hypot(*(float(value.double().norm()) for value in exact.values()))
    facts = {f"error_{name}": math.hypot(*found.values()) / norm if norm else math.nan for name, found in of_sides.items()}
    if is_training:
        ratios = {name: mine / plain for name, plain in of_sides["plain"].items() if plain > 0 and (mine := of_sides["ours"][name]) == mine}
        if ratios:
            facts["worst_gradient"] = max(ratios, key=ratios.get)
            facts["worst_gradient_ratio"] = ratios[facts["worst_gradient"]]
            facts["gradients_above"] = sum(1 for ratio in ratios.values() if ratio > MOST_ERROR)
    return facts


def _accuracy(base: torch.nn.Module, use: Use, door) -> dict:
    exact, of_sides = Step(side("exact", base, door), use).answers(), {}
    for name in nets.SIDES:
        of_sides[name] = errors(exact, Step(side(name, base, door), use).answers())
    return _told_errors(exact, of_sides, use.what == "training")


def _held(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def row(use: Use, way: str, door, device: torch.device, seconds: float, size: str = "full", maker=make) -> dict:
    """One row. Whatever goes wrong stands in it."""
    facts: dict = {"key": f"transformers/{use.name}/{way}", "batch": use.batch, "positions": use.positions, "size": size}
    if use.what == "decode":
        facts["cache"] = "StaticCache"
    elif use.positions:
        facts["cache"] = "DynamicCache"
    try:
        # Neither side drops anything.
        base = nets.calm(maker(use.net, size, device)).to(dtype=torch.bfloat16)
        if way == "eager":
            facts.update(_accuracy(base, use, door))
        steps, calls = {}, {}
        for name in nets.SIDES:
            before = _held(device)
            steps[name] = Step(side(name, base, door), use)
            calls[name] = steps[name].as_way(way)
            if device.type == "cuda":
                facts[f"peak_mib_{name}"] = (steps[name].peak - before) / 2**20
                steps[name].free()
        peaks = {name: value for name, value in facts.items() if name.startswith("peak_mib_")}
        nets._measure(calls, device, seconds, facts)
        facts.update(peaks)
        if peaks:
            facts["peak_ratio"] = facts["peak_mib_plain"] / facts["peak_mib_ours"]
    except Refused as reason:
        facts["refused"] = str(reason)
    except Exception as trouble:  # whatever a network raises, the next row is another matter
        facts["refused"] = first_line(trouble)
        if "CUDA error" in facts["refused"]:
            facts["fatal"] = True
    nets._judge(facts, MOST_ERROR)
    return facts


def run(arguments, device: torch.device, say: Callable[[str], None]) -> int:
    """Carries out ``transformers``. Returns 1 if an error was too large."""
    from .cli import record_path

    for given, known in ((arguments.net, NETS), (arguments.what, WHATS), (arguments.way, WAYS)):
        for one in given:
            if one not in known:
                raise ListError(f"{one}: there are {', '.join(known)}")
    size = "tiny" if arguments.tiny else "full"
    door, started = ours.open_door(device, mode=arguments.mode), machine.now()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    path: Optional[Path] = record_path(arguments, device, started, "transformers")
    writer = record.Writer(path)
    head = {"suite": "transformers", "method": record.METHOD, "date": started, "machine": machine.describe(device)}
    head["software"] = {**machine.software(door.versions()), "transformers": _version()}
    options = {"size": size, "seconds": arguments.seconds, "mode": arguments.mode}
    writer.line("head", {**head, "source": door.source(), "options": options, "clocks": machine.clocks(device)})
    status, keys = 0, []
    for use in _wanted(arguments):
        for way in arguments.way:
            if way == "graph" and device.type != "cuda":
                continue
            facts = row(use.small() if arguments.tiny else use, way, door, device, arguments.seconds, size)
            writer.line("row", facts)
            keys.append(facts["key"])
            say(f"{facts['key']}: " + (facts.get("fault") or facts.get("refused") or f"{facts['wall_ratio']:.3f} of plain's speed"))
            status = status or (1 if facts.get("fault") else 0)
            gc.collect()
            if facts.get("fatal"):
                say("the device answers no more")
                return 1
            if device.type == "cuda":
                torch.cuda.empty_cache()
    writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": len(keys)})
    if path is not None:
        say(f"record: {path}")
    return status


def _wanted(arguments) -> List[Use]:
    every = [use for use in USES if use.net in arguments.net and use.what in arguments.what]
    # Small ones may be alike.
    return list({use.small() if arguments.tiny else use: use for use in every}.values())


def _version() -> str:
    try:
        import transformers
    except ImportError:
        return "absent"
    return transformers.__version__
