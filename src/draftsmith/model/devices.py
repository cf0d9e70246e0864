"""Devices: the default one, its name, its memory, and copies to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def usual() -> torch.device:
    """Return the default device for models.

    It is torch's default device if that is no CPU, else this machine's accelerator (CUDA, ROCm,
    MPS, XPU, …), else the CPU.
    """
    default = torch.get_default_device()
    if default.type not in ("cpu", "meta"):
        return default
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu" if kind is None else kind.type)


def name_of(device: torch.device) -> str:
    """Name a device for a person: "cpu", "mps", "cuda:0 (NVIDIA H100 80GB HBM3)"."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    tell = getattr(module, "get_device_name", None)
    return str(device) if tell is None else f"{device} ({tell(device)})"


def own_memory(device: torch.device) -> tuple[int, int] | None:
    """Return (free, total) bytes of a device with its own memory; None for others.

    What torch's allocator keeps unused counts as free.
    """
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free) + int(unused), int(total)


def send(values: Any, device: torch.device) -> Tensor:
    """Copy a tensor or nested lists of the host to a device, without waiting for the device.

    torch reuses pinned memory only after it was copied. On MPS the copy waits: a kernel there may
    read the source of a non-blocking copy after it was freed.
    """
    on_host = torch.as_tensor(values, device="cpu")
    if device.type in ("cpu", "mps"):
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)
