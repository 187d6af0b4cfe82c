"""One run of a suite: row after row, each judged, then timed, then written down."""

import dataclasses
import sys
import time
import zlib
from typing import Callable, Dict, List, Optional, Sequence

import torch

from . import judge, machine, peers, tensors
from .measure import Side, interleave
from .peers import Refused
from .problems import Problem, identity, key, operand_bytes, traffic_bytes


@dataclasses.dataclass
class Options:
    """What the command line decides of a run."""

    seconds: float = 0.3
    peers: Sequence[str] = ("pytorch", "cublaslt", "native")
    instant: bool = True
    tuning_ms: float = 500.0
    memory_limit_bytes: int = 32 << 30
    time_limit_s: Optional[float] = None


@dataclasses.dataclass
class Contender:
    """One side before it is timed."""

    name: str
    launch: Callable
    result: Optional[torch.Tensor] = None
    judgement: Optional[judge.Judgement] = None
    trouble: Optional[str] = None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


class Bench:
    """A device, our side's door and a timer, for as many rows as there are."""

    def __init__(self, device: torch.device, ours, timer, options: Options, limits: Dict[str, float]):
        self.device, self.ours, self.timer, self.options, self.limits = device, ours, timer, options, limits

    def row(self, problem: Problem) -> dict:
        """Measures one row. Whatever goes wrong stands in the row: `refused` (no way to compute it), `fault` (wrong results), `remarks`."""
        started = time.monotonic()
        row = {**identity(problem), "remarks": []}
        try:
            with peers.precision(problem.dtype), torch.no_grad():
                self._measure(problem, row)
        except Exception as error:  # whatever a library raises, the next row is another matter
            row["refused"] = _first_line(error)
            self._survive(row)
        row["took_s"] = round(time.monotonic() - started, 3)
        return row

    def _survive(self, row: dict) -> None:
        """Marks a row after which the device answers no more: an illegal access, say, takes the context with it."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
            torch.ones(1, device=self.device).item()
        except RuntimeError as error:
            row["fault"], row["fatal"] = _first_line(error), True

    def _measure(self, problem: Problem, row: dict) -> None:
        result_bytes = tensors.elements(problem.result_shape) * 8
        if operand_bytes(problem) + result_bytes > self.options.memory_limit_bytes:
            row["refused"] = f"needs more than the {self.options.memory_limit_bytes >> 20} MiB allowed by --memory-limit"
            return
        count = tensors.copies(problem, self.device, self.options.memory_limit_bytes - result_bytes)
        seed = zlib.crc32(row["key"].encode())
        pairs = tensors.operand_pairs(problem, count, self.device, seed)
        contenders = self._contenders(problem, row)
        self._judge(problem, pairs[0], contenders, seed, row)
        if not row.get("fatal"):
            self._time(problem, pairs, contenders, row)

    def _contenders(self, problem: Problem, row: dict) -> List[Contender]:
        found = []
        modes = ("measured", "instant") if self.options.instant else ("measured",)
        for mode in modes:
            try:
                found.append(Contender(mode, self.ours.launch(problem, mode)))
            except Refused as reason:
                row["refused"] = str(reason)
        taken, refused = peers.of(problem, self.device, self.options.peers)
        found += [Contender(name, launch) for name, launch in taken]
        if self.options.peers and not taken and self.options.peers[0] in refused:
            row["remarks"].append(f"no peer: {refused[self.options.peers[0]]}")
        return found

    def _judge(self, problem: Problem, pair, contenders: List[Contender], seed: int, row: dict) -> None:
        dtype = tensors.TYPES[problem.dtype][1]
        for one in contenders:
            judge.poison(problem, self.device, dtype)
            try:
                one.result = one.launch(*pair)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except Refused as reason:
                one.trouble = str(reason)
            except Exception as error:
                one.trouble = _first_line(error)
                self._survive(row)
                if row.get("fatal"):
                    row["fault"] = f"{one.name}: {row['fault']}"
                    return
        sample = judge.exact(problem, *pair, judge.positions(problem, self.device, seed))
        answered = [one for one in contenders if one.result is not None]
        theirs = next((one for one in answered if one.name in peers.PEERS), None)
        fits = tuple(problem.result_shape), tuple(problem.result_shape[1:])
        for one in answered:
            checked = sample
            if theirs is not None and one is not theirs and tuple(one.result.shape) in fits and tuple(theirs.result.shape) in fits:
                floor = float(sample.rms.median())
                worst = judge.disagreements(problem, one.result, theirs.result, floor)
                extra = judge.exact(problem, *pair, worst)
                checked = judge.merge(sample, extra)
                # They count for the other side as well: it may be the one that is wrong.
                sample_of_theirs = judge.judge(problem, extra, theirs.result)
                if sample_of_theirs.fault and theirs.judgement is None:
                    theirs.judgement = sample_of_theirs
            one.judgement = judge.judge(problem, checked, one.result) if one.judgement is None else one.judgement
        for one in contenders:
            one.result = None
            mine = row if one.name == "measured" else row.setdefault("sides", {}).setdefault(one.name, {})
            if one.trouble:
                mine["refused"] = one.trouble
            elif one.judgement is not None:
                mine["error"], mine["worst_in_tolerances"] = one.judgement.error, one.judgement.worst
                if one.judgement.fault:
                    mine["fault"] = one.judgement.fault

    def _time(self, problem: Problem, pairs, contenders: List[Contender], row: dict) -> None:
        right = [one for one in contenders if one.trouble is None and one.judgement is not None and one.judgement.fault is None]
        if not right:
            return
        for name in ("measured", "instant"):
            if not any(one.name == name for one in right):
                continue
            try:
                facts = self.ours.explain(problem, name)
            except Exception as error:  # times stand without a reason, too
                row["remarks"].append(f"not explained: {_first_line(error)}")
                continue
            (row if name == "measured" else row.setdefault("sides", {}).setdefault(name, {})).update(facts)
        instant = row.get("sides", {}).get("instant", {})
        is_same = "engine" in row and all(row.get(name) == instant.get(name) for name in ("engine", "knobs"))
        if is_same and "refused" not in instant:
            right = [one for one in right if one.name != "instant"]
        sides = [Side(one.name, self._launches(one, pairs)) for one in right]
        samples, is_captured = interleave(self.timer, sides, len(pairs), self.options.seconds)
        if self.timer.trouble:
            row["remarks"].append(self.timer.trouble)
        times = {side.name: sample for side, sample in zip(sides, samples)}
        row["graph"], row["copies"] = is_captured, len(pairs)
        for name, sample in times.items():
            mine = row if name == "measured" else row["sides"][name]
            mine["us"], mine["spread"] = sample.median, sample.spread
        if is_same and "measured" in times and "refused" not in instant:
            instant["us"], instant["spread"] = times["measured"].median, times["measured"].spread
            times["instant"] = times["measured"]
        self._compare(problem, times, row)

    @staticmethod
    def _launches(one: Contender, pairs) -> Callable[[int], object]:
        launch = one.launch
        return lambda i: launch(*pairs[i])

    def _compare(self, problem: Problem, times, row: dict) -> None:
        """Ratios are the peer's time over ours, block by block: above 1, we are faster."""
        who = self.options.peers[0] if self.options.peers else None
        theirs = {name: sample for name, sample in times.items() if name in peers.PEERS}
        if who in theirs:
            row["peer"], row["peer_us"] = who, theirs[who].median
            for name, field in (("measured", "ratio"), ("instant", "ratio_instant")):
                if name in times:
                    ratios = theirs[who].over(times[name])
                    row[field] = ratios.median
                    if name == "measured":
                        row["ratio_spread"] = ratios.spread
        if theirs and "measured" in times:
            best = min(theirs, key=lambda name: theirs[name].median)
            row["best_peer"], row["ratio_best"] = best, theirs[best].over(times["measured"]).median
        if "measured" in times:
            us = times["measured"].median
            row["tflops"], row["gb_per_s"] = problem.flops / us * 1e-6, traffic_bytes(problem) / us * 1e-3
            least = machine.least_us(self.limits, problem.dtype, problem.flops, traffic_bytes(problem))
            if least is not None:
                row["of_ceiling"] = least / us
            row["of_copy"] = row["gb_per_s"] / self.limits["copy_gb_per_s"] if self.limits else None


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
