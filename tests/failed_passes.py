"""Counts the passes that fail and are repeated, in any thread of a test process."""

from __future__ import annotations

import sys
from typing import Any

from draftsmith.core.stats import Stats

FAILED_PASSES: list[str] = []
"""Why passes failed since the last test ended, in any thread."""


class Counted:
    """The field `Stats.failed_passes`, which also tells `FAILED_PASSES` of each increment."""

    def __init__(self, field: Any) -> None:
        self.field = field

    def __get__(self, stats: Stats | None, kind: type) -> Any:
        return self if stats is None else self.field.__get__(stats, kind)

    def __set__(self, stats: Stats, count: int) -> None:
        if count:
            FAILED_PASSES.append(repr(sys.exception() or "logits are not finite"))
        self.field.__set__(stats, count)


Stats.failed_passes = Counted(Stats.failed_passes)  # type: ignore[assignment]
