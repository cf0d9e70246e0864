"""Reader: splits the streamed text of an answer into reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith.engine.sequence import Piece
from draftsmith.server.calls.formats import FORMATS, Format
from draftsmith.server.calls.source import (
    NoCall,
    Parser,
    Part,
    Source,
    TextPart,
    peek,
    rest,
    space,
    taken,
    text_until,
)
from draftsmith.text.thoughts import Thoughts


class Reader:
    """Incremental parser of one answer: reasoning, text and tool calls."""

    def __init__(
        self,
        family: str | None = None,
        tools: Mapping[str, Any] | None = None,
        markers: Mapping[int, str] | None = None,
        thoughts: Thoughts | None = None,
        written: str = "",
        *,
        forced: bool = False,
        own: Callable[[Source], Parser[None]] | None = None,
    ) -> None:
        """Create a reader; with the defaults, the whole answer is text.

        `family`: format of the tool calls, a key of `FORMATS`. `tools`: names of the tools →
        JSON schemas of their parameters, or None. `markers`: tags that are special tokens, which
        decoding removes from the text, by token id. `thoughts`: tags around the
        reasoning. `written`: the part of the answer that the prompt already contains. `forced`:
        whether the answer is one call in JSON, after its reasoning. `own`: parser that replaces
        those of this package.
        """
        known = tools or {}
        form = None if family is None else FORMATS[family]
        self._forced = Source(known, forced=True) if forced else None
        if self._forced is not None:
            form = form if form is not None and form.thinks else None
            self._call = _answer(self._forced, FORMATS["llama"], None)
        tags = () if form is None else (*form.marks, *form.inside)
        tags += () if thoughts is None else (thoughts.begin, thoughts.end)
        self._markers = {i: tag for i, tag in (markers or {}).items() if own or tag in tags}
        self._source = Source(known, written)
        self._parser = _answer(self._source, form, thoughts) if own is None else own(self._source)
        next(self._parser, None)

    @property
    def thought_tokens(self) -> int:
        """Number of reasoning tokens so far, tags included."""
        return self._source.thoughts

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        """Add tokens; return the parts that they complete or continue."""
        source = self._source
        for piece in pieces:
            source.thoughts += source.thinking
            # A special token has no text of its own; its piece may have text held back before it.
            source.text += piece.text + self._markers.get(piece.token, "")
            next(self._parser, None)
        return self._taken()

    def end(self) -> list[Part]:
        """End the answer; return the remaining parts."""
        self._source.ended = True
        next(self._parser, None)
        return self._taken()

    def _taken(self) -> list[Part]:
        """Remove and return the parsed parts; if a call is forced, parse the text as a call."""
        parts, self._source.parts = self._source.parts, []
        if self._forced is not None:
            texts = [part for part in parts if isinstance(part, TextPart) and not part.thought]
            self._forced.text += "".join(part.text for part in texts)
            self._forced.ended = self._source.ended
            next(self._call, None)
            parts = [part for part in parts if part not in texts] + self._forced.parts
            self._forced.parts = []
        return parts


def _answer(source: Source, form: Format | None, thoughts: Thoughts | None) -> Parser[None]:
    """Parse a whole answer."""
    if form is not None and form.thinks:
        source.thinking = True
    elif thoughts is not None and thoughts.begin:
        yield from _thoughts(source, thoughts)
    if form is None:
        return (yield from rest(source))
    called, begin = False, source.at
    yield from space(source)
    if (first := (yield from peek(source))) and first in form.bare:
        called = yield from _calls(source, form, begin, "")
    else:
        source.at = begin
    while mark := (yield from text_until(source, form.marks)):
        begin = source.at
        source.at = source.text.index(mark, begin) + len(mark)
        called |= yield from _calls(source, form, begin, mark)
    # White space after the last call is not part of the answer.
    if not (called and source.text[source.at :].isspace()):
        source.tell(len(source.text))


def _calls(source: Source, form: Format, begin: int, mark: str) -> Parser[bool]:
    """Parse the calls after a mark; return whether there were any.

    If there is no valid call, the text from `begin` to the end of the mark is emitted as text. If
    parsing fails after a part of a call was emitted, parsing continues after that part.
    """
    # Without a mark, the answer may be JSON for other reasons, unless a call is forced.
    source.streams, source.called, behind = bool(mark) or source.forced, begin, source.at
    try:
        calls = yield from form.parse(source, mark)
    except (NoCall, RecursionError):
        if source.called > begin:
            source.at = source.called
            return True
        source.at = begin
        source.tell(behind)
        return False
    source.parts += calls
    return bool(calls) or source.called > begin


def _thoughts(source: Source, tags: Thoughts) -> Parser[None]:
    """Emit the reasoning at the beginning of an answer; skip the white space around it."""
    source.thinking = True
    yield from space(source)
    if (yield from taken(source, tags.begin)):
        yield from space(source)
        if (yield from text_until(source, (tags.end,), thought=True)):
            source.at = source.text.index(tags.end, source.at) + len(tags.end)
            source.thinking = False
            yield from space(source)
        else:
            source.at = len(source.text)
    else:
        source.at = source.thoughts = 0
    source.thinking = False
