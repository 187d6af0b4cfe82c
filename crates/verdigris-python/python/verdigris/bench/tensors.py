"""Operands of a row: seeded normal data in the row's layout, in as many copies as it takes to leave the L2 behind."""

import math
from typing import List, Optional, Tuple

import torch

from .problems import CHANNELS_FIRST, Conv, Problem, operand_bytes

#: Operand and result types by dtype class.
TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f16": (torch.float16, torch.float16),
    "tf32": (torch.float32, torch.float32),
    "f32": (torch.float32, torch.float32),
    "fp8": (torch.float8_e4m3fn, torch.bfloat16),
    "int8": (torch.int8, torch.int32),
}

#: Most copies of the operands: beyond, a launch costs less than what choosing among them does.
MOST_COPIES = 256

#: Integer operands are whole numbers in this range: sums stay within i32, and every product is exact.
INT8_RANGE = (-16, 17)

#: Bytes of host memory that count as "the L2" on the CPU device.
CPU_CACHE_BYTES = 32 << 20

#: Bytes before and behind each operand that nobody may touch, and what stands there. A multiple of every alignment that kernels ask for.
FENCE_BYTES, FENCE = 1024, 0xA5

Pair = Tuple[torch.Tensor, torch.Tensor]


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last cache before the memory."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size


def result_bytes(problem: Problem) -> int:
    return elements(problem.result_shape) * TYPES[problem.dtype][1].itemsize


def copies(problem: Problem, device: torch.device, memory_limit_bytes: int, sides: int = 1) -> int:
    """How many copies of the operands, and of each side's results, are used in turn: more than twice the L2 in all, as far as the memory allows."""
    operands, result = operand_bytes(problem), result_bytes(problem)
    each = max(operands + result, 1)
    wanted = -(-2 * cache_bytes(device) // each) + (0 if each > 2 * cache_bytes(device) else 1)
    return max(1, min(wanted, MOST_COPIES, memory_limit_bytes // (2 * (operands + sides * result) or 1)))


def fill(count: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """``count`` elements of normal data (whole numbers of a small range for int8). Never zeros: they draw less power, and the clock rises."""
    if dtype == torch.int8:
        return torch.randint(*INT8_RANGE, (count,), dtype=torch.int8, device=device, generator=generator)
    values = torch.empty(count, dtype=dtype, device=device)
    step = 1 << 26
    for start in range(0, count, step):
        size = min(step, count - start)
        values[start : start + size] = torch.randn(size, device=device, generator=generator).to(dtype)
    return values


def channels_last(shape) -> Tuple[int, ...]:
    """Strides of a packed tensor ``[n, c, spatial]`` whose channels have stride 1."""
    strides = [0] * len(shape)
    strides[1] = 1
    step = shape[1]
    for dim in range(len(shape) - 1, 1, -1):
        strides[dim] = step
        step *= shape[dim]
    strides[0] = step
    return tuple(strides)


def contiguous(shape) -> Tuple[int, ...]:
    """Strides of a packed tensor whose last dim has stride 1."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def place(problem: Problem, operand: int) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """Shape and strides of an operand (0, 1) or of the result (2)."""
    shape = problem.result_shape if operand == 2 else problem.operand_shapes[operand]
    if isinstance(problem, Conv):
        return shape, (contiguous(shape) if problem.layout == CHANNELS_FIRST else channels_last(shape))
    row, column = problem.strides[operand]
    matrix = (shape[1] - 1) * row + (shape[2] - 1) * column + 1
    # Batched operands follow each other packed.
    packed = max(shape[1] * row if row >= column else shape[2] * column, matrix)
    if problem.batch == 1:
        return shape[1:], (row, column)
    return shape, (packed, row, column)


def span(shape, strides) -> int:
    """Elements from the first to the last one."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides))


def new(problem: Problem, operand: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """One operand, filled."""
    shape, strides = place(problem, operand)
    dtype = TYPES[problem.dtype][1 if operand == 2 else 0]
    return fill(span(shape, strides), dtype, device, generator).as_strided(shape, strides)


def operand_pairs(problem: Problem, count: int, device: torch.device, seed: int) -> List[Pair]:
    """``count`` pairs of operands with the same values at different places. A seed gives the same values on every machine of a kind."""
    generator = torch.Generator(device=device).manual_seed(seed)
    first, second = (new(problem, operand, device, generator) for operand in (0, 1))
    return [(fenced(first), fenced(second)) for _ in range(count)]


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """A copy between two fences."""
    size, dtype = span(tensor.shape, tensor.stride()) * tensor.element_size(), tensor.dtype
    memory = torch.empty(size + 2 * FENCE_BYTES, dtype=torch.uint8, device=tensor.device)
    memory[:FENCE_BYTES] = FENCE
    memory[FENCE_BYTES + size :] = FENCE
    memory[FENCE_BYTES : FENCE_BYTES + size] = flat(tensor).view(torch.uint8)
    return memory[FENCE_BYTES : FENCE_BYTES + size].view(dtype).as_strided(tensor.shape, tensor.stride(), FENCE_BYTES // dtype.itemsize)


def broken(pairs: List[Pair], truth: Pair) -> Optional[str]:
    """Which operand, or which fence around one, is no longer what it was; None where all are."""
    for i, pair in enumerate(pairs):
        for name, tensor, right in zip(("first", "second"), pair, truth):
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            if not (bool((memory[:FENCE_BYTES] == FENCE).all()) and bool((memory[-FENCE_BYTES:] == FENCE).all())):
                return f"memory beside copy {i} of the {name} operand was written"
            if not torch.equal(flat(tensor).view(torch.uint8), flat(right).view(torch.uint8)):
                return f"copy {i} of the {name} operand was written"
    return None


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first element of a tensor to its last, as one dim."""
    return tensor.as_strided((span(tensor.shape, tensor.stride()),), (1,))


def elements(shape) -> int:
    return math.prod(shape)
