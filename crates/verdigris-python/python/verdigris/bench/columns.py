"""The three columns of a row: how the plan was chosen whose time stands there.

``instant``: by estimate, in a process that remembers nothing and takes nothing that ships. ``measured``: by the clock, in that run. ``shipped``: from
the set that ships with the library, and so called. Bars and the gate speak of the first two.

Records of the first method (``record.METHOD``) wrote a plan that ships, or that an earlier run had left behind, where the measured one was asked
for; their ``chosen_by`` tells. Such times stand in the column ``shipped`` here, and ``measured`` is empty.
"""

from typing import Optional

#: In the order of the page.
COLUMNS = ("instant", "measured", "shipped")

#: What bars and the gate judge.
JUDGED = ("instant", "measured")


def main(row: dict) -> str:
    """The column that a row's own fields (``us``, ``ratio``, …) are of; the others stand in its ``sides``."""
    chosen = set(row.get("chosen_by") or ())
    if "shipped" in chosen or (row.get("method", 1) < 2 and chosen - {"clock"}):
        return "shipped"
    return "measured"


def _suffix(column: str, row: dict) -> Optional[str]:
    """What is behind the names of a column's ratios; None where the row's own fields are of another column."""
    if column == main(row):
        return ""
    return f"_{column}" if column != "measured" else None


def ratio(row: dict, column: str) -> Optional[float]:
    """The fastest right peer's time over ours."""
    suffix = _suffix(column, row)
    if suffix is None:
        return None
    known = row.get(f"ratio_best{suffix}") or row.get(f"ratio{suffix}")
    if suffix and not row.get(f"ratio_best{suffix}") and known and row.get("ratio") and row.get("ratio_best"):
        # The first method compared the other columns with the first peer alone.
        known *= row["ratio_best"] / row["ratio"]
    return known if isinstance(known, (int, float)) else None


def us(row: dict, column: str) -> Optional[float]:
    """Our time."""
    if column == main(row):
        return row.get("us")
    return row.get("sides", {}).get(column, {}).get("us") if column != "measured" else None


def spread(row: dict, column: str) -> float:
    """The interquartile range of a column's ratio, as a part of it."""
    known = row.get("ratio_spread") if column == main(row) else row.get(f"ratio_spread_{column}", row.get("ratio_spread"))
    return known or 0.0


def peer_us(row: dict) -> Optional[float]:
    """The fastest right peer's time."""
    name = row.get("best_peer") or row.get("peer")
    side = row.get("sides", {}).get(name, {})
    return side.get("us") or row.get("peer_us")


def trouble(row: dict, column: str) -> Optional[str]:
    """Why a column has no right time: wrong, or refused."""
    side = row if column == main(row) else row.get("sides", {}).get(column, {})
    return side.get("fault") or side.get("refused")
