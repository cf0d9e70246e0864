"""On the pretended device trained heads draft what they draft on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from both import GREEDY, MANY, SAMPLED, Both, mapped, on, strictly
from transformers import AutoModelForCausalLM

from architectures import VOCAB, build
from draftsmith.engine.engine import Engine
from heads import random_head, save, save_with_module
from tiers import slow_after

LAYERS = (1, 3, 4)
HEADS = ["auto(head=eagle3(model=HEAD))", "eagle3(model=HEAD, sample=True)"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("head")
    return save(folder, random_head(64, VOCAB, 40), layer_ids=LAYERS)


def asked(both: Both, drafter: str) -> None:
    """Greedy, sampled and in a batch, with drafts that are verified."""
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": 10, "budget": 6}
    found = [r for more in (GREEDY, SAMPLED) for r in both.generate(MANY[1], **options, **more)]
    found += both.generate(MANY, **options, **GREEDY)
    assert sum(result.stats.drafted for result in found)


def engines_of(model: Any, there: Any) -> Both:
    return Both(Engine.from_pretrained(model), Engine.from_pretrained(there))


@pytest.mark.parametrize("drafter", slow_after(1, HEADS))
@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_a_head_beside_a_target_on_the_device(
    device: str, head: str, name: str, drafter: str
) -> None:
    model = build(name, num_hidden_layers=5)
    with strictly():
        asked(engines_of(model, on(device, model)), drafter.replace("HEAD", head))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", HEADS)
def test_a_head_over_a_device_map(device: str, second: str, head: str, drafter: str) -> None:
    """The layers that it reads are on both devices."""
    model = build("llama", num_hidden_layers=5)
    there = mapped(model, device, second)
    asked(engines_of(model, there), drafter.replace("HEAD", head))


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    ("qwen2", "mimo"),
    ("deepseek_v3", "deepseek"),
    ("qwen3_next", "qwen"),
], ids=lambda case: case[0])  # fmt: skip
def test_a_head_in_the_targets_checkpoint(
    device: str, case: tuple[str, str], tmp_path: Path
) -> None:
    save_with_module(*case, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    both = engines_of(model, on(device, model))
    capabilities = both.cpu.model.capabilities
    if capabilities.shape == "plain":
        pytest.skip("; ".join(capabilities.reasons))
    for drafter in ("mtp", "auto(head=mtp)"):
        asked(both, drafter)
