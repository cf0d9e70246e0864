"""Jobs: sequences with their text, and what callers receive."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from draftsmith.core.sequence import Sequence
from draftsmith.engine.result import GenerationResult
from draftsmith.errors import DraftsmithError, GenerationInterrupted
from draftsmith.text.tokenizer import TextStream, decode


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer: the text that one token released."""

    text: str
    token: int
    source: str
    """Source of the token: a drafter's name, or `target`."""
    seconds: float
    """Seconds since the call."""
    start: int = 0
    """Position in the answer's text, in characters, where the token's own text begins."""


@dataclass(eq=False, slots=True)
class TextSequence:
    """A sequence with everything needed to run it and to create its result."""

    sequence: Sequence
    tokenizer: Any
    stream: TextStream | None = None
    """Decodes text while tokens arrive, for streaming and stop strings; else None."""
    notices: tuple[str, ...] = ()
    began: float = field(default_factory=perf_counter)
    """Time of the call, or of the request's arrival."""
    salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    preceding: tuple[int, ...] = ()
    """Tokens decoded before the answer, so that leading spaces survive."""
    rewinds: bool = False
    """Whether the next request is expected to reuse only a part of this one's row."""
    keeps_drafter: bool = False
    """Whether the caller takes the drafter's state at the end."""
    pieces: deque[Piece] = field(default_factory=deque)
    """Pieces that the caller has not consumed."""
    released: list[str] = field(default_factory=list)
    """Text of the answer, token by token."""
    booked: tuple[int, str] = (0, "")
    """Number of tokens that have become pieces, and the text that is held back after them.

    Assigned at once, because another thread may call `result` during a pass.
    """
    since: int = 0
    """Number of passes of the scheduler when the row was opened."""
    key: Any = None
    """Conditions under which its row is computed; None: the row cannot be shared."""
    marked: bool = False
    """Whether its row has to keep the state at the prompt's end (`Runner.mark`)."""
    need: Any = None
    """Maximum memory it can use (`memory.Need`); None: not computed yet."""
    exact: bool = False
    """Whether its passes compute every token in the same way in any batch."""
    admitted: float | None = None
    """Time at which its row was opened."""
    thread: int = 0
    """Thread that opened its row."""

    def book(self) -> None:
        """Create pieces for the tokens since the last call."""
        sequence, now = self.sequence, perf_counter() - self.began
        if not sequence.settled:  # a pass was interrupted
            return
        new, texts, held = range(self.booked[0], sequence.generated), list[str](), ""
        if not new:
            return
        sequence.stats.wall_seconds = now
        if not new.start:
            sequence.stats.first_token_seconds = now
        if self.stream is not None:
            texts, held = self.stream.take(), self.stream.held()
            if sequence.finished and texts:
                texts[-1] += held
                held = ""
                if self.stream.silent:  # the last token has no text: it starts at the end
                    self.stream.starts[-1] = sum(map(len, (*self.released, *texts)))
        self.released += texts
        self.booked = new.stop, held
        # A failed sequence may have emitted a token without text.
        for text, at in zip(texts, new, strict=False):
            token = sequence.ids[sequence.prompt_length + at]
            start = 0 if self.stream is None else self.stream.starts[at]
            self.pieces.append(Piece(text, token, sequence.sources[at], now, start))

    def result(self) -> GenerationResult:
        """Return what was generated so far, without the tokens of a running pass."""
        sequence, (booked, held) = self.sequence, self.booked
        reason = sequence.finish_reason  # read first: a token is emitted before its finish reason
        if sequence.generated > booked:
            reason = None
        new = range(sequence.prompt_length, sequence.prompt_length + booked)
        tokens = sequence.ids[new.start : new.stop]
        if self.stream is not None:
            text = "".join(self.released[:booked]) + held
        elif self.tokenizer is not None:
            text = decode(self.tokenizer, tokens, preceding=self.preceding)
        else:
            text = ""
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=reason or "cancelled",
            stats=sequence.stats,
            sources=sequence.sources[:booked],
            origins=[sequence.origins.get(position) for position in new],
            logprobs=None if sequence.logprobs is None else sequence.logprobs[:booked],
            prompt_tokens=sequence.ids[: sequence.prompt_length],
            notices=(*self.notices, *sequence.notices.values()),
            exact=self.exact,
            preceding=self.preceding,
        )


@contextmanager
def partial_results(sequences: abc.Sequence[TextSequence]) -> Iterator[None]:
    """Convert an error into GenerationInterrupted with the results of all sequences so far.

    A KeyboardInterrupt is raised unchanged, with the attribute `partial`. An error before the first
    token is raised unchanged.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.partial = [sequence.result() for sequence in sequences]  # type: ignore[attr-defined]
        raise
    except Exception as error:
        done = sum(sequence.generated for sequence in sequences)
        if not done:
            raise
        # The original error of the drafter or processor remains visible as the cause.
        kind = "" if isinstance(error, DraftsmithError) else f"{type(error).__name__}: "
        raise GenerationInterrupted(
            f"generation failed after {done} tokens ({kind}{error}); "
            f"the results so far are in this error's .partial",
            [sequence.result() for sequence in sequences],
        ) from error


def raise_failures(sequences: abc.Sequence[TextSequence]) -> None:
    """Raise the error of the first failed sequence.

    A StopIteration becomes a RuntimeError, as in generators: it would end the loop over a stream.
    """
    for sequence in sequences:
        if isinstance(error := sequence.error, StopIteration):
            raise RuntimeError("a callback raised StopIteration") from error
        if error is not None:
            raise error
