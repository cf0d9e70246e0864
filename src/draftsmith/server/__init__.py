"""A server over one engine (extra `server`): app.py is where requests enter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UnknownName
from draftsmith.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from draftsmith.engine.engine import Engine


def create_app(engine: Engine, *, keys: Iterable[str] = (), **settings: Any) -> FastAPI:
    """Return the endpoints of `draftsmith serve` as an ASGI application, to be mounted in another.

    `keys`: API keys; without any, everybody is served. `settings` are the options of the command by
    the same names, such as `name`, `queue` or `max_output`, in seconds and bytes; `host`, `port`
    and `drain` belong to the program that listens. The engine stays yours to close. Raises
    OptionError for a setting that is wrong, UnknownName for one that does not exist.
    """
    from draftsmith.model.loaded import last_part  # no --help should wait for these
    from draftsmith.server.api import Api
    from draftsmith.server.app import application
    from draftsmith.server.keys import Keys

    known = {field.name for field in fields(Settings)} - {"host", "port", "drain", "api_keys"}
    for name in settings.keys() - known:
        raise UnknownName("setting", name, known)
    chosen = Settings(**settings)
    path = getattr(engine.model.model.config, "_name_or_path", "")
    return application(Api(engine, chosen, Keys(keys), chosen.name or last_part(path) or "model"))
