"""The contract, over every registered drafter and some of its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tiny
from architectures import build
from draftsmith import Engine, accelerate
from draftsmith.core.draft import ROOT, Draft, Proposal
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.registry import parse
from draftsmith.errors import DrafterError, OptionError
from draftsmith.testing import Scripted, check_distribution, check_drafter, check_rewind
from installed import bare_names
from tiers import slow_after

SETTINGS = [
    "copyspec(gamma=1, block=0)",
    "copyspec(gamma=2, overlap=True, match=last)",
    "prompt_lookup(max=5, min=2, tokens=30)",
    "longest_match(min=2, candidates=1, max=4)",
    "cascade(copyspec(gamma=2), spectra(W=3), auto)",
]


@pytest.mark.parametrize("spec", [*bare_names(), *SETTINGS])
def test_contract(spec: str) -> None:
    check_drafter(parse(spec), length=24)


@pytest.mark.parametrize(
    "options", slow_after(1, [{"tokens": 3, "reproducible": True}, {"tokens": 2}])
)
def test_contract_of_a_draft_model(options: dict[str, Any]) -> None:
    """In float64, so that its distributions can be enumerated exactly."""
    model = build("llama", vocab_size=11).double()
    check_drafter(DraftModel(model, algorithm="standard", confidence=0.3, **options), length=6)


def test_a_drafter_may_be_compared_by_identity() -> None:
    @dataclass(frozen=True, repr=False, eq=False)
    class Alone(Drafter):
        repeated: list[int]
        name = "alone"

        def open(self, ctx: Context) -> DrafterState:
            whole = Scripted(lambda _: Draft.chain(self.repeated[: ctx.budget], "alone"))
            return whole.open(ctx)

    check_drafter(Alone([1, 2]), length=8)


@pytest.mark.failing_passes
def test_copies_must_be_where_they_are_said_to_be() -> None:
    def lying(ctx: Context) -> Draft:
        place = next((i for i, token in enumerate(ctx.ids) if token != 1), None)
        return Draft() if place is None else Draft.chain([1][: ctx.budget], "liar", origins=[place])

    with pytest.raises(AssertionError, match="of token 1 holds another token"):
        check_drafter(Scripted(lying))


def test_sampled_drafters_are_checked_for_their_distribution() -> None:
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def honest(ctx: Context) -> Draft:
        if ctx.budget < 1:
            return Draft()
        return Draft.chain([ctx.sampler.draw(q)], "scripted", [q])

    def liar(ctx: Context) -> Draft:
        if ctx.budget < 1:
            return Draft()
        return Draft.chain([1], "scripted", [q])

    check_distribution(Scripted(honest))
    with pytest.raises(AssertionError, match="distribution differs"):
        check_distribution(Scripted(liar))


Q = torch.tensor([0.2, 0.5, 0.1], dtype=torch.float64)
"""Sums to 0.8: with probability 0.2 nothing is drawn."""


def drawn(ctx: Context) -> int | None:
    x = ctx.sampler.draw(torch.cat([Q, 1 - Q.sum(0, keepdim=True)]))
    return None if x == 3 else x


def guess_beside_a_sample(ctx: Context) -> Draft:
    """At the root a guess and a sample that may be nothing, the guess first."""
    x = drawn(ctx)
    if x is None:
        return Draft((1,), (ROOT,), ("scripted",), {ROOT: Proposal(Q, None)})
    return Draft((1, x), (ROOT, ROOT), ("scripted",) * 2, {ROOT: Proposal(Q, 1)})


def sample_below_a_guess(ctx: Context) -> Draft:
    """A guess, and below it a sample that may be nothing: overshoots the end of the answer."""
    x = drawn(ctx)
    if x is None:
        return Draft((1,), (ROOT,), ("scripted",), {0: Proposal(Q, None)})
    return Draft((1, x), (ROOT, 0), ("scripted",) * 2, {0: Proposal(Q, 1)})


@pytest.mark.parametrize("propose", [guess_beside_a_sample, sample_below_a_guess])
def test_nothing_drawn_is_judged_like_something_drawn(
    propose: Callable[[Context], Draft],
) -> None:
    """On chain targets and at the end of an answer, cuts must be blind to what was drawn."""
    check_distribution(Scripted(propose))


def test_the_contract_can_fail() -> None:
    def too_wide(ctx: Context) -> Draft:
        return Draft.chain([0] * (ctx.budget + 1), "scripted")

    with pytest.raises(DrafterError, match="exceeds the budget"):
        check_drafter(Scripted(too_wide))

    def outside(ctx: Context) -> Draft:
        return Draft.chain([ctx.vocab_size][: ctx.budget], "scripted")

    with pytest.raises(DrafterError, match="must be from 0 to"):
        check_drafter(Scripted(outside))

    seen: list[int] = []

    def remembers(ctx: Context) -> Draft:
        seen.append(len(seen) % 11)
        return Draft.chain(seen[-1:][: ctx.budget], "scripted")

    with pytest.raises(AssertionError, match="truncate"):
        check_rewind(Scripted(remembers))


def test_options_that_cannot_be_compared_are_refused() -> None:
    @dataclass(frozen=True)
    class Words(CopySpec):
        name = "words"
        words: Any = ()

    engine = Engine(tiny.model(), tiny.tokenizer(), drafter=Words(words=("a",)))
    for use in (Engine, accelerate, lambda *_, drafter: engine.generate("a", drafter=drafter)):
        with pytest.raises(OptionError, match=r"Words has an option that .*'list'"):
            use(tiny.model(), drafter=Words(words=["a"]))
