"""Attention masks of a pass: cached prefix, own ancestors, within the layer's window.

Shapes: `Q` positions of a row in the pass, `S` slots that are read. A row's slots are its cached
positions, then those of the pass: `p` pending tokens (a chain), then the draft's nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.model.windows import Window

EVERYTHING = torch.ones((1, 1, 1, 1), dtype=torch.bool, device="cpu")
"""Mask that a packed pass gives to the model. Attention uses the masks of its spans instead."""


@dataclass(slots=True)
class Span:
    """One row of a pass: `cached` positions, then `pending` ≥ 1 tokens, then the draft's nodes."""

    cached: int
    pending: int
    draft: Draft = EMPTY
    width: int = field(init=False)
    """Positions of this row in the pass."""
    positions: list[int] = field(init=False)
    """(width,) position ids."""

    def __post_init__(self) -> None:
        root = self.cached + self.pending - 1
        self.width = self.pending + len(self.draft.tokens)
        if self.draft.is_chain:
            self.positions = list(range(self.cached, self.cached + self.width))
        else:
            depths = self.draft.node_depths()
            self.positions = [*range(self.cached, root + 1), *(root + d for d in depths)]


def visible(span: Span, first: int, window: Window = None) -> Tensor:
    """Return the mask (1, 1, Q, S) as bool: prefix and ancestors inside the window.

    Slot 0 has the position `first`. Numpy makes the mask, because a torch call per node would take
    longer than the pass of a small model.
    """
    width, cached = span.width, span.cached - first
    size = -(-width // 8)
    words = b"".join(bits.to_bytes(size, "little") for bits in ancestor_bits(span))
    own = np.frombuffer(words, np.uint8).reshape(width, size)
    mask = torch.ones((1, 1, width, cached + width), dtype=torch.bool, device="cpu")
    seen = mask.numpy()[0, 0]  # the same memory
    seen[:, cached:] = np.unpackbits(own, axis=1, count=width, bitorder="little")
    if window is not None:
        positions = np.array(span.positions)
        keys = np.concatenate([np.arange(first, span.cached), positions])
        seen &= keys > positions[:, None] - window
    return mask


def ancestor_bits(span: Span) -> list[int]:
    """For each position of a span, itself and its ancestors in the span: bit j for position j."""
    bits = [(2 << i) - 1 for i in range(span.pending)]
    for own, parent in enumerate(span.draft.parents, start=span.pending):
        bits.append(bits[span.pending + parent] | 1 << own)  # ROOT is -1: the last pending token
    return bits


def visible_slots(
    bits: Tensor,
    offsets: Tensor,
    base: Tensor,
    start: Tensor,
    slots: int,
    windows: Iterable[Window],
) -> dict[Window, Tensor]:
    """Return masks (R, 1, Q, S) by window for R spans of equal width, computed on their device.

    `bits` (R, 2, Q) are `ancestor_bits` in words of 64 bits, `offsets` (R, Q) the positions after
    `base` (R, 1). Slot s holds position s up to `base`. The Q positions of the span are at the
    slot `start` (R, 1) and the next ones. No other slot is seen.
    Shapes depend on no value, and the host neither waits nor copies.
    """
    width = offsets.shape[1]
    order = torch.arange(min(width, 64), device=bits.device)
    sees = (bits.transpose(1, 2)[..., None] >> order & 1).flatten(2)[..., :width].bool()
    slot = torch.arange(slots, device=bits.device)
    own, cached = slot - start, slot < base
    place = own.clamp(0, width - 1)
    inside = sees.gather(2, place[:, None].expand(-1, width, -1)) & (own == place)[:, None]
    inside = inside | cached[:, None]
    masks: dict[Window, Tensor] = {}
    for window in windows:
        mask = inside
        if window is not None:
            first = (base + offsets)[..., None] - window + 1
            position = torch.where(cached, slot, base + offsets.gather(1, place))
            mask = mask & (position[:, None] >= first)
        masks[window] = mask[:, None]
    return masks
