"""The prior: what a belief starts from, fitted on recorded answers by recipes/auto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as serialize

from draftsmith.drafters.mixture.belief import (
    AFTER,
    CASES,
    CHANCE,
    HEAVY,
    RARE,
    VALUES,
    Belief,
)
from draftsmith.drafters.mixture.candidates import CELLS
from draftsmith.drafters.mixture.compiled import floats
from draftsmith.drafters.mixture.contexts import ORDERS
from draftsmith.drafters.mixture.rows import KNOWN
from draftsmith.errors import LoadError

FILE = Path(__file__).with_name("prior.safetensors")
NAMES = ("chance", "cases", "weights")
"""What is stored of a belief."""
BOUNDS = ((0.0, 1.0), (0.0, 1e9), (-HEAVY, HEAVY))
CONFIDENCE = 100.0
"""Cases that a prior's cell claims at most, so that it follows the text at hand."""
TYPICAL = (0, 1, 2, 3.5, 6.5, 12, 24)
"""Of the size classes."""


def untaught(banks: int) -> Belief:
    """What is believed before anything was seen: frequencies, and all inputs alike."""
    inputs = banks * ORDERS + 1
    cells = [0.02] * CELLS
    for times in range(1, 7):
        for total in range(times, 7):
            share = min(0.9, TYPICAL[times] / (TYPICAL[total] + 2))
            cells[times * 7 + total] = cells[(7 + times) * 7 + total] = share
    weights = [0.0] * (AFTER * (inputs + 1)) + ([0.3] * inputs + [0.0]) * ORDERS**banks * KNOWN
    return _belief(cells * inputs, [0.0] * (CELLS * inputs), weights)


def prior(banks: int) -> Belief:
    """A fresh copy of the shipped prior for so many banks; raises LoadError where it is damaged."""
    return adaptable(_shipped()[banks])


@cache
def _shipped() -> dict[int, Belief]:
    return load(FILE)


def adaptable(taught: Belief) -> Belief:
    """A copy that claims little evidence, so that it follows the text at hand."""
    cells = floats(taught.cells)
    for at in range(CASES, len(cells), VALUES):
        cells[at] = min(cells[at], CONFIDENCE)
    return Belief(cells, floats(taught.weights))


def copied(belief: Belief) -> Belief:
    """A belief with arrays of its own."""
    return Belief(*map(floats, belief))


def _belief(chance: Sequence[float], cases: Sequence[float], weights: Sequence[float]) -> Belief:
    cells = ((p, n, log(p / (1 - p))) for p, n in zip(chance, cases, strict=True))
    return Belief(floats([value for cell in cells for value in cell]), floats(weights))


def save(path: Path, beliefs: Mapping[int, Belief]) -> None:
    """Write beliefs by their number of banks."""
    tensors = (as_tensors(str(banks), one) for banks, one in beliefs.items())
    path.write_bytes(serialize({name: array for each in tensors for name, array in each.items()}))


def as_tensors(key: str, belief: Belief) -> dict[str, Any]:
    """What a file stores of a belief; their names begin with `key`."""
    arrays = belief.cells[CHANCE::VALUES], belief.cells[CASES::VALUES], belief.weights
    return {f"{key}.{n}": np.array(a, np.float32) for n, a in zip(NAMES, arrays, strict=True)}


def load(path: Path) -> dict[int, Belief]:
    """Beliefs by their number of banks.

    Raises LoadError where the file is not one of `save`, or holds what is no belief.
    """
    try:
        tensors = load_file(path)
        return {banks: checked(tensors, str(banks), banks) for banks in (1, 2)}
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise LoadError(
            f"{path} is no prior of auto ({error}); install draftsmith again, or make the file "
            "with recipes/auto"
        ) from error


def checked(tensors: Mapping[str, Any], key: str, banks: int) -> Belief:
    """One of a file's beliefs; raises ValueError or LookupError."""
    inputs = banks * ORDERS + 1
    sizes = inputs * CELLS, inputs * CELLS, (AFTER + ORDERS**banks * KNOWN) * (inputs + 1)
    found = []
    for name, size, (low, high) in zip(NAMES, sizes, BOUNDS, strict=True):
        array = tensors[f"{key}.{name}"]
        if array.shape != (size,):
            raise ValueError(f"{name} has the shape {array.shape}, not ({size},)")
        if not ((array >= low) & (array <= high)).all():  # NaN is neither
            raise ValueError(f"{name} has values that are not from {low:g} to {high:g}")
        found.append(array.astype(float))
    chance, cases, weights = found
    return _belief(chance.clip(RARE, 1 - RARE).tolist(), cases.tolist(), weights.tolist())
