"""A real Prometheus on a temporary port: it scrapes, evaluates every rule, and answers every query of the dashboards.

With `--verdigris` it scrapes the program as well: the service of README's command, which is asked README's request, and the exporter of device metrics.
"""

import contextlib
import http.server
import json
import math
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from . import program
from .dashboards import queries
from .programs import Running, asked, readme_commands
from .promql import HISTOGRAM_PARTS, metrics_of
from .rules import ALERTS, FOLDER, PACKAGE, RULES, rules_of

# Values of labels for which the table lists none; any other label gets a value of its own making.
VALUES = {"device": ["cuda:0"], "xid": ["79", "31"]}
# The jobs: the series made from the table (or what `--scrape` names), and the program's service and exporter.
SYNTHETIC, SERVICE, EXPORTER = "verdigris-serve", "verdigris-service", "verdigris-exporter"
# What has to be there, and above 0, of the program itself: its own series, and two that the rules record of them, once it was asked.
OF_THE_PROGRAM = (
    f'up{{job="{SERVICE}"}}',
    f'verdigris_build_info{{job="{SERVICE}"}}',
    f'sum(verdigris_serve_requests_total{{job="{SERVICE}",model="digits",outcome="ok"}})',
    f'sum(verdigris_serve_rows_total{{job="{SERVICE}"}})',
    f'sum(verdigris_executions_total{{job="{SERVICE}"}})',
    f'sum(verdigris_device_seconds_count{{job="{SERVICE}"}})',
    f'sum(model:verdigris_serve_rows:rate5m{{job="{SERVICE}"}})',
    f'sum(model:verdigris_serve_request_seconds:p99_5m{{job="{SERVICE}"}})',
    f'up{{job="{EXPORTER}"}}',
    f'verdigris_build_info{{job="{EXPORTER}"}}',
)
# And of the exporter, where a device is: without one it says that its process lives, and no more.
OF_A_DEVICE = (f'min(verdigris_gpu_up{{job="{EXPORTER}"}})', f'min(verdigris_gpu_memory_used_bytes{{job="{EXPORTER}"}})')
BOUNDS = ("0.0001", "0.001", "0.01", "0.1", "1", "+Inf")
SETTLE_SECONDS = 60
# Queries that are empty on a minute of data: those that look back by a day, and by an hour.
LOOKS_BACK = re.compile(r"offset 1d|offset 10m|median1w|ALERTS")


def exposition(metrics, seconds):
    """The text that a process with every metric of the table would show, `seconds` after its start."""
    lines = []
    for metric in metrics.values():
        lines += [f"# HELP {metric.name} Synthetic.", f"# TYPE {metric.name} {metric.kind}"]
        labels = sorted(metric.labels)
        sets = [[]]
        for label in labels:
            sets = [chosen + [f'{label}="{value}"'] for chosen in sets for value in sorted(metric.values.get(label, ())) or VALUES.get(label, [f"{label}1"])]
        for chosen in sets:
            count = 10 + 5 * seconds
            if metric.kind == "histogram":
                for place, bound in enumerate(BOUNDS, 1):
                    lines.append(f"{metric.name}_bucket{{{','.join(chosen + [f'le=%s' % json.dumps(bound)])}}} {math.ceil(count * place / len(BOUNDS))}")
                braces = f"{{{','.join(chosen)}}}" if chosen else ""
                lines += [f"{metric.name}_sum{braces} {count * 0.01:.3f}", f"{metric.name}_count{braces} {count}"]
            else:
                braces = f"{{{','.join(chosen)}}}" if chosen else ""
                lines.append(f"{metric.name}{braces} {count if metric.kind == 'counter' else 0.5}")
    return "\n".join(lines) + "\n"


class Exporter(http.server.ThreadingHTTPServer):
    """Serves `exposition`, whose counters grow."""

    daemon_threads = True

    def __init__(self, metrics):
        begin = time.monotonic()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = exposition(metrics, int(time.monotonic() - begin)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


def exposition_findings(text, metrics):
    """What a scraped text says that the table does not: names, types and labels."""
    findings, types = set(), dict(re.findall(r"^# TYPE (\S+) (\w+)", text, flags=re.M))
    for line in text.splitlines():
        found = re.match(r"(verdigris_\w+)(?:\{(.*)\})? ", line)
        if not found or line.startswith("#"):
            continue
        name, labels = found[1], set(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', found[2] or ""))
        base = next((name.removesuffix(part) for part in HISTOGRAM_PARTS if metrics.get(name.removesuffix(part), None) and name.endswith(part)), name)
        metric = metrics.get(base)
        if metric is None:
            findings.add(f"`{name}` is exported and stands in no row of the table")
            continue
        if types.get(base) != metric.kind:
            findings.add(f"`{base}` is exported as {types.get(base)}, and is a {metric.kind} by the table")
        wanted = metric.labels | ({"le"} if name.endswith("_bucket") and metric.kind == "histogram" else set())
        if labels != wanted:
            findings.add(f"`{name}` is exported with the labels {', '.join(sorted(labels)) or 'none'}; the table says {', '.join(sorted(wanted)) or 'none'}")
    return sorted(findings)


class Server:
    """A Prometheus over a folder with its rules' files and its data, on a temporary port; ends with the block."""

    def __init__(self, folder, config, *options):
        self.folder = Path(folder)
        (self.folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [program("prometheus", package=PACKAGE), "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={self.address}"]
        self.log = open(self.folder / "log", "w+", encoding="utf-8")
        self.process = subprocess.Popen([*command, *options], cwd=self.folder, stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def ready(self):
        """Waits until it answers queries."""
        until = time.monotonic() + SETTLE_SECONDS
        while self.process.poll() is None and time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=10):
                    return
            except OSError:
                time.sleep(0.1)
        raise ValueError(f"Prometheus is not ready within {SETTLE_SECONDS} s: {self.said()}")

    def ask(self, path, **query):
        """The `data` of an answer; an error of the server is a ValueError with its words."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from None

    def said(self):
        self.log.flush()
        return (self.folder / "log").read_text(encoding="utf-8")[-600:]


class Prometheus(Server):
    """A server of its own over a temporary folder, with the tree's rules and alerts, that scrapes."""

    def __init__(self, tree, targets):
        """`targets`: the address of each job."""
        folder = Path(tempfile.mkdtemp(prefix="verdigris-prometheus-"))
        source = tree.root / FOLDER
        for name in (RULES, ALERTS):
            # Rules are evaluated every second here, so that nobody waits for their clocks.
            text = re.sub(r"^( *)interval: \w+$", r"\1interval: 1s", (source / name).read_text(encoding="utf-8"), flags=re.M)
            (folder / name).write_text(text, encoding="utf-8")
        urls = {job: urllib.parse.urlsplit(target) for job, target in targets.items()}
        super().__init__(folder, {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [RULES, ALERTS],
            "scrape_configs": [{
                "job_name": job, "metrics_path": url.path or "/metrics", "scheme": url.scheme,
                "static_configs": [{"targets": [url.netloc], "labels": {"node": "here"}}],
            } for job, url in urls.items()],
        })

    def __exit__(self, *what):
        super().__exit__(*what)
        shutil.rmtree(self.folder, ignore_errors=True)


def scraped(prometheus):
    """Waits until every target was scraped several times, and rules of recorded series have followed; what went wrong, else None."""
    until = time.monotonic() + SETTLE_SECONDS
    error = "it was never scraped"
    while time.monotonic() < until:
        if prometheus.process.poll() is not None:
            return f"Prometheus ended with {prometheus.process.returncode}: {prometheus.said()}"
        try:
            targets = prometheus.ask("targets")["activeTargets"]
            error = next((f"{target['labels']['job']}: {target['lastError']}" for target in targets if target["lastError"]), error)
            counts = prometheus.ask("query", query="count_over_time(up[5m]) > 5")["result"]
            if targets and len(counts) == len(targets):
                down = [target for target in targets if target["health"] != "up"]
                return f"the target {down[0]['labels']['job']} cannot be scraped: {down[0]['lastError']}" if down else None
        except (OSError, ValueError):
            pass
        time.sleep(0.5)
    return f"within {SETTLE_SECONDS} s: {error}"


def has_samples(prometheus, expr):
    """Whether an expression has one sample or more, all above 0."""
    values = [float(one["value"][1]) for one in prometheus.ask("query", query=expr)["result"]]
    return bool(values) and all(value > 0 for value in values)


class Program:
    """The program of `--verdigris` as it is deployed: the service of README's command and the exporter, on ports that the system gives."""

    def __init__(self, tree, stack):
        (words, _, request), findings = readme_commands(tree.text("README.md"))
        if findings:
            raise ValueError("; ".join(findings))
        self.request = request
        self.service = stack.enter_context(Running([tree.verdigris, *words, "--listen", "127.0.0.1:0"]))
        self.exporter = stack.enter_context(Running([tree.verdigris, "serve-metrics", "--listen", "127.0.0.1:0"]))
        self.address = self.service.wait_for(r"listening on (http://\S+);")[1]
        self.targets = {SERVICE: f"{self.address}/metrics", EXPORTER: self.exporter.wait_for(r"metrics on (http://\S+)")[1]}

    def findings(self, prometheus, metrics):
        """The service is asked until Prometheus has what asking leaves behind, and both pages are held against the table; what is wrong."""
        self.service.wait_for(r"^ready$")
        findings, texts = [], {}
        for job, url in self.targets.items():
            with urllib.request.urlopen(url, timeout=10) as answer:
                texts[job] = answer.read().decode()
            findings += [f"{job}: {finding}" for finding in exposition_findings(texts[job], metrics)]
        wanted = OF_THE_PROGRAM + (OF_A_DEVICE if re.search(r"^verdigris_gpu_up\{", texts[EXPORTER], flags=re.M) else ())
        until, lacking = time.monotonic() + SETTLE_SECONDS, wanted
        while lacking and time.monotonic() < until and not findings:
            findings += asked(self.address, self.request)
            lacking = [expr for expr in lacking if not has_samples(prometheus, expr)]
            time.sleep(0.5 if lacking else 0.0)
        findings += [f"Prometheus has no sample above 0 of `{expr}` within {SETTLE_SECONDS} s" for expr in lacking]
        for name, running in (("service", self.service), ("exporter", self.exporter)):
            code = running.end()
            if code != 0:
                findings.append(f"the {name} ended with {code} on ctrl-c")
        return len(wanted), findings


def live(tree):
    """Scrapes `--scrape`, or an exposition made from the table; every rule evaluates, every query of the dashboards answers.

    `--verdigris` is scraped beside it, and its series are there.
    """
    program("prometheus", package=PACKAGE)
    metrics = metrics_of(tree)
    with contextlib.ExitStack() as stack:
        if tree.scrape:
            target = tree.scrape
        else:
            exporter = stack.enter_context(contextlib.closing(Exporter(metrics)))
            target = f"http://127.0.0.1:{exporter.server_address[1]}/metrics"
        try:
            ours = Program(tree, stack) if tree.verdigris else None
            return observed(tree, metrics, target, ours)
        except (OSError, ValueError) as error:
            return "", [f"{target}: {error}" if isinstance(error, OSError) else str(error)]


def observed(tree, metrics, target, ours):
    """What a Prometheus sees of the target, and of the program where there is one."""
    with urllib.request.urlopen(target, timeout=10) as answer:
        findings = exposition_findings(answer.read().decode(), metrics)
    with Prometheus(tree, {SYNTHETIC: target, **(ours.targets if ours else {})}) as prometheus:
        trouble = scraped(prometheus)
        if trouble:
            return "", findings + [trouble]
        # Recorded series that are made of recorded series take another round.
        seen, settled = "", time.monotonic() + 3
        if ours:
            count, found = ours.findings(prometheus, metrics)
            findings += found
            seen = f"; of the program itself {count} series or records above 0"
        time.sleep(max(settled - time.monotonic(), 0.0))
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        findings += [f"rule {rule['name']} is {rule['health']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
        wanted = len(rules_of(tree, RULES)) + len(rules_of(tree, ALERTS))
        if len(rules) != wanted:
            findings.append(f"{len(rules)} rules are loaded, {wanted} stand in the files")
        answered, empty = 0, []
        for place, expr in queries(tree, for_server=True):
            try:
                result = prometheus.ask("query", query=expr)["result"]
            except ValueError as error:
                findings.append(f"{place}: {error}")
                continue
            answered += 1
            if not result and not LOOKS_BACK.search(expr):
                empty.append(place)
        # A process under `--scrape` has what it happened to do; the synthetic one has everything.
        if not tree.scrape:
            findings += [f"{place}: answers with nothing, though every metric has samples" for place in empty]
        samples = prometheus.ask("query", query=f'scrape_samples_scraped{{job="{SYNTHETIC}"}}')["result"]
        return f"{samples[0]['value'][1]} samples a scrape, {len(rules)} rules, {answered} queries, {len(empty)} of them empty{seen}", findings
