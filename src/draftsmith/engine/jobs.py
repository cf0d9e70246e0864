"""Jobs: sessions with their text, and what their callers are handed."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from inspect import GEN_CLOSED, getgeneratorstate
from time import perf_counter
from typing import Any

from draftsmith.core.session import Session
from draftsmith.engine.autocast import Mode
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
class Job:
    """A session with what it takes to drive it and to turn it into a result."""

    session: Session
    tokenizer: Any
    stream: TextStream | None = None
    """Set where text is wanted while tokens come: for streaming and for stop strings."""
    notices: tuple[str, ...] = ()
    began: float = field(default_factory=perf_counter)
    """When the call was made, or the request arrived."""
    mode: Mode = field(default_factory=Mode)
    """The caller's autocast mode."""
    salt: str = ""
    """Prefixes are shared with requests of the same salt only."""
    behind: tuple[int, ...] = ()
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
    paused: bool = False
    """Whether passes leave it out for now; its row stays."""
    aborted: bool = False
    done: bool = False
    """Whether it is over and its row given back."""

    @property
    def over(self) -> bool:
        """Whether no pass shall serve it any more."""
        return self.aborted or self.session.finished

    def book(self) -> None:
        """Make pieces of the tokens that came since the last time."""
        session, now = self.session, perf_counter() - self.began
        session.book()
        new, texts, held = range(self.booked[0], session.generated), list[str](), ""
        if not new:
            return
        session.stats.wall_seconds = now
        if not new.start:
            session.stats.first_token_seconds = now
        if self.stream is not None:
            texts, held = self.stream.take(), self.stream.held()
            if session.finished and texts:
                texts[-1] += held
                held = ""
                if self.stream.silent:  # it stands behind all text
                    self.stream.starts[-1] = sum(map(len, (*self.released, *texts)))
        self.released += texts
        self.booked = new.stop, held
        # One that failed may have emitted a token and not its text.
        for text, at in zip(texts, new, strict=False):
            token = session.ids[session.prompt_length + at]
            start = 0 if self.stream is None else self.stream.starts[at]
            self.pieces.append(Piece(text, token, session.sources[at], now, start))

    def result(self) -> GenerationResult:
        """What was generated so far, but for the tokens of a pass that is not over."""
        session, (booked, held) = self.session, self.booked
        reason = session.finish_reason  # its token came before it, so it counts if that does
        if session.generated > booked:
            reason = None
        new = range(session.prompt_length, session.prompt_length + booked)
        tokens = session.ids[new.start : new.stop]
        if self.stream is not None:
            text = "".join(self.released[:booked]) + held
        else:
            known = self.tokenizer is not None
            text = decode(self.tokenizer, tokens, behind=self.behind) if known else ""
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=reason or "cancelled",
            stats=session.stats,
            sources=session.sources[:booked],
            origins=[session.origins.get(position) for position in new],
            logprobs=None if session.logprobs is None else session.logprobs[:booked],
            prompt_tokens=session.ids[: session.prompt_length],
            notices=(*self.notices, *session.notices.values()),
            exact=self.exact,
            behind=self.behind,
        )


@contextmanager
def partial_results(jobs: Sequence[Job]) -> Iterator[None]:
    """Turn failures of jobs into GenerationInterrupted, which holds what there is of all.

    Ctrl-C stays a KeyboardInterrupt, with the same attribute `partial`.
    """
    try:
        yield
        for job in jobs:
            if job.session.error is not None:
                raise job.session.error
    except KeyboardInterrupt as stop:
        stop.partial = [job.result() for job in jobs]  # type: ignore[attr-defined]
        raise
    except Exception as error:
        done = sum(job.session.generated for job in jobs)
        if not done:
            raise
        # The drafter's or the processor's own error stays visible as the cause.
        kind = "" if isinstance(error, DraftsmithError) else f"{type(error).__name__}: "
        raise GenerationInterrupted(
            f"generation failed after {done} tokens ({kind}{error}); "
            f"what was generated is in this error's .partial",
            [job.result() for job in jobs],
        ) from error


def _pieces(job: Job, steps: Generator[Piece]) -> Generator[Piece]:
    """Knows no `Stream`, so that one which is dropped is closed at once, by no collection."""
    with partial_results([job]):
        yield from steps


def _is_own(error: ValueError) -> bool:
    """Whether an error comes from inside a generator, not from Python refusing to enter it.

    Python refuses while another thread runs the generator; such an error has no frame below the
    caller's.
    """
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


class Stream(Iterator[Piece], AbstractContextManager["Stream"]):
    """The pieces of one answer; `result` holds everything generated so far, at any time.

    One that is dropped is closed.
    """

    def __init__(self, job: Job, steps: Generator[Piece]) -> None:
        self._job = job
        self._pieces = _pieces(job, steps)

    def __repr__(self) -> str:
        result = self.result
        state = result.finish_reason if self.closed else "open"
        return f"Stream({len(result.tokens)} tokens, {state})"

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except ValueError as error:
            if _is_own(error) or not self._job.aborted:
                raise
            raise StopIteration from None  # another thread is in the generator, to close it

    @property
    def result(self) -> GenerationResult:
        """The answer so far; `finish_reason` is `cancelled` until it has ended."""
        return self._job.result()

    def close(self) -> None:
        """Cancel: stop generating and free the cache; `result` stays.

        A reader in another thread, who just waits for a piece, comes to the end after the pass.
        """
        self._job.aborted = True
        try:
            self._pieces.close()
        except ValueError as error:
            if _is_own(error):  # otherwise the reader's thread is in the generator
                raise

    @property
    def closed(self) -> bool:
        """Whether nothing of it is under way any more."""
        return getgeneratorstate(self._pieces) == GEN_CLOSED

    def __exit__(self, *_: object) -> None:
        self.close()
