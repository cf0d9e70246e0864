"""The precision that a caller's thread asks of torch: passes follow it, whoever drives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Mode:
    """Whether autocast is on, and to which type, by type of device."""

    settings: tuple[tuple[str, bool, torch.dtype], ...] = ()

    @classmethod
    def of_this_thread(cls, device: Any) -> Mode:
        """What holds here for a model on `device`."""
        kinds = dict.fromkeys(("cpu", torch.device(device).type))
        return cls(
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.amp.is_autocast_available(kind)
            )
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let it hold in this thread; costs nothing where it does."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                now = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
                if now[0] != enabled or (enabled and now[1] != dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            yield
