"""The suites: which lists they read, and in which order their rows are measured."""

import dataclasses
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from . import drawn
from .problems import CHANNELS_LAST, ListError, Problem, load


@dataclasses.dataclass(frozen=True)
class Suite:
    """One suite: its name, its lists under ``bench/lists``, and the rank of a row (lower is measured earlier)."""

    name: str
    lists: Tuple[str, ...]
    rank: Callable[[Problem], int]


def _conv_rank(row) -> int:
    is_last = row.layout == CHANNELS_LAST
    if is_last and row.dtype == "bf16":
        return 0
    if is_last and (row.kind, row.dtype, row.direction) == ("dense", "tf32", "wgrad") or row.dtype == "f32":
        return 1
    return 2 if is_last else 3


def _gemm_rank(row) -> int:
    if row.dtype == "bf16":
        return 0 if row.cls in ("square", "unaligned", "anchors", "llama") else 1
    return 2 if row.dtype == "f16" else 3


SUITES: Dict[str, Suite] = {
    "gemm": Suite("gemm", ("gemm.toml",), _gemm_rank),
    "conv": Suite("conv", ("conv.toml", "conv_more.toml"), _conv_rank),
}


def lists_folder() -> Optional[Path]:
    """``bench/lists`` of the checkout around the current folder or around this file; None outside one."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / "bench" / "lists" / "conv.toml").is_file():
                return folder / "bench" / "lists"
    return None


def rows(suite: Suite, files: Sequence[str] = ()) -> List[Problem]:
    """All rows of a suite, from the given files instead of its own if there are any."""
    if files:
        return load([Path(file) for file in files])
    folder = lists_folder()
    if folder is None:
        raise ListError("no bench/lists in this folder or above it: run in a checkout, or name a list with --list")
    return load([folder / name for name in suite.lists])


def drawn_rows(suite: Suite, seed: int) -> List[Problem]:
    """The rows that a seed draws for a suite, where the checkout says from what; none outside one."""
    folder = lists_folder()
    return drawn.draw(folder / "drawn.toml", suite.name, seed) if folder is not None else []


def in_turn(suite: Suite, wanted: List[Problem]) -> List[Problem]:
    """The order of measuring: by rank, and within a rank the kinds and directions in turn, so that a run cut short has seen something of each."""
    lanes: Dict[Tuple, List[Problem]] = {}
    for row in wanted:
        lanes.setdefault((suite.rank(row), row.kind, row.direction, row.dtype), []).append(row)
    place = {}
    for lane, members in lanes.items():
        for i, row in enumerate(members):
            place[row] = (lane[0], i)
    # Sorting is stable: rows of one place stay in the list's order.
    return sorted(wanted, key=place.__getitem__)
