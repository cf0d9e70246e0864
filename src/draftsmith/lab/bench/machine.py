"""Describes the machine, and its memory and load during a generation."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from draftsmith.model.loaded import LoadedModel
from draftsmith.model.measure import processor

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak(device: torch.device) -> bool:
    """Reset the peak of memory in use; returns whether that is possible.

    On a CPU only Linux can, and not in every sandbox.
    """
    if (module := _counting(device)) is not None:
        module.reset_peak_memory_stats(device)
        return True
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int | None:
    """Peak bytes since the reset, of a GPU or resident; None if the system does not report it."""
    if (module := _counting(device)) is not None:
        return int(module.max_memory_allocated(device))
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _counting(device: torch.device) -> Any:
    """Return torch's module for a device that counts its allocations; None for others."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def load_per_core() -> float | None:
    """Load average of the last minute per core; None if the system does not report it."""
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except OSError:  # "if the load average was unobtainable"
        return None


def linear_layers(model: LoadedModel) -> str:
    """Describe the layout of a model's linear layers."""
    return "as loaded" if model.prepacked is None else model.prepacked.explain()


def machine() -> str:
    """Describe processor and system, as far as Python knows."""
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{processor()}, {system}, Python {platform.python_version()}"
