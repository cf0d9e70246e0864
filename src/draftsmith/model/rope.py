"""Rotary embeddings with angles that depend on the length of the pass, and the limits that follow.

With longrope and dynamic NTK, the last position of a pass determines the angles of *all* its
positions. A draft across the boundary would change the logits of the root before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeBoundary:
    """The first position computed with other angles.

    `grows`: every later position changes the angles of the whole pass again.
    """

    position: int
    grows: bool

    def room(self, root: int) -> int | None:
        """Positions after `root` that a pass may add without changing its angles; None: any."""
        if root < self.position:
            return self.position - 1 - root
        return 0 if self.grows else None

    def beyond(self, root: int) -> bool:
        """Whether a pass over this root uses the other angles."""
        return root >= self.position

    def stale(self, cached: int, root: int) -> bool:
        """Whether the cache has short-text angles while the root needs the long-text ones.

        With growing angles (dynamic NTK) no cached key matches later ones, and the model's own
        decoding accepts that. Only a prompt must be computed in one pass.
        """
        return self.beyond(root) and not self.grows and cached <= self.position

    def keeps(self, length: int, cached: int, root: int) -> bool:
        """Whether the first `length` of `cached` positions can serve a sequence with this new root.

        False for positions that `stale` would drop in the next pass.
        """
        short = cached <= self.position
        if self.grows or not self.beyond(root):
            return short and not self.beyond(root)
        return not short and not self.stale(length, root)


def _tables(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kinds of rotary angles with their settings; several layer types have a table each."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for table in (rope, *(t for t in rope.values() if isinstance(t, dict))):
        yield str(table.get("rope_type", table.get("type", "default"))), table


def yarn_positions(config: Any) -> int:
    """Return the number of positions to which YaRN extends a model; 0 without it."""
    tables = [table for kind, table in _tables(config) if kind == "yarn"]
    if not tables:
        return 0
    whole = getattr(config, "max_position_embeddings", 0)
    first = max(table.get("original_max_position_embeddings") or whole for table in tables)
    return int(first * max(table.get("factor") or 1 for table in tables))


def rope_boundary(config: Any) -> RopeBoundary | None:
    """Boundary of a config with rotary angles that depend on the pass; None for all others."""
    for kind, table in _tables(config):
        if kind == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            boundary = table.get("original_max_position_embeddings", own)
            return RopeBoundary(boundary or config.max_position_embeddings, grows=False)
        if "dynamic" in kind:
            return RopeBoundary(config.max_position_embeddings, grows=True)
    return None


def growing(model: Any) -> list[tuple[Any, str]]:
    """Return modules with growing angles, each with its attribute for the longest pass."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            kinds = {"": kinds}
        if isinstance(kinds, dict) and hasattr(module, "original_max_seq_len"):
            prefixes = [
                f"{layer}_" if layer else "" for layer, k in kinds.items() if "dynamic" in k
            ]
            found += [(module, f"{prefix}max_seq_len_cached") for prefix in prefixes]
    return found


def forget(rotary: list[tuple[Any, str]], length: int) -> None:
    """Make the modules compute new angles for a pass up to `length` positions.

    A module keeps the angles of its longest pass. It computes new ones only if a pass is longer
    than that, or shorter than the original length. Setting the attribute makes either true.
    """
    for module, longest in rotary:
        original = module.original_max_seq_len
        setattr(module, longest, original - 1 if length >= original else original + 1)
