"""Which cases of a test are in the default tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a test, of which those after the first `count` are slow."""
    found = []
    for n, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if n < count else pytest.param(*values, marks=pytest.mark.slow))
    return found
