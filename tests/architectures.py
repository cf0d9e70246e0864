"""Tiny random models of many architectures, with weights large enough for attention to matter."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3

VOCAB = 97
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = _COMMON | {"head_dim": 16}
_IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = _IDS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_MIXED = {
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PLAIN = _IDS | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_MAMBA = {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

TREES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _HEADS,
    "mistral": _COMMON | {"sliding_window": 8},
    "gemma2": _HEADS | _MIXED | {"query_pre_attn_scalar": 16},
    "gemma3_text": _HEADS | _MIXED | {"query_pre_attn_scalar": 16},
    "gemma3n_text": _HEADS
    | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": None,
    },
    "gpt2": _GPT,
    "gpt_neox": _COMMON,
    "phi3": _COMMON | {"sliding_window": None},
    "opt": _PLAIN | {"ffn_dim": 96, "max_position_embeddings": CONTEXT, "word_embed_proj_dim": 64},
    "starcoder2": _COMMON | {"sliding_window": 8},
    "cohere2": _HEADS | _MIXED,
    "mixtral": _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": _COMMON | _EXPERTS | {"shared_expert_intermediate_size": 32},
    "gpt_oss": _HEADS | _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _COMMON
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""Architectures that verify trees, all in one pass for several rows, in one version or another."""

CHAINS: dict[str, dict[str, Any]] = {
    "bloom": _IDS | {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "gpt_neo": _IDS
    | {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": CONTEXT,
    },
    "falcon": _PLAIN | {"alibi": False},
    "falcon_alibi": _PLAIN | {"model_type": "falcon", "alibi": True},
    "llama4_text": _HEADS
    | {
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
    },
}
"""Architectures that cannot pack, by attention or masks of their own: single branches only."""

if version("transformers") < "5":  # attention of their own classes
    CHAINS |= {name: TREES.pop(name) for name in ("gemma2", "qwen2_moe")}
elif hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"):  # caches no keys
    CHAINS["deepseek_v3"] = TREES.pop("deepseek_v3")

_DELTAS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": _COMMON | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": _HEADS | _EXPERTS | _DELTAS | {"shared_expert_intermediate_size": 32},
    "falcon_h1": _COMMON | _MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "mamba2": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
        "expand": 2,
    },
    "mamba": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}
"""Architectures with a state that cannot be rewound."""

MEASURED: dict[str, dict[str, Any]] = {
    "bamba": _COMMON
    | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    | {"mamba_chunk_size": 8, "attn_layer_indices": [1]},
    "jamba": _COMMON
    | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4}
    | {"mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "nemotron_h": _COMMON
    | {"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"], "head_dim": 16}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
    | {"chunk_size": 8, "use_mamba_kernels": False},
    "qwen3_5_text": _HEADS | _DELTAS,
}
"""Recurrent architectures that some versions of transformers lack or compute inexactly."""

ALL = TREES | CHAINS | RECURRENT

ONE_OF_EACH_KIND = {"llama", "gemma2", "gpt2", "deepseek_v3", "bloom", "mamba"}
"""Full attention; windows in some layers; learned positions; latent attention; chains; a state."""


def build(name: str, attention: str | None = None, scale: float = 0.08, **overrides: Any) -> Any:
    """A tiny model in float32, skipping the test where this transformers does not know it."""
    options = (ALL | MEASURED)[name] | overrides
    kind = options.pop("model_type", name)
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = CONFIG_MAPPING[kind](**options)
    torch.manual_seed(0)
    extra = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **extra).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def prompt(length: int, seed: int = 2) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def skip_lost_prefix(model: Any) -> None:
    """Skip the test where PEFT hands a prefix over under a name that this transformers ignores.

    PEFT 0.21 does so with transformers 5.24: its own `generate` then answers without the prefix.
    """
    if model.active_peft_config.peft_type != "PREFIX_TUNING":
        return
    options = {"input_ids": torch.tensor([prompt(9)]), "max_new_tokens": 6, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = [one.generate(**options).tolist() for one in (model, model.get_base_model())]
    if answers[0] == answers[1]:
        pytest.skip("this PEFT loses the prefix with this transformers")
