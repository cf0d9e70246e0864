"""Servers with OpenAI's interface, each in a process of its own, and their clients."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, TypeVar

from benchmarks import load
from benchmarks.load import Chat, Refused, Said
from benchmarks.shared import COMMAND, Options
from benchmarks.turns import Sleeper
from draftsmith import builtin
from draftsmith.model.load import folder_of
from draftsmith.model.loaded import last_part

T = TypeVar("T")

PATIENCE = 300
"""Seconds that a server may take to start or to answer."""
TRANSFORMERS, LLAMA = "transformers serve", "llama-server"
ARMS = (load.PLAIN, load.AUTO, TRANSFORMERS, LLAMA)
HEADS = ("first token, ms", "95 %", "a later one, ms", "95 %", "prompts from the cache")


class Server:
    """A server that is stopped except in its turns; an arm of `load.Load`."""

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
        text, usage, asked, first, last = "", dict[str, Any](), perf_counter(), 0.0, 0.0
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
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        text, first, last = text + piece, first or now, now
        if not (count := usage.get("completion_tokens")):
            raise Refused("an answer without tokens")
        end, details = perf_counter(), usage.get("prompt_tokens_details") or {}
        prompt = usage.get("prompt_tokens", 0), details.get("cached_tokens")
        return Said(text, count, 0, asked, first or end, last or end, *prompt)

    def end(self) -> None:
        """End the server."""
        self.sleeper.end()
        self._process.wait()


def with_peers(made: Options) -> Options:
    """Add the options that say where the servers of the others are."""
    here = Path(sys.executable).with_name("transformers")
    made.add_argument("--transformers", default=str(here), help="the command of that name")
    made.add_argument("--llama-server", default="llama-server", help="the command of that name")
    return made


def started(arm: str, model: str, args: argparse.Namespace, kind: type[Server] = Server) -> Server:
    """Start a server with the best settings that we know, for prompts of `args.longest` tokens.

    Raise Refused.
    """
    most, room = max(args.at_once), args.longest + args.tokens + 64
    name, threads = last_part(model), ["--threads", args.threads]
    if arm in (load.PLAIN, load.AUTO):
        words = [*COMMAND, "serve", "-m", model, "--name", name, "-d", arm, "--dtype", "float32",
                 *threads, "--max-batch", most, "--prefixes", args.prefixes]  # fmt: skip
    elif arm == TRANSFORMERS:
        if not Path(args.transformers).exists():
            raise Refused(f"there is no {args.transformers}; give --transformers")
        name = folder_of(model)
        words = [args.transformers, "serve", name, "--continuous-batching", "--dtype", "float32",
                 "--device", "cpu", "--cb-block-size", 32, "--cb-max-batch-tokens", 256,
                 "--cb-num-blocks", most * (room // 32 + 1), "--log-level", "error"]  # fmt: skip
    else:
        if not builtin.is_gguf(model):
            raise Refused("it takes GGUF files only")
        if (found := shutil.which(args.llama_server)) is None:
            raise Refused(f"there is no {args.llama_server}; give --llama-server")
        words = [found, "-m", builtin.resolve(model), *threads, "--parallel", most,
                 "--ctx-size", most * room, "--jinja"]  # fmt: skip
    log = args.output / f"{args.name}.{last_part(model)}.{arm.split()[0]}.log"
    return kind([str(word) for word in words], name, args.threads, log)


def program(arm: str, model: str, args: argparse.Namespace) -> list[object]:
    """Return the model of an arm and, of a peer, its file with size and time of change."""
    given = {TRANSFORMERS: args.transformers, LLAMA: args.llama_server}.get(arm)
    found = given and shutil.which(given)
    if not found:
        return [builtin.resolve(model), given]
    about = (path := Path(found).resolve()).stat()
    return [builtin.resolve(model), str(path), about.st_size, about.st_mtime_ns]


def compare(
    args: argparse.Namespace,
    model: str,
    title: str,
    prompts: Sequence[T],
    marked: Callable[[str, T], T],
    kind: type[Server] = Server,
) -> tuple[str, bool]:
    """Return the table of all servers (`load.Load`), and whether `auto` is slower than plain.

    `kind`: how a server is asked.
    """
    arms = {arm: partial(started, arm, model, args, kind) for arm in ARMS}
    programs = {arm: program(arm, model, args) for arm in ARMS}
    found = load.Load(args, title, arms, programs, prompts, marked).compare()
    return load.block(title, found, HEADS, figures), load.slower(found)


def figures(own: Sequence[load.Found]) -> list[str]:
    """Format milliseconds, and the part of the prompts that was in the prefix cache."""
    cached, read = [one["cached"] for one in own], sum(one["prompt"] for one in own)
    return [*load.latencies(own), "not reported" if None in cached else f"{sum(cached) / read:.0%}"]
