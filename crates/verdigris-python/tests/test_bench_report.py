"""The bench's judgement of records: the regression gate, the bars, the page. Records are synthetic; no device is asked."""

import copy
import json
import xml.etree.ElementTree as xml

import pytest

pytest.importorskip("torch")

from verdigris.bench import bars, check, cli, record, render, suites, summary, svg

SIZES = {"n": 8, "c": 64, "k": 64, "input": [56, 56], "filter": [3, 3]}


def row(name, ratio=None, kind="dense", direction="fprop", dtype="bf16", spread=0.004, **more):
    values = {
        "key": f"test/{dtype}/channels-last/{name}-{direction}",
        "class": "test",
        "name": f"{name}-{direction}",
        "bar_kind": kind,
        "direction": direction,
        "dtype": dtype,
        "layout": "channels-last",
        "sizes": SIZES,
        "flops": 1e9,
        "bytes": 10**8,
        "remarks": [],
        "sides": {},
    }
    if ratio is not None:
        values.update(
            us=100.0,
            peer_us=100.0 * ratio,
            ratio=ratio,
            ratio_spread=spread,
            ratio_best=ratio,
            ratio_instant=ratio * 0.9,
            tflops=10.0,
            of_ceiling=0.5,
            of_copy=0.6,
            spread=spread,
            engine="conv.test",
        )
    return {**values, **more}


def run(rows, date="2026-01-01T00:00:00Z", chip="GPU-a", driver="580.1", torch="2.11.0", suite="conv"):
    head = {
        "suite": suite,
        "date": date,
        "machine": {"name": "NVIDIA H200", "uuid": chip, "boot": "b", "driver": driver, "device": "cuda"},
        "software": {"torch": torch, "cudnn": 91900, "cublaslt": 130100},
        "ceilings": {"gemm_tflops": 700.0, "copy_gb_per_s": 4200.0},
    }
    return record.Run(head, {one["key"]: one for one in rows}, None, None)


def write(path, *runs):
    for one in runs:
        writer = record.Writer(path)
        writer.line("head", one.head)
        for values in one.rows.values():
            writer.line("row", values)


@pytest.mark.parametrize(
    "before, after, spreads, fails",
    [
        (1.00, 0.96, (0.004, 0.004), False),
        (1.00, 0.94, (0.004, 0.004), True),
        (2.00, 1.94, (0.004, 0.004), False),
        (2.00, 1.86, (0.004, 0.004), True),
        (1.00, 0.94, (0.004, 0.040), False),
        (1.00, 0.94, (0.040, 0.004), False),
        (1.00, 0.91, (0.040, 0.040), True),
        (1.00, 1.50, (0.004, 0.004), False),
    ],
)
def test_a_fall_beyond_five_percent_and_twice_the_spread_fails(before, after, spreads, fails):
    old = run([row("a", before, spread=spreads[0]), row("b", 1.0)])
    new = run([row("a", after, spread=spreads[1]), row("b", 1.0)], date="2026-01-02T00:00:00Z")
    verdict = check.check(new, [old])
    assert verdict.compared == 2 and verdict.passes is not fails
    if fails:
        assert [one.key for one in verdict.regressions] == ["test/bf16/channels-last/a-fprop"] and "allowed" in str(verdict)


@pytest.mark.parametrize("trouble", [{"fault": "element 3"}, {"refused": "no engine"}])
def test_what_was_right_and_no_longer_is_fails(trouble):
    verdict = check.check(run([row("a", **trouble)], date="2026-01-02T00:00:00Z"), [run([row("a", 1.0)])])
    assert not verdict.passes and verdict.regressions[0].after is None


def test_only_the_same_driver_and_peers_are_compared():
    new = run([row("a", 0.5)], date="2026-01-03T00:00:00Z")
    others = [run([row("a", 1.0)], driver="590.1"), run([row("a", 1.0)], torch="2.12.0"), run([row("a", 1.0)], suite="gemm")]
    verdict = check.check(new, others)
    assert verdict.base is None and verdict.passes and "nothing to compare" in str(verdict)
    assert not check.check(new, [*others, run([row("a", 1.0)])]).passes
    later = run([row("a", 1.0)], date="2026-01-04T00:00:00Z")
    assert check.check(new, [later]).base is None, "a later run is no base"


def test_each_row_is_compared_with_the_last_record_that_has_it():
    old = [run([row("a", 2.0), row("b", 1.0)]), run([row("a", 1.0)], date="2026-01-02T00:00:00Z")]
    verdict = check.check(run([row("a", 1.0), row("b", 0.5), row("c", 0.1)], date="2026-01-03T00:00:00Z"), old)
    assert verdict.compared == 2 and [one.key for one in verdict.regressions] == ["test/bf16/channels-last/b-fprop"]


def test_the_gate_as_a_command(tmp_path, capsys):
    write(tmp_path / "old.jsonl", run([row("a", 1.0)]))
    write(tmp_path / "good.jsonl", run([row("a", 0.99)], date="2026-01-02T00:00:00Z"))
    write(tmp_path / "bad.jsonl", run([row("a", 0.9)], date="2026-01-03T00:00:00Z"))
    assert cli.main(["check", str(tmp_path / "good.jsonl"), str(tmp_path / "old.jsonl")]) == 0
    assert cli.main(["check", str(tmp_path / "bad.jsonl")]) == 1
    assert "1 became worse" in capsys.readouterr().out
    (tmp_path / "empty.jsonl").write_text("")
    assert cli.main(["check", str(tmp_path / "empty.jsonl")]) == 2


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
    assert instant({**alone, "us": 80.0}) == 0.8 and instant(row("a", 1.4)) == pytest.approx(0.9) and instant(row("c")) is None
    ours_too = {**alone, **wrong}
    assert bars.standing(fprop, [row("a", 1.4), second, ours_too], every).must is False, "a row that is wrong here stays one"
    unmeasured = row("c", sides={"pytorch": {"us": 1.0}})
    assert bars.standing(fprop, [row("a", 1.4), second, unmeasured], every).must is None


def test_a_bar_is_met_in_two_leases():
    assert bars.word([True, True]) == "met"
    assert bars.word([False, True]) == "passed once"
    assert bars.word([True, False]) == "missed"
    assert bars.word([True, None, True]) == "met"
    assert bars.word([]) == "not measured" == bars.word([None])
    rows = bars.by_lease([run([row("a", 1.0)]), run([row("a", 2.0)], date="2026-01-02T00:00:00Z"), run([row("a", 3.0)], chip="GPU-b")], "conv")
    assert [values[0]["ratio"] for values in rows.values()] == [2.0, 3.0], "two runs of a lease are one opinion"


def test_every_bar_and_fact_can_be_told_from_the_lists():
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    for one in bars.load():
        assert any(one.counts(values) for values in render._listed(one.suite)), one.name
    assert all(fact.suite in ("train", "latency") for fact in bars.load_facts())


def test_the_page_says_what_the_records_say(tmp_path):
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    listed = [values for values in render._listed("conv")]
    ratios = {"fprop": 1.2, "dgrad": 0.7, "wgrad": 1.5}

    def measured(values):
        ratio = ratios[values["direction"]]
        return {**row("x", ratio), **values, "sides": {}, "sizes": values["sizes"]}

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
    assert line("dense conv fprop").count("met") == 2
    assert "**missed** | **missed**" in line("dense conv dgrad")
    assert "A: 1.50 / 1.50" in line("dense conv wgrad") and "B: 1.50 / 1.50" in line("dense conv wgrad")
    assert "not measured" in line("GEMM bf16, fp16")
    assert "passed once" in line("ResNet-50, images a second") and "**missed**" in line("ResNet-50, worst tensor")
    assert "Where we are behind" in text and wrong["key"] in text
    assert "| square bf16 | 1 | 1.02 | 1.02 | 64x64x64-nt | 1/0 |" in text
    plots = sorted(path.name for path in (out.parent / "performance").iterdir())
    assert plots == ["ratios-conv.svg", "roofline-conv.svg"]
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
    for plot in (tmp_path / "performance").glob("*.svg"):
        assert plot.read_text() == (root / "docs" / "performance" / plot.name).read_text()


def test_tables_are_aligned_and_list_what_is_wrong():
    rows = [row("a", 1.5), row("b", 0.5), row("c", fault="element 3 is 7"), row("d", refused="no engine"), row("e", refused="no engine")]
    rows[0]["sides"] = {"pytorch": {"fault": "theirs"}}
    text = summary.text(rows, "conv")
    assert "2/5" in text and "1/1" in text and "element 3 is 7" in text and "theirs" in text
    assert "no engine       2" in text
    assert text.index("b-fprop") < text.index("a-fprop"), "the worst first"
    head, rule, *lines = summary.table(["a", "bb"], [["xxx", 1], ["y", 22]]).splitlines()
    assert (head, rule, lines) == ("a    bb", "───  ──", ["xxx   1", "y    22"])


def test_plots_are_well_formed():
    bars_text = svg.ratio_bars("a < b", [("dense & co", [0.5, 2.0, 8.0]), ("odd", [0.9])])
    xml.fromstring(bars_text)
    assert "mean 2" in bars_text
    xml.fromstring(svg.roofline("r", [("a", 12.0, 100.0, 90.0), ("b", 0.5, 1.0, None)], 700.0, 4200.0))
