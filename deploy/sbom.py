#!/usr/bin/env python3
"""Writes the bill of materials of the program (CycloneDX 1.5): `python3 deploy/sbom.py > verdigris.cdx.json`. It needs cargo alone; --crate names another."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

from checks import Skipped, Tree, supply  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crate", default=supply.PROGRAM, help="a crate of the workspace (default: %(default)s)")
    arguments = parser.parse_args()
    tree = Tree(ROOT, ROOT / "docs/metrics.md")
    try:
        print(json.dumps(supply.bill(tree, arguments.crate), indent=1))
    except StopIteration:
        parser.error(f"the workspace has no crate {arguments.crate}")
    except Skipped as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
