"""Vocabulary: the bytes that each id of a tokenizer writes, and the tokens that two share.

A token is a byte string here, whatever name its tokenizer uses (`Ġthe`, `▁the`, `<0x0A>`). Only so
can two vocabularies be compared.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer
from torch import Tensor

from draftsmith.text import spelling


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Table of the bytes of a tokenizer's ids; without a tokenizer (for tests) it cannot `encode`.

    A token's bytes are those that it writes in the middle of a text. Some tokenizers drop a space
    at the very beginning (SentencePiece marks first words with one).
    """

    tokens: Sequence[bytes | None]
    """(V,) bytes of each id; None: a special token, padding, or an id that writes nothing."""
    special: Mapping[int, str] = field(default_factory=dict)
    """Id → name of the special tokens, which never appear as text."""
    fallback: frozenset[int] = frozenset()
    """Byte-fallback tokens, used for bytes that no other token writes."""
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @classmethod
    def of(cls, tokenizer: Any, size: int | None = None) -> Vocabulary:
        """Return the table of a fast tokenizer (cached for those of transformers).

        `size` is V, the width of the logits; ids beyond the tokenizer's own are padding. None: the
        number of ids. Raises LoadError without a tokenizer, UnsupportedError if the bytes of its
        ids cannot be determined.
        """
        backend = spelling.backend_of(tokenizer)
        # Not cached for a bare tokenizer: the value would refer to its own weak key.
        made = {} if backend is tokenizer else _MADE.setdefault(tokenizer, {})
        added = backend.get_added_tokens_decoder().values()  # tokens may be added or become special
        key = size, backend.get_vocab_size(), sum(token.special for token in added)
        if key not in made:
            made[key] = cls(*spelling.spelling(backend, size), backend)
        return made[key]

    @property
    def size(self) -> int:
        """V, padding included."""
        return len(self.tokens)

    @cached_property
    def ids(self) -> Mapping[bytes, int]:
        """Byte string → canonical id: the lowest id that is not a byte-fallback token.

        If a vocabulary has both `<0x41>` and `A`, its model writes the latter.
        """
        found: dict[bytes, int] = {}
        usual = (i for i in range(self.size) if i not in self.fallback)
        for i in (*usual, *sorted(self.fallback)):
            if (data := self.tokens[i]) is not None:
                found.setdefault(data, i)
        return found

    @cached_property
    def longest(self) -> int:
        """Length of the longest token in bytes."""
        return max(map(len, self.ids), default=0)

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that ids write in the middle of a text.

        Special tokens, padding and ids beyond the table write nothing; a tokenizer may have more
        ids than its model.
        """
        size = self.size
        return b"".join(self.tokens[i] or b"" for i in ids if i < size)

    def encode(self, text: str | bytes) -> list[int]:
        """Return the ids of text from the middle of a text: no tokens or spaces are added.

        Names of special tokens are encoded as text. Bytes that are not UTF-8 become single-byte
        tokens, or nothing if the vocabulary has none. `bytes_of` returns the text again, unless the
        tokenizer is not injective.
        """
        if isinstance(text, str):
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
            return ids
        found: list[int] = []
        for part in filter(None, _NO_TEXT.split(text.decode(errors="surrogateescape"))):
            if not _NO_TEXT.match(part):
                found += self.encode(part)
            elif (byte := part.encode(errors="surrogateescape")) in self.ids:
                found.append(self.ids[byte])
        return found

    def encode_known(self, text: str | bytes) -> list[int]:
        """Like `encode`, without ids beyond the table: a tokenizer may have more than its model."""
        return [i for i in self.encode(text) if i < self.size]

    def encode_exactly(self, data: bytes) -> list[int]:
        """Like `encode_known`, with ids of exactly these bytes: some tokenizers normalize texts.

        For such a text the longest token is taken at each place, up to bytes that no token has.
        """
        ids = self.encode_known(data)
        if self.bytes_of(ids) == data:
            return ids
        found, at = list[int](), 0
        while at < len(data):
            ends = range(min(len(data), at + self.longest), at, -1)
            one = next((self.ids[data[at:end]] for end in ends if data[at:end] in self.ids), None)
            if one is None:
                return found
            found.append(one)
            at += len(self.tokens[one] or b"")
        return found

    @cached_property
    def _encoder(self) -> Tokenizer:
        assert self.tokenizer is not None, "a table made for tests cannot encode"
        return spelling.encoder(self.tokenizer)


_NO_TEXT = re.compile("([\udc80-\udcff])")
"""A byte that is not UTF-8, as decoded by Python's error handler surrogateescape."""

_MADE: WeakKeyDictionary[Any, dict[tuple[int | None, int, int], Vocabulary]] = WeakKeyDictionary()
"""Transformers tokenizer → its tables."""


@dataclass(frozen=True, eq=False)
class Intersection:
    """T ∩ D: the tokens that two vocabularies share, as two inverse maps.

    A special token is shared if both have one with that name. Of several ids with the same bytes
    only the canonical one is mapped, so that no token gets the probability of two. If the
    vocabularies are the `same`, every id is mapped to itself.
    """

    to_target: Tensor
    """(V_drafter,) int64: the target's id of each drafter id; -1 if the target has none."""
    to_drafter: Tensor
    """(V_target,) int64: the drafter's id of each target id; -1 if the drafter has none."""
    size: int
    """|T ∩ D|, including special tokens."""
    same: bool
    """Whether every id, except padding, means the same in both."""

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[int, int]], target: int, drafter: int, *, same: bool
    ) -> Intersection:
        """Create the maps from (target id, drafter id) pairs, for logits of these widths."""
        t, d = torch.tensor(pairs, dtype=torch.long, device="cpu").reshape(-1, 2).T
        to_target, to_drafter = t.new_full((drafter,), -1), t.new_full((target,), -1)
        to_target[d], to_drafter[t] = t, d
        return cls(to_target, to_drafter, len(pairs), same)


def intersect(target: Vocabulary, drafter: Vocabulary) -> Intersection:
    """Return the tokens that two vocabularies share, compared by bytes, in any order of ids."""
    used = _used(target)
    same = used == _used(drafter)
    if same:
        pairs = [(i, i) for i, token in enumerate(used) if token is not None]
    else:
        pairs = [(i, drafter.ids[data]) for data, i in target.ids.items() if data in drafter.ids]
        named = {name: i for i, name in drafter.special.items()}
        pairs += [(i, named[name]) for i, name in target.special.items() if name in named]
    return Intersection.of(pairs, target.size, drafter.size, same=same)


def fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256, in hex, of all (id, token) pairs of any tokenizer.

    Models of one family often pad their logits differently, but have the same fingerprint.
    """
    pairs = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    text = "".join(f"{number}\t{token}\0" for number, token in pairs)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _used(vocabulary: Vocabulary) -> list[bytes | str | None]:
    """Return the bytes of each id, or a special token's name, without the padding at the end."""
    table: list[bytes | str | None] = list(vocabulary.tokens)
    for i, name in vocabulary.special.items():
        table[i] = name
    while table and table[-1] is None:
        table.pop()
    return table


def complete(data: bytes) -> bytes:
    """Return `data` without the bytes of an unfinished character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    held, _ = decoder.getstate()
    return data[: len(data) - len(held)]
