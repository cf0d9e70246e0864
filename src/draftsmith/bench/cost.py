"""What a pass costs on this machine: measured once, saved, and interpolated for estimates."""

from __future__ import annotations

import json
import platform
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from draftsmith.errors import LoadError, OptionError

FORMAT = 1


class Cost(Protocol):
    """Seconds of a pass and of a prompt, measured or assumed."""

    def seconds(self, positions: float, context: float, batch: int = 1) -> float:
        """One step whose pass has so many positions a row, after so many cached tokens."""

    def prefill_seconds(self, tokens: float) -> float:
        """Computing a prompt of one sequence."""


@dataclass(frozen=True, slots=True)
class Slope:
    """An assumed curve: every position after the first costs `slope` plain passes more."""

    slope: float
    plain_seconds: float = 1.0
    """Seconds of a plain pass; the drafter's own time is weighed against it."""

    def seconds(self, positions: float, context: float, batch: int = 1) -> float:  # noqa: ARG002
        return self.plain_seconds * (1 + self.slope * (positions - 1))

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

    model: str
    device: str
    dtype: str
    threads: int
    machine: str
    versions: dict[str, str]
    points: tuple[Point, ...]
    prefill_ms: dict[int, float]
    """Milliseconds to compute a prompt of so many tokens."""

    def seconds(self, positions: float, context: float, batch: int = 1) -> float:
        """Interpolated between measured points; beyond them the last slope goes on.

        Raises OptionError for a batch size that was not measured.
        """
        curves = self._curves(batch)
        return _interpolate([(c, _interpolate(curve, positions)) for c, curve in curves], context)

    def prefill_seconds(self, tokens: float) -> float:
        points = [(t, ms / 1e3) for t, ms in sorted(self.prefill_ms.items())]
        return _interpolate([(0, 0.0), *points], tokens)

    def relative(self, positions: float, context: float, batch: int = 1) -> float:
        """Cost of a pass in passes over one position."""
        return self.seconds(positions, context, batch) / self.seconds(1, context, batch)

    @property
    def batches(self) -> list[int]:
        return sorted({point.batch for point in self.points})

    @property
    def contexts(self) -> list[int]:
        return sorted({point.context for point in self.points})

    def _curves(self, batch: int) -> list[tuple[int, list[tuple[int, float]]]]:
        """(context, [(positions, seconds)]) of one batch size, rising."""
        curves: dict[int, list[tuple[int, float]]] = {}
        for point in sorted(self.points, key=lambda p: (p.context, p.positions)):
            if point.batch == batch:
                curves.setdefault(point.context, []).append((point.positions, point.ms / 1e3))
        if not curves:
            raise OptionError(
                f"batch={batch} was not measured in this cost table (there: {self.batches})"
            )
        return list(curves.items())

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        try:
            Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise LoadError(f"{path} cannot be written: {error.strerror}") from error

    def as_dict(self) -> dict[str, Any]:
        """The table in plain numbers, as it is saved."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a saved table; raises LoadError."""
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            if given.pop("format") != FORMAT:
                raise ValueError("another format")
            given["points"] = tuple(Point(**point) for point in given["points"])
            given["prefill_ms"] = {int(t): float(ms) for t, ms in given["prefill_ms"].items()}
            return cls(**given)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(
                f"{path} is no cost table ({error}); make one with `draftsmith bench cost`"
            ) from error


def parse_cost(text: str, plain_ms: float | None = None) -> CostTable | Slope:
    """A cost table's file, or a number: what a further position costs, in plain passes."""
    try:
        slope = float(text)
    except ValueError:
        return CostTable.load(text)
    if not 0 <= slope < 1e6:
        raise OptionError(f"cost={text} cannot work; a slope is at least 0, e.g. 0.02")
    return Slope(slope, (plain_ms or 0.0) / 1e3 or 1.0)


def machine() -> str:
    """Processor and system, as far as Python knows."""
    return f"{_processor()}, {platform.system()} {platform.release()}, Python " + (
        platform.python_version()
    )


def _processor() -> str:
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
    if x < points[0][0]:  # Noise in the first slope must not make short contexts cheap or dear.
        value = y0
    return max(value, 0.0)
