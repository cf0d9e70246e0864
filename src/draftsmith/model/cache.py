"""A key/value cache of several sequences that rewinds for free.

Shapes: `R` rows allocated, `K` key heads, `C` slots allocated, `D` width; `B` rows of a pass,
`Q` positions of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.errors import UnsupportedError
from draftsmith.model.windows import View, Views, Window

_FIRST_SLOTS = 256


class KVLayer:
    """Keys and values of one layer, (R, K, C, D); allocated where its first keys are."""

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self, keys: Tensor, values: Tensor, rows: int, slots: int) -> None:
        self.keys = keys.new_zeros((rows, keys.shape[1], slots, keys.shape[3]))
        self.values = values.new_zeros((rows, values.shape[1], slots, values.shape[3]))

    def grow(self, rows: int, slots: int) -> None:
        """Reallocate; zeros, not garbage, because 0 · NaN is NaN even under a mask."""
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros((rows, old.shape[1], slots, old.shape[3]))
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def move(self, row: int, source: Tensor, target: int) -> None:
        """Copy the slots `source` (n,) of a row to the n slots from `target` on."""
        index = source.to(self.keys.device)
        for buffer in (self.keys[row], self.values[row]):
            buffer.narrow(1, target, len(source)).copy_(buffer.index_select(1, index))


class LayerGroup:
    """Layers that look equally far back. Slot s of a row holds position s + `dropped[row]`."""

    def __init__(self, window: Window | None, slots_limit: int | None) -> None:
        self.window = window
        self.layers: list[KVLayer] = []
        self.dropped: dict[int, int] = {}
        """Positions of a row that are gone; none where it says nothing."""
        self.view = View(0, 0, (0,))
        """Of the pass that was announced last."""
        self._limit = slots_limit
        self._rows = 0
        self._slots = 0
        self._first, self._stop = 0, 1
        """The rows of the pass: no range, which a compiler wants to know."""
        self._starts = [0]
        """(B,) the slot where each row's new positions begin."""
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def begin(self, first: int, lengths: Sequence[int], width: int, drop: bool) -> View:
        """As `KVCache.begin`; returns what the pass reads."""
        rows = range(first, first + len(lengths))
        for row, length in zip(rows, lengths, strict=True):
            if not length:
                self.dropped.pop(row, None)
            elif drop and length - self.dropped.get(row, 0) + width > self._slots:
                self._drop(row, length)
        gone = [self.dropped.get(row, 0) for row in rows]
        self._first, self._stop, self._index = rows.start, rows.stop, {}
        self._starts = [length - d for length, d in zip(lengths, gone, strict=True)]
        end = max(self._starts) + width
        self._reserve(rows.stop, end)
        # One slice serves all rows: it begins with the row whose window begins first in its slots.
        start = min(self.sight(n) - d for n, d in zip(lengths, gone, strict=True))
        self.view = View(start, end - start, tuple(start + d for d in gone))
        return self.view

    def write(self, layer: KVLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values (B, K, Q, D) behind each row's; returns the (B, K, S, D) to read."""
        first, stop, view, width = self._first, self._stop, self.view, keys.shape[2]
        if stop == first + 1:
            layer.keys[first].narrow(1, self._starts[0], width).copy_(keys[0])
            layer.values[first].narrow(1, self._starts[0], width).copy_(values[0])
        else:
            index = self._scatter_index(keys.device, width)
            layer.keys[index[0], :, index[1]] = keys.transpose(1, 2)
            layer.values[index[0], :, index[1]] = values.transpose(1, 2)
        read = slice(first, stop), slice(None), slice(view.start, view.start + view.slots)
        return layer.keys[read], layer.values[read]

    def _scatter_index(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Rows (B, 1) and slots (B, Q) that a pass writes; made once per pass and device."""
        if device not in self._index:
            rows = torch.arange(self._first, self._stop, device=device)[:, None]
            starts = torch.tensor(self._starts, device=device)[:, None]
            self._index[device] = rows, starts + torch.arange(width, device=device)
        return self._index[device]

    def sight(self, position: int) -> int:
        """The lowest position that a query at `position` may see."""
        return 0 if self.window is None else self.window.first(position)

    def _drop(self, row: int, length: int) -> None:
        """Forget positions that no query from `length` on sees, if it is half a window of them."""
        if self.window is None:
            return
        sight, gone = self.sight(length), self.dropped.get(row, 0)
        if sight - gone < self.window.size / 2:
            return  # so that no position is moved more than twice
        for layer in self.layers:
            for buffer in (layer.keys[row], layer.values[row]):
                buffer[:, : length - sight] = buffer[:, sight - gone : length - gone].clone()
        self.dropped[row] = sight

    def _reserve(self, rows: int, slots: int) -> None:
        if rows <= self._rows and slots <= self._slots:
            return
        # A quarter to spare: positions and rows are moved seldom, and little lies idle.
        if slots > self._slots:
            self._slots = max(_FIRST_SLOTS, slots + slots // 4)
            # The model's context is a good last size, unless the caller goes beyond it.
            if self._limit is not None and slots <= self._limit:
                self._slots = min(self._slots, self._limit)
        if rows > self._rows:
            self._rows = rows + rows // 4
        for layer in self.layers:
            layer.grow(self._rows, self._slots)

    def add(self, keys: Tensor, values: Tensor) -> KVLayer:
        """A new layer for keys and values of these shapes."""
        self.layers.append(KVLayer(keys, values, self._rows, self._slots))
        return self.layers[-1]


class PassCache(Cache):  # type: ignore[misc]
    """What transformers asks a cache about, of ours: they hold what one pass needs."""

    longest = 0
    """Positions before this pass, of the longest row in it."""

    def __init__(self) -> None:
        super().__init__(layers=[])

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


class KVCache(PassCache):
    """Cache handed to the model: rows [first, first + B) of the buffers, each at its own length.

    `begin` says which rows the next pass is about and how long they are; `update`, called by every
    attention layer, writes the pass after each row's end and returns what the layer may look at.
    Nothing is kept until the caller passes longer lengths to the next `begin`: rewinding is not
    writing a number.
    """

    def __init__(
        self, slots_limit: int | None = None, windows: Sequence[Window | None] = (None,)
    ) -> None:
        """`windows`: one for all layers, or one per layer; None: it sees everything."""
        super().__init__()
        groups = {window: LayerGroup(window, slots_limit) for window in windows}
        self._groups = tuple(groups.values())
        self._by_layer = tuple(groups[window] for window in windows)

    # --- what the runner calls -----------------------------------------------------------------

    def begin(self, first: int, lengths: Sequence[int], width: int, drop: bool = False) -> Views:
        """Announce a pass of `width` positions over rows first … first + len(lengths) - 1.

        `drop`: what lies behind these rows' windows may go for good. Returns what will be read.
        """
        self.longest = max(lengths)
        return {group.window: group.begin(first, lengths, width, drop) for group in self._groups}

    def serves(self, row: int, length: int) -> bool:
        """Whether a row can go on from its first `length` positions."""
        return all(group.dropped.get(row, 0) <= group.sight(length) for group in self._groups)

    def keep(self, row: int, start: int, sources: Sequence[int]) -> None:
        """Gather the positions `sources` of a row to `start` and after; in place costs nothing."""
        moved = 0
        while moved < len(sources) and sources[moved] == start + moved:
            moved += 1
        if moved < len(sources):
            index = torch.tensor(sources[moved:], device="cpu")
            for group in self._groups:
                gone = group.dropped.get(row, 0)
                for layer in group.layers:
                    layer.move(row, index - gone, start + moved - gone)

    def clear(self, row: int, start: int) -> None:
        """Zero a row's positions from `start` on: a mask does not hide what is not finite."""
        for group in self._groups:
            slot = start - group.dropped.get(row, 0)
            for layer in group.layers:
                layer.keys[row, :, slot:] = layer.values[row, :, slot:] = 0

    def replace(self, row: int, by: int, length: int) -> None:
        """Move the first `length` positions of row `by` into `row`."""
        for group in self._groups:
            group.dropped[row] = gone = group.dropped.pop(by, 0)
            for layer in group.layers:
                for buffer in (layer.keys, layer.values):
                    buffer[row, :, : length - gone] = buffer[by, :, : length - gone]

    def contents(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (K, n, D) of a row, one pair per layer: the last n of `length`."""
        found = []
        for index, layer in enumerate(self.layers):
            if layer is not None:
                n = length - self._group(index).dropped.get(row, 0)
                found.append((layer.keys[row, :, :n], layer.values[row, :, :n]))
        return found

    def firsts(self, layer_idx: int, _span: int = 0) -> tuple[int, ...]:
        """(B,) the position of the first key that a layer was last given, by row."""
        return self._group(layer_idx).view.firsts

    def _group(self, layer_idx: int) -> LayerGroup:
        return self._by_layer[layer_idx if len(self._by_layer) > 1 else 0]

    # --- what the model calls --------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, Q, D) after each row's end; views of all that are read."""
        self.layers += [None] * (layer_idx + 1 - len(self.layers))
        group = self._group(layer_idx)
        if self.layers[layer_idx] is None:
            self.layers[layer_idx] = group.add(key_states, value_states)
        return group.write(self.layers[layer_idx], key_states, value_states)
