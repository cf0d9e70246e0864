"""What engines hold and how much they compute: threads, broken drafters, memory, work per step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import Tensor

import tiny
from draftsmith.core import loop
from draftsmith.core.draft import EMPTY
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine.engine import Engine
from draftsmith.model.runner import Runner
from draftsmith.testing import Scripted
from heap import young_heap
from work import peak_bytes

PROMPTS = [[5, 6, 7, 8] * 5, [9, 10, 11] * 6]


def draft_model(model: Any, tokens: int = 4) -> DraftModel:
    return DraftModel(model, tokenizer=tiny.tokenizer(), confidence=0, tokens=tokens)


def test_a_draft_model_that_gives_nan_is_no_error() -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3}
    wanted = engine.generate(PROMPTS[0], drafter="none", **options).tokens
    broken = tiny.model.__wrapped__()

    def poison(_module: Any, _args: Any, output: Tensor) -> Tensor:
        return output * float("nan")

    drafter = draft_model(broken)
    engine.generate(PROMPTS[0], drafter=drafter, max_new_tokens=1)  # loads it while it is sound
    broken.lm_head.register_forward_hook(poison)
    found = engine.generate(PROMPTS[0], drafter=drafter, budget=4, **options)
    assert len(found.tokens) == len(wanted)
    assert found.stats.drafter_failures > 0


def test_a_draft_models_cache_shrinks_with_the_number_of_answers() -> None:
    drafter = draft_model(tiny.model())
    engine = Engine.from_pretrained(
        tiny.model(), tokenizer=tiny.tokenizer(), drafter=drafter, budget="drafter", max_batch=8
    )
    memory = engine.drafter.runner.store  # type: ignore[attr-defined]
    held = list[int]()
    drafted = engine.drafter.draft

    def watched(*args: Any) -> Any:
        made = drafted(*args)
        held.append(memory.held())
        return made

    object.__setattr__(engine.drafter, "draft", watched)
    engine.generate([PROMPTS[0] * 10] * 7 + [PROMPTS[0]], max_new_tokens=8)
    assert max(held) > 0
    assert memory.held() == 0


@young_heap()
@pytest.mark.parametrize("how", ["cascade", "fails", "stalls", "under way"])
def test_e5_weights_of_a_draft_model_go_when_other_drafters_came(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="none")
    weights = tiny.model.__wrapped__()
    drafter: Drafter = draft_model(weights, tokens=3)
    if how == "cascade":
        drafter = Cascade((Scripted(lambda _ctx: EMPTY), drafter))
    engine.generate(PROMPTS[0], max_new_tokens=12, drafter=drafter)
    if how == "fails":
        weights.forward = None
        result = engine.generate(PROMPTS[0], max_new_tokens=12, drafter=drafter, budget=3)
        assert result.stats.drafter_failures == 1
    if how == "stalls":
        with monkeypatch.context() as patched:
            patched.setattr(loop, "LONGEST_DRAFT", -1e9)
            result = engine.generate(PROMPTS[0], max_new_tokens=12, drafter=drafter, budget=3)
        assert result.stats.drafter_failures == 1
        assert any("DrafterStalled" in notice for notice in result.notices)
    going = engine.stream(PROMPTS[0], max_new_tokens=12, drafter=drafter)
    next(going)
    gone = weakref.ref(weights)
    del drafter, weights
    for _ in range(8):
        engine.generate(PROMPTS[0], max_new_tokens=2, drafter=Scripted(lambda _ctx: EMPTY))
    if how == "under way":
        list(going)  # what it takes is recorded still
    del going
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["copyspec", "draft_model"])
def test_a_steps_work_does_not_depend_on_the_context(name: str) -> None:
    """A copied list of 4,000 tokens takes 32,000 bytes; the least of six steps counts."""
    model = tiny.model(context=8192)
    drafter = draft_model(model) if name == "draft_model" else name
    engine = Engine.from_pretrained(model, tokenizer=tiny.tokenizer(), drafter=drafter)

    def least(tokens: int) -> int:
        request = engine.prepare({"budget": 4, "temperature": 0.0, "max_new_tokens": 100})
        sequence = request.sequence([5 + i % 300 for i in range(tokens)])
        runner = Runner(engine.model)
        start(sequence, runner)
        for _ in range(3):
            step([sequence], runner)
        return min(peak_bytes(lambda: step([sequence], runner)) for _ in range(6))

    assert least(4_000) <= least(500) + 8_000
