"""What a pass over several rows costs, packed against padded: paired runs, medians, intervals.

    python -m benchmarks.batch_cost           # everything, about ten minutes on two quiet cores
    python -m benchmarks.batch_cost --models edit-7m --dtypes float32 --runs 10

Each arm is a whole pass with its commit, after equally many cached tokens, with the same kernels.
Prints one line per promise; the exit code is 1 if the upper end of an interval breaks one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.paired import in_turn, ratio
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

WIDE = 32
"""Tokens that the one row drafts."""

Arm = Callable[[], None]


def steps(model: LoadedModel, contexts: Sequence[int], drafted: int = 0) -> Arm:
    """A step of rows with so many cached tokens each; the middle one may draft, in vain."""
    runner, generator = Runner(model), torch.Generator().manual_seed(0)
    rows = [
        runner.open(torch.randint(10, 200, (context + 1,), generator=generator).tolist())
        for context in contexts
    ]
    for row in rows:
        runner.prefill(row)
    drafts = [EMPTY] * len(rows)
    if drafted:
        drafts[len(rows) // 2] = Draft.chain([11 + i for i in range(drafted)], "bench")

    def step() -> None:
        runner.forward(rows, drafts)
        runner.commit(rows, [()] * len(rows), [[12]] * len(rows))

    return step


def comparisons(
    packed: LoadedModel, padded: LoadedModel, context: int
) -> Iterator[tuple[str, float | None, Arm, Arm]]:
    """What is compared, the most that the ratio may be, and both arms."""
    for rows, most in ((1, 1.02), (8, 1.1), (32, 1.1)):
        equal = [context] * rows
        what = f"{rows} plain rows of equal length, packed / padded"
        yield what, most, steps(packed, equal), steps(padded, equal)
    ragged = [context * n // 4 for n in range(1, 9)]
    what = f"8 plain rows of {ragged[0]} to {ragged[-1]} tokens, packed / padded"
    yield what, None, steps(packed, ragged), steps(padded, ragged)
    equal = [context] * 8
    for way, model in (("packed", packed), ("padded", padded)):
        what = f"one of 8 drafts {WIDE}, {way} / 8 plain rows, padded"
        most = 2.5 if model is packed and packed.dtype == torch.float32 else None
        yield what, most, steps(model, equal, WIDE), steps(padded, equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--prepack", action="store_true", help="lay linear layers out, as engines do"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.runs} paired runs")
    broken = False
    for name in args.models:
        for dtype in args.dtypes:
            model = load(name, dtype=dtype, prepack=args.prepack)
            if not model.capabilities.packed:
                sys.exit(f"{name} in {dtype} does not pack: {model.capabilities.reasons}")
            padded = replace(model, capabilities=replace(model.capabilities, packed=False))
            print(f"{name}, {dtype}, {args.context} cached tokens a row")
            for what, most, a, b in comparisons(model, padded, args.context):
                found = ratio(*in_turn([a, b], args.runs, warmup=2))
                fits = most is None or found.high <= most
                broken |= not fits
                promise = "reported" if most is None else f"at most {most:g}"
                times = f"{1e3 * found.a_seconds:.1f} / {1e3 * found.b_seconds:.1f} ms"
                verdict = "ok " if fits else "BAD"
                print(f"{verdict} {what:52} {found}  {times}  ({promise})", flush=True)
    sys.exit(broken)


if __name__ == "__main__":
    main()
