"""Training objectives. Source: SDSAT, equations 7 to 9."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from draftsmith.lab.train.batches import Batch

Logits = Callable[[Tensor], Tensor]
"""Ids (R, T) → logits (R, T, V)."""


@dataclass(frozen=True)
class Loss:
    """Contribution of some rows to the loss of their step; contributions add up."""

    total: Tensor
    """() what is minimised."""
    standard: Tensor
    """() sum of the losses of standard input tokens; of the plain half if there is one."""
    adaptive: Tensor
    """() sum of the losses of adaptive input tokens."""


def surprise(logits: Tensor, labels: Tensor, banned: Sequence[int]) -> Tensor:
    """(R, T) -log of the labels' probability, under the distribution of decoding.

    `banned`, the adaptive tokens, have probability 0, because they are never emitted. `logits` is
    (R, T, V).
    """
    logits, labels = logits.float(), labels.to(logits.device)
    if banned:
        never = torch.tensor(banned, device=logits.device)
        logits = logits.index_fill(-1, never, float("-inf"))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


def loss_of(
    objective: str,
    logits: Logits,
    batch: Batch,
    tokens: Sequence[int],
    positions: int,
    w: float = 1.0,
) -> Loss:
    """Return the loss of some rows of a step that has `positions` in all.

    `plain`: equation 7. `basic`: equation 8, with equal weights for all positions of the mixed
    rows. `improved`: equation 9, ½ (plain rows + w · mixed rows where the input is an adaptive
    token); read literally, the paper's mask would be off by one. Both terms are means over all
    positions of their half, although the mask leaves few positions in the second one.
    """
    if objective == "plain":
        plain = surprise(logits(batch.plain), batch.labels, tokens)
        return Loss(plain.sum() / positions, plain.detach().sum(), plain.new_zeros(()))
    at = batch.replaced
    if objective == "basic":
        mixed = surprise(logits(batch.mixed(tokens)), batch.labels, tokens)
        seen = mixed.detach()
        return Loss(mixed.sum() / positions, seen[~at].sum(), seen[at].sum())
    both = logits(torch.cat([batch.plain, batch.mixed(tokens)]))
    plain = surprise(both[: len(at)], batch.labels, tokens)
    adaptive = surprise(both[len(at) :][at][None], batch.labels[at][None], tokens)
    total = (plain.sum() + w * adaptive.sum()) / positions / 2
    return Loss(total, plain.detach().sum(), adaptive.detach().sum())
