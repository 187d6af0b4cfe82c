"""Attention in shifted windows, as torchvision's Swin transformers have it: one call for all windows, whose bias holds what shifted windows leave out.

Windows are batches of the call where nothing is shifted, and the bias is that of the heads. Where windows are shifted, each has regions of its own that do not
attend to each other: then windows are beside the heads, `[batch, windows · heads, positions, elements]`, so that the bias is `[1, windows · heads, positions,
positions]` and is still read, and has its gradient, once for all images.
"""

import math

import torch

from . import functional as F

#: What is added to the scores of positions whose regions are apart in the image.
_APART = -100.0
#: Cosine attention's largest factor, as a logarithm.
_MOST_LOGIT = math.log(100.0)
_MOST_MASKS = 64
_masks = {}


def why_not(module):
    """Why a module stays as it is; `None` if it does not."""
    for name in ("qkv", "proj"):
        kind = type(getattr(module, name))
        if kind is not torch.nn.Linear and not (kind.__name__ == "Linear" and kind.__module__ == f"{__package__}.nn"):
            return f"its {name} is a {kind.__name__}, which is not PyTorch's Linear"
    if module.qkv.in_features % module.num_heads:
        return f"{module.qkv.in_features} channels in {module.num_heads} heads"
    return None


def _is_ours(module, x):
    """Whether the call asks for nothing that only torchvision's forward has: dropout, images of other dims."""
    return x.dim() == 4 and x.numel() and not (module.training and (module.attention_dropout > 0.0 or module.dropout > 0.0))


def _regions(height, width, shift, device):
    """The number of the region of each position of a shifted image, `[height, width]`, as far as positions of one window tell regions apart: what came round from
    the other side is in the last window of its rows, or of its columns."""
    rows, columns = (torch.arange(extent, device=device) >= extent - moved for extent, moved in zip((height, width), shift))
    return 2 * rows.int().unsqueeze(1) + columns.int()


def _apart(height, width, window, shift, device):
    """What is added to the scores of each window, `[windows, 1, positions, positions]`."""
    of_windows = _partition(_regions(height, width, shift, device)[None, :, :, None], window)[:, :, 0]
    are_apart = of_windows.unsqueeze(1) != of_windows.unsqueeze(2)
    return torch.where(are_apart, _APART, 0.0).unsqueeze(1)


def _mask(height, width, window, shift, device):
    """The same, made once: it is of the extents alone. Compiled, it is part of what reads it."""
    if torch.compiler.is_compiling():
        return _apart(height, width, window, shift, device)
    key = (height, width, *window, *shift, device)
    found = _masks.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = _apart(height, width, window, shift, device)
        if len(_masks) >= _MOST_MASKS:
            _masks.clear()
        _masks[key] = found
    return found


def _in_windows(x, window):
    """`[batch, rows of windows, rows, columns of windows, columns, channels]`."""
    return x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))


def _partition(x, window):
    """`[batch · windows, positions, channels]`."""
    return _in_windows(x, window).permute(0, 1, 3, 2, 4, 5).reshape(-1, window[0] * window[1], x.shape[3])


def _partition_inside(x, window):
    """The same with positions outside of windows: `[batch, positions, windows, channels]`."""
    return _in_windows(x, window).permute(0, 2, 4, 1, 3, 5).reshape(x.shape[0], window[0] * window[1], -1, x.shape[3])


def _joined(x, window, height, width):
    """The image of `[batch · windows, positions, channels]`."""
    x = x.reshape(-1, height // window[0], width // window[1], *window, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, x.shape[-1])


def _joined_inside(x, window, height, width):
    """The image of `[batch, positions, windows, channels]`."""
    x = x.reshape(-1, *window, height // window[0], width // window[1], x.shape[-1])
    return x.permute(0, 3, 1, 4, 2, 5).reshape(-1, height, width, x.shape[-1])


def _position_bias(module):
    """The bias of the relative positions, `[heads, positions, positions]`."""
    if hasattr(module, "cpb_mlp"):
        return module.get_relative_position_bias()[0]
    # A row of the table for each pair: the gradient of such rows is one call, that of an index many.
    rows = torch.nn.functional.embedding(module.relative_position_index, module.relative_position_bias_table)
    positions = module.window_size[0] * module.window_size[1]
    return rows.t().reshape(module.num_heads, positions, positions).contiguous()


def _qkv_bias(module):
    """That of the projection; of cosine attention, without the part of the keys."""
    bias = module.qkv.bias
    if bias is None or not hasattr(module, "logit_scale"):
        return bias
    q, k, v = bias.chunk(3)
    return torch.cat((q, torch.zeros_like(k), v))


def window_attention(module, x, theirs):
    """The forward of torchvision's `ShiftedWindowAttention` and `ShiftedWindowAttentionV2`; `theirs`, torchvision's own, in training with dropout."""
    if not _is_ours(module, x):
        return theirs(module, x)
    window, heads = tuple(module.window_size), module.num_heads
    rows, columns = x.shape[1:3]
    below, beside = -rows % window[0], -columns % window[1]
    if below or beside:
        x = torch.nn.functional.pad(x, (0, 0, 0, beside, 0, below))
    height, width = rows + below, columns + beside
    # Of one window there is nothing to shift.
    shift = tuple(0 if size >= extent else moved for size, extent, moved in zip(window, (height, width), module.shift_size))
    is_shifted = sum(shift) > 0
    if is_shifted:
        x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
    bias = _position_bias(module)
    x = _partition_inside(x, window) if is_shifted else _partition(x, window)
    made = F.linear(x, module.qkv.weight, _qkv_bias(module)).unflatten(-1, (3, heads, -1)).unbind(-3)
    if is_shifted:
        bias = (bias + _mask(height, width, window, shift, x.device)).flatten(0, 1)
        made = [part.flatten(2, 3) for part in made]
    q, k, v = (part.transpose(1, 2) for part in made)
    scale = None
    if hasattr(module, "logit_scale"):
        # Cosine attention: the products of rows of length 1, each head's times a factor of its own.
        factor = torch.clamp(module.logit_scale, max=_MOST_LOGIT).exp().repeat(q.shape[1] // heads, 1, 1)
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        q, k, scale = (q * factor).to(v.dtype), k.to(v.dtype), 1.0
    if bias.dtype not in (q.dtype, torch.float32):
        bias = bias.to(q.dtype)
    o = F.attention_of_heads(q, k, v, bias.unsqueeze(0), scale=scale).transpose(1, 2)
    if is_shifted:
        o = o.unflatten(2, (-1, heads))
    y = F.linear(o.flatten(-2), module.proj.weight, module.proj.bias)
    y = _joined_inside(y, window, height, width) if is_shifted else _joined(y, window, height, width)
    if is_shifted:
        y = torch.roll(y, shift, (1, 2))
    return y[:, :rows, :columns, :].contiguous()
