"""Heads for multi-token prediction: tiny models saved with the tensors that their authors name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafted import same_answers
from safetensors.torch import load_file, save_file
from test_eagle3 import Watched, paths
from transformers import AutoModelForCausalLM

from architectures import build, prompt
from draftsmith.drafters.mtp import MTP
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, UnsupportedError
from heads import save_with_module


def engine_of(folder: Path) -> Engine:
    return Engine.from_pretrained(AutoModelForCausalLM.from_pretrained(folder))


CASES = [
    ("qwen2", "mimo"),
    pytest.param(("deepseek_v3", "deepseek"), marks=pytest.mark.slow),
    pytest.param(("qwen3_next", "qwen"), marks=pytest.mark.slow),
    ("qwen3_5_text", "qwen"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"like {case[0]}")
def test_drafts_are_those_of_the_definition(case: tuple[str, str], tmp_path: Path) -> None:
    """On hybrids chains; greedy and sampled answers are those without drafts."""
    module = save_with_module(*case, tmp_path)
    engine = engine_of(tmp_path)
    prompts = [prompt(n, seed=n) for n in (2, 30, 9)]
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        watched = Watched(MTP())
        same_answers(engine, prompts, watched, max_new_tokens=12, budget=4, **options)
    if engine.model.facts.shape == "plain":  # hybrids in transformers 4
        return
    nodes = 0
    for ids, draft in watched.found[-9:]:
        assert engine.model.facts.shape == "tree" or draft.is_chain
        with torch.inference_mode():
            states = module.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        for path, token, prob in paths(draft):
            expected = float(module.next(ids, states[-1][0], path)[token])
            assert prob == pytest.approx(expected, rel=1e-3, abs=1e-5)
            nodes += 1
    assert nodes > 9


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path / "bare")
    with pytest.raises(LoadError, match=r"none of the tensors mtp\.fc\.weight, model\.layers\.2"):
        engine_of(tmp_path / "bare").generate([[1, 2]], drafter="mtp")
    with pytest.raises(UnsupportedError, match="made in memory"):
        Engine.from_pretrained(build("qwen2")).generate([[1, 2]], drafter="mtp")
    module = save_with_module("qwen2", "mimo", tmp_path / "odd")
    file = tmp_path / "odd" / "model.safetensors"
    for extra, match in (
        ({"model.mtp_layers.0.input_proj.weight": torch.ones(64, 64)}, "'project.weight' .*64, 64"),
        ({"model.mtp_layers.0.gate.weight": torch.ones(3)}, "head's tensor 'block.gate.weight'"),
    ):
        save_file(load_file(file) | module.tensors() | extra, file, metadata={"format": "pt"})
        with pytest.raises((LoadError, UnsupportedError), match=match):
            engine_of(tmp_path / "odd").generate([[1, 2]], drafter="mtp")
