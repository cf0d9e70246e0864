"""HTTP server for one engine (extra `server`). Requests enter in app.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UnknownName
from draftsmith.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from draftsmith.engine.engine import Engine


def create_app(engine: Engine, *, keys: Iterable[str] | None = None, **settings: Any) -> FastAPI:
    """Return the endpoints of `draftsmith serve` as an ASGI application, to mount in another one.

    `keys`: one or several API keys; without any, requests need none. `settings`: options of the
    command under the same names, such as `name`, `queue` or `max_output`; times in seconds, sizes
    in bytes. `host`, `port` and `drain` are not accepted, because another program listens. The
    application does not close the engine. Raises OptionError for an invalid setting or key,
    UnknownName for an unknown setting.
    """
    from draftsmith.model.loaded import last_part  # slow imports, not needed for --help
    from draftsmith.server.api import Api
    from draftsmith.server.app import application
    from draftsmith.server.keys import Keys

    known = {field.name for field in fields(Settings)} - {"host", "port", "drain", "api_keys"}
    for name in settings.keys() - known:
        raise UnknownName("setting", name, known)
    chosen = Settings(**settings)
    path = getattr(engine.model.model.config, "_name_or_path", "")
    return application(Api(engine, chosen, Keys(keys), chosen.name or last_part(path) or "model"))
