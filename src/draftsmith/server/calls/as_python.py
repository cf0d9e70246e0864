"""Tool calls in Python's syntax: the pythonic format of Llama 3.2 and 4."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from math import isfinite
from typing import Any

from draftsmith.server.calls.source import (
    Call,
    NoCall,
    Parser,
    Source,
    T,
    called,
    finished,
    must,
    peek,
    ready,
    run,
    separated,
    space,
    taken,
    tool,
)

CONSTANTS = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
"""Constants of Python and of JSON; models write both."""

_WORD, _NUMERAL = re.compile(r"\w+"), re.compile(r"[-+.\w]+")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_SHORT = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL, _NAME = re.compile("[0-7]{1,2}"), re.compile("[A-Za-z0-9 -]+")


def pythonic(source: Source, mark: str) -> Parser[list[Call]]:
    """Parse [name(key=value, …), …] with known tools. Without a mark, nothing may follow it."""
    found = list[Call]()
    yield from space(source)
    yield from must(source, "[")
    more = True
    while more:
        yield from space(source)
        name = yield from tool(source)
        yield from must(source, "(")
        arguments = dict((yield from _entries(source, ")", _keyword)))
        found.append(called(name, json.dumps(arguments, ensure_ascii=False)))
        more = yield from separated(source, "]")
    if not mark:
        yield from finished(source)
    return found


def _entries(source: Source, end: str, entry: Callable[[Source], Parser[T]]) -> Parser[list[T]]:
    """Parse entries up to a closing bracket, with commas between them and perhaps after them."""
    found = list[T]()
    yield from space(source)
    while not (yield from taken(source, end)):
        found.append((yield from entry(source)))
        yield from space(source)
        if (yield from peek(source)) != end:
            yield from must(source, ",")
            yield from space(source)
    return found


def _keyword(source: Source) -> Parser[tuple[str, Any]]:
    name = yield from run(source, _WORD)
    yield from space(source)
    yield from must(source, "=")
    return name, (yield from literal(source))


def _pair(source: Source) -> Parser[tuple[str, Any]]:
    key = yield from literal(source)
    if not isinstance(key, str):
        raise NoCall
    yield from space(source)
    yield from must(source, ":")
    return key, (yield from literal(source))


def literal(source: Source) -> Parser[Any]:
    """Parse a string, number, constant, list, tuple or dict; return its value."""
    yield from space(source)
    letter = yield from peek(source)
    if letter in ("'", '"'):
        return (yield from string(source))
    if letter in ("[", "("):
        source.at += 1
        return (yield from _entries(source, "]" if letter == "[" else ")", literal))
    if letter == "{":
        source.at += 1
        return dict((yield from _entries(source, "}", _pair)))
    word = yield from run(source, _NUMERAL)
    if word in CONSTANTS:
        return CONSTANTS[word]
    try:
        number = float(word)
        exact = int(word) if word.lstrip("+-").isdecimal() else number
    except (ValueError, OverflowError):
        raise NoCall from None
    if not isfinite(number):
        raise NoCall
    return exact


def string(source: Source) -> Parser[str]:
    """Parse a string literal, which may contain line breaks; return its value."""
    quote = source.text[source.at]
    yield from ready(source, 3)
    end = 3 * quote if source.text.startswith(3 * quote, source.at) else quote
    source.at += len(end)
    found = ""
    while not (yield from taken(source, end)):
        found += yield from run(source, _PLAIN[quote])
        if (yield from taken(source, "\\")):
            found += yield from _escaped(source)
        elif end != quote and not (yield from _ends(source, end)):
            found += quote
            source.at += 1
        elif not (yield from ready(source)):
            raise NoCall
    # Models also write one character as two escapes (a surrogate pair), as in JSON.
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _ends(source: Source, end: str) -> Parser[bool]:
    """Return whether the string or the answer ends here."""
    yield from ready(source, len(end))
    return source.text.startswith(end, source.at) or len(source.text) == source.at


def _escaped(source: Source) -> Parser[str]:
    """Parse an escape sequence after its backslash; unknown sequences stay unchanged."""
    letter = yield from peek(source)
    source.at += len(letter)
    if letter and letter in "01234567":
        yield from ready(source, 2)
        more = _OCTAL.match(source.text, source.at)
        source.at += len(more[0]) if more else 0
        return chr(int(letter + (more[0] if more else ""), 8))
    if letter == "N" and (yield from taken(source, "{")):
        name = yield from run(source, _NAME)
        yield from must(source, "}")
        try:
            found = unicodedata.lookup(name)
        except KeyError:
            raise NoCall from None
        if len(found) > 1:  # a named sequence, which no literal may contain
            raise NoCall
        return found
    count = _DIGITS.get(letter)
    if count is None:
        return _SHORT.get(letter, "\\" + letter)
    yield from ready(source, count)
    digits = source.text[source.at : source.at + count]
    source.at += len(digits)
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise NoCall from None
