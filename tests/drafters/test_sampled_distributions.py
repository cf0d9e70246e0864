"""Draws from real tiny models against the exact distribution of the first two tokens.

2,000 per algorithm, so that everything is over in minutes; DRAFTSMITH_DRAWS=20000 asks for more.
"""

from __future__ import annotations

import os

import pytest
from benchmarks.sampled_distributions import drafters
from benchmarks.toys import (
    chi_square,
    distance,
    drawn,
    exact_distribution,
    model,
    prompt,
    tokenizer,
)

DRAWS = int(os.environ.get("DRAFTSMITH_DRAWS", "2000"))


def test_the_exact_distribution_is_one() -> None:
    distribution = exact_distribution(model("target", 1), prompt())
    assert sum(distribution.values()) == pytest.approx(1)
    assert len(distribution) == 73  # 8 first tokens with 9 second ones each, and the end at once
    assert len(tokenizer("target")) != len(tokenizer("drafter"))


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters())
def test_answers_follow_the_targets_distribution(name: str) -> None:
    found = drawn(drafters()[name], DRAWS)
    distribution = exact_distribution(model("target", 1), prompt())
    assert chi_square(found, distribution) > 0.001, distance(found, distribution)
