"""Drafting: the drafter of a model's answers, and how much it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from draftsmith.core.budget import Budget, FixedBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.drafter import Drafter
from draftsmith.core.sequence import Stalls
from draftsmith.core.target import Needs
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.openmp import end_team
from draftsmith.model.taps import needs_of
from draftsmith.values import number

BudgetSpec = int | Literal["auto", "drafter"]
"""Draft nodes per step: a number, `auto` (as many as pay), or `drafter` (the drafter's width)."""


@dataclass(frozen=True)
class Drafting:
    """Drafter, budget and cost of a model's answers, for any number of sequences."""

    model: LoadedModel
    drafter: Drafter
    """The drafter, bound to the model."""
    needs: Needs
    budget: BudgetSpec
    cost: CostCurve
    answers: AnswerCache | None = None
    """Store of earlier answers, if the engine has one."""
    stalls: Stalls = field(default_factory=Stalls)
    """Counts the passes that the drafter delayed."""

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        drafter: Drafter,
        budget: BudgetSpec,
        cost: CostCurve,
        answers: AnswerCache | None = None,
    ) -> Drafting:
        """Bind a drafter to a model; this may load another model."""
        bound = drafter.bind(model.facts)
        made = cls(model, bound, needs_of(bound, model), budget, cost, answers)
        end_team()  # binding may have run passes; the next ones may run in another thread
        return made

    def new_budget(self) -> Budget:
        """Return a budget for one sequence."""
        width = self.drafter.preferred_width()
        if width == 0:
            return FixedBudget(0)
        if self.budget == "auto":
            return self.drafter.auto_budget(self.cost)
        return FixedBudget(width if self.budget == "drafter" else self.budget)


def checked_budget(budget: object) -> BudgetSpec:
    """Return a budget; digits in a string count as a number. Raises OptionError."""
    if isinstance(budget, str):
        if budget == "auto":
            return "auto"
        if budget == "drafter":
            return "drafter"
        if budget.isdecimal() and len(budget) < 20:
            budget = int(budget)
    note = "(draft nodes per pass), 'auto' or 'drafter'"
    return number("budget", budget, int, least=0, most=2**31, note=note)
