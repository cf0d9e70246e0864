"""The automatic budget: wide where drafts hold, silent where they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.core.budget import LADDER, AutoBudget, CostCurve


def learn(budget: AutoBudget, accepted: float, steps: int) -> list[int]:
    """Widths chosen while a share of every draft is accepted."""
    widths = []
    for _ in range(steps):
        width = budget.next()
        widths.append(width)
        if width:
            budget.record(width, round(accepted * width))
    return widths


def curve(slope: float) -> CostCurve:
    cost = CostCurve()
    for width in (0, *LADDER):
        cost.record(width, 1 + slope * width)
    return cost


def test_nothing_is_drafted_before_a_plain_pass_was_measured() -> None:
    assert AutoBudget(CostCurve()).next() == 0


def test_success_widens() -> None:
    assert learn(AutoBudget(curve(0.01)), 1.0, 40)[-1] == 64


def test_failure_pauses_but_retries() -> None:
    widths = learn(AutoBudget(curve(0.03)), 0.0, 200)
    assert any(widths[:20])
    spent = sum(0.03 * width for width in widths)
    assert spent < 0.05 * len(widths)
    assert any(widths[-40:]), "it must notice when times change"


def test_recovery_after_failure() -> None:
    budget = AutoBudget(curve(0.02))
    learn(budget, 0.0, 100)
    assert max(learn(budget, 1.0, 60)) >= 16


def test_probes_get_a_step_to_bring_something() -> None:
    """SDSAT asks in one step and drafts in the next: a pause in between would waste the answers."""
    budget = AutoBudget(curve(0.02))
    widths = []
    found = False
    for step in range(400):
        widths.append(width := budget.next())
        if not width:
            found = False
        elif not found:
            budget.record(0, 0)
            found = True
        else:
            budget.record(width, width if step >= 100 else 0)
            found = False
    assert 0 in widths[60:100]
    assert min(widths[-100:]) >= 8


def test_probes_that_bring_nothing_pause_drafting() -> None:
    budget = AutoBudget(curve(0.03))
    widths = []
    for _ in range(200):
        widths.append(budget.next())
        if widths[-1]:
            budget.record(0, 0)
    assert sum(map(bool, widths)) < 40


def test_a_drafter_that_needs_many_nodes_for_depth_gets_none_it_cannot_use() -> None:
    def last(reach: Callable[[int], int]) -> int:
        budget = AutoBudget(curve(0.02), reach=reach)
        for _ in range(40):
            budget.record(reach(budget.next()), reach(budget.next()))
        return budget.next()

    assert last(int) == 64
    assert last(lambda width: min(4, (width + 1) // 2)) == 8


def test_expensive_passes_keep_drafts_short() -> None:
    cheap = learn(AutoBudget(curve(0.01)), 0.6, 60)[-1]
    costly = learn(AutoBudget(curve(0.5)), 0.6, 60)[-10:]
    assert max(costly) < cheap


def test_the_ceiling_is_kept() -> None:
    assert max(learn(AutoBudget(curve(0.0), ceiling=10), 1.0, 50)) == 10


def test_costs_are_interpolated_and_never_fall_with_width() -> None:
    cost = CostCurve()
    assert cost.relative(0) == 1.0
    cost.record(0, 1.0)
    cost.record(8, 2.0)
    cost.record(16, 1.5)  # noise: a wider pass cannot be cheaper
    costs = [cost.relative(width) for width in range(65)]
    assert costs == sorted(costs)
    assert costs[4] == 1.5
    assert costs[64] > 2.0


def test_one_interrupted_pass_is_no_news() -> None:
    cost = curve(0.0)
    for _ in range(10):
        cost.record(8, 1.0)
    cost.record(8, 100.0)
    assert cost.relative(8) < 1.3


def test_batch_sizes_have_their_own_curves() -> None:
    cost = curve(0.5)
    assert not cost.at(4).knows_plain
    cost.at(4).record(0, 1.0)
    assert cost.at(4).knows_plain


def test_drafting_time_counts() -> None:
    """What a draft model spends per token is weighed like a wider pass."""
    cost = curve(0.0)
    cost.record_draft("slow", 4, 99.0)  # the first one reads the prompt: not believed
    assert cost.drafting("slow", 4) == 0
    for _ in range(3):
        cost.record_draft("slow", 4, 4 * 0.5)
    assert cost.drafting("slow", 4) == pytest.approx(2)
    assert cost.drafting("slow", 2) == pytest.approx(1)  # in proportion below,
    assert cost.drafting("slow", 8) == pytest.approx(2)  # not guessed above
    assert cost.drafting("quick", 4) == 0
    for _ in range(3):
        cost.record_draft("slow", 8, 8 * 0.5)
    assert cost.drafting("slow", 6) == pytest.approx(3)

    def widths(drafter: str) -> list[int]:
        return learn(AutoBudget(cost, ceiling=8, drafter=drafter), 0.6, 60)[-10:]

    assert max(widths("quick")) == 8
    assert max(widths("slow")) == 1
    assert cost.at(2).drafting("slow", 4) == 0  # another batch size, other costs
