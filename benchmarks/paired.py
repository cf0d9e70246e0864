"""Paired timings: two arms in turn, the ratio pair by pair."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeVar

from draftsmith.bench.summary import bootstrap

T = TypeVar("T")
Clock = Callable[[float], float]
"""A moment of `perf_counter` → seconds that a process had been awake until then."""

AWAKE = 1.0
"""Seconds until it is another process's turn: the sleep of one of four is no stall of a drafter."""


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


def in_turn(
    arms: Sequence[Callable[[], object]], runs: int, warmup: int = 1, again: int = 0
) -> list[list[float]]:
    """Seconds of every run of every arm; the order alternates, so that no arm always goes first.

    `again`: an arm's untimed runs before each, where arms push each other out of the caches.
    """
    for _ in range(warmup):
        for arm in arms:
            arm()
    seconds: list[list[float]] = [[] for _ in arms]
    for run in range(runs):
        order = range(len(arms)) if run % 2 == 0 else range(len(arms) - 1, -1, -1)
        for index in order:
            for _ in range(again):
                arms[index]()
            begin = perf_counter()
            arms[index]()
            seconds[index].append(perf_counter() - begin)
    return seconds


def side_by_side(tasks: Mapping[int, Callable[[], T]]) -> dict[int, tuple[T, Clock]]:
    """What each task gave, on which the process of that id works, and the process's clock.

    Only one process is awake at a time, for a second: all meet the same machine, however it
    drifts. They are asleep (`sleep`) before and after; interrupted, all are awake.
    """
    awake: dict[int, list[tuple[float, float]]] = {process: [] for process in tasks}
    with ThreadPoolExecutor(max(1, len(tasks))) as threads:
        working = {process: threads.submit(task) for process, task in tasks.items()}
        try:
            while not all(task.done() for task in working.values()):
                for process, task in working.items():
                    if not task.done():
                        begin = perf_counter()
                        wake(process)
                        wait([task], AWAKE)
                        sleep(process)
                        awake[process].append((begin, perf_counter()))
        except BaseException:
            for process in tasks:  # else the threads would wait for ever
                wake(process)
            raise

    def clock(process: int) -> Clock:
        return lambda at: sum(min(at, end) - begin for begin, end in awake[process] if at > begin)

    return {process: (task.result(), clock(process)) for process, task in working.items()}


def sleep(process: int) -> None:
    """Let a process compute nothing until it is its turn."""
    _tell(process, signal.SIGSTOP)


def wake(process: int) -> None:
    """Let it go on."""
    _tell(process, signal.SIGCONT)


def _tell(process: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended, as whoever works with it finds out
        os.kill(process, what)
