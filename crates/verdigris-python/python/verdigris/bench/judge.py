"""Right before fast: results against sums in f64, at sampled positions and wherever two answers differ most.

The reference gathers the products of single elements of the result and adds them up in f64 on the device, so that it costs the same for a large
result as for a small one. A result is wrong if an element is farther from it than

    tolerance = u_out * (|reference| + 4 * rms * [16-bit result]) + u_in * (8 * rms + 2 * |reference|) + u_acc * (8 * sqrt(L) + L / 16) * rms

where L is the number of products summed up and rms the root of the sum of their squares: the size of a sum of L products of zero-mean data, and of
each of its partial sums. u_out is the result's unit roundoff (its half unit in the last place, and more where partial sums may be kept in
the result's own 16 bits); u_in that of operands which are rounded on their way in (tf32; the worst of some thousand independent errors); u_acc
that of accumulation, a unit in the last place of f32 for each step of a tensor core, which truncates, one step for 16 products. fp8 products are
accumulated with 13 bits behind the point. Integer results are exact. The same rule holds for both sides; sums in another order pass; a tap of a
filter or a slab of channels that is forgotten or counted twice does not.

f32 that is to be f32 has a rule of its own. One chain of multiply-adds is off by

    model = 2**-24 * sqrt(L / 6 + 1) * rms

in the root mean square: each of its roundings is uniform within half a unit of a partial sum that grows with the root of its length, and
the result is rounded once more. The errors of the whole sample may be 4 times that in the root mean square, and each of them 6 times
as far. No term grows with L itself, so neither a tensor core's truncation over a long chain nor operands cut to tf32 pass.
"""

import dataclasses
import itertools
import math
from typing import List, Optional, Sequence

import torch

from .problems import Conv, Problem
from .tensors import flat

#: (u_out, u_in, u_acc) by dtype class.
ROUNDOFF = {
    "bf16": (2.0**-8, 0.0, 2.0**-23),
    "f16": (2.0**-11, 0.0, 2.0**-23),
    "tf32": (2.0**-24, 2.0**-11, 2.0**-23),
    "f32": (2.0**-24, 0.0, 2.0**-24),
    "fp8": (2.0**-8, 0.0, 2.0**-13),
    "int8": (0.0, 0.0, 0.0),
}

#: Of f32: how many times the model's error all errors together may be, and how much farther a single one.
MODEL_FACTOR, OUTLIER_FACTOR = 4.0, 6.0

#: Products gathered for one sample, and at once.
PRODUCTS = {"cuda": (1 << 26, 1 << 24), "cpu": (1 << 22, 1 << 20)}

#: Positions looked at because two answers differ most there.
DISAGREEMENTS = 32


@dataclasses.dataclass(frozen=True)
class Sample:
    """Exact elements of a result: row-major positions, sums in f64, and the root of the sum of squared products."""

    positions: torch.Tensor
    values: torch.Tensor
    rms: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Judgement:
    """How far a result is from right. ``worst`` is in tolerances, and 1 at most where ``fault`` is None."""

    error: float
    worst: float
    fault: Optional[str]


def tolerance(problem: Problem, sample: Sample) -> torch.Tensor:
    """The formula at the head."""
    u_out, u_in, u_acc = ROUNDOFF[problem.dtype]
    size, rms = sample.values.abs(), sample.rms
    if problem.dtype == "f32":
        return u_out * size + MODEL_FACTOR * OUTLIER_FACTOR * model(problem, sample)
    partial = 4.0 if problem.dtype in ("bf16", "f16", "fp8") else 0.0
    terms = problem.terms
    return u_out * (size + partial * rms) + u_in * (8 * rms + 2 * size) + u_acc * (8 * math.sqrt(terms) + terms / 16) * rms


def model(problem: Problem, sample: Sample) -> torch.Tensor:
    """The root mean square error of a chain of f32 multiply-adds, for each element."""
    return ROUNDOFF["f32"][2] * math.sqrt(problem.terms / 6 + 1) * sample.rms


def _unravel(positions: torch.Tensor, shape) -> List[torch.Tensor]:
    indices = []
    for extent in reversed(shape):
        indices.append(positions % extent)
        positions = torch.div(positions, extent, rounding_mode="floor")
    return list(reversed(indices))


def _ravel(indices: Sequence, shape):
    position = 0
    for index, extent in zip(indices, shape):
        position = position * extent + index
    return position


class _Memory:
    """A tensor's memory, read as f64 at offsets."""

    def __init__(self, tensor: torch.Tensor):
        self.strides = tensor.stride()
        self.dtype = tensor.dtype
        # Indexing is not implemented for eight-bit floats.
        self.flat = flat(tensor).view(torch.uint8) if tensor.element_size() == 1 else flat(tensor)

    def at(self, offsets: torch.Tensor) -> torch.Tensor:
        return self.flat[offsets].view(self.dtype).to(torch.float64)


def _axis(values: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    """A vector along one axis (an axis after the samples'), or a [samples, extent] table with the samples in front."""
    shape = [1] * rank
    if values.dim() == 2:
        shape[0] = values.shape[0]
    shape[axis] = values.shape[-1]
    return values.reshape(shape)


def _conv_offsets(conv: Conv, at: List[torch.Tensor], first: _Memory, second: _Memory):
    """Offsets of both operands of every product of sampled elements, and which products there are: [samples, channels or images, dims]."""
    device = at[0].device
    dims = len(conv.input)
    rank = 2 + dims
    taps = [torch.arange(f, device=device) for f in conv.filter]
    per_c, per_k = conv.c // conv.groups, conv.k // conv.groups
    column = [value.reshape([-1] + [1] * (rank - 1)) for value in at]
    valid = torch.ones((1,) * rank, dtype=torch.bool, device=device)

    def spatial(memory, tables):
        return sum(_axis(table * stride, 2 + d, rank) for d, (table, stride) in enumerate(zip(tables, memory.strides[2:])))

    if conv.direction == "fprop":
        n, k = column[:2]
        c = _axis(torch.arange(per_c, device=device), 1, rank)
        pixels = [at[2 + d][:, None] * conv.stride[d] - conv.pad[d] + taps[d] * conv.dilation[d] for d in range(dims)]
        for d, pixel in enumerate(pixels):
            valid = valid & _axis((pixel >= 0) & (pixel < conv.input[d]), 2 + d, rank)
        group = torch.div(k, per_k, rounding_mode="floor")
        a = n * first.strides[0] + (group * per_c + c) * first.strides[1] + spatial(first, pixels)
        b = k * second.strides[0] + c * second.strides[1] + spatial(second, taps)
    elif conv.direction == "dgrad":
        n, c = column[:2]
        group = torch.div(c, per_c, rounding_mode="floor")
        k = group * per_k + _axis(torch.arange(per_k, device=device), 1, rank)
        pixels = []
        for d in range(dims):
            from_start = at[2 + d][:, None] + conv.pad[d] - taps[d] * conv.dilation[d]
            pixel = torch.div(from_start, conv.stride[d], rounding_mode="floor")
            meets = (from_start % conv.stride[d] == 0) & (pixel >= 0) & (pixel < conv.output[d])
            valid = valid & _axis(meets, 2 + d, rank)
            pixels.append(pixel)
        a = n * first.strides[0] + k * first.strides[1] + spatial(first, pixels)
        b = k * second.strides[0] + (c - group * per_c) * second.strides[1] + spatial(second, taps)
    else:
        k, c = column[:2]
        n = _axis(torch.arange(conv.n, device=device), 1, rank)
        outputs = [torch.arange(extent, device=device) for extent in conv.output]
        pixels = [outputs[d] * conv.stride[d] - conv.pad[d] + at[2 + d][:, None] * conv.dilation[d] for d in range(dims)]
        for d, pixel in enumerate(pixels):
            valid = valid & _axis((pixel >= 0) & (pixel < conv.input[d]), 2 + d, rank)
        group = torch.div(k, per_k, rounding_mode="floor")
        a = n * first.strides[0] + k * first.strides[1] + spatial(first, outputs)
        b = n * second.strides[0] + (group * per_c + c) * second.strides[1] + spatial(second, pixels)
    return a, b, valid


def _gemm_offsets(gemm, at, first: _Memory, second: _Memory):
    batch, m, n = (value[:, None] for value in at)
    k = torch.arange(gemm.k, device=m.device)[None, :]
    # The batch dim is left out of tensors where it is 1.
    a_batch, b_batch = (memory.strides[0] if gemm.batch != 1 else 0 for memory in (first, second))
    a = batch * a_batch + m * first.strides[-2] + k * first.strides[-1]
    b = batch * b_batch + k * second.strides[-2] + n * second.strides[-1]
    return a, b, torch.ones((1, 1), dtype=torch.bool, device=m.device)


def _products(problem: Problem) -> int:
    """Products gathered for one element, taps that meet nothing counted too."""
    if isinstance(problem, Conv) and problem.direction == "dgrad":
        return problem.k // problem.groups * math.prod(problem.filter)
    return problem.terms


def exact(problem: Problem, first: torch.Tensor, second: torch.Tensor, positions: torch.Tensor) -> Sample:
    """The elements of a result at row-major positions, in f64."""
    memories = _Memory(first), _Memory(second)
    offsets = _conv_offsets if isinstance(problem, Conv) else _gemm_offsets
    _, at_once = PRODUCTS[first.device.type]
    step = max(1, at_once // _products(problem))
    values, rms = [], []
    for part in positions.split(step):
        a, b, valid = offsets(problem, _unravel(part, problem.result_shape), *memories)
        nowhere = torch.zeros((), dtype=torch.int64, device=part.device)
        products = memories[0].at(torch.where(valid, a, nowhere)) * memories[1].at(torch.where(valid, b, nowhere)) * valid
        products = products.reshape(part.shape[0], -1)
        values.append(products.sum(1))
        rms.append(products.square_().sum(1).sqrt())
    return Sample(positions, torch.cat(values), torch.cat(rms))


def positions(problem: Problem, device: torch.device, seed: int) -> torch.Tensor:
    """All corners of the result, and as many random elements as the budget of products allows; row-major, each once."""
    shape = problem.result_shape
    budget, _ = PRODUCTS[device.type]
    count = max(32, min(2048, budget // _products(problem)))
    corners = [_ravel(corner, shape) for corner in itertools.product(*({0, extent - 1} for extent in shape))]
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, math.prod(shape), (count,), generator=generator)
    return torch.cat([torch.tensor(corners), random]).unique().to(device)


def take(result: torch.Tensor, shape, at: torch.Tensor) -> torch.Tensor:
    """Elements of a result at row-major positions, in f64."""
    result = result.reshape(shape) if result.dim() != len(shape) else result
    indices = _unravel(at, shape)
    return result[tuple(indices)].to(torch.float64)


def judge(problem: Problem, sample: Sample, result: torch.Tensor) -> Judgement:
    """Holds a result against a sample. Every element is looked at for not being a number."""
    if tuple(result.shape) not in (tuple(problem.result_shape), tuple(problem.result_shape[1:])):
        return Judgement(math.inf, math.inf, f"the result's shape is {tuple(result.shape)}, not {tuple(problem.result_shape)}")
    got = take(result, problem.result_shape, sample.positions)
    distance = (got - sample.values).abs()
    allowed = tolerance(problem, sample)
    in_tolerances = torch.where(distance == 0, distance, distance / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
    norm = sample.values.norm().item()
    error = distance.norm().item() / norm if norm else distance.norm().item()
    worst, place = (value.item() for value in in_tolerances.max(0))
    faults = []
    if not worst <= 1:
        index = tuple(value.item() for value in _unravel(sample.positions[place], problem.result_shape))
        faults.append(f"element {index} is {got[place].item():.6g}, not {sample.values[place].item():.6g}: {worst:.3g} tolerances away")
    if problem.dtype == "f32":
        expected = model(problem, sample).norm().item()
        times = distance.norm().item() / expected if expected else 0.0
        if times > MODEL_FACTOR:
            faults.append(f"errors are {times:.3g} times those of f32 multiply-adds, of which {MODEL_FACTOR:g} times are allowed")
            worst = max(worst, times / MODEL_FACTOR)
    if result.is_floating_point():
        not_numbers = int(torch.isnan(result).sum().item())
        if not_numbers:
            faults.append(f"{not_numbers} elements are not numbers, or were not written")
    return Judgement(error, worst, "; ".join(faults) or None)


def disagreements(problem: Problem, ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> torch.Tensor:
    """Row-major positions where two results differ most, as a part of their size (``floor`` is added to it)."""
    shape = tuple(problem.result_shape)
    ours, theirs = ours.reshape(shape), theirs.reshape(shape)
    axis = max(range(len(shape)), key=lambda dim: shape[dim])
    part_extent = max(1, (1 << 26) * shape[axis] // max(math.prod(shape), 1))
    found, at = [], []
    for start in range(0, shape[axis], part_extent):
        extent = min(part_extent, shape[axis] - start)
        mine, other = (tensor.narrow(axis, start, extent).to(torch.float32) for tensor in (ours, theirs))
        distance = ((mine - other).abs() / (other.abs() + floor)).nan_to_num(nan=math.inf, posinf=3e38).reshape(-1)
        top = distance.topk(min(DISAGREEMENTS, distance.numel()))
        part_shape = shape[:axis] + (extent,) + shape[axis + 1 :]
        indices = _unravel(top.indices, part_shape)
        indices[axis] = indices[axis] + start
        found.append(top.values)
        at.append(_ravel(indices, shape))
    best = torch.cat(found).topk(min(DISAGREEMENTS, sum(part.numel() for part in found)))
    return torch.cat(at)[best.indices].unique()


def merge(first: Sample, second: Sample) -> Sample:
    """Both samples as one."""
    return Sample(*(torch.cat(pair) for pair in zip(dataclasses.astuple(first), dataclasses.astuple(second))))


def poison(problem: Problem, device: torch.device, dtype: torch.dtype) -> None:
    """Leaves NaN in the memory that PyTorch's allocator will hand out for the result next, so that an element nobody writes is seen."""
    if dtype.is_floating_point:
        torch.empty(math.prod(problem.result_shape), dtype=dtype, device=device).fill_(math.nan)
