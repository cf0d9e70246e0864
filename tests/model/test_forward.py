"""The call of the model: what its arguments are called, in any version of transformers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from architectures import prompt
from draftsmith.core.draft import Draft
from draftsmith.model.forward import cache_name
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from replica import check_logits

NAMES = ("cache", "cache_params", "past_key_values")


def named(name: str | None) -> type[LlamaForCausalLM]:
    """A Llama whose `forward` calls its cache `name`, as remote code may; None: not named."""
    signature = inspect.signature(LlamaForCausalLM.forward)
    own = cache_name(LlamaForCausalLM.forward)

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        used = {known for known in NAMES if known in options}
        assert used <= {name or own}
        renamed = {own if n in used else n: value for n, value in options.items()}
        return LlamaForCausalLM.forward(self, *args, **renamed)

    parameters = [
        p.replace(name=name or "") if p.name == own and name else p
        for p in signature.parameters.values()
        if p.name != own or name
    ]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return type("Named", (LlamaForCausalLM,), {"forward": forward})


@pytest.mark.parametrize("name", [*NAMES, None])
def test_n1_the_cache_goes_by_the_name_in_the_signature(name: str | None) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = named(name)(config).eval()
    loaded = load(model)
    assert (loaded.capabilities.shape, loaded.capabilities.packed) == ("tree", True)
    assert loaded.capabilities.position_sizes
    runner, ids = Runner(loaded), prompt(12)
    row = runner.open(ids)
    runner.prefill(row)
    draft = Draft((5, 6, 7), (-1, -1, 0), ("test",) * 3)
    check_logits(model, ids, draft, runner.forward([row], [draft])[0].logits)
