"""What PyTorch refuses and takes: a table of calls of both, on the CPU. Both refuse by the same kind of exception, or both accept and agree."""

import itertools

import pytest
import torch
from conftest import TOLERANCES, close

import verdigris.torch as vt

F = torch.nn.functional
KINDS = (IndexError, ValueError, TypeError, RuntimeError)


def t(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def labels(*shape, classes=6, dtype=torch.int64):
    return torch.randint(classes, shape).to(dtype)


def convolutions():
    for spatial in (1, 2, 3):
        name = f"conv{spatial}d"
        x, w = t(2, 4, *[6] * spatial), t(4, 4, *[3] * spatial)
        yield name, (x, w), {}
        yield name, (x[0], w), {}
        for run in [
            dict(stride=0),
            dict(stride=-1),
            dict(stride=[2] * spatial),
            dict(stride=[1] * (spatial + 1)),
            dict(padding=-1),
            dict(padding=5),
            dict(dilation=0),
            dict(dilation=-1),
            dict(dilation=3),
            dict(dilation=2, padding=1),
            dict(groups=0),
            dict(groups=-1),
            dict(groups=2),
            dict(groups=3),
            dict(padding="same"),
            dict(padding="same", stride=2),
            dict(padding="valid"),
            dict(padding="all"),
        ]:
            yield name, (x, w), run
        yield name, (x, t(4, 4, *[7] * spatial)), {}
        yield name, (x, t(4, 4, *[7] * spatial)), dict(padding=1)
        yield name, (x, t(4, 3, *[3] * spatial)), {}
        yield name, (x, t(4, 2, *[3] * spatial)), dict(groups=2)
        yield name, (x, t(5, 2, *[3] * spatial)), dict(groups=2)
        yield name, (x, t(0, 4, *[3] * spatial)), {}
        yield name, (x[0], t(0, 4, *[3] * spatial), t(0)), {}
        yield name, (x, t(0, 2, *[3] * spatial)), dict(groups=2)
        yield name, (t(0, 4, *[6] * spatial), t(0, 4, *[3] * spatial)), {}
        yield name, (x, t()), {}
        yield name, (t(0, 4, *[6] * spatial), w), {}
        yield name, (t(0, 4, *[2] * spatial), w), {}
        yield name, (t(2, 4, *[0] * spatial), w), {}
        yield name, (t(2, 4, *[2] * spatial), w), dict(padding=1)
        yield name, (x.unsqueeze(0), w), {}
        yield name, (x[0, 0], w), {}
        yield name, (x, w[0]), {}
        yield name, (x, w, t(4)), {}
        yield name, (x, w, t(1)), {}
        yield name, (x, w, t(5)), {}
        yield name, (x, w, t(2, 2)), {}
        yield name, (x, w, t(4, dtype=torch.float64)), {}
        yield name, (x, w.double()), {}
        yield name, (x.double(), w.double(), t(4, dtype=torch.float64)), {}
        yield name, (x.bfloat16(), w.bfloat16()), {}
        name = f"conv_transpose{spatial}d"
        yield name, (x, w), {}
        yield name, (x[0], w), {}
        for run in [dict(stride=s, dilation=d, output_padding=o, padding=p) for s, d, o, p in itertools.product((1, 2, 3), (1, 2, 4), (0, 1, 2, 3, 4), (0, 1))]:
            yield name, (x, w), run
        for run in [dict(stride=0), dict(stride=-1), dict(padding=-1), dict(dilation=0), dict(output_padding=-1), dict(padding=9), dict(groups=2), dict(groups=3), dict(groups=0)]:
            yield name, (x, w), run
        yield name, (x, t(3, 4, *[3] * spatial)), {}
        yield name, (x, t(4, 0, *[3] * spatial)), {}
        yield name, (t(2, 0, *[6] * spatial), t(0, 4, *[3] * spatial)), {}
        yield name, (t(2, 0, *[6] * spatial), t(0, 0, *[3] * spatial)), {}
        yield name, (x, w, t(4)), dict(stride=1, dilation=3, output_padding=2)
        yield name, (x, w, t(3)), {}
        yield name, (x, w, t(1)), {}
        yield name, (t(0, 4, *[6] * spatial), w), {}
        yield name, (x[0, 0], w), {}
        yield name, (x, w[0]), {}
        yield name, (x, w.double()), {}


def linears():
    x, w = t(3, 7), t(9, 7)
    for arguments in [
        (x, w),
        (x[0], w),
        (x, w, t(9)),
        (x, w, t(1)),
        (x, w, t(8)),
        (x, w, t(9, dtype=torch.float64)),
        (x, w.double()),
        (x, t(9, 6)),
        (x, w[0]),
        (x, t(2, 9, 7)),
        (t(), w),
        (t(0, 7), w),
        (t(3, 0), t(9, 0)),
        (t(3, 0), t(9, 0), t(9)),
        (x, t(0, 7)),
        (x.bfloat16(), w.bfloat16(), t(9, dtype=torch.bfloat16)),
    ]:
        yield "linear", arguments, {}


def pools():
    for spatial, kind in itertools.product((1, 2, 3), ("max", "avg")):
        name = f"{kind}_pool{spatial}d"
        x = t(2, 3, *[7] * spatial)
        for run in [
            dict(kernel_size=2),
            dict(kernel_size=[2] * spatial),
            dict(kernel_size=[2] * (spatial + 1)),
            dict(kernel_size=0),
            dict(kernel_size=-1),
            dict(kernel_size=7),
            dict(kernel_size=8),
            dict(kernel_size=8, ceil_mode=True),
            dict(kernel_size=8, padding=1),
            dict(kernel_size=3, stride=0),
            dict(kernel_size=3, stride=-1),
            dict(kernel_size=3, stride=[2] * spatial),
            dict(kernel_size=3, stride=5),
            dict(kernel_size=3, padding=1),
            dict(kernel_size=3, padding=2),
            dict(kernel_size=2, padding=1),
            dict(kernel_size=2, padding=-1),
            dict(kernel_size=1, padding=1),
            *[
                dict(kernel_size=k, stride=s, padding=p, ceil_mode=True)
                for k, s, p in [(2, 2, 0), (2, 2, 1), (3, 2, 0), (3, 2, 1), (3, 3, 1), (2, 3, 0), (4, 3, 2), (5, 4, 2), (3, 5, 1), (2, 7, 1)]
            ],
        ]:
            yield name, (x,), run
        if kind == "max":
            for run in [
                dict(kernel_size=2, dilation=2),
                dict(kernel_size=2, dilation=0),
                dict(kernel_size=2, dilation=-1),
                dict(kernel_size=2, dilation=7),
                dict(kernel_size=3, dilation=2, padding=1),
                dict(kernel_size=3, dilation=2, stride=2, ceil_mode=True),
                dict(kernel_size=3, dilation=3, stride=2, ceil_mode=True, padding=1),
            ]:
                yield name, (x,), run
        else:
            windows = [dict(kernel_size=k, stride=s, padding=p) for k, s, p in [(2, 2, 0), (3, 2, 1), (4, 3, 2), (2, 3, 1)]]
            for run, ceil, counts in itertools.product(windows, (False, True), (False, True)):
                yield name, (x,), dict(run, ceil_mode=ceil, count_include_pad=counts)
                if spatial > 1:
                    for divisor in (1, 5, -2, 0):
                        yield name, (x,), dict(run, ceil_mode=ceil, count_include_pad=counts, divisor_override=divisor)
        for shape in [(0, 3), (2, 0), (3,), (0,), (1, 2, 3), ()]:
            yield name, (t(*shape, *[7] * spatial),), dict(kernel_size=2)
        yield name, (t(2, 3, *[0] * spatial),), dict(kernel_size=2)
        yield name, (t(0, 3, *[7] * spatial),), dict(kernel_size=8)
        yield name, (x.double(),), dict(kernel_size=3, ceil_mode=True)
        name = f"adaptive_{kind}_pool{spatial}d"
        for size in (1, 3, 7, 9, 0, -1, [3] * spatial, [3] * (spatial + 1)):
            yield name, (x, size), {}
        for shape in [(0, 3), (2, 0), (3,), (0,), (1, 2, 3), ()]:
            yield name, (t(*shape, *[7] * spatial), 2), {}
        yield name, (t(2, 3, *[0] * spatial), 2), {}
        if spatial > 1:
            yield name, (x, [None] * (spatial - 1) + [2]), {}


def elements():
    names = ["relu", "relu6", "leaky_relu", "gelu", "silu", "hardswish", "hardsigmoid", "hardtanh", "mish", "sigmoid", "tanh", "elu", "softplus"]
    names += ["selu", "celu", "logsigmoid", "hardshrink", "softshrink", "rrelu"]
    for name in names:
        for shape in [(3, 5), (), (0,), (2, 0, 3)]:
            yield name, (3 * t(*shape),), {}
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool):
            yield name, (torch.arange(-4, 4).to(dtype),), {}
    for shape in [(3, 5), (), (0,), (2, 0, 3)]:
        for name in ("tanhshrink", "softsign"):
            yield name, (3 * t(*shape),), {}
        yield "threshold", (3 * t(*shape), 0.5, 2.0), {}
    for weight in [t(1), t(5), t(3), t(), t(1, 1), t(1, 5), t(0), t(5, dtype=torch.float64), t(5, dtype=torch.bfloat16), torch.ones(5, dtype=torch.int64)]:
        for shape in [(3, 5), (3, 5, 2), (5,), (3,), (1,), (), (0, 5), (3, 0), (3, 1)]:
            yield "prelu", (t(*shape), weight), {}
        yield "prelu", (labels(3, 5), weight), {}
    for shape in [(4, 6), (4, 5), (6,), (3,), (), (0, 4), (4, 0), (2, 4, 6)]:
        for dim in (-1, 0, 1, 2, -3, -4):
            yield "glu", (t(*shape),), dict(dim=dim)
        yield "glu", (t(*shape),), {}
    yield "glu", (labels(4, 6),), {}
    x = 3 * t(4, 6)
    for alpha in (0.0, 1.0, 2.5, 0.1):
        yield "celu", (x,), dict(alpha=alpha)
    for lambd in (0.0, -0.5, 0.3, 2.0):
        yield "hardshrink", (x,), dict(lambd=lambd)
        yield "softshrink", (x,), dict(lambd=lambd)
    for lower, upper in ((0.1, 0.2), (0.2, 0.1), (0.2, 0.2), (-0.5, 0.5)):
        yield "rrelu", (x,), dict(lower=lower, upper=upper)
    yield "rrelu", (x,), dict(lower=0.2, upper=0.2, training=True)
    yield "rrelu", (x,), dict(lower=0.2, upper=0.1, training=True)
    yield "rrelu", (x.long(),), dict(lower=0.2, upper=0.2, training=True)
    yield "gelu", (x,), dict(approximate="tanh")
    yield "gelu", (x,), dict(approximate="erf")
    yield "hardtanh", (x,), dict(min_val=1.0, max_val=-1.0)
    yield "hardtanh", (x,), dict(min_val=0.5, max_val=0.5)
    yield "leaky_relu", (x,), dict(negative_slope=-0.5)
    yield "elu", (x,), dict(alpha=-0.5)
    for beta, threshold in itertools.product((1.0, 2.5, 0.1, -1.5), (20.0, 1.0, 0.0, -3.0, 100.0)):
        for dtype in (torch.float32, torch.float64):
            yield "softplus", (x.to(dtype),), dict(beta=beta, threshold=threshold)
    for name in ("softmax", "log_softmax", "softmin"):
        for shape, dim in [((3, 5), 0), ((3, 5), 1), ((3, 5), -1), ((3, 5), -2), ((3, 5), 2), ((3, 5), -3), ((), 0), ((), -1), ((), 1), ((), -2)]:
            yield name, (t(*shape),), dict(dim=dim)
        for shape in [(), (4,), (3, 4), (2, 3, 4), (2, 3, 4, 5)]:
            yield name, (t(*shape),), {}
        for shape in [(0, 4), (4, 0), (0,)]:
            yield name, (t(*shape),), dict(dim=0)
            yield name, (t(*shape),), dict(dim=-1)
        yield name, (labels(3, 4),), dict(dim=0)
        yield name, (labels(3, 4),), dict(dim=0, dtype=torch.float32)
        yield name, (t(3, 4),), dict(dim=0, dtype=torch.float64)


def losses():
    name = "cross_entropy"
    for shape in [(6,), (4, 6), (4, 6, 3), (2, 6, 3, 5)]:
        rows = shape[:0] if len(shape) == 1 else shape[:1] + shape[2:]
        x, target, chance = t(*shape), labels(*rows), t(*shape).softmax(0 if len(shape) == 1 else 1)
        weight = torch.rand(6) + 0.1
        one = int(target.flatten()[0])
        for reduction, smoothing, w, ignore in itertools.product(("none", "sum", "mean"), (0.0, 0.1, 1.0), (None, weight), (-100, one)):
            run = dict(reduction=reduction, label_smoothing=smoothing, weight=w)
            yield name, (x, target), dict(run, ignore_index=ignore)
            yield name, (x, chance), dict(run, ignore_index=ignore)
        yield name, (x, target.to(torch.uint8)), {}
        yield name, (x, target.to(torch.int32)), {}
        yield name, (x, target.float()), {}
        yield name, (x, target.unsqueeze(-1)), {}
        yield name, (x, target + 6), {}
        yield name, (x, target - 7), {}
        yield name, (x, target + 6), dict(weight=weight)
        yield name, (x, target + 6), dict(ignore_index=int(target.flatten()[0]) + 6)
        yield name, (x, torch.full_like(target, -100)), dict()
        yield name, (x, torch.full_like(target, -100)), dict(weight=weight)
        yield name, (x, torch.full_like(target, -100)), dict(weight=weight, reduction="sum", label_smoothing=0.1)
        yield name, (x, labels(*shape)), {}
        yield name, (x.double(), chance), {}
        yield name, (x, chance.double()), {}
        yield name, (x, target), dict(weight=weight.double())
        yield name, (x, chance), dict(weight=weight.double())
        yield name, (x, target), dict(weight=torch.ones(5))
        yield name, (x, target), dict(weight=torch.ones(6, 1))
        yield name, (x, target), dict(reduction="max")
        yield name, (x, target), dict(label_smoothing=1.5)
        yield name, (x, target), dict(size_average=False)
        yield name, (x, target), dict(reduce=False)
        yield name, (x.bfloat16(), target), {}
        yield name, (x.bfloat16(), target), dict(weight=weight.bfloat16())
    for dims, target in [((4, 6), (5,)), ((4, 6), (4, 1)), ((4, 6), ()), ((4, 6, 3), (4,)), ((4, 6, 3), (4, 2)), ((6,), (6,)), ((6,), (1,)), ((), ())]:
        yield name, (t(*dims), labels(*target)), {}
    for reduction in ("none", "sum", "mean"):
        yield name, (t(0, 6), labels(0)), dict(reduction=reduction)
        yield name, (t(0, 6), labels(0)), dict(reduction=reduction, weight=torch.ones(6))
        yield name, (t(0, 6), t(0, 6)), dict(reduction=reduction)
        yield name, (t(3, 6, 0), labels(3, 0)), dict(reduction=reduction)
    yield name, (labels(4, 6), labels(4)), {}
    masked = t(4, 6).masked_fill(torch.tensor([True, False, False, False, False, True]), -torch.inf)
    yield name, (masked, torch.full((4,), 2)), {}
    yield name, (masked, torch.full((4,), 2)), dict(weight=torch.rand(6))


GROUPS = {"convolutions": convolutions, "linears": linears, "pools": pools, "elements": elements, "losses": losses}


#: PyTorch's hard sigmoid has a sixth in f32, in f64 too.
OTHERS = {"hardsigmoid": lambda x: F.relu6(x + 3) / 6, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


def outcome(function, arguments, keywords):
    try:
        return function(*arguments, **keywords)
    except Exception as error:
        return error


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def agree(result, truth):
    """Whether a result is that of PyTorch in f64, to the rounding of its own type; what is not finite is the same."""
    result, truth = result.detach(), truth.detach()
    is_finite = truth.isfinite()
    assert torch.equal(result.isfinite(), is_finite)
    assert torch.equal(result[~is_finite].double().nan_to_num(7.0), truth[~is_finite].double().nan_to_num(7.0))
    if str(result.dtype)[6:] in TOLERANCES:
        close(result[is_finite], truth[is_finite], 2.0)
    else:
        assert torch.equal(result, truth)


def described(name, arguments, keywords):
    def word(value):
        return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)

    return f"{name}({', '.join([*map(word, arguments), *[f'{key}={word(value)}' for key, value in keywords.items()]])})"


def judge(name, arguments, keywords):
    """What is wrong with a call, or `None`."""
    theirs = getattr(F, name, None) or OTHERS[name]
    mine = [value.clone().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in arguments]
    result = outcome(getattr(vt, name), mine, keywords)
    expected = outcome(theirs, arguments, keywords)
    if isinstance(expected, Exception):
        if not isinstance(result, Exception):
            return f"PyTorch refuses: {expected}"
        is_same_kind = any(isinstance(result, kind) and isinstance(expected, kind) for kind in KINDS)
        return None if is_same_kind else f"{type(result).__name__} where PyTorch has {type(expected).__name__}: {result}"
    if isinstance(result, Exception):
        return f"we refuse: {type(result).__name__}: {result}"
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return f"{result.dtype} {list(result.shape)} where PyTorch has {expected.dtype} {list(expected.shape)}"
    others = [wide(value).clone().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in arguments]
    truth = OTHERS.get(name, theirs)(*others, **{key: wide(value) for key, value in keywords.items()})
    try:
        agree(result, truth)
        if result.requires_grad and truth.requires_grad:
            gradient = torch.randn(truth.shape, dtype=truth.dtype).to(result.dtype)
            result.backward(gradient)
            # PyTorch refuses the gradient of some calls that it takes.
            if isinstance(outcome(truth.backward, [gradient.double()], {}), Exception):
                return None
            for one, other in zip(mine, others):
                if isinstance(one, torch.Tensor) and one.requires_grad:
                    agree(one.grad, other.grad)
    except AssertionError as error:
        return f"another result: {str(error).splitlines()[0]}"
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_calls_are_refused_or_computed_as_by_pytorch(group):
    calls = list(GROUPS[group]())
    wrong = [f"{described(*call)}: {fault}" for call in calls if (fault := judge(*call)) is not None]
    assert len(calls) >= 16 and not wrong, "\n".join(wrong)


def _sized(take):
    """Calls by sizes, each of which `take` makes of an integer."""
    x, w, turned = torch.arange(64.0).reshape(1, 1, 8, 8), torch.ones(1, 1, 2, 2), torch.ones(1, 4, 4, 4)
    y, index = F.max_pool2d(x, 2, return_indices=True)
    samples = torch.full((1, 1, 2), 0.4)
    yield lambda f: f.max_pool2d(x, take(2))
    yield lambda f: f.max_pool2d(x, [take(3), take(2)], take(2), take(1), take(1))
    yield lambda f: f.avg_pool2d(x, take(3), take(2), (take(1),), divisor_override=take(5))
    yield lambda f: f.adaptive_avg_pool2d(x, (take(2), None))
    yield lambda f: f.adaptive_max_pool2d(x, [take(2), take(3)])
    yield lambda f: f.conv2d(x, w, None, take(2), take(1), take(2), take(1))
    yield lambda f: f.conv_transpose2d(x, w, None, take(2), take(1), take(1))
    yield lambda f: f.unfold(x, (take(2), take(2)), take(1), take(1), take(2))
    yield lambda f: f.fold(torch.ones(1, 4, 49), (take(8), take(8)), take(2) if f is vt else 2)
    yield lambda f: f.max_unpool2d(y, index, (take(2),) * 2, (take(2),) * 2, (take(0),) * 2, (take(8),) * 2)
    yield lambda f: f.fractional_max_pool2d(x, (take(2), take(2)), (take(3), take(3)), _random_samples=samples)
    yield lambda f: f.pixel_shuffle(turned, take(2))
    yield lambda f: f.pixel_unshuffle(x, take(2))
    yield lambda f: f.channel_shuffle(turned, take(2)) if f is vt else F.channel_shuffle(turned, 2)
    yield lambda f: f.group_norm(turned, take(2))
    yield lambda f: f.layer_norm(x, (take(8),))
    yield lambda f: f.pad(x, (take(1), take(2)))
    yield lambda f: f.interpolate(x, (take(3), take(5)))


def test_sizes_are_whatever_is_an_integer():
    """Those of NumPy, tensors of one element, and all else with `__index__`, by themselves and in lists, as PyTorch takes them."""
    numpy = pytest.importorskip("numpy")

    class Own:
        def __init__(self, value):
            self.value = value

        def __index__(self):
            return self.value

    for take in (numpy.int64, numpy.uint8, torch.tensor, Own):
        for call, plain in zip(_sized(take), _sized(int)):
            torch.testing.assert_close(call(vt), plain(F))
    net, _ = vt.convert(torch.nn.Sequential(torch.nn.Conv2d(numpy.int64(1), numpy.int64(2), numpy.int64(3), stride=numpy.int64(1)), torch.nn.MaxPool2d(numpy.int64(2), numpy.int64(1))))
    assert net(torch.ones(1, 1, 6, 6)).shape == (1, 2, 3, 3)


def test_sizes_are_nothing_else():
    """Truth values and numbers with a point are refused by name, whatever was asked before: a memory of results knows them for integers."""
    numpy = pytest.importorskip("numpy")
    for take in (lambda value: bool(value), float, numpy.float64, numpy.bool_, str, lambda value: torch.tensor(float(value)), lambda value: torch.tensor(bool(value))):
        for call, plain in zip(_sized(take), _sized(int)):
            plain(vt)
            with pytest.raises(TypeError, match=r"is .*; it is an integer, or one for each dim"):
                call(vt)
