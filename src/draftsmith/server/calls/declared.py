"""Answer formats that a tokenizer declares: response templates of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draftsmith.server.calls.source import Call, NoCall, Parser, Source, called, rest

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of fields with reasoning in response templates."""

_BROKEN = (ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""Errors of transformers for calls that do not fit a response template."""


def declares(tokenizer: Any) -> bool:
    """Return whether the tokenizer declares a response template, which parses answers."""
    return getattr(tokenizer, "response_template", None) is not None


def declared(source: Source, tokenizer: Any, prompt: str, tools: Sequence[Any]) -> Parser[None]:
    """Parse a whole answer with transformers; after a parse error, the rest is text."""
    try:
        parser = tokenizer.get_response_parser(prefix=prompt, tools=list(tools))
    except _BROKEN:  # a broken call that the answer continues
        parser = tokenizer.get_response_parser(prefix="", tools=list(tools))
    field, body = "", ""
    for event in parser.initial_events:
        field = event["field"] if event["type"] != "region_close" else ""
    read = 0
    while True:
        source.thinking = field in THOUGHTS
        new, ended, read = source.text[read:], source.ended, len(source.text)
        try:
            events = parser.feed(new)
            events += parser.finalize()[1] if ended else []
        except _BROKEN:
            break
        for event in events:
            field = event["field"]
            if event["type"] == "region_chunk" and event["dirty"]:
                body += event["text"]
            elif event["type"] == "region_chunk":
                source.at, end = _place(source, event["text"])
                source.tell(end, thought=field in THOUGHTS)
            elif event["type"] == "region_close":
                if field == "tool_calls":
                    value = event["value"]
                    try:
                        calls = [*map(_call, value if isinstance(value, list) else [value])]
                    except NoCall:
                        return (yield from rest(source))
                    source.parts += calls
                    _, source.at = _place(source, body)
                field = body = ""
        if ended:
            return
        yield
    yield from rest(source)


def _place(source: Source, text: str) -> tuple[int, int]:
    """Return begin and end of the next text that transformers returns.

    Its first text may begin with an end of the prompt, which transformers had kept back.
    """
    while (place := source.text.find(text, source.at)) < 0:
        text = text[1:]
    return place, place + len(text)


def _call(made: Any) -> Call:
    """Return a call; raise NoCall for one that no response can contain."""
    function = made.get("function", made) if isinstance(made, dict) else None
    if not isinstance(function, dict):
        raise NoCall
    given = function.get("arguments", {})
    try:
        text = (
            given
            if isinstance(given, str)
            else json.dumps(given, allow_nan=False, ensure_ascii=False)
        )
    except (ValueError, RecursionError):
        raise NoCall from None
    return called(function.get("name"), text)
