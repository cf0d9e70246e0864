"""Paired timings: two arms in turn, the ratio pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from draftsmith.bench.summary import bootstrap


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the pairwise ratios with its 95 % bootstrap interval, and both arms' medians."""

    median: float
    low: float
    high: float
    a_seconds: float
    b_seconds: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(a: Sequence[float], b: Sequence[float], resamples: int = 2000, seed: int = 0) -> Ratio:
    """a/b pair by pair; the pairs were measured in turn, so that a drifting machine cancels out."""
    pairs = [x / y for x, y in zip(a, b, strict=True)]
    low, high = bootstrap(pairs, median, resamples, seed)
    return Ratio(median(pairs), low, high, median(a), median(b), len(pairs))


def in_turn(arms: Sequence[Callable[[], object]], runs: int, warmup: int = 1) -> list[list[float]]:
    """Seconds of every run of every arm; the order alternates, so that no arm always goes first."""
    for _ in range(warmup):
        for arm in arms:
            arm()
    seconds: list[list[float]] = [[] for _ in arms]
    for run in range(runs):
        order = range(len(arms)) if run % 2 == 0 else range(len(arms) - 1, -1, -1)
        for index in order:
            begin = perf_counter()
            arms[index]()
            seconds[index].append(perf_counter() - begin)
    return seconds
