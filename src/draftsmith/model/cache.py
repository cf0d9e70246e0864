"""A key/value cache of several sequences that rewinds for free.

Shapes: `R` rows allocated, `K` key heads, `C` slots allocated, `D` width; `B` rows of a pass,
`Q` positions of a pass. Every layer keeps all positions: sliding windows are the masks' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.errors import UnsupportedError

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


class KVCache(Cache):  # type: ignore[misc]
    """Cache handed to the model: rows [first, first + B) of the buffers, each at its own length.

    `begin` says which rows the next pass is about and how long they are; `update`, called by every
    attention layer, writes the pass after each row's end and returns views. Nothing is kept until
    the caller passes longer lengths to the next `begin`: rewinding is not writing a number.
    """

    def __init__(self, slots_limit: int | None = None) -> None:
        super().__init__(layers=[])
        self._limit = slots_limit
        self._rows = 0
        self._slots = 0
        self._first = 0
        self._lengths: tuple[int, ...] = (0,)
        self._index: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    # --- what the runner calls -----------------------------------------------------------------

    def begin(self, first: int, lengths: Sequence[int], width: int) -> None:
        """Announce a pass of `width` positions over rows first … first + len(lengths) - 1."""
        self._first, self._lengths = first, tuple(lengths)
        self._index.clear()
        self._reserve(first + len(lengths), max(lengths) + width)

    def keep(self, row: int, start: int, sources: Sequence[int]) -> None:
        """Gather the slots `sources` of a row to `start` and after; those in place cost nothing."""
        moved = 0
        while moved < len(sources) and sources[moved] == start + moved:
            moved += 1
        if moved < len(sources):
            index = torch.tensor(sources[moved:])
            for layer in self._present():
                layer.move(row, index, start + moved)

    def clear(self, row: int, start: int) -> None:
        """Zero the slots of a row from `start` on: a mask does not hide what is not finite."""
        for layer in self._present():
            layer.keys[row, :, start:] = layer.values[row, :, start:] = 0

    def replace(self, row: int, by: int, length: int) -> None:
        """Move the first `length` positions of row `by` into `row`."""
        for layer in self._present():
            for buffer in (layer.keys, layer.values):
                buffer[row, :, :length] = buffer[by, :, :length]

    def contents(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (K, length, D) of a row, one pair per layer that has any."""
        return [
            (layer.keys[row, :, :length], layer.values[row, :, :length])
            for layer in self._present()
        ]

    def _present(self) -> list[KVLayer]:
        return [layer for layer in self.layers if layer is not None]

    def _reserve(self, rows: int, slots: int) -> None:
        if rows <= self._rows and slots <= self._slots:
            return
        if slots > self._slots:
            doubled = max(_FIRST_SLOTS, 1 << (slots - 1).bit_length())
            # The model's context is a good last size, unless the caller goes beyond it.
            beyond = self._limit is None or slots > self._limit
            slots = doubled if beyond else max(slots, min(doubled, self._limit or doubled))
        self._slots = max(slots, self._slots)
        if rows > self._rows:
            self._rows = 1 << (rows - 1).bit_length()
        for layer in self._present():
            layer.grow(self._rows, self._slots)

    # --- what the model calls --------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, K, Q, D) after each row's end; views over all its positions."""
        layers = self.layers
        while len(layers) <= layer_idx:
            layers.append(None)
        layer = layers[layer_idx]
        if layer is None:
            layer = layers[layer_idx] = KVLayer(key_states, value_states, self._rows, self._slots)
        width = key_states.shape[2]
        if len(self._lengths) == 1:
            start, row = self._lengths[0], self._first
            keys, values = layer.keys[row : row + 1], layer.values[row : row + 1]
            keys.narrow(2, start, width).copy_(key_states)
            values.narrow(2, start, width).copy_(value_states)
            return keys.narrow(2, 0, start + width), values.narrow(2, 0, start + width)
        rows, slots = self._scatter_index(key_states.device, width)
        layer.keys[rows, :, slots] = key_states.transpose(1, 2)
        layer.values[rows, :, slots] = value_states.transpose(1, 2)
        last, end = self._first + len(self._lengths), max(self._lengths) + width
        return layer.keys[self._first : last, :, :end], layer.values[self._first : last, :, :end]

    def _scatter_index(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Rows (B, 1) and slots (B, Q) that a pass writes; made once per pass and device."""
        found = self._index.get((device, width))
        if found is None:
            lengths = torch.tensor(self._lengths)[:, None]
            rows = torch.arange(len(self._lengths))[:, None] + self._first
            slots = lengths + torch.arange(width)
            found = self._index[device, width] = rows.to(device), slots.to(device)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this pass, of the longest row in it."""
        del layer_idx
        return max(self._lengths)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Same as `get_seq_length` (asked by transformers 5)."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Keys in this pass and their offset; `query`: Q, or in transformers 4 its positions."""
        del layer_idx
        width = query if isinstance(query, int) else query.shape[0]
        return max(self._lengths) + width, 0

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
        raise UnsupportedError("a KVCache is rewound by its runner, not by crop()")
