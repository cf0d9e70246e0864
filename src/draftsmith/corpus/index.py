"""From documents in ids to the two files of a corpus and their header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.corpus import files
from draftsmith.corpus.files import Header
from draftsmith.corpus.suffixes import ID, SEPARATOR, sorted_suffixes
from draftsmith.errors import OptionError
from draftsmith.storage import write_chunks


def write_index(
    folder: Path, documents: Iterable[Sequence[int] | np.ndarray[Any, Any]], **facts: Any
) -> Header:
    """Write `documents`, each of at least one id, and their suffix array, the header last.

    `facts` are the fields of `Header` that do not follow from the documents. The same documents
    and facts give the same bytes. Raises OptionError if there is not a single token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counted = _Counted(documents)
    sums = {files.TOKENS: write_chunks(folder / files.TOKENS, counted)}
    if not counted.documents:
        raise OptionError("there is no text to build a corpus from; give other --texts")
    # Mapped rather than read: the sorter makes the only copy.
    ids = np.memmap(folder / files.TOKENS, ID, "r")
    sums[files.SUFFIXES] = write_chunks(
        folder / files.SUFFIXES,
        (piece.tobytes() for piece in sorted_suffixes(ids, counted.largest)),
    )
    header = Header(
        largest=counted.largest,
        tokens=len(ids),
        documents=counted.documents,
        sums=sums,
        **facts,
    )
    header.save(folder)
    return header


class _Counted:
    """The bytes of documents, each with its separator, counted while they pass."""

    def __init__(self, documents: Iterable[Sequence[int] | np.ndarray[Any, Any]]) -> None:
        self._source = documents
        self.documents = self.largest = 0

    def __iter__(self) -> Iterator[bytes]:
        for document in self._source:
            ids = np.asarray(document, ID)
            self.documents += 1
            self.largest = max(self.largest, int(ids.max()))
            yield ids.tobytes() + SEPARATOR.to_bytes(4, "big")
