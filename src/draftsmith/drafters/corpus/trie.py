"""What may follow, as a weighted trie: counts decide which continuations are worth a node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.core.draft import ROOT, Draft
from draftsmith.drafters.corpus.files import SEPARATOR


@dataclass(frozen=True, slots=True)
class Trie:
    """Continuations merged by their prefixes; nodes are numbered depth by depth.

    `n` nodes, `R` continuations, `D` their greatest length.
    """

    tokens: NDArray[np.int64]
    """(n,) ids."""
    parents: NDArray[np.int64]
    """(n,) number of the parent node, ROOT for the first level."""
    weights: NDArray[np.int64]
    """(n,) how many of the continuations go through the node; never more than its parent's."""
    paths: NDArray[np.int64]
    """(R, D) node of each continuation at each depth; n beyond its end."""

    @classmethod
    def of(cls, rows: NDArray[np.int64]) -> Trie:
        """The trie of continuations (R, D) in sorted order; each ends at the first separator."""
        alive = ~np.logical_or.accumulate(rows == SEPARATOR, axis=1)
        # In sorted order a node's continuations are neighbours: it begins where a prefix changes.
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
        """The `most` heaviest nodes, heaviest first; of equal ones the shallower.

        A node is as heavy as the share of continuations that reach it, so these are the nodes most
        likely to be accepted. Parents come first by themselves: none is lighter than its child.
        """
        heaviest = np.argsort(-self.weights, kind="stable")[:most]
        renumber = {ROOT: ROOT, **{int(old): new for new, old in enumerate(heaviest)}}
        tokens = tuple(self.tokens[heaviest].tolist())
        parents = tuple(renumber[p] for p in self.parents[heaviest].tolist())
        return Draft(tokens, parents, (source,) * len(tokens))

    def branches(self, most: int) -> list[list[int]]:
        """Up to `most` continuations, best first (see `best`)."""
        return [self.tokens[path].tolist() for path in self.best(most)]

    def best(self, most: int) -> list[NDArray[np.int64]]:
        """The nodes of up to `most` continuations: each the one that adds the most weight.

        The first is expected to have the most tokens accepted; each further one adds the most to
        what those before it cover. None is a prefix of another.
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
