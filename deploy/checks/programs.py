"""Programs that checks start and ask: what README says of the service and the page of metrics, and a program whose lines are read while it runs."""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

BUILD = "cargo run --release --bin verdigris -- "
SERVICE, METRICS = "http://127.0.0.1:8000", "http://127.0.0.1:9464/metrics"
START_SECONDS = 300


def readme_commands(text):
    """From README: the words of the service and of the demo with its page, and the body that curl sends; findings where one is not there."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.S))
    service = re.search(rf"^{re.escape(BUILD)}(serve .*)$", blocks, flags=re.M)
    demo = re.search(rf"^VERDIGRIS_METRICS=9464 {re.escape(BUILD)}(.*)$", blocks, flags=re.M)
    request = re.search(rf"curl -s {re.escape(SERVICE)}(/\S+) -d '(.*?)'", blocks, flags=re.S)
    findings = []
    for found, what in ((service, f"`{BUILD}serve …`"), (demo, f"`VERDIGRIS_METRICS=9464 {BUILD}…`"), (request, f"a request by curl to {SERVICE}")):
        if not found:
            findings.append(f"README.md has no command {what}")
    for address in (f"{SERVICE}/metrics", METRICS):
        if f"<{address}>" not in text:
            findings.append(f"README.md does not say that a page is at <{address}>")
    if demo and "--hold" not in shlex.split(demo[1]):
        findings.append("README.md's page of metrics ends with the work, before anybody can open it: the command lacks --hold")
    return (service and shlex.split(service[1]), demo and shlex.split(demo[1]), request and (request[1], request[2])), findings


class Running:
    """A program of ours, whose lines are read until it ends; it ends with the block."""

    def __init__(self, command, **environment):
        self.lines, self.news = [], threading.Condition()
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self.news:
                self.lines.append(line.rstrip("\n"))
                self.news.notify_all()
        with self.news:
            self.lines.append(None)
            self.news.notify_all()

    def wait_for(self, pattern):
        """The match of the first line that has it. Raises ValueError where the program ends or takes too long before."""
        until, place = time.monotonic() + START_SECONDS, 0
        with self.news:
            while True:
                while place < len(self.lines):
                    line = self.lines[place]
                    place += 1
                    if line is None:
                        raise ValueError(f"it ended with {self.process.wait()} and said: {' / '.join(filter(None, self.lines))[-600:]}")
                    found = re.search(pattern, line)
                    if found:
                        return found
                if not self.news.wait(max(until - time.monotonic(), 0.0)) and time.monotonic() >= until:
                    raise ValueError(f"no line like `{pattern}` within {START_SECONDS} s; it said: {' / '.join(self.lines)[-600:]}")

    def end(self):
        """Ends it as ctrl-c does: its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.reader.join(10)
        self.process.stdout.close()


def asked(address, request):
    """README's request to a service at an address; what is wrong with the answer."""
    path, body = request
    question = urllib.request.Request(f"{address}{path}", data=body.encode(), headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(question, timeout=60) as answer:
            probabilities = json.load(answer)["outputs"][0]["data"]
    except urllib.error.HTTPError as error:
        return [f"README's request is refused: {error.code} {error.read().decode(errors='replace')[:300]}"]
    if len(probabilities) != 10 or abs(sum(probabilities) - 1) > 0.01:
        return [f"README's request is answered with {probabilities}, which are no probabilities of ten digits"]
    return []
