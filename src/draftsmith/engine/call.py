"""Call and Stream: the sequences of one call, driven in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from time import perf_counter

from draftsmith.engine.resources import Resources
from draftsmith.engine.result import GenerationResult
from draftsmith.engine.scheduler import Scheduler
from draftsmith.engine.sequence import Piece, TextSequence, partial_results, raise_failures
from draftsmith.model.openmp import end_team


class Call(AbstractContextManager["Call"]):
    """The sequences of one call, with their own scheduler; leaving the context ends them.

    An exception from a pass, such as KeyboardInterrupt, ends all sequences of the call. Tokens from
    before that pass are kept.
    """

    def __init__(
        self,
        resources: Resources,
        sequences: Sequence[TextSequence],
        started: Callable[[], object] = lambda: None,
        ended: Callable[[bool], object] = lambda _interrupted: None,
    ) -> None:
        """`started` is called before the first pass. `ended` is called after the last pass, if
        there was a first step, with whether that pass was interrupted."""
        self.sequences = sequences
        self._resources, self._started, self._ended = resources, started, ended
        self._scheduler: Scheduler | None = None
        self._stepping = threading.Lock()
        self._interrupted = False
        """Whether a pass is running or was interrupted."""
        self.closed = False
        """Whether it was asked to end; a pass may still be running in another thread."""
        self.ended = False
        """Whether its sequences have ended and their rows are free."""

    @property
    def running(self) -> bool:
        """Whether a thread runs a pass for it."""
        return self._stepping.locked()

    def run(self, after_step: Callable[[], object] = lambda: None) -> None:
        """Run passes until all sequences have ended; call `after_step` after each."""
        while not self.ended:
            self.step()
            after_step()

    def step(self) -> None:
        """Run one pass for all unfinished sequences; the first call starts them."""
        self._resources.turns.check()  # in a callback of this call, the lock would never be free
        with self._stepping:
            if not self.ended:
                unfinished, self._interrupted = False, True
                try:
                    unfinished = self._step()
                    self._interrupted = False
                finally:
                    if not unfinished:
                        self._end()
        if self.closed:  # another thread or a callback closed it during the pass
            self.close()

    def _step(self) -> bool:
        if self._scheduler is None:
            self._scheduler = Scheduler(self._resources)
            self._started()
            for sequence in self.sequences:
                self._resources.check(sequence)
                self._scheduler.add(sequence)
        for sequence in self.sequences:
            sequence.thread = threading.current_thread()
        for sequence in self._scheduler.step():
            sequence.book()
        now = perf_counter()
        for sequence in self.sequences:
            sequence.stepped_at = now
        return self._scheduler.unfinished

    def close(self) -> None:
        """End all sequences; if another thread runs a pass for them, after that pass."""
        self.closed = True
        if not self._stepping.locked():
            with self._stepping:
                if not self.ended:
                    self._end()

    def _end(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close(interrupted=self._interrupted)
            for sequence in self.sequences:
                sequence.book()
            self._ended(self._interrupted)
            end_team()  # the next pass may run in another thread
        self.ended = True

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(Iterator[Piece], AbstractContextManager["Stream"]):
    """Pieces of one answer; `result` holds everything generated so far, at any time.

    A stream that is garbage-collected is closed.
    """

    def __init__(self, sequence: TextSequence, call: Call) -> None:
        self._sequence, self._call = sequence, call
        self._raised = False
        """Whether the error of the answer was raised, which is done once."""

    def __repr__(self) -> str:
        result = self.result
        state = result.finish_reason if self.closed else "open"
        return f"Stream({len(result.tokens)} tokens, {state})"

    def __next__(self) -> Piece:
        sequence, call = self._sequence, self._call
        if call.closed and (self._raised or sequence.error is None):
            raise StopIteration
        with partial_results([sequence]):
            while not (sequence.pieces or call.ended):
                call.step()
            if not (sequence.pieces or self._raised):
                call.close()
                self._raised = True
                raise_failures([sequence])
        if not sequence.pieces:
            raise StopIteration
        return sequence.pieces.popleft()

    @property
    def result(self) -> GenerationResult:
        """The answer so far; `finish_reason` is `cancelled` until it has ended."""
        return self._sequence.result()

    def close(self) -> None:
        """Stop generating and free the cache; `result` stays available.

        A thread that waits for a piece gets StopIteration after the running pass, or the answer's
        error if that was not raised yet.
        """
        self._call.close()

    @property
    def closed(self) -> bool:
        """Whether the answer has ended and its row is free."""
        return self._call.ended

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
