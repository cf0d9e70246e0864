"""Prompt lookup: copy what followed the longest n-gram at the end of the sequence.

Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding; transformers'
`prompt_lookup_num_tokens` does the same with n-grams of 2…1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.drafters.ngrams import Copier, index_bytes
from draftsmith.drafters.options import at_least, one_of
from draftsmith.errors import OptionError


@dataclass(frozen=True, repr=False)
class PromptLookup(Drafter):
    """Copy `tokens` ids after a match of the last n ids, trying n = `max` down to `min`.

    The original uses max=3, transformers by default max=2. The first match in the text is copied,
    as in transformers; `match="last"` copies the most recent one.
    """

    max: int = 3
    min: int = 1
    tokens: int = 10
    match: Literal["first", "last"] = "first"

    name: ClassVar[str] = "prompt_lookup"
    summary: ClassVar[str] = "copy after the longest matching n-gram (prompt lookup decoding)"

    def __post_init__(self) -> None:
        at_least(self, 1, "max", "min", "tokens")
        one_of(self, "match", ("first", "last"))
        if self.min > self.max:
            raise OptionError(f"prompt_lookup: min must be <= max={self.max}, got {self.min}")

    def preferred_width(self) -> int:
        return self.tokens

    def bytes_for(self, positions: int) -> int:
        """Return the size of one index for each n."""
        return index_bytes(range(self.min, self.max + 1), positions)

    def open(self, ctx: Context) -> DrafterState:
        sizes = range(self.max, self.min - 1, -1)
        return Copier(ctx, self.name, sizes, self.tokens, self.match, overlap=True)
