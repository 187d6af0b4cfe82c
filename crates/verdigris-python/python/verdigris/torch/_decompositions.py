"""Functions in PyTorch's own words, for compilers: what they fuse with what stands around it as well as an opaque call computes it, or better.

Activations, softmax and scans stand beside their operators in `_ops`; norms of rows, channels and batches in `functional`.
"""

import torch
from torch.nn import functional


def pad(x, a):
    """A border of one number, and elements that are left out; from the attributes by name."""
    sides = [side for pair in zip(reversed(a["before"]), reversed(a["after"])) for side in pair]
    return functional.pad(x, sides, value=float(a["value"]))


def _of_elements(a, x, target, weight, positive):
    kind, bend, each = a["loss"], float(a.get("bend", 1.0)), {"reduction": "none"}
    if kind == "squared":
        return functional.mse_loss(x, target, **each)
    if kind == "absolute":
        return functional.l1_loss(x, target, **each)
    if kind == "huber":
        return functional.huber_loss(x, target, delta=bend, **each)
    if kind == "smooth_l1":
        return functional.smooth_l1_loss(x, target, beta=bend, **each)
    if kind == "soft_margin":
        # As PyTorch's own, but finite where e^(-target * x) is not.
        return functional.softplus(-target * x, threshold=100.0)
    if kind == "divergence":
        return functional.kl_div(x, target, log_target=a.get("log") == "1", **each)
    return functional.binary_cross_entropy_with_logits(x, target, weight, pos_weight=positive, **each)


def element_loss(x, target, weight, positive, a):
    """A loss of elements, reduced, from the attributes by name. In f32 (f64 for f64) as the operator computes it, and rounded once; under autocast the result is f32, as the operator's is."""
    kind = x.device.type
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    made = wide if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        tensors = [value if value is None else value.to(wide) for value in (x, target, weight, positive)]
        loss, reduction = _of_elements(a, *tensors), a.get("reduction", "mean")
        loss = loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()
        return loss.to(made)
