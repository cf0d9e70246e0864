"""Tiny random heads: EAGLE-3 in both published formats, and modules for multi-token prediction.

Each is also computed anew from its definition.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from architectures import build

WIDTH, HEADS, KEY_HEADS, SIZE, INNER = 32, 4, 2, 8, 48
EPS, THETA = 1e-5, 10_000.0
FIELDS: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": SIZE,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
}


def random_head(
    target: int,
    vocabulary: int,
    known: int,
    *,
    reads: int = 3,
    layers: int = 1,
    q_norm: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **flags: bool,
) -> dict[str, Tensor]:
    """Tensors by the names of the speculators format; `known` tokens spread over `vocabulary`."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        scale = 0.5 if len(shape) > 1 else 0.2
        return (len(shape) == 1) + scale * torch.randn(shape, generator=generator, dtype=dtype)

    tensors = {"fc.weight": made(WIDTH, reads * target), "norm.weight": made(WIDTH)}
    for i in range(layers):
        p, d = f"layers.{i}.", WIDTH if i else 2 * WIDTH
        tensors |= {
            p + "input_layernorm.weight": made(WIDTH),
            p + "post_attention_layernorm.weight": made(WIDTH),
            p + "self_attn.q_proj.weight": made(HEADS * SIZE, d),
            p + "self_attn.k_proj.weight": made(KEY_HEADS * SIZE, d),
            p + "self_attn.v_proj.weight": made(KEY_HEADS * SIZE, d),
            p + "self_attn.o_proj.weight": made(WIDTH, HEADS * SIZE),
            p + "mlp.gate_proj.weight": made(INNER, WIDTH),
            p + "mlp.up_proj.weight": made(INNER, WIDTH),
            p + "mlp.down_proj.weight": made(WIDTH, INNER),
        }
        if q_norm:
            tensors |= {f"{p}self_attn.{x}_norm.weight": made(SIZE) for x in "qk"}
    tensors["layers.0.hidden_norm.weight"] = made(WIDTH)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = made(reads * target)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": made(target) for i in range(reads)}
    tensors["lm_head.weight"] = 2 * made(known, WIDTH)
    tensors["embed_tokens.weight"] = made(vocabulary, WIDTH)
    ids = torch.randperm(vocabulary, generator=generator)[:known].sort().values
    if known < vocabulary:
        tensors["d2t"] = ids - torch.arange(known)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def save(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    flat: bool = False,
    layer_ids: tuple[int, ...] | None = None,
    **fields: Any,
) -> str:
    """Write a head in the flat format or in that of speculators; returns the folder."""
    target = tensors["fc.weight"].shape[1] // (3 if layer_ids is None else len(layer_ids))
    q_norm = "layers.0.self_attn.q_norm.weight" in tensors
    layer = FIELDS | {"model_type": "qwen3" if q_norm else "llama"}
    vocabulary = len(tensors["embed_tokens.weight"]) if "embed_tokens.weight" in tensors else 97
    rest = {"draft_vocab_size": len(tensors["lm_head.weight"]), "target_hidden_size": target}
    rest |= fields
    if flat:
        config = layer | rest | {"architectures": ["LlamaForCausalLMEagle3"]}
        config["vocab_size"] = vocabulary
        config["num_hidden_layers"] = 40  # as one that copies its target's
        if layer_ids:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "transformer_layer_config": layer | {"vocab_size": vocabulary},
        } | rest
        if layer_ids:
            config["eagle_aux_hidden_state_layer_ids"] = list(layer_ids)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return str(folder)


class Plainly:
    """EAGLE-3 as its definition says, each draft from the beginning, in one loop over entries.

    Nothing of it is shared with the drafter: no cache, no masks, no module of transformers.
    """

    def __init__(self, tensors: dict[str, Tensor], flags: dict[str, bool]) -> None:
        self.t, self.flags = tensors, flags
        known = len(tensors["lm_head.weight"])
        self.ids = torch.arange(known) + tensors.get("d2t", torch.zeros(known, dtype=torch.long))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.t[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, EPS)

    def fuse(self, states: list[Tensor]) -> Tensor:
        """(T, d) from the outputs (T, D) of the blocks."""
        if self.flags.get("fc_norm"):
            states = [self.norm(s, f"fc_norm.{i}") for i, s in enumerate(states)]
        side_by_side = torch.cat(states, -1)
        if self.flags.get("norm_before_fc"):
            side_by_side = self.norm(side_by_side, "input_norm")
        return side_by_side @ self.t["fc.weight"].T

    def turn(self, x: Tensor) -> Tensor:
        """Rotary embedding of (H, n, size) at the positions 0 … n-1."""
        n, half = x.shape[1], SIZE // 2
        angles = torch.arange(n)[:, None] * THETA ** (-torch.arange(half) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(self, x: Tensor, p: str) -> Tensor:
        def heads(name: str) -> Tensor:
            out = (x @ self.t[f"{p}self_attn.{name}_proj.weight"].T).view(len(x), -1, SIZE)
            if f"{p}self_attn.{name}_norm.weight" in self.t:
                out = self.norm(out, f"{p}self_attn.{name}_norm")
            return out.transpose(0, 1)

        q, k, v = self.turn(heads("q")), self.turn(heads("k")), heads("v")
        k, v = (y.repeat_interleave(HEADS // KEY_HEADS, 0) for y in (k, v))
        out = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return out.transpose(0, 1).reshape(len(x), -1) @ self.t[p + "self_attn.o_proj.weight"].T

    def states(self, tokens: list[int], g: Tensor) -> Tensor:
        """(n, d) the head's states for n tokens and the states (n, d) of the positions before."""
        embedded = self.t["embed_tokens.weight"][tokens]
        normed = self.norm(g, "layers.0.hidden_norm")
        a = normed if self.flags.get("norm_before_residual") else g
        layers = len({name.split(".")[1] for name in self.t if name.startswith("layers.")})
        for i in range(layers):
            p = f"layers.{i}."
            own = self.norm(a if i else embedded, p + "input_layernorm")
            a = a + self.attend(own if i else torch.cat([own, normed], -1), p)
            y = self.norm(a, p + "post_attention_layernorm")
            gate = silu(y @ self.t[p + "mlp.gate_proj.weight"].T)
            up = y @ self.t[p + "mlp.up_proj.weight"].T
            a = a + (gate * up) @ self.t[p + "mlp.down_proj.weight"].T
        return self.norm(a, "norm") if self.flags.get("norm_output") else a

    def next(self, ids: list[int], g: Tensor, path: list[int]) -> tuple[Tensor, Tensor]:
        """(K,) ids and probabilities of what follows `ids` and a drafted `path`.

        g (T-1, d) are the fused states of all ids but the last.
        """
        tokens = ids[1:]
        states = self.states(tokens, g)
        for token in path:
            tokens, g = [*tokens, token], torch.cat([g, states[-1:]])
            states = self.states(tokens, g)
        last = states[-1] if self.flags.get("norm_output") else self.norm(states[-1], "norm")
        return self.ids, (self.t["lm_head.weight"] @ last).softmax(-1)


# --- heads in the checkpoint of their target ------------------------------------------------------

NAMES: dict[str, tuple[str, str, str, str, str]] = {
    "qwen": ("mtp.layers.0.", "mtp.pre_fc_norm_embedding.", "mtp.pre_fc_norm_hidden.",
             "mtp.fc.", "mtp.norm."),
    "deepseek": ("model.layers.2.", "model.layers.2.enorm.", "model.layers.2.hnorm.",
                 "model.layers.2.eh_proj.", "model.layers.2.shared_head.norm."),
    "mimo": ("model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm.",
             "model.mtp_layers.0.hidden_layernorm.", "model.mtp_layers.0.input_proj.",
             "model.mtp_layers.0.final_layernorm."),
}  # fmt: skip
"""Family → prefixes of block, token's norm, state's norm, projection and final norm."""


class Module:
    """A random module of a model's own block class, and what it computes without any cache."""

    def __init__(self, model: Any, family: str) -> None:
        torch.manual_seed(1)
        config = type(model.config)(**model.config.to_dict())
        config.num_hidden_layers, config._attn_implementation = 1, "sdpa"
        for name, value in (("layer_types", ["full_attention"]), ("first_k_dense_replace", 0)):
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        self.model, self.family = model, family
        self.block = type(model.model.layers[-1])(config, 0).eval()
        norm = type(self.block.input_layernorm)
        self.norms = [norm(64, eps=config.rms_norm_eps) for _ in range(3)]
        self.project = torch.nn.Linear(128, 64, bias=False)
        with torch.no_grad():
            for part in (self.block, self.project, *self.norms):
                for weight in part.parameters():
                    weight.copy_(0.2 * torch.randn(weight.shape) + (weight.ndim == 1))

    def tensors(self) -> dict[str, Tensor]:
        """By the names in the family's checkpoints, every expert by itself."""
        block, *others = NAMES[self.family]
        parts = [*self.norms[:2], self.project, self.norms[2]]
        found = {f"{name}weight": part.weight for name, part in zip(others, parts, strict=True)}
        for name, tensor in self.block.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for e, (gate, up) in enumerate(one.chunk(2) for one in tensor):
                    path = f"{block}mlp.experts.{e}."
                    found |= {path + "gate_proj.weight": gate, path + "up_proj.weight": up}
            elif name.endswith("experts.down_proj"):
                for e, down in enumerate(tensor):
                    found[f"{block}mlp.experts.{e}.down_proj.weight"] = down
            else:
                found[block + name] = tensor
        return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}

    @torch.no_grad()
    def next(self, ids: list[int], h: Tensor, path: list[int]) -> Tensor:
        """(V,) probabilities of what follows ids and a drafted path; h (T-1, D) of all but one."""
        tokens = ids[1:]
        for token in [*path, None]:
            words = self.model.get_input_embeddings()(torch.tensor([tokens])).clone()
            if self.family != "qwen":
                words[:, 0] = 0.0
            parts = [self.norms[0](words)]
            parts.insert(0 if self.family == "mimo" else 1, self.norms[1](h[None]))
            x, at = self.project(torch.cat(parts, -1)), torch.arange(len(tokens))[None]
            out = self.block(
                x,
                position_embeddings=self.model.model.rotary_emb(x, at),
                attention_mask=(at <= at[0, :, None])[None, None],
                position_ids=at,
            )[0]
            normed = self.norms[2](out)
            if token is not None:
                last = out if self.family == "deepseek" else normed
                tokens, h = [*tokens, token], torch.cat([h, last[-1:]])
        probs: Tensor = self.model.lm_head(normed[-1]).softmax(-1)
        return probs


def save_with_module(name: str, family: str, folder: Path) -> Module:
    """A tiny model in a folder, with the tensors of a random module of its own."""
    model = build(name)
    model.save_pretrained(folder)
    module = Module(model, family)
    file = folder / "model.safetensors"
    save_file(load_file(file) | module.tensors(), file, metadata={"format": "pt"})
    return module
