"""Notices that weights, hooks or adapters of a model changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook

_RECORDING = ("transformers.", "draftsmith.model.taps")
"""Modules with hooks that record outputs."""


def stored(tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: itself, or the parts of a quantized one.

    Tensor subclasses such as torchao's implement few operations and have no address. Torch's
    protocol `__tensor_flatten__` names their parts.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from stored(part)


_steps = Counter[int]()
"""Address of a weight's memory, which views share → steps of the optimizers that write to it."""


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    weights = (one for group in optimizer.param_groups for one in group["params"])
    _steps.update({_memory(part) for one in weights for part in stored(one)})


register_optimizer_step_post_hook(_count_step)


def writes(tensor: Tensor) -> int:
    """Return a number that grows when a plain tensor is written to, except through `.data`.

    Fused optimizers count no versions of the weights that they write, so their steps count, too.
    """
    versions = 0 if tensor.is_inference() else tensor._version
    return versions + (_steps[_memory(tensor)] if _steps else 0)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # such as those laid out by oneDNN
        return id(tensor)


def hooks(model: torch.nn.Module) -> dict[int, Any]:
    """Map the number of each forward hook to it, without those that only record outputs."""
    tables = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    for module in model.modules():
        tables += module._forward_hooks, module._forward_pre_hooks
    found = [pair for table in tables for pair in table.items()]
    return {n: hook for n, hook in found if not str(hook.__module__).startswith(_RECORDING)}


def replaced(module: torch.nn.Module) -> Any:
    """Return the `forward` that a module has instead of its class's; None if there is none."""
    found = vars(module).get("forward")
    # transformers 4 leaves the class's own there after it has recorded hidden states.
    return None if getattr(found, "__func__", None) is type(module).forward else found


def state(model: torch.nn.Module) -> tuple[int, ...]:
    """Return a key that is equal as long as no weight, hook or adapter of the model changed.

    It notices weights and buffers that were written, replaced or moved, exchanged modules and
    `forward` methods, forward hooks, steps of optimizers, and adapters that were switched. It does
    not notice other writes through `.data` or to weights that count no versions, nor numbers that
    modules keep as attributes.
    """
    found = [0, 0, 0, hash((*hooks(model),))]
    for module in model.modules():
        found[0] = hash((found[0], id(module), id(replaced(module))))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            for part in () if tensor is None else stored(tensor):
                # Weights laid out by oneDNN have no address.
                place = id(tensor) if part.is_mkldnn else part.data_ptr()
                found[0] = hash((found[0], place))
                found[1] += writes(part)
        if "lora_A" in vars(module).get("_modules", ()) or hasattr(module, "_disable_adapters"):
            names = ("active_adapters", "disable_adapters", "merged", "scaling")
            found[2] = hash((found[2], *(str(getattr(module, name, "")) for name in names)))
    return tuple(found)
