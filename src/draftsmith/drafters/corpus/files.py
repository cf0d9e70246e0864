"""A corpus on disk: three files, a header that describes the other two.

`corpus.json`   the header, written last: a folder with a header is complete
`tokens.bin`    N big-endian 32-bit ids; every document is followed by the separator 0xFFFFFFFF
`suffixes.bin`  N little-endian 32-bit positions in `tokens.bin`: its suffix array
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import LoadError, OptionError
from draftsmith.storage import write_text

FORMAT = "draftsmith corpus"
VERSION = 1
HEADER, TOKENS, SUFFIXES = "corpus.json", "tokens.bin", "suffixes.bin"
ID, POSITION = np.dtype(">u4"), np.dtype("<u4")
SEPARATOR = 0xFFFFFFFF
"""Ends every document. No token has this id, so no match spans two documents."""
BUILDING = "building"
"""The folder inside a corpus that holds what an unfinished build has done so far."""

_CHUNK = 1 << 26
"""Bytes summed at a time, so that Ctrl-C is heard in between."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What is known of a corpus without reading it."""

    vocabulary: str
    """Fingerprint of the tokenizer's vocabulary (`text.vocab`)."""
    largest: int
    """The largest token id in it."""
    tokens: int
    """N, separators included."""
    documents: int
    examples: int
    """Documents, or pieces of long ones, that were kept."""
    sums: dict[str, int]
    """CRC-32 of each file."""
    model: str
    """What the model was called that ranked it, or whose tokenizer it has."""
    settings: dict[str, Any] = field(default_factory=dict)
    """How it was built."""
    perplexity: dict[str, float] = field(default_factory=dict)
    """Of the examples; empty if they were not ranked."""

    def save(self, folder: Path) -> None:
        """Write the header, whole or not at all."""
        body = asdict(self)
        whole = {"format": FORMAT, "version": VERSION, "sum": _sum_of(body), **body}
        write_text(folder / HEADER, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Header:
        """The checked header of a folder; raises LoadError for anything but a corpus of ours."""
        path = folder / HEADER
        if not path.is_file():
            raise LoadError(_no_header(folder))
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} cannot be read ({error}); {_AGAIN}") from error
        if not isinstance(whole, dict) or whole.pop("format", None) != FORMAT:
            raise LoadError(f"{path} is not the header of a corpus; {_OURS}")
        version = whole.pop("version", None)
        if version != VERSION:
            raise LoadError(
                f"{path} has format version {version!r}, this draftsmith reads {VERSION}; {_AGAIN}"
            )
        if whole.pop("sum", None) != _sum_of(whole):
            raise LoadError(f"{path} {_DAMAGED}")
        return cls(**whole)

    def check_vocabulary(self, vocabulary: str, folder: Path) -> None:
        """Raise OptionError unless the corpus has this vocabulary."""
        if vocabulary != self.vocabulary:
            raise OptionError(
                f"the corpus {folder} was built for another vocabulary (that of {self.model}; "
                f"fingerprint {self.vocabulary[:12]}, this model's is {vocabulary[:12]}): its ids "
                "mean other text; build one for this model with `draftsmith corpus build`"
            )

    def check_ids(self, vocab_size: int, folder: Path) -> None:
        """Raise OptionError unless all ids in it are below `vocab_size`."""
        if self.largest >= vocab_size:
            raise OptionError(
                f"the corpus {folder} has the token id {self.largest}, but this model has "
                f"0…{vocab_size - 1}: it was built for another one ({self.model})"
            )


_AGAIN = "build the corpus again with `draftsmith corpus build`"
_DAMAGED = f"is damaged: its checksum does not fit; {_AGAIN}"
_OURS = "give a folder made by `draftsmith corpus build`"


def _no_header(folder: Path) -> str:
    if (folder / BUILDING).is_dir():
        return (
            f"the corpus {folder} is not finished; give the command that builds it again, and it "
            "goes on where it stopped"
        )
    if not folder.is_dir():
        return f"there is no folder {folder}; {_OURS}"
    return f"{folder} has no {HEADER}, so it is not a corpus; {_OURS}"


def _sum_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def map_file(folder: Path, name: str, tokens: int) -> mmap.mmap:
    """The file's bytes, mapped; raises LoadError unless it has 4 bytes for each token."""
    path = folder / name
    if path.exists() and not path.is_file():
        raise LoadError(f"{path} is no regular file; {_AGAIN}")
    try:
        with path.open("rb") as file:
            size, wanted = os.fstat(file.fileno()).st_size, 4 * tokens
            if size != wanted:
                raise LoadError(
                    f"{path} has {size} bytes instead of {wanted}: it was cut off or belongs to "
                    f"another corpus; {_AGAIN}"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from error


def verify(path: Path, content: mmap.mmap, total: int) -> None:
    """Raise LoadError unless the mapped file has this CRC-32."""
    found = 0
    with memoryview(content) as view:
        for start in range(0, len(view), _CHUNK):
            found = zlib.crc32(view[start : start + _CHUNK], found)
    if found != total:
        raise LoadError(f"{path} {_DAMAGED}")
