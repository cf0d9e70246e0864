"""What each id of a tokenizer writes, in bytes, and which tokens two tokenizers share.

A token is a byte string here, whatever its tokenizer calls it (`Ġthe`, `▁the`, `<0x0A>`): the only
ground on which two vocabularies can be compared.
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

from draftsmith.errors import UnsupportedError
from draftsmith.text import spelling


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The byte-exact table of a tokenizer; without one, of a toy, which cannot `encode`.

    A token's bytes are those that it writes in the middle of a text. Some tokenizers drop a space
    at the very beginning (SentencePiece marks first words with one).
    """

    tokens: Sequence[bytes | None]
    """(V,) the bytes of each id; None: a special token, padding, or an id that writes nothing."""
    special: Mapping[int, str] = field(default_factory=dict)
    """Names of the control tokens by id: they are never text."""
    fallback: frozenset[int] = frozenset()
    """Byte-fallback tokens: kept for bytes that no other token of the tokenizer writes."""
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @classmethod
    def of(cls, tokenizer: Any, size: int | None = None) -> Vocabulary:
        """The table of a fast tokenizer of transformers (made once for each) or of tokenizers.

        `size` is V, the width of the logits: rows beyond the tokenizer's own ids are padding. None:
        as many as there are ids. Raises LoadError without a tokenizer, UnsupportedError if what its
        ids write cannot be told.
        """
        backend = spelling.backend_of(tokenizer)
        # A table that is kept must not hold the very object that it is kept for.
        made = {} if backend is tokenizer else _MADE.setdefault(tokenizer, {})
        added = backend.get_added_tokens_decoder().values()  # which may grow or become special
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
        """One canonical id for each byte string: the lowest that is no byte-fallback token.

        Where a vocabulary has both `<0x41>` and `A`, its model writes the latter.
        """
        found: dict[bytes, int] = {}
        usual = (i for i in range(self.size) if i not in self.fallback)
        for i in (*usual, *sorted(self.fallback)):
            if (data := self.tokens[i]) is not None:
                found.setdefault(data, i)
        return found

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.ids), default=0)

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """What ids write in the middle of a text; special tokens and padding write nothing.

        Nor do ids beyond the table, which a tokenizer has that knows more than its model.
        """
        size = self.size
        return b"".join(self.tokens[i] or b"" for i in ids if i < size)

    def encode(self, text: str | bytes) -> list[int]:
        """Ids of the middle of a text: nothing is put before it or around it.

        Text that looks like a special token stays text. Bytes that are no UTF-8 become single-byte
        tokens, or nothing where the vocabulary has none. `bytes_of` gives the text back unless the
        tokenizer is not injective. Raises UnsupportedError for a toy.
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
        """`encode`, without ids beyond the table: a tokenizer may know more than its model."""
        return [i for i in self.encode(text) if i < self.size]

    @cached_property
    def _encoder(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UnsupportedError(
                "this vocabulary was made without a tokenizer, so it cannot encode text; make it "
                "with Vocabulary.of(tokenizer, size)"
            )
        return spelling.encoder(self.tokenizer)


_NO_TEXT = re.compile("([\udc80-\udcff])")
"""A byte that is no UTF-8, as Python's error handler surrogateescape decodes it."""

_MADE: WeakKeyDictionary[Any, dict[tuple[int | None, int, int], Vocabulary]] = WeakKeyDictionary()
"""Tables by tokenizer of transformers."""


@dataclass(frozen=True, eq=False)
class Intersection:
    """T ∩ D, the tokens that two vocabularies share, as two maps that undo each other.

    A special token is shared where both have one of that name. Of several ids with the same bytes
    the canonical one is mapped, so that no token gets the probability of two; where the two are
    the `same`, every id is mapped to itself.
    """

    to_target: Tensor
    """(V_drafter,) int64: the target's id of each drafter id, -1 where the target has none."""
    to_drafter: Tensor
    """(V_target,) int64: the drafter's id of each target id, -1 where the drafter has none."""
    size: int
    """|T ∩ D|, special tokens included."""
    same: bool
    """Whether every id, padding aside, means the same in both."""

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[int, int]], target: int, drafter: int, *, same: bool
    ) -> Intersection:
        """Of (target id, drafter id), between logits of width `target` and `drafter`."""
        t, d = torch.tensor(pairs, dtype=torch.long, device="cpu").reshape(-1, 2).T
        to_target, to_drafter = t.new_full((drafter,), -1), t.new_full((target,), -1)
        to_target[d], to_drafter[t] = t, d
        return cls(to_target, to_drafter, len(pairs), same)


def intersect(target: Vocabulary, drafter: Vocabulary) -> Intersection:
    """What two vocabularies share, by bytes, whatever the order of their ids."""
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
    """SHA-256, in hex, over all pairs of id and token; of any tokenizer, also one without a table.

    Models of one family often differ in how far their logits are padded, and then still agree here.
    """
    pairs = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    text = "".join(f"{number}\t{token}\0" for number, token in pairs)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _used(vocabulary: Vocabulary) -> list[bytes | str | None]:
    """The bytes of each id, or a special token's name, without the padding at the end."""
    table: list[bytes | str | None] = list(vocabulary.tokens)
    for i, name in vocabulary.special.items():
        table[i] = name
    while table and table[-1] is None:
        table.pop()
    return table


def complete(data: bytes) -> bytes:
    """`data` without the bytes of an unfinished character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    held, _ = decoder.getstate()
    return data[: len(data) - len(held)]
