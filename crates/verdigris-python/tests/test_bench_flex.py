"""The suite of FlexAttention on the CPU: what is drawn, rows that are right and wrong, the time of a lease, the record."""

import math
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verdigris._native")
attention = pytest.importorskip("torch.nn.attention.flex_attention")

from verdigris.bench import cli, flex, measure, ours, record
from verdigris.bench.problems import ListError

torch.set_num_threads(1)

CPU = torch.device("cpu")


def measured(row, door=None, peers=(), **options):
    return flex.measure(row, CPU, measure.HostTimer(), door or ours.open_door(CPU), peers, 0.01, {}, **options)


def door_of(function):
    return types.SimpleNamespace(functions=lambda: types.SimpleNamespace(flex_attention=function), settle=lambda: None)


def small(kind, direction="forward", **settings):
    (row,) = [row for row in flex.draw(3, 14, is_small=True) if row.kind == kind and row.direction == direction]
    return flex.dataclasses.replace(row, **settings)


def test_rows_follow_from_the_seed_alone():
    rows = flex.draw(7, 84)
    assert rows[:9] == flex.draw(7, 9) and len({row.key for row in rows}) == 84
    assert rows[:14] != flex.draw(8, 14)
    assert {row.kind for row in rows[:14]} == set(flex.KINDS) and {row.d for row in rows[:14]} == set(flex.HEADS)
    for one, other in zip(rows[::2], rows[1::2]):
        assert (one.direction, other.direction) == flex.DIRECTIONS and flex.dataclasses.replace(one, direction="backward") == other
    assert any(row.h != row.kv_h for row in rows) and any(row.s % 128 for row in rows)
    for row in rows:
        if row.kind.startswith("document"):
            assert sum(row.get("lengths")) == row.s and min(row.get("lengths")) > 0


@pytest.mark.parametrize("direction", flex.DIRECTIONS)
@pytest.mark.parametrize("kind", flex.KINDS)
def test_a_row_is_right(kind, direction):
    row = small(kind, direction)
    found = measured(row, peers=["eager"] if direction == "forward" else [])
    assert "refused" not in found and "fault" not in found, found
    assert found["sides"]["instant"]["us"] > 0 and 0 < found["sides"]["instant"]["error"] < 0.008
    if direction == "forward":
        assert found["best_peer"] == "eager" and found["ratio_best_instant"] > 0


@pytest.mark.parametrize("kind", flex.KINDS)
def test_pairs_are_those_that_are_attended(kind):
    row = small(kind)
    operands = flex.Operands(row, CPU)
    count = 0
    for q in range(row.s):
        for first in range(0, row.s, 4096):
            kv = torch.arange(first, min(first + 4096, row.s))
            places = (torch.tensor(0), torch.tensor(0), torch.tensor(q), kv)
            shown = torch.ones_like(kv, dtype=torch.bool)
            if operands.score_mod is not None:
                shown &= operands.score_mod(torch.zeros(len(kv)), *places) > -math.inf
            if operands.mask_mod is not None:
                shown &= operands.mask_mod(*places)
            count += int(shown.sum())
    assert operands.pairs() == count


def test_the_reference_is_that_of_every_way_to_cut_it(monkeypatch):
    for kind in ("documents", "capped"):
        operands = flex.Operands(small(kind, "backward"), CPU)
        whole = operands.exact(0, 0)
        monkeypatch.setattr(flex, "MOST_PAIRS", 2000)
        for one, other in zip(whole, operands.exact(0, 0)):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda o, **given: o * 1.02,
        lambda o, **given: o.masked_fill(torch.arange(o.shape[2])[:, None] == o.shape[2] - 1, 0.0),
        lambda o, **given: o * math.nan,
        lambda o, **given: o[:, :, 1:],
    ],
    ids=["a factor", "a row", "no number", "another shape"],
)
def test_a_wrong_result_is_a_fault_and_has_no_time(mistake):
    found = measured(small("prefix"), door_of(lambda q, k, v, **given: mistake(attention.flex_attention(q, k, v, **given))), peers=["eager"])
    assert "error" in found["fault"] and "us" not in found["sides"]["instant"] and "ratio_best_instant" not in found
    assert found["sides"]["eager"]["us"] > 0 and "fault" not in found["sides"]["eager"]


def test_a_mask_that_is_left_out_is_a_fault():
    for kind in ("documents", "prefix", "steps", "dilated", "relative"):
        found = measured(small(kind), door_of(lambda q, k, v, score_mod, block_mask, **given: attention.flex_attention(q, k, v, score_mod, **given)))
        assert "fault" in found, kind


def test_each_gradient_is_judged_by_itself():
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, k):
            return k.clone()

        @staticmethod
        def backward(ctx, d_k):
            return d_k * 1.02

    own = ours.open_door(CPU).functions().flex_attention
    found = measured(small("prefix", "backward"), door_of(lambda q, k, v, **given: own(q, Off.apply(k), v, **given)))
    assert "of result 1" in found["fault"]


def test_a_side_that_is_missing_is_refused_and_the_other_stands():
    def none(*_, **__):
        raise NotImplementedError("not here")

    found = measured(small("steps"), door_of(none), peers=["eager"])
    assert found["refused"] == "NotImplementedError: not here" and found["sides"]["eager"]["us"] > 0 and found["best_peer"] == "eager"


def test_peers_are_left_out_where_the_time_of_a_row_is_spent():
    found = measured(small("steps"), peers=["eager"], row_seconds=0.0)
    assert "left out" in found["sides"]["eager"]["refused"] and found["sides"]["instant"]["us"] > 0 and "best_peer" not in found


def test_the_command_leaves_a_record(tmp_path, capsys):
    path = tmp_path / "flex.jsonl"
    words = ["flex", "--device", "cpu", "--small", "--rows", "14", "--seed", "9", "--filter", "prefix", "--seconds", "0.01", "--json", str(path)]
    assert cli.main(words) == 0
    told = capsys.readouterr().out
    assert "seed of the drawn rows: 9" in told and "-forward (" in told and "prefix forward" in told.split("Fastest")[1]
    (run,) = record.read(path)
    assert run.suite == "flex" and run.head["drawn"] == {"seed": 9, "rows": 2} and run.head["options"]["peers"] == ["eager"] and len(run.rows) == 2
    row = next(iter(run.rows.values()))
    assert row["sizes"]["prefix"] > 0 and row["rotated_bytes"] >= 2 * (32 << 20) or row["copies"] == 256
    # The same rows by the same seed, whatever else is asked.
    assert cli.main(["flex", "--device", "cpu", "--small", "--rows", "14", "--seed", "9", "--dry-run"]) == 0
    assert set(run.rows) <= set(capsys.readouterr().out.splitlines())


def test_no_row_begins_behind_the_time_limit(tmp_path, capsys):
    words = ["flex", "--device", "cpu", "--small", "--rows", "4", "--seed", "9", "--seconds", "0.01", "--peers", "none", "--time-limit", "0"]
    assert cli.main([*words, "--json", str(tmp_path / "none.jsonl")]) == 0
    assert "4 rows were not measured" in capsys.readouterr().out


def test_words_that_are_not_understood():
    assert cli.main(["flex", "--device", "cpu", "--peers", "nobody"]) == 2
    assert cli.main(["flex", "--device", "cpu", "--rows", "0"]) == 2
    assert cli.main(["flex", "--device", "cpu", "--filter", "nothing"]) == 2
    with pytest.raises(ListError, match="nobody"):
        flex.asked_peers(["nobody"], CPU)
