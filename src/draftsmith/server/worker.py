"""Worker and Job: run requests in the engine's thread, and limit their number and time.

    event loop:        Job.start ─▶ EngineThread.submit        Job.chunks ◀─ Job.put
    engine's thread:                   └▶ passes ─▶ Job.on_update ──────────────────┘

Once a sequence is submitted, only the engine's thread changes it. Everything else in a `Job` is
used by the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from draftsmith.core.sequence import OF_DRAFTER
from draftsmith.core.stats import Guess
from draftsmith.engine.engine import Engine
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.sequence import Piece, TextSequence
from draftsmith.errors import DrafterError, DrafterStalled, OptionError
from draftsmith.server.alternatives import Alternatives, Logprob
from draftsmith.server.refusals import Refusal

_OURS = (DrafterError.__name__, DrafterStalled.__name__)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one answer that a step of the engine adds."""

    index: int
    pieces: tuple[Piece, ...]
    logprobs: tuple[Logprob, ...]
    """One for each piece, if the request asks for them."""
    drafts: tuple[tuple[Guess, ...], ...] = ()
    """Drafted nodes of each pass, if the request asks for them."""
    result: GenerationResult | None = None
    """In the last chunk: the result for the whole answer."""
    error: Exception | None = None
    """Error that ended the answer."""
    queued: float = 0.0
    """In the last chunk: seconds from the arrival of the request to its admission."""
    seconds: float = 0.0
    """In the last chunk: seconds from the arrival of the request to its end."""
    stop: str | None = None
    """In the last chunk: the stop string that ended the answer."""


class Deadline:
    """A context that is cancelled at a time of the event loop, and then raises Refusal."""

    def __init__(self, when: float, message: str, **fields: Any) -> None:
        self._timeout = asyncio.timeout_at(when)
        self._message, self._fields = message, fields

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:  # not one that the block raised
            raise Refusal(self._message, **self._fields) from None


class Job:
    """The answers to one request, for use in the event loop. Always call `close` at the end."""

    def __init__(self, worker: Worker, answers: int, began: float, counted: bool) -> None:
        """`answers`: number of answers. `began`: arrival of the request, by `time.perf_counter`.
        `counted`: whether the metrics include the job.
        """
        self._worker = worker
        self.began, self._counted = began, counted
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + worker.seconds - (perf_counter() - began)
        self.left = answers
        """Number of answers that have chunks left."""
        self._waiting = asyncio.Queue[Chunk | Refusal]()
        self._sequences: dict[TextSequence, tuple[int, Alternatives | None]] = {}
        self._closed = False
        self.prompt: list[int] = []
        """Token ids of the first prompt, once the sequences are submitted."""

    @property
    def running(self) -> int:
        """Number of answers that have a row."""
        admitted = (one for one in self._sequences if one.admitted_at is not None)
        return sum(not sequence.finished for sequence in admitted)

    def start(self, sequences: Sequence[TextSequence], top: int | None = None) -> None:
        """Submit the sequences; raises the errors of `EngineThread.submit`.

        `top`: number of alternatives for each token's log-probability; None: none are given.
        """
        for index, sequence in enumerate(sequences):
            seen = None if top is None else Alternatives(sequence, top)
            self._sequences[sequence] = index, seen
        self.prompt = sequences[0].ids[: sequences[0].prompt_length]
        thread = self._worker.engine.thread
        try:
            thread.submit(sequences, self.on_update)
        except OptionError:
            if thread.alive:
                raise
            raise self._worker.failed() from None

    def in_time(self) -> Deadline:
        """Return a context that ends at the time limit of the request."""
        message = "the answer took longer than this server allows"
        return Deadline(self._deadline, message, status=504, code="timeout")

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield all chunks of all answers; raise Refusal for errors and at the time limit."""
        while self.left:
            async with self.in_time():
                await asyncio.sleep(0)  # lets the timeout fire even if a chunk is there
                chunk = await self._waiting.get()
            if isinstance(chunk, Refusal):
                raise chunk
            if chunk.error is not None:
                if not self._worker.engine.thread.alive:
                    raise self._worker.failed()
                raise Refusal.of(chunk.error)
            self.left -= chunk.result is not None
            if not self.left:
                self._worker.jobs.discard(self)  # even if the last chunk is never read
            yield chunk

    def put(self, chunk: Chunk | Refusal) -> None:
        """Record a chunk in the metrics and queue it for `chunks`; queue a refusal."""
        if isinstance(chunk, Chunk) and self._counted:
            self._worker.observe(chunk)
        if not self._closed:
            self._waiting.put_nowait(chunk)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the job if the block raises an error or is cancelled."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel unfinished answers. Their rows are freed after the running pass at the latest."""
        if not self._closed:
            self._closed = True
            self._worker.jobs.discard(self)
            if self.left and self._sequences:
                self._worker.engine.thread.cancel([*self._sequences])

    def on_update(self, sequence: TextSequence, ended: bool) -> None:
        """Send new pieces to the event loop as a chunk; called in the engine's thread."""
        (index, seen), now = self._sequences[sequence], perf_counter()
        pieces = tuple(sequence.pieces)
        sequence.pieces.clear()
        logprobs = () if seen is None else tuple(seen.take([piece.token for piece in pieces]))
        drafts = tuple(sequence.drafts or ())
        if drafts:
            sequence.drafts = []
        end: tuple[Any, ...] = ()
        if ended:
            self._worker.log_failures(sequence)
            queued = (sequence.admitted_at or now) - sequence.began
            stop = None if sequence.stream is None else sequence.stream.stopped
            end = sequence.result(), sequence.error, queued, now - sequence.began, stop
        chunk = Chunk(index, pieces, logprobs, drafts, *end)
        if pieces or ended:
            with suppress(RuntimeError):  # the loop is closed, so no reader waits
                self._loop.call_soon_threadsafe(self.put, chunk)


class Worker:
    """The open jobs of the server, with a limit on the number of their answers."""

    def __init__(
        self, engine: Engine, capacity: int, seconds: float, observe: Callable[[Chunk], None]
    ) -> None:
        """`capacity`: maximum number of answers that run or wait. `seconds`: time limit of a
        request. `observe` is called with every chunk of a counted job."""
        self.engine, self.seconds, self.observe = engine, seconds, observe
        self._capacity = capacity
        self.draining = False
        """Whether new requests are refused."""
        self.jobs: set[Job] = set()
        """Jobs that are not closed, and have chunks left."""
        self._logged: set[tuple[str, ...]] = set()
        """Kinds of failures that were logged."""

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return self.engine.thread.alive and not self.draining

    @property
    def open(self) -> int:
        """Number of answers that run or wait."""
        return sum(job.left for job in self.jobs)

    @property
    def running(self) -> int:
        """Number of answers that have a row."""
        return sum(job.running for job in list(self.jobs))

    def failed(self) -> Refusal:
        """Return the error of all requests after the engine's thread has ended."""
        return Refusal("this server's engine has failed", status=503, code="unavailable")

    def check(self, answers: int) -> None:
        """Raise Refusal if the server cannot accept this number of answers now."""
        if not self.alive:
            raise Refusal("this server is shutting down", status=503, code="unavailable")
        if answers > self._capacity:
            raise Refusal(
                f"this server gives at most {self._capacity} answers at a time", param="n"
            )
        if self.open + answers > self._capacity:
            raise Refusal(
                f"{self.open} answers run or wait already, of at most {self._capacity}; try again",
                status=429,
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def job(self, answers: int, began: float, counted: bool = True) -> Job:
        """Open a job and reserve places for its answers; raise Refusal if there are not enough."""
        self.check(answers)
        job = Job(self, answers, began, counted)
        self.jobs.add(job)
        return job

    def end_all(self) -> None:
        """Refuse new requests, and end all jobs."""
        self.draining = True
        for job in self.jobs:
            job.put(Refusal("this server is shutting down", status=503, code="unavailable"))

    def log_failures(self, sequence: TextSequence) -> None:
        """Log the error of an answer, and each kind of other failure once."""
        if sequence.error is not None and Refusal.of(sequence.error).status >= 500:
            log.error("an answer failed", exc_info=sequence.error)
        for (what, kind), said in sequence.failures.items():
            fields = {"drafter": str(sequence.drafter), "kind": kind}
            # Errors of third-party drafters may contain parts of the prompt.
            why = {"why": said} if what not in OF_DRAFTER or kind in _OURS else {}
            if (key := (what, *fields.values())) not in self._logged:
                self._logged.add(key)
                log.warning(what, extra={"fields": fields | why})
