"""Many callers, one runner: each gets what it gets alone, whoever fails, leaves or interrupts."""

from __future__ import annotations

import gc
import random
import threading
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import tiny
from architectures import build, prompt
from draftsmith.core import loop
from draftsmith.core.cost import RecordedCost
from draftsmith.core.draft import Draft
from draftsmith.core.loop import start, step
from draftsmith.core.sequence import Sequence
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.engine import memory as engine_memory
from draftsmith.engine.call import Call
from draftsmith.engine.chunked_prefill import PATIENCE, ChunkedPrefill
from draftsmith.engine.engine import Engine
from draftsmith.engine.memory import need
from draftsmith.engine.scheduler import Scheduler
from draftsmith.engine.sequence import TextSequence
from draftsmith.errors import GenerationInterrupted, OptionError
from draftsmith.integrations.transformers import Observer, accelerate
from draftsmith.model import packed
from draftsmith.model.load import load
from draftsmith.model.runner import Runner
from draftsmith.testing import Scripted
from draftsmith.text.tokenizer import TextStream
from faults import Raises
from replica import check_cache, contents
from scripted import oracle, random_trees
from work import peak_bytes

MODELS = ["llama", "qwen3", "gemma3_text", "gemma3n_text", "gpt2", "mixtral", "qwen3_next",
          "falcon", "falcon_alibi"]  # fmt: skip
"""Packed ones, two of them with windows and one with shared keys, a mixture of experts, a recurrent
one, and two that cannot pack."""

CONTEXT = 4096

DRAFTERS: list[Any] = [
    "none", "copyspec(gamma=1)", "prompt_lookup", "auto", "spectra(W=3)", "pld_plus",
    random_trees(1, nodes=7), random_trees(2, nodes=5, probes=2),
]  # fmt: skip


@cache
def loaded(name: str) -> Any:
    longest = "n_positions" if name == "gpt2" else "max_position_embeddings"
    model = build(name, **{longest: CONTEXT}).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    return load(model)


def engine_of(name: str, **options: Any) -> Engine:
    return Engine(loaded(name), drafter="none", budget=5, **options)


class Driver(Scheduler):
    """A scheduler whose sequences are turned into answers after each pass."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.resources)

    def add(self, sequence: TextSequence) -> None:
        self.resources.check(sequence)
        super().add(sequence)

    def step(self) -> list[TextSequence]:
        served = super().step()
        for sequence in served:
            sequence.book()
        return served

    def serve(self, sequences: abc.Iterable[TextSequence]) -> None:
        """Run sequences, and all that were added before, to their ends."""
        for sequence in sequences:
            self.add(sequence)
        while self.unfinished:
            self.step()


def job_of(engine: Engine, ids: list[int], **options: Any) -> TextSequence:
    return engine.prepare(options).sequence(ids)


def asked(
    rng: random.Random, longest: int, length: int | None = None
) -> tuple[list[int], dict[str, Any]]:
    """A random request: its prompt and its options."""
    length = length or rng.choice([1, 2, 5, 20, longest // 3, rng.randint(1, longest), longest])
    ids = [rng.randrange(3, 40) for _ in range(length)]
    options: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 24), "temperature": 0.0}
    if rng.random() < 0.5:
        options |= {"temperature": 0.9, "top_k": 30, "seed": rng.randrange(1000)}
    if rng.random() < 0.3:
        options["repetition_penalty"] = 1.2
    return ids, options


# --- equality -------------------------------------------------------------------------------------


MANY: list[Any] = [(name, 14, 150, ()) for name in MODELS]
MANY += [pytest.param("gemma3_text", 40, 600, (5, 20), marks=pytest.mark.slow)]  # and 3,000 tokens


@pytest.mark.parametrize(("name", "requests", "longest", "long"), MANY)
def test_each_answer_is_the_one_it_has_alone(
    name: str, requests: int, longest: int, long: abc.Sequence[int]
) -> None:
    """Random arrivals and aborts, eight drafters at once, prompts in chunks, two of 3,000 tokens;
    every 16th step the caches of all (at most eight) that have a row are compared with new ones."""
    rng = random.Random(name)
    cost = RecordedCost({0: 1.0, 64: 1.5})  # so that chunks do not depend on the clock
    engine, alone = engine_of(name, max_batch=8, cost=cost), engine_of(name, prefixes=0)
    scheduler, running, done = Driver(engine), list[TextSequence](), list[TextSequence]()
    scheduler.runner.chunk = 32 if longest < 600 else 256
    expected: dict[int, list[int]] = {}
    leaving: dict[int, int] = {}
    steps = compared = 0
    while len(done) < requests:
        while len(running) + len(done) < requests and (not running or rng.random() < 0.4):
            number = len(running) + len(done)
            ids, options = asked(rng, longest, 3000 if number in long else None)
            plain = alone.generate(ids, drafter="none", **options).tokens
            sequence = job_of(engine, ids, drafter=DRAFTERS[number % 8], **options)
            expected[id(sequence)] = plain
            leaving[id(sequence)] = rng.randrange(3, 20) if rng.random() < 0.2 else 1 << 30
            scheduler.add(sequence)
            running.append(sequence)
        scheduler.step()
        steps += 1
        left = [sequence for sequence in running if sequence.generated >= leaving[id(sequence)]]
        for sequence in left:
            scheduler.abort(sequence)
        for sequence in scheduler.running if steps % 16 == 0 else ():
            check_cache(scheduler.runner, sequence.row, sequence.ids)
            compared += 1
        done += [sequence for sequence in running if sequence.finished or sequence in left]
        running = [sequence for sequence in running if sequence not in done]
    for sequence in done:
        tokens, plain = sequence.result().tokens, expected[id(sequence)]
        assert tokens == (plain[: len(tokens)] if sequence.finish_reason is None else plain)
        assert sequence.error is None
        assert sequence.drafter_error is None
    assert not scheduler.unfinished
    assert not engine.resources.admitted
    assert compared >= requests // 4


def test_threads_share_an_engine() -> None:
    engine, alone = engine_of("llama", max_batch=3), engine_of("llama", prefixes=0)
    rng = random.Random(5)
    requests = [asked(rng, 100) for _ in range(12)]
    expected = [alone.generate(ids, **options).tokens for ids, options in requests]

    def ask(number: int) -> list[int]:
        ids, options = requests[number]
        if number % 2:
            found: list[int] = engine.generate(ids, drafter="auto", budget="auto", **options).tokens
            return found
        sequence = job_of(engine, ids, drafter="copyspec", **options)
        with Call(engine.resources, [sequence]) as call:
            call.run()
        return sequence.result().tokens

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == expected


def test_threads_share_an_accelerated_model() -> None:
    model = build("llama").double()
    inputs = [torch.tensor([[5 + n, 6, 7, 5 + n, 6]]) for n in range(4)]

    def ask(ids: Tensor) -> Any:
        return model.generate(ids, max_new_tokens=12).tolist()

    wanted = list(map(ask, inputs))
    with accelerate(model, "copyspec(gamma=1)"), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, inputs)) == wanted


# --- isolation ------------------------------------------------------------------------------------


def failing_drafter(calls: int) -> Scripted:
    fails = Raises(ZeroDivisionError("out of ideas"), calls)
    return Scripted(lambda ctx: fails(ctx, Draft.chain([ctx.ids[-1]][: ctx.budget], "failing")))


EIGHT = [[5 + n, 6, 7, 5 + n, 6] for n in range(8)]


@cache
def alone_of_eight() -> list[list[int]]:
    """What plain decoding answers to each of `EIGHT`."""
    engine = engine_of("llama", prefixes=0)
    return [engine.generate(ids, max_new_tokens=16).tokens for ids in EIGHT]


def batch_of_eight(engine: Engine, third: dict[str, Any]) -> list[TextSequence]:
    """A sequence for each of `EIGHT`, the third with options of its own."""
    options = [{"drafter": drafter} for drafter in DRAFTERS]
    options[2] = third
    return [
        job_of(engine, ids, max_new_tokens=16, **own)
        for ids, own in zip(EIGHT, options, strict=True)
    ]


def watched(put: Callable[[Tensor], None]) -> Observer:
    """The stop rule by which `accelerate` streams: it hands `put` every token."""
    config = SimpleNamespace(
        return_dict_in_generate=False, output_scores=False, output_logits=False
    )
    return Observer(lambda *_: torch.tensor([False]), SimpleNamespace(put=put), config)


@pytest.mark.parametrize(
    "how", ["processor", "stop rule", "streamer", "text", "drafter", "nan", "abort"]
)
def test_who_fails_fails_alone(how: str) -> None:
    engine, alone, when = engine_of("llama", max_batch=8), alone_of_eight(), 6
    error = ZeroDivisionError("its own")
    fails = Raises(error, when, rule=True)
    options: dict[str, Any] = {
        "processor": {"processors": [Raises(error, when)]},
        "drafter": {"drafter": failing_drafter(when)},
        "nan": {
            "processors": [nan_from(5 + when)],
            "temperature": 1.0,
            "seed": 3,
            "min_new_tokens": 16,
        },
    }.get(how, {})
    sequences = batch_of_eight(engine, options)
    broken = sequences[2]
    if how == "stop rule":
        broken.stop_rules += (fails,)
    elif how == "streamer":
        broken.stop_rules += (watched(lambda ids: fails(ids, None)),)
    elif how == "text":  # what `Engine.stream` makes of the tokens
        stumbles = Raises(error, 6 * when)
        letters = SimpleNamespace(decode=lambda ids, **_: stumbles(ids, "a" * len(ids)))
        broken.stream = TextStream(letters)
        broken.stop_rules += (broken.stream,)
    scheduler = Driver(engine)
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.unfinished:
        scheduler.step()
        if how == "abort" and broken.generated >= when:
            scheduler.abort(broken)
    result = broken.result()
    for sequence, expected in zip(sequences, alone, strict=True):
        if sequence is not broken:
            assert sequence.result().tokens == expected
            assert sequence.result().finish_reason == "length"
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
        count = len(result.tokens) if how == "text" else when - (how == "processor")
        assert len(result.tokens) == len(result.sources) == count > (how == "text")
        if how != "nan":
            assert broken.error is error
            assert result.tokens == alone[2][:count]
    rows = engine.resources.runner.store._rows  # type: ignore[attr-defined]
    assert len(rows) == len(engine.resources.prefixes)


def test_a_stream_may_be_closed_while_another_thread_waits_for_its_next_piece() -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    within, closed = threading.Event(), threading.Event()

    def waits(_ids: Tensor, scores: Tensor) -> Tensor:
        within.set()
        closed.wait(300)
        return scores

    chat = engine.chat(max_new_tokens=20)
    stream, read = chat.stream("hello world", processors=[waits]), list[Any]()
    reader = threading.Thread(target=lambda: read.extend(stream), daemon=True)
    reader.start()
    try:
        assert within.wait(300)
        stream.close()
        with pytest.raises(OptionError, match="wait until it has ended"):
            chat.send("and now")  # what came of the answer is not known yet
    finally:
        closed.set()
        reader.join(300)
    assert [piece.token for piece in read] == stream.result.tokens
    assert len(read) == 1
    assert stream.result.finish_reason == "cancelled"
    chat.send("and now")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


@pytest.mark.failing_passes
@pytest.mark.parametrize("drafter", ["none", "copyspec(gamma=1)"])
def test_a_row_that_the_model_cannot_compute_fails_alone(drafter: str) -> None:
    """Its logits are not finite: nothing can be drawn from them."""
    live, bad = build("llama").double(), 90
    with torch.no_grad():
        live.get_input_embeddings().weight[bad] = torch.nan
        live.lm_head.weight[bad] = live.lm_head.weight[bad - 1]
    engine = Engine(load(live), drafter=drafter, budget=5, max_batch=8)
    options: dict[str, Any] = {"max_new_tokens": 12, "logit_bias": {bad: -1e9}}
    alone = [engine.generate([5 + n, 6, 7, 5 + n, 6], **options).tokens for n in range(8)]
    sequences = [job_of(engine, [5 + n, 6, 7, 5 + n, 6], **options) for n in range(8)]
    own = {"temperature": 1.0, "seed": 1} | options
    sequences[3] = job_of(engine, [8, 6, bad, 8, 6], **own)
    Driver(engine).serve(sequences)
    failed = sequences.pop(3)
    assert failed.result().finish_reason == "error"
    assert isinstance(failed.error, Exception)
    del alone[3]
    assert [sequence.result().tokens for sequence in sequences] == alone


def nan_from(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, scores: scores * torch.nan if ids.shape[1] >= length else scores


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_is_dropped_gives_its_row_back_at_once(chat: bool) -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    gc.disable()
    try:
        for _ in (engine.chat() if chat else engine).stream("hello world"):
            break
        assert not engine.resources.admitted
    finally:
        gc.enable()


@pytest.mark.failing_passes
def test_an_error_of_the_model_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is made again without drafts, then with smaller chunks, then without the newest."""
    engine, alone = engine_of("llama"), engine_of("llama")
    engine.resources.runner.chunk = 128
    runner, forward = engine.resources.runner, engine.resources.runner.forward
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


def test_a_row_that_cannot_be_kept_is_nobodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    runner: Any = engine.resources.runner

    fails = Mock(side_effect=MemoryError("no room for a buffer of its own"))
    monkeypatch.setattr(runner, "unshare", fails)
    closed, own = list[Any](), Sequence.close_drafter
    monkeypatch.setattr(Sequence, "close_drafter", lambda self: (closed.append(self), own(self)))
    prompts = [prompt(40, n) for n in range(3)]
    for result in engine.generate(prompts, max_new_tokens=4):
        assert any("no room for a buffer of its own" in said for said in result.notices)
    assert len(closed) == 3
    assert not engine.resources.prefixes
    assert not runner.store._rows


@pytest.mark.parametrize("step", ["copy", "extend", "mark"])
def test_a_beginning_that_cannot_be_reused_is_nobodys_error(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begin = engine_of("llama", prefixes=4), prompt(60)
    prompts = [[*begin, *prompt(5, n), *prompt(90 if step == "copy" else 3, n)] for n in range(3)]
    plain = [engine_of("llama").generate(ids, max_new_tokens=4).tokens for ids in prompts]
    runner: Any = engine.resources.runner
    engine.generate(prompts[0], max_new_tokens=4)
    monkeypatch.setattr(runner, step, Mock(side_effect=MemoryError("no room for it")))
    found = [engine.generate(ids, max_new_tokens=4) for ids in prompts[1:]]
    assert [one.tokens for one in found] == plain[1:]
    assert any("no room for it" in said for one in found for said in one.notices)
    assert len(runner.store._rows) == len(engine.resources.prefixes)


def test_work_between_passes_survives_an_interrupt() -> None:
    turns, done = engine_of("llama").resources.turns, list[int]()

    def work() -> None:
        done.append(1)
        if len(done) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.between(work)
    turns.between(lambda: None)
    assert len(done) == 2


def test_a_kept_row_holds_no_attention_of_rows_beside_it() -> None:
    engine = engine_of("llama", prefixes=4)
    drafter = "pld_plus(rank=attention, heads=((0, 1),))"
    engine.generate(prompt(60), n=3, drafter=drafter, max_new_tokens=6, temperature=1.0)
    kept = [one.row for one in engine.resources.prefixes._kept]
    assert kept
    assert all(row.taps.show(row.root).attention is None for row in kept)


def test_no_row_leaks() -> None:
    """Neither rows nor bytes, and no pass is wider than it may be."""
    engine, rng = engine_of("llama", max_batch=4), random.Random(1)
    scheduler, running = Driver(engine), list[TextSequence]()
    for number in range(50):
        ids, options = asked(rng, 60)
        drafter = rng.choice(["copyspec", failing_drafter(3)])
        sequence = job_of(engine, ids, drafter=drafter, **options)
        if number % 5 == 0:
            sequence.stop_rules += (Raises(ValueError("own"), rng.randrange(1, 9), rule=True),)
        if number % 3 == 0:
            fails = Raises(ValueError("the streamer's"), rng.randrange(1, 20))
            sequence.stop_rules += (watched(lambda ids, fails=fails: fails(ids, None)),)
        scheduler.add(sequence)
        running.append(sequence)
        for _ in range(rng.randrange(4)):
            scheduler.step()
            assert len(scheduler.running) <= 4  # max_batch
        running = [sequence for sequence in running if not sequence.finished]
        if number % 7 == 0 and running:
            scheduler.abort(rng.choice(running))
    scheduler.serve([])
    memory: Any = scheduler.runner.store
    kept = engine.resources.prefixes._kept
    assert memory._rows == {one.row for one in kept}
    assert len(kept) == len(engine.resources.prefixes) <= 8
    tokens = sum(one.row.cached + 64 for one in kept)
    assert memory.held() <= 1.1 * loaded("llama").row_bytes(tokens)


# --- whose turn it is -----------------------------------------------------------------------------


def reading() -> tuple[Engine, Driver]:
    """An engine that reads sixteen tokens of prompts in a pass, and its scheduler."""
    engine = engine_of("llama")
    engine.resources.runner.chunk = 16
    return engine, Driver(engine)


@pytest.mark.parametrize("read", [1, 13])
def test_a_short_prompt_does_not_wait_for_a_long_one(read: int) -> None:
    """However much of it is read."""
    engine, scheduler = reading()
    long, middle, short = (job_of(engine, prompt(n, n), max_new_tokens=4) for n in (220, 100, 10))
    scheduler.add(long)
    for _ in range(read):
        scheduler.step()
    scheduler.add(middle)
    scheduler.add(short)
    scheduler.step()
    assert short.generated == 1
    assert not long.generated
    if read == 1:
        assert middle.row.cached == 6
        for _ in range(9):  # in one of them no prompt is read, to know what a pass takes
            scheduler.step()
        assert middle.row.cached > 64
        assert not long.generated


def test_short_prompts_do_not_pass_a_long_one_for_ever() -> None:
    engine, scheduler = reading()
    long, steps = job_of(engine, prompt(220, 0), max_new_tokens=1), 0
    scheduler.add(long)
    while not long.generated:
        scheduler.add(job_of(engine, prompt(40, 1 + steps), max_new_tokens=1))
        scheduler.step()
        steps += 1
    before = 220 // 16 - 40 // 16  # those of them that come so soon are due before it
    assert steps == pytest.approx((220 + 40 * before) / 16, abs=4)


def test_parts_of_prompts_grow_as_far_as_patience_goes() -> None:
    chunks = ChunkedPrefill()
    assert chunks.room(0, 3, 512) == 512, "nobody waits for it"
    assert chunks.room(2, 1, 512) == 0, "one pass tells what passes take without"
    chunks.record(2, 0, 1.0)
    assert chunks.room(2, 1, 512) == 16, "what its tokens cost is not known yet"
    taken = []
    for decoding, waiting in [(2, 1)] * 6 + [(7, 1), (2, 12)]:
        for _ in range(8):
            read = chunks.room(decoding, waiting, 512)
            chunks.record(decoding, read, 1 + read / 100)
        taken.append(read)
    assert taken[:6] == pytest.approx([100 * (PATIENCE + 1 / 2)] * 6, abs=1)
    assert taken[6] == pytest.approx(100 * (PATIENCE + 1 / 7), abs=1), "known of two rows"
    assert taken[7] == pytest.approx(min(512, 100 * (PATIENCE + 12 / 2)), abs=1)


def test_what_passes_take_is_measured_again_but_one_slow_pass_says_nothing() -> None:
    chunks = ChunkedPrefill()
    found = []
    for n, seconds in enumerate([1.0] * 200 + [4.0] * 600):
        found.append(chunks.room(3, 1, 512))
        chunks.record(3, found[-1], (50 if n == 100 else seconds) + found[-1] / 100)
    assert found.count(0) == pytest.approx(800 / 65, abs=1)
    assert found[102] == found[190] == pytest.approx(100 * (PATIENCE + 1 / 3), abs=2)
    assert found[-1] == pytest.approx(400 * (PATIENCE + 1 / 3), abs=8), "as it takes now"


def test_a_result_in_the_midst_of_a_pass_is_cut_at_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As another thread sees it: at every token, and before the drafter learns from them."""
    tokenizer = tiny.tokenizer()
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tokenizer, drafter="none")
    ids, options = tokenizer.encode("hello world"), {"max_new_tokens": 12, "logprobs": True}
    answer = engine.generate(ids, **options).tokens
    asked = engine.prepare(options | {"drafter": oracle(answer, 4), "budget": 4})
    sequence, seen = asked.sequence(ids, streaming=True), list[Any]()
    sequence.stop_rules += (lambda *_: seen.append(sequence.result()),)
    real = loop.learn

    def learn(*given: Any) -> None:
        seen.append(sequence.result())
        real(*given)

    monkeypatch.setattr(loop, "learn", learn)
    Driver(engine).serve([sequence])
    assert [piece.token for piece in sequence.pieces] == answer
    assert sequence.stats.passes < len(answer)
    for one in seen:
        assert one.tokens == answer[: len(one.tokens)]
        assert one.text == tokenizer.decode(one.tokens, skip_special_tokens=True)
        assert len(one.sources) == len(one.origins) == len(one.logprobs) == len(one.tokens)
        assert one.finish_reason == "cancelled"
    assert max(len(one.tokens) for one in seen) > 1
    assert sequence.result().finish_reason == "length"


def test_a_callers_autocast_is_its_own() -> None:
    engine = Engine(load(build("llama")), drafter="none", prefixes=0)
    plain = engine.generate([5, 6, 7], max_new_tokens=6, logprobs=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast = engine.generate([5, 6, 7], max_new_tokens=6, logprobs=True)
    assert plain.logprobs != cast.logprobs
    again = engine.generate([5, 6, 7], max_new_tokens=6, logprobs=True)
    assert again.logprobs == plain.logprobs


# --- memory and prefixes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon"])
def test_memory_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment, also while a buffer grows and the old one is still there."""
    model, peak = loaded(name), 0
    memory = 2 * model.row_bytes(600)
    engine = engine_of(name, memory=memory)
    scheduler = Driver(engine)
    with pytest.raises(OptionError, match=r"\(rows [\d,]+, .*logits.* to 3000 new tokens"):
        engine.generate(prompt(200), max_new_tokens=3000)

    def held() -> int:
        runner: Any = scheduler.runner
        if model.capabilities.packed:
            return int(runner.store.held())
        rows = [sequence.row for sequence in scheduler.running if sequence.row]
        rows += [kept.row for kept in engine.resources.prefixes._kept]
        pairs = [pair for row in rows if row.cached for pair in contents(runner, row)]
        return sum(keys.nbytes + values.nbytes for keys, values in pairs)

    own = packed.regroup

    def grown(*args: Any) -> Any:
        nonlocal peak
        wider = own(*args)
        new = {one.keys.data_ptr(): one.keys.nbytes + one.values.nbytes for one in wider}
        peak = max(peak, held() + sum(new.values()))
        return wider

    monkeypatch.setattr(packed, "regroup", grown)
    lengths = [200, 60, 60, 60, 60, 9, 130, 60]
    sequences = [job_of(engine, prompt(n, i), max_new_tokens=60, drafter=DRAFTERS[i])
            for i, n in enumerate(lengths)]  # fmt: skip
    most = 0
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.unfinished:
        scheduler.step()
        peak, most = max(peak, held()), max(most, len(scheduler.running))
    assert peak <= memory
    assert peak > memory / 4, "the limit is no excuse for leaving most of it alone"
    assert most > 1


@pytest.mark.parametrize(
    ("name", "later"),
    [(name, torch.float32) for name in [*MODELS, "falcon_mqa", "deepseek_v3"]]
    + [(name, torch.bfloat16) for name in ("llama", "gemma3_text")],
)
def test_a_row_is_counted_as_large_as_it_is(name: str, later: torch.dtype) -> None:
    model = build("falcon", multi_query=True) if name == "falcon_mqa" else build(name)
    engine = Engine.from_pretrained(model, drafter="none")
    model.to(later)
    sequence = job_of(engine, prompt(20), max_new_tokens=2)
    scheduler = Driver(engine)
    scheduler.add(sequence)
    scheduler.step()
    row: Any = sequence.row
    if not engine.model.capabilities.packed:
        pairs = [(one.keys, one.values) for one in row.state.layers if hasattr(one, "keys")]
    else:
        pairs = contents(scheduler.runner, row)
    held = sum(tensor.nbytes for pair in pairs for tensor in pair if tensor is not None)
    assert engine.model.row_bytes(row.cached) == held


def test_a_configuration_by_layers_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByLayer(type(tiny.model().config)):  # type: ignore[misc]
        @property
        def head_dim(self) -> int:
            raise RuntimeError("ask for a layer")

    model = load(tiny.model(), tiny.tokenizer())
    unmeasured = replace(model, capabilities=replace(model.capabilities, position_sizes=()))
    usual = unmeasured.row_bytes(10)
    assert usual == model.row_bytes(10)
    config = unmeasured.model.config
    monkeypatch.delitem(config.__dict__, "head_dim", raising=False)
    monkeypatch.setattr(config, "__class__", ByLayer)
    assert unmeasured.row_bytes(10) == usual


def test_a_drafter_that_cannot_count_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", memory=10**9, max_batch=1)
    sequences = [job_of(engine, prompt(20), max_new_tokens=4, drafter="copyspec") for _ in range(3)]
    scheduler = Driver(engine)
    for sequence in sequences[:2]:
        scheduler.add(sequence)
    fails = Mock(side_effect=RuntimeError("no idea"))
    monkeypatch.setattr(type(sequences[0].drafter), "bytes_for", fails)
    with pytest.raises(RuntimeError, match="no idea"):
        scheduler.add(sequences[2])
    scheduler.serve([])
    assert [sequence.generated for sequence in sequences] == [4, 4, 0]


def test_recordings_and_draft_models_are_counted() -> None:
    model, ids = load(tiny.model(), tiny.tokenizer()), [5 + i % 300 for i in range(280)]
    engine = Engine(model, drafter="none", budget=4)
    sequence = job_of(engine, ids, max_new_tokens=100, drafter="pld_plus")
    most = need([sequence], engine.resources.runner)
    scheduler = Driver(engine)
    scheduler.add(sequence)
    row: Any = None
    while scheduler.unfinished:
        scheduler.step()
        row = sequence.row or row
        assert row.taps.bytes * 1.5 <= most.taps
    assert row.taps.bytes * 3 > most.taps
    assert most.logits == 5 * 4 * model.vocab_size
    drafter = DraftModel(tiny.model(), tokenizer=tiny.tokenizer(), confidence=0, tokens=4)
    engine = Engine(model, drafter=drafter, budget=4)
    bound: Any = engine.drafter
    counted = need([job_of(engine, ids, max_new_tokens=100)], engine.resources.runner)
    assert counted.drafter >= 2 * model.row_bytes(380)
    with engine.stream(ids, max_new_tokens=50) as stream:
        for _ in range(20):
            next(stream)
        assert 0 < 2 * bound.runner.store.held() <= counted.drafter
    assert bound.runner.store.held() == 0


def test_what_an_engine_keeps_is_bounded_by_what_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    monkeypatch.setattr(engine_memory, "free_bytes", lambda _: 4 * model.row_bytes(1000))
    engine = engine_of("llama", prefixes=1000)
    memory: Any = engine.resources.runner.store
    for n in range(20):
        engine.generate(prompt(300, n), max_new_tokens=2)
        assert memory.held() <= 3 * model.row_bytes(1000)
    assert 3 <= len(engine.resources.prefixes) < 12
    with pytest.raises(OptionError, match="three quarters of the free memory"):
        engine.generate(prompt(1500), max_new_tokens=2)
    assert engine.generate(prompt(300, 19), max_new_tokens=2).stats.reused_tokens == 299
    monkeypatch.setattr(engine_memory, "free_bytes", lambda _: None)
    assert engine_of("llama").resources.memory == float("inf")


def test_a_kept_row_stays_for_the_request_that_goes_on_from_it() -> None:
    """There is no room for both; counted twice, it would go just before it is wanted."""
    engine = engine_of("llama", memory=int(3 * loaded("llama").row_bytes(400)))
    first = engine.generate(prompt(300), max_new_tokens=20)
    ids = [*first.prompt_tokens, *first.tokens]
    assert engine.generate(ids, max_new_tokens=20).stats.reused_tokens == len(ids) - 1


def test_a_stall_is_said_once() -> None:
    """A model without a cache reads a prompt in one pass, and the others wait."""
    model = loaded("llama")
    plain = replace(model.capabilities, shape="plain", cache="none")
    engine = Engine(replace(model, capabilities=plain), drafter="none", max_batch=8)
    scheduler = Driver(engine)
    scheduler.runner.chunk = 64
    sequences = [job_of(engine, prompt(n, n), max_new_tokens=3) for n in (5, 100, 120, 9)]
    scheduler.serve(sequences)
    said = [
        notice for sequence in sequences for notice in sequence.remarks if "in one pass" in notice
    ]
    assert said == [
        "this model reads a prompt in one pass: other answers waited for a prompt of 100 tokens "
        "(reported once)"
    ]


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


def test_kept_rows_are_few() -> None:
    engine = engine_of("llama", prefixes=3)
    for n in range(6):
        engine.generate(prompt(40, n), max_new_tokens=2)
    assert len(engine.resources.prefixes) == 3
    assert engine.generate(prompt(40, 5), max_new_tokens=2).stats.reused_tokens == 39
    assert engine.generate(prompt(40, 0), max_new_tokens=2).stats.reused_tokens == 0


@pytest.mark.parametrize("name", ["copyspec", "draft_model"])
def test_a_steps_work_does_not_depend_on_the_context(name: str) -> None:
    """A copied list of 4,000 tokens takes 32,000 bytes; the least of six steps counts."""
    model = tiny.model(context=8192)
    drafter: Any = DraftModel(model, tokenizer=tiny.tokenizer(), confidence=0, tokens=4)
    engine = Engine(model, tiny.tokenizer(), drafter=drafter if name == "draft_model" else name)

    def least(tokens: int) -> int:
        request = engine.prepare({"budget": 4, "temperature": 0.0, "max_new_tokens": 100})
        sequence = request.sequence([5 + i % 300 for i in range(tokens)])
        runner = Runner(engine.model)
        start(sequence, runner)
        for _ in range(3):
            step([sequence], runner)
        return min(peak_bytes(lambda: step([sequence], runner)) for _ in range(6))

    assert least(4_000) <= least(500) + 8_000
