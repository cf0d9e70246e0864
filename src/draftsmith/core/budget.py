"""How many nodes each sequence of a pass may draft.

One rule decides, for a pass as a whole: its nodes are those with which it gives most tokens per
unit of cost. `pick` applies it before drafting, with what drafts of each depth have brought
(`share`), and after it, with the probabilities that a drafter states (`loop.py:trim`). What nodes
cost is in `cost.py`. `auto` applies the rule to one node at a time (`drafters/tree_search.py`).

An automatic budget keeps a promise: never much slower than plain decoding, however bad the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import merge
from typing import Protocol

from draftsmith.core.cost import LADDER, PRIOR_SLOPE, CostCurve, on_curve

RETRY_WIDTH = 4
"""Most nodes of a draft that only finds out whether drafting pays again."""

RETRY_COST = 0.1
"""Most plain passes that the nodes of such a draft may cost, if it has more than one. Behind a long
context on a CPU a single node costs as much."""

LONGEST_PAUSE = 16
"""Steps between retries at most: a copy that starts meanwhile is missed for that long."""

HARMLESS = 0.01
"""Plain passes that asking a drafter in vain may take a pass, with the pauses."""

SMOOTHING = 0.2
"""Weight of the last draft in what drafts have brought."""

MARGIN = 1.01
"""A wider draft must promise so many times the tokens per unit of cost."""


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
            self.brought += SMOOTHING * (self._gain - self.brought)
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
        reach: Callable[[int], int] = int,
        drafter: Hashable = None,
    ) -> None:
        """`reach`: how deep the drafter's drafts of so many nodes go (`Drafter.reach`).

        `drafter`: whose drafting time counts; None: nobody's.
        """
        self.drafter = drafter
        self.cost = cost
        self.ceiling = ceiling
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
        return _widths([self], self.cost, 0)[0]

    def rungs(self) -> Iterator[tuple[float, int]]:
        """Yield the tokens and the nodes that each rung of the ladder adds to a draft."""
        width, tokens = 0, 0.0
        for rung in LADDER:
            wider = min(rung, self.ceiling)
            if wider == width:
                return
            more = self.expected(self.reach(wider))
            yield more - tokens, wider - width
            width, tokens = wider, more

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
        rate = max(SMOOTHING, 1 / (1 + self._attempts))
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
        best = _widths([*autos.values()], cost, sum(widths))
        for (i, budget), width in zip(autos.items(), best, strict=True):
            widths[i] = width or budget.retry
    return widths


def _widths(budgets: Sequence[AutoBudget], cost: CostCurve, spent: int) -> list[int]:
    """Return the nodes of each sequence that pay, beside `spent` ones; what drafting takes counts.

    A drafter drafts for all its sequences at once.
    """
    points = cost.points()
    drafts = {budget.drafter: cost.drafts(budget.drafter) for budget in budgets}

    def cost_of(nodes: int, taken: Sequence[int]) -> float:
        asked = dict.fromkeys(drafts, 0)
        for budget, width in zip(budgets, taken, strict=True):
            asked[budget.drafter] = max(width, asked[budget.drafter])
        drafting = sum(on_curve(drafts[drafter], most) for drafter, most in asked.items())
        return on_curve(points, nodes, PRIOR_SLOPE) + drafting

    rungs = [budget.rungs() for budget in budgets]
    return pick(rungs, float(cost.rows), spent, cost_of, MARGIN)


def pick(
    offers: Sequence[Iterable[tuple[float, int]]],
    tokens: float,
    spent: int,
    cost: Callable[[int, Sequence[int]], float],
    margin: float = 1.0,
) -> list[int]:
    """Return how many nodes of each sequence give the pass most tokens per unit of cost.

    `offers`: of each sequence (tokens, nodes) to be added, in this order. Next is always that of
    whichever sequence promises most by node. The pass gives `tokens` and has `spent` nodes in any
    case. `cost`: of a pass by its nodes, and by how many each sequence has of these. More nodes
    must give more than `margin` times as much.
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
