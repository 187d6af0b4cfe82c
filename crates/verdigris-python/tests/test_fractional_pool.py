"""Fractional max pooling beside PyTorch's, element by element."""

import copy

import pytest

torch = pytest.importorskip("torch")

import verdigris as vd
import verdigris.torch as vt
from torch.nn import functional as F

torch.set_num_threads(1)

SHAPES = [
    ((2, 3, 9, 11), (2, 2), (5, 7)),
    ((1, 4, 12, 7), (3, 2), (10, 6)),
    ((1, 2, 8, 8), (1, 5), (1, 3)),
    ((1, 3, 5, 5), (5, 5), (1, 1)),
    ((2, 1, 6, 7), 4, (3, 2)),
    ((3, 33, 20), 2, (15, 9)),
    ((1, 2, 6, 5, 7), (2, 2, 3), (4, 3, 4)),
    ((2, 6, 9, 5), 2, (3, 7, 2)),
    ((2, 3, 5, 5, 6), (4, 1, 2), (1, 4, 2)),
]


def call(library, x, window, out, samples, **options):
    spatial = 3 if isinstance(out, tuple) and len(out) == 3 else 2
    return getattr(library, f"fractional_max_pool{spatial}d")(x, window, out, return_indices=True, _random_samples=samples, **options)


def planes(x, out):
    spatial = len(out)
    return (*(x.shape[:2] if x.dim() == spatial + 2 else (1, x.shape[0])), spatial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape, window, out", SHAPES)
def test_values_places_and_gradients_are_pytorchs(shape, window, out, dtype):
    torch.manual_seed(len(shape) + sum(shape))
    for samples in (None, 0.0, 1.0 - torch.finfo(dtype).eps):
        x = torch.randn(shape, dtype=dtype)
        samples = torch.rand(planes(x, out), dtype=dtype) if samples is None else torch.full(planes(x, out), samples, dtype=dtype)
        results = []
        for library in (vt.functional, F):
            leaf = x.clone().requires_grad_()
            y, index = call(library, leaf, window, out, samples)
            (dx,) = torch.autograd.grad(y, leaf, torch.arange(1.0, y.numel() + 1, dtype=dtype).reshape(y.shape))
            results.append((y, index, dx))
        for ours, theirs in zip(*results):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


def test_the_same_seed_draws_the_same_windows():
    x = torch.randn(2, 3, 9, 11)
    for call in (lambda library: library.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.5)), lambda library: library.fractional_max_pool3d(x, 2, (1, 5, 6))):
        found = []
        for library in (vt.functional, F):
            torch.manual_seed(3)
            found.append(call(library))
        assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_elements_have_the_windows_of_float32(dtype):
    x, samples = torch.randn(2, 3, 9, 11).to(dtype), torch.rand(2, 3, 2).to(dtype)
    y, index = call(vt.functional, x, 2, (5, 7), samples)
    want, places = call(F, x.float(), 2, (5, 7), samples.float())
    assert y.dtype == dtype and torch.equal(y.float(), want) and torch.equal(index, places)


def test_nan_infinities_and_layouts():
    samples = torch.rand(1, 8, 2)
    x = torch.randn(1, 8, 9, 10)
    x[0, 0, 3, 4], x[0, 1], x[0, 2, 5, 5] = float("nan"), -float("inf"), float("inf")
    want = call(F, x, 3, (4, 5), samples)
    strided = torch.randn(1, 8, 18, 20)
    strided[..., ::2, ::2] = x
    for given in (x, x.to(memory_format=torch.channels_last), strided[..., ::2, ::2]):
        y, index = call(vt.functional, given, 3, (4, 5), samples)
        torch.testing.assert_close(y, want[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(index, want[1])
        assert y.is_contiguous(memory_format=torch.channels_last) == given.is_contiguous(memory_format=torch.channels_last)


def test_an_empty_batch():
    y, index = call(vt.functional, torch.empty(0, 3, 6, 6, requires_grad=True), 2, (3, 3), torch.empty(0, 3, 2))
    assert y.shape == index.shape == (0, 3, 3, 3)
    y.sum().backward()


def test_compiled_and_as_pytorch_checks_operators():
    x, samples = torch.randn(2, 3, 9, 8, requires_grad=True), torch.rand(2, 3, 2)
    f = lambda x: vt.functional.fractional_max_pool2d(x * 2, 2, (5, 4), _random_samples=samples)
    found = []
    for call in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        y = call(x)
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    assert all(torch.equal(*pair) for pair in zip(*found))
    torch.library.opcheck(torch.ops.verdigris.fractional_max_pool.default, (x, samples, "window=2,2 fractional=5,4 index=i64"))


def test_modules_and_convert():
    model = torch.nn.Sequential(torch.nn.FractionalMaxPool2d(2, output_ratio=0.6), torch.nn.Conv2d(3, 4, 1))
    ours, _ = vt.convert(copy.deepcopy(model))
    assert any(isinstance(module, vt.nn.FractionalMaxPool2d) for module in ours.modules())
    x, found = torch.randn(2, 3, 10, 9), []
    for network in (ours, model):
        torch.manual_seed(1)
        found.append(network(x))
    torch.testing.assert_close(*found)
    samples = torch.rand(2, 2, 3)
    x = torch.randn(2, 2, 6, 7, 8)
    for ours, theirs in zip(*(room.FractionalMaxPool3d(2, output_size=(3, 4, 5), return_indices=True, _random_samples=samples)(x) for room in (vt.nn, torch.nn))):
        assert torch.equal(ours, theirs)


def test_samples_beyond_0_and_1_are_the_nearer_of_both():
    x = torch.randn(1, 2, 9, 9)
    for beyond, at in ((-3.0, 0.0), (5.0, 1.0), (float("nan"), 0.0), (float("inf"), 1.0)):
        found = [call(vt.functional, x, 2, (5, 4), torch.full((1, 2, 2), sample)) for sample in (beyond, at)]
        assert all(torch.equal(*pair) for pair in zip(*found))


def test_what_is_refused():
    x, call = torch.randn(2, 3, 9, 8), vt.functional.fractional_max_pool2d
    for match, wrong in (
        ("neither an output_size nor", lambda: call(x, 2)),
        ("output_ratio", lambda: call(x, 2, output_ratio=1.5)),
        ("is at most the size", lambda: call(x, 2, (9, 4))),
        ("kernel_size", lambda: call(x, 0, (5, 4))),
        ("output_size", lambda: call(x, 2, (5, 0))),
        ("_random_samples", lambda: call(x, 2, (5, 4), _random_samples=torch.rand(2, 3, 3))),
        ("_random_samples", lambda: call(x, 2, (5, 4), _random_samples=torch.zeros(2, 3, 2, dtype=torch.int64))),
        ("not empty", lambda: call(x[:, :0], 2, (5, 4))),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
    with pytest.raises(IndexError, match="spatial dims"):
        call(x[0, 0], 2, (5, 4))
    y, samples = torch.randn(1, 1, 9, 8, requires_grad=True), torch.rand(1, 1, 2)
    (dx,) = torch.autograd.grad(call(y, 2, (5, 4), _random_samples=samples).square().sum(), y, create_graph=True)
    with pytest.raises((vd.UnsupportedError, vd.GraphError), match="gather"):
        torch.autograd.grad(dx.sum(), y)
