"""Dropout of PyTorch's tensors: the mask against Philox in plain integers, and what keeps it the same."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import verdigris.torch as vt
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


def philox(counter, key, rounds=10):
    """Philox4x32 as the paper has it."""
    mask = 0xFFFFFFFF
    for turn in range(rounds):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        k = [(key[0] + turn * 0x9E3779B9) & mask, (key[1] + turn * 0xBB67AE85) & mask]
        counter = [second >> 32 ^ counter[1] ^ k[0], second & mask, first >> 32 ^ counter[3] ^ k[1], first & mask]
    return counter


def uniform(state, count):
    seed_low, seed_high, low, high = (word & 0xFFFFFFFF for word in state)
    numbers = []
    for block in range((count + 3) // 4):
        at = ((high << 32 | low) + block) % 2**64
        numbers += [(word >> 8) / 2**24 for word in philox([at & 0xFFFFFFFF, at >> 32, 0, 0], [seed_low, seed_high])]
    return numbers[:count]


def test_philox_is_that_of_the_paper():
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(counter, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert philox([0] * 4, [0] * 2, 7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


STATES = [[1, 2, 3, 4], [-1, -2**31, 7, 0], [5, 0, -3, -1]]


@pytest.mark.parametrize("state, p, dtype", list(itertools.product(STATES, [0.1, 0.5, 1.0], [torch.float32, torch.bfloat16, torch.float64])))
def test_the_mask_is_that_of_the_state(state, p, dtype):
    x = torch.rand(3, 5, 7).add(1).to(dtype).requires_grad_()
    y = vt.functional.dropout(x, p, state=torch.tensor(state, dtype=torch.int32))
    # The probability is that of f32.
    keep = torch.tensor(uniform(state, x.numel()), dtype=torch.float32) >= torch.tensor(p, dtype=torch.float32)
    keep = keep.reshape(x.shape)
    scale = 1 / (1 - p) if p < 1 else 0.0
    torch.testing.assert_close(y, torch.where(keep, x.double() * scale, 0.0).to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert torch.equal(y != 0, keep)
    weight = torch.rand_like(x) + 1
    (dx,) = torch.autograd.grad((y * weight).sum(), x)
    assert torch.equal(dx != 0, keep)
    torch.testing.assert_close(dx.double(), torch.where(keep, weight.double() * scale, 0.0), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)


def test_the_mask_is_the_same_in_every_memory_format():
    state = torch.tensor([9, 8, 7, 6], dtype=torch.int32)
    x = torch.rand(2, 6, 3, 5) + 1
    y = vt.functional.dropout(x, 0.3, state=state)
    assert 0 < (y == 0).sum() < y.numel()
    wide = torch.zeros(2, 6, 3, 10)
    wide[..., ::2] = x
    for other in (x.to(memory_format=torch.channels_last), x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), wide[..., ::2]):
        assert torch.equal(vt.functional.dropout(other, 0.3, state=state), y)
    last = vt.functional.dropout(x.to(memory_format=torch.channels_last), 0.3, state=state)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_gradients_of_any_order():
    state = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    x = torch.rand(4, 5, dtype=torch.float64, requires_grad=True)

    def function(x):
        return vt.functional.dropout(x, 0.4, state=state).pow(3)

    assert torch.autograd.gradcheck(function, (x,)) and torch.autograd.gradgradcheck(function, (x,))
    y = vt.functional.dropout(x, 0.4, state=state)
    assert type(y.grad_fn).__name__ == "Verdigris_dropoutBackward" and y.grad_fn.next_functions[0][0].variable is x


def test_states_come_from_pytorchs_generator():
    x = torch.ones(64, 64)
    torch.manual_seed(3)
    first, second = vt.functional.dropout(x), vt.functional.dropout(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(vt.functional.dropout(x), first) and torch.equal(vt.functional.dropout(x), second)
    share = (first == 0).double().mean().item()
    # Five deviations of 4096 throws.
    assert abs(share - 0.5) < 5 * 0.5 / 64
    leaf = x.clone().requires_grad_()
    y = checkpoint(lambda x: vt.functional.dropout(x) ** 2, leaf, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(leaf.grad != 0, y != 0)


def kept(state, count, p):
    return torch.tensor(uniform(state.tolist(), count), dtype=torch.float32) >= torch.tensor(p, dtype=torch.float32)


CHANNELS = [
    (vt.functional.dropout1d, (4, 3, 5)),
    (vt.functional.dropout1d, (16, 5)),
    (vt.functional.dropout2d, (4, 3, 5, 2)),
    (vt.functional.dropout3d, (4, 6, 2, 2, 2)),
    (vt.functional.dropout3d, (16, 2, 4, 2)),
    (vt.functional.feature_alpha_dropout, (4, 3, 5)),
    (vt.functional.feature_alpha_dropout, (4, 3)),
    (vt.functional.alpha_dropout, (4, 3, 5)),
    (vt.functional.alpha_dropout, (16,)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function, shape", CHANNELS)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_channels_and_moments(function, shape, dtype, p):
    """Against the formulas of PyTorch's, with the mask of the state: a channel's number is that of its element in `[n, c]`."""
    state = torch.tensor([9, 8, 7, 6], dtype=torch.int32)
    name, is_alone = function.__name__, (function.__name__, len(shape)) in (("dropout1d", 2), ("dropout3d", 4))
    lead = shape if name == "alpha_dropout" else shape[:1] if is_alone else shape[:2]
    keep = kept(state, torch.Size(lead).numel(), p).reshape(*lead, *[1] * (len(shape) - len(lead)))
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    assert p == 1.0 or not keep.all() and keep.any()
    factor, moved, alpha = (1 / (1 - p) if p < 1 else 0.0), 0.0, 1.7580993408473766
    if "alpha" in name and p < 1:
        factor = ((alpha**2 * p + 1) * (1 - p)) ** -0.5
        moved = alpha * factor * (p - 1) + alpha * factor * keep.double()
    formats = [x, torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2].copy_(x)]
    formats += [x.to(memory_format=torch.channels_last)] if len(shape) == 4 else []
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for given in formats:
        leaf = given.detach().requires_grad_()
        y = function(leaf, p, True, state=state)
        torch.testing.assert_close(y.double(), torch.where(keep, x.double() * factor, 0.0) + moved, rtol=tolerance, atol=tolerance)
        dy = torch.randn(shape, dtype=torch.float64).to(dtype)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        torch.testing.assert_close(dx.double(), torch.where(keep, dy.double() * factor, 0.0), rtol=tolerance, atol=tolerance)
        assert y.dtype == dx.dtype == dtype
    assert torch.equal(function(x, p, False), x) and torch.equal(function(x, 0.0, True), x)
    if dtype == torch.float64:
        leaf = x.requires_grad_()
        assert torch.autograd.gradcheck(lambda x: function(x, p, True, state=state), (leaf,))
        assert torch.autograd.gradgradcheck(lambda x: function(x, p, True, state=state).pow(3), (leaf,))


def test_moments_stay():
    """Of a million normally distributed numbers: mean and variance are within five of their deviations."""
    torch.manual_seed(1)
    x = torch.randn(1000, 1000)
    y = vt.functional.alpha_dropout(x, 0.3, training=True)
    assert abs(y.mean()) < 5e-3 and abs(y.var() - 1) < 1e-2
    assert vt.functional.alpha_dropout(x, 0.3) is x and vt.functional.feature_alpha_dropout(x, 0.3) is x
    share = (vt.functional.dropout1d(torch.ones(100, 100, 2), 0.3)[..., 0] == 0).double().mean()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7) ** 0.5 / 100


def test_dims_of_channels():
    state = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    functional = vt.functional
    for shape in [(0, 3, 2, 2), (2, 3, 0, 2), (0, 0, 2, 2)]:
        assert functional.dropout2d(torch.empty(shape), state=state).shape == shape
    for function, x in ((functional.dropout1d, torch.ones(5)), (functional.dropout1d, torch.ones(2, 3, 4, 5)), (functional.feature_alpha_dropout, torch.ones(5))):
        for module in (functional, torch.nn.functional):
            with pytest.raises(RuntimeError):
                getattr(module, function.__name__)(x, 0.5, True)
    # Of these PyTorch warns, and takes the first two dims for those of channels.
    for function, shape in ((functional.dropout2d, (4, 6, 3)), (functional.dropout2d, (2, 3, 2, 2, 2)), (functional.dropout3d, (4, 6, 3))):
        with pytest.warns(UserWarning, match=function.__name__):
            y = function(torch.ones(shape), 0.4, state=state)
        keep = kept(state, shape[0] * shape[1], 0.4).reshape(shape[:2])
        assert torch.equal(y.flatten(2) != 0, keep[..., None].expand(*shape[:2], y[0, 0].numel()))


LAYERS = [(nn.Dropout1d, (4, 6, 5)), (nn.Dropout2d, (4, 6, 5, 2)), (nn.Dropout3d, (4, 6, 2, 2, 2)), (nn.AlphaDropout, (8, 16)), (nn.FeatureAlphaDropout, (4, 6, 5))]


@pytest.mark.parametrize("kind, shape", LAYERS)
def test_layers_of_channels_under_convert(kind, shape):
    layer, report = vt.convert(kind(0.4))
    assert report.swapped[""] == kind.__name__ and isinstance(layer, kind)
    x = torch.randn(shape)
    assert torch.equal(layer.eval()(x), x)
    torch.manual_seed(5)
    first, second = layer.train()(x), layer(x)
    assert not torch.equal(first, second) and first.unique().numel() < x.numel()
    torch.manual_seed(5)
    assert torch.equal(layer(x), first)
    # In place there is no such function.
    assert vt.convert(nn.Sequential(kind(0.4, inplace=True)))[1].kept


@pytest.mark.parametrize("name", ["dropout1d", "alpha_dropout", "feature_alpha_dropout", "rrelu"])
def test_compilers_are_given_the_state(name):
    """With a state the mask is ours; without one it is a function of PyTorch's that a compiler knows."""
    torch._dynamo.reset()
    state, function = torch.tensor([1, 2, 3, 4], dtype=torch.int32), getattr(vt.functional, name)
    call = lambda x: function(x, training=True, state=state)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 6, 5, requires_grad=True)
    results = [torch.autograd.grad(run(x).square().sum(), x)[0] for run in (call, compiled)]
    assert torch.equal(*results)
    without = torch.compile(lambda x: function(x, training=True), backend="aot_eager", fullgraph=True)
    assert without(x).shape == x.shape


def test_a_layer_under_convert():
    model, report = vt.convert(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.25)))
    assert report.swapped["1"] == "Dropout"
    x = torch.randn(8, 16)
    layer = model[1]
    assert layer.eval()(x) is x
    y = layer.train()(x)
    assert torch.equal(y != 0, y.ne(0)) and 0 < (y == 0).sum() < y.numel()
    torch.testing.assert_close(y[y != 0], (x / 0.75)[y != 0])
    layer.p = 0.0
    assert layer(x) is x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert vt.functional.dropout(x).dtype == torch.float32


def test_through_the_dispatcher():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, state = torch.rand(4, 6).requires_grad_(), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    for words in ("p=0.5", "p=0.5 channels=1", "p=0.5 moments=1", "p=0.5 channels=1 moments=1", "p=0.5 moments=1 gradient=1"):
        torch.library.opcheck(torch.ops.verdigris.dropout.default, (x, state, words))
    with FakeTensorMode():
        y = vt.functional.dropout(torch.empty(4, 6, dtype=torch.bfloat16), 0.5, state=torch.empty(4, dtype=torch.int32))
        assert y.shape == (4, 6) and y.dtype == torch.bfloat16


def test_what_is_refused():
    x = torch.rand(4, 5)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="probability"):
            vt.functional.dropout(x, p)
    with pytest.raises(ValueError, match="floating-point"):
        vt.functional.dropout(torch.ones(4, dtype=torch.int32))
    for state in (torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="random state"):
            vt.functional.dropout(x, state=state)
    assert vt.functional.dropout(torch.empty(0, 5)).shape == (0, 5)
