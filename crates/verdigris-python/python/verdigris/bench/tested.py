"""``docs/performance/tested.json``, from the records of every chip: those of this bench, of ``verdigris canary`` and of ``workshop check conformance``.

Needs neither PyTorch nor the native module, so that anybody can tell whether the file is fresh.
"""

import dataclasses
import json
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Tuple

from . import record
from .record import Run

#: The file's name, beside the plots.
NAME = "tested.json"

#: Where the records of canaries lie that ship in the program.
SHIPPED = Path("cases") / "canary"

#: The suites of our own programs that are rows, beside those of the bench.
SUITES = ("canary", "conformance")


@dataclasses.dataclass
class Tried:
    """Rows of one suite that were tried together."""

    machine: str
    driver: str
    """The driver's release, or nothing where a record does not say it."""
    cuda: str
    """Where it does not, the version of CUDA that the driver supports, which many releases share."""
    versions: Dict[str, str]
    suite: str
    rows: int
    wrong: int
    first: str
    last: str


def of_bench(run: Run) -> Tried:
    """A run of the bench."""
    machine, software = run.head["machine"], run.head["software"]
    versions = {name: str(software[name]) for name in ("torch", "cudnn", "cublaslt") if name in software}
    wrong = sum(1 for row in run.rows.values() if row.get("fault"))
    return Tried(str(machine.get("name")), str(machine.get("driver") or ""), "", versions, run.suite, len(run.rows), wrong, run.date, run.date)


def chip_and_driver(row: dict) -> Optional[Tuple[str, str, str]]:
    """The chip, the driver's release and, for want of that, CUDA's version; none where the row does not name both chip and driver."""
    if row["suite"] == "canary":
        found = (row.get("device"), row.get("driver"), "")
    else:
        # `NVIDIA H200 GPU-…`: the name, and one chip's number.
        name, release = str(row.get("machine") or "").rpartition(" GPU-")[0], row.get("release")
        found = (name, release or "", "" if release else row.get("driver"))
    return found if found[0] and (found[1] or found[2]) else None


def is_wrong(row: dict) -> bool:
    """A canary's graph with wrong elements, or with other bits each time; an instruction that is not what the interpreter says."""
    return bool(row.get("wrong") or row.get("mismatches")) or row.get("repeats") is False


def of_programs(folders: Iterable[Path]) -> List[Tried]:
    """What canaries and probes of instructions found, a file and suite each. A row that stands in two files is one: those that ship are copies."""
    found: Dict[tuple, Tried] = {}
    seen: Dict[str, Path] = {}
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            # Files of other programs are large; their lines are not worth reading as JSON.
            if not any(f'"{suite}"' in line for suite in SUITES):
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not isinstance(row, dict) or row.get("suite") not in SUITES:
                continue
            # A failure stands beside its instruction; an instruction that is not probed has a row with its reason alone.
            if row["suite"] == "conformance" and not row.get("checks"):
                continue
            where = chip_and_driver(row)
            if where is None or seen.setdefault(line, path) != path:
                continue
            key = (path, row["suite"], *where)
            one = found.setdefault(key, Tried(*where, {}, row["suite"], 0, 0, row["date"], row["date"]))
            one.rows += 1
            one.wrong += is_wrong(row)
            one.first, one.last = min(one.first, row["date"]), max(one.last, row["date"])
    return list(found.values())


def rows(tried: Iterable[Tried]) -> List[dict]:
    """Which machine, driver and software have been tried together, with how many rows and how many of them wrong; what ``verdigris matrix`` shows."""
    found: Dict[tuple, dict] = {}
    for one in tried:
        key = (one.machine, one.driver, one.cuda, tuple(one.versions.items()))
        cuda = {"cuda": one.cuda} if one.cuda else {}
        entry = found.setdefault(
            key,
            {
                "machine": one.machine,
                "driver": one.driver,
                **cuda,
                **one.versions,
                "suites": [],
                "runs": 0,
                "rows": 0,
                "wrong": 0,
                "first": one.first,
                "last": one.last,
            },
        )
        entry["suites"] = sorted({*entry["suites"], one.suite})
        entry["runs"] += 1
        entry["rows"] += one.rows
        entry["wrong"] += one.wrong
        entry["first"], entry["last"] = min(entry["first"], one.first), max(entry["last"], one.last)
    return [found[key] for key in sorted(found)]


def text(*folders: Path) -> str:
    """The file, from all records of folders and the folders in them."""
    runs = [run for folder in folders for run in record.read_folder(folder)]
    return json.dumps(rows([*map(of_bench, runs), *of_programs(folders)]), indent=1) + "\n"
