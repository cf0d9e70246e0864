"""Logit rows: the best tokens of the target's logits after an earlier occurrence of a token.

This is RACER's copy-logit (arXiv 2604.14885). Rows of rejected nodes are kept, too, as in token
recycling (Luo et al. 2024). A new row is averaged with the existing row of the same token. The
table has a fixed size; a new row replaces the row of another token in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.compiled import inlined

TOP = 8
"""Number of tokens in a row, the most probable first."""
BLOCK = 64
"""Size of the blocks of neighbouring logits that are searched first."""
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


def best(tokens: Sequence[int], logits: Tensor) -> Any:
    """Return rows, (n,) ROW, for `n` tokens that the logits (n, V) followed.

    If the best logits are not finite, the row is empty: its `after` is 0.
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
    """Return the (n, TOP) highest logits of each row, in falling order, and their token ids.

    Searching the best blocks first, then the best logits in them, takes a quarter of the time.
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
            insert(new, TOP - 1, old.tokens[j], old.probs[j])


@inlined
def insert(row: Any, i: int, token: int, prob: int) -> None:
    """Insert a token in place of the i-th one, after all tokens with an equal probability."""
    while i and row.probs[i - 1] < prob:
        row.tokens[i], row.probs[i] = row.tokens[i - 1], row.probs[i - 1]
        i -= 1
    row.tokens[i], row.probs[i] = token, prob
