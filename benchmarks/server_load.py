"""Servers under load: `draftsmith serve` plainly and with `auto`, and the servers of its peers.

    python -m benchmarks.server_load --data ../shared/data --llama-server PATH     # 25 minutes
    python -m benchmarks.server_load --clients 1 2 --rounds 2 --tokens 16 -o /tmp/try

In a round, so many clients ask for streamed chats, greedily, each the next when it has an answer,
twice; all servers answer the same round side by side, a second each in turn
(`paired.side_by_side`). They are processes started by their own commands,
in float32, with room for all clients: `draftsmith serve` with the drafters `none` and `auto`,
`transformers serve` with continuous batching, and llama.cpp's `llama-server` with the GGUF file as
it is, so with 4-bit weights; it cannot take a built-in model.
Every chat begins with a number of its own, so that nobody has it in a cache of prefixes, and ends
where the model ends it. Times are the clients'. The same command goes on after an interruption,
round by round. The exit code is 1 where `auto` is slower than plain.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, perf_counter
from time import sleep as wait

import numpy as np
import torch

from benchmarks.guard import Guard
from benchmarks.paired import AWAKE, side_by_side, sleep
from benchmarks.shared import setup, table
from benchmarks.under_load import (
    AUTO,
    LEAST,
    LEAST_LOW,
    LONGEST,
    PLAIN,
    Answers,
    Found,
    Talk,
    Told,
    lines,
    over,
    plot,
    summed,
    talks,
)
from draftsmith import builtin
from draftsmith.model.load import folder_of, read_tokenizer
from draftsmith.model.loaded import last_part
from draftsmith.storage import Finished, digest, write_text

TRANSFORMERS, LLAMA = "transformers serve", "llama-server"
ARMS = (PLAIN, AUTO, TRANSFORMERS, LLAMA)
START = "from draftsmith.cli import main; main()"
SMALL, MORE = 8, 3
"""Rounds of fewer chats tell less, so there are up to three times as many."""
PATIENCE = 300
"""Seconds for a server to start."""


class Refused(Exception):
    """A server that cannot be asked, or that did not answer, and why."""


def command(arm: str, model: str, port: int, args: argparse.Namespace) -> list[str]:
    """What starts a server, with the best settings that we know; raises Refused."""
    most, room = max(args.clients), LONGEST + args.tokens + 64
    if arm in (PLAIN, AUTO):
        words = [sys.executable, "-c", START, "serve", "-m", model, "--name", last_part(model),
                 "-d", arm, "--dtype", "float32",
                 "--threads", args.threads, "--port", port, "--max-batch", most]  # fmt: skip
    elif arm == TRANSFORMERS:
        if not Path(args.transformers).exists():
            raise Refused(f"there is no {args.transformers}; give --transformers")
        words = [args.transformers, "serve", folder_of(model), "--continuous-batching", "--dtype",
                 "float32", "--device", "cpu", "--port", port, "--cb-block-size", 32,
                 "--cb-num-blocks", most * (room // 32 + 1), "--cb-max-batch-tokens", 256,
                 "--log-level", "error"]  # fmt: skip
    else:
        if not builtin.is_gguf(model):
            raise Refused("it takes GGUF files only")
        found = shutil.which(args.llama_server)
        if found is None:
            raise Refused(f"there is no {args.llama_server}; give --llama-server")
        words = [found, "-m", builtin.resolve(model), "--port", port, "--threads", args.threads,
                 "--parallel", most, "--ctx-size", most * room, "--jinja"]  # fmt: skip
    return [str(word) for word in words]


class Server:
    """A server in a process of its own, asleep while nobody asks."""

    def __init__(self, arm: str, model: str, args: argparse.Namespace, log: Path) -> None:
        """Start it and wait until it serves; what it says goes to `log`. Raises Refused."""
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        words = command(arm, model, self._port, args)
        self._model = folder_of(model) if arm == TRANSFORMERS else last_part(model)
        threads = {"OMP_NUM_THREADS": str(args.threads)}
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                words,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | threads,
                process_group=0,
            )
        self._guard = Guard(self.process)  # it is asleep most of the time, and would stay so
        end = monotonic() + PATIENCE
        while not self._healthy():
            if self._process.poll() is not None or monotonic() > end:
                self.close()
                raise Refused(f"it did not start; {log.name} says why")
            wait(0.1)
        sleep(self.process)

    @property
    def process(self) -> int:
        """Its id."""
        return self._process.pid

    def _healthy(self) -> bool:
        with suppress(OSError), closing(HTTPConnection("127.0.0.1", self._port, 5)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def ask(self, chats: Sequence[Talk], clients: int, tokens: int) -> Answers:
        """What so many clients got for these chats, of so many tokens at most."""
        try:
            with ThreadPoolExecutor(clients) as threads:
                return list(threads.map(self._chat, chats, [tokens] * len(chats)))
        except (Refused, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def _chat(self, chat: Talk, tokens: int) -> Told:
        body = {
            "model": self._model,
            "messages": chat,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, count, asked, first, last = "", 0, perf_counter(), 0.0, 0.0
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)) as connection:
            told = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), told)
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
                    if said := choice["delta"].get("content"):
                        text, first, last = text + said, first or now, now
        if not count:
            raise Refused("an answer without tokens")
        end = perf_counter()
        return Told(text, count, 0, asked, first or end, last or end)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._guard.close()


class Load:
    """One model behind every server, under one number of clients after the other."""

    def __init__(self, name: str, args: argparse.Namespace, done: Finished) -> None:
        self.name, self.args, self.done = name, args, done
        self.title = f"{last_part(name)}, float32"
        chats = talks(name, read_tokenizer(folder_of(name), {}), args.data, args.prompts)
        self._chats = random.Random(0).sample(chats, len(chats))
        self._mark = "/" if builtin.is_ours(builtin.resolve(name)) else ". "
        self._servers: dict[str, Server | str] = {}
        self._open = ExitStack()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def round(self, clients: int, number: int) -> list[Talk]:
        """What is asked in a round; a chat's first words are its own."""
        count = clients * self.args.requests
        asked = []
        for place in range(number * count, (number + 1) * count):
            first, *rest = self._chats[place % len(self._chats)]
            content = f"{clients * 1000 + place}{self._mark}{first['content']}"
            asked.append([{**first, "content": content}, *rest])
        return asked

    def rounds(self, clients: int) -> Iterator[tuple[int, Sequence[str]]]:
        """Number and servers of every round; peers take part in the first ones only."""
        times = max(1, min(MORE, SMALL // (clients * self.args.requests)))
        for number in range(times * self.args.rounds):
            arms = ARMS if number < times * self.args.peer_rounds else (PLAIN, AUTO)
            yield number, arms[:: 1 if number % 2 else -1]

    def measured(self, clients: int) -> list[dict[str, Found]]:
        """By round, what every server made of it."""
        found, warm = [], set[str]()
        for number, arms in self.rounds(clients):
            asked, made = self.round(clients, number), dict[str, Found]()
            facts = {"model": self.title, "clients": clients, "round": number}
            rest = [AWAKE, self.args.tokens, self.args.threads, digest(asked)]
            keys = {arm: [*facts.values(), arm, *rest] for arm in arms}
            missing = [arm for arm in arms if keys[arm] not in self.done]
            # A server learns what passes of so many rows cost.
            cold, again = [arm for arm in missing if arm not in warm], self.round(clients, -1)
            warm |= self._ask(cold, again[:clients], clients, min(16, self.args.tokens)).keys()
            for arm, one in self._ask(missing, asked, clients, self.args.tokens).items():
                made[arm] = facts | {"arm": arm} | one
                if "refused" not in one:  # perhaps not the next time
                    self.done.add(keys[arm], made[arm])
            found.append({arm: made.get(arm) or self.done[key] for arm, key in keys.items()})
        return found

    def _ask(
        self, arms: Sequence[str], asked: Sequence[Talk], clients: int, tokens: int
    ) -> dict[str, Found]:
        """What servers say to the same chats, side by side."""
        found, asking = dict[str, Found](), dict[int, str]()
        tasks: dict[int, Callable[[], Answers]] = {}
        for arm in arms:
            server = self._server(arm)
            if isinstance(server, str):
                found[arm] = {"refused": server}
            else:
                asking[server.process] = arm
                tasks[server.process] = partial(server.ask, asked, clients, tokens)
        for process, answered in side_by_side(tasks).items():
            found[asking[process]] = summed(*answered)
        for arm, one in found.items():
            if "refused" in one:
                if arm in (PLAIN, AUTO):
                    raise Refused(f"{arm}: {one['refused']}")
                self._servers[arm] = one["refused"]  # the others need not wait for it once more
        return found

    def _server(self, arm: str) -> Server | str:
        """It, or why it cannot be asked."""
        if arm not in self._servers:
            print(f"{self.title}: starting {arm}", flush=True)
            log = self.args.output / f"server_load.{last_part(self.name)}.{arm.split()[0]}.log"
            try:
                found = self._servers[arm] = Server(arm, self.name, self.args, log)
            except Refused as refused:
                self._servers[arm] = str(refused)
            else:
                self._open.callback(found.close)
        return self._servers[arm]


HEADS = ("clients", "server", "tokens/s", "over plain, by round", "rounds", "first token, ms",
         "95 %", "a later one, ms", "95 %", "plain's answers")  # fmt: skip


def percentiles(own: list[Found]) -> list[str]:
    """Milliseconds to the first token and for a later one, each the 50th and the 95th."""
    times = [[1e3 * x for one in own for x in one[name]] for name in ("first", "each")]
    return [f"{np.percentile(ms, share):.1f}" for ms in times for share in (50, 95)]


def report(title: str, found: dict[int, list[dict[str, Found]]], output: Path) -> str:
    """A model's table; its plot is written."""
    write_text(output / f"server_load.{title.replace(', ', '.')}.svg", plot(found, ARMS))
    rows = [line for own in found.items() for line in lines(*own, ARMS, HEADS, percentiles)]
    return f"## {title}\n\n{table(HEADS, rows)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write all of it, from time to time."""
    here = Path(sys.executable)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder with prompts/, recorded/, corpora/")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/load"))
    parser.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=4, help="of plain and auto")
    parser.add_argument("--peer-rounds", type=int, default=1, help="of the others")
    parser.add_argument("--prompts", type=int, default=64, help="different ones")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--transformers", default=str(here.with_name("transformers")))
    parser.add_argument("--llama-server", default="llama-server")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    done = Finished(args.output / "server_load.jsonl")
    slower, said = False, {"": f"{setup()}. At most {args.tokens} tokens an answer.\n"}
    for name in args.models:
        found: dict[int, list[dict[str, Found]]] = {}
        with Load(name, args, done) as load:
            for clients in args.clients:
                found[clients] = load.measured(clients)
                speed = over(found[clients], AUTO)
                bad = speed.median < LEAST or speed.low < LEAST_LOW
                slower |= bad
                print(f"{load.title}, {clients} clients: auto / plain {speed}{' SLOWER' * bad}")
                for line in lines(clients, found[clients], ARMS, HEADS, percentiles):
                    print("   ", *line[1:], flush=True)
                said[load.title] = report(load.title, found, args.output)
                write_text(args.output / "server_load.md", "\n".join(said.values()))
    print("\n".join(said.values()))
    sys.exit(slower)


if __name__ == "__main__":
    main()
