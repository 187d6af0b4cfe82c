"""Batch normalization for PyTorch on the CPU, with PyTorch in f64 as the other opinion."""

import copy
import itertools

import pytest
import torch
from conftest import close

import verdigris as vd
import verdigris.torch as vt

F = torch.nn.functional
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors(shape, dtype, format=torch.contiguous_format):
    """x, weight, bias, what is added; running mean and variance. What belongs to channels is f32, f64 beside f64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    channels = shape[1]
    x, z = ((torch.randn(shape) + 3).to(dtype).to(memory_format=format) for _ in range(2))
    weight, bias, mean = (torch.randn(channels, dtype=wide) for _ in range(3))
    return (x, weight, bias, z), (mean, torch.rand(channels, dtype=wide) + 0.5)


def theirs(x, weight, bias, z, mean, var, training, relu):
    y = F.batch_norm(x, mean, var, weight, bias, training, 0.2, 1e-3)
    y = y if z is None else y + z
    return y.relu() if relu else y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu, adds", list(itertools.product([False, True], repeat=2)))
def test_results_gradients_and_running_statistics(dtype, format, training, relu, adds):
    given, statistics = tensors((4, 6, 5, 3), dtype, format)
    mine = [tensor.clone().requires_grad_() for tensor in given]
    wide = [tensor.double().requires_grad_() for tensor in given]
    own, other = [tensor.clone() for tensor in statistics], [tensor.double() for tensor in statistics]
    run = dict(training=training, momentum=0.2, eps=1e-3, activation="relu" if relu else None)
    y = vt.batch_norm_act(mine[0], *own, *mine[1:3], add=mine[3] if adds else None, **run)
    truth = theirs(*wide[:3], wide[3] if adds else None, *other, training, relu)
    close(y, truth, 4.0)
    assert y.dtype == dtype and y.stride() == truth.stride()
    for one, true in zip(own, other):
        close(one, true, 4.0)
    gradient = torch.randn_like(truth).to(dtype).to(memory_format=format)
    if relu:
        # What is close to 0 may pass on one side alone.
        gradient = gradient * (truth.abs() > 1e-2)
    y.backward(gradient)
    truth.backward(gradient.double())
    for place, (one, true) in enumerate(zip(mine, wide)):
        if place == 3 and not adds:
            assert one.grad is None
        else:
            close(one.grad, true.grad, 16.0)
            assert one.grad.dtype == one.dtype


BEHIND = {
    "relu6": F.relu6,
    "silu": F.silu,
    # By hand: of f64 the sixth in gradients of PyTorch is one of f32.
    "hardswish": lambda x: x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
    "hardsigmoid": lambda x: (x + 3.0).clamp(0.0, 6.0) / 6.0,
    "mish": F.mish,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", BEHIND)
def test_other_activations(dtype, format, training, activation):
    given, statistics = tensors((4, 6, 5, 3), dtype, format)
    # Far on both sides of 0, where gates are 0 or 1.
    given[1][0] *= 40.0
    mine = [tensor.clone().requires_grad_() for tensor in given[:3]]
    wide = [tensor.double().requires_grad_() for tensor in given[:3]]
    own, other = [tensor.clone() for tensor in statistics], [tensor.double() for tensor in statistics]
    y = vt.batch_norm_act(mine[0], *own, *mine[1:], training=training, momentum=0.2, eps=1e-3, activation=activation)
    normalized = F.batch_norm(wide[0], *other, *wide[1:], training, 0.2, 1e-3)
    truth = BEHIND[activation](normalized)
    close(y, truth, 4.0)
    assert y.dtype == dtype and y.stride() == truth.stride()
    for one, true in zip(own, other):
        close(one, true, 4.0)
    gradient = torch.randn_like(truth).to(dtype).to(memory_format=format)
    if activation != "silu":
        # What is close to a kink may be on either side of it.
        gradient = gradient * (torch.stack([(normalized - kink).abs() for kink in (-3.0, 0.0, 3.0, 6.0)]).amin(0) > 2e-2)
    y.backward(gradient)
    truth.backward(gradient.double())
    for one, true in zip(mine, wide):
        close(one.grad, true.grad, 16.0)
        assert one.grad.dtype == one.dtype


def test_a_sum_has_relu_behind_it_alone():
    x = torch.randn(4, 6, 5)
    with pytest.raises(vd.GraphError, match="behind a sum"):
        vt.batch_norm_act(x, None, None, training=True, add=x, activation="silu")


def test_nothing_further_is_kept_for_an_activation():
    """What plain PyTorch keeps of the normalization, and not what the activation is of."""
    x, kept = torch.randn(8, 6, 5, 4, requires_grad=True), []
    weight, bias = (torch.randn(6, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        vt.batch_norm_act(x, None, None, weight, bias, training=True, activation="silu")
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() > 6] == [x.data_ptr()]


@pytest.mark.parametrize("spatial", [0, 1, 2, 3])
def test_modules(spatial):
    kind = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d][spatial]
    for keywords in [{}, dict(affine=False), dict(momentum=None), dict(track_running_stats=False), dict(eps=0.1, momentum=0.5)]:
        module = kind(5, **keywords)
        ours, report = vt.convert(copy.deepcopy(module))
        assert report.swapped == {"": kind.__name__} and ours.state_dict().keys() == module.state_dict().keys()
        for training in (True, True, False):
            ours.train(training)
            module.train(training)
            x = torch.randn(4, 5, *[3] * spatial) + 1
            close(ours(x), module(x), 8.0)
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                close(ours.state_dict()[name], value, 8.0)
            else:
                assert torch.equal(ours.state_dict()[name], value)
    with pytest.raises(ValueError):
        vt.convert(kind(5))[0](torch.randn(4, 5, 3, 3, 3, 3))


def test_what_pytorch_refuses_is_refused():
    x, mean, var = torch.randn(1, 3, 1, 1), torch.zeros(3), torch.ones(3)
    with pytest.raises(ValueError, match="one value per channel"):
        vt.batch_norm(x, mean, var, training=True)
    with pytest.raises(ValueError, match="missing"):
        vt.batch_norm(x, None, None)
    with pytest.raises((ValueError, RuntimeError), match="4"):
        vt.batch_norm(torch.randn(2, 3, 2), mean, var, torch.ones(4), training=True)
    with pytest.raises(ValueError, match="dims"):
        vt.batch_norm(torch.randn(3), mean, var)
    with pytest.raises(ValueError, match="activation"):
        vt.batch_norm_act(torch.randn(2, 3, 2), mean, var, activation="gelu")
    assert mean.eq(0).all() and var.eq(1).all(), "nothing was written"


def test_some_gradients_alone():
    (x, weight, bias, z), _ = tensors((4, 6, 5), torch.float32)
    for wanted in itertools.product([False, True], repeat=4):
        if not any(wanted):
            continue
        mine = [tensor.clone().requires_grad_(want) for tensor, want in zip((x, weight, bias, z), wanted)]
        wide = [tensor.double().requires_grad_(want) for tensor, want in zip((x, weight, bias, z), wanted)]
        run = dict(training=True, eps=1e-3, add=mine[3], activation="relu")
        vt.batch_norm_act(mine[0], None, None, *mine[1:3], **run).square().sum().backward()
        theirs(*wide, None, None, True, True).square().sum().backward()
        for one, true in zip(mine, wide):
            assert (one.grad is None) == (true.grad is None)
            if one.grad is not None:
                close(one.grad, true.grad, 16.0)


def test_gradcheck():
    inputs = tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(3, 2, 4), (2,), (2,), (3, 2, 4)])
    train = lambda x, w, b: vt.batch_norm(x, None, None, w, b, True)  # noqa: E731
    assert torch.autograd.gradcheck(train, inputs[:3])
    act = lambda x, w, b, z: vt.batch_norm_act(x, None, None, w, b, training=True, add=z, activation="relu")  # noqa: E731
    assert torch.autograd.gradcheck(act, inputs)
    for activation in ("silu", "mish"):
        curved = lambda x, w, b: vt.batch_norm_act(x, None, None, w, b, training=True, activation=activation)  # noqa: B023, E731
        assert torch.autograd.gradcheck(curved, inputs[:3])
    mean, var = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64) + 0.5
    given = lambda x, w, b: vt.batch_norm(x, mean, var, w, b)  # noqa: E731
    assert torch.autograd.gradcheck(given, inputs[:3])
    (first,) = torch.autograd.grad(train(*inputs[:3]).square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(vd.UnsupportedError, match="no gradient"):
        first.sum().backward()


ONE = "eps=1e-05 momentum=0.1 relu=1"


@pytest.mark.parametrize("behind", ["", "|f=silu", "|f=clamp lower=0.0 upper=6.0"])
@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_inference", "batch_norm_backward"])
def test_operators_are_what_they_declare(name, behind):
    (x, weight, bias, z), (mean, var) = tensors((4, 6, 5, 3), torch.float32)
    operator = getattr(torch.ops.verdigris, name).default
    for tensor in (x, weight, bias):
        tensor.requires_grad_(name != "batch_norm_backward")
    one = f"{ONE.removesuffix('1')}0{behind}" if behind else ONE
    arguments = {
        "batch_norm": (x, weight, bias, None if behind else z, mean, var, one),
        "batch_norm_inference": (x, mean, var, weight, bias, None, one),
        "batch_norm_backward": (z, x, weight, mean, var, bias, f"relu={int(not behind)} result=0 wanted=1110{behind}"),
    }
    torch.library.opcheck(operator, arguments[name])


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_compile(activation):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8)

        def forward(self, x):
            y = self.conv(x)
            norm = self.norm
            return vt.batch_norm_act(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=self.training, activation=activation)

    torch._dynamo.reset()
    plain, x = Net(), torch.randn(4, 3, 8, 8)
    compiled = copy.deepcopy(plain)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        plain(x).square().sum().backward()
        run(x).square().sum().backward()
    for (name, one), other in zip(compiled.named_parameters(), plain.parameters()):
        close(one.grad, other.grad, 8.0)
    close(compiled.norm.running_mean, plain.norm.running_mean, 4.0)
    close(compiled.norm.running_var, plain.norm.running_var, 4.0)
    assert not torch.equal(compiled.norm.running_var, torch.ones(8))


def test_autocast():
    norm = vt.convert(torch.nn.BatchNorm2d(4))[0]
    x = torch.randn(4, 4, 3, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16 and norm.running_mean.dtype == torch.float32
    close(y, F.batch_norm(x.double(), None, None, training=True), 2.0)


def test_one_running_statistic_without_the_other():
    for statistics in ((None, torch.ones(3)), (torch.zeros(3), None)):
        for training in (False, True):
            with pytest.raises(vd.GraphError, match="missing"):
                vt.functional.batch_norm(torch.randn(4, 3), *statistics, training=training)
