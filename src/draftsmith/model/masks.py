"""What each position of a pass may look at: prefix, its own ancestors, inside its layer's window.

Shapes: `B` rows, `Q` positions of the pass (padded), `S` key slots. A row's slots are its cached
positions, then the positions of the pass: `p` pending tokens (a chain), then the draft's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, ROOT, Draft

EVERYTHING = torch.ones((1, 1, 1, 1), dtype=torch.bool)
"""The mask of a single query that sees all keys; broadcasts, and costs nothing to build."""


@dataclass(frozen=True, slots=True)
class Window:
    """How a layer type limits the view: `size` positions back, or its own chunk of `size`."""

    size: int
    chunked: bool

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether positions `query` may see positions `key` (broadcast)."""
        if self.chunked:
            return query // self.size == key // self.size
        return query - key < self.size


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
        base: Tensor | None = None
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            limited = window is not None and end > window.size
            if single and not limited and self._everything is not None:
                masks[kind] = self._everything
                continue
            if base is None:
                base = visible(spans)
            mask = base & _inside(window, spans) if limited and window is not None else base
            masks[kind] = self._finish(mask)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _finish(self, mask: Tensor) -> Tensor:
        if self._additive is not None:
            floor = torch.finfo(self._additive).min
            mask = torch.zeros(mask.shape, dtype=self._additive).masked_fill_(~mask, floor)
        return mask.to(self._device, non_blocking=True)


def visible(spans: Sequence[Span]) -> Tensor:
    """(B, 1, Q, S) bool: the prefix and the ancestors; padding sees itself alone, so is no NaN."""
    width = max(s.width for s in spans)
    slots = max(s.cached for s in spans) + width
    if len(spans) == 1 and spans[0].draft.is_chain:
        return torch.ones((1, 1, width, slots), dtype=torch.bool).tril_(slots - width)
    mask = torch.zeros((len(spans), 1, width, slots), dtype=torch.bool)
    for row, span in enumerate(spans):
        block = mask[row, 0, :, span.cached : span.cached + width]
        block.fill_diagonal_(True)
        mask[row, 0, : span.width, : span.cached] = True
        if span.draft.is_chain:
            block[: span.width, : span.width] = True
            block[: span.width, : span.width].tril_()
        else:
            nodes = slice(span.pending, span.width)
            block[: span.pending, : span.pending] = True
            block[: span.pending, : span.pending].tril_()
            block[nodes, : span.pending] = True
            block[nodes, nodes] = ancestors(span.draft)
    return mask


def ancestors(draft: Draft) -> Tensor:
    """(n+m, n+m) bool, `Draft.ancestor_mask` without a torch call per node."""
    n = len(draft)
    seen = bytearray(n * n)
    for node, parent in enumerate(draft.parents):
        if parent != ROOT:
            seen[node * n : (node + 1) * n] = seen[parent * n : (parent + 1) * n]
        seen[node * n + node] = 1
    return torch.frombuffer(seen, dtype=torch.bool).view(n, n)


def _inside(window: Window, spans: Sequence[Span]) -> Tensor:
    """(B, 1, Q, S) bool: the pairs of a pass that `window` allows, measured in positions."""
    width = max(s.width for s in spans)
    slots = max(s.cached for s in spans) + width
    rows = []
    for span in spans:
        keys = torch.arange(slots)
        # Padding gets the position of its slot: it must stay visible to itself.
        keys[span.cached : span.cached + span.width] = torch.tensor(span.positions)
        queries = keys[span.cached : span.cached + width]
        rows.append(window.allows(queries[:, None], keys[None, :]))
    return torch.stack(rows)[:, None]


MaskFunction = Callable[[Sequence[Span]], "Tensor | dict[str, Tensor] | None"]
"""Spans of a pass → what to hand the model as `attention_mask`."""
