"""From continuations to a draft: the one place where branches merge.

A source says what may follow, and how much each token of it is worth; which of it is drafted is
decided here, the best first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from draftsmith.core.draft import ROOT, Draft


class Continuation(NamedTuple):
    """What one source expects behind the last token."""

    tokens: Sequence[int]
    source: str
    """The name of the drafter that its nodes count for."""
    weights: float | Sequence[float] | None = None
    """What each token is worth, say the probability that it is reached; a number: all of them
    alike, as often as this was seen, say; None: nothing is known."""
    origins: Sequence[int] | None = None
    """Where in the context each token was copied from; None: nowhere."""


def merge(
    continuations: Iterable[Continuation],
    limit: int | None = None,
    *,
    depth: int | None = None,
    branches: int | None = None,
) -> Draft:
    """The continuations as a tree of at most `limit` nodes down to `depth`, the heaviest first.

    Those that begin alike share nodes. A node is as heavy as all its continuations make it
    together, but no heavier than its parent; its source and origin are the first one's. Of equally
    heavy nodes the earlier continuation's go first: without weights that is branch after branch.

    `branches` bounds the leaves: a continuation that would add one more ends where it leaves the
    tree. One that begins another, or goes on where another ended, adds none.
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
