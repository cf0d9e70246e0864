"""Spelling: the bytes that each id of a Hugging Face tokenizer writes.

Each id is decoded between two letters. Only ids that write no whole characters need more: for them
the decoder's JSON gives the alphabet; class names are not used. In the end all tokens in a row must
write the concatenation of their bytes.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_letters
from typing import Any

from tokenizers import Tokenizer

from draftsmith.errors import LoadError, UnsupportedError

UNKNOWN = "\ufffd"
"""What decoders write for invalid bytes."""

FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a single-byte token in SentencePiece."""


def backend_of(tokenizer: Any) -> Tokenizer:
    """Return the Rust tokenizer inside; raise LoadError for None, UnsupportedError if none."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is None:
        raise LoadError(
            "there is no tokenizer, so the bytes of its ids are unknown; pass tokenizer=…"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedError(
            f"{type(tokenizer).__name__} is a tokenizer in Python, which does not give the bytes "
            "of its ids; load the model's fast tokenizer (with a tokenizer.json)"
        )
    return backend


def spelling(
    backend: Tokenizer, size: int | None
) -> tuple[list[bytes | None], dict[int, str], frozenset[int]]:
    """Return `tokens`, `special` and `fallback` of a `Vocabulary` of the ids 0 … size-1.

    `size` None means all ids. Raises UnsupportedError if their bytes cannot be determined.
    """
    if size is None:
        size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    added = backend.get_added_tokens_decoder()
    special = {i: token.content for i, token in added.items() if token.special and i < size}
    anchor, head, tail = _anchor(backend, special)
    between = [[anchor, i, anchor] for i in range(size)]
    kinds = _kinds(backend)
    tokens: list[bytes | None] = []
    for i, text in enumerate(backend.decode_batch(between, skip_special_tokens=False)):
        if i in special or text == head + tail:
            tokens.append(None)
        # U+FFFD may also be a character of the token itself, alone or beside others.
        elif UNKNOWN in text and (data := _partial(backend, i, kinds)) is not None:
            tokens.append(data)
        elif text.startswith(head) and text.endswith(tail):
            tokens.append(text[len(head) : len(text) - len(tail)].encode())
        else:
            raise _depends(f"token {i} writes", kinds)
    whole = [
        i
        for i, data in enumerate(tokens)
        if data is not None and data == data.decode(errors="ignore").encode()
    ]
    row = backend.decode([anchor, *whole, anchor], skip_special_tokens=False)
    if row != head + b"".join(tokens[i] or b"" for i in whole).decode() + tail:
        raise _depends("its tokens write", kinds)
    fallback = frozenset[int]()
    if "ByteFallback" in kinds:
        names = {i: backend.id_to_token(i) or "" for i in range(size)}
        fallback = frozenset(i for i, name in names.items() if FALLBACK.fullmatch(name))
    return tokens, special, fallback


def encoder(backend: Tokenizer) -> Tokenizer:
    """Return a copy that encodes the middle of a text: it adds no tokens and no space.

    Names of special tokens in a text are encoded as text.
    """
    made = Tokenizer.from_str(backend.to_str())
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True
    if getattr(made.model, "dropout", None) is not None:
        made.model.dropout = None
    changed = []
    for part in (*_inside(made.pre_tokenizer), *_inside(made.normalizer)):
        for name, without in _PREFIX.items():
            if hasattr(part, name):
                changed.append((part, name, getattr(part, name)))
                setattr(part, name, without)
    probe = "a b"
    if made.decode(made.encode(probe, add_special_tokens=False).ids) != probe:
        # In T5 the mark before a word is the space itself, so it must stay.
        for part, name, value in changed:
            setattr(part, name, value)
    return made


_PREFIX = {"prepend_scheme": "never", "add_prefix_space": False, "prepend": ""}
"""Options with which Metaspace, ByteLevel and Prepend add no space before a text."""


def _inside(component: Any) -> Iterator[Any]:
    """Yield the parts of a sequence, or a single component."""
    if type(component).__name__ != "Sequence":
        yield component
        return
    for part in component:
        yield from _inside(part)


def _anchor(backend: Tokenizer, special: Mapping[int, str]) -> tuple[int, str, str]:
    """Return an id that writes a letter, the letter, and what the id writes after itself."""
    for letter in "aeinost0123456789" + ascii_letters:
        found = backend.token_to_id(letter)
        if found is None or found in special:
            continue
        once, twice = backend.decode([found]), backend.decode([found, found])
        if once == letter and twice.startswith(letter):
            return found, letter, twice.removeprefix(letter)
    raise UnsupportedError(
        "this tokenizer has no token that is a single letter or digit, so the bytes of its ids "
        "cannot be determined"
    )


def _partial(backend: Tokenizer, i: int, kinds: set[str]) -> bytes | None:
    """Return the bytes of an id that writes no whole characters.

    None if it writes whole characters, one of which is U+FFFD.
    """
    name = backend.id_to_token(i) or ""
    if "ByteLevel" in kinds and all(character in _ALPHABET for character in name):
        return bytes(_ALPHABET[character] for character in name)
    byte = FALLBACK.fullmatch(name) if "ByteFallback" in kinds else None
    if byte is not None:
        return bytes.fromhex(byte[1])
    if UNKNOWN in name:
        return None
    raise UnsupportedError(
        f"token {i}, {reprlib.repr(name)}, writes no whole character, and a decoder of type "
        f"{_named(kinds)} does not give its bytes"
    )


def _depends(what: str, kinds: set[str]) -> UnsupportedError:
    return UnsupportedError(
        f"with this tokenizer's decoder ({_named(kinds)}) what {what} depends on the neighbouring "
        "tokens, so it cannot be compared with other tokenizers"
    )


def _named(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds)) or "no kind"


def _kinds(backend: Tokenizer) -> set[str]:
    """Return the types of all parts of the decoder, from its JSON."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in _parts(state)}


def _parts(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield state
    for part in state.get("decoders", ()):
        yield from _parts(part)


def _alphabet(printable: Sequence[int]) -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = _alphabet([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
"""GPT-2's characters for the 256 bytes: printable ones unchanged, others from U+0100 on."""
