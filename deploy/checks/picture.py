"""The dashboards as pictures, for the documentation: their panels, drawn from their own queries against a Prometheus.

There is no Grafana in it. A story of three hours on two nodes is written as series (one node gets a neighbour that takes memory and time), promtool makes a
database of them and of the recording rules, a Prometheus answers the panels' queries and the alerts' expressions, and this draws what it answers. All three
dashboards show the one story. Its times are fixed, so that the same story, rules and dashboard make the same picture; each picture holds a hash of them, by
which the check sees that it is old.
"""

import hashlib
import json
import math
import re
import shutil
import tempfile
import time
from pathlib import Path
from xml.sax.saxutils import escape

from . import program
from .dashboards import plain
from .live import Server
from .promql import metrics_of
from .rules import ALERTS, BUCKETS, FOLDER, PACKAGE, RULES, bounds_of, rules_of

# Each dashboard and its picture.
PICTURES = {f"deploy/grafana/{name}.json": f"docs/operations/{name}-dashboard.svg" for name in ("executive", "oncall", "debug")}
# The last moment that is shown (2026-01-08, 12:00 UTC), what is shown before it, and the past that the rules look back to.
END, SHOWN, PAST = 1767873600, 3 * 3600, 50 * 3600
FINE, COARSE, STEP = 30, 300, 120
NODES = (("node-a", "10.0.0.1:8080"), ("node-b", "10.0.0.2:8080"))


# The story.

def calm(minute, seed):
    """About 1, and never quite: the same for the same minute."""
    return 1 + 0.05 * math.sin(minute / 7 + seed) + 0.03 * math.sin(minute / 2.3 + 2 * seed)


def below(bound, middle, width=0.5):
    """Which part of what lies about `middle`, log-normally, is not above a bound."""
    if bound <= 0:
        return 0.0
    return 1.0 if math.isinf(bound) else 0.5 * (1 + math.erf((math.log(bound) - math.log(middle)) / (width * math.sqrt(2))))


class Spread:
    """What a histogram gets: so many a second, log-normally about a middle."""

    def __init__(self, rate, middle, width=0.5):
        self.rate, self.middle, self.width = rate, middle, width

    def series(self, metric, labels, bounds):
        """Its series as (name, labels, per second), with the buckets that the library has."""
        for bound in bounds:
            yield f"{metric}_bucket", {**labels, "le": "+Inf" if math.isinf(bound) else f"{bound:g}"}, self.rate * below(bound, self.middle, self.width)
        yield f"{metric}_count", labels, self.rate
        yield f"{metric}_sum", labels, self.rate * self.middle


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
    yield "verdigris_gpu_memory_utilization_ratio", device, 0.81 if is_hit else 0.38 * calm(minute, seed + 5)
    yield "verdigris_gpu_sm_clock_hertz", device, 1.38e9 if is_hit and minute >= 100 else 1.98e9
    yield "verdigris_gpu_memory_clock_hertz", device, 2.619e9
    yield "verdigris_gpu_temperature_celsius", device, (74 if is_hit else 55) * calm(minute, seed + 6)
    yield "verdigris_gpu_power_watts", device, 690 if is_hit else 420 * calm(minute, seed)
    yield "verdigris_gpu_mig_enabled", device, 0
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
        at, by = {**device, "op": op, "engine": engine, "dtype": "bf16"}, {**device, "op": op}
        middle *= calm(minute, seed + len(op)) * (2.4 if is_hit else 1)
        yield "verdigris_executions_total", at, 400 * calm(minute, seed)
        yield "verdigris_device_seconds", at, Spread(4, middle, spread)
        yield "verdigris_slow_executions_total", {**by, "engine": engine}, 0.5 if is_hit else 0.01
        yield "verdigris_choice_switches_total", by, once(20, 2) if op == "conv" else once(75, 1)
        for chosen_by, count in (("shipped", 40), ("plan_cache", 12), ("estimate", 5)):
            yield "verdigris_choices_total", {**by, "engine": engine, "chosen_by": chosen_by}, once(20 if op == "conv" else 75, count)
        yield "verdigris_drift_checks_total", {**by, "outcome": "within"}, 0.05
        yield "verdigris_drift_checks_total", {**by, "outcome": "beyond"}, once(62, 2) if (node, op) == (0, "gemm") else 0
        yield "verdigris_drift_ratio", by, Spread(0.05, 3.0 if (node, op) == (0, "gemm") and 62 <= minute < 63 else 0.3)
        yield "verdigris_number_checks_total", by, 0.2
        yield "verdigris_nonfinite_total", by, once(60, 3) if (node, op) == (0, "gemm") else 0
        yield "verdigris_amax_ratio", by, Spread(0.2, 2.0 ** -126 * calm(minute, seed), 3.0)
    yield "verdigris_guard_skips_total", {**device, "guard": "drift", "reason": "work"}, 0.01
    for outcome, rate in (("taken", 8), ("skipped", 1 if is_hit else 0.2), ("lost", 0.05 if is_hit else 0)):
        yield "verdigris_samples_total", {**device, "outcome": outcome}, rate
    yield "verdigris_plans_total", device, once(20, 3) + once(75, 2)
    yield "verdigris_plan_seconds", device, Spread(once(20, 3) + once(75, 2), 0.04, 0.8)
    for origin, count in (("pack", 38), ("disk", 6), ("compiled", 3)):
        yield "verdigris_kernels_total", {**device, "origin": origin}, once(20, count) + once(75, count / 2)
    yield "verdigris_kernel_compile_seconds", device, Spread(once(20, 3) + once(75, 2), 0.12, 0.6)
    yield "verdigris_workspace_bytes", device, Spread(800 * calm(minute, seed), 24e6, 1.2)
    yield "verdigris_workspace_had_bytes", device, Spread(800 * calm(minute, seed), 21e6 if is_short_of_memory else 24e6, 1.2)
    yield "verdigris_fallbacks_total", {**device, "reason": "workspace"}, 3 if is_short_of_memory else 0
    yield "verdigris_fallbacks_total", {**device, "reason": "alignment"}, 0.1
    yield "verdigris_pool_grown_total", device, once(20, 2) + once(75, 1)
    yield "verdigris_errors_total", {**device, "kind": "out_of_memory"}, 0.06 if is_short_of_memory else 0
    yield "verdigris_workspace_failures_total", device, 0.05 if is_short_of_memory else 0
    yield "verdigris_gpu_xid_events_total", {**device, "xid": "31"}, once(133, 1) if node == 1 else 0
    for kind in ("corrected", "uncorrected"):
        yield "verdigris_gpu_ecc_errors_total", {**device, "kind": kind}, once(40, 2) if (node, kind) == (1, "corrected") else 0
    model = {"model": "resnet50"}
    for outcome, rate in (("ok", 120), ("queue_full", 9 if is_hit else 0), ("deadline", 6 if is_hit else 0), ("failed", 0.4 if is_short_of_memory else 0)):
        yield "verdigris_serve_requests_total", {**model, "outcome": outcome}, rate * calm(minute, seed + 3)
    wait = (0.42 if is_hit else 0.06) * calm(minute, seed + 4)
    yield "verdigris_serve_request_seconds", model, Spread(120, wait)
    yield "verdigris_serve_queue_seconds", model, Spread(120, wait * (0.7 if is_hit else 0.2))
    yield "verdigris_serve_rows_total", model, 480 * calm(minute, seed + 3)
    yield "verdigris_serve_batch_rows", model, Spread(480 / (30 if is_hit else 18), 30 if is_hit else 18, 0.4)
    yield "verdigris_series_refused_total", {}, 0


def counted(node, minute, bounds):
    """What `rates` tells as series, histograms by their buckets."""
    for name, labels, rate in rates(node, minute):
        if isinstance(rate, Spread):
            yield from rate.series(name, labels, bounds[name])
        else:
            yield name, labels, rate


def bounds_of_story(tree):
    """The buckets of the story's histograms, as the library has them."""
    names = {name for name, _, rate in rates(0, 0) if isinstance(rate, Spread)}
    return {name: (*sorted(bounds_of(tree, name)), math.inf) for name in sorted(names)}


def moments():
    """The times of samples: sparse in the past, as a scrape gives them where it is shown."""
    begin = END - SHOWN - 1800
    return [*range(END - SHOWN - PAST, begin, COARSE), *range(begin, END + 1, FINE)]


def story(bounds):
    """The series as OpenMetrics. Counters are sums of rates, so that none goes back."""
    lines = []
    for node, (name, instance) in enumerate(NODES):
        where, sums, before = {"job": "verdigris-serve", "node": name, "instance": instance}, {}, None
        for moment in moments():
            minute = (moment - (END - SHOWN)) / 60
            samples = [(metric, labels, value) for metric, labels, value in levels(node, minute)]
            for metric, labels, rate in counted(node, minute, bounds):
                key = (metric, *sorted(labels.items()))
                sums[key] = sums.get(key, 0.0) + (rate * (moment - before) if before is not None else 0.0)
                samples.append((metric, labels, sums[key]))
            lines += [(f"{metric}{braces({**where, **labels})}", moment, value) for metric, labels, value in samples]
            before = moment
    return openmetrics(lines)


def openmetrics(samples):
    """Samples as (series, moment, value) in the text that promtool reads: the series of a family stand together."""
    return "".join(f"{series} {value:.9g} {moment}\n" for series, moment, value in sorted(samples)) + "# EOF\n"


def braces(labels):
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items())) + "}"


def story_findings(tree):
    """Names and labels of the story that the table of metrics does not have."""
    metrics, findings = metrics_of(tree), set()
    for name, labels, value in [*levels(1, 0), *rates(1, 0)]:
        if name not in metrics:
            findings.add(f"the story has `{name}`, which stands in no row of the table")
        elif set(labels) != metrics[name].labels:
            findings.add(f"the story has `{name}` by {', '.join(sorted(labels))}; the table says {', '.join(sorted(metrics[name].labels))}")
        elif isinstance(value, Spread) != (metrics[name].kind == "histogram"):
            findings.add(f"the story has `{name}` as {'a' if isinstance(value, Spread) else 'no'} histogram; the table says {metrics[name].kind}")
    return sorted(findings)


# What a Prometheus makes of it.

def backfilled(tree, folder):
    """A database under a folder, of the story, of what the rules record of it, and of the alerts that fire."""
    promtool = program("promtool", package=PACKAGE)
    (folder / "story").write_text(story(bounds_of_story(tree)), encoding="utf-8")
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
    with Server(folder, {}, "--storage.tsdb.retention.time=100y") as server:
        server.ready()
        (folder / "alerts").write_text(openmetrics(firing(tree, server)), encoding="utf-8")
    made("openmetrics", "alerts", "data")


def seconds_of(text):
    """`1m`, `1h30m` in seconds."""
    return sum(int(count) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit] for count, unit in re.findall(r"(\d+)([smhd])", str(text or "0s")))


def firing(tree, server):
    """`ALERTS` as a Prometheus would have it, by the alerts' expressions, `for` and `keep_firing_for`: samples where one fires."""
    for rule in rules_of(tree, ALERTS):
        wait, keep = seconds_of(rule.get("for")), seconds_of(rule.get("keep_firing_for"))
        for one in server.ask("query_range", query=rule["expr"], start=END - SHOWN, end=END, step=FINE)["result"]:
            is_true = {int(float(at)) for at, _ in one["values"]}
            labels = {name: value for name, value in one["metric"].items() if name != "__name__"}
            series = f"ALERTS{braces({**labels, **rule['labels'], 'alertname': rule['alert'], 'alertstate': 'firing'})}"
            since = last = None
            is_firing = False
            for moment in range(END - SHOWN, END + 1, FINE):
                if moment in is_true:
                    since, last = moment if since is None else since, moment
                    is_firing = is_firing or moment - since >= wait
                else:
                    since = None
                    is_firing = is_firing and moment - last < keep
                if is_firing:
                    yield series, moment, 1


def alert_rows(server, expr):
    """Alerts that fire at the last moment: name, severity, labels, how long."""
    rows, told = [], {"__name__", "alertname", "alertstate", "severity", "failure"}
    for one in server.ask("query_range", query=expr, start=END - SHOWN, end=END, step=FINE)["result"]:
        fires, labels = {int(float(at)) for at, _ in one["values"]}, one["metric"]
        if END in fires:
            begin = next(moment for moment in range(END, END - SHOWN - FINE - 1, -FINE) if moment - FINE not in fires)
            words = " ".join(f"{name}={value}" for name, value in sorted(labels.items()) if name not in told)
            rows.append((labels["alertname"], labels["severity"], words, END - begin))
    return sorted(rows, key=lambda row: (row[1] != "page", row[0], row[2]))


def legend(pattern, labels):
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda found: labels.get(found[1], ""), pattern).strip()


def finite(values):
    return [(float(at), float(value)) for at, value in values if math.isfinite(float(value))]


def answer(panel, server):
    """What a panel shows, by its type; empty where it shows nothing."""
    exprs = [(plain(target["expr"]), target["legendFormat"]) for target in panel["targets"]]
    first = exprs[0][0]
    if panel["type"] == "table" and "ALERTS" in first:
        return alert_rows(server, first)
    if panel["type"] in ("stat", "table"):
        found = server.ask("query", query=first, time=END)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found if math.isfinite(float(one["value"][1]))]
    step = 2 * STEP if panel["type"] == "heatmap" else STEP
    lines = []
    for expr, pattern in exprs:
        for one in server.ask("query_range", query=expr, start=END - SHOWN, end=END, step=step)["result"]:
            lines.append((legend(pattern, one["metric"]), finite(one["values"])))
    return sorted(line for line in lines if line[1])


# The picture.

INK, SOFT, FAINT, PAPER, FRAME = "#24292f", "#57606a", "#e4e8ec", "#ffffff", "#d0d7de"
LINES = ("#1f5fa8", "#e08214", "#35a282", "#b2182b", "#8e6bbf", "#6b6b6b")
SHADES = ("#fff0e0", "#fddcb8", "#fdbe85", "#fd9f4f", "#f07f22", "#d95f0e", "#a63603", "#7f2704")
LEVELS = {"green": "#1a7f37", "orange": "#9a6700", "red": "#b2182b"}
COLUMN, ROW, TOP, GAP = 50, 22, 54, 4
LEGENDS = 4
# By unit: what a value is multiplied by, what stands behind it, and whether thousands of it have names of their own.
UNITS = {
    "percentunit": (100, " %", False), "s": (1, "s", True), "bytes": (1, "B", True), "hertz": (1, "Hz", True), "watt": (1, "W", True),
    "celsius": (1, " °C", False), "ops": (1, "/s", True), "reqps": (1, "/s", True), "short": (1, "", True),
}


def amount(value, unit):
    """A value of an axis or a legend, as a person writes it."""
    factor, behind, has_thousands = UNITS[unit]
    value *= factor
    scale, prefix = 1.0, ""
    if has_thousands and value:
        scale, prefix = next(((scale, prefix) for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= scale), (scale, prefix))
        if unit == "s" and abs(value) < 1:
            scale, prefix = (1e-3, "m") if abs(value) >= 1e-3 else (1e-6, "µ")
    value /= scale
    words = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{words} {prefix}{behind}".strip() if (prefix + behind)[:1].isalpha() else f"{words}{prefix}{behind}"


def ceiling(value):
    """A round number that is not less."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if power * step >= value * 0.999999)


def stacked(lines):
    """Lines upon each other: what each adds to those before it, at the moments that it has."""
    sums, result = {}, []
    for name, points in lines:
        for at, value in points:
            sums[at] = sums.get(at, 0.0) + value
        result.append((name, [(at, sums[at]) for at, _ in points]))
    return result


def scale_of(panel, lines):
    """The axis of a panel of lines: its lowest and highest value, and the place of a value between them, 0 to 1."""
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for _, points in lines for _, value in points]
    if defaults["custom"]["scaleDistribution"]["type"] == "log" and min(values, default=0) > 0:
        low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
        high = high if high > low else 10 * low
        return low, high, lambda value: math.log(value / low) / math.log(high / low)
    high = defaults.get("max") or ceiling(max(values, default=0.0))
    return 0.0, high, lambda value: value / high


class Drawing:
    def __init__(self):
        self.parts = []

    def text(self, x, y, words, size=11, color=INK, anchor="start", weight="normal"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>')

    def hours(self, x0, x1, y):
        """The hours below a panel."""
        for hour in range(SHOWN // 3600 + 1):
            x = x0 + hour * 3600 / SHOWN * (x1 - x0)
            self.text(x, y, time.strftime("%H:%M", time.gmtime(END - SHOWN + hour * 3600)), 9, SOFT, "start" if hour == 0 else "middle" if x < x1 else "end")

    def timeseries(self, panel, box, lines):
        """Lines over time."""
        left, top, width, height = box
        unit = panel["fieldConfig"]["defaults"]["unit"]
        told = lines[:LEGENDS]
        x0, x1, y0, y1 = left + 52, left + width - 10, top + 26, top + height - 22 - 13 * math.ceil(len(told) / 2)
        # Stacked, the last value of a line is still its own.
        own = [points[-1][1] for _, points in lines]
        if panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal":
            lines = stacked(lines)
        low, high, place = scale_of(panel, lines)
        is_linear = low == 0.0
        for share in (0, 0.5, 1):
            y = y1 - share * (y1 - y0)
            self.parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x1}" y2="{y:.1f}" stroke="{FAINT}"/>')
            self.text(x0 - 5, y + 3.5, amount(share * high if is_linear else low * (high / low) ** share, unit), 9, SOFT, "end")
        self.hours(x0, x1, y1 + 11)
        for number, (name, points) in enumerate(lines):
            color, path, before = LINES[number % len(LINES)], [], None
            for at, value in points:
                x, y = x0 + (at - END + SHOWN) / SHOWN * (x1 - x0), y1 - place(value) * (y1 - y0)
                path.append(f"{'M' if before is None or at - before > STEP else 'L'}{x:.1f} {y:.1f}")
                before = at
            self.parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.3"><title>{escape(name)}</title></path>')
            if number < LEGENDS:
                x, y = left + 10 + (number % 2) * (width - 16) / 2, y1 + 26 + 13 * (number // 2)
                room = int((width / 2 - 40) / 4.9)
                words = f"{name} {amount(own[number], unit)}"
                self.parts.append(f'<rect x="{x:.1f}" y="{y - 6:.1f}" width="9" height="3" fill="{color}"/>')
                self.text(x + 13, y, words if len(words) <= room or len(told) == 1 else words[:room - 1] + "…", 9)

    def heatmap(self, panel, box, lines):
        """Buckets over time: the more a bucket got of what its moment got, the darker."""
        left, top, width, height = box
        x0, x1, y0, y1 = left + 60, left + width - 10, top + 26, top + height - 18
        buckets = sorted(((math.inf if le == "+Inf" else float(le), dict(points)) for le, points in lines), key=lambda bucket: bucket[0])
        own = []
        for number, (bound, points) in enumerate(buckets):
            before = buckets[number - 1][1] if number else {}
            own.append((bound, {at: max(value - before.get(at, 0.0), 0.0) for at, value in points.items()}))
        # Rows for those between the first and the last that got anything.
        got = [number for number, (_, points) in enumerate(own) if max(points.values(), default=0.0) > 1e-6]
        own = own[got[0]:got[-1] + 1] if got else []
        totals = {at: sum(points.get(at, 0.0) for _, points in own) for _, points in own for at in points}
        high, wide, cells = (y1 - y0) / max(len(own), 1), (x1 - x0) * 2 * STEP / SHOWN, {}
        for number, (bound, points) in enumerate(own):
            y = y1 - (number + 1) * high
            if number % math.ceil(len(own) / 6) == 0:
                unit = panel["fieldConfig"]["defaults"]["unit"]
                words = "beyond" if math.isinf(bound) else f"≤ {amount(bound, unit)}" if bound >= 1e-6 or not bound else f"≤ 2^{math.log2(bound):.0f}"
                self.text(x0 - 5, y + high / 2 + 3.5, words, 9, SOFT, "end")
            for at, value in points.items():
                if value > 1e-6:
                    shade = min(int(len(SHADES) * math.sqrt(value / totals[at])), len(SHADES) - 1)
                    x = min(x0 + (at - END + SHOWN) / SHOWN * (x1 - x0), x1 - wide)
                    cells.setdefault(shade, []).append(f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}z")
        for shade, path in sorted(cells.items()):
            self.parts.append(f'<path d="{"".join(path)}" fill="{SHADES[shade]}"/>')
        self.hours(x0, x1, y1 + 11)

    def stat(self, panel, box, values):
        """One number, in the colour of its threshold."""
        left, top, width, height = box
        defaults, value = panel["fieldConfig"]["defaults"], values[0][1]
        steps = [step["color"] for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]]
        words = amount(value, defaults["unit"]) if "decimals" not in defaults else f"{value * UNITS[defaults['unit']][0]:.{defaults['decimals']}f}{UNITS[defaults['unit']][1]}"
        self.text(left + width / 2, top + height / 2 + 20, words, 26, LEVELS[steps[-1]], "middle", "bold")

    def table(self, panel, box, rows):
        """Alerts with how long they fire; of anything else the labels and the value, the largest first."""
        if "ALERTS" in panel["targets"][0]["expr"]:
            return self.alerts(box, rows)
        left, top, width, height = box
        hidden = panel["transformations"][0]["options"]["excludeByName"]
        names = sorted({name for labels, _ in rows for name in labels} - set(hidden))
        columns = [*names, *([] if "Value" in hidden else ["Value"])]
        room, wide = int((height - 40) // 15), (width - 20) / len(columns)
        for column, name in enumerate(columns):
            self.text(left + 10 + column * wide, top + 32, name, 10, SOFT)
        for number, (labels, value) in enumerate(sorted(rows, key=lambda row: (-row[1], sorted(row[0].items())))[:room]):
            cells = [*(labels.get(name, "") for name in names), amount(value, panel["fieldConfig"]["defaults"]["unit"])]
            for column, words in enumerate(cells[:len(columns)]):
                self.text(left + 10 + column * wide, top + 48 + 15 * number, words, 10)

    def alerts(self, box, rows):
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


def drawn(board, shown, digest):
    """The dashboard as SVG. `shown`: what each panel shows, by its id."""
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
        getattr(drawing, panel["type"])(panel, box, shown[panel["id"]])
    width, height = 24 * COLUMN, bottom + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'role="img" aria-label="{escape(board["title"])}">'
    )
    return "\n".join([head, f"<desc>made of {digest}</desc>", f'<rect width="{width}" height="{height}" fill="#f6f8fa"/>', *drawing.parts, "</svg>", ""])


def made_of(tree, path):
    """A hash of what a dashboard's picture follows from: the dashboard, rules, alerts, buckets, and the story with the program that draws it."""
    parts = [tree.text(path), tree.text(f"{FOLDER}/{RULES}"), tree.text(f"{FOLDER}/{ALERTS}"), tree.text(BUCKETS), Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def panels(board):
    """Those that show data."""
    return [panel for panel in board["panels"] if panel["type"] not in ("row", "text")]


def pictures(tree, paths):
    """The pictures of some dashboards, by their paths, by way of one Prometheus on a temporary port."""
    made = {}
    with tempfile.TemporaryDirectory(prefix="verdigris-picture-") as place:
        folder = Path(place)
        backfilled(tree, folder)
        with Server(folder, {}, "--storage.tsdb.retention.time=100y") as server:
            server.ready()
            for path in paths:
                board = json.loads(tree.text(path))
                shown = {panel["id"]: answer(panel, server) for panel in panels(board)}
                empty = [panel["title"] for panel in panels(board) if not shown[panel["id"]]]
                if empty:
                    raise ValueError(f"the story gives nothing to the panels {', '.join(empty)} of {path}")
                made[path] = drawn(board, shown, made_of(tree, path))
    return made


def pictures_fresh(tree):
    """Each picture was made of its dashboard, the rules and the story as they are, and has every panel; the story keeps the table of metrics."""
    findings, count = story_findings(tree), 0
    for path, picture in PICTURES.items():
        text = tree.text(picture)
        if f"<desc>made of {made_of(tree, path)}</desc>" not in text:
            findings.append(f"{picture} is of another dashboard, other rules or another story: run deploy/check.py --write")
        titles = [panel["title"] for panel in panels(json.loads(tree.text(path)))]
        findings += [f"{picture} has no panel `{title}`" for title in titles if f">{escape(title)}</text>" not in text]
        count += len(titles)
    return f"{count} panels of {len(PICTURES)} dashboards", findings


def write_pictures(tree):
    """Draws anew those that are old, which takes a minute or two. Raises `Skipped` where Prometheus is not installed."""
    def is_old(path):
        picture = tree.root / PICTURES[path]
        return not picture.is_file() or made_of(tree, path) not in picture.read_text(encoding="utf-8")

    old = [path for path in PICTURES if is_old(path)]
    for path, text in (pictures(tree, old) if old else {}).items():
        (tree.root / PICTURES[path]).write_text(text, encoding="utf-8")
