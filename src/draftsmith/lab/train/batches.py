"""Rows of a step, from the seed and the step's number alone, so that any step can be resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.lab.train.recipe import Recipe

_ORDER, _WINDOWS = 0, 1
"""Kinds of random numbers, so that none are used twice."""


@dataclass(frozen=True)
class Batch:
    """R rows of T tokens, and the positions of adaptive tokens in their mixed halves."""

    ids: Tensor
    """(R, T+1) the text. Position t is the input, position t+1 its label."""
    depths: Tensor
    """(R, T) depth of each input position in its window; 0 for the text itself."""

    @property
    def plain(self) -> Tensor:
        """(R, T) the text. Source: SDSAT, equation 5."""
        return self.ids[:, :-1]

    @property
    def labels(self) -> Tensor:
        """(R, T) the true next tokens, of both halves."""
        return self.ids[:, 1:]

    @property
    def replaced(self) -> Tensor:
        """(R, T) M_mask: whether the input is an adaptive token."""
        return self.depths > 0

    def mixed(self, tokens: Sequence[int]) -> Tensor:
        """(R, T) the text with adaptive tokens in the windows. Source: SDSAT, equations 4 and 6.

        `tokens` is one for all depths, or one for each.
        """
        by_depth = torch.tensor(tokens, device=self.ids.device)
        depth = self.depths.clamp(min=1) - 1 if len(tokens) > 1 else torch.zeros_like(self.depths)
        return torch.where(self.replaced, by_depth[depth], self.plain)

    def part(self, rows: slice) -> Batch:
        """Return some of the rows."""
        return Batch(self.ids[rows], self.depths[rows])


def windows(
    length: int,
    L: int,  # noqa: N803
    expected: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """(T,) depth of each of T=`length` positions in a window of adaptive tokens; 0 outside.

    Lengths of windows are uniform in 1…L, and their mean number is `expected`. All arrangements in
    which no two windows touch are equally likely. Position 0 is in no window, because an adaptive
    token needs a token before it. ceil(expected)·(L+1) must not exceed T (`Recipe` checks it).
    Source: SDSAT, section 2.2.
    """
    count = math.floor(expected) + int(rng.random() < expected % 1)
    sizes = rng.integers(1, L + 1, count)
    # Each window follows its own standard token, so drawing those tokens draws an arrangement.
    after = np.sort(rng.choice(length - sizes.sum(), count, replace=False))
    depths = np.zeros(length, dtype=np.int64)
    for number, (size, standard) in enumerate(zip(sizes, after, strict=True)):
        start = standard + 1 + sizes[:number].sum()
        depths[start : start + size] = np.arange(1, size + 1)
    return depths


def in_order(seed: Sequence[int], step: int, rows: int, count: int) -> list[int]:
    """Return which of `count` sequences a step reads: all once, then all in another order."""
    places = range(step * rows, (step + 1) * rows)
    orders = {
        epoch: np.random.default_rng([*seed, epoch]).permutation(count)
        for epoch in {place // count for place in places}
    }
    return [int(orders[place // count][place % count]) for place in places]


@dataclass(frozen=True)
class Batches:
    """All steps of a training over N sequences."""

    sequences: NDArray[np.int32]
    """(N, T+1). Each begins with the last token of the one before."""
    recipe: Recipe

    def step(self, number: int) -> Batch:
        """Return the rows of a step."""
        recipe = self.recipe
        rows = in_order([recipe.seed, _ORDER], number, recipe.rows, len(self.sequences))
        depths = np.zeros((recipe.rows, recipe.length), dtype=np.int64)
        if recipe.adaptive:
            for row in range(recipe.rows):
                rng = np.random.default_rng([recipe.seed, _WINDOWS, number, row])
                depths[row] = windows(recipe.length, recipe.L, recipe.windows, rng)
        ids = self.sequences[rows].astype(np.int64)
        return Batch(torch.from_numpy(ids), torch.from_numpy(depths))
