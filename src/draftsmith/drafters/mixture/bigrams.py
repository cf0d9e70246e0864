"""Bigrams: what a model says after a token in no text but a line break, for its frequent tokens.

The first rows of every request, until the target's own take their place: one answer position in
three has a next token that ids do not name. After Stewart et al. 2024, "The N-Grammys: Accelerating
Autoregressive Inference with Learning-Free Batched Speculation", arXiv 2411.03786, which drafts by
n-grams of the model itself; the line break, the places and the marks are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from draftsmith.core.target import ModelFacts
from draftsmith.drafters.mixture.compiled import Ints, filled
from draftsmith.drafters.mixture.rows import KEPT, LIKELY, WHOLE, WIDTH
from draftsmith.errors import LoadError
from draftsmith.storage import check_writable, file_about, known_about, write_chunks, writing

FORMAT = "draftsmith bigrams 1"
LARGEST = 4 * KEPT * WIDTH + 4096
"""Bytes of a file."""


def path_of(model: ModelFacts) -> Path:
    """The file about a model with this vocabulary, in a folder that is there and can be written.

    Raises WriteError, before the work and not behind it.
    """
    path = file_about(model.name, *_kind(model))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    return path


def save(path: Path, rows: Sequence[Sequence[int]]) -> None:
    """Keep rows (n, WIDTH); raises WriteError."""
    tensors = {"rows": np.array(rows, np.int32).reshape(-1, WIDTH)}
    write_chunks(path, [serialize(tensors, {"format": FORMAT})])


def load(model: ModelFacts) -> Ints | None:
    """Rows in their places, (KEPT * WIDTH,); None where `draftsmith tune auto` kept none.

    Raises LoadError for a file that is damaged.
    """
    path = known_about(model.name, *_kind(model))
    if path is None:
        return None
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        with safe_open(path, framework="np") as file:
            header, rows = dict(file.metadata() or {}), file.get_tensor("rows")
        if header.get("format") != FORMAT:
            raise ValueError("it holds something else")
        return placed(rows, model.vocab_size)
    except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
        raise LoadError(
            f"{path} holds no bigrams of this model: {error}; delete it, or run `draftsmith tune "
            "auto` again"
        ) from error


def _kind(model: ModelFacts) -> tuple[str, str]:
    # By its vocabulary, too: ids that were added to a loaded model are no damage to the file.
    return "auto", f"-{model.vocab_size}.safetensors"


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
    if (np.diff(np.sort(tokens[:, 1:])) == 0).any():
        raise ValueError("it names a token twice")
    table = np.zeros((KEPT, WIDTH), np.int32)
    # Of tokens that share a place the most frequent stays, in most vocabularies the lowest id.
    table[tokens[::-1, 0] % KEPT] = rows[::-1]
    table[:, 0] *= -1
    return filled(table.reshape(-1).tolist())
