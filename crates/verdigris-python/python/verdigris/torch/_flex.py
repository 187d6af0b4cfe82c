"""FlexAttention: attention with a user's function of the score and of the mask, by PyTorch's signature.

The functions are traced (`_flex_trace`), once for all calls that would trace alike (`_flex_guards`), and what their expressions say goes one of three ways: what the op of attention has options for is that op
(`_flex_forms`), with what is left of biases and masks as one tensor beside it; other functions are steps of that op and of its gradient (`_flex_steps`), or scores are computed between two products
(`_flex_composed`), as they are where the log-sum-exp is returned to be trained.
"""

import collections
import contextlib
import functools
import math
import threading
import weakref

import torch

from .._errors import GraphError, UnsupportedError
from . import _flex_blocks as block_maps
from . import _flex_composed as composed
from . import _flex_forms as forms
from . import _flex_guards as guards
from . import _flex_steps as op_steps
from . import _ops
from ._flex_trace import BATCH, CAPTURED, HEAD, KEY, QUERY, Computed, is_transient
from .functional import _NO_BLOCKS, _NO_DESCALES, _attention_words, _rows_of_keys

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: What PyTorch's kernels are told about tiles, warps and the order of their work, which no result depends on; ours choose for themselves.
_HINTS = {
    *("num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE"),
    *("BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu", "IS_DIVISIBLE"),
    *("OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE", "FLOAT32_PRECISION"),
}


def _check_options(kernel_options):
    for name, value in (kernel_options or {}).items():
        if name == "BACKEND" and value != "AUTO":
            raise UnsupportedError(f"kernel_options names the backend {value}, one of PyTorch's; attention is computed by this package's engines")
        if name != "BACKEND" and name.removeprefix("fwd_").removeprefix("bwd_") not in _HINTS:
            raise GraphError(f"kernel_options has `{name}`, which torch.nn.attention.flex_attention does not know; its options are hints to PyTorch's kernels")


def _check_tensors(query, key, value, block_mask, enable_gqa):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise UnsupportedError(f"{name} is a nested tensor; sequences of different lengths are taken by flash_attn_varlen_func, or by a mask")
        if x.dim() != 4:
            raise GraphError(f"{name} has the dims {tuple(x.shape)}; it is [batch, heads, positions, elements]")
        if x.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{name} is on {x.device}; flex_attention runs on CPUs and CUDA devices")
        if x.dtype not in _FLOATS:
            raise UnsupportedError(f"{name} is of {x.dtype}; flex_attention takes f16, bf16, f32 and f64")
        if x.dtype != query.dtype:
            raise GraphError(f"{name} is of {x.dtype} and query of {query.dtype}; query, key and value are of one type")
        if x.device != query.device:
            raise GraphError(f"{name} is on {x.device} and query on {query.device}; query, key and value are on one device")
    b, h, _, d = query.shape
    kv_b, kv_h, s_kv, kv_d = key.shape
    if kv_d != d:
        raise GraphError(f"key has {kv_d} elements a head and query {d}; they have as many")
    if tuple(value.shape[:3]) != (kv_b, kv_h, s_kv):
        raise GraphError(f"value has the dims {tuple(value.shape)} and key {tuple(key.shape)}; they have the same batch, heads and positions")
    if h != kv_h and not enable_gqa:
        raise GraphError(f"query has {h} heads and key {kv_h}; they have as many, or several heads of query read one of key with enable_gqa=True")
    if kv_h == 0 or h % kv_h:
        raise GraphError(f"query has {h} heads and key {kv_h}; heads of query are a multiple of those of key")
    if b != kv_b and (kv_b != 1 or block_mask is None or block_mask.kv_num_blocks.shape[0] != b):
        raise GraphError(f"query has the batch {b} and key {kv_b}; they have one, or key has 1 and block_mask has that of query")


def _check_block_mask(block_mask, query, key):
    for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE", "seq_lengths"):
        if not hasattr(block_mask, name):
            raise GraphError(f"block_mask is {type(block_mask).__name__}; it is a torch.nn.attention.flex_attention.BlockMask")
    if block_mask.kv_num_blocks.device != query.device:
        raise GraphError(f"block_mask is on {block_mask.kv_num_blocks.device} and query on {query.device}; they are on one device")
    if min(block_mask.BLOCK_SIZE) >= _LARGEST_BLOCK:
        return
    told, own = tuple(block_mask.seq_lengths), (query.shape[2], key.shape[2])
    if told != own:
        raise GraphError(f"block_mask was made for {told[0]} queries and {told[1]} keys, and there are {own[0]} and {own[1]}; it is made for as many (see BlockMask._adjust)")
    of_mask, of_query = tuple(block_mask.kv_num_blocks.shape[:2]), tuple(query.shape[:2])
    if any(one not in (1, other) for one, other in zip(of_mask, of_query)):
        raise GraphError(f"block_mask has the batch and heads {of_mask} and query {of_query}; each is that of query, or 1")


#: The block of PyTorch's mask that hides nothing.
_LARGEST_BLOCK = 1 << 30


# The blocks of a mask: which pairs its function is not asked about.


def _dense_blocks(count, indices, columns):
    """Which blocks of keys a list has, by block of queries: `[b, h, blocks of queries, blocks of keys]`, bool."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
    # What is not listed goes to a column behind the last.
    places = torch.where(listed, indices.long(), columns)
    dense = torch.zeros((*count.shape, columns + 1), dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, places, True)[..., :columns]


class _Blocks:
    """The structure of a block mask: a pair is attended if its block is full, or if it is listed and the mask's function holds."""

    def __init__(self, block_mask, keys):
        self.size = tuple(int(size) for size in block_mask.BLOCK_SIZE)
        columns = max(-(-keys // self.size[1]), 1)
        self.listed = _dense_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
        full = block_mask.full_kv_num_blocks
        self.full = None if full is None else _dense_blocks(full, block_mask.full_kv_indices, columns)

    def attended(self, trace, value):
        places = [trace.place(*place) for place in (("batch", BATCH), ("head", HEAD), ("query", QUERY), ("key", KEY))]
        for axis in range(2):
            if self.listed.shape[axis] == 1:
                places[axis] = trace.number(0)
        for axis in range(2):
            places[2 + axis] = trace.binary("floor_divide", places[2 + axis], trace.number(self.size[axis]))
        attended = trace.both(trace.index(self.listed, places), value)
        return attended if self.full is None else trace.binary("bitwise_or", trace.index(self.full, places), attended)


#: By block mask: of the last look at it, what was looked at and whether its blocks are those that its function says.
_looked_at = weakref.WeakKeyDictionary()


def _attended(block_mask, trace, value, dims):
    """What a block mask lets through, of which its function says `value`: that alone where the blocks say no more.

    Whether they do is looked at once for each mask, and waited for. Of functions that captured tensors it is not asked: what they say may change, and the blocks stay where they were.
    """
    if min(block_mask.BLOCK_SIZE) >= _LARGEST_BLOCK:
        return value
    if value.reads & CAPTURED:
        return _Blocks(block_mask, dims[3]).attended(trace, value)
    tensors = [getattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")]
    # Tensors of inference do not tell when they are written to.
    may_be_kept = not any(x is not None and x.is_inference() for x in tensors) and not is_transient()
    versions = [None if x is None or not may_be_kept else x._version for x in tensors]
    key = (trace.key(value), dims, tuple(block_mask.BLOCK_SIZE), versions)
    seen = _looked_at.get(block_mask) if may_be_kept else None
    is_known = seen is not None and seen[0] == key and all(one is other for one, other in zip(seen[1], tensors))
    if is_known and seen[2]:
        return value
    blocks = _Blocks(block_mask, dims[3])
    attended = blocks.attended(trace, value)
    if is_known or not may_be_kept or _is_capturing(trace.device):
        return attended
    is_said = _says_window(blocks, trace, value, dims)
    if is_said is None:
        is_said = torch.ones((), dtype=torch.bool, device=trace.device)
        for _, computed in Computed(trace, dims).in_rows(_MOST_AT_ONCE):
            is_said &= (computed.of(value) == computed.of(attended)).all()
    _looked_at[block_mask] = (key, tensors, bool(is_said))
    return value if is_said else attended


def _says_window(blocks, trace, value, dims):
    """Whether blocks say what a window does, by the least and the greatest distance in each block; None for what is no window."""
    band = (None, None)
    for part in forms.parts_of([(value, True)]):
        own = forms.band_of(trace, *part)
        if own is None:
            return None
        band = forms.narrower(band, own)
    ends = []
    for size, extent, count in zip(blocks.size, dims[2:], blocks.listed.shape[2:]):
        first = torch.arange(count, device=trace.device) * size
        ends.append((first, (first + size - 1).clamp(max=extent - 1)))
    (first_query, last_query), (first_key, last_key) = ((first[:, None], last[:, None]) if axis == 0 else (first, last) for axis, (first, last) in enumerate(ends))
    is_there = (first_query <= last_query) & (first_key <= last_key)
    least, greatest = first_key - last_query, last_key - first_query
    low, high = (torch.iinfo(torch.int64).min if band[0] is None else band[0]), (torch.iinfo(torch.int64).max if band[1] is None else band[1])
    # Every distance between the two is that of a pair of the block.
    is_touched, is_whole = (greatest >= low) & (least <= high), (least >= low) & (greatest <= high)
    if low > high:
        is_touched = is_whole = torch.zeros_like(is_there)
    listed = blocks.listed if blocks.full is None else blocks.listed | blocks.full
    is_right = listed | ~is_touched
    if blocks.full is not None:
        is_right &= is_whole | ~blocks.full
    return (is_right | ~is_there).all()


def _is_capturing(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Tensors of what differs from pair to pair.

#: Biases and masks of places and numbers alone, which are the same at every call; not those of captured tensors.
_kept, _kept_lock, _MOST_KEPT_BYTES = collections.OrderedDict(), threading.Lock(), 256 << 20


def clear_plans():
    """Forgets plans, traces, and what is remembered of masks and biases."""
    composed.clear_plans()
    guards.clear()
    with _kept_lock:
        _kept.clear()


plan_count = composed.plan_count


def _tensor_of(computed, value):
    """The value as a tensor with its keys side by side; remembered where it follows from sizes alone."""
    trace, device = computed.trace, computed.trace.device
    # A tensor that is made while a graph is captured is filled when the graph is replayed, and is the graph's own.
    if value.reads & CAPTURED or _is_capturing(device) or is_transient():
        return _laid_out(computed, value)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (trace.key(value), tuple(size if value.reads & bit else 1 for size, bit in zip(computed.dims, (BATCH, HEAD, QUERY, KEY))), computed.dims[3])
    key = (*key, device, stream, torch.is_inference_mode_enabled())
    with _kept_lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    made = _laid_out(computed, value)
    with _kept_lock:
        _kept[key] = made
        while _kept and sum(tensor.nbytes for tensor in _kept.values()) > _MOST_KEPT_BYTES:
            _kept.popitem(last=False)
    return made


#: How many pairs are computed at a time where nobody wants their gradients: what stands between a mask and its places is eight bytes a pair.
_MOST_AT_ONCE = 1 << 24


def _laid_out(computed, value):
    trace, (b, h, queries, keys) = computed.trace, computed.dims
    b, h = (size if value.reads & bit else 1 for size, bit in ((b, BATCH), (h, HEAD)))
    if b * h * queries * keys <= _MOST_AT_ONCE or not (value.reads & QUERY and value.reads & KEY) or _wants_gradient(trace, [value]):
        made = computed.of(value)
    else:
        made = torch.empty((b, h, queries, keys), dtype=value.dtype, device=trace.device)
        for first, rows in computed.in_rows(_MOST_AT_ONCE):
            made[:, :, first : first + rows.dims[2]] = rows.of(value)
    return _rows_of_keys(made.view(torch.uint8) if made.dtype == torch.bool else made, keys)


def _wants_gradient(trace, values):
    return torch.is_grad_enabled() and any(
        at.op == "captured" and trace.captured[at.args[0]].requires_grad for at in trace.reached(values)
    )


# Calls.


#: Powers of two by which the parts of a number of f32 are multiplied, largest first, where parts are of this type: together they have as many digits as it has.
#: Those of f16 reach from 2⁻⁴⁰ to 2³¹; what a part leaves is at most 2⁻¹¹ of it, which the next one holds.
_FACTORS = {torch.float16: (2.0**15, 2.0**5, 2.0**-5, 2.0**-15), torch.bfloat16: (1.0, 1.0, 1.0)}


def _in_parts(x, dtype):
    """Factors, and tensors of this type that are `x` where they are multiplied by them and added."""
    factors, parts = _FACTORS.get(dtype, (1.0,)), []
    for factor in factors:
        parts.append((x / factor).to(dtype))
        rest = x - parts[-1].to(x.dtype) * factor
        # Of an infinite part nothing is left.
        x = torch.where(rest.isfinite(), rest, 0.0)
    return factors, parts


class _WithTotal(torch.autograd.Function):
    """The op of attention with a gradient of its log-sum-exp too.

    That gradient is one more element of the values: 1, whose gradient is that of the log-sum-exp, and whose result is told to be 0, so that what the softmax takes off again is not.
    In 16 bits, which would round it, it is the sum of a few elements. Elements are added by eights, as tensor cores take them. The greatest scores, where they are wanted, have no gradient.
    """

    @staticmethod
    def forward(ctx, words, wants_most, q, k, v, beside, slopes, lengths, block_map, mask_blocks):
        blocks = (block_map, mask_blocks)
        if wants_most:
            o, total, most = _with_most(words, q, k, v, beside, slopes, lengths, blocks)
        else:
            (o, total), most = _ops.attention(q, k, v, beside, slopes, None, None, lengths, None, None, *_NO_DESCALES, *blocks, None, words), None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, total, beside, slopes, lengths, *blocks)
        ctx.words, ctx.policy = words, _ops._current_policy()
        if most is not None:
            ctx.mark_non_differentiable(most)
        return o, total, most

    @staticmethod
    def backward(ctx, d_o, d_total, _):
        q, k, v, o, total, beside, slopes, lengths, *blocks = ctx.saved_tensors
        needs = ctx.needs_input_grad
        gradients = [None] * len(needs)
        if d_o is None and d_total is None:
            return tuple(gradients)
        if needs[6]:
            raise UnsupportedError("the slopes of attention have no gradient in this package; they are no variables")
        d_o = torch.zeros_like(o) if d_o is None else d_o
        elements = v.shape[3]
        if d_total is not None:
            factors, parts = _in_parts(d_total, d_o.dtype)
            more = v.new_zeros((*v.shape[:3], 8))
            for place, factor in enumerate(factors):
                more[..., place] = factor
            v = torch.cat([v, more], -1)
            d_o = torch.cat([d_o, *parts, d_o.new_zeros((*d_o.shape[:3], 8 - len(parts)))], -1)
            o = torch.cat([o, o.new_zeros((*o.shape[:3], 8))], -1)
        wanted = needs[2:6]
        # There are no sinks.
        words = f"{ctx.words} wanted={''.join('01'[want] for want in wanted)}0"
        policy = _ops._made_deterministic(ctx.policy) if torch.are_deterministic_algorithms_enabled() else ctx.policy
        found = _ops._each_result(_ops.attention_backward.again(policy, d_o, q, k, v, o, total, beside, slopes, None, None, lengths, None, *blocks, None, words))
        found = iter(found)
        gradients[2:6] = [next(found) if want else None for want in wanted]
        if gradients[4] is not None:
            gradients[4] = gradients[4][..., :elements]
        return tuple(gradients)


def _with_most(words, q, k, v, beside, slopes, lengths, blocks):
    """The op of attention with the greatest score of each query."""
    options = dict(word.split("=") for word in words.split())
    options = {"soft_cap" if name == "cap" else name: text if name == "causal" else float(text) if name in ("scale", "cap") else int(text) for name, text in options.items()}
    of_pairs = {} if beside is None else {"mask" if beside.dtype == torch.uint8 else "bias": beside}
    others = {"slopes": slopes, "kv_lengths": lengths, **dict(zip(("block_map", "mask_blocks"), blocks))}
    return op_steps.forward(None, options, q, k, v, {**of_pairs, **{name: x for name, x in others.items() if x is not None}}, [], True)


# What a call is to the op: decided once for all calls that are alike, of which each has tensors of its own (`_attend`).


def _lengths_of(computed, length):
    """How many keys of each batch count, as the op takes them: i32 `[b, 1, 1, 1]`; None where all do."""
    if length is None:
        return None
    b, _, _, keys = computed.dims
    return computed.of(length).to(torch.int64).clamp(0, keys).to(torch.int32).expand(b, 1, 1, 1).contiguous()


class _Options:
    """The op of attention with its options and, where more is left, one tensor beside it. What is computed for them are values of the trace."""

    __slots__ = ("words", "beside", "slope", "length", "is_total_trained")

    def __init__(self, words, beside, slope, length, is_total_trained):
        self.words, self.beside, self.slope, self.length, self.is_total_trained = words, beside, slope, length, is_total_trained

    def run(self, computed, tensors, blocks, wants_most):
        q, k, v = tensors
        beside = None if self.beside is None else _tensor_of(computed, self.beside)
        slopes = None if self.slope is None else computed.of(self.slope)
        is_trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, beside, slopes))
        lengths = _lengths_of(computed, self.length)
        if self.is_total_trained or (wants_most and is_trained):
            return _WithTotal.apply(self.words, wants_most, q, k, v, beside, slopes, lengths, *(blocks or _NO_BLOCKS))
        if wants_most:
            return _with_most(self.words, q, k, v, beside, slopes, lengths, blocks or _NO_BLOCKS)
        return *_ops.attention(q, k, v, beside, slopes, None, None, lengths, None, None, *_NO_DESCALES, *(blocks or _NO_BLOCKS), None, self.words), None


class _InSteps:
    """The op with the function's steps: `words` has its window, `length` says how many keys count, `mask` is what is left of conditions; each of the two may be None."""

    __slots__ = ("function", "words", "length", "mask", "is_trained")

    def __init__(self, function, words, length, mask, is_trained):
        self.function, self.words, self.length, self.mask, self.is_trained = function, words, length, mask, is_trained

    def run(self, computed, tensors, blocks, wants_most):
        if self.is_trained:
            return op_steps.attention(self.function, self.words, *tensors, *self._read(computed, blocks), wants_most)
        with torch.no_grad():
            return op_steps.forward(self.function, self.words, *tensors, *self._read(computed, blocks), wants_most)

    def _read(self, computed, blocks):
        beside = dict(zip(("block_map", "mask_blocks"), blocks)) if blocks else {}
        if self.length is not None:
            beside["kv_lengths"] = _lengths_of(computed, self.length)
        if self.mask is not None:
            beside["mask"] = _tensor_of(computed, self.mask)
        return beside, [_score_operand(computed, operand, self.function.wide) for operand in self.function.operands]


class _Composed:
    """Scores between two products, or where `by_op` has steps of the op for them, their gradients alone."""

    __slots__ = ("steps", "by_op", "mask", "scale", "wide")

    def __init__(self, steps, by_op, mask, scale, wide):
        self.steps, self.by_op, self.mask, self.scale, self.wide = steps, by_op, mask, scale, wide

    def run(self, computed, tensors, blocks, wants_most):
        mask = None if self.mask is None else _tensor_of(computed, self.mask)
        operands = []
        for operand in self.steps.operands:
            made = computed.of(operand)
            operands.append(made.view(torch.uint8) if made.dtype == torch.bool else made.to(self.wide))
        by_op, made_by_op = self.by_op, None
        if by_op is not None:
            with torch.no_grad():
                beside = {} if mask is None else {"mask": mask.view(torch.uint8)}
                read = [_score_operand(computed, operand, self.wide) for operand in by_op.operands]

            def made_by_op(q, k, v, wants_most):
                return op_steps.forward(by_op, {"scale": self.scale}, q, k, v, beside, read, wants_most)

        return composed.attention(self.steps, self.scale, *tensors, mask, operands, made_by_op, wants_most)


def _all_of(trace, parts):
    """Where all parts of conditions are what they have to be; None where that is everywhere."""
    mask = trace.number(True, torch.bool)
    for value, sense in parts:
        value = trace.cast(value, torch.bool)
        mask = trace.both(mask, value if sense else trace.unary("logical_not", value))
    return None if mask.is_number and mask.args[0] else mask


def _options(trace, score, form, conditions, given_scale, tensors, dims, wants_total, has_blocks):
    """The op's options of a function that has their form."""
    q = tensors[0]
    _, _, queries, keys = dims
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    scale, cap = form.scale_and_cap(given_scale)
    biases, hidden = forms.without_hiding(trace, form.biases)
    is_bias_trained = _wants_gradient(trace, [bias for _, bias in biases])
    is_trained = is_trained or is_bias_trained
    band, length, rest = (None, None), None, []
    for value, sense in forms.parts_of([*form.conditions, *hidden, *conditions]):
        own = forms.band_of(trace, value, sense)
        if own is not None:
            narrow = forms.narrower(band, own)
            if forms.words_of_band(narrow, queries, keys) is not None:
                band = narrow
                continue
        # Kernels that go through blocks take no lengths, and those of tensor cores that give the gradient of a bias neither.
        own = forms.length_of(trace, value, sense) if length is None and not has_blocks and not is_bias_trained else None
        if own is not None:
            length, of_length = own, (value, sense)
        else:
            rest.append((value, sense))
    causal, left, right = forms.words_of_band(band, queries, keys)
    slope, kept = None, []
    for factor, bias in biases:
        own = None
        if slope is None and q.dtype != torch.float64 and not _wants_gradient(trace, [bias]):
            own = forms.slope_of(trace, factor, bias, band, keys - queries)
        slope = slope or own
        if own is None:
            kept.append((factor, bias))
    if length is not None and (slope is not None or _follows_lengths(causal, band)):
        rest.append(of_length)
        length = None
    own_parts = forms.parts_of([*form.conditions, *hidden])
    by_steps = _as_steps(trace, score, kept, [part for part in own_parts if part in rest], tensors, dims, has_blocks)
    if by_steps is not None and is_trained:
        is_taken = not wants_total and op_steps.has_gradient(by_steps, tensors, _wants_gradient(trace, [score]))
        by_steps = by_steps if is_taken else None
    if by_steps is not None:
        # What the function hides by a window is one, so that tiles outside are not computed.
        windows = [part for part in own_parts if forms.band_of(trace, *part) is not None]
        return _in_steps(trace, by_steps, [*windows, *conditions], given_scale, dims, is_trained)
    beside = _all_of(trace, rest)
    if kept:
        wide = _wide(q)
        total = trace.cast(forms._sum(trace, kept), wide)
        beside = total if beside is None else trace.where(beside, total, trace.number(-math.inf, wide))
    words = _attention_words(scale, causal, left, right, cap)
    return _Options(words, beside, slope, length, wants_total and is_trained)


def _follows_lengths(causal, band):
    """Whether the diagonal that a window counts from ends at the last key, which lengths would move. So does the one of slopes."""
    return causal is None and band != (None, None)


def _wide(query):
    """The type that scores are computed in."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _of_function(trace, value, conditions, scale, tensors, dims, wants_total):
    """Steps of the op for a function that has no form, or scores in memory."""
    for x in tensors:
        if not _is_plain(x):
            raise UnsupportedError(f"{trace.function} of {type(x).__name__}: score functions that are no options of attention take plain tensors")
    wide = _wide(tensors[0])
    value = trace.cast(value, wide)
    by_op = op_steps.of_function(trace, value, dims, tensors)
    is_trained = torch.is_grad_enabled() and (any(x.requires_grad for x in tensors) or _wants_gradient(trace, [value]))
    if by_op is not None and not is_trained:
        return _in_steps(trace, by_op, conditions, scale, dims, False)
    if by_op is not None and not wants_total and op_steps.has_gradient(by_op, tensors, _wants_gradient(trace, [value])):
        return _in_steps(trace, by_op, conditions, scale, dims, True)
    return _Composed(composed.Steps(trace, value), by_op, _all_of(trace, conditions), scale, wide)


def _is_plain(x):
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _score_operand(computed, value, wide):
    # What is of one place alone stays as small as it is.
    is_of_both = value.reads & QUERY and value.reads & KEY
    return op_steps.as_operand(_tensor_of(computed, value) if is_of_both else computed.of(value), wide)


def _in_steps(trace, function, conditions, scale, dims, is_trained):
    """The op with the function's steps: what bounds distances is its window, the first keys of a batch are a length, the rest of a mask is a tensor or blocks."""
    _, _, queries, keys = dims
    band, length, rest = (None, None), None, []
    # Kernels of tensor cores that give the gradients of what a function reads take no lengths.
    takes_lengths = not _wants_gradient(trace, function.operands)
    for value, sense in forms.parts_of(conditions):
        own = forms.band_of(trace, value, sense)
        narrow = None if own is None else forms.narrower(band, own)
        own = forms.length_of(trace, value, sense) if length is None and takes_lengths else None
        if narrow is not None and forms.words_of_band(narrow, queries, keys) is not None:
            band = narrow
        elif own is not None:
            length, of_length = own, (value, sense)
        else:
            rest.append((value, sense))
    causal, left, right = forms.words_of_band(band, queries, keys)
    if length is not None and _follows_lengths(causal, band):
        rest.append(of_length)
        length = None
    words = {"scale": scale, "causal": causal or "none", "left": left, "right": right}
    return _InSteps(function, words, length, _all_of(trace, rest), is_trained)


def _blocks_of(block_mask, trace, score, mask, tensors, dims):
    """The map of blocks that this mask is to the op, where its kernels go through one."""
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if torch._C._are_functorch_transforms_active() or _wants_gradient(trace, [score]):
        return None
    if not block_maps.takes(block_mask, trace, mask, tensors, is_trained):
        return None
    structure = functools.cache(lambda: _Blocks(block_mask, dims[3]))
    return block_maps.of_mask(block_mask, trace, mask, lambda: structure().listed, lambda: structure().full, dims, _is_capturing(trace.device))


#: Of longer heads lists of blocks leave no registers for steps.
_MOST_ELEMENTS_IN_BLOCKS = 192


def _are_steps_in_blocks(told, tensors, dims):
    """Whether a function that is no option is steps of the op beside a map of blocks: where the op has the gradients that are wanted."""
    trace, score = told.trace, told.score
    if _wants_gradient(trace, [score]) or max(tensors[0].shape[3], tensors[2].shape[3]) > _MOST_ELEMENTS_IN_BLOCKS:
        return False
    # Kernels of other chips go through blocks in gradients alone: with a mask as a tensor tensor cores have steps on both sides.
    if tensors[0].device.type == "cuda" and block_maps.capability(tensors[0].device) != (9, 0):
        return False
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def are_steps():
        function = op_steps.of_function(trace, trace.cast(score, _wide(tensors[0])), dims, tensors)
        return function is not None and (not is_trained or op_steps.has_gradient(function, tensors))

    return _decided(told, ("steps", _kind_of(tensors, None, False, True)), are_steps)[1]


def _as_steps(trace, score, biases, conditions, tensors, dims, has_blocks):
    """The function as steps of the op where its biases would be a tensor of all pairs, or its conditions one that is made anew at each call, and steps read none; else None."""
    is_of_both = functools.partial(map, lambda value: bool(value.reads & QUERY and value.reads & KEY))
    made_anew = (value for value, _ in conditions if value.reads & CAPTURED)
    if not any(is_of_both((*(bias for _, bias in biases), *made_anew))) or torch._C._are_functorch_transforms_active():
        return None
    if not all(map(_is_plain, tensors)):
        return None
    if has_blocks and max(tensors[0].shape[3], tensors[2].shape[3]) > _MOST_ELEMENTS_IN_BLOCKS:
        return None
    function = op_steps.of_function(trace, trace.cast(score, _wide(tensors[0])), dims, tensors)
    return None if function is None or any(is_of_both(function.operands)) else function


#: Most decisions that are kept of a function: one for each kind of call, such as one's sizes.
_MOST_DECIDED = 64


def _kind_of(tensors, scale, wants_total, has_blocks):
    """What a decision about a function depends on beside the function."""
    q, k, v = tensors
    of_tensors = (q.shape, k.shape[2], v.shape[3], q.dtype, *map(_is_plain, tensors), torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    return (*of_tensors, scale, wants_total, has_blocks, torch.is_grad_enabled(), torch._C._are_functorch_transforms_active())


def _decided(told, kind, decide):
    """What `decide` says, and the trace that its values are of; once for all calls of this kind of a trace that is kept."""
    found = told.decided.get(kind)
    if found is not None:
        trace, way = found
        return trace.of_tensors(told.trace.captured), way
    count = len(told.trace.captured)
    way = decide()
    # What was decided about tensors of this call is of no other one.
    if len(told.trace.captured) == count:
        if len(told.decided) >= _MOST_DECIDED:
            told.decided.clear()
        told.decided[kind] = (told.trace.of_tensors([]), way)
    return told.trace, way


def _attend(query, key, value, score_mod, block_mask, scale, wants_total, wants_most):
    dims = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    told = guards.traced(query.device, _wide(query), score_mod, None if block_mask is None else block_mask.mask_mod)
    trace, score, form, mask = told.trace, told.score, told.form, told.mask
    # What is refused from here on is of the score.
    trace.function = told.of_score or told.of_mask
    conditions, blocks = [], None
    tensors = (query, key, value)
    if block_mask is not None:
        if not wants_total and (form is not None or _are_steps_in_blocks(told, tensors, dims)):
            blocks = _blocks_of(block_mask, trace, score, mask, tensors, dims)
        if blocks is None:
            conditions.append((_attended(block_mask, trace, mask, dims), True))
    is_transformed = torch._C._are_functorch_transforms_active()
    if is_transformed and (form is None or wants_total or wants_most):
        raise UnsupportedError(f"{trace.function or 'flex_attention'} under a transform of torch.func: it takes score functions that are options of attention, without return_lse and max_scores")

    def decide():
        if form is not None:
            return _options(trace, score, form, conditions, scale, tensors, dims, wants_total, blocks is not None)
        return _of_function(trace, score, conditions, scale, tensors, dims, wants_total)

    if conditions and conditions[0][0] is not mask:
        # The mask's blocks say more than its function.
        way = decide()
    else:
        trace, way = _decided(told, _kind_of(tensors, scale, wants_total, blocks is not None), decide)
    return way.run(Computed(trace, dims), tensors, blocks, wants_most)


@torch.compiler.disable
def flex_attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, kernel_options=None, *, return_aux=None
):
    """Attention with a function of its scores and a mask; see `torch.nn.attention.flex_attention.flex_attention`, whose signature and meaning it has.

    `query` is `[batch, heads, queries, elements]`, `key` and `value` likewise, of which with `enable_gqa` a head is read by several of `query`. `score_mod(score, b, h, q_idx, kv_idx)` gives a
    score for a score; `block_mask` is a `BlockMask` (`torch.nn.attention.flex_attention.create_block_mask`), whose `mask_mod(b, h, q_idx, kv_idx)` is True where a key is attended. A query that attends no
    key gives 0. With `return_lse`, `(o, log_sum_exp)`, the second f32 `[batch, heads, queries]` (f64 of f64) and −∞ where no key is attended. `return_aux=AuxRequest(lse=…, max_scores=…)`
    gives `(o, AuxOutput)`, whose `max_scores` are the greatest scores, behind `score_mod` and mask, as large as the log-sum-exp and −∞ where it is; they have no gradient.

    Numbers and tensors that the functions capture count as they are at the call: what they read is looked at each time, and they are traced anew where it is something else, or of a kind that has to be run to
    know what it says (objects of classes, functions of PyTorch on tensors alone). They take arithmetic, comparisons, logic, bits, `torch.where`, functions such as `exp` and `tanh`,
    and tensors indexed in each of their dims (`slopes[h]`, `document[q_idx]`, `table[q_idx - kv_idx]`), to which gradients go. What has no form raises `UnsupportedError`, which names the operation and the function.

    Bounds of `kv_idx - q_idx` (causal, windows) are the op's window, so that tiles outside are not computed; a soft cap by `tanh` and ALiBi's slopes are its options, without gradients for slopes so
    taken. Other masks of a `BlockMask` whose blocks are multiples of 128, of 16-bit types, are the op's map of blocks: blocks without a pair are skipped, full ones read no mask, and
    of others a bit for each pair is kept with the mask. Other masks and biases become one tensor over the dims in which they differ, up to `batch * heads * queries * keys` elements; those of places and numbers alone are remembered (256 MiB of them at most).
    Score functions of another kind, arithmetic of both `q_idx` and `kv_idx` that is added, and pairs that a score function hides by captured tensors are steps within the op, and nothing of the size of the scores is stored: on GPUs from compute capability 8.0 on of 16-bit types with heads of up to 256 elements, by multiples of 8, on the CPU of all types. What is
    of queries, of keys, of batch or head alone, and what is gathered, is up to 4 operands of them (at a place of both that lies within a tensor, such as `table[h, q_idx - kv_idx + last]`, it is read there); there are up to 64 steps, of functions that are a few instructions each. So are the gradients of such functions, by their slopes, of up to
    256 steps with each, and those of what they capture: the latter on GPUs of compute capability 9.0 for heads of up to 128 elements, not under `torch.use_deterministic_algorithms`, and on the CPU. Other functions, gradients of a log-sum-exp that is returned and of what is captured elsewhere
    are computed between two products, with all scores in memory. A mask of the first keys of each batch (`kv_idx < lengths[b]`) is the op's lengths of keys, behind which nothing is computed.

    Gradients are there for `query`, `key`, `value`, captured tensors and the log-sum-exp; a second derivative raises `UnsupportedError`. `kernel_options` are hints to PyTorch's kernels and change nothing here.
    `torch.compile` calls it between graphs.
    """
    _check_options(kernel_options)
    if return_lse and return_aux is not None:
        raise GraphError("return_lse and return_aux; one of both says what is returned beside the result")
    _check_tensors(query, key, value, block_mask, enable_gqa)
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    if scale is None:
        scale = query.shape[3] ** -0.5 if query.shape[3] else 1.0
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        wanted = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(wanted) for x in (query, key, value))
    wants_total = return_lse or (return_aux is not None and return_aux.lse)
    wants_most = return_aux is not None and return_aux.max_scores
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        o, total, most = _attend(query, key, value, score_mod, block_mask, float(scale), wants_total, wants_most)
    total = total.squeeze(-1) if wants_total else None
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return o, AuxOutput(lse=total, max_scores=most.squeeze(-1) if wants_most else None)
    return (o, total) if return_lse else o
