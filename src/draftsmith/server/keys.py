"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from draftsmith.errors import LoadError, OptionError
from draftsmith.server.refusals import Refusal
from draftsmith.storage import expanded

VARIABLE = "DRAFTSMITH_API_KEYS"


class Keys:
    """The accepted API keys. If there are none, all requests are accepted."""

    def __init__(self, keys: Iterable[str] | None = None) -> None:
        """`keys`: a string is one key. Raises OptionError for a key without characters."""
        keys = [keys] if isinstance(keys, str) else [*(keys or ())]
        if wrong := [key for key in keys if not isinstance(key, str) or not key.strip()]:
            raise OptionError(f"keys must be non-empty strings, got {wrong[0]!r}")
        self._digests = [
            _digest(key.encode(errors="surrogateescape")) for key in dict.fromkeys(keys)
        ]

    @classmethod
    def read(cls, file: Path | None, environment: Mapping[str, str]) -> Keys:
        """Read keys from a file and the environment; raise LoadError if a given source has none."""
        said = environment.get(VARIABLE)
        found = [key for key in map(str.strip, (said or "").split(",")) if key]
        if said is not None and not found:
            raise LoadError(f"{VARIABLE}={said!r} holds no API key; unset it to serve everybody")
        if file is not None:
            try:
                lines = expanded(file).read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise LoadError(f"cannot read the API keys in {file}: {error}") from error
            mine = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
            if not mine:
                raise LoadError(f"{file} holds no API key; write one a line")
            found += mine
        return cls(found)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def salt(self, key: str | None) -> str:
        """Return the cache salt of a key; raise Refusal for a wrong key.

        Response times reveal cached prefixes and answers, so only requests with the same key share
        them.
        """
        if not self._digests:
            return ""
        # Starlette decodes headers as Latin-1, but most clients send keys as UTF-8.
        given, known = _digest((key or "").encode("latin-1", "replace")), False
        for digest in self._digests:  # compare all, so that the time does not reveal the position
            known |= hmac.compare_digest(digest, given)
        if not known:
            what = "is not one that this server knows" if key else "is missing"
            raise Refusal(
                f"the API key {what}; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"key:{given.hex()}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
