"""Reasons why a model, a call or a batch runs through transformers' own `generate`.

Every function returns the reason as a clause, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from draftsmith.core.draft import Draft
from draftsmith.model.forward import unwrapped
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.reference import distance
from draftsmith.model.rope import rope_boundary
from draftsmith.model.runner import Runner

_NEEDS_PLAIN = ("output_attentions", "output_hidden_states", "token_healing", "is_assistant",
                "return_legacy_cache")  # fmt: skip
"""Config entries that only one-token passes or transformers' own cache can fulfil."""

_OUR_CACHE = (None, "dynamic", "dynamic_full")
"""Values of `cache_implementation` that our cache can replace."""

_ROW_BY_ROW = frozenset((
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor",
    "WatermarkLogitsProcessor", "TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper",
    "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
    "LogitNormalization", "ExponentialDecayLengthPenalty", "MaxLengthCriteria", "MaxTimeCriteria",
    "StopStringCriteria", "EosTokenCriteria",
))  # fmt: skip
"""transformers' processors and criteria that treat each row of a batch alone, without state."""

_CHECKED, _STEPS, _PADS = 12, 3, 5
"""Prompt tokens, steps and padding of the comparison with `generate`'s own passes."""


def of_model(model: Any) -> str | None:
    """Why no call of this model can be accelerated, as far as its class shows."""
    kind, mixin = type(model), GenerationMixin
    if model.config.is_encoder_decoder:
        return f"{kind.__name__} is an encoder-decoder model"
    if vars(model).get("generate") is not None:
        return "generate was replaced on this object already"
    if kind.generate is not mixin.generate or kind._sample is not mixin._sample:
        return f"{kind.__name__} overrides generate"
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        return "its weights are sharded, so all processes must run the same passes"
    return None


def of_call(config: Any, inputs: Mapping[str, Any]) -> str | None:
    """Why this generation config, or an input other than ids and mask, needs transformers' loop."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value.replace('_', ' ')} is neither greedy search nor sampling"
    if config.use_cache is False:
        return "use_cache=False asks for decoding without a cache"
    if config.cache_implementation not in _OUR_CACHE:
        return f"cache_implementation={config.cache_implementation!r} asks for another cache"
    if asked := [name for name in _NEEDS_PLAIN if getattr(config, name, None)]:
        return f"{', '.join(asked)} needs plain decoding"
    given = {name for name, value in inputs.items() if value is not None}
    extra = sorted(given - {"input_ids", "attention_mask", "labels"})
    return f"{', '.join(extra)} was given" if extra else None


def of_prompts(input_ids: Tensor, mask: Tensor | None) -> str | None:
    """Why these ids are not prompts with at most left padding."""
    if input_ids.ndim != 2 or not input_ids.shape[1]:
        return "the prompt is not a row of ids"
    if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
        return "the attention mask has other values than 0 and 1"
    if mask is not None and not bool((mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1].all()):
        return "the attention mask hides more than padding on the left"
    return None


def of_batch(rules: Sequence[Any], criteria: Any, config: Any, streamer: Any) -> str | None:
    """Why a batch would differ from `generate`'s if its rows advance unevenly."""
    if streamer is not None:
        return "a streamer gets the tokens of all rows of a batch together"
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        return "scores of a batch include those of rows that have already finished"
    for rule in rules:
        kind = type(rule)
        if kind.__name__ not in _ROW_BY_ROW or not kind.__module__.startswith("transformers."):
            return f"{kind.__name__} may keep a state for the whole batch"
    kinds = {type(criterion).__name__ for criterion in criteria}
    if "EosTokenCriteria" not in kinds and kinds != {"MaxLengthCriteria"}:
        return "without an end-of-sequence id, a finished row of a batch continues with the others"
    return None


def of_angles(loaded: LoadedModel, length: int | None, longest: int | None) -> str | None:
    """Why `generate` has other rotary angles than each row alone in one cache.

    `length`: ids of a single prompt; None: of a batch, or a padded prompt. `longest`: most tokens
    of a row, padding and answer included; None: no limit.
    """
    boundary = rope_boundary(loaded.config)
    if boundary is None or (longest is not None and longest <= boundary.position):
        return None
    if length is None:
        return "the longest row of a batch determines the rotary angles of all rows"
    # These compute the text again at the boundary, as we do. Other classes keep their keys.
    prepare = type(unwrapped(loaded.model)).prepare_inputs_for_generation
    again = prepare.__module__.endswith((".modeling_phi3", ".modeling_phimoe"))
    if not (again or boundary.grows) and length <= boundary.position:
        return (
            "its rotary angles change within the answer, and generate keeps keys with the old ones"
        )
    return None


def of_passes(loaded: LoadedModel, generate: Any, *, padded: bool) -> str | None:
    """Why the passes of `generate` differ from the model's alone; compares their logits.

    Positions of some decoders count the padding, soft prompts come before the ids, and remote code
    may prepare inputs in its own way. Costs a few short passes.
    """
    if padded and getattr(loaded.config, "log_scaling_n_floor", None) is not None:
        return "it scales queries by their place in the padded row (log_scaling_n_floor)"
    try:
        error = _difference(loaded, generate, _PADS if padded else 0)
    # Models are third-party code. What they raise is the reason.
    except Exception as problem:
        return f"its own passes could not be compared ({type(problem).__name__}: {problem})"
    if error <= max(1e-4, 8 * torch.finfo(loaded.dtype).eps):  # false for NaN, too
        return None
    if padded:
        why = "what it computes for a row depends on the padding before it"
    else:
        why = (
            "prepare_inputs_for_generation, another method or an exchanged module changes the "
            "passes, as soft prompts do"
        )
    return f"{why} (logits differ by {error:.1e})"


def _difference(loaded: LoadedModel, generate: Any, pads: int) -> float:
    """Relative distance between the logits of `generate` and those of our own pass."""
    vocab = loaded.vocab_size
    low = min(10, vocab // 4)  # the lowest ids are often special
    tokens = [low + (37 * i) % (vocab - low) for i in range(pads + _CHECKED)]
    ids = torch.tensor([tokens], device=loaded.device)
    # Without padding there is no mask, which some classes do not accept.
    masked = {"attention_mask": (ids.new_ones(ids.shape).cumsum(1) > pads).long()} if pads else {}

    def freely(model: Any, ids: Tensor, **call: Any) -> Any:
        stop = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + _STEPS)])
        call |= {"logits_processor": LogitsProcessorList(), "stopping_criteria": stop}
        return model._sample(ids, **call)

    theirs = generate(
        ids, **masked, custom_generate=freely, max_new_tokens=_STEPS, do_sample=False, num_beams=1,
        num_return_sequences=1, stop_strings=None, output_scores=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    runner = Runner(loaded)
    row = runner.open(ids[0, pads:].tolist())
    runner.prefill(row)
    answer = Draft.chain(theirs.sequences[0, ids.shape[1] : -1].tolist(), "check")
    ours = runner.forward([row], [answer])[0].logits
    pairs = zip(ours, torch.cat(theirs.logits), strict=True)
    return float(np.max([distance(got, wanted) for got, wanted in pairs]))  # NaN if one is
