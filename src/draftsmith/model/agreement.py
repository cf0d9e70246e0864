"""Where two answers first differ, and how close the model's choice was there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.core.drafter import common_prefix
from draftsmith.model.loaded import LoadedModel


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first position at which two answers differ; None if they are equal."""
    at = common_prefix(a, b)
    return None if at == len(a) == len(b) else at


def top_two_gap(model: LoadedModel, ids: Sequence[int]) -> float:
    """Return the distance of the two best logits after `ids`, by the model's own forward."""
    with torch.inference_mode():
        inputs = torch.tensor([list(ids)], device=model.device)
        best = model.model(inputs).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])
