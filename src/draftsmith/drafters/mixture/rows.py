"""Rows: what the target's own logits said where it saw the same token before.

RACER's copy-logit (arXiv 2604.14885); kept of rejected drafts, too, as token recycling does (Luo et
al. 2024), and averaged, the latest weighing half. One more input of the mixture, beside the
contexts, which know ids only. What does not fit is overwritten: a request's rows take the same
memory however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafters.mixture.candidates import (
    ABSENT,
    BANKED,
    CANDIDATE,
    CANDIDATES,
    CELL,
    FOUND,
    PRESENT,
    ROW,
    SLOTS,
    Work,
    nominate,
    slot_of,
)
from draftsmith.drafters.mixture.compiled import Ints, inner

BEST = 8
"""Tokens of a row that are kept, the most probable first; all become candidates."""
BLOCK = 64
"""Neighbouring tokens of which the best is looked for first."""
KEPT = 4096
"""Rows of a request: one by the last bits of each token's id."""
KNOWN = 2
"""Weights are chosen by whether the row names the candidate."""
TOLD, LIKELY, WIDTH = 1, 1 + BEST, 1 + 2 * BEST
"""A row: 1 + the token it followed, 0 where there is none, negative where only `bigrams` say so;
the best tokens; each one's probability, among the best of each time: a sum over the vocabulary
costs more than it tells."""
WHOLE = 1 << 16
"""A probability of 1."""
STEPS = (58982, 39322, 19661, 6554, 1966, 655)
"""Between the classes of probability: 0.9, 0.6, 0.3, 0.1, 0.03, 0.01."""
CLASSES, RANKS = 1 + len(STEPS), 6
"""Classes of probability, and of places in a row; `bigrams` have cells behind those of the rest."""


def best(tokens: Sequence[int], logits: Tensor) -> list[list[int]]:
    """A row for each of these `n` tokens, which logits (n, V) followed; empty unless finite."""
    highest, ids = (found.tolist() for found in _highest(logits))
    with np.errstate(invalid="ignore"):  # of a row that is not finite nothing is kept
        chances = np.exp(np.array(highest) - [[row[0]] for row in highest])
        chances /= chances.sum(-1, keepdims=True)
        parts = (chances * WHOLE).astype(np.int32).tolist()
    usable = np.isfinite(np.array(highest)).all(-1).tolist()
    rows = zip(tokens, ids, parts, usable, strict=True)
    return [[token + 1, *kept, *part] if good else [] for token, kept, part, good in rows]


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(n, BEST) highest logits of each row, the highest first, and whose they are.

    Of blocks first, then within the best of them: a quarter of the time.
    """
    n, V = logits.shape  # noqa: N806
    if V % BLOCK or V < BEST * BLOCK:
        values, ids = logits.topk(BEST)
        return values, ids
    blocks = logits.view(n, -1, BLOCK)
    chosen = blocks.amax(-1).topk(BEST).indices
    few = blocks[torch.arange(n, device=logits.device)[:, None], chosen].flatten(1)
    values, places = few.topk(BEST)
    return values, chosen.gather(1, places // BLOCK) * BLOCK + places % BLOCK


@inner
def place_of(token: int) -> int:
    """Where a token's row is."""
    return token % KEPT * WIDTH


@inner
def remember(work: Work) -> None:
    """Keep the new rows, each as the mean of itself and what was kept of its token."""
    rows, new = work.rows, work.new
    for start in range(0, len(new), WIDTH):
        at = place_of(new[start] - 1)
        if abs(rows[at]) == new[start]:
            average(new, start, rows, at)
        for i in range(WIDTH):
            rows[at + i] = new[start + i]


@inner
def average(new: Ints, start: int, old: Ints, at: int) -> None:
    """Make the new row the best tokens of its mean with the old one, which is used up."""
    for i in range(BEST):
        new[start + LIKELY + i] //= 2
        old[at + LIKELY + i] //= 2
    for j in range(BEST):
        i = 0
        while i < BEST and new[start + TOLD + i] != old[at + TOLD + j]:
            i += 1
        if i < BEST:
            part = new[start + LIKELY + i] + old[at + LIKELY + j]
            place(new, start, i, old[at + TOLD + j], part)
            old[at + LIKELY + j] = -1
    for j in range(BEST):
        if old[at + LIKELY + j] > new[start + LIKELY + BEST - 1]:
            place(new, start, BEST - 1, old[at + TOLD + j], old[at + LIKELY + j])


@inner
def place(row: Ints, start: int, i: int, token: int, part: int) -> None:
    """Put a token that takes the i-th one's place behind all that are as probable."""
    while i and row[start + LIKELY + i - 1] < part:
        row[start + TOLD + i] = row[start + TOLD + i - 1]
        row[start + LIKELY + i] = row[start + LIKELY + i - 1]
        i -= 1
    row[start + TOLD + i], row[start + LIKELY + i] = token, part


@inner
def likely(part: int) -> int:
    """The class of a probability, the highest first."""
    kind = 0
    for step in STEPS:
        kind += part < step
    return kind


@inner
def recall(work: Work, token: int, count: int) -> int:
    """The candidates that the row after `token` names join the `count` there are."""
    w, rows = work.ints, work.rows
    row, at = w[BANKED], place_of(token)
    w[FOUND + row] = w[ABSENT + row] = -1
    if token >= 0 and len(rows) and abs(rows[at]) == token + 1:
        cell = likely(rows[at + LIKELY]) + CLASSES * (rows[at] < 0)
        w[FOUND + row], w[ABSENT + row] = at, PRESENT + cell
        for i in range(TOLD, LIKELY):
            count = nominate(work, count, rows[at + i])
    return count


@inner
def compare(work: Work, count: int) -> None:
    """Say what the row knows of each candidate."""
    w, rows = work.ints, work.rows
    row = w[BANKED]
    for at in range(CANDIDATES, CANDIDATES + count * CANDIDATE, CANDIDATE):
        w[at + ROW] *= KNOWN
    if w[FOUND + row] < 0:
        return
    first = RANKS * (rows[w[FOUND + row]] < 0)
    for i in range(BEST):
        slot = slot_of(work, rows[w[FOUND + row] + TOLD + i])
        if w[SLOTS + slot]:
            at = CANDIDATES + (w[SLOTS + slot] - 1) * CANDIDATE
            rank = first + (i if i < 4 else 4 if i < 6 else 5)
            w[at + CELL + row] = rank * CLASSES + likely(rows[w[FOUND + row] + LIKELY + i])
            w[at + ROW] += 1
