"""Servers under load: `draftsmith serve` plainly and with `auto`, and servers of its peers.

    python -m benchmarks.server_load DATA --llama-server PATH     # 25 minutes
    python -m benchmarks.server_load --quick                      # on prompts of the demo

In a round each of 1 to 32 clients asks for two streamed chats, one after the other, greedily. Every
server is started by its own command, with room for all clients (`benchmarks/load.py` describes
their turns): `draftsmith serve` with the drafters `none` and `auto`, `transformers serve` with
continuous batching, all three in float32, and llama.cpp's `llama-server` with the GGUF file as it
is, i.e. with 4-bit weights. Every chat begins with a different number, so that no prefix cache has
it. Tokens per second and milliseconds are measured at the clients. The exit code is 1 if `auto` is
slower than plain.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

from benchmarks import load
from benchmarks.servers import Server
from benchmarks.shared import COMMAND, Blocks, Options, run
from draftsmith import builtin
from draftsmith.model.load import folder_of, read_tokenizer
from draftsmith.model.loaded import last_part

TRANSFORMERS, LLAMA = "transformers serve", "llama-server"
ARMS = (load.PLAIN, load.AUTO, TRANSFORMERS, LLAMA)
HEADS = ("first token, ms", "95 %", "a later one, ms", "95 %")


def parser() -> Options:
    made = Options("server_load", __doc__, data="optional")
    made.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    made.add_size("--at-once", [1, 2, 4, 8, 16, 32], [2], "numbers of clients", nargs="+")
    made.add_size("--limit", 64, 8, "different chats")
    made.add_size("--tokens", 48, 8, "most tokens of an answer")
    made.add_size("--rounds", 4, 1, "rounds of plain and auto; fewer clients have more")
    made.add_size("--peer-rounds", 1, 1, "rounds of the others")
    here = Path(sys.executable).with_name("transformers")
    made.add_argument("--transformers", default=str(here), help="the command of that name")
    made.add_argument("--llama-server", default="llama-server", help="the command of that name")
    made.set_defaults(requests=2)
    return made


def started(arm: str, model: str, args: argparse.Namespace) -> Server:
    """Start a server with the best settings that we know; raise Refused."""
    most, room = max(args.at_once), load.LONGEST + args.tokens + 64
    name, threads = last_part(model), ["--threads", args.threads]
    if arm in (load.PLAIN, load.AUTO):
        words = [*COMMAND, "serve", "-m", model, "--name", name, "-d", arm, "--dtype", "float32",
                 *threads, "--max-batch", most]  # fmt: skip
    elif arm == TRANSFORMERS:
        if not Path(args.transformers).exists():
            raise load.Refused(f"there is no {args.transformers}; give --transformers")
        name = folder_of(model)
        words = [args.transformers, "serve", name, "--continuous-batching", "--dtype", "float32",
                 "--device", "cpu", "--cb-block-size", 32, "--cb-max-batch-tokens", 256,
                 "--cb-num-blocks", most * (room // 32 + 1), "--log-level", "error"]  # fmt: skip
    else:
        if not builtin.is_gguf(model):
            raise load.Refused("it takes GGUF files only")
        if (found := shutil.which(args.llama_server)) is None:
            raise load.Refused(f"there is no {args.llama_server}; give --llama-server")
        words = [found, "-m", builtin.resolve(model), *threads, "--parallel", most,
                 "--ctx-size", most * room, "--jinja"]  # fmt: skip
    log = args.output / f"server_load.{last_part(model)}.{arm.split()[0]}.log"
    return Server([str(word) for word in words], name, args.threads, log)


def numbered(mark: str, chat: load.Chat) -> load.Chat:
    """Return a chat that begins with a mark."""
    first, *rest = chat
    return [{**first, "content": f"{mark} {first['content']}"}, *rest]


def measure(args: argparse.Namespace) -> Blocks:
    broken = False
    for model in args.models:
        tokenizer, title = read_tokenizer(folder_of(model), {}), f"{last_part(model)}, float32"
        chats = load.chats(model, tokenizer, args.data, args.limit)
        arms = {arm: partial(started, arm, model, args) for arm in ARMS}
        found = load.compare(args, title, arms, chats, numbered)
        broken |= load.slower(found)
        yield load.block(title, found, HEADS, load.latencies)
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
