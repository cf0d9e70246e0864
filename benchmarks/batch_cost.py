"""What a pass over several rows costs, packed against padded: paired runs, medians, intervals.

    python -m benchmarks.batch_cost                      # everything, about ten minutes
    python -m benchmarks.batch_cost --models edit-7m --dtypes float32 --runs 10

Each arm is a whole pass with its commit, from the same cached positions on, with the same kernels.
Prints one line per promise; the exit code is 1 if the upper end of an interval breaks one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.paired import in_turn, ratio
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

WIDE = 32
"""Tokens that the one row drafts."""


def steps(model: LoadedModel, rows: int, context: int, drafted: int = 0) -> Callable[[], None]:
    """A step of so many rows with `context` cached tokens each; one of them drafts, in vain."""
    runner, generator = Runner(model), torch.Generator().manual_seed(0)
    texts = torch.randint(10, 200, (rows, context + 1), generator=generator).tolist()
    opened = [runner.open(text) for text in texts]
    for row in opened:
        runner.prefill(row)
    draft = Draft.chain([11 + i for i in range(drafted)], "bench") if drafted else EMPTY
    drafts = [EMPTY] * (rows // 2) + [draft] + [EMPTY] * (rows - rows // 2 - 1)

    def step() -> None:
        runner.forward(opened, drafts)
        runner.commit(opened, [()] * rows, [[12]] * rows)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["edit-7m", "smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} threads, {args.runs} paired runs, "
        f"{args.context} tokens cached a row"
    )
    broken = False
    for name in args.models:
        for dtype in args.dtypes:
            model = load(name, dtype=dtype)
            padded = replace(model, capabilities=replace(model.capabilities, packed=False))
            if not model.capabilities.packed:
                sys.exit(f"{name} in {dtype} does not pack: {model.capabilities.reasons}")

            def report(
                what: str, arms: Sequence[Callable[[], None]], most: float | None, where: str
            ) -> bool:
                found = ratio(*in_turn(arms, args.runs, warmup=2))
                fits = most is None or found.high <= most
                promise = "reported" if most is None else f"at most {most:g}"
                times = f"{1e3 * found.a_seconds:.2f} / {1e3 * found.b_seconds:.2f} ms"
                print(
                    f"{'ok ' if fits else 'BAD'} {where:18} {what:44} {found}  {times}  "
                    f"({promise})",
                    flush=True,
                )
                return not fits

            where = f"{name} {dtype}"
            for rows, most in ((1, 1.02), (8, 1.1), (32, 1.1)):
                arms = [steps(one, rows, args.context) for one in (model, padded)]
                broken |= report(f"{rows} plain rows, packed / padded", arms, most, where)
            plain = steps(padded, 8, args.context)
            wide = 2.5 if dtype == "float32" else None
            arms = [steps(model, 8, args.context, WIDE), plain]
            broken |= report(f"one of 8 drafts {WIDE}, packed / 8 plain padded", arms, wide, where)
            arms = [steps(padded, 8, args.context, WIDE), plain]
            report(f"one of 8 drafts {WIDE}, padded / 8 plain padded", arms, None, where)
    sys.exit(broken)


if __name__ == "__main__":
    main()
