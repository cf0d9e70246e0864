"""Key/value store with passes of fixed shapes, so that each can be a CUDA graph.

Rows of similar length lie in one buffer, each at a place of its own with a fixed capacity. A pass
covers the first places of a buffer. All of them have the same width in it, one of `WIDTHS`, and
attend to all slots of their place under a mask. The places, the width and the buffer decide all
shapes and addresses, so such a pass is captured once and replayed (`graphs.Graphs`). What the host
knows of a pass is copied to the device before it; positions, masks and slots are computed there.
All other passes (prompts, recorded attention) are packed, over the same buffers.

Shapes: `R` places, `n` layers of one kind, `K` key heads, `C` slots of a place, `D` and `W` widths
of keys and values; `Q` positions of each place in a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.readout import summary, unpacked
from draftsmith.core.target import Needs, RowOutput
from draftsmith.model.attention import Packed
from draftsmith.model.changes import hooks, state
from draftsmith.model.graphs import MOST_PLACES, SPARE_SLOTS
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.masks import Span, ancestor_bits, visible_slots
from draftsmith.model.packed import PackedStore, Slots, by_kind
from draftsmith.model.pass_cache import PassCache
from draftsmith.model.rope import rope_boundary
from draftsmith.model.rows import SequenceRow, record
from draftsmith.model.taps import PassTaps
from draftsmith.model.windows import Window

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 80)
"""Widths of passes with fixed shapes. The last one takes the root and a draft of 64 nodes."""
LEAST_SLOTS = 256
"""Smallest capacity of a buffer; each larger one has twice as many slots, up to the context."""
MOST_POSITIONS = 512
"""Maximum number of positions of a pass of fixed shape, because a graph holds the logits of all."""

ALIGNMENT = 64
"""Capacities are multiples of it, for the kernels of attention."""


def refusal(loaded: LoadedModel) -> str | None:
    """Return why the passes of a model cannot have fixed shapes; None if they may have them."""
    if not loaded.capabilities.packed:
        return "it keeps keys and values in a cache of its own"
    if rope_boundary(loaded.config) is not None:
        return "its rotary angles depend on the length of the pass"
    if loaded.prepacked is not None and loaded.prepacked.replaced:
        return "its linear layers are laid out for this CPU; prepack=False leaves them as they are"
    if {weight.device for weight in loaded.model.parameters()} != {loaded.device}:
        return "its weights are on several devices"
    return None


class Buffer:
    """Keys and values of several rows: `places` rows with `capacity` positions in every layer.

    After these, each place has `SPARE_SLOTS` spare slots, for the padding of a pass.
    """

    def __init__(self, parts: Sequence[Slots], capacity: int, places: int) -> None:
        """Allocate room for all layers of `parts`, which are of one row."""
        self.capacity = capacity
        self.kind = capacity, *kinds(parts)
        self.rows: list[SequenceRow | None] = [None] * places
        """The row at each place."""
        self.slots: list[list[Slots]] = [[] for _ in range(places)]
        """By place, one for each kind of layers."""
        self.layers: dict[int, tuple[Window, Tensor, Tensor]] = {}
        """Layer → window, keys (R, K, C, D) and values (R, K, C, W)."""
        for alike in by_kind(parts).values():
            window, layers = alike[0].window, tuple(i for part in alike for i in part.layers)
            keys, values = (
                like.new_empty(
                    (places, len(layers), like.shape[2], capacity + SPARE_SLOTS, like.shape[4])
                )
                for like in (alike[0].keys, alike[0].values)
            )
            for place, slots in enumerate(self.slots):
                slots.append(Slots(window, layers, keys, values, place))
            for i, layer in enumerate(layers):
                self.layers[layer] = window, keys[:, i], values[:, i]
        self.stale = [True] * places
        """Whether slots after the row at a place may hold numbers that are not finite.

        A masked key or value must be finite: 0 · NaN is NaN.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return sum(slots.keys.nbytes + slots.values.nbytes for slots in self.slots[0])

    @property
    def idle_bytes(self) -> int:
        """Bytes of the places without a row."""
        return self.nbytes * self.rows.count(None) // len(self.rows)

    def put(self, row: SequenceRow, place: int) -> None:
        """Copy a row to a free place, where it continues."""
        for new, alike in zip(self.slots[place], by_kind(row.state).values(), strict=True):
            for name in ("keys", "values"):
                old = [getattr(p, name)[p.place].narrow(2, 0, row.cached) for p in alike]
                torch.cat(old, out=getattr(new, name)[place].narrow(2, 0, row.cached))
        self.rows[place], self.stale[place], row.state = row, True, self.slots[place]

    def clear(self, place: int) -> None:
        """Overwrite the slots after a row with zeros, if they may be stale."""
        row = self.rows[place]
        if self.stale[place] and row is not None:
            for slots in self.slots[place]:
                for tensor in (slots.keys[place], slots.values[place]):
                    tensor[:, :, row.cached :].zero_()
        self.stale[place] = False


def kinds(parts: Sequence[Slots]) -> tuple[Any, ...]:
    """Return a key that is equal for rows that can use the same buffer."""
    return tuple(
        (kind, tuple(layer for part in alike for layer in part.layers))
        for kind, alike in by_kind(parts).items()
    )


class StaticPass(PassCache):
    """Cache of one pass of fixed shape over the first R places of a buffer."""

    def __init__(self, buffer: Buffer, slots: Tensor, masks: Mapping[Window, Tensor]) -> None:
        """`slots` (R, Q): where the pass writes. `masks`: (R, 1, Q, C) by window."""
        super().__init__()
        self._buffer, self._slots, self._masks = buffer, slots, masks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (1, K, R·Q, D) to their slots; see `PackedPass.update`."""
        places, width = self._slots.shape
        window, *buffers = self._buffer.layers[layer_idx]
        keys, values = (buffer[:places] for buffer in buffers)
        for buffer, states in ((keys, key_states), (values, value_states)):
            new = states[0].reshape(len(states[0]), places, width, -1).transpose(0, 1)
            buffer.scatter_(2, self._slots[:, None, :, None].expand(new.shape), new)
        packed = Packed([places * width], [self._masks[window]], [keys], [values])
        self.given[layer_idx] = key_states.packed = packed  # type: ignore[attr-defined]
        return key_states, value_states


class StaticStore(PackedStore):
    """Rows in buffers of fixed capacity; passes over the rows of a buffer have fixed shapes.

    No layer drops positions that its window has left.
    """

    forgets = False

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._model = loaded.model
        self._position_bytes = loaded.row_bytes(1)
        self._graphs = loaded.graphs
        self._hooked = False
        """Whether the model calls hooks of the user's, which a graph would not repeat."""
        self._places: dict[SequenceRow, tuple[Buffer, int]] = {}

    def open(self, row: SequenceRow) -> None:
        self._graphs.check(state(self._model))
        self._hooked = self._graphs.captures and bool(hooks(self._model))
        super().open(row)

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """Run a pass; if memory is short, once more without the buffers that no row uses."""
        try:
            return super().verify(rows, drafts)
        except torch.OutOfMemoryError:
            if not self._graphs.free:
                raise
        self.free_idle()
        return super().verify(rows, drafts)

    def close(self, row: SequenceRow) -> None:
        self._release(row)
        super().close(row)

    def _passes(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> list[RowOutput]:
        """Run a pass of fixed shape for the rows of each buffer, and a packed one for the rest."""
        groups: dict[Buffer, dict[SequenceRow, Span]] = {}
        for row, span in zip(rows, spans, strict=True):
            if self._has_shape(row, span):
                groups.setdefault(self._places[row][0], {})[row] = span
        found: dict[SequenceRow, RowOutput] = {}
        for buffer, group in groups.items():
            found |= self._fixed(buffer, group)
        rest = {row: span for row, span in zip(rows, spans, strict=True) if row not in found}
        for row in rest:
            if row in self._places:
                buffer, place = self._places[row]
                buffer.stale[place] = True
        if rest:
            packed = super()._passes([*rest], [*rest.values()])
            found |= zip(rest, packed, strict=True)
        return [found[row] for row in rows]

    def _has_shape(self, row: SequenceRow, span: Span) -> bool:
        attends = row.taps is not None and bool(row.taps.needs.attention_heads)
        kind = self._graphs.device.type
        # Under autocast, weights are converted by each pass.
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        fits = span.cached > 0 and span.width <= WIDTHS[-1]
        return fits and not (attends or row.is_chunk or autocast or self._hooked)

    def _fixed(
        self, buffer: Buffer, spans: Mapping[SequenceRow, Span]
    ) -> dict[SequenceRow, RowOutput]:
        """Run a pass over rows of one buffer, padded with positions that see only themselves.

        Returns nothing if the padding would make the pass too wide.
        """
        places = {row: self._places[row][1] for row in spans}
        count = 1 << max(places.values()).bit_length()
        width = next(w for w in WIDTHS if w >= max(span.width for span in spans.values()))
        if count * width > MOST_POSITIONS:
            return {}
        firsts = {row: place * width for row, place in places.items()}
        queries = (slice(firsts[row], firsts[row] + span.width) for row, span in spans.items())
        taps = record(spans, self._blocks, queries)
        layers = () if taps is None else taps.layers
        with self._graphs.turn() as given:
            for place, row in enumerate(buffer.rows[:count]):
                if row is None or row not in spans:
                    # Positions that see only themselves, in the spare slots.
                    _write(given[place], width, [0], [0], [1], 0, buffer.capacity)
                else:
                    buffer.clear(place)
                    span, cached = spans[row], row.cached
                    tokens = [*row.pending[: span.pending], *span.draft.tokens]
                    offsets = [position - cached for position in span.positions]
                    bits = ancestor_bits(span)
                    _write(given[place], width, tokens, offsets, bits, cached, cached)
            self._graphs.send(count)
            body = partial(self._compute, buffer, count, width, layers)
            numbers, *outputs = self._graphs.run(buffer, (count, width, layers), body)
            # The next pass overwrites them.
            logits, *states = (output.clone() for output in outputs)
            numbers = numbers.to("cpu", copy=True)
        if taps is not None:
            taps.hidden.update(zip(layers, states, strict=True))
        for place, usable in enumerate(numbers[:, 0].view(count, width).all(-1).tolist()):
            buffer.stale[place] |= not usable  # also by the padding of a row that has no part
        found = {}
        for row, span in spans.items():
            first = firsts[row]
            own = slice(first + span.pending - 1, first + span.width)
            finite, choices, highest = unpacked(numbers[own], span.draft)
            found[row] = RowOutput(logits[own], choices, finite, highest)
        return found

    def _compute(
        self, buffer: Buffer, places: int, width: int, layers: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Return the `summary` of the pass in the inputs, its logits (R·Q, V), and the outputs
        (1, R·Q, D) of these layers.
        """
        inputs = self._graphs.inputs[:places]
        tokens, offsets, bits = inputs[:, 0, :width], inputs[:, 1, :width], inputs[:, 2:4, :width]
        base, start = inputs[:, 4, :1], inputs[:, 4, 1:2]
        windows = {window for window, *_ in buffer.layers.values()}
        slots = buffer.capacity + SPARE_SLOTS
        masks = visible_slots(bits, offsets, base, start, slots, windows)
        order = torch.arange(width, device=base.device)
        cache = StaticPass(buffer, start + order, masks)
        line, positions = tokens.reshape(1, -1), (base + offsets).reshape(1, -1)
        taps = PassTaps([Needs(layers)], self._blocks) if layers else None
        output = self._forward.compute(line, positions, self._mask, cache, places * width, taps)
        logits = output.logits[0, -places * width :]
        states = () if taps is None else (taps.hidden[layer] for layer in layers)
        return summary(logits, logits.argmax(-1)), logits, *states

    def truncate(self, row: SequenceRow, length: int) -> int:
        if row in self._places:
            buffer, place = self._places[row]
            buffer.stale[place] = True
        return super().truncate(row, length)

    def unshare(self, row: SequenceRow) -> None:
        """Copy an idle row out of its buffer, which the next row uses with its graphs."""
        if row in self._places:
            self.copy(row, row, row.cached)
            self._release(row)

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:
        """Return an upper bound of the peak bytes, without idle buffers.

        Before its first pass in a buffer, a row has slots of its own, a tenth too many. Rows of one
        capacity share a buffer, beside the one of half the capacity that they leave. A buffer of
        several rows is copied to one with twice as many places.
        """
        each = max(1, self._position_bytes)
        sizes = Counter(self._capacity(-(-one // each)) for one in rows)
        total = sum(rows) * 11 // 10 + sum(kept)
        for capacity, count in sizes.items():
            places = 1 << (count - 1).bit_length()
            copied = places // 2
            total += each * (places + copied) * (capacity + SPARE_SLOTS)
            if capacity > LEAST_SLOTS:
                total += each * places * (capacity // 2 + SPARE_SLOTS)
        return total

    def idle_bytes(self) -> int:
        # Another thread may be running passes.
        return sum(buffer.idle_bytes for buffer in [*self._graphs.buffers])

    def free_idle(self) -> None:
        self._graphs.free.clear()

    def _reserve(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> None:
        """Make room for a pass. A row gets its place in a buffer after its first pass."""
        for row, span in zip(rows, spans, strict=True):
            if row.cached:
                self._make_room(row, row.cached + span.width)
            else:
                self._release(row)
                row.state = []

    def _make_room(self, row: SequenceRow, end: int) -> None:
        """Move a row to a buffer with `end` positions if it is in none."""
        if row in self._places:
            buffer, place = self._places[row]
            if row.state is not buffer.slots[place]:
                self._release(row)
            elif end <= buffer.capacity:
                return
        kind = self._capacity(end), *kinds(row.state)
        alike = [buffer for buffer in self._buffers() if buffer.kind == kind]
        free = [buffer for buffer in alike if None in buffer.rows]
        if free:
            buffer = free[0]
        elif small := [buffer for buffer in alike if len(buffer.rows) < MOST_PLACES]:
            buffer = self._new(row, kind[0], 2 * len(small[0].rows))
            self._move(small[0], buffer)
        else:
            buffer = self._graphs.free.pop(kind, None) or self._new(row, kind[0], 1)
        place = buffer.rows.index(None)
        buffer.put(row, place)
        # Only now, so that a row is still complete if there was no memory for a larger place.
        self._release(row)
        self._places[row] = buffer, place

    def _move(self, old: Buffer, new: Buffer) -> None:
        """Move all rows of a buffer to another one."""
        for place, row in enumerate(old.rows):
            if row is not None:
                new.put(row, place)
                self._places[row] = new, place

    def _buffers(self) -> list[Buffer]:
        """Return the buffers that have rows."""
        return list(dict.fromkeys(buffer for buffer, _ in self._places.values()))

    def _new(self, row: SequenceRow, capacity: int, places: int) -> Buffer:
        """Allocate a buffer."""
        buffer = Buffer(row.state, capacity, places)
        self._graphs.buffers.add(buffer)
        return buffer

    def _capacity(self, end: int) -> int:
        """Return the capacity of a buffer for rows of `end` positions."""
        slots = max(LEAST_SLOTS, 1 << (end - 1).bit_length())
        if self._context is not None:
            most = -(-self._context // ALIGNMENT) * ALIGNMENT
            slots = slots if end > most else min(slots, most)
        return slots

    def _release(self, row: SequenceRow) -> None:
        """Free the place of a row. Of the buffers of a kind without rows, one is kept."""
        if row not in self._places:
            return
        buffer, place = self._places.pop(row)
        buffer.rows[place] = None
        if any(other is not None for other in buffer.rows):
            return
        free, graphs = self._graphs.free, self._graphs
        other = free.get(buffer.kind)
        if other is None or graphs.count(other) < graphs.count(buffer):
            free[buffer.kind] = buffer


def _write(
    given: Any,
    width: int,
    tokens: Sequence[int],
    offsets: Sequence[int],
    bits: Sequence[int],
    base: int,
    first: int,
) -> None:
    """Write what a pass reads of a place, padded with positions that see only themselves.

    `given` (5, `SPARE_SLOTS`) are the inputs of the place on the host; `first` is the first slot.
    """
    n = len(tokens)
    given[0, :width] = [*tokens, *[tokens[0]] * (width - n)]
    given[1, :n] = offsets
    given[1, n:] = 0
    every = [*bits, *(1 << i for i in range(n, width))]
    words = [[own % _WORD for own in every], [own // _WORD for own in every]]
    given[2:4, :width] = np.array(words, np.uint64).view(np.int64)
    given[4, :2] = base, first


_WORD = 1 << 64
