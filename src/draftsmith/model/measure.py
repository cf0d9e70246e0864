"""What a pass costs on this machine by its width: measured, saved, and interpolated.

What a running engine learns from its own passes is `core/cost.py:CostCurve`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch

from draftsmith.core.budget import FixedBudget
from draftsmith.core.cost import LADDER, RecordedCost
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.session import Session
from draftsmith.errors import (
    DraftsmithError,
    LoadError,
    OptionError,
    UnsupportedError,
    first_line,
)
from draftsmith.model import devices
from draftsmith.model.loaded import LoadedModel, last_part
from draftsmith.model.runner import Runner
from draftsmith.storage import parse_json, reading, write_text

FORMAT = 1
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of the passes that make a curve."""
DTYPES = {"float32": 4, "bfloat16": 2}
"""Those that are compared: bytes per parameter."""
_MEMORY_SHARE = 0.5
"""Loading in another dtype is only tried where it leaves half of the memory free."""


@dataclass(frozen=True, slots=True)
class Slope:
    """An assumed curve: every position after the first costs `slope` plain passes more."""

    slope: float
    plain_seconds: float | None = None
    """Seconds of a plain pass; None: not known, so everything counts in plain passes."""

    @property
    def in_seconds(self) -> bool:
        return self.plain_seconds is not None

    def seconds(self, positions: float, context: float) -> float:  # noqa: ARG002
        plain = 1.0 if self.plain_seconds is None else self.plain_seconds
        return plain * (1 + self.slope * (positions - 1))

    def prefill_seconds(self, tokens: float) -> float:  # noqa: ARG002
        return 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step: median milliseconds and the quartiles."""

    batch: int
    context: int
    positions: int
    ms: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of a decoding step by batch size, context and positions of its pass."""

    in_seconds: ClassVar[bool] = True
    model: str
    device: str
    dtype: str
    threads: int
    machine: str
    versions: dict[str, str]
    points: tuple[Point, ...]
    prefill_ms: dict[int, float]
    """Milliseconds to compute a prompt of so many tokens."""
    linear_layers: str = "not told"
    """How they are laid out; older files do not tell."""

    @property
    def title(self) -> str:
        """`SmolLM2, float32, 2 threads; 211 of 211 linear layers are laid out for oneDNN`."""
        name, s = last_part(self.model), "s" * (self.threads != 1)
        layers = self.linear_layers
        return f"{name}, {self.dtype}, {self.threads} thread{s}; linear layers: {layers}"

    def seconds(self, positions: float, context: float, batch: int = 1) -> float:
        """A step of so many positions a row after so many cached tokens, interpolated.

        Beyond the measured points the last slope goes on. Raises OptionError for a batch size that
        was not measured.
        """
        curves: dict[int, list[tuple[int, float]]] = {}
        for point in sorted(self.points, key=lambda p: (p.context, p.positions)):
            if point.batch == batch:
                curves.setdefault(point.context, []).append((point.positions, point.ms / 1e3))
        if not curves:
            raise OptionError(
                f"batch={batch} was not measured in this cost table (there: {self.batches})"
            )
        return _interpolate([(c, _interpolate(curves[c], positions)) for c in curves], context)

    def prefill_seconds(self, tokens: float) -> float:
        points = [(t, ms / 1e3) for t, ms in sorted(self.prefill_ms.items())]
        return _interpolate([(0, 0.0), *points], tokens)

    @property
    def batches(self) -> list[int]:
        return sorted({point.batch for point in self.points})

    @property
    def contexts(self) -> list[int]:
        return sorted({point.context for point in self.points})

    def save(self, path: str | Path) -> None:
        """Write the table as JSON; raises WriteError."""
        write_text(Path(path), json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """The table in plain numbers, as it is saved."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a saved table; raises LoadError."""
        with reading(Path(path)):
            text = Path(path).read_text(encoding="utf-8")
        try:
            given = parse_json(text)
            if given.pop("format") != FORMAT:
                raise ValueError("another format")
            given["points"] = tuple(Point(**point) for point in given["points"])
            given["prefill_ms"] = {int(t): float(ms) for t, ms in given["prefill_ms"].items()}
            return cls(**given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(
                f"{path} is no cost table ({error}); make one with `draftsmith bench cost`"
            ) from error


Cost = CostTable | Slope


def curve(cost: Cost, rows: int = 1) -> dict[int, float]:
    """Seconds of a pass over so many rows by its draft nodes, at the middle measured context."""
    widths = (0, *LADDER)
    if isinstance(cost, Slope):
        return {width: cost.seconds(1 + width, 0) for width in widths}
    context = cost.contexts[len(cost.contexts) // 2]
    return {width: cost.seconds(1 + width / rows, context, rows) for width in widths}


def recorded(cost: Cost) -> RecordedCost:
    """What automatic budgets decide by, for as many rows as were measured."""
    batches = cost.batches if isinstance(cost, CostTable) else ()
    return RecordedCost(curve(cost), {rows: curve(cost, rows) for rows in batches})


def parse_cost(text: str) -> Cost:
    """A cost table's file, or a number: what a further position costs, in plain passes."""
    try:
        slope = float(text)
    except ValueError:
        return CostTable.load(text)
    if not 0 <= slope < 1e6:
        raise OptionError(f"cost={text} cannot work; a slope is at least 0, e.g. 0.02")
    return Slope(slope)


def linear_layers(model: LoadedModel) -> str:
    """How a model's linear layers are laid out."""
    return "as loaded" if model.prepacked is None else model.prepacked.explain()


def machine() -> str:
    """Processor and system, as far as Python knows."""
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{processor()}, {system}, Python {platform.python_version()}"


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


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through `points` (rising x), the outer slopes continued, never below 0."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left([p[0] for p in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    if x < points[0][0]:  # Noise in the first slope must not make short contexts cheap or costly.
        value = y0
    return max(value, 0.0)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured."""

    positions: Sequence[int] = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64, 96, 128)
    """Widths of a pass; 11 is the root and a draft of ten, the papers' block."""
    contexts: Sequence[int] = (128, 512, 2048)
    batches: Sequence[int] = (1, 4)
    repeats: int = 9

    def longest(self, loaded: LoadedModel) -> int:
        """The longest context after which all of it fits the model; below 1: none."""
        # Every step adds a token, and the widest pass must still have room behind the last one.
        spare = max(self.positions) + len(self.positions) * (self.repeats + 1) + 1
        return (loaded.context_length or max(self.contexts) + spare) - spare


def pass_cost(
    loaded: LoadedModel,
    widths: Sequence[int] = WIDTHS,
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
        _, seconds = _steps(loaded, grid.contexts[0], 1, grid)
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


def measure_cost(
    loaded: LoadedModel, grid: Grid | None = None, advance: Callable[[str], None] = lambda _: None
) -> CostTable:
    """Time decoding steps on `grid`; `advance` hears what was finished.

    Contexts too long for the model are shortened; raises UnsupportedError if nothing fits.
    """
    grid = grid or Grid()
    longest = grid.longest(loaded)
    if longest < 1:
        raise UnsupportedError(
            f"{loaded.name} has a context of {loaded.context_length}, too short for passes over "
            f"{max(grid.positions)} positions; give fewer --positions or --repeats"
        )
    # What is too long for this model becomes the longest that is not.
    fitting = sorted({min(context, longest) for context in grid.contexts})
    batches = [b for b in grid.batches if b == 1 or loaded.capabilities.packed]
    points: list[Point] = []
    prefill: dict[int, float] = {}
    with torch.inference_mode():
        _steps(loaded, fitting[0], 1, Grid((1,), repeats=1))  # Warms up.
        for context in fitting:
            for batch in batches:
                began, seconds = _steps(loaded, context, batch, grid)
                points += [_point(batch, context, p, s) for p, s in seconds.items()]
                if batch == 1:
                    prefill[context] = 1e3 * began
                advance(f"context {context}, batch {batch}")
    return CostTable(
        model=last_part(loaded.name),
        device=str(loaded.device),
        dtype=loaded.dtype_name,
        threads=torch.get_num_threads(),
        machine=machine(),
        versions={name: version(name) for name in ("draftsmith", "torch", "transformers")},
        points=tuple(points),
        prefill_ms=prefill,
        linear_layers=linear_layers(loaded),
    )


def _point(batch: int, context: int, positions: int, seconds: Sequence[float]) -> Point:
    several = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, middle, high = statistics.quantiles(several, n=4)
    return Point(batch, context, positions, 1e3 * middle, 1e3 * low, 1e3 * high)


def _steps(
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
    sessions = [
        Session(
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
        for session in sessions:
            start(session, runner)
            runner.prefill(session.row)
        runner.wait()
        began = (perf_counter() - begin) / batch
        for turn in range(grid.repeats + 1):
            for width in widths if turn % 2 == 0 else reversed(widths):
                for budget in budgets:
                    budget.width = width - 1
                begin = perf_counter()
                step(sessions, runner)
                runner.wait()
                if turn:  # The first turn may allocate.
                    seconds[width].append(perf_counter() - begin)
    finally:
        for session in sessions:
            if session.row is not None:
                runner.close(session.row)
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
