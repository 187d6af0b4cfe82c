"""Block masks of FlexAttention as the op's map of blocks: blocks without a pair are skipped, full ones read no mask, and of others a bit for each pair is kept.

Of a block mask whose function says a window and no more, the op's window is the better option, which asks for no map.
"""

import functools
import threading
import weakref

import torch

from . import _flex_forms as forms
from ._flex_trace import AXES, BATCH, HEAD, Computed, is_transient

#: Queries and keys that blocks are multiples of, as kernels of tensor cores take them.
_SIDE = 128
#: The longest heads of those kernels, with gradients and without.
_MOST_ELEMENTS = {True: 128, False: 256}
#: How many pairs are computed at a time: what stands between a mask and its places is eight bytes a pair.
_MOST_AT_ONCE = 1 << 24

#: By block mask: what was looked at, and the map and masks that it gave.
_known, _known_lock = weakref.WeakKeyDictionary(), threading.Lock()


class _InBlocks(Computed):
    """Values of the pairs of some blocks: `[blocks, 1, queries, keys]`. Places beyond the last query and key are those of the last."""

    def __init__(self, trace, dims, size, blocks):
        super().__init__(trace, dims)
        self.size, self.blocks = size, blocks

    def _axis(self, axis):
        first = self.blocks[axis].reshape(-1, 1, 1, 1)
        if axis < 2:
            return first
        shape = [1, 1, 1, 1]
        shape[axis] = size = self.size[axis - 2]
        within = torch.arange(size, device=self.trace.device).reshape(shape)
        return first * size + within

    def _made(self, value):
        axis = AXES.get(value.op)
        return super()._made(value) if axis is None else self._axis(axis).clamp(max=max(self.dims[axis] - 1, 0))

    def are_there(self):
        return (self._axis(2) < self.dims[2]) & (self._axis(3) < self.dims[3])


@functools.lru_cache(maxsize=64)
def capability(device):
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def _is_window(trace, value):
    return all(forms.band_of(trace, *part) is not None for part in forms.parts_of([(value, True)]))


def takes(block_mask, trace, value, tensors, is_trained):
    """Whether kernels go through the blocks of this mask, whose function says `value`."""
    q, _, v = tensors
    sides = [int(size) for size in block_mask.BLOCK_SIZE]
    if any(size % _SIDE or size >= 1 << 20 for size in sides) or q.dtype not in (torch.float16, torch.bfloat16) or 0 in q.shape or 0 in v.shape:
        return False
    # Tensor cores of other chips read the mask as a tensor, which is quicker than lists without them; gradients take a map of blocks there.
    if q.device.type == "cuda" and not is_trained and capability(q.device) != (9, 0):
        return False
    widths = (q.shape[3], v.shape[3])
    if any(width % 8 or width > _MOST_ELEMENTS[is_trained] for width in widths):
        return False
    # What tiles add to the gradient of the queries comes in no order.
    if is_trained and torch.are_deterministic_algorithms_enabled():
        return False
    return not _is_window(trace, value)


def of_mask(block_mask, trace, value, listed, full, dims, is_capturing):
    """The map of blocks, i32, and their masks, u8; None while a graph is captured, if they are not known. `listed` and `full` say of which blocks the mask's function is asked, and which are whole.

    They are remembered as long as the mask, while what it was made of stays as it was.
    """
    tensors = [getattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")]
    tensors += [trace.captured[at.args[0]] for at in trace.reached([value]) if at.op == "captured"]
    may_be_kept = not any(x is not None and x.is_inference() for x in tensors) and not is_transient()
    # What was made on one stream is not there yet on another, and what was made in inference mode has no part in gradients.
    stream = torch.cuda.current_stream(trace.device).cuda_stream if trace.device.type == "cuda" else 0
    made_where = (stream, torch.is_inference_mode_enabled())
    key = (trace.key(value), dims, tuple(block_mask.BLOCK_SIZE), made_where, [None if x is None or x.is_inference() else x._version for x in tensors])
    with _known_lock:
        seen = _known.get(block_mask)
    if may_be_kept and seen is not None and seen[0] == key and len(seen[1]) == len(tensors) and all(one is other for one, other in zip(seen[1], tensors)):
        return seen[2]
    if is_capturing:
        return None
    made = _made(trace, value, [int(size) for size in block_mask.BLOCK_SIZE], listed(), full(), dims)
    if may_be_kept:
        with _known_lock:
            _known[block_mask] = (key, tensors, made)
    return made


@torch.no_grad()
def _made(trace, value, size, listed, full, dims):
    device = trace.device
    own = [dims[axis] if value.reads & bit else 1 for axis, bit in ((0, BATCH), (1, HEAD))]
    grid = [max(of_mask, of_value) for of_mask, of_value in zip(listed.shape[:2], own)]
    listed = listed.expand(*grid, -1, -1)
    full = torch.zeros_like(listed) if full is None else full.expand_as(listed)
    block_map = torch.where(full, -1, 0).to(torch.int32)
    # A mask may have rows and columns of blocks beyond the last query and key.
    block_map = block_map[:, :, : -(-dims[2] // size[0]), : -(-dims[3] // size[1])].contiguous()
    asked = (listed & ~full)[:, :, : block_map.shape[2], : block_map.shape[3]].nonzero()
    weights = 1 << torch.arange(8, device=device)
    masks, count = [], 0
    for blocks in asked.split(max(_MOST_AT_ONCE // (size[0] * size[1]), 1)):
        computed = _InBlocks(trace, dims, size, blocks.unbind(1))
        there = computed.are_there()
        attended = computed.of(trace.cast(value, torch.bool)).expand(len(blocks), 1, *size)
        is_whole = (attended | ~there).flatten(1).all(1)
        is_in_part = (attended & there).flatten(1).any(1) & ~is_whole
        numbers = torch.where(is_whole, -1, torch.where(is_in_part, is_in_part.cumsum(0) + count, 0))
        block_map[tuple(blocks.unbind(1))] = numbers.to(torch.int32)
        bits = (attended & there)[is_in_part].reshape(-1, 1, size[0], size[1] // 8, 8)
        masks.append((bits * weights).sum(-1).to(torch.uint8))
        count += len(masks[-1])
    if not count:
        return block_map, torch.zeros((1, 1, size[0], size[1] // 8), dtype=torch.uint8, device=device)
    return block_map, torch.cat(masks)
