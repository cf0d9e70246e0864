"""Calls of tools: parted from the text of an answer, and described where a template does not."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftsmith.engine.sequence import Piece
from draftsmith.server.calls.formats import FORMATS, Format, family_of, markers_of, shows_tools
from draftsmith.server.calls.source import Call, NoCall, Parser, Source
from draftsmith.text.tokenizer import shows_role

__all__ = ["USUAL", "Call", "ToolReader", "described", "family_of", "markers_of", "shows_tools"]

USUAL = "hermes"
"""The format of a model whose chat template teaches none."""

_PROMPT = """You may call functions to help with the request. These are the functions:
<tools>
{tools}
</tools>
To call one, write its name and its arguments like this, and nothing behind it:
{example}"""


class ToolReader:
    """Parts one answer into what it says and what it calls, as it comes."""

    def __init__(
        self,
        family: str | None = None,
        tools: Collection[str] = (),
        markers: Mapping[int, str] | None = None,
    ) -> None:
        """Without a family everything is said.

        `tools`: names of the tools, or a mapping from these to JSON schemas of their parameters.
        `markers`: tags that no text shows, by token.
        """
        known = tools if isinstance(tools, Mapping) else dict.fromkeys(tools)
        self._format: Format | None = None if family is None else FORMATS[family]
        tags = () if self._format is None else (*self._format.marks, *self._format.inside)
        self._markers = {i: tag for i, tag in (markers or {}).items() if tag in tags}
        self._source = Source(known)
        self._unsaid = 0
        """Where the text begins that has been neither said nor read as a call."""
        self._mark, self._begin = "", 0
        """What the parser stands behind, and where it is in the text."""
        self._parser: Parser[list[Call]] | None = None
        self._bare = self._format is not None and bool(self._format.bare)
        """Whether the answer may still turn out to consist of calls without a mark."""
        self._called = False

    def push(self, pieces: Sequence[Piece]) -> tuple[str, list[Call]]:
        """Return the text to say and the calls that are complete."""
        # A tag's own piece has no text but what was held back before it.
        text = "".join(piece.text + self._markers.get(piece.token, "") for piece in pieces)
        if self._format is None:
            return "".join(piece.text for piece in pieces), []
        self._source.text += text
        return self._go_on(self._format)

    def end(self) -> tuple[str, list[Call]]:
        """Return the same of what is still held, now that nothing more comes."""
        self._source.ended = True
        return ("", []) if self._format is None else self._go_on(self._format)

    def _go_on(self, form: Format) -> tuple[str, list[Call]]:
        source, said, calls = self._source, "", list[Call]()
        while self._parser is not None or self._next(form):
            assert self._parser is not None
            try:
                next(self._parser)
                break  # it needs more
            except StopIteration as done:
                said += self._say(self._begin).rstrip()  # white space before a call says nothing
                calls += done.value
                self._called, self._unsaid = True, source.at
            except (NoCall, RecursionError):
                said += self._say(self._begin + len(self._mark))
            self._parser = None
        said += self._say(self._held(form))
        if self._parser is None:
            source.text, self._unsaid = source.text[self._unsaid :], 0
        return said, calls

    def _next(self, form: Format) -> bool:
        """Let a parser begin at the next mark; return whether there is one."""
        source, self._mark = self._source, ""
        if self._bare:
            first = source.text.lstrip()[:1]
            self._bare = not first  # white space alone does not decide
            if first and first in form.bare:
                self._begin = len(source.text) - len(source.text.lstrip())
                source.at = self._begin
                self._parser = form.parse(source, "")
                return True
            if not first and not source.ended:
                return False
        found = [(source.text.find(mark, self._unsaid), mark) for mark in form.marks]
        found = [(place, mark) for place, mark in found if place >= 0]
        if not found:
            return False
        self._begin, self._mark = min(found)
        source.at = self._begin + len(self._mark)
        self._parser = form.parse(source, self._mark)
        return True

    def _held(self, form: Format) -> int:
        """Where the text begins that may belong to a call."""
        text = self._source.text
        if self._source.ended:
            silent = self._called and not text[self._unsaid :].strip()
            return self._unsaid if silent else len(text)
        end = self._begin if self._parser is not None else len(text) - begun(text, form.marks)
        end = max(end, self._unsaid)
        return self._unsaid + len(text[self._unsaid : end].rstrip())

    def _say(self, end: int) -> str:
        """Return the text up to a place, which is said with that."""
        said, self._unsaid = self._source.text[self._unsaid : end], end
        return said


def begun(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at a text's end may be the beginning of a mark."""
    return max(
        (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0
    )


def described(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Any], family: str
) -> list[dict[str, Any]]:
    """Return messages for a chat template that knows no tools: all of them are text.

    The tools come with the system message, or with the first other one where the template shows no
    system message. Earlier calls and their results become text, unless the template has them.
    """
    known = "tool_calls" in str(getattr(tokenizer, "chat_template", None) or "")
    told = [*messages] if known else _as_text(messages)
    if not tools:
        return told
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=listed, example=FORMATS[family].example)
    first = told[0]
    if first["role"] != "system" and shows_role(tokenizer, "system"):
        return [{"role": "system", "content": prompt}, *told]
    text = f"{first['content']}\n\n{prompt}" if first["role"] == "system" else (
        f"{prompt}\n\n{first['content']}"
    )  # fmt: skip
    return [{**first, "content": text}, *told[1:]]


def _as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without anything that only templates with tools know."""
    told, results = list[dict[str, Any]](), False
    for message in messages:
        text, result = message["content"], message["role"] == "tool"
        if result:
            text = f"<tool_response>\n{text}\n</tool_response>"
        elif "tool_calls" in message:
            calls = (
                json.dumps(one["function"], ensure_ascii=False) for one in message["tool_calls"]
            )
            text = "\n".join([text, *(f"<tool_call>\n{one}\n</tool_call>" for one in calls)])
        if results and (result or message["role"] == "user"):  # templates want roles to alternate
            told[-1]["content"] += "\n" + text
        elif result or "tool_calls" in message:
            told.append({"role": "user" if result else message["role"], "content": text.lstrip()})
        else:
            told.append({**message})
        results = result
    return told
