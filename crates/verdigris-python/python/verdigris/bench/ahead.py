"""Compiles the calls of the peer ``compile`` in several processes before anything is measured.

`torch.compile` takes seconds a row, nearly all of them on one core of the host, while the device waits. What it makes is kept on disk (Inductor's cache, here a folder
of the run's own), so that processes which share the rows can make it side by side and the measuring process reads it back. Which config a kernel of Triton's takes is not kept:
that was picked while other processes used the device, and the measuring process picks again, by itself.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, List, Sequence

CACHE, THREADS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
#: Inductor's files of picked configs.
PICKED = "*.best_config"


def share(rows: Sequence, text: str) -> List:
    """The rows of part `i/n`: each n-th from the i-th on."""
    part, parts = (int(number) for number in text.split("/"))
    return list(rows[part::parts])


def compile_in(processes: int, command: Sequence[str], say: Callable[[str], None]) -> None:
    """Runs `command` in as many processes, each with a `--compile-share` of its own, and waits. The environment names the cache for the rest of the run, which ends
    with it: a user's own is neither read nor changed.

    A process that fails costs time and nothing else: its rows are compiled when they are measured."""
    os.environ[CACHE] = tempfile.mkdtemp(prefix="verdigris-bench-")
    atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
    # One process compiles on one core; with as many threads in the measuring process its cache is another.
    os.environ[THREADS] = "1"
    started = [
        subprocess.Popen([sys.executable, "-m", "verdigris.bench", *command, "--compile-share", f"{part}/{processes}"], stdout=subprocess.DEVNULL)
        for part in range(processes)
    ]
    failed = sum(1 for process in started if process.wait() != 0)
    if failed:
        say(f"{failed} of {processes} compiling processes failed: their rows are compiled while they are measured")
    for path in Path(os.environ[CACHE]).rglob(PICKED):
        path.unlink()
