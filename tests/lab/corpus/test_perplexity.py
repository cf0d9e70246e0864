"""Ranking by the target's own perplexity: the formula, whatever shares a pass."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from draftsmith.errors import UnsupportedError
from draftsmith.lab.corpus.perplexity import log_likelihoods, passes, perplexities
from draftsmith.model.load import load
from draftsmith.model.loaded import LoadedModel

DICE, V = random.Random(3), len(tiny.tokenizer())
PIECES = [[DICE.randrange(3, V) for _ in range(n)] for n in (2, 40, 7, 7, 23, 2, 31, 11, 40, 5)]
LENGTHS = np.array(list(map(len, PIECES)))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(tiny.model(), tokenizer=tiny.tokenizer())


def direct(ids: list[int], before: tuple[int, ...]) -> float:
    """PPL(u) = exp(-1/t Σ log p(u_i | u_<i)), as it is written."""
    u = [*before, *ids]
    with torch.inference_mode():
        log_p = tiny.model()(torch.tensor([u])).logits[0].double().log_softmax(-1)
    t = len(u) - 1
    return math.exp(-sum(float(log_p[i - 1, u[i]]) for i in range(1, t + 1)) / t)


@pytest.mark.parametrize("before", [(), (1,)])
def test_padding_changes_nothing(loaded: LoadedModel, before: tuple[int, ...]) -> None:
    sums = np.array(log_likelihoods(loaded, PIECES, before))
    found = perplexities(sums, LENGTHS, before)
    assert found == pytest.approx([direct(piece, before) for piece in PIECES], rel=1e-4)


def test_where_rows_disturb_each_other_pieces_go_alone(loaded: LoadedModel) -> None:
    alone = replace(loaded, capabilities=replace(loaded.capabilities, cache="own"))
    assert [len(turn) for turn in passes(alone, LENGTHS)] == [1] * len(PIECES)


def test_a_model_without_numbers_is_refused(loaded: LoadedModel) -> None:
    class Broken:
        def __call__(self, *_args: object) -> object:
            return type("Output", (), {"logits": torch.full((1, 2, 400), math.nan)})

    broken = replace(loaded)
    broken.__dict__["forward"] = Broken()
    with pytest.raises(UnsupportedError, match=r"gives no probabilities \(nan\) in torch.float32"):
        log_likelihoods(broken, [[1, 2]])
