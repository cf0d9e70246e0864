"""Bigrams: what a model says after a token in no text but a line break, for its frequent tokens.

The first rows of every request, until the target's own take their place: one answer position in
three follows a token that the answer has not had before. Source: Stewart et al. 2024, "The
N-Grammys: Accelerating Autoregressive Inference with Learning-Free Batched Speculation",
arXiv 2411.03786, section 4, whose model-derived bigrams are those of a token without any context.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from draftsmith.core.target import ModelFacts
from draftsmith.drafters.calibration import file_of
from draftsmith.drafters.mixture.compiled import Ints, filled
from draftsmith.drafters.mixture.rows import KEPT, LIKELY, WHOLE, WIDTH
from draftsmith.errors import LoadError, WriteError
from draftsmith.storage import write_chunks, writing

FORMAT = "draftsmith bigrams 1"


def path_of(model: str) -> Path:
    """The file about a model, named after its hub id or folder."""
    return file_of(model, "auto", ".safetensors")


def save(model: ModelFacts, rows: Sequence[Sequence[int]]) -> Path:
    """Keep rows (n, WIDTH) where `load` finds them; returns the file. Raises WriteError."""
    path = path_of(model.name)
    header = {"format": FORMAT, "vocab_size": str(model.vocab_size)}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"rows": np.array(rows, np.int32).reshape(-1, WIDTH)}
        write_chunks(path, [serialize(tensors, header)])
    return path


def load(model: ModelFacts) -> Ints | None:
    """Rows in their places, (KEPT * WIDTH,); None where `draftsmith tune auto` kept none.

    Raises LoadError for a file that is damaged, or about a model with another vocabulary.
    """
    try:
        path = path_of(model.name) if model.name else None
    except WriteError:  # nowhere could one have been kept
        return None
    if path is None or not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            header, rows = dict(file.metadata() or {}), file.get_tensor("rows")
        if header.get("format") != FORMAT:
            raise ValueError("it holds something else")
        if header.get("vocab_size") != str(model.vocab_size):
            raise ValueError(
                f"it is about a vocabulary of {header.get('vocab_size')}, not {model.vocab_size}"
            )
        return placed(rows, model.vocab_size)
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise LoadError(
            f"{path} holds no bigrams of this model: {error}; delete it, or run `draftsmith tune "
            "auto` again"
        ) from error


def placed(rows: np.ndarray, vocab_size: int) -> Ints:
    """Rows (n, WIDTH) in their places, marked as nothing that a request's own target said.

    Raises ValueError for what are no rows of tokens below `vocab_size`.
    """
    if rows.dtype != np.int32 or rows.ndim != 2 or rows.shape[1] != WIDTH:
        raise ValueError(f"its rows are {rows.dtype} of the shape {rows.shape}")
    tokens, parts = rows[:, :LIKELY] - np.eye(1, LIKELY, dtype=np.int32), rows[:, LIKELY:]
    if ((tokens < 0) | (tokens >= vocab_size)).any():
        raise ValueError("it has token ids that the model has not")
    if ((parts < 0) | (parts > WHOLE)).any() or (np.diff(parts) > 0).any():
        raise ValueError("it has impossible probabilities")
    table = np.zeros((KEPT, WIDTH), np.int32)
    # Of tokens that share a place the most frequent stays, in most vocabularies the lowest id.
    table[tokens[::-1, 0] % KEPT] = rows[::-1]
    table[:, 0] *= -1
    return filled(table.reshape(-1).tolist())
