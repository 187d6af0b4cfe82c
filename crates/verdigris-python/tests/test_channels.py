"""Shuffles of pixels and channels, the norm over neighbouring channels, and running extrema with their places, against PyTorch."""

import math

import pytest
import torch

import verdigris.torch as vt
from verdigris import GraphError, OutOfRangeError, UnsupportedError

F = torch.nn.functional


def tensor(*shape, dtype=torch.float32, seed=0, last=False):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.to(memory_format=torch.channels_last) if last else x


def same(ours, theirs, x):
    """Results, memory formats and gradients, bit for bit: what is moved is not computed."""
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = ours(a), theirs(b)
    assert y.dtype == want.dtype and torch.equal(y, want)
    dy = torch.randn(want.shape).to(want.dtype)
    y.backward(dy)
    want.backward(dy)
    assert torch.equal(a.grad, b.grad)
    return y


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, factor", [((2, 12, 3, 5), 2), ((1, 9, 1, 1), 3), ((2, 5, 4, 3), 1), ((3, 32, 7, 8), 4)])
def test_pixels(shape, factor, dtype, last):
    x = tensor(*shape, dtype=dtype, last=last)
    y = same(lambda x: vt.pixel_shuffle(x, factor), lambda x: F.pixel_shuffle(x, factor), x)
    if last and shape[1] > factor**2 and factor > 1:
        assert y.is_contiguous(memory_format=torch.channels_last)
    same(lambda x: vt.pixel_unshuffle(x, factor), lambda x: F.pixel_unshuffle(x, factor), y.detach())


@pytest.mark.parametrize("shape", [(12, 3, 5), (2, 3, 12, 3, 5)])
def test_pixels_of_other_ranks(shape):
    same(lambda x: vt.pixel_shuffle(x, 2), lambda x: F.pixel_shuffle(x, 2), tensor(*shape))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape, groups", [((2, 12, 3, 5), 3), ((2, 6, 4, 4), 6), ((2, 6, 4, 4), 1)])
def test_channels(shape, groups, last):
    x = tensor(*shape, last=last)
    a = x.clone().requires_grad_()
    y, n = vt.channel_shuffle(a, groups), shape[1] // groups
    want = x.view(shape[0], groups, n, *shape[2:]).transpose(1, 2).reshape(shape) if not last else F.channel_shuffle(x, groups)
    assert torch.equal(y, want)
    dy = torch.randn(shape)
    y.backward(dy)
    assert torch.equal(a.grad, dy.view(shape[0], n, groups, *shape[2:]).transpose(1, 2).reshape(shape))


def test_shuffles_refuse_what_does_not_divide():
    x = tensor(2, 6, 3, 4)
    for wrong in (lambda: vt.pixel_shuffle(x, 2), lambda: vt.pixel_unshuffle(x, 2), lambda: vt.channel_shuffle(x, 4), lambda: vt.pixel_shuffle(x, 0)):
        with pytest.raises(GraphError):
            wrong()
    with pytest.raises(GraphError):
        vt.pixel_shuffle(x[0, 0], 1)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape, size", [((2, 7, 3, 5), 5), ((2, 3, 4, 4), 4), ((1, 2, 2, 2), 9), ((2, 16, 3, 3), 1), ((2, 4, 6), 3)])
def test_local_response_norm(shape, size, last):
    if last and len(shape) != 4:
        pytest.skip("of four dims")
    x = tensor(*shape, last=last)
    settings = {"alpha": 0.3, "beta": 0.6, "k": 1.5}
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    y, want = vt.local_response_norm(a, size, **settings), F.local_response_norm(b, size, **settings)
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6)
    dy = torch.randn(shape)
    y.backward(dy)
    want.backward(dy.double())
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=5e-6, atol=5e-6)


def test_local_response_norm_of_narrow_types_rounds_once():
    x = tensor(2, 8, 5, 5, dtype=torch.bfloat16)
    want = F.local_response_norm(x.double(), 5, 1.0, 0.75, 1.0)
    y = vt.local_response_norm(x, 5, 1.0, 0.75, 1.0)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - want).abs() <= want.abs() * 2**-8).all()
    with pytest.raises(UnsupportedError):
        vt.local_response_norm(x, 65)
    with pytest.raises(UnsupportedError):
        vt.local_response_norm(x.int(), 5)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
@pytest.mark.parametrize("shape, dim", [((4, 9), 1), ((4, 9), 0), ((3, 5, 2), -2), ((1, 1), 0), ((), 0), ((2, 300), 1), ((0, 3), 1)])
def test_running_extrema(name, shape, dim):
    # Few values, so that there are ties; their last place counts.
    x = tensor(*shape, seed=3).mul(2).round()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = getattr(vt, name)(a, dim), getattr(torch, name)(b, dim)
    assert torch.equal(y.values, want.values) and torch.equal(y.indices, want.indices) and y.indices.dtype == torch.int64
    dy = torch.randn(shape)
    y.values.backward(dy)
    want.values.backward(dy)
    torch.testing.assert_close(a.grad, b.grad)


def test_running_extrema_of_what_is_no_number():
    nan, inf = math.nan, math.inf
    for row in ([1.0, nan, 5.0, nan, 9.0], [-inf, -inf, 1.0, inf, inf], [nan] * 3, [0.0, -0.0, 0.0]):
        x = torch.tensor(row)
        for name in ("cummax", "cummin"):
            y, want = getattr(vt, name)(x, 0), getattr(torch, name)(x, 0)
            assert torch.equal(y.indices, want.indices), (name, row)
            assert torch.equal(y.values.nan_to_num(7.5), want.values.nan_to_num(7.5)), (name, row)
    with pytest.raises(UnsupportedError):
        vt.cummax(torch.arange(4), 0)
    with pytest.raises(OutOfRangeError):
        vt.cummax(torch.ones(4), 1)


def test_convert_takes_the_modules():
    nn = torch.nn
    net = nn.Sequential(nn.PixelUnshuffle(2), nn.ChannelShuffle(4), nn.LocalResponseNorm(5), nn.PixelShuffle(2))
    ours, _ = vt.convert(net)
    assert all(type(module).__module__.startswith("verdigris") for module in ours)
    x = tensor(2, 3, 8, 6)
    torch.testing.assert_close(ours(x), net(x))


@pytest.mark.parametrize("last", [False, True])
def test_a_compiler_sees_shapes_and_formats(last):
    x = tensor(2, 12, 6, 4, last=last)
    calls = [
        lambda x: vt.pixel_shuffle(x, 2),
        lambda x: vt.pixel_unshuffle(x, 2),
        lambda x: vt.channel_shuffle(x, 3),
        lambda x: vt.local_response_norm(x, 5),
        lambda x: vt.cummax(x, 1)[1],
    ]
    for call in calls:
        y, want = torch.compile(call, backend="aot_eager", fullgraph=True)(x), call(x)
        assert torch.equal(y, want) and y.stride() == want.stride()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        for call in calls:
            y, want = call(fake), None
            with torch.utils._python_dispatch._disable_current_modes():
                want = call(x)
            assert (y.shape, y.dtype, y.stride()) == (want.shape, want.dtype, want.stride())
