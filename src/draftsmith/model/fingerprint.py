"""Tells models of one name apart, cheaply."""

from __future__ import annotations

import zlib

import torch

from draftsmith.model.loaded import LoadedModel


def fingerprint(model: LoadedModel) -> str:
    """Number of parameters and a checksum of some of them."""
    parameters = list(model.model.parameters())
    sums = 0
    for parameter in parameters[:: max(1, len(parameters) // 8)]:
        plain = parameter.to_dense() if parameter.is_mkldnn else parameter.detach()
        part = plain.flatten()[:4096].to("cpu", torch.float32)
        sums = zlib.crc32(part.numpy().tobytes(), sums)
    return f"{sum(p.numel() for p in parameters)} ({sums:08x})"
