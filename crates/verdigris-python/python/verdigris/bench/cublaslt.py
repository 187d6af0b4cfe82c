"""cuBLASLt by its own interface, so that every answer of its heuristic can be timed: PyTorch takes the first, which is not always its best.

The library is the one that PyTorch itself has loaded. It speaks of column-major matrices: ``D = A B`` in rows is asked for as ``Dt = Bt At`` in
columns, so the operands change places and nothing is moved. The numbers below are those of ``cublasLt.h``.
"""

import ctypes
from typing import Callable, List, Optional, Tuple

import torch

from .problems import Gemm
from .tensors import TYPES, place

#: Answers that the heuristic is asked for, and the most workspace of one.
ANSWERS, WORKSPACE_BYTES = 16, 64 << 20

#: ``cudaDataType_t`` by element type; (compute type, scalar type) by dtype class.
DATA = {torch.float32: 0, torch.float16: 2, torch.int8: 3, torch.int32: 10, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
COMPUTE = {"bf16": (68, 0), "f16": (68, 0), "f32": (68, 0), "tf32": (77, 0), "fp8": (68, 0), "int8": (72, 10)}

_TRANSPOSE_A, _TRANSPOSE_B, _SCALE_A, _SCALE_B, _FAST = 3, 4, 17, 18, 25
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_PREFERRED_WORKSPACE, _PREFERRED_ALIGNMENTS = 1, (5, 6, 7, 8)
_NOT_SUPPORTED = 15

#: Alignment in bytes that the bench's operands have, which the heuristic may count on.
ALIGNMENT_BYTES = 256


class Answer(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Trouble(RuntimeError):
    """A call that failed, with its status."""


def library() -> Optional[ctypes.CDLL]:
    """The library; None where there is none."""
    version = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError:
        return None


def _check(call: str, status: int) -> None:
    if status:
        raise Trouble(f"{call} failed with status {status}")


class _Objects:
    """Descriptors of one product, destroyed together."""

    def __init__(self, lib):
        self.lib, self.made = lib, []

    def make(self, kind: str, *arguments) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _check(f"cublasLt{kind}Create", getattr(self.lib, f"cublasLt{kind}Create")(ctypes.byref(made), *arguments))
        self.made.append((kind, made))
        return made

    def set(self, kind: str, of: ctypes.c_void_p, attribute: int, value) -> None:
        call = f"cublasLt{kind}SetAttribute"
        _check(call, getattr(self.lib, call)(of, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))

    def __del__(self):
        for kind, made in self.made:
            getattr(self.lib, f"cublasLt{kind}Destroy")(made)


def _stored(gemm: Gemm, which: int) -> Tuple[bool, int, int, int]:
    """Of an operand: whether its rows are the library's columns; its stored rows, row length and leading dimension."""
    shape, strides = place(gemm, which)
    (rows, columns), (row, column) = shape[-2:], strides[-2:]
    by_rows = column == 1 and (row >= columns or rows == 1)
    return (by_rows, rows, columns, max(row, columns)) if by_rows else (by_rows, columns, rows, max(column, rows))


class Product:
    """One product with the answers of the heuristic."""

    def __init__(self, gemm: Gemm, device: torch.device, lib=None):
        self.lib = library() if lib is None else lib
        if self.lib is None:
            raise Trouble("libcublasLt.so cannot be loaded")
        self.gemm, self.device = gemm, device
        self.handle = ctypes.c_void_p()
        _check("cublasLtCreate", self.lib.cublasLtCreate(ctypes.byref(self.handle)))
        self.objects = _Objects(self.lib)
        self._describe()
        self.answers = self._ask()
        self.workspace = torch.empty(max([1, *(answer.workspace_bytes for answer in self.answers)]), dtype=torch.uint8, device=device)

    def _describe(self) -> None:
        gemm, make, put = self.gemm, self.objects.make, self.objects.set
        compute, scalar = COMPUTE[gemm.dtype]
        number = ctypes.c_int32 if scalar == 10 else ctypes.c_float
        self.scalars = number(1), number(0)
        self.operation = make("MatmulDesc", ctypes.c_int(compute), ctypes.c_int(scalar))
        stored = [_stored(gemm, which) for which in range(3)]
        # Our B is the library's A. A matrix that lies by columns is its transpose by rows.
        put("MatmulDesc", self.operation, _TRANSPOSE_A, ctypes.c_int32(not stored[1][0]))
        put("MatmulDesc", self.operation, _TRANSPOSE_B, ctypes.c_int32(not stored[0][0]))
        if gemm.dtype == "fp8":
            self.ones = torch.ones(1, device=self.device)
            put("MatmulDesc", self.operation, _FAST, ctypes.c_int8(1))
            for attribute in (_SCALE_A, _SCALE_B):
                put("MatmulDesc", self.operation, attribute, ctypes.c_void_p(self.ones.data_ptr()))
        self.layouts = []
        for which, (_, rows, columns, leading) in enumerate(stored):
            dtype = TYPES[gemm.dtype][1 if which == 2 else 0]
            layout = make("MatrixLayout", ctypes.c_int(DATA[dtype]), ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(leading))
            if gemm.batch != 1:
                put("MatrixLayout", layout, _BATCH_COUNT, ctypes.c_int32(gemm.batch))
                put("MatrixLayout", layout, _BATCH_STRIDE, ctypes.c_int64(place(gemm, which)[1][0]))
            self.layouts.append(layout)

    def _ask(self) -> List[Answer]:
        preference = self.objects.make("MatmulPreference")
        self.objects.set("MatmulPreference", preference, _PREFERRED_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        for attribute in _PREFERRED_ALIGNMENTS:
            self.objects.set("MatmulPreference", preference, attribute, ctypes.c_uint32(ALIGNMENT_BYTES))
        found, count = (Answer * ANSWERS)(), ctypes.c_int()
        a, b, d = self.layouts
        status = self.lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, b, a, d, d, preference, ctypes.c_int(ANSWERS), found, ctypes.byref(count)
        )
        if status != _NOT_SUPPORTED:
            _check("cublasLtMatmulAlgoGetHeuristic", status)
        answers = [] if status else [answer for answer in found[: count.value] if answer.state == 0]
        if not answers:
            raise Trouble("cuBLASLt's heuristic has no answer")
        return answers

    def launch(self, index: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The product by one of the answers."""
        answer, (shape, strides) = self.answers[index], place(self.gemm, 2)
        dtype, (alpha, beta) = TYPES[self.gemm.dtype][1], self.scalars
        layout_a, layout_b, layout_d = self.layouts

        def launch(a, b):
            d = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, d)]
            status = self.lib.cublasLtMatmul(
                self.handle,
                self.operation,
                ctypes.byref(alpha),
                pointers[1],
                layout_b,
                pointers[0],
                layout_a,
                ctypes.byref(beta),
                pointers[2],
                layout_d,
                pointers[2],
                layout_d,
                ctypes.byref(answer.algorithm),
                ctypes.c_void_p(self.workspace.data_ptr()),
                ctypes.c_size_t(answer.workspace_bytes),
                ctypes.c_void_p(stream),
            )
            _check("cublasLtMatmul", status)
            return d

        return launch

    def __del__(self):
        handle = getattr(self, "handle", None)
        if handle:
            self.lib.cublasLtDestroy(handle)
