"""Delay of running requests by a long prompt: steps of seven rows during its prefill.

    python -m benchmarks.newcomer           # three minutes on two quiet cores

Seven requests decode plainly while requests with a prompt of 2,000 tokens arrive one after another.
The figure of each newcomer is the 95th percentile of the steps during its prefill, over the median
of the steps before. The exit code is 1 if the upper end of the interval is above 2.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.shared import Blocks, Options, Promise, promised, random_ids, run
from draftsmith import Engine
from draftsmith.engine.scheduler import Scheduler
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel

USUAL = 30
"""Steps of the rows before each newcomer."""


def parser() -> Options:
    made = Options("newcomer", __doc__)
    made.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    made.add_size("--context", 256, 32, "cached tokens of a row")
    made.add_size("--prompt", 2000, 100, "tokens of the newcomer's prompt")
    made.add_size("--runs", 8, 2, "newcomers")
    return made


def newcomers(model: LoadedModel, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return seconds of slow and of usual steps, one of each per newcomer."""
    engine = Engine(model, drafter="none", prefixes=0)
    scheduler = Scheduler(engine.resources)

    def seconds() -> float:
        begin = perf_counter()
        scheduler.step()
        return perf_counter() - begin

    def added(length: int, limit: int, seed: int) -> Any:
        given = {"max_new_tokens": limit, "min_new_tokens": limit, "temperature": 0}
        sequence = engine.prepare(given).sequence(random_ids(length, seed))
        scheduler.add(sequence)
        return sequence

    limit = (1 + args.runs) * (USUAL + args.prompt // 8)
    rows = [added(args.context, limit, seed) for seed in range(7)]
    while not all(row.generated for row in rows):
        scheduler.step()
    slow, usual = [], []
    for number in range(args.runs):
        usual.append(median(seconds() for _ in range(USUAL)))
        late, found = added(args.prompt, 2, 100 + number), []
        while not late.generated:
            found.append(seconds())
        slow.append(float(np.percentile(found, 95)))
        scheduler.abort(late)
    if any(row.finished for row in rows):
        raise SystemExit("an answer ended before the last newcomer's prompt was read")
    scheduler.close()
    return slow, usual


def measure(args: argparse.Namespace) -> Blocks:
    def promises() -> Iterator[Promise]:
        for name, dtype in product(args.models, args.dtypes):
            model = load(name, dtype=dtype, prepack=True)
            yield f"{name}, {dtype}: slow / usual", 2.5, partial(newcomers, model, args)

    ratios, broken = promised(promises())
    yield ratios
    return broken


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
