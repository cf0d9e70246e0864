"""What the scheduler brought: each test failed before it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from draftsmith.core import loop
from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.sequence import Sequence
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine.engine import Engine
from draftsmith.errors import GenerationInterrupted
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from draftsmith.testing import Scripted, ToyTarget, plain
from scripted import oracle
from work import peak_bytes

PROMPTS = [[5, 6, 7, 8] * 5, [9, 10, 11] * 6, [12, 13, 14, 15, 16] * 4]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="copyspec")


class Fails:
    """A processor that fails for sequences that begin with one token, once they are long enough."""

    def __init__(self, first: int, length: int) -> None:
        self.first = first
        self.length = length

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if int(ids[0, 0]) == self.first and ids.shape[1] >= self.length:
            raise ZeroDivisionError("the processor's own error")
        return scores


# --- nobody pays for a neighbour ------------------------------------------------------------------


def test_a_failing_processor_ends_its_own_request_only(engine: Engine) -> None:
    alone = [engine.generate(ids, max_new_tokens=20, budget=4).tokens for ids in PROMPTS]
    fails = Fails(PROMPTS[1][0], len(PROMPTS[1]) + 7)
    with pytest.raises(GenerationInterrupted, match="the processor's own error") as caught:
        engine.generate(PROMPTS, max_new_tokens=20, budget=4, processors=[fails])
    found = caught.value.partial
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert found[1].tokens == alone[1][:7]
    assert [found[0].tokens, found[2].tokens] == [alone[0], alone[2]]
    assert [found[0].finish_reason, found[2].finish_reason] == ["length", "length"]


def test_rows_hold_what_their_sessions_do_after_a_neighbours_failure() -> None:
    target = ToyTarget(20)
    sequences = [
        Sequence(
            ids,
            drafter=oracle(plain(target, ids, 20), 6),
            budget=FixedBudget(6),
            distribution=Distribution((Fails(9, 7),) if ids[0] == 9 else (), greedy=True),
            sampler=TorchSampler.seeded(0),
            vocab_size=20,
            limit=20,
        )
        for ids in ([5, 6, 7], [9, 10, 11], [12, 13])
    ]
    for sequence in sequences:
        start(sequence, target)
    with suppress(ZeroDivisionError):
        step(sequences, target)
    for sequence in (sequences[0], sequences[2]):
        assert sequence.row is not None
        assert [*sequence.row.ids, *sequence.row.pending] == sequence.ids  # type: ignore[attr-defined]


def test_threads_share_an_engine_that_learns_its_budget() -> None:
    """A batch joins from another thread just when this one looks up, for the n-th time, a cost."""
    loaded = load(tiny.model())
    for lookups in range(1, 9):
        engine = Engine(loaded, drafter="copyspec(gamma=1)", budget="auto")
        alone = engine.generate(PROMPTS[0], max_new_tokens=20).tokens
        together = [engine.submit(ids, max_new_tokens=2) for ids in PROMPTS[:2]]

        def begin(engine: Engine = engine, together: list[Any] = together) -> None:
            together += [engine.submit(ids, max_new_tokens=2) for ids in PROMPTS[:2]]

        engine.cost._passes = Interrupted(engine.cost._passes, lookups, begin)
        assert engine.generate(PROMPTS[0], max_new_tokens=20).tokens == alone
        assert [len(one.result().tokens) for one in together] == [2] * 4


class Interrupted(dict[Any, Any]):
    """Does something, once, when a key was found in it for the n-th time."""

    def __init__(self, content: dict[Any, Any], times: int, do: Callable[[], None]) -> None:
        super().__init__(content)
        self.times = times
        self.do = do

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.times -= found
        if found and not self.times:
            self.do()
        return found


# --- never in the way -----------------------------------------------------------------------------


def test_a_failing_drafter_is_reported_and_the_answer_goes_on(engine: Engine) -> None:
    wanted = engine.generate(PROMPTS[0], max_new_tokens=20, drafter="none").tokens

    def fail(ctx: Context) -> Draft:
        if len(ctx.ids) > len(PROMPTS[0]) + 4:
            raise ZeroDivisionError("the drafter's own error")
        return EMPTY

    found = engine.generate(PROMPTS[0], max_new_tokens=20, drafter=Scripted(fail), budget=4)
    assert found.tokens == wanted
    assert found.stats.drafter_failures > 0
    assert sum("the drafter's own error" in notice for notice in found.notices) == 1


def test_a_draft_model_that_gives_nan_is_no_error(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3}
    wanted = engine.generate(PROMPTS[0], drafter="none", **options).tokens
    broken = tiny.model.__wrapped__()

    def poison(_module: Any, _args: Any, output: Tensor) -> Tensor:
        return output * torch.nan

    drafter = DraftModel(broken, tokenizer=tiny.tokenizer(), confidence=0, tokens=4)
    engine.generate(PROMPTS[0], drafter=drafter, max_new_tokens=1)  # loads it while it is sound
    broken.lm_head.register_forward_hook(poison)
    found = engine.generate(PROMPTS[0], drafter=drafter, budget=4, **options)
    assert len(found.tokens) == len(wanted)
    assert found.stats.drafter_failures > 0


# --- work and memory ------------------------------------------------------------------------------


def cache_bytes(runner: Any) -> int:
    held: int = runner._memory.held()
    return held


def need(rows: int, tokens: int) -> int:
    """Bytes of keys and values of the tiny model: 2 layers, 2 heads of 16 numbers of 4 bytes."""
    return 2 * 2 * 2 * 16 * 4 * rows * tokens


def test_a_draft_models_cache_shrinks_after_a_peak() -> None:
    drafter = DraftModel(tiny.model(), tokenizer=tiny.tokenizer(), confidence=0, tokens=4)
    engine = Engine.from_pretrained(
        tiny.model(), tokenizer=tiny.tokenizer(), drafter=drafter, budget="drafter", max_batch=8
    )
    bound: Any = engine.drafter
    engine.generate([PROMPTS[0] * 20] * 8, max_new_tokens=8)
    peak = cache_bytes(bound.runner)
    for _ in range(3):
        engine.generate(PROMPTS[0], max_new_tokens=8)
    assert cache_bytes(bound.runner) < peak / 4


def test_drafters_of_one_call_are_not_kept(engine: Engine) -> None:
    seen: list[weakref.ref[Drafter]] = []
    for _ in range(200):
        drafter = Scripted(lambda _ctx: EMPTY)
        seen.append(weakref.ref(drafter))
        engine.generate(PROMPTS[0], max_new_tokens=1, drafter=drafter)
        del drafter
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 8


@pytest.mark.parametrize("how", ["usual", "cascade", "fails", "stalls", "under way"])
def test_e5_weights_of_a_draft_model_go_when_other_drafters_came(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="none")
    weights = tiny.model.__wrapped__()
    drafter: Drafter = DraftModel(weights, tokenizer=tiny.tokenizer(), tokens=3, confidence=0)
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


def test_several_answers_compute_their_prompt_once() -> None:
    model = tiny.model.__wrapped__()
    engine = Engine.from_pretrained(model, drafter="none")
    computed = 0

    def count(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal computed
        computed += (args[0] if args else kwargs["input_ids"]).numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    prompt = PROMPTS[0] * 10
    engine.generate(prompt, n=8, temperature=1.0, seed=0, max_new_tokens=4)
    assert computed <= 1.5 * len(prompt) + 8 * 4


@pytest.mark.parametrize("name", ["none", "copyspec", "draft_model"])
def test_a_steps_work_does_not_depend_on_the_context(name: str) -> None:
    """A copied list of 4,000 tokens takes 32,000 bytes; the least of six steps counts."""
    drafter: str | Drafter = name
    if name == "draft_model":
        drafter = DraftModel(
            tiny.model(context=8192), tokenizer=tiny.tokenizer(), confidence=0, tokens=4
        )
    engine = Engine.from_pretrained(
        tiny.model(context=8192), tokenizer=tiny.tokenizer(), drafter=drafter
    )

    def least(tokens: int) -> int:
        request = engine.prepare({"budget": 4, "temperature": 0.0, "max_new_tokens": 100})
        sequence = request.sequence([5 + i % 300 for i in range(tokens)])
        runner = Runner(engine.model)
        start(sequence, runner)
        for _ in range(3):
            step([sequence], runner)
        return min(peak_bytes(lambda: step([sequence], runner)) for _ in range(6))

    assert least(4_000) <= least(500) + 8_000


def test_rows_take_the_memory_they_need() -> None:
    runner = Runner(load(tiny.model()))
    rows = [runner.open([5 + i % 300 for i in range(270)]) for _ in range(9)]
    for row in rows:
        runner.prefill(row)
    runner.forward(rows, [EMPTY] * 9)
    assert cache_bytes(runner) <= 1.1 * need(9, 270) + need(9, 64)
