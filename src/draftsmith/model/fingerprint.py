"""Tells models of one name apart, cheaply."""

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
