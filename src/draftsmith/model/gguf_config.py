"""Builds the configuration of a GGUF file's model from all of the file's metadata.

transformers ignores some metadata, and tensors for which its model has no place. Here every value
is put into the configuration. A value or a tensor without a place is refused by name.

Names of values: `gguf.Keys`. What they do: https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draftsmith.errors import LoadError
from draftsmith.model.gguf_file import File, package

_SETTINGS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    ),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "full_attention_interval": ("full_attention_interval",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel", "linear_conv_kernel_dim"),
    "ssm.state_size": ("state_size", "linear_key_head_dim"),
    "ssm.time_step_rank": ("time_step_rank", "linear_num_value_heads"),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.inner_size": ("intermediate_size",),
}  # fmt: skip
"""Value of a file → names of the setting. The first name that a configuration has gets it."""

_WITHOUT_EFFECT = (
    "context_length", "nextn_predict_layers", "pooling_type", "rope.scaling.finetuned",
    "tensor_data_layout",
)  # fmt: skip
"""Values that do not affect logits, unless a setting takes them."""

_NEUTRAL = {
    "attention.causal": True, "embedding_scale": 1, "expert_gating_func": 1,
    "expert_weights_scale": 1, "logit_scale": 1, "residual_scale": 1,
    "rope.scaling.yarn_attn_factor": 1,
}  # fmt: skip
"""Values without effect. For all other names, only 0 has no effect."""

_NEVER_ZERO = ("attention.causal", "rope.scaling.yarn_ext_factor")
"""Values that have an effect if they are 0."""

_PERMUTED = ("llama",)
"""Architectures for which llama.cpp's converter reorders the rows of query and key projections."""

_OWN = dict.fromkeys(
    ("qwen3_5_text", "qwen3_5_moe_text"),
    ("block_count", "rope.dimension_count", "rope.dimension_sections", "rope.freq_base",
     "ssm.inner_size"),
)  # fmt: skip
"""Model type → values from which transformers computes several settings."""

_WINDOWED = ("gemma2", "gemma3_text", "gpt_oss", "phi3", "starcoder2")
"""Model types that have a sliding window wherever `sliding_window` is set."""

_BIASES = {
    "attention_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
    "mlp_bias": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
}
"""Setting that gives layers biases → ends of their tensors' names."""

_27B = {("gemma2", 46), ("gemma3_text", 62)}
"""Type and layers of the Gemmas that scale scores by `hidden_size / num_attention_heads`."""

_LONG, _SHORT, _FREQUENCIES = (
    "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight",
)  # fmt: skip
_ROTARY = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Names of the rotary settings in transformers 4, which version 5 reads as well."""


def configured(config: Any, file: File) -> tuple[Any, dict[str, Any]]:
    """Return the configuration with all values of the file, and its settings under older names.

    Without the older names, transformers 4 uses the default rotary base. Raises LoadError with the
    name of a value or a tensor that has no place.
    """
    prefix, settings = f"{file.architecture}.", config.to_dict()
    left = {
        key.removeprefix(prefix): _of_all_layers(value)
        for key, value in file.values.items()
        if key.startswith(prefix)
        and key.removeprefix(prefix) not in _OWN.get(config.model_type, ())
    }
    if file.architecture in _PERMUTED and "attention.head_count_kv" not in left:
        raise LoadError(
            f"{file.path.name} lacks {prefix}attention.head_count_kv, without which transformers "
            "reads its tensors in a wrong order; use the model's safetensors"
        )
    left.setdefault("attention.head_count_kv", left.get("attention.head_count", 0))
    for name, targets in _SETTINGS.items():
        target = next((target for target in targets if hasattr(config, target)), None)
        value = 0 if target is None else left.pop(name, 0)
        if value or value is False:  # 0 if the architecture has no such layers
            settings[config.attribute_map.get(target, target)] = value
    if ends := file.end_ids:
        settings["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    for setting, kinds in _BIASES.items():
        if hasattr(config, setting):
            settings[setting] = all(any(t.endswith(end) for t in file.tensors) for end in kinds)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hasattr(config, name) and name in left:
            settings[name] = left.pop(name) or None
    if hasattr(config, "norm_topk_prob"):
        usual = file.architecture != "qwen2moe"  # the default of llama.cpp
        settings["norm_topk_prob"] = left.pop("expert_weights_norm", usual)
    placed: set[str] = set()
    if getattr(config, "num_attention_heads", 0):
        _set_heads(config, left, settings)
        _set_window(config, left, settings)
        if config.model_type not in _OWN:
            placed = _set_rotary(file, left, settings)
    for name, value in left.items():
        neutral = not value and name not in _NEVER_ZERO
        if not (neutral or name in _WITHOUT_EFFECT or value == _NEUTRAL.get(name)):
            raise _no_place(file, f"the value {prefix}{name} = {value!r}")
    older = {name: copy.deepcopy(settings[name]) for name in _ROTARY if name in settings}
    made = type(config).from_dict(settings)  # changes dictionaries in `settings`
    _check_model(made, file, placed, older.get("rope_scaling") or {})
    return made, older


def _no_place(file: File, what: str) -> LoadError:
    return LoadError(
        f"{file.path.name} has {what}, which transformers has no place for in this architecture "
        f"({file.architecture}), so its answers would be wrong; use the model's safetensors"
    )


def _of_all_layers(value: Any) -> Any:
    """Return one number for a per-layer list with equal non-zero entries."""
    if isinstance(value, list) and not any(isinstance(one, bool | str) for one in value):
        return max(value) if len({*value} - {0}) == 1 else value
    return value


def _set_heads(config: Any, left: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set the size of a head, and the scale of attention scores if there is a setting for it."""
    heads, width = config.num_attention_heads, config.hidden_size
    size = left.pop("attention.key_length", 0) or width // heads
    if "head_dim" in settings or size != width // heads:
        settings["head_dim"] = size
    if hasattr(config, "query_pre_attn_scalar"):
        large = (config.model_type, config.num_hidden_layers) in _27B
        settings["query_pre_attn_scalar"] = width // heads if large else size
    # Values of architectures without a setting for them.
    implied = {
        "attention.value_length": size,
        "attention.head_count_kv": heads,
        "feed_forward_length": 4 * width,
    }
    for name, value in implied.items():
        if left.get(name) == value:
            del left[name]


def _set_window(config: Any, left: dict[str, Any], settings: dict[str, Any]) -> None:
    """Set the sliding window and the layers that have it."""
    context = settings.get("max_position_embeddings", math.inf)
    window = left.get("attention.sliding_window")
    if config.model_type in _WINDOWED:
        alternating = getattr(config, "layer_types", None) is not None
        if window or not alternating:  # alternating ones have a default window
            settings["sliding_window"] = window or None
        pattern = left.pop("attention.sliding_window_pattern", None)
        if alternating and pattern:
            layers = range(config.num_hidden_layers)
            windowed = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in layers]
            kinds = ("full_attention", "sliding_attention")
            settings["layer_types"] = [kinds[bool(one)] for one in windowed]
    elif window and window < context:
        return
    left.pop("attention.sliding_window", None)


def _set_rotary(file: File, left: dict[str, Any], settings: dict[str, Any]) -> set[str]:
    """Set the rotary settings; return the names of the tensors that they replace."""
    rope = settings.pop("rope_parameters", None) or {}
    table = rope.get("full_attention", rope)
    theta = left.get("rope.freq_base") or table.get("rope_theta") or settings.get("rope_theta")
    if theta is None:  # learned positions, or none
        return set()
    left.pop("rope.freq_base", None)
    settings["rope_theta"] = theta
    size = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    turned = left.get("rope.dimension_count") or size
    if "partial_rotary_factor" in settings or "partial_rotary_factor" in table:
        settings["partial_rotary_factor"] = turned / size
    elif turned != size:
        return set()  # the value stays in `left` and is refused
    left.pop("rope.dimension_count", None)
    local = rope.get("sliding_attention", {}).get("rope_theta")
    if local is not None or "rope_local_base_freq" in settings:
        local = left.pop("rope.freq_base_swa", local)
        settings["rope_local_base_freq"] = local or settings["rope_local_base_freq"]
    scaling, placed = _scaling(file, left, settings, turned // 2)
    settings["rope_scaling"] = scaling
    return placed


def _scaling(
    file: File, left: dict[str, Any], settings: dict[str, Any], frequencies: int
) -> tuple[dict[str, Any] | None, set[str]]:
    """Return `rope_scaling`, and the names of the tensors that it replaces."""
    context = settings["max_position_embeddings"]
    older, factor = left.pop("rope.scale_linear", 0), left.pop("rope.scaling.factor", 0)
    factor = factor or older or 1
    kind = left.get("rope.scaling.type") or ("linear" if factor != 1 else "none")
    # A negative one selects the default, which mixes frequencies in yarn only.
    mixed = left.pop("rope.scaling.yarn_ext_factor", -1)
    if mixed >= 0 and mixed != (kind == "yarn"):
        left["rope.scaling.yarn_ext_factor"] = mixed  # it stays and is refused
    original = left.pop("rope.scaling.original_context_length", 0) or context
    if "original_max_position_embeddings" in settings:
        settings["original_max_position_embeddings"] = original
    factors = {name: file.numbers(name) for name in (_LONG, _SHORT, _FREQUENCIES)}
    for name, values in factors.items():
        if wrong := [one for one in values or () if not 0 < one < math.inf]:
            raise LoadError(f"{file.path.name}: {name} must have positive numbers, got {wrong[0]}")
    sizes = {len(values) for values in factors.values() if values}
    if sizes <= {frequencies} and "rope_local_base_freq" not in settings:
        both, given = (factors[_SHORT], factors[_LONG]), factors[_FREQUENCIES]
        if kind in ("none", "linear") and given and not any(both):
            linear = factor if kind == "linear" else 1
            both, original = ([one * linear for one in given],) * 2, context
            kind = "longrope"  # the only setting with a factor for each frequency
        if kind in ("none", "longrope") and all(both):
            left.pop("rope.scaling.type", None)
            return _longrope(both, original, left, settings), {n for n in factors if factors[n]}
    if kind not in ("none", "linear", "yarn"):
        return None, set()  # the kind stays in `left` and is refused
    left.pop("rope.scaling.type", None)
    if left.get("rope.scaling.attn_factor") == 1:
        del left["rope.scaling.attn_factor"]
    if kind == "none":
        return None, set()
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if value := left.pop(f"rope.scaling.yarn_{name}", 0):
                scaling[name] = value
    return scaling, set()


def _longrope(
    factors: Any, original: int, left: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return `rope_scaling` with (short, long) factors for each frequency."""
    ratio = settings["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    own = "original_max_position_embeddings" in settings  # as in Phi-3
    scaling: dict[str, Any] = {"type" if own else "rope_type": "longrope"}
    scaling["short_factor"], scaling["long_factor"] = factors
    given = left.pop("rope.scaling.attn_factor", usual)
    if not math.isclose(given, usual, rel_tol=1e-5):
        scaling["attention_factor"] = given
    if not own:
        scaling |= {"original_max_position_embeddings": original, "factor": max(ratio, 1.0)}
    return scaling


def _check_model(config: Any, file: File, placed: set[str], scaling: dict[str, Any]) -> None:
    """Raise LoadError for a tensor, or a rotary scaling, for which the model has no place."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kind = scaling.get("rope_type", scaling.get("type"))
    used = [getattr(module, "rope_type", None) for module in model.modules()]
    if kind and not any(kind in (u.values() if isinstance(u, dict) else (u,)) for u in used):
        raise _no_place(file, f"rotary scaling of the kind {kind}")
    own = model.state_dict(keep_vars=True)
    # Tied tensors count once.
    room = sum(tensor.numel() for tensor in {id(t): t for t in own.values()}.values())
    blocks = config.num_hidden_layers
    further = int(file.values.get(f"{file.architecture}.nextn_predict_layers", 0))
    placed |= {
        name
        for name in file.tensors
        if any(name.startswith(f"blk.{blocks + i}.") for i in range(min(further, 8)))
    }  # blocks that predict further tokens from the output of the others
    given = {
        name: int(tensor.n_elements) for name, tensor in file.tensors.items() if name not in placed
    }
    if sum(given.values()) == room:
        return  # no tensor is left over; missing ones were reported when it was read
    gguf = package()
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[file.architecture], blocks)
    known = {
        names.get_name(one, (".weight", ".bias"))
        for name in own
        for one in (name, name.partition(".")[2])
    }
    if left := [name for name in given if name not in known]:
        raise _no_place(file, f"the tensor {left[0]}")
