"""How many target positions a step may spend on guesses.

The automatic budget keeps a promise: never much slower than plain decoding, however bad the
drafts. It weighs what passes and drafts have cost against what has been accepted lately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from heapq import heapify, heappop, heappush
from typing import Any, Protocol
from weakref import WeakKeyDictionary

LADDER = (1, 2, 4, 8, 16, 32, 64)
"""Draft widths; a short ladder, so that each is measured often and can become a CUDA graph."""

RETRY_WIDTH = 4
"""Most nodes of a draft that only finds out whether drafting pays again."""

RETRY_COST = 0.1
"""Most plain passes that the nodes of such a draft may cost, if it has more than one. Behind a long
context on a CPU a single node costs as much."""

LONGEST_PAUSE = 16
"""Steps between retries at most: a copy that starts meanwhile is missed for that long."""

HARMLESS = 0.01
"""Plain passes that asking a drafter in vain may take a pass, with the pauses."""

Points = list[tuple[float, float]]
"""Widths, rising, each with its cost."""

SETTLING = 4
"""Passes of a width of which the fastest counts; later ones are averaged."""


GUESSED = 4
"""Passes over a number of rows whose widths are decided by the costs of another number."""

SHORT = 1024
"""Cached tokens a row below which all passes are alike; from there on contexts count by doublings.

Reading the weights costs more than reading so many keys, and a short chat learns one curve only.
"""


class CostCurve:
    """Cost of a pass over 1+w positions relative to a plain one, learnt from one model's passes.

    Shared by all sequences of a model. Every number of rows, and of those every doubling of the
    context, has a curve of its own: behind a long context a pass costs more, and a draft relatively
    more or less, as attention is computed. Until a width was measured there, what it cost behind
    the nearest context counts, else it is extrapolated; before anything was measured a cheap pass
    is assumed (what a GPU or a CPU in bfloat16 shows).
    """

    def __init__(
        self,
        prior_slope: float = 0.02,
        smoothing: float = 0.1,
        ladder: Sequence[int] = LADDER,
    ) -> None:
        """`prior_slope`: least rise of the cost by node, beyond the widths that were measured.

        `ladder`: the widths that are told apart; between two of them their mean width counts.
        """
        self.prior_slope = prior_slope
        self.ladder = ladder
        self.smoothing = smoothing
        self.rows = 1
        """Sequences per pass; every batch size has its own curves (`at`)."""
        self.doublings = 0
        """Of the context, from `SHORT` on."""
        self._guessed: dict[tuple[int, int], int] = {}
        """By rows and doublings where no plain pass was measured: others that were."""
        self._passes: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        """By rows, doublings and rung: mean width, seconds, how many."""
        self._plainly: dict[int, set[int]] = {}
        """Rows → doublings at which a plain pass was measured."""
        # Weakly: a draft model that nobody uses any more must not stay for what it took.
        self._drafting: WeakKeyDictionary[Any, dict[int, dict[int, tuple[float, int]]]]
        self._drafting = WeakKeyDictionary()
        """Drafter → rows → width allowed: seconds, how many."""
        self._opening: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def at(self, rows: int, context: int = 0) -> CostCurve:
        """What is known of passes over so many sequences and cached tokens, for all to learn."""
        doublings = (context // (SHORT * rows)).bit_length()
        if (rows, doublings) == (self.rows, self.doublings):
            return self
        curve = copy(self)
        curve.rows, curve.doublings = rows, doublings
        return curve

    def nearest(self, rows: int, context: int = 0) -> CostCurve:
        """What to decide by in such a pass: the curve `at` it, or that of the nearest rows known.

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
        """As many cached tokens as `at` gives this curve for: what to ask a budget with."""
        return (SHORT * self.rows << self.doublings) // 2

    @property
    def knows_plain(self) -> bool:
        """Whether a pass without a draft was measured: without it nothing can be compared."""
        return (self.rows, self.doublings, 0) in self._passes

    def _plain(self, doublings: int) -> float:
        """Seconds of a pass without a draft behind such a context: no more than any other took."""
        keys = ((self.rows, doublings, rung) for rung in (0, *self.ladder))
        return min(self._passes[key][1] for key in keys if key in self._passes)

    def record(self, width: int, seconds: float) -> None:
        """One pass whose drafts had `width` nodes together took `seconds`."""
        rungs = 0, *self.ladder
        rung = next((rung for rung in rungs if rung >= width), rungs[-1])
        place = self.rows, self.doublings
        key = *place, rung
        if not rung:
            self._plainly.setdefault(self.rows, set()).add(self.doublings)
        elif not self.knows_plain:
            self._guessed[place] = self._guessed.get(place, 0) + 1
        mean, old, count = self._passes.get(key, (width, seconds, 0))
        new, count = self._learn((old, count), seconds)
        if count > SETTLING:
            mean += self.smoothing * (width - mean)
        elif new < old:
            mean = width
        self._passes[key] = mean, new, count

    def record_draft(self, drafter: Hashable, width: int, seconds: float) -> None:
        """`drafter`, allowed `width` nodes, took `seconds` to draft for all rows."""
        times = self._drafting.setdefault(drafter, {}).setdefault(self.rows, {})
        times[width] = self._learn(times.get(width), seconds)

    def record_opening(self, drafter: Hashable, tokens: int, seconds: float) -> None:
        """The first drafts of sequences with so many tokens in all took `seconds`."""
        old, rate = self._opening.get(drafter), seconds / tokens
        self._opening[drafter] = rate if old is None else (old + rate) / 2

    def opening(self, drafter: Hashable, tokens: int) -> float:
        """Cost of a sequence's first draft, in plain passes; 0 where unmeasured.

        A draft model reads the whole text for it.
        """
        if not self.knows_plain:
            return 0.0
        return self._opening.get(drafter, 0.0) * tokens / self._plain(self.doublings)

    def _learn(self, known: tuple[float, int] | None, seconds: float) -> tuple[float, int]:
        """The seconds to expect after one more time, and how many times that makes."""
        old, count = known or (seconds, 0)
        if count < SETTLING:
            # The first passes of a width are slow (warming up, compiling). Were they remembered,
            # the width would look costly, not be chosen again, and never be set right.
            return min(old, seconds), count + 1
        # A pass interrupted by other work on the machine is no news about its cost.
        old = min(old, 2 * seconds)
        return old + self.smoothing * (min(seconds, 2 * old) - old), count + 1

    def relative(self, width: int) -> float:
        """Cost of a pass with `width` draft nodes, in plain passes; rises with the width."""
        return self.relatives([width])[0]

    def relatives(self, widths: Sequence[int]) -> list[float]:
        """The same for several widths."""
        points = self.widths()
        return [_on_curve(points, width, self.prior_slope) for width in widths]

    def widths(self) -> Points:
        """What was measured: draft nodes of a pass, its cost in plain passes."""
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
        """Cost of drafting within `width` nodes, in plain passes; in proportion where unmeasured.

        Wider than measured it is thought to cost no more: trying corrects that. A first draft says
        nothing, because a draft model reads the prompt for it.
        """
        return _on_curve(self.drafts(drafter), width)

    def drafts(self, drafter: Hashable) -> Points:
        """What was measured: nodes that it was allowed, the cost of drafting in plain passes."""
        if not self.knows_plain or drafter is None:
            return [(0, 0.0)]
        plain = self._plain(self.doublings)
        times = sorted(self._drafting.get(drafter, {}).get(self.rows, {}).items())
        return [(0, 0.0), *((allowed, s / plain) for allowed, (s, count) in times if count > 1)]


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
        super().__init__(
            ladder=sorted({width for curve in curves.values() for width in curve} - {0})
        )
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


def _on_curve(
    points: Sequence[tuple[float, float]], width: float, least_slope: float | None = None
) -> float:
    """The cost of a width on the line through (width, cost) points, which is made to rise.

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


class Budget(Protocol):
    """Decides the width of each step for one sequence, and learns what it brought."""

    @property
    def width(self) -> int:
        """Most nodes that a step may spend."""

    def next(self, rows: int, context: int) -> int:
        """Nodes the next step may spend, in a pass over so many sequences and cached tokens.

        Of a curve that is `at` the pass already, these are its `rows` and `context`.
        """

    def record(self, depth: int, accepted: int, nodes: int = 0) -> None:
        """A step drafted `nodes` down to `depth`, and `accepted` tokens of it held.

        Depth 0: it carried probes alone, which bring nothing in the same step.
        """


class FixedBudget:
    """The same width every step: the papers' setting, and what makes counts repeatable."""

    def __init__(self, width: int) -> None:
        self.width = width

    def next(self, rows: int, context: int) -> int:  # noqa: ARG002
        return self.width

    def record(self, depth: int, accepted: int, nodes: int = 0) -> None:
        pass


class OpenBudget(FixedBudget):
    """All that a drafter may want, for one that weighs `cost` itself (`Context.cost`).

    Pauses while asking it takes more than its drafts bring beyond what their nodes cost: even one
    that says nothing takes time, and in a pass that many share a node costs much.
    """

    def __init__(self, cost: CostCurve, width: int, drafter: Hashable = None) -> None:
        """`drafter`: whose drafting time counts; None: nobody's, so nothing pauses."""
        super().__init__(width)
        self.cost = cost
        self.drafter = drafter
        self.brought = 0.3
        """Tokens accepted a pass, less what their drafts' nodes cost in plain passes, of late."""
        self._asked = False
        self._gain = 0.0
        self._pause = 0
        self._pause_length = 1

    def next(self, rows: int, context: int) -> int:
        self.cost = cost = self.cost.nearest(rows, context)
        if not cost.knows_plain:
            return 0
        if self._asked:
            self.brought += 0.2 * (self._gain - self.brought)
            self._asked, self._gain = False, 0.0
            taken = cost.drafting(self.drafter, self.width)
            if self.brought < taken:
                # No longer than keeps it harmless: what is cheap to ask misses few copies.
                self._pause = min(self._pause_length, int(taken / HARMLESS))
                self._pause_length = min(2 * self._pause_length, LONGEST_PAUSE)
            else:
                self._pause_length = 1
        if self._pause:
            self._pause -= 1
            return 0
        self._asked = True
        return self.width

    def record(self, depth: int, accepted: int, nodes: int = 0) -> None:  # noqa: ARG002
        # As if all sequences of the pass had drafted alike: then each pays for its own.
        self._gain = accepted + 1 - self.cost.relative(self.cost.rows * nodes)


class AutoBudget:
    """The width with the best expected tokens per second; pauses when no width pays.

    `survival[d]` is the smoothed share of attempts in which at least d+1 tokens were accepted;
    beyond the depths tried it is continued geometrically, so success widens the drafts by itself.
    """

    def __init__(
        self,
        cost: CostCurve,
        ceiling: int = LADDER[-1],
        smoothing: float = 0.2,
        reach: Callable[[int], int] = int,
        drafter: Hashable = None,
    ) -> None:
        """`reach`: how deep the drafter's drafts of so many nodes go (`Drafter.reach`).

        `drafter`: whose drafting time counts; None: nobody's.
        """
        self.drafter = drafter
        self.cost = cost
        self.ceiling = ceiling
        self.smoothing = smoothing
        self.reach = reach
        self.survival: list[float] = [0.7, 0.55, 0.45, 0.4]
        self._attempts = 0
        self._pause = 0
        self._pause_length = 1
        self._probed = False

    @property
    def width(self) -> int:
        return self.ceiling

    def next(self, rows: int, context: int) -> int:
        return self.best_width() or self.retry if self.awake(rows, context) else 0

    def awake(self, rows: int, context: int) -> bool:
        """Whether it drafts in the next pass, as for `next`; counts pauses down."""
        self.cost = self.cost.nearest(rows, context)
        if self.cost.knows_plain and self._pause > 0:
            self._pause -= 1
            return False
        return self.cost.knows_plain

    @property
    def retry(self) -> int:
        """Nodes to find out with whether drafting pays again."""
        widths = sorted({min(width, RETRY_WIDTH, self.ceiling) for width in LADDER})
        useful = [width for width in widths if self.reach(width)] or widths[-1:]
        paid = [width for width in useful if self.cost.relative(width) <= 1 + RETRY_COST]
        return max(paid, default=useful[0])

    def best_width(self) -> int:
        """The ladder width with the most expected tokens per unit of cost; 0 if plain is best."""
        return _widest_that_pays({0: self}, self.cost, 0).get(0, 0)

    def expected(self, depth: int) -> float:
        """Expected accepted tokens of a draft `depth` deep."""
        known = self.survival[:depth]
        beyond = depth - len(known)
        if not beyond:
            return sum(known)
        ratio = self._tail_ratio(known)
        return sum(known) + known[-1] * ratio * (1 - ratio**beyond) / (1 - ratio)

    @staticmethod
    def _tail_ratio(survival: list[float]) -> float:
        """Survival from one depth to the next, where it was last seen."""
        return min(0.98, survival[-1] / survival[-2]) if survival[-2] > 0 else 0.0

    def record(self, depth: int, accepted: int, nodes: int = 0) -> None:  # noqa: ARG002
        probed, depth = not depth, max(depth, 1)
        ratio = self._tail_ratio(self.survival)
        while len(self.survival) < depth:
            self.survival.append(ratio * self.survival[-1])
        # The first attempts weigh more: the start is a guess, they are facts.
        self._attempts += 1
        rate = max(self.smoothing, 1 / (1 + self._attempts))
        for d, old in enumerate(self.survival):
            if d < depth or accepted < depth:  # a failed draft says as much about deeper ones
                seen = float(accepted > d)
            else:  # not tried: hope a little, or a run of short drafts would never widen again
                seen = max(old, 0.5 * self.survival[depth - 1])
            self.survival[d] = old + rate * (seen - old)
        if self.best_width() > 0:
            self._pause_length = 1
        elif not probed or self._probed:  # what a first probe found is for the next step to draft
            self._pause = self._pause_length
            self._pause_length = min(2 * self._pause_length, LONGEST_PAUSE)
        self._probed = probed


def share(budgets: Sequence[Budget], context: int = 0) -> list[int]:
    """Nodes for each sequence of a pass, the automatic ones decided together.

    `context`: their cached tokens. Alone it is what the budget says by itself (`AutoBudget.next`).
    """
    at = len(budgets), context
    autos = {i: b for i, b in enumerate(budgets) if isinstance(b, AutoBudget) and b.awake(*at)}
    widths = [0 if isinstance(b, AutoBudget) else b.next(*at) for b in budgets]
    if autos:
        cost = next(iter(autos.values())).cost
        best = _widest_that_pays(autos, cost, sum(widths))
        for i, budget in autos.items():
            widths[i] = best.get(i, 0) or budget.retry
    return widths


def _widest_that_pays(
    budgets: Mapping[int, AutoBudget], cost: CostCurve, spent: int
) -> dict[int, int]:
    """Ladder widths with the most expected tokens per unit of cost of the pass; empty: none pay.

    Rung by rung, where a node more promises most; `spent` nodes are in the pass in any case, which
    gives each of its sequences a token. A drafter drafts for all its sequences at once.
    """
    widths, slope = cost.widths(), cost.prior_slope
    drafts = {budget.drafter: cost.drafts(budget.drafter) for budget in budgets.values()}
    asked = dict.fromkeys(drafts, 0)
    taken = dict.fromkeys(budgets, 0)
    best: dict[int, int] = {}
    tokens = float(cost.rows)
    best_rate = tokens / _on_curve(widths, spent, slope)
    ladder = [_rung(i, budget, 0, 0) for i, budget in budgets.items()]
    heapify(ladder)
    while ladder:
        _, i, number, width, gain = heappop(ladder)
        budget = budgets[i]
        spent, tokens = spent + width - taken[i], tokens + gain
        taken[i], asked[budget.drafter] = width, max(width, asked[budget.drafter])
        drafting = sum(_on_curve(drafts[drafter], most) for drafter, most in asked.items())
        rate = tokens / (_on_curve(widths, spent, slope) + drafting)
        if rate > best_rate * 1.01:
            best, best_rate = dict(taken), rate
        if width < budget.ceiling and number + 1 < len(LADDER):
            heappush(ladder, _rung(i, budget, number + 1, width))
    return best


def _rung(i: int, budget: AutoBudget, number: int, now: int) -> tuple[float, int, int, int, float]:
    """A sequence's next step up the ladder, from `now`; in order, the most promising is first."""
    width = min(LADDER[number], budget.ceiling)
    gain = budget.expected(budget.reach(width)) - budget.expected(budget.reach(now))
    return -gain / max(1, width - now), i, number, width, gain


def likeliest(
    reaches: Mapping[int, Sequence[float]], cost: CostCurve, tokens: float, spent: int
) -> dict[int, list[int]]:
    """Of each draft the nodes with which the pass gives most tokens per unit of cost.

    `reaches`: by draft, how probable each node is to be accepted, parents before and no less than
    their children. The pass gives `tokens` and has `spent` nodes in any case.
    """
    nodes = sorted((-reach, i, n) for i, one in reaches.items() for n, reach in enumerate(one))
    widths, slope = cost.widths(), cost.prior_slope
    best, best_rate = 0, tokens / _on_curve(widths, spent, slope)
    for count, (reach, _, _) in enumerate(nodes, 1):
        tokens -= reach
        rate = tokens / _on_curve(widths, spent + count, slope)
        if rate > best_rate:
            best, best_rate = count, rate
    kept: dict[int, list[int]] = {i: [] for i in reaches}
    for _, i, n in sorted(nodes[:best], key=lambda node: node[2]):
        kept[i].append(n)
    return kept
