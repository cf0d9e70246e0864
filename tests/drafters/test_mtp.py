"""Heads for multi-token prediction: tiny models saved with the tensors that their authors name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_eagle3 import Watched, paths
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from architectures import ALL, VOCAB, build, prompt
from draftsmith.drafters.mtp import MTP
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, UnsupportedError

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

if "qwen3_5_text" in CONFIG_MAPPING:
    own = dict(ALL["qwen3_next"])
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        del own[name]
    ALL.setdefault("qwen3_5_text", own)


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


def saved(name: str, family: str, folder: Path) -> Module:
    """A tiny model in a folder, with the tensors of a random module of its own."""
    model = build(name)
    model.save_pretrained(folder)
    module = Module(model, family)
    file = folder / "model.safetensors"
    save_file(load_file(file) | module.tensors(), file, metadata={"format": "pt"})
    return module


def engine_of(folder: Path) -> Engine:
    return Engine.from_pretrained(AutoModelForCausalLM.from_pretrained(folder))


CASES = [("qwen2", "mimo"), ("deepseek_v3", "deepseek"), ("qwen3_next", "qwen")]
CASES += [("qwen3_5_text", "qwen")] if "qwen3_5_text" in ALL else []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"like {case[0]}")
def test_drafts_are_those_of_the_definition(case: tuple[str, str], tmp_path: Path) -> None:
    """On hybrids chains; greedy and sampled answers are those without drafts."""
    module = saved(*case, tmp_path)
    engine = engine_of(tmp_path)
    prompts = [prompt(n, seed=n) for n in (2, 30, 9)]
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        watched = Watched(MTP())
        options |= {"max_new_tokens": 12, "budget": 4}
        plain = engine.generate(prompts, drafter="none", **options)
        drafted = engine.generate(prompts, drafter=watched, **options)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    if engine.model.facts.shape == "plain":  # hybrids in transformers 4
        return
    nodes = 0
    for ids, draft in watched.found[-9:]:
        assert engine.model.facts.shape == "tree" or draft.is_chain
        with torch.inference_mode():
            states = module.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        for path, token, prob in paths(draft):
            expected = float(module.next(ids, states[-1][0], path)[token])
            assert prob == pytest.approx(expected, rel=1e-3, abs=1e-5)
            nodes += 1
    assert nodes > 9


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path / "bare")
    with pytest.raises(LoadError, match=r"none of the tensors mtp\.fc\.weight, model\.layers\.2"):
        engine_of(tmp_path / "bare").generate([[1, 2]], drafter="mtp")
    with pytest.raises(UnsupportedError, match="made in memory"):
        Engine.from_pretrained(build("qwen2")).generate([[1, 2]], drafter="mtp")
    module = saved("qwen2", "mimo", tmp_path / "odd")
    file = tmp_path / "odd" / "model.safetensors"
    for extra, match in (
        ({"model.mtp_layers.0.input_proj.weight": torch.ones(64, 64)}, "'project.weight' .*64, 64"),
        ({"model.mtp_layers.0.gate.weight": torch.ones(3)}, "'block.gate.weight' of its head"),
    ):
        save_file(load_file(file) | module.tensors() | extra, file, metadata={"format": "pt"})
        with pytest.raises((LoadError, UnsupportedError), match=match):
            engine_of(tmp_path / "odd").generate([[1, 2]], drafter="mtp")


def test_embeddings_are_shared_with_the_target(tmp_path: Path) -> None:
    saved("qwen2", "mimo", tmp_path)
    engine = engine_of(tmp_path)
    bound: Any = MTP().bind(engine.model.facts)
    weight = engine.model.model.get_input_embeddings().weight
    assert bound.head.embeddings.data_ptr() == weight.data_ptr()
    assert len(weight) == VOCAB
