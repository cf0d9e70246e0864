"""Look-up in a corpus: the longest suffix of a text that occurs there, and what followed it.

SPECTRA-RETRIEVAL (Le et al. 2025, section 3.2); the look-up is REST's (He et al. 2024, section 3).
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftsmith.drafters.corpus import files
from draftsmith.drafters.corpus.files import ID, POSITION, Header
from draftsmith.drafters.corpus.trie import Trie
from draftsmith.errors import UnsupportedError
from draftsmith.storage import expanded

LONGEST = 16
SHORTEST = 2
DEPTH = 10
"""Length of a continuation in tokens, as in REST."""
SAMPLE = 256
"""Maximum number of occurrences that are counted; of more, every k-th in sorted order."""


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` ids of a text are at positions `low` to `high` of the suffix array."""

    length: int
    low: int
    high: int

    @property
    def count(self) -> int:
        """Number of occurrences."""
        return self.high - self.low


class Datastore:
    """A corpus opened for look-ups; sequences and threads may share it."""

    def __init__(self, folder: Path, header: Header) -> None:
        if sys.byteorder != "little":
            raise UnsupportedError("corpora can be read on little-endian machines only")
        self.folder, self.header = folder, header
        self._text = files.map_file(folder, files.TOKENS, header.tokens)
        self._order = files.map_file(folder, files.SUFFIXES, header.tokens)
        self._ids: NDArray[np.uint32] = np.frombuffer(self._text, ID)
        self._starts: NDArray[np.uint32] = np.frombuffer(self._order, POSITION)
        # Reading plain integers from a view takes a third of the time of numpy's scalars.
        self._places = memoryview(self._order).cast("I")

    @classmethod
    def open(cls, path: str | Path) -> Datastore:
        """Open a folder created by `draftsmith corpus build`.

        It reads both files once, which takes 0.4 s for 10⁸ tokens. Raises LoadError if the folder
        is not a corpus, has another version, or is truncated or damaged.
        """
        folder = expanded(path)
        store = cls(folder, Header.load(folder))
        for name, content in ((files.TOKENS, store._text), (files.SUFFIXES, store._order)):
            files.verify(folder / name, content, store.header.sums[name])
        return store

    def find(
        self, ids: Sequence[int], longest: int = LONGEST, shortest: int = SHORTEST
    ) -> Match | None:
        """Find the longest suffix of `ids` that occurs, of `longest` to `shortest` ids; else None.

        If a suffix occurs, all shorter ones do. So a binary search over lengths, each with a binary
        search over the suffix array, finds the longest.
        """
        tail = list(ids[-longest:])
        query = struct.pack(f">{len(tail)}I", *tail)
        found: tuple[int, int] | None = None
        low, high = shortest, len(tail)
        while low <= high:
            length = (low + high + 1) // 2
            first = self._first(query[-4 * length :])
            if first is None:
                high = length - 1
            else:
                found, low = (length, first), length + 1
        if found is None:
            return None
        length, first = found
        return Match(length, first, self._last(query[-4 * length :], first))

    def _first(self, key: bytes) -> int | None:
        """Return the first position in the suffix array with a suffix that begins with `key`."""
        text, places, size = self._text, self._places, len(key)
        place = bisect_left(places, key, key=lambda at: text[4 * at : 4 * at + size])
        if place == len(places):
            return None
        at = 4 * places[place]
        return place if text[at : at + size] == key else None

    def _last(self, key: bytes, first: int) -> int:
        """Return one more than the last position with a suffix that begins with `key`."""
        text, size = self._text, len(key)
        return bisect_right(self._places, key, first, key=lambda at: text[4 * at : 4 * at + size])

    def trie(self, match: Match, depth: int = DEPTH, sample: int = SAMPLE) -> Trie:
        """Return what follows a match, up to `depth` ids and never beyond its document.

        Of more than `sample` occurrences, every k-th is used. They are sorted by what follows, so
        frequent continuations keep their share and only rare ones are missed.
        """
        taken = min(match.count, sample)
        places = match.low + np.arange(taken) * match.count // taken
        after = self._starts[places].astype(np.int64)[:, None] + np.arange(
            match.length, match.length + depth
        )
        # The last id is a separator, so positions beyond the end never count as tokens.
        return Trie.of(self._ids[np.minimum(after, len(self._ids) - 1)].astype(np.int64))

    def follow(
        self,
        ids: Sequence[int],
        longest: int = LONGEST,
        shortest: int = SHORTEST,
        depth: int = DEPTH,
        sample: int = SAMPLE,
    ) -> Trie | None:
        """Return what follows the longest suffix of `ids` that occurs (see `find`, `trie`)."""
        match = self.find(ids, longest, shortest)
        return None if match is None else self.trie(match, depth, sample)


def shared(path: str) -> Datastore:
    """Return the corpus of a folder, opened and verified once for all callers until it changes.

    Raises LoadError like `Datastore.open`.
    """
    folder = expanded(path).resolve()
    header = folder / files.HEADER
    stat = header.stat() if header.is_file() else None  # without a header, opening reports it
    return _opened(folder, stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=8)
def _opened(folder: Path, stamp: tuple[int, ...] | None) -> Datastore:  # noqa: ARG001
    return Datastore.open(folder)
