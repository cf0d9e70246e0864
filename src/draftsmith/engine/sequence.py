"""A sequence as the engine runs it: with its text, and with what its caller receives."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


class TextSequence(Sequence):
    """A sequence with its text, and with what its scheduler and its caller keep of it."""

    def __init__(
        self,
        ids: abc.Sequence[int],
        *,
        tokenizer: Any = None,
        stream: TextStream | None = None,
        remarks: tuple[str, ...] = (),
        began: float | None = None,
        salt: str = "",
        preceding: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        """`options` are those of `Sequence`.

        `stream` is set where text is wanted while tokens come: for streaming and for stop strings.
        `remarks`: sentences for the caller about what is no failure. `began`: when the call was
        made, or the request arrived (default: now). `salt`: prefixes are shared with requests of
        the same salt only. `preceding`: tokens decoded before the answer, so that leading spaces
        survive.
        """
        super().__init__(ids, **options)
        self.tokenizer, self.stream, self.remarks = tokenizer, stream, remarks
        self.began = perf_counter() if began is None else began
        self.salt, self.preceding = salt, preceding
        self.rewinds = False
        """Whether the next request is expected to begin in the middle of this one's row."""
        self.keeps_drafter = False
        """Whether its caller takes the drafter's state when it is done."""
        self.pieces: deque[Piece] = deque()
        """Pieces of the answer that the caller has not consumed."""
        self.released: list[str] = []
        """All text so far, token by token."""
        self.booked: tuple[int, str] = (0, "")
        """Number of tokens that were turned into pieces, and the text that is held back after them.

        Set in one assignment: another thread may ask for `result` amid a pass.
        """
        self.since = 0
        """The number of passes when it was given a row."""
        self.key: Any = None
        """What its row is computed under; None: nothing that others could use."""
        self.marked = False
        """Whether its row was asked to keep the prompt's end for others (`Runner.mark`)."""
        self.need: Any = None
        """The most it may come to hold (`memory.Need`); None: not asked yet."""
        self.exact = False
        """Whether its passes compute every token alike in any company."""
        self.admitted: float | None = None
        """When it was given a row."""
        self.thread = 0
        """The thread whose scheduler gave it a row."""

    def book(self) -> None:
        """Make pieces of the tokens that came since the last time."""
        now = perf_counter() - self.began
        if not self.settled:  # a pass was interrupted
            return
        new, texts, held = range(self.booked[0], self.generated), list[str](), ""
        if not new:
            return
        self.stats.wall_seconds = now
        if not new.start:
            self.stats.first_token_seconds = now
        if self.stream is not None:
            texts, held = self.stream.take(), self.stream.held()
            if self.finished and texts:
                texts[-1] += held
                held = ""
                if self.stream.silent:  # it stands behind all text
                    self.stream.starts[-1] = sum(map(len, (*self.released, *texts)))
        self.released += texts
        self.booked = new.stop, held
        # One that failed may have emitted a token and not its text.
        for text, at in zip(texts, new, strict=False):
            token = self.ids[self.prompt_length + at]
            start = 0 if self.stream is None else self.stream.starts[at]
            self.pieces.append(Piece(text, token, self.sources[at], now, start))

    def result(self) -> GenerationResult:
        """What was generated so far, but for the tokens of a pass that is not over."""
        booked, held = self.booked
        reason = self.finish_reason  # its token came before it, so it counts if that does
        if self.generated > booked:
            reason = None
        new = range(self.prompt_length, self.prompt_length + booked)
        tokens = self.ids[new.start : new.stop]
        if self.stream is not None:
            text = "".join(self.released[:booked]) + held
        else:
            text = ""
            if self.tokenizer is not None:
                text = decode(self.tokenizer, tokens, preceding=self.preceding)
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=reason or "cancelled",
            stats=self.stats,
            sources=self.sources[:booked],
            origins=[self.origins.get(position) for position in new],
            logprobs=None if self.logprobs is None else self.logprobs[:booked],
            prompt_tokens=self.ids[: self.prompt_length],
            notices=(*self.remarks, *self.notices.values()),
            exact=self.exact,
            preceding=self.preceding,
            tokenizer=self.tokenizer,
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
