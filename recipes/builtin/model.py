"""The network: transformers' Llama, with initial weights and layers that may be frozen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from common import END, ID, PAD, TEXT_END
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from draftsmith import builtin

Network = LlamaForCausalLM


def fresh(**sizes: Any) -> Network:
    """Make a network with random weights; `sizes` are LlamaConfig's."""
    network = Network(LlamaConfig(tie_word_embeddings=True, rms_norm_eps=1e-5, **sizes))
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.05 if "embed" in name else 0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            with torch.no_grad():
                parameter.mul_((2 * network.config.num_hidden_layers) ** -0.5)
    return network


def states(
    network: Network,
    ids: Tensor,
    layers: int | None = None,
    *,
    still: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(R, T, D) output of the first `layers` layers for ids (R, T); the last norm's if all.

    The first `still` layers are not trained, and embeddings only learn from the output.
    """
    body = network.model
    with torch.set_grad_enabled(torch.is_grad_enabled() and not still):
        x = body.embed_tokens(ids).to(dtype)
        turned = body.rotary_emb(x, torch.arange(ids.shape[1], device=ids.device)[None])
        for layer in body.layers[: min(still, layers or still)]:
            x = layer(x, position_embeddings=turned)
    for layer in body.layers[still:layers]:
        x = layer(x, position_embeddings=turned)
    return body.norm(x) if layers is None else x


def save(network: Network, tokenizer: Path, out: Path) -> None:
    """Write a folder that transformers 4 and 5 read, with this tokenizer and our chat template."""
    marks = {"bos_token_id": ID[TEXT_END], "eos_token_id": ID[END], "pad_token_id": ID[PAD]}
    network.config.update(marks)
    # It names a second stop that the config does not have.
    ends = {"eos_token_id": [ID[END], ID[TEXT_END]]}
    network.generation_config = GenerationConfig(**marks | ends)
    network.to(torch.bfloat16).save_pretrained(out)
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    # It is the same for all our models.
    shutil.copyfile(builtin.path() / "tokenizer_config.json", out / "tokenizer_config.json")
    # With both names where transformers 4 and 5 name a setting differently.
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}
    text = json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2, sort_keys=True)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    for path in out.iterdir():
        path.chmod(0o644)
