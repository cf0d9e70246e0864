"""Savings of kept prefixes: the second of two prompts that begin alike, and a chat of ten turns.

    python -m benchmarks.prefix_reuse           # two minutes on two quiet cores

An engine that keeps rows is compared with one that keeps none, in turn, plainly and greedily. The
table has computed prompt tokens and milliseconds to the first token. The exit code is 1 if a turn
computes more of its prompt than the kept row lacks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.shared import Blocks, Options, random_ids, run, shown, table
from draftsmith import Engine
from draftsmith.core.drafter import common_prefix
from draftsmith.lab.bench.run import in_turn
from draftsmith.model.load import load

OWN = 32
"""Tokens of a prompt that no other one has."""
TURNS = (
    "Name three animals that live in the sea.", "Which is the largest?", "What does it eat?",
    "How long does it live?", "Does it sleep?", "Write one sentence about it for a child.",
    "Now with the word 'deep'.", "Give it a title.", "Name a desert animal.", "Which lives longer?",
)  # fmt: skip
Facts = tuple[int, int, int, float]
"""Tokens of a prompt, those not computed before, those computed, ms to the first token."""
HEADS = ("", "prompt", "not computed before", "computed", "keeping none", "first token, ms",
         "keeping none", "first token, keeping / none")  # fmt: skip


def parser() -> Options:
    made = Options("prefix_reuse", __doc__)
    made.add_argument("-m", "--model", default="smollm2")
    made.add_size("--shared", 2000, 100, "tokens that two prompts share")
    made.add_size("--runs", 5, 2, "pairs of prompts")
    made.add_size("--tokens", 32, 8, "most tokens of a chat's answer")
    return made


def facts(result: Any, needed: int) -> Facts:
    prompt, stats = len(result.prompt_tokens), result.stats
    return prompt, needed, prompt - stats.reused_tokens, 1e3 * stats.first_token_seconds


def second(engines: Sequence[Engine], shared: int, run: int) -> list[list[Facts]]:
    """Return the facts of the second of two prompts that share `shared` tokens, by engine."""
    asked = [random_ids(shared, run) + random_ids(OWN, 1000 * run + n) for n in (1, 2)]
    options, found = {"max_new_tokens": 2, "temperature": 0}, {}
    for engine in in_turn(engines, run):
        found[engine] = [engine.generate(ids, **options) for ids in asked][-1]
    return [[facts(found[engine], OWN) for engine in engines]]


def chat(engines: Sequence[Engine], tokens: int) -> list[list[Facts]]:
    """Return the facts of every turn of one conversation, by engine."""
    talks = [engine.chat(max_new_tokens=tokens, temperature=0) for engine in engines]
    computed, found = list[int](), []
    for turn in TURNS:
        results = [talk.send(turn) for talk in talks]
        new = results[0].prompt_tokens
        needed = len(new) - min(common_prefix(computed, new), len(new) - 1)
        computed = [*new, *results[0].tokens[:-1]]  # the last token was never computed
        found.append([facts(result, needed) for result in results])
    return found


def measure(args: argparse.Namespace) -> Blocks:
    model = load(args.model, dtype="float32", prepack=True)

    def engines() -> list[Engine]:
        return [Engine(model, drafter="none", prefixes=most) for most in (8, 0)]

    Engine(model).generate(random_ids(args.shared, 99), max_new_tokens=args.tokens)  # warm up
    pair = f"second of two that share {args.shared:,}"
    pairs = [lambda n=n: second(engines(), args.shared, n) for n in range(args.runs)]
    talks = [lambda: chat(engines(), args.tokens)] * 2
    rows, broken = [], False
    for what, runs in ((pair, pairs), ("turn", talks)):
        found = zip(*(once() for once in runs), strict=True)
        for turn, both in enumerate(found, 1):
            kept, none = ([run[arm] for run in both] for arm in (0, 1))
            prompt, needed, most = kept[0][0], kept[0][1], max(one[2] for one in kept)
            ms = [[one[3] for one in arm] for arm in (kept, none)]
            broken |= most > needed
            counts, times = map(str, (prompt, needed, most, none[0][2])), map(median, ms)
            rows.append([what if what == pair else f"turn {turn}", *counts,
                         *(f"{time:.1f}" for time in times), shown(*ms)])  # fmt: skip
    yield table(HEADS, rows)
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
