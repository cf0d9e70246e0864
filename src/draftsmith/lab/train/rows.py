"""Embedding rows of the adaptive tokens, trained separately from their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AdaptiveRows:
    """Offsets (n, D) of the rows of n adaptive tokens, initially zero.

    They are separate so that adapters train nothing else of the table, and so that these few rows
    can have their own learning rate. Lookups of other tokens do not change.
    """

    def __init__(self, embeddings: torch.nn.Embedding, tokens: Sequence[int]) -> None:
        table = embeddings.weight
        self.embeddings, self.tokens = embeddings, list(tokens)
        self.scale = getattr(embeddings, "embed_scale", 1.0)  # Gemma 3 scales inside the module
        learnt = torch.nn.Parameter(torch.zeros_like(table[: len(tokens)]))
        self.number = torch.full((len(table),), -1, device="cpu")
        """(V,) index of a token among the adaptive ones, or -1."""
        self.number[self.tokens] = torch.arange(len(tokens), device="cpu")
        embeddings.register_parameter("adaptive", learnt)
        self._hook = embeddings.register_forward_hook(self._add)

    @property
    def learnt(self) -> torch.nn.Parameter:
        """(n, D). Another object after a move to some devices."""
        learnt: torch.nn.Parameter = self.embeddings.adaptive  # type: ignore[assignment]
        return learnt

    def _add(self, _: Any, given: tuple[Tensor, ...], found: Tensor) -> Tensor:
        number = self.number.to(given[0].device)[given[0]]
        known = (number < 0)[..., None]
        rows = found.detach() + self.learnt[number.clamp(min=0)] * self.scale
        return torch.where(known, found, rows)

    def fold(self) -> None:
        """Add the offsets to the table and restore the module."""
        with torch.no_grad():
            self.embeddings.weight[self.tokens] += self.learnt
        self._hook.remove()
        del self.embeddings.adaptive
