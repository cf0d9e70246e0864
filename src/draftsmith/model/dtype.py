"""The default dtypes of a model and of a trained head beside it.

A model's is the checkpoint's, or float32 on a CPU that does not compute in the checkpoint's.
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.model.measure import free_bytes

_ARITHMETIC = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
"""Half precision → PyTorch's query of oneDNN, which computes matrix products on a CPU."""


def computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device has arithmetic of a dtype; all but the CPU are assumed to."""
    if device.type != "cpu" or dtype not in _ARITHMETIC:
        return True
    # Some builds of torch have no oneDNN.
    ask = getattr(torch.ops.mkldnn, _ARITHMETIC[dtype], None)
    return ask is not None and bool(ask())


def widen(model: Any) -> torch.dtype | None:
    """Convert half-precision weights to float32 on a CPU that does not compute in their dtype.

    No value changes. Returns the previous dtype, or None if the weights were not converted, which
    includes the case that they would grow by more than half of the free memory.
    """
    had: torch.dtype = model.dtype
    devices = {parameter.device for parameter in model.parameters()}
    if getattr(model, "is_quantized", False) or any(computes_in(had, one) for one in devices):
        return None
    more = 2 * sum(parameter.numel() for parameter in model.parameters())
    free = free_bytes(torch.device("cpu"))
    if free is not None and more > free // 2:
        return None
    model.float()
    return had


def dtype_beside(target: torch.dtype, own: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype for a head with a checkpoint of the dtype `own`: that of its target.

    A half-precision head beside a float32 target keeps its own if the processor computes in it. It
    is then half as large, and only drafts depend on its rounding.
    """
    half = own in _ARITHMETIC and target == torch.float32
    return own if half and computes_in(own, device) else target
