"""Loads a hub id, a folder or a live model as a `LoadedModel`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from draftsmith import builtin
from draftsmith.errors import LoadError, OptionError, UnknownName, UnsupportedError, first_line
from draftsmith.model import devices, gguf
from draftsmith.model import prepack as prepacking
from draftsmith.model.building import BUILDING
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.dtype import widen
from draftsmith.model.loaded import LoadedModel, Store
from draftsmith.model.probe import probe, with_store
from draftsmith.values import known_options, shown

_UNTESTED = Capabilities("plain", "eager", "none")

_LIVE = "load the model with transformers, and pass the model itself"
LOADING_HINTS = {
    "attn_implementation": f"{_LIVE}; ours is used where the self-test finds that it agrees",
    "cache_dir": "set the environment variable HF_HOME",
    "load_in_4bit": f"{_LIVE}: quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": f"{_LIVE}: quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "local_files_only": "set the environment variable HF_HUB_OFFLINE to 1",
    "low_cpu_mem_usage": "leave it out: weights are read directly to their device",
    "max_memory": _LIVE,
    "memory": "pass it to Engine(…), which keeps rows between answers",
    "quantization_config": _LIVE,
    "subfolder": _LIVE,
    "token": "run `hf auth login`, or set the environment variable HF_TOKEN",
    "torch_dtype": "use dtype",
    "use_auth_token": "run `hf auth login`, or set the environment variable HF_TOKEN",
}
"""Loading options of transformers, and what to do here instead."""


@known_options("load", LOADING_HINTS)
def load(
    model: Any,
    tokenizer: Any | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    prepack: bool = False,
    store: str | None = None,
) -> LoadedModel:
    """Load a causal language model and test how it can be run.

    `model` is a hub id, a folder, a GGUF file (`model.gguf`), the name of a built-in model, or a
    live model. A live model is used as it is (adapters, quantized modules, device map) and not
    changed. Only safetensors and GGUF weights are read.

    `dtype` defaults to the checkpoint's, or to float32 on a CPU that does not compute in the
    checkpoint's dtype (`model.dtype`). "auto" is the checkpoint's on every machine. `device`
    defaults to `devices.usual`, the machine's accelerator if it has one. `prepack` lays out the
    linear layers of a model that is read here for this CPU (`model.prepack`), unless the model
    cannot be computed with them. `store`: "packed"; "static", so that passes can be CUDA graphs
    (`model.static`); None: "static" where such a graph can be captured. A model that cannot have it
    is "packed", and its capabilities name the reason.

    Raises LoadError if something is missing, UnsupportedError if the model cannot generate text
    left to right, OptionError for options that do not apply to a live model (`prepack` leaves it
    as it is).
    """
    if store is not None and store not in get_args(Store):
        raise UnknownName("store", str(store), get_args(Store))
    prepacked = widened = None
    if isinstance(model, str | Path) and device is None and device_map is None:
        device = devices.usual()
    if isinstance(model, str | Path):
        source = folder_of(str(model))
        options = {"trust_remote_code": trust_remote_code, "revision": revision}
        live = read_model(source, options, dtype, device, device_map)
        widened = widen(live) if dtype is None else None
        prepacked = prepacking.prepack(live, keep=False) if prepack else None
        if tokenizer is None:
            tokenizer = read_tokenizer(source, options)
        name = str(model)
    else:
        given = {"dtype": dtype, "device": device, "device_map": device_map, "revision": revision}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise OptionError(
                f"{', '.join(unused)} cannot be applied to a live model: load it with them, or "
                "pass its folder or hub id"
            )
        live, name = model, type(model).__name__
        _check_live(live)
    if isinstance(tokenizer, str | Path):
        tokenizer = read_tokenizer(str(tokenizer), {"trust_remote_code": trust_remote_code})
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise OptionError(
            "tokenizer must be a hub id, a folder or a transformers tokenizer, got "
            f"{shown(tokenizer)}"
        )
    try:
        found = probe(LoadedModel(live, tokenizer, _UNTESTED, name))
    except RuntimeError:
        if prepacked is None or not prepacked.replaced:
            raise
        # Some models, such as Mamba, read the weight of a layer themselves.
        refused = prepacked.refused("the model cannot be computed with such layers")
    else:
        return with_store(LoadedModel(live, tokenizer, found, name, prepacked, widened), store)
    del live, prepacked  # their weights were given up, so read the model again
    loaded = load(
        model, tokenizer, dtype, device, device_map, trust_remote_code, revision, store=store
    )
    return replace(loaded, prepacked=refused)


def folder_of(model: str) -> str:
    """Return the folder of a built-in model or a converted GGUF file, else `model` as it is.

    Raises LoadError if `model` is neither a folder nor a hub id, or if the hub cannot be reached.
    """
    source = builtin.resolve(model)
    if source.endswith(".gguf"):
        return str(gguf.converted(Path(source)))
    if not os.path.exists(source):
        _ask_hub(source)
    return source


def _ask_hub(source: str) -> None:
    """Raise LoadError early if a model is not cached and the hub cannot be reached.

    The hub's library itself retries for half a minute.
    """
    try:
        offline = constants.HF_HUB_OFFLINE
        if not offline and try_to_load_from_cache(source, "config.json") is None:
            HfApi().model_info(source, timeout=10)
    # The hub answered, or the name is no hub id. transformers reports that with more detail.
    except (HfHubHTTPError, ValueError):
        return
    # The errors of the HTTP library, which differs between versions of the hub's library.
    except Exception as error:
        raise LoadError(_explain(source, "the configuration", error)) from error


def _check_live(model: Any) -> None:
    kind = type(model).__name__
    of_model = hasattr(model, "config") and hasattr(model, "get_input_embeddings")
    if isinstance(model, type) or not of_model:
        raise LoadError(
            f"model must be a hub id, a folder or a transformers model, got {kind} "
            f"({shown(model)}); e.g. 'HuggingFaceTB/SmolLM2-135M'"
        )
    _check_config(model.config, kind)
    if not model.can_generate():
        raise UnsupportedError(
            f"{kind} has no language model head; load the checkpoint with AutoModelForCausalLM"
        )
    check_mode(model)
    if getattr(getattr(model, "active_peft_config", None), "alora_invocation_tokens", None):
        raise UnsupportedError(
            f"{kind} looks for the adapter's invocation tokens in the ids of each pass, so only "
            "its own generate can decode it: use accelerate(model), which leaves such calls to it"
        )
    modules = dict(model.named_modules())
    if any(hasattr(module, "_hf_hook") for module in modules.values()):
        return  # offloaded weights are loaded when they are needed
    for name, module in modules.items():
        weights = [one for one in module._parameters.values() if one is not None]
        if any(one.is_meta for one in weights) and not isinstance(module, prepacking.PackedLinear):
            raise LoadError(
                f"{kind} has no weights in {name or 'itself'}: it is on the meta device"
            )


def check_mode(model: Any) -> None:
    """Raise OptionError for a model in training mode."""
    if model.training:
        raise OptionError(
            f"{type(model).__name__} is in training mode, where dropout makes every answer "
            "different: call model.eval() first"
        )


def _check_config(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{name} is an encoder-decoder model ({config.model_type}); draftsmith decodes "
            "decoder-only models"
        )
    both_ways = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if both_ways and not getattr(config, "is_decoder", False):
        raise UnsupportedError(
            f"{name} ({config.model_type}) is an encoder: it attends in both directions and cannot "
            "continue a text"
        )


def read_config(source: str, options: dict[str, Any]) -> Any:
    """Read the configuration of a hub id or a folder; raises LoadError, UnsupportedError."""
    _check_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as error:  # each configuration class raises errors of its own
        raise LoadError(_explain(source, "the configuration", error)) from None
    _check_config(config, source)
    return config


def read_model(
    source: str,
    options: dict[str, Any],
    dtype: str | torch.dtype | None,
    device: str | torch.device | None = None,
    device_map: Any | None = None,
) -> Any:
    """Read the model of a hub id or a folder; raises LoadError, OptionError, UnsupportedError.

    Weights are read directly to `device` (default: CPU); the host never holds all of them.
    """
    if device is not None and device_map is not None:
        raise OptionError("device and device_map were both given: choose one")
    wanted = _torch_dtype(dtype)
    _check_device(device)
    config = read_config(source, options)
    place = torch.device("cpu" if device is None else device)
    on_cpu = device_map is None and place.type == "cpu"
    if not on_cpu and device_map is None:
        device_map = {"": place}
    try:
        # Without a map, transformers loads to torch's default device.
        with BUILDING, place if on_cpu else nullcontext():
            model, info = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=wanted,
                device_map=device_map,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{source} does not fit on {devices.name_of(place)} ({first_line(error)}); use "
            "device='cpu', a smaller dtype, or device_map='auto'"
        ) from None
    except Exception as error:  # each architecture raises errors of its own
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedError(
                f"{source} ({config.model_type}) is not a causal language model"
            ) from None
        raise LoadError(_explain(source, "the weights", error)) from None
    # Buffers and tied weights may be missing: models compute them.
    if lacking := sorted({*info["missing_keys"]} & {name for name, _ in model.named_parameters()}):
        raise LoadError(
            f"{source} lacks {len(lacking)} of the model's tensors, such as {lacking[0]}, which "
            "would be random: save the model itself, not one that torch.compile or DDP wraps, "
            "with the number of layers that config.json has"
        )
    return model.eval()


def _check_device(device: str | torch.device | None) -> None:
    """Raise OptionError for a device that cannot be used, before anything is loaded."""
    if device is None:
        return
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        raise OptionError(
            f"device={str(device)!r} cannot be used here ({first_line(error)}); use device='cpu'"
        ) from None


def _check_folder(source: str) -> None:
    if not source.strip():
        raise LoadError(f"model must be a hub id, a folder or a transformers model, got {source!r}")
    folder = Path(builtin.resolve(source))
    if not os.path.exists(folder):  # False also for a name that is too long for a file
        return
    if not folder.is_dir():
        raise LoadError(f"{source} is a file; give a folder that has config.json")
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise LoadError(
                f"{source} is an adapter: load it with transformers or PEFT, and give the model"
            )
        raise LoadError(f"{source} has no config.json; save a model with model.save_pretrained()")
    if not any(folder.glob("*.safetensors")):
        found = sorted(p.name for p in folder.glob("*.bin"))
        extra = f" ({found[0]} is a pickle, which can run code)" if found else ""
        raise LoadError(
            f"{source} has no .safetensors weights{extra}; save the model again with "
            "model.save_pretrained(folder)"
        )


def read_tokenizer(source: str, options: dict[str, Any]) -> Any:
    """Read the tokenizer of a hub id, a folder or a built-in model; raises LoadError."""
    source = folder_of(source)
    try:
        try:
            found = AutoTokenizer.from_pretrained(source, **options)
            if not hasattr(found, "get_added_vocab"):  # mistral-common's, without a chat template
                found = AutoTokenizer.from_pretrained(source, mistral_format=False, **options)
            return found
        except ValueError as error:
            if "TokenizersBackend" not in str(error):
                raise
            # transformers 5 saves names that version 4 does not know.
            more = get_tokenizer_config(source, **options).get("extra_special_tokens")
            if isinstance(more, list):
                older = {"extra_special_tokens": {}, "additional_special_tokens": more}
                options = options | older
            return PreTrainedTokenizerFast.from_pretrained(source, **options)
    # Each tokenizer class raises errors of its own.
    except Exception as error:
        raise LoadError(
            f"{source} has no tokenizer that can be read ({first_line(error)}); name another "
            "one as tokenizer: a folder or a hub id"
        ) from None


def _torch_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    if dtype is None:
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    # torch also has integers and numbers of 8 bits; weights are not loaded as those.
    real = isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1
    if dtype != "auto" and not real:
        raise OptionError(
            f"unknown dtype {dtype!r}; use 'float32', 'bfloat16', 'float16' or 'auto', which is "
            "the checkpoint's"
        )
    return "auto" if dtype == "auto" else found  # type: ignore[return-value]


def _explain(source: str, what: str, error: Exception) -> str:
    why, odd = first_line(error), isinstance(error, LookupError | TypeError | RuntimeError)
    if "ignore_mismatched_sizes" in why or "size mismatch" in why:
        why = "its tensors have other sizes than config.json says"
    elif odd:
        why = f"{type(error).__name__}: {why}"
    if os.path.exists(source) or odd:  # no network raises those
        return f"{what} in {source} cannot be read: {why}"
    inside = "" if "/" in source else f"; the names known here are {', '.join(builtin.known())}"
    return (
        f"{what} of {source!r} cannot be read: no such folder, and the hub did not deliver it "
        f"({first_line(error)}); check the name, the network, and `hf auth login` for gated models"
        f"{inside}"
    )
