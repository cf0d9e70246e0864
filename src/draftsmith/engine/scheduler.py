"""Scheduler: decides which sequences run, and how much of each prompt a pass reads.

A sequence is first `waiting`, then `running`: `add` queues it; `step` opens rows while there is
memory, runs one pass for all running sequences, and frees the rows of those that have ended. This
is plain code for one thread at a time; `Resources.turns` serializes the passes of all schedulers.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from threading import current_thread
from time import perf_counter

from draftsmith.core.loop import LEAST_CHUNK, start, step, unread
from draftsmith.engine.chunked_prefill import ChunkedPrefill
from draftsmith.engine.resources import Resources
from draftsmith.engine.sequence import TextSequence
from draftsmith.model.load import check_mode
from draftsmith.model.runner import Runner

_STALL = (
    "this model reads a prompt in one pass: other answers waited for a prompt of {} "
    "tokens (reported once)"
)


class Scheduler:
    """Schedules the sequences of one call, or of the engine's thread."""

    def __init__(self, resources: Resources, patient: bool = False) -> None:
        """`patient`: wait for memory even if no other thread is going to free any."""
        self.resources = resources
        self._patient = patient
        # Without kept rows, the model may have changed since the last call.
        fresh = not resources.prefixes.most
        self.runner = Runner(resources.model) if fresh else resources.runner
        self.waiting: deque[TextSequence] = deque()
        self.running: list[TextSequence] = []
        self._passes = 0
        self._chunked = ChunkedPrefill()
        self._stall_noted = False

    @property
    def unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: TextSequence) -> None:
        """Queue a sequence, which `Resources.check` has let pass."""
        if not sequence.finished:
            self.waiting.append(sequence)

    def step(self) -> list[TextSequence]:
        """Run one pass; return the sequences that took part in it, or failed before it.

        If there is no memory for any sequence, waits a moment instead. Raises OptionError if the
        model is in training mode, and for memory that no other thread is going to free.
        """
        if not self.unfinished:
            return []
        turns = self.resources.turns
        with turns.wait(), turns.lock, turns.owner():
            served = self._step()
        if not served and not self.running:
            if not self._patient:
                self.resources.check_waiting()
            self.resources.pause()
        return served

    def abort(self, sequence: TextSequence, *, interrupted: bool = False) -> None:
        """End a sequence without waiting for a pass; `interrupted`: a pass of it was.

        After an interrupt it may be called again.
        """
        if sequence in self.running:
            retire = partial(self.resources.retire, sequence, self.runner, interrupted)
            self.resources.turns.between(retire)
            self.running.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def close(self, *, interrupted: bool = False) -> None:
        """End all sequences; `interrupted`: a pass was."""
        for sequence in [*self.waiting, *self.running]:
            self.abort(sequence, interrupted=interrupted)

    # --- one step -------------------------------------------------------------------------------

    def _step(self) -> list[TextSequence]:
        check_mode(self.resources.model.model)
        failed = self._admit()
        takes = self._schedule()
        sequences = [sequence for sequence in self.running if takes[sequence]]
        if not sequences:
            return failed
        decoding = sum(sequence.generated > 0 for sequence in sequences)
        read = sum(takes[sequence] for sequence in sequences if not sequence.generated)
        begin = perf_counter()
        scheduled = [takes[sequence] for sequence in sequences]
        step(sequences, self.runner, self.resources.cost, scheduled)
        self._passes += 1
        self._chunked.record(decoding, read, perf_counter() - begin)
        for sequence in sequences:
            self.resources.prefixes.mark(sequence)
            if sequence.finished:
                self.resources.retire(sequence, self.runner, interrupted=False)
                self.running.remove(sequence)
        return failed + sequences

    def _admit(self) -> list[TextSequence]:
        """Open rows for the first waiting sequences while there is memory for their whole answers.

        Returns the sequences that failed.
        """
        failed = []
        while self.waiting and len(self.running) < self.resources.max_batch:
            sequence = self.waiting[0]
            if not self.resources.fits(sequence):
                break
            self.waiting.popleft()
            sequence.since = self._passes
            self.resources.prefixes.label(sequence)
            try:
                start(sequence, self.runner)
            except Exception as error:  # the model cannot record what a drafter needs
                sequence.fail(error)
                failed.append(sequence)
                continue
            sequence.row.rewinds = sequence.of_chat
            sequence.admitted_at, sequence.thread = perf_counter(), current_thread()
            self.running.append(sequence)
            self.resources.admitted.append(sequence)
        return failed

    def _schedule(self) -> dict[TextSequence, int]:
        """Return the number of pending tokens that the pass reads for each running sequence.

        A decoding row reads all of its pending tokens. Prompts are read in order of the pass in
        which they would end if every pass read `LEAST_CHUNK` tokens of each. So a short prompt does
        not wait for a long one, and no prompt waits without limit.
        """
        takes = {sequence: len(sequence.row.pending) for sequence in self.running}
        reading = [sequence for sequence in self.running if not sequence.generated]
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
                    takes[sequence] = 0
                    continue
                prefixes.match(sequence, self.running)
                row = sequence.row
            left = len(row.pending)
            splits = self.runner.splits(row)
            take = min(room, left) if splits else left
            if splits and take == left > 1 and prefixes.ends(sequence):
                take -= 1
            if take > self.runner.chunk and len(self.running) > 1 and not self._stall_noted:
                self._stall_noted = True
                sequence.remarks += (_STALL.format(take),)
            room -= min(room, take)
            takes[sequence] = take
        return takes
