"""What went wrong, as OpenAI's clients expect to be told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.errors import DraftsmithError, LoadError, OptionError, PromptError, UnsupportedError


class Refusal(DraftsmithError):
    """A request that gets no (further) answer: the status and the body of OpenAI's errors."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def renamed(self, fields: Mapping[str, str]) -> Refusal:
        """The same where a field has another name."""
        name = self.param or ""
        message = str(self).replace(name, fields[name]) if name in fields else str(self)
        param, more = fields.get(name, self.param), self.headers
        return Refusal(self.status, message, param=param, code=self.code, headers=more)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """What a client is told of an error; of those that nobody expected, not what they say."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, OptionError | PromptError | LoadError | UnsupportedError):
            message = str(error)
            named = re.match(r"[^\W\d]\w*(?==| must be )", message)
            param = named[0] if named and isinstance(error, OptionError) else None
            long = "context" if isinstance(error, PromptError) and "context" in message else None
            return cls(
                400,
                message,
                param=param,
                code=f"{long}_length_exceeded" if long else None,
            )
        return cls(500, "the answer failed; the server's log says why", code="internal_error")

    @classmethod
    def of_validation(cls, errors: Sequence[Any]) -> Refusal:
        """The first of pydantic's errors.

        Where a value may be of several types, what is wrong with it beside its type goes first.
        """
        first = next((e for e in errors if not e["type"].endswith("_type")), errors[0])
        path = [str(part) for part in first["loc"] if part not in ("body", "query")]
        param, message = ".".join(path), str(first["msg"])
        if first["type"] == "json_invalid":
            param, message = "", f"the body is not JSON: {first['ctx']['error']} at byte {path[0]}"
        elif param:
            message = f"{param[:100]}: {message}"
        return cls(400, message[:1000], param=path[0][:100] if param else None)
