"""Where adaptive tokens stand in a mixed sequence. Source: SDSAT, section 2.2."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def windows(
    length: int,
    L: int,  # noqa: N803
    expected: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """(T,) for each of T=`length` positions its depth in a window of adaptive tokens; 0 outside.

    The lengths of the windows are uniform in 1…L, their number is `expected` in the mean, and all
    arrangements in which no two touch are equally likely. Position 0 is in none: something must
    come before an adaptive token. ceil(expected)·(L+1) may not exceed T (`Recipe` checks it).
    """
    count = math.floor(expected) + int(rng.random() < expected % 1)
    sizes = rng.integers(1, L + 1, count)
    # Each window follows a standard token of its own, so drawing those draws an arrangement.
    after = np.sort(rng.choice(length - sizes.sum(), count, replace=False))
    depths = np.zeros(length, dtype=np.int64)
    for number, (size, standard) in enumerate(zip(sizes, after, strict=True)):
        start = standard + 1 + sizes[:number].sum()
        depths[start : start + size] = np.arange(1, size + 1)
    return depths
