"""Attention in shifted windows, torchvision's, under `convert`: values and gradients against torchvision's in f64, and what stays torchvision's."""

import copy
import importlib
import importlib.util
import pathlib
import pickle
import re

import pytest

torch = pytest.importorskip("torch")

from conftest import close

import verdigris.torch as vt

torch.set_num_threads(1)


def _swin():
    """torchvision's module. Where its compiled operators do not load, an import misses them by name alone: they get one."""
    name, names = "torchvision.models.swin_transformer", torch.library.Library("torchvision", "FRAGMENT")
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        pytest.skip("torchvision is not there", allow_module_level=True)
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):
        registered = pathlib.Path(spec.origin).with_name("_meta_registrations.py").read_text()
        for missed in sorted(set(re.findall(r"torchvision::(\w+)", registered) + re.findall(r'register_meta\("(\w+)"', registered))):
            names.define(f"{missed}(Tensor x) -> Tensor")
    try:
        return importlib.import_module(name), names
    except ImportError as error:
        pytest.skip(f"torchvision cannot be imported: {error}", allow_module_level=True)


swin, _names = _swin()
KINDS = ["ShiftedWindowAttention", "ShiftedWindowAttentionV2"]


def made(kind, window=(4, 4), shift=(2, 2), heads=2, size=16, **words):
    module = getattr(swin, kind)(size, list(window), list(shift), heads, **words)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    return module


def step(module, x, weight):
    """The result, and the gradients of the input and of each parameter."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = module(x)
    (y * weight).sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in module.parameters())]


def calls_of(function):
    with torch.profiler.profile() as profile:
        function()
    return [event.key for event in profile.key_averages() if event.key.startswith("verdigris::") for _ in range(event.count)]


def hold(theirs, dims, slack=30.0):
    ours, report = vt.convert(theirs)
    assert report.swapped[""] == type(theirs).__name__ and list(ours.state_dict()) == list(theirs.state_dict())
    wide = copy.deepcopy(theirs).double()
    x, weight = torch.randn(dims), torch.randn(dims)
    right = step(wide, x.double(), weight.double())
    for mine, want in zip(step(ours, x, weight), right, strict=True):
        close(mine, want, slack)
    exact, _ = vt.convert(wide)
    for mine, want in zip(step(exact, x.double(), weight.double()), right, strict=True):
        close(mine, want, slack)
    calls = calls_of(lambda: step(ours, x, weight))
    assert calls.count("verdigris::attention") == calls.count("verdigris::attention_backward") == 1, calls
    return ours


# Whole windows, rows and columns that need padding, one window in a dim or in both, windows and shifts that are not square.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dims, window, shift",
    [
        ((2, 8, 8, 16), (4, 4), (0, 0)),
        ((2, 8, 8, 16), (4, 4), (2, 2)),
        ((3, 7, 10, 16), (4, 4), (2, 2)),
        ((3, 7, 10, 16), (4, 4), (0, 0)),
        ((2, 4, 12, 16), (4, 4), (2, 2)),
        ((2, 4, 3, 16), (4, 4), (2, 2)),
        ((1, 9, 8, 16), (3, 4), (1, 2)),
        ((1, 14, 14, 16), (7, 7), (3, 3)),
        ((2, 8, 8, 16), (4, 4), (0, 2)),
    ],
)
def test_windows(kind, dims, window, shift):
    hold(made(kind, window, shift), dims)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [dict(qkv_bias=False), dict(proj_bias=False), dict(heads=1), dict(heads=4)])
def test_attributes(kind, words):
    hold(made(kind, **words), (2, 8, 6, 16))


def test_dropout_stays_with_torchvision_in_training():
    for words in (dict(attention_dropout=0.5), dict(dropout=0.5)):
        theirs = made("ShiftedWindowAttention", **words)
        ours, x = vt.convert(theirs)[0], torch.randn(1, 8, 8, 16)
        torch.manual_seed(3)
        want = theirs(x)
        torch.manual_seed(3)
        assert torch.equal(ours(x), want)
        assert "verdigris::attention" not in calls_of(lambda: ours(x))
        ours.eval()
        assert "verdigris::attention" in calls_of(lambda: ours(x))
        close(ours(x), theirs.eval().double()(x.double()), 30.0)


def test_what_is_not_swapped_says_why():
    class Other(torch.nn.Linear):
        pass

    lone = made("ShiftedWindowAttention")
    lone.qkv = Other(16, 48)
    report = vt.convert(lone)[1]
    assert "its qkv is a Other" in report.kept[""] and "stays" in str(report)

    class Own(swin.ShiftedWindowAttention):
        pass

    report = vt.convert(Own(16, [4, 4], [0, 0], 2))[1]
    assert "a class of its own, derived from ShiftedWindowAttention" in report.kept[""]
    report = vt.convert(made("ShiftedWindowAttention"), only={torch.nn.Linear})[1]
    assert report.kept[""] == "ShiftedWindowAttention: not asked for"


def test_hooks_copies_and_files():
    theirs, seen = made("ShiftedWindowAttention"), []
    theirs.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    ours, x = vt.convert(theirs)[0], torch.randn(1, 8, 8, 16)
    y = ours(x)
    assert seen == [y.shape]
    plain = vt.convert(made("ShiftedWindowAttention"))[0]
    same = pickle.loads(pickle.dumps(plain))
    assert type(same) is type(plain) and torch.equal(same(x), plain(x)) and torch.equal(copy.deepcopy(plain)(x), plain(x))


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_and_in_halves(kind):
    theirs, x = made(kind), torch.randn(2, 8, 8, 16)
    ours, want = vt.convert(theirs)[0], copy.deepcopy(theirs).double()(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    close(y, want, 6.0)
    y.float().sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in ours.parameters())
    half = vt.convert(copy.deepcopy(theirs).bfloat16())[0]
    close(half(x.bfloat16()), want, 12.0)


def test_a_network():
    theirs = swin.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.0).eval()
    ours, report = vt.convert(theirs)
    assert list(report.swapped.values()).count("ShiftedWindowAttention") == 4
    x, weight = torch.randn(2, 3, 40, 36), torch.randn(2, 5)
    want = step(copy.deepcopy(theirs).double(), x.double(), weight.double())
    for mine, right in zip(step(ours, x, weight), want, strict=True):
        close(mine, right, 200.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_network_keeps_windows_apart(kind):
    """Of images of two sizes in one graph, so that there are two masks."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part, _ = vt.convert(made(kind).eval())

        def forward(self, x):
            return self.part(x), self.part(x[:, :6])

    x, network = torch.randn(2, 10, 10, 16), Twice()
    with torch.no_grad():
        for found, right in zip(torch.compile(network, backend="aot_eager", fullgraph=True)(x), network(x)):
            close(found, right.double())


def test_what_keeps_windows_apart_is_made_where_the_image_is():
    """What a compiled step made on the CPU, it would make anew each time and copy."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from verdigris.torch import _window

    devices = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            made = function(*arguments, **(keywords or {}))
            devices.add(made.device.type)
            return made

    with Seen():
        apart = _window._apart(8, 12, (4, 4), (2, 2), torch.device("meta"))
    assert apart.shape == (6, 1, 16, 16) and devices == {"meta"}, devices
