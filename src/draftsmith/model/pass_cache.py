"""What transformers asks a cache about, of one that holds what a single pass needs."""

from __future__ import annotations

from typing import Any

from transformers import Cache

from draftsmith.errors import UnsupportedError
from draftsmith.model.attention import Packed


class PassCache(Cache):  # type: ignore[misc]
    """A cache of one pass: its layers show, and answer, nothing else."""

    longest = 0
    """Positions before this pass, of the longest row in it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.given: dict[int, Packed] = {}
        """By layer, what it attends to."""

    @property
    def attended(self) -> bool:
        """Whether all layers attended by our function to what they were given."""
        return all(packed.attended for packed in self.given.values())

    def restart(self) -> None:
        """Be as before the pass."""
        self.given.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this pass, of the longest row in it."""
        del layer_idx
        return self.longest

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Same as `get_seq_length` (asked by transformers 5)."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Keys in this pass and their offset; `query`: Q, or in transformers 4 its positions."""
        del layer_idx
        width = query if isinstance(query, int) else query.shape[0]
        return self.longest + width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum (transformers 5's name)."""
        del layer_idx
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No maximum (transformers 4's name)."""
        del layer_idx
        return -1

    @property
    def is_compileable(self) -> bool:
        """Its views change shape every step."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """No layer slides."""
        return [False] * len(self.layers)

    @property
    def is_linear(self) -> list[bool]:
        """No layer is recurrent."""
        return [False] * len(self.layers)

    @property
    def is_dummy(self) -> list[bool]:
        """No layer borrows its keys from another one's place."""
        return [False] * len(self.layers)

    def crop(self, *_: Any, **__: Any) -> None:
        """Refused: it has meant "keep n" and "drop n" in different versions."""
        raise UnsupportedError("this cache is rewound by its runner, not by crop()")
