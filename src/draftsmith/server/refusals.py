"""Errors in the formats of OpenAI and Anthropic."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from draftsmith.errors import DraftsmithError, LoadError, OptionError, PromptError, UnsupportedError
from draftsmith.values import shown


class Refusal(DraftsmithError):
    """An error that ends a request, with the HTTP status and the fields of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """Body of the response in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Body of the response in Anthropic's form."""
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": "error", "error": {"type": _ANTHROPIC.get(self.status, usual),
                                           "message": str(self)}}  # fmt: skip

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """Convert any error. Clients do not see the text of unexpected errors."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, OptionError | PromptError | LoadError | UnsupportedError):
            message = str(error)
            named = re.match(r"[^\W\d]\w*(?==| must be )", message)
            param = named[0] if named and isinstance(error, OptionError) else None
            long = isinstance(error, PromptError) and "context" in message
            code = "context_length_exceeded" if long else None
            return cls(message, param=param, code=code)
        message = "the answer failed; the server's log says why"
        return cls(message, status=500, code="internal_error")

    @classmethod
    def of_validation(cls, errors: Sequence[Any], where: str = "") -> Refusal:
        """Convert the most helpful one of pydantic's validation errors.

        If a field allows several types, errors about the value are preferred to type errors, those
        of inner fields to those of outer ones, and those of later items: what comes before them has
        the right type. `where`: place of what was validated.
        """
        values = [e for e in errors if not e["type"].endswith("_type")] or errors

        def place(error: Any) -> tuple[int, int]:
            return len(error["loc"]), sum(part for part in error["loc"] if isinstance(part, int))

        first = max(values, key=place)
        path = [str(part) for part in first["loc"] if not _NO_FIELD.fullmatch(str(part))]
        path = [where, *path] if where else path
        param, message = ".".join(path), str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "missing" and isinstance(first["input"], dict):
            message += hint(path[-1], first["input"], "is it in {!r}?")
        elif first["type"].endswith(("_type", "literal_error")):
            message += f", got {shown(first['input'])}"
        if first["type"] == "json_invalid":
            param, message = "", f"the body is not JSON: {first['ctx']['error']} at byte {path[0]}"
        elif param:
            message = f"{param[:100]}: {message}"
        elif first["type"] == "missing":
            message = "there is no body; send a JSON object"
        return cls(message[:1000], param=re.split(r"\W", path[0])[0][:100] if param else None)


_NO_FIELD = re.compile(r"body|query|str|int|float|bool|dict|list|[A-Z].*|.*\W.*")
"""Parts of pydantic's places that are no fields: where a value was read, and the type it lacks."""

_ANTHROPIC = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""HTTP status → type of Anthropic's errors."""


def hint(name: str, known: Collection[str], ask: str = "did you mean {!r}?") -> str:
    """Return a question about the most similar one of some names, or ""."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; {ask.format(near[0][:100])}" if near else ""


@contextmanager
def renaming(fields: Mapping[str, str]) -> Iterator[None]:
    """Report refusals with the field names of another interface."""
    try:
        yield
    except (Refusal, OptionError) as error:
        refusal = Refusal.of(error)
        name = refusal.param or ""
        if name in fields:
            refusal.param = fields[name]
            refusal.args = (re.sub(rf"\b{name}\b", refusal.param, str(refusal), count=1),)
        raise refusal from None
