"""Many callers, one runner: each gets what it gets alone, whoever fails, leaves or interrupts."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from architectures import build, prompt
from draftsmith.core.budget import CostCurve, FixedBudget
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, SamplingParams
from draftsmith.core.session import Session
from draftsmith.engine.engine import Engine
from draftsmith.engine.jobs import Job
from draftsmith.engine.scheduler import Scheduler
from draftsmith.errors import GenerationInterrupted, OptionError
from draftsmith.integrations.transformers import accelerate
from draftsmith.model.load import load
from draftsmith.testing import (
    Enumerated,
    Scripted,
    ToyTarget,
    assert_same_distribution,
    enumerate_distribution,
    exact_distribution,
)
from replica import check_cache
from scripted import random_trees

MODELS = ["llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_next", "falcon_alibi"]
"""Packed ones, a mixture of experts, a recurrent one, and one that stays padded."""

DRAFTERS: list[Any] = [
    "none", "copyspec(gamma=1)", "prompt_lookup", "auto", "spectra", "pld_plus",
    random_trees(1, nodes=7), random_trees(2, nodes=5, probes=2),
]  # fmt: skip


@cache
def loaded(name: str) -> Any:
    model = build(name).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    return load(model)


def engine_of(name: str, **options: Any) -> Engine:
    return Engine(loaded(name), drafter="none", budget=5, **options)


def job_of(engine: Engine, ids: list[int], **options: Any) -> Job:
    return engine.prepare(options).job(ids)


def asked(rng: random.Random, longest: int) -> tuple[list[int], dict[str, Any]]:
    """A random request: its prompt and its options."""
    length = rng.choice([1, 2, 5, 20, longest // 3, longest])
    ids = [rng.randrange(3, 40) for _ in range(length)]
    options: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 24), "temperature": 0.0}
    if rng.random() < 0.5:
        options |= {"temperature": 0.9, "top_k": 30, "seed": rng.randrange(1000)}
    if rng.random() < 0.3:
        options["repetition_penalty"] = 1.2
    return ids, options


# --- equality -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("requests", [14, pytest.param(64, marks=pytest.mark.slow)])
def test_each_answer_is_the_one_it_has_alone(name: str, requests: int) -> None:
    """Random arrivals and aborts, eight drafters at once, prompts in chunks."""
    rng = random.Random(name)
    engine, alone = engine_of(name, max_batch=6), engine_of(name, prefixes=0)
    scheduler, running, done = engine.scheduler, list[Job](), list[Job]()
    scheduler.runner.chunk = 32
    expected: dict[int, list[int]] = {}
    leaving: dict[int, int] = {}
    steps = 0
    while len(done) < requests:
        while len(running) + len(done) < requests and (not running or rng.random() < 0.4):
            ids, options = asked(rng, 150)
            plain = alone.generate(ids, drafter="none", **options).tokens
            job = job_of(engine, ids, drafter=rng.choice(DRAFTERS), **options)
            expected[id(job)] = plain
            leaving[id(job)] = rng.randrange(3, 20) if rng.random() < 0.2 else 1 << 30
            scheduler.add(job)
            running.append(job)
        scheduler.step()
        steps += 1
        scheduler.abort([job for job in running if job.session.generated >= leaving[id(job)]])
        if steps % 16 == 0 and name != "gemma3_text":  # which forgets what its window has left
            for job in scheduler._active:
                check_cache(scheduler.runner, job.session.row, job.session.ids)
        done += [job for job in running if job.done]
        running = [job for job in running if not job.done]
    for job in done:
        tokens, plain = job.result().tokens, expected[id(job)]
        assert tokens == (plain[: len(tokens)] if job.session.finish_reason is None else plain)
        assert job.session.error is None
        assert job.session.drafter_error is None
    assert not scheduler._jobs


def test_threads_share_an_engine() -> None:
    engine, alone = engine_of("llama", max_batch=3), engine_of("llama", prefixes=0)
    rng = random.Random(5)
    requests = [asked(rng, 100) for _ in range(12)]
    expected = [alone.generate(ids, **options).tokens for ids, options in requests]
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        ids, options = requests[number]
        if number % 2:
            found[number] = engine.generate(ids, drafter="auto", budget="auto", **options).tokens
        else:
            job = job_of(engine, ids, drafter="copyspec", **options)
            for _ in engine.scheduler.drive([job]):
                pass
            found[number] = job.result().tokens

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(12)] == expected


class Sampling(Scripted):
    """A token drawn from a distribution that is not the target's, or nothing."""

    sampled = True

    def __init__(self) -> None:
        super().__init__(self._propose)

    def _propose(self, ctx: Context) -> Draft:
        q = torch.tensor([0.3, 0.7], dtype=torch.float64)
        return Draft.chain([ctx.sampler.draw(q)], "sampling", [q]) if ctx.budget else Draft()


def test_drafters_that_sample_keep_the_distribution_in_a_batch_of_three() -> None:
    target = ToyTarget(2, order=1)
    prompts = [[0], [1], [1, 0]]

    def answers(sampler: Enumerated) -> tuple[tuple[int, ...], ...]:
        running = [
            Session(
                ids, drafter=Sampling(), budget=FixedBudget(1),
                distribution=Distribution((), greedy=False), sampler=sampler, vocab_size=2,
                limit=2, sampling=SamplingParams(temperature=1.0),
            )
            for ids in prompts
        ]  # fmt: skip
        for session in running:
            session.context.sampler = sampler
            start(session, target)
        while left := [session for session in running if not session.finished]:
            step(left, target)
        return tuple(tuple(s.ids[s.prompt_length :]) for s in running)

    each = [exact_distribution(target, ids, 2) for ids in prompts]
    exact = {
        (a, b, c): p * q * r for (a, p), (b, q), (c, r) in product(*(one.items() for one in each))
    }
    assert_same_distribution(enumerate_distribution(answers), exact)


# --- isolation ------------------------------------------------------------------------------------


class Raises:
    """A stop rule or a processor that raises at its n-th call."""

    def __init__(self, error: BaseException, calls: int) -> None:
        self.error, self.left = error, calls

    def __call__(self, _first: Any, scores: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise self.error
        return scores if self.as_processor else None

    as_processor = False


class RaisesInScores(Raises):
    as_processor = True


def failing_drafter(calls: int) -> Scripted:
    left = [calls]

    def propose(ctx: Context) -> Draft:
        left[0] -= 1
        if left[0] <= 0:
            raise ZeroDivisionError("out of ideas")
        return Draft.chain([ctx.ids[-1]][: ctx.budget], "failing")

    return Scripted(propose)


def batch_of_eight(engine: Engine, first: dict[str, Any]) -> list[Job]:
    """Eight jobs, the third of which has the options `first`."""
    jobs = []
    for number in range(8):
        own = first if number == 2 else {"drafter": DRAFTERS[number]}
        jobs.append(job_of(engine, [5 + number, 6, 7, 5 + number, 6], max_new_tokens=16, **own))
    return jobs


@pytest.mark.parametrize("how", ["processor", "stop rule", "drafter", "nan", "abort"])
@pytest.mark.parametrize("when", [1, 4, 9])
def test_who_fails_fails_alone(how: str, when: int) -> None:
    engine = engine_of("llama", max_batch=8)
    alone = [engine_of("llama").generate([5 + n, 6, 7, 5 + n, 6], max_new_tokens=16).tokens
             for n in range(8)]  # fmt: skip
    error, options = ZeroDivisionError("its own"), dict[str, Any]()
    if how == "processor":
        options = {"processors": [RaisesInScores(error, when)]}
    elif how == "drafter":
        options = {"drafter": failing_drafter(when)}
    elif how == "nan":
        own = {"temperature": 1.0, "seed": 3, "min_new_tokens": 16}
        options = {"processors": [nan_from(5 + when)], **own}
    jobs = batch_of_eight(engine, options)
    broken = jobs[2].session
    if how == "stop rule":
        broken.stop_rules += (Raises(error, when),)
    for job in jobs:
        engine.scheduler.add(job)
    while not all(job.done for job in jobs):
        engine.scheduler.step()
        if how == "abort" and broken.generated >= when:
            engine.scheduler.abort([jobs[2]])
    for number, job in enumerate(jobs):
        if number != 2:
            assert job.result().tokens == alone[number]
            assert job.result().finish_reason == "length"
    result = jobs[2].result()
    if how == "drafter":
        assert result.tokens == alone[2]
        assert result.stats.drafter_failures == 1
        assert any("out of ideas" in notice for notice in result.notices)
    elif how == "abort":
        assert result.finish_reason == "cancelled"
        assert result.tokens == alone[2][: len(result.tokens)]
        assert len(result.tokens) >= when
    else:
        assert result.finish_reason == "error"
        expected = when if how == "stop rule" else when - 1 if how == "processor" else when
        assert len(result.tokens) == expected
        assert len(result.sources) == expected
        if how != "nan":
            assert broken.error is error
            assert result.tokens == alone[2][:expected]
    rows = engine.scheduler.runner._memory._rows  # type: ignore[attr-defined]
    assert len(rows) == len(engine.scheduler.prefixes)


def nan_from(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, scores: scores * torch.nan if ids.shape[1] >= length else scores


@pytest.mark.parametrize("whose", ["own", "neighbour's"])
@pytest.mark.parametrize("when", [1, 5, 16])
def test_ctrl_c_ends_what_its_caller_asked_for_and_nothing_else(whose: str, when: int) -> None:
    """It may strike while somebody else's tokens are settled: these go on, too."""
    engine = engine_of("llama", max_batch=8)
    alone = [engine_of("llama").generate([5 + n, 6, 7, 5 + n, 6], max_new_tokens=16).tokens
             for n in range(8)]  # fmt: skip
    jobs = batch_of_eight(engine, {})
    struck = jobs[2 if whose == "own" else 5]
    asked: list[int] = []
    last = lambda session, _: asked.append(session.generated)  # noqa: E731
    struck.session.stop_rules += (Raises(KeyboardInterrupt(), when), last)
    for job in jobs:
        if job is not jobs[2]:
            engine.scheduler.add(job)
    with pytest.raises(KeyboardInterrupt):
        for _ in engine.scheduler.drive([jobs[2]]):
            pass
    assert jobs[2].done
    cancelled = jobs[2].result()
    assert cancelled.finish_reason == "cancelled"
    assert cancelled.tokens == alone[2][: len(cancelled.tokens)]
    while not all(job.done for job in jobs):
        engine.scheduler.step()
    for number, job in enumerate(jobs):
        if number != 2:
            assert job.result().tokens == alone[number]
            assert job.session.stats.tokens == len(job.result().sources) == 16
    if whose != "own":
        assert asked == list(range(1, 17)), "every rule was asked about every token, once"


def test_an_error_of_the_model_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is made again without drafts, then with smaller chunks, then without the newest."""
    engine, alone = engine_of("llama"), engine_of("llama")
    engine.scheduler.runner.chunk = 128
    runner, forward = engine.scheduler.runner, engine.scheduler.runner.forward
    most = 40

    def narrow(rows: Any, drafts: Any, take: Any = None) -> Any:
        if sum(take) + sum(map(len, drafts)) > most:
            raise MemoryError("no room for so many positions")
        return forward(rows, drafts, take)

    monkeypatch.setattr(runner, "forward", narrow)
    prompts = [prompt(100, 1), prompt(90, 2), prompt(3, 3)]
    expected = [alone.generate(ids, max_new_tokens=8).tokens for ids in prompts]
    found = engine.generate(prompts, max_new_tokens=8, drafter=random_trees(1, nodes=30), budget=60)
    assert [one.tokens for one in found] == expected
    most = 2
    with pytest.raises(GenerationInterrupted, match="no room for so many") as caught:
        engine.generate([[5], [6], [7]], max_new_tokens=8)
    assert [one.finish_reason for one in caught.value.partial] == ["length", "length", "error"]
    most = 0
    with pytest.raises(MemoryError):
        engine.generate([5, 6, 7], max_new_tokens=8)
    most = 1000
    assert engine.generate(prompts[0], max_new_tokens=8).tokens == expected[0]


def test_an_accelerated_model_serves_threads_and_raises_what_callbacks_raise() -> None:
    model = build("llama").double()
    inputs = [torch.tensor([[5 + n, 6, 7, 5 + n, 6]]) for n in range(4)]
    wanted = [model.generate(ids, max_new_tokens=12).tolist() for ids in inputs]
    found: dict[int, Any] = {}

    class Fails:
        def put(self, _tokens: Tensor) -> None:
            self.puts = getattr(self, "puts", 0) + 1
            if self.puts == 5:
                raise ZeroDivisionError("the streamer's own")

        def end(self) -> None:
            pass

    def ask(number: int) -> None:
        streamer = Fails() if number == 2 else None
        try:
            found[number] = model.generate(inputs[number], max_new_tokens=12, streamer=streamer)
        except ZeroDivisionError as error:
            found[number] = error

    with accelerate(model, "copyspec(gamma=1)"):
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert isinstance(found[2], ZeroDivisionError)
    assert [found[n].tolist() for n in (0, 1, 3)] == [wanted[n] for n in (0, 1, 3)]


@pytest.mark.parametrize("requests", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_row_leaks(requests: int) -> None:
    engine, rng = engine_of("llama", max_batch=4), random.Random(1)
    scheduler, running = engine.scheduler, list[Job]()
    for number in range(requests):
        ids, options = asked(rng, 60)
        job = job_of(engine, ids, drafter=rng.choice(["copyspec", failing_drafter(3)]), **options)
        if number % 5 == 0:
            job.session.stop_rules += (Raises(ValueError("own"), rng.randrange(1, 9)),)
        if number % 7 == 0:
            job.session.stop_rules += (Raises(KeyboardInterrupt(), rng.randrange(1, 9)),)
        scheduler.add(job)
        running.append(job)
        for _ in range(rng.randrange(4)):
            try:
                scheduler.step()
            except KeyboardInterrupt:
                scheduler.abort(rng.sample(running, 1))
        running = [job for job in running if not job.done]
    while scheduler._jobs:
        with suppress(KeyboardInterrupt):
            scheduler.step()
    rows = scheduler.runner._memory._rows  # type: ignore[attr-defined]
    assert len(rows) == len(scheduler.prefixes) <= 8


# --- whose turn it is -----------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = engine_of("llama")
    engine.scheduler.runner.chunk = 16
    long, middle, short = (job_of(engine, prompt(n, n), max_new_tokens=4) for n in (220, 100, 10))
    engine.scheduler.add(long)
    engine.scheduler.step()
    for job in (middle, short):
        engine.scheduler.add(job)
    engine.scheduler.step()
    assert short.session.generated == 1
    assert middle.session.row.cached == 6
    for _ in range(8):
        engine.scheduler.step()
    assert middle.session.row.cached > 64
    assert long.session.reading, "they take turns"


def test_chunks_beside_rows_that_decode_are_bounded() -> None:
    cost = CostCurve()
    for width in (0, 64):
        cost.at(2).record(width, 1 + width / 50)
    scheduler = Scheduler(loaded("llama"), cost, 4)
    assert scheduler._room(0) == 512
    assert scheduler._room(2) == 32  # 1 + 32/50 passes
    cost.at(3).record(0, 1.0)
    cost.at(3).record(64, 100.0)
    assert scheduler._room(3) == 16


def test_a_paused_stream_goes_on_while_others_drive() -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    with engine.stream("hello world", max_new_tokens=12) as stream:
        first = next(stream)
        engine.generate("this is a test", max_new_tokens=20)
        assert len(stream.result.tokens) == 12
        assert [first.token, *(piece.token for piece in stream)] == stream.result.tokens


def test_a_callback_may_ask_the_same_engine() -> None:
    engine = engine_of("llama")
    wanted = engine.generate([7, 8], max_new_tokens=3).tokens
    inner: list[list[int]] = []

    def asks(_ids: Tensor, scores: Tensor) -> Tensor:
        inner.append(engine.generate([7, 8], max_new_tokens=3).tokens)
        return scores

    engine.generate([5, 6], max_new_tokens=2, processors=[asks])
    assert inner == [wanted] * 2


def test_a_callers_autocast_is_its_own() -> None:
    engine = Engine(load(build("llama")), drafter="none", prefixes=0)
    plain = engine.generate([5, 6, 7], max_new_tokens=6, logprobs=True)
    with torch.autocast("cpu", torch.bfloat16):
        job = job_of(engine, [5, 6, 7], max_new_tokens=6, logprobs=True)
        cast = engine.generate([5, 6, 7], max_new_tokens=6, logprobs=True)
    assert plain.logprobs != cast.logprobs
    engine.scheduler.add(job)
    again = engine.generate([5, 6, 7], max_new_tokens=6, logprobs=True)
    while not job.done:
        engine.scheduler.step()
    assert again.logprobs == plain.logprobs
    assert job.result().logprobs == cast.logprobs


# --- memory and prefixes --------------------------------------------------------------------------


def test_memory_is_kept() -> None:
    model = loaded("llama")
    memory = model.row_bytes(300)
    engine = engine_of("llama", memory=memory)
    with pytest.raises(OptionError, match=r"needs [\d,]+ bytes .* memory="):
        engine.generate(prompt(200), max_new_tokens=200)
    jobs = [job_of(engine, prompt(60, n), max_new_tokens=20) for n in range(5)]
    for job in jobs:
        engine.scheduler.add(job)
    while not all(job.done for job in jobs):
        engine.scheduler.step()
        assert len(engine.scheduler._active) <= 2
        assert engine.scheduler.runner._memory.held() <= 1.2 * memory  # type: ignore[attr-defined]


class Counted:
    """How many tokens a model computes."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tokens += (args[0] if args else kwargs["input_ids"]).numel()


def test_a_prefix_is_computed_once() -> None:
    model = build("llama")
    engine = Engine(load(model), drafter="none")
    counted, shared = Counted(model), prompt(150)

    def new(ids: list[int], **options: Any) -> int:
        before = counted.tokens
        result = engine.generate(ids, max_new_tokens=4, **options)
        fresh = Engine(engine.model, drafter="none", prefixes=0)
        spent = counted.tokens - before
        assert result.tokens == fresh.generate(ids, max_new_tokens=4).tokens
        return spent

    assert new([*shared, 5, 6, 7]) == 153 + 3
    assert new([*shared, 8, 9]) == 2 + 3
    assert new([*shared, 8, 9], cache_salt="mine") == 152 + 3
    assert new([*shared, 8, 9], drafter="pld_plus") == 152 + 3, (
        "its hidden states were not recorded"
    )
    with torch.autocast("cpu", torch.bfloat16):
        engine.generate([*shared, 8, 9], max_new_tokens=1)
    assert engine.generate([*shared, 8, 9], max_new_tokens=1).stats.reused_tokens == 151
    with torch.no_grad():
        model.lm_head.weight.mul_(1.0)
    assert new([*shared, 8, 9]) == 152 + 3


def test_prefixes_are_shared_while_they_are_in_use() -> None:
    model = build("llama")
    engine = Engine(load(model), drafter="none")
    counted, shared = Counted(model), prompt(150)
    prompts = [[*shared, n] for n in range(5, 12)]
    found = engine.generate(prompts, max_new_tokens=5)
    assert counted.tokens <= 150 + 7 * 6
    alone = Engine(engine.model, drafter="none", prefixes=0)
    assert [r.tokens for r in found] == [
        alone.generate(p, max_new_tokens=5).tokens for p in prompts
    ]


def test_a_chat_computes_every_token_once() -> None:
    model = tiny.model.__wrapped__()
    engine = Engine.from_pretrained(model, tokenizer=tiny.tokenizer(), drafter="none")
    counted, chat = Counted(model), engine.chat(max_new_tokens=6)
    for turn in range(10):
        answer = chat.send(f"the quick brown fox {turn}")
        ids = [*answer.prompt_tokens, *answer.tokens]
    again = sum(1 for _ in ids) - counted.tokens
    assert answer.stats.reused_tokens > 0.8 * answer.stats.prompt_tokens
    # What the template writes otherwise than the model did is computed again: little.
    assert abs(again) < 0.25 * len(ids)


def test_kept_rows_are_few() -> None:
    engine = engine_of("llama", prefixes=3)
    for n in range(6):
        engine.generate(prompt(40, n), max_new_tokens=2)
    assert len(engine.scheduler.prefixes) == 3
    assert engine.generate(prompt(40, 5), max_new_tokens=2).stats.reused_tokens == 39
    assert engine.generate(prompt(40, 0), max_new_tokens=2).stats.reused_tokens == 0
