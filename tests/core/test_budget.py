"""The automatic budget: wide where drafts hold, silent where they do not."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from draftsmith.core.budget import (
    RETRY_WIDTH,
    AutoBudget,
    FixedBudget,
    OpenBudget,
    pick,
    share,
)
from draftsmith.core.cost import GUESSED, LADDER, SHORT, CostCurve, RecordedCost
from draftsmith.errors import OptionError


class Named(str):
    """What stands for a drafter."""


SLOW, QUICK = Named("slow"), Named("quick")


def learn(budget: AutoBudget, accepted: float, steps: int) -> list[int]:
    """Widths chosen while a share of every draft is accepted."""
    widths = []
    for _ in range(steps):
        width = budget.next(1, 0)
        widths.append(width)
        if width:
            budget.record(width, round(accepted * width))
    return widths


def record(cost: CostCurve, *passes: tuple[int, float]) -> CostCurve:
    """Record the widths of passes, and the seconds that they took."""
    for width, seconds in passes:
        cost.record(width, seconds)
    return cost


def line(cost: CostCurve, plain: float, slope: float) -> CostCurve:
    """Record a pass of every width, whose seconds rise by `slope` for each node."""
    return record(cost, *((width, plain + slope * width) for width in (0, *LADDER)))


def curve(slope: float, rows: int = 1) -> CostCurve:
    return line(CostCurve().at(rows), 1.0, slope)


def test_the_first_use_of_a_width_is_not_learned_as_its_price() -> None:
    """On a GPU: it loads kernels. If it were, the width would be left out for good."""
    budgets = []
    for cold in (False, True):
        cost = record(CostCurve(cold=cold), (0, 1.0), (8, 50.0), (0, 1.0))
        budgets.append(AutoBudget(cost))
        if cold:
            assert cost.points() == [(0.0, 1.0)]
            cost.record(8, 1.1)
            assert cost.points() == [(0.0, 1.0), (8, 1.1)]
    assert [budget.next(1, 0) >= 8 for budget in budgets] == [False, True]


def test_failure_pauses_until_drafts_hold_again() -> None:
    budget = AutoBudget(curve(0.03))
    widths = learn(budget, 0.0, 200)
    assert any(widths[:20])
    spent = sum(0.03 * width for width in widths)
    assert spent < 0.05 * len(widths)
    assert any(widths[-40:]), "it must notice when times change"
    assert max(learn(budget, 1.0, 60)) >= 16


def test_probes_get_a_step_to_bring_something() -> None:
    """SDSAT asks in one step and drafts in the next: a pause in between would waste the answers."""
    budget = AutoBudget(curve(0.02))
    widths = []
    found = False
    for step in range(400):
        widths.append(width := budget.next(1, 0))
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
        widths.append(budget.next(1, 0))
        if widths[-1]:
            budget.record(0, 0)
    assert sum(map(bool, widths)) < 40


def test_a_drafter_that_needs_many_nodes_for_depth_gets_none_it_cannot_use() -> None:
    def last(reach: Callable[[int], int]) -> int:
        budget = AutoBudget(curve(0.02), reach=reach)
        for _ in range(40):
            budget.record(reach(budget.next(1, 0)), reach(budget.next(1, 0)))
        return budget.next(1, 0)

    assert last(int) == 64
    assert last(lambda width: min(4, (width + 1) // 2)) == 8


def test_costs_are_interpolated_and_never_fall_with_width() -> None:
    cost = CostCurve()
    assert cost.relative(0) == 1.0
    # The last is noise, or a kernel for 9 rows that is slow: 16 nodes may be drafted.
    record(cost, (0, 1.0), (8, 2.0), (16, 1.5))
    costs = [cost.relative(width) for width in range(65)]
    assert costs == sorted(costs)
    assert costs[4] == 1.25
    assert costs[8] == costs[16] == 1.5
    assert costs[64] > 2.0


def test_a_rung_of_the_ladder_counts_as_the_mean_of_its_widths() -> None:
    """Else a pass over 5 nodes says what 8 cost, and nodes look cheaper than they are."""
    cost, rng = CostCurve(), random.Random(0)
    cost.record(0, 1.0)
    for _ in range(200):
        width = rng.choice([3, 5, 6, 7, 9, 12])
        cost.record(width, 1 + 0.05 * width)
    for width in (3, 5, 7, 12, 16):
        assert cost.relative(width) == pytest.approx(1 + 0.05 * width, rel=0.01)


def test_nodes_of_a_padded_pass_cost_the_same() -> None:
    """Passes with 4 to 7 nodes and the root are computed over 8 positions."""
    cost = CostCurve((1, 3, 7, 15), padded=True)
    for width, seconds in ((0, 1.0), (1, 1.1), (2, 1.2), (6, 1.4)):
        cost.record(width, seconds)
        cost.at(2).record(2 * width, seconds)
    padded = [1.0, 1.1, 1.2, 1.2, 1.4, 1.4, 1.4, 1.4]
    assert [cost.relative(width) for width in range(8)] == pytest.approx(padded)
    assert cost.relative(8) > 1.4
    nodes, costs = zip(*cost.per_sequence(), strict=True)
    assert len(set(nodes)) == len(nodes)
    assert np.interp(range(16), nodes, costs) == pytest.approx([*map(cost.relative, range(16))])
    assert cost.at(2).relative(3) == pytest.approx(1.15), "passes with several rows are not padded"


def test_a_budget_fills_padded_passes() -> None:
    cost = CostCurve((1, 3, 7, 15, 31, 63, 79), padded=True)
    record(cost, *((width, 1 + 0.01 * width) for width in (0, *cost.ladder)))
    budget, widths = AutoBudget(cost), set()
    for n in range(40):
        learn(budget, n / 40, 20)
        widths.add(budget.best_width())
    assert len(widths) > 3
    assert widths <= {0, *cost.ladder[:-1], 64}, "64 is the ceiling"


def test_the_first_pass_of_a_width_may_be_slow() -> None:
    cost = record(CostCurve(), (0, 2.5), (8, 3.0), *[(0, 1.0), (8, 1.2)] * 2)
    assert cost.relative(8) == pytest.approx(1.2)


def test_a_plain_pass_takes_no_longer_than_a_wider_one() -> None:
    """Where the only plain pass was a slow one, all that is weighed with it says so alike."""
    cost = record(CostCurve(), (0, 2.5), (8, 1.0))
    cost.record_opening(SLOW, 10, 5.0)
    for _ in range(2):
        cost.record_draft(SLOW, 4, 0.5)
    assert cost.relative(8) == 1.0
    assert cost.drafting(SLOW, 4) == 0.5
    assert cost.opening(SLOW, 10) == 5.0


def test_what_was_measured_here_is_not_overruled_by_what_was_measured_elsewhere() -> None:
    """A width that cost little behind a short context may cost much behind a long one."""
    cost = record(CostCurve(), (0, 1.0), (32, 1.1))
    long = record(cost.at(1, 100_000), (0, 2.0), *[(8, 3.0)] * 20)
    assert long.relative(8) == pytest.approx(1.5)
    assert long.relative(32) == pytest.approx(1.5)
    assert cost.relative(8) == pytest.approx(1.1), "as dear as there, but no dearer than 32 here"


def test_one_interrupted_pass_is_no_news() -> None:
    cost = record(curve(0.0), *[(8, 1.0)] * 10, (8, 100.0))
    assert cost.relative(8) < 1.3


def test_e13_rows_that_were_not_measured_draft_by_the_nearest_that_were() -> None:
    """While a batch grows and shrinks, or reads prompts; then one pass shows what it costs."""
    cost = curve(0.01)
    line(cost.at(8), 2.0, 0.1)
    for rows, near in ((2, 1), (3, 2), (7, 8), (9, 8), (16, 9)):
        assert cost.nearest(rows).rows == near
        assert cost.nearest(rows).relative(16) == cost.at(near).relative(16)
        assert AutoBudget(cost).next(rows, 0) > 0
        for _ in range(GUESSED):
            assert cost.nearest(rows).rows == near
            cost.at(rows).record(8, 9.0)
        assert cost.nearest(rows).rows == rows
        assert AutoBudget(cost).next(rows, 0) == OpenBudget(cost, 64).next(rows, 0) == 0
        cost.at(rows).record(0, 8.0)
        assert cost.nearest(rows).relative(8) == pytest.approx(9 / 8)
    assert not cost.nearest(4, 4 * 30_000).knows_plain, "behind a long context nothing is known"
    cost.at(1, 30_000).record(0, 5.0)
    assert cost.nearest(4, 4 * 30_000).doublings == cost.at(1, 30_000).doublings
    assert not CostCurve().nearest(3).knows_plain


def test_long_contexts_have_their_own_curves() -> None:
    """Behind 30,000 tokens a plain pass costs more, and a draft relatively more or less."""
    cost = curve(0.2)
    assert cost.at(1, SHORT - 1) is cost, "a short chat learns one curve"
    assert cost.at(4, 4 * SHORT - 1).knows_plain == cost.at(4).knows_plain
    long = cost.at(1, 30_000)
    assert long.at(1, 20_000) is long
    assert not long.knows_plain
    assert AutoBudget(cost).next(1, 30_000) == 0, "one plain pass shows what it costs here"
    long.record(0, 4.0)
    assert cost.at(1, 30_000).relative(8) == pytest.approx(1 + 8 * 0.2)  # as elsewhere, until
    line(long, 4.0, 0.2)  # it was measured here
    assert long.relative(8) == pytest.approx(1 + 8 * 0.05)
    assert cost.relative(8) == pytest.approx(1 + 8 * 0.2)
    assert AutoBudget(cost).next(1, 100) < AutoBudget(cost).next(1, 30_000)


def test_a_recorded_cost_serves_any_number_of_rows() -> None:
    line = {width: 1 + 0.1 * width for width in (0, *LADDER)}
    cost = RecordedCost(line)
    # Another row is one more position of the pass.
    assert cost.at(3, 1 << 20).relative(8) == pytest.approx((1 + 1.0) / (1 + 0.2))
    cost.at(3).record(8, 100.0)
    assert cost.at(3).relative(8) == pytest.approx(2.0 / 1.2)
    odd = RecordedCost({0: 0.020, 3: 0.021, 4: 0.0215, 5: 0.022, 100: 0.060})
    costs = [odd.relative(width) for width in (3, 4, 5, 100)]
    assert costs == pytest.approx([1.05, 1.075, 1.1, 3.0])
    assert RecordedCost({0: 1.0}).relative(8) > 1.0
    good = [AutoBudget(RecordedCost({w: 1 + 0.01 * w for w in line})) for _ in range(6)]
    assert min(share(good)) > 0


def test_drafting_time_counts() -> None:
    """What a draft model spends per token is weighed like a wider pass."""
    cost = curve(0.0)
    cost.record_draft(SLOW, 4, 99.0)  # the first one reads the prompt: not believed
    assert cost.drafting(SLOW, 4) == 0
    for _ in range(3):
        cost.record_draft(SLOW, 4, 4 * 0.5)
    assert cost.drafting(SLOW, 4) == pytest.approx(2)
    assert cost.drafting(SLOW, 2) == pytest.approx(1)  # in proportion below,
    assert cost.drafting(SLOW, 8) == pytest.approx(2)  # not guessed above
    assert cost.drafting(QUICK, 4) == 0
    for _ in range(3):
        cost.record_draft(SLOW, 8, 8 * 0.5)
    assert cost.drafting(SLOW, 6) == pytest.approx(3)

    def widths(drafter: Named) -> list[int]:
        return learn(AutoBudget(cost, ceiling=8, drafter=drafter), 0.6, 60)[-10:]

    assert max(widths(QUICK)) == 8
    assert max(widths(SLOW)) == 1
    assert cost.at(2).drafting(SLOW, 4) == 0  # another batch size, other costs


def test_e5_what_is_known_of_a_drafter_goes_with_it() -> None:
    """Also where it is recorded after the drafter was given up; equal ones count alike."""
    cost, drafter = curve(0.0), Named("new")
    for _ in range(2):
        cost.record_draft(drafter, 4, 2.0)
        cost.at(2).record_draft(drafter, 4, 2.0)
        cost.record_opening(drafter, 10, 5.0)
    assert cost.drafting(Named("new"), 4) == cost.drafting(drafter, 4) == 2.0
    gone = weakref.ref(drafter)
    del drafter
    assert gone() is None
    assert cost.drafting(Named("new"), 4) == cost.opening(Named("new"), 10) == 0


def asked(budget: OpenBudget, accepted: int, steps: int) -> int:
    """How often it asks a drafter of whose every other draft so many tokens hold."""
    count = 0
    for _ in range(steps):
        if budget.next(1, 0):
            count += 1
            if accepted and count % 2:
                budget.record(accepted, accepted)
    return count


def test_what_weighs_costs_itself_is_not_asked_in_vain() -> None:
    cost = curve(0.02)
    for _ in range(3):
        cost.record_draft(SLOW, 64, 0.2)
        cost.record_draft(QUICK, 64, 0.005)
    budget = OpenBudget(cost, 64, SLOW)
    assert asked(budget, 0, 300) * 0.2 < 0.03 * 300
    assert asked(budget, 0, 34) >= 2, "it must notice when times change"
    assert asked(budget, 3, 60) > 40
    assert asked(OpenBudget(cost, 64, SLOW), 1, 60) == 60, "half a token a pass is worth it"
    assert asked(OpenBudget(cost, 64, QUICK), 0, 300) == 300, "it misses no copy to save nothing"
    for plain in (OpenBudget(cost, 64), OpenBudget(RecordedCost({0: 1.0, 8: 1.2}), 64, SLOW)):
        assert asked(plain, 0, 300) == 300, "no time is known: the same drafts as ever"


def test_what_nodes_cost_in_a_shared_pass_is_no_gain() -> None:
    """A quarter of a token a pass is worth asking for alone, but not where eight must wait."""
    cost = curve(0.02)
    cost.at(8).record(0, 1.0)
    cost.at(8).record(64, 2.3)
    for rows in (1, 8):
        for _ in range(3):
            cost.at(rows).record_draft(SLOW, 64, 0.06)

    def share(rows: int) -> float:
        budget, count = OpenBudget(cost, 64, SLOW), 0
        for step in range(400):
            if budget.next(rows, 0):
                count += 1
                budget.record(2, int(step % 4 == 0), 2)
        return count / 400

    assert share(1) > 0.9
    assert share(8) < 0.4


# --- one decision for a pass over several sequences -----------------------------------------------


def taught(cost: CostCurve, accepted: int, steps: int = 12) -> AutoBudget:
    """A budget whose drafts of eight nodes held to the depth `accepted`."""
    budget = AutoBudget(cost)
    for _ in range(steps):
        budget.record(8, accepted)
    budget._pause = 0
    return budget


def test_nodes_go_where_they_hold() -> None:
    """A sequence whose drafts hold gets more than one whose drafts rarely do."""
    cost = curve(0.02, 3)
    good, fair, bad = taught(cost, 8), taught(cost, 2), taught(cost, 0)
    widths = share([good, fair, bad])
    assert widths[0] > widths[1] > 0
    assert widths[2] == RETRY_WIDTH, "to find out again"


def test_a_pass_that_others_fill_leaves_less() -> None:
    """Costs that rise with all positions of a pass: eight that draft alike draft less each."""
    kink = CostCurve()
    for rows in (1, 8):
        for width in (0, *LADDER):
            kink.at(rows).record(width, 1 + 0.01 * width + 0.2 * max(0, width - 16))
    alone = share([taught(kink, 8)])
    together = share([taught(kink.at(8), 8) for _ in range(8)])
    assert alone == [16]
    assert max(together) <= 4
    assert share([taught(kink.at(8), 8), *[FixedBudget(0)] * 7])[0] >= 8


def test_what_is_fixed_stays_fixed() -> None:
    cost = curve(0.02, 2)
    assert share([FixedBudget(7), FixedBudget(0)]) == [7, 0]
    assert share([FixedBudget(7), taught(cost, 8)])[0] == 7


def test_the_likeliest_nodes_of_all_drafts_are_picked() -> None:
    """The best of all prefixes, found by trying every set of nodes that keeps parents."""
    rng = random.Random(3)
    for _ in range(40):
        cost = curve(rng.choice([0.02, 0.1, 0.3]))
        probs = [
            sorted((rng.random() for _ in range(rng.randrange(1, 5))), reverse=True)
            for _ in range(3)
        ]

        def rate(counts: Sequence[int], cost: CostCurve = cost, own: Any = probs) -> float:
            tokens = 3 + sum(sum(own[i][:n]) for i, n in enumerate(counts))
            return tokens / cost.relative(2 + sum(counts))

        offers = [[(prob, 1) for prob in own] for own in probs]
        picked = pick(offers, 3.0, 2, lambda nodes, _, cost=cost: cost.relative(nodes))
        best = max(map(rate, itertools.product(*(range(len(own) + 1) for own in probs))))
        assert rate(picked) == pytest.approx(best)


@pytest.mark.parametrize("node", [0.072, 0.109, 0.5])
@pytest.mark.parametrize("length", [64, 1024])
def test_e12_nodes_that_cost_much_are_not_spent_on_finding_out(node: float, length: int) -> None:
    """A node costs 11 % of a plain pass behind 7,000 tokens on a CPU, 3.5 % behind 256."""
    cost, nodes, tried = CostCurve().at(1, 7000), 0, 0
    budget = AutoBudget(cost, ceiling=10)
    for _ in range(length):
        width = budget.next(1, 7000)
        cost.record(width, 1 + node * width)
        if width:
            budget.record(width, 0, width)
            nodes, tried = nodes + width, tried + 1
    assert nodes <= 34 + length / 12, "the first drafts, and one node in every pause from then on"
    assert tried >= length / 18, "it must notice when times change"


def test_e12_finding_out_takes_few_nodes_where_they_cost_much() -> None:
    """At most a tenth of a plain pass, but as many as the drafter needs to say anything."""
    for slope, ceiling, needed, nodes in (
        (0.0, 64, 1, RETRY_WIDTH),
        (0.025, 64, 1, RETRY_WIDTH),
        (0.025, 3, 1, 3),
        (0.05, 64, 1, 2),
        (0.2, 64, 1, 1),
        (0.2, 64, 2, 2),
        (0.2, 64, 3, RETRY_WIDTH),
    ):
        budget = AutoBudget(curve(slope), ceiling, lambda width, needed=needed: width // needed)
        assert budget.retry == nodes


def test_sequences_of_a_pass_count_though_its_cost_is_a_guess() -> None:
    """Eight rows give eight tokens without drafts, also with a curve of one row."""
    cost = curve(0.1)
    budgets = [AutoBudget(cost) for _ in range(8)]
    assert budgets[0].cost.nearest(8).rows == 1
    guessed = share(budgets)
    known = curve(0.1)
    line(known.at(8), 1.0, 0.1)
    assert guessed == share([AutoBudget(known) for _ in range(8)])


def test_a_reach_that_is_no_number_of_tokens_is_refused() -> None:
    with pytest.raises(OptionError, match=r"reach\(1\) of a drafter must be an integer"):
        AutoBudget(curve(0.1), reach=lambda width: width / 2)  # type: ignore[arg-type, return-value]
