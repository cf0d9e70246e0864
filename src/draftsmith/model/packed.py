"""Key/value store that packs the tokens of all rows into one sequence per pass.

Linear layers then compute no padding. Attention (`attention.py`) runs span by span, each over the
keys of its own row. Nothing after a row's end is ever read, so rejected nodes need no undoing.

Shapes: `n` layers of one kind, `K` key heads, `C` allocated slots, `D` and `W` widths of keys and
values; `Q` positions of a pass, all rows together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.errors import UnsupportedError
from draftsmith.model.attention import BLOCK, MOST_GROUPED, MOST_IN_BLOCKS, Packed
from draftsmith.model.devices import send
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.masks import EVERYTHING, Span, visible
from draftsmith.model.pass_cache import PassCache
from draftsmith.model.rope import RopeBoundary, rope_boundary
from draftsmith.model.rows import KVStore, SequenceRow, record
from draftsmith.model.windows import Window, first_visible, layer_windows, windows_by_layer

_SPARE = 8
"""Spare slots of a new buffer, in addition to a tenth of the slots needed."""
_MAX_SHARED_ROWS = 8
"""Maximum number of rows that share a buffer. It is freed when the last of them has left it."""


@dataclass(slots=True, eq=False)
class Slots:
    """Keys and values of one row in `n` layers of one kind; slot s holds position s + `dropped`."""

    window: Window
    layers: tuple[int, ...]
    keys: Tensor
    """(R, n, K, C, D): R rows that were moved to this buffer in the same pass."""
    values: Tensor
    """(R, n, K, C, W)"""
    place: int = 0
    """Index of this row among the R."""
    dropped: int = 0
    """Positions at the beginning that are no longer stored."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that one pair of tensors can hold."""
        both = ((t.shape[2], t.shape[4], t.dtype, t.device) for t in (self.keys, self.values))
        return self.window, self.dropped, *both

    def fits(self, length: int) -> bool:
        """Whether there are slots for `length` positions."""
        return length - self.dropped <= self.keys.shape[3]

    def parts(self, start: int, end: int, rows: int = 1) -> tuple[Sequence[Tensor], ...]:
        """Return keys (rows, K, end - start, D) and values of these positions, by layer, as views.

        `rows` counts adjacent rows of the buffer, this one first.
        """
        first, count = start - self.dropped, end - start
        keys, values = self.keys.narrow(3, first, count), self.values.narrow(3, first, count)
        if rows < len(keys):
            keys, values = keys.narrow(0, self.place, rows), values.narrow(0, self.place, rows)
        return keys.unbind(1), values.unbind(1)

    def move(self, sources: Sequence[int], start: int) -> None:
        """Copy the positions `sources` to `start` and the following slots."""
        index = send([source - self.dropped for source in sources], self.keys.device)
        for buffer in (self.keys[self.place], self.values[self.place]):
            to = buffer.narrow(2, start - self.dropped, len(sources))
            to.copy_(buffer.index_select(2, index))

    def adjacent(self, other: Slots) -> bool:
        """Whether `other` is the next row of the same buffer."""
        return other.keys is self.keys and other.place == self.place + 1


def by_kind(parts: Iterable[Slots]) -> dict[Any, list[Slots]]:
    """Group the slots of a row by what a pair of tensors can hold."""
    found: dict[Any, list[Slots]] = {}
    for part in parts:
        found.setdefault(part.kind, []).append(part)
    return found


def allocate(like: Tensor, shape: Sequence[int], columns: bool) -> Tensor:
    """Allocate a buffer (…, C, D), with `columns` transposed in memory: (…, D, C)."""
    if columns:
        return like.new_empty((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    return like.new_empty(shape)


def regroup(
    rows: Sequence[Sequence[Slots]], length: int, dropped: int, slots: int, columns: bool
) -> list[Slots]:
    """Move all layers of one kind of several rows to one new buffer, as adjacent rows.

    `length` is the number of cached positions; those from `dropped` on are kept. `slots` is C of
    the new buffer. `columns` is the layout of keys (see `allocate`).
    """
    one, kept = rows[0][0], length - dropped
    layers = tuple(layer for part in rows[0] for layer in part.layers)

    def copied(old: Tensor, buffers: Sequence[Sequence[Tensor]], columns: bool = False) -> Tensor:
        shape = len(rows), len(layers), old.shape[2], slots, old.shape[4]
        new = allocate(old, shape, columns)
        for own, parts in zip(new.narrow(3, 0, kept), buffers, strict=True):
            torch.cat([part.narrow(2, dropped - one.dropped, kept) for part in parts], out=own)
        return new

    keys = copied(one.keys, [[part.keys[part.place] for part in row] for row in rows], columns)
    values = copied(one.values, [[part.values[part.place] for part in row] for row in rows])
    return [Slots(one.window, layers, keys, values, i, dropped) for i in range(len(rows))]


class Views(NamedTuple):
    """Slots of one span in one layer, (R, K, ·, D or W) each."""

    new_keys: Tensor
    """Slots that the pass writes."""
    new_values: Tensor
    keys: Tensor
    """Slots that the span's attention reads, the new ones included."""
    values: Tensor


class PackedPass(PassCache):
    """Cache of one pass. Writes the new keys of every row after its cached ones, in its slots.

    Adjacent rows of one buffer with equal lengths and one new position each form one span.
    """

    columns: ClassVar[bool] = False
    """Memory layout of keys: see `allocate`."""

    def __init__(
        self,
        rows: Sequence[SequenceRow],
        parts: Sequence[Span],
        windows: Sequence[Window],
        recorded: bool,
    ) -> None:
        """Prepare a pass.

        `windows`: one for all layers, or one per layer. `recorded`: taps record attention row by
        row, so no rows are merged.
        """
        super().__init__()
        self.longest = max(part.cached for part in parts)
        self._windows = windows
        runs = _runs(rows, parts, merge=not recorded)
        spans = self._spans = [parts[first] for first, _ in runs]
        self._firsts = {
            window: [first_visible(window, span.cached) for span in spans]
            for window in set(windows)
        }
        self._masks: dict[Any, list[Tensor | None]] = {}
        self._widths = [span.width * count for span, (_, count) in zip(spans, runs, strict=True)]
        self._merged = [i for i, (_, count) in enumerate(runs) if count > 1]
        self._new = {i: rows[first] for i, (first, _) in enumerate(runs) if not spans[i].cached}
        """Rows without slots, by span. Their first pass shows which layers there are."""
        self._views: dict[int, list[Views]] = {}
        """By layer, one for each span that has slots."""
        for i, (span, (first, count)) in enumerate(zip(spans, runs, strict=True)):
            if i in self._new:
                continue
            end = span.cached + span.width
            for slots in rows[first].state:
                written = slots.parts(span.cached, end, count)
                read = slots.parts(self._firsts[slots.window][i], end, count)
                for layer, *views in zip(slots.layers, *written, *read, strict=True):
                    self._views.setdefault(layer, []).append(Views(*views))

    def _window(self, layer_idx: int) -> Window:
        return self._windows[layer_idx if len(self._windows) > 1 else 0]

    def _masks_of(self, window: Window, device: torch.device) -> list[Tensor | None]:
        """Masks by span, made once per window and device."""
        if (window, device) not in self._masks:
            both = zip(self._spans, self._firsts[window], strict=True)
            self._masks[window, device] = [
                _mask(span, first, window, device) for span, first in both
            ]
        return self._masks[window, device]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys (1, K, Q, D) and values after those of each row.

        Returns both arguments. `key_states.packed` has the keys and values that attention reads.
        """
        window = self._window(layer_idx)
        both = key_states, value_states
        alone = len(self._widths) == 1 and self._widths[0] == key_states.shape[2]
        new = [[s] if alone else self._split(s) for s in both]
        views = [*self._views.get(layer_idx, ())]
        for i, row in self._new.items():
            own = allocate(new[0][i], (1, *new[0][i].shape), self.columns)
            owned = allocate(new[1][i], (1, *new[1][i].shape), False)
            row.state.append(Slots(window, (layer_idx,), own, owned))
            views.insert(i, Views(own[0], owned[0], own[0], owned[0]))
        new_keys, new_values, keys, values = zip(*views, strict=True)
        for states in new:
            for i in self._merged:  # one position of each merged row
                states[i] = states[i].transpose(0, 2)
        torch._foreach_copy_([*new_keys, *new_values], [*new[0], *new[1]])
        masks = self._masks_of(window, key_states.device)
        packed = Packed(self._widths, masks, keys, values, self._attend(layer_idx))
        self.given[layer_idx] = key_states.packed = packed  # type: ignore[attr-defined]
        return key_states, value_states

    def restart(self) -> None:
        super().restart()
        for row in self._new.values():
            row.state = []

    def _split(self, states: Tensor) -> list[Tensor]:
        """Split (1, K, Q, D) by span; drops positions after the last span (`PackedStore._fill`)."""
        return list(states.narrow(2, 0, sum(self._widths)).split_with_sizes(self._widths, 2))

    def _attend(self, _layer: int) -> Any:
        """Replacement for our attention in a layer (`Packed.attend`); None for ours."""
        return None


def _reaches(state: Sequence[Slots], length: int) -> bool:
    """Whether these slots have all keys that the position `length` sees."""
    return all(s.dropped <= first_visible(s.window, length) for s in state)


def _runs(rows: Sequence[SequenceRow], parts: Sequence[Span], merge: bool) -> list[tuple[int, int]]:
    """Group neighbouring rows that form one span; returns (first, count) of each group."""
    runs: list[tuple[int, int]] = []
    for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
        before = place - 1
        if (
            merge
            and runs
            and part.cached
            and part.width == parts[before].width == 1
            and part.cached == parts[before].cached
            and all(map(Slots.adjacent, rows[before].state, row.state))
        ):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((place, 1))
    return runs


def _mask(span: Span, first: int, window: Window, device: torch.device) -> Tensor | None:
    """Mask (1, 1, q, S) of a span that reads from position `first`; None if none is needed."""
    if span.width == 1:
        return None  # the keys it reads begin at its window
    if window is not None and max(span.positions) < window:
        window = None
    on_cpu = device.type == "cpu"
    # Kernels for causal attention need no mask, but `attention._in_blocks` does. After cached keys,
    # only a GPU has such kernels, and they pay for a part of a prompt.
    in_blocks = on_cpu and BLOCK < span.width <= MOST_IN_BLOCKS
    after_others = not on_cpu and span.width > MOST_GROUPED
    alike = window is None and span.draft.is_chain
    if alike and not in_blocks and (not span.cached or after_others):
        return None
    return send(visible(span, first, window), device)


class PackedStore(KVStore):
    """Rows that share passes and, while they grow alike, buffers."""

    copies = forgets = True
    passes: ClassVar[type[PackedPass]] = PackedPass

    def __init__(self, loaded: LoadedModel) -> None:
        self._forward = loaded.forward
        everything, kinds = EVERYTHING.to(loaded.device), layer_windows(loaded.config)
        # A model that makes masks by layer type takes one for each.
        self._mask = everything if len(kinds) == 1 else dict.fromkeys(kinds, everything)
        self._windows = windows_by_layer(loaded.config)
        self._boundary = rope_boundary(loaded.config)
        self._blocks: Any = loaded.blocks
        self._context = loaded.context_length
        self._rows: set[SequenceRow] = set()

    def open(self, row: SequenceRow) -> None:
        row.state = []
        self._rows.add(row)

    def close(self, row: SequenceRow) -> None:
        """Free the row's keys and values. Closing twice is allowed."""
        self._rows.discard(row)
        row.state = None

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """Run a pass, or several.

        Raises UnsupportedError if decoder blocks with different windows were removed.
        """
        blocks, layers = self._blocks, len(self._windows)
        if layers > 1 and blocks is not None and len(blocks) != layers:
            raise UnsupportedError(
                f"decoder blocks: {len(blocks)} now, {layers} when the model was loaded; attention "
                "windows depend on a block's index, so load the model again"
            )
        spans = [
            Span(row.cached, row.taken, draft) for row, draft in zip(rows, drafts, strict=True)
        ]
        self._reserve(rows, spans)
        return self._passes(rows, spans)

    def _passes(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> list[RowOutput]:
        """Run one pass for each group of rows with equal rotary angles."""
        if self._boundary is None:
            return self._pass(rows, spans)
        found: dict[int, RowOutput] = {}
        for group in self._groups(rows, self._boundary):
            outputs = self._pass([rows[i] for i in group], [spans[i] for i in group])
            found.update(zip(group, outputs, strict=True))
        return [found[i] for i in range(len(rows))]

    def keep(self, row: SequenceRow, path: Sequence[int]) -> int:
        """Move the accepted path directly after the taken tokens; free if it is there already."""
        start = row.cached + row.taken
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            for slots in row.state:
                slots.move([start + node for node in path[moved:]], start + moved)
        return super().keep(row, path)

    def mark(self, row: SequenceRow) -> None:
        """Keep the slots of windowed layers, so that what the row drops later stays readable."""
        drops = row.state if self.forgets and not row.rewinds else []
        windowed = [slots for slots in drops if slots.window is not None]
        row.mark = (row.cached, windowed) if windowed else None

    def mark_bytes(self, row: SequenceRow) -> int:
        held = () if row.mark is None else row.mark[1]
        return sum(s.keys.nbytes + s.values.nbytes for s in held if s not in row.state)

    def reach(self, row: SequenceRow, length: int) -> int:
        return self._slots(row, length)[0]

    def truncate(self, row: SequenceRow, length: int) -> int:
        """Shorten the row; keeps less if it needs keys that were dropped and not marked."""
        kept, slots = self._slots(row, length)
        if row.mark is not None and (slots is not row.state or kept < row.mark[0]):
            row.mark = None  # the row will overwrite the marked buffers
        row.state = slots
        return kept

    def _slots(self, row: SequenceRow, length: int) -> tuple[int, list[Slots]]:
        """Return how many of the first `length` positions can be kept, and their slots."""
        if _reaches(row.state, length):
            return length, row.state
        if row.mark is not None:
            marked, windowed = row.mark
            length = min(length, marked)
            if _reaches(windowed, length):
                rest = [slots for slots in row.state if slots.window is None]
                return length, sorted([*rest, *windowed], key=lambda s: s.layers)
        return 0, row.state

    def copy(self, source: SequenceRow, row: SequenceRow, length: int) -> bool:
        kept, slots = self._slots(source, length)
        if kept < length:
            return False
        row.state = [self._alone(s, length) for s in slots]
        return True

    def _alone(self, slots: Slots, length: int) -> Slots:
        """Copy the first `length` positions of `slots` to a buffer of their own."""
        room, columns = length - slots.dropped, self.passes.columns
        return regroup([[slots]], length, slots.dropped, room, columns)[0]

    def unshare(self, row: SequenceRow) -> None:
        if any(len(slots.keys) > 1 for slots in row.state):
            self.copy(row, row, row.cached)
        if row.mark is not None and any(len(slots.keys) > 1 for slots in row.mark[1]):
            length, slots = row.mark
            row.mark = length, [self._alone(s, length) for s in slots]

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:
        """Return an upper bound of the peak bytes.

        A growing row briefly has two buffers, the new one a tenth too large. A shared buffer stays
        until the last of its rows has left it.
        """
        return 2 * sum(rows) + (sum(rows) + sum(kept)) // 10 + sum(kept)

    def held(self) -> int:
        """Bytes of keys and values of all rows."""
        tensors = (t for row in self._rows for s in row.state for t in (s.keys, s.values))
        storages = {t.data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def _groups(self, rows: Sequence[SequenceRow], boundary: RopeBoundary) -> list[list[int]]:
        """Group rows that may share a pass: one pass has one set of rotary angles."""
        groups: dict[tuple[bool, int], list[int]] = {}
        for place, row in enumerate(rows):
            beyond = boundary.beyond(row.root)
            alone = beyond and boundary.grows
            groups.setdefault((beyond, place if alone else 0), []).append(place)
        return list(groups.values())

    def _pass(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> list[RowOutput]:
        recorded = any(row.taps is not None for row in rows)
        cache = self.passes(rows, spans, self._windows, recorded)
        tokens, positions, needed = [], [], []
        for row, span in zip(rows, spans, strict=True):
            tokens += [*row.pending[: row.taken], *span.draft.tokens]
            positions += span.positions
            own = 0 if row.is_chunk else 1 + len(span.draft)
            needed.append(range(len(tokens) - own, len(tokens)))
        ends = accumulate((span.width for span in spans), initial=0)
        taps = record(rows, self._blocks, starmap(slice, pairwise(ends)))
        wanted = [i for one in needed for i in one] or [len(tokens) - 1]
        self._fill(tokens, positions, wanted)
        last = self._forward.logits_of(wanted, len(tokens))
        logits = self._forward([tokens], [positions], self._mask, cache, last, taps).logits[0]
        # A number may have been answered with the logits of more positions than `wanted`.
        given = range(len(tokens) - len(logits), len(tokens)) if isinstance(last, int) else wanted
        begins = [bisect_left(given, one.start) for one in needed]
        return [
            RowOutput(logits[begin : begin + len(one)])
            for begin, one in zip(begins, needed, strict=True)
        ]

    def _fill(self, tokens: list[int], positions: list[int], wanted: list[int]) -> None:
        """Add tokens and positions that no row asked for. Here none; see `ExactStore`."""

    def _reserve(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> None:
        """Make room for the new positions; rows that grow alike share a new buffer."""
        wanted: dict[Any, list[tuple[SequenceRow, list[Slots]]]] = {}
        for row, span in zip(rows, spans, strict=True):
            if not row.cached:
                row.state = []
            end = row.cached + span.width
            full = by_kind(slots for slots in row.state if not slots.fits(end))
            for kind, alike in full.items():
                window, dropped, *_ = kind
                if not row.rewinds:
                    dropped = max(dropped, first_visible(window, row.cached))
                wanted.setdefault((row.cached, end, dropped, kind), []).append((row, alike))
        for (length, end, dropped, _), group in wanted.items():
            slots = end - dropped
            spare = slots // 10 + _SPARE
            # A row never grows beyond the context length.
            if self._context is not None and end <= self._context:
                spare = min(spare, self._context - end)
            for i in range(0, len(group), _MAX_SHARED_ROWS):
                some = group[i : i + _MAX_SHARED_ROWS]
                alikes, room = [alike for _, alike in some], slots + spare
                wider = regroup(alikes, length, dropped, room, self.passes.columns)
                for (row, alike), one in zip(some, wider, strict=True):
                    others = (s for s in row.state if s not in alike)
                    row.state = sorted([*others, one], key=lambda s: s.layers)
