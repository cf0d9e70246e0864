"""State shared by all schedulers of a model: runner, prefix cache, costs, memory, and turns."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter, sleep
from weakref import ref

from draftsmith.core.cost import CostCurve
from draftsmith.engine.memory import need
from draftsmith.engine.prefix_cache import PrefixCache, autocast_mode
from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import OptionError
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.openmp import end_team
from draftsmith.model.runner import Runner

_POLL = 1e-4
"""Seconds between two checks for whether another thread has run a pass."""
_POLLS = 100
"""Number of checks before a thread continues: an interrupt may have left the entry of a thread that
no longer exists."""
_PAUSE = 1.0
"""Seconds without a pass after which a stream counts as paused."""


class Turns:
    """Lets one thread at a time run a pass, and gives the next pass to a waiting thread.

    A pass runs in `with turns.wait(), turns.lock, turns.owner():`. The lock is a plain one, so that
    no interrupt can occur between acquiring it and entering the block.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._owner: int | None = None
        self._process = os.getpid()
        self._passes = 0
        self._present: dict[int, int] = {}
        """Waiting or running thread → number of the pass that it runs; 0 while it waits."""
        self._afterwards: deque[Callable[[], None]] = deque()
        """Functions to call between passes."""

    @property
    def own(self) -> bool:
        """Whether this thread runs a pass, so that it is in a callback of it."""
        return self._owner == threading.get_ident() and self.lock.locked()

    def check(self) -> None:
        """Raise OptionError in a callback of the running pass, which would wait for itself.

        And in a process that was forked during a pass, where the pass never ends.
        """
        if os.getpid() != self._process and self.lock.locked():
            raise OptionError(
                "the parent process computed with this engine when it forked; make another"
            )
        if self.own:
            raise OptionError(
                "a callback cannot generate with the engine that calls it; use another engine, or "
                "generate before or after"
            )

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Register as waiting for a pass, and afterwards give the next pass to another thread.

        Raises OptionError like `check`.
        """
        self.check()
        me = threading.get_ident()
        try:
            self._present[me] = 0
            if self.lock.locked():
                end_team()
            yield
        finally:
            try:
                if number := self._present.pop(me, 0):
                    self._give_way(number)
            finally:
                self._sweep()

    @contextmanager
    def owner(self) -> Iterator[None]:
        """Mark this thread as the one that runs a pass."""
        me = threading.get_ident()
        self._passes += 1
        self._present[me], self._owner = self._passes, me
        try:
            self._tidy()
            yield
        finally:
            self._owner = None
            if len(self._present) > 1:
                end_team()  # another thread runs the next pass

    def between(self, work: Callable[[], None]) -> None:
        """Call `work` between two passes: now, or after the running one. Never waits for a pass.

        So it can be called by garbage collection at any time, even during a pass of this thread.
        """
        self._afterwards.append(work)
        self._sweep()

    def _sweep(self) -> None:
        # A thread that runs a pass calls this after it, so no work is left undone.
        while self._afterwards and not self.lock.locked():
            with self.lock:
                self._tidy()

    def _tidy(self) -> None:
        while self._afterwards:
            try:
                self._afterwards[0]()  # an interrupt leaves it there, and it can be done again
            except Exception:
                self._afterwards.popleft()
                raise
            self._afterwards.popleft()

    def _give_way(self, number: int) -> None:
        """Wait until another thread has started the next pass, or for `_POLLS` checks."""
        for _ in range(_POLLS):
            if not self._present or self._passes != number:
                return
            sleep(_POLL)
        self._present.clear()


class Resources:
    """A model and what its passes share; schedulers are created and dropped."""

    def __init__(
        self,
        model: LoadedModel,
        cost: CostCurve,
        memory: float = inf,
        prefixes: int = 0,
        max_batch: float = inf,
    ) -> None:
        """`memory`: maximum bytes of all sequences. `prefixes`: number of finished rows to keep.

        `max_batch`: maximum number of sequences in a pass.
        """
        self.model, self.cost, self.memory, self.max_batch = model, cost, memory, max_batch
        self.turns = Turns()
        self.runner = Runner(model)
        self.prefixes = PrefixCache(self.runner, prefixes)
        self.admitted: list[TextSequence] = []
        """Sequences of all schedulers that have a row."""
        self._resting: list[ref[TextSequence]] = []
        """Last turns of chats that keep their drafter state, oldest first."""

    def check(self, sequence: TextSequence) -> None:
        """Raise OptionError for a sequence that can never fit into memory, or cannot be exact, and
        for a model that was moved.
        """
        if moved := self.model.moved:
            raise OptionError(f"{moved}: load it again, or make another Engine")
        if self.memory < inf:
            alone = need([sequence], self.runner)
            if sum(alone) > self.memory:
                raise OptionError(
                    f"this request needs {alone} for {sequence.prompt_length} prompt tokens and up "
                    f"to {sequence.limit} new tokens, more than memory={self.memory:,} (by default "
                    "three quarters of the free memory); shorten the prompt, reduce "
                    "max_new_tokens, or raise memory"
                )
        if self.model.exact is not None and autocast_mode(self.model.device):
            raise OptionError("exact=True does not work under autocast; leave its context first")

    def fits(self, sequence: TextSequence) -> bool:
        """Return whether one more sequence fits into memory; drops the oldest kept rows for it."""
        if self.memory == inf:
            return True
        sequences, runner = [*self.admitted, sequence], self.runner
        if sum(need(sequences, runner)) > self.memory:
            return False  # even without any kept row
        kept = self.prefixes.others(sequence)
        most = sum(need(sequences, runner, [one.bytes for one in kept]))
        if most + runner.store.idle_bytes() > self.memory:
            runner.store.free_idle()
        while sum(need(sequences, runner, [one.bytes for one in kept])) > self.memory:
            self.prefixes.close(kept.pop(0).row, runner)
        return True

    def pause(self) -> None:
        """Wait a moment for other threads."""
        sleep(10 * _POLL)

    def check_waiting(self) -> None:
        """Raise OptionError if no other thread runs passes for sequences that hold the memory."""
        holding, now = list(self.admitted), perf_counter()
        threads = {sequence.thread for sequence in holding}
        alive = {thread for thread in threads if thread is not None and thread.is_alive()}
        # The threads of a pool take turns in reading a stream.
        read = any(now - sequence.stepped_at < _PAUSE for sequence in holding)
        if threads and not read and not alive - {threading.current_thread()}:
            raise OptionError(
                f"paused streams hold all the memory (memory={self.memory:,}); close one, read it "
                "to its end, or raise memory"
            )

    def retire(self, sequence: TextSequence, runner: Runner, interrupted: bool) -> None:
        """Free what a finished sequence holds; its row may be kept for prompts that begin alike.

        Call it between passes or within one, and again if an interrupt cut it short.
        `interrupted`: a pass of the sequence was.
        """
        healthy = not interrupted and sequence.error is None
        if sequence.row is not None:
            if healthy and sequence.key is not None:
                self.prefixes.insert(sequence)
            else:
                self.prefixes.close(sequence.row, runner)
            sequence.row = None
        if not interrupted:
            sequence.end_drafter()
        if not (healthy and sequence.of_chat):
            sequence.close_drafter()
        if sequence in self.admitted:
            self.admitted.remove(sequence)

    def rest(self, sequence: TextSequence) -> None:
        """Let the last turn of a chat keep its drafter state; closes those that rested longest.

        At most as many rest as rows are kept, and at least one. Call it between passes.
        """
        others = (turn for one in self._resting if (turn := one()) is not sequence)
        turns = [*others, sequence]  # once, also if an interrupt lets this be called again
        resting = [turn for turn in turns if turn is not None and turn.state is not None]
        for turn in resting[: -max(1, self.prefixes.most)]:
            turn.close_drafter()
        self._resting = [ref(turn) for turn in resting if turn.state is not None]

    @property
    def reserved(self) -> float:
        """Share of the memory that sequences, kept rows and idle buffers may use.

        0 without a limit.
        """
        needs = (sequence.memory_need for sequence in list(self.admitted))
        held = sum(sum(need) for need in needs if need) + self.prefixes.bytes
        return (held + self.runner.store.idle_bytes()) / self.memory
