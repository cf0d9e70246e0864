"""This checkout beside another one: seconds of the same calls, in turns.

    git worktree add WORK/before COMMIT
    python -m benchmarks.checkouts DATA --other WORK/before/src     # fifteen minutes

Each checkout is a process with an engine of its own. Both answer the same prompts greedily, in
turns. Two processes of the same code may differ by 5 % as long as they live, so both are started
again and again. Ratios are seconds of this checkout over those of the other, start by start; the
exit code is 1 if an interval lies above 1 / 0.95. "Alike" counts answers with the same tokens.
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
HEADS = ("drafter", "rows", "starts", "seconds, this over the other", "alike")


def parser() -> Options:
    made = Options("checkouts", __doc__, data="needed")
    made.add_argument("--other", type=Path, required=True, help="the src folder of the other one")
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    made.add_argument("--drafters", nargs="+", default=["none", "auto"])
    made.add_size("--rows", [1, 8], [2], "prompts of a call", nargs="+")
    made.add_size("--starts", 8, 2, "starts of both")
    made.add_size("--limit", 1, 1, "conversations of each kind")
    made.add_size("--tokens", 64, 4, "most tokens of an answer")
    return made


def measure(args: argparse.Namespace) -> Blocks:
    tokenizer, slower = read_tokenizer(folder_of(args.model), {}), False
    texts = [r for r in shared.live(args.data, args.limit) if all(m["content"] for m in r.messages)]
    prompts = [render_chat(tokenizer, record.messages) for record in texts]
    arms = [*product(args.rows, args.drafters)]
    for dtype in args.dtypes:
        starts = [started(args, dtype, prompts, arms, n) for n in range(args.starts)]
        lines = []
        for arm, own in zip(arms, zip(*starts, strict=True), strict=True):
            ours, theirs, same, count = zip(*own, strict=True)
            found = ratio(ours, theirs)
            alike = f"{sum(same)}/{sum(count)}"
            lines.append([arm[1], str(arm[0]), str(len(starts)), found.shown("", 3), alike])
            slower |= shared.ends(found)[0] > MOST
        yield f"{args.model}, {dtype}\n\n{table(HEADS, lines)}"
    return slower


def started(
    args: argparse.Namespace, dtype: str, prompts: list[Any], arms: list[Any], start: int
) -> list[tuple[float, float, int, int]]:
    """Return for each arm the seconds of both checkouts, and how many answers are alike."""
    sources, pair = (Path(__file__).parents[1] / "src", args.other), dict[int, Checkout]()
    how = {"model": args.model, "dtype": dtype, "tokens": args.tokens, "start": start,
           "code": [shared.contents(source) for source in sources]}  # fmt: skip
    warm = set[tuple[int, str]]()

    def both(*call: Any, first: int) -> list[Any]:
        for n in (order := (first, 1 - first)):
            if n not in pair:
                pair[n] = Checkout(sources[n], args.model, dtype, args.threads)
            if (n, call[1]) not in warm:
                warm.add((n, call[1]))
                pair[n].ask(call[0], call[1], 4)
        found = {n: pair[n].ask(*call) for n in order}
        return [found[0], found[1]]

    rows = []
    for size, drafter in arms:
        calls = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        found = [
            args.results.recall(
                [drafter, call, how],
                partial(both, call, drafter, args.tokens, first=(n + start) % 2),
            )
            for n, call in enumerate(calls)
        ]  # fmt: skip
        alike = [a == b for ours, theirs in found for a, b in zip(ours[1], theirs[1], strict=True)]
        seconds = (sum(one[n][0] for one in found) for n in (0, 1))
        rows.append((*seconds, sum(alike), len(alike)))
    for checkout in pair.values():
        checkout.close()
    return rows


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
