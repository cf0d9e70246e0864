"""Measure a `CostTable`: time whole steps of the real loop, of every width in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from time import perf_counter
from typing import ClassVar

import torch

from draftsmith.bench.cost import CostTable, Point, machine
from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Dice, Law
from draftsmith.core.session import Session
from draftsmith.errors import UnsupportedError
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

POSITIONS = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64, 96, 128)
"""Widths of a pass; 11 is the root and a draft of ten, the papers' block."""

CONTEXTS = (128, 512, 2048)
BATCHES = (1, 4)
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured."""

    positions: Sequence[int] = POSITIONS
    contexts: Sequence[int] = CONTEXTS
    batches: Sequence[int] = BATCHES
    repeats: int = REPEATS


@dataclass(frozen=True, repr=False)
class _Filler(Drafter):
    """Drafts as many tokens as it may; which ones does not matter to their cost."""

    name: ClassVar[str] = "filler"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _FillerState()


class _FillerState(DrafterState):
    def draft(self, ctx: Context) -> Draft:
        return Draft.chain([(7 * i + 3) % ctx.vocab_size for i in range(ctx.budget)], "filler")


def measure_cost(
    loaded: LoadedModel, grid: Grid | None = None, advance: Callable[[str], None] = lambda _: None
) -> CostTable:
    """Time decoding steps on `grid`; `advance` hears what was finished.

    Steps go through the loop with drafts of every width in turn, so the loop's own work is in the
    times and a slow moment hits all widths. Contexts too long for the model are shortened; raises
    UnsupportedError if nothing fits.
    """
    grid = grid or Grid()
    fitting = _fitting(loaded, grid)
    batches = [b for b in grid.batches if b == 1 or loaded.capabilities.batch]
    points: list[Point] = []
    prefill: dict[int, float] = {}
    with torch.inference_mode():
        _steps(loaded, fitting[0], 1, grid, repeats=1)  # Warms up.
        for context in fitting:
            for batch in batches:
                began, seconds = _steps(loaded, context, batch, grid, grid.repeats)
                points += [_point(batch, context, p, s) for p, s in seconds.items()]
                if batch == 1:
                    prefill[context] = 1e3 * began
                advance(f"context {context}, batch {batch}")
    return CostTable(
        model=loaded.name,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        machine=machine(),
        versions={name: version(name) for name in ("draftsmith", "torch", "transformers")},
        points=tuple(points),
        prefill_ms=prefill,
    )


def _fitting(loaded: LoadedModel, grid: Grid) -> list[int]:
    # Every step adds a token, and the widest pass must still have room behind the last one.
    spare = max(grid.positions) + len(grid.positions) * (grid.repeats + 1) + 1
    length = loaded.context_length or max(grid.contexts) + spare
    longest = length - spare
    # What is too long for this model becomes the longest that is not.
    fitting = sorted({min(context, longest) for context in grid.contexts})
    if longest < 1:
        raise UnsupportedError(
            f"{loaded.name} has a context of {length}, too short for passes over "
            f"{max(grid.positions)} positions; give fewer --positions or --repeats"
        )
    return fitting


def _point(batch: int, context: int, positions: int, seconds: Sequence[float]) -> Point:
    several = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, middle, high = statistics.quantiles(several, n=4)
    return Point(batch, context, positions, 1e3 * middle, 1e3 * low, 1e3 * high)


def _steps(
    loaded: LoadedModel, context: int, batch: int, grid: Grid, repeats: int
) -> tuple[float, dict[int, list[float]]]:
    """Seconds of computing the prompt, and of every step by positions."""
    runner = Runner(loaded)
    plain = runner.shape == "plain"
    widths = [p for p in grid.positions if p == 1 or not plain]
    budgets = [FixedBudget(0) for _ in range(batch)]
    sessions = [_session(loaded, context, row, budgets[row]) for row in range(batch)]
    try:
        begin = perf_counter()
        for session in sessions:
            start(session, runner)
        _wait(loaded.device)
        began = (perf_counter() - begin) / batch
        step(sessions, runner)  # The first step may allocate.
        seconds: dict[int, list[float]] = {width: [] for width in widths}
        for turn in range(repeats):
            for width in widths if turn % 2 == 0 else reversed(widths):
                for budget in budgets:
                    budget.width = width - 1
                begin = perf_counter()
                step(sessions, runner)
                _wait(loaded.device)
                seconds[width].append(perf_counter() - begin)
    finally:
        for session in sessions:
            if session.row is not None:
                runner.close(session.row)
    return began, seconds


def _session(loaded: LoadedModel, context: int, row: int, budget: FixedBudget) -> Session:
    vocab = loaded.vocab_size
    return Session(
        [(31 * i + row) % vocab for i in range(context)],
        drafter=_Filler(),
        budget=budget,
        law=Law((), greedy=True),
        chance=Dice.seeded(0),
        vocab_size=vocab,
        limit=1 << 20,
        device=loaded.device,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
