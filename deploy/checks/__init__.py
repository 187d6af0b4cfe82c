"""What deploy/check.py checks. A check is a function of a `Tree` that returns a summary and a list of findings, or raises `Skipped`."""

import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


class Skipped(Exception):
    """A check cannot run here; the text says what is missing and how to get it."""


@dataclass
class Tree:
    """What is checked, and with what."""

    root: Path
    metrics: Path
    scrape: str | None = None
    verdigris: Path | None = None
    # Programs that are to be here, and whether this Python is the environment of requirements.txt.
    expected: tuple = ()
    has_environment: bool = False
    # Where screenshots are left.
    pictures: Path | None = None
    # A copy of RustSec's database.
    advisories: Path | None = None
    # Seconds that a program may take.
    patience_seconds: int = 900
    cache: dict = field(default_factory=dict)
    # Checks run beside each other, and ask for what each other makes.
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def deploy(self):
        return self.root / "deploy"

    @cached_property
    def yaml(self):
        return module("yaml")

    def load(self, path):
        """The documents of a YAML file."""
        return self.documents(path.read_text(encoding="utf-8"))

    def documents(self, text):
        """The documents of YAML."""
        # The same loader in C, where it was built: ten times as fast.
        loader = getattr(self.yaml, "CSafeLoader", self.yaml.SafeLoader)
        return [document for document in self.yaml.load_all(text, Loader=loader) if document is not None]

    def text(self, name):
        return (self.root / name).read_text(encoding="utf-8")

    def once(self, key, make):
        """A value that several checks ask for, made once."""
        with self.lock:
            if key not in self.cache:
                self.cache[key] = make()
            return self.cache[key]

    def run(self, *command, cwd=None):
        """Exit code, and both outputs as one text."""
        try:
            done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=self.patience_seconds, check=False)
        except subprocess.TimeoutExpired:
            return 124, f"{command[0]} did not end within {self.patience_seconds} s"
        return done.returncode, done.stdout + done.stderr


def module(name):
    """An imported module of requirements.txt, or a skip that names it."""
    try:
        __import__(name)
    except ImportError as error:
        raise Skipped(f"the Python module {name} is not there ({error}); deploy/requirements.txt lists it") from None
    return sys.modules[name]


def program(*names, package):
    """The first program that is there: beside this Python, then in PATH."""
    for name in names:
        beside = Path(sys.executable).parent / name
        found = str(beside) if beside.is_file() else shutil.which(name)
        if found:
            return found
    raise Skipped(f"{names[0]} is not installed ({package})")
