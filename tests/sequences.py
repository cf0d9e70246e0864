"""Sequences with greedy answers, and how they run to their ends."""

from __future__ import annotations

from collections import abc
from typing import Any

from draftsmith.core.budget import FixedBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.sequence import Sequence
from draftsmith.testing import ToyTarget


def sequence_of(
    ids: abc.Sequence[int], drafter: Drafter, limit: int, budget: Any = 6, **options: Any
) -> Sequence:
    """A greedy sequence of at most `limit` new tokens; `budget`: a budget, or a fixed width."""
    if isinstance(budget, int):
        budget = FixedBudget(budget)
    return Sequence(
        ids, drafter=drafter, budget=budget, limit=limit, **{"vocab_size": 11} | options
    )


def run(sequences: abc.Sequence[Sequence], target: ToyTarget, cost: CostCurve | None = None) -> int:
    """Start sequences and run them together; return the sum of their passes."""
    passes = 0
    for sequence in sequences:
        start(sequence, target)
    while running := [one for one in sequences if not one.finished]:
        step(running, target, cost)
        passes += len(running)
    return passes
