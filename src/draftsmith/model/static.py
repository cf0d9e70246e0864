"""Key/value store with passes of fixed shapes, so that each can be a CUDA graph.

A row's keys and values lie in a buffer of fixed capacity. A pass over one row is padded to a width
of `WIDTHS` and attends to all slots of the buffer under a mask. The width and the capacity decide
all shapes and addresses, so such a pass is captured once and replayed (`graphs.Graphs`). What the
host knows of a pass is copied to the device before it; positions, masks and slots are computed
there. All other passes (prompts, several rows, recordings) are packed, over the same buffers.

Shapes: `n` layers of one kind, `K` key heads, `C` slots, `D` and `W` widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.reading import summary, unpacked
from draftsmith.core.target import RowOutput
from draftsmith.model.attention import Packed
from draftsmith.model.fingerprint import state
from draftsmith.model.graphs import WIDEST
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.masks import Span, ancestor_bits, visible_slots
from draftsmith.model.packed import PackedStore, Slots
from draftsmith.model.pass_cache import PassCache
from draftsmith.model.rope import rope_boundary
from draftsmith.model.rows import SequenceRow
from draftsmith.model.windows import Window

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 80)
"""Widths of passes with fixed shapes. The last one takes the root and a draft of 64 nodes."""
LEAST_SLOTS = 256
"""Smallest capacity of a buffer; each larger one has twice as many slots."""

ALIGNMENT = 64
"""Capacities are multiples of it, for the kernels of attention."""


def refusal(loaded: LoadedModel) -> str | None:
    """Return why the passes of a model cannot have fixed shapes; None if they may have them."""
    if not loaded.capabilities.packed:
        return "it keeps keys and values in a cache of its own"
    if rope_boundary(loaded.config) is not None:
        return "its rotary angles depend on the length of the pass"
    if {weight.device for weight in loaded.model.parameters()} != {loaded.device}:
        return "its weights are on several devices"
    return None


class Buffer:
    """Keys and values of one row, with `capacity` slots in every layer."""

    def __init__(self, parts: Sequence[Slots], capacity: int) -> None:
        """Allocate room for all layers of `parts`, which are of one row."""
        self.capacity = capacity
        self.kind = capacity, *kinds(parts)
        self.slots = []
        """One for each kind of layers."""
        for alike in by_kind(parts).values():
            layers = tuple(layer for part in alike for layer in part.layers)
            keys, values = (
                like.new_empty((1, len(layers), like.shape[2], capacity, like.shape[4]))
                for like in (alike[0].keys, alike[0].values)
            )
            self.slots.append(Slots(alike[0].window, layers, keys, values))
        self.layers: dict[int, tuple[Window, Tensor, Tensor]] = {
            layer: (slots.window, slots.keys[:, i], slots.values[:, i])
            for slots in self.slots
            for i, layer in enumerate(slots.layers)
        }
        """Layer → window, keys (1, K, C, D) and values (1, K, C, W)."""
        self.stale = True
        """Whether slots after the row may hold numbers that are not finite.

        A masked key or value must be finite: 0 · NaN is NaN.
        """

    def fill(self, parts: Sequence[Slots], length: int) -> None:
        """Copy the first `length` positions of a row."""
        self.stale = True
        for new, alike in zip(self.slots, by_kind(parts).values(), strict=True):
            for name in ("keys", "values"):
                old = [getattr(part, name)[part.place].narrow(2, 0, length) for part in alike]
                torch.cat(old, out=getattr(new, name)[0].narrow(2, 0, length))

    def clear(self, length: int) -> None:
        """Overwrite the slots after the first `length` with zeros, if they may be stale."""
        if self.stale:
            for slots in self.slots:
                for tensor in (slots.keys, slots.values):
                    tensor.narrow(3, length, self.capacity - length).zero_()
        self.stale = False


def by_kind(parts: Sequence[Slots]) -> dict[Any, list[Slots]]:
    """Group the slots of a row by what a pair of tensors can hold."""
    found: dict[Any, list[Slots]] = {}
    for part in parts:
        found.setdefault(part.kind, []).append(part)
    return found


def kinds(parts: Sequence[Slots]) -> tuple[Any, ...]:
    """Return a key that is equal for rows that can use the same buffer."""
    return tuple(
        (kind, tuple(layer for part in alike for layer in part.layers))
        for kind, alike in by_kind(parts).items()
    )


class StaticPass(PassCache):
    """Cache of one pass of fixed shape over the buffer of one row."""

    def __init__(self, buffer: Buffer, slots: Tensor, masks: Mapping[Window, Tensor]) -> None:
        """`slots` (Q,): where the pass writes. `masks`: (1, 1, Q, C) by window."""
        super().__init__()
        self._buffer, self._slots, self._masks = buffer, slots, masks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (1, K, Q, D) to their slots; see `PackedPass.update`."""
        window, keys, values = self._buffer.layers[layer_idx]
        keys.index_copy_(2, self._slots, key_states)
        values.index_copy_(2, self._slots, value_states)
        packed = Packed([len(self._slots)], [self._masks[window]], [keys], [values])
        self.given[layer_idx] = key_states.packed = packed  # type: ignore[attr-defined]
        return key_states, value_states


class StaticStore(PackedStore):
    """Rows with buffers of fixed capacity; passes over one row have fixed shapes.

    No layer drops positions that its window has left.
    """

    def __init__(self, loaded: LoadedModel, *options: Any) -> None:
        super().__init__(*options)
        self._model = loaded.model
        self._graphs = loaded.graphs
        self._buffers: dict[SequenceRow, Buffer] = {}

    def open(self, row: SequenceRow) -> None:
        self._graphs.check(state(self._model))
        super().open(row)

    def close(self, row: SequenceRow) -> None:
        self._release(row)
        super().close(row)

    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """Run a pass of fixed shape where it can have one, else a packed one."""
        if len(rows) == 1:
            span = Span(rows[0].cached, rows[0].taken, drafts[0])
            if self._has_shape(rows[0], span):
                return [self._fixed(rows[0], span)]
        return super().verify(rows, drafts)

    def _has_shape(self, row: SequenceRow, span: Span) -> bool:
        recorded, chunk = row.taps is not None, row.is_chunk
        kind = self._graphs.device.type
        # Under autocast, weights are converted by each pass.
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        fits = span.cached > 0 and span.width <= WIDTHS[-1]
        return fits and not (recorded or chunk or autocast)

    def _fixed(self, row: SequenceRow, span: Span) -> RowOutput:
        """Run a pass over one row, padded with positions that see only themselves."""
        width = next(width for width in WIDTHS if width >= span.width)
        with self._graphs.turn() as given:
            buffer = self._buffer(row, span.cached + width)
            buffer.clear(row.cached)
            _write(given[:, :width], row, span)
            self._graphs.send()
            body = partial(self._compute, buffer, width)
            logits, numbers = self._graphs.run(buffer, width, body)
            own = slice(span.pending - 1, span.width)
            logits = logits[own].clone()  # the next pass overwrites them
            numbers = numbers.to("cpu", copy=True)
        buffer.stale = not bool(numbers[:, 0].all())
        finite, choices, highest = unpacked(numbers[own], span.draft)
        return RowOutput(logits, choices, finite, highest)

    def _compute(self, buffer: Buffer, width: int) -> tuple[Tensor, Tensor]:
        """Return logits (Q, V) of the pass in the inputs, and their `summary`."""
        inputs = self._graphs.inputs[:, :width]
        tokens, offsets, bits, base = inputs[0], inputs[1], inputs[2:4], inputs[4, :1]
        windows = {window for window, *_ in buffer.layers.values()}
        masks = visible_slots(bits, offsets, base, buffer.capacity, windows)
        order = torch.arange(width, device=base.device)
        cache = StaticPass(buffer, base + order, masks)
        positions = base + offsets
        output = self._forward.compute(tokens[None], positions[None], self._mask, cache, width)
        logits = output.logits[0, -width:]
        return logits, summary(logits, logits)

    def truncate(self, row: SequenceRow, length: int) -> int:
        if row in self._buffers:
            self._buffers[row].stale = True
        return super().truncate(row, length)

    def mark(self, row: SequenceRow) -> None:
        """Do nothing, because no layer drops positions."""

    def part(self, row: SequenceRow) -> None:
        """Copy an idle row out of its buffer, which the next row uses with its graphs."""
        if row in self._buffers:
            self.copy(row, row, row.cached)
            self._release(row)

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:
        """Return an upper bound of the peak bytes of rows with at least `LEAST_SLOTS` positions.

        A buffer is up to twice as large as its row. While a row grows, there are also the buffer
        before, and free ones, each of half the size of the next.
        """
        return 4 * sum(rows) + sum(kept)

    def _reserve(self, rows: Sequence[SequenceRow], spans: Sequence[Span]) -> None:
        """Make room for a packed pass. A row gets its buffer after its first pass."""
        for row, span in zip(rows, spans, strict=True):
            if row.cached:
                self._buffer(row, row.cached + span.width).stale = True
            else:
                self._release(row)
                row.state = []

    def _buffer(self, row: SequenceRow, end: int) -> Buffer:
        """Return the buffer of a row, with slots for `end` positions."""
        buffer = self._buffers.get(row)
        if buffer is not None and row.state is buffer.slots and end <= buffer.capacity:
            return buffer
        capacity = self._capacity(end)
        free = self._graphs.free
        new = free.pop((capacity, *kinds(row.state)), None) or Buffer(row.state, capacity)
        new.fill(row.state, row.cached)
        self._release(row)
        self._buffers[row], row.state = new, new.slots
        return new

    def _capacity(self, end: int) -> int:
        """Return the number of slots of a buffer for `end` positions."""
        slots = max(LEAST_SLOTS, 1 << (end - 1).bit_length())
        if self._context is not None:
            most = -(-self._context // ALIGNMENT) * ALIGNMENT + WIDEST  # the last pass is padded
            slots = slots if end > most else min(slots, most)
        return slots

    def _release(self, row: SequenceRow) -> None:
        """Give the buffer of a row back, for the next row. Of a kind, one is kept."""
        buffer = self._buffers.pop(row, None)
        if buffer is None:
            return
        free, graphs = self._graphs.free, self._graphs
        other = free.get(buffer.kind)
        if other is None or graphs.count(other) < graphs.count(buffer):
            free[buffer.kind] = buffer


def _write(given: Any, row: SequenceRow, span: Span) -> None:
    """Write what a pass reads: tokens, offsets and ancestors (Q,), and the base.

    `given` (5, Q) are the inputs on the host.
    """
    width, n = given.shape[1], span.width
    tokens = [*row.pending[: span.pending], *span.draft.tokens]
    given[0] = [*tokens, *tokens[:1] * (width - n)]
    given[1, :n] = [position - span.cached for position in span.positions]
    given[1, n:] = 0
    bits = [*ancestor_bits(span), *(1 << i for i in range(n, width))]
    words = [[own % _WORD for own in bits], [own // _WORD for own in bits]]
    given[2:4] = np.array(words, np.uint64).view(np.int64)
    given[4, 0] = span.cached


_WORD = 1 << 64
