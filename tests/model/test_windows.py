"""Sliding windows: which layers have them, and what rows keep of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MistralConfig

from architectures import VOCAB, build, prompt
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.engine.engine import Engine
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from draftsmith.model.windows import Window, layer_windows, windows_by_layer
from replica import check_cache, check_logits, contents, loaded

WINDOW = 8
FULL = {"full_attention": None}


def test_what_nobody_will_see_again_takes_no_memory() -> None:
    slots = {}
    for rewinds in (True, False):
        runner = Runner(loaded("gemma3_text"))
        runner.chunk = 16
        rows = [runner.open(prompt(160, seed=i)) for i in range(2)]
        for row in rows:
            row.rewinds = rewinds
            runner.prefill(row)
        for _ in range(20):
            runner.forward(rows, [Draft.chain([5], "test")] * 2)
            runner.commit(rows, [[0]] * 2, [[5, 6]] * 2)
        position = 2 * 2 * 2 * 16 * 4  # two rows of two heads' keys and values of 16 floats
        held: Counter[int] = Counter()
        for part in (part for row in rows for part in row.state):
            size = part.keys[0].nbytes + part.values[0].nbytes
            held.update(dict.fromkeys(part.layers, size // len(part.layers) // position))
        slots[rewinds] = held
    assert slots[True][0] == slots[True][1] == slots[False][1]
    assert 200 <= slots[True][0] <= 1.25 * 201
    assert slots[False][0] <= 1.25 * (WINDOW + WINDOW / 2 + 16)


def test_a_row_that_dropped_keys_is_cut_back_as_far_as_they_reach() -> None:
    model = loaded("gemma3_text")
    runner, ids = Runner(model), prompt(60)
    runner.chunk = 16
    row: Any = runner.open(ids)
    row.rewinds = False
    runner.prefill(row)
    gone = row.cached - min(keys.shape[1] for keys, _ in contents(runner, row))
    assert 0 < gone < 59 - 10
    near, far = [*ids[: gone + 10], 50], [*ids[:gone], 51]
    for new, kept in ((near, gone + 10), (far, 0)):
        assert runner.extend(row, new) == kept
        runner.prefill(row)
        check_logits(model.model, new, EMPTY, runner.forward([row], [EMPTY])[0].logits)
        check_cache(runner, row, new)


def test_layer_types_of_configs() -> None:
    """The texts of the self-test are too short to show a window that is missed."""

    def types(name: str, **overrides: object) -> dict[str, Window]:
        return layer_windows(build(name, **overrides).config)

    assert types("llama") == types("qwen2", sliding_window=8) == FULL
    assert types("mistral") == {"sliding_attention": 8}
    assert types("gemma3_text") == {"full_attention": None, "sliding_attention": 8}
    assert windows_by_layer(build("mistral").config) == (8,)
    assert windows_by_layer(build("gemma3_text").config) == (8, None)
    unknown = SimpleNamespace(
        sliding_window=8, layer_types=["sliding_attention", "indexed_attention"]
    )
    assert windows_by_layer(unknown) == (8, None)
    unknown.layer_types = ["indexed_attention"]
    assert layer_windows(unknown) == FULL


@pytest.mark.parametrize(("setting", "kind"), [
    ({"layer_types": ["reference_sliding_attention"] * 2}, "reference_sliding_attention"),
    ({"keep_window_size": 2048}, "keep_window_size"),
])  # fmt: skip
def test_windows_of_another_kind_are_not_drafted_for(setting: dict[str, Any], kind: str) -> None:
    """Unlimited-OCR's and Doge's are not seen in the texts of the self-test."""
    model = build("llama", num_hidden_layers=2)
    vars(model.config).update(setting)
    found = load(model).capabilities
    assert found.shape == "plain"
    assert f"{kind!r}" in found.reasons[0]


@pytest.mark.parametrize("name", ["mistral", "phi3", "starcoder2"])
def test_a_switch_that_the_class_does_not_read(name: str) -> None:
    """The window holds nevertheless, also without a small copy that would show it."""
    model = build(name, sliding_window=24, use_sliding_window=False)
    for drafter in ("none", "copyspec(gamma=1)"):
        engine = Engine(model, drafter=drafter, budget=4)
        answer = engine.generate(prompt(60), max_new_tokens=12).tokens
        expected = model.generate(torch.tensor([prompt(60)]), max_new_tokens=12, do_sample=False)
        assert answer == expected[0, 60:].tolist()
    assert load(model).capabilities.cache == "packed"
    assert windows_by_layer(model.config) == (24,)


def test_a_switch_that_a_class_of_its_own_reads() -> None:
    """Its parameters do not say what it reads, and there is no small copy to show it."""

    class Child(MistralConfig):
        def __init__(self, extra: int = 1, **settings: Any) -> None:
            self.extra = extra
            super().__init__(**settings)

    config = Child(sliding_window=8)
    config.use_sliding_window = False
    assert layer_windows(config) == FULL
    config.use_sliding_window = True
    assert layer_windows(config) == {"sliding_attention": 8}


def test_layers_that_share_keys_get_all_positions_of_a_long_prompt() -> None:
    """Gemma 4 drops the positions without logits before such layers."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Gemma 4")
    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=20,
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine, prompts = Engine(load(model)), [prompt(n, seed=n) for n in (8, 42, 100)]
    assert engine.model.capabilities.packed
    found = [one.tokens for one in engine.generate(prompts, max_new_tokens=20)]
    for ids, tokens in zip(prompts, found, strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        assert tokens == expected[0, len(ids) :].tolist()
