"""Records: JSON lines, dated, written row by row, so that a run that is killed loses nothing.

The first line of a run is its head (machine, driver, library versions, options, ceilings), the last its foot (clocks at the end); every line
between is one row. A file may hold several runs one after the other. Rows carry the number of no machine: they belong to the head above them.
"""

import dataclasses
import gzip
import json
import math
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional

#: Told apart from the records of the program ``workshop bench`` by this.
BY = "verdigris.bench"

#: How rows are measured; a head says it, and numbers of different methods are not compared. 1 (heads that say nothing): the column that was called
#: measured held plans that ship or were remembered, peers were asked once, rows were timed as short as the run liked. 2: ``columns``, ``peers`` and
#: ``measure`` as they stand.
METHOD = 2


@dataclasses.dataclass
class Run:
    """One run of one suite: its head and its rows by key."""

    head: dict
    rows: Dict[str, dict]
    foot: Optional[dict]
    path: Optional[Path]

    @property
    def suite(self) -> str:
        return self.head["suite"]

    @property
    def date(self) -> str:
        return self.head["date"]

    @property
    def method(self) -> int:
        return self.head.get("method", 1)

    @property
    def source(self) -> str:
        """The sources that ours was built from; empty in records that do not say."""
        return (self.head.get("source") or {}).get("hash", "")

    @property
    def lease(self) -> str:
        """The chip and its start: two runs with the same are no two opinions."""
        machine = self.head["machine"]
        return f"{machine.get('uuid') or machine.get('name')} {machine.get('boot')}"

    @property
    def peers(self) -> tuple:
        """Whom the run compared with, how, and on what kind of machine: ratios of runs with the same can be held against each other."""
        machine, software = self.head["machine"], self.head["software"]
        return (self.method, machine.get("name"), machine.get("driver"), *(software.get(name) for name in ("torch", "cudnn", "cublaslt")))


def _plain(value):
    """JSON has no words for infinity and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


class Writer:
    """Appends lines to a file, or to nothing where there is none."""

    def __init__(self, path: Optional[Path]):
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def line(self, kind: str, content: dict) -> None:
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_plain({"by": BY, "kind": kind, **content}), ensure_ascii=False) + "\n")


def say_facts(facts: dict, say: Callable[[str], None]) -> None:
    """Each fact of a row on a line of its own."""
    for fact, value in facts.items():
        say(f"  {fact}: {value if not isinstance(value, float) else format(value, '.4g')}")


def read(path: Path) -> List[Run]:
    """The runs of a file, which may be packed by gzip. Lines of other programs are passed over, and so is a last line that was cut short."""
    runs: List[Run] = []
    content = Path(path).read_bytes()
    text = (gzip.decompress(content) if Path(path).suffix == ".gz" else content).decode("utf-8")
    for line in text.splitlines():
        # Files of other programs are large; their lines are not worth reading as JSON.
        if BY not in line:
            continue
        try:
            content = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(content, dict) or content.get("by") != BY:
            continue
        if content["kind"] == "head":
            runs.append(Run(content, {}, None, Path(path)))
        elif runs and content["kind"] == "row":
            runs[-1].rows[content["key"]] = {**content, "method": runs[-1].method}
        elif runs and content["kind"] == "foot":
            runs[-1].foot = content
    return runs


def read_folder(folder: Path) -> List[Run]:
    """All runs of a folder and the folders in it, oldest first."""
    paths = sorted(path for name in ("*.jsonl", "*.jsonl.gz") for path in Path(folder).rglob(name))
    runs = [run for path in paths for run in read(path)]
    return sorted(runs, key=lambda run: run.date)


def merged(runs: Iterable[Run]) -> Dict[str, dict]:
    """Rows by key, each from the last of the runs that has it."""
    rows: Dict[str, dict] = {}
    for run in runs:
        for key, row in run.rows.items():
            rows[key] = {**row, "date": run.date, "lease": run.lease}
    return rows


def fresh_path(folder: Path, date: str, name: str) -> Path:
    """``DATE-NAME-python.jsonl`` in a folder, or with a number behind it where that is taken."""
    stem = f"{date[:10]}-{name}-python"
    path = folder / f"{stem}.jsonl"
    number = 2
    while path.exists():
        path = folder / f"{stem}-{number}.jsonl"
        number += 1
    return path
