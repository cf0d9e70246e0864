"""auto: one tree from a learnt mixture of what followed contexts of several lengths.

Ours: no paper. Prediction as in context-mixing compressors (PAQ, CMIX), growth as in best-first search;
docs/algorithms/auto.md has the algorithm and its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from draftsmith.core.budget import LADDER, Budget, CostCurve, OpenBudget
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.mixture.belief import Belief
from draftsmith.drafters.mixture.candidates import CELLS, new_work
from draftsmith.drafters.mixture.compiled import floats, values
from draftsmith.drafters.mixture.contexts import REACH, Bank, hash_on, index, new_bank, put
from draftsmith.drafters.mixture.grow import (
    FIELDS,
    LABEL,
    LARGEST,
    PARENT,
    SOURCE,
    cost,
    grow,
    new_tree,
    read,
)  # fmt: skip
from draftsmith.drafters.mixture.prior import prior
from draftsmith.drafters.ngrams import find

NODE_COST = 0.015
"""What a node is taken to make a pass dearer where no curve says it, in plain passes."""

RATE = 0.004
"""Of the weights' learning while decoding."""
MEMORY = 255.0
"""Cases a cell remembers."""
PACE = 0.05
"""Weight of the last pass in what passes bring and cost at present."""
CURVE_KEPT = 8
"""Drafts for which a cost curve is read once."""


@dataclass(frozen=True, repr=False)
class Auto(Drafter):
    """A tree of what most likely follows, by a mixture that learns while it decodes.

    Contexts of the last 0, 1, 2, 8 and 32 tokens say what followed them in prompt, prediction and
    answer; a logistic mixture makes probabilities of it; the tree grows by the likeliest node, as
    long as that brings more than it costs.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the default: a tree of what followed like contexts, by learnt odds"
    width: ClassVar[int] = LARGEST
    chain: ClassVar[bool] = False

    def bind(self, model: ModelFacts) -> Drafter:
        """It drafts the best chain for a model that verifies nothing else."""
        bound = replace(self)
        object.__setattr__(bound, "chain", model.shape != "tree")
        return bound

    def auto_budget(self, cost: CostCurve) -> Budget:
        """All that it wants: it weighs the cost itself."""
        return OpenBudget(cost, self.preferred_width())

    def open(self, ctx: Context) -> DrafterState:
        state = Mixture(prior(1), chain=self.chain)
        state.follow(ctx, len(ctx.ids))
        return state


class Mixture(DrafterState):
    """One sequence's contexts, and what was learnt of them."""

    def __init__(self, belief: Belief, *, chain: bool = False, earlier: Bank | None = None) -> None:
        """`belief` learns from now on; `earlier`: a second bank, of earlier answers."""
        self.belief, self.chain = belief, chain
        self.earlier = earlier or new_bank()
        self.work, self.tree = new_work(len(belief.chance) // CELLS), new_tree()
        self.tokens, self.cost = 1.6, 1.0
        """What a pass brings and costs at present."""
        self.widths, self.costs = floats((0, LARGEST)), floats((1, 1 + NODE_COST * LARGEST))
        self.drafts = 0
        self.begin()

    def begin(self) -> None:
        """Forget all text, and nothing that was learnt."""
        self.own = new_bank()
        self.length = self.offset = 0
        """Tokens indexed, and those before the context's own: the prediction and what leads to it."""
        self.twin: int | None = None

    def truncate(self, length: int) -> None:
        # Counts cannot be taken back one by one: nobody knows which followers had been dropped.
        if length < self.length - self.offset:
            self.begin()

    def follow(self, ctx: Context, end: int) -> None:
        """Index the context's ids up to `end`."""
        if not self.length and ctx.prediction:
            # As if it were the answer; where the answer leaves it, shorter contexts find it again.
            head = ctx.ids[max(0, ctx.prompt_length - REACH) : ctx.prompt_length]
            self._put([*head, *ctx.prediction])
            hash_on(self.own, 0, len(head))
            self.length = self.offset = len(head) + len(ctx.prediction)
            index(self.own, len(head), self.length, 0)
            twin = find(ctx.prediction, ctx.ids)
            self.twin = None if twin is None else twin - len(head)
        start, self.length = self.length, self.offset + end
        if start < self.length:
            self._put(ctx.ids[start - self.offset : end], start)
            index(self.own, start, self.length, self.offset)

    def _put(self, ids: Sequence[int], start: int = 0) -> None:
        self.own = put(self.own, start, ids, LARGEST)

    def draft(self, ctx: Context) -> Draft:
        self.follow(ctx, len(ctx.ids))
        if ctx.cost is not None and self.drafts % CURVE_KEPT == 0:
            # All sequences of a pass draft about as much.
            rungs, rows = (0, *LADDER), ctx.cost.rows
            self.widths = floats(rungs)
            self.costs = floats([ctx.cost.relative(rows * rung) for rung in rungs])
        self.drafts += 1
        most = min(ctx.budget, LARGEST)
        n = grow(
            self.own, self.length, self.earlier, self.belief, self.work, self.tree, most,
            ctx.depth, self.chain, self.widths, self.costs, self.tokens / self.cost, self.offset,
        )  # fmt: skip
        if not n:
            return EMPTY
        nodes = values(self.tree.nodes, n * FIELDS)
        return Draft(
            tuple(nodes[LABEL::FIELDS]),
            tuple(nodes[PARENT::FIELDS]),
            (Auto.name,) * n,
            origins=tuple(map(self._origin, nodes[SOURCE::FIELDS])),
            chances=tuple(values(self.tree.chances, n)),
        )

    def _origin(self, place: int) -> int:
        """Where in the context's ids a place of the bank's is; -1: nowhere."""
        if place >= self.offset:
            return place - self.offset
        return -1 if place < 0 or self.twin is None else self.twin + place

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        told = len(outcome.verdict.tokens)
        self.follow(ctx, max(self.length - self.offset, len(ctx.ids) - told))
        start, self.length = self.length, self.offset + len(ctx.ids)
        self._put(ctx.ids[start - self.offset :], start)
        read(
            self.own, start, self.length, self.offset, self.earlier, self.belief, self.work, RATE,
            MEMORY, 1.0,
        )  # fmt: skip
        spent = cost(self.widths, self.costs, outcome.draft.size)
        self.tokens += PACE * (told - self.tokens)
        self.cost += PACE * (spent - self.cost)
