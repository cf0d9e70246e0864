"""Arrays for compiled functions; where nothing is compiled, lists. Both give the same trees."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from functools import partial
from typing import Any

import numpy as np

from draftsmith import compiled
from draftsmith.compiled import COMPILED

inner = partial(compiled.inner, forceinline=True)
"""A call passes every field of every array; none is left to be made."""

Ints = MutableSequence[int]
Floats = MutableSequence[float]


@inner
def no(number: int) -> int:
    """0, and no literal: for one a callee would be compiled once more."""
    return 0 * number


def ints(size: int) -> Ints:
    """Zeros: token ids, counts, positions."""
    return np.zeros(size, np.int32) if COMPILED else [0] * size  # type: ignore[return-value]


def filled(numbers: Sequence[int]) -> Ints:
    """These numbers."""
    return np.array(numbers, np.int32) if COMPILED else list(numbers)  # type: ignore[return-value]


def floats(values: Any) -> Floats:
    """Values of which calculations are made; a copy."""
    return np.array(values, np.float64) if COMPILED else list(map(float, values))  # type: ignore[return-value]


def grown(array: Ints, size: int) -> Ints:
    """The array, or a longer one with zeros behind, if it has not `size` places."""
    if len(array) >= size:
        return array
    more = ints(max(size, 2 * len(array)))
    more[: len(array)] = array
    return more


def size_of(array: Any) -> int:
    """Bytes that an array takes, in plain code about."""
    return int(array.nbytes) if COMPILED else 40 * len(array)


def values(array: Any, start: int, size: int) -> list[Any]:
    """A piece of an array, as Python's own values."""
    piece = array[start : start + size]
    return piece.tolist() if COMPILED else piece  # type: ignore[no-any-return]
