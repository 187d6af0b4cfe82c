"""The way `compile` of the suite `nets`, rows compiled side by side: `python bench/nets_side_by_side.py OUT.jsonl [--net …] [--what …]`, as the suite's own options are.

`torch.compile` takes a minute or more for a row, most of it on the host. Here each row has a process of its own; all compile and warm up at once, and none measures before the last is
done. Then they measure one after the other, so that the device and the host serve a single row. What is measured is what the suite measures.
"""

import argparse
import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from verdigris.bench import nets

#: Where processes meet, which of them this is, and how many there are.
MEETING, NUMBER, COUNT = "VERDIGRIS_BENCH_MEETING", "VERDIGRIS_BENCH_NUMBER", "VERDIGRIS_BENCH_COUNT"
#: Longest wait for the others; those that are not done then compile while others are measured, which a remark says.
MOST_SECONDS = 330


def in_turn(measure):
    """`_measure` of the suite, behind all others' compilation, and alone."""
    meeting, count = Path(os.environ[MEETING]), int(os.environ[COUNT])

    def alone(steps, device, seconds, facts):
        import torch

        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        (meeting / f"{os.environ[NUMBER]}.ready").touch()
        begun = time.monotonic()
        while (ready := len(list(meeting.glob("*.ready")))) < count and time.monotonic() < begun + MOST_SECONDS:
            time.sleep(0.2)
        with open(meeting / "turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if ready < count:
                facts["remark"] = f"{count - ready} of {count} rows were compiled while this one was measured"
            measure(steps, device, seconds, facts)

    return alone


def one_row(words):
    from verdigris.bench import cli

    nets._measure = in_turn(nets._measure)
    status = cli.main(["nets", *words])
    # A row that was refused never came to its turn, and nobody need wait for it.
    (Path(os.environ[MEETING]) / f"{os.environ[NUMBER]}.ready").touch()
    return status


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", default=",".join(nets.NETS))
    parser.add_argument("--what", default=",".join(nets.WHATS))
    parser.add_argument("--processes", type=int, default=16, help="rows that are compiled at a time")
    arguments, options = parser.parse_known_args()
    rows = [(net, what) for what in arguments.what.split(",") for net in arguments.net.split(",")]
    status = 0
    for begin in range(0, len(rows), arguments.processes):
        part = rows[begin : begin + arguments.processes]
        with tempfile.TemporaryDirectory() as folder:
            started = []
            for number, (net, what) in enumerate(part):
                environment = {**os.environ, MEETING: folder, NUMBER: str(number), COUNT: str(len(part))}
                environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(part)))
                file = Path(folder) / f"{number}.jsonl"
                words = [sys.executable, __file__, "--row", "--net", net, "--what", what, "--way", "compile", "--json", str(file), *options]
                started.append((file, subprocess.Popen(words, env=environment)))
            left = dict(started)
            while left:
                time.sleep(0.2)
                for file in [file for file, process in left.items() if process.poll() is not None]:
                    process = left.pop(file)
                    status = max(status, abs(process.returncode))
                    # Each as soon as it is there: a run that is cut off keeps the rows that it has.
                    with open(arguments.out, "a") as record:
                        record.write(file.read_text() if file.exists() else json.dumps({"kind": "lost", "words": " ".join(process.args[2:])}) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(one_row(sys.argv[2:]) if sys.argv[1:2] == ["--row"] else main())
