"""The autocast mode of the calling thread, which its passes use."""

from __future__ import annotations

import torch

Mode = tuple[tuple[str, torch.dtype], ...]
"""(device type, dtype) pairs with autocast; empty without autocast."""


def autocast_mode(device: torch.device) -> Mode:
    """Return the autocast mode of this thread for a model on `device`."""
    kinds = dict.fromkeys(("cpu", device.type))
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    )
