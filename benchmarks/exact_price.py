"""Cost of exact passes compared with usual ones.

    python -m benchmarks.exact_price                  # SmolLM2 after 500 tokens, two minutes
    python -m benchmarks.exact_price --context 4000

Both arms run complete passes with their commits, of one model with the same laid-out layers.
Seconds are compared pair by pair.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks.batch_cost import steps
from benchmarks.shared import Blocks, Options, promised, run, timed
from draftsmith import Engine
from draftsmith.model.load import load

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def parser() -> Options:
    made = Options("exact_price", __doc__)
    made.add_argument("-m", "--model", default="smollm2")
    made.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    made.add_size("--context", 500, 32, "cached tokens")
    made.add_size("--runs", 32, 4, "pairs of passes")
    return made


def measure(args: argparse.Namespace) -> Blocks:
    for dtype in args.dtypes:
        usual = load(args.model, dtype=dtype, prepack=True)
        models = Engine(usual, exact=True).model, usual

        def pair(width: int, models: Any = models) -> Any:
            arms = [steps(model, [args.context], width - 1) for model in models]
            return timed(arms, args.runs, warmup=2)

        prices = ((f"width {width}, exact / usual", None, partial(pair, width)) for width in WIDTHS)
        ratios, _ = promised(prices)
        yield f"## {args.model}, {dtype}, after {args.context} tokens\n\n{ratios}"


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
