"""A prior of `auto` without training, and the file of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as serialize

from draftsmith.drafters.mixer import AFTER, PROBS, RANKS, SIZES, Mixer, new_head, new_mixer
from draftsmith.drafters.mixer_prior import as_tensors, filled

CALIBRATED = (0.95, 0.75, 0.45, 0.2, 0.06, 0.02, 0.005)
"""A probability of each class of `PROB_STEPS`."""
TYPICAL = (0, 1, 2, 3.5, 6.5, 12, 24)
"""Typical count of each class."""


def untaught(indexes: int) -> Mixer:
    """Return a mixer without training: cells hold frequencies, all inputs have equal weights."""
    mixer = new_mixer(indexes)
    prob = np.full(mixer.cells.shape, 0.02)
    for times in range(1, SIZES):
        for total in range(times, SIZES):
            share = min(0.9, TYPICAL[times] / (TYPICAL[total] + 2))
            for older in (0, SIZES):
                prob[:, (older + times) * SIZES + total] = share
    mixer.weights[AFTER:, :-1] = 0.3
    return filled(mixer, prob)


def untaught_head(mixer: Mixer) -> Mixer:
    """Return the input of a head (`with_head`) that is believed as far as its probabilities go."""
    head = new_head(mixer.indexes)
    prob = np.full(head.cells.shape, 0.02)
    prob[:, : RANKS * PROBS] = np.tile(CALIBRATED, RANKS)
    head.weights[AFTER:, -2] = 0.3
    named = head.weights[len(mixer.weights) :]
    named[:, :-2], named[:, -1] = mixer.weights[AFTER:, :-1], mixer.weights[AFTER:, -1]
    return filled(head, prob)


def save(path: Path, mixers: Mapping[str, Mixer]) -> None:
    """Write all mixers, and the inputs of heads, with the keys of `mixer_prior.load`."""
    tensors: dict[str, Any] = {}
    for key, mixer in mixers.items():
        tensors |= as_tensors(key, mixer)
    path.write_bytes(serialize(tensors))
