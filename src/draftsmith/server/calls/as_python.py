"""Tool calls in Python's syntax: the pythonic format of Llama 3.2 and 4."""

from __future__ import annotations

import json
import re
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
_ESCAPE = re.compile(r"\\(N\{|[4-7][0-7]{2}|.)", re.DOTALL)
_ESCAPES = {*"\n\\'\"abfnrtvxuU01234567", "N{"}
"""Beginnings of escape sequences. Octal numbers above 377 are not among them."""


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
    begin = source.at
    while not (yield from taken(source, end)):
        if not (yield from ready(source)):
            raise NoCall
        if (yield from taken(source, "\\")):
            yield from ready(source)
            source.at += 1
        elif not (yield from run(source, _PLAIN[quote])):
            source.at += 1  # a quote that does not end the string
    return _unescaped(source.text[begin : source.at - len(end)])


def _unescaped(text: str) -> str:
    """Replace Python's escape sequences; unknown ones stay unchanged."""
    known = _ESCAPE.sub(lambda one: one[0] if one[1] in _ESCAPES else "\\" + one[0], text)
    try:
        found = known.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        raise NoCall from None
    # Models also write one character as two escapes (a surrogate pair), as in JSON.
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
