"""GGUF files of a tiny Llama, written with the gguf package as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tests import tiny
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def model(width: int = 64) -> Any:
    """A random Llama of two layers, `width` wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def name_of(parameter: str) -> str:
    """llama.cpp's name of a parameter of Llama."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if parameter in whole:
        return whole[parameter]
    _, _, layer, inner = parameter.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection in llama.cpp's order: halves of a head interleaved."""
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def heads_of(parameter: str, config: Any) -> int | None:
    """How many heads a parameter's rows are permuted in, None where they are not."""
    if "q_proj" in parameter:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if "k_proj" in parameter else None


def blocks(weights: np.ndarray, kind: Kind, seed: int) -> np.ndarray:
    """Bytes of the quantized weights; random ones where gguf reads a type that it cannot write."""
    try:
        return gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        dice = np.random.default_rng(seed)
        made = dice.integers(0, 256, (*weights.shape[:-1], weights.shape[-1] // block, size))
        made = made.astype(np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        places = {Kind.Q4_K: (0, 2), Kind.Q6_K: (size - 2,)}[kind]
        for place in places:  # else a random scale would be NaN now and then
            made[..., place : place + 2] = scale
        return made.reshape(*weights.shape[:-1], -1)


def write(
    path: Path,
    live: Any,
    kind: Kind,
    tokenizer: Any = None,
    architecture: str = "llama",
    without: str | None = None,
    parts: int | None = None,
) -> dict[str, torch.Tensor]:
    """Write a GGUF file; returns what its parameters are after dequantization, by their name.

    `without`: parameters so named are left out. `parts`: how many it claims to be one of.
    """
    tokenizer, config = tokenizer or tiny.tokenizer(), live.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if parts is not None:
        writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, parts)
    _add_tokenizer(writer, tokenizer)
    expected = {}
    for seed, (parameter, value) in enumerate(live.state_dict().items()):
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if without is not None and without in parameter:
            continue
        weights, heads = value.float().numpy(), heads_of(parameter, config)
        if weights.ndim == 1:
            writer.add_tensor(name_of(parameter), weights)
            expected[parameter] = torch.from_numpy(weights)
            continue
        data = blocks(permuted(weights, heads) if heads else weights, kind, seed)
        writer.add_tensor(name_of(parameter), data, raw_dtype=kind)
        read = gguf.quants.dequantize(data, kind)
        if heads:  # back from interleaved halves
            rows, columns = weights.shape
            apart = read.reshape(heads, rows // heads // 2, 2, columns)
            read = apart.swapaxes(1, 2).reshape(rows, columns)
        expected[parameter] = torch.from_numpy(np.array(read, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    tokens = [t for t, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    special = set(tokenizer.all_special_ids)
    types = [3 if i in special else 1 for i in range(len(tokens))]
    merges = tokenizer.backend_tokenizer.to_str()
    pairs = json.loads(merges)["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
