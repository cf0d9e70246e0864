"""What requests may come to hold: their rows, and all that goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch

from draftsmith.engine.sequence import TextSequence
from draftsmith.model.measure import free_bytes
from draftsmith.model.runner import Runner
from draftsmith.model.taps import recorded

SHARE = 0.75
"""Of the memory that is free when an engine is made; the rest is for what passes compute."""


def usual_limit(device: torch.device) -> float:
    """`SHARE` in bytes; no limit where nobody tells what is free."""
    free = free_bytes(device)
    return inf if free is None else max(1, int(SHARE * free))


class Need(NamedTuple):
    """Bytes of requests whose answers are as long as they may be.

    What a pass computes on its way, and states that do not grow with the text, are not counted.
    """

    rows: int
    """Keys and values, growing included."""
    marks: int
    """What lets others go on from the end of a prompt."""
    taps: int
    logits: int
    """Of the widest pass."""
    drafter: int
    """What its drafter remembers of the text, the row of a draft model included."""

    def __str__(self) -> str:
        each = ", ".join(f"{name} {n:,}" for name, n in self._asdict().items() if n)
        return f"{sum(self):,} bytes ({each})"


def need(sequences: Sequence[TextSequence], runner: Runner, kept: Sequence[int] = ()) -> Need:
    """The most that sequences may come to hold together, beside `kept` rows of so many bytes.

    A drafter is asked for its own once: should that fail, then before its sequence is in line.
    """
    for sequence in sequences:
        sequence.need = sequence.need or _alone(sequence, runner)
    rows, *others = zip(*(sequence.need for sequence in sequences), strict=True)
    return Need(runner.bytes_for(rows, kept), *map(sum, others))


def _alone(sequence: TextSequence, runner: Runner) -> Need:
    sequence, loaded = sequence, runner.loaded
    width = sequence.budget.width
    positions = sequence.prompt_length + sequence.limit + width
    hidden = int(getattr(loaded.config, "hidden_size", 0) or 0)
    return Need(
        runner.row_bytes(positions, rewinds=sequence.rewinds),
        runner.most_mark_bytes(sequence.prompt_length, rewinds=sequence.rewinds),
        recorded(sequence.needs, positions, hidden) * loaded.dtype.itemsize,
        (1 + width) * loaded.vocab_size * loaded.dtype.itemsize,
        sequence.drafter.bytes_for(positions + len(sequence.context.prediction)) if width else 0,
    )
