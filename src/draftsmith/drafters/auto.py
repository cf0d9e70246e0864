"""auto: one tree from a learnt mixture of what followed contexts of several lengths.

Ours: no paper. Prediction as in context-mixing compressors (PAQ, CMIX), growth as in best-first
search; docs/algorithms/auto.md has the algorithm and its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from draftsmith.compiled import COMPILED
from draftsmith.core.budget import LADDER, Budget, CostCurve, OpenBudget
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.stats import PREDICTION
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.longest_match import LongestMatch
from draftsmith.drafters.mixture import bigrams
from draftsmith.drafters.mixture.belief import Belief, banks_of
from draftsmith.drafters.mixture.candidates import (
    CHANCE,
    ELSEWHERE,
    FIELDS,
    FORCED,
    LABEL,
    LARGEST,
    PARENT,
    SOURCE,
    TREE,
    WAITING,
    new_work,
)
from draftsmith.drafters.mixture.compiled import Ints, filled, floats, ints, values
from draftsmith.drafters.mixture.contexts import REACH, Bank, new_bank, put
from draftsmith.drafters.mixture.grow import (
    ALLOWED,
    FORBIDDEN,
    NOTHING,
    Wanted,
    advance,
    proceed,
)
from draftsmith.drafters.mixture.memory import MEMORY, Answers
from draftsmith.drafters.mixture.prior import copied, prior
from draftsmith.drafters.mixture.rows import BEST, KEPT, WIDTH, best
from draftsmith.drafters.ngrams import find
from draftsmith.drafters.options import switches
from draftsmith.text.grammar import GrammarState, Scout

EARLIER = "auto.earlier"
"""The source of nodes that only earlier answers led to."""
GRAMMAR = "grammar"
"""The source of nodes that only the answer's grammar led to."""
_ELSEWHERE = {ELSEWHERE: EARLIER, FORCED: GRAMMAR}
NODE_COST = 0.013
"""What a node is taken to make a pass dearer where no curve says it, in plain passes."""

RATE = 0.007
"""Of the weights' learning while decoding."""
KEPT_RATE = 0.003
"""The same where what is learnt is kept from answer to answer."""
PACE = 0.05
"""Weight of the last pass in what passes bring and cost at present."""
CURVE_KEPT = 8
"""Drafts that read the cost curve each; later ones read it once in so many, or when it changes."""
FIXED = 330_000 if COMPILED else 1 << 22
"""Bytes of a state beside its bank at most: rows, belief, work; plain lists take more."""
TOO_DEAR = 0.1
"""Plain passes that growing a tree may take: about what it brings over `longest_match`."""


@dataclass(frozen=True, repr=False)
class Auto(Drafter):
    """A tree of what most likely follows, by a mixture that learns while it decodes.

    Contexts of the last 0, 1, 2, 8 and 32 tokens say what followed them in prompt, prediction and
    answer, and the target's logits what it held possible after the last token before; a logistic
    mixture makes probabilities of it; the tree grows by the likeliest node, as long as that brings
    more than it costs.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the default: a tree of what followed like contexts, by learnt odds"
    width: ClassVar[int] = LARGEST
    chain: ClassVar[bool] = False
    bigrams: ClassVar[Ints | None] = None
    logits: bool = True
    """Whether it also drafts what the target's logits said; without, token ids alone decide, and a
    replay of a recording makes the very drafts of the live run."""
    grammar: bool = True
    """Whether it drafts what the answer's grammar leaves hardly a choice about, and nothing that it
    forbids."""
    tuned: bool = True
    """Whether the target's logits begin with what `draftsmith tune auto` kept of this model, if
    that was ever run."""

    def __post_init__(self) -> None:
        switches(self)

    def bind(self, model: ModelFacts) -> Drafter:
        """It drafts the best chain for a model that verifies nothing else."""
        bound = replace(self)
        object.__setattr__(bound, "chain", model.shape != "tree")
        if self.logits and self.tuned:
            object.__setattr__(bound, "bigrams", bigrams.load(model))
        return bound

    def auto_budget(self, cost: CostCurve) -> Budget:
        """All that it wants: it weighs nodes itself, and pauses where asking does not pay."""
        return OpenBudget(cost, self.preferred_width(), self)

    def bytes_for(self, positions: int) -> int:
        """Of banks, and what a state takes however short the text is."""
        return FIXED + super().bytes_for(positions)

    def open(self, ctx: Context) -> DrafterState:
        kind: dict[str, Any] = {
            "chain": self.chain, "logits": self.logits, "grammar": self.grammar,
            "bigrams": self.bigrams,
        }  # fmt: skip
        if isinstance(ctx.earlier, Answers):
            state: Mixture = Remembering(ctx.earlier, **kind)
        else:
            state = Mixture(prior(1), **kind)
        state.take(ctx)
        state.read()
        return state if COMPILED else Affordable(self, state)


class Affordable(DrafterState):
    """Where numba is missing: `longest_match` as soon as trees have cost more than they bring."""

    def __init__(self, config: Auto, state: DrafterState) -> None:
        self.config, self.state = config, state
        self.budget: Budget | None = None
        """Of `longest_match`."""

    def draft(self, ctx: Context) -> Draft:
        if ctx.cost is None:
            return self.state.draft(ctx)
        if self.budget is None and ctx.cost.drafting(self.config, ctx.budget) > TOO_DEAR:
            matcher = LongestMatch()
            self.state, self.budget = matcher.open(ctx), matcher.auto_budget(ctx.cost)
        if self.budget is not None:
            width = self.budget.next(ctx.cost.rows, ctx.cost.context)
            ctx = replace(ctx, budget=min(ctx.budget, width))
        return self.state.draft(ctx) if ctx.budget else EMPTY

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        if self.budget is not None and len(outcome.draft):
            self.budget.record(outcome.draft.depth, len(outcome.verdict.path))
        self.state.observe(ctx, outcome)

    def end(self, ctx: Context) -> None:
        self.state.end(ctx)

    def truncate(self, length: int) -> None:
        self.state.truncate(length)


class Mixture(DrafterState):
    """One sequence's contexts, and what was learnt of them."""

    def __init__(
        self,
        belief: Belief,
        *,
        chain: bool = False,
        logits: bool = True,
        grammar: bool = True,
        bigrams: Ints | None = None,
        earlier: Bank | None = None,
    ) -> None:
        """`belief` learns from now on; `bigrams`: rows to begin with; `earlier`: a second bank, of
        earlier answers."""
        self.belief, self.chain, self.logits, self.grammar = belief, chain, logits, grammar
        self.bigrams = bigrams
        self.earlier = earlier or new_bank()
        self.rate = RATE if earlier is None else KEPT_RATE
        self.work = new_work(banks_of(belief))
        self.tokens, self.cost = 1.6, 1.0
        """What a pass brings and costs at present."""
        self.widths = floats([0.0, LARGEST])
        self.curve = 0, 0
        """The rows and doublings of the cost curve that was read last."""
        self.costs = floats([1.0, 1.0 + NODE_COST * LARGEST])
        """Of a pass: nodes that each of its sequences drafts, and cost in plain passes."""
        self.drafts = 0
        self.begin()

    def begin(self) -> None:
        """Forget all text, and nothing that was learnt."""
        self.own = new_bank()
        self.offset = 0
        """Ids of the bank before the context's own: the prediction, and what leads to it."""
        self.length = 0
        """Ids of the bank that were put there; from `told` on they are the target's words."""
        self.told: int | None = None
        self.said: tuple[Sequence[int], Tensor, Sequence[int]] | None = None
        """Tokens of the last pass, the logits behind each, and which of them come last."""
        rows = ints(0) if self.bigrams is None else filled(self.bigrams)
        self.work = self.work._replace(rows=rows, new=ints(0))
        self.twin = range(0)
        """Where in the context the prediction stands, too."""

    def truncate(self, length: int) -> None:
        # Counts cannot be taken back one by one: nobody knows which followers had been dropped.
        if length < self.length - self.offset:
            self.begin()

    def take(self, ctx: Context) -> None:
        """Put what is new of the context into the bank."""
        if not self.length and ctx.prediction:
            # As if it were the answer; where the answer leaves it, shorter contexts find it again.
            head = ctx.ids[max(0, ctx.prompt_length - REACH) : ctx.prompt_length]
            self._put([*head, *ctx.prediction])
            self.offset = self.length
            self._advance(NOTHING, len(head), 0)
            twin = find(ctx.prediction, ctx.ids)
            self.twin = range(0) if twin is None else range(twin, twin + len(ctx.prediction))
        self._put(ctx.ids[self.length - self.offset :])

    def read(self) -> None:
        """Index, and learn, what was put."""
        self._advance(NOTHING, 0, self.offset)

    def _put(self, ids: Sequence[int]) -> None:
        if ids or not self.length:  # else there is room for a path already
            self.own = put(self.own, self.length, ids, LARGEST)
            self.length += len(ids)

    def _advance(self, wanted: Wanted, quiet: int, floor: int, scout: Scout | None = None) -> int:
        """Read what was put, draft what is wanted and the grammar allows; how many nodes."""
        told, self.told = self.length if self.told is None else self.told, None
        count = advance(
            self.own, self.length, quiet, floor, told, self.earlier, self.belief, self.work,
            self.rate, MEMORY, 1.0, wanted,
        )  # fmt: skip
        if len(self.work.new):  # they are remembered
            self.work = self.work._replace(new=ints(0))
        while count < 0 and scout is not None:
            verdict = ALLOWED if scout.go(self._first_waiting()) else FORBIDDEN
            forced, few = scout.onward() if verdict == ALLOWED else ([], [])
            wanted = wanted._replace(forced=filled(forced), few=filled(few))
            count = proceed(self.own, floor, self.earlier, self.belief, self.work, wanted, verdict)
        return count

    def _first_waiting(self) -> list[int]:
        """The path from the root to what may become a node next."""
        path, at = list[int](), WAITING
        while True:
            label, parent = values(self.work.ints, at, PARENT + 1)
            path.append(label)
            if parent < 0:
                return path[::-1]
            at = TREE + parent * FIELDS

    def keep(self) -> None:
        """Let what the target's logits said be remembered."""
        if self.said is None:
            return
        tokens, logits, path = self.said
        rows = best(tokens, logits)
        # Of a token the last row weighs most: that of what was accepted.
        order = [*(row for row in range(len(rows)) if row not in path), *path]
        new = [number for row in order for number in rows[row]]
        if new:
            kept = self.work.rows if len(self.work.rows) else ints(KEPT * WIDTH)
            self.work = self.work._replace(rows=kept, new=filled(new))
        self.said = None

    def draft(self, ctx: Context) -> Draft:
        self.take(ctx)
        self.keep()
        if ctx.cost is not None and (
            self.drafts < CURVE_KEPT
            or self.drafts % CURVE_KEPT == 0
            or (ctx.cost.rows, ctx.cost.doublings) != self.curve
        ):
            self.curve = ctx.cost.rows, ctx.cost.doublings
            # The sequences of a pass are thought to draft alike.
            widths = (0, *LADDER)
            self.widths = floats(widths)
            self.costs = floats(ctx.cost.relatives([ctx.cost.rows * width for width in widths]))
        self.drafts += 1
        scout = None
        if self.grammar and isinstance(ctx.grammar, GrammarState):
            scout = ctx.grammar.scout(ctx.ids)
        forced, few = ([], []) if scout is None else scout.onward()
        wanted = Wanted(
            min(ctx.budget, LARGEST), ctx.depth, self.chain, self.widths, self.costs,
            self.tokens / self.cost, scout is not None, filled(forced), filled(few),
        )  # fmt: skip
        n = self._advance(wanted, 0, self.offset, scout)
        if not n:
            return EMPTY
        nodes = values(self.work.ints, TREE, n * FIELDS)
        places = nodes[SOURCE::FIELDS]
        return Draft(
            tuple(nodes[LABEL::FIELDS]),
            tuple(nodes[PARENT::FIELDS]),
            tuple(map(self._source, places)),
            origins=tuple(map(self._origin, places)),
            chances=tuple(values(self.work.floats, CHANCE, n)),
        )

    def _origin(self, place: int) -> int:
        """Where in the context's ids a place of the bank's is; -1: nowhere."""
        if place >= self.offset:
            return place - self.offset
        # The prediction is the last before the context's own: -1 of both is one token.
        return self.twin[place - self.offset] if place >= 0 and self.twin else -1

    def _source(self, place: int) -> str:
        """Who guessed what was copied from a place of the bank's."""
        if place in _ELSEWHERE:
            return _ELSEWHERE[place]
        predicted = 0 <= place < self.offset or place - self.offset in self.twin
        return PREDICTION if predicted else Auto.name

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        count, drafted = len(outcome.verdict.tokens), outcome.draft.size
        if self.told is None:
            self.told = self.offset + len(ctx.ids) - count
        self.take(ctx)
        logits, tokens = outcome.output.logits, (ctx.ids[-1 - count], *outcome.draft.tokens)
        if self.logits and logits.shape[0] > drafted and logits.shape[1] >= BEST:
            path = [0, *(1 + node for node in outcome.verdict.path)]
            self.said = tokens[: 1 + drafted], logits[: 1 + drafted], path
        spent = float(np.interp(drafted, self.widths, self.costs)) if drafted else 1.0
        self.tokens += PACE * (count - self.tokens)
        self.cost += PACE * (spent - self.cost)

    def end(self, ctx: Context) -> None:  # noqa: ARG002
        self.said = None  # a view of all the pass's logits: an idle chat would keep them


class Remembering(Mixture):
    """The same, that also drafts from earlier answers and learns for later ones."""

    def __init__(self, answers: Answers, **options: Any) -> None:
        self.answers, self.start = answers, answers.belief
        super().__init__(copied(self.start), earlier=answers.bank, **options)

    def _advance(self, wanted: Wanted, quiet: int, floor: int, scout: Scout | None = None) -> int:
        with self.answers.memory.lock:
            # Asked for anew each time: nothing stays here that is deleted there.
            if self.answers.forgotten and self.start is not self.answers.belief:
                self._adopt()
            self.earlier = self.answers.bank
            nodes = super()._advance(wanted, quiet, floor, scout)
            self.earlier = self.own
        return nodes

    def end(self, ctx: Context) -> None:
        super().end(ctx)
        self.take(ctx)
        self.read()
        self.answers.join(ctx.ids, ctx.prompt_length, self.start, self.belief)
        self._adopt()

    def _adopt(self) -> None:
        """Believe what requests begin with now."""
        self.start = self.answers.belief
        self.belief = copied(self.start)
