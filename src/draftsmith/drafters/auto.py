"""auto: one tree, grown by a mixture that learns what follows contexts of several lengths.

Ours, without a paper. Prediction works as in context-mixing compressors (PAQ, CMIX), growth as in
best-first search. docs/algorithms/auto.md describes the algorithm and its ancestors.

    context_index.py   tokens that followed each context, and how often
    logit_rows.py      best tokens of the target's logits after each token
    mixer.py           probability of each candidate
    tree_search.py     nodes that are worth their cost
    auto_head.py       probabilities of a trained head, and the nodes to ask it about
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numba
import numpy as np
from torch import Tensor

from draftsmith.core.budget import Budget, OpenBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import EMPTY, ROOT, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.stats import PREDICTION
from draftsmith.core.target import NO_NEEDS, Highest, ModelFacts, Needs
from draftsmith.drafters import bigrams, registry
from draftsmith.drafters.answer_cache import Answers
from draftsmith.drafters.auto_head import HeadRows
from draftsmith.drafters.context_index import LONGEST, ContextIndex, copied, new_index, with_ids
from draftsmith.drafters.logit_rows import ROW, ROWS, TOP, best
from draftsmith.drafters.mixer import ELSEWHERE, FORCED, MAX_COUNT, Mixer
from draftsmith.drafters.mixer_prior import prior
from draftsmith.drafters.ngrams import find
from draftsmith.drafters.options import switches
from draftsmith.drafters.trained_head import BoundHead, HeadDrafter
from draftsmith.drafters.tree_search import (
    ALLOWED,
    ASK,
    FORBIDDEN,
    LARGEST,
    NO_ANSWERS,
    NO_DRAFT,
    NO_ROWS,
    NO_TOKENS,
    START,
    Limits,
    advance,
    new_search,
)
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.text.grammar import GrammarState, Scout

EARLIER = "auto.earlier"
"""Source of nodes that were found in earlier answers only."""
GRAMMAR = "grammar"
"""Source of nodes that were found by the answer's grammar only."""
NODE_COST = 0.013
"""Cost of a node, in plain passes, if no cost curve is given."""

RATE = 0.007
"""Learning rate of the weights."""
CACHED_RATE = 0.003
"""Learning rate if the mixer is kept from answer to answer."""
PACE = 0.05
"""Weight of the last pass in the moving averages of tokens and cost."""
CURVE_KEPT = 8
"""The first drafts, up to this number, each read the cost curve; later it is read once in this many
drafts, or when the rows or doublings change."""
STATE_BYTES = 330_000
"""Maximum bytes of a state without its index: mixer, search, logit rows."""


@dataclass(frozen=True, repr=False)
class Auto(Drafter):
    """Draft a tree of the most probable continuations, with a mixture that learns while decoding.

    Contexts of the last 0, 1, 2, 8 and 32 tokens predict what followed them in prompt, prediction
    and answer. The target's earlier logits predict what was probable after the last token. A
    logistic mixture turns both into probabilities. The tree grows by the most probable node while
    the node brings more than it costs.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "the default: a tree of likely continuations, by learned probability"
    width: ClassVar[int] = LARGEST
    # `bind` sets these three on the bound copy; as fields they would be options.
    chain: ClassVar[bool] = False
    bigrams: ClassVar[Any | None] = None
    bound_head: ClassVar[BoundHead | None] = None

    logits: bool = True
    """Whether it also drafts from the target's logits. Without them, drafts depend on token ids
    only, so that a replay of a recording makes exactly the drafts of the live run."""
    grammar: bool = True
    """Whether it drafts tokens for which the answer's grammar leaves little choice, and nothing
    that the grammar forbids."""
    tuned: bool = True
    """Whether answers begin with logit rows that `draftsmith tune auto` saved for this model."""
    head: Any = None
    """A drafter with a trained head, `eagle3(model=…)` or `mtp()`. Its probabilities join the
    mixture where computing them pays; of its options `depth` counts, and `nodes` does not."""

    def __post_init__(self) -> None:
        switches(self)
        if self.head is not None:
            head = registry.parse(self.head)
            if not isinstance(head, HeadDrafter):
                raise OptionError(
                    f"{self.name}: head must be a drafter with a trained head, eagle3(model=…) or "
                    f"mtp(), got {head}"
                )
            if head.sample:
                raise OptionError(f"{self.name}: its head drafts guesses only; leave out sample")
            object.__setattr__(self, "head", head)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Needs of its head; none without a head."""
        return NO_NEEDS if self.head is None else self.head.needs

    def needs_of(self, model: ModelFacts) -> Needs:  # noqa: ARG002
        return NO_NEEDS if self.bound_head is None else self.bound_head.wants

    def bind(self, model: ModelFacts) -> Drafter:
        """Bind to a model; for models that verify chains only, the best chain is drafted."""
        if numba.config.DISABLE_JIT:
            raise UnsupportedError(f"{self.name} needs numba's compiler; unset NUMBA_DISABLE_JIT")
        bound = replace(self)
        object.__setattr__(bound, "chain", model.shape != "tree")
        if self.logits and self.tuned:
            object.__setattr__(bound, "bigrams", bigrams.load(model))
        if self.head is not None:
            object.__setattr__(bound, "bound_head", self.head.bind(model))
        return bound

    def auto_budget(self, cost: CostCurve) -> Budget:
        """Return a budget without a fixed width: the search weighs the nodes itself."""
        return OpenBudget(cost, self.preferred_width(), self)

    def bytes_for(self, positions: int) -> int:
        """Return the maximum size, in bytes, of a state: its index and its fixed parts."""
        head = 0 if self.bound_head is None else self.bound_head.bytes_for(positions)
        return STATE_BYTES + head + super().bytes_for(positions)

    def open(self, ctx: Context) -> DrafterState:
        head = None if self.bound_head is None else HeadRows(self.bound_head)
        if isinstance(ctx.earlier, Answers):
            state: AutoState = CachingState(self, ctx.earlier, head)
        else:
            state = AutoState(self, prior(1), head=head)
        state.take(ctx)
        state.read()
        return state


class AutoState(DrafterState):
    """Index and mixer of one sequence."""

    def __init__(
        self,
        config: Auto,
        mixer: Mixer,
        answers: ContextIndex | None = None,
        head: HeadRows | None = None,
    ) -> None:
        """`mixer` is changed by learning. `answers`: second index."""
        self.config, self.head = config, head
        self.mixer = mixer if head is None else head.joined(mixer)
        self.answers = answers or NO_ANSWERS
        self.rate = RATE if answers is None else CACHED_RATE
        self.search = new_search()
        self.tokens, self.cost = 1.6, 1.0
        """Moving averages per pass: emitted tokens, and cost in plain passes."""
        self.costs = np.array([[0.0, 1.0], [LARGEST, 1.0 + NODE_COST * LARGEST]])
        """(P, 2) nodes of each sequence of a pass, cost of the pass in plain passes."""
        self.curve = 0, 0
        """(rows, doublings) of the cost curve that was read last."""
        self.drafts = 0
        self.begin()

    def begin(self) -> None:
        """Forget the text, but keep what the mixer learned from it."""
        self.text = new_index()
        self.offset = 0
        """Number of ids in the index before those of the context: the prediction and its head."""
        self.length = 0
        """Number of ids in the index arrays, indexed or not."""
        self.emitted: int | None = None
        """Position of the first emitted token that the mixer has not learned from."""
        self.passed: tuple[Sequence[int], Tensor, Highest | None, Sequence[int]] | None = None
        """Tokens of the last pass, logits after each, the highest if read, and accepted rows."""
        bigrams = self.config.bigrams
        self.rows, self.new_rows = NO_ROWS if bigrams is None else copied(bigrams), NO_ROWS
        if self.head is not None:
            self.head.begin(0)
        self.predicted = range(0)
        """Positions of the context that hold the whole prediction, too."""

    def truncate(self, length: int) -> None:
        # Counts of removed positions cannot be subtracted, because older followers were dropped.
        if length < self.length - self.offset:
            self.begin()

    def take(self, ctx: Context) -> None:
        """Add new ids of the context to the index arrays."""
        if not self.length and ctx.prediction:
            # Index it like an answer. After a deviation, shorter contexts find it again.
            head = ctx.ids[max(0, ctx.prompt_length - LONGEST) : ctx.prompt_length]
            self._put([*head, *ctx.prediction])
            self._advance(NO_DRAFT, count_from=len(head))
            self.offset = self.length
            start = find(ctx.prediction, ctx.ids)
            if start is not None:
                self.predicted = range(start, start + len(ctx.prediction))
        self._put(ctx.ids[self.length - self.offset :])

    def read(self) -> None:
        """Index the added ids and learn from them."""
        self._advance(NO_DRAFT)

    def _put(self, ids: Sequence[int]) -> None:
        if ids or not self.length:  # otherwise there is room for a path already
            self.text = with_ids(self.text, self.length, ids, LARGEST)
            self.length += len(ids)

    def _advance(self, limits: Limits, scout: Scout | None = None, count_from: int = 0) -> int:
        """Index the added ids, then draft what the grammar allows; return the number of nodes."""
        emitted, self.emitted = self.length if self.emitted is None else self.emitted, None
        rows, base = (NO_ROWS, 0) if self.head is None else (self.head.rows, self.head.base)
        verdict = START
        while True:
            count = advance(
                self.text, self.length, count_from, self.offset, emitted, self.answers, self.rows,
                self.new_rows, rows, base, self.mixer, self.search, self.rate, MAX_COUNT, 1.0,
                limits, verdict,
            )  # fmt: skip
            self.new_rows = NO_ROWS  # the table has them now
            if count != ASK or scout is None:
                return int(count)
            verdict = ALLOWED if scout.go(self._first_path()) else FORBIDDEN
            forced, few = scout.onward() if verdict == ALLOWED else ([], [])
            limits = limits._replace(forced=_tokens(forced), few=_tokens(few))

    def _first_path(self) -> list[int]:
        """Return the tokens from the root to the first node in the queue."""
        node, path = self.search.queue[0], []
        while True:
            path.append(int(node["token"]))
            if node["parent"] == ROOT:
                return path[::-1]
            node = self.search.nodes[node["parent"]]

    def keep_logits(self) -> None:
        """Create logit rows from the last pass, for the table."""
        if self.passed is None:
            return
        tokens, logits, known, path = self.passed
        # The last row of a token has the most weight, so accepted ones come last.
        order = [*(row for row in range(len(tokens)) if row not in path), *path]
        rows = best(tokens, logits, known)[order]
        self.new_rows = rows[rows["after"] > 0]
        if len(self.new_rows) and not len(self.rows):
            self.rows = np.zeros(ROWS, ROW)
        self.passed = None

    def draft(self, ctx: Context) -> Draft:
        self.take(ctx)
        self.keep_logits()
        if ctx.cost is not None and (
            self.drafts < CURVE_KEPT
            or self.drafts % CURVE_KEPT == 0
            or (ctx.cost.rows, ctx.cost.doublings) != self.curve
        ):
            self.curve = ctx.cost.rows, ctx.cost.doublings
            self.costs = np.array(ctx.cost.per_sequence())
        self.drafts += 1
        if self.head is not None:
            self.head.learn(self.text.ids[: self.length])
            self.read()
            self.head.begin(self.length)
        n = self._grow(ctx)
        while self.head is not None:
            grown = self.search.nodes[:n]
            asked = self.head.worth(grown, ctx, self.tokens / self.cost)
            if not asked or not self.head.ask(grown, asked, ctx):
                break
            n = self._grow(ctx)
        if not n:
            return EMPTY
        nodes = self.search.nodes[:n]
        positions = nodes["position"].tolist()
        return Draft(
            tuple(nodes["token"].tolist()),
            tuple(nodes["parent"].tolist()),
            tuple(map(self._source, positions)),
            origins=tuple(map(self._origin, positions)),
            chances=tuple(nodes["prob"].tolist()),
        )

    def _grow(self, ctx: Context) -> int:
        """Draft after the ids that were put; return how many nodes."""
        scout = None
        if self.config.grammar and isinstance(ctx.grammar, GrammarState):
            scout = ctx.grammar.scout(ctx.ids)
        forced, few = ([], []) if scout is None else scout.onward()
        limits = Limits(
            min(ctx.budget, LARGEST), ctx.depth, self.config.chain, self.costs,
            self.tokens / self.cost, scout is not None, _tokens(forced), _tokens(few),
        )  # fmt: skip
        return self._advance(limits, scout)

    def _origin(self, position: int) -> int:
        """Return the position in the context's ids for a position of the index, or -1."""
        if position >= self.offset:
            return position - self.offset
        # The prediction ends directly before the context, so -1 is its last token.
        return self.predicted[position - self.offset] if position >= 0 and self.predicted else -1

    def _source(self, position: int) -> str:
        """Return the source of a node that was copied from a position of the index."""
        if position == ELSEWHERE:
            return EARLIER
        if position == FORCED:
            return GRAMMAR
        predicted = 0 <= position < self.offset or position - self.offset in self.predicted
        return PREDICTION if predicted else Auto.name

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        count, drafted = len(outcome.verification.tokens), outcome.draft.size
        self.take(ctx)  # a state that was truncated indexes the prediction again
        if self.emitted is None:
            self.emitted = self.length - count
        output = outcome.output.first(1 + drafted)
        logits, tokens = output.logits, (ctx.ids[-1 - count], *outcome.draft.tokens)
        if self.config.logits and logits.shape[0] > drafted and logits.shape[1] >= TOP:
            path = [0, *(1 + node for node in outcome.verification.path)]
            self.passed = tokens[: 1 + drafted], logits, output.highest, path
        spent = float(np.interp(drafted, *self.costs.T)) if drafted else 1.0
        self.tokens += PACE * (count - self.tokens)
        self.cost += PACE * (spent - self.cost)

    def end(self, ctx: Context) -> None:  # noqa: ARG002
        self.passed = None  # it refers to all logits of the pass, which an idle chat would keep

    def close(self) -> None:
        if self.head is not None:
            self.head.entries.close()


class CachingState(AutoState):
    """A state that also drafts from earlier answers, and adds its own answer to them."""

    def __init__(self, config: Auto, earlier: Answers, head: HeadRows | None) -> None:
        self.earlier, self.start = earlier, earlier.mixer
        super().__init__(config, self.start.copy(), earlier.index, head)

    def _advance(self, limits: Limits, scout: Scout | None = None, count_from: int = 0) -> int:
        with self.earlier.cache.lock:
            # Read the shared objects in each step, so that deleted answers are not used.
            if self.earlier.forgotten and self.start is not self.earlier.mixer:
                self._adopt()
            self.answers = self.earlier.index
            nodes = super()._advance(limits, scout, count_from)
            self.answers = NO_ANSWERS
        return nodes

    def end(self, ctx: Context) -> None:
        super().end(ctx)
        self.take(ctx)
        self.read()
        learned = self.mixer if self.head is None else self.head.parted(self.mixer)
        self.earlier.add(ctx.ids, ctx.prompt_length, self.start, learned)
        self._adopt()

    def _adopt(self) -> None:
        """Continue with the mixer that new requests begin with."""
        self.start = self.earlier.mixer
        self.mixer = self.start.copy() if self.head is None else self.head.joined(self.start)


def _tokens(ids: Sequence[int]) -> Any:
    return np.array(ids, np.int32) if ids else NO_TOKENS
