"""The prior: initial values of a mixer, fitted to recorded answers by recipes/auto."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as serialize

from draftsmith.drafters.mixer import AFTER, MAX_WEIGHT, MIN_PROB, SIZES, Mixer, new_mixer
from draftsmith.errors import LoadError

FILE = Path(__file__).with_name("mixer_prior.safetensors")
BOUNDS = {"chance": (0.0, 1.0), "cases": (0.0, 1e9), "weights": (-MAX_WEIGHT, MAX_WEIGHT)}
"""Tensors of a mixer in a file, with the bounds of their values: probabilities and counts of the
cells, and all weights."""
CONFIDENCE = 100.0
"""Maximum count of a cell in the prior, so that the mixer adapts to the text."""
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
    return _filled(mixer, prob)


def prior(indexes: int) -> Mixer:
    """Return a copy of the shipped prior for that many indexes; raise LoadError if it is
    damaged."""
    return adaptable(_shipped()[indexes])


@cache
def _shipped() -> dict[int, Mixer]:
    return load(FILE)


def adaptable(taught: Mixer) -> Mixer:
    """Return a copy with limited counts, so that it adapts to the text."""
    mixer = taught.copy()
    np.minimum(mixer.cells["count"], CONFIDENCE, out=mixer.cells["count"])
    return mixer


def _filled(mixer: Mixer, prob: Any) -> Mixer:
    """Set the probabilities, (I, CELLS), of a mixer's cells and their logits; return the mixer."""
    mixer.cells["prob"] = prob
    mixer.cells["logit"] = np.vectorize(log)(prob / (1 - prob))  # np.log differs in the last bit
    return mixer


def save(path: Path, mixers: Mapping[int, Mixer]) -> None:
    """Write mixers, with their number of indexes as keys."""
    tensors: dict[str, Any] = {}
    for indexes, mixer in mixers.items():
        tensors |= as_tensors(str(indexes), mixer)
    path.write_bytes(serialize(tensors))


def as_tensors(key: str, mixer: Mixer) -> dict[str, Any]:
    """Return the tensors of a mixer for a file; their names begin with `key`."""
    arrays = mixer.cells["prob"], mixer.cells["count"], mixer.weights
    return {
        f"{key}.{name}": array.astype(np.float32).ravel()
        for name, array in zip(BOUNDS, arrays, strict=True)
    }


def load(path: Path) -> dict[int, Mixer]:
    """Read the mixers of a file, with their number of indexes as keys.

    Raises LoadError if `save` did not write the file, or its values are out of range.
    """
    try:
        tensors = load_file(path)
        return {indexes: checked(tensors, str(indexes), indexes) for indexes in (1, 2)}
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise LoadError(
            f"{path} is not a prior of auto ({error}); install draftsmith again, or make the file "
            "with recipes/auto"
        ) from error


def checked(tensors: Mapping[str, Any], key: str, indexes: int) -> Mixer:
    """Return one mixer of a file; raise ValueError or LookupError if it is invalid."""
    mixer = new_mixer(indexes)
    shapes = mixer.cells.shape, mixer.cells.shape, mixer.weights.shape
    found = []
    for (name, (low, high)), (rows, width) in zip(BOUNDS.items(), shapes, strict=True):
        array = tensors[f"{key}.{name}"]
        if array.shape != (rows * width,):
            raise ValueError(f"{name} has shape {array.shape}, not ({rows * width},)")
        if not ((array >= low) & (array <= high)).all():  # also refuses NaN
            raise ValueError(f"{name} has values outside {low:g} to {high:g}")
        found.append(array.astype(float).reshape(rows, width))
    prob, mixer.cells["count"], mixer.weights[:] = found
    return _filled(mixer, prob.clip(MIN_PROB, 1 - MIN_PROB))
