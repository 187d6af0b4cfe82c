"""What is asked for (``bars.toml``), and whether records show it.

A bar is judged in the columns *instant* and *measured*, on the rows of the lists and on the drawn ones, each for itself, against the fastest right
peer. Rows that were timed for less than ``EVIDENCE_S``, or by an earlier method, are no evidence.
"""

import dataclasses
import math
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from . import columns
from .problems import _table
from .record import Run

#: A mean or worst row asked for as 1.00 is met from 1 - this on.
TIE = 0.01

#: The least time that a row must have been timed for, all sides together, to count for a bar.
EVIDENCE_S = 0.3

#: Where rows come from.
LISTS, DRAWN = "lists", "drawn"

#: Rows that a drawn class must have before it passes a bar: fewer say little of the distribution.
LEAST_DRAWN = 8


def geometric_mean(values: Iterable[float]) -> float:
    """NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _instant_of_tuned(row: dict, column: str) -> Optional[float]:
    instant, measured = columns.us(row, "instant"), columns.us(row, column)
    return measured / instant if instant and measured else None


def _part_of(field: str) -> Callable[[dict, str], Optional[float]]:
    """A field that stands in a row for its own time, for a column's. Rows of layers have no other time than the instant one."""

    def value(row, column):
        main, us = row.get("us") or columns.us(row, "instant"), columns.us(row, column)
        return row[field] * main / us if row.get(field) and main and us else None

    return value


#: What a bar may ask of a row in a column: the ratio to the fastest right peer, the share of the copy bandwidth or of the ceilings, or how near the
#: choice by estimate comes to the one of the column.
VALUES = {"ratio": columns.ratio, "of_copy": _part_of("of_copy"), "of_ceiling": _part_of("of_ceiling"), "instant_of_tuned": _instant_of_tuned}


def is_evidence(row: dict) -> bool:
    """Whether a row was measured well enough to count for or against a bar; one that has no time counts by its trouble."""
    is_timed = any(columns.us(row, column) for column in columns.COLUMNS)
    return row.get("method", 1) >= 2 and (not is_timed or row.get("timed_s", 0.0) >= EVIDENCE_S)


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: which rows count, and (geometric mean, worst) that must be and that we aim at."""

    name: str
    suite: str
    fields: Dict[str, list]
    value: str
    least_bytes: int
    must: Optional[Tuple[float, float]]
    aim: Tuple[float, float]
    columns: Tuple[str, ...] = columns.JUDGED
    rows: Tuple[str, ...] = (LISTS, DRAWN)

    def counts(self, row: dict) -> bool:
        """Whether a record's row counts for this bar."""
        places = {"kind": row["bar_kind"], "filter": row["sizes"].get("filter")}
        matches = all(places.get(field, row.get(field)) in allowed for field, allowed in self.fields.items())
        return matches and row["bytes"] >= self.least_bytes

    def values(self, rows: Iterable[dict], column: str) -> List[Tuple[float, float, dict]]:
        """(value, spread, row) of all rows that count and have a value in a column."""
        found = ((VALUES[self.value](row, column), row) for row in rows if self.counts(row))
        return [(value, columns.spread(row, column), row) for value, row in found if value]


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a bar stands in one lease: rows with a value and rows that there are, mean, worst, and whether must and aim are passed.

    ``wrong`` rows are wrong or refused on our side; ``unopposed`` ones are right there and timed, and wrong on every peer's.

    None: not asked, or not to be told before all rows are measured.
    """

    measured: int
    expected: int
    wrong: int
    unopposed: int
    mean: float
    worst: float
    worst_row: Optional[dict]
    must: Optional[bool]
    aim: Optional[bool]

    @property
    def exceptions(self) -> str:
        """What is to be said of rows without a value, beginning with a comma; empty where there are none."""
        wrong = f", {self.wrong} wrong or refused" if self.wrong else ""
        return wrong + (f", {self.unopposed} of which every peer is wrong" if self.unopposed else "")


def load(path: Path = Path(__file__).with_name("bars.toml")) -> List[Bar]:
    """The bars, in the order of the file."""
    found = []
    for bar in _table(path)["bar"]:
        known = {"name", "suite", "must", "aim", "value", "least_bytes", "columns", "rows"}
        fields = {name: value for name, value in bar.items() if name not in known}
        must = tuple(bar["must"]) if "must" in bar else None
        where = {name: tuple(bar[name]) for name in ("columns", "rows") if name in bar}
        found.append(Bar(bar["name"], bar["suite"], fields, bar.get("value", "ratio"), bar.get("least_bytes", 0), must, tuple(bar["aim"]), **where))
    return found


def _passes(value: float, asked: float, spread: float) -> bool:
    allowance = min(spread, TIE) if asked == 1.0 else 0.0
    return value >= asked - allowance


def _are_wrong(row: dict) -> bool:
    """Whether peers answered and none was right."""
    theirs = [side for name, side in row.get("sides", {}).items() if name not in columns.COLUMNS]
    return any("fault" in side for side in theirs) and all("fault" in side or "refused" in side for side in theirs)


def standing(bar: Bar, rows: Sequence[dict], every: Sequence[dict] = (), column: str = "measured") -> Optional[Standing]:
    """Where a bar stands in a column by these rows; None where none of them counts. A row that is wrong or refused on our side fails a bar: it has no
    ratio, and is no pass. One that is right here and wrong on every peer's side has nothing to be compared with, and does not count.

    ``every`` are the rows of the lists (see ``problems.identity``). A part of them may fail a bar by its worst row, but cannot pass it.
    """
    mine = [row for row in rows if bar.counts(row)]
    wrong = sum(1 for row in mine if columns.trouble(row, column) or row.get("fault") or row.get("refused"))
    values = bar.values(mine, column)
    if not mine or not (wrong or values or any(columns.us(row, column) for row in mine)):
        return None
    unopposed = sum(1 for row in mine if columns.us(row, column) and not bar.values([row], column) and _are_wrong(row))
    expected = max(sum(1 for row in every if bar.counts(row)), len(mine), LEAST_DRAWN if any(row.get("drawn") for row in mine) else 0)
    is_whole = len(values) + wrong + unopposed >= expected
    if not values:
        fails = False if wrong else None
        return Standing(0, expected, wrong, unopposed, math.nan, math.nan, None, fails if bar.must else None, fails)
    mean = geometric_mean(value for value, _, _ in values)
    worst, spread, row = min(values, key=lambda entry: entry[0])
    typical = sorted(spread for _, spread, _ in values)[len(values) // 2]

    def passes(asked) -> Optional[bool]:
        if wrong or not _passes(worst, asked[1], spread):
            return False
        return _passes(mean, asked[0], typical) if is_whole else None

    return Standing(len(values), expected, wrong, unopposed, mean, worst, row, passes(bar.must) if bar.must else None, passes(bar.aim))


def of(rows: Iterable[dict], where: str) -> List[dict]:
    """The rows of the lists, or the drawn ones."""
    return [row for row in rows if bool(row.get("drawn")) == (where == DRAWN)]


def by_lease(runs: Iterable[Run], suite: str) -> "Dict[str, List[dict]]":
    """Rows of a suite by lease, oldest lease first; of rows measured twice in a lease the last."""
    leases: Dict[str, Dict[str, dict]] = {}
    for run in runs:
        if run.suite == suite:
            leases.setdefault(run.lease, {}).update(run.rows)
    return {lease: list(rows.values()) for lease, rows in leases.items()}


def word(passed: Sequence[Optional[bool]]) -> str:
    """The standing of a bar over leases, oldest first: met in the last two, passed in the last alone, or missed there."""
    asked = [one for one in passed if one is not None]
    if not asked:
        return "not measured"
    if not asked[-1]:
        return "missed"
    return "met" if len(asked) > 1 and asked[-2] else "passed once"


#: Words of `word`, the worst first; what is not measured yet is no pass of the whole.
WORDS = ("missed", "not measured", "passed once", "met")


def worst_word(words: Iterable[str]) -> str:
    """The standing of a bar over its columns."""
    return min(words, key=WORDS.index, default="not measured")


@dataclasses.dataclass(frozen=True)
class Fact:
    """One number that is asked of a whole program: at least or at most so much."""

    name: str
    row: str
    field: str
    must_least: Optional[float] = None
    must_most: Optional[float] = None
    aim_most: Optional[float] = None

    @property
    def suite(self) -> str:
        return self.row.split("/")[0]

    @property
    def asked(self) -> str:
        return f"≥ {self.must_least:g}" if self.must_least is not None else f"≤ {self.must_most:g}"

    def passes(self, value: float) -> bool:
        if self.must_least is not None:
            return value >= self.must_least - (TIE if self.must_least == 1.0 else 0.0)
        return value <= self.must_most


def load_facts(path: Path = Path(__file__).with_name("bars.toml")) -> List[Fact]:
    """The numbers asked of whole programs, in the order of the file."""
    return [Fact(**fact) for fact in _table(path)["fact"]]
