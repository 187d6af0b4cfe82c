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


def test_mistakes_are_named(tmp_path):
    said = done(
        """
        import sys
        import verdigris as vd

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
