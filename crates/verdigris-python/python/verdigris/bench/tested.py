"""``docs/performance/tested.json``, from the records of every chip.

Needs neither PyTorch nor the native module, so that anybody can tell whether the file is fresh.
"""

import json
from pathlib import Path
from typing import Dict, Iterable, List

from . import record
from .record import Run

#: The file's name, beside the plots.
NAME = "tested.json"


def rows(runs: Iterable[Run]) -> List[dict]:
    """Which machine, driver and software have been measured together, with how many rows and how many of them wrong; what ``verdigris matrix`` shows."""
    found: Dict[tuple, dict] = {}
    for run in runs:
        machine, software = run.head["machine"], run.head["software"]
        versions = {name: str(software[name]) for name in ("torch", "cudnn", "cublaslt") if name in software}
        key = (str(machine.get("name")), str(machine.get("driver") or ""), tuple(versions.items()))
        entry = found.setdefault(
            key,
            {"machine": key[0], "driver": key[1], **versions, "suites": [], "runs": 0, "rows": 0, "wrong": 0, "first": run.date, "last": run.date},
        )
        entry["suites"] = sorted({*entry["suites"], run.suite})
        entry["runs"] += 1
        entry["rows"] += len(run.rows)
        entry["wrong"] += sum(1 for row in run.rows.values() if row.get("fault"))
        entry["first"], entry["last"] = min(entry["first"], run.date), max(entry["last"], run.date)
    return [found[key] for key in sorted(found)]


def text(folder: Path) -> str:
    """The file, from all records of a folder and the folders in it."""
    return json.dumps(rows(record.read_folder(folder)), indent=1) + "\n"
