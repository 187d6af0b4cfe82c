"""The regression gate: all runs of a record against the best that comparable records show.

Comparable are records of the same method, machine, driver and peers. Each column that is judged (``columns.JUDGED``) is held against the lease of
history in which it stood best, row by row and class by class. Something became worse where both say so: the ratio to the fastest right peer, and our
own time, less what the peers' times say of the two machines (the median over the class). A peer that became faster is no loss of ours, and a chip
that is slower is none either; a loss of ours shows in both.

- A row fails if both fell by more than 5 %, or three and a half standard errors if these are more (6 % for a row with little spread: the
  same sources differ by 1.2 % from lease to lease, and a run has hundreds of rows). Its base is the best lease, or the second best of three
  and more, so that one lucky measurement is no base. Rows whose errors would hide 10 % are told.
- A class (kind, direction, type, layout) fails if its geometric mean fell by more than 2 %, and by three standard errors.
- A row that had a ratio and is wrong or refused fails, and so does one that is absent although nothing kept the run from measuring it.

Drawn rows are other problems in every run: bars judge them, and this gate passes them over.
"""

import dataclasses
import math
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from . import columns
from .bars import by_lease
from .measure import quantile
from .record import Run

#: The least fall of a row that counts, and of a class.
ROW_FALL, CLASS_FALL = 0.05, 0.02

#: Standard errors that a fall has to be, of a row and of a class. There are many more rows than classes.
ROW_ERRORS, CLASS_ERRORS = 3.5, 3.0

#: By how much a row is off in one lease although nothing changed, as a part of it: between two leases of the records the same engines with the same
#: knobs differ by 1.7 % (the standard deviation of our own times less the machines' drift, of all but the outermost tenth).
LEASE_SIGMA = 0.012

#: A row is too noisy to be judged if a fall of so much might pass.
BLIND = 0.10

#: Rows of a class that both sides must have for its mean, and for the machine's drift.
LEAST_ROWS = 3

#: Blocks of a side in records that do not say how many there were.
BLOCKS = 9

Key = Tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True)
class Regression:
    """One row, or one class, that became worse in one column."""

    key: str
    column: str
    before: Optional[float]
    after: Optional[float]
    why: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the gate found. ``base`` names the leases of history, and is empty where there was nothing to compare with."""

    base: List[str]
    compared: int
    regressions: List[Regression]
    remarks: List[str]

    @property
    def passes(self) -> bool:
        return not self.regressions

    def __str__(self) -> str:
        if not self.base:
            return "check: no record of this suite with the same method, driver and peers; nothing to compare with"
        head = f"check: {self.compared} rows compared with the best of {len(self.base)} leases, {len(self.regressions)} became worse"
        return "\n".join([head, *(f"  {one.key} ({one.column}): {one.why}" for one in self.regressions), *(f"  {text}" for text in self.remarks)])


def class_of(row: dict) -> Key:
    """What is judged as one class; the layouts of products are one."""
    return (row["bar_kind"], row["direction"], row["dtype"], row["layout"] if row["direction"] != "product" else "")


def _error(row: dict, column: str) -> float:
    """The standard error of a row's median ratio within a run, from the spread of its blocks."""
    return 1.253 * columns.spread(row, column) / 1.349 / math.sqrt(row.get("blocks") or BLOCKS)


def _mean(values: Sequence[float]) -> Tuple[float, float]:
    """The mean and its standard error."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _less(log: float) -> float:
    """A fall, as a part, from the logarithm of before over after."""
    return 1 - math.exp(-log)


class _Pair:
    """One lease of history beside the new one: how much less each row is in a column, by its ratio and by its time."""

    def __init__(self, old: Dict[str, dict], new: Dict[str, dict], column: str):
        self.old, self.new, self.column = old, new, column
        both = [key for key in new if key in old]
        self.drift = self._drifts(both)
        #: (logarithm of the ratio's fall, of the time's growth beyond the machine's) by key.
        self.falls: Dict[str, Tuple[float, float]] = {}
        for key in both:
            before, after = columns.us(old[key], column), columns.us(new[key], column)
            ratios = columns.ratio(old[key], column), columns.ratio(new[key], column)
            if before and after:
                time = math.log(after / before) - self._drift(new[key])
                self.falls[key] = (math.log(ratios[0] / ratios[1]) if all(ratios) else time, time)

    def _drifts(self, keys: Iterable[str]) -> Dict[Optional[Key], float]:
        by_class: Dict[Optional[Key], List[float]] = {}
        for key in keys:
            then, now = columns.peer_us(self.old[key]), columns.peer_us(self.new[key])
            if then and now:
                for place in (class_of(self.new[key]), None):
                    by_class.setdefault(place, []).append(math.log(now / then))
        return {place: quantile(values, 0.5) for place, values in by_class.items() if place is None or len(values) >= LEAST_ROWS}

    def _drift(self, row: dict) -> float:
        return self.drift.get(class_of(row), self.drift.get(None, 0.0))

    def classes(self) -> Dict[Key, List[str]]:
        found: Dict[Key, List[str]] = {}
        for key in self.falls:
            found.setdefault(class_of(self.new[key]), []).append(key)
        return found


def _rows(pairs: Dict[str, _Pair], column: str, new: Dict[str, dict]) -> Tuple[int, List[Regression], List[str]]:
    """Each row against the lease in which its ratio was best."""
    compared, worse, blind = 0, [], []
    for key, row in new.items():
        timed = (pair for pair in pairs.values() if key in pair.old and columns.us(pair.old[key], column))
        known = sorted(timed, key=lambda pair: -(columns.ratio(pair.old[key], column) or 0.0))
        if not known:
            continue
        best = known[1 if len(known) > 2 else 0]
        old, trouble = best.old[key], columns.trouble(row, column)
        before = columns.ratio(old, column)
        if trouble and columns.us(old, column):
            worse.append(Regression(key, column, before, None, f"was right and timed, and now: {trouble}"))
            continue
        if key not in best.falls:
            continue
        compared += 1
        errors = ROW_ERRORS * math.sqrt(_error(old, column) ** 2 + _error(row, column) ** 2 + 2 * LEASE_SIGMA**2)
        if errors > BLIND:
            blind.append(key)
        allowed, by_ratio, by_time = max(ROW_FALL, errors), *map(_less, best.falls[key])
        if min(by_ratio, by_time) > allowed:
            after = columns.ratio(row, column)
            ratios = f"{before:.3f} became {after:.3f}: " if before and after else ""
            why = f"{ratios}{100 * by_ratio:.1f} % less by the ratio, {100 * by_time:.1f} % by our time; {100 * allowed:.1f} % allowed"
            worse.append(Regression(key, column, before, after, why))
    remarks = [f"too noisy to see 10 % ({column}): {', '.join(blind[:5])}{', …' if len(blind) > 5 else ''} ({len(blind)} rows)"] if blind else []
    return compared, worse, remarks


def _classes(pairs: Dict[str, _Pair], column: str) -> List[Regression]:
    """Each class against the lease in which its mean was best."""
    worst: Dict[Key, Tuple[float, Regression]] = {}
    for pair in pairs.values():
        for place, keys in pair.classes().items():
            if len(keys) < LEAST_ROWS:
                continue
            by_ratio, error = _mean([pair.falls[key][0] for key in keys])
            by_time, _ = _mean([pair.falls[key][1] for key in keys])
            fall, allowed = _less(min(by_ratio, by_time)), max(CLASS_FALL, CLASS_ERRORS * error)
            if fall > allowed and fall > worst.get(place, (0.0, None))[0]:
                before, after = (
                    math.exp(sum(math.log(columns.ratio(rows[key], column) or 1.0) for key in keys) / len(keys)) for rows in (pair.old, pair.new)
                )
                why = f"mean of {len(keys)} rows {before:.3f} became {after:.3f}: {100 * fall:.1f} % less, {100 * allowed:.1f} % allowed"
                worst[place] = (fall, Regression(" ".join(part for part in place if part), column, before, after, why))
    return [regression for _, regression in worst.values()]


def _absent(history: Dict[str, Dict[str, dict]], new: Dict[str, dict], runs: Sequence[Run]) -> List[Regression]:
    """Rows of the newest lease of history that the new one lacks, unless the run was told to leave rows out."""
    if not history or any(run.head.get("selection") for run in runs):
        return []
    last = list(history.values())[-1]
    return [Regression(key, "every column", columns.ratio(row, columns.main(row)), None, "is absent") for key, row in last.items() if key not in new]


def _listed(rows: Iterable[dict]) -> Dict[str, dict]:
    return {row["key"]: row for row in rows if not row.get("drawn")}


def check(runs: Sequence[Run], records: Iterable[Run]) -> Verdict:
    """Holds the runs of a record, which are of one suite, against comparable records before them; each lease in the record for itself."""
    if not runs:
        return Verdict([], 0, [], [])
    own, first = {run.path for run in runs if run.path is not None}, min(run.date for run in runs)
    old = [one for one in records if one.suite == runs[0].suite and one.peers == runs[0].peers and one.date <= first]
    old = [one for one in old if (one.path is None or one.path not in own) and not any(one is run for run in runs)]
    history = {lease: _listed(rows) for lease, rows in by_lease(old, runs[0].suite).items()}
    history = {lease: rows for lease, rows in history.items() if rows}
    if not history:
        return Verdict([], 0, [], [])
    compared, worse, remarks = 0, [], []
    for lease, rows in by_lease(runs, runs[0].suite).items():
        new, parts = _listed(rows), [run for run in runs if run.lease == lease]
        for column in columns.JUDGED:
            pairs = {name: _Pair(known, new, column) for name, known in history.items()}
            count, fell, told = _rows(pairs, column, new)
            compared, worse, remarks = max(compared, count), worse + fell + _classes(pairs, column), remarks + told
        worse += _absent(history, new, parts)
        if any(run.head.get("selection") for run in parts):
            remarks.append("a selection was measured: rows outside it are not asked")
    return Verdict(list(history), compared, sorted(worse, key=lambda one: one.after or 0.0), remarks)
