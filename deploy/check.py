#!/usr/bin/env python3
"""Checks everything under deploy/, and docs/runbook.md: `python3 deploy/check.py`.

What it judges with is installed into target/deploy-venv at the first call (deploy/requirements.txt); promtool, prometheus and
amtool come from the system (Debian: apt-get install prometheus prometheus-alertmanager). A check that lacks its program is told
as `skipped` with the reason, and fails nothing unless --strict is given. Where a program is known to be there, as in CI that has
just installed it, --expect names it: that it is not found is then a finding. Exit code: 0 all good, 1 a finding, 2 wrong usage.

    python3 deploy/check.py                                     everything, on an exposition made from docs/metrics.md
    python3 deploy/check.py --scrape http://127.0.0.1:9464/metrics     on what a running exporter shows
    python3 deploy/check.py --verdigris target/release/verdigris       commands and options as this program has them
    python3 deploy/check.py --only alerts-names,dashboards-queries     some checks
    python3 deploy/check.py --write                             writes what is made from other files: dashboards, PrometheusRule, pictures and more
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

from checks import Skipped, Tree, advisories, browser, dashboards, documents, failures, importer, kubernetes, live  # noqa: E402
from checks import picture, records, rules, supply, tools, traces  # noqa: E402

CHECKS = {
    "tools": tools.tools,
    "promtool-rules": rules.promtool_rules,
    "promtool-tests": rules.promtool_tests,
    "alerts-tested": rules.alerts_tested,
    "alerts-buckets": rules.buckets,
    "alerts-form": rules.alerts_form,
    "alerts-names": rules.rules_names,
    "alertmanager": rules.alertmanager,
    "prometheus-live": live.live,
    "dashboards-fresh": dashboards.dashboards_fresh,
    "dashboards-schema": dashboards.dashboards_schema,
    "dashboards-form": dashboards.dashboards_form,
    "dashboards-queries": dashboards.dashboards_queries,
    "dashboard-pictures": picture.pictures_fresh,
    "kubernetes-build": kubernetes.build,
    "kubernetes-schema": kubernetes.schema,
    "kubernetes-references": kubernetes.references,
    "kubernetes-hardened": kubernetes.hardened,
    "kubernetes-rules": kubernetes.rules_fresh,
    "systemd": documents.systemd,
    "container": documents.container,
    "image-size": documents.image_size,
    "commands": documents.commands,
    "runbook": documents.runbook,
    "links": documents.links,
    "failures": failures.failures,
    "measures": failures.measures,
    "traces": traces.traces,
    "traces-schema": traces.schema,
    "traces-imported": importer.importer,
    "trace-picture": traces.picture_fresh,
    "tested-fresh": records.tested_fresh,
    "browser": browser.browser,
    "supply-chain": supply.supply_chain,
    "advisories": advisories.advisories,
    "bill-of-materials": supply.bill_of_materials,
}
# These wait for programs that they start, and run beside the others.
WAITING = ("promtool-tests", "prometheus-live", "browser", "advisories")
MARK = "VERDIGRIS_CHECK_ENVIRONMENT"


def enter_environment(folder):
    """Runs this program again in the environment under target/, made or mended first. Returns only where it cannot be made."""
    wanted = (ROOT / "deploy/requirements.txt").read_bytes()
    stamp, python = folder / "made-of", folder / "bin/python"
    digest = hashlib.sha256(wanted).hexdigest()
    if not (python.is_file() and stamp.is_file() and stamp.read_text() == digest):
        print(f"making {folder} (some 300 MB)", file=sys.stderr)
        try:
            venv.create(folder, with_pip=True, clear=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", ROOT / "deploy/requirements.txt"]
            subprocess.run(pip, check=True, stdout=sys.stderr)
            stamp.write_text(digest)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{folder} cannot be made ({error}): checks that need it are skipped", file=sys.stderr)
            return
    os.execve(python, [str(python), *sys.argv], {**os.environ, MARK: "1"})


def judged(tree, name):
    """What one check says: name, status, what was seen, findings, seconds."""
    begin = time.monotonic()
    try:
        summary, findings = CHECKS[name](tree)
        status = "failed" if findings else "passed"
    except Skipped as reason:
        status, summary, findings = "skipped", str(reason), []
    except Exception as error:  # a file that is missing or cannot be read is a finding, and the other checks still run
        status, summary, findings = "failed", "", [f"{type(error).__name__}: {error}"]
    return {"check": name, "status": status, "summary": summary, "findings": findings, "seconds": round(time.monotonic() - begin, 1)}


def perform(tree, names):
    """Runs the checks, those that wait beside the others; results in the order of the names."""
    with concurrent.futures.ThreadPoolExecutor(len(WAITING)) as pool:
        waiting = {name: pool.submit(judged, tree, name) for name in names if name in WAITING}
        done = {name: judged(tree, name) for name in names if name not in WAITING}
        return [waiting[name].result() if name in waiting else done[name] for name in names]


def show(results):
    width = max(len(result["check"]) for result in results)
    for result in results:
        text = f"skipped: {result['summary']}" if result["status"] == "skipped" else f"{result['status']:<8} {result['summary']}"
        print(f"{result['check']:<{width}}  {result['seconds']:>6.1f} s  {text}".rstrip())
        for finding in result["findings"]:
            print(textwrap.indent(finding, "    "))
    count = {status: sum(result["status"] == status for result in results) for status in ("passed", "failed", "skipped")}
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")


def parser():
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--root", type=Path, default=ROOT, help="the tree to check (default: this one)")
    made.add_argument("--metrics", type=Path, help="the table of metrics (default: docs/metrics.md)")
    made.add_argument("--scrape", metavar="URL", help="a running exporter's address, in place of synthetic series")
    made.add_argument("--verdigris", type=Path, metavar="PATH", help="the program whose commands and options are looked up")
    made.add_argument("--only", metavar="A,B", help=f"some of: {', '.join(CHECKS)}")
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument("--expect", metavar="A,B", default="", help="programs that are to be here: the check `tools` fails for one that is not")
    made.add_argument("--strict", action="store_true", help="what is skipped fails too")
    what = "dashboards, the PrometheusRule, pictures of the trace and the dashboards, and docs/performance/tested.json"
    made.add_argument("--write", action="store_true", help=f"write {what} anew, then check")
    made.add_argument("--pictures", type=Path, metavar="FOLDER", help="where the check `browser` leaves screenshots of what it opens")
    made.add_argument("--advisories", type=Path, metavar="FOLDER", help="a copy of RustSec's database, in place of the one of deploy/advisory-db.toml")
    made.add_argument("--no-environment", action="store_true", help="use this Python as it is, and install nothing")
    return made


def checked(arguments):
    """What the checks of a command line say, and its exit code."""
    root = arguments.root.resolve()
    tree = Tree(root, arguments.metrics or root / "docs/metrics.md", arguments.scrape, arguments.verdigris and arguments.verdigris.resolve())
    tree.advisories = arguments.advisories and arguments.advisories.resolve()
    tree.expected = tuple(filter(None, arguments.expect.split(",")))
    tree.has_environment = MARK in os.environ
    tree.pictures = arguments.pictures and arguments.pictures.resolve()
    if arguments.write:
        write(tree)
    results = perform(tree, arguments.only.split(",") if arguments.only else list(CHECKS))
    bad = {"failed", "skipped"} if arguments.strict else {"failed"}
    return 1 if any(result["status"] in bad for result in results) else 0, results


def write(tree):
    """Writes what is made from other files."""
    kubernetes.write_rules(tree)
    traces.write_picture(tree)
    records.write_tested(tree)
    subprocess.run([sys.executable, tree.root / "deploy/grafana/dashboards.py"], check=True)
    try:
        picture.write_pictures(tree)
    except Skipped as reason:
        print(f"the pictures of the dashboards are as they were: {reason}", file=sys.stderr)


def main():
    options = parser()
    arguments = options.parse_args()
    names = arguments.only.split(",") if arguments.only else list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        options.error(f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if arguments.verdigris and not arguments.verdigris.is_file():
        options.error(f"--verdigris {arguments.verdigris} is no file")
    if not arguments.no_environment and MARK not in os.environ:
        enter_environment(ROOT / "target/deploy-venv")
    begin = time.monotonic()
    code, results = checked(arguments)
    if arguments.json:
        print(json.dumps({"results": results}, indent=1))
    else:
        show(results)
        print(f"{time.monotonic() - begin:.1f} s together")
    return code


if __name__ == "__main__":
    sys.exit(main())
