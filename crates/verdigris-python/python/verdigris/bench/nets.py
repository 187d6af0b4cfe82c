"""Whole networks of torchvision, inference and training, plain and with our layers: wall, host and device time, peak memory, and errors against fp32.

Both sides are copies of one network with the same weights, one of them converted by ``verdigris.torch.convert``; channels-last where images are flat,
bf16 autocast, SGD in training. ``eager`` and ``compile`` (``torch.compile``) call the step, ``graph`` replays it as one CUDA graph. What compiles is Inductor, on our
side by the package's backend (``--backend inductor`` leaves its pass out); ``fused_steps`` says how many steps stand in epilogues, of ``fused_calls`` calls.
A row is one network, one of inference and training, one of these ways:

- ``wall_ms``: a step, steps of both sides in turns, many queued as a user's loop has them; ``wall_ratio`` is plain over ours.
- ``host_ms``: from the call of a step to its return, the device idle before; ``device_ms``: the sum of its kernels by the profiler.
- ``peak_mib``: the most memory that PyTorch had handed out during a step, parameters included.
- ``error``: of the outputs (inference) or of all gradients (training), as the norm of the difference from fp32 over the norm.

torchvision is not needed by the package: where it is absent, every row says so.
"""

import contextlib
import copy
import gc
import math
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from . import machine, ours, record
from .measure import CudaTimer, HostTimer, Samples, quantile, rotating
from .peers import Refused
from .problems import ListError
from .row import first_line

#: The networks: where torchvision keeps the maker, and the input of one image ([channels, spatial…]).
NETS: Dict[str, Tuple[str, Tuple[int, ...]]] = {
    **{
        name: ("", (3, 224, 224))
        for name in (
            "resnet50",
            "resnext50_32x4d",
            "wide_resnet50_2",
            "convnext_tiny",
            "efficientnet_b0",
            "mobilenet_v3_large",
            "densenet121",
            "googlenet",
            "vgg16_bn",
            "regnet_y_1_6gf",
            "shufflenet_v2_x1_0",
            "swin_t",
            "vit_b_16",
        )
    },
    "inception_v3": ("", (3, 299, 299)),
    "deeplabv3_resnet50": ("segmentation", (3, 520, 520)),
    "fasterrcnn_resnet50_fpn": ("detection", (3, 800, 800)),
    "r3d_18": ("video", (3, 16, 112, 112)),
}

WHATS, WAYS, SIDES = ("inference", "training"), ("eager", "graph", "compile"), ("plain", "ours")

#: Steps in front of everything that is timed, and steps whose host time is taken.
WARM, HOST_STEPS = 3, 9


def make(name: str) -> torch.nn.Module:
    """A network of torchvision's with weights drawn from a fixed seed."""
    try:
        import torchvision.models
    except ImportError as error:
        raise Refused(f"torchvision cannot be imported: {error}") from error
    room = torchvision.models
    for part in filter(None, NETS[name][0].split(".")):
        room = getattr(room, part)
    known = {"weights": None, **({"weights_backbone": None} if NETS[name][0] in ("segmentation", "detection") else {})}
    if name in ("googlenet", "inception_v3"):
        known["init_weights"] = True
    torch.manual_seed(7)
    return getattr(room, name)(**known)


def _is_detection(name: str) -> bool:
    return NETS[name][0] == "detection"


def data(name: str, batch: int, image: Tuple[int, ...], device: torch.device, seed: int = 1):
    """Inputs of a step, and what its loss is taken against."""
    generator = torch.Generator(device=device).manual_seed(seed)
    images = torch.randn(batch, *image, device=device, generator=generator)
    if _is_detection(name):
        height, width = image[1:]
        box = torch.tensor([[0.1 * width, 0.1 * height, 0.6 * width, 0.7 * height]], device=device)
        return list(images), [{"boxes": box, "labels": torch.ones(1, dtype=torch.int64, device=device)} for _ in range(batch)]
    if images.dim() == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(0, 10, (batch,), device=device, generator=generator)


def loss_of(outputs, labels) -> torch.Tensor:
    """A detector's losses are sums already; logits of images and of pixels, auxiliary ones too, are held against the labels."""
    total = 0.0
    for leaf in (leaf for leaf in tree_leaves(outputs) if torch.is_tensor(leaf)):
        if leaf.dim() == 0:
            total = total + leaf
        else:
            target = labels.reshape([-1] + [1] * (leaf.dim() - 2)).expand(leaf.shape[:1] + leaf.shape[2:])
            total = total + functional.cross_entropy(leaf.float(), target)
    return total


class Step:
    """One side: a network and what is called again and again."""

    def __init__(self, network: torch.nn.Module, name: str, what: str, inputs, labels, autocast: bool = True):
        self.is_training, self.labels, self.autocast = what == "training", labels, autocast
        self.network = network.train(self.is_training)
        self.arguments = (inputs, labels) if self.is_training and _is_detection(name) else (inputs,)
        self.device = next(network.parameters()).device
        self.call = network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, foreach=True) if self.is_training else None
        self.outputs = self.graph = None

    def forward(self):
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            return self.call(*self.arguments)

    def gradients(self) -> None:
        self.network.zero_grad(set_to_none=True)
        outputs = self.forward()
        loss_of(outputs, self.labels).backward()

    def __call__(self) -> None:
        if self.optimizer is None:
            with torch.no_grad():
                self.outputs = self.forward()
        else:
            self.gradients()
            self.optimizer.step()

    def as_way(self, way: str, backend="inductor") -> Callable[[], None]:
        """The step eager, compiled by a backend, or as one CUDA graph; warm."""
        if way == "compile":
            torch._dynamo.reset()
            self.call = torch.compile(self.network, backend=backend)
        if way != "graph":
            self.warm()
            return self
        self.warm(torch.cuda.Stream())
        return self.captured()

    def warm(self, stream=None) -> None:
        """A few steps: what is captured later has to have run on a stream that is not the default one."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            for _ in range(WARM):
                self()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def captured(self) -> Callable[[], None]:
        """The step as one CUDA graph."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self()
        return self.replay

    def replay(self) -> None:
        """The captured step. A method of the step, which owns what the graph writes, such as the optimizer's state: replayed without it, that memory is another's."""
        self.graph.replay()


def calm(network: torch.nn.Module) -> torch.nn.Module:
    """Without dropped values and branches, so that two copies compute the same."""
    for module in network.modules():
        if isinstance(getattr(module, "p", None), float) and ("Dropout" in type(module).__name__ or "StochasticDepth" in type(module).__name__):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return network


def _answers(step: Step) -> List[torch.Tensor]:
    if not step.is_training:
        with torch.no_grad():
            return [leaf.double() for leaf in tree_leaves(step.forward()) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    step.gradients()
    return [parameter.grad.double() for parameter in step.network.parameters() if parameter.grad is not None]


def error(exact: List[torch.Tensor], found: List[torch.Tensor]) -> float:
    """The norm of the difference of all tensors together over the norm of the exact ones; NaN where they are not the same tensors."""
    if [t.shape for t in exact] != [t.shape for t in found]:
        return math.nan
    norm = math.sqrt(sum(float(t.norm()) ** 2 for t in exact))
    return math.sqrt(sum(float((a - b).norm()) ** 2 for a, b in zip(exact, found))) / norm if norm else math.nan


def _host_ms(step: Callable[[], None], synchronize: Callable[[], None]) -> float:
    times = []
    for _ in range(HOST_STEPS):
        synchronize()
        begun = time.perf_counter()
        step()
        times.append((time.perf_counter() - begun) * 1e3)
    synchronize()
    return quantile(times, 0.5)


def _device_ms(step: Callable[[], None]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) * 1e-3


def _measure(steps: Dict[str, Callable[[], None]], device: torch.device, seconds: float, facts: dict) -> None:
    is_cuda = device.type == "cuda"
    timer, names = CudaTimer(0.0) if is_cuda else HostTimer(), list(steps)
    for name in names:
        facts[f"host_ms_{name}"] = _host_ms(steps[name], torch.cuda.synchronize if is_cuda else lambda: None)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
            steps[name]()
            torch.cuda.synchronize()
            facts[f"peak_mib_{name}"] = torch.cuda.max_memory_allocated(device) / 2**20
            facts[f"device_ms_{name}"] = _device_ms(steps[name])
    once_s = sum(timer.run(range(len(names)), list(steps.values()))) * 1e-6
    count = max(1, min(10, int(seconds / max(once_s, 1e-6) / 9)))

    def block(step):
        return lambda: [step() for _ in range(count)]

    times: Dict[str, List[float]] = {name: [] for name in names}
    order = rotating(len(names), max(3, min(24, int(seconds / (once_s * count)))))
    for number, us in zip(order, timer.run(order, [block(steps[name]) for name in names])):
        times[names[number]].append(us * 1e-3 / count)
    samples = {name: Samples(values) for name, values in times.items()}
    for name, found in samples.items():
        facts[f"wall_ms_{name}"] = found.median
    if len(names) == len(SIDES):
        ratio = samples["plain"].over(samples["ours"])
        facts["wall_ratio"], facts["wall_ratio_spread"] = ratio.median, ratio.spread
        for field in ("host_ms", "device_ms", "peak_mib"):
            if facts.get(f"{field}_ours"):
                facts[f"{field.split('_')[0]}_ratio"] = facts[f"{field}_plain"] / facts[f"{field}_ours"]


def _copies(name: str, door, device: torch.device, base: torch.nn.Module) -> Dict[str, torch.nn.Module]:
    flat = len(NETS[name][1]) == 3
    base = base.to(device=device, **({"memory_format": torch.channels_last} if flat else {}))
    return {"plain": base, "ours": door.convert(copy.deepcopy(base))}


def row(
    name: str, what: str, way: str, door, device: torch.device, batch: int, image: Tuple[int, ...], seconds: float, maker=make, backend: str = "verdigris"
) -> dict:
    """One row. Whatever goes wrong stands in it."""
    facts: dict = {"key": f"nets/{name}/{what}/{way}", "batch": batch, "image": list(image)}
    try:
        networks, (inputs, labels) = _copies(name, door, device, maker(name)), data(name, batch, image, device)
        if way == "eager":
            truth = _answers(Step(calm(copy.deepcopy(networks["plain"])), name, what, inputs, labels, autocast=False))
            for side, network in networks.items():
                facts[f"error_{side}"] = error(truth, _answers(Step(calm(copy.deepcopy(network)), name, what, inputs, labels)))
            del truth
        own = door.compiler() if way == "compile" and backend == "verdigris" else None
        backends = {"plain": "inductor", "ours": "inductor" if own is None else own}
        steps = {side: Step(network, name, what, inputs, labels).as_way(way, backends[side]) for side, network in networks.items()}
        # A graph that PyTorch's cache gave back was seen by no pass.
        if own is not None and own.graphs:
            fused = [one for graph in own.graphs for one in graph.fused]
            facts["fused_calls"], facts["fused_steps"] = len(fused), sum(len(one.steps) for one in fused)
        _measure(steps, device, seconds, facts)
    except Refused as reason:
        facts["refused"] = str(reason)
    except Exception as trouble:  # whatever a network or a compiler raises, the next row is another matter
        facts["refused"] = first_line(trouble)
        if "CUDA error" in facts["refused"]:
            facts["fatal"] = True
    _judge(facts)
    return facts


def _judge(facts: dict, most: float = 2) -> None:
    """A fault where our error is more than so many times the plain network's, or no number where that is one."""
    mine, plain = facts.get("error_ours"), facts.get("error_plain")
    if mine is None or plain is None:
        return
    if math.isnan(plain):
        facts["remark"] = "not judged: the plain network's outputs are not comparable with fp32's"
    elif not mine <= most * plain:
        facts["fault"] = f"error {mine:.3g}, plain {plain:.3g}"


def run(arguments, device: torch.device, say: Callable[[str], None]) -> int:
    """Carries out ``nets``. Returns 1 if an error was more than twice the plain network's."""
    from .cli import record_path

    for given, known in ((arguments.net, NETS), (arguments.what, WHATS), (arguments.way, WAYS)):
        for one in given:
            if one not in known:
                raise ListError(f"{one}: there are {', '.join(known)}")
    door, started = ours.open_door(device, mode=arguments.mode), machine.now()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    path: Optional[Path] = record_path(arguments, device, started, "nets")
    writer = record.Writer(path)
    head = {"suite": "nets", "method": record.METHOD, "date": started, "machine": machine.describe(device)}
    head["software"] = machine.software(door.versions())
    options = {"batch": arguments.batch, "seconds": arguments.seconds, "mode": arguments.mode, "backend": arguments.backend}
    writer.line("head", {**head, "source": door.source(), "options": options, "clocks": machine.clocks(device)})
    status, count = 0, 0
    for name in arguments.net:
        # A detector's images are large, and a video is many.
        batch = arguments.batch if math.prod(NETS[name][1]) < 3 * 300 * 300 else max(1, arguments.batch // 8)
        image = NETS[name][1] if arguments.extent is None else NETS[name][1][:-2] + (arguments.extent,) * 2
        for what in arguments.what:
            for way in arguments.way:
                if way == "graph" and device.type != "cuda":
                    continue
                facts = row(name, what, way, door, device, batch, image, arguments.seconds, backend=arguments.backend)
                writer.line("row", facts)
                count += 1
                say(f"{facts['key']}: " + (facts.get("fault") or facts.get("refused") or f"{facts['wall_ratio']:.3f} of plain's speed"))
                status = status or (1 if facts.get("fault") else 0)
                gc.collect()
                if facts.get("fatal"):
                    say("the device answers no more")
                    return 1
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": count})
    if path is not None:
        say(f"record: {path}")
    return status
