"""Heads of EAGLE-3 as they are published: two formats, read into one.

- *Flat* (SafeAILab, SpecForge, AngelSlim): the fields of a Llama layer at the top of `config.json`,
  `midlayer.` before the tensors of the layer.
- *speculators* (vLLM project): `speculators_model_type` "eagle3", the layer's fields in
  `transformer_layer_config`, `layers.0.` before its tensors.

A field or a tensor that is not known here may change what the head computes, so it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from draftsmith.errors import LoadError, UnsupportedError
from draftsmith.model.checkpoint_files import Checkpoint

CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Kinds of layers that a head may have."""

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_IGNORED = {
    "architectures", "auto_map", "base_model_name_or_path", "dtype", "eagle_config",
    "embed_requires_grad", "has_no_defaults_at_init", "model_type", "num_hidden_layers",
    "pretraining_tp", "rope_parameters", "rope_scaling", "rope_theta", "speculators_config",
    "speculators_model_type", "speculators_version", "tie_word_embeddings", "torch_dtype",
    "transformer_layer_config", "transformers_version", "use_aux_hidden_state", "use_cache",
}  # fmt: skip
"""Fields that are read otherwise, or say nothing about what is computed."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OWN = {"draft_vocab_size", _LAYER_IDS, "target_hidden_size", *FLAGS}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that only training needs, or that others say as well."""


@dataclass(frozen=True)
class HeadFiles:
    """Contents of a head's checkpoint."""

    config: Mapping[str, Any]
    """Its config.json."""
    layer: Any
    """Configuration of its decoder layers, `LlamaConfig` or `Qwen3Config`."""
    layer_ids: tuple[int, ...] | None
    """Blocks of the target, counted from 1, that it reads; None: the usual ones of its depth."""
    target_width: int
    """Width of the target's states."""
    flags: Mapping[str, bool]
    """FLAGS → whether they are set."""
    tensors: dict[str, Tensor]
    """Tensors by their names in the speculators format, with `d2t` and `embed_tokens.weight`."""


def read(source: str) -> HeadFiles:
    """Read a head from a folder or a hub id.

    Raises LoadError for what is missing or damaged, UnsupportedError for a kind of head, a field
    or a tensor that is not known.
    """
    files = Checkpoint(source)
    fields = _flat(files.config, source)
    tensors = {
        re.sub(r"^midlayer\.", "layers.0.", name): tensor
        for name, tensor in files.read(n for n in files.files if n not in _UNUSED).items()
    }
    if missing := {"fc.weight", "lm_head.weight", "norm.weight"} - tensors.keys():
        raise LoadError(f"{source} is no EAGLE-3 head: it has no tensor {min(missing)!r}")
    layers = {int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))}
    if layers != set(range(len(layers))) or not layers:
        raise LoadError(f"{source} is no EAGLE-3 head: its layers are {sorted(layers)}")
    flags = {name: bool(fields.get(name)) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise UnsupportedError(f"{source}: norm_before_fc and fc_norm exclude each other")
    layer = _layer_config(fields, len(layers), source)
    ids, width = fields.get(_LAYER_IDS), fields.get("target_hidden_size") or layer.hidden_size
    if not (ids is None or (isinstance(ids, list) and all(isinstance(i, int) for i in ids))):
        raise LoadError(f"{source}: {_LAYER_IDS} in its config.json should be a list of numbers")
    if not isinstance(width, int):
        raise LoadError(f"{source}: target_hidden_size in its config.json should be a number")
    layer_ids = None if ids is None else tuple(ids)
    return HeadFiles(files.config, layer, layer_ids, width, flags, tensors)


def _flat(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """All fields of a configuration on one level; raises UnsupportedError for unknown ones."""
    kind = config.get("speculators_model_type")
    named = any("eagle3" in str(name).lower() for name in config.get("architectures") or ())
    if kind != "eagle3" and not (kind is None and named):
        raise UnsupportedError(
            f"{source} is no EAGLE-3 head: neither speculators_model_type nor architectures in its "
            "config.json name one"
        )
    layer, own = (config.get(name) or {} for name in ("transformer_layer_config", "eagle_config"))
    if not (isinstance(layer, dict) and isinstance(own, dict)) or (kind and not layer):
        raise LoadError(f"{source}: its config.json describes no layer")
    fields = {**layer, **own}
    fields |= {name: value for name, value in config.items() if value is not None}
    if kind is not None:
        fields["model_type"] = layer.get("model_type", "llama")
    if fields.get("use_aux_hidden_state") is False:
        raise UnsupportedError(f"{source}: use_aux_hidden_state=False, as of EAGLE-1, is not known")
    known = _IGNORED | _OWN | LlamaConfig().to_dict().keys() | Qwen3Config().to_dict().keys()
    if unknown := sorted(name for name in fields.keys() - known if fields[name]):
        raise UnsupportedError(
            f"{source}: the field {unknown[0]!r} of its config.json is not known, and may change "
            "what the head computes"
        )
    return fields


def _layer_config(fields: Mapping[str, Any], layers: int, source: str) -> Any:
    """The configuration of `layers` decoder layers."""
    kind = fields.get("model_type", "llama")
    if kind not in CONFIGS:
        raise UnsupportedError(
            f"{source}: its layer is of the kind {kind!r}; known are {', '.join(CONFIGS)}"
        )
    # Transformers 4 and 5 keep the rotary settings under different names; both take these.
    rope = dict(fields.get("rope_parameters") or {})
    theta = fields.get("rope_theta") or rope.pop("rope_theta", None) or 10_000.0
    scaling = dict(fields.get("rope_scaling") or rope)
    scaling.pop("rope_theta", None)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedError(
            f"{source}: rotary embedding of the type {rope_type!r}; known are "
            f"{', '.join(_ROPE_TYPES)}"
        )
    if "sliding_attention" in (fields.get("layer_types") or ()) or fields.get("use_sliding_window"):
        raise UnsupportedError(f"{source}: layers with a sliding window are not known")
    of_layer = CONFIGS[kind]().to_dict().keys() - {"layer_types", "sliding_window", *_IGNORED}
    try:
        config = CONFIGS[kind](
            **{name: fields[name] for name in of_layer & fields.keys()},
            num_hidden_layers=layers,
            rope_theta=float(theta),
            rope_scaling=None if rope_type == "default" else scaling,
        )
    except (TypeError, ValueError) as error:
        raise LoadError(f"{source}: its config.json describes no layer ({error})") from error
    config._attn_implementation = "sdpa"
    return config


def target_ids(tensors: dict[str, Tensor], vocab_size: int, source: str) -> Tensor | None:
    """(K,) ids in the target's vocabulary of the tokens that a head knows; None: they are the same.

    Takes `d2t` out of the tensors. Raises LoadError where the two do not go together.
    """
    offsets, K = tensors.pop("d2t", None), len(tensors["lm_head.weight"])  # noqa: N806
    if offsets is None:
        if vocab_size != K:
            raise LoadError(
                f"{source} has no d2t, but knows {K} tokens where the model has {vocab_size}"
            )
        return None
    ids = torch.arange(K, device="cpu") + offsets.long() if len(offsets) == K else None
    if ids is None or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise LoadError(
            f"{source} was made for another vocabulary: d2t maps its {K} tokens to ids that a "
            f"model with {vocab_size} does not have"
        )
    return ids
