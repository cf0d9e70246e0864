"""CopySpec: copy what followed the last γ tokens when they occurred before.

Dumitru et al. 2025, "CopySpec: Accelerating LLMs with Speculative Copy-and-Paste Without
Compromising Quality", sections 3.1 and 3.2, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.drafters.ngrams import Copier, index_bytes
from draftsmith.drafters.options import at_least, one_of, switches


@dataclass(frozen=True, repr=False)
class CopySpec(Drafter):
    """Copy the `block` tokens after an earlier occurrence of the last `gamma` tokens.

    Where the paper is silent: `match` selects the first occurrence (its appendix B) or the last
    one. Occurrences that overlap the query count only with `overlap`.
    """

    gamma: int = 3
    block: int = 10
    match: Literal["first", "last"] = "first"
    overlap: bool = False

    name: ClassVar[str] = "copyspec"
    summary: ClassVar[str] = "copy what followed the last γ tokens (CopySpec)"

    def __post_init__(self) -> None:
        at_least(self, 1, "gamma")
        switches(self)
        at_least(self, 0, "block")
        one_of(self, "match", ("first", "last"))

    def preferred_width(self) -> int:
        """Return at least 1: with block=0 the drafter is still called, which costs a look-up."""
        return max(1, self.block)

    def bytes_for(self, positions: int) -> int:
        return max(super().bytes_for(positions), index_bytes((self.gamma,), positions))

    def open(self, ctx: Context) -> DrafterState:
        sizes = (self.gamma,)
        return Copier(ctx, self.name, sizes, self.block, self.match, overlap=self.overlap)
