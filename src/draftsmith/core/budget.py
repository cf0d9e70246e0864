"""Number of nodes that each sequence of a pass may draft.

One rule decides for the whole pass: choose the nodes that give the most tokens per unit of cost.
`pick` applies it before drafting, with the tokens that drafts of each depth have brought (`share`),
and again after drafting, with the probabilities that a drafter states (`loop.py:trim`). The cost of
nodes is in `cost.py`. `auto` applies the rule to one node at a time (`drafters/tree_search.py`).

An automatic budget keeps a promise: never much slower than plain decoding, however bad the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import merge
from typing import Protocol

from draftsmith.core.cost import LADDER, PRIOR_SLOPE, CostCurve, on_curve
from draftsmith.values import number

RETRY_WIDTH = 4
"""Maximum nodes of a draft that only tests whether drafting pays again."""

RETRY_COST = 0.1
"""Maximum cost of the nodes of such a draft, in plain passes, if it has more than one. After a long
context on a CPU, a single node costs as much."""

LONGEST_PAUSE = 16
"""Maximum steps between two such drafts; a copy that starts in between is missed until then."""

HARMLESS = 0.01
"""Overhead allowed for drafters that propose nothing, as a fraction of a plain pass."""

SMOOTHING = 0.2
"""Weight of the last draft in the moving average of accepted tokens."""

MARGIN = 1.01
"""Factor by which a wider draft must increase the tokens per unit of cost."""


class Budget(Protocol):
    """Decides the width of each step for one sequence, and learns from the outcome."""

    @property
    def width(self) -> int:
        """Maximum nodes of a step."""

    @property
    def cost(self) -> CostCurve | None:
        """Cost of the passes that the last step was decided by; None: the width is fixed."""

    def next(self, rows: int, context: int) -> int:
        """Return the nodes for the next step, in a pass with `rows` sequences and `context` tokens.

        `context` is the number of cached tokens of all rows.
        """

    def record(self, depth: int, accepted: int, nodes: int = 0) -> None:
        """Record a step that drafted `nodes` down to `depth`, of which `accepted` were accepted.

        Depth 0 means that the draft had probes only, which give no tokens in the same step.
        """


class FixedBudget:
    """The same width in every step: the papers' setting, with repeatable counts."""

    cost: CostCurve | None = None

    def __init__(self, width: int) -> None:
        self.width = width

    def next(self, rows: int, context: int) -> int:  # noqa: ARG002
        return self.width

    def record(self, depth: int, accepted: int, nodes: int = 0) -> None:
        pass


class OpenBudget:
    """A fixed maximum for a drafter that weighs the cost itself (`Context.cost`).

    Pauses while drafting costs more than its drafts bring beyond the cost of their nodes. A drafter
    that proposes nothing still takes time, and in a pass with many rows a node costs much.
    """

    def __init__(self, cost: CostCurve, width: int, drafter: Hashable = None) -> None:
        """`drafter`: the key of drafting times in `cost`; None: drafting is free, without
        pauses."""
        self.width = width
        self.cost = cost
        self.drafter = drafter
        self.brought = 0.3
        """Moving average per pass: accepted tokens less the cost of their nodes in plain passes."""
        self._asked = False
        self._gain = 0.0
        self._pause = 0
        self._pause_length = 1

    def next(self, rows: int, context: int) -> int:
        self.cost = cost = self.cost.nearest(rows, context)
        if not cost.knows_plain:
            return 0
        if self._asked:
            self.brought += SMOOTHING * (self._gain - self.brought)
            self._asked, self._gain = False, 0.0
            taken = cost.drafting(self.drafter, self.width)
            if self.brought < taken:
                # A pause no longer than needed for `HARMLESS`: cheap drafters miss few copies.
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
        # Assumes that all sequences of the pass drafted alike, so each pays for its own nodes.
        self._gain = accepted + 1 - self.cost.relative(self.cost.rows * nodes)


class AutoBudget:
    """The width with the most expected tokens per unit of cost; pauses when no width pays.

    `survival[d]` is the smoothed share of attempts with at least d+1 accepted tokens. Beyond the
    depths tried it is extrapolated geometrically, so that successful drafts become wider.
    """

    def __init__(
        self,
        cost: CostCurve,
        ceiling: int = LADDER[-1],
        reach: Callable[[int], int] = int,
        drafter: Hashable = None,
    ) -> None:
        """`reach`: maximum depth of a draft with that many nodes (`Drafter.reach`).

        `drafter`: the key of drafting times in `cost`; None: drafting is free. Raises OptionError
        for a reach that is no number of nodes.
        """
        for width in sorted({min(width, ceiling) for width in LADDER}):
            number(f"reach({width}) of {drafter or 'a drafter'}", reach(width), int, least=0)
        self.drafter = drafter
        self.cost = cost
        self.width = ceiling
        self.reach = reach
        self.survival: list[float] = [0.7, 0.55, 0.45, 0.4]
        self._attempts = 0
        self._pause = 0
        self._pause_length = 1
        self._probed = False

    def next(self, rows: int, context: int) -> int:
        return self.best_width() or self.retry if self.awake(rows, context) else 0

    def awake(self, rows: int, context: int) -> bool:
        """Return whether to draft in the next pass (see `next`); counts a pause down."""
        self.cost = self.cost.nearest(rows, context)
        if self.cost.knows_plain and self._pause > 0:
            self._pause -= 1
            return False
        return self.cost.knows_plain

    @property
    def retry(self) -> int:
        """Nodes of a draft that tests whether drafting pays again."""
        widths = sorted({min(width, RETRY_WIDTH, self.width) for width in self.cost.widths})
        useful = [width for width in widths if self.reach(width)] or widths[-1:]
        paid = [width for width in useful if self.cost.relative(width) <= 1 + RETRY_COST]
        return max(paid, default=useful[0])

    def best_width(self) -> int:
        """Return the width with the most expected tokens per unit of cost; 0: plain."""
        return _widths([self], self.cost, 0, round(self.cost.rows))[0]

    def rungs(self) -> Iterator[tuple[float, int]]:
        """Yield (tokens, nodes) that each wider draft adds to the one before."""
        width, tokens = 0, 0.0
        for rung in self.cost.widths:
            wider = min(rung, self.width)
            if wider == width:
                return
            more = self.expected(self.reach(wider))
            yield more - tokens, wider - width
            width, tokens = wider, more

    def expected(self, depth: int) -> float:
        """Return the expected number of accepted tokens of a draft with this depth."""
        measured = self.survival[:depth]
        beyond = depth - len(measured)
        if not beyond:
            return sum(measured)
        ratio = self._tail_ratio(measured)
        return sum(measured) + measured[-1] * ratio * (1 - ratio**beyond) / (1 - ratio)

    @staticmethod
    def _tail_ratio(survival: list[float]) -> float:
        """Return the ratio of the last two entries, for extrapolation."""
        return min(0.98, survival[-1] / survival[-2]) if survival[-2] > 0 else 0.0

    def record(self, depth: int, accepted: int, nodes: int = 0) -> None:  # noqa: ARG002
        probed, depth = not depth, max(depth, 1)
        ratio = self._tail_ratio(self.survival)
        while len(self.survival) < depth:
            self.survival.append(ratio * self.survival[-1])
        # The first attempts weigh more, because the initial values are guesses.
        self._attempts += 1
        rate = max(SMOOTHING, 1 / (1 + self._attempts))
        for d, old in enumerate(self.survival):
            if d < depth or accepted < depth:  # a failed draft says as much about deeper ones
                seen = float(accepted > d)
            else:  # not tried: a small value, so that a run of short drafts can become wider again
                seen = max(old, 0.5 * self.survival[depth - 1])
            self.survival[d] = old + rate * (seen - old)
        if self.best_width() > 0:
            self._pause_length = 1
        elif not probed or self._probed:  # after a first probe, the next step drafts what it found
            self._pause = self._pause_length
            self._pause_length = min(2 * self._pause_length, LONGEST_PAUSE)
        self._probed = probed


def share(budgets: Sequence[Budget], context: int = 0) -> list[int]:
    """Return the nodes of each sequence of a pass; automatic budgets are decided together.

    `context` is the number of cached tokens of all sequences. For a single sequence the result is
    that of `Budget.next`.
    """
    at = len(budgets), context
    autos = {i: b for i, b in enumerate(budgets) if isinstance(b, AutoBudget) and b.awake(*at)}
    widths = [0 if isinstance(b, AutoBudget) else b.next(*at) for b in budgets]
    if autos:
        cost = next(iter(autos.values())).cost
        best = _widths([*autos.values()], cost, sum(widths), len(budgets))
        for (i, budget), width in zip(autos.items(), best, strict=True):
            widths[i] = width or budget.retry
    return widths


def _widths(budgets: Sequence[AutoBudget], cost: CostCurve, spent: int, tokens: int) -> list[int]:
    """Return the nodes of each sequence that pay, in a pass with `spent` other nodes.

    Without nodes the pass gives `tokens`, one for each of its sequences.

    The time of drafting counts; a drafter drafts for all its sequences at once.
    """
    points = cost.points()
    drafts = {budget.drafter: cost.drafts(budget.drafter) for budget in budgets}

    def cost_of(nodes: int, taken: Sequence[int]) -> float:
        widest = dict.fromkeys(drafts, 0)
        for budget, width in zip(budgets, taken, strict=True):
            widest[budget.drafter] = max(width, widest[budget.drafter])
        drafting = sum(on_curve(drafts[drafter], most) for drafter, most in widest.items())
        return on_curve(points, nodes, PRIOR_SLOPE) + drafting

    rungs = [budget.rungs() for budget in budgets]
    return pick(rungs, float(tokens), spent, cost_of, MARGIN)


def pick(
    offers: Sequence[Iterable[tuple[float, int]]],
    tokens: float,
    spent: int,
    cost: Callable[[int, Sequence[int]], float],
    margin: float = 1.0,
) -> list[int]:
    """Return the number of nodes of each sequence that gives the most tokens per unit of cost.

    `offers` has, for each sequence, (tokens, nodes) to add in this order. The offer with the most
    tokens per node of any sequence is added next. Without offers the pass gives `tokens` and has
    `spent` nodes. `cost` returns the cost of a pass from its number of nodes and the nodes added
    for each sequence. More nodes must increase the ratio by more than the factor `margin`.
    """
    taken = [0] * len(offers)
    best, best_rate = list(taken), tokens / cost(spent, taken)
    queues = (
        [(-gain / nodes, i, gain, nodes) for gain, nodes in offer] for i, offer in enumerate(offers)
    )
    for _, i, gain, nodes in merge(*queues):
        taken[i] += nodes
        spent, tokens = spent + nodes, tokens + gain
        rate = tokens / cost(spent, taken)
        if rate > best_rate * margin:
            best, best_rate = list(taken), rate
    return best
