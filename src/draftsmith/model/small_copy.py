"""Makes a small random model of the same architecture, for tests that do not depend on weights.

It has few layers (but one of each kind), few heads of the same width, narrow feed-forward layers,
few token ids, and short attention windows. Everything else is as configured: scaling, caps, sinks,
experts, positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from draftsmith.errors import UnsupportedError, first_line
from draftsmith.model.building import BUILDING
from draftsmith.model.forward import unwrapped
from draftsmith.model.loaded import LoadedModel, number
from draftsmith.model.registered import own_name

LAYERS = 2
"""Fewest decoder blocks. There are more if that is needed for one of each kind."""
HEADS = 2
"""Most key heads, if they are shared, and most query heads per key head."""
HIDDEN = 128
"""Largest hidden size, if it does not follow from the heads."""
INNER = 32
"""Width of feed-forward layers."""
VOCABULARY = 256
WINDOW = 6
"""Attention window, so short that the texts of the self-test are longer."""
MOST_PARAMETERS = 60_000_000
"""A larger copy would cost more than it saves."""

_WITH_HIDDEN = ("hidden_size", "mamba_n_heads", "mamba_num_heads", "mamba_d_ssm",
                "word_embed_proj_dim")  # fmt: skip
"""Widths that keep their ratio to the number of heads."""
_number = partial(number, of=lambda _: 0)
"""A setting of all layers; 0 if it differs by layer."""
_SHARING = "num_kv_shared_layers"
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")


def small_copy(loaded: LoadedModel) -> LoadedModel:
    """Make the copy in float32, on the same device, with the model's own attention.

    Raises UnsupportedError with the reason if none can be made, or if the model's class is not one
    of transformers', which alone are made from a configuration.
    """
    own = unwrapped(loaded.model)
    if not type(own).__module__.startswith("transformers."):
        raise UnsupportedError(f"{type(own).__name__} is not a class of transformers")
    # Modules draw random numbers when they are made, which must not advance the user's generator.
    with torch.random.fork_rng(devices=()), torch.inference_mode(mode=False):
        # Configurations and modules reject values with errors of many types.
        try:
            config = _small_config(loaded, own)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in _made(config, own).parameters())
            if size > MOST_PARAMETERS:
                raise UnsupportedError(f"it would have {size:,} parameters")
            with torch.device("cpu"):
                made = _made(config, own)
        except Exception as error:
            raise UnsupportedError(f"no small copy of it can be made ({_what(error)})") from error
    if type(made) is not type(own):
        raise UnsupportedError(f"its configuration makes a {type(made).__name__}")
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn(parameter.shape, generator=generator, device="cpu")
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    made = made.to(loaded.device).eval()
    return LoadedModel(made, None, loaded.capabilities, f"a small copy of {loaded.name}")


def _small_config(loaded: LoadedModel, own: Any) -> Any:
    config = copy.deepcopy(own.config)
    layers = _layers_needed(loaded)
    for part in _parts(config):
        vars(part).pop("quantization_config", None)
        vars(part)["dtype"] = None  # transformers 4 reads it
        _narrow(part)
    _shorten(config.get_text_config(decoder=True), layers)
    return config


def _what(error: Exception) -> str:
    if isinstance(error, UnsupportedError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _made(config: Any, own: Any) -> Any:
    implementation = own_name(own.config)
    with BUILDING:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=implementation
        )


def _parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and its sub-configurations."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _narrow(config: Any) -> None:
    """Make weights few and narrow. The width and the kind of heads stay."""
    attends = _number(config, "num_attention_heads") > 0
    name = "num_attention_heads" if attends else "num_heads"
    heads, hidden = _number(config, name), _number(config, "hidden_size")
    if heads and hidden:
        groups = _number(config, "num_key_value_heads" if attends else "n_groups") or heads
        shared = min(heads // groups, HEADS)
        few = min(groups, HEADS if shared > 1 else 2 * HEADS) if attends else groups
        fewer = few * shared
        apart = attends and _number(config, "head_dim") * heads not in (0, hidden)
        if apart and not any("mamba" in other for other in vars(config)):
            config.hidden_size = min(hidden, HIDDEN)
        elif any(_number(config, other) * fewer % heads for other in _WITH_HIDDEN):
            fewer, few = heads, groups
        else:
            for other in _WITH_HIDDEN:
                if old := _number(config, other):
                    setattr(config, other, old * fewer // heads)
        setattr(config, name, fewer)
        if _number(config, "num_key_value_heads"):
            config.num_key_value_heads = few
    for other, value in list(vars(config).items()):
        if "intermediate_size" in other and value:
            setattr(config, other, [INNER] * len(value) if isinstance(value, list) else INNER)
    for other in _VOCABULARIES:
        if _number(config, other) > VOCABULARY:
            setattr(config, other, VOCABULARY)
    if _number(config, "sliding_window") > WINDOW:
        config.sliding_window = WINDOW
    for other, value in list(vars(config).items()):
        if other.endswith(("_token_id", "_token_index")):
            setattr(config, other, _known_ids(value))


def _known_ids(ids: Any) -> Any:
    """Replace token ids that a small vocabulary lacks by 0."""
    if isinstance(ids, list):
        return [_known_ids(one) for one in ids]
    return 0 if isinstance(ids, int) and ids >= VOCABULARY else ids


def _shorten(config: Any, layers: list[int]) -> None:
    """Keep only these layers, also in lists with an entry per layer."""
    for name in _by_layer(config):
        old = getattr(config, name)
        setattr(config, name, [old[layer] for layer in layers])
    if _number(config, _SHARING):
        config.num_kv_shared_layers = min(config.num_kv_shared_layers, len(layers) // 2)
    config.num_hidden_layers = len(layers)


def _by_layer(config: Any) -> list[str]:
    """Names of the lists with an entry for each layer."""
    layers = _number(config, "num_hidden_layers")
    return [
        name
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == layers and value != list(range(layers))
    ]


def _layers_needed(loaded: LoadedModel) -> list[int]:
    """Return the first layers, enough to have each kind; all layers if kinds are unknown.

    If the last layers share keys of earlier ones, as many of them are added.
    """
    config, blocks = loaded.config, loaded.blocks
    layers, sharing = _number(config, "num_hidden_layers"), _number(config, _SHARING)
    if blocks is None:
        return list(range(layers))
    lists = [getattr(config, name) for name in _by_layer(config)]
    kinds = [repr((_classes(block), [one[i] for one in lists])) for i, block in enumerate(blocks)]
    first = max(LAYERS, *(1 + kinds.index(kind) for kind in kinds[: layers - sharing]))
    last = min(first, sharing)
    kept = {*range(min(first, layers)), *range(layers - last, layers)}
    return sorted(kept)


def _classes(block: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in block.named_modules()]
