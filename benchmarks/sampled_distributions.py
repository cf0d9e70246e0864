"""Sampled answers against the target's exact distribution.

    python -m benchmarks.sampled_distributions     # five minutes on two cores

Compares the first two tokens of answers of tiny models with tokenizers of their own
(`benchmarks/toys.py`) with the distribution computed from the target alone. Answers continue for
two more tokens, so drafts overshoot the first two. The table has the χ² probability and the total
variation.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import toys
from benchmarks.shared import Blocks, Options, run, table
from benchmarks.toys import model, tokenizer
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.drafters.draft_model.draft_model import DraftModel

HEADS = ("", "p by χ²", "total variation", "draws")


def parser() -> Options:
    made = Options("sampled_distributions", __doc__)
    made.add_size("--draws", 20_000, 1_000, "answers of each")
    return made


def drafters() -> dict[str, Drafter]:
    """Return every algorithm of draft models, with its confidence rule on."""

    def draft(name: str, algorithm: Any, **options: Any) -> DraftModel:
        own = {"tokens": 3, "confidence": 0.3} | options
        return DraftModel(model(name, 2), tokenizer=tokenizer(name), algorithm=algorithm, **own)

    return {
        "standard": draft("target", "standard"),
        "union": draft("drafter", "union"),
        "tli": draft("drafter", "tli"),
        "slem": draft("drafter", "slem"),
        "slrs, path": draft("letters", "slrs"),
        "slrs, enumerate": draft("letters", "slrs", psi="enumerate"),
        "tli, reproducible": draft("drafter", "tli", reproducible=True),
        "copyspec+tli": Cascade((CopySpec(gamma=1), draft("drafter", "tli"))),
    }


def measure(args: argparse.Namespace) -> Blocks:
    exact, rows = toys.exact_distribution(model("target", 1), toys.prompt()), []
    for name, drafter in drafters().items():
        try:
            found = toys.drawn(drafter, args.draws)
        except Exception as error:  # a crash is a finding, too
            rows.append([name, f"{type(error).__name__}: {str(error).splitlines()[0]}", "", ""])
            continue
        p, far = toys.chi_square(found, exact), toys.distance(found, exact)
        rows.append([name, f"{p:.2g}", f"{far:.3f}", f"{found.total():,}"])
    yield table(HEADS, rows)


if __name__ == "__main__":
    raise SystemExit(run(parser(), measure))
