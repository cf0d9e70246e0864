"""Perplexity of a text under the target, by which SPECTRA ranks its corpus.

PPL(u) = exp(-1/t Σ log p(u_i | u_<i)), i = 1…t (SPECTRA, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.errors import UnsupportedError
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.rope import rope_boundary

_LOGITS = 1 << 26
"""Most logits of one pass (256 MB in float32), unless a single piece has more."""
_POSITIONS = 4096
"""Most positions of one pass, unless a single piece has more."""


def passes(loaded: LoadedModel, lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Group pieces of similar length into passes, the longest first, so that little is padded."""
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    # Rotary angles may depend on the longest row of a pass, and rows may change each other.
    together = loaded.capabilities.packed and rope_boundary(loaded.config) is None
    most = min(_LOGITS // loaded.vocab_size, _POSITIONS) if together else 1
    found: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        rows = max(1, most // int(lengths[order[start]]))
        found.append(order[start : start + rows])
        start += rows
    return found


def log_likelihoods(
    loaded: LoadedModel, pieces: Iterable[Iterable[int]], before: tuple[int, ...] = ()
) -> list[float]:
    """Σ log p(u_i | u_<i) of each piece in one pass, where u is `before` and then the piece.

    Every piece has at least 2 ids. Raises UnsupportedError if the model overflows.
    """
    rows = [[*before, *map(int, piece)] for piece in pieces]
    width = max(map(len, rows))
    # Padding is on the right, where no token of a causal model looks.
    tokens = [row + row[-1:] * (width - len(row)) for row in rows]
    parts = []
    with torch.inference_mode():
        out = loaded.forward(tokens, [range(width)] * len(rows), None, False, width)
        for row, logits in zip(rows, out.logits[:, -width:], strict=True):
            scores = logits[: len(row) - 1].float()
            right = torch.tensor(row[1:], device=scores.device)
            log_p = scores.gather(-1, right[:, None])[:, 0] - scores.logsumexp(-1)
            parts.append(log_p)
        sizes = [len(part) for part in parts]
        whole = torch.cat(parts).cpu().double()  # some devices have no float64
        found = [float(part.sum()) for part in torch.split(whole, sizes)]
    if any(value != value for value in found):
        raise UnsupportedError(
            f"{loaded.name} gives no probabilities (nan) in {loaded.dtype}; give --dtype float32 "
            "or bfloat16"
        )
    return found


def perplexities(
    sums: NDArray[np.float64], lengths: NDArray[np.int64], before: tuple[int, ...]
) -> NDArray[np.float64]:
    """PPL of pieces from their log-likelihoods; t is the number of predicted tokens."""
    return np.exp(-sums / (lengths + len(before) - 1))
