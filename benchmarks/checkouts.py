"""This checkout beside another one: seconds of the same calls, in turns.

    git worktree add WORK/before COMMIT
    python -m benchmarks.checkouts DATA --other WORK/before/src     # fifteen minutes

Each checkout is a process with an engine of its own. Both answer the same prompts greedily, by
turns. Ratios are seconds of this checkout over those of the other, pair by pair; the exit code is 1
if an interval lies above 1 / 0.95. "Alike" counts answers with the same tokens.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import shared
from benchmarks.shared import Blocks, Options, ratio, run, table
from benchmarks.workers import Checkout
from draftsmith.model.load import folder_of, read_tokenizer
from draftsmith.text.tokenizer import render_chat

MOST = 1 / 0.95
"""Largest ratio that is promised."""
HEADS = ("drafter", "rows", "calls", "seconds, this over the other", "alike")


def parser() -> Options:
    made = Options("checkouts", __doc__, data="needed")
    made.add_argument("--other", type=Path, required=True, help="the src folder of the other one")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    made.add_argument("--drafters", nargs="+", default=["none", "auto"])
    made.add_size("--rows", [1, 8], [2], "prompts of a call", nargs="+")
    made.add_size("--limit", 2, 1, "conversations of each kind")
    made.add_size("--tokens", 96, 4, "most tokens of an answer")
    return made


def measure(args: argparse.Namespace) -> Blocks:
    tokenizer, slower = read_tokenizer(folder_of(args.model), {}), False
    texts = [r for r in shared.live(args.data, args.limit) if all(m["content"] for m in r.messages)]
    prompts = [render_chat(tokenizer, record.messages) for record in texts]
    for dtype in args.dtypes:
        sources, lines = (Path(__file__).parents[1] / "src", args.other), list[list[Any]]()
        pair = [Checkout(source, args.model, dtype, args.threads) for source in sources]

        def both(*call: Any, first: int = 0, pair: Any = pair) -> list[Any]:
            found = {n: pair[n].ask(*call) for n in (first, 1 - first)}
            return [found[0], found[1]]

        for rows, drafter in product(args.rows, args.drafters):
            calls = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]
            both(calls[0], drafter, 4)  # warm up
            how = {"dtype": dtype, "tokens": args.tokens}
            ours, theirs = zip(*(
                args.results.recall(
                    drafter, call, partial(both, call, drafter, args.tokens, first=n % 2), **how
                )
                for n, call in enumerate(calls)
            ), strict=True)  # fmt: skip
            found = ratio([own[0] for own in ours], [own[0] for own in theirs])
            same = sum(a == b for one, other in zip(ours, theirs, strict=True)
                       for a, b in zip(one[1], other[1], strict=True))  # fmt: skip
            counts = [str(rows), str(len(calls))]
            lines.append([drafter, *counts, found.shown("", 3), f"{same}/{len(prompts)}"])
            slower |= found.low > MOST
        for checkout in pair:
            checkout.close()
        yield f"{args.model}, {dtype}\n\n{table(HEADS, lines)}"
    return slower


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
