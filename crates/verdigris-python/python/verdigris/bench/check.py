"""The regression gate: ratios of a run against those of the last run with the same driver and peers.

A row fails if its ratio fell by more than max(5 %, 2 x spread), or if it had a ratio and now is wrong or refused. Rates are not compared: they differ
by 15 % between machines of one kind.
"""

import dataclasses
from typing import Dict, Iterable, List, Optional

from .record import Run, merged

#: The least fall that counts, and how many spreads it has to be.
LEAST_FALL, SPREADS = 0.05, 2.0


@dataclasses.dataclass(frozen=True)
class Regression:
    """One row that became worse."""

    key: str
    before: float
    after: Optional[float]
    allowed: float
    why: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the gate found: rows compared, and which of them became worse; ``base`` is None where there was nothing to compare with."""

    base: Optional[List[Run]]
    compared: int
    regressions: List[Regression]

    @property
    def passes(self) -> bool:
        return not self.regressions

    def __str__(self) -> str:
        if self.base is None:
            return "check: no record of this suite with the same driver and peers; nothing to compare with"
        head = f"check: {self.compared} rows compared with the record of {self.base[-1].date}, {len(self.regressions)} became worse"
        return "\n".join([head, *(f"  {one.key}: {one.why}" for one in self.regressions)])


def _spread(row: dict) -> float:
    return row.get("ratio_spread") or 0.0


def compare(before: Dict[str, dict], after: Dict[str, dict]) -> "tuple[int, List[Regression]]":
    """Rows by key against rows by key. Rows that only one side has are passed over."""
    compared, worse = 0, []
    for key, new in after.items():
        old = before.get(key)
        if old is None or not old.get("ratio"):
            continue
        compared += 1
        allowed = max(LEAST_FALL, SPREADS * max(_spread(old), _spread(new)))
        bad = new.get("fault") or new.get("refused")
        if bad:
            worse.append(Regression(key, old["ratio"], None, allowed, f"had the ratio {old['ratio']:.3f}, and now: {bad}"))
        elif new.get("ratio") and new["ratio"] < old["ratio"] * (1 - allowed):
            fall = 1 - new["ratio"] / old["ratio"]
            why = f"{old['ratio']:.3f} became {new['ratio']:.3f}: {100 * fall:.1f} % less, {100 * allowed:.1f} % allowed"
            worse.append(Regression(key, old["ratio"], new["ratio"], allowed, why))
    return compared, sorted(worse, key=lambda one: one.after or 0.0)


def check(run: Run, records: Iterable[Run]) -> Verdict:
    """Holds a run against the last records before it that are comparable; a row is compared with the last of them that has it."""
    base = [
        old
        for old in records
        if old.suite == run.suite and old.peers == run.peers and old.date <= run.date and (old.path, old.date) != (run.path, run.date)
    ]
    base.sort(key=lambda old: old.date)
    if not base:
        return Verdict(None, 0, [])
    compared, worse = compare(merged(base), run.rows)
    return Verdict(base, compared, worse)
