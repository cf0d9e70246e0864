"""Cost of a pass shared by several rows, compared with one pass per row.

    python -m benchmarks.batch_cost           # everything, about five minutes on two quiet cores
    python -m benchmarks.batch_cost --models edit-7m --dtypes float32 --runs 10

Both arms run complete passes with their commits, after the same number of cached tokens, with the
same kernels. *Packed*: all rows in one pass over our store. *Alone*: the model's own cache and a
pass per row, as for models that cannot share passes. Seconds are compared pair by pair. The exit
code is 1 if the upper end of an interval breaks a promise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.shared import Blocks, Options, Promise, promised, random_ids, run, timed
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

WIDE = 32
"""Tokens that one row drafts."""


def parser() -> Options:
    made = Options("batch_cost", __doc__)
    made.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    made.add_size("--context", 256, 32, "cached tokens of a row")
    made.add_size("--runs", 48, 4, "pairs of passes")
    return made


def steps(model: LoadedModel, contexts: Sequence[int], drafted: int = 0) -> Callable[[], None]:
    """Return a step of rows with these numbers of cached tokens; the middle one drafts in vain."""
    runner = Runner(model)
    rows = [runner.open(random_ids(context + 1, seed)) for seed, context in enumerate(contexts)]
    for row in rows:
        runner.prefill(row)
    drafts = [EMPTY] * len(rows)
    drafts[len(rows) // 2] = Draft.chain([11 + i for i in range(drafted)], "bench")

    def step() -> None:
        runner.forward(rows, drafts)
        runner.commit(rows, [()] * len(rows), [[12]] * len(rows))

    return step


def promises(packed: LoadedModel, args: argparse.Namespace) -> Iterator[Promise]:
    """Yield the comparisons. The models are `packed` and the same model with its own cache."""
    alone = replace(packed, capabilities=replace(packed.capabilities, shape="chain", cache="own"))
    context, ragged = args.context, [args.context * n // 4 for n in range(1, 9)]

    def pair(a: LoadedModel, b: LoadedModel, contexts: list[int], drafted: int = 0) -> Any:
        arms = partial(steps, a, contexts, drafted), partial(steps, b, contexts)
        return lambda: timed([arm() for arm in arms], args.runs, warmup=2)

    for what, most, contexts in (
        ("1 plain row", 1.02, [context]),
        ("8 plain rows", 1.1, [context] * 8),
        ("32 plain rows", 1.1, [context] * 32),
        (f"8 plain rows of {ragged[0]} to {ragged[-1]} tokens", None, ragged),
    ):
        yield f"{what}, packed / alone", most, pair(packed, alone, contexts)
    what, most = f"8 rows of which one drafts {WIDE} / 8 plain rows", 2.5
    if packed.dtype != torch.float32:
        most = None
    yield what, most, pair(packed, packed, [context] * 8, WIDE)


def measure(args: argparse.Namespace) -> Blocks:
    broken = False
    for name, dtype in product(args.models, args.dtypes):
        ratios, bad = promised(promises(load(name, dtype=dtype, prepack=True), args))
        broken |= bad
        yield f"## {name}, {dtype}, {args.context} cached tokens a row\n\n{ratios}"
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
