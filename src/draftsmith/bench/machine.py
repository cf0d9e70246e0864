"""What the machine did during one generation: the most memory in use, and how busy it was."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import torch

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """A high-water mark that can be put back: of the GPU, or of this process's resident memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """Start anew from what is in use now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):  # Only Linux can; elsewhere there is no figure.
            _RESET.write_text("5")

    def read(self) -> int | None:
        """Bytes since the reset; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None


def load_per_core() -> float | None:
    """Processes that want to run, per core, mean of the last minute; None where nobody counts."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except (AttributeError, OSError):  # Windows does not know.
        return None
