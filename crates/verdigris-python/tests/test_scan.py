"""Scans by functions of PyTorch's tensors, against PyTorch's own in float64."""

import numpy as np
import pytest
import torch

import verdigris as v
import verdigris.torch as vt

FUNCTIONS = {"cumsum": (vt.cumsum, torch.cumsum), "cumprod": (vt.cumprod, torch.cumprod), "logcumsumexp": (vt.logcumsumexp, torch.logcumsumexp)}
#: Of what is rounded to the type, and of f32 sums beside those in f64.
NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def near(ours, theirs, dtype):
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=NEAR[dtype], atol=NEAR[dtype], equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("shape, dim", [((7,), 0), ((3, 130), 1), ((33, 9), 0), ((2, 5, 6), -2), ((0, 4), 1), ((4, 0), 1), ((), 0)])
def test_scans_are_those_of_pytorch(name, dtype, shape, dim):
    ours, theirs = FUNCTIONS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    y = ours(x, dim)
    assert (y.dtype, y.shape) == (dtype, x.shape) and (not x.numel() or y.stride() == x.stride())
    near(y, theirs(x.double(), dim), dtype)
    turned = x.t() if x.dim() == 2 else x
    near(ours(turned, dim), theirs(turned.double(), dim), dtype)


def test_a_dtype_is_that_of_sum_and_result():
    x = torch.full((70000,), 1.0, dtype=torch.bfloat16)
    y = vt.cumsum(x, 0, dtype=torch.float32)
    assert y.dtype == torch.float32 and y[-1] == 70000
    assert vt.cumsum(torch.arange(5), 0, dtype=torch.float32).tolist() == [0, 1, 3, 6, 10]
    # Rounded once, where each sum before it would have stuck at 256.
    assert vt.cumsum(x, 0)[-1] == torch.tensor(70000.0, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_and_infinity_reach_what_stands_behind_them_alone(name):
    ours, theirs = FUNCTIONS[name]
    for special in (float("nan"), float("inf"), float("-inf")):
        x = torch.tensor([[0.5, 2.0, special, 1.0, -1.5], [1.0, 2.0, 3.0, 4.0, 5.0]])
        near(ours(x, 1), theirs(x.double(), 1), torch.float32)
        near(ours(x, 0), theirs(x.double(), 0), torch.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients(name, dim):
    ours, theirs = FUNCTIONS[name]
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    if name == "cumprod":
        # One zero, two zeros and none in a row.
        x[0, 1] = x[1, 0] = x[1, 3] = x[3, 1] = 0
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    dy = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    ours(mine, dim).backward(dy)
    theirs(other, dim).backward(dy)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_the_gradient_of_a_sum_keeps_nothing_and_goes_on():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = vt.cumsum(x, 1)
    assert saved == []
    assert torch.autograd.gradgradcheck(lambda x: vt.cumsum(x, 1) ** 2, (x,))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[0].tolist() == [4, 3, 2, 1]


def test_what_is_refused():
    with pytest.raises(v.UnsupportedError, match="int64"):
        vt.cumsum(torch.arange(4), 0)
    with pytest.raises(IndexError):
        vt.cumsum(torch.randn(3), 1)


def test_a_graph_scans_both_ways():
    x = np.array([[3.0, -1.0, 2.0, 4.0, 0.5]], "f4")
    running = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "log_sum_exp": np.logaddexp}
    nothing = {"add": 0.0, "mul": 1.0, "min": np.inf, "max": -np.inf, "log_sum_exp": -np.inf}
    for f, function in running.items():
        for exclusive in (False, True):
            for reverse in (False, True):
                g = v.Graph("scan")
                g.store(g.scan(f, g.tensor("x", "f32", (1, 5)), 1, exclusive=exclusive, reverse=reverse), "y", "f32")
                y = np.full((1, 5), 9.75, "f4")
                v.Device("cpu").plan(g).execute({"x": x, "y": y})
                row = function.accumulate(x[0].astype("f8")[:: -1 if reverse else 1])
                if exclusive:
                    row = np.concatenate([[nothing[f]], row[:-1]])
                np.testing.assert_allclose(y[0][:: -1 if reverse else 1], row, rtol=1e-6)
    g = v.Graph("median")
    with pytest.raises(v.GraphError):
        g.scan("median", g.tensor("x", "f32", (1, 5)), 1)


def test_normal_numbers_of_a_state():
    g = v.Graph("normal")
    state = g.tensor("state", "i32", (4,))
    g.store(g.random_normal((1000, 100), state), "y", "f32")
    plan = v.Device("cpu").plan(g)
    drawn = []
    for words in ([1, 2, 3, 4], [1, 2, 3, 4], [2, 2, 3, 4]):
        y = np.full((1000, 100), np.nan, "f4")
        plan.execute({"state": np.array(words, "i4"), "y": y})
        drawn.append(y.astype("f8"))
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).mean() > 0.99
    for y in drawn[1:]:
        assert abs(y.mean()) < 5 / np.sqrt(y.size) and abs(y.var() - 1) < 5 * np.sqrt(2 / y.size)
        assert np.abs(y).max() < 6.77


def test_seed_and_offset_by_value_are_a_state_in_memory():
    seed, offset = 0x7EDC_BA98_7654_3210, 5

    def graph(drawn):
        g = v.Graph("drawn")
        g.store(drawn(g), "y", "f32")
        return v.Device("cpu").plan(g)

    def by_value(draw):
        def drawn(g):
            state = g.host_scalar("seed", "i64")
            return draw(g, state, offset=g.host_scalar("offset", "i64"))

        return graph(drawn)

    words = np.array([seed, offset], "<i8").view("<i4")
    for draw in (
        lambda g, state, **by: g.random_uniform((3, 50), state, **by),
        lambda g, state, **by: g.random_normal((3, 50), state, **by),
        lambda g, state, **by: g.bernoulli((3, 50), state, 0.5, **by),
    ):
        here, there = np.full((3, 50), np.nan, "f4"), np.full((3, 50), np.nan, "f4")
        by_value(draw).execute({"seed": seed, "offset": offset, "y": here})
        graph(lambda g: draw(g, g.tensor("state", "i32", (4,)))).execute({"state": words, "y": there})
        assert (here == there).all()
