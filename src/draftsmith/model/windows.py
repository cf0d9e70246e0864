"""Attention windows of layers: how far back each layer looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Window:
    """Limit of a layer type: the last `size` positions, or the own chunk of `size` positions."""

    size: int
    chunked: bool

    def first(self, position: int) -> int:
        """Lowest position that the query at `position` may see."""
        if self.chunked:
            return position - position % self.size
        return max(0, position - self.size + 1)


def layer_windows(config: Any) -> dict[str, Window | None]:
    """Return the window of each attention layer type of a config; None: the whole prefix."""
    size = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    known: dict[str, Window | None] = {}
    if size is not None:
        known["sliding_attention"] = Window(size, chunked=False)
    if chunk is not None:
        known["chunked_attention"] = Window(chunk, chunked=True)
    types = getattr(config, "layer_types", None)
    if types:
        found = {kind: known.get(kind) for kind in types}
        return found if any(found.values()) else {"full_attention": None}
    if not getattr(config, "use_sliding_window", True):
        known.pop("sliding_attention", None)
    kind = next(iter(known), "full_attention")
    return {kind: known.get(kind)}


def windows_by_layer(config: Any) -> tuple[Window | None, ...]:
    """Return the window of every layer, or a single one if all layers have the same."""
    found = layer_windows(config)
    if len(found) == 1:
        return tuple(found.values())
    return tuple(found[kind] for kind in config.layer_types)
