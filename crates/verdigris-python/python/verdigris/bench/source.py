"""Which sources a record is of: what the native module was built from, the package's own Python, and the commit of the checkout."""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Optional

from .suites import lists_folder


def _git(*words: str) -> Optional[str]:
    lists = lists_folder()
    if lists is None:
        return None
    try:
        answer = subprocess.run(["git", "-C", str(lists), *words], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def python_hash(package: Path) -> str:
    """Of the package's Python files by name and content. The bench's own do not count: they say how to measure, which ``record.METHOD`` tells."""
    hashed = hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith("bench/"):
            content = path.read_bytes()
            hashed.update(f"{name} {len(content)} ".encode() + content)
    return hashed.hexdigest()


def describe(native_hash: Optional[str], package: Optional[Path]) -> dict:
    """``hash`` over both halves of the package, empty where there is no package; ``commit`` with ``+`` behind it where files are changed.

    Where there is no checkout of git (a copy on another machine), ``VERDIGRIS_COMMIT`` may say the commit.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        commit = os.environ.get("VERDIGRIS_COMMIT", "")
    elif _git("status", "--porcelain", "--untracked-files=no"):
        commit += "+"
    if native_hash is None or package is None:
        return {"hash": "", "commit": commit}
    python = python_hash(package)
    both = hashlib.blake2b(f"{native_hash} {python}".encode(), digest_size=16).hexdigest()
    return {"hash": both, "native": native_hash, "python": python, "commit": commit}
