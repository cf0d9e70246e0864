"""Functions on arrays, compiled by numba; where there is none, the same functions on lists.

Both give the same trees. Compiled code is kept beside the source, or in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
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

OPTIONS = {"nogil": True, "error_model": "numpy"}


def compiled(function: Function) -> Function:
    """Compiled at its first call, or taken from the cache; the interpreter's lock is released."""
    if not COMPILED:
        return function
    # The cache looks at the function's own file only, so its name there tells what it calls, too.
    function.__qualname__ += f"-{_stamp()}"
    try:
        made = numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no folder that the cache could be in
        made = numba.njit(**OPTIONS)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal made
        try:
            return made(*args)
        except OSError:  # the cache's, before anything ran: a full disk shows when it is written
            made = numba.njit(**OPTIONS)(function)
            return made(*args)

    return call  # type: ignore[return-value]


def inner(function: Function) -> Function:
    """Compiled into its callers, which are compiled, too."""
    if not COMPILED:
        return function
    alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**alone, **OPTIONS)(function)  # type: ignore[no-any-return]


@cache
def _stamp() -> str:
    """Names the state of all files of this folder."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@inner
def no(number: int) -> int:
    """0, and no literal: for one a callee would be compiled once more."""
    return 0 * number


def ints(size: int) -> Ints:
    """Zeros: token ids, counts, positions."""
    return np.zeros(size, np.int32) if COMPILED else [0] * size  # type: ignore[return-value]


def filled(numbers: Sequence[int]) -> Ints:
    """These numbers."""
    array = ints(len(numbers))
    array[:] = numbers
    return array


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
