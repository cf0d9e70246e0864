"""Settings of a model's generation_config that apply to every answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import nextafter
from typing import Any

import torch
from transformers import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from draftsmith.core.sampling import Processor, forbid_end

_INHERITED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens",
              "max_new_tokens", "stop_strings")  # fmt: skip
"""Settings that are the defaults of a call's options."""

_NOT_APPLIED = {
    "top_h": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "watermarking_config": None,
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "max_time": None,
}
"""Settings that change the result of `generate` and that our engine does not implement, with the
values that change nothing."""


def given(config: Any) -> dict[str, Any]:
    """Return what the model's author set, without transformers' own defaults (top_k=50)."""
    return {} if config is None else dict(config.to_diff_dict())


def sampling_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of SamplingParams; greedy unless the author set do_sample."""
    found = {name: settings[name] for name in _INHERITED if settings.get(name) is not None}
    if "stop_strings" in found:
        found["stop"] = found.pop("stop_strings")
    found |= {name: value for name, value in filters(found).items() if name in found}
    if not settings.get("do_sample"):
        return found | {"temperature": 0.0}
    return {"temperature": 1.0} | found


def filters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters of a config as SamplingParams takes them: transformers checks no range."""
    p = settings.get("top_p")
    return {
        "top_k": max(settings.get("top_k") or 0, 0),
        "top_p": 1.0 if p is None else min(max(p, nextafter(0.0, 1.0)), 1.0),
        "min_p": min(settings.get("min_p") or 0.0, nextafter(1.0, 0.0)),
    }


def config_processors(
    settings: Mapping[str, Any], prompt_length: int, end_ids: Sequence[int], device: torch.device
) -> tuple[list[Processor], list[Processor]]:
    """Make transformers' own processors for one sequence: before the penalties, and after them.

    The order is that of `GenerationMixin._get_logits_processor`. Those after the penalties only
    forbid tokens, so their order does not matter.
    """
    ends = list(end_ids)
    makers: dict[str, Callable[[Any], Processor]] = {
        "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda words: NoBadWordsLogitsProcessor(words, ends or None),
        "min_length": lambda length: partial(forbid_end, end_ids=ends, until=length),
        "begin_suppress_tokens": lambda ids: SuppressTokensAtBeginLogitsProcessor(
            ids, prompt_length, device=device
        ),
    }
    bias = settings.get("sequence_bias")
    return (
        [SequenceBiasLogitsProcessor(bias)] if bias else [],
        [make(settings[name]) for name, make in makers.items() if settings.get(name)],
    )


def banned(settings: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Return ids that no answer may contain (`suppress_tokens`), e.g. SDSAT's adaptive tokens."""
    return [i for i in settings.get("suppress_tokens") or () if 0 <= i < vocab_size]


def not_applied(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each setting that plain `generate` follows and the engine does not."""
    return tuple(
        f"generation_config.{name}={settings[name]!r} is not applied; "
        "pass processors=…, or use accelerate(model)"
        for name, neutral in _NOT_APPLIED.items()
        if settings.get(name) not in (None, neutral)
    )
