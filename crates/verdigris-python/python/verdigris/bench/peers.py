"""PyTorch, as its users call it. Every peer is a function of a row that returns a launch (operands -> result), or says why it has none.

``pytorch``: eager mode with ``cudnn.benchmark`` on and all of cuDNN's plans tried, several times over, since each try times a plan once and picks by
that; the picks are captured and timed, and the best counts; each direction of a convolution alone, by ``aten::convolution_backward`` with its
output mask.
Products by ``torch.matmul`` (cuBLAS), ``torch._scaled_mm`` (fp8) and ``torch._int_mm`` (int8). ``cublaslt``: products by cuBLASLt itself, the best of
sixteen answers of its heuristic (``cublaslt``). ``native``: convolutions by PyTorch's own kernels, cuDNN off, for groups and depthwise. ``other_format``:
convolutions by ``pytorch`` on operands in the other memory format. ``compile``: what ``torch.compile`` makes of a forward call with
``max-autotune``; asked for by name, since it compiles for seconds a row. Bars speak of the fastest that is right.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from typing import Callable, Dict, List, Optional, Tuple

import torch

from . import cublaslt
from .problems import CHANNELS_FIRST, CHANNELS_LAST, Conv, Problem
from .tensors import TYPES, place

Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Refused(Exception):
    """This side has no way to carry out the row, for the reason given."""


@contextlib.contextmanager
def precision(dtype: str, deterministic: bool = False):
    """PyTorch's switches while a row runs: tf32 exactly where the row says so, cuDNN's measured choice."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    # A build without CUDA has no limit.
    has_limit = hasattr(torch._C, "_cuda_set_cudnn_benchmark_limit")
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit if has_limit else None)
    matmul.allow_tf32 = cudnn.allow_tf32 = dtype == "tf32"
    cudnn.benchmark, cudnn.deterministic = True, deterministic
    if has_limit:
        cudnn.benchmark_limit = 0
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, limit = before
        if has_limit:
            cudnn.benchmark_limit = limit


#: How many times cuDNN is asked for its pick.
PICKS = 3


class Picker:
    """A thread in which PyTorch picks cuDNN's plans anew: it keeps those of each thread apart, and as long as the thread lives.

    A plan that was captured into a graph has to be there when the graph is replayed, so pickers last as long as the process.
    """

    def __init__(self):
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="picker")

    def launch(self, launch: Launch) -> Launch:
        """The launch, in that thread and on the caller's stream."""

        def inside(stream, *operands):
            with torch.no_grad(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                return launch(*operands)

        def outside(*operands):
            stream = torch.cuda.current_stream() if operands[0].is_cuda else None
            return self._thread.submit(inside, stream, *operands).result()

        return outside


@functools.lru_cache(maxsize=None)
def pickers() -> Tuple[Picker, ...]:
    return tuple(Picker() for _ in range(PICKS))


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


def other_format(row: Problem, device: torch.device) -> Launch:
    """As ``pytorch``, on operands that a user would keep in the other memory format; they are laid out before anything is timed."""
    if not isinstance(row, Conv):
        raise Refused("products have no memory formats")
    swapped = dataclasses.replace(row, layout=CHANNELS_LAST if row.layout == CHANNELS_FIRST else CHANNELS_FIRST)
    return pytorch(swapped, device)


def laid_out_otherwise(row: Problem) -> Callable[[torch.Tensor, torch.Tensor], Tuple[torch.Tensor, torch.Tensor]]:
    """Operands of a row in the other memory format."""
    swapped = dataclasses.replace(row, layout=CHANNELS_LAST if row.layout == CHANNELS_FIRST else CHANNELS_FIRST)

    def laid_out(first, second):
        placed = (torch.empty_strided(*place(swapped, i), dtype=t.dtype, device=t.device) for i, t in enumerate((first, second)))
        return tuple(new.copy_(old) for new, old in zip(placed, (first, second)))

    return laid_out


def answers_of_cublaslt(row: Problem, device: torch.device) -> List[Launch]:
    """Every answer of cuBLASLt's heuristic."""
    if isinstance(row, Conv) or device.type != "cuda":
        raise Refused("products on a GPU alone")
    try:
        made = cublaslt.Product(row, device)
    except cublaslt.Trouble as error:
        raise Refused(str(error)) from error
    return [made.launch(i) for i in range(len(made.answers))]


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
    """``torch.compile`` with ``max-autotune``, where a user would have it: backward convolutions are calls of ATen there as well."""
    if isinstance(row, Conv) and row.direction != "fprop":
        raise Refused("torch.compile calls ATen for backward convolutions")
    # Rows share a line of code, and of one line dynamo compiles eight graphs; what comes behind them would be eager.
    torch._dynamo.reset()
    return torch.compile(pytorch(row, device), mode="max-autotune-no-cudagraphs", dynamic=False)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way in which a peer computes a row: a launch, whether it is one of several picks of the same call, and how its operands have to lie
    (None: as the row's)."""

    peer: str
    launch: Launch
    is_pick: bool = False
    operands: Optional[Callable] = None


def _picked(name: str, launch: Launch, row: Problem, device: torch.device, operands: Optional[Callable] = None) -> List[Way]:
    """A convolution by cuDNN several times, each with a pick of its own; anything else once."""
    if not isinstance(row, Conv) or device.type != "cuda":
        return [Way(name, launch, False, operands)]
    return [Way(name, picker.launch(launch), True, operands) for picker in pickers()]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A peer by name: its ways for a row, and whether it is asked unless another is named."""

    ways: Callable[[Problem, torch.device], List[Way]]
    is_default: bool


PEERS: Dict[str, Peer] = {
    "pytorch": Peer(lambda row, device: _picked("pytorch", pytorch(row, device), row, device), True),
    "cublaslt": Peer(lambda row, device: [Way("cublaslt", launch) for launch in answers_of_cublaslt(row, device)], True),
    "native": Peer(lambda row, device: [Way("native", native(row, device))], True),
    "other_format": Peer(lambda row, device: _picked("other_format", other_format(row, device), row, device, laid_out_otherwise(row)), True),
    "compile": Peer(lambda row, device: [Way("compile", compiled(row, device))], False),
}


def of(row: Problem, device: torch.device, names) -> Tuple[List[Way], Dict[str, str]]:
    """The ways of the peers that take a row, and why the others do not."""
    taken, refused = [], {}
    for name in names:
        try:
            taken += PEERS[name].ways(row, device)
        except Refused as reason:
            refused[name] = str(reason)
    return taken, refused
