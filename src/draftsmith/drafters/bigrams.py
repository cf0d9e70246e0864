"""Bigrams: the logit rows of a model after its frequent tokens, each preceded by a line break only.

They are the initial rows of every request, until rows of the target replace them: at one answer
position in three, the ids give no candidate for the next token. After Stewart et al. 2024, "The
N-Grammys: Accelerating Autoregressive Inference with Learning-Free Batched Speculation", arXiv
2411.03786, which drafts n-grams of the model itself; the line break and the table are ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from draftsmith.core.target import ModelFacts
from draftsmith.drafters.logit_rows import ROW, ROWS, TOP, WHOLE, WIDTH
from draftsmith.errors import LoadError
from draftsmith.storage import check_writable, file_about, known_about, write_chunks, writing

FORMAT = "draftsmith bigrams 1"
MAX_BYTES = ROWS * ROW.itemsize + 4096
"""Maximum size of a file, in bytes."""


def path_of(model: ModelFacts) -> Path:
    """Return the path for a model with this vocabulary; its folder exists and is writable.

    Raises WriteError. Call it before the work.
    """
    path = file_about(model.name, *_kind(model))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    return path


def save(path: Path, rows: Any) -> None:
    """Write rows (n,) of type ROW; raise WriteError if the file cannot be written."""
    tensors = {"rows": np.asarray(rows, ROW).view(np.int32).reshape(-1, WIDTH)}
    write_chunks(path, [serialize(tensors, {"format": FORMAT})])


def load(model: ModelFacts) -> Any | None:
    """Return the table of a model, (ROWS,) ROW; None if `draftsmith tune auto` wrote none.

    Raises LoadError for a damaged file.
    """
    path = known_about(model.name, *_kind(model))
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        with safe_open(path, framework="np") as file:
            header, rows = dict(file.metadata() or {}), file.get_tensor("rows")
        if header.get("format") != FORMAT:
            raise ValueError("it has another format")
        return table_of(rows, model.vocab_size)
    except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
        raise LoadError(
            f"{path} has no bigrams of this model: {error}; delete it, or run `draftsmith tune "
            "auto` again"
        ) from error


def _kind(model: ModelFacts) -> tuple[str, str]:
    # The size of the vocabulary is part of the name, because ids can be added to a loaded model.
    return "auto", f"-{model.vocab_size}.safetensors"


def table_of(rows: np.ndarray, vocab_size: int) -> Any:
    """Return a table, (ROWS,) ROW, with the rows (n, WIDTH), marked as bigrams.

    Raises ValueError unless they are rows of tokens below `vocab_size`.
    """
    if rows.dtype != np.int32 or rows.ndim != 2 or rows.shape[1] != WIDTH:
        raise ValueError(f"its rows have type {rows.dtype} and shape {rows.shape}")
    after, tokens, probs = rows[:, :1] - 1, rows[:, 1 : 1 + TOP], rows[:, 1 + TOP :]
    named = np.hstack([after, tokens])
    if ((named < 0) | (named >= vocab_size)).any():
        raise ValueError("it has token ids that the model does not have")
    if ((probs < 0) | (probs > WHOLE)).any() or (np.diff(probs) > 0).any():
        raise ValueError("it has probabilities out of range or order")
    if (np.diff(np.sort(tokens)) == 0).any():
        raise ValueError("a row has the same token twice")
    table = np.zeros((ROWS, WIDTH), np.int32)
    # Tokens can share a row. The most frequent one stays: in most vocabularies the lowest id.
    table[after[::-1, 0] % ROWS] = rows[::-1]
    table[:, 0] *= -1
    return table.view(ROW)[:, 0]
