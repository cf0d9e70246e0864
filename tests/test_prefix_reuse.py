"""Which prompts are read again: those that begin like an earlier one are not, where that can be."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from architectures import ALL, RECURRENT, build, prompt
from draftsmith import accelerate
from draftsmith.engine.engine import Engine
from draftsmith.model.load import load

WINDOW = 32
SLIDING = ("mistral", "starcoder2", "gemma2", "gemma3_text", "cohere2", "gpt_oss")
STATES = ("lfm2", "qwen3_next", "falcon_h1", "mamba2")
"""Recurrent ones that verify chains."""
AGAIN = re.compile(r"\b(read|computed) again\b")


def engine_of(name: str, **options: Any) -> Engine:
    changed = {"sliding_window": WINDOW} if name in SLIDING else {}
    if "max_position_embeddings" in ALL[name]:
        changed["max_position_embeddings"] = 1024
    return Engine(load(build(name, **changed)), drafter="copyspec(gamma=2)", **options)


def alone(engine: Engine, ids: list[int], **options: Any) -> list[int]:
    """The answer of an engine that keeps nothing."""
    found: list[int] = (
        Engine(engine.model, prefixes=0, drafter="none").generate(ids, **options).tokens
    )
    return found


@pytest.mark.parametrize("name", ["llama", *SLIDING])
def test_e10_prompts_that_share_their_beginning(name: str) -> None:
    engine, shared = engine_of(name), prompt(300)
    explained = engine.model.capabilities.explain()
    windows = name != "llama" and engine.model.capabilities.packed
    assert any(map(AGAIN.search, explained)) is windows
    for number in range(3):
        ids = [*shared, *prompt(12, 20 + number)]
        answer = engine.generate(ids, max_new_tokens=40)
        assert answer.stats.reused_tokens >= (300 if number else 0)
        assert answer.tokens == alone(engine, ids, max_new_tokens=40)


@pytest.mark.parametrize("name", [*SLIDING, *STATES])
def test_e10_the_same_prompt_is_read_once(name: str) -> None:
    engine, ids = engine_of(name), prompt(150)
    wanted = alone(engine, ids, max_new_tokens=50)
    for number in range(4):
        answer = engine.generate(ids, max_new_tokens=50)
        assert answer.stats.reused_tokens == (149 if number else 0)
        assert answer.tokens == wanted


@pytest.mark.parametrize("name", [*SLIDING, *STATES])
def test_e10_longer_and_other_prompts_in_turn(name: str) -> None:
    """What goes on from a prompt, what goes on from its answer, and what begins otherwise."""
    engine, first = engine_of(name), prompt(100)
    answer = engine.generate(first, max_new_tokens=60)
    whole = [*answer.prompt_tokens, *answer.tokens]
    for ids, least in (
        ([*first, *prompt(30, 7)], 99),
        (prompt(90, 8), 0),
        ([*whole, *prompt(5, 9)], 0),
        (first, 0),
        (first[:60], 0),
    ):
        found = engine.generate(ids, max_new_tokens=20)
        assert found.stats.reused_tokens >= least
        assert found.tokens == alone(engine, ids, max_new_tokens=20)


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_e10_prompts_in_one_call_and_chunks(name: str) -> None:
    engine = engine_of(name, max_batch=4)
    engine.resources.runner.chunk = 50
    prompts = [[*prompt(120), *prompt(9, 30 + n)] for n in range(3)] * 2
    for _ in range(2):
        found = engine.generate(prompts, max_new_tokens=15)
        assert [one.tokens for one in found] == [
            alone(engine, ids, max_new_tokens=15) for ids in prompts
        ]


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_e10_kept_prompts_count_as_memory(name: str) -> None:
    engine = engine_of(name)
    engine.generate(prompt(200), max_new_tokens=40)
    (kept,) = engine.resources.prefixes._kept
    held = engine.resources.runner.store.mark_bytes(kept.row)
    assert held > 0
    assert kept.bytes >= held + engine.resources.runner.row_bytes(kept.row.cached, False)


@pytest.mark.parametrize("name", RECURRENT)
def test_e10_a_prompt_is_reused_or_it_is_said_why_not(name: str) -> None:
    """Nobody is told where nothing is to be kept."""
    engine, ids = engine_of(name), prompt(80)
    assert any(map(AGAIN.search, engine.model.capabilities.explain()))
    engine.generate(ids, max_new_tokens=30)
    again = engine.generate(ids, max_new_tokens=30)
    said = [notice for notice in again.notices if AGAIN.search(notice)]
    assert (again.stats.reused_tokens == 79) is (name in STATES)
    assert bool(said) is (name not in STATES)
    third = engine.generate(ids, max_new_tokens=30)
    assert not any(AGAIN.search(notice) for notice in third.notices), "said once"
    silent = Engine(engine.model, prefixes=0, drafter="none")
    for _ in range(2):
        assert not any(AGAIN.search(n) for n in silent.generate(ids, max_new_tokens=2).notices)


def test_e10_a_prompt_that_parts_long_before_the_end() -> None:
    engine, shared = engine_of("mistral"), prompt(60)
    engine.resources.runner.chunk = 64
    engine.generate([*shared, *prompt(400, 7)], max_new_tokens=5)
    ids = [*shared, *prompt(400, 8)]
    other = engine.generate(ids, max_new_tokens=5)
    assert other.tokens == alone(engine, ids, max_new_tokens=5)
    assert other.stats.reused_tokens == 0
    assert any("Layers with a window" in notice for notice in other.notices)


@pytest.mark.parametrize(
    ("drafter", "last"), [("pld_plus", 300), ("pld_plus(rank=attention, heads=((0, 1),))", 0)]
)
def test_e10_states_are_copied_attention_is_not_and_that_is_said(drafter: str, last: int) -> None:
    engine, shared = engine_of("llama"), prompt(300)
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": 5}
    for tail, reused in ((12, 0), (12, 300), (320, 300), (321, last)):
        found = engine.generate([*shared, *prompt(tail, 20 + tail + reused)], **options)
        assert found.stats.reused_tokens == reused
        assert any(AGAIN.search(said) for said in found.notices) is (tail > 12 and not reused)


@pytest.mark.parametrize("fused", [False, True])
def test_training_between_answers(fused: bool) -> None:
    """Fused optimizers, which `Trainer` uses, write to weights without counting versions."""
    engine, ids = engine_of("llama"), prompt(150)
    model = engine.model.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    other = torch.nn.Linear(4, 4)
    others = torch.optim.SGD(other.parameters(), lr=0.02)
    with accelerate(model, prepack=True):
        for _ in range(3):
            wanted = alone(Engine(load(copy.deepcopy(model))), ids, max_new_tokens=12)
            for again in (False, True):
                answer = engine.generate(ids, max_new_tokens=12)
                other(torch.ones(4)).sum().backward()
                others.step()  # of another model
                assert answer.tokens == wanted
                assert (answer.stats.reused_tokens > 0) is again
            accelerated = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
            assert accelerated[0, 150:].tolist() == wanted
            model.train()
            model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
