"""From texts to pieces: tokenized, without repeated documents, long ones cut."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.errors import OptionError
from draftsmith.lab.corpus.texts import documents

_AT_ONCE = 256
"""Documents tokenized together."""


@dataclass(frozen=True)
class Pieces:
    """P pieces of documents, in the order of the texts."""

    ids: NDArray[Any]
    """All their tokens."""
    ends: NDArray[np.int64]
    """(P,) where each ends in `ids`; the next one begins there."""
    owners: NDArray[np.int64]
    """(P,) number of the document each belongs to."""
    facts: dict[str, int]
    """How many documents were read, were repeated, were too short, were taken."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> NDArray[Any]:
        start = self.ends[number - 1] if number else 0
        piece: NDArray[Any] = self.ids[start : self.ends[number]]
        return piece

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(P,) tokens of each."""
        return np.diff(self.ends, prepend=0)

    def joined(self, chosen: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
        """The documents that the `chosen` pieces, in ascending order, make up.

        Neighbours of one document are joined again, so that matches may cross their border.
        """
        breaks = (np.diff(chosen) != 1) | (np.diff(self.owners[chosen]) != 0)
        for run in np.split(chosen, np.flatnonzero(breaks) + 1):
            start = self.ends[run[0] - 1] if run[0] else 0
            yield self.ids[start : self.ends[run[-1]]]


def read_pieces(
    paths: Sequence[Path],
    fields: Sequence[str],
    longest: int,
    tokenizer: Any,
    advance: Callable[[int], None] = lambda _: None,
) -> Pieces:
    """The pieces, of at most `longest` tokens, of the texts in these files.

    `advance` is told how many files are done. Raises OptionError if there is no text, LoadError for
    texts that cannot be read.
    """
    ids, ends, owners = array("I"), array("q"), array("q")
    facts = {"documents": 0, "repeated": 0, "too short": 0, "taken": 0}
    fresh = _fresh(paths, fields, facts, advance)
    while texts := list(islice(fresh, _AT_ONCE)):
        # No special tokens: a text in the middle of an answer has none either.
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)
        for document in encoded["input_ids"]:
            if len(document) < 2:  # Nothing in it follows anything.
                facts["too short"] += 1
                continue
            facts["taken"] += 1
            # As few pieces as possible, all of nearly one length.
            count = -(-len(document) // longest)
            for part in range(1, count + 1):
                ends.append(len(ids) + len(document) * part // count)
                owners.append(facts["taken"])
            ids.extend(document)
    if not ids:
        raise OptionError("there is no text to build a corpus from; give other --texts")
    return Pieces(np.array(ids), np.array(ends), np.array(owners), facts)


def _fresh(
    paths: Sequence[Path],
    fields: Sequence[str],
    facts: dict[str, int],
    advance: Callable[[int], None],
) -> Iterator[str]:
    """Each document once; two that differ in white space only are the same."""
    seen: set[bytes] = set()
    for path in paths:
        for text in documents(path, fields):
            facts["documents"] += 1
            plain = " ".join(text.split()).encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(plain, digest_size=16).digest()
            if digest in seen:
                facts["repeated"] += 1
            else:
                seen.add(digest)
                yield text
        advance(1)
