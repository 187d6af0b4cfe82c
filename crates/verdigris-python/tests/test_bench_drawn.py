"""Drawn rows: the same of a seed, others of another, and within what the tables say."""

import math
import statistics

import pytest

pytest.importorskip("torch")

from verdigris.bench import cli, drawn, problems, suites
from verdigris.bench.problems import ListError

TABLE = """
[limits]
most_gflop = 100
most_mib = 100
[[conv]]
class = "dense"
kind = "dense"
rows = 200
dtypes = { any = ["bf16", "bf16", "bf16", "f32"] }
layouts = "channels-last"
n = { from = 1, to = 64 }
c = { from = 16, to = 1024, of = 8 }
k = 64
input = { from = 7, to = 56 }
filter = { any = [1, 3] }
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "drawn.toml"
    path.write_text(TABLE)
    return path


def test_a_seed_draws_the_same_rows_and_another_others(table):
    names = lambda seed: [problems.key(row) for row in drawn.draw(table, "conv", seed)]
    assert names(1) == names(1) and not set(names(1)) & set(names(2))
    # The numbers themselves: they are to be the same on every machine and with every version of Python.
    assert names(77)[0] == FIRST_OF_77
    before = names(1)
    table.write_text(TABLE.replace("[[conv]]", TABLE[TABLE.index("[[conv]]") :].replace('"dense"', '"first"', 1).replace("rows = 200", "rows = 2") + "\n[[conv]]", 1))
    assert names(1)[2:] == before, "another table changes nothing"


FIRST_OF_77 = "drawn_dense/bf16/channels-last/2x80to64of1-10x10-f3s1p0d1-fprop"


def test_rows_are_spread_as_the_table_says(table):
    rows = drawn.draw(table, "conv", 3)
    channels = [row.c for row in rows]
    assert all(c % 8 == 0 and 16 <= c <= 1024 for c in channels) and all(row.flops <= 1e11 and problems.traffic_bytes(row) <= 100 << 20 for row in rows)
    assert 80 < math.exp(statistics.mean(map(math.log, channels))) < 160, "evenly in the logarithm: 128 in the middle, less what is too much work"
    assert 130 <= sum(row.dtype == "bf16" for row in rows) <= 170 and [row.direction for row in rows[:4]] == ["fprop", "dgrad", "wgrad", "fprop"]
    assert {row.kind for row in rows} == {"dense"} and all(problems.identity(row)["drawn"] for row in rows)


def test_what_cannot_be_drawn_is_told(table):
    table.write_text(TABLE.replace("most_mib = 100", "most_mib = 0"))
    with pytest.raises(ListError, match="no problem within the limits"):
        drawn.draw(table, "conv", 1)
    table.write_text(TABLE.replace('"f32"', '"f31"'))
    with pytest.raises(ListError, match="dtype f31"):
        drawn.draw(table, "conv", 1)


def test_the_checkouts_table_has_every_class_and_type():
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    conv, gemm = (suites.drawn_rows(suites.SUITES[name], 9) for name in ("conv", "gemm"))
    assert {row.cls for row in conv} == {f"drawn_{name}" for name in ("dense", "depthwise", "grouped", "first", "odd", "volume", "line")}
    assert {row.cls for row in gemm} == {f"drawn_{name}" for name in ("aligned", "edge", "unaligned", "few_rows")}
    assert {row.layout for row in conv} == {problems.CHANNELS_LAST, problems.CHANNELS_FIRST} and {len(row.input) for row in conv} == {1, 2, 3}
    seen = [row for seed in range(4) for row in suites.drawn_rows(suites.SUITES["gemm"], seed)]
    assert {row.dtype for row in seen} == set(problems.BYTES) and any(row.m in (129, 257, 513) for row in seen)
    assert not {problems.key(row) for row in conv} & {problems.key(row) for row in suites.rows(suites.SUITES["conv"])}


def test_a_run_says_its_seed(capsys):
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    words = ["gemm", "--only-drawn", "--class", "drawn_edge", "--dry-run"]
    assert cli.main([*words, "--seed", "5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("seed of the drawn rows: 5\n") and len(first.splitlines()) == 21
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines()[1:] != first.splitlines()[1:], "a new seed"
    assert cli.main(["gemm", "--no-drawn", "--dry-run"]) == 0
    assert "drawn" not in capsys.readouterr().out
