"""A small heap for tests that collect garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def young_heap() -> Iterator[None]:
    """Let `gc.collect` look only at later objects; for all of a test process it takes a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
