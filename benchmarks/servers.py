"""A server with OpenAI's interface in a process of its own, and its clients."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, perf_counter, sleep

from benchmarks.load import Chat, Refused, Said
from benchmarks.turns import Sleeper

PATIENCE = 300
"""Seconds that a server may take to start or to answer."""


class Server:
    """A server that is stopped except in its turns; an arm of `load.compare`."""

    def __init__(self, words: list[str], model: str, threads: int, log: Path) -> None:
        """Start the server, with --port added, and wait until it serves; raise Refused.

        `model` is its name in requests. `log` is the file for its output.
        """
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._model = model
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*words, "--port", str(self._port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
            )
        self.sleeper = Sleeper(self._process.pid)
        end = monotonic() + PATIENCE
        try:
            while not self._healthy():
                if self._process.poll() is not None or monotonic() > end:
                    raise Refused(f"it did not start; {log.name} says why")
                sleep(0.1)
        except BaseException:
            self.end()
            raise
        self.sleeper.sleep()

    def _healthy(self) -> bool:
        with suppress(OSError), closing(HTTPConnection("127.0.0.1", self._port, 5)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def ask(self, prompts: Sequence[Chat], at_once: int, tokens: int) -> list[Said]:
        """Ask for chats; each client asks its next one after an answer. Raise Refused."""
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(self._chat, prompts, [tokens] * len(prompts)))

    def _chat(self, chat: Chat, tokens: int) -> Said:
        body = {
            "model": self._model, "messages": chat, "max_tokens": tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        text, count, asked, first, last = "", 0, perf_counter(), 0.0, 0.0
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)) as connection:
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), kind)
            response = connection.getresponse()
            if response.status != 200:
                raise Refused(f"{response.status} {response.read(300).decode(errors='replace')}")
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == line.strip() or data == b"[DONE]":
                    continue
                now, event = perf_counter(), json.loads(data)
                if "error" in event:
                    raise Refused(str(event["error"]))
                count = (event.get("usage") or {}).get("completion_tokens", count)
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        text, first, last = text + piece, first or now, now
        if not count:
            raise Refused("an answer without tokens")
        end = perf_counter()
        return Said(text, count, 0, asked, first or end, last or end)

    def end(self) -> None:
        """End the server."""
        self.sleeper.end()
        self._process.wait()
