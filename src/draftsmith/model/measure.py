"""Describes this machine, and times passes by their width.

A running engine learns from its own passes (`core/cost.py:CostCurve`). `lab/bench/cost.py` makes
tables of costs.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections import abc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import torch

from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Scripted
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
"""Widths of the passes of a curve, in tokens."""
DTYPES = {"float32": 4, "bfloat16": 2}
"""Dtypes that are compared, with their bytes per parameter."""
_MEMORY_SHARE = 0.5
"""A model is loaded in another dtype only if that takes at most this share of the memory."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that figures depend on."""
    return {name: version(name) for name in ("draftsmith", "torch", "transformers", "tokenizers")}


def processor() -> str:
    """Return the CPU's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def longest_context(loaded: LoadedModel, widths: abc.Sequence[int], repeats: int) -> int:
    """Longest context after which all passes fit into the model's; below 1 if none does."""
    # Every step adds a token, and the widest pass must still fit after the last one.
    return (loaded.context_length or 1 << 30) - max(widths) - len(widths) * (repeats + 1) - 1


def pass_cost(
    loaded: LoadedModel,
    widths: abc.Sequence[int] = WIDTHS,
    context: int = 256,
    repeats: int = 7,
    rows: int = 1,
) -> dict[int, float]:
    """Median seconds of a decoding step of `rows` rows after `context` tokens, by their width.

    A plain target has one width, 1. If the model's context is too short, `context` is shortened and
    widths that still do not fit are left out.
    """
    widths = sorted(widths)
    while (longest := longest_context(loaded, widths, repeats)) < 1 < len(widths):
        widths.pop()
    with torch.inference_mode():
        _, seconds = timed_steps(loaded, max(1, min(context, longest)), rows, widths, repeats)
    return {width: statistics.median(times) for width, times in seconds.items()}


def compare_dtypes(
    own: LoadedModel, load_in: Callable[[str], LoadedModel]
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Time passes of a model in its own dtype, and as `load_in` loads it in the other `DTYPES`.

    Returns dtype → width of a pass → seconds, and the reason for each dtype that was left out.
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
    """Reason against loading a model in another dtype; None if there is none."""
    needed, memory = parameters_of(own) * DTYPES[dtype], memory_bytes(own.device)
    if getattr(own.model, "is_quantized", False):
        return "the model is quantized"
    if memory is not None and needed > _MEMORY_SHARE * memory:
        return f"its weights alone would take {needed / 1e9:.1f} GB"
    return None


def parameters_of(loaded: LoadedModel) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in loaded.model.parameters())


def memory_bytes(device: torch.device) -> int | None:
    """Total bytes of memory where a model runs; None if the system does not report it."""
    if (own := devices.own_memory(device)) is not None:
        return own[1]
    if hasattr(os, "sysconf"):  # not on Windows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def free_bytes(device: torch.device) -> int | None:
    """Free bytes where a model runs, within a container's limit; None if not reported."""
    if (own := devices.own_memory(device)) is not None:
        return own[0]
    available = _read_number("/proc/meminfo", "MemAvailable:")
    if not available:
        total = memory_bytes(device)
        return None if total is None else total // 2  # an estimate, on systems other than Linux
    free = 1024 * available
    for line in _read_lines("/proc/self/cgroup"):
        number, kinds, path = line.split(":", 2)
        if number == "0":
            root, limit, usage, cache = "/sys/fs/cgroup", "max", "current", "file"
        elif "memory" in kinds.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes"
            cache = "total_cache"
        else:
            continue
        # Each parent has its own limit. In a container, the path may be the host's.
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):
            group = "/".join([root, *names[:depth], "memory."])
            if most := _read_number(group + limit):
                used = _read_number(group + usage) - _read_number(group + "stat", cache)
                free = max(0, min(free, most - used))
    return free


def _read_lines(path: str) -> list[str]:
    """Lines of one of the kernel's files; none if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _read_number(path: str, name: str = "") -> int:
    """Number after a name in one of the kernel's files; 0 if there is none."""
    lines = [line.split() for line in _read_lines(path)]
    numbers = [words[-1] if not name else words[1] for words in lines if name in ("", words[0])]
    return int(numbers[0]) if numbers and numbers[0].isdecimal() else 0


def timed_steps(
    loaded: LoadedModel, context: int, rows: int, widths: abc.Sequence[int], repeats: int
) -> tuple[float, dict[int, list[float]]]:
    """Return the seconds of a prompt, and those of every step of `rows` rows by its width.

    Steps run through the loop, so the times include its work. Widths alternate, so a slow moment of
    the machine affects all of them.
    """
    runner = Runner(loaded)
    widths = [width for width in widths if width == 1 or runner.shape != "plain"]
    budgets = [FixedBudget(0) for _ in range(rows)]
    size = loaded.vocab_size
    sequences = [
        Sequence(
            [(31 * i + row) % size for i in range(context)],
            drafter=Scripted(_fill),
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
        began = (perf_counter() - begin) / rows
        for turn in range(repeats + 1):
            for width in widths if turn % 2 == 0 else reversed(widths):
                for budget in budgets:
                    budget.width = width - 1
                begin = perf_counter()
                step(sequences, runner)
                runner.wait()
                if turn:  # the first turn may allocate
                    seconds[width].append(perf_counter() - begin)
    finally:
        for sequence in sequences:
            if sequence.row is not None:
                runner.close(sequence.row)
    return began, seconds


def _fill(ctx: Context) -> Draft:
    """Draft as many tokens as allowed. Their cost does not depend on which they are."""
    return Draft.chain([(7 * i + 3) % ctx.vocab_size for i in range(ctx.budget)], "filler")
