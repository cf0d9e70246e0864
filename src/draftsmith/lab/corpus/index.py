"""Writes the two files of a corpus and their header from documents in ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.drafters.corpus import files
from draftsmith.drafters.corpus.files import ID, SEPARATOR, Header
from draftsmith.lab.corpus.suffixes import sorted_suffixes
from draftsmith.storage import write_chunks


def write_index(
    folder: Path, documents: Iterable[Sequence[int] | np.ndarray[Any, Any]], **facts: Any
) -> Header:
    """Write `documents`, each of at least one id, and their suffix array, the header last.

    `facts` are the other fields of `Header`. There must be at least one document. The same
    documents and facts give the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = SEPARATOR.to_bytes(4, "big")
    content = (np.asarray(document, ID).tobytes() + end for document in documents)
    sums = {files.TOKENS: write_chunks(folder / files.TOKENS, content)}
    # Memory-mapped, so that the sorter makes the only copy.
    ids = np.memmap(folder / files.TOKENS, ID, "r")
    ends = ids == SEPARATOR
    largest = int(ids.max(where=~ends, initial=0))
    suffixes = (piece.tobytes() for piece in sorted_suffixes(ids, largest))
    sums[files.SUFFIXES] = write_chunks(folder / files.SUFFIXES, suffixes)
    header = Header(largest=largest, tokens=len(ids), documents=int(ends.sum()), sums=sums, **facts)
    header.save(folder)
    return header
