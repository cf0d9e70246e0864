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
from draftsmith.engine.chunked_prefill import ChunkedPrefill
from draftsmith.engine.resources import Resources
from draftsmith.engine.sequence import TextSequence
from draftsmith.model.load import check_mode

_STALL = "this model reads a prompt in one pass: others waited for one over {} tokens (said once)"


class Scheduler:
    """The sequences of one call, or of the engine's thread."""

    def __init__(self, resources: Resources, max_batch: int) -> None:
        """`max_batch`: most sequences in a pass."""
        self.resources, self.max_batch = resources, max_batch
        self.runner = resources.new_runner()
        self.waiting: deque[TextSequence] = deque()
        self.running: list[TextSequence] = []
        self._passes = 0
        self._chunked = ChunkedPrefill()
        self._stall_noted = False

    @property
    def unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: TextSequence) -> None:
        """Put a sequence in line; raises OptionError for one that can never run."""
        self.resources.check(sequence)
        if not sequence.finished:
            self.waiting.append(sequence)

    def step(self) -> list[TextSequence]:
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

    def abort(self, sequence: TextSequence, *, sound: bool = True) -> None:
        """End a sequence, which waits for no pass; `sound`: no pass of it was interrupted.

        May be called again where it was interrupted.
        """
        if sequence in self.running:
            self.resources.retire_later(sequence, self.runner, sound)
            self.running.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def close(self, *, sound: bool = True) -> None:
        """End all sequences; `sound`: no pass was interrupted."""
        for sequence in [*self.waiting, *self.running]:
            self.abort(sequence, sound=sound)

    # --- one step -------------------------------------------------------------------------------

    def _step(self) -> list[TextSequence]:
        check_mode(self.resources.model.model)
        failed = self._admit()
        takes = self._schedule()
        sequences = [sequence for sequence in self.running if takes[id(sequence)]]
        if not sequences:
            return failed
        sequences = [sequence for sequence in sequences]
        decoding = sum(not sequence.reading for sequence in sequences)
        read = sum(takes[id(sequence)] for sequence in sequences if sequence.reading)
        begin = perf_counter()
        step(
            sequences,
            self.runner,
            self.resources.cost,
            [takes[id(sequence)] for sequence in sequences],
        )
        self._passes += 1
        self._chunked.record(decoding, read, perf_counter() - begin)
        for sequence in sequences:
            self.resources.prefixes.mark(sequence)
            if sequence.finished:
                self.resources.retire(sequence, self.runner, sound=True)
                self.running.remove(sequence)
        return failed + sequences

    def _admit(self) -> list[TextSequence]:
        """Give rows to the next in line, while there is memory for their whole answers.

        Returns those that failed at that.
        """
        failed = []
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if not self.resources.fits(sequence):
                break
            self.waiting.popleft()
            sequence.since = self._passes
            self.resources.prefixes.label(sequence)
            try:
                start(sequence, self.runner)
            except Exception as error:  # a drafter's needs that the model cannot fulfil
                sequence.fail(error)
                failed.append(sequence)
                continue
            sequence.row.rewinds = sequence.rewinds
            sequence.admitted, sequence.thread = perf_counter(), get_ident()
            self.running.append(sequence)
            self.resources.admitted.append(sequence)
        return failed

    def _schedule(self) -> dict[int, int]:
        """How many pending tokens of each running sequence the pass takes.

        Rows that decode take theirs. Prompts are taken in the order in which they are due, as if
        every pass read the least part of each: ten tokens after thirty thousand begin with the next
        pass, but no prompt is passed for ever.
        """
        takes = {id(sequence): len(sequence.row.pending) for sequence in self.running}
        reading = [sequence for sequence in self.running if sequence.reading]
        if not reading:
            return takes
        waiting = [sequence for sequence in reading if unread(sequence, self.runner)]
        decoding = len(self.running) - len(reading)
        room = self._chunked.room(decoding, len(reading), self.runner.chunk)
        prefixes = self.resources.prefixes

        def due(sequence: TextSequence) -> float:
            new = sequence.prompt_length - sequence.stats.reused_tokens
            return sequence.since + new / LEAST_CHUNK

        for sequence in sorted(reading, key=due):
            row = sequence.row
            if not row.cached:
                if prefixes.coming(sequence, waiting):
                    takes[id(sequence)] = 0
                    continue
                prefixes.borrow(sequence, self.running)
                row = sequence.row
            left = len(row.pending)
            splits = self.runner.splits(row)
            take = min(room, left) if splits else left
            if splits and take == left > 1 and prefixes.ends(sequence):
                take -= 1
            if take > self.runner.chunk and len(self.running) > 1 and not self._stall_noted:
                self._stall_noted = True
                sequence.notices += (_STALL.format(take),)
            room -= min(room, take)
            takes[id(sequence)] = take
        return takes
