"""Defects that only a device shows, each named after its entry.

D1, D3 and D4 of engines are asked in `test_device_paths.py`, under `strictly`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from both import (
    IDS,
    SAMPLED,
    Both,
    default_device,
    mapped,
    on,
    same_accelerated,
)
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

import tiny
from draftsmith.engine.engine import Engine
from draftsmith.model.runner import Runner
from draftsmith.text.grammar import Grammar


@pytest.mark.slow
def test_d3_exact_and_prepacked_models_beside_a_default_device(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "exact": True}
    expected = Engine.from_pretrained(folder, **options).generate(IDS, max_new_tokens=12)
    with default_device("pretend:1"):
        engine = Engine.from_pretrained(folder, **options)
        assert engine.generate(IDS, max_new_tokens=12).tokens == expected.tokens


@pytest.fixture(scope="module")
def apart(engines: Both, device: str) -> Both:
    """The CPU's engine beside one whose logits end on another device than its ids go in."""
    model = mapped(tiny.model(), device, "pretend:1")
    remove_hook_from_module(model)  # the outermost, which brings the logits back
    there = Engine.from_pretrained(model, tokenizer=tiny.tokenizer())
    ids = torch.tensor([IDS], device=device)
    assert model(ids).logits.device == torch.device("pretend:1")
    return Both(engines.cpu, there, engines._known)


APART: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "min_new_tokens": {"min_new_tokens": 9},
    "truncation": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "log-probabilities": {"logprobs": True},
    "a processor": {"processors": lambda ids, scores: scores + 0.01 * ids.float().mean()},
    "transformers' processors": {
        "processors": [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.3)]
    },
    "a grammar": {"grammar": Grammar.regex("(fox|dog)+ [0-9]{3}")},
    "all": SAMPLED,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
def test_d5_what_reads_ids_where_logits_are_elsewhere(apart: Both, kind: str) -> None:
    for drafter in ("none", "auto", "spectra(N=3, W=4, G=4)"):
        options = {"drafter": drafter, "max_new_tokens": 16, "budget": 8, **APART[kind]}
        apart.generate("the quick brown fox jumps", **options)
        apart.generate(IDS, **{"temperature": 1.0, "seed": 1, **options})


def test_d5_accelerate_where_logits_are_elsewhere(device: str) -> None:
    """As `generate` on one device, since transformers' own fails for some of these."""
    whole, model = on(device, tiny.model()), mapped(tiny.model(), device, "pretend:1")
    remove_hook_from_module(model)
    ids = torch.tensor([IDS], device=device)
    sampling = ({"do_sample": False}, {"do_sample": True, "repetition_penalty": 1.2})
    same_accelerated(whole, model, ids, sampling)


def waits(engine: Engine) -> int:
    """How often `Runner.wait` waits for a device."""
    runner = Runner(engine.model)
    with pretended.counted() as seen:
        runner.wait()
    assert {line.split(":")[0] for _, line in seen.waits} <= {"model/runner.py"}
    return seen.waits.total()


def test_d7_a_pass_is_timed_to_its_end_on_any_device(engines: Both, apart: Both) -> None:
    assert waits(engines.device) == 1
    assert waits(apart.device) == 2  # layers on two devices
    assert waits(engines.cpu) == 0
