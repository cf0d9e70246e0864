"""How far back each layer looks, and so which slots of a row a pass reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Window:
    """How a layer type limits the view: `size` positions back, or its own chunk of `size`."""

    size: int
    chunked: bool

    def first(self, position: int) -> int:
        """The lowest position that the query at `position` may see."""
        if self.chunked:
            return position - position % self.size
        return max(0, position - self.size + 1)


def layer_windows(config: Any) -> dict[str, Window | None]:
    """Layer type → window (None: the whole prefix), as `config` describes its attention layers."""
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
    """The window of every layer; a single one if all layers have the same."""
    found = layer_windows(config)
    if len(found) == 1:
        return tuple(found.values())
    return tuple(found[kind] for kind in config.layer_types)


def windows_by_slot(config: Any) -> bool:
    """Whether the model limits some layers to a window by a mask of its own, slot by slot.

    GPT-Neo does: trees and padding have slots that are no positions, which shows only in a pass
    that reaches beyond the window.
    """
    return "local" in (getattr(config, "attention_layers", None) or ())
