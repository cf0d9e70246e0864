"""Sequences with keys and values of their own, the tokens of all of them in one sequence per pass.

Linear layers then compute exactly the tokens there are; attention (`attention.py`) goes through the
spans. Nothing beyond a row's end is ever read, so what was rejected needs no undoing.

Shapes: `n` layers that are alike, `K` key heads, `C` slots allocated, `D` and `W` widths of keys
and values; `Q` positions of a pass, all rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.model.attention import Packed
from draftsmith.model.cache import PassCache
from draftsmith.model.forward import Forward
from draftsmith.model.masks import EVERYTHING, Span, visible
from draftsmith.model.rope import RopeBoundary
from draftsmith.model.rows import Memory, SequenceRow, finite
from draftsmith.model.taps import Place, record
from draftsmith.model.windows import View, Window

_SPARE = 8
"""Slots that a row is given beyond those it needs, besides a sixteenth of them."""


@dataclass(slots=True)
class Slots:
    """What one row has of `n` layers that are alike; slot s holds position s + `dropped`."""

    window: Window | None
    layers: list[int]
    keys: Tensor
    """(n, 1, K, C, D)"""
    values: Tensor
    """(n, 1, K, C, W)"""
    dropped: int = 0
    """Positions that are gone."""

    @property
    def kind(self) -> Any:
        """Equal for layers that one pair of tensors can hold."""
        both = ((t.shape[1:], t.dtype, t.device) for t in (self.keys, self.values))
        return self.window, self.dropped, *both

    def fits(self, length: int) -> bool:
        """Whether there are slots for so many positions."""
        return length - self.dropped <= self.keys.shape[3]

    def parts(self, start: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
        """By layer, keys (1, K, end - start, D) and values of these positions; views."""
        first, count = start - self.dropped, end - start
        keys, values = (t.narrow(3, first, count).unbind(0) for t in (self.keys, self.values))
        return zip(keys, values, strict=True)

    def move(self, sources: Sequence[int], start: int) -> None:
        """Copy the positions `sources` to `start` and after."""
        index = torch.tensor(sources, device=self.keys.device) - self.dropped
        for buffer in (self.keys, self.values):
            place = buffer.narrow(3, start - self.dropped, len(sources))
            place.copy_(buffer.index_select(3, index))


def together(alike: Sequence[Slots], length: int, end: int, drop: bool, limit: int | None) -> Slots:
    """One for these, its first `length` positions kept, with room up to `end` and a little more.

    `drop`: what lies behind the window is left out. `limit`: the model's context, a good last size.
    """
    first = alike[0]
    dropped = first.dropped
    if drop and first.window is not None:
        dropped = max(dropped, first.window.first(length))
    slots = end - dropped
    spare = slots // 16 + _SPARE
    slots += spare if limit is None or end > limit else min(spare, limit - end)

    def copied(old: Sequence[Tensor]) -> Tensor:
        shape = old[0].shape
        new = old[0].new_empty((sum(map(len, old)), *shape[1:3], slots, shape[4]))
        places = new.narrow(3, 0, length - dropped).split_with_sizes([len(one) for one in old])
        for place, one in zip(places, old, strict=True):
            place.copy_(one.narrow(3, dropped - first.dropped, length - dropped))
        return new

    keys, values = copied([one.keys for one in alike]), copied([one.values for one in alike])
    layers = [layer for one in alike for layer in one.layers]
    return Slots(first.window, layers, keys, values, dropped)


class PackedPass(PassCache):
    """The cache of one pass: every row's new keys go behind its own, in its own slots."""

    def __init__(
        self,
        rows: Sequence[SequenceRow],
        spans: Sequence[Span],
        windows: Sequence[Window | None],
        device: torch.device,
    ) -> None:
        """`windows`: one for all layers, or one per layer."""
        super().__init__()
        self.longest = max(span.cached for span in spans)
        self._rows = rows
        self._spans = spans
        self._windows = windows
        self._widths = [span.width for span in spans]
        self._new = [i for i, span in enumerate(spans) if not span.cached]
        """Rows without slots: which layers there are shows in their first pass."""
        self._layers: dict[int, _Layer] = {}
        self._firsts = {
            window: [0 if window is None else window.first(s.cached) for s in spans]
            for window in windows
        }
        self._masks = {
            window: [
                _mask(span, first, window, device)
                for span, first in zip(spans, firsts, strict=True)
            ]
            for window, firsts in self._firsts.items()
        }
        for place, (row, span) in enumerate(zip(rows, spans, strict=True)):
            end = span.cached + span.width
            for slots in row.state:
                written = slots.parts(span.cached, end)
                read = slots.parts(self._firsts[slots.window][place], end)
                for layer, to, of in zip(slots.layers, written, read, strict=True):
                    self._layer(layer).put(place, to, of)

    def firsts(self, layer_idx: int, span: int) -> tuple[int, ...]:
        """(1,) the position of the first key that a span sees in a layer."""
        return (self._firsts[self._window(layer_idx)][span],)

    def _window(self, layer_idx: int) -> Window | None:
        return self._windows[layer_idx if len(self._windows) > 1 else 0]

    def _layer(self, layer_idx: int) -> _Layer:
        if layer_idx not in self._layers:
            masks = self._masks[self._window(layer_idx)]
            self._layers[layer_idx] = _Layer(self._widths, masks)
        return self._layers[layer_idx]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys (1, K, Q, D) and values behind each row's; returns both, with all to read."""
        layer = self._layer(layer_idx)
        keys, values = (t.split_with_sizes(self._widths, 2) for t in (key_states, value_states))
        for place in self._new:
            own = (
                keys[place].new_empty(keys[place].shape),
                values[place].new_empty(values[place].shape),
            )
            layer.put(place, own, own)
            slots = Slots(self._window(layer_idx), [layer_idx], own[0][None], own[1][None])
            self._rows[place].state.append(slots)
        torch._foreach_copy_(layer.new_keys, keys)
        torch._foreach_copy_(layer.new_values, values)
        key_states.packed = layer.packed  # type: ignore[attr-defined]
        return key_states, value_states


class _Layer:
    """Where a pass writes keys and values in one layer, and what it reads, by span."""

    def __init__(self, widths: Sequence[int], masks: Sequence[Tensor | None]) -> None:
        self.new_keys, self.new_values, keys, values = ([_NOTHING] * len(widths) for _ in range(4))
        self.packed = Packed(widths, masks, keys, values)

    def put(self, place: int, to: tuple[Tensor, Tensor], of: tuple[Tensor, Tensor]) -> None:
        """Say where a span's keys and values go, and what it reads."""
        self.new_keys[place], self.new_values[place] = to
        self.packed.keys[place], self.packed.values[place] = of


_NOTHING = torch.empty(0)


def _mask(span: Span, first: int, window: Window | None, device: torch.device) -> Tensor | None:
    """(1, 1, q, S) for a span that reads from position `first` on; None where none is needed."""
    if span.width == 1:
        return None  # what it reads begins where its only query looks
    if window is not None and max(span.positions) < window.size:
        window = None
    if not span.cached and window is None and span.draft.is_chain:
        return None
    view = View(0, span.cached + span.width - first, (first,))
    return visible([span], view, window).to(device, non_blocking=True)


class PackedMemory(Memory):
    """Rows that share passes and nothing else."""

    def __init__(
        self,
        forward: Forward,
        kinds: Sequence[str],
        windows: Sequence[Window | None],
        boundary: RopeBoundary | None,
        blocks: Any,
        rewinds: bool,
        context: int | None,
    ) -> None:
        """`kinds`: layer types that the model asks masks for. `rewinds`: as in `KVMemory`."""
        self._forward = forward
        everything = EVERYTHING.to(forward.device)
        self._mask = everything if len(kinds) == 1 else dict.fromkeys(kinds, everything)
        self._windows = windows
        self._boundary = boundary
        self._blocks = blocks
        self._rewinds = rewinds
        self._context = context
        self._rows: set[SequenceRow] = set()

    def open(self, row: SequenceRow) -> None:
        row.state = []
        self._rows.add(row)

    def close(self, row: SequenceRow) -> None:
        """Free what it has; no other row moves."""
        self._rows.remove(row)
        row.state = None

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """One pass for all rows whose rotary angles agree."""
        found: dict[int, RowOutput] = {}
        for group in self._groups(rows):
            outputs = self._pass([rows[i] for i in group], [drafts[i] for i in group])
            found.update(zip(group, outputs, strict=True))
        return [found[i] for i in range(len(rows))]

    def keep(self, row: SequenceRow, path: Sequence[int]) -> int:
        """Gather the path behind the taken tokens; what is in place already costs nothing."""
        start = row.cached + row.taken
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            for slots in row.state:
                slots.move([start + node for node in path[moved:]], start + moved)
        return super().keep(row, path)

    def truncate(self, row: SequenceRow, length: int) -> int:
        """A shorter length is all it takes, unless keys it needs were dropped."""
        seen = (s.window.first(length) if s.window else 0 for s in row.state)
        enough = all(s.dropped <= first for s, first in zip(row.state, seen, strict=True))
        return length if enough else 0

    def contents(self, row: SequenceRow) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (K, n, D) of a row, one pair per layer: of its last n positions."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for slots in row.state:
            parts = slots.parts(slots.dropped, row.cached)
            found.update(zip(slots.layers, ((k[0], v[0]) for k, v in parts), strict=True))
        return [found[layer] for layer in sorted(found)]

    def held(self) -> int:
        """Bytes of keys and values of all rows."""
        tensors = (t for row in self._rows for s in row.state for t in (s.keys, s.values))
        return sum(t.untyped_storage().nbytes() for t in tensors)

    def _groups(self, rows: Sequence[SequenceRow]) -> list[list[int]]:
        """Rows that may share a pass: one pass has one set of rotary angles."""
        groups: dict[tuple[bool, int], list[int]] = {}
        for place, row in enumerate(rows):
            beyond = self._boundary is not None and self._boundary.beyond(row.root)
            alone = beyond and self._boundary is not None and self._boundary.grows
            groups.setdefault((beyond, place if alone else 0), []).append(place)
        return list(groups.values())

    def _pass(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        spans = [
            Span(row.cached, row.taken, draft) for row, draft in zip(rows, drafts, strict=True)
        ]
        for row, span in zip(rows, spans, strict=True):
            self._reserve(row, span.width)
        cache = PackedPass(rows, spans, self._windows, self._forward.device)
        tokens, positions, needed = [], [], []
        for row, span in zip(rows, spans, strict=True):
            wanted = 0 if row.is_chunk else 1 + len(span.draft)
            tokens += [*row.pending[: row.taken], *span.draft.tokens]
            positions += span.positions
            needed.append(range(len(tokens) - wanted, len(tokens)))
        ends = list(accumulate(span.width for span in spans))
        places = [
            Place(span=i, queries=slice(a, b)) for i, (a, b) in enumerate(pairwise([0, *ends]))
        ]
        chunks = {i for i, row in enumerate(rows) if row.is_chunk}
        taps = record([row.taps for row in rows], self._blocks, places, chunks, cache.firsts)
        asked = [i for one in needed for i in one] or [len(tokens) - 1]
        last = self._forward.logits_of(asked, len(tokens))
        logits = self._forward([tokens], [positions], self._mask, cache, last, taps).logits[0]
        sound = finite(logits[:, None]) if any(drafts) else [True] * len(logits)
        outputs, picked = [], 0
        for draft, one in zip(drafts, needed, strict=True):
            begin = len(logits) - len(tokens) + one.start  # of those asked for and maybe others
            if isinstance(last, Tensor):
                begin, picked = picked, picked + len(one)
            own = slice(begin, begin + len(one))
            outputs.append(RowOutput(logits[own], finite=not draft or all(sound[own])))
        return outputs

    def _reserve(self, row: SequenceRow, width: int) -> None:
        """Make room for `width` positions more; layers that are alike come into one place."""
        if not row.cached:
            row.state = []
        end = row.cached + width
        full: dict[Any, list[Slots]] = {}
        for slots in row.state:
            if not slots.fits(end):
                full.setdefault(slots.kind, []).append(slots)
        if full:
            drop, limit = not self._rewinds, self._context
            wider = [together(alike, row.cached, end, drop, limit) for alike in full.values()]
            row.state = [slots for slots in row.state if slots.fits(end)] + wider
