"""Tells models of one name apart, and states of one model, cheaply."""

from __future__ import annotations

import zlib

import torch

from draftsmith.model.loaded import LoadedModel
from draftsmith.model.prepack import PackedLinear


def fingerprint(model: LoadedModel) -> str:
    """Number of parameters and a checksum of some of them."""
    parameters = list(model.model.named_parameters())
    sums = 0
    for name, parameter in parameters[:: max(1, len(parameters) // 8)]:
        owner, _, own = name.rpartition(".")
        layer = model.model.get_submodule(owner)
        packed = isinstance(layer, PackedLinear) and own == "weight"
        plain = layer.dense() if packed else parameter.detach()
        part = plain.flatten()[:4096].to("cpu", torch.float32)
        sums = zlib.crc32(part.numpy().tobytes(), sums)
    return f"{sum(p.numel() for _, p in parameters)} ({sums:08x})"


def state(model: torch.nn.Module) -> tuple[int, ...]:
    """Equal as long as no weight was written, replaced or moved, and no adapter switched.

    Writes through `.data`, and to weights that count no versions, are not seen.
    """
    found = [0, 0, 0]
    for parameter in model.parameters():
        # What is laid out for a processor has no address.
        found[0] += id(parameter) if parameter.is_mkldnn else parameter.data_ptr()
        found[1] += 0 if parameter.is_inference() else parameter._version
    for module in model.modules():
        if "lora_A" in vars(module).get("_modules", ()) or hasattr(module, "_disable_adapters"):
            names = ("active_adapters", "disable_adapters", "merged", "scaling")
            found[2] = hash((found[2], *(str(getattr(module, name, "")) for name in names)))
    return tuple(found)
