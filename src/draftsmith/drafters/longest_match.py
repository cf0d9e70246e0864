"""longest_match: copy after the longest recent match; the length follows measured acceptance.

Ours, without a paper. Trusting longer matches more is the idea of SAM decoding (Hu et al. 2024);
here the trust is measured while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.drafters.ngrams import History, common_past, index_bytes
from draftsmith.drafters.options import at_least

BUCKETS = (1, 2, 3, 5, 9, 17, 33)
"""Smallest match length of each bucket; trust is learned per bucket."""

WORTH = 0.06
"""Minimum probability that a token is reached, for drafting it."""


@dataclass(frozen=True, repr=False)
class LongestMatch(Drafter):
    """Copy after the longest of the recent matches; longer matches give longer drafts.

    The last `min` ids are looked up. Of the `candidates` most recent occurrences, the one with the
    longest common past is used (of equal ones the most recent). The length of the draft follows
    from how much of recent copies after matches of that length was accepted; it can be 0.
    """

    min: int = 1
    max: int = 64
    """Maximum length of the past that is compared, and of the draft."""
    candidates: int = 16

    name: ClassVar[str] = "longest_match"
    summary: ClassVar[str] = "the longest recent match, with a length by measured acceptance"

    def __post_init__(self) -> None:
        at_least(self, 1, "min", "max", "candidates")

    def preferred_width(self) -> int:
        return self.max

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the n-grams, longer ones first: they are rarer, so their recent occurrences
        reach further back."""
        return self.min + 2, self.min + 1, self.min

    def bytes_for(self, positions: int) -> int:
        return max(super().bytes_for(positions), index_bytes(self.sizes, positions))

    def open(self, ctx: Context) -> DrafterState:
        return _Matcher(self, ctx)


class _Matcher(DrafterState):
    def __init__(self, config: LongestMatch, ctx: Context) -> None:
        self.config = config
        self.history = History(ctx, config.sizes)
        self.trust = [Trust(prior) for prior in (0.2, 0.5, 0.75, 0.85, 0.92, 0.95, 0.97)]
        self._bucket: int | None = None

    def draft(self, ctx: Context) -> Draft:
        self.history.extend(ctx.ids)
        match = self._longest(ctx)
        if match is None:
            return EMPTY
        start, length = match
        self._bucket = bucket = sum(length >= least for least in BUCKETS) - 1
        width = min(self.trust[bucket].width(), self.config.max, ctx.budget)
        copied = self.history.copy_onward(start, width)
        return self.history.draft(copied, start, self.config.name)

    def _longest(self, ctx: Context) -> tuple[int, int] | None:
        """Return (position to copy from, length of the common past) of the best match, or None."""
        ids = self.history.ids
        for index in self.history.indexes:
            best: tuple[int, int] | None = None
            latest = len(ids) - index.n - 1  # an occurrence may overlap the last n ids
            for occurrence in index.recent(latest, self.config.candidates):
                start = occurrence + index.n
                length = common_past(ids, start, len(ids), self.config.max)
                if best is None or length > best[1]:
                    best = start, length
                if length >= self.config.max:
                    break  # no match can be longer, and this is the most recent one
            if best is not None:
                return best
            if ctx.prediction and len(ctx.ids) == ctx.prompt_length:
                return 0, self.config.max  # the answer is expected to begin like the prediction
        return None

    def observe(self, ctx: Context, outcome: Outcome) -> None:  # noqa: ARG002
        drafted = outcome.draft.size
        if drafted and self._bucket is not None:
            self.trust[self._bucket].record(drafted, len(outcome.verification.path))
        self._bucket = None

    def truncate(self, length: int) -> None:
        self.history.truncate(length)


class Trust:
    """Acceptance of copies after matches of one length, learned from their outcomes.

    It has two probabilities: that the first copied token is accepted, and that the next one is if
    the previous one was. One probability could not show that a copy that begins well mostly goes
    on.
    """

    def __init__(self, prior: float) -> None:
        self.first = Frequency(prior)
        self.next = Frequency(max(prior, 0.75))

    def width(self) -> int:
        """Return the number of tokens worth drafting, which are likely enough to be reached."""
        reach, onward = self.first.value, self.next.value
        if reach < WORTH:
            # Old failures fade, so that a drafter without drafts is tried again.
            self.first.fade()
            return 0
        return 1 + int(log(WORTH / reach) / log(onward))

    def record(self, drafted: int, accepted: int) -> None:
        self.first.record(accepted > 0)
        for depth in range(1, min(accepted + 1, drafted)):
            self.next.record(depth < accepted)


class Frequency:
    """A relative frequency with slow decay, at most 0.99; the prior counts as three cases."""

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.right = self.total = 0.0

    @property
    def value(self) -> float:
        return min(0.99, (self.right + 3 * self.prior) / (self.total + 3))

    def record(self, right: bool) -> None:
        self.fade()
        self.right += right
        self.total += 1

    def fade(self) -> None:
        self.right *= 0.96
        self.total *= 0.96
