"""Functions compiled by numba; where there is none, or it is switched off, they stay as they are.

Compiled code is kept beside the source, or in the user's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from time import perf_counter
from typing import Any, TypeVar

try:
    import numba

    COMPILED = not numba.config.DISABLE_JIT
except ImportError:
    COMPILED = False

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS = {"nogil": True, "error_model": "numpy"}

_TOOK: list[float] = []
"""Seconds of every first call."""


def compiled(function: Function) -> Function:
    """Compiled at its first call, or taken from the cache; the interpreter's lock is released."""
    if not COMPILED:
        return function
    # The cache looks at the function's own file only, so its name there tells what it calls, too.
    function.__qualname__ += f"-{_stamp(Path(function.__code__.co_filename).parent)}"
    try:
        made = numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no folder that the cache could be in
        made = numba.njit(**OPTIONS)(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal made
        known, begin = _versions(made), perf_counter()
        try:
            result = made(*args)
        except (OSError, EOFError, UnpicklingError) as error:
            # The cache's, before anything ran: a full disk shows when it is written, a file that
            # was cut off when it is read. The index of such a one is emptied, for the next run.
            if not isinstance(error, OSError):
                with suppress(AttributeError, OSError):  # the cache is no public part
                    made._cache.flush()
            made, known = numba.njit(**OPTIONS)(function), 0
            result = made(*args)
        if _versions(made) > known:
            _TOOK.append(perf_counter() - begin)
        return result

    return call  # type: ignore[return-value]


def _versions(made: Any) -> int:
    """For how many types of arguments a function was compiled."""
    return len(getattr(made, "overloads", ()))


def compiling() -> float:
    """Seconds that this process has spent in compiling, or in loading what it had compiled."""
    return sum(_TOOK)


def inner(function: Function, **options: Any) -> Function:
    """Compiled into its callers, which are compiled, too."""
    if not COMPILED:
        return function
    alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**alone, **OPTIONS, **options)(function)  # type: ignore[no-any-return]


def fused(function: Function) -> Function:
    """The same; a product and the sum that it goes into are rounded once."""
    return inner(function, fastmath={"contract"})


@cache
def _stamp(folder: Path) -> str:
    """Names the state of all files of a folder, and of this one."""
    sources = [Path(__file__), *sorted(folder.glob("*.py"))]
    return sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
