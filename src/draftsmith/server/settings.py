"""What an operator may choose: addresses, names and limits; needs nothing of the extra `server`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from cyclopts import Group, Parameter

from draftsmith.errors import UnknownName
from draftsmith.values import number, switch

LIMITS = Parameter(group=Group("Limits", sort_key=6))
"""Where `draftsmith serve --help` shows an option."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Address, access and limits of a server."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for programs that read one from a file

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 is every network this machine is in."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    name: Annotated[str | None, Parameter(show_default="as --model")] = None
    """What clients call the model."""
    api_keys: Path | None = None
    """A file with one key a line; lines that begin with # are remarks. DRAFTSMITH_API_KEYS holds
    more, with commas between them. Without any key everybody is served."""
    public: bool = False
    """Answer /health, /v1/models and the page without a key."""
    cors: tuple[str, ...] = ()
    """An origin with pages that may ask, such as https://example.org."""
    queue: Annotated[int, LIMITS] = 64
    """Answers that may wait for a row; more are refused with 429."""
    max_context: Annotated[int | None, LIMITS, Parameter(show_default="the model's context")] = None
    """Most tokens of a prompt."""
    max_output: Annotated[int, LIMITS] = 4096
    """Most tokens of an answer, and how many a chat's may have where the request does not say."""
    max_body: Annotated[int, LIMITS] = 4_000_000
    """Most bytes of a request."""
    timeout: Annotated[float, LIMITS] = 600.0
    """Most seconds for a request, waiting included."""
    grammar_seconds: Annotated[float, LIMITS] = 30.0
    """Most seconds that compiling a grammar may take."""
    slow_reader: Annotated[float, LIMITS] = 30.0
    """Seconds that a client may take to read what waits for it; then its request is cancelled."""
    keep_alive: Annotated[float, LIMITS] = 15.0
    """Seconds after which a stream without news sends a comment."""
    drain: Annotated[float, LIMITS] = 30.0
    """Seconds that running requests are given after SIGTERM, SIGHUP or Ctrl-C."""
    tool_format: str | None = None
    """How the model writes calls of tools, if its chat template does not show it: deepseek, glm,
    granite, harmony, hermes, llama, mistral, phi4, pythonic or qwen3-coder."""
    tolerant: bool = False
    """Ignore unknown fields of a request, and name them in a header, instead of refusing them."""
    allow_drafters: Annotated[bool, LIMITS] = False
    """Let requests choose drafter and budget (a drafter may load a model)."""
    log_prompts: bool = False
    """Write prompts into the log, too."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value: object = getattr(self, option.name)
            if option.name in _RANGE and value is not None:
                kind, least, most = _RANGE[option.name]
                value = number(option.name, value, kind, least=least, most=most)
            elif isinstance(option.default, bool):
                value = switch(option.name, value)
            object.__setattr__(self, option.name, value)
        if isinstance(self.cors, str):
            object.__setattr__(self, "cors", (self.cors,))
        if self.tool_format is not None:
            from draftsmith.server.calls.formats import FORMATS  # which loads more than a --help

            if self.tool_format not in FORMATS:
                raise UnknownName("tool_format", self.tool_format, FORMATS)


_RANGE: dict[str, tuple[type, float, float | None]] = {
    "port": (int, 0, 65_535),
    "queue": (int, 0, None),
    "max_context": (int, 1, None),
    "max_output": (int, 1, None),
    "max_body": (int, 1, None),
    "timeout": (float, 0.001, None),
    "grammar_seconds": (float, 0.001, None),
    "slow_reader": (float, 0.001, None),
    "keep_alive": (float, 0.001, None),
    "drain": (float, 0, 86_400),
}
"""Option → what it is, its least and its most."""
