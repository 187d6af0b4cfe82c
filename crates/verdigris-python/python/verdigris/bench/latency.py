"""What is paid before and beside the device's work: a fresh process, a new shape, one call, the size on disk.

- ``first_result_ms``: in a fresh process in which PyTorch is imported and its context stands, from ``import verdigris.torch`` to the first
  convolution's result on the host. The package's Python is compiled beforehand, as an installed package's is. The first process fills the
  kernel cache and does not count; the median of the others does.
  ``pytorch_first_result_ms`` is PyTorch's own first convolution (without an import).
- ``new_shape_ms``: first call with a shape never seen, to its result, less the same call again; chosen by estimate; median of shapes. PyTorch's
  beside it.
- ``host_us``: time of a call of a small convolution as the host sees it, in turns with PyTorch's, without and with gradients.
- ``installed_mb``: the files of the package.
"""

import compileall
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, List, Optional

import torch
from torch.nn import functional

from . import machine, ours, record
from .measure import Samples, quantile, rotating
from .peers import Refused

#: Shapes that no other part of the bench uses: (n, c, k, extent).
NEW_SHAPES = [
    (3, 72, 88, 19),
    (5, 136, 56, 23),
    (2, 200, 104, 21),
    (7, 40, 168, 17),
    (6, 88, 72, 31),
    (3, 120, 152, 27),
    (9, 56, 40, 33),
    (2, 248, 184, 13),
]

_PROCESS = """
import json, sys, time
import torch
device = torch.device(sys.argv[1])
who = sys.argv[2]
x = torch.randn(8, 64, 56, 56, device=device).bfloat16().contiguous(memory_format=torch.channels_last)
w = torch.randn(64, 64, 3, 3, device=device).bfloat16().contiguous(memory_format=torch.channels_last)
float(x.sum())  # the context, the allocator and one kernel of PyTorch's
start = time.perf_counter()
if who == "ours":
    from verdigris.torch import conv2d
else:
    from torch.nn.functional import conv2d
imported = time.perf_counter()
with torch.no_grad():
    y = conv2d(x, w, None, 1, 1)
    y.flatten()[0].item()
print(json.dumps({"import_ms": (imported - start) * 1e3, "all_ms": (time.perf_counter() - start) * 1e3}))
"""


def _as_installed(package: Path) -> None:
    """Compiles the package's Python, as an installer does: from a copied folder, or where Python is told to write no caches, each process would."""
    compileall.compile_dir(str(package), quiet=2)


def _fresh(device: torch.device, who: str, processes: int) -> dict:
    found: List[dict] = []
    for _ in range(processes + 1):
        command = [sys.executable, "-c", _PROCESS, str(device), who]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if answer.returncode:
            raise RuntimeError((answer.stderr.strip() or "no answer").splitlines()[-1])
        found.append(json.loads(answer.stdout.strip().splitlines()[-1]))
    warm = found[1:]
    return {
        "first_ms": found[0]["all_ms"],
        "ms": quantile([one["all_ms"] for one in warm], 0.5),
        "import_ms": quantile([one["import_ms"] for one in warm], 0.5),
    }


def _tensors(n, c, k, extent, device):
    x = torch.randn(n, c, extent, extent, device=device).bfloat16().contiguous(memory_format=torch.channels_last)
    w = torch.randn(k, c, 3, 3, device=device).bfloat16().contiguous(memory_format=torch.channels_last)
    return x, w


def _new_shape_ms(convolve: Callable, device: torch.device) -> float:
    def once(x, w):
        start = time.perf_counter()
        convolve(x, w).flatten()[0].item()
        return time.perf_counter() - start

    with torch.no_grad():
        x, w = _tensors(4, 64, 64, 29, device)
        once(x, w)  # what a process pays once
        found = []
        for shape in NEW_SHAPES:
            x, w = _tensors(*shape, device)
            first = once(x, w)
            found.append((first - min(once(x, w) for _ in range(3))) * 1e3)
    return quantile(found, 0.5)


def _host_us(sides: List[Callable], device: torch.device, calls: int, gradients: bool) -> List[Samples]:
    """Blocks of calls of each side in turns. The device is waited for between blocks, and its queue holds a block's launches without blocking."""
    x, w = _tensors(1, 64, 64, 8, device)
    x.requires_grad_(gradients)
    w.requires_grad_(gradients)
    each = max(1, min(200, calls // 9))
    rounds = max(3, calls // each)

    def block(convolve):
        for _ in range(each):
            convolve(x, w)

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    samples: List[List[float]] = [[] for _ in sides]
    with torch.set_grad_enabled(gradients):
        for convolve in sides:
            block(convolve)
        for number in rotating(len(sides), rounds):
            wait()
            start = time.perf_counter()
            block(sides[number])
            samples[number].append((time.perf_counter() - start) / each * 1e6)
    wait()
    return [Samples(one) for one in samples]


def _installed_mb(package: Path) -> float:
    """Files of the package and of the libraries that its wheel put beside it; compiled Python left out."""
    folders = [package, package.with_name(f"{package.name}.libs")]
    files = [file for folder in folders if folder.is_dir() for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    return sum(file.stat().st_size for file in files) * 1e-6


def run(arguments, device: torch.device, say: Callable[[str], None]) -> int:
    """Carries out ``latency``."""
    from .cli import record_path

    door = ours.open_door(device)
    torch.backends.cudnn.benchmark = False  # A new shape without tuning, on both sides.
    started = machine.now()
    path: Optional[Path] = record_path(arguments, device, started, "latency")
    writer = record.Writer(path)
    writer.line(
        "head",
        {
            "suite": "latency",
            "date": started,
            "machine": machine.describe(device),
            "software": machine.software(door.versions()),
            "options": {"processes": arguments.processes, "calls": arguments.calls},
            "clocks": machine.clocks(device),
        },
    )
    facts: dict = {"key": "latency/process"}
    theirs = lambda x, w: functional.conv2d(x, w, None, 1, 1)  # noqa: E731
    try:
        peer = _fresh(device, "theirs", arguments.processes)
        facts["pytorch_first_result_ms"] = peer["ms"]
        facts["pytorch_new_shape_ms"] = _new_shape_ms(theirs, device)
        mine = door.conv2d()
        _as_installed(door.package())
        fresh = _fresh(device, "ours", arguments.processes)
        facts.update(first_result_ms=fresh["ms"], import_ms=fresh["import_ms"], first_process_ms=fresh["first_ms"])
        facts["new_shape_ms"] = _new_shape_ms(mine, device)
        for gradients, suffix in ((False, ""), (True, "_gradients")):
            our_us, their_us = _host_us([mine, theirs], device, arguments.calls, gradients)
            facts[f"host_us{suffix}"], facts[f"pytorch_host_us{suffix}"] = our_us.median, their_us.median
            ratios = our_us.over(their_us)
            facts[f"host_ratio{suffix}"], facts[f"host_ratio{suffix}_spread"] = ratios.median, ratios.spread
        facts["installed_mb"] = _installed_mb(door.package())
    except Refused as reason:
        facts["refused"] = str(reason)
    except (RuntimeError, subprocess.SubprocessError) as error:
        facts["fault"] = str(error)[:300]
    writer.line("row", facts)
    writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": 1})
    record.say_facts(facts, say)
    if path is not None:
        say(f"record: {path}")
    return 1 if facts.get("fault") else 0
