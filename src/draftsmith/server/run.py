"""The server process: listening, logging, and graceful shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from draftsmith.errors import OptionError, first_line
from draftsmith.server.api import Api
from draftsmith.server.app import application
from draftsmith.server.settings import Settings

_LAST = 5
"""Seconds that clients have to read the end of their streams."""


class JsonLines(logging.Formatter):
    """Formatter of log records: one line of JSON each, with the `fields` that the caller added."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": JsonLines}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": "INFO", "propagate": False}
        for name in ("draftsmith", "uvicorn", "asyncio")
    },
}


class Draining(uvicorn.Server):
    """A server that finishes running requests within a time limit on SIGTERM, SIGHUP or Ctrl-C."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api = api
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips it, and its cancelled task is logged as an error
            await self.lifespan.shutdown()

    def run(self, sockets: Any = None) -> None:
        super().run(sockets)
        self._api.engine.thread.close(_LAST)  # the application leaves the engine open

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn restores the earlier handlers and raises the signal again, which would end the
        # process before it can save.
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED_SIGNALS:
                signal.signal(number, self.handle_exit)
            hangup = getattr(signal, "SIGHUP", None)  # Windows has none
            if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # as in nohup
                signal.signal(hangup, self.handle_exit)
        yield

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        self.force_exit, self.should_exit = self.should_exit, True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        worker = self._api.worker
        worker.draining = True
        seconds = 0.0 if self.force_exit else self._api.settings.drain
        asyncio.get_running_loop().call_later(seconds, worker.end_all)


def check_address(settings: Settings) -> None:
    """Raise OptionError if the server cannot listen; called before a model is loaded."""
    host, port, why = settings.host, settings.port, "it has no address"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        found, why = [], first_line(error)
    for family, _, _, _, address in found:
        try:
            socket.create_server(address[:2], family=family).close()
        except OSError as error:
            why = first_line(error)
        else:
            return
    raise OptionError(
        f"cannot listen at {host} port {port}: {why}; choose another --port or --host"
    )


def server(api: Api) -> Draining:
    """Return a server; `run()` starts it."""
    settings = api.settings
    config = uvicorn.Config(
        application(api),
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=LOGGING,
        timeout_graceful_shutdown=int(settings.drain) + _LAST,
        server_header=False,
    )
    return Draining(config, api)
