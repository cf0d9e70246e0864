"""How much work a call does, counted rather than timed: the same on a machine that is busy."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs."""
    count, before = 0, sys.gettrace()

    def trace(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def calls(call: Callable[[], object]) -> int:
    """Functions, of Python and of C, that a call calls."""
    count, before = 0, sys.getprofile()

    def profile(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes of Python's that a call holds at a time: a copied list is eight for each item."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
