"""``docs/performance.md`` and its plots, from the records and nothing else."""

import json
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Sequence

from . import bars, record, summary, svg
from .bars import geometric_mean
from .problems import ListError, identity
from .record import Run
from .suites import SUITES, lists_folder
from .suites import rows as rows_of
from .summary import number, percent

# How many leases the table of bars shows; the records hold all.
SHOWN_LEASES = 3

HEAD = """# Performance

<!-- Rendered by `python -m verdigris.bench render` from bench/record. Change the records or the renderer, never this page. -->

Ours beside PyTorch's (cuDNN with `cudnn.benchmark` on, cuBLAS, and PyTorch's own kernels) on the same buffers in the same run. **Ratios are the
peer's time over ours: above 1, we are faster.** Ours is called through `verdigris.torch` as a user calls it, after measuring (`mode="measured"`);
the column *instant* is the plan chosen by estimate. `python -m verdigris.bench --help` tells how to take these numbers on another machine.

- **Right before fast.** Every side is held against f64 sums at sampled positions and wherever two answers differ most; what is wrong is not timed
  and stands below.
- **In turns.** Blocks of each side follow each other in rotating order; a ratio is the median of ratios of neighbouring blocks, a spread its
  interquartile range. Operands rotate through more memory than twice the L2. Where a side is shorter than 50 µs, all are replayed as CUDA graphs.
- **A bar is met** when it passes in two separate leases of a machine; passed in one alone it says so. A row that is wrong or refused fails its bar. Where the
  first peer's answer is wrong, the fastest right peer takes its place; where no peer is right, the row is counted and has no ratio.
- Rates differ by 15 % between chips of one type, so ratios compare across runs and rates do not.
"""


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    def one(line):
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |"

    rule = ["---" if i < left else "--:" for i in range(len(head))]
    return "\n".join([one(head), one(rule), *(one(line) for line in lines)])


def _lease_names(runs: Iterable[Run]) -> Dict[str, str]:
    names: Dict[str, str] = {}
    for run in runs:
        names.setdefault(run.lease, chr(ord("A") + len(names)) if len(names) < 26 else f"L{len(names) + 1}")
    return names


def _runs(runs: Sequence[Run], names: Dict[str, str]) -> str:
    lines = []
    for run in runs:
        machine, software, limits = run.head["machine"], run.head["software"], run.head.get("ceilings") or {}
        versions = ", ".join(f"{name} {software[name]}" for name in ("torch", "cudnn", "cublaslt", "verdigris") if name in software)
        chip = str(machine.get("uuid") or "")[:12]
        lines.append(
            [
                names[run.lease],
                run.date,
                run.suite,
                len(run.rows),
                f"{machine.get('name')} {chip}",
                machine.get("driver") or "–",
                versions,
                number(limits.get("gemm_tflops"), 4),
                number(limits.get("copy_gb_per_s"), 5),
                (run.head.get("clocks") or {}).get("clocks.sm", "–"),
            ]
        )
    head = ["lease", "begun", "suite", "rows", "machine", "driver", "versions", "GEMM TFLOP/s", "copy GB/s", "SM clock"]
    return "## Runs\n\n" + _markdown(head, lines, left=3)


def _listed(suite: str) -> List[dict]:
    """What the lists of a suite hold; nothing outside a checkout."""
    return [identity(row) for row in rows_of(SUITES[suite])] if lists_folder() is not None else []


def _standings(runs: Sequence[Run], names: Dict[str, str]) -> str:
    lines = []
    every = {name: _listed(name) for name in SUITES}
    for bar in bars.load():
        stands = {lease: bars.standing(bar, rows, every[bar.suite]) for lease, rows in bars.by_lease(runs, bar.suite).items()}
        stands = {lease: one for lease, one in stands.items() if one is not None}
        must = f"{bar.must[0]:g} / {bar.must[1]:g}" if bar.must else "–"
        seen = [
            f"{names[lease]}: {number(one.mean)} / {number(one.worst)} ({one.measured} of {one.expected} rows{one.exceptions})"
            for lease, one in stands.items()
        ]
        verdict = bars.word([one.must for one in stands.values()]) if bar.must else "–"
        aim = bars.word([one.aim for one in stands.values()])
        lines.append([bar.name, must, f"{bar.aim[0]:g} / {bar.aim[1]:g}", _latest(seen), _strong(verdict), _strong(aim)])
    head = ["bar (bf16, channels-last unless said)", "must", "aim", "mean / worst", "must is", "aim is"]
    text = f"## Bars\n\nGeometric mean and worst row, in the last {SHOWN_LEASES} leases that measured them; verdicts are of all.\n\n" + _markdown(head, lines)
    return text + "\n\n" + _facts(runs, names)


def _facts(runs: Sequence[Run], names: Dict[str, str]) -> str:
    lines = []
    for fact in bars.load_facts():
        values = {}
        for run in runs:
            value = run.rows.get(fact.row, {}).get(fact.field)
            if isinstance(value, (int, float)):
                values[run.lease] = value
        seen = [f"{names[lease]}: {number(value)}" for lease, value in values.items()]
        lines.append([fact.name, fact.asked, _latest(seen), _strong(bars.word([fact.passes(value) for value in values.values()]))])
    return _markdown(["whole programs", "must", "measured", "must is"], lines)


def _latest(seen: Sequence[str]) -> str:
    """What the last leases measured, a line each."""
    return "<br>".join(seen[-SHOWN_LEASES:]) or "–"


def _strong(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "missed" else verdict


def _behind(rows: Sequence[dict], suite: str) -> str:
    slower = [row for row in rows if row.get("ratio") and row["ratio"] < 1 - (row.get("ratio_spread") or 0.0)]
    measured = sum(1 for row in rows if row.get("ratio"))
    text = f"### Where we are behind\n\n{len(slower)} of {measured} rows are slower than the peer's beyond their spread."
    worst = [line for line, row in zip(summary.worst_lines(rows), summary.worst_rows(rows)) if row["ratio"] < 1]
    if worst:
        text += " The worst of them:\n\n" + _markdown(summary.WORST_HEAD, worst)
    lines = summary.trouble_lines(rows)
    if lines:
        text += "\n\nWrong or refused:\n\n" + _markdown(summary.TROUBLE_HEAD, lines)
    return text


def _plots(rows: Sequence[dict], suite: str, runs: Sequence[Run], folder: Path) -> List[str]:
    """Writes the plots of a suite; returns the lines that show them."""
    shown = []
    groups = []
    for (kind, direction, dtype, layout), members in summary.groups(rows).items():
        ratios = [row["ratio"] for row in members if row.get("ratio")]
        if ratios:
            groups.append((" ".join(part for part in (kind, direction, dtype, "NCHW" if layout == "channels-first" else "") if part), ratios))
    folder.mkdir(parents=True, exist_ok=True)
    if groups:
        (folder / f"ratios-{suite}.svg").write_text(svg.ratio_bars(f"{suite}: against PyTorch", groups), encoding="utf-8")
        shown.append(f"![ratios by kind]({folder.name}/ratios-{suite}.svg)")
    # Points of one run alone lie under that run's ceilings.
    last = next((run for run in reversed(runs) if run.suite == suite and run.rows and run.head.get("ceilings")), None)
    if last is not None:
        points = [
            (row["name"], row["flops"] / row["bytes"], row["tflops"], row["flops"] / row["peer_us"] * 1e-6 if row.get("peer_us") else None)
            for row in last.rows.values()
            if row["dtype"] == "bf16" and row.get("tflops")
        ]
        if points:
            limits = last.head["ceilings"]
            text = svg.roofline(f"{suite}, bf16, {last.date[:10]}", points, limits["gemm_tflops"], limits["copy_gb_per_s"])
            (folder / f"roofline-{suite}.svg").write_text(text, encoding="utf-8")
            shown.append(f"![roofline]({folder.name}/roofline-{suite}.svg)")
    return shown


def _every_row(rows: Sequence[dict]) -> str:
    lines = []
    for row in rows:
        if not row.get("us"):
            continue
        lines.append(
            [
                row["key"],
                number(row["us"], 4),
                number(row.get("peer_us"), 4),
                number(row.get("ratio")),
                percent(row.get("ratio_spread")),
                number(row.get("ratio_instant")),
                number(row.get("ratio_best")),
                percent(row.get("of_ceiling")),
                row.get("engine") or "–",
            ]
        )
    head = ["row", "ours µs", "peer µs", "ratio", "spread", "instant", "fastest peer", "of ceiling", "engine"]
    return "<details><summary>Every row</summary>\n\n" + _markdown(head, lines) + "\n\n</details>"


TITLES = {"gemm": "Matrix products", "conv": "Convolution"}


def _suite(suite: str, runs: Sequence[Run], plots: Path) -> Optional[str]:
    rows = list(record.merged(run for run in runs if run.suite == suite).values())
    if not rows:
        return None
    parts = [f"## {TITLES.get(suite, suite)}", "Each row as it was last measured.", *_plots(rows, suite, runs, plots)]
    if any(row.get("ratio") for row in rows):
        parts.append(_markdown(summary.CLASS_HEAD, summary.class_lines(rows)))
    parts += [_behind(rows, suite), _every_row(rows)]
    return "\n\n".join(parts)


def _programs(runs: Sequence[Run], names: Dict[str, str]) -> Optional[str]:
    """Training and latency: every number of every row, as it was last measured."""
    rows = record.merged(run for run in runs if run.suite in ("train", "latency"))
    if not rows:
        return None
    parts = ["## Whole programs"]
    for key, row in rows.items():
        facts = [(name, value) for name, value in row.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
        parts.append(f"### {key} ({row['date'][:10]}, lease {names[row['lease']]})")
        if row.get("refused"):
            parts.append(f"Refused: {row['refused']}")
        parts.append(_markdown(["what", "value"], [[name, number(value, 4)] for name, value in facts]))
        if row.get("worst_tensors"):
            lines = [[one["tensor"], number(one["ours"]), number(one["theirs"]), number(one["ratio"])] for one in row["worst_tensors"]]
            parts.append(_markdown(["tensor", "our error", "cuDNN's", "ratio"], lines))
    return "\n\n".join(parts)


def program_rows(folder: Path) -> Dict[Path, List[dict]]:
    """Rows of products that the program ``workshop bench gemm`` recorded against cuBLASLt, by file; sweeps over settings left out."""
    found: Dict[Path, List[dict]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            is_product = (
                isinstance(row, dict) and row.get("suite") == "gemm" and "by" not in row and str(row.get("peer") or "").startswith("cublaslt")
            )
            if is_product and not row.get("variants") and (row.get("ratio") or row.get("wrong")):
                found.setdefault(path, []).append(row)
    return found


def _program(folder: Path, root: Path) -> Optional[str]:
    files = program_rows(folder)
    if not files:
        return None
    parts = [
        "## Matrix products from Rust, against cuBLASLt",
        "By the program `workshop bench gemm`: settings chosen by estimate, against the fastest of cuBLASLt's own choices (eight at most, each "
        "timed), graphs replayed on both sides. These rows count for no bar above, which speak of PyTorch.",
    ]
    for path, rows in files.items():
        by_class: Dict[tuple, List[dict]] = {}
        for row in rows:
            by_class.setdefault((row["class"], row["dtype"]), []).append(row)
        lines = []
        for (name, dtype), members in by_class.items():
            right = [row for row in members if row.get("ratio") and not row.get("wrong")]
            worst = min(right, key=lambda row: row["ratio"], default={})
            won = sum(1 for row in right if row["ratio"] > 1 + (row.get("spread") or 0))
            lost = sum(1 for row in right if row["ratio"] < 1 - (row.get("spread") or 0))
            lines.append(
                [
                    f"{name} {dtype}",
                    len(right),
                    number(geometric_mean(row["ratio"] for row in right)),
                    number(worst.get("ratio")),
                    worst.get("problem", "–"),
                    f"{won}/{lost}",
                    len(members) - len(right) or "",
                ]
            )
        relative = path.relative_to(root).as_posix()
        machines = sorted({f"{row['machine']}, driver API {row['driver']}, {row['versions']}" for row in rows})
        parts.append(f"### [{path.stem}](../{relative})\n\n{'; '.join(machines)}")
        parts.append(_markdown(["class", "rows", "mean", "worst", "worst row", "won/lost", "wrong"], lines))
    return "\n\n".join(parts)


def page(runs: Sequence[Run], records: Path, root: Path, plots: Path) -> str:
    """The whole page. Plots are written into ``plots``, a folder beside the page."""
    names = _lease_names(runs)
    parts = [HEAD.rstrip()]
    parts.append(_standings(runs, names))
    if runs:
        parts.append(_runs(runs, names))
    else:
        parts.append("No run of this bench is recorded yet.")
    parts += [_suite(suite, runs, plots) for suite in ("conv", "gemm", *(name for name in SUITES if name not in ("conv", "gemm")))]
    parts += [_programs(runs, names), _program(records, root)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render(records: Optional[Path], out: Optional[Path], say: Callable[[str], None]) -> int:
    """Reads all records of a folder and writes the page and its plots."""
    lists = lists_folder()
    if lists is None and (records is None or out is None):
        raise ListError("no checkout around this folder: name --records and --out")
    root = lists.parent.parent if lists is not None else Path.cwd()
    records = (records or root / "bench" / "record" / "h200").resolve()
    out = (out or root / "docs" / "performance.md").resolve()
    if not records.is_dir():
        raise ListError(f"{records}: no such folder")
    runs = record.read_folder(records)
    base = root if root in records.parents else records
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(runs, records, base, out.parent / "performance"), encoding="utf-8")
    say(f"{out}: {len(runs)} runs, {sum(len(run.rows) for run in runs)} rows")
    return 0
