"""``docs/performance.md`` and its plots, from the records and nothing else."""

import json
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Sequence

from . import bars, ceilings, columns, layers, record, summary, svg, tested
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

Ours beside PyTorch's (cuDNN, cuBLAS, cuBLASLt and PyTorch's own kernels) on the same buffers in the same run. **Ratios are the fastest right peer's
time over ours: above 1, we are faster.** Ours is called through `verdigris.torch` as a user calls it. `python -m verdigris.bench --help` tells how to
take these numbers on another machine.

- **Columns.** *instant*: the plan is chosen by estimate in a process that remembers nothing and takes nothing that ships. *measured*: by the clock, in
  that run. *shipped*: from the set that ships with the library, which was fitted on these lists; no bar counts it.
- **Rows.** Those of `bench/lists`, and rows that each run draws from `bench/lists/drawn.toml` with a seed of its own, which nobody has tuned for.
- **Right before fast, and after.** Every side is held against f64 sums at sampled positions and wherever two answers differ most, before it is timed and
  again after the last replay; what is wrong stands below.
- **In turns.** Blocks of each side follow each other in rotating order; a ratio is the median of ratios of neighbouring blocks, a spread its
  interquartile range. Operands and results rotate. Where a side is shorter than 50 µs, all are replayed as CUDA graphs.
- **A bar is met** when it passes in two separate leases of a machine, in both columns, on the lists and on drawn rows; passed in one alone it says so. A
  row that is wrong or refused fails its bar; where no peer is right, the row is counted and has no ratio. Rows that were timed for less than 0.3 s are no
  evidence. What is said of a bar, of a suite's table, or of one function of a suite of layers, is of the same sources: the newest of which at least half as many of
  its rows are evidence as of any other's.
- Rates differ by 15 % between chips of one type, so ratios compare across runs and rates do not.
"""

#: What is said above tables of records of the first method.
FIRST_METHOD = """These records are of the bench's first method, and no bar counts them. Their plans were shipped or remembered ones where the column
says *shipped*; peers were asked once, and cuBLASLt for PyTorch's pick alone; rows were timed for 0.05 to 0.08 s, all sides together; they do not say of
which sources they are."""


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
                run.method,
                f"`{run.source[:12]}`" if run.source else "not told",
                (run.head.get("source") or {}).get("commit", "")[:12] or "not told",
                (run.head.get("drawn") or {}).get("seed", "–"),
            ]
        )
    head = ["lease", "begun", "suite", "rows", "machine", "driver", "versions", "GEMM TFLOP/s", "copy GB/s", "SM clock"]
    head += ["method", "sources", "commit", "seed"]
    return "## Runs\n\n" + _markdown(head, lines, left=3)


def _listed(suite: str) -> List[dict]:
    """What the lists of a suite hold; nothing outside a checkout."""
    folder = lists_folder()
    if folder is None:
        return []
    if suite in layers.SUITES:
        return [layers.identity(row) for row in layers.load(folder / "layers.toml", suite, None)]
    return [identity(row) for row in rows_of(SUITES[suite])]


#: A source of which fewer rows are evidence than this part of the fullest one's is a sample: a probe of some rows puts no suite off the page.
LEAST_OF_FULLEST = 0.5


def current(runs: Sequence[Run], suite: str, counts: Callable[[dict], bool] = lambda row: True) -> List[Run]:
    """The runs that a table of a suite is made from, or what is said of the rows that count: by today's method (by the first where there is no other), those of the
    newest sources of which enough rows are evidence (`LEAST_OF_FULLEST`)."""
    mine = [run for run in runs if run.suite == suite and any(counts(row) for row in run.rows.values())]
    latest = max((run.method for run in mine), default=1)
    mine = [run for run in mine if run.method == latest]
    evidence: Dict[str, set] = {}
    for run in mine:
        evidence.setdefault(run.source, set()).update(key for key, row in run.rows.items() if counts(row) and bars.is_evidence(row))
    enough = LEAST_OF_FULLEST * max((len(keys) for keys in evidence.values()), default=0)
    shown = next((run.source for run in reversed(mine) if len(evidence[run.source]) >= enough), None)
    return [run for run in mine if run.source == shown]


def _standings(runs: Sequence[Run], names: Dict[str, str]) -> str:
    lines = []
    suites = (*SUITES, *layers.SUITES)
    every = {name: _listed(name) for name in suites}
    places = [(where, column) for column in columns.JUDGED for where in (bars.LISTS, bars.DRAWN)]
    for bar in bars.load():
        cells, musts, aims = [], [], []
        leases = bars.by_lease(current(runs, bar.suite, bar.counts), bar.suite)
        for where, column in places:
            if where not in bar.rows or column not in bar.columns:
                cells.append("–")
                continue
            listed = every[bar.suite] if where == bars.LISTS else ()
            stands = {
                lease: bars.standing(bar, bars.of([row for row in rows if bars.is_evidence(row)], where), listed, column)
                for lease, rows in leases.items()
            }
            stands = {lease: one for lease, one in stands.items() if one is not None}
            seen = [
                f"{names[lease]}: {number(one.mean)} / {number(one.worst)} ({one.measured} of {one.expected} rows{one.exceptions})"
                for lease, one in stands.items()
            ]
            cells.append(_latest(seen) if seen else "not measured yet")
            musts.append(bars.word([one.must for one in stands.values()]) if bar.must else "–")
            aims.append(bars.word([one.aim for one in stands.values()]))
        must = f"{bar.must[0]:g} / {bar.must[1]:g}" if bar.must else "–"
        verdict = bars.worst_word(musts) if bar.must else "–"
        lines.append([bar.name, must, f"{bar.aim[0]:g} / {bar.aim[1]:g}", *cells, _strong(verdict), _strong(bars.worst_word(aims))])
    head = ["bar (bf16, channels-last unless said)", "must", "aim", *(f"{column}, {where}" for where, column in places), "must is", "aim is"]
    text = f"## Bars\n\nGeometric mean / worst row, in the last {SHOWN_LEASES} leases that measured them; verdicts are of the last two.\n\n"
    return text + _markdown(head, lines) + "\n\n" + _facts(runs, names)


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


def _behind(rows: Sequence[dict]) -> str:
    column = summary.best_column(rows)
    ratios = [(columns.ratio(row, column), columns.spread(row, column)) for row in rows]
    slower = sum(1 for ratio, spread in ratios if ratio and ratio < 1 - spread)
    count = sum(1 for ratio, _ in ratios if ratio)
    text = f"### Where we are behind\n\n{slower} of {count} rows are slower than the fastest peer's beyond their spread ({column})."
    worst = [line for line, row in zip(summary.worst_lines(rows), summary.worst_rows(rows)) if columns.ratio(row, column) < 1]
    if worst:
        text += " The worst of them:\n\n" + _markdown(summary.WORST_HEAD, worst)
    lines = summary.trouble_lines(rows)
    if lines:
        text += "\n\nWrong or refused:\n\n" + _markdown(summary.TROUBLE_HEAD, lines)
    return text


def _plots(rows: Sequence[dict], suite: str, runs: Sequence[Run], folder: Path) -> List[str]:
    """Writes the plots of a suite; returns the lines that show them."""
    shown, groups, column = [], [], summary.best_column(rows)
    for (kind, direction, dtype, layout), members in summary.groups(rows).items():
        ratios = [ratio for ratio in (columns.ratio(row, column) for row in members) if ratio]
        if ratios:
            groups.append((" ".join(part for part in (kind, direction, dtype, "NCHW" if layout == "channels-first" else "") if part), ratios))
    folder.mkdir(parents=True, exist_ok=True)
    if groups:
        (folder / f"ratios-{suite}.svg").write_text(svg.ratio_bars(f"{suite}: against the fastest right peer ({column})", groups), encoding="utf-8")
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
        errors = [row.get("error"), summary.peer_error(row)]
        lines.append(
            [
                row["key"] + ("" if bars.is_evidence(row) or row.get("method", 1) < 2 else " (timed too short)"),
                number(row["us"], 4),
                number(columns.peer_us(row), 4),
                *(number(columns.ratio(row, column)) for column in columns.COLUMNS),
                percent(row.get("ratio_spread")),
                number(row.get("ratio_apart")),
                " / ".join(f"{error:.1e}" if isinstance(error, (int, float)) else "–" for error in errors),
                f"{row['workspace_bytes'] / 2**20:.1f}" if row.get("workspace_bytes") else "",
                percent(row.get("of_ceiling")),
                row.get("engine") or "–",
            ]
        )
    head = ["row", "ours µs", "peer µs", *columns.COLUMNS, "spread", "apart", "error, peer's", "workspace MiB", "of ceiling", "engine"]
    note = (
        "*Ours µs* is the plan's of *measured*, or of *shipped* where that is empty. *Apart*: the ratio with a foreign kernel between launches. Errors are "
        "relative to sums in f64; the peer's is that of the best right one."
    )
    return "<details><summary>Every row</summary>\n\n" + note + "\n\n" + _markdown(head, lines) + "\n\n</details>"


TITLES = {"gemm": "Matrix products", "conv": "Convolution"}


def _suite(suite: str, runs: Sequence[Run], plots: Path) -> Optional[str]:
    runs = current(runs, suite)
    rows = list(record.merged(runs).values())
    if not rows:
        return None
    rows = ceilings.applied(rows, ceilings.of_chip(runs))
    said = FIRST_METHOD if runs[-1].method < 2 else f"Each row as it was last measured, of the sources `{runs[-1].source[:12] or 'unknown'}`."
    parts = [f"## {TITLES.get(suite, suite)}", said, *_plots(rows, suite, runs, plots)]
    for where, title in ((bars.LISTS, "### The lists"), (bars.DRAWN, "### Drawn rows")):
        part = bars.of(rows, where)
        parts.append(title)
        is_told = any(columns.ratio(row, column) for row in part for column in columns.COLUMNS)
        parts.append(_markdown(summary.CLASS_HEAD, summary.class_lines(part)) if is_told else "Not measured yet.")
    parts += [_behind(rows), _every_row(rows)]
    return "\n\n".join(parts)


def _layers(suite: str, runs: Sequence[Run], names: Dict[str, str]) -> str:
    """A suite of what lies between the products: of each function the rows of one source."""
    kinds = dict.fromkeys(row["bar_kind"] for run in runs if run.suite == suite for row in run.rows.values())
    rows: List[dict] = []
    origins: Dict[str, List[str]] = {}
    for kind in kinds:
        of_kind = current(runs, suite, lambda row, kind=kind: row["bar_kind"] == kind)
        rows += [row for row in record.merged(of_kind).values() if row["bar_kind"] == kind]
        origins.setdefault(f"lease {names[of_kind[-1].lease]}, sources `{of_kind[-1].source[:12] or 'unknown'}`", []).append(kind)
    text = f"## Suite {suite}\n\n"
    if not rows:
        return text + "Not measured yet."
    short = sum(1 for row in rows if not bars.is_evidence(row))
    said = "; ".join(f"{origin}: {', '.join(found)}" for origin, found in origins.items())
    text += f"The fastest right peer's time over ours, of each function by the newest sources that have enough of its rows ({said}). "
    text += f"{short} rows were timed for less than {bars.EVIDENCE_S} s. " if short else ""
    told = [row for row in rows if not row.get("fault")]
    means = layers.mean_lines(told)
    parts = [text.rstrip(), _markdown(layers.MEANS_HEAD, means)] if means else [text.rstrip()]
    parts.append("<details><summary>every row</summary>\n\n" + _markdown(layers.HEAD, layers.lines(rows)) + "\n\n</details>")
    failed = summary.trouble_lines(rows)
    if failed:
        parts.append(_markdown(summary.TROUBLE_HEAD, failed))
    return "\n\n".join(parts)


NETS_HEAD = ["network", "wall, of plain's", "host", "device", "ours ms", "plain ms", "peak MiB", "plain", "error", "plain"]


#: The suites of networks, with what their part of the page is called.
NETS = {"nets": "Networks", "transformers": "Hugging Face's networks"}


def _nets(runs: Sequence[Run], names: Dict[str, str], suite: str = "nets") -> str:
    """A suite of networks, by the sources of its newest run."""
    runs = current(runs, suite)
    rows = list(record.merged(runs).values())
    text = f"## {NETS[suite]}\n\n"
    if not rows:
        return text + "Not measured yet."
    # Right before fast: a wrong row has no speed.
    told = [row for row in rows if row.get("wall_ratio") and not row.get("fault")]
    lines = [
        [
            row["key"].removeprefix(f"{suite}/"),
            *(number(row.get(field)) for field in ("wall_ratio", "host_ratio", "device_ratio")),
            *(number(row.get(field), 4) for field in ("wall_ms_ours", "wall_ms_plain", "peak_mib_ours", "peak_mib_plain")),
            *(number(row.get(field)) for field in ("error_ours", "error_plain")),
        ]
        for row in told
    ]
    slower = [row["key"].removeprefix(f"{suite}/") for row in told if row["wall_ratio"] < 1 - (row.get("wall_ratio_spread") or 0.0)]
    text += f"Lease {names[runs[-1].lease]}, sources `{runs[-1].source[:12] or 'unknown'}`. Ratios are plain PyTorch's over ours: above 1, we are better. "
    text += f"{len(slower)} of {len(told)} are slower than plain beyond their spread{': ' + ', '.join(slower) if slower else ''}.\n\n"
    text += _markdown(NETS_HEAD, lines)
    reasons = ((row.get("fault") or row.get("refused") or row.get("remark"), row["key"].removeprefix(f"{suite}/")) for row in rows)
    failed = [[reason, key] for reason, key in reasons if reason]
    return text + ("\n\n" + _markdown(["wrong, refused or not judged", "which"], failed, left=2) if failed else "")


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
    parts += [_layers(suite, runs, names) for suite in layers.SUITES]
    parts += [*(_nets(runs, names, suite) for suite in NETS if any(run.suite == suite for run in runs)), _programs(runs, names), _program(records, root)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render(records: Optional[Path], out: Optional[Path], say: Callable[[str], None]) -> int:
    """Writes the page and its plots, of one folder's records, and the table of what was tested.

    The table is of the same folder, or where none is named, of the records of every chip and of those that ship.
    """
    lists = lists_folder()
    if lists is None and (records is None or out is None):
        raise ListError("no checkout around this folder: name --records and --out")
    root = lists.parent.parent if lists is not None else Path.cwd()
    every = [records.resolve()] if records else [root / "bench" / "record", root / tested.SHIPPED]
    records = (records or root / "bench" / "record" / "h200").resolve()
    out = (out or root / "docs" / "performance.md").resolve()
    if not records.is_dir():
        raise ListError(f"{records}: no such folder")
    runs = record.read_folder(records)
    base = root if root in records.parents else records
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(runs, records, base, out.parent / "performance"), encoding="utf-8")
    (out.parent / "performance").mkdir(exist_ok=True)
    (out.parent / "performance" / tested.NAME).write_text(tested.text(*every), encoding="utf-8")
    say(f"{out}: {len(runs)} runs, {sum(len(run.rows) for run in runs)} rows")
    return 0
