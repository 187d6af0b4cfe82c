"""Converted modules where PyTorch's can be used in more ways than being called with a tensor: in place, by keyword, edited, traced, with options of any kind."""

import copy
import inspect

import pytest
import torch
from conftest import close
from torch import nn

import verdigris as vd
import verdigris.torch as vt

torch.set_num_threads(1)
INFINITY = float("inf")


class Skip(nn.Module):
    """As the innermost block of pix2pix's generator: what goes around the branch is what the branch's first module has written."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.LeakyReLU(0.2, True), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))

    def forward(self, x):
        return torch.cat([x, self.model(x)], 1)


class Statement(nn.Module):
    """An activation whose result nobody takes."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn(self.conv(x))
        self.relu(y)
        return y


IN_PLACE = [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Mish, nn.ELU, nn.SELU, nn.CELU]


@pytest.mark.parametrize("kind", [Skip, Statement])
@pytest.mark.parametrize("records", [False, True])
def test_what_works_in_place_writes_its_input(kind, records):
    net = kind().eval()
    ours, report = vt.convert(net)
    x = torch.randn(2, 3, 5, 5)
    with torch.set_grad_enabled(records):
        wide = copy.deepcopy(net).double()
        close(ours(x.clone()), wide(x.double()), 4.0)
    assert any("into its input" in why for why in report.kept.values())


@pytest.mark.parametrize("kind", IN_PLACE)
def test_every_activation_that_works_in_place_stays(kind):
    x = torch.randn(4, 5)
    want = kind()(x)
    ours, report = vt.convert(nn.Sequential(kind(inplace=True)))
    assert list(report.kept) == ["0"]
    given = x.clone()
    ours(given)
    torch.testing.assert_close(given, want)
    assert vt.convert(nn.Sequential(kind()))[1].swapped


def test_a_network_with_activations_in_place_is_one_call_a_block():
    """What stays is computed in the chains all the same, with gradients too, and nothing is copied for it."""
    from test_torch_chains import calls_of, filled, nodes_of

    block = lambda act: filled(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), act, nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), act))
    x = torch.randn(2, 3, 9, 8)
    for act in (nn.ReLU(inplace=True), nn.SiLU(inplace=True)):
        ours, report = vt.convert(block(act))
        assert report.chains == {"": ["0 + 1 + 2", "3 + 4 + 5"]} and list(report.kept) == ["2"]
        names = nodes_of(ours(x))
        assert not any("Copy" in name or "Clone" in name or name.startswith(("Silu", "Relu")) for name in names), names
        ours.eval()
        with torch.no_grad():
            assert calls_of(lambda: ours(x)) == ["verdigris::conv_norm"] * 2


def test_inputs_have_the_names_that_they_have_in_pytorch():
    for base, ours in vt.nn.CLASSES.items():
        names = [[*inspect.signature(kind.forward).parameters][1:] for kind in (base, ours)]
        assert names[0] == names[1], base
    x = torch.randn(2, 4, 6, 6)
    for module in (nn.Conv2d(4, 3, 3), nn.ConvTranspose2d(4, 3, 3), nn.Linear(6, 5), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.LayerNorm(6), nn.Softmax(-1)):
        ours, report = vt.convert(copy.deepcopy(module))
        assert report.swapped
        close(ours(input=x), module(input=x).double(), 4.0)
    with pytest.raises(TypeError):
        vt.nn.BatchNorm2d(4)(x, x)


@pytest.mark.parametrize(
    "module, dims",
    [
        (nn.ConstantPad2d(1, -INFINITY), (2, 3, 4, 4)),
        (nn.ConstantPad1d(1, float("nan")), (2, 3, 4)),
        (nn.Hardtanh(0, INFINITY), (4, 5)),
        (nn.Hardtanh(-INFINITY, 0.5), (4, 5)),
        (nn.LocalResponseNorm(65), (2, 70, 4)),
        (nn.Softplus(beta=0), (4, 5)),
        (nn.Softplus(beta=-1.0), (4, 5)),
        (nn.Softplus(threshold=INFINITY), (4, 5)),
        (nn.ELU(INFINITY), (4, 5)),
        (nn.LeakyReLU(INFINITY), (4, 5)),
        (nn.CELU(INFINITY), (4, 5)),
        (nn.CELU(-0.5), (4, 5)),
        (nn.Hardshrink(INFINITY), (4, 5)),
        (nn.Threshold(-INFINITY, 0.0), (4, 5)),
        (nn.Threshold(0.0, -INFINITY), (4, 5)),
    ],
    ids=str,
)
def test_a_module_whose_options_are_refused_stays(module, dims):
    ours, report = vt.convert(nn.Sequential(module))
    x = torch.randn(dims)
    assert list(report.kept) == ["0"] and not report.swapped, report
    torch.testing.assert_close(ours(x), module(x), equal_nan=True)


def test_options_of_a_convolution_that_are_set_later_count():
    x = torch.randn(2, 4, 9, 9)
    for base, options in (
        (nn.Conv2d(4, 4, 3, padding=1), dict(stride=(2, 2), padding=(0, 1), dilation=(2, 1), groups=4)),
        (nn.Conv2d(4, 4, 3, padding=1), dict(padding="same")),
        (nn.Conv2d(4, 4, 3, padding=1), dict(padding=2, padding_mode="circular", stride=(1, 2))),
        (nn.ConvTranspose2d(4, 4, 3), dict(stride=(2, 3), padding=(1, 0), output_padding=(1, 0))),
    ):
        ours, _ = vt.convert(nn.Sequential(base, nn.BatchNorm2d(4)))
        ours.eval(), ours(x)
        for name, value in options.items():
            if name == "groups":
                base.weight = ours[0].weight = nn.Parameter(torch.randn(4, 1, 3, 3))
            setattr(base, name, value), setattr(ours[0], name, value)
            close(ours[0](x), base(x).double(), 4.0)
            with torch.no_grad():
                close(ours(x), ours[1](base(x)).double(), 4.0)


def test_options_of_a_convolution_may_be_set_one_after_the_other():
    conv = vt.nn.Conv2d(4, 4, 3, stride=2)
    conv.padding = "same"
    for net in (conv, nn.Sequential(conv, nn.BatchNorm2d(4)).eval(), vt.convert(nn.Sequential(conv, nn.BatchNorm2d(4)).eval())[0]):
        with pytest.raises(vd.GraphError, match="'same' with stride"), torch.no_grad():
            net(torch.randn(1, 4, 6, 6))
    conv.stride = (1, 1)
    assert conv(torch.randn(1, 4, 6, 6)).shape == (1, 4, 6, 6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.conv, self.bn, self.act = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.GELU()
        self.pool, self.norm, self.head = nn.AdaptiveAvgPool2d(1), nn.LayerNorm(6), nn.Linear(6, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        x = self.stem(x)
        x = self.act(self.bn(self.conv(x)) + x)
        return self.mlp(self.head(self.norm(self.pool(x).flatten(1))))


@pytest.mark.parametrize("training", [False, True])
def test_fx_sees_a_converted_network_as_it_sees_the_plain_one(training):
    from test_torch_chains import filled

    net = filled(Net()).train(training)
    ours, report = vt.convert(net)
    assert report.chains
    plain, traced = torch.fx.symbolic_trace(net), torch.fx.symbolic_trace(ours)
    nodes = [[(node.op, str(node.target)) for node in graph.graph.nodes if node.op == "call_module"] for graph in (plain, traced)]
    assert nodes[0] == nodes[1]
    x = torch.randn(2, 3, 7, 7)
    close(traced(x), copy.deepcopy(net).double()(x.double()), 8.0)
    models = pytest.importorskip("torchvision.models.feature_extraction")
    wanted = {"stem.1": "low", "act": "high", "mlp.1": "last"}
    mine = models.create_feature_extractor(ours, wanted)(x)
    theirs = models.create_feature_extractor(net.double(), wanted)(x.double())
    for name, value in mine.items():
        close(value, theirs[name], 8.0)


def test_parts_of_several_inputs_are_one_node_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.loss = nn.MultiheadAttention(8, 2, batch_first=True), nn.CrossEntropyLoss()

        def forward(self, x, target):
            return self.loss(self.attention(x, x, x, need_weights=False)[0].flatten(0, 1), target=target)

    ours, report = vt.convert(Two())
    assert len(report.swapped) == 2
    traced = torch.fx.symbolic_trace(ours)
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_module"] == ["attention", "loss"]
    x, target = torch.randn(2, 3, 8), torch.randint(8, (6,))
    torch.testing.assert_close(traced(x, target), ours(x, target))
