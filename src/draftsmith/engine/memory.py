"""Maximum memory of requests: their rows, logits, recordings and drafter states."""

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
"""Share of the free memory when the engine is created; the rest is for activations of passes."""


def usual_limit(device: torch.device) -> float:
    """Return the default limit in bytes; infinite if the free memory is unknown."""
    free = free_bytes(device)
    return inf if free is None else max(1, int(SHARE * free))


class MemoryNeed(NamedTuple):
    """Bytes that requests use if their answers have the maximum length.

    Activations of a pass, and states that do not grow with the text, are not included.
    """

    rows: int
    """Keys and values, including growth of the buffers."""
    marks: int
    """States at the end of the prompt, kept for other requests."""
    taps: int
    logits: int
    """Logits of the widest pass, and on an accelerator the noise of draws after its nodes."""
    drafter: int
    """State of the drafter, including the row of a draft model."""

    def __str__(self) -> str:
        each = ", ".join(f"{name} {n:,}" for name, n in self._asdict().items() if n)
        return f"{sum(self):,} bytes ({each})"


def need(sequences: Sequence[TextSequence], runner: Runner, kept: Sequence[int] = ()) -> MemoryNeed:
    """Return the most memory of all sequences together, beside `kept` rows (their bytes).

    The drafter's `bytes_for` is called once per sequence, before it is queued, so its error ends
    only that call.
    """
    for sequence in sequences:
        sequence.memory_need = sequence.memory_need or _alone(sequence, runner)
    rows, *others = zip(*(sequence.memory_need for sequence in sequences), strict=True)
    return MemoryNeed(runner.store.bytes_for(rows, kept), *map(sum, others))


def _alone(sequence: TextSequence, runner: Runner) -> MemoryNeed:
    loaded, width = runner.loaded, sequence.budget.width
    positions = sequence.prompt_length + sequence.limit + width
    hidden = int(getattr(loaded.config, "hidden_size", 0) or 0)
    predicts = sequence.sampler.predicts and not sequence.distribution.greedy
    noise = torch.float32.itemsize if predicts and loaded.device.type != "cpu" else 0
    return MemoryNeed(
        runner.row_bytes(positions, rewinds=sequence.of_chat),
        runner.most_mark_bytes(sequence.prompt_length, rewinds=sequence.of_chat),
        recorded(sequence.needs, positions, hidden) * loaded.dtype.itemsize,
        (1 + width) * loaded.vocab_size * (loaded.dtype.itemsize + noise),
        sequence.drafter.bytes_for(positions + len(sequence.context.prediction)) if width else 0,
    )
