"""What is asked in a live run, what comes back, and who answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.stats import Stats
from draftsmith.engine.request import BudgetSpec


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


class Arm(Protocol):
    """A way of answering, with its name in tables."""

    @property
    def name(self) -> str: ...

    @property
    def drafter(self) -> str:
        """The whole configuration, defaults included."""

    @property
    def budget(self) -> BudgetSpec | None: ...

    @property
    def seeded(self) -> bool:
        """Whether a seed gives the same tokens as with plain decoding."""

    def answer(self, ask: Ask) -> Answer:
        """Generate; the clock runs inside."""
