"""Attention weights computed later: of one query, for chosen heads and positions.

Shapes: `H` query heads, `K` key heads, `Q` queries, `S` keys, `D` width of a row's span.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad, softmax

Heads = Sequence[tuple[int, int]]
"""(layer, head), both from 0."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Inputs of one layer's attention, sufficient to compute any of its weights later."""

    query: Tensor
    """(1, H, Q, D), after rotary embedding."""
    key: Tensor
    """(1, K, S, D), after rotary embedding; usually a view of the cache."""
    mask: Tensor | None
    """(1, 1, Q, S) bool; None: causal."""
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None
    """(H,)"""
    totals: Tensor | None = None
    """(1, H, Q) logarithms of the sums of exponents, if the kernel returned them."""

    def last(self) -> Seen:
        """Copy the last query alone, to free the others."""
        mask = None if self.mask is None else self.mask[:, :, -1:].clone()
        return replace(self, query=self.query[:, :, -1:].clone(), mask=mask, totals=None)

    def at(self, query: int) -> int:
        """Index of a query; the last one if only that was kept."""
        return min(query, self.query.shape[2] - 1)

    @property
    def kind(self) -> Hashable:
        """Equal for layers with weights that can be computed together."""
        shape = self.query.shape[3], self.scale, self.softcap
        return *shape, id(self.mask), self.key.shape[2], self.query.shape[2], self.key.device

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.query.shape[3] ** -0.5 if self.scaling is None else self.scaling

    def bias(self, query: int, slots: slice | Tensor) -> Tensor | float:
        """(slots,) what the mask adds to the scores of one query: 0 or -inf."""
        if self.mask is None:
            return 0.0
        line = self.mask[0, 0, self.at(query)]
        line = line[slots] if isinstance(slots, slice) else line[slots.to(line.device)]
        return torch.zeros_like(line, dtype=torch.float32).masked_fill_(~line, float("-inf"))


def attention_at(
    seen: Mapping[int, Seen], heads: Heads, query: int, slots: Tensor, end: int, length: int
) -> Tensor:
    """Return (heads, |slots|) float32 weights of one query over the first `end` slots.

    `length` counts the positions up to the last key. A layer that holds fewer keys has dropped the
    first positions, which have no weight. Reads only the keys in `slots` if the sums of exponents
    are known, else all keys.
    """
    if all(seen[layer].totals is not None for layer, _ in heads):
        return (_scores(seen, heads, query, slots, length) - _totals(seen, heads, query)).exp_()
    scores = _scores(seen, heads, query, slice(end), length)
    sinks = [seen[layer].sinks for layer, _ in heads]
    if any(sink is not None for sink in sinks):
        columns = [
            scores.new_tensor([float("-inf")]) if sink is None else sink[head : head + 1].to(scores)
            for sink, (_, head) in zip(sinks, heads, strict=True)
        ]
        scores = torch.cat([scores, torch.stack(columns)], dim=-1)
    return softmax(scores, dim=-1)[:, slots.to(scores.device)]


def _totals(seen: Mapping[int, Seen], heads: Heads, query: int) -> Tensor:
    """(heads, 1) logarithm of the sum of one query's exponents, by head."""
    lines, first, begins = [], 0, {}
    for layer in dict.fromkeys(layer for layer, _ in heads):
        one = seen[layer]
        assert one.totals is not None
        lines.append(one.totals[0, :, one.at(query)])
        begins[layer], first = first, first + len(lines[-1])
    return torch.cat(lines)[[begins[layer] + head for layer, head in heads], None]


def _scores(
    seen: Mapping[int, Seen], heads: Heads, query: int, slots: slice | Tensor, length: int
) -> Tensor:
    """(heads, slots) float32 scores of one query, masked, on the device of the first layer."""
    places: dict[int, list[int]] = {}
    for place, (layer, _) in enumerate(heads):
        places.setdefault(layer, []).append(place)
    alike: dict[Hashable, list[int]] = {}
    for layer in places:  # usually one kind, or two
        alike.setdefault(seen[layer].kind, []).append(layer)
    found = []
    for layers in alike.values():
        one = seen[layers[0]]
        first = length - one.key.shape[2]
        own = _behind(slots, first)
        chosen = [(seen[layer], [heads[place][1] for place in places[layer]]) for layer in layers]
        scores = _products(chosen, query, own).float() * one.scale
        if one.softcap is not None:
            scores = torch.tanh(scores / one.softcap) * one.softcap
        scores = scores + one.bias(query, own)
        if first and isinstance(slots, slice):
            scores = pad(scores, (first, 0), value=float("-inf"))
        elif first and isinstance(slots, Tensor):
            scores = scores.masked_fill((slots < first).to(scores.device), float("-inf"))
        found.append(scores.to(seen[heads[0][0]].key.device))
    together = torch.cat(found)
    order = [place for layers in alike.values() for layer in layers for place in places[layer]]
    scores = torch.empty_like(together)
    scores[order] = together
    return scores


def _behind(slots: slice | Tensor, first: int) -> slice | Tensor:
    """Convert positions to indices of keys that begin at the position `first`."""
    if not first:
        return slots
    return slice(slots.stop - first) if isinstance(slots, slice) else (slots - first).clamp_min(0)


def _products(
    chosen: Sequence[tuple[Seen, list[int]]], query: int, slots: slice | Tensor
) -> Tensor:
    """(heads, slots) products of one query with keys, by heads of several layers of one kind."""
    # Head by head: indexing several heads would copy the cache.
    if isinstance(slots, slice):
        return torch.stack([
            one.key[0, head // one.groups, slots] @ one.query[0, head, one.at(query)]
            for one, heads in chosen
            for head in heads
        ])  # fmt: skip
    keys, queries = [], []
    for one, heads in chosen:
        own = [[head // one.groups] for head in heads]
        keys.append(one.key[0][own, slots.to(one.key.device)])
        queries.append(one.query[0, heads, one.at(query), :, None])
    return torch.bmm(torch.cat(keys), torch.cat(queries))[:, :, 0]
