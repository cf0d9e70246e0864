"""Distinguishes models of one name, and states of one model, at little cost."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from draftsmith.model.loaded import LoadedModel
from draftsmith.model.prepack import PackedLinear

_SAMPLE = 4096
"""Numbers of a weight that are read."""
_AS_FLOAT32 = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are compared as float32; all others are compared by their bytes."""


def fingerprint(model: LoadedModel) -> str:
    """Return the number of parameters and a checksum of some of them.

    Quantized and offloaded weights are included.
    """
    parameters = list(model.model.named_parameters())
    sums = 0
    for name, parameter in parameters[:: max(1, len(parameters) // 8)]:
        owner, _, own = name.rpartition(".")
        layer = model.model.get_submodule(owner)
        if isinstance(layer, PackedLinear) and own == "weight":
            sums = zlib.crc32(_bytes(layer.dense()), sums)
            continue
        with _here(layer, parameter):
            for part in stored(getattr(layer, own)):
                sums = zlib.crc32(_bytes(part), sums)
    return f"{sum(p.numel() for _, p in parameters)} ({sums:08x})"


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


def _here(layer: torch.nn.Module, parameter: Tensor) -> AbstractContextManager[Any]:
    """Bring a layer's weights that accelerate offloaded to the CPU while the context is open."""
    if parameter.device.type != "meta":
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(layer, torch.device("cpu"))  # type: ignore[no-any-return]


def _bytes(part: Tensor) -> bytes:
    """Bytes of the first numbers of a plain tensor."""
    sample = part.detach().flatten()[:_SAMPLE]
    if sample.dtype in _AS_FLOAT32:
        return sample.to("cpu", torch.float32).numpy().tobytes()
    return sample.contiguous().view(torch.uint8).cpu().numpy().tobytes()


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
