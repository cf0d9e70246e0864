"""What `draftsmith tune pld-plus` found out about a model: a small JSON file in the user's cache.

A calibration changes how well drafts are chosen, never what is generated.
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
    """The best layer, heads and draft length of PLD+ for one model. Source: PLD+, section 5.5."""

    model: str
    layers: int
    heads_per_layer: int
    layer: int
    """Counted from 1: its hidden states gave the longest accepted drafts."""
    heads: tuple[tuple[int, int, int], ...]
    """(layer, head, count), both from 0, best first: how often its attention peaked at the copy."""
    K: dict[str, int]
    """Draft length with the longest accepted drafts, by rank: hidden, attention."""
    accepted: dict[str, dict[str, float]]
    """Mean accepted length, bonus token included: by layer at K=10, and by K for each rank."""
    prompts: int
    tokens: int

    def save(self) -> Path:
        """Write it where `load` finds it; returns the file. Raises WriteError if it cannot."""
        path = file_of(self.model)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")
        return path


def file_of(model: str) -> Path:
    """The file about a model."""
    return file_about(model, *KIND)


def load(model: ModelFacts) -> Calibration | None:
    """What is known about a model; None if it has no name or was never calibrated.

    Raises LoadError for a file that is damaged, or about a model of another shape.
    """
    path = known_about(model.name, *KIND)
    if path is None:
        return None
    remedy = "delete it, or run `draftsmith tune pld-plus` again"
    try:
        found = _read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path} is no calibration of PLD+ ({error}); {remedy}") from error
    if (found.layers, found.heads_per_layer) != (model.layers, model.heads):
        raise LoadError(
            f"{path} is about a model of {found.layers} layers with {found.heads_per_layer} heads, "
            f"not {model.layers} with {model.heads}; {remedy}"
        )
    return found


def _read(entry: dict[str, Any]) -> Calibration:
    if entry.pop("format") != FORMAT:
        raise ValueError("another version wrote it")
    heads = tuple((int(layer), int(head), int(count)) for layer, head, count in entry.pop("heads"))
    return Calibration(heads=heads, **entry)
