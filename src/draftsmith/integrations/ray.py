"""Ray Serve: replicas of the server behind one address (docs/scaling.md)."""

# Without the usual `from __future__ import annotations`: Ray Serve reads what `build_app` takes.
import logging.config
import os
from typing import Any

import torch

from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.engine.request import checked_budget
from draftsmith.errors import DraftsmithError, OptionError
from draftsmith.model.loaded import last_part
from draftsmith.server.settings import Settings

try:
    from fastapi import FastAPI
    from pydantic import BaseModel, ConfigDict
    from ray import serve
    from sse_starlette.sse import AppStatus

    from draftsmith.server.api import Api
    from draftsmith.server.app import application
    from draftsmith.server.keys import Keys
    from draftsmith.server.run import LOGGING
except ModuleNotFoundError as error:
    raise OptionError(
        f"replicas need {error.name}, which is not installed: pip install 'draftsmith[ray]'"
    ) from error


class Options(BaseModel):
    """What every replica is, and how many there are."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Hub id, folder or GGUF file, on every machine that may hold a replica."""
    drafter: str = "auto"
    budget: int | str = "auto"
    dtype: str | None = None
    exact: bool = False
    max_batch: int = 16
    memory: int | None = None
    """Bytes, of each replica; to be given where a machine holds several."""
    prefixes: int = 8
    answers: int = 0
    server: Settings = Settings()
    """What the server takes, but for `host` and `port`, which are Ray Serve's own."""
    replicas: int = 1
    cores: int = 1
    """CPU cores of each replica, and its threads."""
    gpus: float = 0
    """GPUs of each replica; 0: it runs on its cores."""
    deployment: dict[str, Any] = {}
    """Further options of `serve.deployment`, such as `autoscaling_config`; they win."""


OURS = {"server", "replicas", "cores", "gpus", "deployment"}
"""Options that are not the engine's."""


class Replica:
    """An engine and the server's endpoints, in a process of Ray's."""

    def __init__(self, options: Options) -> None:
        logging.config.dictConfig(LOGGING)
        torch.set_num_threads(options.cores)
        engine = Engine.from_pretrained(
            device="cuda" if options.gpus else None, **options.model_dump(exclude=OURS)
        )
        settings = options.server
        keys = Keys.read(settings.api_keys, os.environ)
        self._api = Api(engine, settings, keys, settings.name or last_part(options.model))
        self._api.warm_up()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve asks for it once, and starts it."""
        AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
        return application(self._api)

    def check_health(self) -> None:
        """Raise where Ray Serve should put another replica in this one's place."""
        if not self._api.worker.alive:
            raise DraftsmithError("the thread that drives the engine has ended")


def build_app(options: Options) -> serve.Application:
    """The server as a Ray Serve application, for `serve.run` and for `serve run` with a file.

    Every endpoint is there; Ray Serve spreads requests over the replicas. Raises OptionError.
    """
    parse(options.drafter)  # here rather than on every replica
    checked_budget(options.budget)
    if (options.server.host, options.server.port) != (Settings.host, Settings.port):
        raise OptionError("host and port are Ray Serve's: serve.start(http_options={'port': …})")
    chosen: dict[str, Any] = {
        "name": "draftsmith",
        "max_ongoing_requests": options.max_batch + options.server.queue,
        "graceful_shutdown_timeout_s": options.server.drain,
        "ray_actor_options": {"num_cpus": options.cores, "num_gpus": options.gpus},
    }
    scaling = options.deployment.get("autoscaling_config")
    if scaling is None:
        chosen["num_replicas"] = options.replicas
    chosen |= options.deployment
    if scaling is not None:  # a pass serves many requests, so two are not a full replica
        chosen["autoscaling_config"] = {"target_ongoing_requests": options.max_batch} | scaling
    return serve.deployment(serve.ingress()(Replica), **chosen).bind(options)
