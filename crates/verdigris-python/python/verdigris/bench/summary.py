"""Tables for people: ratios by class, the ten worst rows, the bars."""

import math
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from . import bars, columns, record
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


def _mean_and_worst(members: Sequence[dict], column: str) -> str:
    ratios = [ratio for ratio in (columns.ratio(row, column) for row in members) if ratio]
    return f"{number(geometric_mean(ratios))} / {number(min(ratios))} ({len(ratios)})" if ratios else "–"


def class_lines(rows: Iterable[dict]) -> List[List[str]]:
    """One line for each group: rows, mean and worst (rows) in each column, our error over the best peer's, of the ceiling, wrong or refused."""
    lines = []
    for (kind, direction, dtype, layout), members in groups(rows).items():
        ceiling = [row["of_ceiling"] for row in members if row.get("of_ceiling")]
        errors = [row["error"] / least for row in members if row.get("error") and (least := peer_error(row))]
        bad = sum(1 for row in members if row.get("fault") or row.get("refused"))
        lines.append(
            [
                " ".join(part for part in (kind, direction, dtype, "NCHW" if layout == "channels-first" else "") if part),
                str(len(members)),
                *(_mean_and_worst(members, column) for column in columns.COLUMNS),
                number(max(errors, default=None)),
                percent(geometric_mean(ceiling) if ceiling else None),
                str(bad) if bad else "",
            ]
        )
    return lines


CLASS_HEAD = ["kind", "rows", *columns.COLUMNS, "worst error of peer's", "of ceiling", "wrong or refused"]


def peer_error(row: dict) -> Optional[float]:
    """The least error of a right peer, relative to f64."""
    sides = (side for name, side in row.get("sides", {}).items() if name not in columns.COLUMNS and not side.get("fault"))
    return min((side["error"] for side in sides if isinstance(side.get("error"), (int, float))), default=None)


def best_column(rows: Iterable[dict]) -> str:
    """The column that most of the rows have, the first of equals."""
    rows = list(rows)
    return max(columns.COLUMNS, key=lambda column: sum(1 for row in rows if columns.ratio(row, column)))


def worst_rows(rows: Iterable[dict], count: int = WORST) -> List[dict]:
    """The rows with the least ratios in the column that most have."""
    rows = list(rows)
    column = best_column(rows)
    return sorted((row for row in rows if columns.ratio(row, column)), key=lambda row: columns.ratio(row, column))[:count]


WORST_HEAD = ["row", "ratio", "ours µs", "fastest peer", "its µs", "engine"]


def worst_lines(rows: Iterable[dict]) -> List[List[str]]:
    rows = list(rows)
    column, lines = best_column(rows), []
    for row in worst_rows(rows):
        side = row if column == columns.main(row) else row.get("sides", {}).get(column, {})
        engine, peer = str(side.get("engine") or row.get("engine") or "–"), row.get("best_peer") or row.get("peer") or "–"
        ours_us, theirs_us = number(columns.us(row, column), 4), number(columns.peer_us(row), 4)
        lines.append([row["key"], number(columns.ratio(row, column)), ours_us, peer, theirs_us, engine])
    return lines


BAR_HEAD = ["bar", "column", "rows", "mean", "must", "aim", "worst", "must", "aim", "passes", "aim passed"]


def bar_lines(rows: Sequence[dict], suite: str) -> List[List[str]]:
    """The bars of a suite by one set of rows, in the columns that it has. Drawn rows and those of the lists are judged apart."""
    lines = []
    for bar in bars.load():
        for where, column in ((where, column) for where in bar.rows for column in bar.columns if bar.suite == suite):
            stands = bars.standing(bar, bars.of(rows, where), column=column)
            if stands is None:
                continue
            must = bar.must or (math.nan, math.nan)
            verdict = "–" if stands.must is None else "yes" if stands.must else "no"
            lines.append(
                [
                    bar.name,
                    f"{column}, {where}",
                    f"{stands.measured}{stands.exceptions}",
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


def rows_and_means(rows: Sequence[dict], each: Tuple[Sequence[str], List[List[str]]], means: Tuple[Sequence[str], List[List[str]]]) -> str:
    """A table of the rows, one of their means, and one of the rows that failed: each a head and its lines."""
    parts = [table(*each)]
    if means[1]:
        parts.append("Fastest right peer's time over ours (above 1, we are faster)\n\n" + table(*means))
    failed = trouble_lines(rows)
    if failed:
        parts.append(table(TROUBLE_HEAD, failed, left=3))
    return "\n\n".join(parts)


def text(rows: Sequence[dict], suite: str) -> str:
    """All of it, for a terminal."""
    parts = []
    if any(row.get("ratio") for row in rows):
        parts.append("Fastest right peer's time over ours (above 1, we are faster): mean / worst (rows)\n\n" + table(CLASS_HEAD, class_lines(rows)))
        parts.append(f"The {WORST} worst rows\n\n" + table(WORST_HEAD, worst_lines(rows)))
    elif rows:
        timed = [[row["key"], number(row.get("us"), 4), number(row.get("of_ceiling"))] for row in rows if row.get("us")]
        parts.append(table(["row", "ours µs", "of ceiling"], timed) if timed else "no row was timed")
    # Rows of a run that is being measured do not say by which method; those of a record do.
    rows = [{"method": record.METHOD, **row} for row in rows]
    short = sum(1 for row in rows if row.get("us") and not bars.is_evidence(row))
    if short:
        parts.append(f"{short} rows were timed for less than {bars.EVIDENCE_S} s, and are no evidence for a bar")
    lines = bar_lines([row for row in rows if bars.is_evidence(row)], suite)
    if lines:
        parts.append("Bars (met when passed in two leases)\n\n" + table(BAR_HEAD, lines))
    lines = trouble_lines(rows)
    if lines:
        parts.append("Wrong or refused\n\n" + table(TROUBLE_HEAD, lines, left=3))
    return "\n\n".join(parts)
