"""GGUF files of tiny models, written with the gguf package as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tests import tiny
from transformers import LlamaConfig, LlamaForCausalLM


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


def architecture_of(config: Any) -> str:
    """llama.cpp's name of a type of model."""
    return {"mistral": "llama"}.get(config.model_type, config.model_type.removesuffix("_text"))


def names_of(live: Any) -> dict[str, str]:
    """llama.cpp's name of every parameter."""
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds[architecture_of(live.config)]
    known = gguf.get_tensor_name_map(kind, live.config.num_hidden_layers)
    return {name: known.get_name(name, (".weight", ".bias")) for name in live.state_dict()}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection in llama.cpp's order: halves of a head interleaved."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def heads_of(parameter: str, config: Any) -> int | None:
    """How many heads a parameter's rows are permuted in, None where they are not."""
    if architecture_of(config) != "llama":
        return None
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
        assert kind == Kind.Q4_K
        for place in (0, 2):  # else a random scale would be NaN now and then
            made[..., place : place + 2] = scale
        return made.reshape(*weights.shape[:-1], -1)


def write(
    path: Path,
    live: Any,
    kind: Kind = Kind.F32,
    tokenizer: Any = None,
    architecture: str | None = None,
    without: str | None = None,
    parts: int | None = None,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    control: Mapping[int, str] | None = None,
    kind_of_control: int = 3,
) -> dict[str, torch.Tensor]:
    """Write a GGUF file; returns what its parameters are after dequantization, by their name.

    `without`: parameters so named are left out. `parts`: how many it claims to be one of. `values`
    and `tensors` are added, the former with the architecture before their names unless that has a
    prefix of its own; a value of None takes one away. `control`: tokens with another text,
    which are control tokens unless `kind_of_control` says otherwise.
    """
    tokenizer, config = tokenizer or tiny.tokenizer(), live.config
    architecture = architecture or architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture)
    eps = getattr(config, "rms_norm_eps", None)
    described = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": 10000.0,
        "vocab_size": config.vocab_size,
    } | dict(values or {})
    for name, value in described.items():
        if value is not None:
            prefix = "" if name.startswith(("tokenizer.", "general.")) else f"{architecture}."
            add_value(writer, prefix + name, value)
    if parts is not None:
        writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, parts)
    _add_tokenizer(writer, tokenizer, control or {}, kind_of_control)
    expected, names = {}, names_of(live)
    for seed, (parameter, value) in enumerate(live.state_dict().items()):
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if without is not None and without in parameter:
            continue
        weights, heads = value.float().numpy(), heads_of(parameter, config)
        stored = permuted(weights, heads) if heads else weights
        if weights.ndim == 1:
            plus = config.model_type.startswith("gemma") and "norm" in parameter
            writer.add_tensor(names[parameter], stored + np.float32(plus))
            expected[parameter] = torch.from_numpy(weights)
            continue
        data = blocks(stored, kind, seed)
        writer.add_tensor(names[parameter], data, raw_dtype=kind)
        read = gguf.quants.dequantize(data, kind)
        if heads:  # back from interleaved halves
            rows, columns = weights.shape
            apart = read.reshape(heads, rows // heads // 2, 2, columns)
            read = apart.swapaxes(1, 2).reshape(rows, columns)
        expected[parameter] = torch.from_numpy(np.array(read, np.float32))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def add_value(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """Add a metadata value of the type that llama.cpp's converter would give it."""
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](name, value)


def _add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: Any, control: Mapping[int, str], kind: int
) -> None:
    tokens = [t for t, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    special = dict.fromkeys(tokenizer.all_special_ids, 3) | dict.fromkeys(control, kind)
    types = [special.get(i, 1) for i in range(len(tokens))]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    renamed = {tokens[i] for i in control}
    kept = [pair for pair in pairs if not renamed & {*pair, "".join(pair)}]
    for number, text in control.items():
        tokens[number] = text
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in kept])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
