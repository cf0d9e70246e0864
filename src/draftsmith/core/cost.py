"""Cost of a pass by its number of draft nodes, learned from the passes.

The unit is a plain pass: 1 is a pass with the same rows and context without drafts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

LADDER = (1, 2, 4, 8, 16, 32, 64)
"""Draft widths; few of them, so that each is measured often."""

SHORT = 1024
"""Cached tokens per row up to which all passes share a curve; above, each doubling has its own.

Up to there, reading the weights costs more than reading the keys. A short chat has one curve.
"""

PRIOR_SLOPE = 0.02
"""Minimum slope of the cost per node beyond the measured widths."""
SMOOTHING = 0.1
"""Weight of the last pass in the moving average of its width."""
SETTLING = 4
"""First passes of a width, of which the minimum is kept; later passes are averaged."""
GUESSED = 4
"""Passes with a new number of rows that use the curve of another number of rows."""

Points = list[tuple[float, float]]
"""(nodes, cost) pairs, nodes rising from 0."""


class CostCurve:
    """Cost of the passes of one model, for all its sequences.

    Each number of rows has a curve for each doubling of the context: after a long context a pass
    costs more, and the relative cost of a draft depends on how attention is computed. A width that
    was not measured there costs what it did at the nearest context; else the curve is extrapolated.
    Before any measurement passes are assumed to be cheap (as on a GPU, or a CPU in bfloat16).
    """

    def __init__(
        self, ladder: Sequence[int] = LADDER, cold: bool = False, padded: bool = False
    ) -> None:
        """`ladder`: widths that are measured separately; passes between two count for the
        upper one, which keeps their mean width.

        `cold`: the first pass over each number of tokens is not recorded. A GPU loads and chooses
        kernels for it.

        `padded`: a pass with one row is padded to the next width of `ladder`, so all nodes up to
        that width cost the same.
        """
        self.ladder = ladder
        self._padded = padded
        self._warm: set[int] | None = set() if cold else None
        """Numbers of tokens that passes had; None: all passes are recorded."""
        self.rows = 1
        """Sequences of a pass (see `at`)."""
        self.doublings = 0
        """Doublings of the context per row, from `SHORT` on."""
        self._guessed: dict[tuple[int, int], int] = {}
        """(rows, doublings) without a measured plain pass → number of measured drafted passes."""
        self._passes: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        """(rows, doublings, rung) → (mean width, seconds, number of passes)."""
        self._plainly: dict[int, set[int]] = {}
        """Rows → doublings with a measured plain pass."""
        # Weak keys: the times of a draft model must not keep the model in memory.
        self._drafting: WeakKeyDictionary[Any, dict[int, dict[int, tuple[float, int]]]]
        self._drafting = WeakKeyDictionary()
        """Drafter → rows → allowed nodes → (seconds, number of drafts)."""
        self._opening: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        """Drafter → seconds per token."""

    def at(self, rows: int, context: int = 0) -> CostCurve:
        """Return the curve for `rows` sequences and `context` cached tokens; data are shared."""
        doublings = (context // (SHORT * rows)).bit_length()
        if (rows, doublings) == (self.rows, self.doublings):
            return self
        curve = copy(self)
        curve.rows, curve.doublings = rows, doublings
        return curve

    def nearest(self, rows: int, context: int = 0) -> CostCurve:
        """Return the curve to decide by: `at`, or that of the nearest measured number of rows.

        The latter is used for the first `GUESSED` passes with a new number of rows. Then one plain
        pass is made, to compare with. So a batch that grows, shrinks or reads prompts in between
        (such passes are not recorded) still drafts.
        """
        here = self.at(rows, context)
        place = rows, here.doublings
        if here.knows_plain or self._guessed.get(place, 0) >= GUESSED:
            return here
        measured = [n for n, doublings in self._plainly.items() if here.doublings in doublings]
        if not measured:
            return here
        near = min(measured, key=lambda n: (max(n, rows) / min(n, rows), n))
        return self.at(near, context * near // rows)

    @property
    def widths(self) -> Sequence[int]:
        """Widths of drafts that are worth comparing."""
        return self.ladder if self._padded else LADDER

    @property
    def context(self) -> int:
        """A number of cached tokens for which `at` returns this curve."""
        return (SHORT * self.rows << self.doublings) // 2

    @property
    def knows_plain(self) -> bool:
        """Whether a plain pass was measured; without one, no cost can be compared."""
        return (self.rows, self.doublings, 0) in self._passes

    def _plain(self, doublings: int) -> float:
        """Return the seconds of a plain pass at that context: at most those of any other pass."""
        keys = ((self.rows, doublings, rung) for rung in (0, *self.ladder))
        return min(self._passes[key][1] for key in keys if key in self._passes)

    def record(self, width: int, seconds: float) -> None:
        """Record that a pass with `width` draft nodes in all rows together took `seconds`."""
        tokens = self.rows + width
        if self._warm is not None and tokens not in self._warm:
            self._warm.add(tokens)
            return
        rungs = 0, *self.ladder
        rung = next((rung for rung in rungs if rung >= width), rungs[-1])
        place = self.rows, self.doublings
        key = *place, rung
        if not rung:
            self._plainly.setdefault(self.rows, set()).add(self.doublings)
        elif not self.knows_plain:
            self._guessed[place] = self._guessed.get(place, 0) + 1
        mean, old, count = self._passes.get(key, (width, seconds, 0))
        new, count = _learned((old, count), seconds)
        if count > SETTLING:
            mean += SMOOTHING * (width - mean)
        elif new < old:
            mean = width
        self._passes[key] = mean, new, count

    def record_draft(self, drafter: Hashable, width: int, seconds: float) -> None:
        """Record the seconds that `drafter` took for all rows with a budget of `width` nodes."""
        times = self._drafting.setdefault(drafter, {}).setdefault(self.rows, {})
        times[width] = _learned(times.get(width), seconds)

    def record_opening(self, drafter: Hashable, tokens: int, seconds: float) -> None:
        """Record that first drafts of sequences with `tokens` in total took `seconds`."""
        old, rate = self._opening.get(drafter), seconds / tokens
        self._opening[drafter] = rate if old is None else (old + rate) / 2

    def relative(self, width: int) -> float:
        """Return the cost of a pass with `width` draft nodes; it does not fall with the width."""
        return on_curve(self.points(), width, PRIOR_SLOPE)

    def per_sequence(self) -> Points:
        """Return (nodes of each sequence, cost of the pass) for `widths`.

        Assumes that all sequences of the pass draft the same number of nodes.
        """
        points, nodes = self.points(), {0, *self.widths}
        if self._padded:
            nodes |= {1 + width for width in self.widths}  # from where the next width is paid
        return [(n, on_curve(points, self.rows * n, PRIOR_SLOPE)) for n in sorted(nodes)]

    def points(self) -> Points:
        """Return the measured (draft nodes of a pass, cost) pairs."""
        if not self.knows_plain:
            return [(0.0, 1.0)]
        here, points = self.doublings, [(0.0, 1.0)]
        near = sorted(self._plainly[self.rows], key=lambda doublings: abs(doublings - here))
        plain = {doublings: self._plain(doublings) for doublings in near}
        least = math.inf
        for below, rung in reversed([*pairwise((0, *self.ladder))]):
            at = next((d for d in near if (self.rows, d, rung) in self._passes), None)
            if at is not None:
                width, seconds, _ = self._passes[self.rows, at, rung]
                # Some kernels are slower at a width than at a wider one; the wider cost is used.
                cost = min(least, seconds / plain[at])
                alike = {below + 1, rung} if self._padded and self.rows == 1 else {width}
                points[1:1] = [(nodes, cost) for nodes in sorted(alike)]
                least = cost if at == here else least
        return points

    def drafting(self, drafter: Hashable, width: int) -> float:
        """Return the cost of drafting within `width` nodes, interpolated between measured widths.

        A width beyond the measured ones costs as much as the last one, until it is tried. The first
        draft does not count, because a draft model reads the prompt for it.
        """
        return on_curve(self.drafts(drafter), width)

    def drafts(self, drafter: Hashable) -> Points:
        """Return the measured (allowed nodes, cost of drafting) pairs."""
        if not self.knows_plain or drafter is None:
            return [(0, 0.0)]
        plain = self._plain(self.doublings)
        times = sorted(self._drafting.get(drafter, {}).get(self.rows, {}).items())
        return [(0, 0.0), *((allowed, s / plain) for allowed, (s, count) in times if count > 1)]

    def opening(self, drafter: Hashable, tokens: int) -> float:
        """Return the cost of a sequence's first draft, for which a draft model reads the whole
        text; 0 if not measured."""
        if not self.knows_plain:
            return 0.0
        return self._opening.get(drafter, 0.0) * tokens / self._plain(self.doublings)


class RecordedCost(CostCurve):
    """A curve with fixed measurements, so that the same drafts are made again.

    Drafting costs nothing, because its time was not recorded. All contexts share one curve.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds` maps the draft nodes of a pass with one row to its seconds, with an entry for
        0. Each further row counts as one more node.
        """
        super().__init__(sorted(seconds.keys() - {0}))
        for width, measured in seconds.items():
            super().record(width, measured)

    def at(self, rows: int, context: int = 0) -> CostCurve:  # noqa: ARG002
        curve = super().at(rows)
        if not curve.knows_plain:
            one = super().at(1)
            for rung in (0, *self.ladder):
                CostCurve.record(curve, rung, one.relative(rung + rows - 1))
        return curve

    def record(self, width: int, seconds: float) -> None:
        pass

    def record_draft(self, drafter: Hashable, width: int, seconds: float) -> None:
        pass

    def record_opening(self, drafter: Hashable, tokens: int, seconds: float) -> None:
        pass


def _learned(before: tuple[float, int] | None, seconds: float) -> tuple[float, int]:
    """Return the expected seconds after one more measurement, and the number of measurements."""
    old, count = before or (seconds, 0)
    if count < SETTLING:
        # The first passes of a width are slow (warm-up, compilation). If their mean were kept, the
        # width would look expensive, never be chosen again, and never be corrected.
        return min(old, seconds), count + 1
    # A pass that other work on the machine interrupts must not change the cost much.
    old = min(old, 2 * seconds)
    return old + SMOOTHING * (min(seconds, 2 * old) - old), count + 1


def on_curve(points: Points, width: float, least_slope: float | None = None) -> float:
    """Return the cost of a width by linear interpolation of (width, cost) points, made monotonic.

    Beyond the last point the curve is flat, or, with `least_slope`, continues with the overall
    slope, at least `least_slope`.
    """
    below, cost = points[0]
    for measured, seen in points[1:]:
        seen = max(cost, seen)
        if measured >= width:
            return cost + (seen - cost) * (width - below) / (measured - below)
        below, cost = measured, seen
    if least_slope is None:
        return cost
    slope = (cost - points[0][1]) / below if below else 0.0
    return cost + max(least_slope, slope) * (width - below)
