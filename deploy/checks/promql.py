"""The table of metrics, and which of its metrics and labels a PromQL expression names."""

import re
from dataclasses import dataclass, field

from . import Skipped, module

# What scraping adds to every series: by Prometheus, by the operator, and by the relabelling of deploy/kubernetes.
TARGET_LABELS = frozenset({"job", "instance", "node", "namespace", "pod", "service", "container", "endpoint"})
ALERT_LABELS = TARGET_LABELS | {"alertname", "alertstate", "severity", "failure", "device", "op", "model", "xid", "kind", "reason"}
COUNTER_FUNCTIONS = {"rate", "irate", "increase", "resets"}
HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")


@dataclass(frozen=True)
class Metric:
    """A row of docs/metrics.md."""

    name: str
    kind: str
    labels: frozenset
    # The values of those labels whose values the meaning lists: `origin: pack, disk (the cache), compiled`.
    values: dict = field(default_factory=dict, hash=False)


def read_table(text):
    """Metrics by name, from the table whose header has the columns name, kind and labels. Raises ValueError where a row is odd."""
    metrics, columns = {}, None
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.lstrip().startswith("|") else []
        heads = [cell.lower().strip("`* ") for cell in cells]
        if {"name", "kind", "labels"} <= set(heads):
            columns = {head: heads.index(head) for head in ("name", "kind", "labels")}
        elif not cells:
            columns = None
        elif columns and not all(set(cell) <= set("-: ") for cell in cells):
            names = re.findall(r"verdigris_\w+", cells[columns["name"]])
            kind = cells[columns["kind"]].strip("`* ").lower()
            if not names or kind not in ("counter", "gauge", "histogram"):
                raise ValueError(f"line {number}: `{line.strip()}` is no row `| name | counter, gauge or histogram | labels | … |`")
            labels = frozenset(re.findall(r"[a-z_]+", cells[columns["labels"]]))
            meaning = re.sub(r"\([^)]*\)", "", " ".join(cells[columns["labels"] + 1:]))
            values = {label: frozenset(re.findall(r"\w+", listed)) for label, listed in re.findall(r"(\w+): ([^;:]+?)(?=;|\(|$)", meaning) if label in labels}
            for name in names:
                metrics[name] = Metric(name, kind, labels, values)
    if not metrics:
        raise ValueError("no table with the columns name, kind and labels")
    return metrics


def metrics_of(tree):
    """The table of `tree`, read once."""
    if not tree.metrics.is_file():
        raise Skipped(f"{tree.metrics} is not there")
    return tree.once("metrics", lambda: read_table(tree.metrics.read_text(encoding="utf-8")))


class Names:
    """Judges expressions by the table and by what rules record. `recorded` maps a rule's name to the labels of its result."""

    def __init__(self, metrics, recorded=None):
        self.metrics = metrics
        self.recorded = dict(recorded or {})
        self.parser = module("promql_parser")

    def judge(self, text):
        """The labels of the expression's result, and what is wrong with its names."""
        findings = []
        try:
            tree = self.parser.parse(text)
        except ValueError as error:
            return frozenset(), [f"does not parse: {error}"]
        labels, _ = self._labels(tree, findings, None)
        return labels, findings

    def series(self, name):
        """The labels of a series of this name, and its kind; None where there is none such."""
        if name in self.recorded:
            return self.recorded[name], "gauge"
        if name in ("up", "scrape_samples_scraped"):
            return TARGET_LABELS, "gauge"
        if name == "ALERTS":
            return ALERT_LABELS, "gauge"
        metric = self.metrics.get(name)
        if metric and metric.kind != "histogram":
            return metric.labels | TARGET_LABELS, metric.kind
        for part in HISTOGRAM_PARTS:
            metric = self.metrics.get(name.removesuffix(part)) if name.endswith(part) else None
            if metric and metric.kind == "histogram":
                return metric.labels | TARGET_LABELS | ({"le"} if part == "_bucket" else frozenset()), "counter"
        return None

    def _selector(self, selector, findings, function):
        matchers = list(selector.matchers.matchers)
        name = selector.name or next((m.value for m in matchers if m.name == "__name__" and str(m.op).endswith("Equal") and "Not" not in str(m.op)), None)
        if name is None:
            return TARGET_LABELS | {label for metric in self.metrics.values() for label in metric.labels}, True
        found = self.series(name)
        if found is None:
            is_histogram = name in self.metrics
            findings.append(f"`{name}` is a histogram, of which only _bucket, _count and _sum are series" if is_histogram else f"there is no metric `{name}`")
            return TARGET_LABELS, True
        labels, kind = found
        for matcher in matchers:
            if matcher.name not in labels | {"__name__"}:
                findings.append(f"`{name}` has no label `{matcher.name}`; it has {', '.join(sorted(labels - TARGET_LABELS)) or 'none'}")
            metric = self.metrics.get(name) or next((self.metrics[name.removesuffix(part)] for part in HISTOGRAM_PARTS if name.removesuffix(part) in self.metrics), None)
            listed = metric.values.get(matcher.name) if metric else None
            for value in matcher.value.split("|") if listed else ():
                # Other patterns than a choice of words are left alone.
                if re.fullmatch(r"\w+", value) and value not in listed:
                    findings.append(f"`{name}` has no {matcher.name} `{value}`; the table lists {', '.join(sorted(listed))}")
        if function in COUNTER_FUNCTIONS and kind != "counter":
            findings.append(f"{function}() of `{name}`, which is a {kind}")
        return labels, True

    def _labels(self, node, findings, function):
        """Labels of a result, and whether it is a vector at all."""
        kind = type(node).__name__
        if kind == "VectorSelector":
            return self._selector(node, findings, function)
        if kind == "MatrixSelector":
            return self._selector(node.vector_selector, findings, function)
        if kind in ("ParenExpr", "UnaryExpr", "SubqueryExpr"):
            return self._labels(node.expr, findings, function)
        if kind in ("NumberLiteral", "StringLiteral"):
            return frozenset(), False
        if kind == "Call":
            return self._call(node, findings)
        if kind == "AggregateExpr":
            return self._aggregate(node, findings)
        if kind == "BinaryExpr":
            return self._binary(node, findings)
        findings.append(f"an expression of the unknown kind {kind}")
        return frozenset(), True

    def _call(self, node, findings):
        name = node.func.name
        parts = [self._labels(argument, findings, name) for argument in node.args]
        vectors = [labels for labels, vector in parts if vector]
        if not vectors or name.startswith("absent"):
            return frozenset(), name == "vector" or bool(vectors)
        if name == "histogram_quantile" and "le" not in vectors[0]:
            findings.append("histogram_quantile() of what has no label `le`")
        return vectors[0] - ({"le"} if name == "histogram_quantile" else set()), True

    def _aggregate(self, node, findings):
        inner, _ = self._labels(node.expr, findings, None)
        if str(node.op) in ("topk", "bottomk"):
            return inner, True
        if node.modifier is None:
            return frozenset(), True
        named = frozenset(node.modifier.labels)
        for label in sorted(named - inner):
            findings.append(f"{node.op} by or without `{label}`, which its operand does not have")
        return (inner - named if "Without" in str(node.modifier.type) else named & inner), True

    def _binary(self, node, findings):
        left, left_vector = self._labels(node.lhs, findings, None)
        right, right_vector = self._labels(node.rhs, findings, None)
        if not (left_vector and right_vector):
            return (left if left_vector else right), left_vector or right_vector
        matching = getattr(node.modifier, "matching", None) if node.modifier else None
        on = matching is not None and "Include" in str(matching.type)
        if matching is not None:
            for label in sorted(frozenset(matching.labels) - (left | right if not on else left & right)):
                findings.append(f"`{node.op}` matches on `{label}`, which one side does not have")
        elif str(node.op) not in ("or",) and left != right:
            findings.append(f"`{node.op}` of sides with different labels ({', '.join(sorted(left ^ right))} on one alone), which never match")
        if str(node.op) == "or":
            return left | right, True
        if str(node.op) in ("and", "unless"):
            return left, True
        card = str(node.modifier.card) if node.modifier else ""
        if "ManyToOne" in card:
            return left | frozenset(node.modifier.group_labels or ()), True
        if "OneToMany" in card:
            return right | frozenset(node.modifier.group_labels or ()), True
        if matching is not None:
            return (left & frozenset(matching.labels) if on else left - frozenset(matching.labels)), True
        return left, True
