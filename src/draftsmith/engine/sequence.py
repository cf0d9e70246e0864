"""Jobs: sequences with their text, and what their callers are handed."""

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
    """A bit of streamed answer: the text one token released, who guessed it, when it came."""

    text: str
    token: int
    source: str
    seconds: float
    """Since the call."""
    start: int = 0
    """Where the token's own text begins in the answer's text, in characters."""


@dataclass(eq=False, slots=True)
class TextSequence:
    """A sequence with what it takes to drive it and to turn it into a result."""

    sequence: Sequence
    tokenizer: Any
    stream: TextStream | None = None
    """Set where text is wanted while tokens come: for streaming and for stop strings."""
    notices: tuple[str, ...] = ()
    began: float = field(default_factory=perf_counter)
    """When the call was made, or the request arrived."""
    salt: str = ""
    """PrefixCache are shared with requests of the same salt only."""
    preceding: tuple[int, ...] = ()
    """What its text is decoded behind."""
    rewinds: bool = False
    """Whether the next request is expected to begin in the middle of this one's row."""
    keeps_drafter: bool = False
    """Whether its caller takes the drafter's state when it is done."""
    pieces: deque[Piece] = field(default_factory=deque)
    """Of its answer, not taken yet."""
    released: list[str] = field(default_factory=list)
    """All text so far, token by token."""
    booked: tuple[int, str] = (0, "")
    """How many tokens have been turned into pieces, and the text that is held back behind them.

    Set in one go: `result` may be asked for by another thread, in the midst of a pass.
    """
    since: int = 0
    """The number of passes when it was given a row."""
    key: Any = None
    """What its row is computed under; None: nothing that others could use."""
    marked: bool = False
    """Whether its row was asked to keep the prompt's end for others (`Runner.mark`)."""
    need: Any = None
    """The most it may come to hold (`memory.Need`); None: not asked yet."""
    exact: bool = False
    """Whether its passes compute every token alike in any company."""
    admitted: float | None = None
    """When it was given a row."""
    thread: int = 0
    """The thread whose scheduler gave it a row."""

    def book(self) -> None:
        """Make pieces of the tokens that came since the last time."""
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
                if self.stream.silent:  # it stands behind all text
                    self.stream.starts[-1] = sum(map(len, (*self.released, *texts)))
        self.released += texts
        self.booked = new.stop, held
        # One that failed may have emitted a token and not its text.
        for text, at in zip(texts, new, strict=False):
            token = sequence.ids[sequence.prompt_length + at]
            start = 0 if self.stream is None else self.stream.starts[at]
            self.pieces.append(Piece(text, token, sequence.sources[at], now, start))

    def result(self) -> GenerationResult:
        """What was generated so far, but for the tokens of a pass that is not over."""
        sequence, (booked, held) = self.sequence, self.booked
        reason = sequence.finish_reason  # its token came before it, so it counts if that does
        if sequence.generated > booked:
            reason = None
        new = range(sequence.prompt_length, sequence.prompt_length + booked)
        tokens = sequence.ids[new.start : new.stop]
        if self.stream is not None:
            text = "".join(self.released[:booked]) + held
        else:
            known = self.tokenizer is not None
            text = decode(self.tokenizer, tokens, preceding=self.preceding) if known else ""
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
    """Turn an error into GenerationInterrupted, which holds what there is of all sequences.

    Ctrl-C stays a KeyboardInterrupt, with the same attribute `partial`; an error before the first
    token stays what it is.
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
        # The drafter's or the processor's own error stays visible as the cause.
        kind = "" if isinstance(error, DraftsmithError) else f"{type(error).__name__}: "
        raise GenerationInterrupted(
            f"generation failed after {done} tokens ({kind}{error}); "
            f"what was generated is in this error's .partial",
            [sequence.result() for sequence in sequences],
        ) from error


def raise_failures(sequences: abc.Sequence[TextSequence]) -> None:
    """Raise what has ended the first of the sequences that failed.

    A StopIteration becomes a RuntimeError, as in a generator: it would end a loop over a stream.
    """
    for sequence in sequences:
        if isinstance(error := sequence.error, StopIteration):
            raise RuntimeError("a callback raised StopIteration") from error
        if error is not None:
            raise error
