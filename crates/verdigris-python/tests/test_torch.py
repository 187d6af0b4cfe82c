"""Functions, operators and modules for PyTorch on the CPU, with PyTorch as the other opinion (in f64, where rounding is judged)."""

import contextlib
import copy
import inspect
import itertools
import re
import threading

import pytest
import torch
from conftest import close, error_of

import verdigris as vd
import verdigris.torch as vt
from verdigris import _native
from torch.utils._python_dispatch import TorchDispatchMode

F = torch.nn.functional
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def compare(ours, theirs, inputs, slack=1.0):
    """Result and gradients of both, ours in the inputs' type, theirs in f64 of the same numbers; memory formats as PyTorch's own are."""
    mine = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs]
    y, truth = ours(*mine), theirs(*wide)
    close(y, truth, slack)
    gradient = torch.randn_like(truth).to(y.dtype)
    y.backward(gradient)
    truth.backward(gradient.double())
    for one, other in zip(mine, wide):
        if one.is_floating_point():
            close(one.grad, other.grad, slack)
    return y, truth


CONVS = {
    "plain": dict(x=(2, 6, 9, 8), w=(4, 6, 3, 3)),
    "strided": dict(x=(2, 6, 9, 8), w=(4, 6, 3, 2), stride=(2, 3), padding=(1, 0)),
    "dilated": dict(x=(1, 3, 11, 12), w=(5, 3, 3, 3), dilation=2, padding="same"),
    "grouped": dict(x=(3, 8, 7, 7), w=(12, 2, 3, 3), groups=4, padding=1),
    "depthwise": dict(x=(2, 6, 8, 8), w=(6, 1, 5, 5), groups=6, padding=2),
    "pointwise": dict(x=(2, 9, 5, 5), w=(7, 9, 1, 1)),
    "first": dict(x=(1, 1, 9, 9), w=(3, 1, 3, 3), padding=1),
    "even same": dict(x=(1, 2, 6, 7), w=(2, 2, 2, 4), padding="same"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_conv2d(name, dtype, format):
    keywords = dict(CONVS[name])
    x = torch.randn(keywords.pop("x"), dtype=dtype).to(memory_format=format)
    w = (torch.randn(keywords.pop("w"), dtype=dtype) / 4).to(memory_format=format)
    b = torch.randn(w.shape[0], dtype=dtype)
    y, truth = compare(lambda *t: vt.conv2d(*t, **keywords), lambda *t: F.conv2d(*t, **keywords), [x, w, b], 2.0)
    assert y.stride() == truth.stride()
    with torch.no_grad():
        close(vt.conv2d(x, w, **keywords), F.conv2d(x.double(), w.double(), **keywords), 2.0)


@pytest.mark.parametrize("spatial", [1, 3])
def test_conv_in_one_and_three_dims(spatial):
    ours, theirs = getattr(vt, f"conv{spatial}d"), getattr(F, f"conv{spatial}d")
    x, w, b = torch.randn(2, 4, *[7] * spatial), torch.randn(6, 2, *[3] * spatial), torch.randn(6)
    run = dict(stride=2, padding=1, groups=2)
    compare(lambda *t: ours(*t, **run), lambda *t: theirs(*t, **run), [x, w, b], 2.0)
    close(ours(x[0], w, b, **run), theirs(x[0].double(), w.double(), b.double(), **run), 2.0)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_conv_transpose(spatial):
    ours, theirs = getattr(vt, f"conv_transpose{spatial}d"), getattr(F, f"conv_transpose{spatial}d")
    x, w, b = torch.randn(2, 4, *[5] * spatial), torch.randn(4, 3, *[3] * spatial), torch.randn(6)
    run = dict(stride=2, padding=1, output_padding=1, groups=2)
    compare(lambda *t: ours(*t, **run), lambda *t: theirs(*t, **run), [x, w, b], 2.0)
    with pytest.raises(vd.GraphError, match="less than one of them"):
        ours(x, w, b, stride=2, dilation=3, output_padding=3, groups=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_conv_transpose_beyond_the_stride(dtype, padding):
    """Of more output than the stride, what lies in the padding first, then the bias alone."""
    x, w, b = torch.randn(2, 3, 5, 4, dtype=dtype), torch.randn(3, 4, 2, 3, dtype=dtype) / 4, torch.randn(4, dtype=dtype)
    run = dict(stride=(2, 1), dilation=(4, 5), padding=padding, output_padding=(3, 4))
    compare(lambda *t: vt.conv_transpose2d(*t, **run), lambda *t: F.conv_transpose2d(*t, **run), [x, w, b], 2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (2, 3, 4, 7)], ids=str)
def test_linear(dtype, shape):
    x, w, b = torch.randn(shape, dtype=dtype), torch.randn(9, 7, dtype=dtype), torch.randn(9, dtype=dtype)
    compare(vt.linear, F.linear, [x, w, b], 2.0)


def test_linear_of_what_does_not_fold():
    x, w = torch.randn(4, 3, 5, 7).permute(2, 0, 1, 3)[:, ::2], torch.randn(9, 7)
    compare(lambda x, w: vt.linear(x, w), lambda x, w: F.linear(x, w), [x, w])
    close(vt.linear(x, w), F.linear(x.double(), w.double()))


def test_any_strides():
    x = torch.randn(9, 4, 8, 2).permute(3, 1, 0, 2)[:, :, ::2]
    w = torch.randn(3, 3, 4, 6).permute(3, 2, 0, 1)
    assert not x.is_contiguous()
    close(vt.conv2d(x, w, padding=1), F.conv2d(x.double(), w.double(), padding=1), 2.0)
    close(vt.conv2d(x[:1].expand(3, -1, -1, -1), w), F.conv2d(x[:1].expand(3, -1, -1, -1).double(), w.double()), 2.0)
    close(vt.gelu(x), F.gelu(x.double()))


POOLS = list(itertools.product([1, 2, 3], [(2, None, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0)], [False, True]))


@pytest.mark.parametrize("spatial,windows,ceil", POOLS, ids=str)
def test_pools(spatial, windows, ceil):
    window, stride, padding = windows
    x = torch.randn(2, 3, *[8, 7, 6][:spatial])
    ours, theirs = getattr(vt, f"max_pool{spatial}d"), getattr(F, f"max_pool{spatial}d")
    run = dict(stride=stride, padding=padding, ceil_mode=ceil)
    compare(lambda x: ours(x, window, **run), lambda x: theirs(x, window, **run), [x])
    y, index = ours(x, window, return_indices=True, **run)
    y_theirs, index_theirs = theirs(x, window, return_indices=True, **run)
    assert torch.equal(y, y_theirs) and torch.equal(index, index_theirs)
    ours, theirs = getattr(vt, f"avg_pool{spatial}d"), getattr(F, f"avg_pool{spatial}d")
    for counts in (False, True):
        settings = dict(run, count_include_pad=counts)
        compare(lambda x: ours(x, window, **settings), lambda x: theirs(x, window, **settings), [x])


def test_pools_keep_channels_last():
    x = torch.randn(2, 5, 8, 8).to(memory_format=torch.channels_last)
    for ours, theirs in ((vt.max_pool2d, F.max_pool2d), (vt.avg_pool2d, F.avg_pool2d)):
        y, truth = compare(lambda x: ours(x, 3, 2, 1), lambda x: theirs(x, 3, 2, 1), [x])
        assert y.stride() == truth.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", [dict(ceil_mode=True), dict(divisor_override=5), dict(ceil_mode=True, divisor_override=-3)], ids=str)
def test_average_pools_with_other_divisors(dtype, run):
    x = torch.randn(2, 3, 8, 7, dtype=dtype)
    for settings in (dict(kernel_size=3, stride=2, padding=1, **run), dict(kernel_size=(4, 3), stride=(3, 2), **run)):
        compare(lambda x: vt.avg_pool2d(x, **settings), lambda x: F.avg_pool2d(x, **settings), [x], 2.0)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_adaptive_pools(spatial):
    x, out = torch.randn(2, 3, *[7] * spatial), [3, None, 1][:spatial]
    ours, theirs = getattr(vt, f"adaptive_avg_pool{spatial}d"), getattr(F, f"adaptive_avg_pool{spatial}d")
    out = out[0] if spatial == 1 else out
    compare(lambda x: ours(x, out), lambda x: theirs(x, out), [x])
    ours, theirs = getattr(vt, f"adaptive_max_pool{spatial}d"), getattr(F, f"adaptive_max_pool{spatial}d")
    compare(lambda x: ours(x, out), lambda x: theirs(x, out), [x])


ACTIVATIONS = {
    "relu": (vt.relu, F.relu),
    "relu6": (vt.relu6, F.relu6),
    "leaky_relu": (lambda x: vt.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.2)),
    "gelu": (vt.gelu, F.gelu),
    "gelu_tanh": (lambda x: vt.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "silu": (vt.silu, F.silu),
    "hardswish": (vt.hardswish, F.hardswish),
    # PyTorch's own has a sixth in f32, in f64 too.
    "hardsigmoid": (vt.hardsigmoid, lambda x: F.relu6(x + 3) / 6),
    "hardtanh": (vt.hardtanh, F.hardtanh),
    "mish": (vt.mish, F.mish),
    "sigmoid": (vt.sigmoid, torch.sigmoid),
    "tanh": (vt.tanh, torch.tanh),
    "elu": (lambda x: vt.elu(x, 0.7), lambda x: F.elu(x, 0.7)),
    "softplus": (vt.softplus, F.softplus),
    "softplus_sharp": (lambda x: vt.softplus(x, 2.5, 1.0), lambda x: F.softplus(x, 2.5, 1.0)),
    "softplus_turned": (lambda x: vt.softplus(x, -1.5, 3.0), lambda x: F.softplus(x, -1.5, 3.0)),
    "prelu": (lambda x: vt.prelu(x, torch.tensor([0.25], dtype=x.dtype)), lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype))),
    "rrelu": (lambda x: vt.rrelu(x, 0.125, 0.25), lambda x: F.rrelu(x, 0.125, 0.25)),
    "selu": (vt.selu, F.selu),
    "celu": (vt.celu, F.celu),
    # Of others the gradient of PyTorch's takes the inverse in f32, in f64 too.
    "celu_narrow": (lambda x: vt.celu(x, 0.25), lambda x: F.celu(x, 0.25)),
    "logsigmoid": (vt.logsigmoid, F.logsigmoid),
    "hardshrink": (lambda x: vt.hardshrink(x, 0.75), lambda x: F.hardshrink(x, 0.75)),
    "softshrink": (lambda x: vt.softshrink(x, 0.75), lambda x: F.softshrink(x, 0.75)),
    "tanhshrink": (vt.tanhshrink, F.tanhshrink),
    "softsign": (vt.softsign, F.softsign),
    "threshold": (lambda x: vt.threshold(x, 0.25, -2.0), lambda x: F.threshold(x, 0.25, -2.0)),
    "softmin": (lambda x: vt.softmin(x, 1), lambda x: F.softmin(x, 1)),
    "softmax": (lambda x: vt.softmax(x, 1), lambda x: F.softmax(x, 1)),
    "log_softmax": (lambda x: vt.log_softmax(x, -2), lambda x: F.log_softmax(x, -2)),
    "layer_norm": (lambda x: vt.layer_norm(x, (6, 4)), lambda x: F.layer_norm(x, (6, 4))),
    "rms_norm": (lambda x: vt.rms_norm(x, (4,), eps=1e-3), lambda x: F.rms_norm(x, (4,), eps=1e-3)),
    "group_norm": (lambda x: vt.group_norm(x, 5), lambda x: F.group_norm(x, 5)),
    "instance_norm": (vt.instance_norm, F.instance_norm),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype):
    ours, theirs = ACTIVATIONS[name]
    x = 3 * torch.randn(3, 5, 6, 4, dtype=dtype)
    for given in (x, x.to(memory_format=torch.channels_last)):
        y, _ = compare(ours, theirs, [given], 2.0)
        assert y.stride() == given.stride()


EDGES = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, float("inf"), -float("inf"), 0.3, -0.3, 100.0, -100.0, 1e-3, -1e-3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["prelu", "rrelu", "selu", "celu", "logsigmoid", "hardshrink", "softshrink", "tanhshrink", "softsign", "threshold"])
def test_edges_of_activations(name, dtype):
    """Zeros of both signs, infinities, and what stands at a kink or a step, where the gradient is that of PyTorch's side; in the type itself, in which PyTorch compares too. 0.3 of
    f16 and bf16 is above 0.3."""
    weight, beside = torch.tensor([0.25], dtype=dtype), {"hardshrink": [(0.5,), (0.3,), (0.0,), (-1.0,)], "softshrink": [(0.5,), (0.3,), (0.0,)]}
    beside |= {"threshold": [(0.5, 2.0), (0.3, -1.0), (0.0, 0.0)], "prelu": [(weight,)]}
    for run in beside.get(name, [()]):
        mine, other = (torch.tensor(EDGES, dtype=dtype, requires_grad=True) for _ in range(2))
        y, right = getattr(vt, name)(mine, *run), getattr(F, name)(other, *run)
        # PyTorch rounds each function that it composes others of.
        slack = dict(rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps, equal_nan=True)
        torch.testing.assert_close(y, right, **slack)
        (gradient,), (wanted,) = torch.autograd.grad(y.sum(), mine), torch.autograd.grad(right.sum(), other)
        if name == "softshrink":
            # PyTorch's gradient compares with a lambda of the type, its result with one that is not rounded to it; ours is 1 where the result is not 0.
            wanted = (right != 0).to(dtype)
        torch.testing.assert_close(gradient, wanted, **slack)
        nothing = getattr(vt, name)(torch.tensor([float("nan")], dtype=dtype), *run)
        assert nothing.isnan().all()
    if name in ("hardshrink", "softshrink", "threshold"):
        # What is constant lets nothing of its gradient through, not even an infinite one.
        x = torch.zeros(3, dtype=dtype, requires_grad=True)
        assert torch.equal(torch.autograd.grad(getattr(vt, name)(x, *beside[name][0]), x, torch.full_like(x, float("inf")))[0], torch.zeros_like(x))


PRELUS = [((2, 4, 6), 4), ((2, 4, 6), 1), ((3, 4, 2, 5), 4), ((5, 3), 3), ((5,), 1), ((), 1), ((1, 1), 1), ((0, 4, 6), 4), ((0, 4, 6), 1), ((3, 0, 2), 0), ((2, 3, 2, 2, 3), 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, slopes", PRELUS, ids=str)
def test_prelu(shape, slopes, dtype):
    x, w = torch.randn(shape, dtype=dtype), torch.randn(slopes, dtype=dtype)
    wide = torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2] if shape else x
    for given in [x, x.mT if x.dim() == 2 and shape[0] == shape[1] else x, wide, *([x.to(memory_format=torch.channels_last)] if len(shape) == 4 else [])]:
        y, truth = compare(vt.prelu, F.prelu, [given, w], 4.0)
        assert y.stride() == F.prelu(given, w).stride() or 0 in shape
    if dtype == torch.float64 and 0 not in shape:
        assert torch.autograd.gradcheck(vt.prelu, (x.requires_grad_(), w.requires_grad_()))


def test_prelu_is_one_node_and_its_gradients_one_call():
    x, w = torch.randn(3, 4, 5, requires_grad=True), torch.full((4,), 0.25, requires_grad=True)
    y = vt.prelu(x, w)
    assert type(y.grad_fn).__name__ == "Verdigris_preluBackward" and len({next for next, _ in y.grad_fn.next_functions}) == 2
    for asked in ([x], [w], [x, w]):
        for mine, right in zip(torch.autograd.grad(y, asked, torch.ones_like(y), retain_graph=True), torch.autograd.grad(F.prelu(x, w), asked, torch.ones_like(y))):
            torch.testing.assert_close(mine, right)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = vt.prelu(x, w)
    assert y.dtype == torch.bfloat16
    # Parameters have gradients in their own type, rounded once.
    gradients = torch.autograd.grad(y.sum(), (x, w))
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2
    low = x.detach().bfloat16().double()
    torch.testing.assert_close(gradients[1], torch.where(low > 0, 0.0, low).sum((0, 2)).float(), rtol=1e-6, atol=1e-6)
    assert vt.prelu(x, torch.tensor(0.5)).shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, dim", [((4, 6), -1), ((2, 4, 3, 5), 1), ((2, 4, 3, 6), -1), ((2, 4, 3, 6), 0), ((2,), 0), ((0, 4), 1), ((3, 0), 1), ((3, 2, 0), 1), ((2, 3, 4, 2, 3), 2)])
def test_glu(shape, dim, dtype):
    x = 3 * torch.randn(shape, dtype=dtype)
    wide = torch.randn(*shape[:-1], 3 * shape[-1], dtype=dtype)[..., ::3]
    for given in [x, wide, *([x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)] if len(shape) == 4 else [])]:
        y, _ = compare(lambda x: vt.glu(x, dim), lambda x: F.glu(x, dim), [given], 2.0)
        assert y.stride() == F.glu(given, dim).stride() or 0 in shape
    # The gradient of the result may lie in another way.
    if len(shape) == 4:
        mine, other = x.clone().requires_grad_(), x.double().clone().requires_grad_()
        y = vt.glu(mine, dim)
        dy = torch.randn_like(y).to(memory_format=torch.channels_last)
        y.backward(dy), F.glu(other, dim).backward(dy.double())
        close(mine.grad, other.grad, 2.0)
    leaf = x.clone().requires_grad_()
    y = vt.glu(leaf, dim)
    torch.library.opcheck(torch.ops.verdigris.glu_backward.default, (torch.empty_like(y).fill_(1.0).detach(), leaf.detach(), f"axis={dim % leaf.dim()}"))
    assert type(y.grad_fn).__name__ == "Verdigris_gluBackward" and y.grad_fn.next_functions[0][0].variable is leaf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_slopes(dtype):
    """Each follows from the state and the element's number as what dropout drops, in every memory format, and is drawn again in the gradient."""
    from test_dropout import uniform

    state = torch.tensor([5, -7, 3, 0], dtype=torch.int32)
    x = torch.randn(3, 5, 4, 6, dtype=dtype)
    slopes = 0.1 + torch.tensor(uniform(state.tolist(), x.numel()), dtype=torch.float64).reshape(x.shape) * 0.4
    for given in (x, x.to(memory_format=torch.channels_last)):
        run = lambda x: vt.rrelu(x, 0.1, 0.5, training=True, state=state)
        y, _ = compare(run, lambda x: torch.where(x > 0, x, slopes * x), [given], 2.0)
        assert y.stride() == given.stride()
    leaf = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: vt.rrelu(x, 0.1, 0.5, True, state=state), (leaf,))
    assert torch.autograd.gradgradcheck(lambda x: vt.rrelu(x, 0.1, 0.5, True, state=state).pow(3), (leaf,))
    torch.manual_seed(3)
    first, second = (vt.rrelu(-torch.ones(8, 9), training=True) for _ in range(2))
    assert not torch.equal(first, second) and -1 / 3 <= first.min() < first.max() <= -1 / 8
    torch.manual_seed(3)
    assert torch.equal(vt.rrelu(-torch.ones(8, 9), training=True), first)
    assert vt.rrelu(torch.empty(0, 3), training=True).shape == (0, 3)
    torch.library.opcheck(torch.ops.verdigris.rrelu.default, (torch.randn(3, 4, requires_grad=True), state, "lower=0.1 upper=0.5"))


#: Normalizations with vectors: the dims of the input, those of the vectors, and both functions.
NORMS = {
    "layer": ((5, 7, 12), (12,), lambda f, x, w, b: f.layer_norm(x, (12,), w, b, 1e-4)),
    "layer over two": ((5, 4, 6), (4, 6), lambda f, x, w, b: f.layer_norm(x, (4, 6), w, b)),
    "group": ((3, 6, 4, 5), (6,), lambda f, x, w, b: f.group_norm(x, 3, w, b)),
    "group of one image": ((1, 4, 7), (4,), lambda f, x, w, b: f.group_norm(x, 2, w, b, 1e-3)),
    "instance": ((2, 5, 4, 6), (5,), lambda f, x, w, b: f.instance_norm(x, weight=w, bias=b)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, dtype):
    shape, vector, call = NORMS[name]
    x, w, b = 2 * torch.randn(shape, dtype=dtype) + 1, torch.randn(vector, dtype=dtype), torch.randn(vector, dtype=dtype)
    given = [x, x.to(memory_format=torch.channels_last)] if x.dim() == 4 else [x]
    for x in given:
        y, _ = compare(lambda x, w, b: call(vt, x, w, b), lambda x, w, b: call(F, x, w, b), [x, w, b], 4.0)
        assert y.stride() == x.stride()


def test_norms_that_pytorch_refuses():
    x = torch.randn(2, 6, 4)
    for refused in (
        lambda: vt.layer_norm(x, (6,)),
        lambda: vt.layer_norm(x, ()),
        lambda: vt.layer_norm(x, (4,), torch.ones(6)),
        lambda: vt.rms_norm(x, 6),
        lambda: vt.group_norm(x, 4),
        lambda: vt.group_norm(x, 2, torch.ones(4)),
        lambda: vt.instance_norm(x[..., :1]),
    ):
        with pytest.raises(vd.GraphError):
            refused()


def test_the_gradients_of_a_norm_are_one_plan():
    x, w, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = vt.layer_norm(x, (8,), w, b)
    dy = torch.randn(4, 8)
    for asked in ([x], [w], [b], [x, w], [w, b], [x, w, b]):
        ours = torch.autograd.grad(y, asked, dy, retain_graph=True)
        theirs = torch.autograd.grad(F.layer_norm(x, (8,), w, b), asked, dy)
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other)


def test_modules_of_norms_are_swapped():
    network = torch.nn.Sequential(
        torch.nn.GroupNorm(2, 4),
        torch.nn.InstanceNorm2d(4, affine=True),
        torch.nn.InstanceNorm2d(4, track_running_stats=True),
        torch.nn.LayerNorm([4, 3, 3]),
        torch.nn.RMSNorm(3),
    )
    converted, report = vt.convert(network)
    assert list(report.swapped.values()) == ["GroupNorm", "InstanceNorm2d", "InstanceNorm2d", "LayerNorm", "RMSNorm"] and not report.kept
    assert list(converted.state_dict()) == list(network.state_dict())
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(converted(x), network(x))
    single = torch.nn.InstanceNorm1d(4)
    torch.testing.assert_close(vt.convert(single)[0](x[0, :, 0]), single(x[0, :, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("affine", [False, True])
def test_running_statistics_of_instances(dtype, momentum, affine):
    """Two steps of training and one of inference, in both memory formats, beside PyTorch's in f64."""
    base = torch.nn.InstanceNorm2d(3, momentum=momentum, affine=affine, track_running_stats=True)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.uniform_(0.5, 2.0)
    ours, theirs = vt.convert(base)[0], copy.deepcopy(base).double()
    results = []
    for step in range(3):
        x = (torch.randn(4, 3, 5, 6) * 3 + 1).to(dtype)
        x = x.to(memory_format=torch.channels_last) if step == 1 else x
        leaves = [x.detach().requires_grad_(), x.double().detach().requires_grad_()]
        for network, leaf in zip((ours, theirs), leaves):
            network.train(step < 2)
            network.zero_grad()
            y = network(leaf)
            y.backward(torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape))
            results.append((y, leaf.grad, *network.buffers(), *(p.grad for p in network.parameters())))
        assert results[-2][0].dtype == dtype
        tolerance = dict(rtol=3e-2, atol=3e-2) if dtype == torch.bfloat16 else dict(rtol=3e-5, atol=3e-5)
        for one, other in zip(results[-2], results[-1], strict=True):
            torch.testing.assert_close(one.to(other.dtype), other, **tolerance)
    assert list(ours.state_dict()) == list(base.state_dict())


def test_running_statistics_of_instances_by_the_function():
    x = torch.randn(2, 3, 4)
    for run in (dict(use_input_stats=False), dict(use_input_stats=True, momentum=0.3)):
        ours, theirs = ([torch.zeros(3), torch.ones(3)] for _ in range(2))
        torch.testing.assert_close(vt.functional.instance_norm(x, *ours, **run), F.instance_norm(x, *theirs, **run))
        torch.testing.assert_close(ours, theirs)
    # Of two channels of a table there are statistics to normalize with, and none of its own.
    torch.testing.assert_close(vt.functional.instance_norm(x[:, :, 0], *ours, use_input_stats=False), F.instance_norm(x[:, :, 0], *theirs, use_input_stats=False))
    kept = [statistic.clone() for statistic in ours]
    assert vt.functional.instance_norm(x[:0], *ours).shape == (0, 3, 4) and all(map(torch.equal, ours, kept))
    for call, match in (
        (lambda: vt.functional.instance_norm(x, use_input_stats=False), "missing"),
        (lambda: vt.functional.instance_norm(x, torch.zeros(3)), "kept together"),
        (lambda: vt.functional.instance_norm(x, torch.zeros(2), torch.ones(2)), "3 channels"),
        (lambda: vt.functional.instance_norm(x[:, :, :1], *ours), "more than one element"),
    ):
        with pytest.raises(vd.GraphError, match=match):
            call()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 6, 3, 5)], ids=str)
def test_cross_entropy(reduction, shape):
    classes = shape[0] if len(shape) == 1 else shape[1]
    labels = torch.randint(classes, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if labels.dim():
        labels.view(-1)[0] = -100
    run = dict(reduction=reduction, label_smoothing=0.1)
    compare(lambda x: vt.cross_entropy(x, labels, **run), lambda x: F.cross_entropy(x, labels, **run), [torch.randn(shape)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction,smoothing", itertools.product(["none", "sum", "mean"], [0.0, 0.2]), ids=str)
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 6, 3, 5)], ids=str)
def test_cross_entropy_with_weights_and_probabilities(dtype, reduction, smoothing, shape):
    axis = 0 if len(shape) == 1 else 1
    labels = torch.randint(shape[axis], shape[:axis] + shape[axis + 1 :])
    weight = (torch.rand(shape[axis]) + 0.5).to(dtype)
    logits, chances = torch.randn(shape).to(dtype), torch.randn(shape).softmax(axis).to(dtype)
    run = dict(reduction=reduction, label_smoothing=smoothing)
    # An index that is ignored may be a class.
    for ignored in (-100, int(labels.view(-1)[-1])):
        if labels.dim():
            labels.view(-1)[0] = ignored
        elif ignored >= 0:
            continue
        compare(
            lambda x: vt.cross_entropy(x, labels, weight, ignore_index=ignored, **run),
            lambda x: F.cross_entropy(x, labels, weight.double(), ignore_index=ignored, **run),
            [logits],
            3.0,
        )
    for w in (None, weight):
        wide = w if w is None else w.double()
        compare(
            lambda x, t: vt.cross_entropy(x, t, w, **run),
            lambda x, t: F.cross_entropy(x, t, wide, **run),
            [logits, chances],
            3.0,
        )


def test_labels_that_are_no_classes():
    logits = torch.randn(3, 4)
    for labels, weight in itertools.product([[0, 4, 1], [0, -1, 1]], [None, torch.ones(4)]):
        with pytest.raises(IndexError, match=r"label (4|-1) of row 1 for 4 classes") as caught:
            vt.cross_entropy(logits, torch.tensor(labels), weight)
        assert isinstance(caught.value, vd.OutOfRangeError)
    ours = vt.cross_entropy(logits, torch.tensor([0, -1, 1]), ignore_index=-1)
    close(ours, F.cross_entropy(logits.double(), torch.tensor([0, -1, 1]), ignore_index=-1))
    # Labels of any strides.
    labels = torch.tensor([[0, 9], [9, 9], [1, 9]])[:, 0]
    with pytest.raises(vd.OutOfRangeError, match="label 9 of row 1"):
        vt.cross_entropy(logits, labels)


def test_softmax_without_dims():
    for ours, theirs in ((vt.softmax, F.softmax), (vt.log_softmax, F.log_softmax)):
        compare(lambda x: ours(x, -1), lambda x: theirs(x, -1), [torch.tensor(3.0)])
        with pytest.warns(UserWarning, match="name it"):
            close(ours(torch.ones(2, 3)), theirs(torch.ones(2, 3).double(), 1))


GRADCHECKS = {
    "conv1d": (lambda x, w, b: vt.conv1d(x, w, b, stride=2, padding=1), [(2, 2, 6), (4, 2, 3), (4,)], True),
    "conv2d": (lambda x, w, b: vt.conv2d(x, w, b, stride=2, padding=1, groups=2), [(1, 4, 4, 4), (2, 2, 3, 3), (2,)], True),
    "conv3d": (lambda x, w, b: vt.conv3d(x, w, b), [(1, 1, 3, 3, 3), (2, 1, 2, 2, 2), (2,)], True),
    "transposed": (
        lambda x, w, b: vt.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        [(1, 2, 3, 3), (2, 2, 3, 3), (2,)],
        True,
    ),
    "linear": (vt.linear, [(2, 3, 4), (5, 4), (5,)], True),
    "avg_pool": (lambda x: vt.avg_pool2d(x, 3, 2, 1), [(1, 2, 5, 5)], True),
    "adaptive": (lambda x: vt.adaptive_avg_pool2d(x, 3), [(1, 2, 5, 5)], True),
    "beyond": (lambda x, w, b: vt.conv_transpose1d(x, w, b, dilation=4, output_padding=3, padding=1), [(1, 2, 3), (2, 2, 3), (2,)], True),
    "divisor": (lambda x: vt.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=4), [(1, 2, 5, 5)], True),
    "ceil": (lambda x: vt.avg_pool2d(x, 3, 2, 1, ceil_mode=True), [(1, 2, 6, 5)], True),
    "relu": (vt.relu, [(2, 4)], True),
    "max_pool": (lambda x: vt.max_pool2d(x, 3, 2, 1), [(1, 2, 5, 5)], False),
    "softmax": (lambda x: vt.softmax(x, 1), [(2, 4)], True),
    "log_softmax": (lambda x: vt.log_softmax(x, 0), [(2, 4)], True),
    "softplus": (lambda x: vt.softplus(x, 2.0, 1.0), [(2, 4)], False),
    "selu": (vt.selu, [(2, 4)], False),
    "celu": (lambda x: vt.celu(x, 0.3), [(2, 4)], False),
    "logsigmoid": (vt.logsigmoid, [(2, 4)], False),
    "hardshrink": (lambda x: vt.hardshrink(x).pow(2), [(2, 4)], True),
    "softshrink": (lambda x: vt.softshrink(x).pow(2), [(2, 4)], True),
    "tanhshrink": (vt.tanhshrink, [(2, 4)], False),
    "softsign": (vt.softsign, [(2, 4)], True),
    "threshold": (lambda x: vt.threshold(x, 0.1, 2.0).pow(2), [(2, 4)], True),
    "glu": (lambda x: vt.glu(x, 1), [(2, 4, 3)], False),
    "prelu": (vt.prelu, [(2, 4, 3), (4,)], True),
    "softmin": (lambda x: vt.softmin(x, 1), [(2, 4)], True),
    "probabilities": (lambda x, t: vt.cross_entropy(x, t, label_smoothing=0.1), [(3, 4), (3, 4)], True),
    "layer_norm": (lambda x, w, b: vt.layer_norm(x, (4,), w, b), [(3, 4), (4,), (4,)], False),
    "group_norm": (lambda x, w, b: vt.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)], False),
    "rms_norm": (lambda x, w: vt.rms_norm(x, (4,), w), [(3, 4), (4,)], False),
    "mish": (vt.mish, [(2, 4)], False),
    "gelu": (vt.gelu, [(2, 4)], False),
    "cross_entropy": (lambda x: vt.cross_entropy(x, torch.tensor([1, -100, 2]), label_smoothing=0.1), [(3, 4)], False),
}


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name):
    function, shapes, twice = GRADCHECKS[name]
    inputs = tuple(double(*shape) for shape in shapes)
    assert torch.autograd.gradcheck(function, inputs)
    if twice:
        assert torch.autograd.gradgradcheck(function, inputs)
    else:
        first, *_ = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        with pytest.raises(vd.UnsupportedError, match="no gradient"):
            first.sum().backward()


OPERATORS = {
    "conv_fprop": ([(2, 4, 6, 6), (3, 4, 3, 3), (3,)], ["stride=1,1 padding=1,1 dilation=1,1 groups=1"]),
    "conv_dgrad": ([(2, 3, 5, 5), (3, 4, 3, 3), (4,)], ["stride=2,2 padding=1,1 dilation=1,1 groups=1", [10, 10]]),
    "linear": ([(3, 4), (5, 4), (5,)], [""]),
    "max_pool": ([(2, 4, 6, 6)], ["window=2,2"]),
    "avg_pool": ([(2, 4, 6, 6)], ["window=2,2 pad=1"]),
    "activation": ([(2, 4)], ["f=silu"]),
    "softmax": ([(2, 4)], ["axis=1 log=0"]),
    "prelu": ([(2, 4, 3), (4,)], [""]),
    "glu": ([(2, 4, 6)], ["axis=1"]),
    "scan": ([(2, 4)], ["f=mul axis=1"]),
    "norm": ([(2, 4), (4,), (4,)], ["kind=layer axes=1 eps=1e-05"]),
    "class_loss": ([(2, 4), (2, 4), (4,)], ["axis=1 reduction=sum targets=probabilities"]),
}

#: Gradients: what is given behind the gradient of the result, and the attributes.
CONV = "stride=1,1 padding=1,1 dilation=1,1 groups=1"
GRADIENTS = {
    "conv x": ([(2, 3, 6, 6), (2, 4, 6, 6), (3, 4, 3, 3), (3,)], f"of=conv_fprop wrt=0|{CONV}", []),
    "conv w": ([(2, 3, 6, 6), (2, 4, 6, 6), (3, 4, 3, 3), (3,)], f"of=conv_fprop wrt=1|{CONV}", []),
    "conv bias": ([(2, 3, 6, 6), (2, 4, 6, 6), (3, 4, 3, 3), (3,)], f"of=conv_fprop wrt=2|{CONV}", []),
    "linear w": ([(2, 3, 5), (2, 3, 4), (5, 4)], "of=linear wrt=1|", []),
    "avg_pool": ([(2, 4, 3, 3)], "of=avg_pool wrt=0|window=2,2 pad=1", [2, 4, 6, 6]),
    "softmax": ([(2, 4), (2, 4)], "of=softmax wrt=0|axis=1 log=0", []),
    "softmin": ([(2, 4), (2, 4)], "of=softmax wrt=0|axis=1 log=0 negative=1", []),
    "prelu x": ([(2, 4, 3), (2, 4, 3), (4,)], "of=prelu wrt=0|", []),
    "prelu weight": ([(2, 4, 3), (2, 4, 3), (4,)], "of=prelu wrt=1|", []),
    "shrink": ([(2, 4), (2, 4)], "of=activation wrt=0|f=soft_shrink lambda=0.5", []),
    "norm x": ([(2, 4), (2, 4), (4,), (4,)], "of=norm wrt=0|kind=layer axes=1 eps=1e-05", []),
    "norm scale": ([(2, 4), (2, 4), (4,), (4,)], "of=norm wrt=1|kind=layer axes=1 eps=1e-05", []),
    "of a gradient": ([(2, 4), (2, 4), (2, 4)], "of=gradient wrt=0|of=softmax wrt=0|axis=1 log=0", []),
}


#: Those whose gradients are refused.
LAST_GRADIENTS = ("norm x", "norm scale")


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_what_they_declare(name):
    shapes, attributes, dims = GRADIENTS[name]
    inputs = [torch.randn(shape, requires_grad=name not in LAST_GRADIENTS) for shape in shapes]
    torch.library.opcheck(torch.ops.verdigris.gradient.default, (*inputs, *[None] * (6 - len(inputs)), attributes, dims))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_what_they_declare(name):
    """PyTorch's own judge: schema, aliases, fake kernels, autograd registration, ahead-of-time dispatch with static and dynamic shapes."""
    shapes, rest = OPERATORS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch.library.opcheck(getattr(torch.ops.verdigris, name).default, (*inputs, *rest))


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(3, 2, 1),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8),
        torch.nn.GELU(),
        torch.nn.ConvTranspose2d(8, 4, 2, stride=2),
        torch.nn.AdaptiveAvgPool2d(3),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 10),
    )


def test_convert():
    model = network()
    ours, report = vt.convert(model)
    assert ours is not model and type(model[0]) is torch.nn.Conv2d and type(ours[0]) is vt.nn.Conv2d
    # What works in place stays, and is part of a chain all the same.
    assert list(report.swapped) == ["0", "1", "3", "4", "5", "6", "7", "9"] and report.chains[""] == ["0 + 1 + 2"]
    assert list(report.kept) == ["2", "8"] and "not computed" in str(report)
    assert list(ours.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(ours.parameters(), model.parameters()))
    x = torch.randn(2, 3, 16, 16)
    model.eval(), ours.eval()
    close(ours(x), model(x).double(), 4.0)
    ours.train(), model.train()
    loss = torch.nn.CrossEntropyLoss()
    gradients = []
    for net in (model, vt.convert(torch.nn.ModuleList([ours]))[0][0]):
        net.zero_grad()
        loss(net(x), torch.tensor([1, 3])).backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for mine, theirs in zip(*gradients):
        assert (mine - theirs).abs().max() < 1e-5


def test_convert_tells_why_not():
    class Mine(torch.nn.Conv2d):
        pass

    model = torch.nn.ModuleDict(
        {
            "mine": Mine(1, 1, 1),
            "weighted": torch.nn.CrossEntropyLoss(weight=torch.ones(3)),
            "ceil": torch.nn.AvgPool2d(2, ceil_mode=True),
            "left": torch.nn.Sequential(torch.nn.Linear(1, 1)),
            "norm": torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
            "linear": torch.nn.Linear(1, 1),
        }
    )
    same, report = vt.convert(model, inplace=True, skip=("left",))
    assert same is model and list(report.swapped) == ["weighted", "ceil", "linear"]
    assert "derived from Conv2d" in report.kept["mine"]
    assert "to be skipped" in report.kept["left.0"]
    assert "Linear" in report.kept["norm"]
    assert list(vt.convert(network(), only={torch.nn.Linear})[1].swapped) == ["9"]


@pytest.mark.parametrize("mode", ["circular", "reflect"])
def test_modules_with_padding_of_other_kinds(mode):
    module = torch.nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    ours, _ = vt.convert(module)
    x = torch.randn(1, 2, 6, 6)
    close(ours(x), module(x).double(), 2.0)


MODULES = {
    "softplus": (torch.nn.Softplus(2.0, 1.5), (2, 5)),
    "prelu": (torch.nn.PReLU(), (2, 5)),
    "prelu of channels": (torch.nn.PReLU(5, 0.1), (2, 5, 3)),
    "selu": (torch.nn.SELU(), (2, 5)),
    "celu": (torch.nn.CELU(0.5), (2, 5)),
    "glu": (torch.nn.GLU(1), (2, 6, 3)),
    "logsigmoid": (torch.nn.LogSigmoid(), (2, 5)),
    "hardshrink": (torch.nn.Hardshrink(0.75), (2, 5)),
    "softshrink": (torch.nn.Softshrink(0.75), (2, 5)),
    "tanhshrink": (torch.nn.Tanhshrink(), (2, 5)),
    "softsign": (torch.nn.Softsign(), (2, 5)),
    "threshold": (torch.nn.Threshold(0.25, -1.0), (2, 5)),
    "rrelu": (torch.nn.RReLU(0.25, 0.75).eval(), (2, 5)),
    "softmin": (torch.nn.Softmin(1), (2, 5)),
    "softmax of channels": (torch.nn.Softmax2d(), (2, 5, 3, 2)),
    "softmax of channels without a batch": (torch.nn.Softmax2d(), (5, 3, 2)),
    "average": (torch.nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=7), (2, 3, 8, 7)),
    "ceil": (torch.nn.AvgPool2d(3, 2, 1, ceil_mode=True), (2, 3, 8, 7)),
    "transposed": (torch.nn.ConvTranspose2d(3, 4, 3, dilation=4, output_padding=2), (1, 3, 5, 5)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_with_all_their_settings(name):
    module, shape = MODULES[name]
    ours, report = vt.convert(module)
    assert not report.kept
    truth = copy.deepcopy(module).double()
    compare(ours, truth, [torch.randn(shape)], 2.0)


@pytest.mark.parametrize("target", [torch.tensor([1, -5, 2, 0]), torch.randn(4, 3, generator=torch.Generator().manual_seed(5)).softmax(1)])
def test_the_loss_module_with_all_its_settings(target):
    weight = torch.tensor([0.5, 2.0, 1.5])
    module = torch.nn.CrossEntropyLoss(weight, ignore_index=-5, label_smoothing=0.1, reduction="sum")
    ours = vt.convert(module)[0]
    theirs = copy.deepcopy(module).double()
    compare(lambda x: ours(x, target), lambda x: theirs(x, target.double() if target.is_floating_point() else target), [torch.randn(4, 3)])


def test_compile():
    model = vt.convert(network())[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 16, 16)
    results = []
    for net in (model, compiled):
        net.zero_grad()
        y = net(x)
        y.square().sum().backward()
        results.append([y, *[p.grad.clone() for p in model.parameters()]])
    for one, other in zip(*results):
        assert torch.allclose(one, other, atol=1e-5)


POINTWISE = {
    **{name: getattr(vt, name) for name in ("relu", "gelu", "silu", "hardswish", "hardsigmoid", "relu6", "mish", "sigmoid", "tanh")},
    "leaky_relu": lambda x: vt.leaky_relu(x, 0.3),
    "gelu by tanh": lambda x: vt.gelu(x, "tanh"),
    "hardtanh": lambda x: vt.hardtanh(x, -0.5, 0.7),
    "elu": lambda x: vt.elu(x, 1.5),
    "softplus": lambda x: vt.softplus(x, 2.0, 1.5),
    **{name: getattr(vt, name) for name in ("selu", "logsigmoid", "hardshrink", "softshrink", "tanhshrink", "softsign", "rrelu")},
    "celu": lambda x: vt.celu(x, 0.5),
    "threshold": lambda x: vt.threshold(x, 0.1, 2.0),
    "glu": lambda x: vt.glu(x, 1),
    "prelu": lambda x: vt.prelu(x, torch.full((4,), 0.25)),
    "softmin": lambda x: vt.softmin(x, 1),
    "softmax": lambda x: vt.softmax(x, 1),
    "log_softmax": lambda x: vt.log_softmax(x, 0),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_the_compiler_gets_what_it_fuses_in_its_own_words(name):
    """Else nothing around an activation would be fused with it. The values are those of the call that is not compiled."""
    torch._dynamo.reset()
    seen = []

    def backend(graph, examples):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph

    w = torch.randn(4, 3, 3, 3)
    net = lambda x: POINTWISE[name](vt.conv2d(x, w)) + 1
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    x = torch.randn(2, 3, 6, 6)
    assert torch.allclose(compiled(x), net(x), atol=1e-5)
    assert [target for target in seen if "verdigris" in target] == ["verdigris.conv_fprop.default"], seen


def test_every_activation_has_words_of_the_compiler():
    told = set(re.findall(r'"f=(\w+)', inspect.getsource(vt.functional)))
    assert told and told <= set(vt._ops._ACTIVATIONS), told - set(vt._ops._ACTIVATIONS)


def test_compile_with_changing_shapes():
    compiled = torch.compile(lambda x, w: vt.relu(vt.conv2d(x, w, padding=1)).sum(), backend="aot_eager", dynamic=True, fullgraph=True)
    w = torch.randn(4, 3, 3, 3, requires_grad=True)
    for size in (6, 9, 12):
        x = torch.randn(2, 3, size, size)
        (got,) = torch.autograd.grad(compiled(x, w), w)
        (want,) = torch.autograd.grad(F.relu(F.conv2d(x, w, padding=1)).sum(), w)
        assert torch.allclose(got, want, atol=1e-4)


def test_modes_see_the_calls():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3, requires_grad=True)
    with Watch():
        vt.conv2d(x, w).sum().backward()
    assert "verdigris.conv_fprop.default" in seen and "verdigris.gradient.default" in seen
    with torch.profiler.profile() as profile:
        vt.conv2d(x, w)
    assert any("verdigris::conv_fprop" in event.key for event in profile.key_averages())


def test_autocast():
    x, w, b = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = vt.conv2d(x, w, b)
        assert y.dtype == torch.bfloat16
        assert vt.linear(torch.randn(2, 3), torch.randn(4, 3)).dtype == torch.bfloat16
        assert vt.softmax(y, 1).dtype == torch.float32
        assert vt.conv2d(x.double(), w.double()).dtype == torch.float64
    y.float().sum().backward()
    assert w.grad.dtype == torch.float32 and b.grad.dtype == torch.float32
    close(y, F.conv2d(x.bfloat16().double(), w.bfloat16().double(), b.bfloat16().double()))


class PassOn(TorchDispatchMode):
    """A mode that changes nothing, and before which calls go through the dispatcher."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_profiled_step_is_the_step():
    """The profiler sees the calls, with their shapes, and changes neither which plans run nor what they give."""
    model, _ = vt.convert(torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.GELU(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 5)))
    x = torch.randn(3, 12)

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    before = step()
    plans = _native.plan_count()
    with torch.profiler.profile(record_shapes=True) as profile:
        during = step()
    assert _native.plan_count() == plans
    assert all(torch.equal(one, other) for one, other in zip(before, during))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["verdigris::linear"] == 2 and counts["verdigris::norm"] == 1, counts
    # Both layers, the activation and the norm, each of which has all of its gradients by one call.
    assert counts["verdigris::gradient"] == 4, counts
    shapes = [event.input_shapes for event in profile.events() if event.name == "verdigris::linear"]
    assert [3, 12] in shapes[0] and [7, 12] in shapes[0], shapes


def test_a_profiled_call_that_fails_ends_its_range():
    with torch.profiler.profile() as profile:
        with pytest.raises(vd.Error):
            vt.linear(torch.randn(2, 3), torch.randn(4, 5))
        vt.relu(torch.randn(3))
    roots = [event for event in profile.events() if event.name == "verdigris::activation"]
    assert roots and all(event.cpu_parent is None or "linear" not in event.cpu_parent.name for event in roots)


@pytest.mark.parametrize("is_dispatched", [False, True], ids=["straight", "through the dispatcher"])
def test_autocast_casts_what_pytorch_casts(is_dispatched):
    """The two ways of a call agree with PyTorch about types, gradients and values."""
    wide, narrow = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(2, 3, 6, 6).bfloat16()
    w = torch.randn(4, 3, 3, 3, requires_grad=True)

    def calls(of):
        yield lambda: of.conv2d(wide, w)
        yield lambda: of.conv2d(narrow, w)
        yield lambda: of.conv2d(wide.half(), w)
        yield lambda: of.conv_transpose2d(of.conv2d(wide, w), w)
        yield lambda: of.linear(wide[0, 0], w[0, 0, :, :1].expand(3, 6))
        yield lambda: of.relu(wide)
        yield lambda: of.relu(narrow)
        yield lambda: of.avg_pool2d(narrow, 2)

    mode = PassOn() if is_dispatched else contextlib.nullcontext()
    with torch.autocast("cpu", dtype=torch.bfloat16), mode:
        ours, plain = [[call() for call in calls(of)] for of in (vt, F)]
    for mine, theirs in zip(ours, plain):
        assert mine.dtype == theirs.dtype and mine.requires_grad == theirs.requires_grad
        assert error_of(mine, theirs) <= 0.02, "both are rounded to bf16"
        if not mine.requires_grad:
            continue
        of = [tensor for tensor in (wide, w) if torch.autograd.grad(theirs.float().sum(), tensor, retain_graph=True, allow_unused=True)[0] is not None]
        for mine_of, theirs_of in zip(*(torch.autograd.grad(y.float().sum(), of) for y in (mine, theirs))):
            assert mine_of.dtype == theirs_of.dtype == torch.float32
            assert error_of(mine_of, theirs_of) <= 0.02


def test_autocast_leaves_alone_what_is_off_or_of_f64():
    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert vt.conv2d(x, w).dtype == torch.float32
        assert vt.conv2d(x.double(), w.double()).dtype == torch.float64


def test_policies():
    assert vt.get_policy() == vd.Policy()
    with vt.policy(precision="ieee") as inner:
        assert vt.get_policy() == inner == vd.Policy(precision="ieee")
        other = []
        thread = threading.Thread(target=lambda: other.append(vt.get_policy()))
        thread.start(), thread.join()
        assert other == [vd.Policy()]
    vt.set_policy(deterministic=True)
    try:
        assert vt.get_policy() == vd.Policy(deterministic=True)
    finally:
        vt.set_policy()
    assert vt.get_policy() == vd.Policy()


def test_plans_are_found_again():
    x, w = torch.randn(1, 3, 5, 5), torch.randn(2, 3, 3, 3)
    vt.conv2d(x, w)
    before = vt.plan_count()
    for _ in range(3):
        vt.conv2d(x.clone(), w.clone())
    assert vt.plan_count() == before
    vt.conv2d(x, w, padding=1)
    assert vt.plan_count() == before + 1
    assert "cpu.conv" in vt.explain("conv_fprop", "stride=1,1 padding=0,0 dilation=1,1 groups=1", x, w)


def test_plans_are_bounded_and_the_oldest_go():
    vt.clear_plans()
    loop = [torch.randn(1, 3, size, 5) for size in range(4, 12)]
    sigmoid = [vt.sigmoid(x) for x in loop]
    count = len(loop)
    for size in range(1, _native.CALL_PLANS + 600):
        vt.relu(torch.empty(size))
        if size % 256 == 0:
            # What a program goes on using stays, whichever thread found it.
            for x in loop:
                vt.sigmoid(x)
        assert vt.plan_count() <= _native.CALL_PLANS
    before = vt.plan_count()
    assert before > _native.CALL_PLANS // 2
    for x, want in zip(loop, sigmoid):
        assert torch.equal(vt.sigmoid(x), want)
    vt.relu(torch.empty(_native.CALL_PLANS + 500))
    assert vt.plan_count() == before, "what was used lately is there"
    y = vt.relu(torch.tensor([-1.0, 2.0]))
    assert vt.plan_count() == before + 1 and y.tolist() == [0.0, 2.0], "what was used long ago is made again"
    vt.clear_plans()
    assert count and vt.plan_count() == 0


@pytest.mark.parametrize("call", ["conv", "transpose", "linear"])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, True, False), (False, True, True), (True, False, True), (False, True, False)])
def test_the_gradients_of_a_layer_are_one_plan(call, wanted):
    """Input, filter and bias in one native call: one plan more, and the bits that each has when it is computed alone."""
    shapes = {
        "conv": [(2, 6, 9, 8), (4, 6, 3, 3), (4,)],
        "transpose": [(2, 6, 5, 4), (6, 4, 3, 3), (4,)],
        "linear": [(3, 7, 6), (5, 6), (5,)],
    }[call]
    function = {"conv": vt.conv2d, "transpose": vt.conv_transpose2d, "linear": vt.linear}[call]
    inputs = [torch.randn(shape) for shape in shapes]

    def gradients(needs):
        leaves = [tensor.clone().requires_grad_(need) for tensor, need in zip(inputs, needs)]
        y = function(*leaves)
        torch.manual_seed(7)
        before = vt.plan_count()
        y.backward(torch.randn_like(y))
        return [leaf.grad for leaf in leaves], vt.plan_count() - before

    vt.clear_plans()
    together, plans = gradients(wanted)
    assert plans == 1
    assert [gradient is not None for gradient in together] == list(wanted)
    for place in (place for place in range(3) if wanted[place]):
        alone, _ = gradients([place == other for other in range(3)])
        assert torch.equal(alone[place], together[place]) and alone[place].stride() == together[place].stride()


def test_the_dispatcher_is_asked_for_one_gradient_at_a_time():
    """A mode sees each, and what it sees are the same numbers."""
    x, w, b = torch.randn(2, 6, 9, 8), torch.randn(4, 6, 3, 3), torch.randn(4)

    class Seen(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.names.append(function.name())
            return function(*arguments, **(keywords or {}))

    def run():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
        vt.conv2d(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    plain = run()
    with Seen():
        seen = run()
    assert Seen.names.count("verdigris::gradient") == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, seen))


def test_what_is_wrong_is_said():
    x, w = torch.randn(1, 3, 5, 5), torch.randn(2, 4, 3, 3)
    with pytest.raises(vd.GraphError, match="channel"):
        vt.conv2d(x, w)
    with pytest.raises(vd.BindingError, match="operands are of one type"):
        vt.linear(torch.randint(5, (2, 3)), torch.randint(5, (2, 3)))
    with pytest.raises(vd.GraphError, match="one number, or one for each"):
        vt.conv2d(x, w, stride=(1, 2, 3))
    with pytest.raises(vd.GraphError, match="dim is 4"):
        vt.softmax(x, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_has_the_eps_of_the_type_that_it_computes_in(dtype):
    """Without an eps, where the values are small enough to tell: forward and gradient, of the function and the module."""
    generator = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(3, 8, generator=generator) * 1e-3).to(dtype), torch.randn(3, 8, generator=generator).to(dtype)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps

    def step(function, x, dy):
        x = x.clone().requires_grad_()
        y = function(x)
        y.backward(dy)
        return y.detach(), x.grad

    right = step(lambda x: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(), x.double(), dy.double())
    ours, _ = vt.convert(torch.nn.RMSNorm(8, elementwise_affine=False))
    for function in (lambda x: vt.rms_norm(x, (8,)), ours, lambda x: torch.nn.functional.rms_norm(x, (8,))):
        for mine, want in zip(step(function, x, dy), right):
            close(mine, want, 4.0)
    # Under autocast it is computed in f32 as well.
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", torch.bfloat16):
            close(vt.rms_norm(x, (8,)).to(dtype), right[0], 4.0)


def test_norms_of_nothing_and_of_one_value():
    """What has no elements has a result, and one value has no deviation, as in PyTorch."""
    plain = torch.nn.functional
    shapes = [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 4, 0), (0, 4, 1), (2, 0, 1), (2, 4, 1), (1, 4, 1), (1, 4), (2, 4), (0, 4), (1, 4, 1, 2), (1, 4, 0, 2)]
    calls = [(name, (lambda f, name=name, words=words: lambda x: getattr(f, name)(x, **words))) for name, words in (("instance_norm", {}), ("group_norm", {"num_groups": 4}), ("group_norm", {"num_groups": 2}))]
    refused = 0
    for shape, (name, call) in itertools.product(shapes, calls):
        if name == "group_norm" and shape[1] == 0:
            continue
        x = torch.randn(shape)
        try:
            want = call(plain)(x.double())
        except ValueError:
            refused += 1
            with pytest.raises(vd.GraphError, match=name):
                call(vt)(x)
        else:
            mine = call(vt)(x)
            assert mine.shape == want.shape
            close(mine, want, 8.0) if mine.numel() else None
    assert refused > 5


@pytest.mark.parametrize("shape", [(0, 4), (2, 4, 0), (0, 4, 3), (2, 4, 0, 3), (1, 4, 0)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_of_nothing_in_training(shape, momentum):
    """A result without elements, gradients of 0, and statistics that stay."""
    kind = torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d
    ours, _ = vt.convert(kind(4, momentum=momentum))
    ours.running_mean.fill_(2.0)
    x = torch.ones(shape, requires_grad=True)
    y = ours(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape and torch.equal(ours.weight.grad, torch.zeros(4)) and torch.equal(ours.bias.grad, torch.zeros(4))
    assert ours.running_mean.eq(2).all() and ours.running_var.eq(1).all() and ours.num_batches_tracked == 1
    add = torch.ones(shape, requires_grad=True)
    vt.batch_norm_act(x, None, None, training=True, add=add, activation="relu").sum().backward()
    assert add.grad.shape == shape


def test_a_chain_of_no_images_in_training():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    ours, report = vt.convert(net)
    assert report.chains
    x = torch.ones(0, 3, 2, 2, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad.shape == x.shape and torch.equal(ours[0].weight.grad, torch.zeros(4, 3, 1, 1)) and ours[1].running_var.eq(1).all()


def test_empty_batches():
    x, w = torch.randn(0, 3, 5, 5, requires_grad=True), torch.randn(2, 3, 3, 3, requires_grad=True)
    y = vt.conv2d(x, w)
    assert y.shape == (0, 2, 3, 3)
    y.sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))
