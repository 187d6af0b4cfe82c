"""The suites of what lies between the products, on the CPU: rows that are right and wrong, drawn rows, the record and its page."""

import json
import math
import os
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verdigris._native")

from verdigris.bench import ahead, bars, cli, layers, measure, ours, record, render
from verdigris.bench.layers import Layer
from verdigris.bench.problems import CHANNELS_FIRST, CHANNELS_LAST, ListError
from verdigris.bench.suites import lists_folder

torch.set_num_threads(1)

CPU = torch.device("cpu")
LIST = lists_folder()


def layer(op="softmax", shape=(16, 33), dtype="f32", layout="rows", direction="forward", **settings):
    return Layer("memory", "t", op, shape, dtype, layout, direction, tuple(sorted(settings.items())))


def measured(row, door=None, peers=("pytorch",)):
    return layers.measure(row, CPU, measure.HostTimer(), door or ours.open_door(CPU), peers, 0.01, {"copy_gb_per_s": 10.0})


@pytest.mark.parametrize("direction", layers.DIRECTIONS)
@pytest.mark.parametrize("op, shape, layout", [("softmax", (16, 33), "rows"), ("cross_entropy", (16, 33), "rows"), ("linear_cross_entropy", (16, 33), "rows"), ("max_pool", (2, 8, 9, 9), CHANNELS_LAST)])
def test_a_row_is_measured_on_both_sides(op, shape, layout, direction):
    row = measured(layer(op, shape, "bf16", layout, direction))
    assert "refused" not in row and "fault" not in row, row
    assert row["ratio_best_instant"] > 0 and row["sides"]["instant"]["us"] > 0 and row["best_peer"] == "pytorch"
    assert row["of_copy"] == pytest.approx(row["bytes"] / row["sides"]["instant"]["us"] * 1e-3 / 10)


@pytest.mark.parametrize("op", [name for name, op in layers.OPS.items() if not op.has_backward])
def test_what_is_a_graph_of_ours_is_right(op):
    shape, layout = {"change_format": ((2, 8, 4, 4), CHANNELS_LAST), "attention_block": ((2, 5, 64), "rows")}.get(op, ((64, 96), "rows"))
    heads = dict(heads=4, kv_heads=2, d=16)
    for settings in ((heads, {**heads, "room": 9}) if op == "attention_block" else ({},)):
        row = measured(layer(op, shape, "bf16", layout, **settings))
        assert "refused" not in row and "fault" not in row, row


@pytest.mark.parametrize("op", ["nearest", "bilinear", "bicubic", "reflect_pad", "pixel_shuffle", "local_response_norm"])
def test_functions_of_images_are_right_in_both_directions(op):
    for direction in layers.DIRECTIONS:
        row = measured(layer(op, (2, 8, 6, 5), "f32", CHANNELS_LAST, direction))
        assert "refused" not in row and "fault" not in row, row


def test_dropout_of_another_share_or_another_value_is_wrong():
    row = layer("dropout", (64, 64))
    assert "fault" not in measured(row, door_of(dropout=torch.nn.functional.dropout))
    assert "inf" in measured(row, door_of(dropout=lambda x, p: torch.nn.functional.dropout(x, 0.3) * 0.7 / 0.9))["fault"]
    assert "fault" in measured(row, door_of(dropout=lambda x, p: torch.nn.functional.dropout(x, p) * 1.01))


def test_quack_is_asked_only_where_it_is_installed():
    assert ("quack" in layers.asked_peers(None)) == layers.Quack.is_installed()
    assert layers.asked_peers(["compile"]) == ["compile"]
    row = measured(layer("relu"), peers=("pytorch", "quack"))
    assert "no attribute 'relu'" in row["sides"]["quack"]["refused"] and row["best_peer"] == "pytorch"


def test_every_class_has_a_bar():
    found = [bar for bar in bars.load() if bar.suite in layers.SUITES]
    for suite in layers.SUITES:
        for row in layers.load(LIST / "layers.toml", suite, 5) if LIST else []:
            facts = {"bar_kind": row.op, "sizes": {}, "class": row.cls, "direction": row.direction, "layout": row.layout, "bytes": 1 << 30}
            assert row.op == "local_response_norm" or any(bar.suite == suite and bar.counts(facts) for bar in found), row.key


def door_of(**functions):
    return types.SimpleNamespace(functions=lambda: types.SimpleNamespace(**functions), settle=lambda: None)


def test_a_wrong_result_is_a_fault_and_has_no_time():
    off = door_of(softmax=lambda x, dim: torch.softmax(x, dim) * (1 + 1e-4))
    row = measured(layer(), off)
    assert row["fault"].startswith("errors ") and "us" not in row["sides"]["instant"] and "ratio_best_instant" not in row
    flat = door_of(softmax=lambda x, dim: torch.softmax(x, dim).flatten())
    assert "inf" in measured(layer(), flat)["fault"]
    none = door_of(softmax=lambda x, dim: torch.softmax(x, dim) * math.nan)
    assert "inf" in measured(layer(), none)["fault"]


def test_each_gradient_is_judged_by_itself():
    # The sums that are the gradients of scale and shift are many times as large as a gradient of x.
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(x, w)
            return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            with torch.enable_grad():
                inputs = [tensor.detach().requires_grad_() for tensor in (x, w, torch.zeros_like(w))]
                y = torch.nn.functional.layer_norm(inputs[0], x.shape[-1:], *inputs[1:])
                dx, dw, db = torch.autograd.grad(y, inputs, dy)
            return dx, dw, db * 1.001

    row = layer("layer_norm", (64, 32), direction="backward")
    assert "fault" in measured(row, door_of(layer_norm=lambda x, dims, w, b: Off.apply(x, w, b)))
    right = measured(row, door_of(layer_norm=torch.nn.functional.layer_norm))
    assert "fault" not in right and right["bytes"] == 4 * (64 * 32 + (64 * 32 + 32) + (64 * 32 + 2 * 32))


def test_a_function_that_is_not_there_is_refused():
    row = measured(layer(), door_of())
    assert "no attribute 'softmax'" in row["refused"] and row["sides"]["pytorch"]["us"] > 0


@pytest.mark.skipif(LIST is None, reason="no bench/lists around this folder")
def test_the_list_is_read_and_rows_are_drawn_by_seed():
    for suite in layers.SUITES:
        fixed = layers.load(LIST / "layers.toml", suite, None)
        one, again, other = (layers.load(LIST / "layers.toml", suite, seed) for seed in (1, 1, 2))
        assert fixed and one == again != other and len(one) > len(fixed) and one[: len(fixed)] == fixed
        for row in one[len(fixed) :]:
            assert row.cls.startswith("drawn_") and row.op in layers.OPS and row.layout in layers.LAYOUTS
            assert 2**20 * 0.99 <= math.prod(row.shape) * layers.TYPES[row.dtype].itemsize <= 1024 * 2**20


def test_an_unknown_op_is_told(tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text('[[group]]\nsuite = "norm"\nclass = "x"\nops = ["no_such"]\nshapes = [[2, 2]]\n')
    with pytest.raises(ListError, match="op no_such"):
        layers.load(path, "norm", None)


@pytest.mark.skipif(LIST is None, reason="no bench/lists around this folder")
def test_the_command_leaves_a_record_that_the_page_shows(tmp_path, capsys):
    path = tmp_path / "memory.jsonl"
    words = ["memory", "--device", "cpu", "--filter", "relu-64x1000", "--no-drawn", "--peers", "pytorch", "--seconds", "0.01", "--json", str(path)]
    assert cli.main(words) == 0
    assert "relu-64x1000-forward" in capsys.readouterr().out
    runs = record.read(path)
    assert [run.suite for run in runs] == ["memory"] and len(runs[0].rows) == 2
    row = next(iter(runs[0].rows.values()))
    assert not bars.is_evidence({**row, "timed_s": 0.1, "method": 2}) and bars.is_evidence({**row, "timed_s": 0.4, "method": 2})
    page = render._layers("memory", runs, {runs[0].lease: "A"})
    assert "relu forward" in page and "relu-64x1000-backward" in page
    assert cli.main(["check", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["head", "row", "row", "foot"]


def test_without_the_package_peers_are_measured_alone():
    row = measured(layer(), ours.Absent("no package here"))
    assert row["refused"].startswith("Refused: no package here") and row["sides"]["pytorch"]["us"] > 0


def test_one_rounding_of_a_single_value_passes():
    exact = [torch.full((64,), -1.0036, dtype=torch.float64)]
    once = [exact[0].to(torch.bfloat16)]
    (of_once,) = layers.error(exact, once)
    # A peer that rounded twice and came nearer by chance; what is off by two roundings does not pass.
    (most,) = layers.allowed([of_once / 10], exact, once, 2.0**-9)
    (of_twice,) = layers.error(exact, [once[0] + 2.0**-7])
    assert of_once > 2.0**-9 and of_once <= most < of_twice
    (most,) = layers.allowed([0.0], [torch.ones(4, dtype=torch.float64)], [torch.ones(4)], 2.0**-9)
    assert most == 2.0**-9


def test_a_sample_of_rows_and_the_shares_of_processes(capsys):
    def rows_of(*words):
        assert cli.main(["norm", "--seed", "5", "--dry-run", "--device", "cpu", *words]) == 0
        return capsys.readouterr().out.split()

    every = rows_of()
    some = rows_of("--sample", "12")
    assert len(set(some)) == 12 and some == [row for row in every if row in some] == rows_of("--sample", "12")
    assert {row.rsplit("-", 1)[1] for row in some} == set(layers.DIRECTIONS)
    assert rows_of("--sample", "100000") == every
    shares = [ahead.share(every, f"{part}/3") for part in range(3)]
    assert sorted(sum(shares, [])) == sorted(every) and max(map(len, shares)) - min(map(len, shares)) <= 1
    assert cli.main(["norm", "--sample", "0", "--dry-run", "--device", "cpu"]) == 2


def test_each_row_is_compiled_for_itself(monkeypatch):
    """Rows share a line of code, of which dynamo compiles eight graphs before it leaves the rest eager."""
    graphs, real = [], torch.compile

    def backend(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, backend=backend, dynamic=False))
    for n in range(12):
        row = layer("relu", (4, 8 + n))
        measured(row, peers=("pytorch", "compile"))
    assert len(graphs) >= 12


def test_processes_that_compile_ahead_leave_no_picked_configs(monkeypatch, tmp_path):
    """The cache stays, what was picked beside others goes, and a process that fails is told of."""
    own = tmp_path / "of the user"
    own.mkdir()
    (own / "kept.best_config").write_text("")
    monkeypatch.setenv(ahead.CACHE, str(own))
    monkeypatch.setenv(ahead.THREADS, "7")
    monkeypatch.setattr(ahead.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "of the run"))
    (tmp_path / "of the run" / "ab").mkdir(parents=True)
    for name in ("one.best_config", "kernel.py"):
        (tmp_path / "of the run" / "ab" / name).write_text("")
    said = []
    ahead.compile_in(2, ["norm", "--filter", "no such row", "--device", "cpu", "--no-drawn"], said.append)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["kept.best_config", "kernel.py"]
    assert said == ["2 of 2 compiling processes failed: their rows are compiled while they are measured"]
    assert os.environ[ahead.THREADS] == "1"
    asked = []
    monkeypatch.setattr(ahead, "compile_in", lambda processes, command, say: asked.append((processes, command)))
    monkeypatch.setattr(layers, "measure", lambda row, *_: {"key": row.key, "sides": {}, "bar_kind": row.op, "direction": row.direction, "layout": row.layout})
    words = ["norm", "--filter", "rms_norm", "--sample", "9", "--seed", "3", "--device", "cpu", "--peers", "pytorch,compile", "--workers", "3", "--json", str(tmp_path / "r.jsonl")]
    assert cli.main(words) == 0
    assert asked == [(3, ["norm", "--filter", "rms_norm", "--device", "cpu", "--sample", "9", "--seed", "3"])]
