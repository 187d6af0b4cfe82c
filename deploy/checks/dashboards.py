"""Checks of deploy/grafana: the JSON is what the program writes, Grafana's models take it whole, and its queries are right."""

import json
import re
import sys
import tempfile
from pathlib import Path

from . import module, program
from .rules import PACKAGE, names_of

FOLDER = "deploy/grafana"
# What Grafana puts in place of its own variables; label matchers take any value.
BUILT_IN = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}


def boards(tree):
    """Each dashboard with its file's name."""
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in sorted((tree.root / FOLDER).glob("*.json"))]


def variables(board):
    return {variable["name"] for variable in board.get("templating", {}).get("list", [])}


def queries(tree, for_server=False):
    """Every expression with its place: panels, annotations and variables. With variables replaced, for what has to parse."""
    found = []
    for name, board in boards(tree):
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                found.append((f"{name}, panel `{panel['title']}`", target["expr"]))
        for note in board.get("annotations", {}).get("list", []):
            found.append((f"{name}, annotation `{note['name']}`", note["expr"]))
        for variable in board.get("templating", {}).get("list", []):
            asked = variable["query"]["query"] if isinstance(variable["query"], dict) else variable["query"]
            inside = re.fullmatch(r"label_values\((.*), *(\w+)\)", asked, flags=re.S)
            if inside:
                found.append((f"{name}, variable `{variable['name']}`", inside[1] if for_server else f"count by ({inside[2]}) ({inside[1]})"))
    return [(place, plain(expr)) for place, expr in found]


def plain(expr):
    """The expression with Grafana's variables replaced."""
    for name, value in BUILT_IN.items():
        expr = expr.replace(name, value)
    return re.sub(r"\$\{?\w+\}?", ".*", expr)


def dashboards_fresh(tree):
    """The files are what dashboards.py writes."""
    code, output = tree.run(sys.executable, tree.root / FOLDER / "dashboards.py", "--check")
    return f"{len(boards(tree))} dashboards", [output.strip()] if code != 0 else []


def without_empty(value):
    """JSON without what models leave out when they write: nulls."""
    if isinstance(value, dict):
        return {key: without_empty(inner) for key, inner in value.items() if inner is not None}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def lost(ours, theirs, path=""):
    """What of `ours` does not stand in `theirs`."""
    if isinstance(ours, dict):
        if not isinstance(theirs, dict):
            return [f"{path} became {theirs!r}"]
        return [finding for key, value in ours.items() for finding in (
            lost(value, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key} is no field that Grafana's models know"])]
    if isinstance(ours, list):
        if not isinstance(theirs, list) or len(theirs) != len(ours):
            return [f"{path} became {theirs!r}"]
        return [finding for number, (one, other) in enumerate(zip(ours, theirs, strict=True)) for finding in lost(one, other, f"{path}[{number}]")]
    return [] if ours == theirs else [f"{path} is {ours!r} and became {theirs!r}"]


def wrong_types(value, kind, path=""):
    """Where a model's field holds what its annotation does not allow: decoding itself checks no types."""
    import dataclasses
    import enum
    import types
    import typing

    origin = typing.get_origin(kind)
    if kind in (object, typing.Any) or isinstance(kind, typing.TypeVar):
        return []
    if origin in (typing.Union, types.UnionType):
        tries = [wrong_types(value, one, path) for one in typing.get_args(kind)]
        return min(tries, key=len) if all(tries) else []
    if kind is type(None):
        return [] if value is None else [f"{path} is {value!r}, which is not null"]
    if origin is typing.Literal:
        return [] if value in typing.get_args(kind) else [f"{path} is {value!r}, none of {typing.get_args(kind)}"]
    if origin is list:
        if not isinstance(value, list):
            return [f"{path} is {value!r}, which is no list"]
        (inner,) = typing.get_args(kind)
        return [finding for number, one in enumerate(value) for finding in wrong_types(one, inner, f"{path}[{number}]")]
    if origin is dict:
        return [] if isinstance(value, dict) else [f"{path} is {value!r}, which is no object"]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        allowed = [member.value for member in kind]
        return [] if (value.value if isinstance(value, enum.Enum) else value) in allowed else [f"{path} is {value!r}, none of {allowed}"]
    if kind is float:
        return [] if isinstance(value, int | float) and not isinstance(value, bool) else [f"{path} is {value!r}, which is no number"]
    if kind in (int, str, bool):
        return [] if type(value) is kind else [f"{path} is {value!r}, which is no {kind.__name__}"]
    # Some lists of models are left as they were read.
    if isinstance(value, dict) and hasattr(kind, "from_json"):
        return wrong_types(kind.from_json(value), kind, path)
    if isinstance(kind, type) and not isinstance(value, kind):
        return [f"{path} is {value!r}, which is no {kind.__name__}"]
    if hasattr(value, "__dict__") and not isinstance(value, enum.Enum) and not dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        return [finding for key, inner in vars(value).items() if key in hints for finding in wrong_types(inner, hints[key], f"{path}.{key}")]
    return []


def dashboards_schema(tree):
    """Grafana's models read each dashboard, and write it again without losing a field or changing a type."""
    module("grafana_foundation_sdk")
    import typing
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, RowPanel

    plugins.register_default_plugins()
    findings, panels = [], 0
    for name, board in boards(tree):
        # A panel whose queries name their data source, and not the panel, would be read without a model.
        try:
            read = Dashboard.from_json(board)
            again = json.loads(JSONEncoder().encode(read))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            findings.append(f"{name}: the models do not read it: {type(error).__name__}: {error}")
            continue
        findings += [f"{name}{finding}" for finding in lost(without_empty(board), again)]
        hints = typing.get_type_hints(Dashboard)
        for key, value in vars(read).items():
            if key == "panels":
                for number, panel in enumerate(value):
                    findings += [f"{name}.panels{finding}" for finding in wrong_types(panel, RowPanel if isinstance(panel, RowPanel) else Panel, f"[{number}]")]
            elif key in hints:
                findings += [f"{name}{finding}" for finding in wrong_types(value, hints[key], f".{key}")]
        panels += len(board["panels"])
    return f"{panels} panels", findings


def dashboards_form(tree):
    """Ids, places, data sources and variables; a title and a description for each panel."""
    findings, uids = [], set()
    for name, board in boards(tree):
        say = lambda text: findings.append(f"{name}: {text}")  # noqa: B023,E731
        if board["uid"] in uids:
            say(f"the uid {board['uid']} is another's")
        uids.add(board["uid"])
        if not {"datasource", "device", "op"} <= variables(board):
            say("lacks a variable for the data source, the device or the op")
        ids, taken = set(), {}
        for panel in board["panels"]:
            title = panel.get("title") or panel["type"]
            if panel["id"] in ids:
                say(f"two panels have the id {panel['id']}")
            ids.add(panel["id"])
            at = panel["gridPos"]
            for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
                if cell[0] >= 24 or taken.setdefault(cell, title) != title:
                    say(f"`{title}` lies over `{taken.get(cell)}`, or beyond the 24 columns")
                    break
            if panel["type"] not in ("row", "text"):
                if not panel.get("description"):
                    say(f"`{title}` says nothing of itself")
                for source in [panel["datasource"]] + [target["datasource"] for target in panel["targets"]]:
                    if source.get("uid") != "${datasource}":
                        say(f"`{title}` asks the data source {source.get('uid')}, and not the chosen one")
        used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps([panel.get("targets") for panel in board["panels"]]))) - {"__rate_interval", "__interval", "__range", "__auto"}
        for variable in sorted(used - variables(board)):
            say(f"the variable ${variable} is used and not declared")
        for variable in sorted(variables(board) - used - {"datasource"}):
            if f"${variable}" not in json.dumps(board["templating"]):
                say(f"the variable ${variable} is declared and not used")
    return f"{len(uids)} dashboards", findings


def dashboards_queries(tree):
    """Every expression is read by promtool, and names metrics and labels that exist."""
    promtool = program("promtool", package=PACKAGE)
    names, _ = names_of(tree)
    places = queries(tree)
    findings = [f"{place}: {finding}" for place, expr in places for finding in names.judge(expr)[1]]
    for place, legend, known in legends(tree, names):
        findings += [f"{place}: the legend speaks of `{label}`, which its query does not have" for label in legend - known]
    with tempfile.TemporaryDirectory() as folder:
        # JSON is YAML, and a recording rule's expression is parsed by Prometheus's own parser.
        rules = [{"record": f"check:expression_{number}", "expr": expr} for number, (_, expr) in enumerate(places)]
        path = Path(folder) / "expressions.yml"
        path.write_text(json.dumps({"groups": [{"name": "expressions", "rules": rules}]}), encoding="utf-8")
        code, output = tree.run(promtool, "check", "rules", "--lint=none", path)
        if code != 0:
            numbers = {int(number) for number in re.findall(r"expression_(\d+)", output)}
            findings += [f"{places[number][0]}: promtool does not read `{places[number][1]}`" for number in sorted(numbers)] or [output.strip()]
    return f"{len(places)} expressions", findings


def legends(tree, names):
    """Place, labels in the legend, and labels of the query, for each query with a legend."""
    for name, board in boards(tree):
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                if labels:
                    yield f"{name}, panel `{panel['title']}`", labels, names.judge(plain(target["expr"]))[0]
