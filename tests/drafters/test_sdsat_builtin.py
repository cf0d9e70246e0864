"""The built-in model that was taught adaptive tokens, as it ships."""

from __future__ import annotations

import pytest

from draftsmith import builtin
from draftsmith.engine.engine import Engine

NAME = "edit-7m-sdsat"
pytestmark = pytest.mark.skipif(NAME not in builtin.names(), reason=f"{NAME} is not installed")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(builtin.path(NAME), dtype="float32", drafter="none")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["sdsat(k=3)", "sdsat(k=2,passes=1)", "sdsat(k=5,tree=16)"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_it_drafts_for_itself(engine: Engine, drafter: str, sampling: dict[str, float]) -> None:
    before, message = builtin.demo()
    asked = builtin.edit_messages("shop.py", message, before[:400])
    plain = engine.generate(asked, max_new_tokens=60, **sampling)
    result = engine.generate(
        asked, max_new_tokens=60, drafter=drafter, budget="drafter", **sampling
    )
    assert result.tokens == plain.tokens
    assert result.stats.accepted > 0
    assert 10 not in result.tokens
