"""Rotary angles that depend on the pass: no draft across the boundary, one pass beyond it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from architectures import build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.engine.engine import Engine
from draftsmith.model.forward import cache_name
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from replica import check_logits

BOUNDARY = 32


def longrope() -> Any:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]}
    return build(
        "phi3",
        original_max_position_embeddings=BOUNDARY,
        rope_scaling={"type": "longrope"} | factors,
    )


def dynamic() -> Any:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return build("llama", max_position_embeddings=BOUNDARY, rope_scaling=scaling)


def test_yarn_extends_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    scaling["original_max_position_embeddings"] = BOUNDARY
    model = build("qwen3", max_position_embeddings=BOUNDARY, rope_scaling=scaling)
    engine, ids = Engine(load(model)), prompt(BOUNDARY + 8)
    result = engine.generate(ids, max_new_tokens=200)
    assert len(result.tokens) == 4 * BOUNDARY - len(ids)
    options = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    assert result.tokens == plain[: len(result.tokens)]


def test_longrope_drafts_stop_at_the_boundary_and_the_root_crosses() -> None:
    """One node more would change the logits of the root itself."""
    model = longrope()
    runner, ids = Runner(load(model)), prompt(BOUNDARY - 4)
    assert runner.shape == "tree"
    row = runner.open(ids)
    runner.prefill(row)
    for step in range(8):
        room = runner.room(row)
        assert room == BOUNDARY - len(ids) or len(ids) > BOUNDARY
        draft = Draft.chain([5 + step, 6, 7, 8][:room], "test") if room else EMPTY
        check_logits(model, ids, draft, runner.forward([row], [draft])[0].logits)
        path = [0] if draft.size else []
        new = [*draft.tokens[:1], 9]
        runner.commit([row], [path], [new])
        ids = ids + new
        assert row.ids + row.pending == ids
        assert len(row.pending) == (len(ids) if len(ids) == BOUNDARY + 1 else 1)


@pytest.mark.parametrize("length", [BOUNDARY - 6, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1])
@pytest.mark.parametrize("drafter", ["none", "auto", "pld_plus"])
def test_longrope_answers_cross_the_boundary(length: int, drafter: str) -> None:
    model, ids = longrope(), prompt(length)
    for _ in range(12):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    ask = {"drafter": drafter, "max_new_tokens": 12, "budget": 6}
    engine = Engine(load(model))
    beside = engine.generate(prompt(9, 3), **ask).tokens
    found = engine.generate([ids[:length], prompt(9, 3)], **ask)
    assert [one.tokens for one in found] == [ids[length:], beside]


def test_longrope_prompts_beyond_the_boundary_take_one_pass() -> None:
    model, ids = longrope(), prompt(BOUNDARY + 9)
    runner = Runner(load(model))
    runner.chunk = 8
    row = runner.open(ids)
    runner.prefill(row)
    assert row.cached == 0
    draft = Draft.chain([5, 6], "test")
    check_logits(model, ids, draft, runner.forward([row], [draft])[0].logits)
    runner.commit([row], [[0]], [[5, 7]])
    assert runner.extend(row, ids[:10]) == 0, "these keys carry long angles"
    runner.prefill(row)
    check_logits(model, ids[:10], EMPTY, runner.forward([row], [EMPTY])[0].logits)


@pytest.mark.parametrize("length", [BOUNDARY - 3, BOUNDARY + 6])
def test_dynamic_scaling_decodes_as_the_model_alone(length: int) -> None:
    ids = prompt(length)
    runner = Runner(load(dynamic()))
    runner.chunk = 8
    row = runner.open(ids)
    runner.prefill(row)
    # A second model: the angles of this kind are state inside it.
    model = dynamic()
    own = {cache_name(model.forward): DynamicCache()}
    feed = ids
    for step in range(6):
        expected_room = max(0, BOUNDARY - length - step)
        assert runner.room(row) == expected_room
        with torch.inference_mode():
            want = model(torch.tensor([feed]), **own, use_cache=True).logits[0, -1]
        draft = Draft.chain([5] * min(2, expected_room), "test")
        got = runner.forward([row], [draft])[0].logits[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        feed = [11 + step]
        runner.commit([row], [[]], [feed])


def test_no_tree_where_llama4_would_scale_it_by_slot() -> None:
    long = {"max_position_embeddings": 2048, "attention_chunk_size": 512, "floor_scale": 512}
    loaded = load(build("llama4_text", **long))
    assert "depends on slots" in loaded.capabilities.reasons[0]
    assert loaded.capabilities.shape == "chain"


@pytest.mark.parametrize("lengths", [(BOUNDARY + 9, 25), (BOUNDARY + 12, 36), (36, 36)])
def test_a_prefix_serves_only_requests_whose_angles_it_carries(lengths: tuple[int, int]) -> None:
    """Copied from a row that is too long to be taken over, or taken over (the last)."""
    model, shared = load(longrope()), prompt(20)
    engine = Engine(model, drafter="none")
    assert engine.resources.runner.store.copies
    for seed, length in enumerate(lengths):
        ids = [*shared, *prompt(length - 20, seed=seed)]
        alone = Engine(model, drafter="none", prefixes=0).generate(ids, max_new_tokens=6)
        assert engine.generate(ids, max_new_tokens=6).tokens == alone.tokens


@pytest.mark.parametrize("made", [longrope, dynamic])
def test_a_copied_prefix_has_the_angles_of_its_new_row(made: Any) -> None:
    model, long = load(made()), prompt(BOUNDARY + 20)
    for length in (25, BOUNDARY + 9):
        runner, ids = Runner(model), long[:length]
        source, row = runner.open(long), runner.open(ids)
        runner.forward([source], [EMPTY])
        runner.commit([source], [()], [()])
        runner.copy(source, row, 20)
        runner.prefill(row)
        check_logits(made(), ids, EMPTY, runner.forward([row], [EMPTY])[0].logits)


def test_growing_angles_are_those_of_a_rows_own_pass() -> None:
    """Whatever longer row the model computed before it, or failed to compute."""
    live = dynamic()
    runner = Runner(load(live))
    for length in (BOUNDARY + 60, BOUNDARY + 5, BOUNDARY + 30, BOUNDARY, BOUNDARY + 5, 12):
        row, ids = runner.open(prompt(length)), prompt(length)
        runner.prefill(row)
        check_logits(dynamic(), ids, EMPTY, runner.forward([row], [EMPTY])[0].logits)
        hook = live.get_input_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.forward([runner.open(prompt(BOUNDARY + 40))], [EMPTY])
        hook.remove()
