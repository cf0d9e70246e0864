"""Distinguishes models of one name, at little cost."""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from draftsmith.model.changes import stored
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
