"""PyTorch, as its users call it. Every peer is a function of a row that returns a launch (operands -> result), or says why it has none.

``pytorch``: eager mode with ``cudnn.benchmark`` on; each direction of a convolution alone, by ``aten::convolution_backward`` with its output mask.
Products by ``torch.matmul`` (cuBLAS), ``torch._scaled_mm`` (fp8) and ``torch._int_mm`` (int8). ``cublaslt``: products by cuBLASLt where
``pytorch`` would take cuBLAS. ``native``: convolutions by PyTorch's own kernels, cuDNN off, for groups and depthwise. ``compile``: what
``torch.compile`` makes of the call with ``max-autotune``; asked for by name, since it compiles for seconds a row.
"""

import contextlib
import dataclasses
from typing import Callable, Dict, List, Tuple

import torch

from .problems import Conv, Problem
from .tensors import TYPES, place

Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Refused(Exception):
    """This side has no way to carry out the row, for the reason given."""


@contextlib.contextmanager
def precision(dtype: str, deterministic: bool = False):
    """PyTorch's switches while a row runs: tf32 exactly where the row says so, cuDNN's measured choice."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    matmul.allow_tf32 = cudnn.allow_tf32 = dtype == "tf32"
    cudnn.benchmark, cudnn.deterministic = True, deterministic
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def convolution(conv: Conv, device: torch.device) -> Launch:
    """One direction of a convolution by ATen. The tensor whose sizes alone are asked for (x of dgrad, w of wgrad) is made once and never read."""
    dtype = TYPES[conv.dtype][0]
    arguments = [list(conv.stride), list(conv.pad), list(conv.dilation), False, [0] * len(conv.input), conv.groups]
    if conv.direction == "fprop":
        return lambda x, w: torch.ops.aten.convolution(x, w, None, *arguments)
    shape, strides = place(conv, 2)
    like = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    backward = torch.ops.aten.convolution_backward
    if conv.direction == "dgrad":
        return lambda dy, w: backward(dy, like, w, None, *arguments, [True, False, False])[0]
    return lambda dy, x: backward(dy, x, like, None, *arguments, [False, True, False])[1]


def _scaled(device: torch.device) -> Launch:
    one = torch.ones((), device=device)

    def launch(a, b):
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return launch


def product(gemm, device: torch.device) -> Launch:
    """A matrix product by the function that PyTorch has for the type."""
    if gemm.dtype in ("fp8", "int8") and gemm.batch != 1:
        raise Refused(f"PyTorch has no batched product of {gemm.dtype}")
    if gemm.dtype == "fp8":
        if device.type == "cuda" and gemm.letters != "nt":
            raise Refused("_scaled_mm takes a row-major A and a column-major B alone")
        return _scaled(device)
    if gemm.dtype == "int8":
        return torch._int_mm
    if gemm.ldd is not None:
        shape, strides = place(gemm, 2)
        out = torch.empty_strided(shape, strides, dtype=TYPES[gemm.dtype][1], device=device)
        return lambda a, b: torch.matmul(a, b, out=out)
    return torch.matmul


def pytorch(row: Problem, device: torch.device) -> Launch:
    """Eager mode."""
    if isinstance(row, Conv):
        if row.dtype in ("fp8", "int8"):
            raise Refused(f"PyTorch has no {row.dtype} convolution")
        return convolution(row, device)
    return product(row, device)


def cublaslt(row: Problem, device: torch.device) -> Launch:
    """``torch.matmul`` told to prefer cuBLASLt."""
    if isinstance(row, Conv) or device.type != "cuda":
        raise Refused("products on a GPU alone")
    if row.dtype in ("fp8", "int8"):
        raise Refused("PyTorch calls cuBLASLt for this type already")
    inner = product(row, device)
    prefer = torch.backends.cuda.preferred_blas_library

    def launch(a, b):
        before = prefer()
        prefer("cublaslt")
        try:
            return inner(a, b)
        finally:
            prefer(before)

    return launch


def native(row: Problem, device: torch.device) -> Launch:
    """PyTorch's own kernels."""
    if not isinstance(row, Conv) or row.groups == 1 or device.type != "cuda":
        raise Refused("convolutions in groups on a GPU alone")
    if row.dtype in ("fp8", "int8"):
        raise Refused(f"PyTorch has no {row.dtype} convolution")
    if row.kind == "grouped":
        # One convolution after the other, a group each: nobody's choice, and seconds long for many groups.
        raise Refused("PyTorch's own kernels take groups one by one")
    inner = convolution(row, device)

    def launch(first, second):
        with torch.backends.cudnn.flags(enabled=False, allow_tf32=row.dtype == "tf32"):
            return inner(first, second)

    return launch


def compiled(row: Problem, device: torch.device) -> Launch:
    """``torch.compile`` with ``max-autotune``."""
    return torch.compile(pytorch(row, device), mode="max-autotune-no-cudagraphs", dynamic=False)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A peer by name, and whether it is asked unless another is named."""

    make: Callable[[Problem, torch.device], Launch]
    is_default: bool


#: The first one is who the bars speak of.
PEERS: Dict[str, Peer] = {
    "pytorch": Peer(pytorch, True),
    "cublaslt": Peer(cublaslt, True),
    "native": Peer(native, True),
    "compile": Peer(compiled, False),
}


def of(row: Problem, device: torch.device, names) -> Tuple[List[Tuple[str, Launch]], Dict[str, str]]:
    """The peers that take a row, and why the others do not."""
    taken, refused = [], {}
    for name in names:
        try:
            taken.append((name, PEERS[name].make(row, device)))
        except Refused as reason:
            refused[name] = str(reason)
    return taken, refused
