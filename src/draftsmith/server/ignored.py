"""Ignored parts of a request: refused, or named in a header of the response."""

from __future__ import annotations

import difflib
import json

from fastapi import Response

from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import Body, MessagesRequest, ResponsesRequest, Sampling

HEADER = "Warning"
"""Header for warnings (RFC 7234). Code 299 is a miscellaneous warning."""

_LONGEST = 2000
"""Maximum bytes of the header's value. Some servers and proxies refuse longer headers."""


class Ignored:
    """Warnings about the parts of one request that are ignored."""

    def __init__(self, body: Body, strict: bool) -> None:
        """Start with the unknown fields of the body; with `strict`, raise Refusal for the first."""
        known, unknown = sorted(type(body).model_fields), list(body.model_extra or ())
        if unknown and strict:
            near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise Refusal(400, f"unknown field {unknown[0][:100]!r}{hint}", param=unknown[0][:100])
        self._told = [f"the field {name!r:.100} is unknown and was ignored" for name in unknown]

    def add(self, told: str) -> None:
        """Add a warning."""
        self._told.append(told)

    def limit(self, body: Sampling | ResponsesRequest | MessagesRequest, most: int) -> None:
        """Lower the requested length of the answer to `most` tokens, with a warning."""
        name = body.longest
        asked = getattr(body, name)
        if asked is not None and asked > most:
            if name in body.model_fields_set:  # else it is a default
                self.add(f"{name}={asked} was lowered to {most}, this server's limit")
            setattr(body, name, most)

    def named(self, response: Response) -> Response:
        """Add a header with all warnings to a response, and return the response."""
        values, left = list[str](), _LONGEST
        for told in self._told:
            # A header is ASCII. JSON escapes turn any text into a quoted ASCII string.
            value = f"299 draftsmith {json.dumps(told)}"
            left -= len(value) + 2
            if left < 0:
                break
            values.append(value)
        if values:
            response.headers[HEADER] = ", ".join(values)
        return response
