"""The contract, over every registered drafter and some of its settings."""

from __future__ import annotations

import pytest
import torch

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.drafters.registry import names, parse
from draftsmith.errors import DrafterError
from draftsmith.testing import Scripted, check_drafter, check_law, check_rewind

SETTINGS = [
    "copyspec(gamma=1)",
    "copyspec(gamma=10, block=50)",
    "copyspec(block=0)",
    "copyspec(match='last')",
    "copyspec(gamma=2, overlap=True)",
    "prompt_lookup(max=2)",
    "prompt_lookup(match=last)",
    "prompt_lookup(max=5, min=2, tokens=30)",
    "auto(min=2)",
    "auto(candidates=1, max=4)",
]


@pytest.mark.parametrize("spec", [*names(), *SETTINGS])
def test_contract(spec: str) -> None:
    check_drafter(parse(spec))


def test_sampled_drafters_are_checked_for_their_law() -> None:
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def honest(ctx: Context) -> Draft:
        if ctx.budget < 1:
            return Draft()
        return Draft.chain([ctx.chance.draw(q)], "scripted", [q])

    def liar(ctx: Context) -> Draft:
        if ctx.budget < 1:
            return Draft()
        return Draft.chain([1], "scripted", [q])

    check_law(Scripted(honest))
    with pytest.raises(AssertionError, match="law differs"):
        check_law(Scripted(liar))


def test_the_contract_can_fail() -> None:
    def too_wide(ctx: Context) -> Draft:
        return Draft.chain([0] * (ctx.budget + 1), "scripted")

    with pytest.raises(DrafterError, match="exceeds the budget"):
        check_drafter(Scripted(too_wide))

    def outside(ctx: Context) -> Draft:
        return Draft.chain([ctx.vocab_size][: ctx.budget], "scripted")

    with pytest.raises(DrafterError, match="outside"):
        check_drafter(Scripted(outside))

    seen: list[int] = []

    def remembers(ctx: Context) -> Draft:
        seen.append(len(seen) % 11)
        return Draft.chain(seen[-1:][: ctx.budget], "scripted")

    with pytest.raises(AssertionError, match="rewound"):
        check_rewind(Scripted(remembers))
