"""Exporters from Python. A process has them once, so each test is a process of its own."""

import json
import os
import subprocess
import sys
import textwrap

import pytest


def run(code, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def done(code, *arguments):
    process = run(code, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_program_is_scraped_and_leaves_whole_files(tmp_path):
    said = done(
        """
        import sys, urllib.request
        import verdigris as vd

        folder = sys.argv[1]
        running = vd.telemetry(prometheus="127.0.0.1:0", trace=folder + "/trace.json", events=folder + "/events-%p.jsonl", nvml=1)
        page = urllib.request.urlopen(f"http://{running.address}/metrics").read().decode()
        assert "verdigris_series_refused_total 0" in page, page
        assert running.text().splitlines()[-1] == page.splitlines()[-1]
        assert isinstance(running.absent, list)
        try:
            vd.telemetry()
        except RuntimeError as error:
            print(error)
        # The end of the program ends the files.
        """,
        tmp_path,
    )
    assert "already" in said
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"host", "device"}
    assert len(list(tmp_path.glob("events-*.jsonl"))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_leaves_the_files_to_its_parent(tmp_path):
    done(
        """
        import os, sys
        import numpy as np
        import verdigris as vd

        folder = sys.argv[1]
        vd.telemetry(trace=folder + "/trace.json", events=folder + "/events.jsonl")
        g = vd.Graph("watched")
        x = g.tensor("x", "f32", (4, 4))
        g.store(g.unary("relu", x), "y", "f32")
        plan = vd.Device("cpu").plan(g)
        a, b = np.ones((4, 4), "f4"), np.empty((4, 4), "f4")
        run = lambda: plan.execute({"x": a, "y": b})
        for _ in range(20):
            run()
        stay, end = os.pipe()
        child = os.fork()
        if child == 0:
            # What it does is not told, and its end is not the trace's.
            for _ in range(200):
                run()
                vd.Device("cpu").plan(g)
            os.close(end)
            os.read(stay, 1)
            sys.exit(0)
        for _ in range(20):
            run()
            vd.Device("cpu").plan(g)
        # A second child goes at once, by the same end of a program.
        other = os.fork()
        if other == 0:
            sys.exit(0)
        assert os.waitpid(other, 0)[1] == 0
        for _ in range(20):
            run()
        print(child, os.getpid())
        # The first child is left behind: it ends when the pipe does.
        """,
        tmp_path,
    )
    events = json.loads((tmp_path / "trace.json").read_text())
    assert len({event["pid"] for event in events}) == 2, "host and device of one process"
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line) for line in lines)
    # The files are free again although a child may live on.
    done("import sys, verdigris as vd\nvd.telemetry(trace=sys.argv[1] + '/trace.json', events=sys.argv[1] + '/events.jsonl')", tmp_path)


def test_a_block_ends_it():
    done(
        """
        import urllib.error, urllib.request
        import verdigris as vd

        with vd.telemetry(prometheus="127.0.0.1:0") as running:
            url = f"http://{running.address}/healthz"
            assert urllib.request.urlopen(url).read() == b"ok\\n"
        try:
            urllib.request.urlopen(url)
        except urllib.error.URLError:
            running.close()
        else:
            raise AssertionError("it listens still")
        """
    )


def test_nobody_listens_in_a_pause():
    done(
        """
        import numpy as np
        import verdigris as vd

        def count(text):
            return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("verdigris_executions_total"))

        with vd.telemetry(sample=(1, 100000)) as running:
            g = vd.Graph("relu")
            x = g.tensor("x", "f32", (4,))
            g.store(g.unary("relu", x), "y", "f32")
            plan = vd.Device("cpu").plan(g)
            run = lambda: plan.execute({"x": np.ones(4, "f4"), "y": np.empty(4, "f4")})
            counts = []
            for step in (lambda: None, running.pause, running.pause, running.resume, running.resume):
                step()
                run()
                counts.append(count(running.text()))
            assert counts == [1, 1, 1, 2, 3], counts
        running.pause()  # ended: nothing to pause
        """
    )


GUARDED = """
import time
import numpy as np
import verdigris as vd

def of(running, name, *labels):
    lines = [line for line in running.text().splitlines() if line.startswith(name + "{") and all(label in line for label in labels)]
    return sum(float(line.split()[-1]) for line in lines)

def run(value):
    g = vd.Graph("logs")
    x = g.tensor("x", "f32", (4,))
    g.store(g.unary("log", x), "y", "f32")
    y = np.full(4, 77, "f4")
    vd.Device("cpu").plan(g).execute({"x": np.array([1, 2, value, 4], "f4"), "y": y})
    return y

# Looks are made by a thread, one a second.
def wait(until):
    end = time.monotonic() + 30
    while not until():
        assert time.monotonic() < end, running.text()
        time.sleep(0.05)
"""


def test_a_planted_nan_and_a_shadow_execution_are_counted():
    done(
        GUARDED
        + textwrap.dedent("""
        running = vd.telemetry(check_numbers=(1, 1000), check_drift=(1, 1000))
        run(3)
        wait(lambda: of(running, "verdigris_number_checks_total", 'device="cpu"') == 1)
        assert of(running, "verdigris_nonfinite_total") == 0, running.text()
        assert np.isnan(run(-1)[2])
        wait(lambda: of(running, "verdigris_number_checks_total", 'device="cpu"') == 2)
        assert of(running, "verdigris_nonfinite_total", 'device="cpu"') == 1, running.text()
        wait(lambda: of(running, "verdigris_drift_checks_total", 'outcome="within"', 'device="cpu"') == 2)
        assert of(running, "verdigris_drift_checks_total", 'outcome="beyond"') == 0, running.text()
        """)
    )


def test_one_guard_is_on_without_the_other_and_none_unless_asked_for():
    for words, numbers, drift in (("check_numbers=(1, 1000)", 1, 0), ("check_drift=(1, 1000), check_numbers=(0, 0)", 0, 1), ("", 0, 0)):
        done(
            GUARDED
            + textwrap.dedent(f"""
            with vd.telemetry({words}) as running:
                run(-1)
                counted = lambda: (of(running, "verdigris_number_checks_total"), of(running, "verdigris_drift_checks_total"))
                wait(lambda: sum(counted()) >= {numbers + drift})
                time.sleep(2.5 if not {numbers + drift} else 0)
                assert counted() == ({numbers}, {drift}), running.text()
                assert of(running, "verdigris_executions_total") == 1, running.text()
            """)
        )


def test_rates_that_are_none_are_named():
    said = done(
        """
        import verdigris as vd

        for name in ("sample", "check_numbers", "check_drift"):
            for wrong in ("often", 5, (1,), (1, 2, 3), (-1, 5), (1, 2**32), (1.5, 1), (5, 0), (0, 5)):
                try:
                    vd.telemetry(**{name: wrong})
                except vd.ConfigError as error:
                    print(error)
        """
    ).splitlines()
    assert len(said) == 27, said
    assert said[9 + 4] == (
        "check_numbers = (-1, 5): two whole numbers, as (100, 5) for one run of a plan in 100 and at most 5 a second, or (0, 0) for none"
    )


def test_a_collector_is_pushed_to_or_the_build_says_what_it_lacks():
    said = done(
        """
        import http.server, threading
        import verdigris as vd

        class Collector(http.server.BaseHTTPRequestHandler):
            paths = []
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                Collector.paths.append((self.path, b"verdigris_build_info" in body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()
            def log_message(self, *words):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            vd.telemetry(otlp_endpoint=f"http://127.0.0.1:{server.server_port}").close()
            assert ("/v1/metrics", True) in Collector.paths, Collector.paths
            print("pushed")
        except vd.UnsupportedError as error:
            assert not Collector.paths
            print(error)
            # Nothing was taken: the next call has everything.
            vd.telemetry().close()
        """
    )
    assert said == "pushed\n" or "feature `otlp`" in said, said


def test_mistakes_are_named(tmp_path):
    said = done(
        """
        import os, sys
        import verdigris as vd

        os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = "hunter2"
        try:
            vd.telemetry(otlp_endpoint="http://127.0.0.1:1")
        except vd.ConfigError as error:
            assert "entry 1 of the headers" in str(error) and "hunter2" not in str(error), error
        else:
            raise AssertionError("headers that are none")
        for wrong in ({"prometheus": "here"}, {"prometheus": 70000}, {"trace": sys.argv[1] + "/no/such/folder"}, {"nvml": 0.0}, {"nvml": -1.0}):
            try:
                vd.telemetry(**wrong)
            except (ValueError, OSError, TypeError, OverflowError) as error:
                print(type(error).__name__, error)
            else:
                raise AssertionError(wrong)
        """,
        tmp_path,
    ).splitlines()
    assert len(said) >= 5
    assert said[0].startswith("ConfigError `here` names no address")
    assert any(line.startswith("OSError cannot write") for line in said)
    assert sum("the seconds between two readings" in line for line in said) == 2
