"""The recipe of `auto`'s prior: what it counts, and that fitting and judging go together."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import numpy as np
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


@pytest.mark.usefixtures("recipe")
def test_suffixes_are_counted_as_a_suffix_tree_would() -> None:
    suffixes = importlib.import_module("suffixes")
    text = suffixes.Text()
    text.add([1, 2, 3, 9, 2, 4, 1, 2, 3, 8, 1, 2])
    ends = {length: at.tolist() for length, at in text.ends(text.ids[: text.length])}
    assert ends == {1: [1, 4, 7], 2: [1, 7]}
    expected, nodes = suffixes.grow(text, np.array([1, 4, 7]), 4, 0.1)
    assert nodes[:2] == [(3, -1, 2 / 3), (4, -1, 1 / 3)]
    assert [node[:2] for node in nodes[2:]] == [(8, 0), (9, 0)]
    assert expected == pytest.approx(2 / 3 + 1 / 3 + 1 / 3 + 1 / 3)
    assert len(suffixes.grow(text, np.array([1, 4, 7]), 9, 0.5)[1]) == 1


@pytest.mark.usefixtures("recipe")
def test_rows_are_taught_and_what_ids_are_worth_stays() -> None:
    knowledge, passes = map(importlib.import_module, ("knowledge", "passes"))
    # Ten tokens in turn, each followed by another new one, which its row had named second.
    ids, rows, kinds = [], [], (0, 1, 2, 3, 4, 5, 6, 6)
    for pair in range(150):
        turn, named = pair % 10, [1000 + pair % 10 * 100 + pair // 10 + i for i in range(8)]
        ids += turn, named[0]
        rows += [turn + 1, *named, *kinds], [named[0] + 1, (turn + 1) % 10, *named[1:], *kinds]
    aside = [[100, node, *rows[node]] for node in range(60)]
    answer = passes.Passes("qa", ids, 100, np.array(rows[99:-1]), np.array(aside))
    shipped, mixer = knowledge.load(knowledge.FILE)[1], knowledge.load(knowledge.FILE)[1]
    knowledge.teach(mixer, [answer], knowledge.UNTUNED)
    once = mixer.copy()
    counts = {
        arm: knowledge.replay(mixer, answer, 0.02, arm, knowledge.UNTUNED)
        for arm in (knowledge.IDS, knowledge.ACCEPTED, knowledge.ALL)
    }
    same = knowledge.replay(shipped, answer, 0.02, knowledge.IDS, knowledge.UNTUNED)
    assert counts[knowledge.IDS].tolist() == same.tolist()
    assert counts[knowledge.ALL][1] < counts[knowledge.IDS][1]
    knowledge.teach(mixer, [answer], knowledge.UNTUNED)
    assert all(map(np.array_equal, mixer, once))
