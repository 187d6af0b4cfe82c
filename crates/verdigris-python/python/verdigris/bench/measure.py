"""Time: the sides in turns, medians with their quartiles.

Blocks of launches of each side follow each other in rotating order without a pause, so that clocks and heat are the same for all. Each launch
takes the next copy of its operands and writes to memory of its own, so that none finds its data in the L2. Where a launch of any side is short, all
sides are captured into CUDA graphs, a block a graph, and replayed: what is compared is the device's time, not the host's. Longer launches hide the
host.
"""

import dataclasses
import gc
import math
import time
from typing import Callable, List, Optional, Sequence

import torch

#: Blocks of each side that are aimed at, the least and the most, and the least where a round takes more than twice the time that all should.
BLOCKS, LEAST_BLOCKS, MOST_BLOCKS, SLOW_BLOCKS = 24, 9, 96, 4

#: A launch from which on one is enough to know how long it takes, roughly.
LONG_US = 1e5

#: No launch is taken to be shorter.
LEAST_US = 0.5

#: Most launches of one captured block.
MOST_LAUNCHES = 2048


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which that part of the values lies, interpolated; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Microseconds a launch, block by block."""

    us: List[float]

    @property
    def median(self) -> float:
        return quantile(self.us, 0.5)

    @property
    def spread(self) -> float:
        """The interquartile range as a part of the median."""
        return (quantile(self.us, 0.75) - quantile(self.us, 0.25)) / self.median

    def over(self, other: "Samples") -> "Samples":
        """Block by block, this side's time over the other's: drifts of the clock fall out."""
        return Samples([mine / theirs for mine, theirs in zip(self.us, other.us)])


@dataclasses.dataclass
class Side:
    """One side of a comparison: ``launch(i)`` starts one launch on copy ``i`` of the operands.

    A timer's ``rough`` fills in about how long a launch takes, and how long the host takes to start it.
    """

    name: str
    launch: Callable[[int], object]
    #: Whether it is captured however long a launch takes: the host's part is not the library's own.
    is_captured: bool = False
    rough_us: float = 0.0
    host_us: float = 0.0


class CudaTimer:
    """Events on the current stream, and graphs."""

    is_cuda = True

    def __init__(self, graph_below_us: float):
        self.graph_below_us = graph_below_us
        #: Why the last sides were not captured, where they should have been.
        self.trouble: Optional[str] = None
        #: Where launches are captured.
        self.stream = torch.cuda.Stream()

    def rough(self, side: Side, launches: int = 4) -> None:
        """About how long a launch takes: the best of some, one alone where it is long. Whatever there is to compile and choose was so before."""
        side.rough_us = side.host_us = math.inf
        for _ in range(launches):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            begun = time.perf_counter()
            side.launch(0)
            side.host_us = min(side.host_us, (time.perf_counter() - begun) * 1e6)
            end.record()
            end.synchronize()
            side.rough_us = max(min(side.rough_us, start.elapsed_time(end) * 1e3), 1.0)
            if side.rough_us > LONG_US:
                break

    def blocks(self, sides: Sequence[Side], launches: Sequence[int], copies: int) -> "tuple[List[Callable[[], None]], bool]":
        """A block of launches of each side, and whether they are graphs: where launches are short, or a slow host makes them seem long."""
        self.trouble = None
        if any(side.is_captured or side.rough_us < max(self.graph_below_us, 3 * side.host_us) for side in sides):
            try:
                return [self._captured(side, count, copies) for side, count in zip(sides, launches)], True
            except Exception as error:  # a door's own errors among them
                torch.cuda.synchronize()
                self.trouble = f"not captured: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
        return [_loop(side, count, copies) for side, count in zip(sides, launches)], False

    def _captured(self, side: Side, launches: int, copies: int) -> Callable[[], None]:
        # Not `torch.cuda.graph`, which collects garbage and gives all cached memory back: a tenth of a second for each graph.
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            side.launch(0)  # what a library keeps for each stream is not to lie in the graph's memory
            torch.cuda.synchronize()
            # Another thread may go on compiling kernels meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(launches):
                    side.launch(i % copies)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay

    def run(self, order: Sequence[int], blocks: Sequence[Callable[[], None]]) -> List[float]:
        """Microseconds of each block of ``order``."""
        marks = []
        for number in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            blocks[number]()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in marks]


class HostTimer:
    """The host's clock, for devices that finish before a call returns."""

    is_cuda = False
    trouble = None

    def rough(self, side: Side, launches: int = 2) -> None:
        side.launch(0)
        side.rough_us = max(min(self.run([0] * launches, [lambda: side.launch(0)])), 0.1)

    def blocks(self, sides, launches, copies):
        return [_loop(side, count, copies) for side, count in zip(sides, launches)], False

    def run(self, order, blocks):
        times = []
        for number in order:
            start = time.perf_counter()
            blocks[number]()
            times.append((time.perf_counter() - start) * 1e6)
        return times


def _loop(side: Side, launches: int, copies: int) -> Callable[[], None]:
    def block():
        for i in range(launches):
            side.launch(i % copies)

    return block


def block_launches(side: Side, block_us: float, copies: int) -> int:
    """Launches of one block: whole rounds over the copies where there is time for one, so that every launch meets the cache as the last one did."""
    wanted = max(1, int(block_us / side.rough_us))
    if wanted >= copies:
        return min(wanted // copies * copies, max(MOST_LAUNCHES // copies, 1) * copies)
    return wanted


def rotating(sides: int, rounds: int) -> List[int]:
    """The order of blocks: each round begins with the next side."""
    return [(start + i) % sides for start in range(rounds) for i in range(sides)]


@dataclasses.dataclass
class Timing:
    """What `interleave` measured: samples of each side, whether graphs were replayed, seconds of all sides together, and a round of blocks once
    more, for looking at results."""

    samples: List[Samples]
    is_captured: bool
    seconds: float
    again: Callable[[], None]


def interleave(timer, sides: Sequence[Side], copies: int, seconds: float) -> Timing:
    """Measures the sides in turns for so many seconds in all, or as long as ``MOST_BLOCKS`` of each take."""
    for side in sides:
        if not side.rough_us:
            timer.rough(side)
    block_us = seconds * 1e6 / (BLOCKS * len(sides))
    launches = [block_launches(side, block_us, copies) for side in sides]
    blocks, is_captured = timer.blocks(sides, launches, copies)
    if is_captured:
        # What the host takes to start a launch made it seem long; a replay knows better.
        for side, count, us in zip(sides, launches, timer.run(range(len(sides)), blocks)):
            side.rough_us = max(us / count, LEAST_US)
        better = [block_launches(side, block_us, copies) for side in sides]
        if any(count > 2 * before for count, before in zip(better, launches)):
            launches = better
            blocks, is_captured = timer.blocks(sides, launches, copies)
    round_us = sum(count * side.rough_us for count, side in zip(launches, sides))
    # Launches of a second and more would take minutes otherwise.
    least = LEAST_BLOCKS if LEAST_BLOCKS * round_us < 20e6 * seconds else SLOW_BLOCKS
    rounds = int(min(max(seconds * 1e6 / round_us, least), MOST_BLOCKS))
    samples: List[List[float]] = [[] for _ in sides]
    spent = 0.0
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        timer.run(range(len(sides)), blocks)  # warm
        # What a launch takes was known roughly: rounds are added until the time is reached.
        while rounds and len(samples[0]) < MOST_BLOCKS:
            order = rotating(len(sides), rounds)
            times = timer.run(order, blocks)
            for number, us in zip(order, times):
                samples[number].append(us / launches[number])
            spent += sum(times) * 1e-6
            rounds = min(math.ceil((seconds - spent) / (sum(times) * 1e-6 / rounds)), MOST_BLOCKS - len(samples[0])) if spent < seconds else 0
    finally:
        if was_enabled:
            gc.enable()
    return Timing([Samples(values) for values in samples], is_captured, spent, lambda: timer.run(range(len(sides)), blocks))
