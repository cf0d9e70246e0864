"""Belief: how likely each candidate is, learnt from what the target says.

Logistic mixing as in context-mixing compressors (PAQ, CMIX). Every input has a table from its cells to
probabilities; their logits are added up with weights that are chosen by the longest contexts that know
the candidate, and by what followed the last token.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

from draftsmith.drafters.mixture.candidates import (
    CELL,
    CELLS,
    ID,
    PRESENT,
    ROW,
    Work,
    examine,
    forget,
    gather,
    look_up,
)  # fmt: skip
from draftsmith.drafters.mixture.compiled import Floats, compiled
from draftsmith.drafters.mixture.contexts import ORDERS, Bank

AFTER = 1 + CELLS - PRESENT
"""What followed the last token: nothing known, or so many of so many kinds."""
RARE = 0.0005
"""A cell's probability is never lower, nor its complement; its logit is at most 7.6."""
HEAVY = 16.0
"""Bound of a weight."""
FAR = 20.0
"""Bound of a sum of logits."""
TOGETHER = 0.995
"""What all candidates are worth at most: one of them at most is right."""


class Belief(NamedTuple):
    """Tables and weights of `I` inputs: all that is learnt."""

    chance: Floats
    """(I * CELLS,) that a candidate in this situation is right."""
    evidence: Floats
    """(I * CELLS,) cases that stand behind it."""
    logit: Floats
    """(I * CELLS,) of `chance`."""
    seen: Floats
    """(ORDERS ** banks * (I + 1),) weights and bias by the longest contexts that know it."""
    after: Floats
    """(AFTER * (I + 1),) weights and bias by what followed the last token, added to those."""


@compiled
def squash(odds: float) -> float:
    """The probability that a logit stands for."""
    return 1.0 / (1.0 + exp(-min(FAR, max(-FAR, odds))))


@compiled
def guess(own: Bank, earlier: Bank, belief: Belief, work: Work, end: int) -> int:
    """Candidates for what follows the first `end` of the ids in `own`, and how likely each is.

    Those behind the indexed ones are a path. Returns the number of candidates.
    """
    two = len(work.absent) > ORDERS
    look_up(own, 0, own, end, work)
    if two:
        look_up(earlier, ORDERS, own, end, work)
    count = gather(own, 0, work, 0)
    if two:
        count = gather(earlier, ORDERS, work, count)
    examine(own, 0, True, work, count)
    if two:
        examine(earlier, ORDERS, False, work, count)
    forget(work, count)
    weigh(belief, work, count)
    return count


@compiled
def row_after(work: Work) -> int:
    """The row of `Belief.after` for what followed the last token."""
    return 0 if work.absent[1] < 0 else 1 + work.absent[1] - PRESENT


@compiled
def weigh(belief: Belief, work: Work, count: int) -> None:
    """The candidates' logits and probabilities."""
    inputs = len(work.absent)
    after = row_after(work) * (inputs + 1)
    whole = 0.0
    for one in range(count):
        at = one * (CELL + inputs)
        row = work.candidates[at + ROW] * (inputs + 1)
        odds = belief.seen[row + inputs] + belief.after[after + inputs]
        for i in range(inputs):
            cell = work.candidates[at + CELL + i]
            if cell >= 0:
                weight = belief.seen[row + i] + belief.after[after + i]
                odds += weight * belief.logit[i * CELLS + cell]
        work.odds[one] = odds
        work.chances[one] = squash(odds)
        whole += work.chances[one]
    if whole > TOGETHER:
        for one in range(count):
            work.chances[one] *= TOGETHER / whole


@compiled
def learn(
    belief: Belief, work: Work, count: int, truth: int, rate: float, memory: float, weight: float
) -> None:
    """The target said `truth` where `guess` gave these candidates.

    `rate` of the weights; `memory`: evidence a cell can have at most; `weight` of this case.
    """
    inputs = len(work.absent)
    after = row_after(work) * (inputs + 1)
    for one in range(count):
        at = one * (CELL + inputs)
        row = work.candidates[at + ROW] * (inputs + 1)
        right = 1.0 if work.candidates[at + ID] == truth else 0.0
        step = (right - squash(work.odds[one])) * rate * weight
        for i in range(inputs):
            cell = i * CELLS + work.candidates[at + CELL + i]
            if cell >= i * CELLS:
                add(belief.seen, row + i, step * belief.logit[cell])
                add(belief.after, after + i, step * belief.logit[cell])
                cases = min(belief.evidence[cell] + weight, memory)
                p = belief.chance[cell]
                p = min(1.0 - RARE, max(RARE, p + (right - p) * weight / (cases + 1.5)))
                belief.evidence[cell], belief.chance[cell] = cases, p
                belief.logit[cell] = log(p / (1.0 - p))
        add(belief.seen, row + inputs, step)
        add(belief.after, after + inputs, step)


@compiled
def add(weights: Floats, at: int, step: float) -> None:
    """Change a weight, within bounds."""
    weights[at] = min(HEAVY, max(-HEAVY, weights[at] + step))
