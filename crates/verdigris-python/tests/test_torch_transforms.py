"""What stands between a call and its kernel in PyTorch: transforms, forward mode, traces, bits of a tensor that its memory does not show, tensors without memory."""

import copy
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import verdigris as vd
import verdigris.torch as vt
from conftest import close

F = torch.nn.functional
torch.set_num_threads(1)


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


#: By name: a function of a namespace and a tensor, of PyTorch's names.
FUNCTIONS = {
    "conv": (lambda f, x: f.conv2d(x, x.new_ones(3, 2, 2, 2)), (2, 2, 4, 4)),
    "filter": (lambda f, x: f.conv2d(x.new_ones(1, 2, 4, 4), x), (3, 2, 2, 2)),
    "linear": (lambda f, x: f.linear(x.new_ones(2, 3) / 3, x), (4, 3)),
    "activation": (lambda f, x: f.gelu(x), (5,)),
    "norm": (lambda f, x: f.layer_norm(x, (6,)), (3, 6)),
    "softmax": (lambda f, x: f.softmax(x, -1), (3, 6)),
    "batch norm": (lambda f, x: f.batch_norm(x, None, None, training=True), (3, 2, 4)),
    "pool": (lambda f, x: f.max_pool2d(x, 2), (1, 2, 4, 4)),
    "attention": (lambda f, x: f.scaled_dot_product_attention(x, x, x), (1, 2, 3, 4)),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


@EACH
def test_gradients_by_transforms(name):
    function, shape = FUNCTIONS[name]
    x = drawn(*shape)
    of = lambda f: torch.func.grad(lambda x: function(f, x).pow(3).sum())
    torch.testing.assert_close(of(vt)(x), of(F)(x))
    torch.testing.assert_close(torch.func.vjp(lambda x: function(vt, x), x)[0], function(F, x))


@pytest.mark.parametrize("name", ["conv", "filter", "linear", "softmax"])
def test_gradients_of_gradients_by_transforms(name):
    """The levels below the innermost record what it computes."""
    function, shape = FUNCTIONS[name]
    x = drawn(*shape)

    def second(f):
        first = torch.func.grad(lambda x: function(f, x).pow(3).sum())
        return torch.func.grad(lambda x: first(x).square().sum())(x)

    torch.testing.assert_close(second(vt), second(F))
    # And autograd below all of them.
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for f, leaf in zip((vt, F), leaves):
        torch.func.grad(lambda x: function(f, x).pow(3).sum())(leaf).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_gradients_of_each_sample():
    w, x = drawn(3, 2, 2, 2), drawn(4, 2, 5, 5)
    of = lambda f: torch.func.vmap(torch.func.grad(lambda w, x: f.conv2d(x[None], w).square().sum()), (None, 0))(w, x)
    torch.testing.assert_close(of(vt), of(F))


@EACH
def test_forward_mode_is_refused_by_name(name):
    function, shape = FUNCTIONS[name]
    x, tangent = drawn(*shape), drawn(*shape)

    def dual():
        with forward_ad.dual_level():
            return function(vt, forward_ad.make_dual(x, tangent))

    def dual_of_a_leaf():
        with forward_ad.dual_level():
            return function(vt, forward_ad.make_dual(x.clone().requires_grad_(), tangent))

    loss = lambda x: function(vt, x).sum()
    for run in (dual, dual_of_a_leaf, lambda: torch.func.jvp(loss, (x,), (tangent,)), lambda: torch.func.jacfwd(loss)(x), lambda: torch.func.hessian(loss)(x)):
        with pytest.raises(vd.UnsupportedError, match="forward-mode differentiation of `"):
            run()
    with forward_ad.dual_level():
        # What has no tangent is computed.
        close(function(vt, x), function(F, x))


def test_functions_of_their_own_refuse_transforms_by_name():
    x, target = drawn(3, 4), torch.tensor([0, 1, 2])
    w = drawn(5, 4)
    for run in (lambda x: vt.linear_cross_entropy(x, w, target), lambda x: vt.unfold(x.reshape(1, 1, 3, 4), 2).sum()):
        with pytest.raises(vd.UnsupportedError, match="within a transform of torch.func"):
            torch.func.grad(run)(x)
        with pytest.raises(vd.UnsupportedError, match="forward-mode"):
            torch.func.jvp(run, (x,), (x,))


def test_a_trace_records_calls():
    w = torch.randn(4, 3, 3, 3)
    net, _ = vt.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(36, 3)))
    net.eval()
    x, other = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 5)
    for function in (lambda x: vt.conv2d(x, w), net):
        traced = torch.jit.trace(function, (x,), check_trace=False)
        close(traced(other), function(other).double())
    with torch.no_grad():
        traced = torch.jit.trace(net, (x,), check_trace=False)
        close(traced(other), net(other).double())


def test_negatives_are_resolved():
    """`x.conj().imag` has the memory of `x.imag`, and a bit that says so."""
    x = torch.fft.rfft(torch.randn(2, 3, 8, 8)).conj().imag
    assert x.is_neg()
    w = torch.randn(4, 3, 3, 3)
    for view in (x, x[:, :, 1:, 1:], x.transpose(2, 3), x.expand(2, 3, 8, 5)):
        close(vt.conv2d(view, w), F.conv2d(view.double(), w.double()), 4.0)
    close(vt.relu(x[0, 0, 0, 1]), F.relu(x[0, 0, 0, 1]).double())
    close(vt.relu(x[0, :1, :1, 1]), F.relu(x[0, :1, :1, 1]).double())
    # Saved for a gradient, and as a gradient.
    leaf = w.clone().requires_grad_()
    vt.conv2d(x, leaf).sum().backward()
    right = w.double().requires_grad_()
    F.conv2d(x.double(), right).sum().backward()
    close(leaf.grad, right.grad, 4.0)
    y = torch.randn(2, 3, 8, 5, requires_grad=True)
    vt.gelu(y).backward(x)
    wide = y.detach().double().requires_grad_()
    F.gelu(wide).backward(x.double())
    close(y.grad, wide.grad, 4.0)


def test_tensors_without_memory():
    net, _ = vt.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(36, 3)).to("meta"))
    x = torch.empty(2, 3, 5, 5, device="meta", requires_grad=True)
    y = net(x)
    assert y.is_meta and y.shape == (2, 3)
    y.sum().backward()
    assert x.grad.is_meta and net[0].weight.grad.shape == (4, 3, 3, 3)
    with torch.no_grad():
        assert net.eval()(x).shape == (2, 3) and vt.layer_norm(x, (5,)).shape == x.shape


def test_autocast_widens_what_pytorch_widens():
    """By tensors without memory, which tell types on machines without a GPU as well."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    functions = {
        "softplus": lambda f, x: f.softplus(x),
        "nearest": lambda f, x: f.interpolate(x, scale_factor=2),
        "nearest-exact": lambda f, x: f.interpolate(x, scale_factor=2, mode="nearest-exact"),
        "bilinear": lambda f, x: f.interpolate(x, scale_factor=2, mode="bilinear"),
        "bicubic": lambda f, x: f.interpolate(x, scale_factor=2, mode="bicubic"),
        "area": lambda f, x: f.interpolate(x, scale_factor=2, mode="area"),
        "relu": lambda f, x: f.relu(x),
        "gelu": lambda f, x: f.gelu(x),
        **{name: lambda f, x, name=name: getattr(f, name)(x) for name in ("selu", "celu", "logsigmoid", "hardshrink", "softshrink", "tanhshrink", "softsign", "rrelu", "glu")},
        "threshold": lambda f, x: f.threshold(x, 0.5, 2.0),
        "softmin": lambda f, x: f.softmin(x, 1),
        "prelu": lambda f, x: f.prelu(x.float(), x.new_empty(4, dtype=torch.float32)),
        "alpha_dropout": lambda f, x: f.alpha_dropout(x, 0.5, True),
        "dropout2d": lambda f, x: f.dropout2d(x),
        "max_pool": lambda f, x: f.max_pool2d(x, 2),
        "softmax": lambda f, x: f.softmax(x, 1),
        "layer_norm": lambda f, x: f.layer_norm(x, (6,)),
        "group_norm": lambda f, x: f.group_norm(x, 2),
        "mse_loss": lambda f, x: f.mse_loss(x, x),
        "pad": lambda f, x: f.pad(x, (1, 1)),
        "reflect": lambda f, x: f.pad(x, (1, 1, 1, 1), mode="reflect"),
    }
    with FakeTensorMode():
        for kind in ("cuda", "cpu"):
            x = torch.empty(2, 4, 6, 6, device=kind, dtype=torch.bfloat16)
            before, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            torch.set_autocast_enabled(kind, True), torch.set_autocast_dtype(kind, torch.bfloat16)
            try:
                for name, function in functions.items():
                    if kind == "cuda" or name in ("softplus", "prelu", "glu", "logsigmoid", "nearest", "bilinear", "bicubic"):
                        assert function(vt, x).dtype == function(F, x).dtype, (kind, name)
            finally:
                torch.set_autocast_enabled(kind, before), torch.set_autocast_dtype(kind, dtype)


class Rows(torch.nn.Module):
    """Frozen normalization with a residual and ReLU behind it, and what stands before and after it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = torch.nn.Conv2d(3, 3, 3, padding=1), torch.nn.BatchNorm2d(3), torch.nn.ReLU()
        self.first = torch.nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)) + self.first(x))


TRACED = {
    "two layers": (lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)), (5, 6)),
    "normalization": (lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()), (2, 3, 6, 6)),
    "without an activation": (lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4, affine=False)), (2, 3, 6, 6)),
    "transposed": (lambda: torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 4, 3), torch.nn.BatchNorm2d(4)), (2, 3, 6, 6)),
    "residual": (Rows, (2, 3, 6, 6)),
    "maxima": (lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.MaxPool2d(2), torch.nn.AdaptiveMaxPool2d(1)), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_is_the_same_in_both_modes(name):
    """PyTorch traces again without gradients and compares; and what was traced in one mode is run in the other, with gradients of all that there is."""
    make, dims = TRACED[name]
    torch.manual_seed(3)
    module = make().eval()
    net, _ = vt.convert(module)
    truth = copy.deepcopy(module).double()
    x, other = torch.randn(dims), torch.randn(dims)
    texts = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            # An addend's dims are compared with those of what it is added to, and a transposed convolution's result has dims of its own.
            warnings.simplefilter("ignore" if name in ("residual", "transposed") else "error", torch.jit.TracerWarning)
            traced = torch.jit.trace(net, (x,))
        texts.append([node.kind() for node in traced.inlined_graph.nodes()])
        with torch.no_grad():
            close(traced(other), truth(other.double()))
        mine, right = other.clone().requires_grad_(), other.double().requires_grad_()
        wanted = [(mine, *traced.parameters()), (right, *truth.parameters())]
        y = traced(mine)
        assert y.requires_grad
        for one, its in zip(torch.autograd.grad(y.square().sum(), wanted[0]), torch.autograd.grad(truth(right).square().sum(), wanted[1])):
            close(one, its, 8.0)
    assert texts[0] == texts[1]


def test_operators_for_inference_have_the_gradients_of_the_others():
    """Whoever calls them by name, as a trace does: gradients, and gradients of these."""
    x, w, vector = drawn(2, 3, 5, 5), drawn(4, 3, 3, 3), lambda: torch.rand(4, dtype=torch.float64) + 0.5
    ops = torch.ops.verdigris
    calls = {
        "conv_norm": (lambda x, w: ops.conv_norm(x, w, None, *norm, None, "stride=1,1 padding=0,0 dilation=1,1 groups=1 eps=1e-05|f=tanh"), (x, w)),
        "max_pool_values": (lambda x: ops.max_pool_values(x.tanh(), "window=2,2 stride=2,2 padding=0,0 dilation=1,1"), (x,)),
        "mlp_inference": (lambda x, up, down: ops.mlp_inference(x, up, None, down, None, "f=relu"), (drawn(4, 5), drawn(6, 5), drawn(3, 6))),
        "gated_mlp_inference": (lambda x, gate, up, down: ops.gated_mlp_inference(x, gate, up, down, None, "f=relu"), (drawn(4, 5), drawn(6, 5), drawn(6, 5), drawn(3, 6))),
    }
    norm = vector(), vector(), vector(), vector()
    for name, (call, inputs) in calls.items():
        inputs = [value.double().requires_grad_() for value in inputs]
        assert torch.autograd.gradcheck(call, inputs), name
        if "mlp" in name:
            assert torch.autograd.gradgradcheck(call, inputs), name
