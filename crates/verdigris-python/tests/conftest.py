"""What the tests share: seeds, judges, and the devices that are here."""

import os
import sys

import pytest

# The tests' plans and kernels are their own.
os.environ.setdefault("VERDIGRIS_PLANS", "off")


@pytest.fixture(autouse=True)
def seed():
    torch = pytest.importorskip("torch")
    torch.manual_seed(20)
    return 20


@pytest.fixture(autouse=True)
def default_policy():
    """A program that is tested may set the policy of the process, which is every test's."""
    yield
    torch = sys.modules.get("verdigris.torch")
    if torch is not None:
        torch.set_policy()


def error_of(result, truth):
    """The greatest error over the greatest magnitude of the truth."""
    import torch

    truth = truth.detach().to(torch.float64).cpu()
    result = result.detach().to(torch.float64).cpu()
    assert result.shape == truth.shape, (result.shape, truth.shape)
    assert torch.isfinite(result).all() == torch.isfinite(truth).all()
    return ((result - truth).abs().max() / truth.abs().max().clamp_min(1e-30)).item() if truth.numel() else 0.0


#: Rounding of the result, with room for sums in another order.
TOLERANCES = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 9e-3, "float16": 1.2e-3}


def close(result, truth, slack=1.0):
    """Whether `result` is `truth` (computed in f64) to the rounding of its own type."""
    name = str(result.dtype).removeprefix("torch.")
    error = error_of(result, truth)
    assert error <= slack * TOLERANCES[name], f"error {error:.3g} in {name}, {slack * TOLERANCES[name]:.3g} allowed"
