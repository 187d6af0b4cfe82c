"""Checks of recorded traces: Chrome's trace format by the rules of Perfetto's importer, and the picture that the documentation shows of one.

The rules are those by which trace_processor counts errors while it reads JSON (`json_parser_failure`, `misplaced_end_event`, overlapping complete events,
depth) and those by which it silently leaves an event out. Perfetto's schema of traces, in its package for Python, says the same of an event (`ChromeTraceEvent`), which is a check
of its own; what trace_processor itself makes of the files is another (`importer`).
"""

import gzip
import json
import math
from xml.sax.saxutils import escape

from . import module

RECORDS = "bench/record"
PICTURE = "docs/operations/step-trace.svg"
# Spans of one track within each other; beyond it they are left out.
MOST_DEPTH = 512
SCOPES = {"g", "p", "t"}
NAMES = {"process_name", "thread_name", "process_labels"}
ORDERS = {"process_sort_index", "thread_sort_index"}


def recorded(tree):
    """The traces among the records, oldest first."""
    return sorted((tree.root / RECORDS).glob("**/*trace*.json.gz"))


def load(path):
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def nanoseconds(us):
    return round(us * 1000)


def findings_of(trace):
    """What an importer would complain of, or leave out; and the number of spans."""
    findings = []
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        return ["it is neither an array of events nor an object with `traceEvents`"], 0
    spans, stacks, whole, last = 0, {}, {}, {}
    for number, event in enumerate(events):

        def wrong(rule, number=number, event=event):
            findings.append(f"event {number}: {rule}: {json.dumps(event, ensure_ascii=False)[:200]}")

        if not isinstance(event, dict) or not isinstance(event.get("ph"), str) or len(event["ph"]) != 1:
            wrong("an event is an object with a phase of one letter")
            continue
        phase = event["ph"]
        if any(not isinstance(event.get(key), int) or not 0 <= event[key] < 1 << 32 for key in ("pid", "tid")):
            wrong("pid and tid are whole numbers of 32 bits")
            continue
        if "args" in event and not isinstance(event["args"], dict):
            wrong("args are an object")
        track = (event["pid"], event["tid"])
        if phase == "M":
            args, name = event.get("args") or {}, event.get("name")
            if name in NAMES and not (isinstance(args.get("name", args.get("labels")), str) and args.get("name", args.get("labels"))):
                wrong("a name is a text that is not empty")
            elif name in ORDERS and not isinstance(args.get("sort_index"), int):
                wrong("an order is a whole number")
            elif name not in NAMES | ORDERS:
                wrong("metadata that nobody reads")
            continue
        time = event.get("ts")
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not math.isfinite(time) or time < 0:
            wrong("ts is a number of microseconds")
            continue
        if phase != "E" and not (isinstance(event.get("name"), str) and event["name"]):
            wrong("it has no name")
        if phase == "X":
            duration = event.get("dur")
            if isinstance(duration, bool) or not isinstance(duration, (int, float)) or not math.isfinite(duration) or duration < 0:
                wrong("dur is a number of microseconds, 0 or more")
                continue
            whole.setdefault(track, []).append((nanoseconds(time), nanoseconds(time) + nanoseconds(duration), number))
            spans += 1
        elif phase in "BE":
            if time < last.get(track, 0):
                wrong("it comes before the one that stands before it on its track")
            last[track] = time
            stack = stacks.setdefault(track, [])
            if phase == "B":
                stack.append((time, number))
                spans += 1
                if len(stack) > MOST_DEPTH:
                    wrong(f"more than {MOST_DEPTH} spans within each other")
            elif stack:
                begun, first = stack.pop()
                whole.setdefault(track, []).append((nanoseconds(begun), nanoseconds(time), first))
            else:
                wrong("it ends what never began")
        elif phase == "i":
            if event.get("s", "t") not in SCOPES:
                wrong("the scope of an instant is g, p or t")
        else:
            wrong("a phase that we do not write")
    # Spans of one track are apart or within each other.
    for track, slices in whole.items():
        stack = []
        for begin, end, number in sorted(slices, key=lambda one: (one[0], -one[1])):
            while stack and stack[-1][1] <= begin:
                stack.pop()
            if stack and end > stack[-1][1]:
                findings.append(f"event {number} crosses event {stack[-1][2]} on the track {track}")
            stack.append((begin, end, number))
    return findings, spans


def traces(tree):
    """Every recorded trace keeps the importer's rules."""
    paths, spans = recorded(tree), 0
    findings = [] if paths else [f"no trace is recorded under {RECORDS}"]
    for path in paths:
        try:
            trace = load(path)
        except (OSError, ValueError, EOFError) as error:
            findings.append(f"{path.name}: {error}")
            continue
        found, count = findings_of(trace)
        spans += count
        findings += [f"{path.name}: {one}" for one in found]
    return f"{len(paths)} traces, {spans} spans, by the rules of Perfetto's importer", findings


# Keys of an event in JSON, and the fields of Perfetto's message that they are.
FIELDS = {"ph": "phase", "pid": "process_id", "tid": "thread_id", "ts": "timestamp", "dur": "duration", "name": "name", "cat": "category_group_name", "s": "scope"}
VALUES = ((bool, "bool_value"), (int, "int_value"), (float, "double_value"), (str, "string_value"))


def schema_findings(schema, events):
    """What of some events does not go into messages of Perfetto's schema, and the messages."""
    bundle, findings = schema.ChromeEventBundle(), []
    for number, event in enumerate(events):
        message, values = bundle.trace_events.add(), {key: value for key, value in event.items() if key != "args"}
        # A letter is its code there, and times are whole microseconds: their range is what is held.
        values |= {key: ord(values[key]) for key in ("ph",) if key in values} | {key: round(values[key]) for key in ("ts", "dur") if key in values}
        for key, value in values.items():
            try:
                setattr(message, FIELDS[key], value)
            except KeyError:
                findings.append(f"event {number}: Perfetto's schema has no `{key}` of an event")
            except (TypeError, ValueError) as error:
                findings.append(f"event {number}: {key} is no {FIELDS[key]} of Perfetto's schema: {error}")
        for name, value in event.get("args", {}).items():
            field = next((field for kind, field in VALUES if isinstance(value, kind)), None)
            try:
                setattr(message.args.add(name=name), field or "json_value", value if field else json.dumps(value))
            except (TypeError, ValueError) as error:
                findings.append(f"event {number}: the argument {name} is no {field} of Perfetto's schema: {error}")
    return findings, bundle


def schema(tree):
    """Every event of the recorded traces goes into a message of Perfetto's own schema, and comes out of its bytes again."""
    perfetto, count, findings = module("perfetto.protos.perfetto.trace.perfetto_trace_pb2"), 0, []
    for path in recorded(tree):
        trace = load(path)
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        found, bundle = schema_findings(perfetto, events)
        findings += [f"{path.name}: {one}" for one in found]
        again = perfetto.ChromeEventBundle.FromString(bundle.SerializeToString())
        if [event.name for event in again.trace_events] != [event.get("name", "") for event in events]:
            findings.append(f"{path.name}: names of events are others after they were bytes of Perfetto's")
        count += len(events)
    return f"{count} events, by Perfetto's ChromeTraceEvent", findings


def picture_fresh(tree):
    """The picture in the documentation is that of the newest recorded trace."""
    paths = recorded(tree)
    if not paths:
        return "", [f"no trace is recorded under {RECORDS}"]
    path = tree.root / PICTURE
    wanted = picture(load(paths[-1]), paths[-1].relative_to(tree.root).as_posix())
    is_fresh = path.is_file() and path.read_text(encoding="utf-8") == wanted
    return f"{PICTURE} of {paths[-1].name}", [] if is_fresh else [f"{PICTURE} is not what {paths[-1].name} shows: python3 deploy/check.py --write"]


def write_picture(tree):
    """Draws it anew."""
    paths = recorded(tree)
    if paths:
        path = tree.root / PICTURE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(picture(load(paths[-1]), paths[-1].relative_to(tree.root).as_posix()), encoding="utf-8")


# What each op is drawn in; distinguishable for those who see few colours, by lightness too.
COLORS = {
    "conv": "#1f5fa8", "gemm": "#e08214", "batch_norm": "#35a282", "norm": "#35a282", "pool": "#b2182b", "map": "#8e6bbf", "reduce": "#6b6b6b",
    "softmax": "#c51b7d", "attention": "#5e3c99", "other": "#999999",
}
INK, FAINT, HOST, PAPER = "#24292f", "#d0d7de", "#8ea4bd", "#ffffff"
LEFT, WIDTH, LANE = 90, 1080, 24


def _spans(trace):
    """Spans as (track, start, end, name, op, text), with the names of the tracks and which of them are a device's."""
    names, is_device, open_, spans = {}, {}, {}, []
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    for event in events:
        track = (event["pid"], event["tid"])
        args = event.get("args", {})
        if event["ph"] == "M" and event["name"] == "process_name":
            is_device[event["pid"]] = args["name"] == "device"
        elif event["ph"] == "M" and event["name"] == "thread_name":
            names[track] = args["name"]
        elif event["ph"] == "X":
            engine = args.get("engine", "")
            op = engine.removeprefix("cpu.").split(".")[0]
            text = f"{event['name']}, {engine}, {event['dur']:.1f} µs"
            spans.append((track, event["ts"], event["ts"] + event["dur"], event["name"], op if op in COLORS else "other", text))
        elif event["ph"] == "B":
            open_.setdefault(track, []).append(event)
        elif event["ph"] == "E" and open_.get(track):
            begun = open_[track].pop()
            what = begun["name"] + "".join(f" {begun['args'][key]}" for key in ("graph",) if key in begun.get("args", {}))
            spans.append((track, begun["ts"], event["ts"], begun["name"], None, f"{what}, {(event['ts'] - begun['ts']) / 1e3:.1f} ms"))
    return spans, names, is_device


def _tick(span_us):
    """A round distance of about a tenth of the span."""
    rough = span_us / 10
    power = 10 ** math.floor(math.log10(rough))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= rough)


def picture(trace, source):
    """The trace as SVG: all of it, and below it what came behind the last plan, where every plan is made and the step is as all later ones are."""
    spans, names, is_device = _spans(trace)
    if not spans:
        raise ValueError("there are no spans in it")
    tracks = sorted({span[0] for span in spans}, key=lambda track: (is_device.get(track[0], False), track))
    begin, end = min(span[1] for span in spans), max(span[2] for span in spans)
    planned = max((span[2] for span in spans if span[3] == "plan"), default=begin)
    late = [span for span in spans if span[1] >= planned]
    parts = []

    def text(x, y, words, anchor="start", size=12, color=INK, weight="normal"):
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{color}">{escape(words)}</text>')

    def panel(y, low, high, origin, since, title):
        """One stretch of time, from `low` to `high` microseconds; the height below it that is free again."""
        text(10, y, title, weight="bold")
        scale, tick = WIDTH / (high - low), _tick(high - low)
        bottom = y + 10 + LANE * len(tracks)
        for step in range(math.ceil((low - origin) / tick), int((high - origin) / tick) + 1):
            x = LEFT + (origin + step * tick - low) * scale
            parts.append(f'<line x1="{x:.1f}" y1="{y + 6}" x2="{x:.1f}" y2="{bottom}" stroke="{FAINT}"/>')
            text(x, bottom + 14, f"{step * tick / 1e3:.6g}", "middle", 10)
        text(LEFT + WIDTH, bottom + 28, f"ms since {since}", "end", 10)
        for row, track in enumerate(tracks):
            top = y + 10 + LANE * row
            text(LEFT - 8, top + 15, names.get(track, "host") if not is_device.get(track[0]) else "device", "end", 11)
            for _, start, stop, _, op, words in sorted(one for one in spans if one[0] == track and one[1] < high and one[2] > low):
                left, right = LEFT + (max(start, low) - low) * scale, LEFT + (min(stop, high) - low) * scale
                color = COLORS[op] if op else HOST
                parts.append(
                    f'<rect x="{left:.1f}" y="{top + 2}" width="{max(right - left, 0.6):.1f}" height="{LANE - 6}" fill="{color}" stroke="{PAPER}" '
                    f'stroke-width="0.3"><title>{escape(words)}</title></rect>'
                )
        return bottom + 52

    text(10, 22, "A trace of a training step: what the host plans, and what the device computes", size=15, weight="bold")
    text(10, 40, f"{source}; one box a span, its name and time where the mouse rests; device spans are those whose time was sampled", size=11, color="#57606a")
    y = panel(66, begin, end, begin, "the first span", "All of it: each shape is planned once")
    if late:
        low, high = min(span[1] for span in late), max(span[2] for span in late)
        middle = (low + high) / 2
        y = panel(y, low, middle, low, "its begin", "Behind the last plan, first half")
        y = panel(y, middle, high, low, "its begin", "Behind the last plan, second half")
    sums = {}
    for span in late or spans:
        if span[4]:
            count, us = sums.get(span[4], (0, 0.0))
            sums[span[4]] = (count + 1, us + span[2] - span[1])
    x = LEFT
    for op, (count, us) in sorted(sums.items(), key=lambda item: -item[1][1]):
        words = f"{op}: {count} spans, {us / 1e3:.2f} ms"
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLORS[op]}"/>')
        text(x + 17, y, words, size=11)
        x += 27 + 6.4 * len(words)
    parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{HOST}"/>')
    text(x + 17, y, "host", size=11)
    width, height = LEFT + WIDTH + 30, y + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'role="img" aria-label="A trace of a training step">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="{PAPER}"/>', *parts, "</svg>", ""])
