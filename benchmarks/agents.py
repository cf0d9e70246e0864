"""Servers under agents: many sessions at once, each a conversation that grows turn by turn.

    python -m benchmarks.agents DATA --llama-server PATH     # 20 sessions of ten turns, 20 minutes
    python -m benchmarks.agents --quick                      # on the demo's file

A session is recorded: each turn has a file, or a part of it, as the result of a tool, a commit's
message, and what the commit made of it. That stays in the conversation, whatever a server answers,
so all servers read the same prompts, each of which begins with the one before it. Turns follow one
another, greedily and streamed. The servers are those of `server_load`; `draftsmith serve` and
`llama-server` keep a prefix for each session. The exit code is 1 if `auto` is slower than plain.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.server_load import numbered
from benchmarks.servers import Server, compare, with_peers
from benchmarks.shared import Blocks, Options, held_out, run
from draftsmith import builtin
from draftsmith.model.load import folder_of, read_tokenizer
from draftsmith.model.loaded import last_part
from draftsmith.text.tokenizer import render_chat

Session = list[load.Chat]  # the prompts of its turns
SYSTEM = "You edit files. You see what read_file returned. Answer with the new text and no other."


class Agents(Server):
    """A server whose clients are sessions."""

    def ask(self, prompts: Sequence[Session], at_once: int, tokens: int) -> list[load.Said]:
        """Ask for all turns of each session, one after the other; raise Refused."""
        with ThreadPoolExecutor(at_once) as threads:
            each = threads.map(lambda turns: [self._chat(one, tokens) for one in turns], prompts)
            return [one for said in each for one in said]


def parser() -> Options:
    made = Options("agents", __doc__, data="optional")
    made.add_argument("--models", nargs="+", default=["smollm2"])
    made.add_size("--at-once", [20], [2], "numbers of sessions", nargs="+")
    made.add_size("--turns", 10, 2, "turns of a session")
    made.add_size("--tokens", 48, 8, "most tokens of an answer")
    made.add_size("--rounds", 1, 1, "rounds of plain and auto")
    made.add_size("--peer-rounds", 1, 1, "rounds of the others")
    made.set_defaults(requests=1, warm=2)
    return with_peers(made)


def changes(data: Path | None, tokenizer: Any) -> Iterator[list[str]]:
    """Yield each change: message of a tool with the whole file, one with a part, the new part."""
    file, what = (text[:1000] for text in builtin.demo())
    rows: Any = [{"path": "shop.py", "message": what, "before": file,
                  "after": file.replace("return ", "return +")}]  # fmt: skip
    for row in rows if data is None else held_out(data, tokenizer, 2 * load.LONGEST):
        old, new = (row[name].splitlines(keepends=True) for name in ("before", "after"))
        for hunk in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(4):
            part = "".join(old[hunk[0][1] : hunk[-1][2]])
            tool = [f"{row['path']}:\n{text}\n{row['message']}" for text in (row["before"], part)]
            yield [*tool, "".join(new[hunk[0][3] : hunk[-1][4]])]


def session(asked: Sequence[list[str]]) -> Session:
    """Return the growing prompts of a session that makes some changes."""
    chats, chat = Session(), [{"role": "system", "content": SYSTEM}]
    for number, (whole, part, answer) in enumerate(asked):
        chat = [*chat, {"role": "user", "content": part if number else whole}]
        chats.append(chat)
        chat = [*chat, {"role": "assistant", "content": answer}]
    return chats


def marked(mark: str, turns: Session) -> Session:
    """Return a session that shares no more than the system's message with others."""
    return [[chat[0], *numbered(mark, chat[1:])] for chat in turns]


def measure(args: argparse.Namespace) -> Blocks:
    broken, args.prefixes = False, max(args.at_once)
    for model in args.models:
        title = f"{last_part(model)}, float32, {args.turns} turns"
        asked = cycle(changes(args.data, tokenizer := read_tokenizer(folder_of(model), {})))
        made = [session([*islice(asked, args.turns)]) for _ in range(args.prefixes)]
        args.longest = max(len(render_chat(tokenizer, one[-1])) for one in made) + load.MANY
        block, slower = compare(args, model, title, made, marked, Agents)
        broken |= slower
        yield block
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
