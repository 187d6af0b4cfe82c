"""The bench's parts on the CPU: problems, judging, timing, and a whole run against a door that is right and one that is not."""

import contextlib
import dataclasses
import io
import itertools
import math
import threading
import types

import pytest

torch = pytest.importorskip("torch")

from verdigris.bench import cli, judge, measure, peers, problems, record, source, suites, tensors
from verdigris.bench.problems import CHANNELS_FIRST, CHANNELS_LAST, Conv, Gemm, ListError
from verdigris.bench.row import Bench, Contender, Options
from verdigris.bench.run import Progress

# Small tensors gain nothing from more threads, and other programs lose.
torch.set_num_threads(1)

CPU = torch.device("cpu")


def conv(direction="fprop", dtype="f32", layout=CHANNELS_LAST, n=2, c=6, k=8, input=(7, 6), filter=(3, 2), stride=1, pad=1, dilation=1, groups=1):
    each = lambda value: value if isinstance(value, tuple) else (value,) * len(input)
    return Conv("t", "t", direction, dtype, layout, n, c, k, input, filter, each(stride), each(pad), each(dilation), groups)


@torch.enable_grad()
def by_autograd(row, first, second):
    """The whole result in f64 by PyTorch's derivative, which shares nothing with the bench's sums."""
    functions = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
    settings = dict(stride=row.stride, padding=row.pad, dilation=row.dilation, groups=row.groups)
    convolve = lambda x, w: functions[len(row.input)](x, w, **settings)
    first, second = first.double(), second.double()
    if row.direction == "fprop":
        return convolve(first, second)
    if row.direction == "dgrad":
        x = torch.zeros(row.x_shape, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(convolve(x, second), x, first)[0]
    w = torch.zeros(row.w_shape, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(convolve(second, w), w, first)[0]


SHAPES = [
    dict(),
    dict(stride=2, layout=CHANNELS_FIRST),
    dict(stride=(2, 3), pad=(0, 1), dilation=(2, 1), groups=2),
    dict(c=6, k=12, groups=6),
    dict(input=(19,), filter=(5,), stride=3, pad=2),
    dict(input=(5, 6, 7), filter=(3, 2, 1), stride=(1, 2, 1), pad=(1, 0, 0), c=4, k=4),
]


@pytest.mark.parametrize("direction", problems.DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_at_positions_are_the_convolution(direction, shape):
    row = conv(direction, **shape)
    first, second = tensors.operand_pairs(row, 1, CPU, 5)[0]
    every = torch.arange(math.prod(row.result_shape))
    sample = judge.exact(row, first, second, every)
    whole = by_autograd(row, first, second)
    torch.testing.assert_close(sample.values, whole.reshape(-1), rtol=1e-12, atol=1e-12)
    squares = by_autograd(row, first.double().square(), second.double().square())
    torch.testing.assert_close(sample.rms, squares.reshape(-1).sqrt(), rtol=1e-12, atol=1e-12)
    assert judge.judge(row, sample, whole.float()).fault is None


@pytest.mark.parametrize("letters", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("sizes", [dict(batch=1, m=5, n=7, k=9), dict(batch=3, m=4, n=6, k=8), dict(batch=1, m=5, n=7, k=9, lda=11, ldb=13, ldd=17)])
def test_sums_at_positions_are_the_product(letters, sizes):
    row = Gemm("t", "f32", letters, **sizes)
    a, b = tensors.operand_pairs(row, 1, CPU, 3)[0]
    assert [a.stride()[-2:], b.stride()[-2:]] == list(row.strides[:2])
    sample = judge.exact(row, a, b, torch.arange(math.prod(row.result_shape)))
    torch.testing.assert_close(sample.values, (a.double() @ b.double()).reshape(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32", "f32"])
@pytest.mark.parametrize("direction", problems.DIRECTIONS)
def test_rounded_sums_pass_and_wrong_ones_do_not(dtype, direction):
    row = conv(direction, dtype, n=3, c=16, k=24, input=(13, 12), filter=(3, 3))
    first, second = tensors.operand_pairs(row, 1, CPU, 5)[0]
    if dtype == "tf32":
        rounded = [(t.view(torch.int32) & -8192).view(torch.float32) for t in (first, second)]  # as a tensor core cuts them off
    else:
        rounded = [first, second]
    result = by_autograd(row, *rounded).to(tensors.TYPES[dtype][1])
    sample = judge.exact(row, first, second, judge.positions(row, CPU, 1))
    right = judge.judge(row, sample, result)
    assert right.fault is None and 0 < right.worst <= 1

    corner = result.clone()
    corner[(-1,) * corner.dim()] += 0.1 * float(sample.rms[-1])
    assert "tolerances away" in judge.judge(row, sample, corner).fault
    missing = result.clone()
    missing[1] = math.nan
    assert "not numbers" in judge.judge(row, sample, missing).fault
    assert judge.judge(row, sample, result.roll(1, -1)).worst > 10
    halved = first.clone()
    halved[:, -1] = 0  # the products of one channel, or one row of a filter, are forgotten
    assert judge.judge(row, sample, by_autograd(row, halved, second).to(result.dtype)).fault
    assert "shape" in judge.judge(row, sample, result[:, :1]).fault


def test_f32_is_held_to_multiply_adds_however_many_terms_there_are():
    """A chain of f32 additions passes; operands cut to tf32, and sums that lose a part of themselves, do not, though a rule with a term in L would let
    them."""
    row = conv("wgrad", "f32", n=48, c=4, k=4, input=(64, 64), filter=(1, 1), pad=0)
    assert row.terms == 196_608
    first, second = tensors.operand_pairs(row, 1, CPU, 5)[0]
    sample = judge.exact(row, first, second, torch.arange(math.prod(row.result_shape)))
    x, dy = (t.permute(1, 0, 2, 3).reshape(4, -1) for t in (second, first))
    if by_autograd(row, first, second).shape[0] != dy.shape[0]:
        x, dy = dy, x
    products = dy[:, None] * x[None]
    chain = products.cumsum(-1)[..., -1].reshape(row.result_shape)
    right = judge.judge(row, sample, chain)
    assert right.fault is None and 0 < right.worst <= 1, right

    exact = sample.values.reshape(row.result_shape)
    cut = [(t.view(torch.int32) & -8192).view(torch.float32) for t in (first, second)]
    for wrong in (by_autograd(row, *cut).float(), (exact * (1 - 2e-4)).float()):
        assert "times those of f32 multiply-adds" in judge.judge(row, sample, wrong).fault
    as_tf32 = conv("wgrad", "tf32", n=48, c=4, k=4, input=(64, 64), filter=(1, 1), pad=0)
    assert judge.judge(as_tf32, sample, by_autograd(row, *cut).float()).fault is None


def test_integers_are_exact():
    row = Gemm("t", "int8", "nt", 1, 33, 24, 40)
    a, b = tensors.operand_pairs(row, 1, CPU, 3)[0]
    sample = judge.exact(row, a, b, judge.positions(row, CPU, 1))
    result = a.int() @ b.int()
    assert judge.judge(row, sample, result).worst == 0
    result[0, 0] += 1
    assert judge.judge(row, sample, result).fault


def test_where_two_answers_differ_is_looked_at():
    row = conv(n=2, c=8, k=16, input=(64, 64), filter=(1, 1), pad=0)
    theirs = torch.randn(row.result_shape).to(memory_format=torch.channels_last)
    ours = theirs.clone()
    ours[1, 7, 33, 12] += 1
    ours[0, 3, 5, 9] = math.nan
    found = judge.disagreements(row, ours, theirs, 1.0)
    wanted = {(((1 * 16 + 7) * 64) + 33) * 64 + 12, (((0 * 16 + 3) * 64) + 5) * 64 + 9}
    assert wanted <= set(found.tolist())


def test_the_lists_of_the_checkout_read():
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    rows = suites.rows(suites.SUITES["conv"])
    by_key = {problems.key(row): row for row in rows}
    assert len(by_key) == len(rows) > 450
    assert {row.kind for row in rows if row.dtype == "bf16"} == {"dense", "depthwise", "grouped", "first", "volume", "odd"}
    assert {row.layout for row in rows} == {CHANNELS_LAST, CHANNELS_FIRST}
    assert {1, 256} <= {row.n for row in rows}
    strided = by_key["resnet/bf16/channels-last/resnet_3x3_128_s2-dgrad"]
    assert strided.output == (28, 28) and strided.flops == 2.0 * 256 * 784 * 128 * 128 * 9
    uneven = by_key["uneven/bf16/channels-last/inception_1x7-fprop"]
    assert uneven.output == (17, 17) and uneven.terms == 128 * 7
    products = {problems.key(row): row for row in suites.rows(suites.SUITES["gemm"])}
    assert products["unaligned/bf16/nt/4096x4096x4096-nt-lda4097"].kind == "odd"
    assert products["moe/bf16/nt/16x8x8192x5120-nt"].flops == 2.0 * 16 * 8 * 8192 * 5120


def test_what_matters_most_is_measured_first():
    if suites.lists_folder() is None:
        pytest.skip("no checkout around")
    suite = suites.SUITES["conv"]
    order = suites.in_turn(suite, suites.rows(suite))
    ranks = [suite.rank(row) for row in order]
    assert ranks == sorted(ranks) and sorted(map(problems.key, order)) == sorted(map(problems.key, suites.rows(suite)))
    lanes = list(itertools.product(["dense", "depthwise", "grouped", "first", "volume", "odd"], problems.DIRECTIONS))
    seen = {(row.kind, row.direction) for row in order[: 2 * len(lanes)]}
    assert seen == set(lanes)


LIST = """
[[group]]
class = "tiny"
directions = ["fprop", "dgrad", "wgrad"]
dtypes = ["bf16"]
problems = [{ name = "a", n = 2, c = 8, k = 16, input = [9, 8], filter = [3, 3], pad = 1, stride = 2 }]
[[group]]
class = "tiny_first"
layout = "channels-first"
directions = ["fprop"]
dtypes = ["f32", "int8"]
problems = [{ name = "a", n = 1, c = 6, k = 4, input = [5, 6, 7], filter = [3, 2, 1], pad = [1, 0, 0], stride = [1, 2, 1], groups = 2 }]
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A short list, and caches small enough for few copies."""
    monkeypatch.setattr(tensors, "CPU_CACHE_BYTES", 1 << 14)
    path = tmp_path / "tiny.toml"
    path.write_text(LIST)
    return path


@pytest.mark.parametrize(
    "change, message",
    [
        ("filter = [3]", "as many of the filter"),
        ("filter = [3, 30]", "do not fit"),
        ("filter = [3, 3], groups = 3", "do not fit"),
        ("filter = [3, 3], pad = [1, 2, 3]", "as many as there are spatial dims"),
    ],
)
def test_rows_that_cannot_be_are_told(tmp_path, change, message):
    path = tmp_path / "bad.toml"
    path.write_text(LIST.replace("filter = [3, 3], pad = 1, stride = 2", change))
    with pytest.raises(ListError, match=message):
        problems.load([path])
    with pytest.raises(ListError, match="twice"):
        path.write_text(LIST + LIST)
        problems.load([path])


def test_blocks_rotate_and_quantiles_interpolate():
    assert measure.rotating(3, 3) == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert measure.quantile([4, 1, 3, 2], 0.5) == 2.5 and math.isnan(measure.quantile([], 0.5))
    samples = measure.Samples([10.0, 10.0, 12.0, 14.0])
    assert samples.median == 11 and samples.spread == pytest.approx(2.5 / 11)
    assert measure.Samples([2.0, 8.0]).over(measure.Samples([1.0, 2.0])).us == [2.0, 4.0]
    side = measure.Side("a", lambda i: None, rough_us=10.0)
    assert measure.block_launches(side, 1000.0, 7) == 98, "whole rounds over the copies"
    assert measure.block_launches(side, 50.0, 7) == 5
    assert measure.block_launches(side, 1.0, 7) == 1


class FakeTimer(measure.HostTimer):
    """A clock that says what a launch costs, and remembers who ran."""

    def __init__(self, costs):
        self.costs, self.now, self.ran = costs, 0.0, []

    def run(self, order, blocks):
        times = []
        for number in order:
            before = self.now
            blocks[number]()
            times.append(self.now - before)
        return times


def test_sides_take_turns_over_all_copies():
    timer = FakeTimer({"a": 2.0, "b": 3.0})

    def side(name):
        def launch(i):
            timer.ran.append((name, i))
            timer.now += timer.costs[name]

        return measure.Side(name, launch)

    timing = measure.interleave(timer, [side("a"), side("b")], 4, 2e-3)
    (a, b), is_captured = timing.samples, timing.is_captured
    assert (a.median, b.median, is_captured) == (2.0, 3.0, False)
    assert len(a.us) == len(b.us) >= measure.LEAST_BLOCKS
    assert {i for _, i in timer.ran} == {0, 1, 2, 3}
    # A first guess that was too long makes no short row.
    hasty = dataclasses.replace(side("a"), rough_us=6.0)
    assert measure.interleave(timer, [hasty], 4, 2e-3).seconds >= 2e-3 > measure.BLOCKS * 8e-6


class FakeCuda:
    """Events, streams and graphs on a clock of their own: launches cost what they say, and are recorded while one captures."""

    def __init__(self, monkeypatch):
        self.now, self.recorded, cuda = 0.0, None, self

        class Event:
            def __init__(self, enable_timing):
                self.at = 0.0

            def record(self):
                self.at = cuda.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e-3

        class Stream:
            def wait_stream(self, other):
                pass

        class Graph:
            def capture_begin(self, capture_error_mode):
                self.costs = cuda.recorded = []

            def capture_end(self):
                cuda.recorded = None

            def replay(self):
                cuda.now += sum(self.costs)

        for name, value in (("Event", Event), ("Stream", Stream), ("CUDAGraph", Graph), ("current_stream", Stream)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def side(self, name, us, captures=True):
        def launch(i):
            if self.recorded is None:
                self.now += us
            elif captures:
                self.recorded.append(us)
            else:
                raise ValueError("this cannot be captured")

        return measure.Side(name, launch)


def test_short_sides_are_replayed_as_graphs(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    timer = measure.CudaTimer(50.0)
    timing = measure.interleave(timer, [cuda.side("a", 4.0), cuda.side("b", 8.0)], 7, 0.02)
    (a, b), is_captured = timing.samples, timing.is_captured
    assert is_captured and (a.median, b.median) == (pytest.approx(4.0), pytest.approx(8.0))
    timing = measure.interleave(timer, [cuda.side("a", 400.0), cuda.side("b", 80.0)], 7, 0.02)
    (a, b), is_captured = timing.samples, timing.is_captured
    assert not is_captured and timer.trouble is None and (a.median, b.median) == (pytest.approx(400.0), pytest.approx(80.0))
    timing = measure.interleave(timer, [cuda.side("a", 4.0), cuda.side("b", 5.0, captures=False)], 7, 0.02)
    (a, b), is_captured = timing.samples, timing.is_captured
    assert not is_captured and timer.trouble == "not captured: this cannot be captured" and b.median == pytest.approx(5.0)


class TorchDoor:
    """A door that answers by f64 and a rounding, and spoils what its test asks for: the result of a column, from call ``late`` on if that is named, or
    an operand."""

    def __init__(self, spoil=None, late=0, operand=False):
        self.spoil, self.late, self.operand, self.calls = spoil, late, operand, 0

    def versions(self):
        return {"verdigris": "test"}

    def source(self):
        return {"hash": "test"}

    def launch(self, row, mode):
        if row.dtype == "int8":
            raise peers.Refused("no eight bits here")

        def launch(first, second):
            result = by_autograd(row, first, second).to(tensors.TYPES[row.dtype][1])
            self.calls += 1
            if self.operand and self.calls > self.late:
                memory = torch.empty(0, dtype=torch.uint8).set_(second.untyped_storage())
                memory[tensors.FENCE_BYTES if self.operand == "inside" else 3] += 1
            if self.spoil == mode and self.calls > self.late:
                result[tuple(extent // 2 for extent in result.shape)] += 7
            return result

        return launch

    def explain(self, row, mode):
        return {"engine": "test.engine", "knobs": mode, "workspace_bytes": 0}


def bench(door):
    return Bench(CPU, door, measure.HostTimer(), Options(seconds=2e-3), {"gemm_tflops": 1.0, "copy_gb_per_s": 10.0})


def test_a_right_row_is_timed_on_both_sides(tiny):
    for problem in problems.load([tiny])[:4]:
        row = bench(TorchDoor()).row(problem)
        assert "fault" not in row and "refused" not in row, row
        assert row["us"] > 0 and row["peer_us"] > 0 and row["ratio"] > 0 and row["sides"]["instant"]["us"] > 0
        assert row["worst_in_tolerances"] <= 1 and row["sides"]["pytorch"]["worst_in_tolerances"] <= 1
        assert row["engine"] == "test.engine" and row["workspace_bytes"] == 0
        assert row["tflops"] == pytest.approx(problem.flops / row["us"] * 1e-6)


def test_a_wrong_result_is_a_fault_and_never_timed(tiny):
    problem = problems.load([tiny])[0]
    row = bench(TorchDoor("measured")).row(problem)
    assert "tolerances away" in row["fault"] and "us" not in row and "ratio" not in row
    assert row["sides"]["pytorch"]["us"] > 0
    row = bench(TorchDoor("instant")).row(problem)
    assert row["us"] > 0 and "fault" in row["sides"]["instant"] and "us" not in row["sides"]["instant"]


def test_what_goes_wrong_while_it_is_timed_is_a_fault(tiny):
    problem = problems.load([tiny])[0]
    row = bench(TorchDoor("measured", late=3)).row(problem)
    assert row["fault"].startswith("after the timed replays: element") and "ratio" not in row and "ratio_best" not in row
    for place, words in (("inside", "of the second operand was written"), ("beside", "memory beside copy")):
        row = bench(TorchDoor(operand=place, late=3)).row(problem)
        assert words in row["fault"], row


def test_a_row_says_how_it_was_measured(tiny):
    row = bench(TorchDoor()).row(problems.load([tiny])[0])
    assert row["timed_s"] >= 2e-3 and row["blocks"] >= measure.SLOW_BLOCKS and row["rotated_bytes"] > 0
    assert row["error"] > 0 and row["error_after"] == pytest.approx(row["error"], rel=0.5) and row["sides"]["pytorch"]["error"] > 0
    assert row["best_peer"] in ("pytorch", "other_format") and row["ratio_best"] > 0 and row["ratio_best_instant"] > 0
    assert row["apart_us"] > 0 and row["ratio_apart"] > 0
    other = row["sides"]["other_format"]
    assert other["ways_us"] == [other["us"]]


def test_results_lie_apart_and_operands_between_fences(tiny):
    problem = problems.load([tiny])[0]
    pairs = tensors.operand_pairs(problem, 3, CPU, 1)
    truth = tuple(tensors.fenced(tensor) for tensor in pairs[0])
    one = Contender("pytorch", peers.pytorch(problem, CPU))
    side = one.side(pairs)
    for i in (0, 1, 2, 0, 1):
        side.launch(i)
    assert len({result.data_ptr() for result in one.held}) == 3
    assert tensors.broken(pairs, truth) is None and all(t.data_ptr() % 64 == pairs[0][0].data_ptr() % 64 for pair in pairs for t in pair)
    pairs[2][0][0, 0, 0, 0] += 1
    assert tensors.broken(pairs, truth) == "copy 2 of the first operand was written"


def test_of_a_peers_answers_the_best_counts(tiny, monkeypatch):
    """Six answers of cuBLASLt's, of which one is fast and wrong; a clock of their own says what they cost."""

    class Clock(measure.HostTimer):
        now = 0.0

        def run(self, order, blocks):
            times = []
            for number in order:
                before = Clock.now
                blocks[number]()
                times.append(Clock.now - before)
            return times

    def answer(us, is_wrong=False):
        def launch(a, b):
            Clock.now += us
            return torch.matmul(a, b) + is_wrong

        return launch

    class Matmul(TorchDoor):
        def launch(self, row, mode):
            return answer(20.0)

    monkeypatch.setattr(peers, "answers_of_cublaslt", lambda row, device: [answer(us, us == 1.0) for us in (40.0, 80.0, 1.0, 20.0, 60.0, 10.0)])
    monkeypatch.setattr(peers, "product", lambda row, device: answer(30.0))
    monkeypatch.setattr(Bench, "_apart", lambda *arguments: None)
    row = Bench(CPU, Matmul(), Clock(), Options(seconds=2e-3), {}).row(problems.Gemm("t", "f32", "nn", 1, 16, 16, 16))
    side = row["sides"]["cublaslt"]
    assert sorted(side["ways_us"]) == [10.0, 20.0, 40.0, 60.0] and side["us"] == 10.0 and "fault" not in side
    assert (row["peer"], row["best_peer"]) == ("pytorch", "cublaslt") and (row["ratio"], row["ratio_best"]) == (1.5, 0.5)


def test_cudnn_is_asked_for_all_its_plans_and_for_several_picks(monkeypatch):
    limit = torch.backends.cudnn.benchmark_limit if hasattr(torch._C, "_cuda_set_cudnn_benchmark_limit") else None
    with peers.precision("bf16"):
        assert torch.backends.cudnn.benchmark and (limit is None or torch.backends.cudnn.benchmark_limit == 0)
    assert limit is None or torch.backends.cudnn.benchmark_limit == limit
    ways = peers._picked("pytorch", None, conv(), torch.device("meta"))
    assert [way.is_pick for way in ways] == [False]
    picks = peers._picked("pytorch", lambda x, w: threading.get_ident(), conv(), types.SimpleNamespace(type="cuda"))
    assert len(picks) == peers.PICKS and all(way.is_pick for way in picks)
    x = torch.zeros(1)
    threads = [[way.launch(x, x) for way in picks] for _ in range(2)]
    assert threads[0] == threads[1], "a pick stays in its thread, where PyTorch keeps its plan"
    assert len({*threads[0], threading.get_ident()}) == peers.PICKS + 1, "each pick has a thread of its own"


def test_a_picker_works_without_gradients_and_hands_errors_on():
    picker = peers.Picker()
    x = torch.ones(1, requires_grad=True)
    assert not picker.launch(lambda a, b: a * b)(x, x).requires_grad

    def fail(a, b):
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        picker.launch(fail)(x, x)


def test_a_pick_is_captured_however_long_it_takes(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    long = cuda.side("a", 400.0)
    assert not measure.interleave(measure.CudaTimer(50.0), [long], 3, 0.02).is_captured
    long = cuda.side("a", 400.0)
    long.is_captured = True
    assert measure.interleave(measure.CudaTimer(50.0), [long], 3, 0.02).is_captured


def test_launches_that_the_host_makes_seem_long_are_timed_for_as_long_as_asked(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def launch(i):
        if cuda.recorded is None:
            cuda.now += 120.0
        else:
            cuda.recorded.append(2.0)

    timing = measure.interleave(measure.CudaTimer(50.0), [measure.Side("a", launch, True)], 4, 0.3)
    assert timing.seconds >= 0.29 and timing.samples[0].median == pytest.approx(2.0)


def test_the_other_format_is_laid_out_before(tiny):
    row = conv("fprop", layout=CHANNELS_FIRST)
    first, second = tensors.operand_pairs(row, 1, CPU, 1)[0]
    laid = peers.laid_out_otherwise(row)(first, second)
    assert laid[0].is_contiguous(memory_format=torch.channels_last) and torch.equal(laid[0], first) and torch.equal(laid[1], second)
    with pytest.raises(peers.Refused):
        peers.other_format(problems.Gemm("t", "f32", "nn", 1, 4, 4, 4), CPU)


def test_pixels_that_nobody_reads_are_no_traffic():
    strided = conv(n=1, c=8, k=8, input=(8, 8), filter=(1, 1), stride=2, pad=0, dtype="bf16")
    assert problems.traffic_bytes(strided) == 2 * (4 * 4 * 8 + 8 * 8 + 4 * 4 * 8)
    assert problems.traffic_bytes(dataclasses.replace(strided, direction="dgrad")) == 2 * (4 * 4 * 8 + 8 * 8 + 8 * 8 * 8)


def test_a_record_says_of_which_sources_it_is(tmp_path, monkeypatch):
    package = tmp_path / "verdigris"
    (package / "bench").mkdir(parents=True)
    (package / "a.py").write_text("a = 1")
    (package / "bench" / "b.py").write_text("b = 1")
    first = source.describe("native", package)
    (package / "bench" / "b.py").write_text("b = 2")
    assert source.describe("native", package)["hash"] == first["hash"], "how is measured is no part of what is"
    (package / "a.py").write_text("a = 2")
    assert len({first["hash"], source.describe("native", package)["hash"], source.describe("other", package)["hash"]}) == 3
    monkeypatch.setattr(source, "_git", lambda *words: {"rev-parse": "abc", "status": " M a"}[words[0]])
    assert source.describe(None, None) == {"hash": "", "commit": "abc+"}
    monkeypatch.setattr(source, "_git", lambda *words: None)
    monkeypatch.setenv("VERDIGRIS_COMMIT", "def")
    assert source.describe(None, None)["commit"] == "def"


def test_a_refusal_is_told_with_its_reason(tiny):
    row = bench(TorchDoor()).row(problems.load([tiny])[4])
    assert row["refused"] == "no eight bits here" and "no int8 convolution" in row["remarks"][0]
    limited = Bench(CPU, TorchDoor(), measure.HostTimer(), Options(memory_limit_bytes=100), {}).row(problems.load([tiny])[0])
    assert "--memory-limit" in limited["refused"]


def test_the_command_line(tiny, tmp_path, monkeypatch, capsys):
    from verdigris.bench import machine, ours

    monkeypatch.setattr(ours, "open_door", lambda device, tuning_ms: TorchDoor())
    monkeypatch.setattr(machine, "CEILING", {"cpu": (64, 1 << 16)})
    monkeypatch.setattr(machine, "CEILING_SECONDS", 0.01)
    path = tmp_path / "record" / "a.jsonl"
    words = ["conv", "--list", str(tiny), "--device", "cpu", "--seconds", "0.002", "--json", str(path)]
    assert cli.main([*words, "--class", "tiny", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"tiny/bf16/channels-last/a-{direction}" for direction in problems.DIRECTIONS]
    assert not path.exists()
    assert cli.main([*words, "--direction", "fprop"]) == 0
    (run,) = record.read(path)
    assert set(run.rows) == {"tiny/bf16/channels-last/a-fprop", "tiny_first/f32/channels-first/a-fprop", "tiny_first/int8/channels-first/a-fprop"}
    assert run.head["software"]["torch"] == torch.__version__ and run.head["ceilings"]["copy_gb_per_s"] > 0 and run.foot["rows"] == 3
    # The rest alone is measured when the same record goes on.
    assert cli.main([*words, "--class", "tiny"]) == 0
    assert [len(part.rows) for part in record.read(path)] == [3, 2]
    assert cli.main([*words, "--class", "nothing"]) == 2
    assert "tiny_first" in capsys.readouterr().err
    monkeypatch.setattr(ours, "open_door", lambda device, tuning_ms: TorchDoor("measured"))
    assert cli.main(["conv", "--list", str(tiny), "--device", "cpu", "--seconds", "0.002", "--class", "tiny", "--direction", "fprop"]) == 1
    assert "tolerances away" in capsys.readouterr().out


def test_the_progress_bar_is_for_terminals_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        progress = Progress(2, stream)
        progress.step("first")
        progress.end()
        assert ("first" in stream.getvalue()) == is_shown
