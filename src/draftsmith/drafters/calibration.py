"""Calibration: the result of `draftsmith tune pld-plus` for a model, a JSON file in the cache.

A calibration affects how well drafts are chosen, never what is generated.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.core.target import ModelFacts
from draftsmith.errors import LoadError
from draftsmith.storage import file_about, known_about, write_text, writing

FORMAT = 1
KIND = "pld_plus", ".json"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Best layer, heads and draft length of PLD+ for one model. Source: PLD+, section 5.5."""

    model: str
    layers: int
    heads_per_layer: int
    layer: int
    """Layer, counted from 1, with hidden states that gave the longest accepted drafts."""
    heads: tuple[tuple[int, int, int], ...]
    """(layer, head, count), both from 0, best first: how often its attention peaked at the copy."""
    K: dict[str, int]
    """Rank (hidden, attention) → draft length with the longest accepted drafts."""
    accepted: dict[str, dict[str, float]]
    """Mean accepted length with bonus token: by layer for K=10, and by K for each rank."""
    prompts: int
    tokens: int

    def save(self) -> Path:
        """Write the file that `load` reads; return its path. Raises WriteError."""
        path = file_of(self.model)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")
        return path


def file_of(model: str) -> Path:
    """Return the path of a model's file."""
    return file_about(model, *KIND)


def load(model: ModelFacts) -> Calibration | None:
    """Return the calibration of a model; None if it has no name or was never calibrated.

    Raises LoadError for a damaged file, or one of a model with another shape.
    """
    path = known_about(model.name, *KIND)
    if path is None:
        return None
    remedy = "delete it, or run `draftsmith tune pld-plus` again"
    try:
        found = _read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} is not a calibration of PLD+ ({error}); {remedy}") from error
    if (found.layers, found.heads_per_layer) != (model.layers, model.heads):
        raise LoadError(
            f"{path} is for a model of {found.layers} layers with {found.heads_per_layer} heads, "
            f"not of {model.layers} with {model.heads}; {remedy}"
        )
    return found


def _read(entry: dict[str, Any]) -> Calibration:
    if entry.pop("format") != FORMAT:
        raise ValueError("it has another format version")
    heads = tuple((int(layer), int(head), int(count)) for layer, head, count in entry.pop("heads"))
    return Calibration(heads=heads, **entry)
