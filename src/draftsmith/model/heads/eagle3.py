"""The module of EAGLE-3: a decoder layer that reads tokens and fused states of the target.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (arXiv 2503.01840), section 3.1. Attention, feed-forward layers, norms and
rotary embeddings are transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from draftsmith.core.target import ModelFacts
from draftsmith.errors import LoadError
from draftsmith.model.building import BUILDING
from draftsmith.model.forward import cache_name
from draftsmith.model.heads.eagle3_files import HeadFiles, target_ids
from draftsmith.model.heads.head import Head, check_tensors, embeddings_of

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
"""Model type of the layer → decoder layer, norm, rotary embedding."""

LONGEST = 1 << 30
"""Maximum position of a head; published heads are used beyond their configured limit."""


class Fuse(nn.Module):
    """g = FC(l, m, h): projects the states of several target blocks to the width of the head."""

    def __init__(self, config: Any, layers: int, target_width: int, flags: Mapping[str, bool]):
        super().__init__()
        norm, eps = KINDS[config.model_type][1], config.rms_norm_eps
        self.width = config.hidden_size
        self.fc = nn.Linear(layers * target_width, self.width, bias=False)
        if flags["norm_before_fc"]:
            self.input_norm = norm(layers * target_width, eps=eps)
        if flags["fc_norm"]:
            self.fc_norm = nn.ModuleList(norm(target_width, eps=eps) for _ in range(layers))
        self.flags = flags

    def forward(self, states: Tensor) -> Tensor:
        """(…, layers·D) → (…, d)."""
        states = states.to(self.fc.weight.dtype)
        if self.flags["norm_before_fc"]:
            states = self.input_norm(states)
        if self.flags["fc_norm"]:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        found: Tensor = self.fc(states)
        return found


class Eagle3Head(Head):
    """The draft model of figure 5: embeddings beside g, one decoder layer, its own vocabulary."""

    def __init__(
        self,
        config: Any,
        layers: int,
        target_width: int,
        vocabulary: int,
        flags: Mapping[str, bool],
    ):
        """`layers`: number of target blocks that it reads. `vocabulary`: K."""
        super().__init__()
        layer, norm, rotary = KINDS[config.model_type]
        d, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.flags = config, flags
        self.fuse = Fuse(config, layers, target_width, flags)
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        first: Any = self.layers[0]
        first.hidden_norm = norm(d, eps=eps)
        for name in ("q_proj", "k_proj", "v_proj"):  # their input: embedding and g
            own = getattr(first.self_attn, name)
            wide = nn.Linear(2 * d, own.out_features, bias=own.bias is not None)
            setattr(first.self_attn, name, wide)
        self.norm = norm(d, eps=eps)
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        with torch.device("cpu"):  # even if the weights are still on the meta device
            self.rotary = rotary(config)
        config.max_position_embeddings = LONGEST
        self._cache = cache_name(first.self_attn.forward)

    def step(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        first: Any = self.layers[0]
        attention[self._cache] = attention.pop("cache")
        attention["position_embeddings"] = self.rotary(states, attention["position_ids"])
        # x = [norm(E[x_p]); norm(g_{p-1})]
        g = first.hidden_norm(states)
        x = torch.cat([first.input_layernorm(embedded), g], dim=-1)
        residual = g if self.flags["norm_before_residual"] else states
        a = residual + first.self_attn(x, **attention)[0]
        a = a + first.mlp(first.post_attention_layernorm(a))
        for layer in self.layers[1:]:
            a = layer(a, **attention)
        found: Tensor = self.norm(a) if self.flags["norm_output"] else a
        return found

    def logits(self, states: Tensor) -> Tensor:
        found: Tensor = self.lm_head(states if self.flags["norm_output"] else self.norm(states))
        return found


def usual_layers(layers: int) -> tuple[int, ...]:
    """Return the blocks that a head reads by default, counted from 1, for a target of `layers`."""
    return 2, layers // 2, layers - 3


class Beside(NamedTuple):
    """What a head has beside its module, for a target."""

    ids: Tensor | None
    """(K,) ids of its tokens in the target's vocabulary; None: they are the same."""
    layers: tuple[int, ...]
    """Blocks of the target, counted from 1, that it reads."""
    embeddings: Tensor
    """(V, d), its own or the target's."""


def fitted(files: HeadFiles, model: ModelFacts, source: str) -> Beside:
    """Return what a head has beside its module; raise LoadError if it does not fit the model.

    Takes `d2t` and `embed_tokens.weight` out of the tensors.
    """
    ids = target_ids(files.tensors, model.vocab_size, source)
    embeddings = files.tensors.pop("embed_tokens.weight", None)
    if embeddings is None:
        embeddings = embeddings_of(model, source)
    width = files.layer.hidden_size
    if embeddings.shape[1] != width or len(embeddings) < model.vocab_size:
        raise LoadError(
            f"{source} does not fit this model: it needs embeddings of {model.vocab_size} "
            f"tokens and the width {width}, and those there are have the shape "
            f"{tuple(embeddings.shape)}"
        )
    config = model.model and model.model.config.get_text_config(decoder=True)
    own_width = getattr(config, "hidden_size", files.target_width)
    if own_width != files.target_width:
        raise LoadError(
            f"{source} reads states of the width {files.target_width}, and this model's "
            f"have {own_width}"
        )
    return Beside(ids, files.layer_ids or usual_layers(model.layers), embeddings)


def build(
    files: HeadFiles, layers: int, device: str, dtype: torch.dtype, source: str
) -> Eagle3Head:
    """Return the module with its weights, for `layers` blocks of the target.

    Raises UnsupportedError for unknown tensors, LoadError for missing tensors and wrong shapes.
    """
    vocabulary = len(files.tensors["lm_head.weight"])
    with BUILDING, torch.device("meta"):
        head = Eagle3Head(files.layer, layers, files.target_width, vocabulary, files.flags)
    tensors = {
        f"fuse.{name}" if name.startswith(("fc.", "fc_norm.", "input_norm.")) else name: tensor
        for name, tensor in files.tensors.items()
    }
    check_tensors(head, tensors, source)
    # Converting the module instead would convert its rotary frequencies, which stay in float32.
    placed = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    head.load_state_dict(placed, assign=True)
    head.rotary.to(device)
    return head.requires_grad_(False)
