"""How often the host waits for the device in each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pretended
import pytest
from both import IDS, on

from architectures import build, prompt
from draftsmith.engine.engine import Engine

PROMPTS = [prompt(20 + 3 * i, i) for i in range(8)]
SHORT, LONG = 8, 40
"""Lengths of two answers; their difference leaves out what happens once for each request."""


def engine(device: str, layers: int, name: str = "llama") -> Engine:
    """A model whose answers do not end, with blocks of logits that are searched first."""
    model = build(name, num_hidden_layers=layers, eos_token_id=None, vocab_size=1024)
    return Engine.from_pretrained(on(device, model))


def per_pass(
    engine: Engine, ids: Sequence[Any], **options: Any
) -> tuple[int, Counter[tuple[str, str]]]:
    """Return the passes between two lengths of an answer, and their waits by line."""
    counts = []
    for length in (SHORT, SHORT, LONG):  # the first time warms up
        with pretended.counted() as seen:
            found = engine.generate(ids, max_new_tokens=length, **options)
        results = found if isinstance(found, list) else [found]
        assert not any(result.notices for result in results)
        counts.append((max(result.stats.passes for result in results), seen))
    (few, before), (many, after) = counts[1:]
    return many - few, after.waits - before.waits


ARMS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "a drafted chain": {"drafter": "copyspec(gamma=2)", "budget": 8},
    "a drafted tree": {"drafter": "auto", "budget": 8},
    "auto": {"drafter": "auto"},
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("arm", ARMS)
def test_a_greedy_pass_waits_once(device: str, arm: str, rows: int) -> None:
    """For the copy of what the step reads, of all rows together."""
    ids = IDS if rows == 1 else PROMPTS
    passes, waits = per_pass(engine(device, 2), ids, **ARMS[arm])
    assert {why for why, _ in waits} == {"copy to the host"}
    assert {line.split(":")[0] for _, line in waits} == {"core/reading.py"}
    assert waits.total() == passes


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "phi3"])
def test_other_architectures_wait_once(device: str, name: str) -> None:
    """Without experts: transformers waits for each of these itself."""
    found = Engine.from_pretrained(on(device, build(name, eos_token_id=None)))
    passes, waits = per_pass(found, IDS, drafter="copyspec(gamma=2)", budget=4)
    assert waits.total() == passes


def test_a_sampled_pass_waits_once_more_for_each_token(device: str) -> None:
    """The walk draws on the device, and the host follows it."""
    options = {"temperature": 0.8, "top_k": 40, "seed": 1}
    passes, waits = per_pass(engine(device, 2), IDS, drafter="none", **options)
    assert waits.total() == 2 * passes


def test_banned_ids_wait_no_longer(device: str) -> None:
    model = build("llama", eos_token_id=None)
    model.generation_config.suppress_tokens = [7, 9]
    found = Engine.from_pretrained(on(device, model))
    passes, waits = per_pass(found, PROMPTS, **ARMS["a drafted tree"])
    assert waits.total() == passes
