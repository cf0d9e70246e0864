"""The answer to one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.core.stats import PREDICTION, SourceStats, Stats
from draftsmith.engine.attribution import MIN_LENGTH, Copy, Span, find_copies


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """The answer to one prompt."""

    tokens: list[int]
    """New token ids, the ending one included."""
    text: str
    """The new text, special tokens left out and cut before a stop string."""
    finish_reason: str
    """`stop` (an end token, a stop string or criterion), `length`, `cancelled` or `error`."""
    stats: Stats
    sources: list[str]
    """Who guessed each token."""
    origins: list[int | None]
    """Position in prompt and output that each token's guess was copied from; None: it was not.

    These are bare facts; `copies` and `attribution` make spans of them.
    """
    logprobs: list[float] | None = None
    """Log-probability of each token under the distribution it was chosen from, if asked for."""
    prompt_tokens: list[int] = field(default_factory=list)
    notices: tuple[str, ...] = ()
    """What could not be accelerated, and why."""
    exact: bool = False
    """Whether its engine is `exact`: every token was computed alike in any pass."""
    preceding: tuple[int, ...] = ()
    """The token of the prompt behind which its tokens are `text`; empty where they begin a text."""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:59]}…"
        return (
            f"GenerationResult(text={text!r}, {len(self.tokens)} tokens, "
            f"finish_reason={self.finish_reason!r}, "
            f"{self.stats.tokens_per_pass:.2f} tokens per pass)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; `stats` as in `Stats.as_dict`."""
        return {
            "text": self.text,
            "tokens": [*self.tokens],
            "finish_reason": self.finish_reason,
            "sources": [*self.sources],
            "origins": [*self.origins],
            "logprobs": None if self.logprobs is None else [*self.logprobs],
            "prompt_tokens": [*self.prompt_tokens],
            "accepted_prediction_tokens": self.accepted_prediction_tokens,
            "rejected_prediction_tokens": self.rejected_prediction_tokens,
            "notices": [*self.notices],
            "exact": self.exact,
            "stats": self.stats.as_dict(),
        }

    def copies(self, min_length: int = MIN_LENGTH) -> list[Copy]:
        """Spans of the answer with what they were copied from, in order. Source: PLD+, appendix D.

        Raises OptionError for a `min_length` below 1.
        """
        return find_copies(self.prompt_tokens, self.tokens, self.origins, min_length)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of the answer that a draft had copied from its `prediction`."""
        return self._predicted.accepted

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens that drafts had copied from the `prediction` where the model then said others.

        Counted in every pass that drafted them, as a pass computes them each time. A token behind
        the end of the answer, as behind a stop string, is neither accepted nor rejected.
        """
        return self._predicted.rejected

    @property
    def _predicted(self) -> SourceStats:
        return self.stats.by_source.get(PREDICTION, SourceStats())

    @property
    def attribution(self) -> list[Span | None]:
        """For each token None, or the span of prompt and output that its copy was made from."""
        spans: list[Span | None] = [None] * len(self.tokens)
        for output, source in self.copies():
            for position in range(*output):
                spans[position - len(self.prompt_tokens)] = source
        return spans
