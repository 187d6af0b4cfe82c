"""The bench's judgement of records: the bars, the page. Records are synthetic; no device is asked."""

import copy
import gzip
import json
import xml.etree.ElementTree as xml

import pytest

pytest.importorskip("torch")

from synthetic import row, run, write
from verdigris.bench import bars, ceilings, cli, columns, problems, record, render, suites, summary, svg, tested

def test_records_survive_being_cut_short(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, run([row("a", 1.0), row("b", float("inf"))]))
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"suite": "gemm", "ratio": 1.0}) + "\n")
        file.write('{"by": "verdigris.bench", "kind": "row", "ke')
    (found,) = record.read(path)
    assert list(found.rows) == ["test/bf16/channels-last/a-fprop", "test/bf16/channels-last/b-fprop"] and found.foot is None
    assert found.rows["test/bf16/channels-last/b-fprop"]["ratio"] == "inf"
    assert record.fresh_path(tmp_path, "2026-01-01T00:00:00Z", "conv").name == "2026-01-01-conv-python.jsonl"
    (tmp_path / "2026-01-01-conv-python.jsonl").touch()
    assert record.fresh_path(tmp_path, "2026-01-01T00:00:00Z", "conv").name == "2026-01-01-conv-python-2.jsonl"


def test_the_table_of_what_was_tested_has_every_chip_and_packed_records(tmp_path):
    for chip in ("h200", "h100"):
        (tmp_path / chip).mkdir()
    write(tmp_path / "h200" / "a.jsonl", run([row("a", 1.0), row("b", fault="element 3 is 7")]))
    other = run([row("a", 1.0)])
    other.head["machine"] = {**other.head["machine"], "name": "NVIDIA H100"}
    write(tmp_path / "b.jsonl", other)
    (tmp_path / "h100" / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    (tmp_path / "b.jsonl").unlink()
    found = json.loads(tested.text(tmp_path))
    assert [(one["machine"], one["runs"], one["rows"], one["wrong"]) for one in found] == [("NVIDIA H100", 1, 1, 0), ("NVIDIA H200", 1, 2, 1)]


def test_canaries_and_probes_of_instructions_are_rows_where_they_name_chip_and_driver(tmp_path):
    graph = {"suite": "canary", "problem": "gemm/a", "device": "NVIDIA H200", "driver": "580.1.2", "date": "2026-01-02", "wrong": 0, "repeats": True}
    probe = {"suite": "conformance", "class": "instruction", "problem": "Mov", "checks": 4, "mismatches": 0, "machine": "NVIDIA H200 GPU-12-ab", "driver": "13.0"}
    probe = {**probe, "date": "2026-01-01"}
    lines = lambda rows: "".join(json.dumps(one) + "\n" for one in rows)
    records, shipped = tmp_path / "record" / "h200", tmp_path / "shipped"
    records.mkdir(parents=True)
    shipped.mkdir()
    graphs = [graph, {**graph, "problem": "b", "wrong": 3}, {**graph, "problem": "c", "repeats": False, "date": "2026-01-03"}, {**graph, "problem": "d", "repeats": None}]
    nameless = [{**graph, "problem": "e", "driver": None}, {key: value for key, value in graph.items() if key != "driver"}]
    (records / "canary.jsonl").write_text(lines([*graphs, *nameless]))
    # Of the rows that ship one is a copy, and one is not.
    (shipped / "record.jsonl").write_text("# A record that names its \"canary\".\n" + lines([graph, {**graph, "problem": "f"}]))
    failure, silent = {**probe, "class": "failure", "mismatches": 1}, {**probe, "problem": "Trap"}
    del failure["checks"], silent["checks"]
    others = [{**probe, "problem": "Add", "mismatches": 2}, failure, silent, {**probe, "suite": "gemm"}, {**probe, "machine": "an H200"}]
    (records / "conformance.jsonl").write_text(lines([probe, probe, *others, {**probe, "release": "580.1.2"}]) + '{"suite": "conformance", "cla')
    table = json.loads(tested.text(tmp_path / "record", shipped))
    told = [(one["driver"], one.get("cuda"), one["suites"], one["runs"], one["rows"], one["wrong"], one["first"], one["last"]) for one in table]
    assert {one["machine"] for one in table} == {"NVIDIA H200"}
    assert told == [
        ("", "13.0", ["conformance"], 1, 3, 1, "2026-01-01", "2026-01-01"),
        ("580.1.2", None, ["canary", "conformance"], 3, 6, 2, "2026-01-01", "2026-01-03"),
    ]


def bar(name):
    return next(one for one in bars.load() if one.name == name)


def test_bars_judge_mean_and_worst():
    dense = bar("dense conv dgrad")
    rows = lambda *ratios: [row(str(i), ratio, direction="dgrad") for i, ratio in enumerate(ratios)]
    assert bars.standing(dense, [row("a", 2.0)]) is None, "another direction"
    good = bars.standing(dense, rows(1.3, 1.0, 1.1))
    assert (good.must, good.aim, good.measured) == (True, False, 3) and good.mean == pytest.approx(1.1266, abs=1e-3) and good.worst == 1.0
    assert bars.standing(dense, rows(3.0, 3.0, 0.79)).must is False
    assert bars.standing(dense, rows(1.02, 1.02)).must is False
    assert bars.standing(dense, [*rows(2.0), row("x", direction="dgrad", fault="wrong")]).must is False


def test_a_tie_is_met_within_the_spread_and_one_percent():
    fprop = bar("dense conv fprop")
    assert bars.standing(fprop, [row("a", 0.995, spread=0.006)]).must is True
    assert bars.standing(fprop, [row("a", 0.995, spread=0.001)]).must is False
    assert bars.standing(fprop, [row("a", 0.98, spread=0.10)]).must is False


def test_a_part_of_the_rows_cannot_pass_but_can_fail():
    fprop = bar("dense conv fprop")
    every = [row("a"), row("b"), row("c", direction="wgrad")]
    part = bars.standing(fprop, [row("a", 1.5)], every)
    assert (part.measured, part.expected, part.must) == (1, 2, None)
    assert bars.standing(fprop, [row("a", 0.5)], every).must is False
    assert bars.standing(fprop, [row("a", 1.5), row("b", 1.5)], every).must is True


def test_a_wrong_peer_gives_way_to_a_right_one_and_no_right_peer_leaves_no_ratio():
    fprop = bar("dense conv fprop")
    wrong = {"fault": "element 3 is 1, not 2"}
    second = row("b", us=100.0, ratio_best=1.4, sides={"instant": {"us": 100.0}, "pytorch": wrong, "cublaslt": {"us": 140.0}})
    alone = row("c", us=100.0, sides={"instant": {"us": 100.0}, "pytorch": wrong, "cublaslt": wrong})
    every = [row("a"), row("b"), row("c")]
    whole = bars.standing(fprop, [row("a", 1.4), second, alone], every)
    assert (whole.measured, whole.unopposed, whole.wrong, whole.must) == (2, 1, 0, True)
    assert whole.exceptions == ", 1 of which every peer is wrong" and whole.worst == 1.4
    assert bars.standing(fprop, [row("a", 1.4), {**second, "ratio_best": 0.7}, alone], every).must is False
    instant = bars.VALUES["instant_of_tuned"]
    assert instant({**alone, "us": 80.0}, "measured") == 0.8 and instant(row("a", 1.4), "measured") == pytest.approx(0.9)
    assert instant(row("c"), "measured") is None
    ours_too = {**alone, **wrong}
    assert bars.standing(fprop, [row("a", 1.4), second, ours_too], every).must is False, "a row that is wrong here stays one"
    unmeasured = row("c", sides={"pytorch": {"us": 1.0}})
    assert bars.standing(fprop, [row("a", 1.4), second, unmeasured], every).must is None


def test_the_fastest_right_peer_is_who_bars_speak_of():
    beside = row("a", 1.4, ratio_best=1.1, ratio_best_instant=1.05)
    assert bars.standing(bar("dense conv fprop"), [beside]).worst == 1.1
    assert bars.standing(bar("dense conv fprop"), [beside], column="instant").worst == 1.05


def test_a_column_holds_what_it_says():
    shipped = row("a", 1.4, chosen_by=["shipped"])
    assert columns.main(shipped) == "shipped" and columns.ratio(shipped, "measured") is None
    assert columns.ratio(shipped, "shipped") == 1.4 and columns.ratio(shipped, "instant") == pytest.approx(1.26)
    # Before the second method a remembered choice may have been another run's.
    first = row("a", 1.4, method=1, chosen_by=["plan_cache"], ratio_best=1.2)
    del first["ratio_best_instant"]
    assert columns.main(first) == "shipped" and columns.main({**first, "chosen_by": ["clock"]}) == "measured"
    assert columns.ratio(first, "instant") == pytest.approx(1.26 * 1.2 / 1.4)
    assert columns.main({**first, "method": 2}) == "measured", "what is remembered is of this run"
    assert bars.standing(bar("dense conv fprop"), [shipped], column="measured") is None
    assert bars.standing(bar("dense conv fprop"), [shipped], column="instant").worst == pytest.approx(1.26)


def test_what_was_timed_too_short_or_by_the_first_method_is_no_evidence():
    assert bars.is_evidence(row("a", 1.0)) and bars.is_evidence(row("a", fault="wrong"))
    assert not bars.is_evidence(row("a", 1.0, timed_s=0.2)) and not bars.is_evidence(row("a", 1.0, method=1))
    assert "1 rows were timed for less than 0.3 s" in summary.text([row("a", 1.0), row("b", 1.0, timed_s=0.1)], "conv")


def test_drawn_rows_are_judged_apart_and_not_by_a_few():
    rows = [row("a", 1.5), *(row(f"d{i}", 0.6, drawn=True) for i in range(7))]
    fprop = bar("dense conv fprop")
    assert bars.standing(fprop, bars.of(rows, "lists")).worst == 1.5
    few = bars.standing(fprop, bars.of([row(f"d{i}", 1.5, drawn=True) for i in range(7)], "drawn"))
    assert few.must is None and bars.standing(fprop, bars.of(rows, "drawn")).must is False
    assert bars.standing(fprop, bars.of([row(f"d{i}", 1.5, drawn=True) for i in range(8)], "drawn")).must is True


def test_tables_are_of_one_source_and_one_method():
    old = run([row("a", 1.0), row("b", 1.0)])
    new = run([row("a", 2.0)], date="2026-01-02T00:00:00Z")
    old.head["source"], new.head["source"] = {"hash": "old"}, {"hash": "new"}
    first = run([row("c", 1.0)], date="2026-01-03T00:00:00Z")
    first.head["method"] = 1
    assert render.current([old, new, first], "conv") == [new]
    assert render.current([old, first], "conv") == [old] and render.current([first], "conv") == [first]


def test_a_sample_of_rows_puts_no_suite_off_the_page():
    whole = run([row(name, 1.0) for name in "abcd"])
    probe = run([row("a", 2.0), row("b", 2.0, timed_s=0.1)], date="2026-01-02T00:00:00Z")
    whole.head["source"], probe.head["source"] = {"hash": "old"}, {"hash": "new"}
    assert render.current([whole, probe], "conv") == [whole], "one row is evidence, of four"
    # Of what the probe was of, it has enough.
    assert render.current([whole, probe], "conv", lambda one: one["name"][0] in "ab") == [probe]
    assert render.current([whole, probe], "conv", lambda one: one["name"][0] in "bcd") == [whole]
    assert render.current([whole, probe], "conv", lambda one: False) == []
    probe.rows.update({name: row(name, 2.0) for name in "bc"})
    assert render.current([whole, probe], "conv") == [probe]


def test_ceilings_are_one_set_for_a_chip():
    limits = [dict(gemm_tflops=700.0, copy_gb_per_s=4000.0), dict(gemm_tflops=800.0, copy_gb_per_s=4200.0, launch_us=2.0)]
    limits.append(dict(gemm_tflops=790.0, copy_gb_per_s=4300.0))
    runs = [run([], chip=f"GPU-{i}", date=f"2026-01-0{i + 1}T00:00:00Z") for i in range(3)]
    for one, known in zip(runs, limits):
        one.head["ceilings"] = known
    chip = ceilings.of_chip(runs)
    assert chip == dict(gemm_tflops=790.0, copy_gb_per_s=4200.0, launch_us=2.0)
    (told,) = ceilings.applied([row("a", 1.0, us=50.0)], chip)
    assert told["of_ceiling"] == pytest.approx((2.0 + 1e8 / 4200.0 * 1e-3) / 50.0)


def test_a_bar_is_met_in_two_leases():
    assert bars.word([True, True]) == "met"
    assert bars.word([False, True]) == "passed once"
    assert bars.word([True, False]) == "missed"
    assert bars.word([True, None, True]) == "met"
    assert bars.word([]) == "not measured" == bars.word([None])
    assert bars.worst_word(["met", "passed once"]) == "passed once" and bars.worst_word(["met", "missed", "not measured"]) == "missed"
    assert bars.worst_word(["met", "not measured"]) == "not measured"
    rows = bars.by_lease([run([row("a", 1.0)]), run([row("a", 2.0)], date="2026-01-02T00:00:00Z"), run([row("a", 3.0)], chip="GPU-b")], "conv")
    assert [values[0]["ratio"] for values in rows.values()] == [2.0, 3.0], "two runs of a lease are one opinion"


def test_every_bar_and_fact_can_be_told_and_every_row_has_a_bar():
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    for suite in suites.SUITES.values():
        known = {bars.LISTS: render._listed(suite.name), bars.DRAWN: [problems.identity(row) for row in suites.drawn_rows(suite, 5)]}
        asked = [one for one in bars.load() if one.suite == suite.name]
        for where, rows in known.items():
            mine = [one for one in asked if where in one.rows]
            assert not [values["key"] for values in rows if not any(one.counts(values) for one in mine)], where
        assert not [one.name for one in asked if not any(one.counts(values) for where in one.rows for values in known[where])]
    assert all(fact.suite in ("train", "latency") for fact in bars.load_facts())


def test_the_page_says_what_the_records_say(tmp_path):
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    listed = [values for values in render._listed("conv")]
    ratios = {"fprop": 1.2, "dgrad": 0.7, "wgrad": 1.5}

    def measured(values):
        ratio = ratios[values["direction"]]
        made = row("x", ratio)
        return {**made, **values, "sides": made["sides"], "sizes": values["sizes"]}

    rows = [measured(values) for values in listed]
    first = run(rows)
    second = run(copy.deepcopy(rows), date="2026-01-02T00:00:00Z", chip="GPU-b")
    wrong = next(iter(second.rows.values()))
    train = run([{"key": "train/resnet50", "speed_eager": 1.1, "error_worst": 1.4}], suite="train", date="2026-01-02T00:00:01Z", chip="GPU-b")
    folder = tmp_path / "record"
    write(folder / "a.jsonl", first, second, train)
    program = {
        "suite": "gemm",
        "class": "square",
        "dtype": "bf16",
        "problem": "64x64x64-nt",
        "peer": "cublaslt 1 of 8",
        "ratio": 1.02,
        "spread": 0.01,
        "machine": "NVIDIA H200 x",
        "driver": "13.0",
        "versions": "v",
    }
    (folder / "gemm.jsonl").write_text(json.dumps(program) + "\n" + json.dumps({**program, "ratio": 9.0, "variants": [1]}) + "\n")
    out = tmp_path / "docs" / "performance.md"
    assert cli.main(["render", "--records", str(folder), "--out", str(out)]) == 0
    text = out.read_text()
    line = lambda start: next(one for one in text.splitlines() if one.startswith(f"| {start}"))
    assert line("dense conv fprop").count("A: 1.20 / 1.20") == 1 and line("dense conv fprop").count("not measured yet") == 2
    assert line("dense conv fprop").endswith("| not measured | **missed** |"), "drawn rows are not measured"
    assert "**missed** | **missed**" in line("dense conv dgrad")
    assert "A: 1.50 / 1.50" in line("dense conv wgrad") and "B: 1.50 / 1.50" in line("dense conv wgrad")
    assert line("GEMM bf16, fp16").count("not measured yet") == 4
    assert "passed once" in line("ResNet-50, images a second") and "**missed**" in line("ResNet-50, worst tensor")
    assert "Where we are behind" in text and wrong["key"] in text
    assert "| square bf16 | 1 | 1.02 | 1.02 | 64x64x64-nt | 1/0 |" in text
    written = sorted(path.name for path in (out.parent / "performance").iterdir())
    plots = [name for name in written if name.endswith(".svg")]
    assert plots == ["ratios-conv.svg", "roofline-conv.svg"]
    assert written == [*plots, "tested.json"]
    for name in plots:
        xml.parse(out.parent / "performance" / name)
        assert f"performance/{name}" in text
    before = text
    assert cli.main(["render", "--records", str(folder), "--out", str(out)]) == 0
    assert out.read_text() == before, "the same records give the same page"


def test_the_page_of_the_checkout_is_that_of_its_records(tmp_path):
    """Fails if a record or the renderer changed and ``python -m verdigris.bench render`` was not run."""
    lists = suites.lists_folder()
    if lists is None:
        pytest.skip("no checkout around")
    root = lists.parent.parent
    assert cli.main(["render", "--out", str(tmp_path / "performance.md")]) == 0
    assert (tmp_path / "performance.md").read_text() == (root / "docs" / "performance.md").read_text()
    assert (tmp_path / "performance" / "tested.json").is_file()
    for plot in (tmp_path / "performance").glob("*"):
        assert plot.read_text() == (root / "docs" / "performance" / plot.name).read_text()


def test_tables_are_aligned_and_list_what_is_wrong():
    rows = [row("a", 1.5), row("b", 0.5), row("c", fault="element 3 is 7"), row("d", refused="no engine"), row("e", refused="no engine")]
    rows[0]["sides"] = {"pytorch": {"fault": "theirs"}}
    text = summary.text(rows, "conv")
    assert "0.866 / 0.500 (2)" in text and "element 3 is 7" in text and "theirs" in text
    assert "no engine       2" in text
    assert text.index("b-fprop") < text.index("a-fprop"), "the worst first"
    head, rule, *lines = summary.table(["a", "bb"], [["xxx", 1], ["y", 22]]).splitlines()
    assert (head, rule, lines) == ("a    bb", "───  ──", ["xxx   1", "y    22"])


def test_plots_are_well_formed():
    bars_text = svg.ratio_bars("a < b", [("dense & co", [0.5, 2.0, 8.0]), ("odd", [0.9])])
    xml.fromstring(bars_text)
    assert "mean 2" in bars_text
    xml.fromstring(svg.roofline("r", [("a", 12.0, 100.0, 90.0), ("b", 0.5, 1.0, None)], 700.0, 4200.0))
