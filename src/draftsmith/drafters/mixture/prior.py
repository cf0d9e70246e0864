"""The prior: what a belief starts from, fitted on recorded answers by recipes/auto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as serialize

from draftsmith.drafters.mixture.belief import AFTER, HEAVY, RARE, Belief
from draftsmith.drafters.mixture.candidates import CELLS
from draftsmith.drafters.mixture.compiled import floats
from draftsmith.drafters.mixture.contexts import ORDERS
from draftsmith.errors import LoadError

FILE = Path(__file__).with_name("prior.safetensors")
CONFIDENCE = 30.0
"""Cases that a prior's cell claims at most, so that it follows the text at hand."""
LEARNT = ("chance", "evidence", "seen", "after")
"""What is stored of a belief."""
BOUNDS = ((0.0, 1.0), (0.0, 1e9), (-HEAVY, HEAVY), (-HEAVY, HEAVY))
TYPICAL = (0, 1, 2, 3.5, 6.5, 12, 24)
"""Of the size classes."""


def untaught(banks: int) -> Belief:
    """What is believed before anything was seen: frequencies, and all inputs alike."""
    cells = [0.02] * CELLS
    for times in range(1, 7):
        for total in range(times, 7):
            cells[times * 7 + total] = min(0.9, TYPICAL[times] / (TYPICAL[total] + 2))
    inputs = banks * ORDERS
    return belief(
        cells * inputs,
        [0.0] * (CELLS * inputs),
        ([0.3] * inputs + [0.0]) * ORDERS**banks,
        [0.0] * (AFTER * (inputs + 1)),
    )


def prior(banks: int) -> Belief:
    """A fresh copy of the shipped prior for so many banks; raises LoadError where it is damaged."""
    return adaptable(_shipped()[banks])


@cache
def _shipped() -> dict[int, Belief]:
    return load(FILE)


def adaptable(taught: Belief) -> Belief:
    """A copy that claims little evidence, so that it follows the text at hand."""
    evidence = [min(cases, CONFIDENCE) for cases in taught.evidence]
    return belief(taught.chance, evidence, taught.seen, taught.after)


def belief(
    chance: Iterable[float],
    evidence: Iterable[float],
    seen: Iterable[float],
    after: Iterable[float],
) -> Belief:
    """A belief of these values, with arrays of its own."""
    chance = list(chance)
    logit = [log(p / (1 - p)) for p in chance]
    return Belief(*map(floats, (chance, list(evidence), logit, list(seen), list(after))))


def save(path: Path, beliefs: Mapping[int, Belief]) -> None:
    """Write beliefs by their number of banks."""
    tensors = {
        f"{banks}.{name}": np.array(getattr(one, name), np.float32)
        for banks, one in beliefs.items()
        for name in LEARNT
    }
    path.write_bytes(serialize(tensors))


def load(path: Path) -> dict[int, Belief]:
    """Beliefs by their number of banks.

    Raises LoadError where the file is not one of `save`, or holds what is no belief.
    """
    try:
        tensors = load_file(path)
        return {banks: _checked(banks, tensors) for banks in (1, 2) if f"{banks}.seen" in tensors}
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise LoadError(
            f"{path} is no prior of auto ({error}); install draftsmith again, or make the file with "
            "recipes/auto"
        ) from error


def _checked(banks: int, tensors: Mapping[str, Any]) -> Belief:
    """One of a file's beliefs; raises ValueError or LookupError."""
    inputs = banks * ORDERS
    sizes = (inputs * CELLS,) * 2 + (ORDERS**banks * (inputs + 1), AFTER * (inputs + 1))
    found = []
    for name, size, (low, high) in zip(LEARNT, sizes, BOUNDS, strict=True):
        array = tensors[f"{banks}.{name}"]
        if array.shape != (size,):
            raise ValueError(f"{name} has shape {array.shape}, not ({size},)")
        if not ((array >= low) & (array <= high)).all():  # NaN is neither
            raise ValueError(f"{name} has values outside {low:g} to {high:g}")
        found.append(np.clip(array.astype(float), RARE, 1 - RARE) if name == "chance" else array)
    return belief(*(array.tolist() for array in found))
