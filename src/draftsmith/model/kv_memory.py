"""Sequences in one shared key/value cache: trees, chains and ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.model.cache import KVCache
from draftsmith.model.forward import Forward
from draftsmith.model.masks import MaskBuilder, Span
from draftsmith.model.rope import RopeBoundary
from draftsmith.model.rows import Memory, SequenceRow, finite
from draftsmith.model.taps import Place, record
from draftsmith.model.windows import Views


class KVMemory(Memory):
    """Rows of a `KVCache`. Without `masks` a pass is one row and one chain: the model masks it."""

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        masks: MaskBuilder | None,
        batch: bool,
        boundary: RopeBoundary | None = None,
        blocks: Any = None,
    ) -> None:
        self.cache = cache
        self._forward = forward
        self._masks = masks
        self._batch = batch and masks is not None
        self._boundary = boundary
        self._blocks = blocks
        self._rows: list[SequenceRow] = []

    def open(self, row: SequenceRow) -> None:
        """Give the sequence the next row."""
        row.slot = len(self._rows)
        self._rows.append(row)

    def close(self, row: SequenceRow) -> None:
        """Move the last row into this one's place, so that the rows in use stay side by side."""
        last = self._rows.pop()
        if last is not row:
            if last.taps is not None:
                last.taps.settle()
            if last.cached:  # Else it may have no place in the buffers yet.
                self.cache.replace(row.slot, last.slot, last.cached)
            last.slot = row.slot
            self._rows[last.slot] = last

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """One pass per group of neighbouring rows."""
        if len(rows) == 1:
            return self._pass(rows, drafts)
        by_row = dict(zip(map(id, rows), drafts, strict=True))
        found: dict[int, RowOutput] = {}
        for group in self._groups(rows):
            outputs = self._pass(group, [by_row[id(row)] for row in group])
            found.update(zip(map(id, group), outputs, strict=True))
        return [found[id(row)] for row in rows]

    def keep(self, row: SequenceRow, path: Sequence[int]) -> int:
        """Gather the path behind the taken tokens."""
        start = row.cached + row.taken
        self.cache.keep(row.slot, start, [start + node for node in path])
        return super().keep(row, path)

    def reach(self, row: SequenceRow, length: int) -> int:
        return length if self.cache.serves(row.slot, length) else 0

    def truncate(self, row: SequenceRow, length: int) -> int:
        """Nothing to do: a shorter length is all it takes, unless keys it needs were dropped."""
        return self.reach(row, length)

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:
        """All rows are as long as the longest, and as `LayerGroup` allocates them; a layer at a
        time grows, which is little."""
        count = len(rows) + len(kept)
        return (count + count // 4) * max((*rows, *kept), default=0) * 5 // 4

    def contents(self, row: SequenceRow) -> list[tuple[Tensor, Tensor]]:
        """As `PackedMemory.contents`."""
        return self.cache.contents(row.slot, row.cached)

    def _groups(self, rows: Sequence[SequenceRow]) -> list[list[SequenceRow]]:
        """Runs of neighbours that may share a pass."""
        groups: list[list[SequenceRow]] = []
        for row in sorted(rows, key=lambda r: r.slot):
            if groups and self._may_join(groups[-1][-1], row):
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _may_join(self, left: SequenceRow, right: SequenceRow) -> bool:
        if not self._batch or right.slot != left.slot + 1:
            return False
        if left.is_chunk or right.is_chunk:  # all others would be padded to it
            return False
        if self._boundary is None:
            return True
        # One pass has one set of rotary angles.
        sides = [self._boundary.beyond(row.root) for row in (left, right)]
        return sides[0] == sides[1] and not (self._boundary.grows and sides[0])

    def _pass(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        spans = [
            Span(row.cached, row.taken, draft) for row, draft in zip(rows, drafts, strict=True)
        ]
        width = max(s.width for s in spans)
        chunk = rows[0].is_chunk  # alone, then
        last = 1 if chunk else width - min(s.pending for s in spans) + 1
        views = self._begin(rows, spans)
        mask: Any = None
        if self._masks is not None and (spans[0].cached or len(spans) > 1 or len(drafts[0])):
            mask = self._masks(spans, views)
        tokens, positions = [], []
        for row, draft, span in zip(rows, drafts, spans, strict=True):
            padding = width - span.width
            # With a token that is committed, for another one's keys might overflow.
            own = [*row.pending[: row.taken], *draft.tokens]
            tokens.append(own + row.pending[-1:] * padding)
            # Learned position tables have no entry beyond their end: padding stays at the start.
            positions.append(span.positions + [span.cached] * padding)
        places = [Place(row=i) for i in range(len(rows))]
        asked = [row.taps for row in rows]
        taps = record(asked, self._blocks, places, {0} if chunk else (), self.cache.firsts)
        logits = self._forward(tokens, positions, mask, self.cache, last, taps).logits
        skipped = width - logits.shape[1]
        sound = finite(logits) if any(drafts) else [True] * len(rows)
        outputs = []
        for i, (row, draft, s) in enumerate(zip(rows, drafts, spans, strict=True)):
            usable = sound[i] or not draft
            if not usable:
                self.cache.clear(row.slot, row.cached)
            found = logits[i, s.pending - 1 - skipped : s.width - skipped]
            outputs.append(RowOutput(found[:0] if chunk else found, finite=usable))
        return outputs

    def _begin(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> Views:
        width = max(s.width for s in spans)
        lengths = [s.cached for s in spans]
        return self.cache.begin(
            rows[0].slot, lengths, width, drop=not any(row.rewinds for row in rows)
        )
