"""Convolutions with normalization, residual and activation behind them as one call in inference: found, right, and nothing else changed."""

import abc
import copy
import io
import itertools
import operator
import pickle

import pytest

torch = pytest.importorskip("torch")

from conftest import close, error_of

import verdigris as vd
import verdigris.torch as vt
from torch import nn

# Small tensors gain nothing from more threads, and other programs lose.
torch.set_num_threads(1)


class Residual(nn.Module):
    """A block as ResNet has it: one activation module for all, a branch that may be there."""

    def __init__(self, inplace=True, branch=True):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=inplace)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) if branch else None

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def filled(model):
    """With statistics and parameters that are not those of a new network."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
            if module.affine:
                with torch.no_grad():
                    module.weight.copy_(torch.randn(module.num_features, generator=generator))
                    module.bias.copy_(torch.randn(module.num_features, generator=generator))
    return model


def calls_of(function):
    """The operators of this package that a function's calls reach."""
    with torch.profiler.profile() as profile:
        function()
    return sorted(event.key for event in profile.key_averages() if event.key.startswith("verdigris::") for _ in range(event.count))


def agrees(model, *inputs, slack=3.0):
    """The converted network's result in inference, held against the plain one in f64."""
    ours, report = vt.convert(model)
    model.eval(), ours.eval()
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(*(x.double() for x in inputs))
        close(ours(*inputs), truth, slack)
    return ours, report


@pytest.mark.parametrize("inplace, branch", itertools.product([False, True], repeat=2))
def test_a_residual_block_is_one_call_a_convolution(inplace, branch):
    x = torch.randn(2, 4, 7, 6)
    ours, report = agrees(filled(Residual(inplace, branch)), x)
    want = ["conv1 + bn1 + relu", "conv2 + bn2 + add + relu"]
    assert report.chains[""] == want and (report.chains.get("downsample") == ["0 + 1"]) == branch
    assert "chains that are one call" in str(report)
    with torch.no_grad():
        assert calls_of(lambda: ours(x)) == ["verdigris::conv_norm"] * (3 if branch else 2)


ACTIVATIONS = [
    nn.ReLU6(),
    nn.LeakyReLU(0.2),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(inplace=True),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.Hardtanh(-0.3, 0.7),
    nn.Mish(),
    nn.Sigmoid(),
    nn.Tanh(),
    nn.ELU(1.5),
    nn.CELU(),
    nn.Threshold(0.0, 0.0),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    model = filled(nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.BatchNorm2d(5, eps=0.1), activation))
    _, report = agrees(model, torch.randn(2, 3, 9, 8))
    assert report.chains == {"": ["0 + 1 + 2"]}


@pytest.mark.parametrize("activation", [nn.SELU(), nn.CELU(0.5), nn.PReLU(5), nn.Softshrink(), nn.Threshold(0.5, 1.0)], ids=str)
def test_activations_that_are_no_step_stand_behind_the_chain(activation):
    ours, report = agrees(filled(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, eps=0.1), activation)), torch.randn(2, 3, 9, 8))
    assert report.chains == {"": ["0 + 1"]}
    with torch.no_grad():
        assert "verdigris::conv_norm" in calls_of(lambda: ours(torch.randn(2, 3, 9, 8)))


def test_random_slopes_are_no_part_of_a_chain_that_trains():
    model = filled(nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.RReLU(0.2, 0.4)))
    ours, report = vt.convert(model.eval())
    assert report.chains == {"": ["0 + 1 + 2"]}
    x = torch.randn(2, 3, 9, 8)
    ours[2].train()
    with torch.no_grad():
        y, normalized = ours(x), model[1](model[0](x))
    slopes = (y / normalized)[normalized < -1e-3]
    assert slopes.unique().numel() > 50 and 0.19 < slopes.min() < slopes.max() < 0.41


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dims_groups_and_what_is_absent(dims):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 6, 3, padding="same", groups=2, dilation=2)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](6, affine=False)
    ours, report = agrees(filled(nn.Sequential(conv, norm)), torch.randn(2, 4, *(9, 6, 5)[:dims]))
    assert report.chains == {"": ["0 + 1"]}
    if dims < 3:
        # Without the batch's dim PyTorch takes it, and so do the modules one by one.
        x = torch.randn(4, *(9, 6)[:dims])
        with torch.no_grad():
            try:
                want = nn.Sequential(conv, norm)(x)
            except (RuntimeError, ValueError) as error:
                with pytest.raises(type(error)):
                    ours(x)
            else:
                close(ours(x), want.double(), 3.0)


def test_training_and_gradients_are_those_of_the_modules():
    model = filled(Residual())
    wide, (ours, _) = copy.deepcopy(model).double(), vt.convert(model)
    x = torch.randn(2, 4, 7, 6)
    for training in (True, False):
        wide.train(training), ours.train(training)
        results = []
        for net in (ours, wide):
            net.zero_grad()
            y = net(x.to(next(net.parameters()).dtype))
            y.square().sum().backward()
            results.append([y, *(p.grad.clone() for p in net.parameters()), *(b.clone() for b in net.buffers())])
        for mine, right in zip(*results):
            # A bias in front of a normalization has a gradient of 0: what is there is rounding.
            assert (mine.double() - right).abs().max() <= 1e-4 * right.abs().max().clamp_min(1.0)


def test_the_modules_stay_what_they_are():
    model = filled(Residual())
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    ours, _ = vt.convert(model)
    assert [name for name, _ in ours.named_modules()] == names and list(ours.state_dict()) == keys
    assert isinstance(ours, Residual) and type(ours).__name__ == "Residual"
    assert not vt.convert(ours)[1].chains, "what is chained already is left alone"
    x = torch.randn(1, 4, 5, 5)
    again = io.BytesIO()
    torch.save(ours, again)
    again.seek(0)
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(again, weights_only=False)]
    ours.eval()
    with torch.no_grad():
        want = ours(x)
        for one in copies:
            one.eval()
            assert torch.equal(one(x), want)
            assert calls_of(lambda: one(x)) == ["verdigris::conv_norm"] * 3
            # A copy has weights of its own.
            one.conv1.weight.zero_()
            assert not torch.equal(one(x), want) and torch.equal(ours(x), want)


def test_what_is_set_later_counts():
    """Parameters, statistics and modules are read at each call."""
    ours, _ = vt.convert(filled(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))))
    ours.eval()
    x = torch.randn(1, 3, 6, 6)
    with torch.no_grad():
        ours[1].running_mean.data.add_(1.0)
        ours[0].weight.data.mul_(2.0)
        close(ours(x), nn.functional.batch_norm(ours[0](x).double(), *(t.double() for t in (ours[1].running_mean, ours[1].running_var, ours[1].weight, ours[1].bias))), 3.0)
        ours[0] = nn.Identity()
        ours[1] = nn.Identity()
        assert torch.equal(ours(x), x)


def test_hooks_see_what_they_saw():
    model = filled(Residual(branch=False))
    model.bn1.register_forward_hook(lambda module, inputs, output: None)
    assert vt.convert(model)[1].chains == {"": ["conv2 + bn2 + add + relu"]}
    ours, _ = vt.convert(filled(Residual(branch=False)))
    ours.eval()
    seen = []
    handle = ours.bn1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with torch.no_grad():
        ours(torch.randn(1, 4, 5, 5))
        handle.remove()
        ours(torch.randn(1, 4, 5, 5))
    assert len(seen) == 1


class Disturbed(nn.Module):
    """The input is changed in place between the convolution that reads it and the end of what would be a chain."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x):
        x = x * 1.0
        y = self.bn(self.conv(x))
        z = self.relu(x)
        return y + z


class Asking(nn.Module):
    """A forward that a trace would misread."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            x = [x]
        return self.bn(self.conv(x[0]))


class Shared(nn.Module):
    """What is behind the normalization is read twice, and what is behind the convolution too."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        y = self.bn(self.conv(x))
        first = self.conv(x)
        return self.relu(y) + y + self.bn(first) + first


class Numbers(nn.Module):
    """Sums that are none of two tensors, or with factors."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.bn(self.conv(x)) + 1.5
        y = torch.add(self.bn(self.conv(y)), x, alpha=2)
        z = self.bn(self.conv(y))
        return z + z


class Training(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.bn(self.conv(x))
        return y if self.training else y * 2


class Mutating(nn.Module):
    """The caller's tensor is changed by another name."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        same = x
        same += 1.0
        return self.bn(self.conv(x))


def test_a_forward_that_changes_its_input_changes_it():
    model = filled(Mutating()).eval()
    ours, report = vt.convert(model)
    x = torch.zeros(1, 4, 3, 3)
    with torch.no_grad():
        y = ours.eval()(x)
        assert report.chains[""] == ["conv + bn"] and x.eq(1).all()
        close(y, plain_of(model)(torch.zeros(1, 4, 3, 3)), 3.0)


@pytest.mark.parametrize("kind, chains", [(Disturbed, ["conv + bn"]), (Asking, None), (Training, None), (Shared, ["conv + bn"]), (Numbers, ["conv + bn"] * 3)])
def test_what_is_no_chain_is_left_alone(kind, chains):
    # What is disturbed ends before the disturbance.
    _, report = agrees(filled(kind()), torch.randn(2, 4, 5, 5), slack=6.0)
    assert report.chains.get("") == chains


def test_an_addend_that_broadcasts_is_added_by_the_modules():
    class Broadcast(Numbers):
        def forward(self, x, z):
            return self.bn(self.conv(x)) + z

    x = torch.randn(2, 4, 5, 5)
    for z in (torch.randn(2, 4, 5, 5), torch.randn(1, 4, 1, 1), torch.randn(2, 4, 5, 5).permute(0, 1, 3, 2), torch.randn(3, 2, 4, 5, 5)):
        agrees(filled(Broadcast()), x, z)


def test_skipped_modules_hold_no_chain():
    model = nn.Sequential(filled(Residual()), filled(Residual()))
    _, report = vt.convert(model, skip=["0"])
    assert all(name.startswith("1") for name in report.chains)


def test_autocast_lowers_what_is_multiplied_alone():
    model = filled(Residual()).eval()
    ours, _ = vt.convert(model)
    x = torch.randn(2, 4, 7, 6)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = ours(x), model(x)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    with torch.no_grad():
        right = copy.deepcopy(model).double()(x.double())
    assert error_of(mine, right) <= 1.25 * error_of(theirs, right) + 0.004


def test_the_compiler_sees_one_op_a_chain():
    torch._dynamo.reset()
    ours, _ = vt.convert(filled(Residual()))
    ours.eval()
    seen = []

    def backend(graph, examples):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    x = torch.randn(2, 4, 7, 6)
    with torch.no_grad():
        close(compiled(x), ours(x).double(), 2.0)
    assert seen.count("verdigris.conv_norm.default") == 3 and not any("conv_fprop" in target for target in seen)


def test_the_call_by_itself_has_the_gradients_of_its_parts():
    x, w, channel = torch.randn(1, 2, 4, 4, requires_grad=True), torch.randn(3, 2, 1, 1), torch.rand(3)
    y = vt._ops.conv_norm(x, w, None, channel, channel, None, None, None, "stride=1,1 padding=0,0 dilation=1,1 groups=1 eps=1e-05|f=relu")
    own = x.detach().double().requires_grad_()
    right = nn.functional.relu(nn.functional.batch_norm(nn.functional.conv2d(own, w.double()), channel.double(), channel.double()))
    close(y, right)
    close(*(torch.autograd.grad(one.square().sum(), of)[0] for one, of in ((y, x), (right, own))), 4.0)


def decides(x):
    return x if isinstance(x, torch.Tensor) else x[0]


def plain(x):
    return torch.relu(x)


class Calling(nn.Module):
    """Functions and methods that a forward calls are read as well."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.rest = nn.ModuleList([nn.ReLU()])

    def method(self, x):
        return self.bn(self.conv(x))

    def asking(self, x):
        return self.bn(self.conv(decides(x)))

    def as_trained(self, x):
        return self.bn(self.conv(x)) if self.training else x


class ByMethod(Calling):
    def forward(self, x):
        return plain(self.method(x))


class ByList(Calling):
    def forward(self, x):
        return self.rest[0](self.method(x))


class ByAsking(Calling):
    def forward(self, x):
        return self.asking(x)


class ByTraining(Calling):
    def forward(self, x):
        return self.as_trained(x)


class BySuper(ByMethod):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    "kind, chains",
    [(ByMethod, ["conv + bn + relu"]), (ByList, ["conv + bn + rest.0"]), (ByAsking, None), (ByTraining, None), (BySuper, None)],
)
def test_what_a_forward_calls_is_read_too(kind, chains):
    _, report = agrees(filled(kind()), torch.randn(2, 4, 5, 5))
    assert report.chains.get("") == chains


def nodes_of(result):
    """The names of the nodes of autograd that a result comes from."""
    names, open_, seen = [], [result.grad_fn], set()
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        open_ += [behind for behind, _ in node.next_functions]
    return sorted(names)


class Unbiased(nn.Module):
    """As ResNet's blocks are: no convolution has a bias."""

    def __init__(self, dims=2, groups=1, affine=True):
        super().__init__()
        conv, norm = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1], (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.conv1, self.bn1 = conv(4, 6, 3, stride=2, padding=1, groups=groups, bias=False), norm(6, affine=affine)
        self.conv2, self.bn2 = conv(6, 8, 1, bias=False), norm(8, affine=affine)
        self.branch = nn.Sequential(conv(4, 8, 1, stride=2, bias=False), norm(8, momentum=0.3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.branch(x)
        return self.relu(y)


def trained(net, x, weight, freeze=()):
    """A step's results: y, the gradients, and the buffers behind it."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in freeze)
        parameter.grad = None
    y = net(x)
    (y * weight).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
    return [y.detach(), *grads, *([x.grad.clone()] if x.requires_grad else []), *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize("dims, groups, affine, last, wants_x", [(2, 1, True, True, True), (2, 2, True, False, False), (1, 1, False, False, True), (3, 2, True, True, True)])
def test_training_is_one_node_a_layer(dims, groups, affine, last, wants_x):
    net = filled(Unbiased(dims, groups, affine))
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    if last:
        net = net.to(memory_format=formats[dims])
    wide, (ours, report) = copy.deepcopy(net).double(), vt.convert(net)
    assert report.chains[""] == ["conv1 + bn1 + relu", "conv2 + bn2 + add + relu"]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 4, *(9, 8, 5)[:dims], generator=generator)
    x = x.to(memory_format=formats[dims]) if last else x
    with torch.no_grad():
        weight = torch.randn(net(x).shape, generator=generator)
        wide(x.double())
    for freeze in ((), ("conv1.weight",), ("bn2.weight", "bn2.bias", "conv2.weight")) if affine else ((),):
        mine = trained(ours, x.clone().requires_grad_(wants_x), weight, freeze)
        right = trained(wide, x.double().requires_grad_(wants_x), weight.double(), freeze)
        assert len(mine) == len(right)
        for got, want in zip(mine, right):
            assert got.shape == want.shape and (got.double() - want).abs().max() <= 3e-5 * want.abs().max().clamp_min(1.0)
    names = nodes_of(ours(x.requires_grad_(wants_x)))
    assert names.count("Verdigris_conv_batch_normBackward") == 3, names
    assert set(names) <= {"Verdigris_conv_batch_normBackward", "torch::autograd::AccumulateGrad"}, names
    with torch.no_grad():
        # What is computed without gradients is computed alike.
        assert calls_of(lambda: ours(x)) == ["verdigris::batch_norm"] * 3 + ["verdigris::conv_fprop"] * 3


class Inverted(nn.Module):
    """As MobileNet and EfficientNet have them: each normalization but the last one has an activation behind it, as a module and as a function."""

    def __init__(self, activation):
        super().__init__()
        self.expand, self.bn1, self.act = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), activation
        self.depthwise, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.project, self.bn3 = nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.act(self.bn1(self.expand(x)))
        y = nn.functional.silu(self.bn2(self.depthwise(y)))
        return x + self.bn3(self.project(y))


@pytest.mark.parametrize("activation", [nn.SiLU(inplace=True), nn.Hardswish(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.Mish()], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["nhwc", "nchw"])
def test_training_with_other_activations_is_one_node_a_layer(activation, last):
    net = filled(Inverted(activation))
    net = net.to(memory_format=torch.channels_last) if last else net
    wide, (ours, report) = copy.deepcopy(net).double(), vt.convert(net)
    assert report.chains[""] == ["expand + bn1 + act", "depthwise + bn2 + silu", "project + bn3 + add"]
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(3, 4, 9, 8, generator=generator) for _ in range(2))
    x = x.to(memory_format=torch.channels_last) if last else x
    mine = trained(ours, x.clone().requires_grad_(), weight)
    right = trained(wide, x.double().requires_grad_(), weight.double())
    for got, want in zip(mine, right):
        assert got.shape == want.shape and (got.double() - want).abs().max() <= 1e-4 * want.abs().max().clamp_min(1.0)
    names = nodes_of(ours(x.requires_grad_()))
    assert names.count("Verdigris_conv_batch_normBackward") == 3, names
    assert set(names) <= {"Verdigris_conv_batch_normBackward", "torch::autograd::AccumulateGrad"}, names
    wide(x.double())
    # With statistics that stay, and gradients, the normalization and its activation are one call.
    ours.eval(), wide.eval()
    mine, right = trained(ours, x.detach().clone().requires_grad_(), weight), trained(wide, x.detach().double().requires_grad_(), weight.double())
    for got, want in zip(mine, right):
        assert (got.double() - want).abs().max() <= 1e-4 * want.abs().max().clamp_min(1.0)


def test_a_residual_in_front_of_another_activation_is_no_part_of_the_node():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.SiLU()

        def forward(self, x):
            return self.act(self.bn(self.conv(x)) + x)

    net = filled(Late())
    wide, (ours, _) = copy.deepcopy(net).double(), vt.convert(net)
    x, weight = torch.randn(3, 4, 5, 4), torch.randn(3, 4, 5, 4)
    for got, want in zip(trained(ours, x.clone().requires_grad_(), weight), trained(wide, x.double().requires_grad_(), weight.double())):
        assert (got.double() - want).abs().max() <= 1e-4 * want.abs().max().clamp_min(1.0)


def test_training_under_autocast_casts_parameters_inside_the_node():
    """Gradients of parameters come in the parameters' own type, rounded once, and no node stands for a cast."""
    net = filled(Unbiased())
    wide, (ours, _) = copy.deepcopy(net).double(), vt.convert(net)
    x, weight = torch.randn(4, 4, 9, 8).bfloat16(), torch.randn(4, 8, 5, 4)
    step = torch.autocast("cpu", torch.bfloat16)(trained)
    theirs, mine = step(copy.deepcopy(net), x, weight), step(ours, x, weight)
    right = trained(wide, x.double(), weight.double())
    for plain, got, want in zip(theirs, mine, right):
        scale = want.abs().max().clamp_min(1.0)
        assert got.dtype == plain.dtype and (got.double() - want).abs().max() <= 2.0 * (plain.double() - want).abs().max() + 1e-3 * scale
    gradient = dict(ours.named_parameters())["conv1.weight"].grad
    assert gradient.dtype == torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        names = nodes_of(ours(x))
    assert set(names) == {"Verdigris_conv_batch_normBackward", "torch::autograd::AccumulateGrad"}, names


def test_what_cannot_be_one_node_is_computed_all_the_same():
    block = lambda **words: nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5, **words), nn.ReLU())
    x = torch.randn(2, 3, 6, 6)
    # The mean of all batches so far.
    ours, _ = vt.convert(block(momentum=None))
    plain = copy.deepcopy(block(momentum=None))
    plain.load_state_dict(ours.state_dict())
    for _ in range(2):
        ours(x), plain(x)
    assert ours[1].num_batches_tracked == 2
    close(ours[1].running_mean, plain[1].running_mean.double(), 8.0)
    # Statistics that stay, with gradients.
    ours.eval()
    assert "Verdigris_conv_batch_normBackward" not in nodes_of(ours(x))
    # One value a channel has no deviation, and counts as no batch.
    ours, _ = vt.convert(block())
    with pytest.raises(vd.GraphError, match="one value per channel"):
        ours(torch.randn(1, 3, 3, 3))
    assert ours[1].num_batches_tracked == 0
    # An addend that is broadcast.
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)

        def forward(self, x, z):
            return torch.relu(self.bn(self.conv(x)) + z)

    net = Added()
    wide, (ours, _) = copy.deepcopy(net).double(), vt.convert(net)
    for z in (torch.randn(1, 5, 1, 1), torch.randn(2, 5, 4, 4)):
        close(ours(x, z), wide(x.double(), z.double()), 8.0)
        is_alike = z.shape[0] == 2
        assert (nodes_of(ours(x, z))[-1] == "torch::autograd::AccumulateGrad") and ("Verdigris_conv_batch_normBackward" in nodes_of(ours(x, z))) == is_alike


@pytest.mark.parametrize("layer", ["conv", "linear"])
def test_gradients_of_gradients_reach_parameters_that_autocast_rounded(layer):
    plain = nn.Conv2d(3, 4, 3, padding=1) if layer == "conv" else nn.Linear(3, 4)
    x = torch.randn(2, 3, 5, 5) if layer == "conv" else torch.randn(6, 3)
    ours, _ = vt.convert(plain)

    def second(module, x, dtype):
        x = x.clone().to(dtype).requires_grad_()
        parameters = list(module.parameters())
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            y = module(x).float().square().sum() if dtype == torch.float32 else module(x).square().sum()
        grads = torch.autograd.grad(y, [x, *parameters], create_graph=True)
        (sum((grad.square() if dtype == torch.float64 else grad.float().square()).sum() for grad in grads)).backward()
        return [x.grad, *(parameter.grad for parameter in parameters)]

    right = second(copy.deepcopy(plain).double(), x, torch.float64)
    theirs, mine = second(copy.deepcopy(plain), x, torch.float32), second(ours, x, torch.float32)
    for plain_grad, got, want in zip(theirs, mine, right):
        scale = want.abs().max().clamp_min(1.0)
        assert got.dtype == plain_grad.dtype
        assert (got.double() - want).abs().max() <= 2.0 * (plain_grad.double() - want).abs().max() + 1e-2 * scale


def plain_of(net):
    """What PyTorch computes with the same parameters, in f64."""
    wide = copy.deepcopy(net).double()
    return lambda x: wide(x.double())


def test_a_module_that_stands_in_a_sequence_twice_is_called_twice():
    act, linear = nn.GELU(), nn.Linear(4, 4)
    for net, x in (
        (filled(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), act, nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), act)), torch.randn(2, 3, 4, 4)),
        (nn.Sequential(linear, act, linear, act, nn.Linear(4, 4)), torch.randn(3, 4)),
    ):
        _, report = agrees(net, x)
        assert report.chains


class WritesTheAddend(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x, z):
        z = z * 1.0
        return z.add_(self.bn(self.conv(x))) * z


class WritesItByAnOperator(WritesTheAddend):
    def forward(self, x, z):
        z = z * 1.0
        return operator.iadd(z, self.bn(self.conv(x))) * z


class WritesItself(WritesTheAddend):
    def forward(self, x, z):
        return self.bn(self.conv(x)).add_(z)


@pytest.mark.parametrize(
    "kind, chains", [(WritesTheAddend, ["conv + bn"]), (WritesItByAnOperator, None), (WritesItself, ["conv + bn + add_"])]
)
def test_a_sum_in_place_of_the_addend_writes_it(kind, chains):
    x, z = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)
    given = z.clone()
    _, report = agrees(filled(kind()), x, given)
    assert report.chains.get("") == chains and torch.equal(given, z)


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.bn(self.conv(x))
        z = y
        y += x
        return y * z


def test_a_sum_in_place_of_a_tensor_of_two_names_is_left_alone():
    agrees(filled(TwoNames()), torch.randn(2, 4, 5, 5))


def doubled(forward):
    return lambda x: 2 * forward(x)


@pytest.mark.parametrize("part", ["0", "1", "2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_an_instance_is_called(part, when):
    net = filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()))
    x = torch.randn(2, 3, 6, 6)
    if when == "before":
        net.get_submodule(part).forward = doubled(net.get_submodule(part).forward)
    ours, report = vt.convert(net)
    if when == "after":
        for one in (net, ours):
            one.get_submodule(part).forward = doubled(one.get_submodule(part).forward)
        assert report.chains == {"": ["0 + 1 + 2"]}
    ours.eval(), net.eval()
    with torch.no_grad():
        close(ours(x), net(x).double(), 4.0)


def test_what_is_told_to_stay_is_no_part_of_a_chain():
    net = lambda: filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    for keywords, chains in (
        (dict(only=[nn.Conv2d]), {}),
        (dict(only=[nn.Conv2d, nn.BatchNorm2d]), {"": ["0 + 1"]}),
        (dict(skip=["1"]), {}),
        (dict(skip=["0"]), {}),
        (dict(skip=["2"]), {"": ["0 + 1"]}),
        (dict(), {"": ["0 + 1 + 2"]}),
    ):
        assert vt.convert(net(), **keywords)[1].chains == chains
    block = filled(Residual())
    assert vt.convert(nn.ModuleDict({"a": block}), skip=["a.bn1"])[1].chains["a"] == ["conv2 + bn2 + add + relu"]
    assert vt.convert(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3)), skip=["1"])[1].chains == {}


def test_activations_are_read_at_each_call():
    x = torch.randn(2, 3, 6, 6)
    for make, given in (
        (lambda: filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))), x),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 4)), x),
    ):
        net = make()
        ours, report = vt.convert(net)
        at = next(name for name, part in net.named_children() if isinstance(part, nn.LeakyReLU))
        assert report.chains
        net.eval(), ours.eval()
        with torch.no_grad():
            # Another slope, and another module.
            for one in (net, ours):
                one.get_submodule(at).negative_slope = 0.7
            close(ours(given), plain_of(net)(given), 4.0)
            for one in (net, ours):
                one[int(at)] = nn.Softsign()
            close(ours(given), plain_of(net)(given), 4.0)
            for one in (net, ours):
                one[int(at)] = nn.Tanh()
            close(ours(given), plain_of(net)(given), 4.0)
            # A hook on it, and one on every module there is.
            seen = []
            handle = ours[int(at)].register_forward_hook(lambda *arguments: seen.append(1))
            close(ours(given), plain_of(net)(given), 4.0)
            handle.remove()
            assert len(seen) == 1
            names = []
            handle = nn.modules.module.register_module_forward_hook(lambda module, *arguments: names.append(type(module).__name__))
            try:
                close(ours(given), net(given).double(), 4.0)
            finally:
                handle.remove()
            assert len(names) == 2 * (len(net) + 1)


def test_functions_of_a_chain_are_computed_whoever_looks():
    """An activation that is a function of the forward, where the modules are called one by one."""
    net = filled(ByMethod())
    ours, report = vt.convert(net)
    assert report.chains == {"": ["conv + bn + relu"]}
    net.eval(), ours.eval()
    x = torch.randn(2, 4, 5, 5)
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        with torch.no_grad():
            close(ours(x), plain_of(net)(x), 4.0)
    finally:
        handle.remove()


def test_a_sequence_may_be_edited():
    make = lambda: filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    x = torch.randn(2, 3, 8, 8)
    edits = {
        "append": lambda net: net.append(nn.Hardtanh(-0.1, 0.2)),
        "extend": lambda net: net.extend([nn.Tanh(), nn.Conv2d(4, 2, 1)]),
        "insert": lambda net: net.insert(0, nn.Tanh()),
        "delete": lambda net: net.__delitem__(2),
        "replace": lambda net: net.__setitem__(2, nn.Tanh()),
        "module": lambda net: net.add_module("last", nn.Tanh()),
    }
    for edit in edits.values():
        net = make()
        ours, report = vt.convert(net)
        assert report.chains
        torch.manual_seed(3), edit(net), torch.manual_seed(3), edit(ours)
        net.eval(), ours.eval()
        with torch.no_grad():
            close(ours(x), plain_of(net)(x), 4.0)
    ours, _ = vt.convert(make())
    ours.eval()
    with torch.no_grad():
        for part in (ours[:1], ours[1:], ours[:], ours[1:1]):
            assert type(part) is nn.Sequential
        close(ours[1:](ours[:1](x)), ours(x).double(), 4.0)
        close(pickle.loads(pickle.dumps(ours)).append(nn.Tanh())(x), torch.tanh(ours(x).double()), 4.0)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x)) + torch.randn(1)


class Counting(Drawing):
    def forward(self, x):
        return self.bn(self.conv(x)) + torch.arange(5.0)


@pytest.mark.parametrize("kind", [Drawing, Counting])
def test_a_tensor_that_a_forward_makes_is_no_constant(kind):
    net = filled(kind())
    names = set(vars(net))
    ours, report = vt.convert(net)
    assert report.chains == {"": ["conv + bn"]} and set(vars(ours)) == names
    x = torch.randn(1, 4, 5, 5)
    ours.eval(), net.eval()
    with torch.no_grad():
        assert torch.equal(ours(x), ours(x)) == (kind is Counting)
        torch.manual_seed(5), (got := ours(x)), torch.manual_seed(5)
        close(got, net(x).double(), 4.0)


class Registered(nn.Module):
    """A class that keeps a list of those derived from it, as registries of models do, and takes no name twice."""

    derived = []

    def __init_subclass__(cls, **words):
        super().__init_subclass__(**words)
        if cls.__name__ in (one.__name__ for one in Registered.derived):
            raise ValueError(f"{cls.__name__} is there already")
        Registered.derived.append(cls)


class Listing(abc.ABCMeta):
    """As `Registered`, by a metaclass."""

    derived = []

    def __new__(cls, name, bases, body):
        made = super().__new__(cls, name, bases, body)
        Listing.derived.append(made)
        return made

    def __init__(cls, name, bases, body):
        super().__init__(name, bases, body)
        Listing.derived.append(name)


class OfRegistry(Registered):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)

    def forward(self, x):
        return self.norm(self.conv(x))


class OfMetaclass(nn.Module, metaclass=Listing):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)

    def forward(self, x):
        return self.norm(self.conv(x))


def test_the_class_of_a_chain_is_nobodys_news():
    """What a class, or its metaclass, does with each class derived from it is not done for ours: neither by `convert` nor where a copy is made."""
    for kind in (OfRegistry, OfMetaclass):
        before = list(Registered.derived), list(Listing.derived)
        module = filled(kind().eval())
        net, report = vt.convert(module)
        assert report.chains and type(net) is not kind and isinstance(net, kind)
        assert type(net).__bases__ == (kind,) and type(net).__mro__[1:] == kind.__mro__ and type(type(net)) is type(kind)
        x = torch.randn(2, 4, 6, 6)
        with torch.no_grad():
            right = copy.deepcopy(module).double()(x.double())
        for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            with torch.no_grad():
                close(one(x), right, 4.0)
        assert (Registered.derived, Listing.derived) == before
        # Its own classes stay told apart from it, by an abstract base's memory too.
        assert not isinstance(kind(), type(net)) and not issubclass(kind, type(net))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("training", [False, True])
def test_a_chain_without_output_channels_is_the_error_of_its_convolution(training):
    net, report = vt.convert(nn.Sequential(nn.Conv2d(4, 0, 3, bias=False), nn.BatchNorm2d(0), nn.ReLU()).train(training))
    assert report.chains
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(vd.GraphError, match=r"\(0, 4, 3, 3\); there is at least one output channel"):
            net(torch.randn(2, 4, 6, 6))
