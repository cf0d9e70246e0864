"""Calls in JSON: the formats of Hermes, Qwen, Granite, Phi-4, Llama 3, Mistral and DeepSeek."""

from __future__ import annotations

import json
import re
from math import isfinite

from draftsmith.server.calls.source import (
    NAME,
    Call,
    CallParser,
    NoCall,
    Parser,
    Source,
    called,
    closing,
    finished,
    must,
    peek,
    ready,
    run,
    separated,
    space,
    taken,
    until,
)

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LETTERS = re.compile(r"[A-Za-z]+")
_NUMERAL = re.compile(r"[-+.eE0-9]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")

# --- values, as they are written ------------------------------------------------------------------


def value(source: Source) -> Parser[str]:
    """Return any JSON value; raise NoCall for NaN and for numbers that overflow."""
    begin = source.at
    letter = yield from peek(source)
    if letter == '"':
        yield from string(source)
    elif letter == "{":
        yield from members(source)
    elif letter == "[":
        source.at += 1
        yield from space(source)
        more = not (yield from taken(source, "]"))
        while more:
            yield from value(source)
            more = yield from separated(source, "]")
    elif letter.isalpha():
        if (yield from run(source, _LETTERS)) not in ("true", "false", "null"):
            raise NoCall
    else:
        number = yield from run(source, _NUMERAL)
        if not _NUMBER.fullmatch(number) or not isfinite(float(number)):
            raise NoCall
    return source.text[begin : source.at]


def string(source: Source) -> Parser[str]:
    """Return a string, quotes included."""
    begin = source.at
    yield from must(source, '"')
    while True:
        yield from run(source, _PLAIN)
        if (yield from taken(source, '"')):
            return source.text[begin : source.at]
        if (yield from ready(source, 2)) and source.text.startswith("u", source.at + 1):
            yield from ready(source, 6)
        escape = _ESCAPE.match(source.text, source.at)
        if escape is None:
            raise NoCall
        source.at = escape.end()


def members(source: Source) -> Parser[dict[str, str]]:
    """Return the members of an object, their names decoded."""
    found: dict[str, str] = {}
    yield from must(source, "{")
    yield from space(source)
    more = not (yield from taken(source, "}"))
    while more:
        name = yield from string(source)
        yield from space(source)
        yield from must(source, ":")
        yield from space(source)
        found[json.loads(name)] = yield from value(source)
        more = yield from separated(source, "}")
    return found


def written(source: Source) -> Parser[str]:
    """Return an object as it is written."""
    begin = source.at
    yield from members(source)
    return source.text[begin : source.at]


# --- calls ----------------------------------------------------------------------------------------


def call(source: Source) -> Parser[Call]:
    """{"name": …, "arguments": …}, or `parameters` in place of `arguments`."""
    found = yield from members(source)
    if "name" not in found:
        raise NoCall
    arguments = found.get("arguments", found.get("parameters", "{}"))
    return called(json.loads(found["name"]), arguments)


def calls(source: Source) -> Parser[list[Call]]:
    """Objects and lists of them, with semicolons, commas or white space between two."""
    found = list[Call]()
    yield from space(source)
    while True:
        more = yield from taken(source, "[")
        if not more:
            found.append((yield from call(source)))
        while more:
            yield from space(source)
            found.append((yield from call(source)))
            more = yield from separated(source, "]")
        behind = source.at
        yield from space(source)
        if (yield from peek(source)) in (";", ","):
            source.at += 1
            yield from space(source)
        if (yield from peek(source)) not in ("{", "["):
            source.at = behind
            return found


def closed(*tags: str) -> CallParser:
    """Calls with a closing tag, which the answer's end may cut off."""

    def parse(source: Source, _mark: str) -> Parser[list[Call]]:
        found = yield from calls(source)
        if not (yield from closing(source, *tags)):
            raise NoCall
        return found

    return parse


def open_ended(*tags: str) -> CallParser:
    """Calls with or without a closing tag."""

    def parse(source: Source, _mark: str) -> Parser[list[Call]]:
        found = yield from calls(source)
        yield from closing(source, *tags)
        return found

    return parse


def llama(source: Source, mark: str) -> Parser[list[Call]]:
    """Calls of known tools: after a mark, or without one as the whole answer.

    Nothing marks the latter as calls, and an answer may be JSON for other reasons.
    """
    found = yield from calls(source)
    if not all(one.name in source.tools for one in found):
        raise NoCall
    if not mark:
        yield from finished(source)
    return found


def mistral(source: Source, _mark: str) -> Parser[list[Call]]:
    """A list of calls; in newer models NAME{…}, NAME[ARGS]{…} or NAME[CALL_ID]ID[ARGS]{…}."""
    behind = source.at
    yield from space(source)
    if (yield from peek(source)) in ("[", "{"):
        return (yield from calls(source))
    name = yield from run(source, NAME)
    tight = source.at == behind + len(name) and (yield from peek(source)) in ("[", "{")
    if name not in source.tools and not (name and tight):  # else it is prose that names the mark
        raise NoCall
    yield from space(source)
    if (yield from taken(source, "[CALL_ID]")):
        yield from run(source, NAME)
    yield from taken(source, "[ARGS]")
    yield from space(source)
    return [called(name, (yield from written(source)))]


def deepseek(source: Source, _mark: str) -> Parser[list[Call]]:
    """V3.1: NAME<｜tool▁sep｜>{…}. V3 and R1: function<｜tool▁sep｜>NAME, then a block of JSON."""
    found = list[Call]()
    more = True
    while more:
        yield from space(source)
        if not (yield from taken(source, "<｜tool▁call▁begin｜>")):
            break
        name = yield from until(source, "<｜tool▁sep｜>")
        yield from space(source)
        fenced = (yield from peek(source)) != "{"
        if fenced:
            name = yield from until(source, "\n")
            yield from must(source, "```json")
            yield from space(source)
        found.append(called(name.strip(), (yield from written(source))))
        if fenced and not (yield from closing(source, "```")):
            raise NoCall
        more = yield from closing(source, "<｜tool▁call▁end｜>")
    if not found:
        raise NoCall
    yield from closing(source, "<｜tool▁calls▁end｜>")
    return found
