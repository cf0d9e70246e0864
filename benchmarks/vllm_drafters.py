"""Our drafters and vLLM's own `ngram` and `suffix`, in the Python that has vLLM installed.

    python -m benchmarks.vllm_drafters {replay,cost} DATA

The real proposers run on recorded answers, as if the target had just written them; no model is run
(`benchmarks/vllm_rows.py`). `replay`: tokens per pass at equal drafted tokens. `auto` is a curve
over the given cost of a drafted token, read where the other proposer drafts as much. `cost`:
processor time of drafting after 8,192 tokens. Without vLLM only ours run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from statistics import median

import numpy as np

from benchmarks.shared import Blocks, Options, recorded, run, table
from benchmarks.vllm_rows import OURS, Batch, Count, decode, proposers, replayed
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.suites import parts, sample

COSTS = (0.0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 0.8, 1.5)
"""Given costs of a drafted token, in plain passes: at higher costs ours draft less."""
SUITES = ("mt_bench", "mt_redundant", "spec_bench", "humaneval", "gsm8k_json", "commit_edits")
WEIGHING = ("auto", "auto, earlier answers")


def parser() -> Options:
    made = Options("vllm_drafters", __doc__)
    made.add_argument("way", choices=("replay", "cost"))
    made.add_data("needed")
    made.add_argument("--width", type=int, default=8, help="most drafted tokens")
    made.add_size("--limit", 20, 1, "conversations of each suite and task, for replay")
    made.add_size("--rows", 32, 2, "requests, for cost")
    made.add_size("--context", 8192, 256, "tokens of context, for cost")
    return made


def replay(args: argparse.Namespace, encoding: Encoding) -> Iterator[list[str]]:
    """Yield a line for each suite and proposer: it, and `auto` at as many drafted tokens."""
    known = args.results.recall
    for suite in SUITES:
        records = sample([r for r in recorded(args.data, suite) if r.answered], args.limit)
        named, how = parts(records), {"width": args.width, "limit": args.limit}
        for part in sorted(set(named)):
            chosen = (one for one, name in zip(records, named, strict=True) if name == part)
            answers, curves = [*map(encoding, chosen)], []
            for name in WEIGHING:
                points = {(0.0, 1.0)}
                for price in COSTS:
                    make = partial(OURS[name], cost={"0": 1.0, "64": 1 + 64 * price})
                    once = partial(replayed, make, answers, args.width)
                    points.add(tuple(known([name, part, price, how], once)))
                curves.append([*zip(*sorted(points), strict=True)])
            for name, make in args.proposers.items():
                if name in WEIGHING:
                    continue
                once = partial(replayed, make, answers, args.width)
                drafted, tokens = known([name, part, how], once)
                beside = (f"{np.interp(drafted, *curve):.2f}" for curve in curves)
                yield [part, name, f"{drafted:.2f}", f"{tokens:.2f}", *beside]


def cost(args: argparse.Namespace, encoding: Encoding) -> Iterator[list[str]]:
    """Yield a line for each proposer: the cost of drafting, on real text."""
    encoded = map(encoding, recorded(args.data, "commit_edits"))
    stream = chain.from_iterable((*one.prompt, *one.answer) for one in encoded)
    texts = [[*islice(stream, args.context + 200)] for _ in range(args.rows)]
    vocab = max(map(max, texts)) + 1
    for name, make in args.proposers.items():
        proposer = make(args.width, vocab)
        begun, rest = zip(*((t[: args.context], t[args.context :]) for t in texts), strict=True)
        for turn in ("cold", "warm"):  # compilation happens in the first turn
            found = Count()
            first = decode(proposer, Batch.of(begun, 201, turn), rest, found)
        times = sorted(1e6 * spent for spent in found.times)
        figures = median(times), times[len(times) * 9 // 10], 1e6 * found.seconds / found.tokens
        yield [name, *(f"{figure:.0f}" for figure in figures), f"{1e3 * first / args.rows:.2f}",
               f"{found.per_pass[1]:.2f}"]  # fmt: skip


HEADS = {
    "replay": ("suite", "proposer", "drafted", "tokens a pass", *(f"{w} there" for w in WEIGHING)),
    "cost": ("drafter", "µs a request and step", "nine in ten below", "µs a token",
             "first draft, ms", "tokens a pass"),
}  # fmt: skip


def measure(args: argparse.Namespace) -> Blocks:
    args.name += f".{args.way}"
    args.proposers, lines = proposers(), {"replay": replay, "cost": cost}[args.way]
    yield table(HEADS[args.way], lines(args, Encoding((args.data / "tokenizers",))))


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
