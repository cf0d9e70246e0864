"""The recipe of `auto`'s prior: what it counts, and that fitting and judging go together."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from draftsmith.drafters.logit_rows import ROW, ROWS
from draftsmith.drafters.mixer_prior import FILE, load

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
def test_a_prior_is_the_same_when_read_again(tmp_path: Path) -> None:
    importlib.import_module("untaught").save(tmp_path / "prior", load(FILE))
    assert (tmp_path / "prior").read_bytes() == FILE.read_bytes()


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
    mixer, before = load(FILE)["1"], rows.copy()
    found = head.teach(mixer, [one], np.zeros(ROWS, ROW))
    assert (rows == before).all()
    assert (mixer.weights == load(FILE)["1"].weights).all()
    learned = found.cells["prob"][0] - head.untaught_head(mixer).cells["prob"][0]
    assert learned.max() > 0.2  # the head is right more often than it says
