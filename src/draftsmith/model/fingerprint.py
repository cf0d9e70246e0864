"""Tells models of one name apart, and states of one model, cheaply."""

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
"""Numbers of a weight that are looked at."""
_AS_FLOAT32 = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights that are compared as float32, all others by their bytes."""


def fingerprint(model: LoadedModel) -> str:
    """Number of parameters and a checksum of some of them, quantized and offloaded ones too."""
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
    """The plain tensors that a tensor keeps: itself, or what a quantized tensor is made of.

    Tensor subclasses such as torchao's implement few operations, and have no address; what they
    are made of says `__tensor_flatten__`, torch's protocol for them.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(part := getattr(tensor, name), Tensor):
            yield from stored(part)


def _here(layer: torch.nn.Module, parameter: Tensor) -> AbstractContextManager[Any]:
    """Bring a layer's weights that accelerate keeps elsewhere to the CPU meanwhile."""
    if parameter.device.type != "meta":
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(layer, torch.device("cpu"))  # type: ignore[no-any-return]


def _bytes(part: Tensor) -> bytes:
    """A sample of a plain tensor."""
    sample = part.detach().flatten()[:_SAMPLE]
    if sample.dtype in _AS_FLOAT32:
        return sample.to("cpu", torch.float32).numpy().tobytes()
    return sample.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def state(model: torch.nn.Module) -> tuple[int, ...]:
    """Equal as long as no weight was written, replaced or moved, and no adapter switched.

    Writes through `.data`, and to weights that count no versions, are not seen.
    """
    found = [0, 0, 0]
    for parameter in model.parameters():
        for part in stored(parameter):
            # What is laid out for a processor has no address.
            found[0] += id(parameter) if part.is_mkldnn else part.data_ptr()
            found[1] += 0 if part.is_inference() else part._version
    for module in model.modules():
        if "lora_A" in vars(module).get("_modules", ()) or hasattr(module, "_disable_adapters"):
            names = ("active_adapters", "disable_adapters", "merged", "scaling")
            found[2] = hash((found[2], *(str(getattr(module, name, "")) for name in names)))
    return tuple(found)
