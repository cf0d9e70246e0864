"""Answers transformers' questions about a cache, for one that serves a single pass."""

from __future__ import annotations

from typing import Any

from transformers import Cache

from draftsmith.model.attention import Packed


class PassCache(Cache):  # type: ignore[misc]
    """A cache of one pass. It has no layer objects: only `Packed` inputs of our attention."""

    longest = 0
    """Number of positions before this pass in its longest row."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.given: dict[int, Packed] = {}
        """Inputs of each layer's attention."""

    @property
    def attended(self) -> bool:
        """Whether every layer called our attention with the inputs it got."""
        return all(packed.attended for packed in self.given.values())

    def restart(self) -> None:
        """Return to the state before the pass."""
        self.given.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of positions before this pass in its longest row."""
        del layer_idx
        return self.longest

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys in this pass, and their offset.

        `query` is Q, or in transformers 4 the positions (Q,).
        """
        del layer_idx
        width = query if isinstance(query, int) else query.shape[0]
        return self.longest + width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum. `Cache` itself cannot answer without layers."""
        del layer_idx
        return -1
