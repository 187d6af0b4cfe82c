"""Losses of elements and of log-probabilities, beside PyTorch's in f64."""

import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")

from conftest import close

import verdigris as vd
import verdigris.torch as vt
from torch.nn import functional as F

torch.set_num_threads(1)


def signs(x):
    return torch.where(x > 0, 1.0, -1.0).to(x.dtype)


#: By name: what makes a target of a random tensor, and keywords.
LOSSES = [
    ("mse_loss", lambda t: t, {}),
    ("l1_loss", lambda t: t, {}),
    ("huber_loss", lambda t: t, {}),
    ("huber_loss", lambda t: t, dict(delta=0.3)),
    ("smooth_l1_loss", lambda t: t, {}),
    ("smooth_l1_loss", lambda t: t, dict(beta=0.25)),
    ("smooth_l1_loss", lambda t: t, dict(beta=0.0)),
    ("binary_cross_entropy_with_logits", torch.sigmoid, {}),
    ("binary_cross_entropy_with_logits", lambda t: (t > 0).to(t.dtype), {}),
    ("binary_cross_entropy_with_logits", torch.sigmoid, dict(weight=(4, 1), pos_weight=(7,))),
    ("binary_cross_entropy", torch.sigmoid, {}),
    ("binary_cross_entropy", torch.sigmoid, dict(weight=(4, 1))),
    ("soft_margin_loss", signs, {}),
    ("kl_div", lambda t: t.softmax(-1) * (t > -1), {}),
    ("kl_div", lambda t: t.log_softmax(-1), dict(log_target=True)),
]


def operand(name, x):
    """What a loss takes: binary cross-entropy takes probabilities."""
    return torch.sigmoid(x) if name == "binary_cross_entropy" else x


def both(name, x, target, options):
    """Our loss with the gradients of input and target, and PyTorch's of the same numbers in f64."""
    results = []
    for library, wide in ((vt.functional, False), (F, True)):
        leaf, other = (tensor.detach().to(torch.float64 if wide else tensor.dtype).requires_grad_() for tensor in (x, target))
        # PyTorch has none there.
        other.requires_grad_(name != "soft_margin_loss")
        weights = {key: value.to(leaf.dtype) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        loss = getattr(library, name)(leaf, other, **weights)
        (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)).sum().backward()
        results.append((loss, leaf.grad, other.grad))
    return results


@pytest.mark.parametrize(
    "which, reduction, dtype", list(itertools.product(range(len(LOSSES)), ["none", "sum", "mean"], ["float32", "bfloat16", "float64"]))
)
def test_losses_of_elements(which, reduction, dtype):
    name, make, options = LOSSES[which]
    options = {key: torch.rand(value) + 0.5 if isinstance(value, tuple) else value for key, value in options.items()}
    x, target = operand(name, torch.randn(3, 4, 7)).to(getattr(torch, dtype)), make(torch.randn(3, 4, 7)).to(getattr(torch, dtype))
    options = {key: value.to(x.dtype) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    ours, theirs = both(name, x, target, dict(options, reduction=reduction))
    assert ours[0].dtype == x.dtype and ours[0].shape == theirs[0].shape
    close(ours[0], theirs[0], 2)
    close(ours[1], theirs[1], 2)
    if theirs[2] is not None:
        # The logarithm of a probability of 0 has no slope.
        known = torch.isfinite(theirs[2])
        close(ours[2][known], theirs[2][known], 2)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in LOSSES}))
def test_edges(name):
    ours = getattr(vt.functional, name)
    theirs = getattr(F, name)
    for shape in ((), (1,), (0, 3), (2, 1, 1025)):
        x, target = operand(name, torch.randn(shape)), torch.rand(shape)
        for reduction in ("none", "sum", "mean"):
            torch.testing.assert_close(ours(x, target, reduction=reduction), theirs(x, target, reduction=reduction), rtol=1e-5, atol=1e-6, equal_nan=True)
    last = operand(name, torch.randn(2, 3, 4, 5)).to(memory_format=torch.channels_last)
    target = torch.rand(2, 3, 4, 5)
    torch.testing.assert_close(ours(last, target, reduction="none"), theirs(last, target, reduction="none"), rtol=1e-5, atol=1e-6)
    with pytest.raises(vd.GraphError, match="same dims"):
        ours(last, target[:, :2])
    with pytest.raises(ValueError, match="reduction"):
        ours(last, target, reduction="median")


def test_logits_far_out_and_at_zero():
    x = torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0]).requires_grad_()
    for target in (torch.zeros(5), torch.ones(5)):
        loss = vt.functional.binary_cross_entropy_with_logits(x, target, reduction="none")
        torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(x, target, reduction="none"), rtol=1e-6, atol=1e-5)
        (dx,) = torch.autograd.grad(loss.sum(), x)
        torch.testing.assert_close(dx, torch.sigmoid(x.detach()) - target, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("positive", [None, 3.0])
def test_confident_values_keep_their_loss_and_gradient(positive):
    """The loss of a confident logit or probability is small, and no difference of large numbers; on both sides, in f32 to its own rounding."""
    logits = torch.tensor([-80.0, -40.0, -20.0, -9.0, -1.0, 0.0, 1.0, 9.0, 20.0, 40.0, 80.0])
    tiny = torch.tensor([1e-30, 1e-12, 3e-8, 1e-6, 0.01, 0.3, 0.5, 0.9, 1 - 1e-3, 1 - 1.2e-7])
    weight = {} if positive is None else {"pos_weight": torch.tensor([positive])}
    cases = [("binary_cross_entropy_with_logits", logits, weight)] + ([("binary_cross_entropy", tiny, {})] if positive is None else [])
    for name, x, options in cases:
        for target in (0.0, 1.0, 0.25):
            wide = {key: value.double() for key, value in options.items()}
            truth = x.double().requires_grad_()
            targets = torch.full_like(truth, target)
            if name == "binary_cross_entropy":
                right = -(targets * truth.log() + (1 - targets) * torch.log1p(-truth))
            else:
                # PyTorch's own formula cancels in f64 as well, where logits are far out.
                v = positive or 1.0
                right = (1 - targets) * F.softplus(truth, threshold=1e9) + v * targets * F.softplus(-truth, threshold=1e9)
                torch.testing.assert_close(right, getattr(F, name)(truth, targets, reduction="none", **wide), rtol=1e-9, atol=1e-13)
            right.sum().backward()
            mine = x.clone().requires_grad_()
            loss = getattr(vt.functional, name)(mine, torch.full_like(x, target), reduction="none", **options)
            loss.sum().backward()
            torch.testing.assert_close(loss.double(), right, rtol=2e-6, atol=0.0)
            # Two terms of the gradient of a target between 0 and 1 may cancel.
            torch.testing.assert_close(mine.grad.double(), truth.grad, rtol=4e-6, atol=0.0 if target in (0.0, 1.0) else 1e-6)


def test_probabilities_of_0_and_1():
    x = torch.tensor([0.0, 0.0, 1.0, 1.0, 1e-30, 0.25], requires_grad=True)
    target = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.5])
    loss = vt.functional.binary_cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(loss, F.binary_cross_entropy(x.detach(), target, reduction="none"))
    loss.sum().backward()
    # The logarithm of 0, which is held at -100, has no slope.
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 0.0, 0.0, -1.0, -1e30, -2 + 2 / 3]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 5, 3, 2), (0, 5)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_nll_loss(shape, reduction):
    rows = shape[:0] if len(shape) == 1 else (shape[0], *shape[2:])
    labels = torch.randint(5, rows)
    if labels.dim() and labels.numel():
        labels.view(-1)[0] = -100
    for weight in (None, torch.rand(5) + 0.5):
        leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
        losses = [f.nll_loss(leaf, labels, weight, reduction=reduction) for f, leaf in zip((vt.functional, F), leaves)]
        torch.testing.assert_close(*losses, equal_nan=True)
        for loss in losses:
            loss.sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_what_is_refused():
    x = torch.rand(4, 5)
    for name in ("mse_loss", "l1_loss", "huber_loss"):
        with pytest.raises(vd.GraphError, match="one for each element"):
            getattr(vt.functional, name)(x, x, weight=x[0])
    for name in ("mse_loss", "kl_div"):
        with pytest.raises(vd.GraphError, match="broadcast to the same dims"):
            getattr(vt.functional, name)(x, torch.rand(4, 4))
    for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
        with pytest.raises(vd.GraphError, match="of the same dims"):
            getattr(vt.functional, name)(x, x[0])
    for call in (
        lambda: vt.functional.huber_loss(x, x, delta=0.0),
        lambda: vt.functional.smooth_l1_loss(x, x, beta=-1.0),
        lambda: vt.functional.binary_cross_entropy_with_logits(x, x, weight=torch.rand(3)),
        lambda: vt.functional.nll_loss(x, torch.zeros(5, dtype=torch.int64)),
        lambda: vt.functional.nll_loss(x, torch.zeros(4)),
        lambda: vt.functional.mse_loss(x.int(), x.int()),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(vd.UnsupportedError, match="wants a gradient"):
        vt.functional.binary_cross_entropy_with_logits(x, x, weight=torch.rand(5, requires_grad=True))
    with pytest.raises(IndexError):
        vt.functional.nll_loss(x, torch.tensor([0, 1, 2, 5]))


def test_autocast_and_kl_of_batches():
    x, target = torch.randn(6, 4).log_softmax(-1), torch.rand(6, 4)
    torch.testing.assert_close(vt.functional.kl_div(x, target, reduction="batchmean"), F.kl_div(x, target, reduction="batchmean"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert vt.functional.mse_loss(x.bfloat16(), target.bfloat16()).dtype == torch.float32


def test_gradients_and_the_dispatcher():
    x, target = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.rand(3, 4, dtype=torch.float64)
    for name in ("mse_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"):
        assert torch.autograd.gradcheck(lambda x: getattr(vt.functional, name)(x, target), (x,))
    torch.library.opcheck(torch.ops.verdigris.element_loss.default, (x, target, None, None, "loss=squared reduction=mean"))


BROADCAST = [("mse_loss", True), ("l1_loss", True), ("huber_loss", True), ("smooth_l1_loss", True), ("soft_margin_loss", False), ("kl_div", False)]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("name,warns", BROADCAST)
def test_inputs_and_targets_broadcast(name, warns, reduction):
    if reduction == "batchmean" and name != "kl_div":
        pytest.skip("a reduction of kl_div")
    for of_input, of_target in (((4, 5), (5,)), ((4, 1), (4, 5)), ((), (3,)), ((2, 1, 3), (4, 1))):
        if name == "soft_margin_loss" and of_input != (4, 5):
            # Nor does PyTorch.
            with pytest.raises(vd.GraphError, match="broadcasts to the input"):
                vt.functional.soft_margin_loss(torch.randn(of_input), torch.randn(of_target), reduction=reduction)
            continue
        x, target = torch.randn(of_input), signs(torch.randn(of_target)) if name == "soft_margin_loss" else torch.rand(of_target)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = both(name, x, target, dict(reduction=reduction))
        mine = [one for one in told if "broadcast to" in str(one.message)]
        assert bool(mine) == warns and all(one.filename == __file__ for one in mine)
        for one, other in zip(*results):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.shape == other.shape
                close(one, other, 8.0)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "huber_loss"])
@pytest.mark.parametrize("of_target", [(4, 5), (5,), (3, 4, 5)])
@pytest.mark.filterwarnings("ignore:.*broadcast")
def test_a_weight_for_each_element(name, reduction, of_target):
    """With a gradient of the weights and without."""
    x, target, weight = torch.randn(4, 5), torch.randn(of_target), torch.rand(4, 5) + 0.5
    for is_learned in (False, True):
        results = []
        for library, dtype in ((vt.functional, torch.float32), (F, torch.float64)):
            leaves = [one.detach().to(dtype).requires_grad_() for one in (x, target, weight)]
            leaves[2].requires_grad_(is_learned)
            loss = getattr(library, name)(*leaves[:2], weight=leaves[2], reduction=reduction)
            (loss * torch.linspace(1, 2, loss.numel(), dtype=dtype).reshape(loss.shape)).sum().backward()
            results.append((loss, *(leaf.grad for leaf in leaves)))
        for one, other in zip(*results):
            assert (one is None) == (other is None)
            if one is not None:
                close(one, other, 8.0)


def test_modules_of_losses_are_swapped():
    x, weight = torch.rand(4, 5) * 0.8 + 0.1, torch.rand(5) + 0.5
    labels = torch.tensor([0, 4, -100, 1])
    modules = [
        (torch.nn.MSELoss(), x.flip(0)),
        (torch.nn.L1Loss(reduction="sum"), x.flip(0)),
        (torch.nn.HuberLoss(delta=0.1), x.flip(0)),
        (torch.nn.SmoothL1Loss(beta=0.2, reduction="none"), x.flip(0)),
        (torch.nn.BCEWithLogitsLoss(weight, pos_weight=weight.flip(0)), x.flip(0)),
        (torch.nn.SoftMarginLoss(), signs(x - 0.5)),
        (torch.nn.KLDivLoss(reduction="batchmean"), x.flip(0)),
        (torch.nn.KLDivLoss(reduction="sum", log_target=True), x.flip(0)),
        (torch.nn.NLLLoss(weight, ignore_index=-100), labels),
        (torch.nn.NLLLoss(reduction="none", ignore_index=4), labels.clamp(min=0)),
    ]
    for module, target in modules:
        converted, report = vt.convert(module)
        assert list(report.swapped.values()) == [type(module).__name__] and list(converted.state_dict()) == list(module.state_dict())
        torch.testing.assert_close(converted(x, target), module(x, target))
        torch.testing.assert_close(converted(input=x, target=target), module(input=x, target=target))
    assert not vt.convert(torch.nn.BCELoss())[1].swapped
