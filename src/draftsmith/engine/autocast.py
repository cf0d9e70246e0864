"""The autocast mode of the calling thread, under which its passes compute."""

from __future__ import annotations

import torch

Mode = tuple[tuple[str, torch.dtype], ...]
"""Types of devices that compute in another dtype; empty without autocast."""


def autocast_mode(device: torch.device) -> Mode:
    """Return the mode that holds here for a model on `device`."""
    kinds = dict.fromkeys(("cpu", device.type))
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    )
