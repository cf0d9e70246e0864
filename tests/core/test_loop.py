"""The loop on the toy target, which checks that every token is fed after its own prefix."""

from __future__ import annotations

from collections import abc
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch

import draftsmith.testing
from draftsmith.core import loop
from draftsmith.core.budget import AutoBudget, FixedBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context
from draftsmith.core.loop import propose, start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.sequence import EndTokens, Sequence, Stalls
from draftsmith.core.target import RowOutput
from draftsmith.core.tree import Continuation, merge
from draftsmith.errors import DrafterError, DrafterStalled
from draftsmith.testing import Scripted, ToyRow, ToyTarget, check_distribution, decode, plain
from scripted import oracle, random_trees


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
    end = answer[4]
    sequence = decode(target, oracle(answer), [1], 20, stop_rules=[EndTokens([end])])
    assert sequence.finish_reason == "stop"
    assert sequence.row is not None
    assert sequence.row.pending == [sequence.ids[-1]]
    assert sequence.row.cached == len(sequence.ids) - 1


def test_batches_mix_drafters_and_rows_finish_alone() -> None:
    target = ToyTarget(11)
    prompts = [[1], [2, 3, 4], [5, 5, 5, 5]]
    answers = [plain(target, p, 10 + 5 * i) for i, p in enumerate(prompts)]
    drafters = [oracle(answers[0], 3), Scripted(lambda _c: EMPTY), random_trees(near=answers[2])]
    sequences = [
        Sequence(
            prompt,
            drafter=drafter,
            budget=FixedBudget(6),
            distribution=Distribution((), greedy=True),
            sampler=TorchSampler.seeded(0),
            vocab_size=11,
            limit=len(answer),
        )
        for prompt, drafter, answer in zip(prompts, drafters, answers, strict=True)
    ]
    for sequence in sequences:
        start(sequence, target)
    while active := [s for s in sequences if not s.finished]:
        step(active, target)
    assert [s.ids[s.prompt_length :] for s in sequences] == answers


def test_chain_targets_get_the_first_branch_and_plain_ones_nothing() -> None:
    tree = Scripted(
        lambda ctx: merge([Continuation([1, 2], "t"), Continuation([3, 4], "t")], ctx.budget)
    )
    chain, flat = ToyTarget(11, shape="chain"), ToyTarget(11, shape="plain")
    assert decode(chain, tree, [1], 20).ids[1:] == plain(chain, [1], 20)
    sequence = decode(flat, tree, [1], 20)
    assert sequence.stats.drafted == 0


def test_drafts_end_where_the_target_has_no_room() -> None:
    target = ToyTarget(11, context_length=30)
    answer = plain(target, [1, 2], 28)
    sequence = decode(target, oracle(answer, 16), [1, 2], 28)
    assert sequence.ids[2:] == answer
    assert sequence.row is not None
    assert sequence.row.cached < 30


def test_a_draft_beyond_its_budget_is_an_error_not_a_cut() -> None:
    wide = Scripted(lambda _ctx: Draft.chain([1] * 40, "greedy_one"))
    with pytest.raises(DrafterError, match="greedy_one: a draft of 40 nodes exceeds"):
        decode(ToyTarget(11), wide, [1], 20)


def test_observe_sees_the_committed_ids_and_the_probes() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Watching(Scripted):
        def open(self, ctx: Context):  # type: ignore[no-untyped-def]
            state = super().open(ctx)
            state.observe = lambda ctx, out: seen.append(  # type: ignore[method-assign]
                (len(ctx.ids), tuple(out.output.logits.shape))
            )
            return state

    probing = Watching(
        lambda ctx: Draft((4, 5, 6), (-1, -1, 1), ("t",) * 3, probes=2) if ctx.budget > 2 else EMPTY
    )
    target = ToyTarget(11)
    sequence = decode(target, probing, [1], 10)
    assert sequence.ids[1:] == plain(target, [1], 10), "probes must never be accepted"
    assert seen[-1][0] == len(sequence.ids)
    # Near the end the deepest probe has no room left, then none has.
    assert {shape for _, shape in seen} <= {(4, 11), (3, 11), (1, 11)}
    assert (4, 11) in {shape for _, shape in seen}


def test_costs_are_learnt_from_the_passes() -> None:
    target, cost = ToyTarget(11), CostCurve()
    answer = plain(target, [1], 20)
    sequence = Sequence(
        [1],
        drafter=oracle(answer),
        budget=FixedBudget(0),
        distribution=Distribution((), greedy=True),
        sampler=TorchSampler.seeded(0),
        vocab_size=11,
        limit=20,
    )
    start(sequence, target)
    step([sequence], target, cost)
    assert cost.knows_plain


class Told(CostCurve):
    """Learns as it does, but that passes take a known time: a node 0.01 of a row's pass."""

    def record(self, width: int, seconds: float) -> None:  # noqa: ARG002
        super().record(width, 1.0 + 0.1 * self.rows + 0.01 * width)

    def record_draft(self, drafter: Hashable, width: int, seconds: float) -> None:
        pass


def test_e13_a_batch_that_shrinks_learns_its_costs_without_a_plain_pass_for_each_size() -> None:
    """Eight requests took twice the passes that each took alone."""

    def passes(cost: CostCurve, together: bool) -> int:
        target, sequences, made = ToyTarget(11), list[Sequence](), 0
        for number in range(8):
            answer = plain(target, [number], 40 + 8 * number)
            sequences.append(
                Sequence(
                    [number],
                    drafter=oracle(answer, 8),
                    budget=AutoBudget(cost, 8),
                    distribution=Distribution((), greedy=True),
                    sampler=TorchSampler.seeded(0),
                    vocab_size=11,
                    limit=len(answer),
                )
            )
            start(sequences[-1], target)
        for members in [sequences] if together else [[one] for one in sequences]:
            while going := [one for one in members if not one.finished]:
                step(going, target, cost)
                made += len(going)
        return made

    cost = Told()
    alone = passes(cost, together=False)
    assert passes(cost, together=True) <= alone + 3 * 8
    assert passes(cost, together=True) <= alone + 8


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_banned_ids_are_never_emitted(greedy: bool) -> None:
    """Neither by the short cut nor by the walk."""
    target = ToyTarget(5)
    answers = []
    for lazy in (False, True):
        sequence = Sequence(
            [1, 2], drafter=random_trees(2), budget=FixedBudget(6), sampler=TorchSampler.seeded(3),
            distribution=Distribution((), greedy=greedy, lazy=lazy, banned=[0, 3]),
            vocab_size=5, limit=60,
        )  # fmt: skip
        start(sequence, target)
        while not sequence.finished:
            step([sequence], target)
        answers.append(sequence.ids[2:])
    assert answers[0] == answers[1]
    assert not {0, 3} & set(answers[0])
    assert len(set(answers[0])) > 1


def test_a_distribution_leaves_the_logits_as_they_are() -> None:
    distribution, logits = (
        Distribution((), greedy=True, banned=[2]),
        torch.arange(3.0).expand(4, 3).clone(),
    )
    assert distribution.best(logits).tolist() == [1] * 4
    assert distribution.scores(None, logits[0]).argmax() == 1
    assert torch.equal(logits, torch.arange(3.0).expand(4, 3))


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


class Sampling(Scripted):
    """Two tokens drawn from the same distribution, which is not the target's."""

    sampled = True

    def __init__(self) -> None:
        super().__init__(self._propose)

    def _propose(self, ctx: Context) -> Draft:
        q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
        tokens = [ctx.sampler.draw(q) for _ in range(min(2, ctx.budget))]
        return Draft.chain(tokens, "sampling", [q] * len(tokens))


@pytest.mark.failing_passes
def test_samples_that_overflow_keep_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a token overflows depends on what was drawn, so it cannot just be left out."""
    monkeypatch.setattr(draftsmith.testing, "ToyTarget", Overflowing)
    check_distribution(Sampling())


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
            wasted = stats.passes + stats.accepted - stats.tokens
            assert 0 < wasted < 60, "what it cost is counted"


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
        sequence = Sequence(
            [1], drafter=told, budget=AutoBudget(cost, 4),
            distribution=Distribution((), greedy=distributions is None),
            sampler=TorchSampler.seeded(0), vocab_size=11, limit=20,
        )  # fmt: skip
        sequence.budget.survival = [0.9] * 4  # type: ignore[attr-defined]
        target = ToyTarget(11)
        start(sequence, target)
        sequence.open_drafter()
        [draft] = propose([sequence], [sequence], target)
        seen.append(len(draft))
    assert seen == [2, 4]
    with pytest.raises(DrafterError, match="chances must be 4 probabilities"):
        replace(guess, chances=(0.5,)).check(11, 4)


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(ToyTarget):
    """Whose passes take `seconds`."""

    clock: Clock
    seconds: float

    def forward(self, *given: Any) -> Any:
        self.clock.now += self.seconds
        return super().forward(*given)


@pytest.mark.parametrize(
    ("drafting", "passing", "stalls"),
    [(10.0, 0.01, True), (4.9, 0.0, False), (10.0, 0.7, False), (60.0, 7.0, False)],
)
def test_a_drafter_that_holds_up_a_pass_is_asked_once_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, drafting: float, passing: float, stalls: bool
) -> None:
    """Ten seconds beside a pass that takes none; on a machine whose passes take long it may."""
    clock, target, asked = Clock(), Slow(11), []
    target.clock, target.seconds = clock, passing
    monkeypatch.setattr(loop, "perf_counter", clock)
    answer = plain(ToyTarget(11), [1], 9)

    def stall(ctx: Context) -> Draft:
        asked.append(len(ctx.ids))
        clock.now += drafting
        return Draft.chain(answer[len(ctx.ids) - 1 :][:1], "stalls")

    if stalls:
        with pytest.raises(DrafterStalled, match=r"drafting took 10\.0 s"):
            decode(target, Scripted(stall), [1], 9)
        assert asked == [1]
        return
    sequence = decode(target, Scripted(stall), [1], 9)
    assert sequence.ids[1:] == answer
    assert len(asked) == 4
    assert sequence.stats.drafter_failures == 0


def answers_of(drafter: Scripted, count: int, clock: Clock) -> list[Sequence]:
    """Answers one after the other, by passes that take no time."""
    target, stalls, found = Slow(11), Stalls(), []
    target.clock, target.seconds = clock, 0.0
    for _ in range(count):
        sequence = Sequence(
            [1, 2, 3], drafter=drafter, budget=FixedBudget(2), vocab_size=11, limit=4,
            distribution=Distribution((), greedy=True), sampler=TorchSampler.seeded(0),
            stalls=stalls,
        )  # fmt: skip
        start(sequence, target)
        while not sequence.finished:
            step([sequence], target)
        found.append(sequence)
    return found


def test_e5_a_drafter_that_was_slow_once_is_asked_by_the_next_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that was stopped for an hour, say."""
    clock, asked = Clock(), []
    monkeypatch.setattr(loop, "perf_counter", clock)

    def slow_once(_ctx: Context) -> Draft:
        asked.append(clock.now)
        clock.now += 3600.0 if len(asked) == 3 else 0.0
        return EMPTY

    first, second = answers_of(Scripted(slow_once), 2, clock)
    assert isinstance(first.drafter_error, DrafterStalled)
    assert first.stats.drafter_failures == 1
    assert second.drafter_error is None
    assert len(asked) == 3 + 3


def test_e5_a_drafter_that_stays_slow_is_asked_ever_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, quick = Clock(), [], False
    monkeypatch.setattr(loop, "perf_counter", clock)

    def slow(_ctx: Context) -> Draft:
        asked.append(clock.now)
        clock.now += 0.0 if quick else 10.0
        return EMPTY

    drafter = Scripted(slow)
    found = answers_of(drafter, 100, clock)
    assert len(asked) == 7, "after 0, 1, 3, 7, 15 and 31 answers without it"
    for sequence in found:
        assert isinstance(sequence.drafter_error, DrafterStalled)
        assert sequence.stats.drafter_failures == 1
        assert sequence.stats.tokens == 4


def test_e5_who_gets_quick_again_is_asked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), []
    monkeypatch.setattr(loop, "perf_counter", clock)

    def mostly_quick(_ctx: Context) -> Draft:
        asked.append(clock.now)
        clock.now += 10.0 if len(asked) % 10 == 1 else 0.0
        return EMPTY

    found = answers_of(Scripted(mostly_quick), 20, clock)
    stalled = [sequence for sequence in found if sequence.drafter_error is not None]
    assert len(stalled) == sum(1 for n in range(len(asked)) if n % 10 == 0), "no answer rested"


def test_what_a_drafter_compiles_and_reads_is_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, target, compiled = Clock(), Slow(11), Clock()
    target.clock, target.seconds = clock, 0.0
    monkeypatch.setattr(loop, "perf_counter", clock)
    monkeypatch.setattr(loop, "compiling", compiled)

    def compiles(_ctx: Context) -> Draft:
        clock.now += 30.0
        compiled.now += 26.0
        return EMPTY

    assert decode(target, Scripted(compiles), [1], 4).stats.drafter_failures == 0

    def reads(ctx: Context) -> Draft:
        clock.now += 30.0 if len(ctx.ids) == ctx.prompt_length else 0.0
        return EMPTY

    sequence = Sequence(
        [1, 2, 3], drafter=Scripted(reads), budget=FixedBudget(2), vocab_size=11, limit=3,
        distribution=Distribution((), greedy=True), sampler=TorchSampler.seeded(0),
    )  # fmt: skip
    start(sequence, target)
    target.seconds = 26.0
    step([sequence], target, take=[2])
    target.seconds = 0.0
    step([sequence], target)
    assert sequence.waited == 30.0
    assert sequence.drafter_error is None


def test_one_that_waits_before_it_fails_is_not_asked_for_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, target, asked = Clock(), ToyTarget(11), []
    monkeypatch.setattr(loop, "perf_counter", clock)

    def times_out(ctx: Context) -> Draft:
        asked.append(len(ctx.ids))
        clock.now += 10.0
        raise TimeoutError("nobody answers")

    drafter = Scripted(times_out)
    sequences = [
        Sequence(
            [1] * n, drafter=drafter, budget=FixedBudget(2), vocab_size=11, limit=3,
            distribution=Distribution((), greedy=True), sampler=TorchSampler.seeded(0),
        )
        for n in (1, 2, 3)
    ]  # fmt: skip
    for sequence in sequences:
        start(sequence, target)
    step(sequences, target)
    assert asked == [1]
    for sequence in sequences:
        assert isinstance(sequence.drafter_error, DrafterStalled)
        assert isinstance(sequence.drafter_error.__cause__, TimeoutError)
        assert sequence.stats.drafter_failures == 1
