"""Attention masks of a pass: cached prefix, own ancestors, within the layer's window.

Shapes: `Q` positions of a row in the pass, `S` slots that are read. A row's slots are its cached
positions, then those of the pass: `p` pending tokens (a chain), then the draft's nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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


def visible(span: Span, first: int, window: Window | None = None) -> Tensor:
    """Return the mask (1, 1, Q, S) as bool: prefix and ancestors inside the window.

    Slot 0 has the position `first`. The mask is written as bytes, one string per query, because a
    torch call per node would take longer than the pass of a small model.
    """
    width, cached = span.width, span.cached - first
    if window is None and span.draft.is_chain:
        ones = torch.ones((1, 1, width, cached + width), dtype=torch.bool, device="cpu")
        return ones.tril_(cached)
    prefix = b"\1" * cached
    lines = []
    for seen, position in zip(_ancestors(span), span.positions, strict=True):
        if window is not None:
            lowest = window.first(position)
            inside = min(max(span.cached - lowest, 0), cached)
            prefix = bytes(cached - inside) + b"\1" * inside
            if lowest > span.cached:
                near = (p >= lowest for p in span.positions)
                seen = bytes(a & b for a, b in zip(seen, near, strict=True))
        lines.append(prefix + seen)
    flat = torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.bool)
    return flat.view(1, 1, width, cached + width)


def ancestor_bits(span: Span) -> list[int]:
    """For each position of a span, itself and its ancestors in the span: bit j for position j."""
    bits = [(2 << i) - 1 for i in range(span.pending)]
    for own, parent in enumerate(span.draft.parents, start=span.pending):
        bits.append(bits[span.pending + parent] | 1 << own)  # ROOT is -1: the last pending token
    return bits


def visible_slots(
    bits: Tensor, offsets: Tensor, base: Tensor, slots: int, windows: Iterable[Window | None]
) -> dict[Window | None, Tensor]:
    """Return masks (1, 1, Q, S) by window for a span at `base`, computed on its device.

    `bits` (2, Q) are `ancestor_bits` in words of 64 bits, `offsets` (Q,) the positions after `base`
    (1,). Slot s holds position s up to `base`. Then the Q positions of the span follow, then slots
    that none sees.
    Shapes depend on no value, and the host neither waits nor copies.
    """
    width = len(offsets)
    order = torch.arange(min(width, 64), device=bits.device)
    sees = (bits.T[..., None] >> order & 1).flatten(1)[:, :width].bool()
    slot = torch.arange(slots, device=bits.device)
    after = slot - base
    own = after.clamp(0, width - 1)
    cached = after < 0
    inside = sees.index_select(1, own) & (after < width) | cached
    masks: dict[Window | None, Tensor] = {}
    for window in windows:
        mask = inside
        if window is not None:
            at = (base + offsets)[:, None]
            first = at - at % window.size if window.chunked else at - window.size + 1
            mask = mask & (torch.where(cached, slot, base + offsets.index_select(0, own)) >= first)
        masks[window] = mask[None, None]
    return masks


def _ancestors(span: Span) -> list[bytes]:
    """For each position of a span, itself and its ancestors among its positions, as bytes."""
    seen = [(b"\1" * (i + 1)).ljust(span.width, b"\0") for i in range(span.pending)]
    for own, parent in enumerate(span.draft.parents, start=span.pending):
        above = seen[span.pending + parent]  # ROOT is -1: the last pending token
        seen.append(above[:own] + b"\1" + above[own + 1 :])
    return seen
