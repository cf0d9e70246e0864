"""What slrs(psi="path") costs and how much of it is accepted, beside SLEM and TLI.

    python -m benchmarks.slrs_cost ../shared/data                # the table, sampled answers
    python -m benchmarks.slrs_cost ../shared/data --tokens 3 --temperature 0.6

The built-in model answers the first live prompts (see live_prompts.py), its byte-level companion
drafts by every algorithm, at the same seeds. Counts do not depend on the machine; times are
ratios within the run, from alternating answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.live_prompts import prompts
from draftsmith import builtin
from draftsmith.core import verify
from draftsmith.core.draft import LazyDistribution
from draftsmith.core.sampling import Sampler
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.drafters.draft_model.psi import DRAWS
from draftsmith.engine.engine import Engine

ALGORITHMS = ("slrs", "slem", "tli")


@dataclass
class Count:
    """What one algorithm spent and brought over all its answers."""

    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    passes: int = 0
    """Of the target."""
    drafting: int = 0
    """Passes of the drafter while it drafts."""
    asked: int = 0
    """Passes of the drafter while the target verifies."""
    residuals: int = 0
    """Draws from norm((p−ψ)₊)."""
    values: list[int] = field(default_factory=list)
    """Of each of them: how many values of ψ it asked for."""
    whole: int = 0
    """Residual draws that asked for ψ wherever p is not zero."""
    proposals: int = 0
    """Proposals that were verified."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    target_seconds: float = 0.0


class Watched:
    """A lazy distribution that counts what it is asked for."""

    def __init__(self, distribution: LazyDistribution) -> None:
        self.distribution, self.draws = distribution, distribution.draws
        self.asked: list[int] = []

    def of(self, tokens: Sequence[int]) -> Tensor:
        self.asked.append(len(tokens))
        return self.distribution.of(tokens)


@contextmanager
def counting(count: Count, drafter: BoundDraftModel) -> Iterator[None]:
    """Count what happens inside; the drafter's passes by whether they serve drafting or ψ."""
    forward = drafter.runner.forward
    residual, choose = verify.draw_residual, verify.choose
    verifying = False

    def counted_forward(*args: Any) -> Any:
        if verifying:
            count.asked += 1
        else:
            count.drafting += 1
        return forward(*args)

    def counted_residual(p: Tensor, q: LazyDistribution, sampler: Sampler) -> int:
        watched = Watched(q)
        token = residual(p, watched, sampler)
        count.residuals += 1
        count.values.append(sum(watched.asked))
        count.whole += len(watched.asked) > watched.draws
        return token

    def counted_choose(
        scores: Any, distribution: Any, sampler: Any, draft: Any, proposal: Any
    ) -> int:
        nonlocal verifying
        count.proposals += proposal is not None
        verifying = True
        try:
            return choose(scores, distribution, sampler, draft, proposal)
        finally:
            verifying = False

    with (
        patch.object(drafter.runner, "forward", counted_forward),
        patch.object(verify, "draw_residual", counted_residual),
        patch.object(verify, "choose", counted_choose),
    ):
        yield


def measure(args: argparse.Namespace) -> dict[str, Count]:
    counts = {name: Count() for name in ALGORITHMS}
    engine = Engine.from_pretrained(
        builtin.path(), drafter="none", budget="drafter", dtype=args.dtype
    )
    drafters = {
        name: engine.drafting(
            DraftModel("edit-bytes", args.tokens, args.confidence, algorithm=name)  # type: ignore[arg-type]
        ).drafter
        for name in ALGORITHMS
    }
    for seed, prompt in enumerate(prompts(args.data, 2048, args.prompts)):
        for name, drafter in drafters.items():
            count = counts[name]
            began = perf_counter()
            with counting(count, drafter):  # type: ignore[arg-type]
                result = engine.generate(
                    prompt["messages"],
                    drafter=drafter,
                    max_new_tokens=args.length,
                    temperature=args.temperature,
                    seed=seed,
                )
            stats = result.stats
            count.tokens += stats.tokens
            count.passes += stats.passes
            count.drafted += stats.drafted
            count.accepted += stats.accepted
            count.draft_seconds += stats.seconds.draft
            count.verify_seconds += stats.seconds.verify
            count.target_seconds += stats.seconds.target
            print(f"{seed} {name}: {perf_counter() - began:.1f} s", flush=True)
    return counts


def report(counts: dict[str, Count]) -> None:
    print(
        f"\n{'':5} {'proposed':>9} {'accepted':>9} {'tokens/':>8} {'drafter passes per':>28}"
        f" {'drafting s per proposed /'}"
    )
    print(f"{'':33} {'pass':<8} {'proposed':>9} {'accepted':>9} {'':7} target s per pass")
    for name, c in counts.items():
        spent = c.drafting + c.asked
        cost = c.draft_seconds / c.drafted / (c.target_seconds / c.passes)
        print(
            f"{name:5} {c.drafted:9} {c.accepted / c.drafted:9.3f} {c.tokens / c.passes:8.2f}"
            f" {spent / c.drafted:14.2f} {spent / c.accepted:9.2f} {cost:18.3f}"
        )
    c = counts["slrs"]
    single = [n for n in c.values if n <= DRAWS]
    if not c.residuals:
        return
    print(
        f"\nslrs: {c.proposals} proposals verified, {c.residuals} residual draws"
        f"\n  values of ψ per residual draw, where the bound was not reached:"
        f" {sum(single) / max(1, len(single)):.2f}; it was reached by {c.whole}"
        f"\n  drafter passes for ψ: {c.asked / c.residuals:.2f} per residual draw,"
        f" {c.asked / c.proposals:.2f} per verified proposal"
        f"\n  verifying takes {c.verify_seconds / c.draft_seconds:.2f} of the drafting time"
        f" (SLEM {counts['slem'].verify_seconds / counts['slem'].draft_seconds:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--confidence", type=float, default=0.4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report(measure(args))


if __name__ == "__main__":
    main()
