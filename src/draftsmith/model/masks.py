"""What each position of a pass may look at: prefix, its own ancestors, inside its layer's window.

Shapes: `B` rows, `Q` positions of the pass (padded), `S` slots of the view. A row's slots are its
cached positions, then those of the pass: `p` pending tokens (a chain), then the draft's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.model.windows import View, Views, Window

EVERYTHING = torch.ones((1, 1, 1, 1), dtype=torch.bool, device="cpu")
"""The mask of a single query that sees all keys; broadcasts, and costs nothing to build."""


@dataclass(slots=True)
class Span:
    """One row of a pass: `cached` positions, then `pending` ≥ 1 tokens, then the draft's nodes."""

    cached: int
    pending: int
    draft: Draft = EMPTY
    width: int = field(init=False)
    """Positions this row spends."""
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


class MaskBuilder:
    """Builds the masks of a pass in the form one model wants them.

    `additive` is a float dtype for masks that are added to the scores (eager), None for bool masks.
    `broadcasts`: the attention takes a (1, 1, 1, 1) mask (ours does; some models check shapes).
    """

    def __init__(
        self,
        windows: dict[str, Window | None],
        device: torch.device,
        additive: torch.dtype | None,
        broadcasts: bool,
    ) -> None:
        self._windows = windows
        self._device = device
        self._additive = additive
        self._everything = self._finish(EVERYTHING) if broadcasts else None

    def __call__(self, spans: Sequence[Span], views: Views) -> Tensor | dict[str, Tensor]:
        """(B, 1, Q, S) for models with one layer type, one such mask per type for the others."""
        end = 1 + max(max(s.positions) for s in spans)
        single = len(spans) == 1 and spans[0].width == 1
        masks: dict[str, Tensor] = {}
        made: dict[tuple[View, Window | None], Tensor] = {}
        for kind, window in self._windows.items():
            if single and self._everything is not None:  # a view begins where its first query looks
                masks[kind] = self._everything
                continue
            key = views[window], window if window is not None and end > window.size else None
            if key not in made:
                made[key] = self._finish(visible(spans, *key))
            masks[kind] = made[key]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _finish(self, mask: Tensor) -> Tensor:
        if self._additive is not None:
            floor = torch.finfo(self._additive).min
            mask = torch.zeros_like(mask, dtype=self._additive).masked_fill_(~mask, floor)
        # Blocking: MPS may read the source of any other copy after it was freed.
        return mask.to(self._device)


def visible(spans: Sequence[Span], view: View, window: Window | None = None) -> Tensor:
    """(B, 1, Q, S) bool: prefix and ancestors inside the window; padding sees itself, so no NaN.

    Written as bytes, one line per query: a torch call per node would cost more than the pass of a
    small model.
    """
    width, slots = max(s.width for s in spans), view.slots
    if len(spans) == 1 and window is None and spans[0].draft.is_chain:
        ones = torch.ones((1, 1, width, slots), dtype=torch.bool, device="cpu")
        return ones.tril_(slots - width)
    lines: list[bytes] = []
    for span, first in zip(spans, view.firsts, strict=True):
        prefix = span.cached - first
        lines += _lines(span, width, prefix, bytes(slots - prefix - width), window)
    flat = torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.bool)
    return flat.view(len(spans), 1, width, slots)


def _lines(span: Span, width: int, cached: int, rest: bytes, window: Window | None) -> list[bytes]:
    """What each of `width` queries of a row sees, one byte per slot; `cached` slots come first."""
    prefix = b"\1" * cached
    lines = []
    for seen, position in zip(_ancestors(span, width), span.positions, strict=True):
        if window is not None:
            first = window.first(position)
            inside = min(max(span.cached - first, 0), cached)
            prefix = bytes(cached - inside) + b"\1" * inside
            if first > span.cached:
                near = (p >= first for p in span.positions)
                seen = bytes(a & b for a, b in zip(seen, near, strict=False)).ljust(width, b"\0")
        lines.append(prefix + seen + rest)
    for own in range(span.width, width):
        lines.append(bytes(cached + own) + b"\1" + bytes(width - own - 1) + rest)
    return lines


def _ancestors(span: Span, width: int) -> list[bytes]:
    """For each position of a span, itself and its ancestors among `width` positions, as bytes."""
    seen = [(b"\1" * (i + 1)).ljust(width, b"\0") for i in range(span.pending)]
    for own, parent in enumerate(span.draft.parents, start=span.pending):
        above = seen[span.pending + parent]  # ROOT is -1: the last pending token
        seen.append(above[:own] + b"\1" + above[own + 1 :])
    return seen
