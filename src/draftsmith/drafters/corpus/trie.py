"""A trie of continuations with counts, which decide the continuations to draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.core.draft import ROOT, Draft
from draftsmith.drafters.corpus.files import SEPARATOR


@dataclass(frozen=True, slots=True)
class Trie:
    """Continuations merged by their prefixes; nodes are numbered by depth.

    `n` nodes, `R` continuations, `D` maximum length.
    """

    tokens: NDArray[np.int64]
    """(n,) ids."""
    parents: NDArray[np.int64]
    """(n,) index of the parent node, ROOT for the first level."""
    weights: NDArray[np.int64]
    """(n,) number of continuations through each node; at most its parent's."""
    paths: NDArray[np.int64]
    """(R, D) node of each continuation at each depth; n after its end."""

    @classmethod
    def of(cls, rows: NDArray[np.int64]) -> Trie:
        """Merge continuations (R, D) in sorted order; each ends at the first separator."""
        alive = ~np.logical_or.accumulate(rows == SEPARATOR, axis=1)
        # In sorted order a node's continuations are adjacent: it begins where a prefix changes.
        begins = np.ones_like(alive)
        begins[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
        begins &= alive
        by_depth = begins.T
        numbers = (np.cumsum(by_depth) - 1).reshape(by_depth.shape).T
        n = int(np.count_nonzero(begins))
        paths = np.where(alive, numbers, n)
        above = np.concatenate([np.full((len(rows), 1), ROOT), paths[:, :-1]], axis=1)
        weights = np.bincount(paths.ravel(), minlength=n + 1)[:n]
        return cls(rows.T[by_depth], above.T[by_depth], weights, paths)

    def draft(self, most: int, source: str) -> Draft:
        """Return the `most` heaviest nodes, the heaviest first; of equal ones the shallower.

        The weight is the number of continuations that reach a node, so these nodes are most likely
        to be accepted. Parents precede their children, because no child is heavier.
        """
        heaviest = np.argsort(-self.weights, kind="stable")[:most]
        renumber = {ROOT: ROOT, **{int(old): new for new, old in enumerate(heaviest)}}
        tokens = tuple(self.tokens[heaviest].tolist())
        parents = tuple(renumber[p] for p in self.parents[heaviest].tolist())
        return Draft(tokens, parents, (source,) * len(tokens))

    def branches(self, most: int) -> list[list[int]]:
        """Return the tokens of up to `most` continuations, best first (see `best`)."""
        return [self.tokens[path].tolist() for path in self.best(most)]

    def best(self, most: int) -> list[NDArray[np.int64]]:
        """Return the nodes of up to `most` continuations, each with the most additional weight.

        The first one has the most expected accepted tokens; each further one adds the most to
        those before it. None is a prefix of another.
        """
        left = np.append(self.weights, 0)
        found: list[NDArray[np.int64]] = []
        while len(found) < most:
            gains = left[self.paths].sum(axis=1)
            best = int(np.argmax(gains))
            if not gains[best]:
                break
            path = self.paths[best]
            left[path] = 0
            found.append(path[path < len(self.tokens)])
        return found
