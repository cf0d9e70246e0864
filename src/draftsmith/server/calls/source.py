"""Source: the streamed text of an answer, and the primitives of its parsers.

A parser is a generator. It yields when it needs more text, returns its result, and raises `NoCall`
as soon as the text cannot be a call. A call is final once a part of it is emitted. Later text that
cannot belong to the call is ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from draftsmith.text.tokenizer import overlap

T = TypeVar("T")
Parser = Generator[None, None, T]

NAME = re.compile(r"[\w.:/-]+")
"""A tool's name."""


class NoCall(Exception):
    """Raised by parsers if the text is not a tool call."""


def new_id(prefix: str) -> str:
    """Return an id that no other object has."""
    return prefix + secrets.token_hex(12)


@dataclass(slots=True)
class Call:
    """A tool call. `arguments` is JSON text; it is incomplete while the call is streamed."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: new_id("call_"))


@dataclass(slots=True)
class TextPart:
    """Text of the answer, or of the reasoning before it."""

    text: str
    thought: bool = False


@dataclass(slots=True)
class MoreArguments:
    """The next part of the last call's arguments."""

    text: str


Part = TextPart | Call | MoreArguments


def add(parts: list[Part], part: Part) -> None:
    """Append a copy of a part, or merge the part into the last one if it continues that one."""
    last = parts[-1] if parts else None
    match last, part:
        case TextPart(), TextPart() if last.thought == part.thought:
            last.text += part.text
        case Call(), MoreArguments():
            last.arguments += part.text
        case MoreArguments(), MoreArguments():
            last.text += part.text
        case _:
            parts.append(replace(part))


@dataclass(slots=True)
class Source:
    """The text of an answer so far, the parser's position `at` in it, and the parts emitted."""

    tools: Mapping[str, Any]
    """Names of the tools → JSON schema of the parameters, or None."""
    text: str = ""
    at: int = 0
    ended: bool = False
    """Whether the answer is complete."""
    parts: list[Part] = field(default_factory=list)
    """Emitted parts that the reader has not removed yet."""
    thinking: bool = False
    """Whether the next token counts as reasoning."""
    thoughts: int = 0
    """Number of reasoning tokens so far."""
    forced: bool = False
    """Whether the whole text is one call."""
    streams: bool = False
    """Whether a call of a known tool may be emitted before it is complete."""
    called: int = 0
    """Position up to which the current call is emitted; its start if nothing is emitted."""

    def tell(self, end: int, *, thought: bool = False) -> None:
        """Emit the text up to the position `end`, and move there."""
        text, self.at = self.text[self.at : end], end
        if text:
            add(self.parts, TextPart(text, thought))

    def send(self, call: Call | None = None) -> None:
        """Emit a new call, or the arguments of the last call up to the current position."""
        if call is not None:
            add(self.parts, call)
        elif self.at > self.called:
            add(self.parts, MoreArguments(self.text[self.called : self.at]))
        self.called = self.at


CallParser = Callable[[Source, str], Parser[list[Call]]]
"""(source, mark) → calls that are not emitted yet. The source is positioned after the mark, which
is "" if an answer begins with a call without a mark."""


def ready(source: Source, count: int = 1) -> Parser[bool]:
    """Wait for `count` characters; return False if the answer ends before them."""
    while len(source.text) < source.at + count:
        if source.ended:
            return False
        yield
    return True


def peek(source: Source) -> Parser[str]:
    """Return the next character without consuming it, or "" at the end of the answer."""
    there = yield from ready(source)
    return source.text[source.at] if there else ""


def space(source: Source) -> Parser[None]:
    """Skip white space."""
    while (yield from peek(source)) in (" ", "\t", "\r", "\n"):
        source.at += 1


def taken(source: Source, word: str) -> Parser[bool]:
    """Consume a word if it comes next; return whether it did."""
    while True:
        there = source.text[source.at : source.at + len(word)]
        if there == word:
            source.at += len(word)
            return True
        if source.ended or not word.startswith(there):
            return False
        yield


def must(source: Source, word: str) -> Parser[None]:
    """Consume a word; raise NoCall if something else comes next."""
    if not (yield from taken(source, word)):
        raise NoCall


def closing(source: Source, *tags: str) -> Parser[bool]:
    """Consume white space and one of several tags; if none follows, consume nothing, return False.

    The end of the answer may cut off the tag or a part of it.
    """
    begin = source.at
    yield from space(source)
    for tag in tags:
        if (yield from taken(source, tag)):
            return True
    rest = source.text[source.at :]
    if source.ended and any(tag.startswith(rest) for tag in tags):
        source.at = len(source.text)
        return True
    source.at = begin
    return False


def until(source: Source, word: str) -> Parser[str]:
    """Consume text up to and including a word; return the text before it.

    Raise NoCall if the answer ends without the word.
    """
    begin = seen = source.at
    while (found := source.text.find(word, seen)) < 0:
        if source.ended:
            raise NoCall
        seen = max(begin, len(source.text) - len(word) + 1)
        yield
    source.at = found + len(word)
    return source.text[begin:found]


def text_until(source: Source, marks: Sequence[str], *, thought: bool = False) -> Parser[str]:
    """Emit text while it is generated, up to the white space before the first of several marks.

    Return that mark without consuming it, or "" at the end of the answer.
    """
    while True:
        found = [(source.text.find(mark, source.at), mark) for mark in marks]
        place, mark = min((one for one in found if one[0] >= 0), default=(-1, ""))
        end = len(source.text) if place < 0 else place
        if place < 0 and not source.ended:
            end -= max((overlap(source.text, mark) for mark in marks), default=0)
        end = max(end, source.at)
        source.tell(source.at + len(source.text[source.at : end].rstrip()), thought=thought)
        if mark or source.ended:
            return mark
        source.text, source.at = source.text[source.at :], 0
        yield


def rest(source: Source) -> Parser[None]:
    """Emit all text that follows while it is generated."""
    while True:
        source.tell(len(source.text))
        if source.ended:
            return
        source.text, source.at = "", 0
        yield


def run(source: Source, pattern: re.Pattern[str]) -> Parser[str]:
    """Consume and return the longest text that a pattern of repeated characters matches."""
    begin = source.at
    while True:
        found = pattern.match(source.text, source.at)
        source.at = found.end() if found else source.at
        if source.at < len(source.text) or source.ended:
            return source.text[begin : source.at]
        yield


def tool(source: Source) -> Parser[str]:
    """Consume and return the name of a known tool; raise NoCall for other names."""
    name = yield from run(source, NAME)
    if name not in source.tools:
        raise NoCall
    return name


def separated(source: Source, end: str) -> Parser[bool]:
    """Consume a comma or the end of a list; return whether the list continues."""
    yield from space(source)
    if (yield from taken(source, end)):
        return False
    yield from must(source, ",")
    yield from space(source)
    return True


def finished(source: Source) -> Parser[None]:
    """Raise NoCall if anything but white space follows."""
    yield from space(source)
    if (yield from ready(source)):
        raise NoCall


def called(name: Any, arguments: str) -> Call:
    """Return a call; if the JSON text `arguments` is a string, its value becomes the arguments.

    Raise NoCall for invalid JSON, and for half of a surrogate pair, which no response can contain.
    """
    try:
        value = json.loads(arguments)
        json.dumps([name, value], ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise NoCall from None
    if not isinstance(name, str):
        raise NoCall
    return Call(name, value if isinstance(value, str) else arguments)
