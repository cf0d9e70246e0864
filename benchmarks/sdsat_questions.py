"""Where one-pass SDSAT should ask: tokens per pass, simulated with depths that hold independently.

    python -m benchmarks.sdsat_questions

`drafters/sdsat.py:questions`, which divides the nodes between draft and questions and asks where
drafts are likely to end; every prefix asked alike (k = c); the paper's two passes with k = 13.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from math import isqrt
from operator import mul

from draftsmith.drafters.sdsat import questions

DEPTHS = {
    "0.6, 0.5, 0.45, 0.4 …": [0.6, 0.5, 0.45, *[0.4] * 10],
    "0.8, 0.75, 0.7, 0.65 …": [0.8, 0.75, 0.7, *[0.65] * 10],
    "0.75 three times, then 0.9": [*[0.75] * 3, *[0.9] * 10],
    "0.9": [0.9] * 13,
}
NODES = (3, 5, 8, 13, 24, 48)
STEPS = 20_000


def likely(held: Sequence[float], found: int, nodes: int) -> list[int]:
    """Ours."""
    return [*questions(tuple(held), found, nodes, 99)]


def alike(held: Sequence[float], found: int, nodes: int) -> list[int]:
    """The same number behind every prefix."""
    c = min(found, max(isqrt(nodes + 1) - 1, 1))
    return [min(len(held), (nodes - c) // (c + 1))] * (c + 1)


def tokens_per_pass(asked: Sequence[Sequence[int]], held: Sequence[float]) -> float:
    """`asked[found]`: what to ask in a step that has so many drafts."""
    rng = random.Random(0)
    found = tokens = 0
    for _ in range(STEPS):
        now = asked[found]
        accepted = 0
        while accepted < len(now) - 1 and rng.random() < held[accepted]:
            accepted += 1
        tokens += 1 + accepted
        found = now[accepted]
    return tokens / STEPS


def main() -> None:
    print("| depths hold | nodes | by what is likely | all alike | two passes, k = 13 |")
    print("|---|---|---|---|---|")
    for name, held in DEPTHS.items():
        two = (2 + sum(accumulate(held, mul))) / 2
        for nodes in NODES:
            ours, same = (
                tokens_per_pass([way(held, n, nodes) for n in range(len(held) + 1)], held)
                for way in (likely, alike)
            )
            print(f"| {name} | {nodes} | {ours:.2f} | {same:.2f} | {two:.2f} |")


if __name__ == "__main__":
    main()
