"""Verdigris for PyTorch: functions, operators (`torch.ops.verdigris`), modules, and `convert` for existing networks.

    import verdigris.torch as vt

    y = vt.conv2d(x, w, bias, stride=2, padding=1)
    model, report = vt.convert(model)
    with vt.policy(precision="tf32", mode="measured"):
        loss = model(batch).sum()
        loss.backward()

Work goes to PyTorch's current stream, results and workspace come from PyTorch's allocator. Autograd, `torch.compile`, CUDA-graph capture,
`channels_last`, autocast and `gradcheck` work. Precision is `fp32` unless the policy says otherwise: f32 convolutions are not rounded to tf32 by
themselves, as PyTorch's are.
"""

import importlib
import sys

import torch

from .. import _native
from . import _ops, functional
from .functional import *  # noqa: F403
from ._block import attention_block
from ._kvcache import flash_attn_with_kvcache, flash_mla_with_kvcache
from ._policy import get_policy, policy, set_policy

#: What is imported when it is asked for: classes of modules are a good part of the time of an import.
_LATER = {
    "Compiler": "_compiler",
    "compiler": "_compiler",
    "nn": "nn",
    "Report": "_convert",
    "convert": "_convert",
    "flex_attention": "_flex",
    "register_transformers": "_sdpa",
    "sdpa_kernel": "_sdpa",
}


def __getattr__(name):
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    globals()[name] = found = module if name == _LATER[name] else getattr(module, name)
    return found


def __dir__():
    return sorted({*globals(), *_LATER})


def plan_count():
    """How many plans calls have made: one for each function, attributes, shapes, strides, types, alignment, device and policy."""
    flex = sys.modules.get(f"{__name__}._flex")
    return _native.plan_count() + (flex.plan_count() if flex else 0)


def clear_plans():
    """Forgets the plans of calls, and the masks that `flex_attention` keeps."""
    _native.clear_plans()
    flex = sys.modules.get(f"{__name__}._flex")
    if flex:
        flex.clear_plans()


def explain(name, attributes, *tensors, dims=None):
    """How the plan of an operator's call was chosen, as text: `explain("conv_fprop", "stride=1,1 padding=0,0 dilation=1,1 groups=1", x, w)`.

    The plan is made if there is none. `name` and `attributes` are those of `torch.ops.verdigris`, `dims` where the operator has them.
    """
    operator = getattr(torch.ops.verdigris, name).default
    missing = sum(isinstance(argument.type, (torch.TensorType, torch.OptionalType)) for argument in operator._schema.arguments) - len(tensors)
    dims = [] if dims is None else [dims]
    return _native.explain_call(_ops.operator_number(name), *tensors, *[None] * missing, attributes, *dims)


__all__ = [
    *functional.__all__,
    "Compiler",
    "Report",
    "attention_block",
    "clear_plans",
    "compiler",
    "convert",
    "explain",
    "flex_attention",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "functional",
    "get_policy",
    "nn",
    "plan_count",
    "policy",
    "register_transformers",
    "sdpa_kernel",
    "set_policy",
]
