"""Positions that depend on more than the token itself, and what that forbids.

With longrope and dynamic NTK the angles of *every* position in a pass follow from its last one. A
draft reaching over the boundary would change the logits of the root before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeBoundary:
    """`position` is the first one computed with other angles; `grows`: they change ever after."""

    position: int
    grows: bool

    def room(self, root: int) -> int | None:
        """Positions a pass with this root may add without changing its angles; None: any."""
        if root < self.position:
            return self.position - 1 - root
        return 0 if self.grows else None

    def beyond(self, root: int) -> bool:
        """Whether a pass over this root uses the other angles."""
        return root >= self.position

    def stale(self, cached: int, root: int) -> bool:
        """Whether `cached` positions carry short angles while the root wants the long ones.

        Growing angles never match their past: a model's own decoding lives with that, except that
        a prompt is computed in one pass. So they are stale only before the first pass.
        """
        return self.beyond(root) and not self.grows and cached <= self.position

    def keeps(self, length: int, cached: int, root: int) -> bool:
        """Whether the first `length` of `cached` positions serve a sequence with this new root.

        Those that `stale` would forget do not: a pass is counted before it takes them in again.
        """
        short = cached <= self.position
        if self.grows or not self.beyond(root):
            return short and not self.beyond(root)
        return not short and not self.stale(length, root)


def rope_boundary(config: Any) -> RopeBoundary | None:
    """The boundary of a config whose rotary angles depend on the pass, None for all others."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Models with several layer types keep one such table per type.
    tables = [rope, *(t for t in rope.values() if isinstance(t, dict))]
    for table in tables:
        kind = str(table.get("rope_type", table.get("type", "default")))
        if kind == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            boundary = table.get("original_max_position_embeddings", own)
            return RopeBoundary(boundary or config.max_position_embeddings, grows=False)
        if "dynamic" in kind:
            return RopeBoundary(config.max_position_embeddings, grows=True)
    return None


def growing(model: Any) -> list[tuple[Any, str]]:
    """Modules whose angles grow, each with its attribute for the longest pass it has seen."""
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
    """Let a pass up to `length` positions have its own angles, whatever was computed before it.

    The module keeps those of its longest pass until one is shorter than the original length, and
    computes new ones for a pass that is longer than the longest so far. Which it believes to be a
    longer or a shorter one than it was, so that it does either.
    """
    for module, longest in rotary:
        original = module.original_max_seq_len
        setattr(module, longest, original - 1 if length >= original else original + 1)


def scaled_by_slot(config: Any) -> bool:
    """Whether attention takes a temperature from a token's slot.

    Llama 4 scales the queries of some layers so, and a tree's slots run ahead of its positions.
    """
    tuned = getattr(config, "attn_temperature_tuning", False)
    return config.model_type == "llama4_text" and bool(tuned)
