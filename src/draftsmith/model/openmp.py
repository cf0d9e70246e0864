"""Ends OpenMP teams, so that only one exists at a time and its workers stay awake.

GNU's runtime, which torch uses on Linux, keeps a team of workers for every thread that has
computed, as long as that thread lives. If all teams together have more threads than the machine has
cores, idle workers sleep at once and must be woken for each of the hundreds of small operations of
a pass. Two cores are then no faster than one (docs/lab-notes, 2026-11-23). So a thread that may
leave the next pass to another thread ends its team. A new team takes 0.1 ms.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

_HARD = 2
"""omp_pause_hard. On a CPU, both kinds only end the caller's workers."""


def end_team() -> None:
    """End the workers of the calling thread; does nothing except under GNU's OpenMP."""
    if (pause := _pause()) is not None:
        pause(_HARD)


@cache
def _pause() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    loaded = ctypes.CDLL(None)  # torch loads its runtime with global symbols
    # LLVM's or Intel's runtime would end the teams of all threads.
    if hasattr(loaded, "kmp_set_blocktime"):
        return None
    return getattr(loaded, "omp_pause_resource_all", None)


if sys.platform.startswith("linux"):
    # A forked child would inherit a team without its threads, and wait for them forever.
    os.register_at_fork(before=end_team)
