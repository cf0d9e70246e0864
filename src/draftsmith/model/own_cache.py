"""Stores that use the model's own cache: one per row, chains only, one row per pass.

Keys and values of rejected tokens are cut off. A recurrent state cannot be cut: the result would be
silently wrong. It is copied before a draft is verified, and restored unless the whole draft is
accepted. The accepted tokens then stay pending and are computed again in the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.model.forward import cache_of
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.rows import KVStore, SequenceRow, record
from draftsmith.model.taps import PassTaps

_IN_PLACE = ("conv_states", "recurrent_states")
"""Attributes of transformers 5's cache layers that a pass overwrites. It replaces all others."""

Snapshot = list[dict[str, Any]]
"""The attributes of every layer of a cache."""


def recurrent_cache(config: Any) -> Any | None:
    """Make transformers 5's cache of a recurrent or hybrid model; None for all other models."""
    try:
        cache = DynamicCache(config=config)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    layers = cache.layers
    return cache if any(hasattr(layer, "recurrent_states") for layer in layers) else None


def first_recurrent_state(cache: Any) -> Tensor | None:
    """Copy the state of the first recurrent layer; None if there is none.

    Where it is the model's first layer, it contains no rounding of other layers.
    """
    for layer in getattr(cache, "layers", ()):
        for state in getattr(layer, "recurrent_states", {}).values():
            if isinstance(state, Tensor):
                return state.clone()
    return None


class OwnCacheStore(KVStore):
    """One cache of transformers' own classes per row."""

    def __init__(self, loaded: LoadedModel) -> None:
        capabilities = loaded.capabilities
        self._forward = loaded.forward
        self._config = loaded.config
        self._blocks = loaded.blocks
        self._rewinds = capabilities.cache == "own"
        self._restores = capabilities.cache == "replay" and capabilities.shape == "chain"
        self._prepared = False

    def open(self, row: SequenceRow) -> None:
        """Make an empty cache, unless the model makes its own in the first pass."""
        row.state = self._empty()

    def close(self, row: SequenceRow) -> None:
        row.state = row.unfinished = None

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """Run one pass per row, after a snapshot of recurrent states."""
        outputs = []
        for row, draft in zip(rows, drafts, strict=True):
            self._undo(row)
            # A plain step is expected to be committed, so it is not copied.
            saved = snapshot(row.state) if draft and self._restores else None
            row.unfinished = saved, len(draft)
            last = 1 + len(draft)
            tokens = [*row.pending[: row.taken], *draft.tokens]
            taps = record([row], self._blocks, [slice(None)])
            logits = self._pass(row, tokens, row.cached, last, taps)
            outputs.append(RowOutput(logits[:0] if row.is_chunk else logits[-last:]))
        return outputs

    def keep(self, row: SequenceRow, path: Sequence[int]) -> int:
        """Keep a pass accepted completely, cut one accepted in part, or undo it."""
        kept = super().keep(row, path)
        if len(path) == row.unfinished[1] or self._cut(row, row.cached + kept):
            row.unfinished = None
            return kept
        self._undo(row)
        return 0

    def mark(self, row: SequenceRow) -> None:
        """Copy the state, if states can be restored."""
        self._undo(row)
        row.mark = (row.cached, snapshot(row.state)) if self._restores else None

    def mark_bytes(self, row: SequenceRow) -> int:
        return 0 if row.mark is None else sum(map(_bytes, row.mark[1]))

    def reach(self, row: SequenceRow, length: int) -> int:
        if self._rewinds or length >= row.cached:
            return min(length, row.cached)
        return row.mark[0] if row.mark is not None and row.mark[0] <= length else 0

    def truncate(self, row: SequenceRow, length: int) -> int:
        """Cut keys and values. A state is kept completely, restored from the mark, or dropped."""
        self._undo(row)
        if length == row.cached or self._cut(row, length):
            return length
        if kept := self.reach(row, length):
            restore(row.state, [_copy(layer) for layer in row.mark[1]])  # type: ignore[index]
        else:
            row.state, row.mark = self._empty(), None
        return kept

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:
        """A pass makes new keys and values while the old ones are kept, in case it is undone."""
        return 2 * sum(rows) + sum(kept)

    def _cut(self, row: SequenceRow, length: int) -> bool:
        """Drop keys and values after `length` positions; False for caches with recurrent states.

        Not by `Cache.crop(n)`, which has meant "keep n" and "drop n" in different versions.
        """
        if self._rewinds:
            for layer in row.state.layers:
                for name in ("keys", "values"):
                    if isinstance(held := getattr(layer, name, None), Tensor) and held.numel():
                        setattr(layer, name, held[..., :length, :])
        return self._rewinds

    def _undo(self, row: SequenceRow) -> None:
        """Undo a pass that was not committed, or was interrupted."""
        if row.unfinished is None:
            return
        saved, _ = row.unfinished
        if not self._cut(row, row.cached):
            if saved is not None:
                restore(row.state, saved)
            else:
                row.state = self._empty()
                if row.ids:
                    self._pass(row, row.ids, 0, 1)
        row.unfinished = None  # only now: what fails here is done before the next pass

    def _pass(
        self,
        row: SequenceRow,
        tokens: Sequence[int],
        start: int,
        last: int,
        taps: PassTaps | None = None,
    ) -> Tensor:
        positions = [list(range(start, start + len(tokens)))]
        if row.state is None and self._prepared:
            row.state = self._forward.prepared_cache(tokens)
        output = self._forward([tokens], positions, None, row.state, last, taps)
        if row.state is None:
            row.state = cache_of(output)
        if row.state is None:
            # Some models of transformers 4 fill a cache that only `generate` makes.
            self._prepared = True
            return self._pass(row, tokens, start, last, taps)
        logits: Tensor = output.logits
        return logits[0]

    def _empty(self) -> Any | None:
        if self._rewinds:
            return DynamicCache()  # its layers keep all positions; masks limit windows
        return recurrent_cache(self._config) if self._restores else None


class NoStore(KVStore):
    """No cache: every pass computes the whole sequence again."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._forward = loaded.forward

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """Compute each whole row, followed by a chain."""
        outputs = []
        for row, draft in zip(rows, drafts, strict=True):
            tokens = [*row.ids, *row.pending, *draft.tokens]
            last = 1 + len(draft)
            output = self._forward([tokens], [list(range(len(tokens)))], None, False, last)
            outputs.append(RowOutput(output.logits[0, -last:]))
        return outputs


def snapshot(cache: Any) -> Snapshot:
    """Copy the recurrent states; refer to keys and values, which a pass does not overwrite."""
    return [_copy(vars(layer)) for layer in cache.layers]


def restore(cache: Any, before: Snapshot) -> None:
    """Restore a snapshot, which must not be used again."""
    for layer, saved in zip(cache.layers, before, strict=True):
        vars(layer).clear()
        vars(layer).update(saved)


def _bytes(attributes: dict[str, Any]) -> int:
    """Bytes of the tensors in a layer's snapshot."""
    nested = (value.values() for value in attributes.values() if isinstance(value, dict))
    return sum(
        value.nbytes for value in chain(attributes.values(), *nested) if isinstance(value, Tensor)
    )


def _copy(attributes: dict[str, Any]) -> dict[str, Any]:
    copied = dict(attributes)
    for name, value in attributes.items():
        if isinstance(value, dict):
            copied[name] = {
                key: item.clone() if name in _IN_PLACE and item is not None else item
                for key, item in value.items()
            }
    return copied
