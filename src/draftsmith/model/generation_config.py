"""What a model's generation_config asks of every answer, beyond temperature and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
"""Settings that give a call its options where the caller says nothing."""

_NOT_APPLIED = (
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "watermarking_config",
    "num_beams",
    "penalty_alpha",
    "dola_layers",
    "max_time",
)
"""Settings that change what `generate` answers and that our own engine does not know."""


def given(config: Any) -> dict[str, Any]:
    """What the model's author set; transformers' own defaults (top_k=50) are not the model's."""
    return {} if config is None else dict(config.to_diff_dict())


def sampling_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams; greedy unless the author asked for sampling."""
    found = {name: settings[name] for name in _INHERITED if settings.get(name) is not None}
    if "stop_strings" in found:
        found["stop"] = found.pop("stop_strings")
    if not settings.get("do_sample"):
        return found | {"temperature": 0.0}
    return {"temperature": 1.0} | found


def config_processors(
    settings: Mapping[str, Any], prompt_length: int, end_ids: Sequence[int], device: torch.device
) -> tuple[list[Processor], list[Processor]]:
    """transformers' own processors, new for every sequence: before the penalties, and after.

    The order is that of `GenerationMixin._get_logits_processor`. Those after the penalties only
    forbid tokens, so that the order among them, and with our own, does not matter.
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
    """Ids that no answer may have (`suppress_tokens`), such as SDSAT's adaptive tokens."""
    return [i for i in settings.get("suppress_tokens") or () if 0 <= i < vocab_size]


def not_applied(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence per setting that plain `generate` would follow and the engine does not."""
    return tuple(
        f"generation_config.{name}={settings[name]!r} is not applied; "
        "pass processors=…, or use accelerate(model)"
        for name in _NOT_APPLIED
        if settings.get(name) not in (None, 1, 1.0, 0.0)
    )
