"""The scheduler: which sequences run, and how much of each prompt a pass reads.

A sequence is `waiting`, then `running`, then gone: `add` puts it in line, `step` gives rows to
those for which there is room, makes one pass for all that run, and frees the rows of those that
have ended. Plain code for one thread at a time; `Resources.turns` keeps the passes of several
schedulers apart.
"""

from __future__ import annotations

from collections import deque
from threading import get_ident
from time import perf_counter

from draftsmith.core.loop import LEAST_CHUNK, start, step, unread
from draftsmith.engine.chunks import Chunks
from draftsmith.engine.jobs import Job
from draftsmith.engine.resources import Resources
from draftsmith.model.load import check_mode

_STALL = "this model reads a prompt in one pass: others waited for one over {} tokens (said once)"


class Scheduler:
    """The sequences of one call, or of the engine's thread."""

    def __init__(self, resources: Resources, max_batch: int) -> None:
        """`max_batch`: most sequences in a pass."""
        self.resources, self.max_batch = resources, max_batch
        self.runner = resources.new_runner()
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._passes = 0
        self._chunked = Chunks()
        self._stall_noted = False

    @property
    def unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, job: Job) -> None:
        """Put a sequence in line; raises OptionError for one that can never run."""
        self.resources.check(job)
        if not job.session.finished:
            self.waiting.append(job)

    def step(self) -> list[Job]:
        """Make one pass; return the sequences that took part in it, or failed before it.

        Without memory for any, waits a little instead. Raises OptionError for a model that was put
        into training mode, and where only paused streams of this thread hold the memory.
        """
        if not self.unfinished:
            return []
        turns = self.resources.turns
        with turns.line(), turns.lock, turns.owner():
            served = self._step()
        if not served and not self.running:
            self.resources.wait_for_memory()
        return served

    def abort(self, job: Job, *, sound: bool = True) -> None:
        """End a sequence, which waits for no pass; `sound`: no pass of it was interrupted.

        May be called again where it was interrupted.
        """
        if job in self.running:
            self.resources.retire_later(job, self.runner, sound)
            self.running.remove(job)
        if job in self.waiting:
            self.waiting.remove(job)

    def close(self, *, sound: bool = True) -> None:
        """End all sequences; `sound`: no pass was interrupted."""
        for job in [*self.waiting, *self.running]:
            self.abort(job, sound=sound)

    # --- one step -------------------------------------------------------------------------------

    def _step(self) -> list[Job]:
        check_mode(self.resources.model.model)
        failed = self._admit()
        takes = self._schedule()
        jobs = [job for job in self.running if takes[id(job)]]
        if not jobs:
            return failed
        sessions = [job.session for job in jobs]
        decoding = sum(not session.reading for session in sessions)
        read = sum(takes[id(job)] for job in jobs if job.session.reading)
        begin = perf_counter()
        step(sessions, self.runner, self.resources.cost, [takes[id(job)] for job in jobs])
        self._passes += 1
        self._chunked.record(decoding, read, perf_counter() - begin)
        for job in jobs:
            self.resources.prefixes.mark(job)
            if job.session.finished:
                self.resources.retire(job, self.runner, sound=True)
                self.running.remove(job)
        return failed + jobs

    def _admit(self) -> list[Job]:
        """Give rows to the next in line, while there is memory for their whole answers.

        Returns those that failed at that.
        """
        failed = []
        while self.waiting and len(self.running) < self.max_batch:
            job = self.waiting[0]
            if not self.resources.fits(job):
                break
            self.waiting.popleft()
            job.since = self._passes
            self.resources.prefixes.label(job)
            try:
                start(job.session, self.runner)
            except Exception as error:  # a drafter's needs that the model cannot fulfil
                job.session.fail(error)
                failed.append(job)
                continue
            job.session.row.rewinds = job.rewinds
            job.admitted, job.thread = perf_counter(), get_ident()
            self.running.append(job)
            self.resources.admitted.append(job)
        return failed

    def _schedule(self) -> dict[int, int]:
        """How many pending tokens of each running sequence the pass takes.

        Rows that decode take theirs. Prompts are taken in the order in which they are due, as if
        every pass read the least part of each: ten tokens after thirty thousand begin with the next
        pass, but no prompt is passed for ever.
        """
        takes = {id(job): len(job.session.row.pending) for job in self.running}
        reading = [job for job in self.running if job.session.reading]
        if not reading:
            return takes
        waiting = [job for job in reading if unread(job.session, self.runner)]
        decoding = len(self.running) - len(reading)
        room = self._chunked.room(decoding, len(reading), self.runner.chunk)
        prefixes = self.resources.prefixes

        def due(job: Job) -> float:
            new = job.session.prompt_length - job.session.stats.reused_tokens
            return job.since + new / LEAST_CHUNK

        for job in sorted(reading, key=due):
            row = job.session.row
            if not row.cached:
                if prefixes.coming(job, waiting):
                    takes[id(job)] = 0
                    continue
                prefixes.borrow(job, self.running)
                row = job.session.row
            left = len(row.pending)
            splits = self.runner.splits(row)
            take = min(room, left) if splits else left
            if splits and take == left > 1 and prefixes.ends(job):
                take -= 1
            if take > self.runner.chunk and len(self.running) > 1 and not self._stall_noted:
                self._stall_noted = True
                job.notices += (_STALL.format(take),)
            room -= min(room, take)
            takes[id(job)] = take
        return takes
