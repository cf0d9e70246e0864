"""The recipe of `auto`'s prior: what it counts, and that fitting and judging go together."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import tiny
from draftsmith import Engine
from draftsmith.drafters.logit_rows import ROW, ROWS
from draftsmith.drafters.mixer import AFTER, NAMED
from draftsmith.drafters.mixer_prior import FILE, load
from draftsmith.model.runner import Runner

RECIPE = Path(__file__).parent.parent / "recipes" / "auto"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPE))
    return importlib.import_module("evaluate")


def test_a_fitted_prior_drafts_repeated_answers(recipe: ModuleType) -> None:
    source = random.Random(0)
    columns = importlib.import_module("columns")
    data = []
    for column in recipe.COLUMNS:
        words = source.sample(range(400), k=80)
        data.append([columns.Answer(column, words, words[20:], 400, i == 0) for i in range(2)])
    for memory in (False, True):
        priors = recipe.fitted(data, 2 if memory else 1)
        judged = recipe.judge(data, priors, 0.01, memory=memory, picked=False)
        tokens, nodes = recipe.summary(judged)
        assert tokens > 5
        assert 5 < nodes <= 64
        assert recipe.columns({"one": judged}).count("\n") == len(recipe.COLUMNS) + 2


@pytest.mark.usefixtures("recipe")
def test_rows_are_taught_and_what_ids_are_worth_stays() -> None:
    logits = importlib.import_module("logits")
    # Ten tokens in turn, each followed by another new one, which its row had named second.
    ids, rows, kinds = [], [], (0, 1, 2, 3, 4, 5, 6, 6)
    for pair in range(150):
        turn, named = pair % 10, [1000 + pair % 10 * 100 + pair // 10 + i for i in range(8)]
        ids += turn, named[0]
        rows += [turn + 1, *named, *kinds], [named[0] + 1, (turn + 1) % 10, *named[1:], *kinds]
    aside = [[100, node, *rows[node]] for node in range(60)]
    answer = logits.Passes(ids, 100, np.array(rows[99:-1]), np.array(aside))
    none = np.zeros(ROWS, ROW)
    shipped, mixer = load(FILE).mixers[1], load(FILE).mixers[1]
    logits.teach(mixer, [answer], none)
    once = mixer.copy()
    assert not np.array_equal(once.weights, shipped.weights)
    assert np.array_equal(once.cells[:-1], shipped.cells[:-1])
    for weights in (slice(AFTER), slice(AFTER, None, NAMED)):
        changed, kept = once.weights[weights], shipped.weights[weights]
        assert np.array_equal(np.delete(changed, -2, 1), np.delete(kept, -2, 1))
    logits.teach(mixer, [answer], none)
    assert all(map(np.array_equal, mixer, once))


@pytest.mark.usefixtures("recipe")
def test_a_model_gives_an_answer_again_and_its_rows_are_kept() -> None:
    logits = importlib.import_module("logits")
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    plain = engine.generate([5, 6, 7, 5, 6], max_new_tokens=40, temperature=0, drafter="none")
    with torch.inference_mode():
        found = logits.record(Runner(engine.model), [*plain.prompt_tokens, *plain.tokens], 5)
    assert [row[1] for row in found.rows.tolist()] == plain.tokens  # the best token of each row
    assert len(found.aside) == 0 or found.aside[:, 0].max() < len(found.ids)


@pytest.mark.usefixtures("recipe")
def test_a_heads_input_is_fitted_beside_a_mixer_that_stays() -> None:
    """Rows are the same in every epoch, although `auto` averages the rows that it remembers."""
    logits, head = importlib.import_module("logits"), importlib.import_module("head")
    ids, n = [*range(100, 112)] * 4, 48
    model, own = np.zeros(n, ROW), np.zeros((logits.PASS, n), ROW)
    model["after"], model["tokens"], model["probs"] = np.array(ids) + 1, np.arange(8), 8000
    for k in range(logits.PASS):  # right at every place
        for i in range(n - 1 - k):
            own[k, i]["tokens"] = [ids[i + 1 + k], *range(200, 207)]
    own["probs"][:, :, 0] = 30000
    rows = model.view(np.int32).reshape(n, -1)[11:-1]
    one = logits.Passes(ids, 12, rows, np.zeros((0, 2 + rows.shape[1]), np.int32), own)
    mixer, before = load(FILE).mixers[1], rows.copy()
    found = head.teach(mixer, [one], np.zeros(ROWS, ROW))
    assert (rows == before).all()
    assert (mixer.weights == load(FILE).mixers[1].weights).all()
    learned = found.cells["prob"][0] - head.untaught_head(mixer).cells["prob"][0]
    assert learned.max() > 0.2  # the head is right more often than it says
