"""`draftsmith serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from draftsmith.cli.loading import load_engine, resolve, short
from draftsmith.cli.options import Count, ModelOptions, group
from draftsmith.cli.render import say_notices
from draftsmith.cli.report import note
from draftsmith.errors import OptionError
from draftsmith.server.settings import Settings


@group("Engine", 4)
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the engine may hold."""

    max_batch: Count = 16
    """Most answers in a pass."""
    memory: Annotated[Count | None, Parameter(show_default="three quarters of what is free")] = None
    """Most bytes that requests and kept sequences may hold."""
    prefixes: int = 8
    """Ended sequences that are kept for prompts that begin like them."""
    answers: int = 0
    """Bytes of earlier answers to draft from, of the same key only; at least 1,000,000."""
    answers_file: Path | None = None
    """Where those are kept when the server ends."""


def serve(
    *,
    model: ModelOptions = ModelOptions(),
    engine: EngineOptions = EngineOptions(),
    settings: Annotated[Settings, group("Server", 5)] = Settings(),
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients (needs the extra `server`).

    Examples

    draftsmith serve -m Qwen/Qwen3-0.6B
    draftsmith serve -m ./my-model -d auto --port 9000 --api-keys keys.txt --answers 50000000
    """
    try:
        from draftsmith.server.api import Api
        from draftsmith.server.keys import Keys
        from draftsmith.server.run import check_address
        from draftsmith.server.run import server as listening
    except ModuleNotFoundError as error:
        raise OptionError(
            f"a server needs {error.name}, which is not installed: pip install 'draftsmith[server]'"
        ) from error
    keys = Keys.read(settings.api_keys, os.environ)
    check_address(settings)
    if settings.host not in ("127.0.0.1", "::1", "localhost") and not keys:
        note(f"everybody who reaches {settings.host} is served: give --api-keys to choose whom")
    made = load_engine(model, {}, **asdict(engine))
    say_notices(made)
    name = settings.name or short(model.model or resolve(None))
    try:
        api = Api(made, settings, keys, name)
        listener = listening(api)
        api.warm_up()
        listener.run()
    finally:
        made.close()
