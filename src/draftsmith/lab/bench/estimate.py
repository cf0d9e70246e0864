"""Predicts a drafter's speed-up from recorded answers and the cost of a pass.

Predicted speed-up = Σ cost of plain decoding / Σ (cost of every replayed pass at its own width and
context + the drafter's measured time). Prompts cost the same on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.core.stats import total
from draftsmith.lab.bench.cost import Cost, curve
from draftsmith.lab.bench.replay import Replay, ReplayBudget, bucket
from draftsmith.lab.bench.suites import parts
from draftsmith.lab.bench.sweep import Done


@dataclass(frozen=True, slots=True)
class Estimate:
    """Prediction for one drafter on some records; suite None for all of them."""

    suite: str | None
    drafter: str
    records: int
    tokens: int
    tokens_per_pass: float
    pass_cost: float
    """Mean cost of a pass, in plain passes at the same context."""
    drafter_share: float
    """Share of the predicted time that the drafter itself takes."""
    prefill_share: float
    speedup: float
    """Plain decoding's time over this drafter's, prompts included on both sides."""


def estimate(done: Sequence[Done], cost: Cost) -> list[Estimate]:
    """Return an estimate per part (`suites.parts`) and drafter, then the total of several parts."""
    groups: dict[tuple[str | None, str], list[Replay]] = {}
    named = parts([one.record for one in done])
    several = len(set(named)) > 1
    for one, part in zip(done, named, strict=True):
        for suite in (part, None) if several else (part,):
            groups.setdefault((suite, one.drafter), []).append(one.replay)
    places = sorted(groups, key=lambda place: place[0] is None)  # the total comes last
    return [predict(groups[place], cost, *place) for place in places]


def predict(replays: Sequence[Replay], cost: Cost, suite: str | None, drafter: str) -> Estimate:
    """Return the estimate for one drafter's replays."""
    stats = total([replay.stats for replay in replays])
    prefill = sum(cost.prefill_seconds(replay.stats.prompt_tokens) for replay in replays)
    plain = sum(plain_seconds(replay, cost) for replay in replays)
    counts = [item for replay in replays for item in replay.passes.items()]
    passes = sum(n * cost.seconds(width, context) for (context, width), n in counts)
    same_passes_plain = sum(n * cost.seconds(1, context) for (context, _), n in counts)
    # If costs are not in seconds, the drafter's time cannot be compared with them.
    drafting = stats.seconds.draft if cost.in_seconds else 0.0
    return Estimate(
        suite=suite,
        drafter=drafter,
        records=len(replays),
        tokens=stats.tokens,
        tokens_per_pass=stats.tokens_per_pass,
        pass_cost=passes / same_passes_plain,
        drafter_share=drafting / (prefill + passes + drafting),
        prefill_share=prefill / (prefill + passes + drafting),
        speedup=(prefill + plain) / (prefill + passes + drafting),
    )


def plain_seconds(replay: Replay, cost: Cost) -> float:
    """Seconds of plain decoding of the same answer: one pass per token."""
    first = replay.stats.prompt_tokens - 1
    contexts = Counter(map(bucket, range(first, first + replay.stats.tokens)))
    return sum(n * cost.seconds(1, context) for context, n in contexts.items())


def automatic(cost: Cost) -> ReplayBudget:
    """Return the engine's automatic budget under `cost`, at the middle measured context."""
    return ReplayBudget(curve=tuple(curve(cost).items()))
