"""Belief: how likely each candidate is, learnt from what the target says.

Logistic mixing as in context-mixing compressors (PAQ, CMIX). Every input has a table from its cells
to probabilities; their logits are added up with weights that are chosen by the longest contexts
that know the candidate, and by what followed the last token.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

from draftsmith.drafters.mixture.candidates import (
    ABSENT,
    ALONE,
    BANKED,
    CANDIDATE,
    CANDIDATES,
    CELL,
    CELLS,
    CHANCES,
    ID,
    PRESENT,
    ROW,
    USED,
    Work,
    examine,
    forget,
    gather,
    look_up,
)
from draftsmith.drafters.mixture.compiled import Floats, inner, no
from draftsmith.drafters.mixture.contexts import ORDERS, Bank
from draftsmith.drafters.mixture.rows import compare, recall

CHANCE, CASES, LOGIT, VALUES = range(4)
"""Of a cell, and how many: the probability that a candidate in this situation is right, cases that
stand behind it, its logit."""
AFTER = 1 + CELLS - PRESENT
"""Kinds of what followed the last token: nothing known, or so many of so many kinds."""
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

    cells: Floats
    """(I * CELLS * VALUES,)"""
    weights: Floats
    """((AFTER + ORDERS ** banks * KNOWN) * (I + 1),) rows of weights and a bias: by what followed
    the last token; and, to be added, by the longest context of each bank that knows the candidate
    and by whether the target's own row names it."""


def banks_of(belief: Belief) -> int:
    """How many banks it is about."""
    return len(belief.cells) // (ORDERS * CELLS * VALUES)


@inner
def squash(odds: float) -> float:
    """The probability that a logit stands for."""
    return 1.0 / (1.0 + exp(-min(FAR, max(-FAR, odds))))


@inner
def guess(own: Bank, earlier: Bank, belief: Belief, work: Work, end: int) -> int:
    """Candidates for what follows the first `end` of the ids in `own`, and how likely each is.

    Those behind the indexed ones are a path. Returns the number of candidates.
    """
    count = first = no(end)
    two = work.ints[BANKED] > ORDERS
    look_up(own, first, own, end, work)
    if two:
        look_up(earlier, ORDERS + first, own, end, work)
    count = recall(work, own.ids[end - 1] if end else -1, count)
    count = gather(own, first, work, count)
    if two:
        count = gather(earlier, ORDERS + first, work, count)
    examine(own, first, work, count)
    if two:
        examine(earlier, ORDERS + first, work, count)
    compare(work, count)
    forget(work, count)
    weigh(belief, work, count)
    return count


@inner
def row_after(work: Work) -> int:
    """The row of weights for what followed the last token."""
    cell = work.ints[ABSENT + 1]
    return 0 if cell < 0 else 1 + cell - PRESENT


@inner
def weigh(belief: Belief, work: Work, count: int) -> None:
    """The candidates' probabilities."""
    w, f, inputs = work.ints, work.floats, work.ints[USED]
    after = row_after(work) * (inputs + 1)
    whole = 0.0
    for one in range(count):
        at = CANDIDATES + one * CANDIDATE
        row = (AFTER + w[at + ROW]) * (inputs + 1)
        odds = belief.weights[row + inputs] + belief.weights[after + inputs]
        for i in range(inputs):
            if w[at + CELL + i] >= 0:
                cell = (i * CELLS + w[at + CELL + i]) * VALUES
                weight = belief.weights[row + i] + belief.weights[after + i]
                odds += weight * belief.cells[cell + LOGIT]
        f[ALONE + one] = f[CHANCES + one] = squash(odds)
        whole += f[CHANCES + one]
    if whole > TOGETHER:
        for one in range(count):
            f[CHANCES + one] *= TOGETHER / whole


@inner
def learn(
    belief: Belief, work: Work, count: int, truth: int, rate: float, memory: float, weight: float
) -> None:
    """The target said `truth` where `guess` gave these candidates.

    `rate` of the weights; `memory`: most cases of a cell; `weight` of this case.
    """
    w, c, inputs = work.ints, belief.cells, work.ints[USED]
    after = row_after(work) * (inputs + 1)
    for one in range(count):
        at = CANDIDATES + one * CANDIDATE
        row = (AFTER + w[at + ROW]) * (inputs + 1)
        right = 1.0 if w[at + ID] == truth else 0.0
        step = (right - work.floats[ALONE + one]) * rate * weight
        for i in range(inputs + 1):
            change = step
            if i < inputs:
                if w[at + CELL + i] < 0:
                    continue
                cell = (i * CELLS + w[at + CELL + i]) * VALUES
                change *= c[cell + LOGIT]
                cases, p = min(c[cell + CASES] + weight, memory), c[cell + CHANCE]
                p = min(1.0 - RARE, max(RARE, p + (right - p) * weight / (cases + 1.5)))
                c[cell + CASES] = cases
                if p != c[cell + CHANCE]:  # at a bound it stays the same, time and again
                    c[cell + CHANCE], c[cell + LOGIT] = p, log(p / (1.0 - p))
            for place in (row + i, after + i):
                new = belief.weights[place] + change
                belief.weights[place] = min(HEAVY, max(-HEAVY, new))
