"""The network: transformers' Llama, with weights to begin from and layers that may stand still."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

Network = LlamaForCausalLM


def fresh(**sizes: Any) -> Network:
    """A network with random weights; `sizes` are LlamaConfig's."""
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
    """(R, T, D) what so many first layers say of ids (R, T); the last norm's if it is all of them.

    `still` first layers do not train, and the embeddings learn only from what is said.
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
