"""Multi-token prediction: the head that was trained with a model and is in its checkpoint.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 2.2. transformers drops
these tensors when it loads a model, so they are read from the checkpoint's files. The block is of
the class of the target's own; embeddings, rotary embedding and LM head are the target's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import LoadError
from draftsmith.model.building import BUILDING
from draftsmith.model.checkpoint_files import Checkpoint
from draftsmith.model.forward import cache_name
from draftsmith.model.heads.head import Head, check_tensors


@dataclass(frozen=True)
class Layout:
    """Names of the tensors of the first module in a model family, and its variants."""

    block: str
    """Prefix of the decoder block's tensors; {L} is the number of the model's blocks."""
    norm_of_token: str
    norm_of_state: str
    project: str
    norm: str
    hidden_first: bool = False
    """Whether the projection reads [state; token] instead of [token; state]."""
    recycles_normed: bool = True
    """Whether the next step reads the state after the module's norm."""
    first_is_zero: bool = True
    """Whether the first position reads zeros for its token, as in vLLM and SGLang."""

    def named(self, layers: int) -> dict[str, str]:
        """Return our prefixes → prefixes in the checkpoint."""
        ours = {
            "norm_of_token.": self.norm_of_token,
            "norm_of_state.": self.norm_of_state,
            "project.": self.project,
            "norm.": self.norm,
            "block.": self.block,
        }
        return {name: there.replace("{L}", str(layers)) for name, there in ours.items()}


_L = "model.layers.{L}."
LAYOUTS = (
    Layout(
        block="mtp.layers.0.",
        norm_of_token="mtp.pre_fc_norm_embedding.",
        norm_of_state="mtp.pre_fc_norm_hidden.",
        project="mtp.fc.",
        norm="mtp.norm.",
        first_is_zero=False,
    ),  # Qwen3-Next, Qwen3.5
    Layout(
        block=_L,
        norm_of_token=_L + "enorm.",
        norm_of_state=_L + "hnorm.",
        project=_L + "eh_proj.",
        norm=_L + "shared_head.norm.",
        recycles_normed=False,
    ),  # DeepSeek-V3, GLM-4.5
    Layout(
        block="model.mtp_layers.0.",
        norm_of_token="model.mtp_layers.0.token_layernorm.",
        norm_of_state="model.mtp_layers.0.hidden_layernorm.",
        project="model.mtp_layers.0.input_proj.",
        norm="model.mtp_layers.0.final_layernorm.",
        hidden_first=True,
    ),  # MiMo
)
_SHARED = ("shared_head.head.", "embed_tokens.", "self_attn.rotary_emb.")
"""Tensors that copy those of the target."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class MTPHead(Head):
    """h' = block(M [norm(E[x_p]); norm(h_{p-1})]), and the target's LM head after a norm."""

    def __init__(self, model: Any, layout: Layout) -> None:
        """`model`: the live target, which is not changed and adds no parameters."""
        super().__init__()
        decoder = model.get_decoder()
        self.config, self.layout = block_config(model.config), layout
        self.block = type(decoder.layers[-1])(self.config, 0)
        norm: Any = type(self.block.input_layernorm)
        d, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.norm_of_token, self.norm_of_state, self.norm = (norm(d, eps=eps) for _ in range(3))
        self.project = nn.Linear(2 * d, d, bias=False)
        self._of_target = decoder.rotary_emb, model.get_output_embeddings()
        self._cache = cache_name(self.block.forward)

    def step(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        rotary, _ = self._of_target
        attention[self._cache] = attention.pop("cache")
        attention["position_embeddings"] = rotary(states, attention["position_ids"])
        if self.layout.first_is_zero:
            embedded = embedded.masked_fill(attention["position_ids"][..., None] == 0, 0.0)
        parts = [self.norm_of_token(embedded), self.norm_of_state(states)]
        if self.layout.hidden_first:
            parts.reverse()
        found: Tensor = self.block(self.project(torch.cat(parts, dim=-1)), **attention)
        return self.norm(found) if self.layout.recycles_normed else found

    def logits(self, states: Tensor) -> Tensor:
        _, lm_head = self._of_target
        found: Tensor = lm_head(states if self.layout.recycles_normed else self.norm(states))
        return found


class FinalNorm(nn.Module):
    """The target's final norm, applied to the states that the head reads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._norm = (model.get_decoder().norm,)
        self.width = model.config.get_text_config(decoder=True).hidden_size

    def forward(self, states: Tensor) -> Tensor:
        """Normalize states (n, D)."""
        found: Tensor = self._norm[0](states)
        return found


def block_config(config: Any) -> Any:
    """Return the configuration of one more block, with full attention, and experts if any."""
    own = copy.deepcopy(config.get_text_config(decoder=True))
    own.num_hidden_layers = 1
    for name, value in (("layer_types", ["full_attention"]), ("first_k_dense_replace", 0)):
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    own._attn_implementation = "sdpa"
    return own


def read(model: Any, source: str) -> MTPHead:
    """Read the head from the checkpoint `source` of a live model; only its first module is used.

    Raises LoadError where the checkpoint has none, or not all of it, UnsupportedError for tensors
    that are not known.
    """
    files = Checkpoint(source)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    marks = {one.named(layers)["project."] + "weight": one for one in LAYOUTS}
    layout = next((one for mark, one in marks.items() if mark in files.files), None)
    if layout is None:
        raise LoadError(
            f"{source} has no head for multi-token prediction: its files have none of the tensors "
            f"{', '.join(marks)}; a copy saved by transformers lacks them, even where the original "
            "has them"
        )
    named, names = layout.named(layers), dict[str, str]()
    for theirs in files.files:
        ours = next((o + theirs[len(t) :] for o, t in named.items() if theirs.startswith(t)), None)
        if ours is not None and not ours.removeprefix("block.").startswith(_SHARED):
            names[theirs] = ours
    with BUILDING, torch.device("meta"):
        head = MTPHead(model, layout)
    tensors = {names[theirs]: tensor for theirs, tensor in files.read(names).items()}
    if any(name.endswith(".experts.gate_up_proj") for name in head.state_dict()):
        tensors = _fused(tensors)
    check_tensors(head, tensors, source)
    last = model.get_decoder().layers[-1]  # some weights of a block have a dtype of their own
    dtypes = {f"block.{n}": w.dtype for n, w in (*last.named_parameters(), *last.named_buffers())}
    placed = {n: t.to(model.device, dtypes.get(n, model.dtype)) for n, t in tensors.items()}
    head.load_state_dict(placed, assign=True)
    return head.requires_grad_(False)


def _fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts of a block into two tensors, as transformers 5 stores them."""
    found, experts = dict[str, Tensor](), dict[str, dict[int, dict[str, Tensor]]]()
    for name, tensor in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            found[name] = tensor
        else:
            own = experts.setdefault(match[1], {}).setdefault(int(match[2]), {})
            own[match[3]] = tensor
    for name, table in experts.items():
        each = [table[i] for i in range(len(table))]
        found[f"{name}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        found[f"{name}.down_proj"] = torch.stack([e["down"] for e in each])
    return found
