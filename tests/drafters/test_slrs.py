"""SLRS: ψ is the probability of a proposal, and the output distribution is the target's; all
enumerated."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import DISTRIBUTIONS, PAIRS, bound, check, decoded, in_a_batch
from torch import Tensor

import tiny
from draftsmith.core import verify
from draftsmith.core.draft import Draft
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.core.target import Shape
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.drafters.draft_model.psi import PathPsi, Rule, Walk, psi_of
from draftsmith.drafters.draft_model.translation import Ids
from draftsmith.engine.engine import Engine
from draftsmith.errors import DraftsmithError, OptionError, UnsupportedError
from draftsmith.testing import (
    Enumerated,
    ToyTarget,
    assert_same_distribution,
    enumerate_distribution,
)

BYTES: dict[str, tuple[list[bytes | None], list[bytes | None]]] = {
    "same": ([b"a", b"b", b"c"], [b"a", b"b", b"c"]),
    "prefixes": ([b"a", b"aa", b"ab", b"b"], [b"b", b"a"]),
    "no single a": ([b"ab", b"b", b"aab"], [b"a", b"b"]),
    "bytes that no token has": ([b"a", b"ab"], [b"c", b"b", b"a"]),
    "tokens out of reach": ([b"a", b"ac", b"aa"], [b"a", b"b"]),
    "padded": ([b"a", None, b"ba"], [b"a", b"b", None]),
}
"""Tokens of target and byte-level drafter."""

CASES = [(name, "path") for name in BYTES] + [(name, "enumerate") for name in PAIRS]


def drafter_of(name: str, psi: str, **options: object) -> BoundDraftModel:
    T, D = (BYTES if psi == "path" else PAIRS)[name]  # noqa: N806
    return bound(T, D, "slrs", psi=psi, order=2, **options)


def test_in_a_batch_of_three_each_keeps_its_distribution() -> None:
    """Beside two that have no more than a token to go."""
    in_a_batch(bound([b"a", b"b"], [b"b", b"a"], "slrs", tokens=1), [2, 1, 1])


def size_of(name: str, psi: str) -> int:
    return len((BYTES if psi == "path" else PAIRS)[name][0])


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw of a residual before all of ψ is asked for: fewer branches, both ways taken."""
    monkeypatch.setattr(PathPsi, "draws", 1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("name", "psi"), CASES)
def test_output_distribution_is_the_targets(name: str, psi: str, distribution: str) -> None:
    """Answers of one token cut the draft's second proposal off; longer ones go on after it."""
    for length in (1, 2):
        check(drafter_of(name, psi), DISTRIBUTIONS[distribution], length, size=size_of(name, psi))


@pytest.mark.parametrize(("name", "psi"), CASES)
def test_distribution_with_confidence_and_end_rules(name: str, psi: str) -> None:
    """Three proposals where the drafter is sure, one where it is not; its end is a token like any.

    The second drafter has an end that the target has not, the third one that it has.
    """
    T, D = (BYTES if psi == "path" else PAIRS)[name]  # noqa: N806
    check(drafter_of(name, psi, tokens=3, confidence=0.4), size=len(T))
    for own in ("</s>", "<eos>"):
        drafter = bound([*T, "</s>"], [*D, own], "slrs", psi=psi, ends=[len(D)], order=2)
        check(drafter, size=len(T) + 1)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_distribution_where_branches_share_a_pass(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of ψ at once, on drafters that take trees and on those that take chains."""
    monkeypatch.setattr(PathPsi, "draws", 0)
    check(drafter_of("prefixes", "path", shape=shape), length=3, size=4)


@settings(max_examples=12, deadline=None)
@given(
    of_target=st.lists(st.text("ab", min_size=1, max_size=3), min_size=2, max_size=5, unique=True),
    of_drafter=st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=4, unique=True),
    seed=st.integers(0, 100),
    confidence=st.sampled_from([0.0, 0.5]),
)
def test_any_vocabularies_keep_the_distribution(
    of_target: list[str], of_drafter: list[str], seed: int, confidence: float
) -> None:
    target = [token.encode() for token in of_target]
    drafters = {"enumerate": [token.encode() for token in of_drafter], "path": [b"b", b"a"]}
    for psi, tokens in drafters.items():
        try:
            drafter = bound(target, tokens, "slrs", psi=psi, seed=seed, confidence=confidence)
        except UnsupportedError:
            continue
        check(drafter, size=len(target))


# ------------------------------------------------------------------------------------- ψ itself


def walked(
    drafter: BoundDraftModel, stop: str | None, sampler: Enumerated, size: int
) -> tuple[int | None, Tensor]:
    """The token of one walk after the empty text, and the distribution that is stated for it."""
    rule: Rule = drafter.translate().rule  # type: ignore[attr-defined]
    runner = drafter.runner

    def distribution(ids: Ids) -> Tensor:
        logits = runner.logits((0, *ids))  # type: ignore[attr-defined]
        return rule.mask(logits).softmax(-1)

    def distributions(branches: Sequence[Ids]) -> dict[Ids, Tensor]:
        return {b[:end]: distribution(b[:end]) for b in branches for end in range(len(b) + 1)}

    walk = Walk(stop)
    while not walk.over:
        rule.step(walk, distribution(walk.ids), sampler)
    psi = psi_of(rule, stop, {}, distributions, size)
    return walk.token, psi if isinstance(psi, Tensor) else psi.of(range(size))


@pytest.mark.parametrize(("name", "psi"), CASES)
def test_psi_is_the_probability_of_the_proposal(name: str, psi: str) -> None:
    """Of every token and of ⊥, by the frequencies of all walks, wherever a plan stops them.

    Drafts that run past t count.
    """
    drafter = drafter_of(name, psi, tokens=3)
    texts: dict[int, str] = drafter.translate().rule.lexicon.texts  # type: ignore[attr-defined]
    tokens = range(size_of(name, psi))
    for stop in (None, *texts.values()):
        distributions: list[Tensor] = []

        def proposed(
            sampler: Enumerated,
            stop: str | None = stop,
            distributions: list[Tensor] = distributions,
        ) -> int | None:
            token, distribution = walked(drafter, stop, sampler, len(tokens))
            distributions.append(distribution)
            return token

        found = enumerate_distribution(proposed)
        stated: dict[int | None, float] = dict(enumerate(distributions[0].tolist()))
        stated[None] = 1 - sum(stated.values())
        assert_same_distribution(found, stated)
        assert all(
            torch.allclose(distribution, distributions[0], atol=1e-12)
            for distribution in distributions
        )
        # Σ min(p, ψ), the acceptance, is at least Σ p·ψ, that of an exact match with the draft.
        for seed in range(10):
            p = ToyTarget(len(tokens), order=1, seed=seed).distribution([0])
            assert torch.minimum(p, distributions[0]).sum() >= (p * distributions[0]).sum()


# ---------------------------------------------------------------------------- pairs that cannot


def test_pairs_that_cannot_work_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"single-byte tokens, but this one has b'ab' with 2 bytes"
    ):
        bound([b"a"], [b"a", b"ab"], "slrs")
    with pytest.raises(UnsupportedError, match="spell no token"):
        bound([b"a"], [b"b"], "slrs")
    long = [bytes(pair) for pair in itertools.product(b"abcdefgh", repeat=6)]
    with pytest.raises(UnsupportedError, match="more than 4096 drafter evaluations"):
        bound(long, [bytes([b]) for b in b"abcdefgh"], "slrs", psi="enumerate", tokens=6)
    with pytest.raises(OptionError, match="reproducible"):
        bound([b"a"], [b"a"], "slrs", reproducible=True)


def test_a_greedy_target_gets_the_drafts_of_slem() -> None:
    T, D = BYTES["prefixes"]  # noqa: N806
    target, greedy = ToyTarget(4, order=2, seed=3), SamplingParams()
    answers = [
        decoded(target, bound(T, D, algorithm, order=2), [0, 1], 20, TorchSampler.seeded(0), greedy)
        for algorithm in ("slem", "slrs")
    ]
    assert answers[0].ids == answers[1].ids
    assert answers[0].stats.drafted == answers[1].stats.drafted > 0


# --------------------------------------------------------------------------------- real models


def bytewise() -> tuple[Engine, Any]:
    """An engine with a draft model of bytes, and that model."""
    byte_level = tiny.tokenizer(259)
    model = copy.deepcopy(tiny.model())
    model.resize_token_embeddings(len(byte_level))
    drafter = DraftModel(model, 3, 0.0, algorithm="slrs", tokenizer=byte_level)
    engine = Engine.from_pretrained(
        tiny.model(), tokenizer=tiny.tokenizer(), drafter=drafter, budget="drafter"
    )
    return engine, model


def test_psi_of_a_real_drafter_sums_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ragged batch, asked for while verifying; the distributions of a walk and of a tree
    agree."""
    engine, _ = bytewise()
    sums: list[float] = []
    choose = verify.choose

    def checking(scores: Any, distribution: Any, sampler: Any, draft: Draft, proposal: Any) -> int:
        if proposal is not None and len(sums) < 12:
            psi = proposal.q.of(range(len(tiny.tokenizer())))
            sums.append(float(psi.sum()))
            assert proposal.child is None or psi[draft.tokens[proposal.child]] > 0
        return choose(scores, distribution, sampler, draft, proposal)

    monkeypatch.setattr(verify, "choose", checking)
    texts = ["def foo(x): return x + 1", "the quick 🦊 brown", "hello world, this\t"]
    results = engine.generate(texts, max_new_tokens=8, temperature=1.0, seed=1)
    assert all(result.stats.drafted for result in results)
    # No text ends up without a token: all bytes are tokens of the target.
    assert sums == pytest.approx([1.0] * len(sums), abs=1e-4)
    assert len(sums) == 12


@pytest.mark.parametrize("lasting", [False, True])
def test_a_draft_model_that_fails_during_verification(
    lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pass is repeated. If that fails, too, the error names it: no token would be exact."""
    engine, model = bytewise()
    options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1}
    expected = engine.generate("the quick brown", **options)
    draw, failures, fails = verify.draw_residual, list[int](), [False]

    def drawing(*given: Any) -> int:
        fails[0] = True
        try:
            return draw(*given)
        finally:
            fails[0] = False

    def hook(*_: Any) -> None:
        if fails[0]:
            fails[0] = lasting
            failures.append(1)
            raise MemoryError("no room")

    monkeypatch.setattr(verify, "draw_residual", drawing)
    model.register_forward_pre_hook(hook)
    if lasting:
        stream = engine.stream("the quick brown", **options)
        with pytest.raises(DraftsmithError, match="draft model failed while its draft was"):
            list(stream)
        assert stream.result.stats.drafter_failures == 1
    else:
        assert engine.generate("the quick brown", **options).tokens == expected.tokens
    assert failures
