"""The text that parsers of answers read while it comes, and the least things that they do.

A parser is a generator. It yields where it needs more text, returns what it has read, and raises
`NoCall` as soon as the text cannot be a call. A call with streamed arguments counts from its
first part on: what cannot belong to it is text.
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
    """The text is no call."""


@dataclass(slots=True)
class Call:
    """One call; `arguments` is JSON text, as OpenAI's clients expect it, or the begin of it."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(slots=True)
class TextPart:
    """Text of an answer, or of the thoughts before it."""

    text: str
    thought: bool = False


@dataclass(slots=True)
class MoreArguments:
    """Text that continues the arguments of the last call."""

    text: str


Part = TextPart | Call | MoreArguments


def add(parts: list[Part], part: Part) -> None:
    """Append a copy of a part, or merge it into the last one if it continues that."""
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
    """An answer's text as far as it came, and where its parser stands."""

    tools: Mapping[str, Any]
    """The tools that may be called, each with the JSON schema of its parameters, or None."""
    text: str = ""
    at: int = 0
    ended: bool = False
    """Whether no more text comes."""
    parts: list[Part] = field(default_factory=list)
    """What was read and not taken yet."""
    thinking: bool = False
    """Whether the next token counts as one of the thoughts."""
    thoughts: int = 0
    """Tokens that do so far."""
    forced: bool = False
    """Whether the text is one call."""
    streams: bool = False
    """Whether a call of a known tool may be sent before it is complete."""
    called: int = 0
    """End of what was sent of a call that is being read; its begin if nothing was sent."""

    def tell(self, end: int, *, thought: bool = False) -> None:
        """Add the text up to a place to the parts, and go there."""
        text, self.at = self.text[self.at : end], end
        if text:
            add(self.parts, TextPart(text, thought))

    def send(self, call: Call | None = None) -> None:
        """Add a new call, or what was read of the last one's arguments since, to the parts."""
        if call is not None:
            add(self.parts, call)
        elif self.at > self.called:
            add(self.parts, MoreArguments(self.text[self.called : self.at]))
        self.called = self.at


CallParser = Callable[[Source, str], Parser[list[Call]]]
"""(source, mark) → calls; the source stands after the mark, "" at the beginning of an answer."""


def ready(source: Source, count: int = 1) -> Parser[bool]:
    """Wait for `count` characters; return False if the answer ends before."""
    while len(source.text) < source.at + count:
        if source.ended:
            return False
        yield
    return True


def peek(source: Source) -> Parser[str]:
    """Return the next character, or "" at the answer's end."""
    there = yield from ready(source)
    return source.text[source.at] if there else ""


def space(source: Source) -> Parser[None]:
    """Skip white space."""
    while (yield from peek(source)) in (" ", "\t", "\r", "\n"):
        source.at += 1


def taken(source: Source, word: str) -> Parser[bool]:
    """Skip a word if it is there; return whether it was."""
    while True:
        there = source.text[source.at : source.at + len(word)]
        if there == word:
            source.at += len(word)
            return True
        if source.ended or not word.startswith(there):
            return False
        yield


def must(source: Source, word: str) -> Parser[None]:
    """Skip a word; raise NoCall if it is not there."""
    if not (yield from taken(source, word)):
        raise NoCall


def closing(source: Source, *tags: str) -> Parser[bool]:
    """Skip white space and one of some tags, of which the answer's end may cut off a part.

    Skip nothing, and return False, if none of them is there.
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
    """Return the text before a word, and skip both; raise NoCall if the word never comes."""
    begin = seen = source.at
    while (found := source.text.find(word, seen)) < 0:
        if source.ended:
            raise NoCall
        seen = max(begin, len(source.text) - len(word) + 1)
        yield
    source.at = found + len(word)
    return source.text[begin:found]


def text_until(source: Source, marks: Sequence[str], *, thought: bool = False) -> Parser[str]:
    """Tell text as it comes, up to the white space before the first of some marks.

    Return that mark, which is not skipped; "" at the answer's end.
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


def run(source: Source, pattern: re.Pattern[str]) -> Parser[str]:
    """Skip and return the longest text of the characters that a pattern repeats; maybe ""."""
    begin = source.at
    while True:
        found = pattern.match(source.text, source.at)
        source.at = found.end() if found else source.at
        if source.at < len(source.text) or source.ended:
            return source.text[begin : source.at]
        yield


def tool(source: Source) -> Parser[str]:
    """Return the name of a tool; raise NoCall if there is none of that name."""
    name = yield from run(source, NAME)
    if name not in source.tools:
        raise NoCall
    return name


def separated(source: Source, end: str) -> Parser[bool]:
    """Skip a comma, or the end of a list; return whether the list goes on."""
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
    """Return a call with JSON text for arguments, or with the string that this text spells.

    Raises NoCall for half of a surrogate pair, which no response can hold.
    """
    try:
        value = json.loads(arguments)
        json.dumps([name, value], ensure_ascii=False).encode()
    except ValueError:
        raise NoCall from None
    if not isinstance(name, str):
        raise NoCall
    return Call(name, value if isinstance(value, str) else arguments)
