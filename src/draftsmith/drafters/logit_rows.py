"""Logit rows: the best tokens of the target's logits after an earlier occurrence of a token.

This is RACER's copy-logit (arXiv 2604.14885). Rows of rejected nodes are kept, too, as in token
recycling (Luo et al. 2024). A new row is averaged with the existing row of the same token. The
table has a fixed size; a new row replaces the row of another token in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from draftsmith.compiled import inlined, int64
from draftsmith.core.readout import HIGHEST, highest
from draftsmith.core.target import Highest

TOP = HIGHEST
"""Number of tokens in a row, the most probable first."""
ROWS = 4096
"""Number of rows in a table; a token's row is its id modulo this."""
WHOLE = 1 << 16
"""Integer that represents the probability 1."""
ROW = np.dtype([("after", np.int32), ("tokens", np.int32, TOP), ("probs", np.int32, TOP)])
"""`after`: 1 + the token before the row; 0 for no row; negative for a row of `bigrams`.

`probs` are shares of WHOLE among the tokens of the row only, because a sum over the vocabulary
costs more than it gains.
"""
WIDTH = ROW.itemsize // 4
"""Number of integers in a row."""


def best(tokens: Sequence[int], logits: Tensor, known: Highest | None = None) -> Any:
    """Return rows, (n,) ROW, for `n` tokens that the logits (n, V) followed.

    `known` are their highest logits, if they were read. If the best logits are not finite, the row
    is empty: its `after` is 0.
    """
    if known is None:
        known = Highest(*(one.cpu().double().numpy() for one in highest(logits)))
    values, ids = known.values.astype(np.float64), known.ids
    finite = np.isfinite(values).all(-1)
    values[~finite] = 0.0
    probs = np.exp(values - values[:, :1])
    probs /= probs.sum(-1, keepdims=True)
    rows = np.zeros(len(values), ROW)
    rows["after"] = np.where(finite, np.array(tokens) + 1, 0)
    rows["tokens"], rows["probs"] = ids, probs * WHOLE
    return rows


@inlined
def remember(table: Any, rows: Any) -> None:
    """Store new rows in the table, each averaged with the existing row of its token."""
    for i in range(len(rows)):
        new, old = rows[i], table[(rows[i].after - 1) % ROWS]
        if abs(old.after) == new.after:
            average(new, old)
        old.after = new.after
        for j in range(TOP):
            old.tokens[j], old.probs[j] = new.tokens[j], new.probs[j]


@inlined
def average(new: Any, old: Any) -> None:
    """Replace `new` by the best tokens of the mean of both rows; changes `old`."""
    for i in range(TOP):
        new.probs[i] //= 2
        old.probs[i] //= 2
    for j in range(TOP):
        i = 0
        while i < TOP and new.tokens[i] != old.tokens[j]:
            i += 1
        if i < TOP:
            insert(new, i, old.tokens[j], new.probs[i] + old.probs[j])
            old.probs[j] = -1
    for j in range(TOP):
        if old.probs[j] > new.probs[TOP - 1]:
            insert(new, TOP - 1, old.tokens[j], int64(old.probs[j]))


@inlined
def insert(row: Any, i: int, token: int, prob: int) -> None:
    """Insert a token in place of the i-th one, after all tokens with an equal probability."""
    while i and row.probs[i - 1] < prob:
        row.tokens[i], row.probs[i] = row.tokens[i - 1], row.probs[i - 1]
        i -= 1
    row.tokens[i], row.probs[i] = token, prob
