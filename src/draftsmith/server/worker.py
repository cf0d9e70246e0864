"""One thread owns the scheduler: commands come in by a queue, chunks leave for the event loop.

    event loop:   Worker.call ── Call.start ─▶ commands           Call.chunks ◀─ hand_out
    its thread:                                  └▶ Scheduler.add · step · abort ─┘

Nothing of a job is touched by the event loop once it has started, and nothing of a `Call` by the
thread. The thread sleeps while there is nobody to serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any

from draftsmith.core.session import OF_DRAFTER
from draftsmith.core.stats import Guess
from draftsmith.engine.jobs import Job, Piece
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.scheduler import Scheduler
from draftsmith.errors import DrafterError, DrafterStalled
from draftsmith.server.alternatives import Alternatives, Logprob
from draftsmith.server.refusals import Refusal

MOST_WAITING = 64
"""Chunks that may wait for a reader before its answers are paused."""

_OURS = (DrafterError.__name__, DrafterStalled.__name__)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step gave one answer of a call."""

    index: int
    pieces: tuple[Piece, ...]
    logprobs: tuple[Logprob, ...]
    """Of each piece, where they were asked for."""
    drafts: tuple[tuple[Guess, ...], ...] = ()
    """What the pass drafted, where that was asked for."""
    result: GenerationResult | None = None
    """With the last one: the whole answer."""
    error: Exception | None = None
    """What ended it, where that was no stop rule."""
    queued: float = 0.0
    """With the last one: seconds from the request to its row."""
    seconds: float = 0.0
    """With the last one: from the request to its end."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A job in the worker's hands."""

    job: Job
    index: int
    call: Call
    alternatives: Alternatives | None


class Call:
    """A request's answers as they come; belongs to the event loop. Close it, whatever happens."""

    def __init__(
        self, worker: Worker, answers: int, seconds: float, began: float, counted: bool
    ) -> None:
        """`answers`: how many there will be. `seconds`: that it may take.

        `began`: when the request arrived, by `time.perf_counter`. `counted`: whether the figures
        have them.
        """
        self._worker, self.answers = worker, answers
        self.began, self.counted = began, counted
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._left = answers
        self._waiting: deque[Chunk | Refusal] = deque()
        self._news = asyncio.Event()
        self._tickets: list[Ticket] = []
        self._accepted: asyncio.Future[None] | None = None
        self._paused = self._closed = False

    async def start(self, jobs: Sequence[Job], alternatives: Sequence[Alternatives | None]) -> None:
        """Put the jobs in line; raises what the scheduler has against them."""
        self._tickets = [
            Ticket(job, index, self, seen)
            for index, (job, seen) in enumerate(zip(jobs, alternatives, strict=True))
        ]
        self._accepted = asyncio.get_running_loop().create_future()
        self._worker.command(partial(self._worker.add, self._tickets))
        await self.in_time(self._accepted)

    async def in_time(self, news: Awaitable[Any]) -> Any:
        """Wait for something; raises Refusal when the request's time is over."""
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                return await news
        except TimeoutError:
            if not limit.expired():  # what it waited for has raised this
                raise
            raise Refusal(
                504, "the answer took longer than this server allows", code="timeout"
            ) from None

    async def chunks(self) -> AsyncIterator[Chunk]:
        """All chunks of all answers; raises Refusal, also when its time is over."""
        while self._left:
            await self.in_time(self._any())
            chunk = self._waiting.popleft()
            if self._paused and len(self._waiting) <= MOST_WAITING // 2:
                self._pause(False)
            if isinstance(chunk, Refusal):
                raise chunk
            if chunk.error is not None:
                raise Refusal.of(chunk.error)
            self._left -= chunk.result is not None
            if not self._left:
                self._worker.forget(self)  # whether or not the end is ever read
            yield chunk

    async def _any(self) -> None:
        """Wait for a chunk."""
        await asyncio.sleep(0)  # so that time may be over also where there is one already
        while not self._waiting:
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        """Free what it holds: rows are given back after the running pass at the latest."""
        if not self._closed:
            self._closed = True
            self._worker.forget(self)
            if self._left and self._tickets:
                self._worker.command(partial(self._worker.abort, self._tickets))

    # --- for the worker, on the event loop --------------------------------------------------------

    def accept(self, error: Exception | None) -> None:
        """Say that its jobs are in line, or why they are not."""
        if self._accepted is not None and not self._accepted.done():
            if error is None:
                self._accepted.set_result(None)
            else:
                self._accepted.set_exception(error)

    def put(self, chunk: Chunk | Refusal) -> None:
        """Let a chunk wait for the reader; too many of them pause the answers."""
        if self._closed:
            return
        self._waiting.append(chunk)
        self._news.set()
        if isinstance(chunk, Refusal):
            self.accept(chunk)
        elif not self._paused and len(self._waiting) >= MOST_WAITING:
            self._pause(True)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        self._worker.command(partial(self._worker.pause, self._tickets, paused))


class Worker:
    """The thread, and what the event loop may ask of it."""

    def __init__(
        self, scheduler: Scheduler, capacity: int, observe: Callable[[Chunk], None]
    ) -> None:
        """`capacity`: answers that may run or wait at a time. `observe` is told of every chunk."""
        self.scheduler, self.capacity, self.observe = scheduler, capacity, observe
        self.draining = False
        """Whether no more requests are taken."""
        self._calls: set[Call] = set()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: list[Ticket] = []
        """Those of the thread."""
        self._logged: set[tuple[str, ...]] = set()
        """What failed and was done in another way, as the log has it already."""
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="draftsmith-worker", daemon=True)

    # --- on the event loop ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End all answers and the thread."""
        self.end_all()
        self.command(self._stop)
        await asyncio.to_thread(self._thread.join)

    def leave(self, seconds: float) -> None:
        """Wait so long for the pass that runs, if any does: it shall be the last."""
        self._stopping = True
        self.command(lambda: None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether anybody would be served."""
        return self._thread.is_alive() and not self.draining

    @property
    def open(self) -> int:
        """Answers that run or wait."""
        return sum(call.answers for call in self._calls)

    @property
    def running(self) -> int:
        """Answers that have a row."""
        return sum(ticket.job.admitted is not None for ticket in list(self._live))

    @property
    def reserved(self) -> float:
        """Share of the memory that requests and kept rows may come to hold; 0 where none is set."""
        scheduler = self.scheduler
        needs = (ticket.job.need for ticket in list(self._live) if ticket.job.admitted is not None)
        held = sum(sum(need) for need in needs if need) + scheduler.prefixes.bytes
        return held / scheduler.memory

    def check(self, answers: int) -> None:
        """Raise Refusal where there is no room for so many answers."""
        if not self.alive:
            raise Refusal(503, "this server is shutting down", code="unavailable")
        if answers > self.capacity:
            raise Refusal(
                400, f"this server gives at most {self.capacity} answers at a time", param="n"
            )
        if self.open + answers > self.capacity:
            raise Refusal(
                429,
                f"{self.open} answers run or wait already, of at most {self.capacity}; try again",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def call(
        self,
        answers: int,
        seconds: float,
        began: float | None = None,
        counted: bool = True,
    ) -> Call:
        """Room for so many answers, for so long; raises Refusal where there is none.

        `began`: when the request arrived; None: now.
        """
        self.check(answers)
        began = perf_counter() if began is None else began
        call = Call(self, answers, seconds, began, counted)
        self._calls.add(call)
        return call

    def end_all(self) -> None:
        """Take no more requests and end those there are."""
        self.draining = True
        for call in self._calls:
            call.put(Refusal(503, "this server is shutting down", code="unavailable"))

    def forget(self, call: Call) -> None:
        """Give its room to others."""
        self._calls.discard(call)

    def command(self, command: Callable[[], None]) -> None:
        """Let the thread do something between two steps."""
        self._commands.put(command)

    def _hand_out(self, chunks: Sequence[tuple[Call, Chunk]]) -> None:
        for call, chunk in chunks:
            if call.counted:
                self.observe(chunk)
            call.put(chunk)

    # --- in the thread ----------------------------------------------------------------------------

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Put jobs in line, all of them or none."""
        error = None
        try:
            for ticket in tickets:
                self.scheduler.add(ticket.job)
        except Exception as refused:
            error = refused
            self.abort(tickets)
        else:
            self._live += tickets
        self._tell(partial(tickets[0].call.accept, error))

    def abort(self, tickets: Sequence[Ticket]) -> None:
        """End jobs whose reader is gone."""
        self.scheduler.abort([ticket.job for ticket in tickets])

    def pause(self, tickets: Sequence[Ticket], paused: bool) -> None:
        """Leave jobs out of the passes while their reader has enough to read."""
        for ticket in tickets:
            ticket.job.paused = paused

    def _stop(self) -> None:
        self._stopping = True
        self.abort(self._live)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            log.exception("the worker failed")
            self._tell(self.end_all)

    def _serve(self) -> None:
        busy = False
        while not self._stopping:
            self._obey(wait=not busy)
            error = None
            try:
                if self._live:
                    self.scheduler.step()
            except Exception as failed:  # of a model that was changed meanwhile: nobody's own
                log.exception("a step failed")
                error = failed
                self.abort(self._live)
            served = len(self._live)
            self._deliver(error)
            # A row that was freed is another one's now. Who is paused, or waits for the row of one
            # who is, waits for a command.
            busy = len(self._live) < served or any(
                job.admitted is not None and not job.paused
                for job in (ticket.job for ticket in self._live)
            )

    def _obey(self, wait: bool) -> None:
        """Do what was commanded; `wait` until something is."""
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except Empty:
            pass

    def _deliver(self, error: Exception | None) -> None:
        """Hand out what the step gave, in one message to the event loop."""
        chunks = []
        for ticket in self._live:
            job, now = ticket.job, perf_counter()
            pieces = tuple(job.pieces)
            job.pieces.clear()
            if not (pieces or job.done):
                continue
            seen = ticket.alternatives
            logprobs = () if seen is None else tuple(seen.take([piece.token for piece in pieces]))
            drafts = tuple(job.session.drafts or ())
            if drafts:
                job.session.drafts = []
            chunk = Chunk(ticket.index, pieces, logprobs, drafts)
            if job.done:
                self._log_failures(job)
                chunk = Chunk(
                    ticket.index,
                    pieces,
                    logprobs,
                    drafts,
                    job.result(),
                    job.session.error or error,
                    (job.admitted or now) - job.began,
                    now - job.began,
                )
            chunks.append((ticket.call, chunk))
        self._live = [ticket for ticket in self._live if not ticket.job.done]
        if chunks:
            self._tell(partial(self._hand_out, chunks))

    def _log_failures(self, job: Job) -> None:
        """Log why an answer failed, and once for each kind of error what it did in another way."""
        session = job.session
        if session.error is not None and Refusal.of(session.error).status >= 500:
            log.error("an answer failed", exc_info=session.error)
        for (what, kind), said in session.notices.items():
            fields = {"drafter": str(session.drafter), "kind": kind}
            # Errors of other people's drafters may name what was asked.
            why = {"why": said} if what not in OF_DRAFTER or kind in _OURS else {}
            if (key := (what, *fields.values())) not in self._logged:
                self._logged.add(key)
                log.warning(what, extra={"fields": fields | why})

    def _tell(self, news: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(news)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._stopping = True
