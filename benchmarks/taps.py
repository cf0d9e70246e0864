"""What taps cost: a step that records over one that does not, in turn; and ranking with them.

    python -m benchmarks.taps            # about two minutes on two cores
    python -m benchmarks.taps --runs 5   # quicker, wider intervals

A random Llama of 100M parameters in bfloat16; sessions with the same context take their steps in
turn: one without taps, one with the states of one layer, some with 50 attention heads of all
layers, asked for as many positions as PLD+ has candidates, or for all.
"""

from __future__ import annotations

import argparse
from functools import partial
from time import perf_counter

import torch

from benchmarks import shared
from benchmarks.paired import in_turn, ratio
from benchmarks.shared import random_ids, random_llama, started
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.loop import step
from draftsmith.core.session import Session
from draftsmith.core.target import NO_NEEDS, Needs
from draftsmith.drafters.pld_plus import PldPlus
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner
from draftsmith.testing import Scripted

HEADS = 50
CANDIDATES = (30, 300)


def spread(layers: int, heads: int, count: int) -> tuple[tuple[int, int], ...]:
    """`count` of all heads, evenly spread over layers."""
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    return tuple(every[i * len(every) // count] for i in range(count))


def session(
    model: LoadedModel, needs: Needs, context: int, width: int, asked: int = 0
) -> tuple[Session, Runner]:
    """A started session with `context` cached tokens that drafts `width` random tokens a step.

    Before it drafts it asks for the attention at so many positions.
    """
    ids, drafts = random_ids(context + 1), random_ids(width, seed=1)
    positions = torch.randperm(context, generator=torch.Generator().manual_seed(0))[:asked]

    def draft(ctx: Context) -> Draft:
        if ctx.attention is not None:
            ctx.attention(positions).amax(0)
        return Draft.chain(drafts[: ctx.budget], "scripted")

    runner = Runner(model)
    made = started(runner, ids, Scripted(draft), width, model.vocab_size, needs=needs)
    return made, runner


def step_cost(model: LoadedModel, context: int, width: int, runs: int) -> None:
    """Print what a step costs with taps, in steps without."""
    facts = model.facts
    layer = PldPlus().needs_of(facts).hidden_layer
    heads = Needs(attention_heads=spread(facts.layers, facts.heads, HEADS))
    wanted = {f"states of layer {layer}": (Needs(hidden_layer=layer), 0)} | {
        f"{HEADS} heads at {asked} positions": (heads, asked) for asked in (*CANDIDATES, context)
    }
    asking = ((NO_NEEDS, 0), *wanted.values())
    sessions = [session(model, needs, context, width, asked) for needs, asked in asking]
    arms = [partial(step, [one], runner) for one, runner in sessions]
    bare, *tapped = in_turn(arms, runs, warmup=3)
    for name, seconds in zip(wanted, tapped, strict=True):
        found = ratio(seconds, bare)
        print(
            f"step of {1 + width:2}, context {context}, {name:26} / without: {found}  "
            f"({1e3 * found.a_seconds:.2f} ms / {1e3 * found.b_seconds:.2f} ms)",
            flush=True,
        )


def ranking_microseconds(width: int, candidates: int, runs: int, rank: str) -> float:
    """Median microseconds of a draft in 2048 ids, `candidates` of them equal to the last."""
    ids = list(range(10, 2058))
    for place in range(candidates):
        ids[place * (2046 // candidates) + 1] = 7
    ids.append(7)
    weights = torch.rand(HEADS, len(ids) - 1)
    drafter = PldPlus(layer=1) if rank == "hidden" else PldPlus(rank="attention", heads=((0, 0),))
    ctx = shared.context(
        ids, vocab_size=32_000, budget=64, depth=64,
        hidden=torch.randn(len(ids) - 1, width).bfloat16(),
        attention=lambda positions: weights[:, positions],
    )  # fmt: skip
    state = drafter.open(ctx)
    state.draft(ctx)
    seconds = []
    for _ in range(runs):
        begin = perf_counter()
        state.draft(ctx)
        seconds.append(perf_counter() - begin)
    return 1e6 * sorted(seconds)[runs // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.runs} steps each, in turn")
    model = load(random_llama())
    for width in (0, 7, 15):
        step_cost(model, args.context, width, args.runs)
    for rank in ("hidden", "attention"):
        for candidates in (2, 30, 300):
            spent = ranking_microseconds(640, candidates, args.runs, rank)
            print(f"draft by {rank}, {candidates} candidates: {spent:.0f} µs")


if __name__ == "__main__":
    main()
