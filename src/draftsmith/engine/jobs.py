"""Jobs: sessions with their text, driven to their end by the loop, alone or in a ragged batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from draftsmith.core.budget import CostCurve
from draftsmith.core.loop import start, step
from draftsmith.core.session import Session
from draftsmith.core.stats import TARGET, Step
from draftsmith.engine.result import GenerationResult
from draftsmith.errors import DraftsmithError, GenerationInterrupted
from draftsmith.model.runner import Runner
from draftsmith.text.tokenizer import TextStream, decode


@dataclass(frozen=True, slots=True)
class Piece:
    """A bit of streamed answer: the text one token released, who guessed it, when it came."""

    text: str
    token: int
    source: str
    seconds: float
    """Since the call."""


@dataclass(slots=True)
class Job:
    """A session with what it takes to turn it into a result."""

    session: Session
    tokenizer: Any
    stream: TextStream | None = None
    """Set where text is wanted while tokens come: for streaming and for stop strings."""
    notices: tuple[str, ...] = ()
    began: float = field(default_factory=perf_counter)
    sources: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def take(self, done: Step) -> list[Piece]:
        """Book one step; the pieces of text that its tokens released."""
        now = perf_counter() - self.began
        if not self.sources:
            self.session.stats.first_token_seconds = now
        self.sources += done.sources
        if self.stream is None:
            return []
        texts = self.stream.take()
        if self.session.finished:
            texts[-1] += self.stream.held()
        self.released += texts
        return [
            Piece(text, token, source, now)
            for text, token, source in zip(texts, done.tokens, done.sources, strict=True)
        ]

    def result(self) -> GenerationResult:
        """What was generated so far."""
        session = self.session
        new = range(session.prompt_length, len(session.ids))
        tokens = session.ids[session.prompt_length :]
        # Tokens committed by a step that then failed have not been booked.
        sources = self.sources + [TARGET] * (len(tokens) - len(self.sources))
        if self.stream is not None:
            self.released += self.stream.take()
            text = "".join(self.released)
            if not session.finished:
                text += self.stream.held()
        else:
            text = decode(self.tokenizer, tokens) if self.tokenizer is not None else ""
        return GenerationResult(
            tokens=tokens,
            text=text,
            finish_reason=session.finish_reason or "cancelled",
            stats=session.stats,
            sources=sources,
            origins=[session.origins.get(position) for position in new],
            logprobs=session.logprobs,
            prompt_tokens=session.ids[: session.prompt_length],
            notices=self.notices,
        )


def run(
    jobs: Sequence[Job],
    runner: Runner,
    cost: CostCurve,
    max_batch: int = 1,
    *,
    keep: bool = False,
) -> Generator[list[Piece]]:
    """Drive jobs to their end, up to `max_batch` at a time; yields what every step released.

    A job joins as soon as another one leaves. When the generator ends or is closed, the rows are
    freed (unless `keep`) and the sessions hold what was generated.
    """
    waiting = [job for job in reversed(jobs) if not job.session.finished]
    active: list[Job] = []
    try:
        while waiting or active:
            while waiting and len(active) < max_batch:
                active.append(waiting.pop())
                start(active[-1].session, runner)
            steps = step([job.session for job in active], runner, cost)
            # All are booked before any is shown: the caller may stop at a yield.
            yield from [job.take(done) for job, done in zip(active, steps, strict=True)]
            for job in [job for job in active if job.session.finished]:
                active.remove(job)
                if not keep:
                    release(job.session, runner)
    finally:
        if not keep:
            for job in active:
                release(job.session, runner)


def release(session: Session, runner: Runner) -> None:
    """Free a session's cache row and drafter state."""
    if session.row is not None:
        runner.close(session.row)
        session.row = None
    if session.state is not None:
        session.state.close()
        session.state = None


@contextmanager
def partial_results(jobs: Sequence[Job]) -> Iterator[None]:
    """Turn a failure half-way into GenerationInterrupted, which holds what there is.

    Ctrl-C stays a KeyboardInterrupt, with the same attribute `partial`.
    """
    try:
        yield
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


class Stream(Iterator[Piece], AbstractContextManager["Stream"]):
    """The pieces of one answer; `result` holds everything generated so far, at any time."""

    def __init__(self, job: Job, steps: Generator[list[Piece]]) -> None:
        self._job = job
        self._steps = steps
        self._pieces = self._iterate()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def _iterate(self) -> Generator[Piece]:
        with partial_results([self._job]):
            for pieces in self._steps:
                yield from pieces

    @property
    def result(self) -> GenerationResult:
        """The answer so far; `finish_reason` is `cancelled` until it has ended."""
        return self._job.result()

    def close(self) -> None:
        """Cancel: stop generating and free the cache; `result` stays."""
        self._pieces.close()
        self._steps.close()

    def __exit__(self, *_: object) -> None:
        self.close()
