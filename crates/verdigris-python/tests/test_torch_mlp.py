"""Two linear layers with an activation between them: one call, one node, and what `convert` finds of them."""

import copy
import itertools
import pickle

import pytest

torch = pytest.importorskip("torch")

from conftest import close, error_of

import verdigris as vd
import verdigris.torch as vt
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def operands(leading=(3, 5), inputs=6, hidden=11, outputs=4, biases=(True, True), dtype=torch.float64):
    """x, both weights and biases, as `mlp` takes them; values of which no activation is at its kink."""
    shapes = [(*leading, inputs), (hidden, inputs), (hidden,) if biases[0] else None, (outputs, hidden), (outputs,) if biases[1] else None]
    return [None if shape is None else torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def by_hand(x, up, up_bias, down, down_bias, activation):
    return F.linear(ACTIVATIONS[activation](F.linear(x, up, up_bias)), down, down_bias)


def gradients(y, tensors, weight):
    return torch.autograd.grad((y * weight).sum(), [tensor for tensor in tensors if tensor is not None])


@pytest.mark.parametrize("activation, biases", list(itertools.product(ACTIVATIONS, [(True, True), (False, True), (True, False), (False, False)])))
def test_values_and_gradients(activation, biases):
    given = operands(biases=biases)
    y, want = vt.mlp(*given, activation), by_hand(*given, activation)
    close(y, want)
    weight = torch.randn_like(want)
    for mine, theirs in zip(gradients(y, given, weight), gradients(want, given, weight)):
        close(mine, theirs)
    with torch.no_grad():
        close(vt.mlp(*given, activation), want)


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 0), (7,), (2, 3, 4)])
def test_leading_dims(leading):
    given = operands(leading)
    y, want = vt.mlp(*given), by_hand(*given, "gelu")
    assert y.shape == want.shape
    close(y, want)
    weight = torch.randn_like(want)
    for mine, theirs in zip(gradients(y, given, weight), gradients(want, given, weight)):
        assert mine.shape == theirs.shape
        close(mine, theirs)


def test_inputs_of_any_strides():
    _, *layers = operands()
    wide = torch.randn(5, 6, 3, dtype=torch.float64)
    for x in (wide.permute(2, 0, 1), wide.permute(0, 2, 1)[::2], torch.randn(3, 5, 12, dtype=torch.float64)[..., ::2]):
        x = x.detach().requires_grad_()
        y, want = vt.mlp(x, *layers), by_hand(x, *layers, "gelu")
        close(y, want)
        # A gradient that is expanded, as that of a sum is.
        for mine, theirs in zip(*(torch.autograd.grad(z.sum(), [x, *layers]) for z in (y, want))):
            close(mine, theirs)


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [4], [0, 3], [1, 4]])
def test_gradients_of_some(wanted):
    given = operands()
    for place, tensor in enumerate(given):
        tensor.requires_grad_(place in wanted)
    some = [given[place] for place in wanted]
    for mine, theirs in zip(*(torch.autograd.grad(of(*given, "gelu").square().sum(), some) for of in (vt.mlp, by_hand))):
        close(mine, theirs)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gradients_of_gradients(activation):
    given = operands((2,), 3, 4, 2)
    assert torch.autograd.gradcheck(lambda *inputs: vt.mlp(*inputs, activation), given)
    for tensor in given:
        tensor.grad = None
    # GELU's gradient has no gradient of its own in this package: what the layers one by one refuse is refused here.
    function = lambda *inputs: vt.linear(ACTIVATIONS_OF_OURS[activation](vt.linear(*inputs[:3])), *inputs[3:])
    results = []
    for of in (lambda *inputs: vt.mlp(*inputs, activation), function):
        first = torch.autograd.grad(of(*given).square().sum(), given, create_graph=True)
        try:
            second = torch.autograd.grad(sum(one.square().sum() for one in first), given)
        except vd.UnsupportedError as error:
            second = str(error)
        results.append(second)
    mine, theirs = results
    assert type(mine) is type(theirs)
    if isinstance(mine, str):
        assert "no gradient" in mine
    else:
        for one, other in zip(mine, theirs):
            close(one, other, 100.0)


ACTIVATIONS_OF_OURS = {"gelu": vt.gelu, "silu": vt.silu}


def test_gradients_of_gradients_of_relu():
    given = operands((2,), 3, 4, 2)
    assert torch.autograd.gradgradcheck(lambda *inputs: vt.mlp(*inputs, "relu"), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype):
    given = [tensor.detach().to(dtype).requires_grad_() for tensor in operands((64,), 96, 128, 40)]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    y, want = vt.mlp(*given), by_hand(*wide, "gelu")
    # The hidden values are rounded in between.
    close(y, want, 3.0)
    weight = torch.randn_like(want)
    for mine, theirs in zip(gradients(y, given, weight.to(dtype)), gradients(want, wide, weight.to(dtype).double())):
        assert mine.dtype == dtype
        close(mine, theirs, 4.0)


@pytest.mark.parametrize("is_leaf", [False, True])
def test_autocast(is_leaf):
    """Types are PyTorch's, and so is the error."""
    given = [tensor.detach().float().requires_grad_() for tensor in operands((64,), 96, 128, 40)]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    want = by_hand(*wide, "gelu")
    weight = torch.randn_like(want).bfloat16()
    truth = gradients(want, wide, weight.double())
    found = []
    for of in (vt.mlp, by_hand):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = given[0] if is_leaf else given[0] * 1.0
            y = of(x, *given[1:], "gelu")
        assert y.dtype == torch.bfloat16
        found.append([y, *gradients(y, given, weight)])
    for mine, theirs, exact in zip(*found, [want, *truth]):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert error_of(mine, exact) <= 1.5 * error_of(theirs, exact) + 2e-3


@pytest.mark.parametrize("function", ["linear", "conv2d", "conv_transpose2d", "mlp"])
def test_a_bias_under_autocast_is_not_rounded(function):
    """It has digits that bf16 does not, and the products are 0."""
    bias = torch.tensor([1.0 + 2.0**-7, -3.0 - 2.0**-6])
    shapes = {"linear": [(3, 4), (2, 4)], "conv2d": [(1, 4, 3, 3), (2, 4, 1, 1)], "conv_transpose2d": [(1, 4, 3, 3), (4, 2, 1, 1)], "mlp": [(3, 4), (2, 4)]}[function]
    x, w = torch.randn(shapes[0]), torch.zeros(shapes[1], requires_grad=True)
    bias.requires_grad_()
    others = (torch.eye(2), bias, "relu") if function == "mlp" else ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = getattr(vt, function)(x, w, bias, *others)
    want = bias + (bias.relu() if function == "mlp" else 0)
    first = y.movedim(1, -1).reshape(-1, 2)[0]
    # Rounded once, at the end: for the second layer of the two, what the first one gives is rounded too.
    assert torch.equal(first, want.bfloat16()) or function == "mlp" and (first - want).abs().max() < 0.02
    y.float().sum().backward()
    assert bias.grad.dtype == torch.float32 and w.grad.dtype == torch.float32


def test_autocast_and_gradients_of_gradients():
    given = [tensor.detach().float().requires_grad_() for tensor in operands((4,), 6, 8, 3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = vt.mlp(*given, "relu")
    first = torch.autograd.grad(y.float().sum(), given, create_graph=True)
    assert all(one.dtype == torch.float32 for one in first)
    second = torch.autograd.grad(first[0].square().sum(), given[1])
    assert second[0].dtype == torch.float32 and second[0].abs().max() > 0


def test_operators_are_what_they_declare():
    given = [tensor.detach().float().requires_grad_() for tensor in operands()]
    x, up, _, down, _ = given
    torch.library.opcheck(torch.ops.verdigris.mlp.default, (*given, "f=relu"))
    with torch.no_grad():
        plain = [tensor.detach() for tensor in given]
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.verdigris.mlp_inference.default, (*plain, "f=relu"), test_utils=tests)
        hidden, dy = torch.randn(3, 5, 11), torch.randn(3, 5, 4)
        for words in ("wanted=11111|f=silu", "wanted=01010 as1=f64 as3=bf16|f=silu"):
            torch.library.opcheck(torch.ops.verdigris.mlp_backward.default, (dy, x.detach(), up.detach(), down.detach(), hidden, hidden, words), test_utils=tests)


def test_what_does_not_fit_is_told():
    x, up, up_bias, down, down_bias = (tensor.detach() for tensor in operands())
    with pytest.raises(vd.GraphError, match="the activation is 'step'; it is one of gelu, gelu_tanh, relu, silu"):
        vt.mlp(x, up, up_bias, down, down_bias, "step")
    with pytest.raises(vd.Error, match=r"a weight of dims \[11, 6\] for 5 values"):
        vt.mlp(x[..., :5], up, up_bias, down, down_bias)
    with pytest.raises(vd.Error, match="a bias has one dim, with an element for each output"):
        vt.mlp(x, up, up_bias[:1], down, down_bias)
    with pytest.raises(vd.Error, match="linear layers of f64 and f32; they are of one floating-point type"):
        vt.mlp(x, up.float(), up_bias, down, down_bias)


@pytest.mark.parametrize("name", ["mlp", "conv_batch_norm", "max_pool"])
def test_no_gradient_is_made_of_results_that_have_none(name):
    """Autograd would fill a tensor of zeros for each, as large as the result."""
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    layers = {
        "mlp": lambda: vt.mlp(x, torch.randn(7, 5), None, torch.randn(3, 7), None),
        "conv_batch_norm": lambda: vt.convert(nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)))[0](x),
        "max_pool": lambda: vt.max_pool2d(x, 2),
    }[name]
    y = layers().square().sum()
    with torch.profiler.profile() as profile:
        y.backward()
    filled = [event.key for event in profile.key_averages() if event.key in ("aten::zeros", "aten::zero_", "aten::new_zeros", "aten::zeros_like")]
    assert not filled and x.grad.abs().max() > 0


# What `convert` finds.


def calls_of(function):
    """The operators of this package that a function's calls reach."""
    with torch.profiler.profile() as profile:
        function()
    return sorted(event.key for event in profile.key_averages() if event.key.startswith("verdigris::") for _ in range(event.count))


def feed_forward(activation=None, p=0.0):
    return nn.Sequential(nn.Linear(6, 11), activation or nn.GELU(), nn.Dropout(p), nn.Linear(11, 4), nn.Dropout(p))


class Block(nn.Module):
    """A forward of its own, with the activation as a function."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(6), nn.Linear(6, 11), nn.Linear(11, 6, bias=False)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.ReLU(inplace=True), nn.SiLU(), nn.Hardswish(), nn.ELU(0.5)], ids=str)
def test_a_feed_forward_is_one_call_each_way(activation):
    model = feed_forward(activation)
    ours, report = vt.convert(model)
    assert report.chains == {"": ["0 + 1 + 2 + 3"]}
    x = torch.randn(3, 5, 6)
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        assert calls_of(lambda: ours(x)) == ["verdigris::mlp_inference"]
        close(ours(x), wide(x.double()), 3.0)
    assert calls_of(lambda: ours(x).sum().backward()) == ["verdigris::mlp", "verdigris::mlp_backward"]
    ours.zero_grad()
    ours(x).square().sum().backward()
    wide(x.double()).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), wide.parameters()):
        close(mine.grad, theirs.grad, 30.0)


def test_a_forward_of_its_own():
    model = Block()
    ours, report = vt.convert(model)
    assert report.chains == {"": ["fc1 + relu + fc2"]}
    x = torch.randn(5, 6)
    close(ours(x), copy.deepcopy(model).double()(x.double()), 3.0)


def test_dropout_that_drops_keeps_the_layers_apart():
    ours, report = vt.convert(feed_forward(p=0.5))
    assert report.chains
    x = torch.randn(200, 6)
    found = calls_of(lambda: ours(x))
    assert "verdigris::mlp" not in found and found.count("verdigris::linear") == 2 and found.count("verdigris::dropout") == 2
    ours.eval()
    assert "verdigris::mlp" in calls_of(lambda: ours(x))


def test_chains_do_not_share_layers():
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    ours, report = vt.convert(model)
    assert report.chains == {"": ["0 + 1 + 2", "4 + 5 + 6"]}
    x = torch.randn(3, 4)
    close(ours(x), copy.deepcopy(model).double()(x.double()), 3.0)


def test_hooks_keep_seeing_their_modules():
    seen = []
    before = feed_forward()
    before[3].register_forward_hook(lambda module, inputs, output: seen.append("second"))
    ours, report = vt.convert(before)
    assert report.chains == {}
    later, _ = vt.convert(feed_forward())
    later[0].register_forward_hook(lambda module, inputs, output: seen.append("first"))
    x = torch.randn(2, 6)
    ours(x), later(x)
    assert seen == ["second", "first"]


def test_copies_pickles_and_state():
    model = feed_forward()
    ours, _ = vt.convert(model)
    assert list(ours.state_dict()) == list(model.state_dict())
    x = torch.randn(2, 6)
    want = ours(x)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again(x), want)


def test_compiled():
    """The compiler sees the layers one by one, and fuses what lies between them itself."""
    ours, _ = vt.convert(feed_forward())
    x = torch.randn(2, 6)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    close(compiled(x), copy.deepcopy(ours).double()(x.double()), 3.0)
    compiled(x).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_a_network_of_pytorchs_own():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.ops.MLP(6, [11, 4], activation_layer=nn.GELU, inplace=None, dropout=0.0)
    _, report = vt.convert(model)
    assert report.chains == {"": ["0 + 1 + 2 + 3"]}
