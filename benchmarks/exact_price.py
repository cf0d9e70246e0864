"""What exact passes cost beside usual ones: paired runs, medians, intervals.

    python -m benchmarks.exact_price                  # SmolLM2 after 500 tokens, two minutes
    python -m benchmarks.exact_price --context 4000

Both arms are whole passes with their commits, of the same model with the same laid-out layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.batch_cost import steps
from benchmarks.paired import in_turn, ratio
from benchmarks.shared import setup, table
from draftsmith import builtin
from draftsmith.model.exact.find import exactly
from draftsmith.model.load import load

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", default=builtin.SMOLLM2)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--runs", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    print(f"{setup()}. {args.model} after {args.context} tokens, {args.runs} paired runs.\n")
    heads = ("tokens", "exact over usual", "95 % interval", "exact / usual, ms")
    for dtype in args.dtypes:
        usual = load(args.model, dtype=dtype, prepack=True)
        exact = exactly(usual)
        assert exact.exact is not None
        print(f"## {dtype}: {exact.exact.explain()}\n")
        lines = []
        for width in WIDTHS:
            arms = [steps(model, [args.context], width - 1) for model in (exact, usual)]
            found = ratio(*in_turn(arms, args.runs, warmup=2))
            both = f"{1e3 * found.a_seconds:.1f} / {1e3 * found.b_seconds:.1f}"
            interval = f"[{found.low:.3f}, {found.high:.3f}]"
            lines.append((str(width), f"{found.median:.3f}", interval, both))
        print(table(heads, lines), "\n")


if __name__ == "__main__":
    main()
