"""A model to train: its weights in float32, free token ids, and the folder it is saved to."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from draftsmith import builtin
from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.model.adaptive import AdaptiveTokens
from draftsmith.model.capabilities import Capabilities
from draftsmith.model.load import read_config, read_model, read_tokenizer
from draftsmith.model.loaded import LoadedModel
from draftsmith.storage import write_text

NAME = "<|adaptive_{}|>"
"""Name of an added token in the tokenizer."""
_FREE = re.compile(r"\W*(reserved|unused|placeholder|dummy|extra_(id|token))\w*\W*", re.IGNORECASE)
"""Tokens that models reserve for users, such as <|reserved_special_token_7|> and <unused7>."""

_RENAMED = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Model settings that transformers 5 keeps in `rope_parameters`."""


@dataclass(frozen=True, eq=False)
class Trainable:
    """A model to train, and what must be restored when it is saved."""

    loaded: LoadedModel
    dtype: torch.dtype
    """Dtype of its weights on disk, before and after."""
    tokens: tuple[int, ...]
    """Its adaptive tokens."""

    @property
    def model(self) -> Any:
        return self.loaded.model

    def save(self, model: Any, folder: Path) -> None:
        """Write the trained model, in its own dtype, and the tokenizer to a folder.

        The model's generation_config suppresses the adaptive tokens, because no answer may contain
        one.
        """
        model.to(self.dtype)
        if self.tokens:
            suppressed = set(model.generation_config.suppress_tokens or ()) | set(self.tokens)
            model.generation_config.suppress_tokens = sorted(suppressed)
        model.save_pretrained(folder)
        self.loaded.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
        _name_as_before(folder, self.loaded.name)


def _name_as_before(folder: Path, source: str) -> None:
    """Add the setting names of transformers 4 to a folder.

    Without them, version 4 rejects the tokenizer and uses another rotary base.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    older: dict[str, Any] = {}
    # One value for all layers. If there are several, the names of `source` are used.
    if "rope_theta" in rope:
        scaled = rope.get("rope_type", "default") != "default"
        older = {"rope_theta": rope["rope_theta"], "rope_scaling": rope if scaled else None}
    known, _ = PretrainedConfig.get_config_dict(source)
    if known.get("model_type") == config.get("model_type"):
        older |= {name: known[name] for name in _RENAMED if name in known}
    _write(folder / "config.json", older | config)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    write_text(path, text + "\n")


def open_trainable(
    source: str, count: int, *, tokens: Sequence[int] = (), add: bool = False
) -> Trainable:
    """Read a model in float32 and choose its `count` adaptive tokens.

    `tokens` names them; otherwise free ones are found, or with `add` new ones are added. Raises
    UnsupportedError for quantized weights and GGUF files, OptionError if there are no such tokens,
    LoadError.
    """
    if builtin.is_gguf(source):
        raise UnsupportedError(
            f"{source} is a GGUF file, which cannot be trained; give a folder that has config.json"
        )
    config = read_config(source, {})
    _check_not_quantized(config, source)
    dtype = getattr(config, "dtype", None) or read_model(source, {}, "auto").dtype
    model = read_model(source, {}, "float32")
    _check_can_be_saved(model, source)
    tokenizer = read_tokenizer(source, {})
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, torch.nn.Embedding):
        raise UnsupportedError(
            f"the embeddings of {source} are {type(embeddings).__name__}, not a plain table of "
            "one row per token, so adaptive tokens cannot be trained"
        )
    if tokens:
        chosen = _checked(tokens, count, model, tokenizer)
    elif add and count:
        chosen = _added(count, model, tokenizer)
    else:
        chosen = _found(count, model, tokenizer, source)
    known = AdaptiveTokens.load(source)
    trained = () if known is None else known.tokens
    _blank(model, [token for token in chosen if token not in trained])
    untested = Capabilities("plain", "eager", "none")
    return Trainable(LoadedModel(model, tokenizer, untested, source), dtype, chosen)


def _blank(model: Any, tokens: Sequence[int]) -> None:
    """Set the rows of tokens to the mean of all others, because untrained rows are arbitrary."""
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    for table in tables if tokens else ():
        others = torch.ones(len(table), dtype=torch.bool, device=table.device)
        others[list(tokens)] = False
        with torch.no_grad():
            table[list(tokens)] = table[others].mean(dim=0)


def _check_not_quantized(config: Any, source: str) -> None:
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        kind = settings.get("quant_method", "") if isinstance(settings, dict) else settings
        raise UnsupportedError(
            f"the weights of {source} are quantized ({kind}) and cannot be trained; train the "
            "model it was made from, and quantize that afterwards"
        )


def _check_can_be_saved(model: Any, source: str) -> None:
    """Raise OptionError if the model could not be saved after the training."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise OptionError(
            f"the generation_config of {source} is invalid, so transformers would not save it: "
            f"correct the file first ({reason})"
        ) from error


def free_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return ids that occur in no text: embedding rows without a token, then reserved tokens."""
    rows = model.get_input_embeddings().weight.shape[0]
    vocabulary = tokenizer.get_vocab()
    padding = range(max(vocabulary.values()) + 1, rows)
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    usable = {i for i in special - _meaningful(model, tokenizer) if i < rows}
    reserved = (i for token, i in vocabulary.items() if i in usable and _FREE.fullmatch(token))
    return [*padding, *sorted(reserved)]


def _meaningful(model: Any, tokenizer: Any) -> set[int]:
    """Return ids with a function: ends, padding, and tokens of the chat template."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    found: set[int] = set()
    for owner in (model.config, model.generation_config, tokenizer):
        for name in names:
            value = getattr(owner, name, None)
            several = value if isinstance(value, list | tuple) else [value]
            found |= {int(i) for i in several if i is not None}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return found | {i for token, i in tokenizer.get_added_vocab().items() if token in template}


def _found(count: int, model: Any, tokenizer: Any, source: str) -> tuple[int, ...]:
    free = free_tokens(model, tokenizer)
    if len(free) < count:
        raise OptionError(
            f"{source} has {len(free)} free token ids (rows of the embedding without a token, or "
            f"reserved tokens) where {count} are needed: add some with --add-token, or name ids "
            "that your texts never use with --token"
        )
    return tuple(free[:count])


def _checked(tokens: Sequence[int], count: int, model: Any, tokenizer: Any) -> tuple[int, ...]:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(set(tokens)) != len(tokens) or len(tokens) != count:
        raise OptionError(f"{count} different adaptive tokens are needed, got {list(tokens)}")
    for token in tokens:
        if not 0 <= token < rows:
            raise OptionError(f"there is no token {token}: this model has 0…{rows - 1}")
        if token in _meaningful(model, tokenizer):
            name = tokenizer.convert_ids_to_tokens(token)
            raise OptionError(
                f"the token {token} ({name!r}) has a meaning; free ones are "
                f"{free_tokens(model, tokenizer)[:8] or 'missing here: use --add-token'}"
            )
    return tuple(tokens)


def _added(count: int, model: Any, tokenizer: Any) -> tuple[int, ...]:
    names = [NAME.format(number) for number in range(count)]
    known = next((name for name in names if name in tokenizer.get_vocab()), None)
    if known is not None:
        raise OptionError(
            f"the tokenizer has {known!r} already, from an earlier training; name its id with "
            f"--token {tokenizer.convert_tokens_to_ids(known)}"
        )
    tokenizer.add_tokens(names, special_tokens=True)
    ids = tuple(tokenizer.convert_tokens_to_ids(names))
    if max(ids) >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    return ids
