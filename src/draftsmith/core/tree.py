"""Merging of continuations into a draft tree.

A source gives continuations and a weight for each of their tokens. `merge` decides which tokens are
drafted, in order of weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from draftsmith.core.draft import ROOT, Draft


class Continuation(NamedTuple):
    """A sequence of tokens that a source expects after the last token."""

    tokens: Sequence[int]
    source: str
    """Name of the drafter to which its nodes are attributed."""
    weights: float | Sequence[float] | None = None
    """Weight of each token, such as the probability that it is reached. One number gives all tokens
    the same weight, such as the count of the continuation. None: unknown."""
    origins: Sequence[int] | None = None
    """Position in the context from which each token was copied; None: not copied."""


def merge(
    continuations: Iterable[Continuation],
    limit: int | None = None,
    *,
    depth: int | None = None,
    branches: int | None = None,
) -> Draft:
    """Merge continuations into a tree of at most `limit` nodes and `depth` levels, heaviest first.

    Continuations with equal beginnings share nodes. The weight of a node is the sum over its
    continuations, but at most the weight of its parent. Its source and origin are those of its
    first continuation. Nodes of equal weight keep the order of the continuations, so without
    weights the branches follow each other.

    `branches` is the maximum number of leaves. A continuation that would add one more leaf is cut
    where it leaves the tree. A continuation that extends another, or is its beginning, adds none.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    places: list[int] = []
    weights: list[float] = []
    index: dict[tuple[int, int], int] = {}
    inner: set[int] = set()
    leaves, copied = 0, False
    for ids, source, worth, origins in continuations:
        node = ROOT
        copied |= origins is not None
        for at, token in enumerate(ids[:depth]):
            child = index.get((node, token))
            if child is None:
                if node == ROOT or node in inner:
                    if leaves == branches:
                        break
                    leaves += 1
                inner.add(node)
                child = index[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
                sources.append(source)
                places.append(-1 if origins is None else origins[at])
                weights.append(0.0)
            if worth is not None:
                weights[child] += worth if isinstance(worth, float | int) else worth[at]
            node = child
    tree = Draft(
        tuple(tokens), tuple(parents), tuple(sources), origins=tuple(places) if copied else None
    )
    if not any(weights):
        return tree if limit is None or len(tree) <= limit else tree.select(range(limit))
    for node, parent in enumerate(parents):
        if parent != ROOT:
            weights[node] = min(weights[node], weights[parent])
    heaviest = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    return tree.select(heaviest[:limit])
