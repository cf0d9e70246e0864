"""What each position of a pass may look at: prefix, its own ancestors, inside its layer's window.

Shapes: `B` rows, `Q` positions of the pass (padded), `S` key slots. A row's slots are its cached
positions, then the positions of the pass: `p` pending tokens (a chain), then the draft's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft

EVERYTHING = torch.ones((1, 1, 1, 1), dtype=torch.bool)
"""The mask of a single query that sees all keys; broadcasts, and costs nothing to build."""


@dataclass(frozen=True, slots=True)
class Window:
    """How a layer type limits the view: `size` positions back, or its own chunk of `size`."""

    size: int
    chunked: bool

    def first(self, position: int) -> int:
        """The lowest position that the query at `position` may see."""
        if self.chunked:
            return position - position % self.size
        return max(0, position - self.size + 1)


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


def layer_windows(config: Any) -> dict[str, Window | None]:
    """Layer type → window (None: the whole prefix), as `config` describes its attention layers."""
    size, chunk = (
        getattr(config, "sliding_window", None),
        getattr(config, "attention_chunk_size", None),
    )
    known: dict[str, Window | None] = {"full_attention": None}
    if size is not None:
        known["sliding_attention"] = Window(size, chunked=False)
    if chunk is not None:
        known["chunked_attention"] = Window(chunk, chunked=True)
    types = getattr(config, "layer_types", None)
    if types:
        return {kind: known[kind] for kind in known if kind in types} or {"full_attention": None}
    if getattr(config, "use_sliding_window", True) and size is not None:
        return {"sliding_attention": known["sliding_attention"]}
    if chunk is not None:
        return {"chunked_attention": known["chunked_attention"]}
    return {"full_attention": None}


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

    def __call__(self, spans: Sequence[Span]) -> Tensor | dict[str, Tensor]:
        """(B, 1, Q, S) for models with one layer type, one such mask per type for the others."""
        end = 1 + max(max(s.positions) for s in spans)
        single = len(spans) == 1 and spans[0].width == 1
        masks: dict[str, Tensor] = {}
        whole: Tensor | None = None
        for kind, window in self._windows.items():
            if window is not None and end > window.size:
                masks[kind] = self._finish(visible(spans, window))
            elif single and self._everything is not None:
                masks[kind] = self._everything
            else:
                whole = self._finish(visible(spans)) if whole is None else whole
                masks[kind] = whole
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _finish(self, mask: Tensor) -> Tensor:
        if self._additive is not None:
            floor = torch.finfo(self._additive).min
            mask = torch.zeros(mask.shape, dtype=self._additive).masked_fill_(~mask, floor)
        return mask.to(self._device, non_blocking=True)


def visible(spans: Sequence[Span], window: Window | None = None) -> Tensor:
    """(B, 1, Q, S) bool: prefix and ancestors inside the window; padding sees itself, so no NaN.

    Written as bytes, one line per query: a torch call per node would cost more than the pass of a
    small model.
    """
    width = max(s.width for s in spans)
    slots = max(s.cached for s in spans) + width
    if len(spans) == 1 and window is None and spans[0].draft.is_chain:
        return torch.ones((1, 1, width, slots), dtype=torch.bool).tril_(slots - width)
    lines: list[bytes] = []
    for span in spans:
        lines += _lines(span, width, bytes(slots - span.cached - width), window)
    flat = torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.bool)
    return flat.view(len(spans), 1, width, slots)


def _lines(span: Span, width: int, rest: bytes, window: Window | None) -> list[bytes]:
    """What each of `width` queries of a row sees, one byte per slot."""
    prefix = b"\1" * span.cached
    lines = []
    for seen, position in zip(_ancestors(span, width), span.positions, strict=True):
        if window is not None:
            first = window.first(position)
            out = min(first, span.cached)
            prefix = bytes(out) + b"\1" * (span.cached - out)
            if first > span.cached:
                inside = (p >= first for p in span.positions)
                seen = bytes(a & b for a, b in zip(seen, inside, strict=False)).ljust(width, b"\0")
        lines.append(prefix + seen + rest)
    for own in range(span.width, width):
        lines.append(bytes(span.cached + own) + b"\1" + bytes(width - own - 1) + rest)
    return lines


def _ancestors(span: Span, width: int) -> list[bytes]:
    """For each position of a span, itself and its ancestors among `width` positions, as bytes."""
    seen = [(b"\1" * (i + 1)).ljust(width, b"\0") for i in range(span.pending)]
    for own, parent in enumerate(span.draft.parents, start=span.pending):
        above = seen[span.pending + parent]  # ROOT is -1: the last pending token
        seen.append(above[:own] + b"\1" + above[own + 1 :])
    return seen
