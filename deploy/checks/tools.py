"""What the checks judge with is where it was said to be: a check that is skipped for want of it would hide that nothing was judged."""

import importlib.metadata
import re

from . import Skipped, program

REQUIREMENTS = "deploy/requirements.txt"


def required(text):
    """The packages of a requirements file, as pairs of name and version."""
    return re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)", text, flags=re.M)


def tools(tree):
    """The programs of `--expect`, and the packages of the environment that was made for the checks."""
    findings = []
    for name in tree.expected:
        try:
            program(name, package="--expect names it")
        except Skipped as reason:
            findings.append(f"{reason}: what needs it is skipped, and nothing of it was judged")
    packages = required(tree.text(REQUIREMENTS)) if tree.has_environment else []
    for name, version in packages:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != version:
            findings.append(f"{name} is {'not there' if found is None else found}, and {REQUIREMENTS} says {version}")
    if not tree.expected and not tree.has_environment:
        raise Skipped("this Python has no environment of the checks' own, and --expect names no program")
    return f"{len(tree.expected)} programs that --expect names, {len(packages)} packages of the environment", findings
