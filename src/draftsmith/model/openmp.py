"""One team of OpenMP threads at a time, so that its workers stay awake between two operations.

GNU's runtime, which torch has on Linux, gives every thread that computes a team of its own, for as
long as that thread lives. Once all teams together are more threads than there are cores, a worker
that has nothing to do sleeps at once, and has to be woken for each of the hundreds of small
operations of a pass: with two cores no faster than one (docs/lab-notes, 2026-11-23). So whoever
has computed, and may leave the next pass to another thread, ends its team; a new one takes 0.1 ms
there.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

_HARD = 2
"""omp_pause_hard; on a CPU both kinds end the caller's workers and nothing else."""


def end_team() -> None:
    """End the workers of the calling thread; elsewhere than under GNU's OpenMP do nothing."""
    if (pause := _pause()) is not None:
        pause(_HARD)


@cache
def _pause() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    loaded = ctypes.CDLL(None)  # torch makes its runtime visible to all
    if hasattr(loaded, "kmp_set_blocktime"):  # LLVM's or Intel's, which would end everybody's teams
        return None
    return getattr(loaded, "omp_pause_resource_all", None)


if sys.platform.startswith("linux"):
    # A child gets a team without its threads, and would wait for them for ever.
    os.register_at_fork(before=end_team)
