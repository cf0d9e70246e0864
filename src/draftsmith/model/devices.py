"""Devices: the default one, its name, and its memory."""

from __future__ import annotations

from typing import Any

import torch


def usual() -> torch.device:
    """Return the default device for models.

    It is torch's default device if one was set, else this machine's accelerator (CUDA, ROCm, MPS,
    XPU, …), else the CPU.
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
