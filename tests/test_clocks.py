"""Clocks begin when a call is made and end with its last token, whoever shares its passes."""

from __future__ import annotations

import copy
import threading
from time import perf_counter
from typing import Any

import pytest
import torch

import tiny
from draftsmith.core.stats import Stats, total
from draftsmith.engine.call import Stream
from draftsmith.engine.engine import Engine
from draftsmith.engine.result import GenerationResult
from draftsmith.integrations.transformers import accelerate
from draftsmith.text.grammar import Grammar
from scripted import binding

PROMPT = "the quick brown fox"
WAIT = 0.1
"""Seconds that something takes at least; no test asks how long anything takes at most."""


def pause() -> None:
    threading.Event().wait(WAIT)


def slow_down(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> None:
    """Let a method pause before it begins."""
    own = getattr(holder, name)
    monkeypatch.setattr(holder, name, lambda *given, **named: (pause(), own(*given, **named))[1])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="none")


# --- E7: wall time by answer, shares in sums ------------------------------------------------------


def test_e7_the_rate_of_an_answer_is_the_one_that_its_caller_saw(engine: Engine) -> None:
    begin = perf_counter()
    found = engine.generate([f"{PROMPT} {n}" for n in range(8)], max_new_tokens=16)
    waited = perf_counter() - begin
    for result in found:
        stats = result.stats
        assert stats.tokens_per_second == stats.tokens / stats.wall_seconds
        assert stats.wall_seconds <= waited
        assert stats.tokens_per_second >= stats.tokens / waited
    last = max(found, key=lambda result: result.stats.wall_seconds)
    shares = sum(result.stats.seconds.total for result in found)
    assert shares <= last.stats.wall_seconds
    assert all(r.stats.wall_seconds >= r.stats.seconds.total for r in found)


def test_e7_a_sum_counts_a_shared_pass_once(engine: Engine) -> None:
    found = [r.stats for r in engine.generate([PROMPT, f"{PROMPT} jumps"], max_new_tokens=16)]
    whole = total(found)
    shares = sum(stats.seconds.total for stats in found)
    assert whole.wall_seconds == pytest.approx(shares)
    assert whole.tokens_per_second == pytest.approx(whole.tokens / shares)
    assert total(found[:1]).wall_seconds == found[0].wall_seconds
    assert total([]).tokens_per_second == Stats().tokens_per_second == 0


def test_e7_accelerated_models_count_alike() -> None:
    model = copy.deepcopy(tiny.model())
    with accelerate(model, "none") as handle:
        ids = torch.tensor([[5, 6, 7]])
        for prompts in (ids, ids.repeat(4, 1)):
            begin = perf_counter()
            model.generate(prompts, max_new_tokens=8)
            waited = perf_counter() - begin
            assert handle.stats is not None
            assert 0 < handle.stats.wall_seconds <= waited
            assert handle.stats.tokens_per_second >= handle.stats.tokens / waited


# --- E8: clocks begin with the call ---------------------------------------------------------------


def read(stream: Stream) -> GenerationResult:
    list(stream)
    return stream.result


ENTRIES: dict[str, Any] = {
    "generate": lambda engine, **options: engine.generate(PROMPT, **options),
    "stream": lambda engine, **options: read(engine.stream(PROMPT, **options)),
    "chat": lambda engine, **options: engine.chat().send(PROMPT, **options),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_e8_binding_a_drafter_and_reading_a_prompt_are_in_the_time(
    entry: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, type(engine.model.tokenizer), "__call__")
    slow = binding(pause)  # as one that loads a model
    stats = ENTRIES[entry](engine, drafter=slow, max_new_tokens=3).stats
    assert stats.first_token_seconds >= 2 * WAIT
    assert stats.wall_seconds >= stats.first_token_seconds


def test_e8_compiling_a_grammar_and_preparing_inputs_is_in_the_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, engine.model.grammars, "compile")
    stats = engine.generate(PROMPT, grammar=Grammar.regex("[a-z]{3}")).stats
    assert stats.first_token_seconds >= WAIT
    model = copy.deepcopy(tiny.model())
    with accelerate(model, "none") as handle:
        slow_down(monkeypatch, model, "_prepare_generation_config")
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
        assert handle.stats is not None
        assert handle.stats.first_token_seconds >= WAIT


def test_e8_waiting_for_other_answers_is_in_the_time(engine: Engine) -> None:
    first, second = engine.stream(PROMPT, max_new_tokens=4), engine.stream(PROMPT, max_new_tokens=4)
    next(first)
    pause()
    list(second)
    assert second.result.stats.first_token_seconds >= WAIT
