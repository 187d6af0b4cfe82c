"""One run of a suite: row after row, until they are done, the time is spent or the device is lost."""

import sys
import time
from typing import Callable, List, Sequence

import torch

from .problems import Problem, key
from .row import Bench


class Progress:
    """One line on stderr that is written over, where stderr is a terminal; nothing elsewhere."""

    def __init__(self, total: int, stream=None):
        self.stream = sys.stderr if stream is None else stream
        self.total, self.done, self.started = total, 0, time.monotonic()
        self.is_shown = self.stream.isatty()

    def step(self, text: str) -> None:
        if self.is_shown:
            spent = time.monotonic() - self.started
            left = spent / self.done * (self.total - self.done) if self.done else 0.0
            bar = "█" * (20 * self.done // max(self.total, 1))
            self.stream.write(f"\r\x1b[K{bar:░<20} {self.done}/{self.total}, {left:.0f} s left  {text[:80]}")
            self.stream.flush()
        self.done += 1

    def end(self) -> None:
        if self.is_shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def rows(bench: Bench, problems: Sequence[Problem], each: Callable[[dict], None]) -> List[dict]:
    """Measures rows in order until they are done, the time is spent or the device is lost; ``each`` is told of every row as soon as it stands."""
    progress, found, started = Progress(len(problems)), [], time.monotonic()
    limit = bench.options.time_limit_s
    for problem in problems:
        if limit is not None and time.monotonic() - started > limit:
            break
        progress.step(key(problem))
        row = bench.row(problem)
        each(row)
        found.append(row)
        if row.get("fatal"):
            break
        if bench.device.type == "cuda" and torch.cuda.memory_reserved() > bench.options.memory_limit_bytes:
            # Graphs and odd sizes leave fragments behind.
            torch.cuda.empty_cache()
    progress.end()
    return found
