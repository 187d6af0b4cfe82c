"""A whole network's training: images a second with cuDNN's layers and with ours, and whose logits and gradients are nearer to fp32.

Speed: two copies of one network with the same weights, one of them converted by ``verdigris.torch.convert``; channels-last, bf16 autocast, SGD
with momentum; both eager and both as one CUDA graph a step, blocks of steps in rotating order. Errors: both under autocast against the same
network in fp32 (no tf32), the relative Frobenius norm of the logits' and of every parameter's gradient's difference, squared and averaged over
several batches.
"""

import copy
import gc
import math
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch.nn import functional

from . import machine, ours, record
from .measure import CudaTimer, HostTimer, Samples, quantile, rotating
from .models import MODELS
from .peers import Refused
from .problems import ListError

#: Classes of the labels.
CLASSES = 1000

#: Tensors with the worst ratios that a record names.
WORST = 12


def images_and_labels(batch: int, extent: int, device: torch.device, seed: int) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    images = torch.randn(batch, 3, extent, extent, device=device, generator=generator)
    labels = torch.randint(0, CLASSES, (batch,), device=device, generator=generator)
    return images.contiguous(memory_format=torch.channels_last), labels


def new_network(name: str, device: torch.device, deterministic: bool) -> torch.nn.Module:
    torch.manual_seed(7)
    return MODELS[name](deterministic).to(device=device, memory_format=torch.channels_last).train()


class Trainer:
    """One copy of a network, its optimizer, and a step on fixed images."""

    def __init__(self, network: torch.nn.Module, images, labels):
        self.network, self.images, self.labels = network, images, labels
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, foreach=True)
        self.loss: Optional[torch.Tensor] = None

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.images.device.type, dtype=torch.bfloat16):
            loss = functional.cross_entropy(self.network(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def captured(self) -> Callable[[], None]:
        """A step as a graph, after some on a stream of their own, as PyTorch asks for."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        return graph.replay


def _speed(name: str, door, arguments, device: torch.device, facts: dict, say) -> None:
    images, labels = images_and_labels(arguments.batch, arguments.extent, device, 1)
    base = new_network(name, device, deterministic=False)
    sides: Dict[str, Callable[[], None]] = {}
    trainers: Dict[str, Trainer] = {}
    for who in ("cudnn", "ours"):
        network = copy.deepcopy(base)
        if who == "ours":
            try:
                network = door.convert(network)
            except Refused as reason:
                facts["refused"] = str(reason)
                continue
        for how in ("eager", "graph"):
            if how == "graph" and device.type != "cuda":
                continue
            trainer = trainers[f"{who}_{how}"] = Trainer(copy.deepcopy(network) if how == "graph" else network, images, labels)
            try:
                for _ in range(3):
                    trainer.step()
                sides[f"{who}_{how}"] = trainer.captured() if how == "graph" else trainer.step
            except (RuntimeError, NotImplementedError) as error:
                facts[f"{who}_{how}_trouble"] = str(error).splitlines()[0][:300]
                if "CUDA error" in str(error):
                    raise
        say(f"  {who}: ready")
    timer = CudaTimer(0.0) if device.type == "cuda" else HostTimer()
    names = list(sides)
    step_s = sum(timer.run(range(len(names)), list(sides.values()))) * 1e-6
    # Blocks of some steps, so that the host's work of one step hides behind the step before as it does in training.
    steps = max(1, min(10, int(arguments.seconds / max(step_s, 1e-6) / 9)))
    rounds = max(3, min(24, int(arguments.seconds / (step_s * steps))))

    def block(step):
        def run():
            for _ in range(steps):
                step()

        return run

    gc.collect()
    order = rotating(len(names), rounds)
    times: Dict[str, List[float]] = {one: [] for one in names}
    for number, us in zip(order, timer.run(order, [block(sides[one]) for one in names])):
        times[names[number]].append(us / steps)
    for one, us in times.items():
        samples = Samples(us)
        facts[f"images_per_s_{one}"] = arguments.batch / samples.median * 1e6
        facts[f"spread_{one}"] = samples.spread
        facts[f"loss_{one}"] = float(trainers[one].loss)
    for how in ("eager", "graph"):
        if f"ours_{how}" in times and f"cudnn_{how}" in times:
            ratios = Samples(times[f"cudnn_{how}"]).over(Samples(times[f"ours_{how}"]))
            facts[f"speed_{how}"], facts[f"speed_{how}_spread"] = ratios.median, ratios.spread


def _answers(network: torch.nn.Module, images, labels, autocast: bool) -> Dict[str, torch.Tensor]:
    """Logits and all parameters' gradients of one batch."""
    network.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=autocast):
        logits = network(images)
        loss = functional.cross_entropy(logits, labels)
    loss.backward()
    answers = {"logits": logits.detach().double()}
    answers.update((name, parameter.grad.double()) for name, parameter in network.named_parameters() if parameter.grad is not None)
    return answers


def _accuracy(name: str, door, arguments, device: torch.device, facts: dict) -> None:
    exact = new_network(name, device, deterministic=True)
    theirs = copy.deepcopy(exact)
    try:
        mine = door.convert(copy.deepcopy(exact))
    except Refused as reason:
        facts["refused"] = str(reason)
        return
    squares: Dict[str, Dict[str, List[float]]] = {"ours": {}, "theirs": {}}
    for seed in range(arguments.seeds):
        images, labels = images_and_labels(arguments.accuracy_batch, arguments.extent, device, 100 + seed)
        truth = _answers(exact, images, labels, autocast=False)
        for who, network in (("theirs", theirs), ("ours", mine)):
            found = _answers(network, images, labels, autocast=True)
            missing = set(truth) - set(found)
            if missing:
                facts["fault"] = f"no gradient of {sorted(missing)[0]} from {who}"
                return
            for tensor, value in truth.items():
                norm = value.norm()
                distance = (found[tensor].reshape(value.shape) - value).norm()
                # A gradient that vanishes (a bias before a normalization) has no relative error.
                if norm > 1e-12:
                    squares[who].setdefault(tensor, []).append(float(distance / norm) ** 2)
    lines = []
    for tensor, values in squares["ours"].items():
        our_error = math.sqrt(sum(values) / len(values))
        their_error = math.sqrt(sum(squares["theirs"][tensor]) / len(values))
        ratio = our_error / their_error if their_error else (1.0 if our_error == 0 else math.inf)
        lines.append({"tensor": tensor, "ours": our_error, "theirs": their_error, "ratio": ratio})
    if not lines or not all(math.isfinite(line["ratio"]) for line in lines):
        facts["fault"] = "errors that are no numbers"
    ratios = [line["ratio"] for line in lines]
    facts["error_worst"], facts["error_median"] = max(ratios), quantile(ratios, 0.5)
    facts["tensors"], facts["tensors_over_bar"] = len(lines), sum(1 for ratio in ratios if not ratio <= 1.25)
    logits = next(line for line in lines if line["tensor"] == "logits")
    facts["logits_error"], facts["logits_error_cudnn"] = logits["ours"], logits["theirs"]
    facts["worst_tensors"] = sorted(lines, key=lambda line: -line["ratio"])[:WORST]


def run(arguments, device: torch.device, say: Callable[[str], None]) -> int:
    """Carries out ``train``. Returns 1 if something was wrong."""
    from .cli import record_path

    for name in arguments.model:
        if name not in MODELS:
            raise ListError(f"--model {name}: there are {', '.join(MODELS)}")
    door = ours.open_door(device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    started = machine.now()
    path: Optional[Path] = record_path(arguments, device, started, "train")
    writer = record.Writer(path)
    options = {"batch": arguments.batch, "extent": arguments.extent, "seconds": arguments.seconds, "accuracy_batch": arguments.accuracy_batch}
    writer.line(
        "head",
        {
            "suite": "train",
            "date": started,
            "machine": machine.describe(device),
            "software": machine.software(door.versions()),
            "options": options,
            "clocks": machine.clocks(device),
        },
    )
    status = 0
    for name in arguments.model:
        facts: dict = {"key": f"train/{name}"}
        say(name)
        try:
            if not arguments.no_accuracy:
                _accuracy(name, door, arguments, device, facts)
            if not arguments.no_speed:
                _speed(name, door, arguments, device, facts, say)
        except (RuntimeError, MemoryError) as error:
            facts["fault"] = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        writer.line("row", facts)
        record.say_facts(facts, say)
        status = status or (1 if facts.get("fault") else 0)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": len(arguments.model)})
    if path is not None:
        say(f"record: {path}")
    return status
