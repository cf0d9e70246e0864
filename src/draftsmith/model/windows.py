"""Attention windows of layers: how many of the latest tokens each layer sees."""

from __future__ import annotations

import inspect
from typing import Any

Window = int | None
"""Number of the latest positions that a layer sees; None: all."""


def first_visible(window: Window, position: int) -> int:
    """Return the lowest position that the query at `position` may see."""
    return 0 if window is None else max(0, position - window + 1)


def layer_windows(config: Any) -> dict[str, Window]:
    """Return the window of each attention layer type of a config."""
    size = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types and "sliding_attention" in types and size is not None:
        return {kind: size if kind == "sliding_attention" else None for kind in types}
    if types or size is None:
        return {"full_attention": None}
    if not getattr(config, "use_sliding_window", True):
        # Some classes of transformers get this setting, but do not read it.
        own = not type(config).__module__.startswith("transformers.")
        if own or "use_sliding_window" in inspect.signature(type(config).__init__).parameters:
            return {"full_attention": None}
    return {"sliding_attention": size}


def unknown_window(config: Any) -> str | None:
    """Return the layer type, or the setting, of windows of another kind; None if there are none.

    Known by the config, because the texts of the self-test may be too short to show them (Doge), or
    because they concern the answer only (Unlimited-OCR).
    """
    if getattr(config, "keep_window_size", None) is not None:
        return "keep_window_size"
    types = getattr(config, "layer_types", None) or ()
    windowed = (kind for kind in types if kind.endswith("sliding_attention"))
    return next((kind for kind in windowed if kind != "sliding_attention"), None)


def windows_by_layer(config: Any) -> tuple[Window, ...]:
    """Return the window of every layer, or a single one if all layers have the same."""
    found = layer_windows(config)
    if len(found) == 1:
        return tuple(found.values())
    return tuple(found[kind] for kind in config.layer_types)
