"""Evaluates a model on held-out text: its loss, and how far it can draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.lab.train.loss import Logits, surprise
from draftsmith.model.adaptive import AdaptiveTokens

DEPTHS = 13
"""Most adaptive tokens that the paper attaches. Source: SDSAT, section 3.4."""
_ASKS = 3
"""Kind of random numbers, in addition to those of `batches` and `texts`."""


@dataclass(frozen=True)
class Depths:
    """Quality of drafts by depth, with k adaptive tokens after a true prefix of the text."""

    accuracy: tuple[float, ...]
    """Share of places where the draft at depth 1, 2, … is the text's token."""
    agreement: tuple[float, ...]
    """Share of places where it is the model's own choice after the true tokens."""
    accepted: tuple[float, ...]
    """Mean number of correct drafts in a row from the first, for k = 1, 2, …"""
    places: int


@torch.inference_mode()
def standard_loss(
    logits: Logits, sequences: NDArray[np.int32], banned: Sequence[int], rows_per_pass: int = 8
) -> float:
    """Mean loss of the text's tokens, in nats. `sequences` is (N, T+1)."""
    total, counted = 0.0, 0
    for rows in _rows(sequences, rows_per_pass):
        losses = surprise(logits(rows[:, :-1]), rows[:, 1:], banned)
        total += float(losses.cpu().double().sum())  # some devices have no float64
        counted += losses.numel()
    return total / counted


@torch.inference_mode()
def by_depth(
    logits: Logits,
    sequences: NDArray[np.int32],
    adaptive: AdaptiveTokens,
    depths: int = DEPTHS,
    rows_per_pass: int = 8,
) -> Depths:
    """Test drafts once per sequence (N, T+1), at a random place, with `depths` adaptive tokens.

    With diverse tokens fewer depths are tested. T must be at least twice the depths.
    """
    depths = min(depths, adaptive.L - 1) if adaptive.diverse else depths
    ask = torch.tensor(adaptive.ask(depths), device="cpu")
    right, same, runs = torch.zeros((3, depths), device="cpu")
    counted = 0
    rng = np.random.default_rng([0, _ASKS])
    for rows in _rows(sequences, rows_per_pass):
        length = rows.shape[1] - 1
        known = torch.from_numpy(rng.integers(depths, length - depths + 1, len(rows)))
        # Later tokens are not attended to, so rows with longer prefixes need no padding.
        #
        # (R, K): a_j is at position known + j - 1
        places = known[:, None] + torch.arange(depths, device="cpu")
        asked = rows[:, :-1].scatter(1, places, ask.expand(len(rows), -1))
        drafts = _best(logits(asked), adaptive.tokens).gather(1, places)
        own = _best(logits(rows[:, :-1]), adaptive.tokens).gather(1, places)
        true = rows[:, 1:].gather(1, places)
        hits = (drafts == true).float()
        right += hits.sum(0)
        same += (drafts == own).float().sum(0)
        runs += hits.cumprod(1).cumsum(1).sum(0)
        counted += len(rows)
    accuracy, agreement, accepted = ((sums / counted).tolist() for sums in (right, same, runs))
    return Depths(tuple(accuracy), tuple(agreement), tuple(accepted), counted)


def _best(logits: Tensor, banned: Sequence[int]) -> Tensor:
    """(R, T) the greedy choice among tokens that may be emitted, on the CPU."""
    logits = logits.index_fill(-1, torch.tensor(banned, device=logits.device), float("-inf"))
    return logits.argmax(-1).cpu()


def _rows(sequences: NDArray[np.int32], rows_per_pass: int) -> Iterator[Tensor]:
    for start in range(0, len(sequences), rows_per_pass):
        yield torch.from_numpy(sequences[start : start + rows_per_pass].astype(np.int64))
