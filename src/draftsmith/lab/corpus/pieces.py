"""Pieces of texts: encoded, without repeated documents, long ones cut."""

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
"""Documents encoded together."""


@dataclass(frozen=True)
class Pieces:
    """P pieces of documents, in the order of the texts."""

    ids: NDArray[Any]
    """All their tokens."""
    ends: NDArray[np.int64]
    """(P,) end of each piece in `ids`; the next one begins there."""
    owners: NDArray[np.int64]
    """(P,) number of each piece's document."""
    facts: dict[str, int]
    """Numbers of documents read, repeated, too short, and taken."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> NDArray[Any]:
        start = self.ends[number - 1] if number else 0
        piece: NDArray[Any] = self.ids[start : self.ends[number]]
        return piece

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(P,) tokens of each piece."""
        return np.diff(self.ends, prepend=0)

    def joined(self, chosen: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
        """Yield the documents formed by the `chosen` pieces, in ascending order.

        Neighbouring pieces of one document are joined, so that matches may cross their border.
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
    """Read the texts of these files as pieces of at most `longest` tokens.

    `advance` counts finished files. Raises OptionError if there is no text, LoadError for texts
    that cannot be read.
    """
    ids, ends, owners = array("I"), array("q"), array("q")
    facts = {"documents": 0, "repeated": 0, "too short": 0, "taken": 0}
    fresh = _fresh(paths, fields, facts, advance)
    while texts := list(islice(fresh, _AT_ONCE)):
        # Without special tokens, as in the middle of an answer.
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)
        for document in encoded["input_ids"]:
            if len(document) < 2:  # no token follows another
                facts["too short"] += 1
                continue
            facts["taken"] += 1
            # Cut into as few pieces as possible, all of nearly the same length.
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
    """Yield each document once; documents that differ only in white space are the same."""
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
