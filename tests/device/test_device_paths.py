"""On the pretended device every main path gives the CPU's tokens in as many passes as there."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from both import (
    BYTES,
    DRAFTERS,
    GREEDY,
    IDS,
    MANY,
    REAL,
    SAMPLED,
    SMALL,
    Both,
    mapped,
    named,
    on,
    same,
    same_accelerated,
    strictly,
)

import tiny
from architectures import TREES, build, prompt
from draftsmith import accelerate
from draftsmith.core.draft import EMPTY
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.registry import lookup, names
from draftsmith.engine.engine import Engine
from draftsmith.engine.memory import need
from draftsmith.errors import OptionError
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from draftsmith.text.grammar import Grammar

FEW = ["none", "auto", "pld_plus", "spectra(N=3, W=4, G=4)", "sdsat(k=3)",
       "draft_model(model=FOLDER, tokens=3)"]  # fmt: skip


def test_every_registered_drafter_is_tried() -> None:
    tried = {part.split("(")[0] for drafter in DRAFTERS for part in drafter.split("+")}
    elsewhere = {"cascade", "eagle3", "mtp"}  # heads need a checkpoint: tests/drafters
    assert tried | elsewhere == {n for n in names() if lookup(n).__module__.startswith("draftsm")}


@pytest.mark.parametrize(
    "drafter", [d if d in FEW else pytest.param(d, marks=pytest.mark.slow) for d in DRAFTERS]
)
def test_every_drafter(engines: Both, folder: Path, drafter: str) -> None:
    """Greedy, sampled and in a batch; with a fixed budget, since clocks decide about others."""
    options = {"drafter": named(drafter, folder), "max_new_tokens": 14, "budget": 8}
    with strictly():
        engines.generate(IDS, **options, **GREEDY)
        engines.generate(IDS, **options, **SAMPLED)
        engines.generate(MANY, **options, **GREEDY)


@pytest.mark.parametrize("drafter", ["none", "auto"])
@pytest.mark.usefixtures("simulated")
def test_batches_of_samples(engines: Both, drafter: str) -> None:
    options = {"drafter": drafter, "max_new_tokens": 12, "budget": 6}
    engines.generate(MANY, **options, **SAMPLED)
    engines.generate(IDS, n=4, **options, temperature=1.0, seed=1)


def test_noise_of_draws_is_counted_as_memory(engines: Both) -> None:
    def logits(engine: Engine, **options: Any) -> int:
        sequences = engine.prepare({"drafter": "none", "budget": 4, **options}).sequences([IDS])
        return need(sequences, engine.resources.runner).logits

    counted = logits(engines.cpu, temperature=1.0)
    assert logits(engines.device, temperature=0.0) == counted
    assert logits(engines.device, temperature=1.0) == 2 * counted
    assert logits(engines.device, temperature=1.0, seed=3) == 2 * counted


def shift(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of the caller's own."""
    return scores + (torch.arange(scores.shape[1], device=ids.device) == ids[0, -1]) * 2


@pytest.mark.parametrize("options", [
    {"budget": "drafter"},
    {"processors": shift},
    {"processors": shift} | SAMPLED,
    {"grammar": Grammar.regex("(fox|dog)+ [0-9]{3}"), "prompt": "the"},
])  # fmt: skip
def test_options(engines: Both, options: dict[str, Any]) -> None:
    prompt = options.get("prompt", IDS)
    own = {name: value for name, value in options.items() if name != "prompt"}
    engines.generate(prompt, **{"drafter": "auto", "max_new_tokens": 16, "budget": 6} | own)


def test_log_probabilities_and_ends(engines: Both) -> None:
    options = {"drafter": "auto", "budget": 6, "max_new_tokens": 16, "min_new_tokens": 4}
    free = engines.cpu.generate(IDS, **options)
    asked = options | {"stop_token_ids": (free.tokens[9],), "logprobs": True}
    cpu, device = (e.generate(IDS, **asked) for e in (engines.cpu, engines.device))
    same(cpu, device)
    assert device.logprobs == pytest.approx(cpu.logprobs, abs=1e-4)


def test_kept_prefixes(engines: Both) -> None:
    def answers(engine: Engine) -> list[Any]:
        own = Engine(engine.model)
        options = {"drafter": "auto", "max_new_tokens": 6, "budget": 6}
        return [own.generate([*IDS, 9, last], **options) for last in (4, 5, 4)]

    found = same(answers(engines.cpu), answers(engines.device))
    assert [r.stats.reused_tokens > 0 for r in found] == [False, True, True]


def test_what_a_generation_config_asks(device: str) -> None:
    model = copy.deepcopy(tiny.model())
    model.generation_config.update(
        bad_words_ids=[[7], [8, 9]], no_repeat_ngram_size=3, suppress_tokens=[11],
        sequence_bias=[[[12], 1.5]], begin_suppress_tokens=[6], forced_eos_token_id=2,
    )  # fmt: skip
    both = Both(Engine.from_pretrained(model), Engine.from_pretrained(on(device, model)))
    both.generate(IDS, drafter="auto", max_new_tokens=16, budget=6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["other", "target on the CPU"])
@pytest.mark.parametrize("algorithm", ["standard", "union", "tli", "slem", "slrs", "reproducible"])
def test_draft_models_anywhere(
    engines: Both, device: str, second: str, algorithm: str, kind: str
) -> None:
    small, tokenizer = copy.deepcopy(tiny.model()), tiny.tokenizer()
    if algorithm != "standard":
        tokenizer = tiny.tokenizer(BYTES if algorithm == "slrs" else SMALL)
        small.resize_token_embeddings(len(tokenizer))
    place = second if kind == "other" else device
    target = engines.cpu if kind == "target on the CPU" else engines.device

    own = {"algorithm": "tli", "reproducible": True}
    own = own if algorithm == "reproducible" else {"algorithm": algorithm}
    options: Any = {"confidence": 0, "tokens": 3} | own
    expected, drafter = (
        DraftModel(on(where, small), tokenizer=tokenizer, **options) for where in ("cpu", place)
    )

    texts = ["def foo(x): return x + 1", "the quick brown fox jumps over the lazy dog"]
    for more in (GREEDY, {"temperature": 0.9, "seed": 4}):
        options = {"max_new_tokens": 12, "budget": "drafter", **more}
        cpu = engines.cpu.generate(texts, drafter=expected, **options)
        with strictly():
            same(cpu, target.generate(texts, drafter=drafter, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20, "repetition_penalty": 1.1},
        {"do_sample": False, "no_repeat_ngram_size": 3, "output_scores": True,
         "return_dict_in_generate": True},
    ],
    ids=["greedy", "sampled", "scores"],
)  # fmt: skip
def test_accelerate(device: str, options: dict[str, Any]) -> None:
    """As `generate` on that device does, streams included, and with the CPU's pass count."""
    passes, streamed = [], list[torch.Tensor]()
    streamer = SimpleNamespace(put=streamed.append, end=lambda: None)
    for where in ("cpu", device):
        model, ids = on(where, tiny.model()), torch.tensor([IDS], device=where)
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, **options}
        torch.manual_seed(0)
        plain = model.generate(ids, **asked)
        torch.manual_seed(0)
        with strictly(), accelerate(model, "auto", budget=6) as handle:
            fast = model.generate(ids, streamer=streamer, **asked)
        assert handle.last_notice is None
        assert handle.stats is not None
        assert not handle.stats.drafter_failures
        passes.append(handle.stats.passes)
        if options.get("output_scores"):
            torch.testing.assert_close(
                torch.cat(fast.scores), torch.cat(plain.scores), atol=1e-4, rtol=1e-3
            )
            plain, fast = plain.sequences, fast.sequences
        assert fast.device == ids.device
        assert torch.equal(plain, fast)
    assert {value.device.type for value in streamed} == {"cpu"}  # as generate() streams them
    if not (REAL and options["do_sample"]):
        assert passes[0] == passes[1] < 16


@pytest.mark.filterwarnings("ignore::draftsmith.integrations.transformers.NotAcceleratedWarning")
def test_a_model_that_was_moved_since(device: str) -> None:
    for before, after in (("cpu", device), (device, "cpu")):
        model = on(before, tiny.model())
        engine = Engine(model, drafter="none")
        with accelerate(model) as handle:
            model.to(after)
            ids = torch.tensor([IDS], device=after)
            asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6}
            found = model.generate(ids, do_sample=False, **asked)
            assert handle.last_notice == (
                f"the model was moved from {before} to {after} after it was loaded; "
                "call accelerate again"
            )
        assert torch.equal(found, model.generate(ids, do_sample=False, **asked))
        with pytest.raises(OptionError, match=f"moved from {before} to {after} .* load it again"):
            engine.generate(IDS, max_new_tokens=2)


def test_accelerate_a_padded_batch(device: str) -> None:
    model = on(device, tiny.model())
    ids = torch.tensor([[0] * 5 + IDS[:12], IDS[:17]], device=device)
    options = {"attention_mask": (ids != 0).long(), "do_sample": False}
    same_accelerated(model, model, ids, [options])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_parts_of_a_long_prompt(device: str, name: str) -> None:
    """They are wide enough for torch's causal kernels, where no window ends."""
    model, outputs = build(name, max_position_embeddings=1024), []
    for place in ("cpu", device):
        runner = Runner(load(on(place, model)))
        runner.chunk = 200
        row = runner.open(prompt(601))
        runner.prefill(row)
        (output,) = runner.forward([row], [EMPTY])
        outputs.append(output.logits.cpu())
    torch.testing.assert_close(*outputs)


@pytest.fixture(scope="module")
def spread(device: str, second: str) -> Both:
    """The tiny model on the CPU, and over both devices."""
    cpu = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    model = mapped(tiny.model(), device, second)
    return Both(cpu, Engine.from_pretrained(model, tokenizer=tiny.tokenizer()))


def test_d2_a_device_map_packs(spread: Both) -> None:
    found = spread.device.model.capabilities
    assert (found.shape, found.attention, found.cache) == ("tree", "draftsmith", "packed")


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_d2_other_architectures_pack_over_either_order_of_devices(
    device: str, second: str, name: str
) -> None:
    model = build(name)
    expected = Engine.from_pretrained(model)
    for places in ((device, second), (second, device)):
        engine = Engine.from_pretrained(mapped(model, *places))
        assert engine.model.capabilities.packed == expected.model.capabilities.packed
        Both(expected, engine).generate(MANY, drafter="auto", max_new_tokens=12, budget=8)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [d for d in DRAFTERS if d.startswith(("pld_plus", "auto"))])
def test_a_device_map(spread: Both, folder: Path, drafter: str) -> None:
    options = {"drafter": named(drafter, folder), "max_new_tokens": 16, "budget": 8}
    spread.generate(IDS, **options, **GREEDY)
    spread.generate(IDS, **options, **SAMPLED)
    spread.generate([IDS, IDS[:20]], **options, **GREEDY)


def test_a_device_map_keeps_prefixes(spread: Both) -> None:
    options = {"drafter": "auto", "max_new_tokens": 6, "budget": 6}
    spread.generate([*IDS, 9, 4], **options)
    (found,) = spread.generate([*IDS, 9, 5], **options)
    assert found.stats.reused_tokens


def test_accelerate_over_a_device_map(device: str, second: str) -> None:
    model = mapped(tiny.model(), device, second)
    ids = torch.tensor([IDS], device=device)
    sampling = ({"do_sample": False}, {"do_sample": True, "repetition_penalty": 1.1})
    same_accelerated(model, model, ids, sampling)


FEW = ("qwen2", "gemma3_text", "gpt_oss", "falcon", "deepseek_v3", "gpt_neo", "qwen3_next")
"""Architectures that differ most in what their passes compute."""


@pytest.mark.parametrize("name", FEW)
def test_every_architecture(device: str, name: str) -> None:
    model = build(name)
    cpu = Engine.from_pretrained(model)
    with strictly():
        there = Engine.from_pretrained(on(device, model))
        expected = cpu.model.capabilities
        if REAL and expected.reasons:  # where packing fails, it fails at another place
            expected = replace(expected, reasons=there.model.capabilities.reasons)
        assert there.model.capabilities == expected
        drafter = "auto" if name in TREES else "copyspec(gamma=2)"
        options = {"drafter": drafter, "max_new_tokens": 14, "budget": 8}
        same(cpu.generate(IDS, **options), there.generate(IDS, **options))
        same(cpu.generate(MANY, **options), there.generate(MANY, **options))
