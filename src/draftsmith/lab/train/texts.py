"""Sequences of ids from files: read, decontaminated, rearranged for infilling, joined, cut."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.errors import OptionError
from draftsmith.lab.corpus.build import Show, unseen
from draftsmith.lab.corpus.texts import PLAIN, documents, find, kind
from draftsmith.lab.train.held_out import HeldOut
from draftsmith.lab.train.infill import Encode, Markers, infilled
from draftsmith.lab.train.recipe import Texts
from draftsmith.text.tokenizer import encode, opening
from draftsmith.text.vocab import Vocabulary

CODE = (
    ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".java", ".js", ".jsx", ".ts", ".tsx",
    ".rs", ".rb", ".php", ".sh", ".bash", ".sql", ".kt", ".scala", ".swift", ".lua", ".jl", ".r",
)  # fmt: skip
"""Suffixes of code files to look for in folders."""
_INFILL = 2
"""Kind of random numbers, in addition to those of `batches`."""


def read(
    paths: Sequence[Path], fields: Sequence[str], show: Show = unseen
) -> Iterator[tuple[str, bool]]:
    """The texts of some files, and whether each is code. Raises LoadError."""
    files = find(paths, PLAIN + CODE)
    with show("reading texts", len(files)) as advance:
        for path in files:
            prose = kind(path) in PLAIN
            for text in documents(path, fields):
                if text:
                    yield text, not prose
            advance(1)


def stream(
    texts: Texts, tokenizer: Any, infill: float, seed: int, show: Show = unseen
) -> NDArray[np.int32]:
    """(n,) ids of all training texts in order, without held-out text, a separator after each.

    Raises OptionError if code should be rearranged and the tokenizer has no markers for it.
    """
    markers = Markers.of(tokenizer.get_vocab())
    if infill and markers is None:
        raise OptionError(
            f"infill={infill}, but the tokenizer has no markers for prefix, suffix and "
            "middle that we know; give infill=0"
        )
    banned = HeldOut(text for text, _ in read(texts.held_out, texts.fields))
    before, after = opening(tokenizer), separator(tokenizer)
    ids = array("i")
    pieces = (
        (piece, code and paths is texts.paths)
        for paths in (texts.paths, texts.prose)
        for text, code in read(paths, texts.fields, show)
        for piece in banned.remove(text)
    )  # fmt: skip
    write: Encode = partial(encode, tokenizer)
    write_inside = Vocabulary.of(tokenizer).encode if markers is not None and infill else write
    for number, (text, code) in enumerate(pieces):
        rng = np.random.default_rng([seed, _INFILL, number])
        share = infill if code else 0.0
        ids.extend((*before, *infilled(text, share, markers, write, write_inside, rng), *after))
    return np.array(ids, dtype=np.int32)


def held_out_stream(texts: Texts, tokenizer: Any) -> NDArray[np.int32]:
    """(n,) ids of the held-out texts as they are, a separator after each."""
    return stream(Texts(paths=(), prose=texts.held_out, fields=texts.fields), tokenizer, 0.0, 0)


def separator(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a text: <|endoftext|> if it exists, else the end of sequence."""
    end = tokenizer.get_vocab().get("<|endoftext|>", tokenizer.eos_token_id)
    return () if end is None else (int(end),)


def sequences(
    stream: NDArray[np.int32], length: int, what: str, before: Sequence[int] = ()
) -> NDArray[np.int32]:
    """(N, T+1): T=`length` inputs and their labels, cut from a stream; the rest is dropped.

    `before` is what the tokenizer puts before every text. It is put before every sequence here,
    because some models fail on texts without it. Raises OptionError, calling the texts `what`, if
    the stream is too short for one sequence.
    """
    own = length + 1 - len(before)
    if len(stream) < own:
        raise OptionError(
            f"the {what} have {len(stream)} tokens in all, and one sequence needs {own}: "
            "give more text, or a smaller --length"
        )
    views = np.lib.stride_tricks.sliding_window_view(stream, own)[::length]
    if not before:
        return views
    return np.hstack((np.tile(np.array(before, dtype=np.int32), (len(views), 1)), views))
