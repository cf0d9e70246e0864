"""cascade: several drafters in order; the first one with a draft is used.

CopySpec's section 3.3, "Merging with Vanilla Speculative Decoding", is `copyspec+draft_model(…)`:
copy if the last γ tokens occurred before, else let a draft model propose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from time import perf_counter
from typing import ClassVar

from draftsmith.core.budget import Budget, OpenBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.target import NO_NEEDS, ModelFacts, Needs
from draftsmith.drafters import registry
from draftsmith.errors import OptionError


def members(drafter: Drafter) -> Iterator[Drafter]:
    """Yield the members of a cascade, and of cascades in it; else the drafter itself."""
    if isinstance(drafter, Cascade):
        for one in drafter.drafters:
            yield from members(one)
    else:
        yield drafter


@dataclass(frozen=True, repr=False)
class Cascade(Drafter):
    """Call `drafters` in order until one has a draft for the sequence in this step.

    `copyspec+draft_model(model=…)` is short for `cascade(copyspec, draft_model(model=…))`.

    Decisions: One drafter is used per sequence and step, as in the paper. So a pass can contain
    copies, verified as guesses, and sampled drafts, verified by Leviathan's rule. A member that
    drew nothing (⊥) counts as having a draft, because its distribution must be verified; if the
    next member replaced the draw, the output distribution would change. A draft of probes alone is
    used if no later member has a draft; this depends on nothing that was drawn. Members without a
    draft observe the emitted tokens as after an empty draft. Each member has its own automatic
    budget, so a member with drafts that do not pay pauses alone.
    """

    drafters: tuple[Drafter, ...]

    name: ClassVar[str] = "cascade"
    summary: ClassVar[str] = "the first drafter with a draft: copyspec+draft_model(…)"

    def __post_init__(self) -> None:
        given = self.drafters
        if isinstance(given, str | Drafter) or not isinstance(given, Sequence) or not given:
            raise OptionError(
                f"{self.name}: drafters must be at least one drafter, such as "
                f"cascade(copyspec, auto), got {given!r}"
            )
        object.__setattr__(self, "drafters", tuple(map(registry.parse, given)))

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """An example of the needs of all members."""
        needs = [drafter.needs for drafter in self.drafters]  # examples may differ
        return Needs(
            next((one.hidden_layers for one in needs if one.hidden_layers), ()),
            next((one.attention_heads for one in needs if one.attention_heads), ()),
            any(one.logits for one in needs),
        )

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Whether any member samples."""
        return any(drafter.sampled for drafter in self.drafters)

    @property
    def shares_noise(self) -> bool:  # type: ignore[override]
        """Whether any member predicts the target's draws."""
        return any(drafter.shares_noise for drafter in self.drafters)

    def preferred_width(self) -> int:
        return max(drafter.preferred_width() for drafter in self.drafters)

    def bind(self, model: ModelFacts) -> Drafter:
        """Bind all members; raise OptionError if one is reproducible and another samples."""
        bound = Cascade(tuple(drafter.bind(model) for drafter in self.drafters))
        if bound.shares_noise and bound.sampled:
            raise OptionError(
                f"{self}: with reproducible=True the output depends on the seed only, but other "
                "members sample; make all members reproducible, or none"
            )
        return bound

    def needs_of(self, model: ModelFacts) -> Needs:
        """Return the needs of all members; raise OptionError if they contradict each other."""
        return reduce(_both, (drafter.needs_of(model) for drafter in self.drafters), NO_NEEDS)

    def bytes_for(self, positions: int) -> int:
        return sum(drafter.bytes_for(positions) for drafter in self.drafters)

    def open(self, ctx: Context) -> DrafterState:
        return _Members(self, [drafter.open(ctx) for drafter in self.drafters])

    def auto_budget(self, cost: CostCurve) -> Budget:
        """Return a budget without a fixed width: each member has its own automatic budget."""
        return OpenBudget(cost, self.preferred_width())

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        """Call each member once, for all sequences without a draft."""
        drafts = [EMPTY] * len(states)
        left = {i: state for i, state in enumerate(states) if isinstance(state, _Members)}
        for members in left.values():
            members.drafted_by = None
        for number, drafter in enumerate(self.drafters):
            asked = {i: members.ask(number, contexts[i]) for i, members in left.items()}
            asked = {i: ctx for i, ctx in asked.items() if ctx.budget}
            if not asked:
                continue
            begin = perf_counter()
            made = drafter.draft([left[i].states[number] for i in asked], [*asked.values()])
            seconds = perf_counter() - begin
            first = [i for i in asked if number not in left[i].opened]
            widest = max(asked.values(), key=lambda ctx: ctx.budget)
            if widest.cost is not None and not first:
                widest.cost.record_draft(drafter, widest.budget, seconds)
            elif widest.cost is not None and len(first) == len(asked):
                read = sum(len(ctx.ids) for ctx in asked.values())
                widest.cost.record_opening(drafter, read, seconds)
            for i in first:
                left[i].opened.add(number)
            for i, draft in zip(asked, made, strict=True):
                if draft.size or draft.proposals:  # also a draw that gave nothing
                    left.pop(i).drafted_by, drafts[i] = number, draft
                elif draft.probes and left[i].drafted_by is None:
                    left[i].drafted_by, drafts[i] = number, draft
        return drafts

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.drafters))})"

    __repr__ = __str__


class _Members(DrafterState):
    """State of one sequence in every member, and the member that drafted its last step."""

    def __init__(self, config: Cascade, states: Sequence[DrafterState]) -> None:
        self.config = config
        self.states = list(states)
        self.drafted_by: int | None = None
        self.budgets: list[Budget] = []
        """Budgets of the members, if the budget is automatic."""
        self.opened: set[int] = set()
        """Members that have been called."""
        self.missed = [0] * len(states)
        """For each member that is not opened yet, the steps in which it could have drafted."""

    def draft(self, ctx: Context) -> Draft:
        return self.config.draft([self], [ctx])[0]

    def ask(self, number: int, ctx: Context) -> Context:
        """Return the context for a member, with its part of the budget."""
        if ctx.cost is None:
            self.budgets = []
            return ctx
        if not self.budgets:
            self.budgets = [drafter.auto_budget(ctx.cost) for drafter in self.config.drafters]
        if number and number not in self.opened:
            # A draft model reads the text before its first draft, which may never pay if other
            # members mostly have drafts. It waits until the passes that it missed have cost as much
            # as reading: in any case at most twice the cost of the best choice.
            self.missed[number] += 1
            if self.missed[number] <= ctx.cost.opening(self.config.drafters[number], len(ctx.ids)):
                return replace(ctx, budget=0)
        width = self.budgets[number].next(ctx.cost.rows, ctx.cost.context)
        return replace(ctx, budget=min(ctx.budget, width))

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        drafted_by, self.drafted_by = self.drafted_by, None
        draft = outcome.draft
        if drafted_by is not None and self.budgets and len(draft):
            self.budgets[drafted_by].record(draft.depth, len(outcome.verification.path), len(draft))
        for number, state in enumerate(self.states):
            state.observe(ctx, outcome if number == drafted_by else without_draft(outcome))

    def end(self, ctx: Context) -> None:
        for state in self.states:
            state.end(ctx)

    def truncate(self, length: int) -> None:
        self.drafted_by = None
        for state in self.states:
            state.truncate(length)

    def close(self) -> None:
        for state in self.states:
            state.close()


def without_draft(outcome: Outcome) -> Outcome:
    """Return the outcome for a member without a draft: emitted tokens and logits of the root."""
    shared = outcome.verification
    verification = replace(shared, path=(), nodes=(None,) * len(shared.tokens))
    return Outcome(EMPTY, verification, outcome.output.first(1))


def _both(a: Needs, b: Needs) -> Needs:
    """Combine the needs of two drafters; raise OptionError if they contradict each other."""
    for what, first, second in (
        ("the states of layers", a.hidden_layers, b.hidden_layers),
        ("the attention of one set of heads", a.attention_heads, b.attention_heads),
    ):
        if first and second and first != second:
            raise OptionError(
                f"cascade: its members need {what}, but {first} and {second} differ; "
                "set the same value in the options of both"
            )
    if a.hidden_layers and b.hidden_layers and a.fold is not b.fold:
        raise OptionError("cascade: two of its members fold the states of layers differently")
    return Needs(
        a.hidden_layers or b.hidden_layers,
        a.attention_heads or b.attention_heads,
        a.logits or b.logits,
        a.fold or b.fold,
        why="; ".join(filter(None, (a.why, b.why))),
    )
