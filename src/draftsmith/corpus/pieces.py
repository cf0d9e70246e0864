"""From texts to pieces: tokenized, without repeated documents, long ones cut; kept on disk.

`pieces.json` is written last and says that the other two are complete.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.corpus.suffixes import ID
from draftsmith.corpus.texts import documents
from draftsmith.errors import OptionError
from draftsmith.storage import write_chunks, write_text

_INDEX, _IDS, _BOUNDS = "pieces.json", "pieces.ids", "pieces.bounds"
_AT_ONCE = 256
"""Documents tokenized together."""


@dataclass(frozen=True)
class Pieces:
    """P pieces of documents, in the order of the texts."""

    ids: NDArray[Any]
    """All their tokens, mapped from disk."""
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


@dataclass(frozen=True)
class Reading:
    """Which texts become pieces, and how."""

    paths: tuple[Path, ...]
    """Files, found."""
    fields: tuple[str, ...]
    longest: int
    """Tokens of a piece at most."""
    vocabulary: str
    key: str = field(init=False)
    """Changes when the texts or anything else does that the pieces depend on."""

    def __post_init__(self) -> None:
        stats = [(str(path), path.stat()) for path in self.paths]
        texts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        whole = json.dumps([texts, self.fields, self.longest, self.vocabulary])
        object.__setattr__(self, "key", hashlib.sha256(whole.encode()).hexdigest())

    def pieces(
        self, folder: Path, tokenizer: Any, advance: Callable[[int], None] = lambda _: None
    ) -> Pieces:
        """The pieces, read from `folder` if they are there already, else made and kept there.

        `advance` is told how many files are done. Raises OptionError if `folder` holds other ones,
        LoadError for texts that cannot be read.
        """
        index = folder / _INDEX
        if not index.is_file():
            _Cutter(self, tokenizer).write(folder, advance)
        else:
            advance(len(self.paths))
        known = json.loads(index.read_text(encoding="utf-8"))
        if known["key"] != self.key:
            raise OptionError(
                f"{folder} holds the beginning of another build: the texts, their fields, --piece "
                "or the tokenizer were others; give another folder, or delete this one"
            )
        bounds = np.fromfile(folder / _BOUNDS, np.dtype("<i8")).reshape(-1, 2)
        ids = np.memmap(folder / _IDS, ID, "r")
        return Pieces(ids, bounds[:, 0], bounds[:, 1], known["facts"])


class _Cutter:
    """Makes the pieces of one reading."""

    def __init__(self, reading: Reading, tokenizer: Any) -> None:
        self.reading, self.tokenizer = reading, tokenizer
        self.bounds = array("q")
        self.end = 0
        self.facts = {"documents": 0, "repeated": 0, "too short": 0, "taken": 0}
        self._seen: set[bytes] = set()

    def write(self, folder: Path, advance: Callable[[int], None]) -> None:
        write_chunks(folder / _IDS, self._chunks(advance))
        if not self.end:
            raise OptionError("there is no text to build a corpus from; give other --texts")
        bounds = np.array(self.bounds, np.dtype("<i8"))
        write_chunks(folder / _BOUNDS, [bounds.tobytes()])
        known = {"key": self.reading.key, "facts": self.facts}
        write_text(folder / _INDEX, json.dumps(known) + "\n")

    def _chunks(self, advance: Callable[[int], None]) -> Iterator[bytes]:
        fresh = self._fresh(advance)
        while texts := list(islice(fresh, _AT_ONCE)):
            # No special tokens: a text in the middle of an answer has none either.
            encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
            for ids in encoded["input_ids"]:
                if len(ids) < 2:  # Nothing in it follows anything.
                    self.facts["too short"] += 1
                    continue
                self._cut(len(ids))
                yield np.array(ids, ID).tobytes()

    def _fresh(self, advance: Callable[[int], None]) -> Iterator[str]:
        """Each document once; two that differ in white space only are the same."""
        for path in self.reading.paths:
            for text in documents(path, self.reading.fields):
                self.facts["documents"] += 1
                plain = " ".join(text.split()).encode("utf-8", "surrogatepass")
                digest = hashlib.blake2b(plain, digest_size=16).digest()
                if digest in self._seen:
                    self.facts["repeated"] += 1
                else:
                    self._seen.add(digest)
                    yield text
            advance(1)

    def _cut(self, length: int) -> None:
        """Note the pieces of the next document: as few as possible, all of nearly one length."""
        self.facts["taken"] += 1
        count = -(-length // self.reading.longest)
        for part in range(1, count + 1):
            self.bounds.extend((self.end + length * part // count, self.facts["taken"]))
        self.end += length
