"""Exact distributions: every rule of acceptance, by enumeration of every random choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith import testing
from draftsmith.core.draft import EMPTY, ROOT, Draft, Proposal
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.verify import Verification, verify, verify_choices
from draftsmith.testing import (
    Enumerated,
    Scripted,
    ToyTarget,
    assert_same_distribution,
    decode,
    enumerate_distribution,
    exact_distribution,
)


def distribution64(*weights: float) -> Tensor:
    p = torch.tensor(weights, dtype=torch.float64)
    return p / p.sum()


def verified(
    draft: Draft, target: ToyTarget, sampler: Enumerated, *, greedy: bool = False
) -> Verification:
    """The verification of a draft after id 0."""
    logits = target.forward([target.open([0])], [draft])[0].logits
    distribution = Distribution((), greedy=greedy)
    return verify(draft, logits.__getitem__, distribution, sampler, lambda: None, lambda *_: False)


def run(target: ToyTarget, draft: Draft, sampler: Enumerated, length: int) -> tuple[int, ...]:
    """Decode `length` ids after id 0: one drafted pass, then plain passes."""
    once = Scripted(lambda ctx: draft if len(ctx.ids) == 1 else EMPTY)
    done = decode(target, once, [0], length, greedy=False, sampler=sampler)
    return tuple(done.ids[1:])


def sampled_chain(distributions: list[Tensor], sampler: Enumerated) -> Draft:
    """A chain drawn from `distributions`; a distribution that sums to less than one may draw
    nothing, and stops."""
    tokens: list[int] = []
    proposals: dict[int, Proposal] = {}
    for depth, q in enumerate(distributions):
        nothing = max(0.0, 1 - float(q.sum()))
        x = sampler.draw(torch.cat([q, torch.tensor([nothing], dtype=q.dtype)]))
        if x == len(q):
            proposals[depth - 1] = Proposal(q, None)
            break
        proposals[depth - 1] = Proposal(q, depth)
        tokens.append(x)
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), ("q",) * len(tokens), proposals)


P = distribution64(0.5, 0.3, 0.2)
CASES = {
    "p equals q": [P, P],
    "different": [distribution64(0.1, 0.6, 0.3), distribution64(0.7, 0.2, 0.1)],
    "disjoint supports": [distribution64(0, 0, 1), distribution64(0, 1, 0)],
    "q concentrated": [distribution64(1, 0, 0), distribution64(1, 0, 0)],
    "may propose nothing": [
        distribution64(0.1, 0.6, 0.3) * 0.6,
        distribution64(0.7, 0.2, 0.1) * 0.5,
    ],
    "never proposes": [torch.zeros(3, dtype=torch.float64)],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "target",
    [
        ToyTarget(3, lambda _k: P, order=1),
        ToyTarget(
            3,
            lambda k: distribution64(0, 0.4, 0.6) if k == (0,) else distribution64(0.3, 0, 0.7),
            order=1,
        ),
        ToyTarget(3, order=2, seed=5),
    ],
    ids=["constant", "with zeros", "random"],
)
def test_sampled_chains_keep_the_distribution(name: str, target: ToyTarget) -> None:
    distributions = CASES[name]
    ours = enumerate_distribution(lambda c: run(target, sampled_chain(distributions, c), c, 3))
    assert_same_distribution(ours, exact_distribution(target, [0], 3))


@dataclass
class Lazy:
    """A lazy distribution that says what a dense one says."""

    q: Tensor
    draws: int

    def of(self, tokens: Sequence[int]) -> Tensor:
        return self.q[list(tokens)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("draws", [0, 2])
def test_lazy_distributions_keep_the_distribution(name: str, draws: int) -> None:
    target = ToyTarget(3, lambda k: distribution64(0, 0.4, 0.6) if k == (0,) else P, order=1)

    def lazily(sampler: Enumerated) -> tuple[int, ...]:
        draft = sampled_chain(CASES[name], sampler)
        proposals = {
            parent: Proposal(Lazy(proposal.q, draws), proposal.child)
            for parent, proposal in draft.proposals.items()
            if isinstance(proposal.q, Tensor)
        }
        return run(target, replace(draft, proposals=proposals), sampler, 3)

    assert_same_distribution(enumerate_distribution(lazily), exact_distribution(target, [0], 3))


@pytest.mark.parametrize("q", [P, distribution64(0.1, 0.6, 0.3)], ids=["p equals q", "different"])
def test_acceptance_is_one_minus_total_variation(q: Tensor) -> None:
    target = ToyTarget(3, lambda _k: P, order=1)

    def accepted(sampler: Enumerated) -> int:
        return len(verified(sampled_chain([q], sampler), target, sampler).path)

    expected = float(torch.minimum(P, q).sum())
    assert enumerate_distribution(accepted)[1] == pytest.approx(expected, abs=1e-12)


def test_mixed_node_takes_the_sample_first_and_then_the_guess() -> None:
    """A sampled child beside guesses: Leviathan, then the residual decides about the guesses."""
    target = ToyTarget(3, order=2, seed=1)
    q = distribution64(0.2, 0.7, 0.1)

    def experiment(sampler: Enumerated) -> tuple[int, ...]:
        x = sampler.draw(q)
        draft = Draft(
            tokens=(2, x, 0, 1, 2),
            parents=(ROOT, ROOT, ROOT, 0, 1),
            source=("guess", "q", "guess", "guess", "guess"),
            proposals={ROOT: Proposal(q, 1)},
        )
        return run(target, draft, sampler, 3)

    assert_same_distribution(enumerate_distribution(experiment), exact_distribution(target, [0], 3))


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 7))
    tokens = tuple(draw(st.integers(0, 2)) for _ in range(size))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    return Draft(tokens, parents, ("guess",) * size)


@given(trees(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_guess_trees_keep_the_distribution(draft: Draft, seed: int) -> None:
    """Also with equal siblings, which are one guess."""
    target = ToyTarget(3, order=1, seed=seed)
    ours = enumerate_distribution(lambda c: run(target, draft, c, 3))
    assert_same_distribution(ours, exact_distribution(target, [0], 3))


@given(trees(), st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_greedy_short_cut_equals_the_walk(draft: Draft, seed: int) -> None:
    target = ToyTarget(3, order=2, seed=seed)
    logits = target.forward([target.open([0])], [draft])[0].logits
    lazy = verified(draft, target, Enumerated(()), greedy=True)
    fast = verify_choices(draft, logits.argmax(-1).tolist(), lambda *_: False)
    assert lazy == fast


def test_guesses_spend_one_draw_per_token() -> None:
    sampler = Enumerated(())
    verification = verified(Draft.chain([0, 1, 2, 0], "guess"), ToyTarget(3, order=1), sampler)
    assert len(sampler.taken) == len(verification.tokens)


def test_an_experiment_with_too_many_branches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "MOST_BRANCHES", 3)
    with pytest.raises(AssertionError, match="more than 3 branches; make it smaller"):
        enumerate_distribution(lambda sampler: sampler.draw(torch.full((4,), 0.25)))


def test_predicted_draws_are_those_that_are_made() -> None:
    """In any order, and some of them made one by one afterwards."""
    probs = torch.rand(6, 30, generator=torch.Generator().manual_seed(1)).softmax(-1)
    for seed in range(20):
        one, other = TorchSampler.seeded(seed), TorchSampler.seeded(seed)
        expected = [one.draw(p) for p in probs]
        draws = [2, 0, 1, 3]
        assert other.predict(probs[draws], draws).tolist() == [expected[n] for n in draws]
        other.skip(2)
        assert other.draw(probs[2]) == expected[2]
        assert other.predict(probs[3:5], [0, 1]).tolist() == expected[3:5]
        other.skip(2)
        assert other.draw(probs[5]) == expected[5]


def test_drafts_are_accepted_alike_whatever_torch_s_default_dtype() -> None:
    asked = torch.linspace(0, 1, 200).tolist()
    before = torch.get_default_dtype()
    try:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            sampler = TorchSampler.seeded(3)
            found.append([sampler.accept(ratio) for ratio in asked])
    finally:
        torch.set_default_dtype(before)
    assert found[0] == found[1]


def test_a_draw_from_what_is_no_distribution_raises_after_a_prediction() -> None:
    sampler = TorchSampler.seeded(0)
    sampler.predict(torch.full((2, 4), 0.25), [0, 1])
    with pytest.raises(RuntimeError, match="probability tensor"):
        sampler.draw(torch.full((4,), float("nan")))
