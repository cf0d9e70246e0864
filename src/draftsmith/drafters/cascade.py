"""cascade: the first drafter with something to say, in order.

CopySpec's section 3.3, "Merging with Vanilla Speculative Decoding", is `copyspec+draft_model(…)`:
copy if the last γ tokens occurred before, else let a draft model propose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from time import perf_counter
from typing import ClassVar

from draftsmith.core.budget import Budget, OpenBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.target import NO_NEEDS, ModelFacts, Needs, RowOutput
from draftsmith.drafters import registry
from draftsmith.errors import OptionError


@dataclass(frozen=True, repr=False)
class Cascade(Drafter):
    """Ask `drafters` in order; the first with something to say drafts this step.

    `copyspec+draft_model(model=…)` is short for `cascade(copyspec, draft_model(model=…))`.

    Decisions: one drafter speaks per sequence and step, as in the paper, so a copy is judged by the
    guess rule and a sampled draft by Leviathan's, side by side in the pass of a batch. Who has
    drawn nothing (⊥) from a distribution that allows it *has* spoken: its distribution must be
    judged, and to let the next drafter replace the draw for its value would change the output's
    distribution. Probes alone, which only ask the target, are sent where nobody has anything to
    say; nothing drawn decides about them. Members that stayed silent are told which tokens were
    emitted, as after an empty draft of their own. The automatic budget is one for each: a member
    whose drafts do not pay pauses alone.
    """

    drafters: tuple[Drafter, ...]

    name: ClassVar[str] = "cascade"
    summary: ClassVar[str] = "the first drafter with something to say: copyspec+draft_model(…)"

    def __post_init__(self) -> None:
        given = self.drafters
        if isinstance(given, str | Drafter) or not isinstance(given, Sequence) or not given:
            raise OptionError(
                f"{self.name}: drafters={given!r} cannot work; give at least one drafter, like "
                "cascade(copyspec, auto)"
            )
        object.__setattr__(self, "drafters", tuple(map(registry.parse, given)))

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """An example of all that any of them needs."""
        needs = [drafter.needs for drafter in self.drafters]
        return Needs(
            next((one.hidden_layers for one in needs if one.hidden_layers), ()),
            next((one.attention_heads for one in needs if one.attention_heads), ()),
            any(one.logits for one in needs),
        )

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Whether any of them samples."""
        return any(drafter.sampled for drafter in self.drafters)

    @property
    def shares_noise(self) -> bool:  # type: ignore[override]
        """Whether any of them foresees the target's draws."""
        return any(drafter.shares_noise for drafter in self.drafters)

    def preferred_width(self) -> int:
        return max(drafter.preferred_width() for drafter in self.drafters)

    def reach(self, width: int) -> int:
        return max(drafter.reach(width) for drafter in self.drafters)

    def bind(self, model: ModelFacts) -> Drafter:
        """Every one bound; raises OptionError where one is reproducible and another samples."""
        bound = Cascade(tuple(drafter.bind(model) for drafter in self.drafters))
        if bound.shares_noise and bound.sampled:
            raise OptionError(
                f"{self}: with reproducible=True the output depends on the seed alone, but the "
                "draws of its other drafters would show in it; make all of them reproducible"
            )
        return bound

    def needs_of(self, model: ModelFacts) -> Needs:
        """All that any of them needs; raises OptionError where one recording cannot serve two."""
        return reduce(_both, (drafter.needs_of(model) for drafter in self.drafters), NO_NEEDS)

    def bytes_for(self, positions: int) -> int:
        return sum(drafter.bytes_for(positions) for drafter in self.drafters)

    def open(self, ctx: Context) -> DrafterState:
        return _Members(self, [drafter.open(ctx) for drafter in self.drafters])

    def auto_budget(self, cost: CostCurve) -> Budget:
        """All that any of them may want: each has an automatic budget of its own."""
        return OpenBudget(cost, self.preferred_width())

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        """Each member is asked once, for all sequences that have no draft yet."""
        drafts = [EMPTY] * len(states)
        silent = {i: state for i, state in enumerate(states) if isinstance(state, _Members)}
        for members in silent.values():
            members.speaker = None
        for number, drafter in enumerate(self.drafters):
            asked = {i: members.ask(number, contexts[i]) for i, members in silent.items()}
            asked = {i: ctx for i, ctx in asked.items() if ctx.budget}
            if not asked:
                continue
            begin = perf_counter()
            made = drafter.draft([silent[i].states[number] for i in asked], [*asked.values()])
            seconds = perf_counter() - begin
            first = [i for i in asked if number not in silent[i].opened]
            widest = max(asked.values(), key=lambda ctx: ctx.budget)
            if widest.cost is not None and not first:
                widest.cost.record_draft(drafter, widest.budget, seconds)
            elif widest.cost is not None and len(first) == len(asked):
                read = sum(len(ctx.ids) for ctx in asked.values())
                widest.cost.record_opening(drafter, read, seconds)
            for i in first:
                silent[i].opened.add(number)
            for i, draft in zip(asked, made, strict=True):
                if speaks(draft):
                    silent.pop(i).speaker, drafts[i] = number, draft
                elif draft.probes and silent[i].speaker is None:
                    silent[i].speaker, drafts[i] = number, draft
        return drafts

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.drafters))})"

    __repr__ = __str__


def speaks(draft: Draft) -> bool:
    """Whether a draft says anything: nodes that can be accepted, or that a draw gave nothing."""
    return bool(draft.size or draft.proposals)


class _Members(DrafterState):
    """One sequence's state in every member, and who drafted its last step."""

    def __init__(self, config: Cascade, states: Sequence[DrafterState]) -> None:
        self.config = config
        self.states = list(states)
        self.speaker: int | None = None
        self.budgets: list[Budget] = []
        """One for each member, where the budget is automatic."""
        self.opened: set[int] = set()
        """Members that have been asked for a draft."""
        self.missed = [0] * len(states)
        """Steps without a draft so far, for each member that might have opened for it."""

    def draft(self, ctx: Context) -> Draft:
        return self.config.draft([self], [ctx])[0]

    def ask(self, number: int, ctx: Context) -> Context:
        """What a member may see and spend."""
        if ctx.cost is None:
            self.budgets = []
            return ctx
        if not self.budgets:
            self.budgets = [drafter.auto_budget(ctx.cost) for drafter in self.config.drafters]
        if number and number not in self.opened:
            # One that must read the text first, as a draft model does, may never earn that back
            # beside others that mostly have something to say. It waits until the passes that it
            # missed have cost as much: whatever comes, that is no worse than half of the best.
            self.missed[number] += 1
            if self.missed[number] <= ctx.cost.opening(self.config.drafters[number], len(ctx.ids)):
                return replace(ctx, budget=0)
        width = self.budgets[number].next(ctx.cost.rows, ctx.cost.context)
        return replace(ctx, budget=min(ctx.budget, width))

    def observe(self, ctx: Context, outcome: Outcome) -> None:
        speaker, self.speaker = self.speaker, None
        draft = outcome.draft
        if speaker is not None and self.budgets and len(draft):
            self.budgets[speaker].record(draft.depth, len(outcome.verdict.path), len(draft))
        for number, state in enumerate(self.states):
            state.observe(ctx, outcome if number == speaker else unheard(outcome))

    def end(self, ctx: Context) -> None:
        for state in self.states:
            state.end(ctx)

    def truncate(self, length: int) -> None:
        self.speaker = None
        for state in self.states:
            state.truncate(length)

    def close(self) -> None:
        for state in self.states:
            state.close()


def unheard(outcome: Outcome) -> Outcome:
    """A step as one sees it who had drafted nothing: the emitted tokens, and the root's logits."""
    theirs = outcome.verdict
    verdict = replace(theirs, path=(), nodes=(None,) * len(theirs.tokens))
    return Outcome(EMPTY, verdict, RowOutput(outcome.output.logits[:1]))


def _both(a: Needs, b: Needs) -> Needs:
    """One recording that serves two drafters; raises OptionError where none does."""
    for what, first, second in (
        ("the states of layers", a.hidden_layers, b.hidden_layers),
        ("the attention of one set of heads", a.attention_heads, b.attention_heads),
    ):
        if first and second and (first != second or a.fold is not b.fold):
            raise OptionError(
                f"cascade: its drafters need {what}, but not the same: {first} and {second}; "
                "give both the same in their options, or use one of them"
            )
    return Needs(
        a.hidden_layers or b.hidden_layers,
        a.attention_heads or b.attention_heads,
        a.logits or b.logits,
        a.fold or b.fold,
        why="; ".join(filter(None, (a.why, b.why))),
    )
