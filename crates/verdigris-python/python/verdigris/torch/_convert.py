"""Swaps the modules of an existing network."""

import copy
import dataclasses

import torch

from . import _chains, _transformers, nn


@dataclasses.dataclass(frozen=True)
class Report:
    """What `convert` did: names of modules with their classes, of those that stay why they do, and of those that hold chains which are computed
    together in inference, which they are."""

    swapped: dict
    kept: dict
    chains: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        lines = [f"{len(self.swapped)} modules swapped, {len(self.kept)} kept"]
        lines += [f"  {name or '(itself)'}: {kind}" for name, kind in self.swapped.items()]
        lines += [f"  {name or '(itself)'} stays: {why}" for name, why in self.kept.items()]
        count = sum(map(len, self.chains.values()))
        lines += [f"{count} chains that are one call in inference"] if count else []
        lines += [f"  {name or '(itself)'}: {', '.join(chains)}" for name, chains in self.chains.items()]
        return "\n".join(lines)


def _why_not(module):
    """Why a module of a class that we have is not swapped; `None` if it is."""
    if type(module).forward is not _stock(type(module)).forward or "forward" in vars(module):
        return "its forward is not PyTorch's"
    if getattr(module, "parametrizations", None) is not None:
        return "it is parametrized"
    if getattr(module, "inplace", False):
        return "it writes its result into its input, and ours makes a new one"
    own = getattr(nn.CLASSES[_stock(type(module))], "_why_not", None)
    return own(module) if own is not None else None


def _stock(kind):
    return next((base for base in kind.__mro__ if base in nn.CLASSES), kind)


def convert(model, *, inplace=False, only=None, skip=()):
    """Swaps every module of `model` that this package computes: convolutions, transposed ones, `Linear`, pooling, resampling, padding, activations, batch, layer,
    RMS, group and instance norm, multi-head attention, dropout, softmax, cross-entropy and other losses; of torchvision the attention in shifted windows of its Swin
    transformers; and of Hugging Face's transformers RMS norms, activations, gated feed-forward layers and attention whose projections are of one input, with rotary
    positions or without, where a trial shows that a module computes just that. Returns the network and a `Report` of what was swapped, what was not, and why.

    With `inplace` the network's own modules change their class: parameters, buffers, hooks and names stay as they are. Without it that happens to a
    copy of the modules that shares parameters and buffers with the original. `state_dict` has the same keys either way.

    A convolution with the batch normalization behind it, and with a residual and an activation where they follow, is one call in inference (in eval
    mode and without gradients), and in training one call and one node of autograd with its residual and ReLU, if the convolution has no bias; where the
    forward of the module that holds them can be read exactly. A module with hooks stays by itself. Modules and `state_dict` stay as they are.

    The weights of such queries, keys and values move behind each other in memory, for one product; they stay parameters of their own.

    `only`: classes that are swapped, all others staying. `skip`: names of modules that stay, with everything below them.
    """
    if not inplace:
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        model = copy.deepcopy(model, shared)
    swapped, kept, left, classes = {}, {}, set(), nn.classes()
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__ == nn.__name__:
            continue
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in skip):
            left.add(module)
            if kind in classes:
                kept[name] = f"{kind.__name__}: it is to be skipped"
            continue
        if kind not in classes:
            if _transformers.is_known(kind) and (only is None or kind in only):
                why = _transformers.take(module)
                if why is None:
                    swapped[name] = kind.__name__
                elif why:
                    kept[name] = f"{kind.__name__}: {why}"
                if why is not False:
                    continue
            base = _stock(kind)
            if base in classes:
                kept[name] = f"{kind.__name__}: a class of its own, derived from {base.__name__}"
            elif not any(True for _ in module.children()):
                kept[name] = f"{kind.__name__}: not computed by this package"
            continue
        if only is not None and kind not in only:
            left.add(module)
            kept[name] = f"{kind.__name__}: not asked for"
            continue
        why = _why_not(module)
        if why is not None:
            kept[name] = f"{kind.__name__}: {why}"
            continue
        module.__class__ = classes[kind]
        module._prepare()
        swapped[name] = kind.__name__
    return model, Report(swapped, kept, _chains.chain(model, skip, left))
