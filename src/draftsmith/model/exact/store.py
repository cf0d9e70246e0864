"""Packed passes with rows that are bit-equal in any batch: see `kernel` and `widths`.

Shapes: `Q` positions of a pass, `H` query heads, `K` key heads, `C` slots, `D` and `W` widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.model.attention import Form
from draftsmith.model.exact.kernel import attend
from draftsmith.model.exact.widths import Widths
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.masks import Span
from draftsmith.model.packed import PackedPass, PackedStore, Slots
from draftsmith.model.rows import SequenceRow
from draftsmith.model.windows import Window, first_visible

_BITS: dict[torch.dtype, tuple[torch.dtype, Any, int]] = {
    torch.bfloat16: (torch.int16, np.uint16, 16),
    torch.float32: (torch.int32, np.uint32, 0),
}
"""Dtype → (torch integer, numpy integer, left shift that makes a float32 of the bits)."""
DTYPES = frozenset(_BITS)

_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
_Views = tuple[_Ints, _Ints, _Ints, _Ints]
"""Arguments lows, highs, starts, slots of `kernel.attend`: what each query of a span sees."""


class ExactPass(PackedPass):
    """A pass that uses our own attention kernel, with keys stored by column."""

    columns = True

    def __init__(
        self,
        rows: Sequence[SequenceRow],
        parts: Sequence[Span],
        windows: Sequence[Window],
        recorded: bool,
    ) -> None:
        super().__init__(rows, parts, windows, recorded=True)  # no rows are merged
        self._rows, self._recorded = rows, recorded
        self._seen: dict[tuple[Window, int, int], _Views] = {}
        self._bits: dict[Slots, tuple[Any, Any]] = {}
        self._places = [
            {layer: (s, i) for s in row.state for i, layer in enumerate(s.layers)} for row in rows
        ]
        """Buffer and index of each layer's keys, by row. New rows get theirs during the pass."""

    def _masks_of(self, window: Window, device: torch.device) -> list[Tensor | None]:
        if self._recorded:
            return super()._masks_of(window, device)
        return [None] * len(self._spans)

    def _attend(self, layer: int) -> Any:
        spans = []
        for i, row in enumerate(self._rows):
            slots, place = self._places[i].get(layer) or (row.state[-1], 0)
            keys, values = self._both(slots)
            key = slots.window, slots.dropped, i
            if key not in self._seen:
                self._seen[key] = _views(self._spans[i], slots.window, slots.dropped)
            spans.append((keys[slots.place, place], values[slots.place, place], self._seen[key]))
        return partial(_attend, self._widths, spans, _BITS[slots.keys.dtype][2])

    def _both(self, slots: Slots) -> tuple[Any, Any]:
        """Bits of keys (R, n, K, D, C) and values (R, n, K, C, W), as views."""
        found = self._bits.get(slots)
        if found is None:
            alike, kind, _ = _BITS[slots.keys.dtype]
            both = slots.keys.transpose(-1, -2), slots.values
            keys, values = (t.view(alike).numpy().view(kind) for t in both)
            found = self._bits[slots] = keys, values
        return found


class ExactStore(PackedStore):
    """Rows of exact passes. Each pass is padded to a width that the self-test allows."""

    passes: ClassVar[type[PackedPass]] = ExactPass

    def __init__(self, loaded: LoadedModel, widths: Widths) -> None:
        super().__init__(loaded)
        self._exact_widths = widths

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        # `most` is an allowed width, so padding leaves a pass on its side of it.
        width = sum(row.taken + len(draft) for row, draft in zip(rows, drafts, strict=True))
        with self._exact_widths.pieces(width):
            return super().verify(rows, drafts)

    def _fill(self, tokens: list[int], positions: list[int], wanted: list[int]) -> None:
        more = self._exact_widths.at_least(len(tokens)) - len(tokens)
        tokens += tokens[-1:] * more
        positions += positions[-1:] * more
        if not self._forward.picks:
            wanted[:] = range(len(tokens))
        more = self._exact_widths.at_least(len(wanted)) - len(wanted)
        wanted += wanted[-1:] * more


def _attend(
    widths: Sequence[int], spans: Sequence[tuple[Any, Any, _Views]], shift: int,
    query: Tensor, form: Form,
) -> Tensor:  # fmt: skip
    """Attention (1, Q, H, W) of query (1, H, Q, D), span by span; 0 for padding."""
    scaling, softcap, sinks = form
    q = query[0].transpose(0, 1).float().contiguous().numpy()
    shape = *q.shape[:2], spans[0][1].shape[-1]
    out = torch.zeros(shape, dtype=torch.float32, device="cpu")
    scale = np.float32(q.shape[2] ** -0.5 if scaling is None else scaling)
    cap = np.float32(softcap or 0)
    sunk = _NO_SINKS if sinks is None else sinks.detach().float().numpy()
    found, ends = out.numpy(), accumulate(widths, initial=0)
    for (a, b), (keys, values, seen) in zip(pairwise(ends), spans, strict=True):
        attend(q[a:b], keys, values, shift, *seen, scale, cap, sunk, found[a:b])
    return out.to(query.dtype)[None]


_NO_SINKS = np.zeros(0, np.float32)


def _views(span: Span, window: Window, dropped: int) -> _Views:
    """Return what each query sees: a run [low, high) of slots, then slots of further ancestors."""
    lows, highs, starts = [], [], [0]
    slots: list[int] = []
    paths: list[tuple[int, tuple[int, ...]]] = []
    """(end of the run, further ancestors) of each query, ignoring the window."""
    for i, position in enumerate(span.positions):
        own, node = span.cached + i, i - span.pending
        above = paths[span.pending + span.draft.parents[node]] if node >= 0 else (own, ())
        # The window cuts the run by slots, so a node that leaves out positions does not join it.
        joins = above == (own, ()) and position == own
        end, beyond = (own + 1, ()) if joins else (above[0], (*above[1], own))
        paths.append((end, beyond))
        first = first_visible(window, position)
        lows.append(min(max(first, dropped), end) - dropped)
        highs.append(end - dropped)
        slots += [at - dropped for at in beyond if span.positions[at - span.cached] >= first]
        starts.append(len(slots))
    low, high, start, slot = (np.array(n, np.int64) for n in (lows, highs, starts, slots))
    return low, high, start, slot
