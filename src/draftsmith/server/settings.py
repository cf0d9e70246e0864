"""What an operator may choose: addresses, names and limits; needs nothing of the extra `server`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import ClassVar

from draftsmith.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a server listens, whom it serves, and how much it takes."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for whoever reads one from a file

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 is every network this machine is in."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    name: str | None = None
    """What clients call the model. [as --model]"""
    api_keys: Path | None = None
    """A file with one key a line (# begins a remark); DRAFTSMITH_API_KEYS holds more, with commas
    between them. Without any key everybody is served."""
    public: bool = False
    """Answer /health, /v1/models and the page without a key."""
    cors: tuple[str, ...] = ()
    """An origin whose pages may ask, such as https://example.org. [none]"""
    queue: int = 64
    """Answers that may wait for a row; more are refused with 429."""
    max_context: int | None = None
    """Most tokens of a prompt. [the model's context]"""
    max_output: int = 4096
    """Most tokens of an answer, and how many a chat's may have where the request does not say."""
    max_body: int = 4_000_000
    """Most bytes of a request."""
    timeout: float = 600.0
    """Most seconds for a request, waiting included."""
    grammar_seconds: float = 30.0
    """Most seconds that compiling a grammar may take."""
    slow_reader: float = 30.0
    """Seconds that a client may take to read what waits for it; then its request is cancelled."""
    keep_alive: float = 15.0
    """A stream with no news says so after so many seconds."""
    drain: float = 30.0
    """Seconds that running requests are given after SIGTERM."""
    tolerant: bool = False
    """Ignore unknown fields of a request, and name them in a header, instead of refusing them."""
    allow_drafters: bool = False
    """Let requests choose drafter and budget (a drafter may load a model)."""
    log_prompts: bool = False
    """Write prompts into the log, too."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            least, most = _RANGE.get(option.name, (None, inf))
            if least is None or value is None:
                continue
            if not least <= value <= most:
                end = "or more" if most == inf else f"to {most}"
                raise OptionError(f"{option.name}={value!r} cannot work; it must be {least} {end}")


_RANGE = {
    "port": (0, 65535), "queue": (0, inf), "max_context": (1, inf), "max_output": (1, inf),
    "max_body": (1, inf), "timeout": (0.001, inf), "grammar_seconds": (0.001, inf),
    "slow_reader": (0.001, inf), "keep_alive": (0.001, inf), "drain": (0, 86_400),
}  # fmt: skip
"""Least and most of an option."""
