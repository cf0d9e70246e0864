"""The engine's own thread: one scheduler, whose passes all that was submitted shares.

any thread:    submit ── sequences ─▶ commands            listener(sequence) ─▶ its own reader
this thread:                       └▶ Scheduler.add · step · abort ─┘
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from draftsmith.engine.resources import Resources
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.scheduler import Scheduler
from draftsmith.engine.sequence import Piece, TextSequence, partial_results, raise_failures
from draftsmith.errors import DraftsmithError, LoadError, OptionError
from draftsmith.model.openmp import end_team
from draftsmith.text.tokenizer import NO_TOKENIZER

log = logging.getLogger(__name__)

Listener = Callable[[TextSequence, bool], None]
"""Called in the engine's thread when a sequence has new pieces or has ended; the second argument
says if it has ended."""


class EngineThread:
    """Drives what any thread submits; starts with the first submission and sleeps between."""

    def __init__(self, resources: Resources, max_batch: int) -> None:
        self._resources, self._max_batch = resources, max_batch
        self.turns = resources.turns
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._listeners: dict[TextSequence, Listener] = {}
        """Of the thread alone."""
        self._lock = threading.Lock()
        """So that nothing is submitted once `_closing` is set."""
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def alive(self) -> bool:
        """Whether what is submitted would be served."""
        return not self._closing and (self._thread is None or self._thread.is_alive())

    def submit(self, sequences: Sequence[TextSequence], listener: Listener) -> None:
        """Drive some sequences, all of them or none; `listener` hears of each of them.

        Raises OptionError for one that can never run, and after `close`.
        """
        for sequence in sequences:
            self._resources.check(sequence)
        with self._lock:
            if not self.alive:
                raise OptionError("this engine is closed, and takes no more requests")
            self._commands.put(partial(self._add, sequences, listener))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="draftsmith-engine", daemon=True
                )
                self._thread.start()

    def cancel(self, sequences: Sequence[TextSequence]) -> None:
        """End sequences after the running pass; their listener hears of it."""
        self._commands.put(partial(self._cancel, sequences))

    def close(self, seconds: float | None = None) -> None:
        """End all sequences and the thread; wait at most so long for the pass that runs."""
        self._end_submissions()
        self._commands.put(lambda: None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _end_submissions(self) -> None:
        with self._lock:
            self._closing = True

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._scheduler = Scheduler(self._resources, self._max_batch)
        try:
            while not self._closing:
                self._obey()
                if not self._closing:
                    self._step()
        except BaseException:
            log.exception("the engine's thread failed")
            for sequence in self._listeners:
                sequence.fail(DraftsmithError("the engine's thread failed; the log says why"))
        finally:
            self._end_submissions()
            while not self._commands.empty():
                self._commands.get()()
            self._cancel([*self._listeners])
            end_team()

    def _obey(self) -> None:
        """Carry out the commands there are; sleep until there is one, or a sequence to drive."""
        try:
            while True:
                if idle := not self._scheduler.unfinished and self._commands.empty():
                    end_team()  # other threads may make the next pass
                self._commands.get(block=idle)()
                if self._closing:
                    return
        except Empty:
            return

    def _step(self) -> None:
        try:
            served = self._scheduler.step()
        except Exception as error:  # the model was changed meanwhile: concerns all sequences
            log.exception("a pass failed")
            served = [*self._listeners]
            for sequence in served:
                sequence.fail(error)
                self._scheduler.abort(sequence, sound=False)
        for sequence in served:
            sequence.book()
            self._tell(sequence, sequence.finished)

    def _add(self, sequences: Sequence[TextSequence], listener: Listener) -> None:
        for sequence in sequences:
            self._listeners[sequence] = listener
            self._scheduler.add(sequence)
            if sequence.finished:  # no token was asked for
                self._tell(sequence, True)

    def _cancel(self, sequences: Sequence[TextSequence]) -> None:
        for sequence in sequences:
            if sequence in self._listeners:
                self._scheduler.abort(sequence)
                self._tell(sequence, True)

    def _tell(self, sequence: TextSequence, ended: bool) -> None:
        listener = self._listeners.pop(sequence) if ended else self._listeners[sequence]
        try:
            listener(sequence, ended)
        except Exception:  # the reader's own failure ends nobody else's answer
            log.exception("the reader of an answer failed")


class Handle(Iterator[Piece]):
    """An answer that the engine's thread computes: wait for it, iterate over it, or cancel it.

    `await handle` and `async for piece in handle` do the same in asyncio. The answer is computed
    whether it is read or not.
    """

    def __init__(self, thread: EngineThread, sequence: TextSequence, owner: object) -> None:
        """`owner` closes the thread when it is collected as garbage; not before the answer ends."""
        self._thread, self._job, self._owner = thread, sequence, owner
        self._pieces: deque[Piece] = deque()
        self._ended = False
        self._wakers: deque[Callable[[], None]] = deque()
        """What wakes those that wait. They note theirs first and look for news then; the engine's
        thread does it the other way round. So no lock is needed that an interrupt could leave."""
        thread.submit([sequence], self._hear)

    def _hear(self, sequence: TextSequence, ended: bool) -> None:
        while sequence.pieces:
            self._pieces.append(sequence.pieces.popleft())
        self._ended = ended
        while self._wakers:
            self._wakers.popleft()()

    def _has_news(self) -> bool:
        if self._job.stream is None:
            raise LoadError(NO_TOKENIZER.format(what="tokens cannot be turned into text"))
        return bool(self._pieces) or self._ended

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return self._ended

    def cancel(self) -> None:
        """End the answer after the running pass; what there is of it stays."""
        self._thread.cancel([self._job])

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the whole answer.

        Raises TimeoutError after `timeout` seconds, and what `generate` raises.
        """
        end = None if timeout is None else perf_counter() + timeout
        while not self._ended:
            if not self._wait(lambda: self._ended, end):
                raise TimeoutError(f"the answer has not ended within {timeout} s")
        return self._result()

    def _result(self) -> GenerationResult:
        with partial_results([self._job]):
            raise_failures([self._job])
        return self._job.result()

    def _wait(self, ready: Callable[[], bool], end: float | None = None) -> bool:
        """Sleep until there is any news; False at the time `end`."""
        self._thread.turns.check()
        woken = threading.Lock()
        woken.acquire()
        self._wakers.append(woken.release)
        left = -1.0 if end is None else max(0.0, end - perf_counter())
        return ready() or woken.acquire(timeout=left)

    def __next__(self) -> Piece:
        while not self._has_news():
            self._wait(self._has_news)
        if self._pieces:
            return self._pieces.popleft()
        self._result()
        raise StopIteration

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._whole().__await__()

    async def _whole(self) -> GenerationResult:
        while not self._ended:
            await self._sleep(lambda: self._ended)
        return self._result()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            while not self._has_news():
                await self._sleep(self._has_news)
            if not self._pieces:
                self._result()
                return
            yield self._pieces.popleft()

    async def _sleep(self, ready: Callable[[], bool]) -> None:
        """As `_wait`, without a thread."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(woken.set)

        self._wakers.append(wake)
        if not ready():
            await woken.wait()
