"""Forwards of users' modules that `convert` finds chains in: what they compute, write, draw and decide is what it was, at each call."""

import copy
import functools
import inspect
import itertools
import pickle
import random
from typing import Callable, Optional

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from conftest import close

import verdigris.torch as vt
from torch import Tensor, nn

torch.set_num_threads(1)


class Block(nn.Module):
    """What the forwards below are made of."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.identity = nn.ReLU(), nn.Identity()
        self.scale, self.flag, self.branch, self.cache = 2.0, True, None, {}
        self.writer, self.function = Writes(), torch.tanh
        self.register_buffer("factor", torch.ones(3))
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for conv in (self.conv, self.conv2):
                conv.weight.copy_(torch.randn(conv.weight.shape, generator=generator) / 3)
            for norm in (self.bn, self.bn2):
                norm.running_mean.copy_(torch.randn(4, generator=generator))
                norm.running_var.copy_(torch.rand(4, generator=generator) + 0.5)

    @property
    def on(self):
        return self.training

    def chained(self, x):
        return self.bn(self.conv(x))


class Writes(nn.Module):
    def forward(self, x):
        x.mul_(2)
        return x


def read_as(forward, **more):
    """A module with a forward, and with other attributes of its class."""
    return type("Module", (Block,), dict(forward=forward, **more))()


def outcome(net, x, dtype, training, steps, **keywords):
    """All that is seen of a few calls: results, what became of the input, whether there are gradients, and buffers."""
    net = net.to(dtype).train(training)
    seen = []
    for seed in range(steps):
        torch.manual_seed(seed), random.seed(seed)
        given = x.to(dtype)
        y = net(given.clone() if keywords.get("keeps") else given)
        seen += [y.detach().clone(), given.clone(), torch.tensor(float(y.requires_grad))]
    return [one.double() for one in (*seen, *net.buffers())]


def holds(net, chains=..., steps=2, before=None):
    """The converted module does what the module did, in both modes, with gradients and without. In f64 first, where nothing but an order of sums differs."""
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(2))
    for converted_in in (True, False):
        plain = copy.deepcopy(net).train(converted_in)
        ours, report = vt.convert(copy.deepcopy(plain), inplace=True)
        if chains is not ...:
            assert report.chains.get("") == chains
        assert set(vars(ours)) == set(vars(plain))
        for training in (True, False):
            for grad in (True, False):
                one, other = copy.deepcopy(ours), copy.deepcopy(plain)
                if before is not None:
                    before(one), before(other)
                with torch.set_grad_enabled(grad):
                    mine, right = (outcome(each, x.clone(), torch.float64, training, steps) for each in (one, other))
                for got, want in zip(mine, right, strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)
    return ours


# Annotations are no part of what a forward does.


def optional(self, x, y: Optional[Tensor] = None) -> Tensor:
    return self.relu(self.bn(self.conv(x)))


def united(self, x: "Tensor | None", factor: float = 1.0) -> "Tensor | None":
    return self.relu(self.bn(self.conv(x)))


def given_a_function(self, x: Callable[[Tensor], Tensor]):
    return self.relu(self.bn(self.conv(x)))


@pytest.mark.parametrize("forward", [optional, united, given_a_function])
def test_annotations_are_passed_over(forward):
    holds(read_as(forward), ["conv + bn + relu"])


def test_annotations_by_classes_of_a_function_are_passed_over():
    class Local:
        pass

    def forward(self, x: Local, y: Local = None) -> Local:
        return self.relu(self.bn(self.conv(x)))

    ours = holds(read_as(forward))
    assert list(inspect.signature(type(ours).forward).parameters) == ["self", "x", "y"]


# A wrapper does more than the source that it shows.


def wrapped(function):
    @functools.wraps(function)
    def as_trained(self, x):
        return function(self, x) if self.training else x

    return as_trained


@torch.no_grad()
def without_gradients(self, x):
    return self.relu(self.bn(self.conv(x)))


@wrapped
def in_training(self, x):
    return self.relu(self.bn(self.conv(x)))


@torch.no_grad()
def without_gradients_by_chance(self, x):
    return self.bn(self.conv(x)) * random.random()


def calls_a_wrapped(self, x):
    return in_training(self, x)


@pytest.mark.parametrize("forward", [without_gradients, in_training, without_gradients_by_chance, calls_a_wrapped])
def test_a_forward_in_a_wrapper_is_left_alone(forward):
    holds(read_as(forward), None)


def test_source_that_is_no_longer_what_was_compiled_is_not_read(tmp_path):
    import importlib.util

    path = tmp_path / "edited_forward.py"
    text = "def forward(self, x):\n    return self.bn(self.conv(x)) * {}\n"
    path.write_text(text.format("2"))
    spec = importlib.util.spec_from_file_location("edited_forward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    holds(read_as(module.forward), ["conv + bn"])
    path.write_text(text.format("3"))
    holds(read_as(module.forward), None)


# What is drawn, counted or read is so at each call.


def mixed_by_a_number(self, x):
    y = self.bn(self.conv(x))
    z = self.conv2(x)
    a = torch.rand(1).item()
    return a * y + (1 - a) * z


def imports(self, x):
    import random

    return self.bn(self.conv(x)) * random.random()


def by_chance(self, x):
    return self.bn(self.conv(x)) * random.random()


def by_a_buffer(self, x):
    return self.bn(self.conv(x)) * torch.sum(self.factor).item()


def by_a_number(self, x):
    return self.bn(self.conv(x)) * self.scale + x


def by_a_property(self, x):
    y = self.bn(self.conv(x))
    if self.on:
        y = y * 2
    return y


def by_a_decision(self, x):
    y = self.bn(self.conv(x))
    if self.flag and self.branch is None:
        return y
    return y * 3 if not self.flag else y * 5


def by_a_function_of_its_own(self, x):
    return self.function(self.bn(self.conv(x)))


def by_a_method(self, x):
    return self.relu(self.chained(x))


def by_its_mode(self, x):
    return F.dropout(self.bn(self.conv(x)), 0.5, self.training)


def with_a_list(self, x):
    parts = []
    parts.append(self.bn(self.conv(x)))
    parts.append(self.bn2(self.conv2(x)))
    return torch.cat(parts, 1)


def with_parts(self, x):
    a, b = x.chunk(2, 1)
    c = torch.cat([b, a], dim=1)
    return self.relu(self.bn(self.conv(c)) + x[:, :, :, -5:].reshape(x.shape[0], -1, *[5, 5]))


def with_shapes(self, x):
    n, c = x.shape[0], x.size(1)
    return self.relu(self.bn(self.conv(x)) + x.view(n, c, -1).view(x.shape)).flatten(1).view(n, -1)


@pytest.mark.parametrize(
    "forward, chains",
    [
        (mixed_by_a_number, ["conv + bn"]),
        (imports, None),
        (by_chance, None),
        (by_a_buffer, ["conv + bn"]),
        (by_a_number, ["conv + bn"]),
        (by_a_property, None),
        (by_a_decision, ["conv + bn"]),
        (by_a_function_of_its_own, ["conv + bn"]),
        (by_a_method, ["conv + bn + relu"]),
        (by_its_mode, ["conv + bn"]),
        (with_a_list, ["conv + bn", "conv2 + bn2"]),
        (with_parts, None),
        (with_shapes, ["conv + bn + add + relu"]),
    ],
)
def test_what_is_drawn_or_read_is_so_at_each_call(forward, chains):
    net = read_as(forward)
    holds(net, chains)

    def changed(module):
        # After conversion.
        module.scale, module.flag, module.function = 5.0, False, torch.sin
        module.factor.fill_(3.0)

    holds(net, chains, before=changed)


def test_a_method_that_an_instance_was_given_is_called():
    def own(module):
        module.chained = lambda x: x + 1

    assert read_as(by_a_method)(torch.zeros(1, 4, 3, 3)).shape == (1, 4, 3, 3)
    x = torch.randn(1, 4, 3, 3)
    ours, _ = vt.convert(read_as(by_a_method).eval())
    own(ours)
    assert torch.equal(ours(x), torch.relu(x + 1))


# What is stored or written is stored and written.


def keeps(self, x):
    y = self.relu(self.bn(self.conv(x)))
    self.cache["y"] = y
    return y


def sets(self, x):
    self.last = self.relu(self.bn(self.conv(x)))
    return self.last


def writes_a_view(self, x):
    z = x.flatten(1)
    z += 1
    return self.bn(self.conv(x))


def writes_by_a_module(self, x):
    z = self.identity(x)
    z += 1
    return self.bn(self.conv(x))


def writes_a_part(self, x):
    a, b = x.chunk(2, 1)
    a += b
    return self.bn(self.conv(x))


def writes_what_it_is_given(self, x, /):
    x += 1
    return self.bn(self.conv(x))


def writes_by_a_tuple(self, x):
    y, z = x, x
    y *= 2
    return self.bn(self.conv(z))


def writes_by_an_annotated_name(self, x):
    y: Tensor = x
    y -= 1
    return self.bn(self.conv(x))


def writes_between(self, x):
    y = self.bn(self.conv(x))
    z = self.writer(x)
    return y + z


def writes_out_between(self, x):
    y = self.bn(self.conv(x))
    z = torch.mul(x, 2, out=x)
    return y + z


def writes_in_place_between(self, x):
    y = self.bn(self.conv(x))
    z = F.relu(x, True)
    return y + z


def numbers_in_place(self, x):
    a = x.shape[0]
    b = a
    a += 1
    return self.bn(self.conv(x)) * a + b


def adds_in_place(self, x):
    y = self.bn(self.conv(x))
    y += x
    return self.relu(y)


def names_a_global(self, x):
    if not self.flag:
        global seen_last
    seen_last = self.bn(self.conv(x))
    return seen_last


def shares_a_name(self, x):
    y = self.bn(self.conv(x))
    if not self.flag:
        return (lambda: y)()
    return y


def generates(self, x):
    return self.bn(self.conv(x))
    yield x


def loops(self, x):
    for conv in (self.conv, self.conv2):
        x = self.bn(conv(x))
    return x


def decides_by_its_input(self, x, y=None):
    return self.bn(self.conv(x)) if y is None else y


@pytest.mark.parametrize("forward", [names_a_global, shares_a_name, generates, loops, decides_by_its_input], ids=lambda forward: forward.__name__)
def test_what_is_not_on_the_list_is_left_alone(forward):
    assert not vt.convert(read_as(forward))[1].chains
    if forward is not generates:
        holds(read_as(forward), None)


STORES = {
    keeps: None,
    sets: None,
    writes_a_view: ["conv + bn"],
    writes_by_a_module: ["conv + bn"],
    writes_a_part: ["conv + bn"],
    writes_what_it_is_given: None,
    writes_by_a_tuple: ["conv + bn"],
    writes_by_an_annotated_name: ["conv + bn"],
    writes_between: ["conv + bn"],
    writes_out_between: ["conv + bn"],
    writes_in_place_between: ["conv + bn"],
    numbers_in_place: ["conv + bn"],
    adds_in_place: ["conv + bn + add + relu"],
}


@pytest.mark.parametrize("forward", STORES, ids=lambda forward: forward.__name__)
def test_what_is_written_is_written(forward):
    if forward is sets:
        # The attribute is new with the first call.
        x = torch.randn(1, 4, 3, 3)
        ours, report = vt.convert(read_as(forward).eval())
        assert ours(x) is ours.last and not report.chains
        return
    with torch.no_grad():
        ours = holds(read_as(forward), STORES[forward])
    if forward is keeps:
        y = ours(torch.randn(1, 4, 3, 3))
        assert ours.cache["y"] is y


# A sum behind a normalization is of what it is given.


def adds_a_number(self, x):
    return self.relu(self.bn(self.conv(x)) + self.scale)


def adds_a_size(self, x):
    y = self.bn(self.conv(x))
    y += x.shape[1]
    return self.relu(y)


def adds_another_type_in_place(self, x):
    y = self.bn(self.conv(x))
    y += x.float()
    return self.relu(y)


def adds_another_type(self, x):
    return self.relu(self.bn(self.conv(x)).add(x.float()))


def adds_what_broadcasts_in_place(self, x):
    return self.relu(self.bn(self.conv(x)).add_(x[:1]))


SUMS = [adds_a_number, adds_a_size, adds_another_type_in_place, adds_another_type, adds_what_broadcasts_in_place]


@pytest.mark.parametrize("forward", SUMS, ids=lambda forward: forward.__name__)
def test_sums_are_those_that_are_written(forward):
    ours = holds(read_as(forward))
    assert vt.convert(read_as(forward))[1].chains
    # Where the type of the sum is told by one side alone.
    x, net = torch.randn(2, 4, 5, 5), read_as(forward)
    for dtype in (torch.bfloat16, torch.float16):
        for training, grad in itertools.product([True, False], repeat=2):
            with torch.set_grad_enabled(grad):
                mine, right = (copy.deepcopy(one).to(dtype).train(training)(x.to(dtype)) for one in (ours, net))
            assert mine.dtype == right.dtype
            assert (mine.double() - right.double()).abs().max() <= 16 * torch.finfo(dtype).eps * right.double().abs().max()
    with torch.no_grad(), pytest.raises(RuntimeError, match="output with shape"):
        # In place nothing grows.
        vt.convert(read_as(grows_in_place).eval())[0](x)


def grows_in_place(self, x):
    return self.relu(self.bn(self.conv(x[:1])).add_(x))


# A chain is computed where its last node stands.


def one_norm_twice(self, x):
    y = self.bn(self.conv(x))
    z = self.bn(self.conv2(x))
    return self.relu(y + z)


def reads_a_statistic(self, x):
    y = self.bn(self.conv(x))
    m = self.bn.running_mean.view(1, 4, 1, 1) * x
    return self.relu(y + m)


def reads_a_statistic_it_named_before(self, x):
    m = self.bn.running_mean.view(1, 4, 1, 1)
    y = self.bn(self.conv(x))
    z = x * m
    return self.relu(y + z)


def another_norm_between(self, x):
    y = self.bn(self.conv(x))
    z = self.bn2(self.conv2(x))
    return self.relu(y + z)


@pytest.mark.parametrize(
    "forward, chains",
    [
        (one_norm_twice, ["conv + bn", "conv2 + bn + add + relu"]),
        (reads_a_statistic, ["conv + bn"]),
        (reads_a_statistic_it_named_before, ["conv + bn"]),
        (another_norm_between, ["conv + bn + add + relu", "conv2 + bn2"]),
    ],
)
def test_statistics_are_those_of_the_order_that_is_written(forward, chains):
    holds(read_as(forward), chains)


def test_norms_that_share_a_buffer_keep_their_order():
    net = read_as(another_norm_between)
    net.bn2.running_mean = net.bn.running_mean
    ours, report = vt.convert(copy.deepcopy(net), inplace=True)
    assert report.chains[""] == ["conv + bn", "conv2 + bn2 + add + relu"]
    x = torch.randn(2, 4, 5, 5)
    ours.train()(x), net.train()(x)
    close(ours.bn.running_mean, net.bn.running_mean.double(), 8.0)


# What the code is made of.


def by_functions(self, x):
    y = torch.add(self.bn(self.conv(x)), x, alpha=2)
    z = self.function(self.conv2(y), out=None) if self.flag else y
    return {"all": torch.cat((F.relu(y), x.to(torch.float64), -z.mT.mT, y ** 2, 2 / (y + 1e3)), dim=-3), "part": [z[..., None, 1:-1, 0], len(y) // 2, y > 0]}


def test_code_says_what_the_source_says():
    net = read_as(by_functions).double().eval()
    ours, report = vt.convert(net)
    assert report.chains[""] == ["conv + bn"]
    x = torch.randn(2, 4, 5, 5).double()
    mine, right = ours(x), net(x)
    assert set(mine) == set(right) and type(mine["part"]) is list and mine["part"][1] == right["part"][1] == 1
    torch.testing.assert_close([mine["all"], mine["part"][0], mine["part"][2]], [right["all"], right["part"][0], right["part"][2]])


def test_classes_are_made_anew_by_who_reads_a_file():
    ours, report = vt.convert(Picklable().eval())
    assert report.chains[""] == ["conv + bn"]
    x = torch.randn(1, 4, 3, 3)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(x), ours(x))


class Picklable(Block):
    def forward(self, x, y=None, factor: Optional[float] = -1.5):
        z = torch.cat([self.bn(self.conv(x)) * factor, x], 1)
        return z.clamp(float("-1"), 2)


def test_the_compiler_reads_conditions():
    torch._dynamo.reset()
    net = read_as(by_a_method).eval()
    ours, report = vt.convert(net)
    assert report.chains[""] == ["conv + bn + relu"]
    x = torch.randn(1, 4, 3, 3)
    with torch.no_grad():
        close(torch.compile(ours, backend="eager", fullgraph=True)(x), ours(x).double(), 1.0)
        graph = torch.fx.symbolic_trace(vt.convert(read_as(with_shapes).eval())[0])
        close(graph(x), read_as(with_shapes).eval()(x).double(), 4.0)


def test_a_function_that_no_code_can_name_leaves_the_module(monkeypatch):
    from verdigris.torch import _chains

    def unnamed(*arguments):
        raise RuntimeError("no name")

    monkeypatch.setattr(_chains, "_derived", unnamed)
    ours, report = vt.convert(read_as(by_a_method).eval())
    assert not report.chains and report.swapped
    assert ours(torch.zeros(1, 4, 3, 3)).shape == (1, 4, 3, 3)


def test_a_norm_of_other_dims_is_refused_in_a_chain_too():
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm1d(4)).eval()
    ours, report = vt.convert(net)
    assert report.chains
    with torch.no_grad(), pytest.raises(ValueError, match="expected 2D or 3D input"):
        ours(torch.randn(2, 4, 3, 3))


# Networks.

#: Chains of each of torchvision's networks: modules that hold some, and how many there are.
CHAINS = {
    "convnext_tiny": (18, 18),
    "densenet121": (1, 1),
    "efficientnet_b0": (49, 49),
    "googlenet": (61, 61),
    "inception_v3": (96, 96),
    "mnasnet0_5": (17, 52),
    "mobilenet_v2": (52, 52),
    "mobilenet_v3_small": (35, 35),
    "r2plus1d_18": (20, 21),
    "regnet_y_400mf": (53, 53),
    "resnet18": (12, 20),
    "resnet50": (21, 53),
    "resnext50_32x4d": (21, 53),
    "s3d": (77, 77),
    "shufflenet_v2_x0_5": (21, 56),
    "swin_t": (12, 12),
    "vgg11_bn": (2, 9),
    "vit_b_16": (12, 12),
}


@pytest.mark.parametrize("name", CHAINS)
def test_networks_have_their_chains(name):
    models = pytest.importorskip("torchvision").models
    # RegNet reads its weights as it makes them.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        keywords = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        model = getattr(models.video if hasattr(models.video, name) else models, name)(**keywords)
    chains = vt.convert(model, inplace=True)[1].chains
    assert (len(chains), sum(map(len, chains.values()))) == CHAINS[name]


def scaled_by_the_greater(y):
    return y * max(y.shape[1], 3)


class TakesMax(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x, max=None):
        return scaled_by_the_greater(self.norm(self.conv(x)))


def test_a_parameter_that_hides_a_global_of_helpers_is_left_alone():
    net, x = TakesMax().eval(), torch.randn(1, 4, 5, 5)
    made, _ = vt.convert(net)
    torch.testing.assert_close(made(x), net(x), rtol=1e-4, atol=1e-4)
