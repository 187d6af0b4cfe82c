"""What a chip can do: one set of ceilings for all leases of a kind, and how near rows come to it.

A run measures its own (``machine.ceilings``), but runs differ by what the chip's power and heat allow while they are taken. Tables hold every row
against the median of all leases, with the time that a launch takes at least in front.
"""

from typing import Dict, Iterable, List, Sequence

from .machine import least_us
from .measure import quantile
from .record import Run

#: Fields of a run's ceilings; a record of the first method has no launch floor.
FIELDS = ("gemm_tflops", "copy_gb_per_s", "launch_us")


def of_chip(runs: Iterable[Run]) -> Dict[str, float]:
    """The medians over leases of the newest run's kind of machine; of a lease's runs the last counts. Empty where no run has any."""
    runs = [run for run in runs if run.head.get("ceilings")]
    name = runs[-1].head["machine"].get("name") if runs else None
    by_lease = {run.lease: run.head["ceilings"] for run in runs if run.head["machine"].get("name") == name}
    known = {field: [limits[field] for limits in by_lease.values() if limits.get(field)] for field in FIELDS}
    return {field: quantile(values, 0.5) for field, values in known.items() if values}


def applied(rows: Sequence[dict], limits: Dict[str, float]) -> List[dict]:
    """The rows with the part of the ceilings that they reach."""
    if not limits:
        return list(rows)
    found = []
    for row in rows:
        least = least_us(limits, row["dtype"], row["flops"], row["bytes"]) if row.get("us") else None
        found.append({**row, "of_ceiling": least / row["us"]} if least else dict(row))
    return found
