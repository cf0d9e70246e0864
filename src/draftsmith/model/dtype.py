"""The default dtype of a model.

It is the checkpoint's, or float32 on a CPU that does not compute in the checkpoint's.
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


def computes_in(dtype: torch.dtype) -> bool:
    """Return whether this CPU has arithmetic of a dtype."""
    if dtype not in _ARITHMETIC:
        return True
    # Some builds of torch have no oneDNN.
    ask = getattr(torch.ops.mkldnn, _ARITHMETIC[dtype], None)
    return ask is not None and bool(ask())


def widen(model: Any) -> torch.dtype | None:
    """Convert half-precision weights to float32 on a CPU that does not compute in their dtype.

    No value changes. Returns the previous dtype, or None if the weights were not converted, which
    includes the case that float32 would take more than half of the free memory.
    """
    had: torch.dtype = model.dtype
    elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    if elsewhere or getattr(model, "is_quantized", False) or computes_in(had):
        return None
    more = 2 * sum(parameter.numel() for parameter in model.parameters())
    free = free_bytes(torch.device("cpu"))
    if free is not None and more > free // 2:
        return None
    model.float()
    return had
