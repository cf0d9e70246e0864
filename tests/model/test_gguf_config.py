"""What a GGUF file says of its model is followed, or refused by name; nothing is passed over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests import gguf_files, tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftsmith import Engine
from draftsmith.errors import LoadError
from draftsmith.model.gguf_file import read_file
from draftsmith.model.load import load

pytestmark = pytest.mark.usefixtures("kept")
POSITIONS = (10, 60, 200, 300)
CONTEXT = 512
LAYERS = 2
HEAD = 16


def model(kind: str = "llama", **settings: Any) -> Any:
    """A random model of two layers and four heads, with weights that attend to far positions."""
    config = CONFIG_MAPPING[kind](
        **{
            "vocab_size": len(tiny.tokenizer()),
            "hidden_size": 4 * HEAD,
            "intermediate_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        | settings
    )
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.2)
    return made


def written(tmp_path: Path, live: Any, **options: Any) -> Path:
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, live, **options)
    return path


def llama3_factors(original: int = 64) -> np.ndarray:
    """`rope_freqs.weight` of a Llama 3.1, as llama.cpp's converter computes it."""
    factor, low, high, factors = 8.0, 1.0, 4.0, []
    for i in range(HEAD // 2):
        wavelength = 2 * math.pi * 10000.0 ** (2 * i / HEAD)
        smooth = min(max((original / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SHORT, LONG = [1.0 + i / 7 for i in range(6)], [1.0 + i * i for i in range(6)]
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
FACTORS = {
    "rope_factors_long.weight": np.array(LONG, np.float32),
    "rope_factors_short.weight": np.array(SHORT, np.float32),
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24}
GEMMA_VALUES = {"attention.key_length": 32, "attention.value_length": 32,
                "attention.sliding_window": 24}  # fmt: skip

NEUTRAL = {
    "logit_scale": 1.0,
    "residual_scale": 0.0,
    "attention.causal": True,
    "expert_count": 0,
    "pooling_type": 1,
    "tensor_data_layout": "Meta AI original pth",
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "rope.scaling.original_context_length": CONTEXT,
    "rope.scaling.attn_factor": 1.0,
    "general.quantized_by": "somebody",
    "tokenizer.ggml.fim_pre_token_id": 7,
}

READ: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "rotary base": ("llama", {"rope_theta": 5e5}, {"rope.freq_base": 5e5}, {}),
    "rope_freqs": ("llama", {"rope_scaling": LLAMA3}, {}, {"rope_freqs.weight": llama3_factors()}),
    "linear": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "linear, by its older name": (
        "qwen2",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scale_linear": 4.0},
        {},
    ),
    "no scaling": (
        "llama",
        {},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": True},
        {},
    ),
    "yarn with its defaults": (
        "llama",
        {"rope_scaling": YARN},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": 1.0,
            "rope.scaling.yarn_attn_factor": 1.0,
            "rope.scaling.yarn_ext_factor": -1.0,
        },
        {},
    ),
    "rope_freqs without yarn's mixing": (
        "llama",
        {"rope_scaling": LLAMA3},
        {"rope.scaling.yarn_ext_factor": 0.0},
        {"rope_freqs.weight": llama3_factors()},
    ),
    "mixing of no yarn": ("llama", {}, {"rope.scaling.yarn_ext_factor": 0.0}, {}),
    "as many key heads as heads, unsaid": (
        "qwen2", {"num_key_value_heads": 4}, {"attention.head_count_kv": None}, {},
    ),
    "yarn with betas": (
        "qwen3",
        {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}, "head_dim": 32},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "attention.key_length": 32,
            "attention.value_length": 32,
        },
        {},
    ),
    "factors of Phi-3": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 128,
        },
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(128)),
        },
        FACTORS,
    ),
    "window of Phi-3": (
        "phi3",
        {"sliding_window": 24},
        {"rope.dimension_count": 16, "attention.sliding_window": 24},
        {},
    ),
    "values without effect": ("llama", {}, NEUTRAL, {}),
    "window beyond the context": ("llama", {}, {"attention.sliding_window": CONTEXT}, {}),
    "attention biases": ("llama", {"attention_bias": True}, {}, {}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}, {}, {}),
    "Gemma 2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0,
                 "tie_word_embeddings": True},
        GEMMA_VALUES | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        {},
    ),
    "Gemma 3": (
        "gemma3_text",
        GEMMA | {
            "rope_theta": 1e6, "rope_local_base_freq": 500.0, "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": ["full_attention", "sliding_attention"],
        },
        GEMMA_VALUES | {
            "rope.freq_base": 1e6, "rope.freq_base_swa": 500.0, "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0, "attention.sliding_window_pattern": [False, True],
        },
        {},
    ),
    "StableLM": (
        "stablelm",
        {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3, "rope_theta": 5e4},
        {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-3, "rope.freq_base": 5e4,
         "use_parallel_residual": False},
        {},
    ),
    "Starcoder 2": (
        "starcoder2",
        {"norm_epsilon": 1e-3, "rope_theta": 5e4, "tie_word_embeddings": True},
        {"attention.layer_norm_epsilon": 1e-3, "rope.freq_base": 5e4},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_g1_logits_are_those_of_the_model_that_was_converted(case: str, tmp_path: Path) -> None:
    kind, settings, values, tensors = READ[case]
    live = model(kind, **settings)
    path = written(tmp_path, live, values=values, tensors=tensors)
    ids = torch.randint(3, 300, (1, max(POSITIONS) + 1), generator=torch.manual_seed(1))
    with torch.inference_mode():
        wanted = live(ids).logits[0, POSITIONS]
        got = load(path, dtype="float32").model(ids).logits[0, POSITIONS]
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], str]] = {
    "scale of the logits": ("llama", {"logit_scale": 0.5}, {}, "llama.logit_scale = 0.5"),
    "scale of attention": ("llama", {"attention.scale": 1.0}, {}, "llama.attention.scale"),
    "both ways": ("llama", {"attention.causal": False}, {}, "llama.attention.causal = False"),
    "softcap": ("llama", {"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
    "window of Llama": ("llama", {"attention.sliding_window": 64}, {}, "sliding_window = 64"),
    "experts of Llama": ("llama", {"expert_count": 8}, {}, "llama.expert_count = 8"),
    "partly turned": ("llama", {"rope.dimension_count": 8, "attention.key_length": 16}, {},
                      "llama.rope.dimension_count = 8"),
    "values of another size": ("llama", {"attention.value_length": 8}, {}, "value_length = 8"),
    "another scaling": ("llama", {"rope.scaling.type": "longrope"}, {}, "type = 'longrope'"),
    "attention factor of yarn": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.2},
        {},
        "llama.rope.scaling.attn_factor",
    ),
    "yarn without its mixing": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.yarn_ext_factor": 0.0},
        {},
        "llama.rope.scaling.yarn_ext_factor = 0.0",
    ),
    "mixing without yarn": (
        "llama", {"rope.scaling.yarn_ext_factor": 1.0}, {}, "yarn_ext_factor = 1.0",
    ),
    "yarn and rope_freqs": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope_freqs.weight": llama3_factors()},
        "rope_freqs.weight",
    ),
    "rope_freqs of another size": (
        "llama", {}, {"rope_freqs.weight": np.ones(4, np.float32)}, "rope_freqs.weight",
    ),
    "one table of two": (
        "phi3", {"rope.dimension_count": 12}, dict([*FACTORS.items()][:1]), "rope_factors_long",
    ),
    "some of the biases": (
        "llama", {}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "blk.0.attn_q.bias",
    ),
    "norms of the queries": (
        "llama", {}, {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "attn_q_norm.weight",
    ),
    "a block beyond the last": (
        "llama", {}, {"blk.2.attn_norm.weight": np.ones(64, np.float32)}, "blk.2.attn_norm.weight",
    ),
    "an unknown tensor": (
        "qwen2", {}, {"blk.0.mystery.weight": np.ones(3, np.float32)}, "blk.0.mystery.weight",
    ),
    "positions": ("llama", {}, {"position_embd.weight": np.ones((4, 64), np.float32)}, "position"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_g1_what_has_no_place_is_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, values, tensors, named = REFUSED[case]
    path = written(tmp_path, model(kind), values=values, tensors=tensors)
    with pytest.raises(LoadError, match=named) as told:
        load(path)
    assert "tiny.gguf has the" in str(told.value)
    assert not [*(tmp_path / "cache" / "gguf").iterdir()]


def test_g1_without_its_number_of_key_heads_a_llama_is_refused(tmp_path: Path) -> None:
    """transformers would leave the projections in llama.cpp's order."""
    values = {"attention.head_count_kv": None}
    path = written(tmp_path, model(num_key_value_heads=4), values=values)
    with pytest.raises(LoadError, match=r"lacks llama\.attention\.head_count_kv"):
        load(path)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("attention.head_count", [4, 2], r"num_attention_heads.* got list"),
    ("vocab_size", 77, "tensors have other sizes than its metadata says"),
])  # fmt: skip
@pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="transformers 4 reports other errors"
)
def test_g1_sizes_that_the_architecture_cannot_have_are_named(
    name: str, value: Any, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, model(), values={name: value})
    with pytest.raises(LoadError, match=said):
        load(path)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_g1_rotary_factors_that_are_no_positive_numbers_are_named(
    wrong: float, tmp_path: Path
) -> None:
    factors = np.array([1, 1, 1, 1, 1, 1, 1, wrong], np.float32)
    path = written(tmp_path, model(), tensors={"rope_freqs.weight": factors})
    with pytest.raises(LoadError, match=r"rope_freqs\.weight must have positive numbers, got"):
        load(path)


# --- where an answer ends -------------------------------------------------------------------------


def answer(path: Path) -> tuple[list[int], str]:
    result = Engine.from_pretrained(path, dtype="float32").generate([5, 6, 7], max_new_tokens=24)
    return result.tokens, result.finish_reason


def test_g2_an_id_beside_eos_ends_an_answer(tmp_path: Path) -> None:
    live = model()
    whole, why = answer(written(tmp_path, live))
    assert (len(whole), why) == (24, "length")
    end = next(token for token in whole[2:] if token not in whole[:2])
    path = written(tmp_path, live, control={end: "<|eot_id|>"})
    assert answer(path) == (whole[: whole.index(end) + 1], "stop")
    assert load(path).generation_config.eos_token_id == [2, end]


NAMED = ("eot", "eom", "fim_pad")
TOKENS = ("<|eot_id|>", "<end_of_turn>", "[EOT]", "<|calls|>", "<|tool_response>",
          "<｜end▁of▁sentence｜>")  # fmt: skip


@pytest.mark.parametrize(("values", "control", "ends"), [
    *(({f"tokenizer.ggml.{name}_token_id": 9}, {}, [2, 9]) for name in NAMED),
    ({"tokenizer.ggml.eot_token_id": 100_000}, {9: "<|other|>"}, [2]),  # there is no such token
    *(({}, {9: text}, [2, 9]) for text in TOKENS),
    ({}, {9: "<|fim_pad|>", 10: "<|repo_name|>", 11: "<|file_sep|>"}, [2, 9, 10, 11]),
    ({}, {9: "<PAD>", 10: "<fim_pad>"}, [2, 10]),  # the first of the list only
    ({}, {9: "<|end|>", 10: "<|return|>"}, [2, 9, 10]),
    ({}, {9: "<|end|>", 10: "<|return|>", 11: "<|call|>"}, [2, 10, 11]),
    ({}, {9: "<|end|>", 10: "<|flush|>", 11: "<|calls|>"}, [2, 10, 11]),
])  # fmt: skip
@pytest.mark.parametrize("kind", [1, 3], ids=["normal", "control"])
def test_g2_tokens_end_an_answer_as_in_llama_cpp(
    values: dict[str, int], control: dict[int, str], ends: list[int], kind: int, tmp_path: Path
) -> None:
    path = written(tmp_path, model(), values=values, control=control, kind_of_control=kind)
    assert read_file(path).end_ids == ends


@pytest.mark.parametrize("wrong", ["x", 1.5, [2]])
def test_g2_an_end_that_is_no_token_id_is_named(wrong: Any, tmp_path: Path) -> None:
    path = written(tmp_path, model(), values={"tokenizer.ggml.eot_token_id": wrong})
    with pytest.raises(LoadError, match=r"eot_token_id must be a token id, got"):
        load(path)
