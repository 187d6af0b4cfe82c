"""Windows as columns, and columns added up to images, beside PyTorch's."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from conftest import close

import verdigris as vd
import verdigris.torch as vt
from torch.nn import functional as F

torch.set_num_threads(1)

#: Image, kernel_size, dilation, padding, stride.
FORMS = [
    ((4, 4), 2, 1, 0, 2),
    ((7, 9), 3, 1, 1, 1),
    ((7, 9), (3, 2), (2, 3), (2, 1), 1),
    ((8, 11), (3, 5), 1, (1, 2), (2, 3)),
    ((9, 9), 3, 2, 2, 2),
    ((12, 10), (2, 3), (3, 2), (0, 4), (2, 3)),
    ((6, 6), 1, 1, 0, 1),
    ((6, 7), 1, 1, 1, 2),
    ((5, 5), 5, 1, 0, 1),
    ((5, 5), 2, 1, 0, 4),
    ((5, 6), 2, 1, 3, 1),
    ((3, 10), (2, 3), (1, 2), (1, 0), (5, 4)),
    ((16, 16), 16, 1, 0, 16),
]


@pytest.mark.parametrize("form, dtype", list(itertools.product(range(len(FORMS)), ["float64", "float32", "bfloat16"])))
def test_beside_pytorch(form, dtype):
    image, *taps = FORMS[form]
    dtype = getattr(torch, dtype)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, *image).to(dtype).to(memory_format=memory_format).requires_grad_()
        columns, want = vt.unfold(x, *taps), F.unfold(x.detach(), *taps)
        assert torch.equal(columns, want) and columns.is_contiguous()
        cotangent = torch.randn(want.shape).to(dtype)
        (dx,) = torch.autograd.grad(columns, x, cotangent)
        close(dx, F.fold(cotangent.double(), image, *taps), 2)
    folded = cotangent.clone().requires_grad_()
    y = vt.fold(folded, image, *taps)
    assert y.dtype == dtype and y.is_contiguous()
    close(y, F.fold(cotangent.double(), image, *taps), 2)
    dy = torch.randn(y.shape).to(dtype)
    (back,) = torch.autograd.grad(y, folded, dy)
    assert torch.equal(back, F.unfold(dy, *taps))


def test_of_one_image_and_of_none():
    x = torch.randn(3, 5, 6)
    columns = vt.unfold(x, 2)
    assert torch.equal(columns, F.unfold(x, 2))
    close(vt.fold(columns, (5, 6), 2), F.fold(columns.double(), (5, 6), 2))
    nothing = torch.empty(0, 3, 5, 6)
    assert vt.unfold(nothing, 2).shape == (0, 12, 20) and vt.fold(torch.empty(0, 12, 20), (5, 6), 2).shape == (0, 3, 5, 6)


def test_columns_of_any_strides():
    columns = torch.randn(20, 2, 12).permute(1, 2, 0)
    close(vt.fold(columns, (5, 6), 2), F.fold(columns.double(), (5, 6), 2))


def test_what_no_window_holds_is_zero_and_infinities_stay_where_they_are():
    x = torch.zeros(1, 1, 6, 6)
    x[0, 0, 2, 2] = float("inf")
    assert torch.equal(vt.unfold(x, 3, padding=1), F.unfold(x, 3, padding=1))
    columns = vt.unfold(x, 2, stride=3)
    assert torch.equal(vt.fold(columns, (6, 6), 2, stride=3), F.fold(columns, (6, 6), 2, stride=3))
    far = F.unfold(x, 3, padding=1, stride=2)
    assert torch.equal(vt.fold(far, (6, 6), 3, padding=1, stride=2), F.fold(far, (6, 6), 3, padding=1, stride=2))


def test_gradients_of_gradients():
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: vt.unfold(x, (2, 3), 1, 1, 2), (x,))
    assert torch.autograd.gradgradcheck(lambda x: vt.unfold(x, (2, 3), 1, 1, 2).square(), (x,))
    columns = vt.unfold(x.detach(), 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda c: vt.fold(c, (5, 4), 2), (columns,))


def test_compiled_and_as_pytorch_checks_them():
    x = torch.randn(2, 3, 6, 7, requires_grad=True)
    call = lambda x: vt.fold(vt.unfold(x, 3, padding=1, stride=2) * 2, (6, 7), 3, padding=1, stride=2)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(call(x), compiled(x))
    assert torch.equal(*(torch.autograd.grad(f(x).square().sum(), x)[0] for f in (call, compiled)))
    words = "window=3,3 dilation=1,1 padding=1,1 stride=2,2"
    torch.library.opcheck(torch.ops.verdigris.unfold.default, (x, words))
    columns = F.unfold(x.detach(), 3, padding=1, stride=2).requires_grad_()
    torch.library.opcheck(torch.ops.verdigris.fold.default, (columns, words, [6, 7]))


def test_converted():
    model = torch.nn.Sequential(torch.nn.Unfold((2, 3), padding=1, stride=2), torch.nn.Fold((8, 9), (2, 3), padding=1, stride=2))
    x = torch.randn(2, 3, 8, 9)
    ours, report = vt.convert(model)
    assert all(type(module).__module__ == "verdigris.torch.nn" for module in ours)
    close(ours(x), model(x.double()))


def test_what_is_refused():
    x = torch.randn(1, 2, 5, 5)
    for match, call in (
        ("unfold of", lambda: vt.unfold(x[0, 0], 2)),
        ("there is one along each dim", lambda: vt.unfold(x, 6)),
        ("kernel_size", lambda: vt.unfold(x, 0)),
        ("stride", lambda: vt.unfold(x, 2, stride=0)),
        ("padding", lambda: vt.unfold(x, 2, padding=-1)),
        ("a number, or two", lambda: vt.unfold(x, (2, 2, 2))),
        ("fold of 15 columns", lambda: vt.fold(torch.randn(1, 8, 15), (5, 5), 2)),
        ("multiple of a window", lambda: vt.fold(torch.randn(1, 7, 16), (5, 5), 2)),
        ("fold of", lambda: vt.fold(x, (5, 5), 2)),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(vd.UnsupportedError, match="floating-point"):
        vt.unfold(x.int(), 2)
