"""README's two commands of a service, as a reader meets them: each is started, asked, and its page of metrics opened in a headless browser.

Ports are others than README's (the system gives free ones), and the program is the one that `--verdigris` names; all else is what README says.
"""

import html
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from . import Skipped, program, traces
from .live import SYNTHETIC, Exporter, Prometheus, exposition_findings, scraped
from .programs import Running, asked, readme_commands
from .promql import metrics_of

WINDOW = "1280,640"


def headless(chromium, profile):
    """How the browser is called: with a profile of its own, so that nobody's browser is touched, and without the sandbox, which needs rights that a container's root does not have."""
    return [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]


def open_page(tree, chromium, url, picture=None):
    """The text that the browser shows of a page."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*headless(chromium, folder), f"--window-size={WINDOW}"]
        if tree.pictures and picture:
            tree.pictures.mkdir(parents=True, exist_ok=True)
            subprocess.run([*command, "--virtual-time-budget=4000", f"--screenshot={tree.pictures / picture}", url], capture_output=True, timeout=120, check=True)
        done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise ValueError(f"{Path(chromium).name} ended with {done.returncode}: {done.stderr[-400:]}")
    return html.unescape(re.sub(r"<[^>]*>", "", done.stdout))


def shows(text, metrics, wanted):
    """What is wrong with a page of metrics as the browser shows it."""
    findings = exposition_findings(text, metrics)
    return findings + [f"the browser shows no `{series}` above 0" for series in wanted if not re.search(rf"^{series} (?!0$)\d", text, flags=re.M)]


def service(tree, chromium, words, request):
    """The service, README's request, and its page."""
    findings = []
    with Running([tree.verdigris, *words, "--listen", "127.0.0.1:0"]) as running:
        address = running.wait_for(r"listening on (http://\S+);")[1]
        running.wait_for(r"^ready$")
        findings += asked(address, request)
        text = open_page(tree, chromium, f"{address}/metrics")
        findings += shows(text, metrics_of(tree), [r'verdigris_serve_requests_total\{model="digits",outcome="ok"\}', r"verdigris_executions_total\{[^}]*\}"])
        code = running.end()
        if code != 0:
            findings.append(f"the service ended with {code} on ctrl-c")
    return [f"{' '.join(words)}: {finding}" for finding in findings]


def demo(tree, chromium, words):
    """The demo, whose page stays; its trace is held against the importer's rules, and has the device's spans."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "trace.json"
    with folder, Running([tree.verdigris, *words], VERDIGRIS_METRICS="127.0.0.1:0", VERDIGRIS_TRACE=str(path)) as running:
        url = running.wait_for(r"the page stays at (http://\S+) until ctrl-c")[1]
        text = open_page(tree, chromium, url, "metrics-page.png")
        wanted = [r"verdigris_plans_total\{[^}]*\}", r"verdigris_executions_total\{[^}]*\}", r"verdigris_device_seconds_count\{[^}]*\}"]
        findings = shows(text, metrics_of(tree), wanted)
        code = running.end()
        if code != 0:
            findings.append(f"it ended with {code} on ctrl-c")
        trace = traces.load(path)
        findings += [f"its trace: {finding}" for finding in traces.findings_of(trace)[0][:20]]
        engines = {event["args"].get("engine") for event in trace if event["ph"] == "X"}
        findings += [f"its trace has no span of {engine}" for engine in ("cpu.conv.gemm", "cpu.pointwise") if engine not in engines]
    return [f"VERDIGRIS_METRICS=9464 {' '.join(words)}: {finding}" for finding in findings]


def alerts_picture(tree, chromium):
    """Prometheus's own page of alerts, while series of every metric are scraped: a picture for the documentation."""
    exporter = Exporter(metrics_of(tree))
    try:
        with Prometheus(tree, {SYNTHETIC: f"http://127.0.0.1:{exporter.server_address[1]}/metrics"}) as prometheus:
            trouble = scraped(prometheus)
            if trouble:
                raise ValueError(trouble)
            time.sleep(3)
            # Debian's build has the older pages alone.
            for page in ("classic/alerts", "alerts"):
                try:
                    with urllib.request.urlopen(f"http://{prometheus.address}/{page}", timeout=10):
                        break
                except urllib.error.HTTPError:
                    continue
            open_page(tree, chromium, f"http://{prometheus.address}/{page}", "prometheus-alerts.png")
    finally:
        exporter.close()


def browser(tree):
    """README's service and its metrics page answer, and a headless browser shows their metrics; without --verdigris, README alone is read."""
    (serve_words, demo_words, request), findings = readme_commands(tree.text("README.md"))
    if findings:
        return "", findings
    if tree.verdigris is None:
        raise Skipped("which program? --verdigris target/release/verdigris")
    chromium = program("chromium", "chromium-browser", "google-chrome", package="Debian: apt-get install chromium")
    for run in (lambda: service(tree, chromium, serve_words, request), lambda: demo(tree, chromium, demo_words)):
        try:
            findings += run()
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            findings.append(f"{type(error).__name__}: {error}")
    if tree.pictures:
        alerts_picture(tree, chromium)
    return "2 commands of README.md, 2 pages", findings
