"""Prompt lookup: copy what followed the longest n-gram that ends the sequence.

Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding; transformers'
`prompt_lookup_num_tokens` is the same idea with n-grams of 2…1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.drafters.ngrams import History, NgramIndex
from draftsmith.drafters.options import at_least, one_of
from draftsmith.errors import OptionError


@dataclass(frozen=True, repr=False)
class PromptLookup(Drafter):
    """Copy `tokens` ids after a match of the last n ids, trying n = `max` down to `min`.

    max=3 is the original's setting, max=2 transformers' default. The first match in the text is
    copied, as both do; `match="last"` takes the most recent one.
    """

    max: int = 3
    min: int = 1
    tokens: int = 10
    match: Literal["first", "last"] = "first"

    name: ClassVar[str] = "prompt_lookup"
    summary: ClassVar[str] = "copy after the longest matching n-gram (prompt lookup decoding)"

    def __post_init__(self) -> None:
        for option in ("max", "min", "tokens"):
            at_least(self, option, 1)
        one_of(self, "match", ("first", "last"))
        if self.min > self.max:
            raise OptionError(
                f"prompt_lookup: min={self.min} is above max={self.max}; n-grams go from max to min"
            )

    def preferred_width(self) -> int:
        return self.tokens

    def open(self, ctx: Context) -> DrafterState:
        return _Lookup(self, ctx)


class _Lookup(DrafterState):
    def __init__(self, config: PromptLookup, ctx: Context) -> None:
        self.config = config
        self.history = History(ctx)
        sizes = range(config.max, config.min - 1, -1)
        self.indexes = [NgramIndex(n, self.history.ids) for n in sizes]

    def draft(self, ctx: Context) -> Draft:
        c = self.config
        self.history.extend(ctx.ids)
        for index in self.indexes:
            index.extend()
        for index in self.indexes:
            if c.match == "first":
                start = index.first(index.latest)
            else:
                start = next(iter(index.recent(index.latest)), None)
            if start is not None:
                start += index.n
                copied = self.history.copy(start, min(c.tokens, ctx.budget))
                if copied:
                    origins = self.history.origins(start, len(copied))
                    return Draft.chain(copied, c.name, origins=origins)
        return EMPTY

    def truncate(self, length: int) -> None:
        for index in self.indexes:
            index.truncate(self.history.offset + length)
        self.history.truncate(length)
