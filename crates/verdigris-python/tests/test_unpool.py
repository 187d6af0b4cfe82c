"""Un-pooling beside PyTorch's, from indices of PyTorch's poolings."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from conftest import close

import verdigris as vd
import verdigris.torch as vt
from torch.nn import functional as F

torch.set_num_threads(1)

#: Extents, kernel_size, stride, padding: windows that do not overlap, so that PyTorch's result is one.
FORMS = [
    ((8,), 2, None, 0),
    ((9,), 3, 4, 1),
    ((8, 6), 2, None, 0),
    ((9, 7), (2, 3), None, (1, 0)),
    ((11, 13), 3, (4, 3), 1),
    ((7, 7), 2, 3, 0),
    ((6, 4, 5), 2, None, 0),
    ((7, 5, 6), (3, 1, 2), None, (1, 0, 1)),
]


def pooled(extents, window, stride, padding, dtype, ours=False):
    spatial = len(extents)
    x = torch.randn(2, 3, *extents).to(dtype)
    y, index = getattr(F, f"max_pool{spatial}d")(x, window, stride, padding, return_indices=True)
    return y, index


@pytest.mark.parametrize("form, dtype, size", list(itertools.product(range(len(FORMS)), ["float64", "float32", "bfloat16"], [True, False])))
def test_beside_pytorch(form, dtype, size):
    extents, *windows = FORMS[form]
    y, index = pooled(extents, *windows, getattr(torch, dtype))
    spatial = len(extents)
    size = extents if size else None
    # Without a size, indices mean another image where the usual size is another one.
    usual = tuple(getattr(F, f"max_unpool{spatial}d")(y, torch.zeros_like(index), *windows).shape[2:])
    if size is None and usual != extents:
        pytest.skip("the usual size is not that of the image")
    results = []
    dy = torch.randn(2, 3, *extents).to(y.dtype)
    for library in (vt, F):
        leaf = y.detach().clone().requires_grad_()
        x = getattr(library, f"max_unpool{spatial}d")(leaf, index, *windows, output_size=size)
        results.append((x, *torch.autograd.grad(x, leaf, dy)))
    for ours, theirs in zip(*results):
        assert ours.dtype == y.dtype and torch.equal(ours, theirs)


def test_from_our_own_indices_in_both_orders():
    x = torch.randn(2, 4, 8, 6)
    for order in (torch.contiguous_format, torch.channels_last):
        y, index = vt.max_pool2d(x.to(memory_format=order), 2, return_indices=True)
        assert torch.equal(vt.max_unpool2d(y, index, 2), F.max_unpool2d(y, index, 2))
        assert torch.equal(vt.max_unpool2d(y, index.int(), 2), F.max_unpool2d(y, index, 2))
        assert torch.equal(vt.max_unpool2d(y[0], index[0], 2), F.max_unpool2d(y, index, 2)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_several_windows_name_is_their_mean(dtype):
    x = torch.randn(2, 3, 9, 9).to(dtype)
    y, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    values = torch.randn(y.shape).to(dtype).requires_grad_()
    flat = index.flatten(2)
    sums = torch.zeros(2, 3, 81, dtype=torch.float64).scatter_add(2, flat, values.detach().double().flatten(2))
    counts = torch.zeros(2, 3, 81, dtype=torch.float64).scatter_add(2, flat, torch.ones_like(flat, dtype=torch.float64))
    assert counts.max() > 1
    found = vt.max_unpool2d(values, index, 3, 2, 1, output_size=(9, 9))
    close(found, (sums / counts.clamp_min(1)).reshape(found.shape))
    # What came of a pooling comes back itself.
    close(vt.max_unpool2d(y, index, 3, 2, 1, output_size=(9, 9)), F.max_unpool2d(y.double(), index, 3, 2, 1, output_size=(9, 9)), 0.2)
    dy = torch.randn(found.shape).to(dtype)
    (dx,) = torch.autograd.grad(found, values, dy)
    close(dx, (dy.double().flatten(2) / counts.clamp_min(1)).gather(2, flat).reshape(dx.shape), 2)


def test_gradients_of_gradients():
    for window, stride in ((2, 2), (3, 2)):
        y, index = F.max_pool2d(torch.randn(1, 2, 7, 7, dtype=torch.float64), window, stride, return_indices=True)
        y.requires_grad_()
        call = lambda y: vt.max_unpool2d(y, index, window, stride, output_size=(7, 7))
        assert torch.autograd.gradcheck(call, (y,)) and torch.autograd.gradgradcheck(lambda y: call(y).square(), (y,))


def test_compiled_and_as_pytorch_checks_them():
    y, index = F.max_pool2d(torch.randn(2, 3, 8, 8), 2, return_indices=True)
    y.requires_grad_()
    call = lambda y: vt.max_unpool2d(y * 2, index, 2)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(call(y), compiled(y))
    assert torch.equal(*(torch.autograd.grad(f(y).square().sum(), y)[0] for f in (call, compiled)))
    words = "window=2,2 stride=2,2 padding=0,0 after=0,0"
    torch.library.opcheck(torch.ops.verdigris.max_unpool.default, (y, index, words, [8, 8]))
    torch.library.opcheck(torch.ops.verdigris.max_unpool_backward.default, (torch.randn(2, 3, 8, 8, requires_grad=True), index, words))


def test_converted():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.unpool = torch.nn.MaxPool2d(2, return_indices=True), torch.nn.MaxUnpool2d(2)

        def forward(self, x):
            return self.unpool(*self.pool(x), output_size=x.shape)

    model, x = Net(), torch.randn(2, 3, 9, 8)
    ours, _ = vt.convert(model)
    assert type(ours.unpool).__module__ == "verdigris.torch.nn" and torch.equal(ours(x), model(x))


def test_of_no_images_and_of_values_that_are_no_numbers():
    assert vt.max_unpool2d(torch.empty(0, 3, 4, 4), torch.empty(0, 3, 4, 4, dtype=torch.int64), 2).shape == (0, 3, 8, 8)
    y, index = F.max_pool2d(torch.randn(1, 1, 4, 4), 2, return_indices=True)
    y[0, 0, 0, 0], y[0, 0, 1, 1] = float("nan"), float("inf")
    torch.testing.assert_close(vt.max_unpool2d(y, index, 2), F.max_unpool2d(y, index, 2), equal_nan=True, rtol=0, atol=0)


def test_what_is_refused():
    y, index = F.max_pool2d(torch.randn(1, 2, 6, 6), 2, return_indices=True)
    for label in (-1, 36, 2):
        wrong = index.clone()
        wrong[0, 1, 0, 0] = label
        with pytest.raises(IndexError, match=rf"index {label} at \(0, 1, 0, 0\)"):
            vt.max_unpool2d(y, wrong, 2)
    for match, call in (
        ("un-pooling over 2", lambda: vt.max_unpool2d(y[0, 0], index[0, 0], 2)),
        ("one for each element", lambda: vt.max_unpool2d(y, index[:, :1], 2)),
        ("one for each element", lambda: vt.max_unpool2d(y, index.float(), 2)),
        ("kernel_size", lambda: vt.max_unpool2d(y, index, (2, 2, 2))),
        ("stride", lambda: vt.max_unpool2d(y, index, 2, 0)),
        ("output_size", lambda: vt.max_unpool2d(y, index, 2, output_size=(8, 6))),
        ("output_size", lambda: vt.max_unpool2d(y, index, 2, output_size=(6,))),
        ("not empty", lambda: vt.max_unpool2d(y[:, :0], index[:, :0], 2)),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(vd.UnsupportedError, match="floating-point"):
        vt.max_unpool2d(y.int(), index, 2)
    with pytest.raises(vd.UnsupportedError, match="2\\^24"):
        vt.max_unpool2d(torch.empty(1, 1, 2048, 2048, device="meta"), torch.empty(1, 1, 2048, 2048, dtype=torch.int64, device="meta"), 2)


@pytest.mark.parametrize("which", ["x", "index", "both"])
def test_expanded_tensors(which):
    """Images that share their places, or their values."""
    pooled, index = torch.nn.functional.max_pool2d(torch.randn(1, 2, 6, 6, dtype=torch.float64), 2, return_indices=True)
    x = pooled.expand(3, -1, -1, -1) if which != "index" else torch.randn(3, 2, 3, 3, dtype=torch.float64)
    index = index.expand(3, -1, -1, -1) if which != "x" else index.repeat(3, 1, 1, 1)
    a, b = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
    y, want = vt.max_unpool2d(a, index, 2), torch.nn.functional.max_unpool2d(b, index.contiguous(), 2)
    assert torch.equal(y, want)
    dy = torch.randn(want.shape, dtype=torch.float64)
    assert torch.equal(torch.autograd.grad(y, a, dy)[0], torch.autograd.grad(want, b, dy)[0])
