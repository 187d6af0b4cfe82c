"""What metrics cost: training with somebody listening beside training with nobody, in one process.

Metrics are scraped and NVML is read each second, as an operator would have it; ``pause()`` stops both and all counting. Blocks of steps stand in pairs, listened to
first in every other one, and a pair gives one ratio: the clock of the chip wanders by more than what is looked for, and less within a pair. Pairs of two
blocks that are both paused show what such a ratio is worth. ``listened`` is the mean of the ratios with its standard error, ``paused`` that of the latter; the
interval of two errors about the first has to end below 1.01 for the claim of at most one per cent.

``host_us`` is the host's time of a call of a small convolution that waits for nothing, ``host_paused_us`` the same with nobody listening, and their difference
has the standard error of the pairs.
"""

import math
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, List, Optional, Tuple

import torch

from . import machine, ours, record
from .models import MODELS
from .peers import Refused
from .problems import ListError
from .train import Trainer, images_and_labels, new_network

#: Seconds from one scrape to the next, and from one reading of NVML to the next.
EACH_S = 1.0

#: Calls of a block of the host's time.
CALLS = 200


def mean_and_error(values: List[float]) -> Tuple[float, float]:
    """The mean, and its standard error; of one value alone the error is not known."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.fmean(values), error


_SCRAPES = """
import sys, time, urllib.request
while True:
    time.sleep(float(sys.argv[2]))
    with urllib.request.urlopen("http://" + sys.argv[1] + "/metrics", timeout=10) as page:
        page.read()
    print(flush=True)
"""


class Scraper:
    """A process that reads the page of metrics each second while it is let: a thread of this one would take Python's lock from what is timed."""

    def __init__(self, address: str):
        self._process = subprocess.Popen([sys.executable, "-c", _SCRAPES, address, str(EACH_S)], stdout=subprocess.PIPE)
        self.let(False)

    def let(self, is_on: bool) -> None:
        self._process.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)

    def end(self) -> int:
        """How often it read."""
        self._process.kill()
        return len(self._process.communicate()[0].splitlines())


def pairs(block: Callable[[], float], listening: Callable[[bool], None], count: int, second: bool) -> List[Tuple[float, float]]:
    """So many pairs of a block that is listened to and one that is not, or, where `second`, of two that are not; each comes first in every other pair."""
    found = []
    for number in range(count):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        times = [0.0, 0.0]
        for side in order:
            listening(side == 0 and not second)
            times[side] = block()
        found.append((times[0], times[1]))
    return found


def _ratios(found: List[Tuple[float, float]]) -> dict:
    mean, error = mean_and_error([one / other for one, other in found])
    return {"ratio": mean, "error": error, "pairs": len(found)}


def _training(arguments, door, device: torch.device, listening, facts: dict) -> None:
    images, labels = images_and_labels(arguments.batch, arguments.extent, device, 1)
    trainer = Trainer(door.convert(new_network(arguments.model, device, deterministic=False)), images, labels)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def block() -> float:
        start = time.perf_counter()
        for _ in range(arguments.steps):
            trainer.step()
        wait()
        return (time.perf_counter() - start) / arguments.steps * 1e3

    for _ in range(3):
        block()
    for name, second, count in (("listened", False, arguments.pairs), ("paused", True, max(2, arguments.pairs // 2))):
        found = pairs(block, listening, count, second)
        facts[name] = _ratios(found)
        facts[f"{name}_ms"] = statistics.median(one for one, _ in found)
    low, high = (facts["listened"]["ratio"] + side * 2 * facts["listened"]["error"] for side in (-1, 1))
    facts["listened_interval"] = [low, high]


def _host(arguments, door, device: torch.device, listening, facts: dict) -> None:
    convolve = door.conv2d()
    x = torch.randn(1, 64, 8, 8, device=device).bfloat16().contiguous(memory_format=torch.channels_last)
    w = torch.randn(64, 64, 3, 3, device=device).bfloat16().contiguous(memory_format=torch.channels_last)

    def block() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            convolve(x, w)
        return (time.perf_counter() - start) / CALLS * 1e6

    with torch.no_grad():
        block()
        found = pairs(block, listening, max(2, arguments.calls // CALLS // 2), False)
    facts["host_us"], facts["host_paused_us"] = (statistics.median(one[side] for one in found) for side in (0, 1))
    facts["host_listening_us"], facts["host_listening_error_us"] = mean_and_error([one - other for one, other in found])


def run(arguments, device: torch.device, say: Callable[[str], None]) -> int:
    """Carries out ``telemetry``. Returns 1 if something was wrong."""
    from .cli import record_path

    if arguments.model not in MODELS:
        raise ListError(f"--model {arguments.model}: there are {', '.join(MODELS)}")
    for name in ("pairs", "steps", "calls"):
        if getattr(arguments, name) < 1:
            raise ListError(f"--{name} {getattr(arguments, name)}: at least 1")
    door = ours.open_door(device)
    started = machine.now()
    path: Optional[Path] = record_path(arguments, device, started, "telemetry")
    writer = record.Writer(path)
    names = ("model", "batch", "extent", "pairs", "steps", "calls")
    writer.line(
        "head",
        {
            "suite": "telemetry",
            "date": started,
            "machine": machine.describe(device),
            "software": machine.software(door.versions()),
            "options": {name: getattr(arguments, name) for name in names},
            "clocks": machine.clocks(device),
        },
    )
    facts: dict = {"key": f"telemetry/{arguments.model}"}
    try:
        telemetry = door.listen(prometheus=0, nvml=EACH_S)
        scraper = Scraper(telemetry.address)

        def listening(is_on: bool) -> None:
            (telemetry.resume if is_on else telemetry.pause)()
            scraper.let(is_on)

        try:
            _training(arguments, door, device, listening, facts)
            _host(arguments, door, device, listening, facts)
        finally:
            facts["scrapes"] = scraper.end()
            telemetry.close()
    except Refused as reason:
        facts["refused"] = str(reason)
    except (OSError, RuntimeError, MemoryError) as error:
        facts["fault"] = (str(error).splitlines() or [type(error).__name__])[0][:300]
    writer.line("row", facts)
    writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": 1})
    record.say_facts(facts, say)
    if path is not None:
        say(f"record: {path}")
    return 1 if facts.get("fault") else 0
