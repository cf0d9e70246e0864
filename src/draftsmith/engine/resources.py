"""What all schedulers of one model share: the runner, kept rows, costs, memory, and turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from time import sleep

from draftsmith.core.cost import CostCurve
from draftsmith.engine.autocast import autocast_mode
from draftsmith.engine.memory import need
from draftsmith.engine.prefix_cache import PrefixCache
from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import OptionError
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.openmp import end_team
from draftsmith.model.runner import Runner

_POLL = 1e-4
"""Seconds between two looks at whether another thread has had its turn."""
_POLLS = 100
"""Looks after which a thread goes on: an interrupt may have left an entry of a thread that is
gone."""


class Turns:
    """Lets one thread at a time make a pass; threads that wait get the next ones.

    A pass is made in `with turns.line(), turns.lock, turns.owner():`. The lock is a plain one, so
    no interrupt can come between taking it and entering the block.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._owner: int | None = None
        self._passes = 0
        self._present: dict[int, int] = {}
        """Thread in line → the number of the pass that it makes; 0 while it waits."""
        self._afterwards: deque[Callable[[], None]] = deque()
        """Work to do between passes."""

    def check(self) -> None:
        """Raise OptionError in a pass: a callback cannot wait for a pass of its own engine."""
        if self._owner == threading.get_ident() and self.lock.locked():
            raise OptionError(
                "a callback cannot generate on the engine, or the accelerated model, whose pass "
                "has called it; use another engine, or generate before or after"
            )

    @contextmanager
    def line(self) -> Iterator[None]:
        """Wait among those that want to make a pass, and let another one have the next.

        Raises what `check` raises.
        """
        self.check()
        me = threading.get_ident()
        try:
            self._present[me] = 0
            if self.lock.locked():
                end_team()
            yield
        finally:
            if number := self._present.pop(me, 0):
                self._give_way(number)
            self._sweep()

    @contextmanager
    def owner(self) -> Iterator[None]:
        """Be the thread that makes a pass."""
        me = threading.get_ident()
        self._passes += 1
        self._present[me], self._owner = self._passes, me
        try:
            self._tidy()
            yield
        finally:
            self._owner = None
            if len(self._present) > 1:
                end_team()  # the next pass computes in another thread

    def between(self, work: Callable[[], None]) -> None:
        """Call `work` between two passes: now, or after the one that runs. Waits for no pass.

        So garbage collection may call this at any time, also amid a pass of its own thread.
        """
        self._afterwards.append(work)
        self._sweep()

    def _sweep(self) -> None:
        # A thread that makes a pass does this after it, so one of both finds what is left.
        while self._afterwards and not self.lock.locked():
            with self.lock:
                self._tidy()

    def _tidy(self) -> None:
        while self._afterwards:
            self._afterwards.popleft()()

    def _give_way(self, number: int) -> None:
        """Let a thread that waits make the next pass after this one."""
        for _ in range(_POLLS):
            if not self._present or self._passes != number:
                return
            sleep(_POLL)
        self._present.clear()


class Resources:
    """One model, and what its passes share; schedulers come and go."""

    def __init__(
        self,
        model: LoadedModel,
        cost: CostCurve,
        memory: float = inf,
        prefixes: int = 0,
    ) -> None:
        """`memory`: most bytes of all sequences. `prefixes`: ended rows that are kept."""
        self.model, self.cost, self.memory = model, cost, memory
        self.turns = Turns()
        self.prefixes = PrefixCache(Runner(model, rewinds=False), prefixes)
        self.admitted: list[TextSequence] = []
        """Those of all schedulers that have a row."""

    def new_runner(self) -> Runner:
        """A scheduler's runner: the shared one where rows are kept, else one of its own.

        Whoever keeps nothing may have changed the model since the last call.
        """
        if self.prefixes.most:
            return self.prefixes.runner
        return Runner(self.model, rewinds=False)

    def check(self, sequence: TextSequence) -> None:
        """Raise OptionError for a sequence that can never run."""
        if self.memory < inf:
            alone = need([sequence], self.prefixes.runner)
            if sum(alone) > self.memory:
                raise OptionError(
                    f"this request, {sequence.prompt_length} tokens and up to {sequence.limit} new "
                    f"ones, needs {alone}, but memory={self.memory:,} is all there may be (by "
                    "default most of what was free); shorten the prompt, ask for fewer tokens, or "
                    "raise memory"
                )
        sequence.exact = self.model.exact is not None
        if sequence.exact and autocast_mode(self.model.device):
            raise OptionError("exact=True cannot hold under autocast: leave its context first")

    def fits(self, sequence: TextSequence) -> bool:
        """Whether there is memory for one more; kept rows are dropped for it, the oldest first."""
        if self.memory == inf:
            return True
        sequences, runner = [*self.admitted, sequence], self.prefixes.runner
        if sum(need(sequences, runner)) > self.memory:
            return False  # with none of them neither
        kept = self.prefixes.others(sequence)
        while sum(need(sequences, runner, [one.bytes for one in kept])) > self.memory:
            self.prefixes.drop(kept.pop(0))
        return True

    def wait_for_memory(self) -> None:
        """Let other threads end sequences; raises OptionError where only this one has any."""
        threads = {sequence.thread for sequence in list(self.admitted)}
        if threads == {threading.get_ident()}:
            raise OptionError(
                f"streams that are paused in this thread hold the memory (memory={self.memory:,}): "
                "close one, read it to its end, or raise memory"
            )
        sleep(10 * _POLL)

    def retire(self, sequence: TextSequence, runner: Runner, sound: bool) -> None:
        """Free what an ended sequence holds; its row may be kept for prompts that begin alike.

        Called between passes or within one, and again where an interrupt cut it short. `sound`: no
        pass of it was interrupted.
        """
        healthy = sound and sequence.error is None
        if sequence.row is not None:
            if healthy and sequence.key is not None:
                self.prefixes.keep(sequence)
            else:
                self.prefixes.close(sequence.row, runner)
            sequence.row = None
        if sound:
            sequence.end_drafter()
        if not (healthy and sequence.keeps_drafter):
            sequence.close_drafter()
        if sequence in self.admitted:
            self.admitted.remove(sequence)

    def retire_later(self, sequence: TextSequence, runner: Runner, sound: bool) -> None:
        """Do so now, or after the pass that runs."""
        self.turns.between(partial(self.retire, sequence, runner, sound))

    @property
    def reserved(self) -> float:
        """Share of the memory that sequences and kept rows may come to hold; 0 without a limit."""
        needs = (sequence.need for sequence in list(self.admitted))
        held = sum(sum(need) for need in needs if need) + self.prefixes.bytes
        return held / self.memory
