"""What is asked in a live run, what comes back, and who answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.stats import Stats


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt in tokens, and how it is to be answered."""

    ids: Sequence[int]
    limit: int
    """Most new tokens."""
    sampling: SamplingParams
    """Temperature, seed and filters; the same for every arm."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation by one arm."""

    tokens: list[int]
    seconds: float
    """From the call to the last token."""
    first_token_seconds: float
    passes: int
    finish_reason: str
    stats: Stats | None = None
    """The loop's own record; peers have none."""
