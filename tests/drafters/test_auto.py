"""`auto`: its contexts, its trees, what it learns, its prior."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from auto_steps import opened, step, steps
from drafted import context
from safetensors.numpy import load_file, save_file

from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import EMPTY
from draftsmith.core.drafter import Outcome
from draftsmith.core.stats import PREDICTION
from draftsmith.core.target import ModelFacts, RowOutput
from draftsmith.core.verify import Verification
from draftsmith.drafters import context_index, mixer_prior
from draftsmith.drafters.auto import Auto
from draftsmith.drafters.mixer import MAX_WEIGHT
from draftsmith.errors import LoadError, UnsupportedError

STEPS = Path(__file__).with_name("auto_steps.py")
BYTES_PER_TOKEN = 600
"""Of context, at most."""


def test_trees_are_those_that_were_recorded() -> None:
    """A change of these changes what `auto` is: fit the prior again, and judge it."""
    found = steps(400)
    trees = json.dumps([draft[:4] for draft in found])
    assert sha256(trees.encode()).hexdigest()[:16] == "770328f234ce52db"
    assert sum(len(draft[0]) for draft in found) == 5720
    assert sum(sum(draft[4]) for draft in found) == pytest.approx(3445.285156, abs=1e-5)


@pytest.mark.slow
def test_two_processes_may_compile_at_once_and_none_needs_a_cache(tmp_path: Path) -> None:
    places = [str(tmp_path), str(tmp_path), "/dev/null/nowhere"]
    running = [
        subprocess.Popen(
            [sys.executable, str(STEPS), "50"],
            stdout=subprocess.PIPE,
            env=os.environ | {"NUMBA_CACHE_DIR": place},
        )
        for place in places
    ]
    found = [json.loads(process.communicate()[0]) for process in running]
    assert found[0] == found[1] == found[2]
    assert list(tmp_path.rglob("*.nbi"))


# --- contexts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_a_rewound_state_knows_what_a_fresh_one_does(seed: int) -> None:
    """Contexts are a fresh start's; what was learnt stays."""
    source = random.Random(seed)
    text = [source.choice((source.randrange(5), source.randrange(200))) for _ in range(400)]
    prediction = tuple(text[50:90])
    auto, ctx = opened(text[:120], prediction=prediction)
    for _ in range(20):
        step(auto, ctx, text[len(ctx.ids) :])
    auto.draft(ctx)
    learned = auto.mixer.copy()
    kept = source.randrange(1, len(ctx.ids))
    auto.truncate(kept)
    ctx.ids = [*ctx.ids[:kept], 7, 7, 8]
    rewound = auto.draft(ctx)
    fresh, other = opened(list(ctx.ids), prediction=prediction)
    other.prompt_length = ctx.prompt_length
    fresh.mixer, fresh.tokens, fresh.cost = auto.mixer, auto.tokens, auto.cost
    expected = fresh.draft(other)
    assert (rewound.tokens, rewound.chances) == (expected.tokens, expected.chances)
    assert all(map(np.array_equal, learned, auto.mixer))


def test_passes_without_a_draft_teach_the_emitted_tokens_alone() -> None:
    """Also before the prediction is indexed, as after a rewind."""
    text = [5, 6, 7, 8] * 20
    mixers = []
    for early in (False, True):
        auto, ctx = opened(text[:40], prediction=tuple(range(50, 90)))
        if early:
            auto.take(ctx)
        for token in text[40:44]:
            ctx.ids = [*ctx.ids, token]
            emitted = Verification((), (token,), (None,))
            auto.observe(ctx, Outcome(EMPTY, emitted, RowOutput(torch.empty((0, 0)))))
        auto.draft(ctx)
        mixers.append(auto.mixer)
    assert all(map(np.array_equal, *mixers))


LONG = 25_000
TEXTS = {
    "equal": [7] * LONG,
    "period two": [7, 8] * (LONG // 2),
    "different": list(range(LONG)),
    "wide": [token * 26 % 262_144 for token in range(LONG)],
}


@pytest.mark.parametrize("name", TEXTS)
def test_long_texts_take_bounded_memory(name: str) -> None:
    auto, ctx = opened(TEXTS[name])
    draft = step(auto, ctx, [7] * 64)
    step(auto, ctx, [7] * 64)
    assert auto.text.nbytes <= BYTES_PER_TOKEN * LONG
    assert auto.text.totals["followers"][0] <= 4 * len(ctx.ids)
    if name == "equal":
        assert draft.tokens[:10] == (7,) * 10
    if name == "period two":
        assert draft.tokens[:6] == (7, 8) * 3


def test_no_result_depends_on_how_contexts_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if contexts with the same last token had the same hash: then only the comparison with the
    text tells them apart."""
    expected = steps(40)
    monkeypatch.setattr(context_index, "RADIX", 0)
    assert steps(40) == expected


# --- trees ---------------------------------------------------------------------------------------


PARTING = [
    token
    for place, way in enumerate((50, 60, 60, 50, 60, 50, 50, 60))
    for token in (1, 2, 3, way, 100 + place)
] + [1, 2, 3]
"""After 1, 2, 3 comes 50 or 60."""


def test_a_prediction_is_what_the_answer_is_expected_to_be() -> None:
    prediction = tuple(range(200, 230))
    auto, ctx = opened([1, 2, 3, 4, 5], prediction=prediction)
    draft = auto.draft(ctx)
    assert draft.first_branch().tokens[:5] == prediction[:5]
    assert {*(draft.origins or ())} == {-1}
    assert draft.first_branch().source[:5] == (PREDICTION,) * 5
    auto, ctx = opened([9, *prediction, 1, 2, 3], prediction=prediction)
    draft = auto.draft(ctx).first_branch()
    assert draft.tokens[:5] == prediction[:5]
    assert draft.origins is not None
    assert draft.origins[:5] == (1, 2, 3, 4, 5)
    assert draft.source[:5] == (PREDICTION,) * 5
    # Left, and found again.
    step(auto, ctx, [77, 78, prediction[10], prediction[11], prediction[12], 79])
    ctx.ids = [*ctx.ids, 78, prediction[10], prediction[11]]
    assert auto.draft(ctx).first_branch().tokens[0] == prediction[12]


def test_for_a_model_that_verifies_chains_it_drafts_the_best_one() -> None:
    bound = Auto().bind(ModelFacts(layers=1, heads=1, shape="chain"))
    ctx = context(PARTING)
    chain = bound.open(ctx).draft(ctx)
    assert chain.is_chain
    tree = Auto().open(ctx).draft(ctx)
    assert not tree.is_chain
    best = tree.first_branch().tokens
    assert len(best) <= len(chain)
    assert chain.tokens[: len(best)] == best
    assert str(bound) == "auto(logits=True, grammar=True, tuned=True, head=None)"


def test_dear_nodes_are_not_drafted_and_cheap_ones_are() -> None:
    """More rows in the pass make a node dearer."""
    ids = random.Random(1).choices(range(30), k=400)

    def size(curve: dict[int, float], rows: int = 1) -> int:
        auto, ctx = opened(ids)
        ctx.cost = CostCurve().at(rows)
        for width, seconds in curve.items():
            ctx.cost.record(width, seconds)
        return len(auto.draft(ctx))

    sizes = [size({0: 1.0, 64: 1 + 64 * slope}) for slope in (0.002, 0.02, 0.2, 2.0)]
    assert sizes[0] > sizes[1] > sizes[2] >= sizes[3] == 0
    curve = {0: 1.0, 8: 1.1, 64: 4.0}
    assert size(curve, rows=8) < size(curve)


# --- learning ------------------------------------------------------------------------------------


def test_a_stream_that_turns_around_cannot_drive_anything_out_of_bounds() -> None:
    """First every guess is right, then each is wrong, and so on."""
    auto, ctx = opened([1, 2, 3] * 30)
    source = random.Random(0)
    for round_ in range(400):
        best = auto.draft(ctx).first_branch().tokens
        right = (round_ // 20) % 2 == 0
        step(auto, ctx, [*best, source.randrange(50)] if right else [999 + round_])
    assert all(np.isfinite(auto.mixer.cells[name]).all() for name in ("prob", "count", "logit"))
    assert np.abs(auto.mixer.weights).max() <= MAX_WEIGHT


# --- prior ---------------------------------------------------------------------------------------


def third(value: float) -> Any:
    """A change of the third number of an array."""
    return lambda array: np.where(np.arange(len(array)) == 3, np.float32(value), array)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("1.weights", third(np.nan), "weights has values outside"),
        ("2.weights", third(-np.inf), "weights has values outside"),
        ("2.chance", third(1e6), "chance has values outside"),
        ("2.cases", lambda array: array[1:], "cases has shape"),
        ("1.head.weights", None, "not a prior of auto"),
    ],
)
def test_a_prior_with_impossible_values_is_refused(
    tmp_path: Path, name: str, change: Any, complaint: str
) -> None:
    tensors = load_file(mixer_prior.FILE)
    array = tensors.pop(name)
    if change is not None:
        tensors[name] = change(array)
    file = tmp_path / "prior.safetensors"
    save_file(tensors, file)
    with pytest.raises(LoadError, match=complaint):
        mixer_prior.load(file)


def test_what_is_no_prior_is_refused(tmp_path: Path) -> None:
    file, own = tmp_path / "prior.safetensors", mixer_prior.FILE.read_bytes()
    with pytest.raises(LoadError):
        mixer_prior.load(file)
    for content in (b"", b"x" * 100, own[:-7]):
        file.write_bytes(content)
        with pytest.raises(LoadError, match="install draftsmith again"):
            mixer_prior.load(file)


def test_a_switched_off_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(UnsupportedError, match="unset NUMBA_DISABLE_JIT"):
        Auto().bind(ModelFacts(layers=1, heads=1))
