"""The first promise: greedy output equals transformers' `generate`, token for token in float32."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import ALL, build, prompt
from draftsmith.core.drafter import Drafter
from draftsmith.engine.call import Call
from draftsmith.engine.engine import Engine
from draftsmith.lab.bench.suites import read, sample
from draftsmith.model.load import load
from installed import bare_names
from scripted import adversary, oracle, random_trees

TIE = 1e-5
"""Two best logits closer than this may fall either way; counted apart, never called equal."""


def reference(model: Any, ids: list[int], length: int, ends: list[int] | None = None) -> list[int]:
    """What transformers' own greedy `generate` answers."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=length,
        pad_token_id=0,
        **({} if ends is None else {"eos_token_id": ends}),
    )
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def is_tie(model: Any, ids: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Whether the first difference is between logits that are equal but for rounding."""
    at = next(i for i, (a, b) in enumerate(zip([*ours, -1], [*theirs, -1], strict=False)) if a != b)
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *theirs[:at]]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    return best - second < TIE


def compare(
    engine: Engine, prompts: list[list[int]], length: int, drafters: list[str], alone: int = 1
) -> int:
    """Assert equality for every drafter on every prompt; returns the number of ties.

    Each answers every `alone`-th prompt by itself; at the others all share their passes.
    """
    model = engine.model.model
    ties = 0
    for seed, ids in enumerate(prompts):
        expected = reference(model, ids, length)
        special: dict[str, Drafter] = {
            "always wrong": adversary(expected),
            "always right": oracle(expected),
            "random trees": random_trees(seed, nodes=12, near=expected),
            "random trees with probes": random_trees(seed, nodes=6, probes=3, near=expected),
        }
        options = {"max_new_tokens": length, "budget": 16, "temperature": 0.0}
        asked = {
            name: engine.prepare(options | {"drafter": special.get(name, name)}).sequences([ids])
            for name in [*drafters, *special]
        }
        together = [list(chain.from_iterable(asked.values()))]
        for sequences in asked.values() if seed % alone == 0 else together:
            with Call(engine.resources, sequences) as call:
                call.run()
        for name, (sequence,) in asked.items():
            tokens = sequence.result().tokens
            if tokens != expected:
                assert is_tie(model, ids, tokens, expected), f"{name}: prompt {seed}"
                ties += 1
    return ties


def random_prompts(vocab: int, count: int) -> list[list[int]]:
    """Noise with repeats inside, of many lengths, so that copying drafters act."""
    generator = torch.Generator().manual_seed(3)
    prompts = []
    for n in range(count):
        noise = torch.randint(3, vocab, (4 + 2 * n,), generator=generator).tolist()
        prompts.append([*noise, *noise[: 3 + n // 2]])
    return prompts


FEW = ["auto", "copyspec", "lookahead"]
"""Drafters that try another architecture of a shape that all drafters have tried."""


@pytest.mark.parametrize("name", ALL)
def test_architectures(name: str) -> None:
    """Random prompts with a tiny random model of each architecture.

    What a drafter does depends on the target's shape only: all try one of trees and one of chains.
    """
    engine = Engine.from_pretrained(build(name))
    every = name in ("llama", "bloom")
    prompts = random_prompts(90, 8)[:: 1 if every else 2]
    ties = compare(engine, prompts, 24, bare_names() if every else FEW, alone=2)
    assert ties <= 2, f"{ties} ties are too many to be luck"


def spec_bench(engine: Engine, data: Path, of_each: int, length: int) -> list[list[int]]:
    """The last `length` ids of `of_each` prompts of each task."""
    records = sample(read(data / "prompts" / "spec_bench.jsonl").records, of_each)
    first = [list(record.messages) for record in records if record.turn == 1]
    assert len(first) == 6 * of_each
    return [engine.prepare({}).encode(messages)[-length:] for messages in first]


@pytest.mark.slow
def test_builtin_model_on_24_prompts(shared_data: Path) -> None:
    engine = Engine.from_pretrained("edit-7m", dtype="float32")
    prompts = spec_bench(engine, shared_data, 4, 600)
    assert compare(engine, prompts, 24, bare_names(), alone=6) <= 2


@pytest.mark.slow
def test_smollm2_on_spec_bench(smollm2: str, shared_data: Path) -> None:
    """On laid-out layers; docs/lab-notes has the run over 48."""
    engine = Engine.from_pretrained(smollm2, dtype="float32")
    prompts = spec_bench(engine, shared_data, 1, 400)
    assert compare(engine, prompts, 16, ["copyspec", "prompt_lookup", "auto"], alone=3) <= 1


def test_windows_that_a_model_masks_by_slot_hold_for_drafts_and_batches() -> None:
    """GPT-Neo's, wider than the texts of the self-test."""
    engine = Engine(load(build("gpt_neo", window_size=64)))
    prompts = [prompt(length, seed=length) for length in (20, 90, 130)]
    expected = [reference(engine.model.model, ids, 40) for ids in prompts]
    for drafter in (random_trees(1, nodes=12), "longest_match"):
        found = engine.generate(prompts, max_new_tokens=40, drafter=drafter, budget=12)
        assert [one.tokens for one in found] == expected
