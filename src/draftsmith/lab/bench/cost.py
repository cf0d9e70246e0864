"""Cost of a pass on this machine by width and context: measured, saved, interpolated."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from draftsmith.core.cost import LADDER
from draftsmith.errors import LoadError, OptionError, UnsupportedError
from draftsmith.lab.bench.machine import linear_layers, machine
from draftsmith.model.loaded import LoadedModel, last_part
from draftsmith.model.measure import longest_context, timed_steps, versions
from draftsmith.storage import parse_json, reading, write_text

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """Widths, contexts and repetitions of a measurement."""

    positions: Sequence[int] = (1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64, 96, 128)
    """Widths of a pass; 11 is the root and a draft of ten, as in the papers."""
    contexts: Sequence[int] = (128, 512, 2048)
    repeats: int = 9


@dataclass(frozen=True, slots=True)
class Slope:
    """An assumed curve: every position after the first costs `slope` plain passes."""

    slope: float
    plain_seconds: float | None = None
    """Seconds of a plain pass; None: unknown, so costs are in plain passes."""

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

    context: int
    positions: int
    ms: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of a decoding step by context and positions of its pass."""

    in_seconds: ClassVar[bool] = True
    model: str
    device: str
    dtype: str
    threads: int
    machine: str
    versions: dict[str, str]
    points: tuple[Point, ...]
    prefill_ms: dict[int, float]
    """Prompt tokens → milliseconds to compute them."""
    linear_layers: str = "unknown"
    """Layout of the linear layers; older files do not have it."""

    @property
    def title(self) -> str:
        """`SmolLM2, float32, 2 threads; 211 of 211 linear layers are laid out for oneDNN`."""
        name, s = last_part(self.model), "s" * (self.threads != 1)
        layers = self.linear_layers
        return f"{name}, {self.dtype}, {self.threads} thread{s}; linear layers: {layers}"

    def seconds(self, positions: float, context: float) -> float:
        """Seconds of a step over `positions` after `context` cached tokens, interpolated.

        The last slope continues beyond the measured points.
        """
        curves: dict[int, list[tuple[int, float]]] = {}
        for point in sorted(self.points, key=lambda p: (p.context, p.positions)):
            curves.setdefault(point.context, []).append((point.positions, point.ms / 1e3))
        return _interpolate([(c, _interpolate(curves[c], positions)) for c in curves], context)

    def prefill_seconds(self, tokens: float) -> float:
        points = [(t, ms / 1e3) for t, ms in sorted(self.prefill_ms.items())]
        return _interpolate([(0, 0.0), *points], tokens)

    @property
    def contexts(self) -> list[int]:
        return sorted({point.context for point in self.points})

    def save(self, path: str | Path) -> None:
        """Write the table as JSON; raises WriteError."""
        write_text(Path(path), json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the table in plain values, as it is saved."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a saved table; raises LoadError."""
        with reading(Path(path)):
            text = Path(path).read_text(encoding="utf-8")
        try:
            given = parse_json(text)
            if given.pop("format") != FORMAT:
                raise ValueError("it has another format")
            given["points"] = tuple(Point(**point) for point in given["points"])
            given["prefill_ms"] = {int(t): float(ms) for t, ms in given["prefill_ms"].items()}
            if not (points := given["points"]) or not all(
                0 < p.ms < 1e9 and p.positions > 0 <= p.context for p in points
            ):
                raise ValueError("its points are no measurements")
            return cls(**given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(
                f"{path} is not a cost table ({error}); make one with `draftsmith bench cost`"
            ) from error


Cost = CostTable | Slope


def curve(cost: Cost) -> dict[int, float]:
    """Seconds of a pass by its draft nodes, at the middle measured context."""
    context = 0 if isinstance(cost, Slope) else cost.contexts[len(cost.contexts) // 2]
    return {width: cost.seconds(1 + width, context) for width in (0, *LADDER)}


def parse_cost(text: str) -> Cost:
    """Read a cost table's file, or a number: the cost of a further position in plain passes."""
    try:
        slope = float(text)
    except ValueError:
        return CostTable.load(text)
    if not 0 <= slope < 1e6:
        raise OptionError(f"cost must be a file, or a number >= 0 such as 0.02, got {text}")
    return Slope(slope)


def measure_cost(
    loaded: LoadedModel, grid: Grid, advance: Callable[[int], None] = lambda _: None
) -> CostTable:
    """Time decoding steps on `grid`; `advance` counts finished contexts.

    Contexts too long for the model are shortened; raises UnsupportedError if nothing fits.
    """
    longest = longest_context(loaded, grid.positions, grid.repeats)
    if longest < 1:
        raise UnsupportedError(
            f"{loaded.name} has a context of {loaded.context_length}, too short for passes over "
            f"{max(grid.positions)} positions; give fewer --positions or --repeats"
        )
    # A context that is too long for this model is replaced by the longest possible one.
    fitting = sorted({min(context, longest) for context in grid.contexts})
    points: list[Point] = []
    prefill: dict[int, float] = {}
    with torch.inference_mode():
        timed_steps(loaded, fitting[0], 1, (1,), 1)  # warm up
        for context in fitting:
            began, seconds = timed_steps(loaded, context, 1, grid.positions, grid.repeats)
            points += [_point(context, p, s) for p, s in seconds.items()]
            prefill[context] = 1e3 * began
            advance(1)
    return CostTable(
        model=last_part(loaded.name),
        device=str(loaded.device),
        dtype=loaded.dtype_name,
        threads=torch.get_num_threads(),
        machine=machine(),
        versions=versions(),
        points=tuple(points),
        prefill_ms=prefill,
        linear_layers=linear_layers(loaded),
    )


def _point(context: int, positions: int, seconds: Sequence[float]) -> Point:
    several = seconds if len(seconds) > 1 else [*seconds, *seconds]
    low, middle, high = statistics.quantiles(several, n=4)
    return Point(context, positions, 1e3 * middle, 1e3 * low, 1e3 * high)


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate `points` (rising x) linearly; the last slope continues, unless it falls."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left([p[0] for p in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    # Noise in an outer slope must not make other contexts cheap or expensive.
    if x < points[0][0]:
        return y0
    return max(value, y1) if x > points[-1][0] else value
