"""Suffix arrays: starts of all suffixes of a list of token ids, in lexicographic order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.drafters.corpus.files import ID, POSITION
from draftsmith.errors import OptionError, extra

Ids = NDArray[Any]
"""(N,) big-endian 32-bit token ids, so that comparing bytes is comparing ids."""

_CHUNK = 1 << 24
"""Entries filtered at a time, to bound memory."""

MOST = 0xFFFFFFFF
"""Most positions that 32 bits can address."""


def sorted_suffixes(ids: Ids, largest: int) -> Iterator[NDArray[np.uint32]]:
    """Yield the suffix array of `ids` in pieces: the N starts of its suffixes, smallest first.

    `largest` is the largest id except separators. Raises OptionError if the sorter is not installed
    or `ids` is too long. Memory: five bytes for each byte that an id needs (three bytes for a
    vocabulary of 150,000).
    """
    if len(ids) > MOST:
        raise OptionError(f"{len(ids)} tokens are too many for one corpus; {MOST} fit: keep fewer")
    # One more value than the ids need: the separator becomes the largest value.
    width = ((largest + 1).bit_length() + 7) // 8
    # The last bytes of each id, the most significant first.
    text = np.ascontiguousarray(ids, ID).view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    found = sorter()(text.flatten())
    for start in range(0, len(found), _CHUNK):
        piece = found[start : start + _CHUNK]
        # Only suffixes that start at an id's first byte are suffixes of ids.
        yield (piece[piece % width == 0] // width).astype(POSITION)


def sorter() -> Any:
    """Return the function that sorts suffixes of bytes; OptionError if it is not installed."""
    with extra("corpus", "building a corpus needs pydivsufsort"):
        from pydivsufsort import divsufsort
    return divsufsort
