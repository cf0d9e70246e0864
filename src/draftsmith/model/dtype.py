"""The dtype of a model where none is asked for.

It is the checkpoint's, but float32 on a CPU that does not compute in the checkpoint's.
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.model.measure import free_bytes

_ARITHMETIC = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
"""Half precision → PyTorch's question to oneDNN, which multiplies its matrices on a CPU."""


def computes_in(dtype: torch.dtype) -> bool:
    """Return whether this CPU has arithmetic of a type."""
    if dtype not in _ARITHMETIC:
        return True
    ask = getattr(torch.ops.mkldnn, _ARITHMETIC[dtype], None)  # some builds are without oneDNN
    return ask is not None and bool(ask())


def widen(model: Any) -> torch.dtype | None:
    """Make the weights of a model on a CPU that does not compute in their half precision float32.

    Every number stays what it is. Returns the dtype that they had, None where they keep it: also
    where float32 would take more than half of the memory that is free.
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
