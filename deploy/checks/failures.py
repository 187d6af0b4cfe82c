"""Checks that each failure is known from end to end: the test that injects it, the error, the metric that moves, the alert, and the runbook's command.

What the tables say stands in deploy/failures.toml; that the names lead from one to the next is checked here.
"""

import re
import tomllib

from .documents import FAILURES, code_of
from .promql import HISTOGRAM_PARTS, metrics_of
from .rules import ALERTS, FOLDER, RULES, TESTS, rules_of

TABLE = "deploy/failures.toml"
EVENTS_FOLDER = "crates/verdigris/src/observe"
MEASURES_PAGE = "docs/telemetry.md"
MEASURES = [f"M{number}" for number in range(1, 11)]


def base_metrics(tree, expr):
    """The metrics of the table of which an expression is made, through what rules record."""
    recorded = tree.once("recorded-expressions", lambda: {rule["record"]: rule["expr"] for rule in rules_of(tree, RULES)})
    known, found, left, seen = metrics_of(tree), set(), [expr], set()
    while left:
        for name in re.findall(r"[a-z_][\w:]*", left.pop()):
            if name in recorded and name not in seen:
                seen.add(name)
                left.append(recorded[name])
            for part in ("", *HISTOGRAM_PARTS):
                if name.endswith(part) and name.removesuffix(part) in known:
                    found.add(name.removesuffix(part))
    return found


def body_of(text, name):
    """The text of a test of Rust; None where there is no test of that name."""
    found = re.search(rf"^( *)(?:#\[[^\n]*\]\n *)*#\[test\]\n(?: *#\[[^\n]*\]\n)* *fn {re.escape(name)}\(\)[^\n]*\n(.*?)^\1}}", text, flags=re.M | re.S)
    return found[2] if found else None


def fired(tree):
    """For each alert, the metrics of the series of the tests in which it fires."""
    alerts = {}
    for name in TESTS:
        for document in tree.load(tree.root / FOLDER / name):
            for test in document["tests"]:
                series = set().union(*(base_metrics(tree, one["series"]) for one in test["input_series"]))
                for check in test.get("promql_expr_test", []):
                    for sample in check["exp_samples"] or []:
                        for alert in re.findall(r'alertname="(\w+)"', sample["labels"]):
                            alerts.setdefault(alert, set()).update(series)
    return alerts


def events_of(tree):
    """The events that the library tells."""
    found = set()
    for path in sorted((tree.root / EVENTS_FOLDER).glob("*.rs")):
        found |= set(re.findall(r'target: "verdigris", (?:parent: [^,]+, )?event = "(\w+)"', path.read_text(encoding="utf-8")))
    return found


def failures(tree):
    """From each failure's test by its error, event, metrics and alerts to the runbook's command, every name leads to the next."""
    findings, tests = [], 0
    rows = tomllib.loads(tree.text(TABLE))["failure"]
    named = [row["name"] for row in rows]
    findings += [f"{TABLE} has no row `{name}`" for name in FAILURES if name not in named]
    findings += [f"{TABLE}: `{name}` is none of the runbook's sections" for name in named if name not in FAILURES]
    alerts, known, fires = {rule["alert"]: rule for rule in rules_of(tree, ALERTS)}, metrics_of(tree), fired(tree)
    kinds, events = known["verdigris_errors_total"].values.get("kind", frozenset()), events_of(tree)
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", tree.text("docs/runbook.md"), flags=re.M | re.S))
    for row in rows:
        name = row["name"]

        def say(text, name=name):
            findings.append(f"{name}: {text}")

        bodies = []
        for test in row["tests"]:
            path, _, function = test.partition("::")
            file = tree.root / path
            body = body_of(file.read_text(encoding="utf-8"), function) if file.is_file() else None
            if body is None:
                say(f"there is no test {test}")
                continue
            tests += 1
            bodies.append(body)
        looked_at = "\n".join(bodies)
        errors = row.get("error", [])
        for error in [errors] if isinstance(errors, str) else errors:
            if error not in kinds:
                say(f"`{error}` is no kind of verdigris_errors_total")
            if error not in looked_at:
                say(f"none of its tests looks for the error `{error}`")
            if f"`{error}`" not in sections.get(name, ""):
                say(f"the runbook's section does not name the error `{error}`")
        section = sections.get(name, "")
        if not errors and "No call fails" not in section:
            say("it has no error, and the runbook's section does not say that no call fails")
        event = row.get("event")
        if event not in events:
            say(f"`{event}` is no event of the library")
        elif f'"{event}"' not in looked_at:
            say(f"none of its tests hears the event `{event}`")
        elif f"`{event}`" not in section:
            say(f"the runbook's section does not name the event `{event}`")
        for metric in row["metrics"]:
            if metric not in known:
                say(f"there is no metric `{metric}`")
            elif metric not in looked_at:
                say(f"none of its tests looks at `{metric}`")
        for alert in row["alerts"]:
            rule = alerts.get(alert)
            if rule is None:
                say(f"there is no alert {alert}")
                continue
            made_of = base_metrics(tree, rule["expr"]) & set(row["metrics"])
            if not made_of:
                say(f"{alert} looks at none of the metrics that move")
            elif not fires.get(alert, set()) & made_of:
                say(f"no test of the alerts fires {alert} on series of {', '.join(sorted(made_of))}")
        if not any(alerts.get(alert, {}).get("labels", {}).get("failure") == name[:2] for alert in row["alerts"]):
            say(f"none of its alerts has `failure: {name[:2]}`, so that nobody is led to its section")
        lines, spans = code_of(section)
        for command in row["commands"]:
            if not any(command in text for text in lines + spans):
                say(f"the runbook's section does not have `{command}`")
    return f"{len(rows)} failures, {tests} tests", findings


def measures(tree):
    """What operators ask for, M1 to M10, stands in one table, each with metrics and recorded series that exist."""
    rows = dict(re.findall(r"^\| (M\d+) [^|]*\|(.*)\|$", tree.text(MEASURES_PAGE), flags=re.M))
    findings = [f"{MEASURES_PAGE} has no row for {name}" for name in MEASURES if name not in rows]
    known, recorded = metrics_of(tree), {rule["record"] for rule in rules_of(tree, RULES)}
    for name, text in rows.items():
        names = re.findall(r"`([\w:]*verdigris_?[\w:]*)", text)
        if not names:
            findings.append(f"{name} names no metric")
        findings += [f"{name}: there is no metric `{one}`" for one in names if one not in known and one not in recorded]
    return f"{len(rows)} measures", findings
