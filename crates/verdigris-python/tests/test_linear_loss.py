"""A linear layer with cross-entropy in chunks of rows, beside PyTorch's composition in f64."""

import itertools
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from conftest import close

import verdigris as vd
import verdigris.torch as vt
from torch.nn import functional as F
from verdigris.torch import _linear_loss

torch.set_num_threads(1)


def truth(x, w, target, bias=None, *, softcap=None, z_loss=0.0, class_weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """The loss composed in the tensors' own type."""
    logits = F.linear(x, w, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    is_probable = target.is_floating_point()
    rows = logits.shape[:-1]
    logits, target = logits.reshape(-1, logits.shape[-1]), target.reshape((-1, target.shape[-1]) if is_probable else (-1,))
    counts = torch.ones(target.shape[0], dtype=torch.bool) if is_probable else target != ignore_index
    loss = F.cross_entropy(logits, target, class_weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    if z_loss:
        z = z_loss * torch.logsumexp(logits, -1).square() * counts
        loss = loss + {"none": z, "sum": z.sum(), "mean": z.sum() / counts.sum()}[reduction]
    return loss.reshape(rows) if is_probable and reduction == "none" else loss


def operands(rows, classes, inputs, dtype, has_bias=True, scale=1.0):
    x, w = torch.randn(rows, inputs) * scale, torch.randn(classes, inputs)
    target = torch.randint(classes, (rows,))
    if rows > 2:
        target[1] = -100
    bias = torch.randn(classes) if has_bias else None
    return [value if value is None or value.dtype == torch.int64 else value.to(dtype) for value in (x, w, target, bias)]


def both(given, **options):
    """Our loss and gradients, and those of PyTorch in f64."""
    found = []
    theirs = {key: value for key, value in options.items() if key not in ("chunk_size", "accum_dtype")}
    for call, wide, said in ((vt.linear_cross_entropy, False, options), (truth, True, theirs)):
        x, w, target, bias = (
            value if value is None or value.dtype == torch.int64 else value.detach().to(torch.float64 if wide else value.dtype).requires_grad_() for value in given
        )
        said = {key: value.to(x.dtype) if isinstance(value, torch.Tensor) else value for key, value in said.items()}
        loss = call(x, w, target, bias, **said)
        # What comes back is no one, and differs from row to row.
        (loss * torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)).sum().backward()
        found.append((loss, x.grad, w.grad, *([] if bias is None else [bias.grad])))
    return found


def chances(rows, classes, dtype=torch.float32):
    """What is no distribution: sums of 1 would hide what multiplies them."""
    return torch.rand(rows, classes).mul(2 / classes).to(dtype)


def with_chances(x, w, target, bias=None, call=vt.linear_cross_entropy, **options):
    """The loss and the gradients of all, the target's among them."""
    leaves = [value if value is None else value.detach().clone().requires_grad_() for value in (x, w, target, bias)]
    loss = call(*leaves, **options)
    (loss * torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)).sum().backward()
    return loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)


FORMS = [
    {},
    dict(label_smoothing=0.2),
    dict(softcap=3.0),
    dict(z_loss=0.01),
    dict(z_loss=0.01, label_smoothing=0.1, softcap=5.0),
    dict(class_weight=True),
    dict(class_weight=True, label_smoothing=0.3),
    dict(class_weight=True, softcap=4.0, ignore_index=2),
]


@pytest.mark.parametrize("form, reduction, dtype", list(itertools.product(range(len(FORMS)), ["mean", "sum", "none"], ["float64", "float32"])))
def test_each_form_beside_pytorch(form, reduction, dtype):
    options = dict(FORMS[form], reduction=reduction)
    if "class_weight" in options:
        options["class_weight"] = torch.rand(13) + 0.25
    given = operands(21, 13, 9, getattr(torch, dtype))
    given[2][1] = options.get("ignore_index", -100)
    for ours, theirs in zip(*both(given, **options, chunk_size=8)):
        assert str(ours.dtype) == f"torch.{dtype}"
        close(ours, theirs, 4)


PROBABLE = [
    *(form for form in FORMS if "ignore_index" not in form),
    dict(class_weight=True, z_loss=0.01),
    dict(class_weight=True, label_smoothing=0.3, softcap=2.0),
    dict(label_smoothing=1.0),
]


@pytest.mark.parametrize("form, reduction, dtype", list(itertools.product(range(len(PROBABLE)), ["mean", "sum", "none"], ["float64", "float32"])))
def test_each_form_with_probabilities_beside_pytorch(form, reduction, dtype):
    options, dtype = dict(PROBABLE[form], reduction=reduction), getattr(torch, dtype)
    x, w, _, bias = operands(21, 13, 9, dtype)
    target, weight = chances(21, 13, dtype), (torch.rand(13) + 0.25).to(dtype)
    said = lambda dtype: {key: weight.to(dtype) if key == "class_weight" else value for key, value in options.items()}
    want = with_chances(*(value.double() for value in (x, w, target, bias)), call=truth, **said(torch.float64))
    for ours, theirs in zip(with_chances(x, w, target, bias, **said(dtype), chunk_size=8), want, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        close(ours, theirs, 4)
    # Where the target wants no gradient, all others are computed with the loss.
    leaves = [value.detach().requires_grad_() for value in (x, w, bias)]
    loss = vt.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], **said(dtype), chunk_size=8)
    (loss * torch.linspace(0.5, 2, loss.numel(), dtype=dtype).reshape(loss.shape)).sum().backward()
    for ours, theirs in zip((loss, *(leaf.grad for leaf in leaves)), (want[0], want[1], want[2], want[4])):
        close(ours, theirs, 4)


@pytest.mark.parametrize("dtype, of_target", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_probabilities_beside_narrow_operands(dtype, of_target, reduction):
    """No further from f64 than PyTorch in the same types."""
    x, w, _, bias = operands(300, 70, 40, dtype, scale=0.3)
    target = torch.softmax(torch.randn(300, 70), -1).to(of_target)
    ours = with_chances(x, w, target, bias, reduction=reduction)
    want = with_chances(*(value.double() for value in (x, w, target, bias)), call=truth, reduction=reduction)
    theirs = with_chances(x, w, target, bias, call=truth, reduction=reduction)
    for place, (got, exact, beside) in enumerate(zip(ours, want, theirs, strict=True)):
        error, allowed = ((value.double() - exact).norm() / exact.norm() for value in (got, beside))
        assert got.dtype == (of_target if place == 3 else dtype)
        assert error <= 1.25 * allowed + torch.finfo(dtype).eps, (place, error, allowed)


@pytest.mark.parametrize("rows, chunk", [(0, None), (1, None), (7, 1), (7, 7), (8, 4), (9, 4), (129, 128), (300, None)])
def test_edges_of_chunks_with_probabilities(rows, chunk):
    x, w, _, _ = operands(rows, 11, 5, torch.float64, has_bias=False)
    for reduction in ("mean", "none"):
        given = (x, w, chances(rows, 11, torch.float64))
        for ours, theirs in zip(with_chances(*given, reduction=reduction, chunk_size=chunk), with_chances(*given, call=truth, reduction=reduction), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True) if rows == 0 else close(ours, theirs, 4)


def test_probabilities_of_one_class_one_row_and_leading_dims():
    x, w = torch.randn(3, 2, 9), torch.randn(6, 9)
    for given in ((x, w, chances(6, 6).reshape(3, 2, 6)), (x[0, 0], w, chances(1, 6)[0]), (x[0], w[:1], torch.rand(2, 1)), (x, w, chances(6, 6).reshape(2, 3, 6).transpose(0, 1))):
        want = with_chances(*(value.double() for value in given), call=truth, reduction="none")
        for ours, theirs in zip(with_chances(*given, reduction="none", chunk_size=4), want, strict=True):
            assert ours.shape == theirs.shape
            # The gradient of the logits of one class is a difference that is 0.
            assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, theirs.abs().max())


def test_probabilities_that_are_labels():
    """One-hot rows have the losses and gradients of their labels."""
    x, w, target, bias = operands(12, 7, 5, torch.float64)
    target[1] = 3
    for smoothing in (0.0, 0.2):
        found = []
        for given in (target, F.one_hot(target, 7).double()):
            leaves = [value.detach().requires_grad_() for value in (x, w, bias)]
            loss = vt.linear_cross_entropy(leaves[0], leaves[1], given, leaves[2], label_smoothing=smoothing, chunk_size=5)
            found.append((loss, *torch.autograd.grad(loss, leaves)))
        for ours, theirs in zip(*found):
            close(ours, theirs, 4)


def test_autocast_and_compiled_with_probabilities():
    x, w, _, bias = operands(40, 12, 16, torch.float32)
    target = chances(40, 12)
    leaves = [value.detach().requires_grad_() for value in (x, w, target, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vt.linear_cross_entropy(*leaves, chunk_size=16)
    assert loss.dtype == torch.float32
    loss.backward()
    want = with_chances(x.bfloat16().double(), w.bfloat16().double(), target.double(), bias.double(), call=truth)
    for leaf, theirs in zip(leaves, want[1:]):
        assert leaf.grad.dtype == torch.float32
        # What one loss is multiplied by in `with_chances` is 0.5.
        assert ((leaf.grad * 0.5 - theirs).norm() / theirs.norm()).item() < 8e-3
    for reduction in ("mean", "none"):
        call = lambda x, w, target, bias: vt.linear_cross_entropy(x, w, target, bias, reduction=reduction, chunk_size=16).sum()
        results = []
        for f in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            loss = f(*leaves)
            results.append((loss, *torch.autograd.grad(loss, leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows, inputs", [(300, 40), (80, 40), (81, 40), (301, 400)])
def test_narrow_operands(dtype, reduction, rows, inputs):
    """No further from f64 than PyTorch in the same type, which rounds the logits and their gradients as well; in several chunks, and in one of all rows."""
    given = operands(rows, 70, inputs, dtype, scale=0.3 * (40 / inputs) ** 0.5)
    ours, exact = both(given, reduction=reduction)
    x, w, target, bias = (value if value.dtype == torch.int64 else value.detach().requires_grad_() for value in given)
    loss = truth(x, w, target, bias, reduction=reduction)
    (loss * torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)).sum().backward()
    unit = torch.finfo(dtype).eps
    for got, want, theirs in zip(ours, exact, (loss, x.grad, w.grad, bias.grad)):
        error, allowed = ((value.double() - want).norm() / want.norm() for value in (got, theirs))
        assert got.dtype == dtype and error <= 1.25 * allowed + unit, (error, allowed)


@pytest.mark.parametrize("rows, chunk", [(1, None), (7, 1), (7, 7), (7, 8), (8, 4), (9, 4), (128, 127), (129, 128), (300, None)])
def test_edges_of_chunks(rows, chunk):
    given = operands(rows, 11, 5, torch.float64, has_bias=False)
    for ours, theirs in zip(*both(given, chunk_size=chunk)):
        close(ours, theirs, 4)


def test_the_rule_of_chunks():
    rule = _linear_loss.rows_of_chunk
    assert [rule(rows, 50304, 2) for rows in (0, 1, 255, 256, 1024, 4096, 8192, 8193)] == [1, 1, 255, 256, 256, 1024, 2048, 2176]
    # 512 MiB of logits.
    assert rule(1 << 20, 128256, 2) == 2176 and rule(1 << 20, 1 << 30, 4) == 256
    # Of logits and their gradient, where both are there.
    assert [rule(rows, 50304, 2, False) for rows in (255, 2048, 4096, 8193)] == [255, 256, 512, 1152] and rule(1 << 20, 128256, 2, False) == 1152
    # One chunk of logits is less than a tenth of what PyTorch has of them at once, which is three times all.
    assert all(3 * rows / rule(rows, 50304, 2) > 10 for rows in (4096, 8192, 16384, 1 << 20))


def test_the_rule_of_one_chunk():
    rule = _linear_loss.is_one_chunk
    assert rule(4096, 2048, torch.bfloat16, "none") and rule(4096, 2048, torch.float16, "none") and not rule(4097, 2048, torch.bfloat16, "none")
    assert not any(rule(4096, 2048, torch.bfloat16, reduction) for reduction in ("mean", "sum"))
    assert not rule(1, 2048, torch.float32, "none") and not rule(1, 2048, torch.float64, "none")
    # The logits are no more bytes than sums of the weight's gradient in float32, which are not there then.
    assert all(rows * 50304 * 2 <= 50304 * inputs * 4 for rows in range(1, 300) for inputs in range(1, 100) if rule(rows, inputs, torch.bfloat16, "none"))


def test_one_chunk_rounds_the_gradient_of_the_weight_once():
    """Bit for bit what sums in float32 give that are rounded at the end."""
    x, w, target, bias = (value if value.dtype == torch.int64 else value.requires_grad_() for value in operands(64, 33, 40, torch.bfloat16, scale=0.2))
    target[1] = 0
    dloss, found = torch.randn(64), []
    for accum in (None, torch.float32):
        loss = vt.linear_cross_entropy(x, w, target, bias, accum_dtype=accum, reduction="none")
        found.append(torch.autograd.grad(loss, (x, w, bias), dloss.to(loss.dtype)))
    assert all(torch.equal(*pair) for pair in zip(*found))


def test_leading_dims_and_strides():
    x, w = torch.randn(9, 2, 3).permute(1, 2, 0).requires_grad_(), torch.randn(9, 6).t().requires_grad_()
    target = torch.randint(6, (3, 2)).t()
    loss = vt.linear_cross_entropy(x, w, target, chunk_size=4, reduction="none")
    want = truth(x.double(), w.double(), target, reduction="none").reshape(2, 3)
    close(loss, want)
    for ours, theirs in zip(torch.autograd.grad(loss.sum(), (x, w)), torch.autograd.grad(want.sum(), (x, w))):
        close(ours, theirs, 2)
    one = vt.linear_cross_entropy(torch.ones(9), w, torch.tensor(3))
    close(one, F.cross_entropy(F.linear(torch.ones(9), w), torch.tensor(3)), 2)


def test_all_rows_ignored_and_no_rows():
    for rows, reduction in itertools.product((3, 0), ("mean", "sum", "none")):
        results = []
        for call in (vt.linear_cross_entropy, truth):
            x, w = torch.ones(rows, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
            loss = call(x, w, torch.full((rows,), -100), reduction=reduction)
            loss.sum().backward()
            results.append((loss, x.grad, w.grad))
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_ignored_rows_pass_nothing_on_whatever_they_hold():
    x, w = torch.randn(4, 3), torch.randn(5, 3, requires_grad=True)
    x[2] = float("nan")
    x.requires_grad_()
    for options in ({}, dict(z_loss=0.1), dict(label_smoothing=0.1)):
        loss = vt.linear_cross_entropy(x, w, torch.tensor([1, 2, -100, 0]), **options)
        (dx,) = torch.autograd.grad(loss, x)
        assert torch.isfinite(loss) and torch.equal(dx[2], torch.zeros(3))


def test_labels_that_are_no_class():
    x, w = torch.randn(5, 3), torch.randn(4, 3)
    for label in (-1, 4):
        with pytest.raises(IndexError, match=f"label {label} of row 3 for 4 classes"):
            vt.linear_cross_entropy(x, w, torch.tensor([0, 1, 2, label, 3]), chunk_size=2)


def test_gradients_that_are_not_wanted_are_not_computed():
    x, w, target, bias = operands(12, 7, 5, torch.float32)
    for wanted in itertools.product((False, True), repeat=3):
        for reduction in ("mean", "none"):
            leaves = [value.clone().requires_grad_(want) for value, want in zip((x, w, bias), wanted)]
            loss = vt.linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], reduction=reduction, chunk_size=5)
            assert loss.requires_grad == any(wanted)
            if any(wanted):
                loss.sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_twice_backward_and_what_is_accumulated_in():
    given = operands(600, 9, 6, torch.bfloat16)
    for accum in (None, torch.float32, torch.bfloat16):
        x, w, target, bias = (value if value.dtype == torch.int64 else value.detach().requires_grad_() for value in given)
        loss = vt.linear_cross_entropy(x, w, target, bias, accum_dtype=accum)
        first = torch.autograd.grad(loss, (x, w, bias), retain_graph=True)
        again = torch.autograd.grad(loss, (x, w, bias))
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        wide = [value.detach().double().requires_grad_() for value in (x, w, bias)]
        want = torch.autograd.grad(truth(wide[0], wide[1], target, wide[2]), wide)
        # Rounded once a chunk, where there are three.
        for ours, theirs in zip(first, want):
            close(ours, theirs, 3)


def test_results_repeat_bit_for_bit():
    given = operands(70, 33, 20, torch.float32)
    runs = [both(given, chunk_size=16)[0] for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


def test_autocast():
    x, w, target, bias = (value if value.dtype == torch.int64 else value.requires_grad_() for value in operands(40, 12, 16, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vt.linear_cross_entropy(x, w, target, bias, chunk_size=16)
    assert loss.dtype == torch.float32
    loss.backward()
    wide = [value.detach().to(torch.bfloat16).double().requires_grad_() for value in (x, w)] + [bias.detach().double().requires_grad_()]
    want = truth(wide[0], wide[1], target, wide[2])
    want.backward()
    for ours, theirs in zip((x, w, bias), wide):
        assert ours.grad.dtype == torch.float32
        assert ((ours.grad - theirs.grad).norm() / theirs.grad.norm()).item() < 8e-3
    assert abs(loss.item() - want.item()) < 2e-2


def test_compiled():
    x, w, target, bias = (value if value.dtype == torch.int64 else value.requires_grad_() for value in operands(40, 12, 16, torch.float32))
    for reduction in ("mean", "none"):
        call = lambda x, w, bias: vt.linear_cross_entropy(x, w, target, bias, reduction=reduction, chunk_size=16).sum()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        results = []
        for f in (call, compiled):
            loss = f(x, w, bias)
            results.append((loss, *torch.autograd.grad(loss, (x, w, bias))))
        assert all(torch.equal(a, b) for a, b in zip(*results))
        with torch.no_grad():
            assert torch.equal(compiled(x, w, bias), results[0][0])


def test_operators_as_pytorch_checks_them():
    x, w, target, bias = (value if value.dtype == torch.int64 else value.requires_grad_() for value in operands(10, 6, 4, torch.float32))
    words = "ignore=-100 reduction=mean smoothing=0.0 z=0.0 chunk=4 compute=f32 result=f32"
    torch.library.opcheck(torch.ops.verdigris.linear_cross_entropy.default, (x, w, target, bias, None, words))
    plain = [value.detach() for value in (x, w, target, bias)]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.verdigris.linear_cross_entropy_and_gradients.default, (*plain, None, words + " wanted=101"), test_utils=tests)
    rows = words.replace("mean", "none") + " wanted=1110"
    torch.library.opcheck(torch.ops.verdigris.linear_cross_entropy_rows.default, (torch.rand(10), *plain, None, rows), test_utils=tests)
    plain[2] = chances(10, 6)
    torch.library.opcheck(torch.ops.verdigris.linear_cross_entropy.default, (x, w, plain[2].clone().requires_grad_(), bias, None, words))
    torch.library.opcheck(torch.ops.verdigris.linear_cross_entropy_and_gradients.default, (*plain, None, words + " wanted=101"), test_utils=tests)
    for wanted in ("1110", "1111", "0001"):
        given = (torch.rand(10), *plain, torch.rand(6), rows.replace("1110", wanted))
        torch.library.opcheck(torch.ops.verdigris.linear_cross_entropy_rows.default, given, test_utils=tests)


def test_explained():
    x, w, target = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    words = "smoothing=0.0 ignore=-100 z=0.0 wanted=110 add=1"
    text = vt.explain("linear_loss", words, x, w, None, target, None, None, None, torch.empty(6), torch.empty(6, 4), torch.zeros(9, 4), None, None)
    assert "matmul" in text or "gemm" in text or "contraction" in text, text


def test_the_module():
    x, w, target, bias = operands(20, 6, 4, torch.float32)
    loss = vt.nn.LinearCrossEntropyLoss(label_smoothing=0.1, reduction="sum", z_loss=0.01)
    close(loss(x, w, target, bias), truth(x.double(), w.double(), target, bias.double(), label_smoothing=0.1, reduction="sum", z_loss=0.01), 4)
    weighted = vt.nn.LinearCrossEntropyLoss(weight=torch.rand(6) + 0.5)
    assert list(weighted.state_dict()) == ["weight"]
    close(weighted(x, w, target), truth(x.double(), w.double(), target, class_weight=weighted.weight.double()), 4)


def test_what_is_refused():
    x, w, target, bias = operands(6, 5, 4, torch.float32)
    call = vt.linear_cross_entropy
    with pytest.raises(vd.UnsupportedError, match="class_weight requires a gradient"):
        call(x, w, torch.rand(6, 5), class_weight=torch.ones(5, requires_grad=True))
    with pytest.raises(vd.UnsupportedError, match="probabilities are of"):
        call(x, w, torch.rand(6, 5).to(torch.float8_e4m3fn))
    with pytest.raises(vd.UnsupportedError, match="class_weight and z_loss"):
        call(x, w, target, class_weight=torch.ones(5), z_loss=0.1)
    for match, wrong in (
        ("same last dim", lambda: call(x[:, :3], w, target)),
        ("classes, in", lambda: call(x, w[0], target)),
        ("without classes", lambda: call(x, w[:0], target)),
        ("target", lambda: call(x, w, target[:5])),
        ("target", lambda: call(x, w, target.int())),
        ("probabilities floating-point of", lambda: call(x, w, torch.rand(6, 4))),
        ("probabilities floating-point of", lambda: call(x, w, torch.rand(6))),
        ("only labels are ignored", lambda: call(x, w, torch.rand(6, 5), ignore_index=3)),
        ("bias has the dims", lambda: call(x, w, target, bias[:4])),
        ("class_weight has the dims", lambda: call(x, w, target, class_weight=bias[:4])),
        ("one floating-point type", lambda: call(x, w.double(), target)),
        ("reduction", lambda: call(x, w, target, reduction="median")),
        ("label_smoothing", lambda: call(x, w, target, label_smoothing=1.5)),
        ("z_loss", lambda: call(x, w, target, z_loss=-1.0)),
        ("softcap", lambda: call(x, w, target, softcap=0.0)),
        ("chunk_size", lambda: call(x, w, target, chunk_size=0)),
        ("accum_dtype", lambda: call(x, w, target, accum_dtype=torch.bfloat16)),
        ("requires a gradient", lambda: call(x, w, target, class_weight=bias.clone().requires_grad_())),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()


def test_a_gradient_of_the_gradient_is_refused():
    x, w, target, _ = operands(6, 5, 4, torch.float32)
    x.requires_grad_()
    for reduction in ("mean", "none"):
        loss = vt.linear_cross_entropy(x, w, target, reduction=reduction)
        with pytest.raises(vd.UnsupportedError, match="has no gradient"):
            torch.autograd.grad(loss.sum(), x, create_graph=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says of a process")
def test_the_logits_are_never_all_there():
    """By the most memory that a process has: all logits are 128 MiB, and twice that with their gradient."""
    program = """
        import sys, torch
        torch.set_num_threads(1)
        import verdigris.torch as vt
        rows, classes = 4096, 8192
        x, w = torch.randn(rows, 4, requires_grad=True), torch.randn(classes, 4, requires_grad=True)
        target = torch.randint(classes, (rows,))
        chunk = int(sys.argv[1])
        vt.linear_cross_entropy(x[:8], w, target[:8]).backward()
        most = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
        before = most()
        vt.linear_cross_entropy(x, w, target, chunk_size=chunk or None).backward()
        print(most() - before)
    """
    of = lambda chunk: int(subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(chunk)], check=True, capture_output=True, text=True).stdout)
    chunked, whole = of(0), of(4096)
    # 512 rows at a time: 16 MiB of logits; the CPU keeps some numbers of each twice.
    assert chunked < 80 * 1024 < 200 * 1024 < whole, (chunked, whole)
