"""The recipe of `auto`'s prior: what it counts, and that fitting and judging go together."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest

from draftsmith.core.draft import Draft

RECIPE = Path(__file__).parent.parent / "recipes" / "auto"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPE))
    return importlib.import_module("evaluate")


def test_only_nodes_whose_parent_was_right_are_counted(recipe: ModuleType) -> None:
    tally = recipe.Tally()
    draft = Draft((5, 6, 7, 8), (-1, -1, 0, 1), ("auto",) * 4, chances=(0.55, 0.31, 1.0, 0.02))
    tally.note(draft, [0])
    assert [place for place, said in enumerate(tally.said) if said] == [3, 5, 9]
    assert [place for place, right in enumerate(tally.right) if right] == [5]
    assert "| 0.5 to 0.6 | 1 | 1.000 |" in recipe.calibration(recipe.total([tally]))


def test_a_fitted_prior_drafts_repeated_answers(recipe: ModuleType) -> None:
    source = random.Random(0)
    columns = importlib.import_module("columns")
    data = []
    for column in recipe.COLUMNS:
        words = source.sample(range(400), k=80)
        data.append([columns.Answer(column, words, words[20:], 400, i == 0) for i in range(2)])
    for memory in (False, True):
        priors = recipe.Priors.fitted(data, 2 if memory else 1)
        judged = recipe.judge(data, priors, 0.01, memory=memory, picked=False)
        tokens, nodes = recipe.summary(judged)
        assert tokens > 5
        assert 5 < nodes <= 64
        assert recipe.table({"one": judged}).count("\n") == len(recipe.COLUMNS) + 2
