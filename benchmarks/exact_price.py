"""Cost of exact passes compared with usual ones.

    python -m benchmarks.exact_price                  # SmolLM2 after 500 tokens, two minutes
    python -m benchmarks.exact_price --context 4000

Both arms run complete passes with their commits, of one model with the same laid-out layers.
Seconds are compared pair by pair.
"""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.batch_cost import steps
from benchmarks.shared import Blocks, Options, run, shown, table, timed
from draftsmith import Engine
from draftsmith.model.load import load

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
HEADS = ("tokens", "exact / usual", "ms")


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
        exact, rows = Engine(usual, exact=True).model, []
        for width in WIDTHS:
            key = {"dtype": dtype, "context": args.context, "runs": args.runs}
            arms = [steps(model, [args.context], width - 1) for model in (exact, usual)]
            a, b = args.results.recall(
                f"{width}", args.model, lambda arms=arms: timed(arms, args.runs, warmup=2), **key
            )
            both = f"{1e3 * median(a):.1f} / {1e3 * median(b):.1f}"
            rows.append((f"{width}", shown(a, b), both))
        yield f"## {args.model}, {dtype}, after {args.context} tokens\n\n{table(HEADS, rows)}"


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
