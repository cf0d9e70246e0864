"""Tool calls in JSON: formats of Hermes, Qwen, Granite, Phi-4, Llama 3, Mistral and DeepSeek."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

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
_WORD = re.compile(r"[-+.\w]*")

MemberParser = Callable[[str, Mapping[str, str]], Parser[str]]
"""(name of a member, members before it) → parser of its value."""

# --- JSON values, as text ------------------------------------------------------------------


def value(source: Source) -> Parser[str]:
    """Parse any JSON value and return its text; raise NoCall for NaN and numbers that overflow."""
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
    else:
        _check((yield from run(source, _WORD)))
    return source.text[begin : source.at]


def _check(text: str) -> None:
    """Raise NoCall for text that is no finite JSON value, or that no response can contain."""
    try:
        json.dumps(json.loads(text), allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        raise NoCall from None


def string(source: Source) -> Parser[str]:
    """Parse a string and return its text, quotes included."""
    begin = source.at
    yield from must(source, '"')
    yield from run(source, _PLAIN)
    while not (yield from taken(source, '"')):
        yield from must(source, "\\")
        if not (yield from ready(source)):
            raise NoCall
        source.at += 1
        yield from run(source, _PLAIN)
    _check(source.text[begin : source.at])
    return source.text[begin : source.at]


def members(source: Source, read: MemberParser | None = None) -> Parser[dict[str, str]]:
    """Parse an object; return a mapping from decoded names to the JSON text of their values.

    `read` parses the values; the default is `value`.
    """
    found: dict[str, str] = {}
    yield from must(source, "{")
    yield from space(source)
    more = not (yield from taken(source, "}"))
    while more:
        name = yield from string(source)
        yield from space(source)
        yield from must(source, ":")
        yield from space(source)
        key = json.loads(name)
        found[key] = yield from value(source) if read is None else read(key, found)
        more = yield from separated(source, "}")
    return found


# --- calls ----------------------------------------------------------------------------------------


def streamed(source: Source, name: Any) -> Parser[bool]:
    """Parse the arguments of a call, and emit the call while they are generated.

    Return False, and consume nothing, if the tool is unknown, if the arguments are no object, or if
    `source.streams` is false.
    """
    known = source.streams and isinstance(name, str) and name in source.tools
    if not known or (yield from peek(source)) != "{":
        return False
    source.send(Call(name))
    try:
        for _ in members(source):
            source.send()
            yield
    except NoCall:
        if source.ended:  # the answer was cut off within the arguments
            source.at = len(source.text)
        raise
    finally:
        source.send()
    return True


def given(source: Source, name: str) -> Parser[list[Call]]:
    """Parse the arguments of a call; return the call, unless it was streamed."""
    if (yield from streamed(source, name)):
        return []
    begin = source.at
    yield from members(source)
    return [called(name, source.text[begin : source.at])]


def call(source: Source) -> Parser[list[Call]]:
    """Parse {"name": …, "arguments": …}; `parameters` may replace `arguments`.

    Return a list with the call, or an empty list if the call was streamed.
    """
    sent = False

    def read(key: str, before: Mapping[str, str]) -> Parser[str]:
        nonlocal sent
        if key in ("arguments", "parameters") and "name" in before and not sent:
            sent = yield from streamed(source, json.loads(before["name"]))
            if sent:
                return ""
        return (yield from value(source))

    found = yield from members(source, read)
    if sent:
        source.called = source.at
        return []
    if "name" not in found:
        raise NoCall
    arguments = found.get("arguments", found.get("parameters", "{}"))
    return [called(json.loads(found["name"]), arguments)]


def calls(source: Source) -> Parser[list[Call]]:
    """Parse objects, and lists of objects, separated by semicolons, commas or white space."""
    found = list[Call]()
    yield from space(source)
    while True:
        more = yield from taken(source, "[")
        if not more:
            found += yield from call(source)
        while more:
            yield from space(source)
            found += yield from call(source)
            more = yield from separated(source, "]")
        behind = source.at
        yield from space(source)
        if (yield from peek(source)) in (";", ","):
            source.at += 1
            yield from space(source)
        if (yield from peek(source)) not in ("{", "["):
            source.at = behind
            return found


def listed(*tags: str, required: bool) -> CallParser:
    """Return a parser of calls before one of several closing tags, which may be required.

    The end of the answer may cut off the tag.
    """

    def parse(source: Source, _mark: str) -> Parser[list[Call]]:
        found = yield from calls(source)
        if not (yield from closing(source, *tags)) and required:
            raise NoCall
        return found

    return parse


def llama(source: Source, mark: str) -> Parser[list[Call]]:
    """Parse calls of known tools after a mark, or a whole answer that consists of such calls.

    Without a mark, an answer may be JSON for other reasons, so all tools must be known.
    """
    found = yield from calls(source)
    if not all(one.name in source.tools for one in found):
        raise NoCall
    if not mark:
        yield from finished(source)
    return found


def mistral(source: Source, _mark: str) -> Parser[list[Call]]:
    """Parse a list of calls, or NAME{…}, NAME[ARGS]{…} or NAME[CALL_ID]ID[ARGS]{…}."""
    behind = source.at
    yield from space(source)
    if (yield from peek(source)) in ("[", "{"):
        return (yield from calls(source))
    name = yield from run(source, NAME)
    tight = source.at == behind + len(name) and (yield from peek(source)) in ("[", "{")
    if name not in source.tools and not (name and tight):  # the text only mentions the mark
        raise NoCall
    yield from space(source)
    if (yield from taken(source, "[CALL_ID]")):
        yield from run(source, NAME)
    yield from taken(source, "[ARGS]")
    yield from space(source)
    return (yield from given(source, name))


def deepseek(source: Source, _mark: str) -> Parser[list[Call]]:
    """Parse NAME<｜tool▁sep｜>{…} (V3.1) or function<｜tool▁sep｜>NAME, fenced JSON (V3, R1)."""
    found, more = list[Call](), True
    yield from space(source)
    yield from must(source, "<｜tool▁call▁begin｜>")
    while more:
        name = yield from until(source, "<｜tool▁sep｜>")
        yield from space(source)
        fenced = (yield from peek(source)) != "{"
        if fenced:
            name = yield from until(source, "\n")
            yield from must(source, "```json")
            yield from space(source)
        found += yield from given(source, name.strip())
        if fenced and not (yield from closing(source, "```")):
            raise NoCall
        more = yield from closing(source, "<｜tool▁call▁end｜>")
        if more:
            yield from space(source)
            more = yield from taken(source, "<｜tool▁call▁begin｜>")
    yield from closing(source, "<｜tool▁calls▁end｜>")
    return found
