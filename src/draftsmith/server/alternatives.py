"""Log-probabilities of emitted tokens before any processor, with the best alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import DraftsmithError
from draftsmith.model.loaded import LoadedModel
from draftsmith.text.tokenizer import decode
from draftsmith.text.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, and the most probable tokens at its position."""

    token: int
    logprob: float | None
    """None for the first token of a text."""
    top: tuple[tuple[int, float], ...] = ()


class Alternatives:
    """A processor that changes no scores and records their log-softmax for every emitted token."""

    def __init__(self, sequence: TextSequence, top: int) -> None:
        """Record from the start of a sequence; `top`: number of alternatives for each token."""
        self._top = top
        self._rows: list[Tensor] = []
        sequence.distribution = sequence.distribution.watched(self)

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        self._rows.append(scores[0].log_softmax(-1))
        return scores

    def take(self, tokens: Sequence[int]) -> list[Logprob]:
        """Return the log-probabilities of the tokens since the last call."""
        rows = zip(tokens, self._rows, strict=False)
        found = [logprob_of(token, row, self._top) for token, row in rows]
        del self._rows[: len(tokens)]
        return found


def logprob_of(token: int, row: Tensor, top: int) -> Logprob:
    """Return a token's log-probability and the `top` best ones of `row`, log-probabilities (V,)."""
    best = row.topk(min(top, len(row)))
    pairs = zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True)
    return Logprob(token, _finite(float(row[token])), tuple(pairs))


def _finite(logprob: float) -> float:
    """Limit a value as OpenAI's servers do, because JSON has no infinity and no NaN."""
    return logprob if logprob > -9999 else -9999.0


def speller(model: LoadedModel) -> Callable[[int], bytes]:
    """Return a function that returns the bytes of a token, or of a special token's name."""
    try:
        vocabulary = Vocabulary.of(model.tokenizer, model.vocab_size)
    except DraftsmithError:  # the bytes of this tokenizer's ids are not known
        return lambda token: decode(model.tokenizer, [token], special=True).encode()

    def spell(token: int) -> bytes:
        data = vocabulary.tokens[token]
        return vocabulary.special.get(token, "").encode() if data is None else data

    return spell
