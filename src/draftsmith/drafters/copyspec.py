"""CopySpec: copy what followed the last γ tokens when they occurred before.

Dumitru et al. 2025, "CopySpec: Accelerating LLMs with Speculative Copy-and-Paste Without
Compromising Quality", sections 3.1 and 3.2, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.drafters.ngrams import History, NgramIndex
from draftsmith.drafters.options import at_least, one_of


@dataclass(frozen=True, repr=False)
class CopySpec(Drafter):
    """Copy the `block` tokens after an earlier occurrence of the last `gamma` tokens.

    Decisions where the paper is silent: `match` is the first occurrence (its appendix B) or the
    last; occurrences that overlap the query do not count unless `overlap`.
    """

    gamma: int = 3
    block: int = 10
    match: Literal["first", "last"] = "first"
    overlap: bool = False

    name: ClassVar[str] = "copyspec"
    summary: ClassVar[str] = "copy what followed the last γ tokens (CopySpec)"

    def __post_init__(self) -> None:
        at_least(self, "gamma", 1)
        at_least(self, "block", 0)
        one_of(self, "match", ("first", "last"))

    def preferred_width(self) -> int:
        return self.block

    def open(self, ctx: Context) -> DrafterState:
        return _Copier(self, ctx)


class _Copier(DrafterState):
    def __init__(self, config: CopySpec, ctx: Context) -> None:
        self.config = config
        self.history = History(ctx)
        self.index = NgramIndex(config.gamma, self.history.ids)

    def draft(self, ctx: Context) -> Draft:
        c = self.config
        self.history.extend(ctx.ids)
        self.index.extend()
        # The query starts at len − γ; an occurrence of γ ids must end before it.
        latest = len(self.history.ids) - c.gamma - (1 if c.overlap else c.gamma)
        if c.match == "first":
            start = self.index.first(latest)
        else:
            start = next(iter(self.index.recent(latest)), None)
        if start is None:
            return EMPTY
        start += c.gamma
        copied = self.history.copy(start, min(c.block, ctx.budget))
        return Draft.chain(copied, c.name, origins=self.history.origins(start, len(copied)))

    def truncate(self, length: int) -> None:
        self.index.truncate(self.history.offset + length)
        self.history.truncate(length)
