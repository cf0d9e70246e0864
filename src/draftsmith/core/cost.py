"""What a pass costs, by the nodes that are drafted: learned from the passes themselves.

Costs are in plain passes: 1 is a pass of the same rows, after the same context, without drafts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

LADDER = (1, 2, 4, 8, 16, 32, 64)
"""Draft widths; a short ladder, so that each is measured often and can become a CUDA graph."""

SHORT = 1024
"""Cached tokens a row below which all passes are alike; beyond, contexts count by doublings.

Reading the weights costs more than reading so many keys, and a short chat learns one curve only.
"""

PRIOR_SLOPE = 0.02
"""Least rise of the cost by node, beyond the widths that were measured."""
SMOOTHING = 0.1
"""Weight of the last pass in the mean of its width."""
SETTLING = 4
"""Passes of a width of which the fastest counts; later ones are averaged."""
GUESSED = 4
"""Passes over a number of rows whose widths are decided by the costs of another number."""

Points = list[tuple[float, float]]
"""(nodes, cost), nodes rising from 0."""


class CostCurve:
    """Costs of one model's passes, for all its sequences.

    Each number of rows, and for each of these every doubling of the context, has a curve of its
    own: after a long context a pass costs more, and a draft relatively more or less, as attention
    is computed. A width that was not measured there costs what it did after the nearest context,
    else the curve is extrapolated. Before anything was measured a cheap pass is assumed (as on a
    GPU, or a CPU in bfloat16).
    """

    def __init__(self, ladder: Sequence[int] = LADDER) -> None:
        """`ladder`: widths with costs of their own; between two of them their mean width counts."""
        self.ladder = ladder
        self.rows = 1
        """Sequences of a pass: see `at`."""
        self.doublings = 0
        """Of the context, from `SHORT` on."""
        self._guessed: dict[tuple[int, int], int] = {}
        """By rows and doublings where no plain pass was measured: others that were."""
        self._passes: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        """By rows, doublings and rung: mean width, seconds, how many."""
        self._plainly: dict[int, set[int]] = {}
        """Rows → doublings at which a plain pass was measured."""
        # Weak keys: the times of a draft model must not keep it alive once it is unused.
        self._drafting: WeakKeyDictionary[Any, dict[int, dict[int, tuple[float, int]]]]
        self._drafting = WeakKeyDictionary()
        """Drafter → rows → nodes that were allowed → seconds, how many."""
        self._opening: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        """Drafter → seconds a token."""

    def at(self, rows: int, context: int = 0) -> CostCurve:
        """Return the curve of passes over so many sequences and cached tokens; both learn alike."""
        doublings = (context // (SHORT * rows)).bit_length()
        if (rows, doublings) == (self.rows, self.doublings):
            return self
        curve = copy(self)
        curve.rows, curve.doublings = rows, doublings
        return curve

    def nearest(self, rows: int, context: int = 0) -> CostCurve:
        """Return the curve to decide by in such a pass: `at` it, or at the nearest rows known.

        The latter until a few passes over so many rows were measured. Then one is made without
        drafts, to compare with. So the rows of a batch that grows, shrinks, or reads prompts beside
        (such passes are no measure) draft meanwhile.
        """
        here = self.at(rows, context)
        place = rows, here.doublings
        if here.knows_plain or self._guessed.get(place, 0) >= GUESSED:
            return here
        known = [n for n, doublings in self._plainly.items() if here.doublings in doublings]
        if not known:
            return here
        near = min(known, key=lambda n: (max(n, rows) / min(n, rows), n))
        return self.at(near, context * near // rows)

    @property
    def context(self) -> int:
        """A number of cached tokens for which `at` returns this curve."""
        return (SHORT * self.rows << self.doublings) // 2

    @property
    def knows_plain(self) -> bool:
        """Whether a pass without a draft was measured; before, nothing can be compared."""
        return (self.rows, self.doublings, 0) in self._passes

    def _plain(self, doublings: int) -> float:
        """Seconds of a pass without a draft after such a context: no more than any other took."""
        keys = ((self.rows, doublings, rung) for rung in (0, *self.ladder))
        return min(self._passes[key][1] for key in keys if key in self._passes)

    def record(self, width: int, seconds: float) -> None:
        """Learn that a pass whose drafts had `width` nodes together took `seconds`."""
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
        """Learn that `drafter`, allowed `width` nodes, took `seconds` to draft for all rows."""
        times = self._drafting.setdefault(drafter, {}).setdefault(self.rows, {})
        times[width] = _learned(times.get(width), seconds)

    def record_opening(self, drafter: Hashable, tokens: int, seconds: float) -> None:
        """Learn that the first drafts of sequences with `tokens` in all took `seconds`."""
        old, rate = self._opening.get(drafter), seconds / tokens
        self._opening[drafter] = rate if old is None else (old + rate) / 2

    def relative(self, width: int) -> float:
        """Return the cost of a pass with `width` draft nodes; it rises with the width."""
        return on_curve(self.points(), width, PRIOR_SLOPE)

    def line(self) -> Points:
        """Return (nodes that each sequence drafts, cost of the pass) up the ladder.

        All sequences of the pass are taken to draft alike.
        """
        points = self.points()
        return [(n, on_curve(points, self.rows * n, PRIOR_SLOPE)) for n in (0, *LADDER)]

    def points(self) -> Points:
        """Return what was measured: draft nodes of a pass, its cost."""
        if not self.knows_plain:
            return [(0.0, 1.0)]
        here, points = self.doublings, [(0.0, 1.0)]
        near = sorted(self._plainly[self.rows], key=lambda doublings: abs(doublings - here))
        plain = {doublings: self._plain(doublings) for doublings in near}
        least = math.inf
        for rung in reversed(self.ladder):
            at = next((d for d in near if (self.rows, d, rung) in self._passes), None)
            if at is not None:
                width, seconds, _ = self._passes[self.rows, at, rung]
                # Some kernels are slower at a width than at a wider one: that many may be drafted.
                cost = min(least, seconds / plain[at])
                points.insert(1, (width, cost))
                least = cost if at == here else least
        return points

    def drafting(self, drafter: Hashable, width: int) -> float:
        """Return the cost of drafting within `width` nodes; in proportion where unmeasured.

        Wider than measured it is taken to cost no more: trying corrects that. A first draft does
        not count, because a draft model reads the prompt for it.
        """
        return on_curve(self.drafts(drafter), width)

    def drafts(self, drafter: Hashable) -> Points:
        """Return what was measured: nodes that a drafter was allowed, the cost of drafting."""
        if not self.knows_plain or drafter is None:
            return [(0, 0.0)]
        plain = self._plain(self.doublings)
        times = sorted(self._drafting.get(drafter, {}).get(self.rows, {}).items())
        return [(0, 0.0), *((allowed, s / plain) for allowed, (s, count) in times if count > 1)]

    def opening(self, drafter: Hashable, tokens: int) -> float:
        """Return the cost of a sequence's first draft, for which a draft model reads the whole
        text; 0 where unmeasured."""
        if not self.knows_plain:
            return 0.0
        return self._opening.get(drafter, 0.0) * tokens / self._plain(self.doublings)


class RecordedCost(CostCurve):
    """A curve that was measured before and learns nothing, so that the same drafts are made again.

    Drafting costs nothing on it: what that takes was not recorded. It is the same for all contexts.
    """

    def __init__(
        self, seconds: Mapping[int, float], batches: Mapping[int, Mapping[int, float]] | None = None
    ) -> None:
        """`seconds` of one row's pass by its draft nodes, 0 among them.

        `batches`: the same by the rows of a pass, the nodes of all of them together. A row that
        was not measured counts as one more node of the next smaller pass that was.
        """
        curves = {**(batches or {}), 1: seconds}
        super().__init__(sorted({width for curve in curves.values() for width in curve} - {0}))
        for rows, curve in curves.items():
            for width, measured in curve.items():
                CostCurve.record(super().at(rows), width, measured)

    def at(self, rows: int, context: int = 0) -> CostCurve:  # noqa: ARG002
        curve = super().at(rows)
        if not curve.knows_plain:
            known = super().at(max(n for n, _, _ in self._passes if n <= rows))
            for rung in (0, *self.ladder):
                CostCurve.record(curve, rung, known.relative(rung + rows - known.rows))
        return curve

    def record(self, width: int, seconds: float) -> None:
        pass

    def record_draft(self, drafter: Hashable, width: int, seconds: float) -> None:
        pass

    def record_opening(self, drafter: Hashable, tokens: int, seconds: float) -> None:
        pass


def _learned(known: tuple[float, int] | None, seconds: float) -> tuple[float, int]:
    """Return the seconds to expect after one more measurement, and how many that makes."""
    old, count = known or (seconds, 0)
    if count < SETTLING:
        # The first passes of a width are slow (warming up, compiling). Were they remembered, the
        # width would look costly, not be chosen again, and never be set right.
        return min(old, seconds), count + 1
    # A pass interrupted by other work on the machine is no news about its cost.
    old = min(old, 2 * seconds)
    return old + SMOOTHING * (min(seconds, 2 * old) - old), count + 1


def on_curve(points: Points, width: float, least_slope: float | None = None) -> float:
    """Return the cost of a width on the line through (width, cost) points, which is made to rise.

    It goes on flat, or with `least_slope` given, as steeply as it rose on the whole.
    """
    below, cost = points[0]
    for measured, known in points[1:]:
        known = max(cost, known)
        if measured >= width:
            return cost + (known - cost) * (width - below) / (measured - below)
        below, cost = measured, known
    if least_slope is None:
        return cost
    slope = (cost - points[0][1]) / below if below else 0.0
    return cost + max(least_slope, slope) * (width - below)
