"""Train the arms of the paper's comparisons: `python experiments.py --texts T --runs R`.

All arms see the same text in the same steps. An arm that is done is left alone, one that was
stopped goes on, so the command can be repeated.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from draftsmith import builtin
from draftsmith.train.curves import Row
from draftsmith.train.recipe import Recipe
from draftsmith.train.sdsat import Options, train
from draftsmith.train.texts import Texts

ARMS: dict[str, dict[str, object]] = {
    "plain": {"objective": "plain"},
    "improved-5": {},
    "basic-5": {"objective": "basic"},
    "plain-again": {"objective": "plain", "seed": 1},  # how much another order of the text changes
    "improved-3": {"L": 3},
    "improved-7": {"L": 7},
    "diverse-5": {"diverse": True},
    "windows-5": {"share_of": "windows"},
}
"""What differs from the recipe; the number is L."""


def texts(folder: Path) -> Texts:
    """What texts.py wrote."""
    return Texts(
        paths=[folder / "code.jsonl"],
        prose=[folder / "edits.jsonl"],
        held_out=[folder / "held_out_code.jsonl", folder / "held_out_edits.jsonl"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--model", default=str(builtin.path()))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--token-rate", type=float, default=100.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(
        share_of="replaced",  # as the arm that ships was trained; the paper's is windows-5
        steps=args.steps, rows=args.rows, rows_per_pass=min(4, args.rows), length=args.length,
        learning_rate=args.learning_rate, final_learning_rate=args.learning_rate / 5,
        token_rate=args.token_rate,
    )  # fmt: skip
    options = Options(cpu=True, save_every=20, measure_every=max(1, args.steps // 5))
    for arm in args.arms.split(","):
        if (args.runs / arm / "config.json").exists():
            continue
        since = time.monotonic()

        def follow(row: Row, arm: str = arm) -> None:
            if row.held_out is not None:
                print(f"{arm} {row.step}: held-out {row.held_out:.4f}", flush=True)

        chosen = replace(recipe, **ARMS[arm])  # type: ignore[arg-type]
        train(args.model, chosen, texts(args.texts), args.runs / arm, options, follow=follow)
        print(f"{arm}: {time.monotonic() - since:.0f} s", flush=True)


if __name__ == "__main__":
    main()
