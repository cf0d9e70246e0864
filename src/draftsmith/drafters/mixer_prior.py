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

from draftsmith.drafters.mixer import MAX_WEIGHT, MIN_PROB, Mixer, new_head, new_mixer
from draftsmith.errors import LoadError

FILE = Path(__file__).with_name("mixer_prior.safetensors")
BOUNDS = {"chance": (0.0, 1.0), "cases": (0.0, 1e9), "weights": (-MAX_WEIGHT, MAX_WEIGHT)}
"""Tensors of a mixer in a file, with the bounds of their values: probabilities and counts of the
cells, and all weights."""
CONFIDENCE = 100.0
"""Maximum count of a cell in the prior, so that the mixer adapts to the text."""


def prior(indexes: int) -> Mixer:
    """Return a copy of the shipped prior for that many indexes; raise LoadError for a bad one."""
    return adaptable(_shipped()[f"{indexes}"])


def head_prior(indexes: int) -> Mixer:
    """Return the same for the input of a head."""
    return adaptable(_shipped()[f"{indexes}.head"])


@cache
def _shipped() -> dict[str, Mixer]:
    return load(FILE)


def adaptable(taught: Mixer) -> Mixer:
    """Return a copy with limited counts, so that it adapts to the text."""
    mixer = taught.copy()
    np.minimum(mixer.cells["count"], CONFIDENCE, out=mixer.cells["count"])
    return mixer


def filled(mixer: Mixer, prob: Any) -> Mixer:
    """Set the probabilities, (I, CELLS), of a mixer's cells and their logits; return the mixer."""
    mixer.cells["prob"] = prob
    mixer.cells["logit"] = np.vectorize(log)(prob / (1 - prob))  # np.log differs in the last bit
    return mixer


def as_tensors(key: str, mixer: Mixer) -> dict[str, Any]:
    """Return the tensors of a mixer for a file; their names begin with `key`."""
    arrays = mixer.cells["prob"], mixer.cells["count"], mixer.weights
    return {
        f"{key}.{name}": array.astype(np.float32).ravel()
        for name, array in zip(BOUNDS, arrays, strict=True)
    }


def load(path: Path) -> dict[str, Mixer]:
    """Return the fitted mixers by number of indexes, and the input of a head for each: `2.head`.

    Raises LoadError for another file, and if its values are out of range.
    """
    empty = {f"{n}": new_mixer(n) for n in (1, 2)} | {f"{n}.head": new_head(n) for n in (1, 2)}
    try:
        tensors = load_file(path)
        return {key: checked(tensors, key, mixer) for key, mixer in empty.items()}
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise LoadError(
            f"{path} is not a prior of auto ({error}); install draftsmith again, or make the file "
            "with recipes/auto"
        ) from error


def checked(tensors: Mapping[str, Any], key: str, mixer: Mixer) -> Mixer:
    """Fill a mixer from a file; raise ValueError or LookupError if its numbers are invalid."""
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
    return filled(mixer, prob.clip(MIN_PROB, 1 - MIN_PROB))
