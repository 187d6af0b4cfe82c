"""One row: its sides are judged, timed, judged again, and written down."""

import dataclasses
import math
import time
import zlib
from typing import Callable, Dict, List, Optional, Sequence

import torch

from . import judge, machine, peers, tensors
from .columns import COLUMNS
from .measure import Samples, Side, Timing, interleave
from .peers import Refused
from .problems import Problem, identity, operand_bytes, traffic_bytes

#: Answers of a peer that are timed beside everybody; of more, the fastest are found first.
MOST_WAYS = 4

#: The part of a row's time for finding them, and for the series with a foreign kernel between launches.
FINDING, APART = 0.3, 0.3

#: What stands in results before the last replay: whatever is not written over is found.
SENTINEL = {torch.int32: -(2**31) + 7}


@dataclasses.dataclass
class Options:
    """What the command line decides of a run."""

    seconds: float = 0.35
    peers: Sequence[str] = ("pytorch", "cublaslt", "native", "other_format")
    instant: bool = True
    shipped: bool = False
    tuning_ms: float = 500.0
    memory_limit_bytes: int = 32 << 30
    time_limit_s: Optional[float] = None


@dataclasses.dataclass
class Contender:
    """One side: a column of ours, or one way of a peer. ``held`` are the last results by copy of the operands, so that each lies apart."""

    name: str
    launch: Callable
    is_pick: bool = False
    operands: Optional[Callable] = None
    result: Optional[torch.Tensor] = None
    judgement: Optional[judge.Judgement] = None
    after: Optional[judge.Judgement] = None
    trouble: Optional[str] = None
    held: List[Optional[torch.Tensor]] = dataclasses.field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        return self.name in COLUMNS

    def side(self, pairs) -> Side:
        """Launches on copy ``i``, whose result takes the place of the one before on that copy."""
        mine = pairs if self.operands is None else [self.operands(*pair) for pair in pairs]
        self.held = [None] * len(mine)

        def launch(i):
            self.held[i] = None
            self.held[i] = self.launch(*mine[i])

        return Side(self.name, launch, self.is_pick)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


class Bench:
    """A device, our side's door and a timer, for as many rows as there are."""

    def __init__(self, device: torch.device, ours, timer, options: Options, limits: Dict[str, float]):
        self.device, self.ours, self.timer, self.options, self.limits = device, ours, timer, options, limits
        self._foreign = torch.zeros(1 << 14, device=device)

    def row(self, problem: Problem) -> dict:
        """Measures one row. Whatever goes wrong stands in the row: `refused` (no way to compute it), `fault` (wrong results), `remarks`."""
        started = time.monotonic()
        row = {**identity(problem), "remarks": []}
        try:
            with peers.precision(problem.dtype), torch.no_grad():
                self._measure(problem, row)
        except Exception as error:  # whatever a library raises, the next row is another matter
            row["refused"] = first_line(error)
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
            row["fault"], row["fatal"] = first_line(error), True

    def _measure(self, problem: Problem, row: dict) -> None:
        result_bytes = tensors.result_bytes(problem)
        if operand_bytes(problem) + 8 * result_bytes > self.options.memory_limit_bytes:
            row["refused"] = f"needs more than the {self.options.memory_limit_bytes >> 20} MiB allowed by --memory-limit"
            return
        contenders = self._contenders(problem, row)
        count = tensors.copies(problem, self.device, self.options.memory_limit_bytes, len(contenders) + 1)
        seed = zlib.crc32(row["key"].encode())
        pairs = tensors.operand_pairs(problem, count, self.device, seed)
        truth = tuple(tensors.fenced(tensor) for tensor in pairs[0])
        sample = self._judge(problem, pairs[0], contenders, seed, row)
        if not row.get("fatal"):
            self._time(problem, pairs, truth, sample, contenders, row)

    def _contenders(self, problem: Problem, row: dict) -> List[Contender]:
        found = []
        # What ships first: what is measured would come before it, and the choice by estimate is not to find kernels that measuring compiled.
        modes = [mode for mode, is_asked in (("shipped", self.options.shipped), ("instant", self.options.instant), ("measured", True)) if is_asked]
        for mode in modes:
            try:
                found.append(Contender(mode, self.ours.launch(problem, mode)))
            except Refused as reason:
                (row if mode == "measured" else row.setdefault("sides", {}).setdefault(mode, {}))["refused"] = str(reason)
        found.sort(key=lambda one: one.name != "measured")
        taken, refused = peers.of(problem, self.device, self.options.peers)
        found += [Contender(way.peer, way.launch, way.is_pick, way.operands) for way in taken]
        if self.options.peers and self.options.peers[0] in refused:
            row["remarks"].append(f"no {self.options.peers[0]}: {refused[self.options.peers[0]]}")
        return found

    def _first_results(self, pair, contenders: List[Contender], problem: Problem, row: dict) -> None:
        dtype = tensors.TYPES[problem.dtype][1]
        # Choices by estimate run first, before measuring has compiled and warmed everything.
        for one in sorted(contenders, key=lambda one: one.name == "measured"):
            judge.poison(problem, self.device, dtype)
            try:
                one.result = one.launch(*(pair if one.operands is None else one.operands(*pair)))
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except Refused as reason:
                one.trouble = str(reason)
            except Exception as error:
                one.trouble = first_line(error)
                self._survive(row)
                if row.get("fatal"):
                    row["fault"] = f"{one.name}: {row['fault']}"
                    return

    def _judge(self, problem: Problem, pair, contenders: List[Contender], seed: int, row: dict) -> Optional[judge.Sample]:
        self._first_results(pair, contenders, problem, row)
        if row.get("fatal"):
            return None
        sample = judge.exact(problem, *pair, judge.positions(problem, self.device, seed))
        answered = [one for one in contenders if one.result is not None]
        theirs = next((one for one in answered if not one.is_ours), None)
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
            mine = self._facts(row, one)
            # Of several ways of a peer the right ones count.
            if one.trouble and "error" not in mine:
                mine["refused"] = one.trouble
            elif one.judgement is not None and ("error" not in mine or "fault" in mine):
                mine["error"], mine["worst_in_tolerances"] = one.judgement.error, one.judgement.worst
                mine.pop("refused", None)
                mine.pop("fault", None)
                if one.judgement.fault:
                    mine["fault"] = one.judgement.fault
        return sample

    @staticmethod
    def _facts(row: dict, one: Contender) -> dict:
        return row if one.name == "measured" else row.setdefault("sides", {}).setdefault(one.name, {})

    def _explain(self, problem: Problem, right: List[Contender], row: dict) -> List[Contender]:
        """Writes down what our plans are. Returns the contenders without columns whose plan is the measured one's: they share its times."""
        for one in right:
            if one.is_ours:
                try:
                    self._facts(row, one).update(self.ours.explain(problem, one.name))
                except Exception as error:  # times stand without a reason, too
                    row["remarks"].append(f"not explained: {first_line(error)}")

        def is_same(one):
            facts = row.get("sides", {}).get(one.name, {})
            return one.name != "measured" and "engine" in row and all(row.get(field) == facts.get(field) for field in ("engine", "knobs"))

        has_measured = any(one.name == "measured" for one in right)
        return [one for one in right if not (one.is_ours and has_measured and is_same(one))]

    def _fastest(self, pairs, right: List[Contender]) -> List[Contender]:
        """Leaves of a peer's many answers the fastest. Picks that are made anew are not the same the next time, and stay."""
        left = []
        for name in dict.fromkeys(one.name for one in right):
            ways = [one for one in right if one.name == name]
            if len(ways) > MOST_WAYS and not any(one.is_pick for one in ways):
                timing = interleave(self.timer, [one.side(pairs) for one in ways], len(pairs), FINDING * self.options.seconds)
                order = sorted(range(len(ways)), key=lambda i: timing.samples[i].median)
                for one in ways:
                    one.held = []
                ways = [ways[i] for i in order[:MOST_WAYS]]
            left += ways
        return left

    def _time(self, problem: Problem, pairs, truth, sample, contenders: List[Contender], row: dict) -> None:
        right = [one for one in contenders if one.trouble is None and one.judgement is not None and one.judgement.fault is None]
        if not right:
            return
        timed = self._fastest(pairs, self._explain(problem, right, row))
        timing = interleave(self.timer, [one.side(pairs) for one in timed], len(pairs), self.options.seconds)
        if self.timer.trouble:
            row["remarks"].append(self.timer.trouble)
        row.update(graph=timing.is_captured, copies=len(pairs), timed_s=timing.seconds, blocks=len(timing.samples[0].us))
        row["rotated_bytes"] = len(pairs) * (operand_bytes(problem) + tensors.result_bytes(problem))
        if row["rotated_bytes"] < 2 * tensors.cache_bytes(self.device):
            row["remarks"].append("operands and results rotate through less than twice the L2")
        self._judge_again(problem, pairs, truth, sample, timed, timing, row)
        times = self._best_ways(timed, timing.samples, row)
        for one in right:
            # A column that shares the measured plan shares its times.
            if one.is_ours and one not in timed and "measured" in times:
                times[one.name] = times["measured"]
        for name, samples in times.items():
            mine = row if name == "measured" else row["sides"][name]
            mine["us"], mine["spread"] = samples.median, samples.spread
        self._compare(problem, times, row)
        self._apart(pairs, timed, row)

    @staticmethod
    def _best_ways(timed: List[Contender], samples: List[Samples], row: dict) -> Dict[str, Samples]:
        """Of each side its fastest right way; the times of all its ways stand in the row."""
        times: Dict[str, Samples] = {}
        for one, found in zip(timed, samples):
            facts = Bench._facts(row, one)
            if not one.is_ours:
                facts.setdefault("ways_us", []).append(found.median)
            if one.after is not None and one.after.fault:
                continue
            if one.name not in times or found.median < times[one.name].median:
                times[one.name] = found
        return times

    def _judge_again(self, problem: Problem, pairs, truth, sample, timed: List[Contender], timing: Timing, row: dict) -> None:
        """After the replays: a last round onto sentinels, the first and the last result of each side, the operands and what lies beside them."""
        results = [result for one in timed for result in one.held if result is not None]
        for result in results:
            result.fill_(SENTINEL.get(result.dtype, math.nan))
        del results
        timing.again()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for one in timed:
            held = [result for result in one.held if result is not None]
            judged = [judge.judge(problem, sample, result) for result in (held[:1] + held[-1:] if len(held) > 1 else held)]
            if judged:
                one.after = max(judged, key=lambda each: each.worst if each.fault is None else math.inf)
                facts = self._facts(row, one)
                facts["error_after"] = max(facts.get("error_after", 0.0), one.after.error)
                if one.after.fault and one.is_ours:
                    facts["fault"] = f"after the timed replays: {one.after.fault}"
                elif one.after.fault:
                    row["remarks"].append(f"{one.name}, after the timed replays: {one.after.fault}")
        damage = tensors.broken(pairs, truth)
        if damage:
            row["fault"] = f"after the timed replays: {damage}"

    def _apart(self, pairs, timed: List[Contender], row: dict) -> None:
        """The series with a foreign kernel between launches, as a network has one: nobody's launches overlap themselves."""
        peer = row.get("best_peer")
        chosen = [next((one for one in timed if one.name == name), None) for name in ("measured", "instant", peer)]
        chosen = [one for one in chosen if one is not None]
        if not chosen or row.get("fault"):
            return

        def with_foreign(side: Side) -> Side:
            def launch(i):
                side.launch(i)
                self._foreign.add_(1.0)

            return Side(side.name, launch, side.is_captured)

        sides = [with_foreign(one.side(pairs)) for one in chosen] + [Side("foreign", lambda i: self._foreign.add_(1.0))]
        timing = interleave(self.timer, sides, len(pairs), APART * self.options.seconds)
        alone = timing.samples[-1].median
        apart = {one.name: max(samples.median - alone, 0.0) for one, samples in zip(chosen, timing.samples)}
        for one in chosen:
            self._facts(row, one)["apart_us"] = apart[one.name]
        ours = apart.get("measured") or apart.get("instant")
        if ours and apart.get(peer):
            row["ratio_apart"] = apart[peer] / ours

    def _compare(self, problem: Problem, times: Dict[str, Samples], row: dict) -> None:
        """Ratios are the peer's time over ours, block by block: above 1, we are faster."""
        who = self.options.peers[0] if self.options.peers else None
        theirs = {name: samples for name, samples in times.items() if name in peers.PEERS}
        best = min(theirs, key=lambda name: theirs[name].median, default=None)
        if who in theirs:
            row["peer"], row["peer_us"] = who, theirs[who].median
        if best is not None:
            row["best_peer"] = best
        for name in COLUMNS:
            if name not in times or (row if name == "measured" else row["sides"][name]).get("fault"):
                continue
            suffix = "" if name == "measured" else f"_{name}"
            if who in theirs:
                row[f"ratio{suffix}"] = theirs[who].over(times[name]).median
            if best is not None:
                ratios = theirs[best].over(times[name])
                row[f"ratio_best{suffix}"], row[f"ratio_spread{suffix}"] = ratios.median, ratios.spread
        if "measured" in times:
            us = times["measured"].median
            row["tflops"], row["gb_per_s"] = problem.flops / us * 1e-6, traffic_bytes(problem) / us * 1e-3
            least = machine.least_us(self.limits, problem.dtype, problem.flops, traffic_bytes(problem))
            if least is not None:
                row["of_ceiling"] = least / us
            row["of_copy"] = row["gb_per_s"] / self.limits["copy_gb_per_s"] if self.limits else None
