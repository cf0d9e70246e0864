"""GenerationResult: the answer to one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

from draftsmith.core.stats import PREDICTION, TARGET, SourceStats, Stats
from draftsmith.engine.attribution import MIN_LENGTH, Copy, Span, find_copies
from draftsmith.text.tokenizer import token_texts

_COLORS = ("0,114,178", "213,94,0", "0,158,115", "204,121,167", "230,159,0", "86,180,233")
"""Red, green and blue of one drafter after the other; Okabe and Ito's, for all eyes."""


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """The answer to one prompt."""

    tokens: list[int]
    """New token ids, including the one that ended the answer."""
    text: str
    """New text without special tokens, cut before a stop string."""
    finish_reason: str
    """`stop` (an end token, a stop string or criterion), `length`, `cancelled` or `error`."""
    stats: Stats
    """What the answer cost: passes, drafts and seconds."""
    sources: list[str]
    """Source of each token: a drafter's name, or `target`."""
    origins: list[int | None]
    """Position in prompt and output from which each token was copied; None: it was not copied.

    `copies` and `attribution` combine them into spans.
    """
    logprobs: list[float] | None = None
    """Log-probability of each token in the distribution it was drawn from; None: not requested."""
    prompt_tokens: list[int] = field(default_factory=list)
    """Token ids of the prompt."""
    notices: tuple[str, ...] = ()
    """Parts that could not be accelerated or applied, with reasons."""
    exact: bool = False
    """Whether its engine is `exact`: every token was computed in the same way in any pass."""
    preceding: tuple[int, ...] = ()
    """The last token of the prompt if `text` continues it; empty if the answer begins a text."""

    tokenizer: Any = field(default=None, compare=False)
    """Tokenizer that decoded `tokens`; None if the model was loaded without one."""

    def token_texts(self) -> list[str]:
        """Return the text that each token adds; joined, they are `text`.

        Raises LoadError without a tokenizer.
        """
        texts, left = list[str](), len(self.text)
        for text in token_texts(self.tokenizer, self.tokens, preceding=self.preceding):
            texts.append(text[:left])  # a stop string ends the text within a token
            left -= len(texts[-1])
        return texts

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:59]}…"
        return (
            f"GenerationResult(text={text!r}, {len(self.tokens)} tokens, "
            f"finish_reason={self.finish_reason!r}, "
            f"{self.stats.tokens_per_pass:.2f} tokens per pass)"
        )

    def _repr_html_(self) -> str:
        """Return the answer for a notebook: each token in the color of the drafter that guessed it.

        Colors are translucent, so that they suit a light page and a dark one.
        """
        texts = [self.text] if self.tokenizer is None else self.token_texts()
        names = [name for name in dict.fromkeys(self.sources) if name != TARGET]
        colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}

        def marked(text: str, source: str) -> str:
            if source not in colors:
                return escape(text)
            style = f"background:rgba({colors[source]},.3)"
            return f'<span style="{style}" title="{escape(source)}">{escape(text)}</span>'

        stats, kinds = self.stats, [marked(name, name) for name in names]
        facts = [
            f"{len(self.tokens)} tokens in {stats.passes} passes",
            f"{stats.tokens_per_pass:.2f} tokens per pass",
            *([f"guessed by {', '.join(kinds)}"] if kinds else []),
            *map(escape, self.notices),
        ]
        answer = "".join(map(marked, texts, self.sources)) if len(texts) > 1 else escape(self.text)
        return (
            f'<div style="white-space:pre-wrap">{answer}</div>'
            f'<div style="opacity:.75;font-size:.85em">{" · ".join(facts)}</div>'
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; `stats` as in `Stats.as_dict`."""
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
        """Return spans of the answer and of their sources, in order. Source: PLD+, appendix D.

        Raises OptionError for a `min_length` below 1.
        """
        return find_copies(self.prompt_tokens, self.tokens, self.origins, min_length)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Number of answer tokens that were drafted from the `prediction`."""
        return self._predicted.accepted

    @property
    def rejected_prediction_tokens(self) -> int:
        """Number of tokens that were drafted from the `prediction` and rejected.

        A token counts in every pass that drafted it. A token after the end of the answer, such as
        after a stop string, is neither accepted nor rejected.
        """
        return self._predicted.rejected

    @property
    def _predicted(self) -> SourceStats:
        return self.stats.by_source.get(PREDICTION, SourceStats())

    @property
    def attribution(self) -> list[Span | None]:
        """For each token, the span of prompt and output from which it was copied, or None."""
        spans: list[Span | None] = [None] * len(self.tokens)
        for output, source in self.copies():
            for position in range(*output):
                spans[position - len(self.prompt_tokens)] = source
        return spans
