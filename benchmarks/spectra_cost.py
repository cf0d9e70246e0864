"""Microseconds a step that SPECTRA spends beside the pass: `observe` and `draft`.

    python -m benchmarks.spectra_cost                    # 30 paired runs, half a minute
    python -m benchmarks.spectra_cost "spectra(W=7)" --vocab 128256 --dtype bfloat16

Synthetic logits: a few tokens are probable everywhere, as in text, so that the most probable
tokens are soon known and the search for an unseen one has to look further. They are written anew
before every step, as a pass would. Each run is paired with one that does everything but call the
drafter, and the difference counts. The exit code is 1 if the upper end of the 95 % interval exceeds
300 µs.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from time import perf_counter

import torch

from benchmarks.shared import context
from draftsmith.bench.summary import bootstrap
from draftsmith.core.draft import EMPTY
from draftsmith.core.drafter import DrafterState, Outcome
from draftsmith.core.target import RowOutput
from draftsmith.core.verify import Verdict
from draftsmith.drafters.registry import parse

LIMIT = 300e-6
"""Seconds a step may cost (median)."""


class Steps:
    """A made-up sequence whose drafts are never accepted; one step at a time."""

    def __init__(self, spec: str, vocab: int, dtype: torch.dtype) -> None:
        drafter = parse(spec)
        generator = torch.Generator().manual_seed(0)
        common = -torch.log(1 + torch.randperm(vocab, generator=generator).float())
        rows = 1 + drafter.preferred_width()
        self.logits = [
            (common + 3 * torch.randn((rows, vocab), generator=generator)).to(dtype)
            for _ in range(4)
        ]
        ids = torch.multinomial(common.exp(), 256, replacement=True, generator=generator)
        self.tokens = torch.multinomial(common.exp(), 10_000, True, generator=generator).tolist()
        self.written = torch.empty_like(self.logits[0])
        self.context = context(ids.tolist(), vocab, drafter.preferred_width(), depth=1000)
        self.state = drafter.open(self.context)
        self.draft = EMPTY
        self.done = 0
        self.nodes: list[int] = []

    def step(self, state: DrafterState | None) -> float:
        """Seconds of one observe and one draft; with no state, of nothing."""
        draft = self.draft if state is not None else EMPTY
        rows = 1 + len(draft)
        logits = self.written[:rows].copy_(self.logits[self.done % len(self.logits)][:rows])
        token = self.tokens[self.done % len(self.tokens)]
        outcome = Outcome(draft, Verdict((), (token,), (None,)), RowOutput(logits))
        begin = perf_counter()
        if state is not None:
            state.observe(self.context, outcome)
            self.draft = state.draft(self.context)
        seconds = perf_counter() - begin
        if state is not None:
            self.context.ids.append(token)  # type: ignore[attr-defined]
            self.nodes.append(self.draft.size)
            self.done += 1
        return seconds

    def run(self, steps: int) -> float:
        """Median seconds of a step, less what measuring itself takes."""
        with_drafter, without = [], []
        for _ in range(steps):
            with_drafter.append(self.step(self.state))
            without.append(self.step(None))
        return median(with_drafter) - median(without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="*", default=["spectra", "lookahead"])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, vocabulary {args.vocab}, {args.dtype}, "
          f"{args.runs} paired runs of {args.steps} steps")  # fmt: skip
    broken = False
    for spec in args.drafters:
        steps = Steps(spec, args.vocab, getattr(torch, args.dtype))
        steps.run(args.steps)
        runs = [steps.run(args.steps) for _ in range(args.runs)]
        low, high = bootstrap(runs, median)
        fits = high <= LIMIT
        broken |= not fits
        shown = f"{1e6 * median(runs):.0f} [{1e6 * low:.0f}, {1e6 * high:.0f}] µs"
        print(f"{'ok ' if fits else 'BAD'} {spec:24} {shown} a step, at most {1e6 * LIMIT:.0f}; "
              f"{sum(steps.nodes) / len(steps.nodes):.1f} guessed nodes a step")  # fmt: skip
    sys.exit(broken)


if __name__ == "__main__":
    main()
