"""A linear layer with a cross-entropy behind it, whose logits are never all there at once, which `functional` shows.

Rows are computed in chunks: their logits, the loss, the gradient of the logits, and what the gradients of input, weight and bias get of it, all in one native
call whose workspace holds the chunk's logits, in whose place their gradient comes. Gradients are computed with the loss, and the backward pass multiplies them by
the gradient of the loss, and by what a mean divides by where they are those of the sum of all rows' losses: neither is known to the host. The loss of each row
(`reduction="none"`) has a gradient for each row, which only the backward pass knows: it computes the chunks' logits again. So it does where probabilities as targets want
a gradient, which is as large as all logits: it is not kept from the forward pass on.

The weight's gradient is added up over chunks in wide numbers, which each chunk reads and writes. Where all logits are no more bytes than these sums, and the gradient of
each row's loss is known, all rows are one chunk instead: there are no sums, and the gradient is rounded where it is made, as PyTorch rounds it.
"""

import functools

import torch

from .._errors import GraphError, OutOfRangeError, UnsupportedError
from . import _ops, _policy

_CHUNK = _ops.operator_number("linear_loss")
#: The least rows of a chunk and what their number is a multiple of, the most bytes of a chunk's logits and of their gradient together, and into how many chunks rows are cut
#: while neither bounds them, where the gradient lies in the logits' place.
_LEAST, _STEP, _MOST_BYTES, _CHUNKS = 256, 128, 1 << 29, 4
_WORDS = {dtype: word for word, dtype in _ops._WIDTHS.items()}


def rows_of_chunk(rows, classes, element_bytes, is_in_place=True):
    """How many rows a chunk has, where the caller does not say: a quarter of them, as far as their logits have at most 512 MiB, at least 256, rounded up to a multiple of 128;
    an eighth and 256 MiB where the gradient of the logits does not lie in their place: on the CPU, and where `_is_in_place` says so.

    Few chunks, for each reads and writes the sums of the weight's gradient once.
    """
    copies = 1 if is_in_place else 2
    most = max(_MOST_BYTES // max(copies * classes * element_bytes, 1), 1)
    wanted = max(min(-(-rows // (_CHUNKS * copies)), most), _LEAST)
    return min(-(-wanted // _STEP) * _STEP, max(rows, 1))


def _is_in_place(a, class_weight, is_probable):
    """Whether the gradient of the logits is one op, which writes where it reads them."""
    return not is_probable and "cap" not in a and float(a["z"]) == 0.0 and (class_weight is None or float(a["smoothing"]) == 0.0)


def is_one_chunk(rows, inputs, compute, reduction):
    """Whether all rows are one chunk of the gradients, where the caller says neither how many nor what the weight's gradient is added up in: where all logits are no more bytes
    than the sums of the weight's gradient would be, which are not needed then (rows are at most twice the inputs), and the gradients of the rows' losses are known.

    Gradients of a mean or a sum are multiplied later: rounded before, their error would be a third above PyTorch's (2.2e-3 beside 1.67e-3 of 4096 rows, in bfloat16).
    Wider operands than 16 bits spend their time on products.
    """
    return _is_narrow(compute) and reduction == "none" and rows * compute.itemsize <= inputs * _wide(compute).itemsize


def _is_narrow(dtype):
    return dtype in (torch.float16, torch.bfloat16)


def _computed_in(a, x):
    return _ops._WIDTHS[a["compute"]] if "compute" in a else x.dtype


def _wide(compute):
    return torch.float64 if compute == torch.float64 else torch.float32


def _is_whole(a, of_w):
    return a.get("whole") == "1" and of_w


def _sums(a, compute):
    """The type in which the gradient of the weight is added up."""
    if _is_whole(a, True):
        return compute
    return _ops._WIDTHS[a["sums"]] if "sums" in a else _wide(compute)


def _chunks(a, rows, classes, compute, of_w, is_in_place):
    size = max(rows, 1) if _is_whole(a, of_w) else int(a["chunk"]) or rows_of_chunk(rows, classes, compute.itemsize, is_in_place)
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def _share_of(class_weight, target, ignored, wide):
    """The weight of each row's class, 0 where its label is ignored. A label that is no class has that of some class; its loss is NaN."""
    if class_weight.numel() == 0:
        return torch.zeros_like(target, dtype=wide)
    weights = class_weight.to(wide).take(target.long().clamp(0, class_weight.shape[0] - 1))
    return torch.where(target == ignored, torch.zeros_like(weights), weights)


def _check_labels(target, classes, ignored):
    """On the CPU, where they can be looked at before anything is computed."""
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise OutOfRangeError(f"label {int(target[row])} of row {row} for {classes} classes; a label is a class, or the index that is ignored")


def _as_read(target, compute):
    """The type in which probabilities are read: their own, but float64 beside float64 and nowhere else."""
    return _wide(compute) if torch.float64 in (target.dtype, compute) else target.dtype


def _of_rows(x, w, target, bias, class_weight, share, dloss, a, wanted, dx_dtype):
    """The losses of rows, the sums of gradients over all of them, and the gradient of probabilities: `(losses, dx, dw, dbias, dtarget)`. `share`: those of the rows in a
    mean, where they are not 1."""
    compute, (classes, inputs), rows = _computed_in(a, x), w.shape, x.shape[:-1].numel()
    wide = _wide(compute)
    is_smoothed, ignored, is_probable = float(a["smoothing"]) != 0.0, int(a["ignore"]), target.is_floating_point()
    of_x, of_w, of_bias, of_target = wanted
    bounds = _chunks(a, rows, classes, compute, of_w, x.device.type != "cpu" and _is_in_place(a, class_weight, is_probable))
    target = target.reshape(-1, classes) if is_probable else target.reshape(-1)
    if target.device.type == "cpu" and not is_probable:
        _check_labels(target, classes, ignored)
    values, weight = x.reshape(-1, inputs).to(compute), w.to(compute)
    bias = bias if bias is None or bias.dtype == compute or _is_narrow(compute) and bias.dtype == torch.float32 else bias.to(compute)
    spread = class_weight.to(wide) if class_weight is not None and (is_smoothed or is_probable) else None
    dloss = None if dloss is None else dloss.reshape(-1).to(wide)
    made = torch.zeros if rows == 0 else torch.empty
    place = dict(device=x.device)
    losses = made(rows, dtype=wide, **place)
    dx = made((rows, inputs) if of_x else (0, 0), dtype=dx_dtype, **place)
    dw = made((classes, inputs) if of_w else (0, 0), dtype=_sums(a, compute), **place)
    dbias = made(classes if of_bias else 0, dtype=wide, **place)
    read = _as_read(target, compute) if is_probable else target.dtype
    dtarget = made((rows, classes) if of_target else (0, 0), dtype=target.dtype if is_probable else wide, **place)
    words = "targets=probabilities" if is_probable else f"ignore={ignored}"
    words += f" smoothing={a['smoothing']} z={a['z']} wanted={''.join('01'[want] for want in wanted)}"
    words += f" cap={a['cap']}" if "cap" in a else ""

    def part(tensor, first, end, is_there=True):
        return tensor[first:end] if tensor is not None and is_there else None

    for first, end in bounds:
        chances = part(dtarget, first, end, of_target)
        is_cast = chances is not None and chances.dtype != read
        written = torch.empty_like(chances, dtype=read) if is_cast else chances
        _ops._run(
            _CHUNK,
            values[first:end],
            weight,
            bias,
            target[first:end].to(read),
            part(share, first, end),
            spread,
            part(dloss, first, end),
            losses[first:end],
            part(dx, first, end, of_x),
            dw if of_w else None,
            dbias if of_bias else None,
            written,
            f"{words} add={int(first > 0)}",
        )
        if is_cast:
            chances.copy_(written)
    return losses, dx.reshape(x.shape) if of_x else dx, dw, dbias, dtarget.reshape(x.shape[:-1] + (classes,)) if of_target else dtarget


def _compute(x, w, target, bias, class_weight, attributes):
    """The loss, the gradients of the sum of all rows' losses, and the factor that makes them those of the loss."""
    a = _ops.parse(attributes)
    reduction, ignored = a["reduction"], int(a["ignore"])
    wanted = tuple(want == "1" for want in a["wanted"])
    wide = _wide(_computed_in(a, x))
    share = None if class_weight is None or target.is_floating_point() else _share_of(class_weight, target.reshape(-1), ignored, wide)
    shares = None
    factor = torch.ones((), dtype=wide, device=x.device)
    if reduction == "mean" and target.is_floating_point():
        # Every row counts, whatever its classes weigh.
        shares = x.shape[:-1].numel()
        factor = torch.full_like(factor, 1 / shares if shares else 0.0)
    elif reduction == "mean":
        counts = target.reshape(-1) != ignored
        shares = (counts if share is None else share).sum(dtype=wide)
        # Where no row counts, the mean is 0 / 0 and its gradient 0, as PyTorch's are.
        factor = torch.where(counts.any(), 1 / shares, torch.zeros_like(shares))
    # The gradient of the input is unrounded: the backward pass multiplies it, and rounds once.
    losses, dx, dw, dbias, _ = _of_rows(x, w, target, bias, class_weight, share, None, a, (*wanted, False), wide)
    result = _ops._WIDTHS[a["result"]]
    if reduction == "none":
        return losses.reshape(x.shape[:-1]).to(result), dx, dw, dbias, factor
    total = losses.sum()
    return (total if shares is None else total / shares).to(result), dx, dw, dbias, factor


def _fake(x, w, target, bias, class_weight, attributes):
    a = _ops.parse(attributes)
    compute, (of_x, of_w, of_bias) = _computed_in(a, x), (want == "1" for want in a["wanted"])
    wide = _wide(compute)
    loss = x.new_empty(x.shape[:-1] if a["reduction"] == "none" else (), dtype=_ops._WIDTHS[a["result"]])
    dx = x.new_empty(x.shape if of_x else (0, 0), dtype=wide)
    dw = w.new_empty(w.shape if of_w else (0, 0), dtype=_sums(a, compute))
    return loss, dx, dw, w.new_empty(w.shape[:1] if of_bias else (0,), dtype=wide), x.new_empty((), dtype=wide)


def _compute_rows(dloss, x, w, target, bias, class_weight, attributes):
    """The gradients of each row's loss, times `dloss`."""
    a = _ops.parse(attributes)
    wanted = tuple(want == "1" for want in a["wanted"])
    share = None if class_weight is None or target.is_floating_point() else _share_of(class_weight, target.reshape(-1), int(a["ignore"]), _wide(_computed_in(a, x)))
    _, dx, dw, dbias, dtarget = _of_rows(x, w, target, bias, class_weight, share, dloss, a, wanted, x.dtype)
    dw = scaled(dw, dw.new_ones(()), f"as={_WORDS[w.dtype]}") if wanted[1] and dw.dtype != w.dtype else dw.to(w.dtype)
    return dx, dw, dbias if bias is None else dbias.to(bias.dtype), dtarget


def _fake_rows(dloss, x, w, target, bias, class_weight, attributes):
    a = _ops.parse(attributes)
    of_x, of_w, of_bias, of_target = (want == "1" for want in a["wanted"])
    return (
        x.new_empty(x.shape if of_x else (0, 0)),
        w.new_empty(w.shape if of_w else (0, 0)),
        w.new_empty(w.shape[:1] if of_bias else (0,), dtype=torch.float32 if bias is None else bias.dtype),
        x.new_empty(target.shape if of_target else (0, 0), dtype=target.dtype if target.is_floating_point() else _wide(_computed_in(a, x))),
    )


def _refuse(ctx, *_):
    raise UnsupportedError("a tensor that is scaled for a gradient has no gradient; see linear_cross_entropy")


scaled = _ops._operator(
    "scaled",
    ["Tensor x", "Tensor factor"],
    "Tensor",
    False,
    lambda x, factor, attributes: torch.empty_like(x, dtype=_ops._WIDTHS[_ops.parse(attributes)["as"]]),
    gradients=(_ops._keep_nothing, _refuse),
)


class _Loss(torch.autograd.Function):
    """The differentiable call: one node, which keeps gradients instead of logits."""

    @staticmethod
    def forward(ctx, x, w, target, bias, class_weight, attributes):
        needs = ctx.needs_input_grad
        asked = (needs[0], needs[1], bias is not None and needs[3])
        ctx.reduction, ctx.of_target = _ops.parse(attributes)["reduction"], needs[2]
        ctx.of_rows = ctx.reduction == "none" or ctx.of_target
        ctx.asked, ctx.policy = (*asked, ctx.of_target), _ops._current_policy()
        digits = "".join("01"[want] for want in ctx.asked)
        ctx.words = f"{attributes} wanted={digits}"
        words = f"{attributes} wanted={'000' if ctx.of_rows else digits[:3]}"
        with torch._C._AutoDispatchBelowAutograd():
            loss, dx, dw, dbias, factor = _ops._namespace.linear_cross_entropy_and_gradients.default(x, w, target, bias, class_weight, words)
        if ctx.of_rows:
            ctx.save_for_backward(x, w, target, bias, class_weight)
        else:
            ctx.save_for_backward(dx, dw, dbias, factor)
            ctx.dtypes = (x.dtype, w.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        if torch.is_grad_enabled():
            rule = "compose it from linear and log_softmax where a gradient of its gradient is wanted"
            raise UnsupportedError(f"the gradient of linear_cross_entropy has no gradient; {rule}")
        dtarget = None
        with _policy.policy(_ops._native.numbered_policy(ctx.policy)):
            if ctx.of_rows:
                rows = ctx.saved_tensors[0].shape[:-1]
                if ctx.reduction != "none":
                    # Of a mean or a sum all rows have the same; in wide numbers, for a mean divides it.
                    dloss = dloss.to(_wide(dloss.dtype)) / (max(rows.numel(), 1) if ctx.reduction == "mean" else 1)
                *found, dtarget = _ops._namespace.linear_cross_entropy_rows.default(dloss.expand(rows), *ctx.saved_tensors, ctx.words)
            else:
                *found, factor = ctx.saved_tensors
                factor = factor * dloss.to(factor.dtype)
                found = [
                    scaled(value, factor, f"as={_WORDS[dtype]}") if want else None for value, dtype, want in zip(found, ctx.dtypes, ctx.asked)
                ]
        dx, dw, dbias = (value if want else None for value, want in zip(found, ctx.asked))
        return dx, dw, dtarget if ctx.of_target else None, dbias, None, None


def _autograd(x, w, target, bias, class_weight, attributes):
    _ops.refuse_tangents("linear_cross_entropy", (x, w, target, bias, class_weight))
    if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in (x, w, target, bias)):
        return _ops.apply("linear_cross_entropy", _Loss, x, w, target, bias, class_weight, attributes)
    with torch._C._AutoDispatchBelowAutograd():
        return _ops._namespace.linear_cross_entropy.default(x, w, target, bias, class_weight, attributes)


def _loss_alone(x, w, target, bias, class_weight, attributes):
    return _compute(x, w, target, bias, class_weight, attributes + " wanted=000")[0]


def _fake_loss(x, w, target, bias, class_weight, attributes):
    return _fake(x, w, target, bias, class_weight, attributes + " wanted=000")[0]


_TENSORS = "Tensor x, Tensor w, Tensor target, Tensor? bias, Tensor? class_weight, str attributes"
_PLACES = "Tensor(a!)? losses, Tensor(b!)? dx, Tensor(c!)? dw, Tensor(d!)? dbias, Tensor(e!)? dtarget"
_ops._library.define(f"linear_cross_entropy({_TENSORS}) -> Tensor")
# What the first does where gradients are recorded, in the forward pass and, for a loss of each row or the gradient of the target, in the backward pass; and one chunk of either.
_ops._library.define(f"linear_cross_entropy_and_gradients({_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_ops._library.define(f"linear_cross_entropy_rows(Tensor dloss, {_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)")
_ops._library.define(
    f"linear_loss(Tensor x, Tensor w, Tensor? bias, Tensor target, Tensor? share, Tensor? weights, Tensor? dloss, {_PLACES}, str attributes) -> ()"
)
for _key in ("CPU", "CUDA"):
    _ops._library.impl("linear_cross_entropy", _loss_alone, _key)
    _ops._library.impl("linear_cross_entropy_and_gradients", _compute, _key)
    _ops._library.impl("linear_cross_entropy_rows", _compute_rows, _key)
    _ops._library.impl("linear_loss", functools.partial(_ops._run, _CHUNK), _key)
_ops._library.impl("linear_cross_entropy", _autograd, "Autograd")
_ops._register_fake("linear_cross_entropy", _fake_loss)
_ops._register_fake("linear_cross_entropy_and_gradients", _fake)
_ops._register_fake("linear_cross_entropy_rows", _fake_rows)
_ops._register_fake("linear_loss", lambda *_: None)


def linear_cross_entropy(
    input,
    weight,
    target,
    bias=None,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    class_weight=None,
    z_loss=0.0,
    softcap=None,
    chunk_size=None,
    accum_dtype=None,
):
    """`cross_entropy(linear(input, weight, bias), target)` that never stores all logits, with the gradients of input, weight and bias.

    `input` is `[..., in]`, `weight` `[classes, in]`, `bias` `[classes]` (of the type of the operands, or float32), `target` int64 `[...]`, or a
    floating-point probability for each class, `[..., classes]`, which has a gradient too. `ignore_index` (of labels), `reduction`, `label_smoothing` and `class_weight` are
    as in `cross_entropy`. `z_loss` times the square of each row's log-sum-exp is added to its loss, beside labels not together with `class_weight`. `softcap` replaces each logit `y` by `softcap * tanh(y / softcap)`. The result has the type
    of the input, float32 under autocast, as `cross_entropy` of `linear` has.

    Rows are computed `chunk_size` at a time: by default a quarter of them, as far as their logits have at most 512 MiB, at least 256, rounded up to a multiple of
    128. Beside results and gradients, memory is that of a chunk's logits in the type of the operands, in whose place their gradient comes (of both on the CPU, with
    `softcap` or `z_loss`, with `class_weight` beside `label_smoothing`, and with probabilities; chunks are half as large there), and of the weight's gradient in `accum_dtype` while it is
    added up, by default float32 (float64 of float64). 16-bit operands may add up in their own type: half the memory, rounded once a chunk. The gradient of the input
    is kept in float32 (float64) until the backward pass, which scales and rounds it.

    With `reduction="none"`, where rows are at most twice the inputs, of 16-bit operands, without the options just named, `chunk_size` and `accum_dtype`, all logits are no
    more bytes than the weight's gradient in float32, and take its place: all rows are one chunk of the backward pass, and the weight's gradient is rounded once, in the
    type of the operands. Large chunks are faster: each reads and writes the weight's gradient in `accum_dtype`.

    Gradients are computed with the loss, by three products, and the backward pass multiplies them by one number; a loss without gradients is one product.
    `reduction="none"` computes the logits again in the backward pass, four products in all, and so does the gradient of probabilities. Results repeat bit for bit for one `chunk_size`. The host reads nothing
    of the device, so that a call can be captured. A gradient of the gradient raises `UnsupportedError`. A label that is neither a class nor ignored raises
    `OutOfRangeError` on the CPU, and gives NaN on a GPU. Where all rows are ignored a mean is NaN and its gradient 0.
    """
    if weight.dim() != 2:
        raise GraphError(f"a weight of {tuple(weight.shape)}; it is [classes, in]")
    classes, inputs = weight.shape
    if input.dim() == 0 or input.shape[-1] != inputs:
        raise GraphError(f"an input of {tuple(input.shape)} and a weight of {tuple(weight.shape)}; both have the same last dim")
    if classes == 0:
        raise GraphError("a weight without classes; there is at least one")
    rows, is_probable = input.shape[:-1], target.is_floating_point()
    if target.shape != rows + (classes,) * is_probable or not is_probable and target.dtype != torch.int64:
        rule = f"labels are torch.int64 of {tuple(rows)}, probabilities floating-point of {(*rows, classes)}"
        raise GraphError(f"a target of {target.dtype} and {tuple(target.shape)} for an input of {tuple(input.shape)}; {rule}")
    if is_probable and target.dtype not in _WORDS:
        raise UnsupportedError(f"a target of {target.dtype}; probabilities are of float64, float32, float16 or bfloat16")
    if is_probable and ignore_index >= 0:
        raise GraphError(f"ignore_index is {ignore_index} with probabilities as targets; only labels are ignored")
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and tuple(vector.shape) != (classes,):
            raise GraphError(f"{name} has the dims {tuple(vector.shape)} for {classes} classes; there is one number a class")
    if reduction not in ("none", "sum", "mean"):
        raise GraphError(f"the reduction is '{reduction}'; it is 'none', 'sum' or 'mean'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise GraphError(f"label_smoothing is {label_smoothing}; it is from 0 to 1")
    if not 0.0 <= z_loss < float("inf"):
        raise GraphError(f"z_loss is {z_loss}; it is finite and at least 0")
    if softcap is not None and not 0.0 < softcap < float("inf"):
        raise GraphError(f"softcap is {softcap}; it is finite and above 0")
    if chunk_size is not None and chunk_size < 1:
        raise GraphError(f"chunk_size is {chunk_size}; a chunk has at least one row")
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        if is_probable:
            raise UnsupportedError("class_weight requires a gradient; compose linear and cross_entropy, which have it beside probabilities")
        raise GraphError("class_weight requires a gradient; beside labels it has none")
    if class_weight is not None and z_loss and not is_probable:
        raise UnsupportedError("linear_cross_entropy with class_weight and z_loss; a mean would divide each by another number")
    kind = input.device.type
    under_autocast = torch.is_autocast_enabled(kind) and input.dtype != torch.float64
    compute = torch.get_autocast_dtype(kind) if under_autocast else input.dtype
    if compute not in _WORDS or not weight.is_floating_point() or not under_autocast and weight.dtype != input.dtype:
        raise GraphError(f"an input of {input.dtype} and a weight of {weight.dtype}; they are of one floating-point type")
    if accum_dtype not in (None, compute, _wide(compute)):
        raise GraphError(f"accum_dtype is {accum_dtype} for operands of {compute}; it is their type, or {_wide(compute)}")
    words = f"ignore={int(ignore_index)} reduction={reduction} smoothing={float(label_smoothing)!r} z={float(z_loss)!r} chunk={int(chunk_size or 0)}"
    words += "" if softcap is None else f" cap={float(softcap)!r}"
    words += "" if accum_dtype is None else f" sums={_WORDS[accum_dtype]}"
    is_free = chunk_size is None and accum_dtype is None and _is_in_place(_ops.parse(words), class_weight, is_probable)
    words += " whole=1" if is_free and is_one_chunk(rows.numel(), inputs, compute, reduction) else ""
    words += f" compute={_WORDS[compute]} result={_WORDS[torch.float32 if under_autocast else input.dtype]}"
    return _ops._namespace.linear_cross_entropy.default(input, weight, target, bias, class_weight, words)
