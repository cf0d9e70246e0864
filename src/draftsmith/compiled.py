"""Functions that numba compiles at their first call and caches on disk.

Plain `numba.njit(cache=True)` has three gaps: it does not notice changes of functions in other
files that were compiled into this one; it fails if the cache is not writable or truncated; and two
versions of numba that share a checkout replace each other's files, so that each compiles anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.dispatcher import Dispatcher

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS = {"nogil": True, "error_model": "numpy"}

_timer = event.TimingListener()
event.register("numba:compiler_lock", _timer)


def compiled(function: Function) -> Function:
    """Compile at the first call, or load from the cache. Calls release the GIL."""
    made = numba.njit(**OPTIONS)(function)
    with suppress(RuntimeError):  # no cache folder is writable: each process compiles
        made._cache = _Cache(function)
    return made  # type: ignore[no-any-return]


def inner(function: Function, **options: Any) -> Function:
    """Compile a function that is called by compiled functions only."""
    alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**alone, **OPTIONS, **options)(function)  # type: ignore[no-any-return]


inlined = partial(inner, forceinline=True)
"""Like `inner`, and inlined into its callers, so that no arguments are passed at run time."""
fused = partial(inner, fastmath={"contract"})
"""Like `inner`, with fused multiply-add: a product and its sum are rounded once."""
int64 = cast(Callable[[int], int], np.int64)
"""Gives constants and record fields the type of other integers: each type of an argument would be
compiled for itself."""


def compiling() -> float:
    """Return the seconds that this process has spent compiling or loading compiled code."""
    return _timer.duration if _timer.done else 0.0


class _Files(CompileResultCacheImpl):  # type: ignore[misc]
    """Names of files that include numba's version."""

    @property
    def filename_base(self) -> str:
        return f"{super().filename_base}.numba-{numba.__version__}"


class _Cache(FunctionCache):  # type: ignore[misc]
    """Cache with a key that includes all functions that the code was compiled from.

    Code that cannot be read or written (a full disk, a truncated file) is compiled again.
    """

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):
            super().save_overload(sig, data)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return *super()._index_key(sig, codegen), digest(self._py_func)


def digest(function: FunctionType) -> str:
    """Return a digest of the bytecode, constants and options of a function and those it calls."""
    found: dict[FunctionType, list[Any]] = {}

    def visit(one: FunctionType, options: dict[str, Any]) -> None:
        if one in found:
            return
        code = one.__code__
        found[one] = [code.co_code, code.co_consts, code.co_names, code.co_varnames]
        found[one] += sorted((name, repr(value)) for name, value in options.items())
        for name in code.co_names:
            value = one.__globals__.get(name)
            if isinstance(value, Dispatcher):
                visit(value.py_func, value.targetoptions)
            elif isinstance(value, int | float | str | tuple):
                found[one].append(value)

    visit(function, OPTIONS)
    return sha256(repr([*found.values()]).encode()).hexdigest()
