"""EngineThread: one scheduler in its own thread, where all submitted requests share passes.

any thread:    submit ── sequences ─▶ commands            listener(sequence) ─▶ reader of the answer
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
"""Called in the engine's thread when a sequence has new pieces or has ended. The second argument is
True if it has ended."""


LOOK = 1.0
"""Seconds after which a waiting thread looks whether it waits for itself."""


class EngineThread:
    """Runs the requests of any thread; starts with the first one and sleeps when there are none."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._listeners: dict[TextSequence, Listener] = {}
        """Used by the thread only."""
        self._lock = threading.Lock()
        """Prevents submissions after `_closing` is set."""
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return not self._closing and (self._thread is None or self._thread.is_alive())

    def submit(self, sequences: Sequence[TextSequence], listener: Listener) -> None:
        """Run sequences, all of them or none; `listener` is called for each of them.

        Raises OptionError for a sequence that needs more memory than there is, and after `close`.
        """
        for sequence in sequences:
            self.resources.check(sequence)
        with self._lock:
            if not self.alive:
                raise OptionError(
                    "this engine is closed, or a parent process runs it; make another"
                )
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="draftsmith-engine", daemon=True)
                thread.start()
                self._thread = thread
            self._commands.put(partial(self._add, sequences, listener))

    def cancel(self, sequences: Sequence[TextSequence]) -> None:
        """End sequences after the running pass, and call their listener."""
        self._commands.put(partial(self._cancel, sequences))

    def close(self, seconds: float | None = None) -> None:
        """End all sequences and the thread; wait at most `seconds` for the running pass."""
        self._end_submissions()
        self._commands.put(lambda: None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _end_submissions(self) -> None:
        with self._lock:
            self._closing = True

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._scheduler = Scheduler(self.resources, patient=True)
        try:
            while not self._closing:
                self._run_commands()
                if not self._closing:
                    self._step()
        except BaseException:
            log.exception("the engine's thread failed")
            for sequence in self._listeners:
                sequence.fail(DraftsmithError("the engine's thread failed; see the log"))
        finally:
            self._end_submissions()
            while not self._commands.empty():
                self._commands.get()()
            self._cancel([*self._listeners])
            end_team()

    def _run_commands(self) -> None:
        """Run the queued commands; sleep until there is one, or a sequence to run."""
        try:
            while True:
                if idle := not self._scheduler.unfinished and self._commands.empty():
                    end_team()  # the next pass may run in another thread
                self._commands.get(block=idle)()
                if self._closing:
                    return
        except Empty:
            return

    def _step(self) -> None:
        try:
            served = self._scheduler.step()
        except Exception as error:  # such as a changed model: concerns all sequences
            log.exception("a pass failed")
            served = [*self._listeners]
            for sequence in served:
                sequence.fail(error)
                self._scheduler.abort(sequence, interrupted=True)
        for sequence in served:
            sequence.book()
            self._notify(sequence, sequence.finished)

    def _add(self, sequences: Sequence[TextSequence], listener: Listener) -> None:
        for sequence in sequences:
            self._listeners[sequence] = listener
            self._scheduler.add(sequence)
            if sequence.finished:  # max_new_tokens was 0
                self._notify(sequence, True)

    def _cancel(self, sequences: Sequence[TextSequence]) -> None:
        for sequence in sequences:
            if sequence in self._listeners:
                self._scheduler.abort(sequence)
                self._notify(sequence, True)

    def _notify(self, sequence: TextSequence, ended: bool) -> None:
        listener = self._listeners.pop(sequence) if ended else self._listeners[sequence]
        try:
            listener(sequence, ended)
        except Exception:  # an error of one reader must not end other answers
            log.exception("the listener of an answer failed")


class Handle(Iterator[Piece]):
    """An answer that the engine's thread computes; wait for it, iterate over it, or cancel it.

    `await handle` and `async for piece in handle` do the same in asyncio. The answer is computed
    even if it is not read.
    """

    def __init__(self, thread: EngineThread, sequence: TextSequence, owner: object) -> None:
        """`owner`: the object that closes the thread when collected; kept until the answer ends."""
        self._thread, self._sequence, self._owner = thread, sequence, owner
        self._pieces: deque[Piece] = deque()
        self._ended = False
        self._wakers: deque[Callable[[], None]] = deque()
        """Functions that wake waiting readers. A reader first adds its function and then looks for
        news; the engine's thread works in the reverse order. So no lock is needed, which an
        interrupt could leave locked."""
        thread.submit([sequence], self._on_update)

    def __repr__(self) -> str:
        state = self._sequence.finish_reason or "cancelled" if self._ended else "open"
        return f"Handle({state})"

    def _on_update(self, sequence: TextSequence, ended: bool) -> None:
        while sequence.pieces:
            self._pieces.append(sequence.pieces.popleft())
        self._ended = ended
        while self._wakers:
            self._wakers.popleft()()

    def _has_news(self) -> bool:
        if self._sequence.stream is None:
            raise LoadError(NO_TOKENIZER.format(what="tokens cannot be turned into text"))
        return bool(self._pieces) or self._ended

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return self._ended

    def cancel(self) -> None:
        """End the answer after the running pass; what was generated is kept."""
        self._thread.cancel([self._sequence])

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the whole answer.

        Raises TimeoutError after `timeout` seconds, and the errors of `generate`.
        """
        end = None if timeout is None else perf_counter() + timeout
        while not self._ended:
            if not self._wait(lambda: self._ended, end):
                raise TimeoutError(f"the answer has not ended within {timeout} s")
        return self._result()

    def _result(self) -> GenerationResult:
        with partial_results([self._sequence]):
            raise_failures([self._sequence])
        return self._sequence.result()

    def _wait(self, ready: Callable[[], bool], end: float | None = None) -> bool:
        """Sleep until `ready` may have changed; return False if it has not by the time `end`."""
        self._thread.resources.turns.check()
        woken = threading.Lock()
        woken.acquire()
        self._wakers.append(woken.release)
        while not ready():
            left = LOOK if end is None else min(LOOK, end - perf_counter())
            if left <= 0:
                return False
            if woken.acquire(timeout=left):
                return True
            if self._sequence.admitted_at is None:
                self._thread.resources.check_waiting()
        return True

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
        """Like `_wait`, in asyncio."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, so no reader waits
                loop.call_soon_threadsafe(woken.set)

        self._wakers.append(wake)
        if not ready():
            await woken.wait()
