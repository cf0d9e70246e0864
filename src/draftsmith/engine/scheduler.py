"""One model, one runner, any number of callers: every pass serves whoever is there.

A request's life: `add` puts it in line, `_admit` gives it a row, `_chunks` reads its prompt part by
part, passes give it tokens, `_retire` frees its row. Nobody has a thread of his own: callers take
turns at driving (`step`), and whoever drives makes a step for all.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

from draftsmith.core.cost import CostCurve
from draftsmith.core.loop import LEAST_CHUNK, mend, start, step, unread
from draftsmith.engine.chunks import Chunks
from draftsmith.engine.jobs import Job, Piece
from draftsmith.engine.memory import need
from draftsmith.engine.prefixes import Prefixes
from draftsmith.errors import OptionError
from draftsmith.model.load import check_mode
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.openmp import end_team
from draftsmith.model.rows import SequenceRow
from draftsmith.model.runner import Runner

_STALL = "this model reads a prompt in one pass: others waited for one over {} tokens (said once)"


@dataclass(eq=False, slots=True)
class _Turn:
    """A step of one thread, which holds both locks by `with` as long as it lasts.

    No interrupt, however late, leaves that without letting go: nobody waits for who is gone.
    """

    thread: int = field(default_factory=threading.get_ident)
    going: Any = field(default_factory=threading.Lock)
    """Nobody else ever takes it."""
    ended: Any = field(default_factory=threading.Lock)
    """What others wait for."""


class Scheduler:
    """Sessions of one model, driven together by those who wait for them."""

    def __init__(
        self,
        model: LoadedModel,
        cost: CostCurve,
        max_batch: int,
        memory: float = inf,
        prefixes: int = 0,
    ) -> None:
        """`max_batch`: most rows at a time. `memory`: most bytes of all requests.

        `prefixes`: finished rows that are kept for requests that begin like them.
        """
        self.model, self.cost, self.max_batch, self.memory = model, cost, max_batch, memory
        self.prefixes = Prefixes(Runner(model, rewinds=False), prefixes)
        """Rows of ended jobs."""
        self._jobs: list[Job] = []
        """In the order of arrival; those admitted have a row."""
        self._lock = threading.RLock()
        """For `_jobs` and `_turn`; nobody waits while he has it. Never nested: `abort` asks."""
        self._turn = _Turn()
        """The last that began."""
        self._passes = 0
        self._chunked = Chunks()
        self._told = False
        """Whether somebody heard of `_STALL`."""

    # --- for callers ----------------------------------------------------------------------------

    @property
    def runner(self) -> Runner:
        """What makes the passes, and has the rows that are kept."""
        return self.prefixes.runner

    @property
    def _driver(self) -> int | None:
        """The thread that makes a step at the moment."""
        turn = self._turn
        return turn.thread if turn.going.locked() else None

    @property
    def here(self) -> Scheduler:
        """This one; for a callback from within its own pass another one, of the same model."""
        if self._driver != threading.get_ident():
            return self
        return Scheduler(self.model, self.cost, self.max_batch, self.memory)

    def add(self, job: Job) -> None:
        """Put a job in line; never waits for a pass. Raises OptionError for a job too large."""
        session = job.session
        if self.memory < inf and sum(alone := need([job], self.runner)) > self.memory:
            raise OptionError(
                f"this request, {session.prompt_length} tokens and up to {session.limit} new ones, "
                f"needs {alone}, but memory={self.memory:,} is all there may be (by default most "
                "of what was free); shorten the prompt, ask for fewer tokens, or raise memory"
            )
        job.exact = self.model.exact is not None
        if job.exact and any(enabled for _, enabled, _ in job.mode.settings):
            raise OptionError("exact=True cannot hold under autocast: leave its context first")
        job.done = job.session.finished
        if not job.done:
            with self._lock:
                self._jobs.append(job)

    def drive(self, jobs: Sequence[Job]) -> Generator[Piece]:
        """Add jobs; their pieces, one job after the other, until all are done. Closing it aborts.

        What other callers wait for is done by the way, and they do the same for these.
        """
        try:
            for job in jobs:
                self.add(job)
            for job in jobs:
                while not job.done:
                    while job.pieces:
                        yield job.pieces.popleft()
                    self.step(job)
                yield from job.pieces
        finally:
            self.abort(jobs)
            end_team()

    def abort(self, jobs: Sequence[Job]) -> None:
        """End jobs that are not done; their rows are freed at once, or after the running pass."""
        for job in jobs:
            job.aborted = True
        if self._lock._is_owned():  # type: ignore[attr-defined]
            # A collection of garbage closes a stream amid this thread's own step, which ends it.
            return
        mine = _Turn()
        with mine.ended, mine.going:
            if self._begin(mine) is None:
                self._retire()

    def leave(self, job: Job) -> bool:
        """Wait until no pass carries an aborted job any more; False from within that pass."""
        while job in self._jobs:
            if self._driver == threading.get_ident():
                return False
            self.step(job)
        return True

    def step(self, job: Job | None = None) -> None:
        """Make a step, unless `job` has news; or wait for the one that somebody else is making."""
        mine = _Turn()
        if self._driver == mine.thread:
            raise OptionError("an answer cannot wait for another one of the same pass")
        with mine.ended, mine.going:
            other = self._begin(mine)
            if other is None:
                try:
                    if job is None or not (job.done or job.pieces):
                        self._pass()
                finally:
                    self._retire()
                return
        end_team()
        with other.ended:
            return

    def _begin(self, mine: _Turn) -> _Turn | None:
        """Let this step be the one that is made; or the other one that is."""
        with self._lock:
            if self._driver is not None:
                return self._turn
            self._turn = mine
            return None

    # --- one step -------------------------------------------------------------------------------

    def _pass(self) -> None:
        """One pass for all jobs of one autocast mode; the modes take turns."""
        check_mode(self.model.model)
        active = [job for job in self._admit() if not job.paused]
        modes = list(dict.fromkeys(job.mode for job in active))
        if not modes:
            return
        mode = modes[self._passes % len(modes)]
        self._passes += 1
        jobs = [job for job in active if job.mode == mode]
        for job in jobs:
            mend(job.session, self.runner)
            row: SequenceRow = job.session.row
            row.rewinds = job.rewinds
        jobs = [job for job in jobs if not job.over]
        takes = {id(job): len(job.session.row.pending) for job in jobs}
        takes |= self._chunks(jobs)
        jobs = [job for job in jobs if takes[id(job)]]
        if not jobs:  # all of this mode have ended meanwhile
            return
        sessions = [job.session for job in jobs]
        decoding = sum(not session.reading for session in sessions)
        read = sum(takes[id(job)] for job in jobs if job.session.reading)
        begin = perf_counter()
        with mode.entered():
            step(sessions, self.runner, self.cost, [takes[id(job)] for job in jobs])
        self._chunked.record(decoding, read, perf_counter() - begin)
        for job in jobs:
            job.book()
            self.prefixes.mark(job)

    @property
    def _active(self) -> list[Job]:
        """Jobs that have a row, the oldest first."""
        return [job for job in self._jobs if job.session.row is not None and not job.over]

    def _admit(self) -> list[Job]:
        """Give rows to the next in line, while there is memory for their whole answers.

        Returns all jobs that have a row, the oldest first.
        """
        active = self._active
        if len(active) == len(self._jobs):
            return active
        for job in self._jobs:
            if job.over or job in active:
                continue
            if len(active) >= self.max_batch or not self._fit([*active, job]):
                break
            job.since = self._passes
            self.prefixes.label(job)  # before it has a row: who has one has a key
            try:
                start(job.session, self.runner)
            except Exception as error:  # a drafter's needs that the model cannot fulfil
                job.session.fail(error)
                continue
            job.admitted = perf_counter()
            active.append(job)
        return active

    def _fit(self, jobs: Sequence[Job]) -> bool:
        """Whether there is memory for these; kept rows go for it, the least recently used first."""
        if self.memory == inf:
            return True
        if sum(need(jobs, self.runner)) > self.memory:
            return False  # with none of them neither
        kept = self.prefixes.others(jobs[-1])
        while sum(need(jobs, self.runner, [one.bytes for one in kept])) > self.memory:
            self.prefixes.drop(kept.pop(0))
        return True

    def _chunks(self, jobs: Sequence[Job]) -> dict[int, int]:
        """How much of each waiting prompt the pass takes, those that are due first coming first.

        That is, as if every pass took the least part of each: ten tokens behind thirty thousand
        begin with the next pass, but nobody is passed for ever.
        """
        reading = [job for job in jobs if job.session.reading]
        if not reading:
            return {}
        waiting = [job for job in reading if unread(job.session, self.runner)]
        decoding = len(jobs) - len(reading)
        room = self._chunked.room(decoding, len(reading), self.runner.chunk)
        takes = dict.fromkeys(map(id, reading), 0)

        def due(job: Job) -> float:
            new = job.session.prompt_length - job.session.stats.reused_tokens
            return job.since + new / LEAST_CHUNK

        for job in sorted(reading, key=due):
            session = job.session
            if not session.row.cached:
                if self.prefixes.coming(job, waiting):
                    continue
                self.prefixes.borrow(job, jobs)
            left = len(session.row.pending)
            splits = self.runner.splits(session.row)
            take = min(room, left) if splits else left
            if splits and take == left > 1 and self.prefixes.ends(job):
                take -= 1
            if take > self.runner.chunk and len(self._jobs) > 1 and not self._told:
                self._told = True
                job.notices += (_STALL.format(take),)
            room -= min(room, take)
            takes[id(job)] = take
        return takes

    def _retire(self) -> None:
        """Free the rows of jobs that have ended, then let others drive.

        Drafters are told without `_lock`: whoever holds what they wait for may want to abort.
        """
        over = list[Job]()
        while True:
            for job in over:
                self._end(job)
            with self._lock:
                over = [job for job in self._jobs if job.over and not job.done]
                if not over:
                    self._clear()
                    self._turn = _Turn()
                    break
        if any(job.over for job in self._jobs):  # aborted while this had the lock
            self.abort(())

    def _end(self, job: Job) -> None:
        """Free a job's row; it is done even where that is interrupted."""
        try:
            job.book()
            session = job.session
            if session.row is not None:
                self.prefixes.keep(job)
            session.end_drafter()
            if not job.keeps_drafter:
                session.close_drafter()
        finally:
            job.done = True

    def _clear(self) -> None:
        """Drop the jobs that are done, and what nobody needs any more."""
        self._jobs = [job for job in self._jobs if not job.done]
        lasting = self.model.capabilities.packed and self.prefixes.most
        if not (self._jobs or self.prefixes or lasting):
            # Padded rows share buffers, which otherwise stay as large as they ever were; and who
            # keeps nothing (`accelerate`) may have changed the model before its next call.
            self.prefixes.runner = Runner(self.model, rewinds=False)
