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

from benchmarks import load
from benchmarks.servers import compare, with_peers
from benchmarks.shared import Blocks, Options, run
from draftsmith.model.load import folder_of, read_tokenizer
from draftsmith.model.loaded import last_part


def parser() -> Options:
    made = Options("server_load", __doc__, data="optional")
    made.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    made.add_size("--at-once", [1, 2, 4, 8, 16, 32], [2], "numbers of clients", nargs="+")
    made.add_size("--limit", 64, 8, "different chats")
    made.add_size("--tokens", 48, 8, "most tokens of an answer")
    made.add_size("--rounds", 4, 1, "rounds of plain and auto; fewer clients have more")
    made.add_size("--peer-rounds", 1, 1, "rounds of the others")
    made.set_defaults(requests=2, warm=load.MANY, longest=load.LONGEST, prefixes=8)
    return with_peers(made)


def numbered(mark: str, chat: load.Chat) -> load.Chat:
    """Return a chat that begins with a mark."""
    first, *rest = chat
    return [{**first, "content": f"{mark} {first['content']}"}, *rest]


def measure(args: argparse.Namespace) -> Blocks:
    broken = False
    for model in args.models:
        tokenizer, title = read_tokenizer(folder_of(model), {}), f"{last_part(model)}, float32"
        chats = load.chats(model, tokenizer, args.data, args.limit)
        block, slower = compare(args, model, title, chats, numbered)
        broken |= slower
        yield block
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
