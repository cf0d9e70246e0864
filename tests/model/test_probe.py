"""The self-test must be able to fail: models that look fine and are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import build, prompt
from draftsmith import builtin
from draftsmith.engine.engine import Engine
from draftsmith.errors import UnsupportedError
from draftsmith.model.forward import cache_name
from draftsmith.model.load import load
from test_lossless import reference


def ignoring_masks() -> Any:
    """A model that drops every mask it is given and attends causally by slot."""
    model = build("llama")
    model.model.register_forward_pre_hook(without_mask, with_kwargs=True)
    return model


def without_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"attention_mask": None}


def disturbed(strength: float) -> Any:
    """A model whose rows are moved by the last row of their pass."""
    model = build("llama")

    def move(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        (hidden,) = args
        return (hidden + strength * hidden[:, -1:],)

    model.lm_head.register_forward_pre_hook(move)
    return model


def test_a_model_that_ignores_the_mask_gets_no_trees() -> None:
    found = load(ignoring_masks()).capabilities
    assert (found.shape, found.cache) == ("chain", "own")
    assert [reason.split(":")[0] for reason in found.reasons] == ["trees and shared passes"]
    assert "makes its own masks" in found.reasons[0]


def test_rows_that_influence_each_other_get_no_drafts() -> None:
    found = load(disturbed(0.02)).capabilities
    assert found.shape == "plain"
    assert "rejected drafts would change accepted tokens" in found.reasons[0]


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="later"):
        load(disturbed(2.0))


def test_a_model_without_a_usable_cache_recomputes() -> None:
    model = build("llama")

    def forget(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {cache_name(model.model.forward): None, "use_cache": False}

    model.model.register_forward_pre_hook(forget, with_kwargs=True)
    found = load(model).capabilities
    assert (found.shape, found.cache) == ("plain", "none")
    assert any("plain decoding with its cache" in reason for reason in found.reasons)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
def test_half_precision_is_judged_by_its_own_noise(dtype: torch.dtype, name: str) -> None:
    found = load(build(name).to(dtype)).capabilities
    assert (found.shape, found.attention, found.cache) == ("tree", "draftsmith", "packed")
    wrong = ignoring_masks().to(dtype)
    assert load(wrong).capabilities.shape == "chain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 0.08, 0.35, 1.0])
@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_state_that_is_not_continued_is_seen_for_any_weights(
    name: str, scale: float, dtype: torch.dtype
) -> None:
    """Small weights, or few digits, hide it from the logits."""
    found = load(build(name, scale=scale).to(dtype)).capabilities
    assert (found.shape, found.cache) == ("plain", "replay")
    assert any(reason.startswith("chains: ") for reason in found.reasons)


@pytest.mark.parametrize("scale", [0.08, 0.35, 1.0])
@pytest.mark.parametrize("name", ["nemotron_h", "bamba"])
def test_steps_that_differ_from_wider_passes_get_no_drafts(name: str, scale: float) -> None:
    """nemotron_h limits its time step in wider passes only, which large weights show."""
    engine = Engine.from_pretrained(build(name, scale=scale), drafter="copyspec(gamma=1)")
    if name == "nemotron_h":
        found = engine.model.capabilities
        assert (found.shape, found.cache) == ("plain", "replay")
    ids = [*prompt(12), *prompt(12)]
    answer = engine.generate(ids, max_new_tokens=24, budget=6).tokens
    assert answer == reference(engine.model.model, ids, 24)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", builtin.names())
def test_the_built_in_models_can_do_everything(name: str, dtype: torch.dtype) -> None:
    """Some positions of the test are so sensitive that a last bit shows; those judge mildly."""
    found = load(builtin.path(name), dtype=dtype).capabilities
    assert (found.shape, found.attention, found.cache) == ("tree", "draftsmith", "packed")
    wrong = load(builtin.path(name), dtype=dtype).model
    wrong.model.register_forward_pre_hook(without_mask, with_kwargs=True)
    assert load(wrong).capabilities.shape == "chain"


def test_explanations_are_sentences() -> None:
    lines = load(ignoring_masks()).capabilities.explain()
    assert lines[0] == "It verifies single branches only."
    assert lines[-1].startswith("Refused: trees and shared passes")
    assert len(load(build("llama")).capabilities.explain()) == 4
