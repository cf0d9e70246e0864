"""Plain decoding: the drafter that never drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftsmith.core.draft import EMPTY
from draftsmith.core.drafter import Context, Drafter, DrafterState, Stateless


@dataclass(frozen=True, repr=False)
class Plain(Drafter):
    """Decode one token per pass: the baseline, with the same loop as all drafters."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "plain decoding, one token per pass"
    width: ClassVar[int] = 0

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return Stateless(lambda _ctx: EMPTY)
