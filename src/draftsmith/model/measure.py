"""What this machine is, and what a pass costs on it by its width.

What a running engine learns from its own passes is `core/cost.py:CostCurve`; tables of costs are
made by `lab/bench/cost.py`.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import torch

from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.sequence import Sequence
from draftsmith.errors import (
    DraftsmithError,
    first_line,
)
from draftsmith.model import devices
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.runner import Runner

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the passes that make a curve."""
DTYPES = {"float32": 4, "bfloat16": 2}
"""Those that are compared: bytes per parameter."""
_MEMORY_SHARE = 0.5
"""Loading in another dtype is only tried where it leaves half of the memory free."""


def versions() -> dict[str, str]:
    """Of the packages that figures depend on."""
    return {name: version(name) for name in ("draftsmith", "torch", "transformers", "tokenizers")}


def processor() -> str:
    """The CPU's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured."""

    positions: abc.Sequence[int] = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64, 96, 128)
    """Widths of a pass; 11 is the root and a draft of ten, the papers' block."""
    contexts: abc.Sequence[int] = (128, 512, 2048)
    batches: abc.Sequence[int] = (1, 4)
    repeats: int = 9

    def longest(self, loaded: LoadedModel) -> int:
        """The longest context after which all of it fits the model; below 1: none."""
        # Every step adds a token, and the widest pass must still have room behind the last one.
        spare = max(self.positions) + len(self.positions) * (self.repeats + 1) + 1
        return (loaded.context_length or max(self.contexts) + spare) - spare


def pass_cost(
    loaded: LoadedModel,
    widths: abc.Sequence[int] = WIDTHS,
    context: int = 256,
    repeats: int = 7,
) -> dict[int, float]:
    """Median seconds of a decoding step, by the positions of its pass, after `context` tokens.

    A plain target has one width, 1. Where the model's context is too short, it is shortened, and
    what is still too wide is left out.
    """
    widths = sorted(widths)
    while (longest := Grid(widths, (context,), (1,), repeats).longest(loaded)) < 1 < len(widths):
        widths.pop()
    grid = Grid(widths, (max(1, min(context, longest)),), (1,), repeats)
    with torch.inference_mode():
        _, seconds = timed_steps(loaded, grid.contexts[0], 1, grid)
    return {width: statistics.median(times) for width, times in seconds.items()}


def compare_dtypes(
    own: LoadedModel, load_in: Callable[[str], LoadedModel]
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Time passes of a model in its own dtype, and as `load_in` loads it in the other `DTYPES`.

    Returns dtype → tokens of a pass → seconds, and for those that were left out the reason.
    """
    seconds, left_out = {own.dtype_name: pass_cost(own)}, {}
    for other in DTYPES:
        if other in seconds:
            continue
        reason = _too_much(own, other)
        if reason is None:
            try:
                seconds[other] = pass_cost(load_in(other))
            except (DraftsmithError, RuntimeError) as error:
                reason = first_line(error)
        if reason is not None:
            left_out[other] = reason
    return seconds, left_out


def _too_much(own: LoadedModel, dtype: str) -> str | None:
    """Why a model is not to be loaded in another dtype."""
    needed, memory = parameters_of(own) * DTYPES[dtype], memory_bytes(own.device)
    if getattr(own.model, "is_quantized", False):
        return "the model is quantized"
    if memory is not None and needed > _MEMORY_SHARE * memory:
        return f"its weights alone would take {needed / 1e9:.1f} GB"
    return None


def parameters_of(loaded: LoadedModel) -> int:
    """How many numbers its weights are."""
    return sum(p.numel() for p in loaded.model.parameters())


def memory_bytes(device: torch.device) -> int | None:
    """All the memory there is where a model runs; None where nobody tells."""
    if (own := devices.own_memory(device)) is not None:
        return own[1]
    if hasattr(os, "sysconf"):  # not on Windows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free where a model runs, within a container's limit; None: nobody tells."""
    if (own := devices.own_memory(device)) is not None:
        return own[0]
    available = _told("/proc/meminfo", "MemAvailable:")
    if not available:
        total = memory_bytes(device)
        return None if total is None else total // 2  # a guess: elsewhere than on Linux
    free = 1024 * available
    for line in _lines("/proc/self/cgroup"):
        number, kinds, path = line.split(":", 2)
        if number == "0":
            root, limit, usage, cache = "/sys/fs/cgroup", "max", "current", "file"
        elif "memory" in kinds.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes"
            cache = "total_cache"
        else:
            continue
        # Each parent has a limit of its own; in a container the path may be the host's.
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):
            group = "/".join([root, *names[:depth], "memory."])
            if most := _told(group + limit):
                used = _told(group + usage) - _told(group + "stat", cache)
                free = max(0, min(free, most - used))
    return free


def _lines(path: str) -> list[str]:
    """Of one of the kernel's files; none where it is not."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _told(path: str, name: str = "") -> int:
    """The number behind a name in one of the kernel's files; 0 where there is none."""
    lines = [line.split() for line in _lines(path)]
    numbers = [words[-1] if not name else words[1] for words in lines if name in ("", words[0])]
    return int(numbers[0]) if numbers and numbers[0].isdecimal() else 0


def timed_steps(
    loaded: LoadedModel, context: int, batch: int, grid: Grid
) -> tuple[float, dict[int, list[float]]]:
    """Seconds of computing the prompt, and of every step by positions.

    Steps go through the loop with drafts of every width in turn, so the loop's own work is in the
    times and a slow moment hits all widths.
    """
    runner = Runner(loaded)
    widths = [p for p in grid.positions if p == 1 or runner.shape != "plain"]
    budgets = [FixedBudget(0) for _ in range(batch)]
    size = loaded.vocab_size
    sequences = [
        Sequence(
            [(31 * i + row) % size for i in range(context)],
            drafter=_Filler(),
            budget=budget,
            distribution=Distribution((), greedy=True),
            sampler=TorchSampler.seeded(0),
            vocab_size=size,
            limit=1 << 20,
            device=loaded.device,
        )
        for row, budget in enumerate(budgets)
    ]
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    try:
        begin = perf_counter()
        for sequence in sequences:
            start(sequence, runner)
            runner.prefill(sequence.row)
        runner.wait()
        began = (perf_counter() - begin) / batch
        for turn in range(grid.repeats + 1):
            for width in widths if turn % 2 == 0 else reversed(widths):
                for budget in budgets:
                    budget.width = width - 1
                begin = perf_counter()
                step(sequences, runner)
                runner.wait()
                if turn:  # The first turn may allocate.
                    seconds[width].append(perf_counter() - begin)
    finally:
        for sequence in sequences:
            if sequence.row is not None:
                runner.close(sequence.row)
    return began, seconds


@dataclass(frozen=True, repr=False)
class _Filler(Drafter):
    """Drafts as many tokens as it may; which ones does not matter to their cost."""

    name: ClassVar[str] = "filler"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _FillerState()


class _FillerState(DrafterState):
    def draft(self, ctx: Context) -> Draft:
        return Draft.chain([(7 * i + 3) % ctx.vocab_size for i in range(ctx.budget)], "filler")
