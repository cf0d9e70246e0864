"""From a hub id, a folder or a live model to a `LoadedModel`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from draftsmith import builtin
from draftsmith.errors import LoadError, OptionError, UnsupportedError, WriteError, first_line
from draftsmith.model import devices, gguf
from draftsmith.model import prepack as prepacking
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.choice import MEASURED, Measured
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.measure import compare_dtypes, machine
from draftsmith.model.probe import probe
from draftsmith.storage import cache_folder, digest, reading

_UNTESTED = Capabilities("plain", "eager", "none", batch=False)


def load(
    model: Any,
    tokenizer: Any | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    prepack: bool = False,
) -> LoadedModel:
    """Load a causal language model and find out by a self-test how to run it.

    `model` is a hub id, a folder, a GGUF file (see `model.gguf`), a built-in model's name, or a
    live model, which is used as it is (adapters, quantized modules, device map) and not changed.
    `dtype` defaults to the checkpoint's; `measured` is the cheapest on this CPU of those that lose
    nothing (`measure.compare_dtypes`). `device` defaults to `devices.usual`: the accelerator of
    this machine if it has one. No weights are read but safetensors and GGUF. With `prepack`
    a model that is read here has its linear layers laid out for this CPU (`model.prepack`). Raises
    LoadError if something is missing, UnsupportedError if the model cannot generate text left to
    right, OptionError for options that do not apply to a live model.
    """
    packed = None
    if isinstance(model, str | Path) and device is None and device_map is None:
        device = devices.usual()
    if dtype == MEASURED and isinstance(model, str | Path):
        return _load_measured(
            model, tokenizer, device, device_map, trust_remote_code, revision, prepack
        )
    if isinstance(model, str | Path):
        source = folder_of(str(model))
        options = {"trust_remote_code": trust_remote_code, "revision": revision}
        live = read_model(source, options, dtype, device, device_map)
        packed = prepacking.prepack(live, keep=False) if prepack else None
        if tokenizer is None:
            tokenizer = read_tokenizer(source, options)
        name = str(model)
    else:
        given = {"dtype": dtype, "device": device, "device_map": device_map, "revision": revision}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise OptionError(
                f"{', '.join(unused)} cannot be applied to a live model: load it that way, or "
                "pass its folder or hub id"
            )
        live, name = model, type(model).__name__
        _check_live(live)
    if isinstance(tokenizer, str | Path):
        tokenizer = read_tokenizer(str(tokenizer), {"trust_remote_code": trust_remote_code})
    loaded = LoadedModel(live, tokenizer, _UNTESTED, name)
    return LoadedModel(live, tokenizer, probe(loaded), name, packed)


def _load_measured(
    model: str | Path,
    tokenizer: Any | None,
    device: Any,
    device_map: Any,
    trust_remote_code: bool,
    revision: str | None,
    prepack: bool,
) -> LoadedModel:
    """The model in the dtype whose passes cost least on this CPU; elsewhere in its own."""
    source = folder_of(str(model))  # once: a GGUF file is read for its name
    options = {"trust_remote_code": trust_remote_code, "revision": revision}
    on_cpu = device_map is None and torch.device(device).type == "cpu"
    note = choice_file(source, options, prepack)

    def load_in(dtype: str | None) -> LoadedModel:
        where = device, device_map, trust_remote_code, revision
        return replace(load(source, tokenizer, dtype, *where, prepack), name=str(model))

    if on_cpu and (known := Measured.load(note)) is not None:
        return replace(load_in(known.best), measured=known)
    own = load_in(None)
    if own.device.type != "cpu":
        return own
    measured, models = compare_dtypes(own, load_in)
    if on_cpu and measured.seconds:
        measured.save(note)
    return replace(models[measured.best], measured=measured)


def choice_file(source: str, options: dict[str, Any], prepack: bool) -> Path | None:
    """Where it is remembered which dtype was the cheapest for a model, as things are here now.

    `source` is a hub id or a folder. None without a home folder; raises as `read_config`.
    """
    config = read_config(source, options)
    # What the choice loses nothing of: a snapshot of the hub, or what lies in the folder now.
    weights: list[object] = [getattr(config, "_commit_hash", None)]
    folder = Path(builtin.resolve(source)).expanduser()
    with reading(folder):
        for file in sorted(folder.glob("*.safetensors")):
            weights.append((file.name, file.stat().st_size, file.stat().st_mtime_ns))
    versions = map(version, ("draftsmith", "torch", "transformers"))
    capability = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA")
    here = [machine(), *capability, torch.get_num_threads(), *versions]
    key = [source, config.to_dict(), weights, prepack, here]
    try:
        return cache_folder() / "dtypes" / f"{digest(key)}.json"
    except WriteError:
        return None


def folder_of(model: str) -> str:
    """Where a built-in model or a converted GGUF file is; any other hub id or folder as it is.

    Raises LoadError for what can be none of these.
    """
    source = builtin.resolve(model)
    return str(gguf.converted(Path(source).expanduser())) if source.endswith(".gguf") else source


def _check_live(model: Any) -> None:
    kind = type(model).__name__
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise LoadError(
            f"expected a hub id, a folder or a transformers model, got {kind}; "
            "e.g. load('HuggingFaceTB/SmolLM2-135M')"
        )
    _check_config(model.config, kind)
    if not model.can_generate():
        raise UnsupportedError(
            f"{kind} has no language model head; load the checkpoint with AutoModelForCausalLM"
        )
    check_mode(model)


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
            f"{name} ({config.model_type}) is an encoder: it reads in both directions and cannot "
            "continue a text"
        )


def read_config(source: str, options: dict[str, Any]) -> Any:
    """The configuration of a hub id or a folder; raises LoadError, UnsupportedError."""
    _check_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
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
    """The model of a hub id or a folder; raises LoadError, OptionError, UnsupportedError.

    Its weights go straight to `device`, the CPU by default; the host never holds all of them.
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
        # Without a map transformers loads to torch's default device.
        with place if on_cpu else nullcontext():
            model = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=wanted,
                device_map=device_map,
                use_safetensors=True,
                **options,
            )
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{source} does not fit on {devices.name_of(place)} ({first_line(error)}); give "
            "device='cpu', a smaller dtype, or device_map='auto'"
        ) from None
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedError(
                f"{source} ({config.model_type}) is no causal language model"
            ) from None
        raise LoadError(_explain(source, "the weights", error)) from None
    return model.eval()


def _check_device(device: str | torch.device | None) -> None:
    """Fail now and in plain words rather than after loading with torch's."""
    if device is None:
        return
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        raise OptionError(
            f"device={str(device)!r} cannot be used here ({first_line(error)}); cpu always can"
        ) from None


def _check_folder(source: str) -> None:
    folder = Path(builtin.resolve(source)).expanduser()
    if not folder.exists():
        return
    if not folder.is_dir():
        raise LoadError(f"{source} is a file; give the folder that has config.json")
    if not (folder / "config.json").is_file():
        raise LoadError(f"{source} has no config.json; save a model with model.save_pretrained()")
    if not any(folder.glob("*.safetensors")):
        found = sorted(p.name for p in folder.glob("*.bin"))
        extra = f" ({found[0]} is a pickle, which can run code)" if found else ""
        raise LoadError(
            f"{source} has no .safetensors weights{extra}; save the model again with "
            "model.save_pretrained(folder)"
        )


def read_tokenizer(source: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a hub id, a folder or a built-in model; raises LoadError."""
    source = folder_of(source)
    try:
        try:
            return AutoTokenizer.from_pretrained(source, **options)
        except ValueError as error:
            if "TokenizersBackend" not in str(error):
                raise
            # The name that transformers 5 saves for the class that 4 knows by another one.
            return PreTrainedTokenizerFast.from_pretrained(source, **options)
    except Exception as error:  # Each tokenizer class fails in its own way.
        raise LoadError(
            f"{source} has no tokenizer that can be read ({first_line(error)}); pass "
            "tokenizer=<folder, hub id or tokenizer>"
        ) from None


def _torch_dtype(dtype: str | torch.dtype | None) -> str | torch.dtype:
    if dtype is None:
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    # torch also has integer types by name: no weights are loaded as those.
    real = isinstance(found, torch.dtype) and found.is_floating_point
    if dtype != "auto" and not real:
        raise OptionError(
            f"unknown dtype {dtype!r}; use 'float32', 'bfloat16', 'float16' or 'measured'"
        )
    return "auto" if dtype == "auto" else found  # type: ignore[return-value]


def _explain(source: str, what: str, error: Exception) -> str:
    if Path(source).expanduser().exists():
        return f"{what} in {source} cannot be read: {first_line(error)}"
    inside = "" if "/" in source else f"; the built-in models are {', '.join(builtin.names())}"
    return (
        f"{what} of {source!r} cannot be read: no such folder, and the hub did not deliver it "
        f"({first_line(error)}); check the name, the network, and `hf auth login` for gated models"
        f"{inside}"
    )
