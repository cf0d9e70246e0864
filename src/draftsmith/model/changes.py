"""Notices that weights or adapters of a model changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


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


def state(model: torch.nn.Module) -> tuple[int, ...]:
    """Return a key that is equal as long as no weight or adapter of the model changed.

    It notices weights that were written, replaced or moved, and adapters that were switched. It
    does not notice writes through `.data`, nor to weights that count no versions.
    """
    found = [0, 0, 0]
    for parameter in model.parameters():
        for part in stored(parameter):
            # Weights laid out by oneDNN have no address.
            found[0] += id(parameter) if part.is_mkldnn else part.data_ptr()
            found[1] += 0 if part.is_inference() else part._version
    for module in model.modules():
        if "lora_A" in vars(module).get("_modules", ()) or hasattr(module, "_disable_adapters"):
            names = ("active_adapters", "disable_adapters", "merged", "scaling")
            found[2] = hash((found[2], *(str(getattr(module, name, "")) for name in names)))
    return tuple(found)
