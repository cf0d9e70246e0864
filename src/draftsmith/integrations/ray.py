"""Ray Serve: replicas of the server at one address (docs/scaling.md)."""

# Without `from __future__ import annotations`: Ray Serve reads the annotations of `build_app`.
import logging.config
import os
from typing import Any

import torch

from draftsmith.drafters.registry import parse
from draftsmith.engine.drafting import checked_budget
from draftsmith.engine.engine import Engine
from draftsmith.errors import DraftsmithError, OptionError
from draftsmith.model.loaded import last_part
from draftsmith.server.settings import Settings

try:
    from fastapi import FastAPI
    from pydantic import BaseModel, ConfigDict, Field
    from ray import serve

    from draftsmith.server.api import Api
    from draftsmith.server.app import application
    from draftsmith.server.keys import Keys
    from draftsmith.server.run import LOGGING
except ModuleNotFoundError as error:
    raise OptionError(
        f"replicas need {error.name}, which is not installed: pip install 'draftsmith[ray]'"
    ) from error


class Options(BaseModel):
    """Options of the replicas."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Hub id, folder or GGUF file, on every machine that may hold a replica."""
    drafter: str = "auto"
    budget: int | str = "auto"
    dtype: str | None = None
    exact: bool = False
    max_batch: int = Field(16, ge=1)
    memory: int | None = Field(None, ge=1)
    """Bytes per replica. Set it if a machine holds several replicas."""
    prefixes: int = Field(8, ge=0)
    answers: int = Field(0, ge=0)
    server: Settings = Settings()
    """Options of the server, except `host` and `port`, which Ray Serve sets."""
    replicas: int = Field(1, ge=1)
    cores: int = Field(1, ge=1)
    """CPU cores, and threads, of each replica."""
    gpus: float = Field(0, ge=0)
    """GPUs of each replica; 0: it runs on its cores."""
    deployment: dict[str, Any] = {}
    """Further options of `serve.deployment`, such as `autoscaling_config`; they take precedence,
    and so does each one of `ray_actor_options`."""


OURS = {"server", "replicas", "cores", "gpus", "deployment"}
"""Options that are not the engine's."""


class Replica:
    """An engine and the server's endpoints, in a process of Ray's."""

    def __init__(self, options: Options) -> None:
        logging.config.dictConfig(LOGGING)
        torch.set_num_threads(options.cores)
        engine = Engine.from_pretrained(
            device="cuda" if options.gpus else "cpu", **options.model_dump(exclude=OURS)
        )
        settings = options.server
        keys = Keys.read(settings.api_keys, os.environ)
        self._api = Api(engine, settings, keys, settings.name or last_part(options.model))
        self._api.warm_up()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the app, which Ray Serve starts."""
        return application(self._api)

    def check_health(self) -> None:
        """Raise if Ray Serve should replace this replica."""
        if not self._api.worker.alive:
            raise DraftsmithError("the thread that drives the engine has ended")


def build_app(options: Options) -> serve.Application:
    """Make a Ray Serve application of the server, for `serve.run` and for `serve run` with a file.

    It has every endpoint, and Ray Serve distributes requests over the replicas. Raises OptionError.
    """
    parse(options.drafter)  # here, so that it fails before any replica starts
    checked_budget(options.budget)
    if (options.server.host, options.server.port) != (Settings.host, Settings.port):
        raise OptionError("host and port are Ray Serve's: serve.start(http_options={'port': …})")
    chosen: dict[str, Any] = {
        "name": "draftsmith",
        "max_ongoing_requests": options.max_batch + options.server.queue,
        "graceful_shutdown_timeout_s": options.server.drain,
    }
    actor = {"num_cpus": options.cores, "num_gpus": options.gpus}
    scaling = options.deployment.get("autoscaling_config")
    if scaling is None and options.deployment.get("num_replicas") == "auto":
        scaling = {}
    if scaling is None:
        chosen["num_replicas"] = options.replicas
    chosen |= options.deployment
    chosen["ray_actor_options"] = actor | options.deployment.get("ray_actor_options", {})
    if isinstance(scaling, BaseModel):
        scaling = scaling.model_dump(exclude_unset=True)
    if scaling is not None:  # a pass serves many requests, so Ray's default of two is too low
        chosen["autoscaling_config"] = {"target_ongoing_requests": options.max_batch} | scaling
    return serve.deployment(serve.ingress()(Replica), **chosen).bind(options)
