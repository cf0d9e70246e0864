"""Exact distributions of drafts by a second model: every random choice of target and drafter
enumerated."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pairs import (
    DISTRIBUTIONS,
    PAIRS,
    SAMPLED,
    answer,
    bound,
    check,
    decoded,
    in_a_batch,
    sequence,
)
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import step
from draftsmith.core.sampling import Gumbel, Sampler, SamplingParams, TorchSampler
from draftsmith.drafters.draft_model.psi import PathPsi
from draftsmith.testing import (
    Scripted,
    ToyTarget,
    assert_same_distribution,
    check_rewind,
    enumerate_distribution,
    exact_distribution,
)

FITTING = [
    (name, algorithm)
    for name, (T, D) in PAIRS.items()
    for algorithm in ("standard", "union", "tli")
    if not (algorithm == "standard" and name not in ("same", "padded"))
    and not (algorithm == "tli" and not set(T) & set(D))
]


@pytest.mark.parametrize("algorithm", ["standard", "union", "tli"])
def test_in_a_batch_of_three_each_keeps_its_distribution(algorithm: str) -> None:
    in_a_batch(bound([b"a", b"b"], [b"a", b"b"], algorithm, tokens=1), [2, 2, 2])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("name", "algorithm"), FITTING)
def test_output_distribution_is_the_targets(name: str, algorithm: str, distribution: str) -> None:
    """Full drafts of two tokens, one more of the target's own; answers shorter than drafts, too."""
    T, D = PAIRS[name]  # noqa: N806
    for length in (1, 3) if distribution == "plain" else (2,):
        check(bound(T, D, algorithm), DISTRIBUTIONS[distribution], length, size=len(T))


@pytest.mark.parametrize("after", [(0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("standard", {}), ("tli", {}), ("slrs", {"psi": "path"}), ("slrs", {"psi": "enumerate"})],
)
def test_a_draft_model_that_overflows_after_a_token_keeps_the_distribution(
    algorithm: str,
    options: dict[str, str],
    after: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its draft ends there; were it dropped, what is accepted would depend on what was drawn.

    Where it has drawn nothing, it fails, and the target goes on alone.
    """
    monkeypatch.setattr(PathPsi, "draws", 1)  # each more is a level of the enumeration

    def overflowing(key: tuple[int, ...]) -> Tensor:
        weights = [0.4, 0.6] if sum(key) % 2 else [0.55, 0.45]
        return torch.full((2,), torch.nan) if key == after else torch.tensor(weights)

    T, D = [b"ab", b"aa", b"bb", b"ba", b"b", b"a"], [b"a", b"b"]  # noqa: N806
    if algorithm == "standard":
        T = D = [b"a", b"b"]  # noqa: N806
    drafter = bound(T, D, algorithm, distribution=overflowing, order=2, **options)
    target = ToyTarget(len(T), order=1, seed=1)

    def answered(sampler: Sampler, length: int) -> tuple[int, ...]:
        done = sequence(target, drafter, [1, 1], length, sampler)
        while not done.finished:
            step([done], target)
        return tuple(done.ids[2:])

    for length in (1, 2):
        ours = enumerate_distribution(partial(answered, length=length))
        assert_same_distribution(ours, exact_distribution(target, [1, 1], length))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("algorithm", ["standard", "tli", "slem", "slrs"])
def test_a_draft_model_that_always_overflows_is_reported(
    algorithm: str, temperature: float
) -> None:
    nothing = torch.full((3,), torch.nan)
    drafter = bound(*PAIRS["same"], algorithm, distribution=lambda _key: nothing)
    params, target = SamplingParams(temperature=temperature), ToyTarget(3, order=1, seed=1)
    done = sequence(target, drafter, [0, 0], 9, TorchSampler.seeded(0), params)
    while not done.finished:
        step([done], target)
    assert done.stats.drafted == 0
    assert done.stats.drafter_failures == 1
    assert any("the drafter failed" in notice for notice in done.failures.values())


SPELLINGS = st.sampled_from([b"a", b"b", b"aa", b"ab", b"ba", b"aab"])
TOKENS = st.lists(SPELLINGS, min_size=2, max_size=4, unique=True)


@settings(deadline=None, max_examples=40)
@given(
    TOKENS,
    TOKENS,
    st.sampled_from(["union", "tli"]),
    st.sampled_from(list(DISTRIBUTIONS)),
    st.sampled_from([0.0, 0.3, 0.6]),
    st.integers(0, 99),
)
def test_any_two_vocabularies(
    T: list[bytes | None],  # noqa: N803
    D: list[bytes | None],  # noqa: N803
    algorithm: str,
    distribution: str,
    confidence: float,
    seed: int,
) -> None:
    assume(algorithm == "union" or set(T) & set(D))
    drafter = bound(T, D, algorithm, seed=seed, confidence=confidence, ends=[seed % len(D)])
    check(drafter, DISTRIBUTIONS[distribution], 2, size=len(T))


@pytest.mark.parametrize(("name", "algorithm"), FITTING)
def test_distribution_with_confidence_and_end_rules(name: str, algorithm: str) -> None:
    """The drafter's end ends the draft; so does a token less probable than the threshold."""
    T, D = PAIRS[name]  # noqa: N806
    check(bound(T, D, algorithm, ends=[0], confidence=0.4), length=3, size=len(T))
    check(bound(T, D, algorithm, ends=[1]), length=3, size=len(T), ends=[1])


@pytest.mark.parametrize("algorithm", ["union", "tli", "slem"])
def test_a_rewound_state_drafts_like_a_new_one(algorithm: str) -> None:
    """Where the drafter spells most tokens in several of its own."""
    T = [bytes(t) for n in (1, 2, 3) for t in product(b"ab", repeat=n)][:11]  # noqa: N806
    options = {"reproducible": algorithm != "slem", "tokens": 4, "order": 99}
    check_rewind(bound(T, [b"a", b"b", b"aab"], algorithm, **options))


def acceptance(drafter: Drafter, target: ToyTarget, params: SamplingParams = SAMPLED) -> float:
    """The exact probability that the first drafted token is accepted."""

    def accepted(sampler: Any) -> int:
        return decoded(target, drafter, [0, 1], 2, sampler, params).stats.accepted

    return enumerate_distribution(accepted).get(1, 0.0)


@pytest.mark.parametrize("name", ["overlapping", "drafter inside", "target inside", "prefixes"])
@pytest.mark.parametrize("seed", range(2))
def test_tli_accepts_at_least_as_often_as_the_union(name: str, seed: int) -> None:
    """Theorem 4.1, and both acceptances as the formula says: Σ min(p, q)."""
    T, D = PAIRS[name]  # noqa: N806
    target = ToyTarget(len(T), order=1, seed=seed)
    tli, union = (bound(T, D, algorithm, seed=seed + 9, tokens=1) for algorithm in ("tli", "union"))
    found = acceptance(tli, target), acceptance(union, target)
    assert found[0] >= found[1] - 1e-12

    maps = tli.translate().maps  # type: ignore[attr-defined]
    p, q = target.distribution([1]), tli.runner.distribution(maps.spelling(1))  # type: ignore[attr-defined]
    inside = maps.distribution(q, len(T))
    sums = [
        torch.minimum(p, distribution).sum() for distribution in (inside / inside.sum(), inside)
    ]
    assert found == pytest.approx([float(s) for s in sums], abs=1e-12)


# ------------------------------------------------------------------------ the reproducible mode


def formula(p: Tensor, q: Tensor) -> float:
    """Σ_x 1/Σ_y max(p(y)/p(x), q(y)/q(x))."""
    both = (p > 0) & (q > 0)
    return sum(float(1 / torch.maximum(p / p[x], q / q[x]).sum()) for x in both.nonzero()[:, 0])


@pytest.mark.parametrize(("name", "algorithm"), FITTING)
def test_reproducible_output_depends_on_the_seed_alone(name: str, algorithm: str) -> None:
    T, D = PAIRS[name]  # noqa: N806
    target = ToyTarget(len(T), order=1, seed=1)
    silent = Scripted(lambda _ctx: Draft())
    for seed in range(8):
        params = SamplingParams(temperature=1.0, seed=seed)
        answers = {
            answer(target, drafter, [0, 1], 8, Gumbel(seed), params)
            for drafter in (
                bound(T, D, algorithm, reproducible=True, tokens=3),
                bound(T, D, algorithm, reproducible=True, seed=77, confidence=0.5),
                silent,
            )
        }
        assert len(answers) == 1


@pytest.mark.slow
def test_acceptance_of_the_reproducible_mode() -> None:
    """The loop accepts as often as the formula says, and always if both models are the same."""
    target = ToyTarget(3, lambda _key: torch.tensor([0.5, 0.3, 0.2]))
    other = torch.tensor([0.2, 0.3, 0.5])
    drafter = bound(
        *PAIRS["same"], "standard", distribution=lambda _key: other, reproducible=True, tokens=1
    )
    tries = 4000
    accepted = sum(
        decoded(target, drafter, [0], 2, Gumbel(seed)).stats.accepted for seed in range(tries)
    )
    expected = formula(target.distribution([0]), other.double())
    sigma = (expected * (1 - expected) / tries) ** 0.5
    assert abs(accepted / tries - expected) < 4 * sigma
    same = bound(
        *PAIRS["same"], "standard", distribution=target.distribution, reproducible=True, tokens=1
    )
    assert all(decoded(target, same, [0], 2, Gumbel(s)).stats.accepted for s in range(50))


class Given(Gumbel):
    """Gumbel noise from uniform numbers that a test chooses."""

    uniform: np.ndarray[Any, Any]

    def _uniform(self, stream: int, size: int) -> np.ndarray[Any, Any]:  # noqa: ARG002
        return self.uniform


def test_distribution_of_a_gumbel_draw() -> None:
    """To 1e-9: the least token's noise by Gauss quadrature, the others' thresholds by bisection.

    Given its own uniform number u, token 0 is drawn where every other one lies above a threshold;
    the thresholds are 1 − (1−u)^(p_y/p_0), so that with whole ratios a few nodes are exact.
    """
    p = torch.tensor([0.125, 0.25, 0.625], dtype=torch.float64)
    sampler = Given(0)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    total = 0.0
    for u, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        above = 1.0
        for other in (1, 2):
            low, high = 0.0, 1.0
            for _ in range(50):
                middle = (low + high) / 2
                sampler.uniform = np.array([u, 1 - 1e-16, 1 - 1e-16])
                sampler.uniform[other] = middle
                low, high = (low, middle) if sampler.draw(p) == 0 else (middle, high)
            above *= 1 - low
        total += weight * above
    assert total == pytest.approx(0.125, abs=1e-9)


def test_gumbel_draws_are_keyed() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    counts = torch.zeros(4)
    sampler, tries = Gumbel(7), 5_000
    for _ in range(tries):
        counts[sampler.draw(p)] += 1
    chi2 = float(((counts - tries * p) ** 2 / (tries * p)).sum())
    assert chi2 < 16.27  # p = 0.001 with 3 degrees of freedom
    assert torch.equal(Gumbel(7).noise(3, 5), Gumbel(7).noise(3, 9)[:5])  # keyed by token, too
    with pytest.raises(RuntimeError, match="not finite"):  # as `torch.multinomial` does
        sampler.draw(torch.tensor([0.5, float("nan")]))
    assert not torch.equal(Gumbel(7).noise(3, 5), Gumbel(8).noise(3, 5))
    assert Gumbel(1).draw(torch.tensor([0.0, 1.0, 0.0])) == 1
    shares = sum(sampler.accept(0.25) for _ in range(4000)) / 4000
    assert abs(shares - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert not any(Gumbel(s).accept(0.0) for s in range(100))
