"""Ignored parts of a request: refused, or named in a header of the response."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Self

from fastapi import Response

from draftsmith.server.refusals import Refusal, hint
from draftsmith.server.schema import (
    FUNCTION,
    WITHOUT_EFFECT,
    Body,
    MessagesRequest,
    Part,
    ResponsesRequest,
    Sampling,
    Section,
    Tool,
)

log = logging.getLogger(__name__)

HEADER = "Warning"
"""Header for warnings (RFC 7234). Code 299 is a miscellaneous warning."""

_LONGEST = 2000
"""Maximum bytes of the header's value. Some servers and proxies refuse longer headers."""

_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
"""Fields that OpenAI has replaced → those that are read."""

_MOST = 50
"""Number of fields after which no others are named. Fewer fit into the header."""


class Ignored:
    """Warnings about the parts of one request that are ignored."""

    def __init__(self, body: Body, strict: bool) -> None:
        """Start with the unknown fields of the body; with `strict`, raise Refusal for the first."""
        known, unknown = sorted(type(body).model_fields), [*(body.model_extra or ())]
        if unknown and strict:
            name = unknown[0][:100]
            instead = f"; use {_INSTEAD[name]!r}" if name in _INSTEAD else hint(name, known)
            raise Refusal(f"unknown field {name!r}{instead}", param=name)
        self._warnings = [f"the field {name!r:.100} is unknown and was ignored" for name in unknown]
        self._places: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        """An unknown field, and the fields that are known there → its places."""
        for where, part in _sections(body):
            self.section(part, where)

    def add(self, warning: str) -> None:
        """Add a warning, once."""
        if warning not in self._warnings:
            self._warnings.append(warning)

    def section(self, part: Section, where: str) -> None:
        """Add a warning for each unknown field of a part of the request, and of its parts."""
        if part.model_extra:
            self.fields(part.model_extra, part.names(), where)
        if isinstance(part, Tool):
            self.fields(part.function, FUNCTION, f"{where}.function")
        for place, inner in _sections(part):
            self.section(inner, f"{where}.{place}")

    def fields(self, given: Mapping[str, Any], known: Collection[str], where: str) -> None:
        """Add a warning for each field of a part of the request that is not known.

        Fields that are empty or false ask for nothing.
        """
        for name, value in given.items():
            if value and name not in known and name not in WITHOUT_EFFECT:
                key = name[:100], tuple(known)
                if key in self._places or len(self._places) < _MOST:
                    self._places.setdefault(key, []).append(where)

    def parts(self, content: Any, where: str) -> None:
        """Add a warning for each unknown field of the parts of a message's content."""
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping):
                self.fields(part, Part.names(), f"{where}[{number}]")

    def limited(self, body: Sampling | ResponsesRequest | MessagesRequest, most: int) -> Self:
        """Lower the requested length of the answer to `most` tokens, with a warning."""
        name = body.longest
        asked = getattr(body, name)
        if asked is not None and asked > most:
            if name in body.model_fields_set:  # else it is a default
                self.add(f"{name}={asked} was lowered to {most}, this server's limit")
            setattr(body, name, most)
        return self

    def named(self, response: Response) -> Response:
        """Add a header with all warnings to a response, and return the response."""
        warnings, values, left = [*self._warnings], list[str](), _LONGEST
        warnings += (
            f"the field {name!r} of {first}{f' and {len(more)} more' if more else ''} was ignored"
            f"{hint(name, known)}"
            for (name, known), (first, *more) in self._places.items()
        )
        if warnings:  # clients often show no headers
            log.info("ignored", extra={"fields": {"warnings": warnings}})
        for warning in warnings:
            # A header is ASCII. JSON escapes turn any text into a quoted ASCII string.
            value = f"299 draftsmith {json.dumps(warning)}"
            left -= len(value) + 2
            if left < 0:
                break
            values.append(value)
        if values:
            response.headers[HEADER] = ", ".join(values)
        return response


def _sections(body: Section) -> Iterator[tuple[str, Section]]:
    """Yield the parts of a request that have fields of their own, with their places."""
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Section):
            yield name, value
        for number, part in enumerate(value if isinstance(value, list) else ()):
            if isinstance(part, Section):
                yield f"{name}[{number}]", part
