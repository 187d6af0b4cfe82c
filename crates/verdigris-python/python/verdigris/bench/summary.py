"""Tables for people: ratios by class, the ten worst rows, the bars."""

import math
from typing import Dict, Iterable, List, Sequence, Tuple

from . import bars
from .bars import geometric_mean

#: How many of the worst rows are shown.
WORST = 10


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned columns for a terminal: the first ``left`` to the left, the others to the right."""
    lines = [[str(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in [list(head), *lines]) for i in range(len(head))]

    def one(line):
        cells = (cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths)))
        return "  ".join(cells).rstrip()

    return "\n".join([one(head), one(["─" * width for width in widths]), *(one(line) for line in lines)])


def number(value, digits: int = 3) -> str:
    """A number to so many digits, a dash for none."""
    if value is None or isinstance(value, str) or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}"


def percent(value) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def groups(rows: Iterable[dict]) -> "Dict[Tuple[str, str, str, str], List[dict]]":
    """Rows by kind, direction, dtype and layout (of products: all layouts together)."""
    found: Dict[Tuple[str, str, str, str], List[dict]] = {}
    for row in rows:
        layout = row["layout"] if row["direction"] != "product" else ""
        found.setdefault((row["bar_kind"], row["direction"], row["dtype"], layout), []).append(row)
    return found


def class_lines(rows: Iterable[dict]) -> List[List[str]]:
    """One line for each group: rows, mean, worst, best, wins and losses, against the fastest peer, without tuning, of the ceiling, faults."""
    lines = []
    for (kind, direction, dtype, layout), members in groups(rows).items():
        ratios = [row["ratio"] for row in members if row.get("ratio")]
        # A tie within the spread is nobody's win.
        wins = sum(1 for row in members if row.get("ratio") and row["ratio"] > 1 + (row.get("ratio_spread") or 0))
        losses = sum(1 for row in members if row.get("ratio") and row["ratio"] < 1 - (row.get("ratio_spread") or 0))
        best = geometric_mean(row["ratio_best"] for row in members if row.get("ratio_best"))
        instant = geometric_mean(row["ratio_instant"] for row in members if row.get("ratio_instant"))
        ceiling = [row["of_ceiling"] for row in members if row.get("of_ceiling")]
        bad = sum(1 for row in members if row.get("fault") or row.get("refused"))
        lines.append(
            [
                " ".join(part for part in (kind, direction, dtype, "NCHW" if layout == "channels-first" else "") if part),
                f"{len(ratios)}/{len(members)}",
                number(geometric_mean(ratios)),
                number(min(ratios, default=None)),
                number(max(ratios, default=None)),
                f"{wins}/{losses}",
                number(best),
                number(instant),
                percent(geometric_mean(ceiling) if ceiling else None),
                str(bad) if bad else "",
            ]
        )
    return lines


CLASS_HEAD = ["kind", "rows", "mean", "worst", "best", "won/lost", "fastest peer", "instant", "of ceiling", "wrong or refused"]


def worst_rows(rows: Iterable[dict], count: int = WORST) -> List[dict]:
    """The rows with the least ratios."""
    return sorted((row for row in rows if row.get("ratio")), key=lambda row: row["ratio"])[:count]


WORST_HEAD = ["row", "ratio", "ours µs", "peer µs", "engine"]


def worst_lines(rows: Iterable[dict]) -> List[List[str]]:
    lines = []
    for row in worst_rows(rows):
        engine = str(row.get("engine") or "–")
        lines.append([row["key"], number(row["ratio"]), number(row["us"], 4), number(row["peer_us"], 4), engine])
    return lines


BAR_HEAD = ["bar", "rows", "mean", "must", "aim", "worst", "must", "aim", "passes", "aim passed"]


def bar_lines(rows: Sequence[dict], suite: str) -> List[List[str]]:
    """The bars of a suite by one set of rows."""
    lines = []
    for bar in bars.load():
        stands = bars.standing(bar, rows) if bar.suite == suite else None
        if stands is None:
            continue
        must = bar.must or (math.nan, math.nan)
        verdict = "–" if stands.must is None else "yes" if stands.must else "no"
        rows_text = f"{stands.measured}{stands.exceptions}"
        lines.append(
            [
                bar.name,
                rows_text,
                number(stands.mean),
                number(must[0]),
                number(bar.aim[0]),
                number(stands.worst),
                number(must[1]),
                number(bar.aim[1]),
                verdict,
                "yes" if stands.aim else "no",
            ]
        )
    return lines


TROUBLE_HEAD = ["why", "rows", "which"]


def trouble_lines(rows: Iterable[dict], shown: int = 3) -> List[List[str]]:
    """What was wrong on either side and what ours refused, one line for each reason."""
    by_reason: Dict[str, List[str]] = {}
    for row in rows:
        reason = row.get("fault") or row.get("refused")
        if reason:
            by_reason.setdefault(str(reason), []).append(row["key"])
        for name, side in row.get("sides", {}).items():
            if side.get("fault"):
                by_reason.setdefault(str(side["fault"]), []).append(f"{row['key']} ({name})")
    return [[reason, str(len(keys)), ", ".join(keys[:shown]) + (", …" if len(keys) > shown else "")] for reason, keys in by_reason.items()]


def text(rows: Sequence[dict], suite: str) -> str:
    """All of it, for a terminal."""
    parts = []
    if any(row.get("ratio") for row in rows):
        parts.append("Peer's time over ours (above 1, we are faster)\n\n" + table(CLASS_HEAD, class_lines(rows)))
        parts.append(f"The {WORST} worst rows\n\n" + table(WORST_HEAD, worst_lines(rows)))
    elif rows:
        timed = [[row["key"], number(row.get("us"), 4), number(row.get("of_ceiling"))] for row in rows if row.get("us")]
        parts.append(table(["row", "ours µs", "of ceiling"], timed) if timed else "no row was timed")
    lines = bar_lines(rows, suite)
    if lines:
        parts.append("Bars (met when passed in two leases)\n\n" + table(BAR_HEAD, lines))
    lines = trouble_lines(rows)
    if lines:
        parts.append("Wrong or refused\n\n" + table(TROUBLE_HEAD, lines, left=3))
    return "\n\n".join(parts)
