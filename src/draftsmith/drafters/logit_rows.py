"""Logit rows: the target's best tokens where it saw the same token before.

RACER's copy-logit (arXiv 2604.14885). Rows of rejected nodes are kept, too, as token recycling does
(Luo et al. 2024). A new row is averaged with the one that was kept for the same token. The table
has a fixed size: a row takes the place of another token's row that shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.compiled import inlined

TOP = 8
"""Tokens of a row, the most probable first."""
BLOCK = 64
"""Neighbouring logits of which the best is looked for first."""
ROWS = 4096
"""Rows of a table; a token's row is found by the last bits of its id."""
WHOLE = 1 << 16
"""A probability of 1."""
ROW = np.dtype([("after", np.int32), ("tokens", np.int32, TOP), ("probs", np.int32, TOP)])
"""`after`: 1 + the token that the row follows; 0 for no row; negated for a row of `bigrams`.

`probs` are shares of WHOLE among these tokens only: a sum over the vocabulary costs more than it
tells.
"""
WIDTH = ROW.itemsize // 4
"""Numbers of a row where it is stored as integers."""


def best(tokens: Sequence[int], logits: Tensor) -> Any:
    """Return rows, (n,) ROW, for `n` tokens that logits (n, V) followed.

    Where the best logits are not finite, the row is empty: its `after` is 0.
    """
    highest, ids = _highest(logits)
    values = highest.cpu().double().numpy()  # some devices have no float64
    finite = np.isfinite(values).all(-1)
    values[~finite] = 0.0
    probs = np.exp(values - values[:, :1])
    probs /= probs.sum(-1, keepdims=True)
    rows = np.zeros(len(values), ROW)
    rows["after"] = np.where(finite, np.array(tokens) + 1, 0)
    rows["tokens"], rows["probs"] = ids.numpy(force=True), probs * WHOLE
    return rows


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (n, TOP) highest logits of each row, the highest first, and their token ids.

    The best blocks are found first, then the best logits in them: that takes a quarter of the time.
    """
    n, V = logits.shape  # noqa: N806
    if V % BLOCK or V < TOP * BLOCK:
        values, ids = logits.topk(TOP)
        return values, ids
    blocks = logits.view(n, -1, BLOCK)
    chosen = blocks.amax(-1).topk(TOP).indices
    few = blocks[torch.arange(n, device=logits.device)[:, None], chosen].flatten(1)
    values, places = few.topk(TOP)
    return values, chosen.gather(1, places // BLOCK) * BLOCK + places % BLOCK


@inlined
def remember(table: Any, rows: Any) -> None:
    """Put new rows into the table, each as the mean of itself and the token's row so far."""
    for i in range(len(rows)):
        new, old = rows[i], table[(rows[i].after - 1) % ROWS]
        if abs(old.after) == new.after:
            average(new, old)
        old.after = new.after
        for j in range(TOP):
            old.tokens[j], old.probs[j] = new.tokens[j], new.probs[j]


@inlined
def average(new: Any, old: Any) -> None:
    """Make `new` the best tokens of the mean of both; `old` is used up."""
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
            insert(new, TOP - 1, old.tokens[j], old.probs[j])


@inlined
def insert(row: Any, i: int, token: int, prob: int) -> None:
    """Put a token, which takes the i-th one's place, after all that are as probable."""
    while i and row.probs[i - 1] < prob:
        row.tokens[i], row.probs[i] = row.tokens[i - 1], row.probs[i - 1]
        i -= 1
    row.tokens[i], row.probs[i] = token, prob
