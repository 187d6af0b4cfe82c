"""Hands PyTorch's types, modes and allocators to the native half, once."""

import torch
from torch._C._dynamo import guards as _guards

from .. import _native

_CUDA = torch.backends.cuda.is_built()


def _is_capturing():
    return _CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_native.hook_torch(
    {
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "example": torch.empty(0),
        # The allocations by which compiled code of PyTorch makes its results: the same allocator, without the parsing of arguments.
        "empty_cpu": _guards._empty_strided_cpu,
        "empty_cuda": _guards._empty_strided_cuda,
        "empty": torch.empty_strided,
        "dtypes": {
            "f64": torch.float64,
            "f32": torch.float32,
            "f16": torch.float16,
            "bf16": torch.bfloat16,
            "e4m3": torch.float8_e4m3fn,
            "e5m2": torch.float8_e5m2,
            "i8": torch.int8,
            "u8": torch.uint8,
            "i32": torch.int32,
            "i64": torch.int64,
            "bool": torch.bool,
        },
        # Whatever may stand between a call and its kernel; each is asked at every call.
        "modes": [
            torch._C._len_torch_dispatch_stack,
            torch._C._len_torch_function_stack,
            torch._C._are_functorch_transforms_active,
            torch._C._is_tracing,
        ],
        # Where `_current_level` is that of `torch.autograd.forward_ad`: a look into a dict, where no function is asked.
        "forward_mode": vars(torch.autograd.forward_ad),
        # Profiled calls go the way that they go unseen: another way would have other plans, which would be chosen while somebody measures.
        "is_profiled": torch._C._autograd._profiler_enabled,
        "range": torch._C._profiler._RecordFunctionFast,
        "is_autocast": torch._C._is_any_autocast_enabled,
        "is_autocast_of": torch.is_autocast_enabled,
        "autocast_dtype": torch.get_autocast_dtype,
        "is_grad": torch.is_grad_enabled,
        # To ask how many devices there are would cost the import more than this does a thousand calls.
        "current_device": torch._C._cuda_getDevice if _CUDA else None,
        "is_capturing": _is_capturing,
    }
)
