"""Defects that only a device shows, each named after its entry, and others of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from both import (
    BYTES,
    DRAFTERS,
    GREEDY,
    IDS,
    MANY,
    SAMPLED,
    SMALL,
    Both,
    default_device,
    like_mps,
    mapped,
    named,
    on,
    same,
    same_accelerated,
)
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

import tiny
from architectures import build
from draftsmith import accelerate
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine.engine import Engine
from draftsmith.model.runner import Runner
from draftsmith.text.grammar import Grammar


@contextmanager
def elsewhere() -> Iterator[None]:
    """A device like MPS, beside a default device that is another than the model's.

    What is made without naming a device lies on the default one.
    """
    with like_mps(), default_device("pretend:1"):
        yield


@pytest.fixture(scope="module")
def strict_device(engines: Both, folder: Path, device: str) -> Both:
    """The CPU's engine beside one that was loaded there."""
    with elsewhere():
        there = Engine.from_pretrained(folder, device=device, drafter="none", prepack=False)
    return Both(engines.cpu, there, engines._known)


def test_d1_the_self_test_finds_what_it_finds_elsewhere(strict_device: Both) -> None:
    assert strict_device.device.model.capabilities == strict_device.cpu.model.capabilities


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_d1_d3_and_d4_every_drafter(strict_device: Both, folder: Path, drafter: str) -> None:
    options = {"drafter": named(drafter, folder), "max_new_tokens": 14, "budget": 8}
    with elsewhere():
        strict_device.generate(IDS, **options, **GREEDY)
        strict_device.generate(IDS, **options, **SAMPLED)
        strict_device.generate(MANY, **options, **GREEDY)


@pytest.mark.parametrize("name", ["gpt_oss", "falcon", "qwen3_next"])
def test_d1_and_d3_other_architectures(device: str, name: str) -> None:
    """Windows, sinks, chains and recurrent states."""
    model = build(name)
    cpu = Engine.from_pretrained(model)
    with elsewhere():
        there = Engine.from_pretrained(on(device, model))
        assert there.model.capabilities == cpu.model.capabilities
        for drafter in ("auto", "copyspec(gamma=2)"):
            options = {"drafter": drafter, "max_new_tokens": 12, "budget": 8}
            same(cpu.generate(MANY, **options), there.generate(MANY, **options))


def draft_model(device: str, algorithm: str, **options: Any) -> DraftModel:
    """A tiny one of another vocabulary, of which it drafts everything it may."""
    tokenizer = tiny.tokenizer(BYTES if algorithm == "slrs" else SMALL)
    model = on("cpu", tiny.model())
    model.resize_token_embeddings(len(tokenizer))
    own: dict[str, Any] = {"algorithm": algorithm, "tokens": 3, "confidence": 0} | options
    return DraftModel(model.to(device), tokenizer=tokenizer, **own)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["union", "tli", "slem", "slrs", "reproducible"])
def test_d3_and_d4_draft_models(strict_device: Both, device: str, algorithm: str) -> None:
    """They change no answer and no count."""
    own: dict[str, Any] = {"algorithm": algorithm}
    if algorithm == "reproducible":
        own = {"algorithm": "tli", "reproducible": True}
    texts = ["def foo(x): return x + 1", "the quick brown fox jumps over the lazy dog"]
    expected, drafter = draft_model("cpu", **own), draft_model(device, **own)
    for more in (GREEDY, {"temperature": 0.9, "seed": 4}):
        options = {"max_new_tokens": 10, "budget": "drafter", **more}
        cpu = strict_device.cpu.generate(texts, drafter=expected, **options)
        with elsewhere():
            same(cpu, strict_device.device.generate(texts, drafter=drafter, **options))


def test_d3_a_model_on_the_cpu_beside_a_default_device() -> None:
    model = build("gpt2")
    options = {"drafter": "copyspec(gamma=2)", "max_new_tokens": 12, "budget": 8}
    expected = Engine.from_pretrained(model).generate(MANY, **options)
    with default_device("pretend:1"):
        same(expected, Engine.from_pretrained(on("cpu", model)).generate(MANY, **options))


def test_d3_exact_and_prepacked_models_beside_a_default_device(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "exact": True}
    expected = Engine.from_pretrained(folder, **options).generate(IDS, max_new_tokens=12)
    with default_device("pretend:1"):
        engine = Engine.from_pretrained(folder, **options)
        assert engine.generate(IDS, max_new_tokens=12).tokens == expected.tokens


@pytest.mark.parametrize("where", ["pretend:0", "cpu"])
def test_d3_accelerate_under_a_default_device(where: str) -> None:
    model, streamed = on(where, tiny.model()), list[torch.Tensor]()

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            streamed.append(value)

        def end(self) -> None:
            pass

    ids = torch.tensor([IDS], device=where)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, **options}
        torch.manual_seed(0)
        plain = model.generate(ids, **asked)
        torch.manual_seed(0)
        with default_device("pretend:1"), accelerate(model) as handle:
            fast = model.generate(ids, streamer=Streamer(), **asked)
        assert handle.last_notice is None
        assert torch.equal(plain, fast)
    assert {value.device.type for value in streamed} == {"cpu"}  # as generate() streams them


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


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_d7_a_budget_learns_from_passes_and_not_from_launches(
    engines: Both, options: dict[str, Any]
) -> None:
    """A pass whose time is taken ends in a copy of what the step reads."""
    engine = Engine(engines.device.model, drafter="copyspec(gamma=2)", budget=6)
    with pretended.counted() as seen:
        passes = engine.generate(IDS, max_new_tokens=12, **options).stats.passes
    reads = [n for (_, line), n in seen.waits.items() if line.startswith("core/reading.py")]
    assert sum(reads) == passes
