"""Two threads that do the same, to see what they do at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest


def twice_at_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], object]
) -> tuple[int, bool]:
    """Run `action` in two threads; return its calls of `owner.name`, and whether two met there."""
    own, both, calls, met = getattr(owner, name), threading.Barrier(2), list[Any](), list[int]()

    def waiting(*given: Any, **options: Any) -> Any:
        calls.append(given)
        try:
            met.append(both.wait(0.5))
        except threading.BrokenBarrierError:
            both.reset()
        return own(*given, **options)

    monkeypatch.setattr(owner, name, waiting)
    threads = [threading.Thread(target=action) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(calls), bool(met)
