"""A corpus on disk: three files, of which the header describes the other two.

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
"""Folder inside a corpus with the results of an unfinished build."""

_CHUNK = 1 << 26
"""Bytes per checksum call, so that Ctrl-C can interrupt the calls."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Description of a corpus."""

    vocabulary: str
    """Fingerprint of the tokenizer's vocabulary (`text.vocab`)."""
    largest: int
    """Largest token id in it."""
    tokens: int
    """N, including separators."""
    documents: int
    examples: int
    """Documents, or pieces of long documents, that were kept."""
    sums: dict[str, int]
    """CRC-32 of each file."""
    model: str
    """Name of the model that ranked it, or that has its tokenizer."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the build."""
    perplexity: dict[str, float] = field(default_factory=dict)
    """Perplexity of the examples; empty if they were not ranked."""

    def save(self, folder: Path) -> None:
        """Write the header atomically."""
        body = asdict(self)
        whole = {"format": FORMAT, "version": VERSION, "sum": _sum_of(body), **body}
        write_text(folder / HEADER, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Header:
        """Return the checked header of a folder; raise LoadError if it is not a corpus."""
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
                f"{path} has format version {version!r}, but this draftsmith reads {VERSION}; "
                f"{_AGAIN}"
            )
        if whole.pop("sum", None) != _sum_of(whole):
            raise LoadError(f"{path} {_DAMAGED}")
        return cls(**whole)

    def check_vocabulary(self, vocabulary: str, folder: Path) -> None:
        """Raise OptionError unless the corpus has this vocabulary."""
        if vocabulary != self.vocabulary:
            raise OptionError(
                f"the corpus {folder} was built for another vocabulary: that of {self.model}, with "
                f"fingerprint {self.vocabulary[:12]}; this model's is {vocabulary[:12]}. Build one "
                "for this model with `draftsmith corpus build`"
            )

    def check_ids(self, vocab_size: int, folder: Path) -> None:
        """Raise OptionError unless all ids in it are below `vocab_size`."""
        if self.largest >= vocab_size:
            raise OptionError(
                f"the corpus {folder} has token ids up to {self.largest}, but those of this model "
                f"are from 0 to {vocab_size - 1}: it was built for another model ({self.model}). "
                "Build one for this model with `draftsmith corpus build`"
            )


_AGAIN = "build the corpus again with `draftsmith corpus build`"
_DAMAGED = f"is damaged: its checksum is wrong; {_AGAIN}"
_OURS = "use a folder created by `draftsmith corpus build`"


def _no_header(folder: Path) -> str:
    if (folder / BUILDING).is_dir():
        return (
            f"the corpus {folder} is not finished; run the command that builds it again, which "
            "continues where it stopped"
        )
    if not folder.is_dir():
        return f"there is no folder {folder}; {_OURS}"
    return f"{folder} has no {HEADER}, so it is not a corpus; {_OURS}"


def _sum_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def map_file(folder: Path, name: str, tokens: int) -> mmap.mmap:
    """Return the file's bytes as a memory map; raise LoadError unless it has 4 bytes per token."""
    path = folder / name
    if path.exists() and not path.is_file():
        raise LoadError(f"{path} is not a regular file; {_AGAIN}")
    try:
        with path.open("rb") as file:
            size, wanted = os.fstat(file.fileno()).st_size, 4 * tokens
            if size != wanted:
                raise LoadError(
                    f"{path} has {size} bytes instead of {wanted}: it was truncated or belongs to "
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
