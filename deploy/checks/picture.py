"""The on-call dashboard as a picture, for the documentation: its panels, drawn from their own queries against a Prometheus.

There is no Grafana in it. A story of three hours on two nodes is written as series (one node gets a neighbour that takes memory and time), promtool makes a
database of them and of the recording rules, a Prometheus answers the panels' queries and the alerts' expressions, and this draws what it answers. The story's
times are fixed, so that the same story, rules and dashboard make the same picture; the picture holds a hash of them, by which the check sees that it is old.
"""

import hashlib
import json
import math
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from xml.sax.saxutils import escape

from . import program
from .dashboards import plain
from .live import Server
from .promql import HISTOGRAM_PARTS, metrics_of
from .rules import ALERTS, FOLDER, PACKAGE, RULES, rules_of

PICTURE, BOARD = "docs/operations/oncall-dashboard.svg", "deploy/grafana/oncall.json"
# The last moment that is shown (2026-01-08, 12:00 UTC), what is shown before it, and the past that the rules look back to.
END, SHOWN, PAST = 1767873600, 3 * 3600, 50 * 3600
FINE, COARSE, STEP = 30, 300, 120
NODES = (("node-a", "10.0.0.1:8080"), ("node-b", "10.0.0.2:8080"))
DEVICE_BOUNDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, math.inf)
REQUEST_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, math.inf)


# The story.

def calm(minute, seed):
    """About 1, and never quite: the same for the same minute."""
    return 1 + 0.05 * math.sin(minute / 7 + seed) + 0.03 * math.sin(minute / 2.3 + 2 * seed)


def below(bound, middle, width=0.5):
    """How many of what lies about `middle`, log-normally, is not above a bound."""
    return 1.0 if math.isinf(bound) else 0.5 * (1 + math.erf((math.log(bound) - math.log(middle)) / (width * math.sqrt(2))))


def levels(node, minute):
    """Gauges of a node at a minute of the story, as (name, labels, value)."""
    seed, is_hit = float(node), node == 1 and 90 <= minute < 140
    device = {"device": "cuda:0"}
    others = 31e9 if is_hit else 0.6e9
    yield "verdigris_build_info", {"version": "0.0.0", "source": "e197c3dfd9e6"}, 1
    yield "verdigris_gpu_up", device, 1
    yield "verdigris_gpu_memory_total_bytes", device, 80e9
    yield "verdigris_gpu_memory_used_bytes", device, 38e9 + others
    yield "verdigris_gpu_process_memory_bytes", {**device, "process": "self"}, 38e9
    yield "verdigris_gpu_process_memory_bytes", {**device, "process": "others"}, others
    yield "verdigris_gpu_utilization_ratio", device, 0.97 if is_hit else 0.6 * calm(minute, seed)
    yield "verdigris_pool_reserved_bytes", device, 36e9
    yield "verdigris_pool_used_bytes", device, 24e9 * calm(minute, seed + 1)
    yield "verdigris_overdue_executions", device, 1 if node == 1 and 128 <= minute < 134 else 0
    for reason in ("power", "thermal"):
        yield "verdigris_gpu_throttled", {**device, "reason": reason}, 1 if is_hit and reason == "power" and minute >= 100 else 0
    yield "verdigris_serve_queue_rows", {"model": "resnet50"}, round((220 if is_hit else 6) * calm(minute, seed + 2))


def rates(node, minute):
    """What a node counts in a second at a minute of the story, as (name, labels, per second)."""
    seed, is_hit = float(node), node == 1 and 90 <= minute < 140
    is_short_of_memory = is_hit and 104 <= minute < 118
    device = {"device": "cuda:0"}

    def once(at, count):
        """Something that happens in one minute."""
        return count / 60 if at <= minute < at + 1 else 0.0

    for op, engine, middle, spread in (("conv", "conv.halo", 4e-4, 0.5), ("gemm", "gemm.wgmma", 9e-4, 0.4)):
        at = {**device, "op": op, "engine": engine, "dtype": "bf16"}
        middle *= calm(minute, seed + len(op)) * (2.4 if is_hit else 1)
        yield "verdigris_executions_total", at, 400 * calm(minute, seed)
        for bound in DEVICE_BOUNDS:
            yield "verdigris_device_seconds_bucket", {**at, "le": "+Inf" if math.isinf(bound) else f"{bound:g}"}, 4 * below(bound, middle, spread)
        yield "verdigris_device_seconds_count", at, 4
        yield "verdigris_device_seconds_sum", at, 4 * middle
        yield "verdigris_slow_executions_total", {**device, "op": op, "engine": engine}, 0.5 if is_hit else 0.01
        yield "verdigris_choice_switches_total", {**device, "op": op}, once(20, 2) if op == "conv" else once(75, 1)
        yield "verdigris_drift_checks_total", {**device, "op": op, "outcome": "within"}, 0.05
        yield "verdigris_drift_checks_total", {**device, "op": op, "outcome": "beyond"}, once(62, 2) if (node, op) == (0, "gemm") else 0
        yield "verdigris_nonfinite_total", {**device, "op": op}, once(60, 3) if (node, op) == (0, "gemm") else 0
    yield "verdigris_errors_total", {**device, "kind": "out_of_memory"}, 0.02 if is_short_of_memory else 0
    yield "verdigris_workspace_failures_total", device, 0.05 if is_short_of_memory else 0
    yield "verdigris_gpu_xid_events_total", {**device, "xid": "31"}, once(133, 1) if node == 1 else 0
    for kind in ("corrected", "uncorrected"):
        yield "verdigris_gpu_ecc_errors_total", {**device, "kind": kind}, once(40, 2) if (node, kind) == (1, "corrected") else 0
    model = {"model": "resnet50"}
    for outcome, rate in (("ok", 120), ("queue_full", 9 if is_hit else 0), ("deadline", 6 if is_hit else 0), ("failed", 0.4 if is_short_of_memory else 0)):
        yield "verdigris_serve_requests_total", {**model, "outcome": outcome}, rate * calm(minute, seed + 3)
    middle = (0.42 if is_hit else 0.06) * calm(minute, seed + 4)
    for bound in REQUEST_BOUNDS:
        yield "verdigris_serve_request_seconds_bucket", {**model, "le": "+Inf" if math.isinf(bound) else f"{bound:g}"}, 120 * below(bound, middle)
    yield "verdigris_serve_request_seconds_count", model, 120
    yield "verdigris_serve_request_seconds_sum", model, 120 * middle


def moments():
    """The times of samples: sparse in the past, as a scrape gives them where it is shown."""
    begin = END - SHOWN - 1800
    return [*range(END - SHOWN - PAST, begin, COARSE), *range(begin, END + 1, FINE)]


def story():
    """The series as OpenMetrics. Counters are sums of rates, so that none goes back."""
    lines = []
    for node, (name, instance) in enumerate(NODES):
        where, sums, before = {"job": "verdigris-serve", "node": name, "instance": instance}, {}, None
        for moment in moments():
            minute = (moment - (END - SHOWN)) / 60
            samples = [(metric, labels, value) for metric, labels, value in levels(node, minute)]
            for metric, labels, rate in rates(node, minute):
                key = (metric, *sorted(labels.items()))
                sums[key] = sums.get(key, 0.0) + (rate * (moment - before) if before is not None else 0.0)
                samples.append((metric, labels, sums[key]))
            lines += [(f"{metric}{braces({**where, **labels})}", moment, value) for metric, labels, value in samples]
            before = moment
    # The series of a family stand together.
    return "".join(f"{series} {value:.9g} {moment}\n" for series, moment, value in sorted(lines)) + "# EOF\n"


def braces(labels):
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items())) + "}"


def story_findings(tree):
    """Names and labels of the story that the table of metrics does not have."""
    metrics, findings = metrics_of(tree), set()
    for name, labels, _ in [*levels(1, 0), *rates(1, 0)]:
        base = next((name.removesuffix(part) for part in HISTOGRAM_PARTS if name.endswith(part) and name.removesuffix(part) in metrics), name)
        if base not in metrics:
            findings.add(f"the story has `{name}`, which stands in no row of the table")
        elif set(labels) - {"le"} != metrics[base].labels:
            findings.add(f"the story has `{name}` by {', '.join(sorted(labels))}; the table says {', '.join(sorted(metrics[base].labels))}")
    return sorted(findings)


# What a Prometheus makes of it.

def backfilled(tree, folder):
    """A database under a folder, of the story and of what the rules record of it."""
    promtool = program("promtool", package=PACKAGE)
    (folder / "story").write_text(story(), encoding="utf-8")
    shutil.copy(tree.root / FOLDER / RULES, folder / RULES)

    def made(*arguments):
        code, output = tree.run(promtool, "tsdb", "create-blocks-from", *arguments, cwd=folder)
        if code != 0:
            raise ValueError(f"promtool: {output.strip()[-400:]}")

    made("openmetrics", "--max-block-duration=72h", "story", "data")
    begin = END - SHOWN
    # Records of records need the first ones in the database, so the past is worked out twice.
    for passes in (((begin - PAST, END, COARSE), (begin - 900, END, FINE)), ((begin - PAST, END, COARSE),)):
        with Server(folder, {}, "--storage.tsdb.retention.time=100y") as server:
            server.ready()
            for start, end, interval in passes:
                made("rules", f"--start={start}", f"--end={end}", f"--eval-interval={interval}s", f"--url=http://{server.address}", "--output-dir=new", RULES)
        for block in (folder / "new").iterdir():
            shutil.move(str(block), str(folder / "data" / block.name))


def seconds_of(text):
    """`1m`, `1h30m` in seconds."""
    return sum(int(count) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit] for count, unit in re.findall(r"(\d+)([smhd])", str(text or "0s")))


def firing(tree, server):
    """Alerts that fire at the last moment, by their expressions, `for` and `keep_firing_for`: name, severity, labels, how long."""
    rows = []
    for rule in rules_of(tree, ALERTS):
        wait, keep = seconds_of(rule.get("for")), seconds_of(rule.get("keep_firing_for"))
        for one in server.ask("query_range", query=rule["expr"], start=END - SHOWN, end=END, step=FINE)["result"]:
            is_true = {int(float(at)) for at, _ in one["values"]}
            since = fired = last = None
            for moment in range(END - SHOWN, END + 1, FINE):
                if moment in is_true:
                    since, last = moment if since is None else since, moment
                    if fired is None and moment - since >= wait:
                        fired = moment
                else:
                    since = None
                    if fired is not None and moment - last >= keep:
                        fired = None
            if fired is not None:
                labels = {name: value for name, value in one["metric"].items() if name != "__name__"}
                rows.append((rule["alert"], rule["labels"]["severity"], " ".join(f"{name}={value}" for name, value in sorted(labels.items())), END - fired))
    return sorted(rows, key=lambda row: (row[1] != "page", row[0], row[2]))


def legend(pattern, labels):
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda found: labels.get(found[1], ""), pattern).strip()


def answers(tree, board, server):
    """What each panel with lines shows: its id, and (legend, points) of each series."""
    shown = {}
    for panel in board["panels"]:
        if panel["type"] != "timeseries":
            continue
        lines = []
        for target in panel["targets"]:
            result = server.ask("query_range", query=plain(target["expr"]), start=END - SHOWN, end=END, step=STEP)["result"]
            for one in result:
                points = [(float(at), float(value)) for at, value in one["values"]]
                lines.append((legend(target["legendFormat"], one["metric"]), [point for point in points if math.isfinite(point[1])]))
        shown[panel["id"]] = sorted(lines)
    return shown


# The picture.

INK, SOFT, FAINT, PAPER, FRAME = "#24292f", "#57606a", "#e4e8ec", "#ffffff", "#d0d7de"
LINES = ("#1f5fa8", "#e08214", "#35a282", "#b2182b", "#8e6bbf", "#6b6b6b")
COLUMN, ROW, TOP, GAP = 50, 22, 54, 4
LEGENDS = 4


def amount(value, unit):
    """A value of an axis or a legend, as a person writes it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / 1e9:.3g} GB"
    return f"{value:.3g}"


def ceiling(value):
    """A round number that is not less."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if power * step >= value * 0.999999)


class Drawing:
    def __init__(self):
        self.parts = []

    def text(self, x, y, words, size=11, color=INK, anchor="start", weight="normal"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>')

    def lines(self, panel, box, series):
        """A panel of lines in its box."""
        left, top, width, height = box
        unit = panel["fieldConfig"]["defaults"]["unit"]
        told = series[:LEGENDS]
        x0, x1, y0, y1 = left + 52, left + width - 10, top + 26, top + height - 22 - 13 * math.ceil(len(told) / 2)
        high = ceiling(max((value for _, points in series for _, value in points), default=0.0))
        for share in (0, 0.5, 1):
            y = y1 - share * (y1 - y0)
            self.parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x1}" y2="{y:.1f}" stroke="{FAINT}"/>')
            self.text(x0 - 5, y + 3.5, amount(share * high, unit), 9, SOFT, "end")
        for hour in range(SHOWN // 3600 + 1):
            x = x0 + hour * 3600 / SHOWN * (x1 - x0)
            self.text(x, y1 + 11, time.strftime("%H:%M", time.gmtime(END - SHOWN + hour * 3600)), 9, SOFT, "start" if hour == 0 else "middle" if x < x1 else "end")
        if not series:
            self.text((x0 + x1) / 2, (y0 + y1) / 2, "no data", 11, SOFT, "middle")
        for number, (name, points) in enumerate(series):
            color, path, before = LINES[number % len(LINES)], [], None
            for at, value in points:
                x, y = x0 + (at - END + SHOWN) / SHOWN * (x1 - x0), y1 - value / high * (y1 - y0)
                path.append(f"{'M' if before is None or at - before > STEP else 'L'}{x:.1f} {y:.1f}")
                before = at
            self.parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.3"><title>{escape(name)}</title></path>')
            if number < LEGENDS:
                x, y = left + 10 + (number % 2) * (width - 16) / 2, y1 + 26 + 13 * (number // 2)
                room = int((width / 2 - 40) / 4.9)
                words = f"{name} {amount(points[-1][1], unit)}" if points else name
                self.parts.append(f'<rect x="{x:.1f}" y="{y - 6:.1f}" width="9" height="3" fill="{color}"/>')
                self.text(x + 13, y, words if len(words) <= room or len(told) == 1 else words[:room - 1] + "…", 9)

    def table(self, box, rows):
        left, top, width, height = box
        room = int((height - 40) // 15)
        for number, (x, words) in enumerate(((10, "alert"), (270, "severity"), (350, "labels"), (width - 10, "fires for"))):
            self.text(left + x, top + 32, words, 10, SOFT, "end" if number == 3 else "start")
        for number, (name, severity, labels, seconds) in enumerate(rows[:room]):
            y = top + 48 + 15 * number
            color = "#b2182b" if severity == "page" else "#9a6700"
            self.text(left + 10, y, name, 11, color, weight="bold")
            self.text(left + 270, y, severity, 11, color)
            self.text(left + 350, y, labels, 10)
            self.text(left + width - 10, y, f"{seconds // 60} min", 10, INK, "end")
        if len(rows) > room:
            self.text(left + width - 10, top + 16, f"and {len(rows) - room} more", 10, SOFT, "end")


def drawn(board, series, rows, digest):
    """The dashboard as SVG."""
    drawing = Drawing()
    drawing.text(10, 24, f"{board['title']}: a neighbour comes to node-b, from 10:30 to 11:20", 16, weight="bold")
    drawing.text(10, 42, "Drawn from the panels' own queries against a Prometheus on made-up series, by deploy/check.py --write; not Grafana's own drawing.", 11, SOFT)
    bottom = 0
    for panel in board["panels"]:
        grid = panel["gridPos"]
        box = (grid["x"] * COLUMN + GAP, TOP + grid["y"] * ROW + GAP, grid["w"] * COLUMN - 2 * GAP, grid["h"] * ROW - 2 * GAP)
        left, top, width, height = box
        bottom = max(bottom, top + height)
        if panel["type"] == "row":
            drawing.text(left + 6, top + 12, panel["title"], 13, weight="bold")
            continue
        if panel["type"] == "text":
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", panel["options"]["content"]).splitlines()[0]
            drawing.text(left + 6, top + 20, words, 11, SOFT)
            continue
        drawing.parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="{PAPER}" stroke="{FRAME}" rx="3"/>')
        drawing.text(left + 10, top + 16, panel["title"], 12, weight="bold")
        if panel["type"] == "table":
            drawing.table(box, rows)
        else:
            drawing.lines(panel, box, series[panel["id"]])
    width, height = 24 * COLUMN, bottom + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'role="img" aria-label="{escape(board["title"])}">'
    )
    return "\n".join([head, f"<desc>made of {digest}</desc>", f'<rect width="{width}" height="{height}" fill="#f6f8fa"/>', *drawing.parts, "</svg>", ""])


def made_of(tree):
    """A hash of what the picture follows from: dashboard, rules, alerts, and the story with the program that draws it."""
    parts = [tree.text(BOARD), tree.text(f"{FOLDER}/{RULES}"), tree.text(f"{FOLDER}/{ALERTS}"), Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def picture(tree):
    """The picture, by way of a Prometheus on a temporary port."""
    board = json.loads(tree.text(BOARD))
    with tempfile.TemporaryDirectory(prefix="verdigris-picture-") as place:
        folder = Path(place)
        backfilled(tree, folder)
        with Server(folder, {}, "--storage.tsdb.retention.time=100y") as server:
            server.ready()
            series, rows = answers(tree, board, server), firing(tree, server)
    empty = [panel["title"] for panel in board["panels"] if panel["type"] == "timeseries" and not any(points for _, points in series[panel["id"]])]
    if empty:
        raise ValueError(f"the story gives nothing to the panels {', '.join(empty)}")
    return drawn(board, series, rows, made_of(tree))


def picture_fresh(tree):
    """The picture was made of the dashboard, the rules and the story as they are, and has every panel; the story keeps the table of metrics."""
    findings, text = story_findings(tree), tree.text(PICTURE)
    if f"<desc>made of {made_of(tree)}</desc>" not in text:
        findings.append(f"{PICTURE} is of another dashboard, other rules or another story: run deploy/check.py --write")
    titles = [panel["title"] for panel in json.loads(tree.text(BOARD))["panels"] if panel["type"] not in ("row", "text")]
    findings += [f"{PICTURE} has no panel `{title}`" for title in titles if f">{escape(title)}</text>" not in text]
    return f"{len(titles)} panels of {BOARD}", findings


def write_picture(tree):
    """Draws it anew where it is old, which takes a minute or two. Raises `Skipped` where Prometheus is not installed."""
    path = tree.root / PICTURE
    if not path.is_file() or made_of(tree) not in path.read_text(encoding="utf-8"):
        path.write_text(picture(tree), encoding="utf-8")
