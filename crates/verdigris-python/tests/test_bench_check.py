"""The bench's regression gate on synthetic records: what it lets pass, what it finds, and how often it cries wolf."""

import math
import random

import pytest

pytest.importorskip("torch")

from synthetic import row, run, write
from verdigris.bench import check, cli

NEXT = "2026-01-09T00:00:00Z"

KINDS = [(kind, direction) for kind in ("dense", "depthwise", "grouped", "first", "odd") for direction in ("fprop", "dgrad", "wgrad")]


def lease(seed, slower=None, date="2026-01-01T00:00:00Z", rows=20, skip=()):
    """A run of 15 classes with the noise of the records: a machine that is up to 8 % slower as a whole and up to 4 % in a class, medians that are off by
    0.5 to 1.5 % on either side, and peers that pick another plan (up to 15 % apart) in a tenth of the rows. ``slower`` says by key how much slower
    ours became."""
    noise, chip = random.Random(seed), f"GPU-{seed}"
    machine, made = noise.uniform(-0.08, 0.08), []
    for kind, direction in KINDS:
        drift = machine + noise.uniform(-0.04, 0.04)
        for i in range(rows):
            fixed = random.Random(f"{kind} {direction} {i}")
            ours, theirs, sigma = fixed.uniform(5, 500), fixed.uniform(0.8, 2.0), fixed.uniform(0.005, 0.015)
            flip = noise.uniform(-0.15, 0.15) if noise.random() < 0.1 else 0.0
            values = row(f"{kind}{i}", 1.0, kind=kind, direction=direction, spread=3 * sigma)
            loss = 1 + (slower or {}).get(values["key"], 0.0)
            peer = ours * theirs * math.exp(drift + flip + noise.gauss(0, sigma))
            us, instant = (ours * part * loss * math.exp(drift + noise.gauss(0, sigma)) for part in (1.0, 1.07))
            values.update(us=us, ratio=peer / us, ratio_best=peer / us, ratio_best_instant=peer / instant, peer_us=peer)
            values["sides"] = {"instant": {"us": instant}, "pytorch": {"us": peer}}
            if values["key"] not in skip:
                made.append(values)
    return run(made, date=date, chip=chip)


HISTORY = [lease(seed, date=f"2026-01-0{seed}T00:00:00Z") for seed in (1, 2, 3, 4)]
KEYS = list(HISTORY[0].rows)


def test_noise_alone_seldom_fails_the_gate():
    """The false alarm rate: runs of 300 rows in 15 classes and two columns, against the best of four leases."""
    alarms = [check.check([lease(100 + seed, date=NEXT)], HISTORY) for seed in range(20)]
    assert all(one.compared == len(KEYS) for one in alarms)
    assert sum(not one.passes for one in alarms) <= 1, [str(one) for one in alarms if not one.passes]


@pytest.mark.parametrize("kind, direction", [KINDS[0], KINDS[7]])
def test_five_percent_of_a_class_are_found(kind, direction):
    slower = {key: 0.05 for key in KEYS if f"/{kind}" in key and key.endswith(direction)}
    found = [check.check([lease(200 + seed, slower, NEXT)], HISTORY) for seed in range(6)]
    assert len(slower) == 20 and not any(one.passes for one in found)
    named = f"{kind} {direction} bf16 channels-last"
    assert all(any(one.key == named and one.column == "measured" for one in verdict.regressions) for verdict in found)


def test_ten_percent_of_one_row_are_found():
    found = 0
    for seed in range(20):
        key = KEYS[37 * seed % len(KEYS)]
        verdict = check.check([lease(300 + seed, {key: 0.10}, NEXT)], HISTORY)
        found += any(one.key == key for one in verdict.regressions)
    # A peer that happens to pick another plan in the very row hides it in its ratio.
    assert found >= 17


def test_ten_percent_of_everything_are_no_slower_machine():
    verdict = check.check([lease(7, {key: 0.10 for key in KEYS}, NEXT)], HISTORY)
    assert len({one.key for one in verdict.regressions if "mean of" in one.why}) == len(KINDS)


def fall(before, after, ours=None, **more):
    """Two runs of a row among nine that stay."""
    still = [row(str(i), 1.0) for i in range(9)]
    old, new = row("a", before), row("a", after, **more)
    if ours is not None:
        new.update(us=ours, peer_us=ours * after)
        new["sides"] = {"instant": {"us": ours}, "pytorch": {"us": ours * after}}
    return check.check([run([new, *still], date=NEXT)], [run([old, *still])])


def test_a_row_fails_by_its_ratio_and_its_time():
    assert fall(1.0, 0.96, 104.0).passes
    verdict = fall(1.0, 0.92, 109.0)
    assert {one.key for one in verdict.regressions} == {"test/bf16/channels-last/a-fprop"} and "allowed" in str(verdict)
    assert fall(1.0, 0.92, 100.0).passes, "the peer alone became faster"
    assert fall(1.0, 1.5, 100.0).passes
    assert fall(1.0, 0.92, 109.0, spread=0.3).passes and "too noisy" in str(fall(1.0, 0.92, 109.0, spread=0.5))


@pytest.mark.parametrize("trouble", [{"fault": "element 3"}, {"refused": "no engine"}])
def test_what_was_right_and_no_longer_is_fails(trouble):
    verdict = check.check([run([row("a", **trouble)], date=NEXT)], [run([row("a", 1.0)])])
    assert not verdict.passes and verdict.regressions[0].after is None


def test_a_row_that_one_lease_of_three_had_right_fails_when_it_breaks():
    old = [row("a", 1.0), row("a", refused="no engine"), row("a", refused="no engine")]
    history = [run([one], date=f"2026-01-0{day}T00:00:00Z", chip=f"GPU-{day}") for day, one in enumerate(old, 1)]
    verdict = check.check([run([row("a", fault="element 3")], date=NEXT)], history)
    assert not verdict.passes and "was right and timed" in str(verdict)


def test_rows_that_are_absent_fail_unless_a_selection_was_asked_for():
    part = lease(9, date=NEXT, skip=KEYS[:3])
    verdict = check.check([part], HISTORY)
    assert {one.key for one in verdict.regressions if one.why == "is absent"} == set(KEYS[:3])
    part.head["selection"] = {"filter": "dense"}
    chosen = check.check([part], HISTORY)
    assert not any(one.why == "is absent" for one in chosen.regressions) and "selection" in str(chosen)


def test_all_runs_of_a_record_are_judged():
    half = len(KEYS) // 2
    first, second = lease(11, {KEYS[0]: 0.2}, NEXT, skip=KEYS[half:]), lease(11, date="2026-01-09T01:00:00Z", skip=KEYS[:half])
    verdict = check.check([first, second], HISTORY)
    assert verdict.compared == len(KEYS) and KEYS[0] in {one.key for one in verdict.regressions}


def test_only_the_same_method_driver_and_peers_are_compared():
    new = run([row("a", 0.5, us=200.0)], date=NEXT)
    old = run([row("a", 1.0)])
    old.head["method"] = 1
    others = [run([row("a", 1.0)], driver="590.1"), run([row("a", 1.0)], torch="2.12.0"), run([row("a", 1.0)], suite="gemm"), old]
    verdict = check.check([new], others)
    assert not verdict.base and verdict.passes and "nothing to compare" in str(verdict)
    later = run([row("a", 1.0)], date="2026-02-04T00:00:00Z")
    assert not check.check([new], [later]).base, "a later run is no base"


def test_the_base_is_the_best_of_history_and_does_not_slide():
    """Four losses of 4 % each: none is seen beside the one before, all are seen beside the best."""
    still, history = [row(str(i), 1.0) for i in range(9)], []
    verdicts = []
    for step in range(5):
        ratio = 0.96**step
        slower = row("a", ratio, us=100.0 / ratio, sides={"instant": {"us": 100.0 / ratio}, "pytorch": {"us": 100.0}}, peer_us=100.0)
        one = run([slower, *still], date=f"2026-01-0{step + 1}T00:00:00Z", chip=f"GPU-{step}")
        verdicts.append(check.check([one], history).passes)
        history.append(one)
    assert verdicts == [True, True, False, False, False]


def test_the_gate_as_a_command(tmp_path, capsys):
    write(tmp_path / "old.jsonl", run([row("a", 1.0)]))
    write(tmp_path / "good.jsonl", run([row("a", 0.99, us=101.0)], date="2026-01-02T00:00:00Z", chip="GPU-b"))
    write(tmp_path / "bad.jsonl", run([row("a", 0.8, us=125.0, peer_us=100.0)], date="2026-01-03T00:00:00Z", chip="GPU-c"))
    assert cli.main(["check", str(tmp_path / "good.jsonl"), str(tmp_path / "old.jsonl")]) == 0
    (tmp_path / "empty.jsonl").write_text("")
    assert cli.main(["check", str(tmp_path / "empty.jsonl")]) == 2
