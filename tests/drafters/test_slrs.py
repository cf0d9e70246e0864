"""SLRS: ψ is the probability of a proposal, and the output law is the target's; all enumerated."""

from __future__ import annotations

import pytest
from pairs import PAIRS, SAMPLED, answer, bound, exact

from draftsmith.core.sampling import SamplingParams
from draftsmith.drafters import slrs
from draftsmith.drafters.draft_model import BoundDraftModel
from draftsmith.testing import ToyTarget, assert_same_law, enumerate_law

BYTES: dict[str, tuple[list[bytes | None], list[bytes | None]]] = {
    "same": ([b"a", b"b", b"c"], [b"a", b"b", b"c"]),
    "prefixes": ([b"a", b"aa", b"ab", b"b"], [b"b", b"a"]),
    "no single a": ([b"ab", b"b", b"aab"], [b"a", b"b"]),
    "bytes that no token has": ([b"a", b"ab"], [b"c", b"b", b"a"]),
    "tokens out of reach": ([b"a", b"ac", b"aa"], [b"a", b"b"]),
    "padded": ([b"a", None, b"ba"], [b"a", b"b", None]),
}
"""Tokens of target and byte-level drafter."""

LAWS = {
    "plain": SAMPLED,
    "cold": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.7),
}

CASES = [(name, "path") for name in BYTES] + [(name, "enumerate") for name in PAIRS]


def drafter_of(name: str, psi: str, **options: object) -> BoundDraftModel:
    T, D = (BYTES if psi == "path" else PAIRS)[name]  # noqa: N806
    return bound(T, D, "slrs", psi=psi, order=2, **options)


def check(drafter: BoundDraftModel, params: SamplingParams, length: int, size: int) -> None:
    target = ToyTarget(size, order=1, seed=1)
    ours = enumerate_law(lambda chance: answer(target, drafter, [0, 1], length, chance, params))
    assert_same_law(ours, exact(target, [0, 1], length, params))


def size_of(name: str, psi: str) -> int:
    return len((BYTES if psi == "path" else PAIRS)[name][0])


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw of a residual before all of ψ is asked for: fewer branches, both ways taken."""
    monkeypatch.setattr(slrs.PathPsi, "draws", 1)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("name", "psi"), CASES)
def test_output_law_is_the_targets(name: str, psi: str, law: str) -> None:
    """Answers of one token cut the draft's second proposal off; longer ones go on after it."""
    for length in (1, 2):
        check(drafter_of(name, psi), LAWS[law], length, size_of(name, psi))
