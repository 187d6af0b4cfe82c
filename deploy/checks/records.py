"""The table of what was tested, which `verdigris matrix` shows: it is what the records of every chip say, of the bench, of canaries and of instructions."""

import importlib
import sys
import types

BENCH = "crates/verdigris-python/python/verdigris/bench"
RECORDS, TABLE = "bench/record", "docs/performance/tested.json"


def made(tree):
    """The table as the bench's own module makes it of the tree's records; the bench itself, which needs PyTorch, is not imported."""
    name = "verdigris_bench_of_the_tree"
    # Another tree's may have been asked before.
    for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        del sys.modules[known]
    package = types.ModuleType(name)
    package.__path__ = [str(tree.root / BENCH)]
    sys.modules[name] = package
    tested = importlib.import_module(f"{name}.tested")
    return tested.text(tree.root / RECORDS, tree.root / tested.SHIPPED)


def tested_fresh(tree):
    """The table names every chip that the records do, with as many runs and rows."""
    text = made(tree)
    findings = [] if tree.text(TABLE) == text else [f"{TABLE} is not what the records under {RECORDS}, and those of canaries that ship, give: run deploy/check.py --write"]
    return f"{text.count('machine')} rows of machine, driver and software", findings


def write_tested(tree):
    (tree.root / TABLE).write_text(made(tree), encoding="utf-8")
