"""Checks of deploy/prometheus: rules, alerts and their tests, the example configurations, and the names in expressions."""

import concurrent.futures
import re

from . import program
from .promql import Names, metrics_of

FOLDER = "deploy/prometheus"
RULES, ALERTS = "rules.yml", "alerts.yml"
TESTS = ("tests.yml", "tests-week.yml")
RUNBOOK_URL = "https://github.com/verdigris-gpu/verdigris/blob/main/docs/runbook.md#"
PACKAGE = "Debian: apt-get install prometheus"


def rules_of(tree, name):
    """Every rule of a file."""
    documents = tree.load(tree.root / FOLDER / name)
    return [rule for document in documents for group in document["groups"] for rule in group["rules"]]


def names_of(tree):
    """The judge of expressions, which knows the recording rules, and what it found in them."""
    def make():
        names, findings = Names(metrics_of(tree)), []
        for rule in rules_of(tree, RULES):
            labels, found = names.judge(rule["expr"])
            findings += [f"{rule['record']}: {finding}" for finding in found]
            names.recorded[rule["record"]] = labels
        return names, findings
    return tree.once("names", make)


def promtool_rules(tree):
    """promtool reads rules and alerts, and the example of a configuration."""
    promtool, folder = program("promtool", package=PACKAGE), tree.root / FOLDER
    findings = []
    for command in (["check", "rules", "--lint=all", RULES, ALERTS], ["check", "config", "prometheus.yml"]):
        code, output = tree.run(promtool, *command, cwd=folder)
        if code != 0:
            findings.append(output.strip())
    return f"{len(rules_of(tree, RULES))} recording rules, {len(rules_of(tree, ALERTS))} alerts", findings


def promtool_tests(tree):
    """promtool runs the tests on synthetic series."""
    promtool, folder = program("promtool", package=PACKAGE), tree.root / FOLDER
    count = sum(len(test.get("promql_expr_test", [])) for name in TESTS for document in tree.load(folder / name) for test in document["tests"])
    with concurrent.futures.ThreadPoolExecutor(len(TESTS)) as pool:
        done = list(pool.map(lambda name: tree.run(promtool, "test", "rules", name, cwd=folder), TESTS))
    findings = [output.strip() for code, output in done if code != 0]
    return f"{count} moments", findings


def alerts_tested(tree):
    """Every alert fires in a test, and in the same test there is a moment at which it does not."""
    fires, silent = set(), set()
    for name in TESTS:
        for document in tree.load(tree.root / FOLDER / name):
            for test in document["tests"]:
                moments = [
                    set(re.findall(r'alertname="(\w+)"', " ".join(sample["labels"] for sample in check["exp_samples"] or [])))
                    for check in test.get("promql_expr_test", [])
                ]
                for alert in set().union(*moments) if moments else ():
                    fires.add(alert)
                    if any(alert not in moment for moment in moments):
                        silent.add(alert)
    alerts = [rule["alert"] for rule in rules_of(tree, ALERTS)]
    findings = [f"{alert} fires in no test" for alert in alerts if alert not in fires]
    findings += [f"{alert} is never silent in the tests in which it fires" for alert in alerts if alert in fires - silent]
    findings += [f"the tests speak of {alert}, which does not exist" for alert in sorted(fires - set(alerts))]
    return f"{len(alerts)} alerts", findings


def heading_anchors(text):
    """The anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


BUCKETS = "crates/verdigris-telemetry/src/buckets.rs"
UNITS = {"_seconds": "Seconds", "_bytes": "Bytes", "_ratio": "Ratio"}


def bounds_of(tree, metric):
    """The upper bounds of a histogram's buckets, as the library has them."""
    text = tree.text(BUCKETS)
    lists = {name: {float(number) for number in re.findall(r"[\d.e+-]*\d", numbers)} for name, numbers in re.findall(r"const (\w+): &\[f64\] =\s*&\[(.*?)\];", text, flags=re.S)}
    # Powers of two, counted in a loop, and a few behind them.
    for name, body in re.findall(r"static (\w+): \[f64; \d+\] = \{(.*?)\n\};", text, flags=re.S):
        count, least, step = (int(re.search(pattern, body)[1]) for pattern in (r"while i < (\d+)", r"BIAS - (\d+)", r"\+ (\d+) \* i"))
        behind = re.search(r"\) = \(([\d./, ]+)\);", body)[1].split(",")
        parts = [part.partition("/") for part in behind]
        lists[name] = {1.0, *(2.0 ** (step * i - least) for i in range(count)), *(float(over) / float(under or 1) for over, _, under in parts)}
    unit = next((unit for suffix, unit in UNITS.items() if metric.endswith(suffix)), "Count")
    by_name = dict(re.findall(r'\(Unit::\w+, "(\w+)"\) => &?(\w+)', text))
    by_unit = dict(re.findall(r"\(Unit::(\w+), _\) => (\w+)", text))
    return lists[by_name.get(metric) or by_unit[unit]]


def buckets(tree):
    """Every bound of a bucket that a test or an expression speaks of is one that the library has."""
    known, findings, seen = metrics_of(tree), [], set()
    files = [*(tree.root / FOLDER).glob("*.yml"), *(tree.root / "deploy/grafana").glob("*.json"), tree.root / "docs/runbook.md"]
    for path in sorted(files):
        for metric, labels in re.findall(r"(verdigris_\w+)_bucket\{([^}]*)\}", path.read_text(encoding="utf-8")):
            for bound in re.findall(r'\ble=\\?"([^"\\]*)', labels):
                seen.add((metric, bound))
                where = f"{path.relative_to(tree.root)}: {metric}"
                if metric not in known:
                    findings.append(f"{where} is no metric")
                elif bound != "+Inf" and float(bound) not in bounds_of(tree, metric):
                    findings.append(f'{where} has no bucket le="{bound}": see {BUCKETS}')
    return f"{len(seen)} bounds", sorted(set(findings))


def alerts_form(tree):
    """Severity, hysteresis, texts, a section of the runbook, and labels in texts that the expression has."""
    names, _ = names_of(tree)
    anchors = heading_anchors(tree.text("docs/runbook.md"))
    findings, seen = [], set()
    for rule in rules_of(tree, ALERTS):
        alert, labels, annotations = rule["alert"], rule.get("labels", {}), rule.get("annotations", {})
        say = lambda text: findings.append(f"{alert}: {text}")  # noqa: B023,E731
        if alert in seen:
            say("stands twice")
        seen.add(alert)
        if labels.get("severity") not in ("page", "ticket"):
            say(f"severity `{labels.get('severity')}` is neither page nor ticket")
        if not re.fullmatch(r"F[1-7]", labels.get("failure", "")):
            say(f"failure `{labels.get('failure')}` is none of F1 to F7")
        if "for" not in rule and "increase(" not in rule["expr"]:
            say("neither `for` nor an increase over a window: one bad scrape fires it")
        if "keep_firing_for" not in rule:
            say("no `keep_firing_for`: a condition that comes and goes would be many alerts")
        for key in ("summary", "description", "runbook_url"):
            if not annotations.get(key):
                say(f"no {key}")
        url = annotations.get("runbook_url", "")
        if url and not (url.startswith(RUNBOOK_URL) and url.removeprefix(RUNBOOK_URL) in anchors):
            say(f"runbook_url `{url}` leads to no section of docs/runbook.md")
        known, _ = names.judge(rule["expr"])
        for key, text in annotations.items():
            for label in re.findall(r"\$labels\.(\w+)", text):
                if label not in known | set(labels):
                    say(f"{key} speaks of the label `{label}`, which the expression does not have")
    return f"{len(seen)} alerts", findings


def rules_names(tree):
    """Every metric and label in rules and alerts stands in docs/metrics.md, or is recorded."""
    names, findings = names_of(tree)
    for rule in rules_of(tree, ALERTS):
        findings = findings + [f"{rule['alert']}: {finding}" for finding in names.judge(rule["expr"])[1]]
    return f"{len(names.metrics)} metrics, {len(names.recorded)} recorded", findings


def alertmanager(tree):
    """amtool reads the example, and its matchers name alerts and labels that exist."""
    amtool = program("amtool", package="Debian: apt-get install prometheus-alertmanager")
    path = tree.root / FOLDER / "alertmanager.yml"
    code, output = tree.run(amtool, "check-config", path)
    findings = [output.strip()] if code != 0 else []
    names, _ = names_of(tree)
    rules = {rule["alert"]: rule for rule in rules_of(tree, ALERTS)}
    labels = {alert: names.judge(rule["expr"])[0] | set(rule.get("labels", {})) for alert, rule in rules.items()}
    for number, rule in enumerate(tree.load(path)[0].get("inhibit_rules", []), 1):
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            key, values = re.fullmatch(r'\s*(\w+)\s*=~?\s*"?([^"]*)"?\s*', matcher).groups()
            for alert in values.split("|") if key == "alertname" else ():
                if alert not in rules:
                    findings.append(f"inhibit rule {number} names the alert {alert}, which does not exist")
                else:
                    missing = set(rule.get("equal", [])) - labels[alert]
                    # A label that the source lacks would be equal to that of every target that lacks it as well.
                    if missing and matcher in rule["source_matchers"]:
                        findings.append(f"inhibit rule {number} is for equal {', '.join(sorted(missing))}, which {alert} does not have")
    for severity, receiver in (("page", "pager"), ("ticket", "tickets")) if code == 0 else ():
        _, routed = tree.run(amtool, "config", "routes", "test", f"--config.file={path}", f"severity={severity}", "node=gpu1")
        if routed.split()[:1] != [receiver]:
            findings.append(f"severity={severity} goes to {routed.split()[0] if routed.split() else 'nobody'}, and not to {receiver}")
    return f"{len(rules)} alerts, 2 receivers", findings
