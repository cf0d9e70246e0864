"""What all schedulers of one model share: the runner, kept rows, costs, memory, and turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from time import sleep
from typing import TypeVar

from draftsmith.core.budget import CostCurve
from draftsmith.engine.autocast import autocast_mode
from draftsmith.engine.jobs import Job
from draftsmith.engine.memory import need
from draftsmith.engine.prefixes import Prefixes
from draftsmith.errors import OptionError
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.openmp import end_team
from draftsmith.model.runner import Runner

T = TypeVar("T")

_POLL = 1e-4
"""Seconds between two looks at whether another thread has had its turn."""


class Turns:
    """Lets one thread at a time make a pass; threads that wait get the next ones."""

    def __init__(self) -> None:
        # A plain lock in a `with`: no interrupt can come between taking it and entering the block.
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._present: list[int] = []
        """Threads that make a pass or wait for one."""
        self._count = 0

    @property
    def mine(self) -> bool:
        """Whether the calling thread is making a pass."""
        return self._owner == threading.get_ident() and self._lock.locked()

    def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, which no other thread's work overlaps.

        Raises OptionError where it is called from within such work: a callback cannot wait for a
        pass of the engine that has called it.
        """
        if self.mine:
            raise OptionError(
                "a callback cannot generate on the engine, or the accelerated model, whose pass "
                "has called it; use another engine, or generate before or after"
            )
        me = threading.get_ident()
        self._present.append(me)
        count = None
        try:
            with self._lock:
                self._owner, self._count = me, self._count + 1
                count = self._count
                try:
                    return work()
                finally:
                    self._owner = None
                    if len(self._present) > 1:
                        end_team()  # the next pass computes in another thread
        finally:
            self._present.remove(me)
            while count is not None and self._present and self._count == count:
                sleep(_POLL)


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
        self.prefixes = Prefixes(Runner(model, rewinds=False), prefixes)
        self.admitted: list[Job] = []
        """Those of all schedulers that have a row."""

    def new_runner(self) -> Runner:
        """A scheduler's runner: the shared one where rows are kept, else one of its own.

        Whoever keeps nothing may have changed the model since the last call.
        """
        if self.prefixes.most:
            return self.prefixes.runner
        return Runner(self.model, rewinds=False)

    def check(self, job: Job) -> None:
        """Raise OptionError for a job that can never run."""
        session = job.session
        if self.memory < inf:
            alone = need([job], self.prefixes.runner)
            if sum(alone) > self.memory:
                raise OptionError(
                    f"this request, {session.prompt_length} tokens and up to {session.limit} new "
                    f"ones, needs {alone}, but memory={self.memory:,} is all there may be (by "
                    "default most of what was free); shorten the prompt, ask for fewer tokens, or "
                    "raise memory"
                )
        job.exact = self.model.exact is not None
        if job.exact and autocast_mode(self.model.device):
            raise OptionError("exact=True cannot hold under autocast: leave its context first")

    def fits(self, job: Job) -> bool:
        """Whether there is memory for one more; kept rows are dropped for it, the oldest first."""
        if self.memory == inf:
            return True
        jobs, runner = [*self.admitted, job], self.prefixes.runner
        if sum(need(jobs, runner)) > self.memory:
            return False  # with none of them neither
        kept = self.prefixes.others(job)
        while sum(need(jobs, runner, [one.bytes for one in kept])) > self.memory:
            self.prefixes.drop(kept.pop(0))
        return True

    def wait_for_memory(self) -> None:
        """Let other threads end sequences; raises OptionError where only this one has any."""
        threads = {job.thread for job in list(self.admitted)}
        if threads == {threading.get_ident()}:
            raise OptionError(
                f"streams that are paused in this thread hold the memory (memory={self.memory:,}): "
                "close one, read it to its end, or raise memory"
            )
        sleep(10 * _POLL)

    @property
    def reserved(self) -> float:
        """Share of the memory that sequences and kept rows may come to hold; 0 without a limit."""
        needs = (job.need for job in list(self.admitted))
        held = sum(sum(need) for need in needs if need) + self.prefixes.bytes
        return held / self.memory
