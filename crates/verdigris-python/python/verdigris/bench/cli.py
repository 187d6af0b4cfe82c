"""The command line: ``python -m verdigris.bench``."""

import argparse
import secrets
import sys
from pathlib import Path
from typing import List, Optional, Sequence

from . import check as gate
from . import flex, layers, record, summary
from .problems import BYTES, DIRECTIONS, DRAWN, ListError, Problem, key
from .suites import SUITES, Suite, drawn_rows, in_turn, lists_folder, rows


def _list(text: str) -> List[str]:
    return [part for part in text.split(",") if part]


def _add_rows_options(one: argparse.ArgumentParser, peers: str) -> None:
    """What all suites of rows ask: which rows, for how long, against whom."""
    one.add_argument("--filter", default="", help="only rows whose key contains this")
    one.add_argument("--seed", type=int, help="the seed of the drawn rows; default a new one, or that of the record which goes on")
    one.add_argument("--no-drawn", action="store_true", help="draws no rows")
    one.add_argument("--only-drawn", action="store_true", help="leaves out the lists")
    one.add_argument("--dry-run", action="store_true", help="names the rows in their order, and measures nothing")
    one.add_argument("--seconds", type=float, default=0.35, help="time for a row, all sides together (0.35; below 0.3 a row is no evidence)")
    one.add_argument("--time-limit", type=float, help="stops after so many minutes, with what there is")
    one.add_argument("--peers", type=_list, default=None, help=peers)


def _add_place_options(one: argparse.ArgumentParser) -> None:
    """What all measuring commands ask: where to run, and where records go."""
    one.add_argument("--device", default=None, help="cuda:0 or cpu; default the GPU if there is one")
    one.add_argument("--json", type=Path, help="the file that the record is appended to; a suite of rows measures none again that it has of this machine")
    one.add_argument("--out", type=Path, help="the folder of records; default bench/record/DEVICE of the checkout, on a GPU")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verdigris.bench", description="Ours beside PyTorch's, in the same run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for suite in SUITES.values():
        one = commands.add_parser(suite.name, help=f"measures the suite {suite.name} ({', '.join(suite.lists)})")
        one.add_argument("--class", dest="classes", type=_list, default=[], help="only these classes of the list, or kinds (dense, depthwise, …)")
        one.add_argument("--dtype", type=_list, default=[], help="only these types: " + ", ".join(BYTES))
        one.add_argument("--direction", type=_list, default=[], help="only these directions: " + ", ".join(DIRECTIONS))
        one.add_argument("--layout", type=_list, default=[], help="only these layouts")
        one.add_argument("--list", action="append", default=[], help="a problem list, instead of the suite's own")
        _add_rows_options(one, "pytorch, cublaslt, native, other_format, compile, or none")
        one.add_argument("--no-instant", action="store_true", help="leaves out the column of plans that are chosen by estimate")
        one.add_argument("--shipped", action="store_true", help="also the column of plans that ship with the library")
        one.add_argument("--tuning", type=float, default=500.0, metavar="MS", help="most time of our measured choice, a part (500 ms)")
        one.add_argument("--graph-below", type=float, default=50.0, metavar="US", help="replays CUDA graphs where a side is shorter (50 µs)")
        one.add_argument("--memory-limit", type=float, default=32.0, metavar="GIB", help="most memory of one row (32 GiB)")
        _add_place_options(one)
        one.add_argument(
            "--check", action="store_true", help="afterwards the regression gate against the records in --out; status 1 if a row became worse"
        )
    from .nets import NETS as NET_NAMES

    for name in layers.SUITES:
        one = commands.add_parser(name, help=f"measures the suite {name} of layers.toml: what lies between the products")
        _add_rows_options(one, ", ".join(layers.PEERS))
        one.add_argument("--class", dest="classes", type=_list, default=[], help="only these classes of the list, or functions (softmax, max_pool, …)")
        one.add_argument("--sample", type=int, metavar="N", help="N of the rows, drawn from all alike: the same ones each time that the rows are the same")
        one.add_argument("--workers", type=int, default=0, metavar="N", help="processes in which torch.compile works before rows are measured (0: none)")
        one.add_argument("--compile-share", help=argparse.SUPPRESS)
        _add_place_options(one)

    flex.add_options(commands)
    _add_place_options(commands.choices[flex.SUITE])
    train = commands.add_parser("train", help="a network's training: images a second and errors against fp32, converted and not")
    train.add_argument("--model", type=_list, default=["resnet50", "convnext_tiny"])
    train.add_argument("--batch", type=int, default=128)
    train.add_argument("--extent", type=int, default=224, help="pixels of a side of an image")
    train.add_argument("--seconds", type=float, default=20.0, help="time of measuring for each model")
    train.add_argument("--no-speed", action="store_true")
    train.add_argument("--no-accuracy", action="store_true")
    train.add_argument("--accuracy-batch", type=int, default=32)
    train.add_argument("--seeds", type=int, default=3, help="batches over which errors are averaged")
    nets = commands.add_parser("nets", help="torchvision's networks, plain and converted: wall, host and device time, memory, errors")
    nets.add_argument("--net", type=_list, default=list(NET_NAMES), help=", ".join(NET_NAMES))
    nets.add_argument("--what", type=_list, default=["inference", "training"])
    nets.add_argument("--way", type=_list, default=["eager", "graph", "compile"])
    nets.add_argument("--backend", choices=["verdigris", "inductor"], default="verdigris", help="what compiles our side, of the way compile")
    nets.add_argument("--mode", choices=["measured", "instant"], default="measured", help="how our layers are planned: by the clock, or at once")
    nets.add_argument("--batch", type=int, default=64, help="images; an eighth of them for networks of large ones")
    nets.add_argument("--extent", type=int, help="pixels of a side of an image; default each network's own")
    nets.add_argument("--seconds", type=float, default=5.0, help="time of measuring for each row")
    hugging = commands.add_parser("transformers", help="networks of Hugging Face's transformers, plain and converted: times, memory, errors")
    hugging.add_argument("--net", type=_list, default=["llama_1b", "vit_b_16"])
    hugging.add_argument("--what", type=_list, default=["prefill", "decode", "training", "inference"])
    hugging.add_argument("--way", type=_list, default=["eager", "graph"])
    hugging.add_argument("--mode", choices=["measured", "instant"], default="measured", help="how our layers are planned: by the clock, or at once")
    hugging.add_argument("--tiny", action="store_true", help="small networks and inputs, to see that everything runs")
    hugging.add_argument("--seconds", type=float, default=5.0, help="time of measuring for each row")
    latency = commands.add_parser("latency", help="a fresh process to its first result, a new shape, the host's cost of a call, the size on disk")
    latency.add_argument("--processes", type=int, default=5)
    latency.add_argument("--calls", type=int, default=2000)
    telemetry = commands.add_parser("telemetry", help="what metrics cost: training of a network and calls, listened to and paused in turns")
    telemetry.add_argument("--model", default="resnet50")
    telemetry.add_argument("--batch", type=int, default=128)
    telemetry.add_argument("--extent", type=int, default=224, help="pixels of a side of an image")
    telemetry.add_argument("--pairs", type=int, default=100, help="pairs of blocks, one listened to and one not; half as many of two that are not")
    telemetry.add_argument("--steps", type=int, default=2, help="steps of a block")
    telemetry.add_argument("--calls", type=int, default=20000, help="calls of a small convolution, for the host's time of one")
    for one in (train, nets, hugging, latency, telemetry):
        _add_place_options(one)
    check = commands.add_parser("check", help="the regression gate: NEW against the best of comparable records")
    check.add_argument("new", type=Path, help="the record to judge: all its runs, suite by suite")
    check.add_argument("old", type=Path, nargs="?", help="a record or a folder of them; default the folder of NEW")
    render = commands.add_parser("render", help="docs/performance.md and its plots, from the records")
    where = "default bench/record/h200 of the checkout, and for the table of what was tested all of bench/record"
    render.add_argument("--records", type=Path, help=where)
    render.add_argument("--out", type=Path, help="the page; default docs/performance.md of the checkout")
    return parser


#: Words of the command line that leave rows out; a record says them, so that absent rows are told from those that were not asked for.
SELECTION = ("classes", "dtype", "direction", "layout", "filter", "only_drawn")


def _say(text: str) -> None:
    print(text, flush=True)


def _selected(suite: Suite, arguments, seed: Optional[int]) -> List[Problem]:
    every = ([] if arguments.only_drawn else rows(suite, arguments.list)) + ([] if seed is None else drawn_rows(suite, seed))
    for name, given, known in (
        ("class", arguments.classes, {row.cls for row in every} | {row.kind for row in every}),
        ("dtype", arguments.dtype, set(BYTES)),
        ("direction", arguments.direction, {row.direction for row in every}),
        ("layout", arguments.layout, {row.layout for row in every}),
    ):
        for one in given:
            if one not in known:
                raise ListError(f"--{name} {one}: there are {', '.join(sorted(known))}")

    def is_wanted(row):
        return (
            (not arguments.classes or row.cls in arguments.classes or row.kind in arguments.classes)
            and (not arguments.dtype or row.dtype in arguments.dtype)
            and (not arguments.direction or row.direction in arguments.direction)
            and (not arguments.layout or row.layout in arguments.layout)
            and arguments.filter in key(row)
        )

    found = in_turn(suite, [row for row in every if is_wanted(row)])
    if not found:
        raise ListError("no row is left by --class, --dtype, --direction, --layout and --filter")
    return found


def _seed(arguments) -> Optional[int]:
    """The seed of drawn rows: what is said, that of the record which goes on, or a new one; None where none are drawn."""
    if arguments.seed is not None:
        return arguments.seed
    if arguments.no_drawn or (arguments.list and not arguments.only_drawn):
        return None
    earlier = record.read(arguments.json) if arguments.json is not None and arguments.json.exists() else []
    known = [run.head["drawn"]["seed"] for run in earlier if run.suite == arguments.command and run.head.get("drawn")]
    return known[-1] if known else secrets.randbelow(1 << 31)


def _device(name: Optional[str]):
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def folder_of_records(device) -> Optional[Path]:
    """``bench/record/NAME`` of the checkout: the GPU's name in small letters, without its maker."""
    import torch

    lists = lists_folder()
    if lists is None:
        return None
    if device.type != "cuda":
        return lists.parent / "record" / "cpu"
    name = torch.cuda.get_device_name(device).lower().replace("nvidia", "").split()
    return lists.parent / "record" / (name[0] if name else "gpu")


def record_path(arguments, device, date: str, name: str) -> Optional[Path]:
    """Where a run's record goes; nowhere for a run on the CPU that names no place."""
    if arguments.json is not None:
        return arguments.json
    folder = arguments.out or (folder_of_records(device) if device.type == "cuda" else None)
    return None if folder is None else record.fresh_path(folder, date, name)


def _measure(suite: Suite, arguments) -> int:
    seed = _seed(arguments)
    problems = _selected(suite, arguments, seed)
    if seed is not None:
        _say(f"seed of the drawn rows: {seed}")
    if arguments.dry_run:
        for row in problems:
            _say(key(row))
        return 0
    from . import machine, ours
    from .measure import CudaTimer, HostTimer
    from .peers import PEERS
    from .row import Bench, Options
    from .run import rows as measure_rows

    device = _device(arguments.device)
    names = [name for name, peer in PEERS.items() if peer.is_default] if arguments.peers is None else arguments.peers
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in PEERS:
            raise ListError(f"--peers {name}: there are {', '.join(PEERS)}")
    options = Options(
        seconds=arguments.seconds,
        peers=names,
        instant=not arguments.no_instant,
        shipped=arguments.shipped,
        memory_limit_bytes=int(arguments.memory_limit * 2**30),
        tuning_ms=arguments.tuning,
        time_limit_s=None if arguments.time_limit is None else 60 * arguments.time_limit,
    )
    timer = CudaTimer(arguments.graph_below) if device.type == "cuda" else HostTimer()
    door = ours.open_door(device, options.tuning_ms)
    started = machine.now()
    path = record_path(arguments, device, started, suite.name)
    head = {
        "suite": suite.name,
        "method": record.METHOD,
        "date": started,
        "machine": machine.describe(device),
        "software": machine.software(door.versions()),
        "source": door.source(),
        "selection": {name: value for name in SELECTION if (value := getattr(arguments, name))},
        "drawn": None if seed is None else {"seed": seed, "rows": sum(1 for row in problems if row.cls.startswith(DRAWN))},
        "options": {
            "seconds": options.seconds,
            "peers": list(options.peers),
            "graph_below_us": arguments.graph_below,
            "tuning_ms": options.tuning_ms,
        },
    }
    # A row that an earlier part of the same record has of this very lease stands.
    fresh = record.Run(head, {}, None, path)
    known = (
        {}
        if path is None or not path.exists()
        else record.merged(run for run in record.read(path) if run.suite == suite.name and run.lease == fresh.lease and run.peers == fresh.peers)
    )
    left = [row for row in problems if key(row) not in known]
    if known:
        _say(f"{len(problems) - len(left)} rows stand in {path} already")
    limits = machine.ceilings(timer, device) if left else {}
    head["ceilings"] = limits
    # After them, so that they are those of a device at work.
    head["clocks"] = machine.clocks(device)
    if limits:
        _say(f"{head['machine']['name']}: {limits['gemm']} {limits['gemm_tflops']:.0f} TFLOP/s, copy {limits['copy_gb_per_s']:.0f} GB/s")
    writer = record.Writer(path)
    if left:
        writer.line("head", head)
    bench = Bench(device, door, timer, options, limits)

    def each(row):
        fresh.rows[row["key"]] = row
        writer.line("row", row)

    found = measure_rows(bench, left, each)
    if left:
        writer.line("foot", {"date": machine.now(), "clocks": machine.clocks(device), "rows": len(found)})
    all_rows = [*(known[key(row)] for row in problems if key(row) in known), *found]
    _say("")
    _say(summary.text(all_rows, suite.name))
    if len(found) < len(left):
        why = "the device answers no more" if found and found[-1].get("fatal") else "the time of --time-limit was spent"
        _say(f"\n{len(left) - len(found)} rows were not measured: {why}; the same command with the same --json goes on")
    if path is not None:
        _say(f"\nrecord: {path}")
    has_fault = any(row.get("fault") for row in all_rows)
    status = 1 if has_fault else 0
    if arguments.check:
        folder = arguments.out or (path.parent if path is not None else folder_of_records(device))
        old = record.read_folder(folder) if folder is not None and folder.is_dir() else []
        earlier = [] if path is None else [run for run in record.read(path) if run.suite == suite.name and run.date < fresh.date]
        verdict = gate.check([*earlier, fresh], old)
        _say(f"\n{verdict}")
        status = status or (0 if verdict.passes else 1)
    return status


def _check(arguments) -> int:
    new = record.read(arguments.new)
    if not new:
        raise ListError(f"{arguments.new}: no run stands in it")
    place = arguments.old or arguments.new.parent
    old = record.read_folder(place) if place.is_dir() else record.read(place)
    status = 0
    for suite in sorted({run.suite for run in new if run.rows}):
        verdict = gate.check([run for run in new if run.suite == suite and run.rows], old)
        _say(f"{suite}: {verdict}")
        status = status or (0 if verdict.passes else 1)
    return status


def main(words: Optional[Sequence[str]] = None) -> int:
    """Carries out one command. Returns 0; 1 if a result was wrong or a row became worse; 2 for words that cannot be understood."""
    arguments = _parser().parse_args(words)
    try:
        if arguments.command in SUITES:
            return _measure(SUITES[arguments.command], arguments)
        if arguments.command == "check":
            return _check(arguments)
        if arguments.command in layers.SUITES:
            seed = arguments.seed if arguments.seed is not None else None if arguments.no_drawn else secrets.randbelow(1 << 31)
            return layers.run(arguments, _device(arguments.device), seed, _say)
        if arguments.command == flex.SUITE:
            seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1 << 31)
            return flex.run(arguments, _device(arguments.device), seed, _say)
        if arguments.command == "render":
            from .render import render

            return render(arguments.records, arguments.out, _say)
        if arguments.command == "train":
            from .train import run

            return run(arguments, _device(arguments.device), _say)
        if arguments.command == "nets":
            from .nets import run

            return run(arguments, _device(arguments.device), _say)
        if arguments.command == "transformers":
            from .transformer_nets import run

            return run(arguments, _device(arguments.device), _say)
        if arguments.command == "telemetry":
            from .telemetry import run

            return run(arguments, _device(arguments.device), _say)
        from .latency import run

        return run(arguments, _device(arguments.device), _say)
    except ListError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
