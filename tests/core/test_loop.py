"""The loop on the toy target, which checks that every token is fed after its own prefix."""

from __future__ import annotations

import weakref
from collections import abc
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import draftsmith.testing
from draftsmith.core import loop
from draftsmith.core.budget import AutoBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context
from draftsmith.core.loop import propose, start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.sequence import Sequence, Stalls, end_rule
from draftsmith.core.target import RowOutput
from draftsmith.drafters.registry import parse
from draftsmith.errors import DrafterError, DrafterStalled
from draftsmith.testing import Scripted, ToyRow, ToyTarget, check_distribution, decode, plain
from scripted import Gambler, altered, oracle, random_trees
from sequences import run, sequence_of


def test_full_acceptance_gives_one_more_than_was_drafted() -> None:
    target = ToyTarget(11)
    answer = plain(target, [1, 2], 33)
    sequence = decode(target, oracle(answer, 8), [1, 2], 33)
    assert sequence.ids[2:] == answer
    assert sequence.stats.passes == 4  # 9 + 9 + 9 + 6
    assert sequence.stats.mean_accepted_length == pytest.approx(33 / 4)


def test_stats_add_up() -> None:
    target = ToyTarget(11)
    answer = plain(target, [1], 60)
    stats = decode(target, random_trees(1, near=answer, probes=2), [1], 60).stats
    assert stats.tokens == 60
    assert stats.accepted == sum(stats.accepted_by_depth)
    assert stats.accepted == sum(s.accepted for s in stats.by_source.values())
    assert stats.drafted == sum(s.drafted for s in stats.by_source.values())
    assert stats.tokens == stats.passes + stats.accepted
    assert stats.attempts == stats.drafted_by_depth[0]
    assert stats.probes > 0


def test_a_finishing_guess_counts_as_accepted_but_is_not_cached() -> None:
    target = ToyTarget(11)
    answer = plain(target, [1], 20)
    sequence = decode(target, oracle(answer), [1], 20, stop_rules=[end_rule([answer[4]])])
    assert sequence.finish_reason == "stop"
    assert sequence.row.pending == [sequence.ids[-1]]
    assert sequence.row.cached == len(sequence.ids) - 1


def test_drafts_end_where_the_target_has_no_room_and_plain_ones_get_none() -> None:
    target, flat = ToyTarget(11, context_length=30), ToyTarget(11, shape="plain")
    answer = plain(target, [1, 2], 28)
    assert decode(flat, oracle(answer), [1, 2], 20).stats.drafted == 0
    sequence = decode(target, oracle(answer, 16), [1, 2], 28)
    assert sequence.ids[2:] == answer
    assert sequence.row.cached < 30


def test_observe_sees_the_committed_ids_and_the_probes() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    def observe(ctx: Context, outcome: Any) -> None:
        seen.append((len(ctx.ids), tuple(outcome.output.logits.shape)))

    def propose(ctx: Context) -> Draft:
        probing = Draft((4, 5, 6), (-1, -1, 1), ("t",) * 3, probes=2)
        return probing if ctx.budget > 2 else EMPTY

    target = ToyTarget(11)
    sequence = decode(target, altered(propose, observe=observe), [1], 10)
    assert sequence.ids[1:] == plain(target, [1], 10), "probes must never be accepted"
    assert seen[-1][0] == len(sequence.ids)
    # Near the end the deepest probe has no room left, then none has.
    assert {shape for _, shape in seen} <= {(4, 11), (3, 11), (1, 11)}
    assert (4, 11) in {shape for _, shape in seen}


class Told(CostCurve):
    """Learns as it does, but that passes take a known time: a node 0.01 of a row's pass."""

    def record(self, width: int, seconds: float) -> None:  # noqa: ARG002
        super().record(width, 1.0 + 0.1 * self.rows + 0.01 * width)

    def record_draft(self, drafter: Hashable, width: int, seconds: float) -> None:
        pass


def test_e13_a_batch_that_shrinks_learns_its_costs_without_a_plain_pass_for_each_size() -> None:
    """Eight requests took twice the passes that each took alone."""

    def passes(cost: CostCurve, together: bool) -> int:
        target, sequences = ToyTarget(11), list[Sequence]()
        for number in range(8):
            answer = plain(target, [number], 40 + 8 * number)
            budget = AutoBudget(cost, 8)
            sequences.append(sequence_of([number], oracle(answer, 8), len(answer), budget))
        if together:
            return run(sequences, target, cost)
        return sum(run([one], target, cost) for one in sequences)

    cost = Told()
    alone = passes(cost, together=False)
    assert cost.knows_plain
    assert passes(cost, together=True) <= alone + 3 * 8
    assert passes(cost, together=True) <= alone + 8


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_banned_ids_are_never_emitted(greedy: bool) -> None:
    """Neither by the short cut nor by the walk."""
    answers = []
    for lazy in (False, True):
        distribution = Distribution((), greedy=greedy, lazy=lazy, banned=[0, 3])
        options: dict[str, Any] = {"distribution": distribution, "vocab_size": 5}
        sequence = sequence_of(
            [1, 2], random_trees(2), 60, sampler=TorchSampler.seeded(3), **options
        )
        run([sequence], ToyTarget(5))
        answers.append(sequence.ids[2:])
    assert answers[0] == answers[1]
    assert not {0, 3} & set(answers[0])
    assert len(set(answers[0])) > 1


class Overflowing(ToyTarget):
    """Computes nothing right in a pass that carries id 2 as a draft."""

    def forward(
        self,
        rows: abc.Sequence[ToyRow],
        drafts: abc.Sequence[Draft],
        take: abc.Sequence[int] | None = None,
    ) -> list[RowOutput]:
        outputs = super().forward(rows, drafts, take)
        return [
            RowOutput(torch.full_like(output.logits, torch.nan), finite=False)
            if 2 in draft.tokens
            else output
            for output, draft in zip(outputs, drafts, strict=True)
        ]


@pytest.mark.failing_passes
def test_samples_that_overflow_keep_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a token overflows depends on what was drawn, so it cannot just be left out."""
    monkeypatch.setattr(draftsmith.testing, "ToyTarget", Overflowing)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    check_distribution(Gambler(q, width=2))


@pytest.mark.failing_passes
def test_guesses_that_overflow_are_followed_one_by_one() -> None:
    target = Overflowing(11)
    for greedy in (True, False):
        answer = plain(target, [1], 60, greedy=greedy)
        assert 2 in answer
        for drafter in (oracle(answer), random_trees(1, near=answer, probes=2)):
            sequence = decode(target, drafter, [1], 60, greedy=greedy)
            assert sequence.ids[1:] == answer
            stats = sequence.stats
            assert stats.passes + stats.accepted == stats.tokens
            assert 0 < stats.failed_passes < 60, "what it cost is counted"


class Scarce(ToyTarget):
    """Has no memory for two rows together, nor while an earlier try is still held."""

    held: weakref.ref[Tensor] | None = None

    def forward(self, rows: Any, drafts: Any, takes: Any = None) -> list[RowOutput]:
        made = torch.zeros(9)
        if self.held is not None and self.held() is not None:
            raise torch.OutOfMemoryError("what was tried before is still held")
        if len(rows) > 1:
            self.held = weakref.ref(made)
            raise torch.OutOfMemoryError("no memory for two")
        return super().forward(rows, drafts, takes)


@pytest.mark.failing_passes
def test_a_row_that_is_left_out_holds_nothing_of_the_pass() -> None:
    target = Scarce(11)
    sequences = [sequence_of(ids, parse("none"), 5) for ids in ([1, 2], [3, 4])]
    for sequence in sequences:
        start(sequence, target)
    step(sequences, target)
    assert sequences[0].error is None
    assert sequences[0].generated == 1
    assert "no memory for two" in str(sequences[1].error)
    assert "in forward" in sequences[1].error.__notes__[0]  # type: ignore[union-attr]


def test_guesses_that_do_not_pay_stay_out_of_the_pass_and_samples_never() -> None:
    """Where a drafter says how likely its nodes are, and the budget is automatic."""
    cost = CostCurve()
    for width in (0, 64):
        cost.record(width, 1 + 0.1 * width)
    chances = (0.9, 0.8, 0.1, 0.05)
    q = torch.full((11,), 1 / 11, dtype=torch.float64)
    seen: list[int] = []
    for distributions in (None, [q] * 4):
        guess = Draft.chain([1, 2, 3, 4], "told", distributions)
        told = Scripted(lambda ctx, guess=guess: replace(guess, chances=chances).clip(ctx.budget))
        budget, greedy = AutoBudget(cost, 4), Distribution((), greedy=distributions is None)
        budget.survival = [0.9] * 4
        sequence, target = sequence_of([1], told, 20, budget, distribution=greedy), ToyTarget(11)
        start(sequence, target)
        sequence.open_drafter()
        [draft] = propose([sequence], [sequence], target)
        seen.append(len(draft))
    assert seen == [2, 4]
    with pytest.raises(DrafterError, match="chances must be 4 numbers from 0 to 1"):
        replace(guess, chances=(0.5,)).check(11, 4)


# --- drafters that delay passes -------------------------------------------------------------------


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(ToyTarget):
    """Its passes take `seconds` of `clock`."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        super().__init__(11)
        self.clock, self.seconds = clock, seconds

    def forward(self, *given: Any) -> Any:
        self.clock.now += self.seconds
        return super().forward(*given)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The loop's clock."""
    made = Clock()
    monkeypatch.setattr(loop, "perf_counter", made)
    monkeypatch.setattr(loop, "LONGEST_DRAFT", 5.0)
    return made


class Taking(Scripted):
    """Drafts nothing; its n-th draft takes `seconds(n)`, counted from 1."""

    def __init__(self, clock: Clock, seconds: abc.Callable[[int], float]) -> None:
        asked: list[int] = []

        def propose(ctx: Context) -> Draft:
            asked.append(len(ctx.ids))
            clock.now += seconds(len(asked))
            return EMPTY

        super().__init__(propose)
        object.__setattr__(self, "asked", asked)

    def answers(self, clock: Clock, count: int) -> list[Sequence]:
        """Answers of four tokens, one after the other, by passes that take no time."""
        stalls = Stalls()
        found = [sequence_of([1, 2, 3], self, 4, 2, stalls=stalls) for _ in range(count)]
        for sequence in found:
            run([sequence], Slow(clock))
        return found


@pytest.mark.parametrize(
    ("drafting", "passing", "stalls"),
    [(10.0, 0.01, True), (4.9, 0.0, False), (10.0, 0.7, False), (60.0, 7.0, False)],
)
def test_a_drafter_that_delays_a_pass_is_called_once_for_an_answer(
    clock: Clock, drafting: float, passing: float, stalls: bool
) -> None:
    """Ten seconds beside a pass that takes none; on a machine with slow passes it may."""
    target, drafter = Slow(clock, passing), Taking(clock, lambda _: drafting)
    if stalls:
        with pytest.raises(DrafterStalled, match=r"drafting took 10\.0 s"):
            decode(target, drafter, [1], 9)
        assert drafter.asked == [1]
        return
    sequence = decode(target, drafter, [1], 9)
    assert sequence.ids[1:] == plain(ToyTarget(11), [1], 9)
    assert len(drafter.asked) == 8
    assert sequence.stats.drafter_failures == 0


def test_e5_a_drafter_that_was_slow_once_is_used_by_the_next_answer(clock: Clock) -> None:
    """Such as on a machine that was stopped for an hour."""
    drafter = Taking(clock, lambda n: 3600.0 if n == 3 else 0.0)
    first, second = drafter.answers(clock, 2)
    assert isinstance(first.drafter_error, DrafterStalled)
    assert first.stats.drafter_failures == 1
    assert second.drafter_error is None
    assert len(drafter.asked) == 3 + 3


def test_e5_a_drafter_that_stays_slow_is_used_ever_less(clock: Clock) -> None:
    drafter = Taking(clock, lambda _: 10.0)
    for sequence in drafter.answers(clock, 100):
        assert isinstance(sequence.drafter_error, DrafterStalled)
        assert sequence.stats.drafter_failures == 1
        assert sequence.stats.tokens == 4
    assert len(drafter.asked) == 7, "after 0, 1, 3, 7, 15 and 31 answers without it"


def test_e5_a_drafter_that_gets_quick_again_is_used_as_before(clock: Clock) -> None:
    drafter = Taking(clock, lambda n: 10.0 if n % 10 == 1 else 0.0)
    stalled = [one for one in drafter.answers(clock, 20) if one.drafter_error is not None]
    slow = sum(1 for n in range(len(drafter.asked)) if n % 10 == 0)
    assert len(stalled) == slow, "no answer skipped it"


def test_time_of_compiling_and_of_reading_the_prompt_does_not_count(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Clock()
    monkeypatch.setattr(loop, "compiling", compiled)

    def compiles(_ctx: Context) -> Draft:
        clock.now += 30.0
        compiled.now += 26.0
        return EMPTY

    assert decode(Slow(clock), Scripted(compiles), [1], 4).stats.drafter_failures == 0
    sequence = sequence_of([1, 2, 3], Taking(clock, lambda n: 30.0 if n == 1 else 0.0), 3, 2)
    target = Slow(clock, 26.0)
    start(sequence, target)
    step([sequence], target, take=[2])
    target.seconds = 0.0
    step([sequence], target)
    assert sequence.drafting_seconds == 30.0
    assert sequence.drafter_error is None


def test_a_drafter_that_waits_before_it_fails_is_not_called_for_each_alone(clock: Clock) -> None:
    asked = []

    def times_out(ctx: Context) -> Draft:
        asked.append(len(ctx.ids))
        clock.now += 10.0
        raise TimeoutError("nobody answers")

    drafter, target = Scripted(times_out), ToyTarget(11)
    sequences = [sequence_of([1] * n, drafter, 3, 2) for n in (1, 2, 3)]
    for sequence in sequences:
        start(sequence, target)
    step(sequences, target)
    assert asked == [1]
    for sequence in sequences:
        assert isinstance(sequence.drafter_error, DrafterStalled)
        assert isinstance(sequence.drafter_error.__cause__, TimeoutError)
        assert sequence.stats.drafter_failures == 1
