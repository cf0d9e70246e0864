"""Attention weights after the fact: of one query, by chosen heads, at chosen positions.

Shapes: `B` rows, `H` query heads, `K` key heads, `Q` queries, `S` keys, `D` width of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softmax

Heads = Sequence[tuple[int, int]]
"""(layer, head), both from 0."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer's attention was computed from: enough for any of its weights, later."""

    query: Tensor
    """(B, H, Q, D), after rotary embedding."""
    key: Tensor
    """(B, K, S, D), likewise; usually a view of the cache."""
    mask: Tensor | None
    """(B or 1, 1, Q, S) bool, or float to be added; None: everything before a query."""
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None
    """(H,)"""
    totals: Tensor | None = None
    """(B, H, Q) logarithms of the sums of each query's exponents, where the kernel told them."""

    def last(self) -> Seen:
        """The last query alone, without the memory of the others."""
        mask = None if self.mask is None else self.mask[:, :, -1:].clone()
        return replace(self, query=self.query[:, :, -1:].clone(), mask=mask, totals=None)

    def at(self, query: int) -> int:
        """Where that query is; the only one there is is the last."""
        return min(query, self.query.shape[2] - 1)

    def scores(self, row: int, query: int, heads: Sequence[int], slots: slice | Tensor) -> Tensor:
        """(heads, slots) float32 scores of one query, before the mask."""
        groups = self.query.shape[1] // self.key.shape[1]
        keys, own = self.key[row].unbind(), self.query[row, :, self.at(query)].unbind()
        if isinstance(slots, slice):  # head by head, because taking several would copy the cache
            found = [keys[head // groups][slots] @ own[head] for head in heads]
        else:
            slots = slots.to(self.key.device)
            found = [keys[head // groups].index_select(0, slots) @ own[head] for head in heads]
        scale = self.query.shape[3] ** -0.5 if self.scaling is None else self.scaling
        scores = torch.stack(found).float() * scale
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def bias(self, row: int, query: int, slots: slice | Tensor) -> Tensor | float:
        """(slots,) what the mask adds to the scores of one query: 0, or -inf where it is blind."""
        if self.mask is None:
            return 0.0
        line = self.mask[min(row, len(self.mask) - 1), 0, self.at(query)]
        line = line[slots] if isinstance(slots, slice) else line[slots.to(line.device)]
        if line.is_floating_point():
            return line.float()
        return torch.zeros_like(line, dtype=torch.float32).masked_fill_(~line, float("-inf"))


def attention_rows(
    seen: Mapping[int, Seen], heads: Heads, row: int, query: int, slots: slice | Tensor
) -> Tensor:
    """(heads, slots) float32 weights of one query, which may look at no slot but `slots`."""
    scores = _scores(seen, heads, row, query, slots)
    sinks = [seen[layer].sinks for layer, _ in heads]
    if all(sink is None for sink in sinks):
        return softmax(scores, dim=-1)
    columns = [
        scores.new_tensor([float("-inf")]) if sink is None else sink[head : head + 1].to(scores)
        for sink, (_, head) in zip(sinks, heads, strict=True)
    ]
    return softmax(torch.cat([scores, torch.stack(columns)], dim=-1), dim=-1)[:, :-1]


def attention_at(
    seen: Mapping[int, Seen], heads: Heads, row: int, query: int, slots: Tensor, end: int
) -> Tensor:
    """(heads, |slots|) float32 weights of one query among the first `end` slots.

    Only the keys in `slots` are read where the sums of exponents are known; else all of them.
    """
    totals = [seen[layer].totals for layer, _ in heads]
    known = [
        total[row, head, seen[layer].at(query)]
        for total, (layer, head) in zip(totals, heads, strict=True)
        if total is not None
    ]
    if len(known) < len(heads):
        found = attention_rows(seen, heads, row, query, slice(end))
        return found[:, slots.to(found.device)]
    return (_scores(seen, heads, row, query, slots) - torch.stack(known)[:, None]).exp_()


def _scores(
    seen: Mapping[int, Seen], heads: Heads, row: int, query: int, slots: slice | Tensor
) -> Tensor:
    """(heads, slots) float32 scores of one query, masked, on the device of the first layer."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    biases: dict[int, Tensor | float] = {}
    found: dict[tuple[int, int], Tensor] = {}
    for layer, own in by_layer.items():
        one = seen[layer]
        if id(one.mask) not in biases:  # most layers share theirs
            biases[id(one.mask)] = one.bias(row, query, slots)
        scores = one.scores(row, query, own, slots) + biases[id(one.mask)]
        found.update({(layer, head): line for head, line in zip(own, scores, strict=True)})
    lines = [found[pair] for pair in heads]
    return torch.stack([line.to(lines[0].device) for line in lines])
