"""Functions on arrays, compiled by numba; where there is none, the same functions on lists.

Both give the same trees. Compiled code is kept beside the source, or in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from typing import Any, TypeVar

import numpy as np

try:
    import numba

    COMPILED = not numba.config.DISABLE_JIT
except ImportError:
    COMPILED = False

Ints = MutableSequence[int]
Floats = MutableSequence[float]
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiled at its first call, or taken from the cache; the interpreter's lock is released."""
    if not COMPILED:
        return function
    try:
        made = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder that the cache could be in
        made = numba.njit(nogil=True)(function)
    return made  # type: ignore[no-any-return]


def ints(size: int) -> Ints:
    """Zeros: token ids, counts, positions."""
    return np.zeros(size, np.int32) if COMPILED else [0] * size  # type: ignore[return-value]


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


def values(array: Any, size: int) -> list[Any]:
    """The first values of an array, as Python's own."""
    return array[:size].tolist() if COMPILED else array[:size]  # type: ignore[no-any-return]
