"""Who drives: calls in their own threads, the engine's thread, interrupts, dropped streams."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

import tiny
from draftsmith.engine import resources
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError
from draftsmith.model.load import load
from heap import young_heap

INTERRUPTED = """
import os, random, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import tiny
import torch
from draftsmith import Engine, accelerate

engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="copyspec")
prompts = [[5 + n, 6, 7, 8] * 5 for n in range(3)]
options = {{"max_new_tokens": 40, "min_new_tokens": 40}}
begin = time.perf_counter()
alone = [engine.generate(ids, **options).tokens for ids in prompts]
usual = time.perf_counter() - begin
armed, over, rng, others = False, threading.Event(), random.Random(1), []

def handler(*_):
    if armed:
        raise KeyboardInterrupt

def strike():
    while not over.is_set():
        time.sleep(rng.uniform(0, usual))
        os.kill(os.getpid(), signal.SIGINT)

def other():
    while not over.is_set():
        others.append(engine.generate(prompts[2], **options).tokens == alone[2])
        others.append(engine.submit(prompts[1], **options).result().tokens == alone[1])

def read():
    with engine.stream(prompts[0], **options) as stream:
        for _ in stream:
            pass

model = tiny.model.__wrapped__()
accelerated = accelerate(model, "copyspec")
given = torch.tensor(prompts[:1])
whole = model.generate(given, **options)
calls = [
    lambda: engine.generate(prompts[:2], **options), read, lambda: model.generate(given, **options)
]
signal.signal(signal.SIGINT, handler)
threads = [threading.Thread(target=one) for one in (strike, other)]
for thread in threads:
    thread.start()
partial, interrupted = 0, 0
while interrupted < 9 or not partial:
    try:
        try:
            armed = True
            calls[interrupted % 3]()
        finally:
            armed = False
    except KeyboardInterrupt as stop:
        interrupted += 1
        for found, plain in zip(getattr(stop, "partial", ()), alone):
            assert found.tokens == plain[: len(found.tokens)]
            partial += bool(found.tokens) and found.finish_reason == "cancelled"
over.set()
for thread in threads:
    thread.join()
assert others and all(others)
assert partial
assert [one.tokens for one in engine.generate(prompts, **options)] == alone
assert torch.equal(model.generate(given, **options), whole)
assert not (engine.resources.admitted or accelerated.resources.admitted)
kept = engine.resources.prefixes
assert len(kept.runner.store._rows) == len(kept)
"""


@pytest.mark.slow
def test_ctrl_c_at_any_time_leaves_partial_results_and_harms_no_other_call() -> None:
    code = INTERRUPTED.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1800)


OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12}
LONG: dict[str, Any] = {"max_new_tokens": 400, "min_new_tokens": 400}


def test_submitted_answers_are_those_of_generate(engine: Engine) -> None:
    whole = engine.generate("hello world", **OPTIONS)
    bare = Engine(tiny.model()).submit([5, 6, 7], max_new_tokens=2)
    assert len(bare.result().tokens) == 2
    with pytest.raises(LoadError, match="no tokenizer"):
        next(bare)
    handles = [engine.submit("hello world", **OPTIONS) for _ in range(8)]
    assert [one.result().tokens for one in handles] == [whole.tokens] * 8
    assert all(one.done for one in handles)
    assert "".join(piece.text for piece in handles[0]) == whole.text

    async def ask() -> None:
        waited, read = (engine.submit("hello world", **OPTIONS) for _ in range(2))
        assert [piece.token async for piece in read] == (await waited).tokens == whole.tokens

    asyncio.run(ask())


def test_a_submitted_answer_may_be_cancelled_and_waited_for(engine: Engine) -> None:
    handle = engine.submit("hello world", **LONG)
    with pytest.raises(TimeoutError, match="within 0 s"):
        handle.result(timeout=0)
    first = next(handle)
    assert repr(handle) == "Handle(open)"
    handle.cancel()
    result = handle.result()
    assert result.finish_reason == "cancelled"
    assert repr(handle) == "Handle(cancelled)"
    assert result.tokens == [first.token, *(piece.token for piece in handle)]
    assert not engine.resources.admitted


def test_a_model_that_is_moved_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request is accepted before the model is moved, and added after it."""
    model = load(tiny.model(), tiny.tokenizer())
    engine, others = Engine(model, drafter="none"), list[Any]()

    def move(_ids: Tensor, logits: Tensor) -> Tensor:
        if not others:
            others.append(engine.submit("a fox", max_new_tokens=4))
            monkeypatch.setattr(type(model), "moved", "the model was moved")
        return logits

    engine.submit("the quick", max_new_tokens=4, processors=[move]).result()
    found = others[0].result().tokens
    with pytest.raises(OptionError, match="was moved"):
        engine.submit("a fox", max_new_tokens=4)
    monkeypatch.undo()
    assert engine.submit("a fox", max_new_tokens=4).result().tokens == found


@young_heap()
def test_closing_an_engine_ends_what_was_submitted() -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    with engine:
        handle = engine.submit("hello world", **LONG)
        next(handle)
    assert handle.result().finish_reason == "cancelled"
    with pytest.raises(OptionError, match="closed"):
        engine.submit("hello world")
    before = threading.active_count()
    Engine(tiny.model()).submit([5, 6, 7], max_new_tokens=2).result()
    gc.collect()
    assert threading.active_count() == before


def test_a_callback_cannot_generate_on_its_own_engine(engine: Engine) -> None:
    whole, asked = engine.generate("hello world", **OPTIONS).tokens, list[str]()
    ways = {
        "generate": lambda: engine.generate("hello"),
        "stream": lambda: next(engine.stream("hello")),
        "chat": lambda: engine.chat().send("hello"),
        "submit": lambda: engine.submit("hello", max_new_tokens=2).result(),
    }

    def asks(_ids: Tensor, scores: Tensor) -> Tensor:
        for name, way in ways.items():
            if name not in asked:
                asked.append(name)
                with pytest.raises(OptionError, match="a callback cannot generate"):
                    way()
        return scores

    assert engine.generate("hello world", processors=[asks], **OPTIONS).tokens == whole
    assert asked == list(ways)
    ways["its own stream"] = lambda: next(own)
    own = engine.stream("hello world", processors=[asks], **OPTIONS)
    assert [piece.token for piece in own] == whole
    assert asked == list(ways)
    assert engine.generate("hello world", **OPTIONS).tokens == whole


@young_heap()
def test_streams_that_are_collected_amid_a_pass_free_their_rows(engine: Engine) -> None:
    """In a pass of the same thread, and in that of another one."""
    whole = engine.generate("hello world", **OPTIONS).tokens
    dropped = list[Any]()

    def collects(_ids: Tensor, scores: Tensor) -> Tensor:
        if dropped:
            dropped.clear()
            gc.collect()
        return scores

    for _ in range(2):
        stream = engine.stream("this is a test", **LONG)
        next(stream)
        cycle = [stream]
        cycle.append(cycle)  # type: ignore[arg-type]
        dropped.append(cycle)
    del stream, cycle
    assert len(engine.resources.admitted) == 2
    assert engine.generate("hello world", processors=[collects], **OPTIONS).tokens == whole
    assert not engine.resources.admitted
    memory: Any = engine.resources.runner
    assert len(memory.store._rows) == len(engine.resources.prefixes)


FORKED = """
import os, sys, threading
sys.path.insert(0, {tests!r})
import tiny
from draftsmith import Engine
from draftsmith.errors import OptionError

engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="none")
begun, over = threading.Event(), threading.Event()

def waits(ids, scores):
    begun.set()
    over.wait()
    return scores

call = lambda: engine.generate([5, 6, 7], processors=[waits], max_new_tokens=2)
thread = threading.Thread(target=call)
thread.start()
begun.wait()
child = os.fork()
if not child:
    try:
        engine.generate([5, 6, 7], max_new_tokens=2)
    except OptionError as error:
        os._exit(7 if "when it forked" in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
thread.join()
"""


def test_a_process_that_is_forked_during_a_pass_does_not_wait_for_its_end() -> None:
    script = FORKED.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "7", done.stderr


def short_of_memory() -> Engine:
    """An engine with memory for one answer of 40 tokens."""
    loaded = load(tiny.model(), tiny.tokenizer())
    with pytest.raises(OptionError, match="needs") as refused:
        Engine(loaded, memory=1000, prefixes=0).generate([5, 6, 7, 8], max_new_tokens=40)
    need = int(re.findall(r"[\d,]{5,}", str(refused.value))[0].replace(",", ""))
    return Engine(loaded, memory=int(1.2 * need), prefixes=0)


def test_streams_read_by_a_pool_are_not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for memory may be the one that ran the stream's last pass."""
    monkeypatch.setattr(resources, "_PAUSE", 3600.0)
    engine = short_of_memory()
    stream = engine.stream([5, 6, 7, 8], max_new_tokens=40)
    with ThreadPoolExecutor(1) as reads, ThreadPoolExecutor(1) as waits:
        waits.submit(next, stream).result()
        waiting = waits.submit(engine.generate, [5, 6, 7, 8], max_new_tokens=40)
        reads.submit(list, stream).result()
        assert waiting.result().tokens == stream.result.tokens


def test_who_waits_for_what_its_own_stream_holds_is_told() -> None:
    engine = short_of_memory()
    stream = engine.stream([5, 6, 7, 8], max_new_tokens=40)
    next(stream)
    handle = engine.submit([5, 6, 7, 8], max_new_tokens=40)
    with pytest.raises(OptionError, match="paused streams hold all the memory"):
        handle.result()
    with pytest.raises(OptionError, match="paused streams hold all the memory"):
        engine.generate([5, 6, 7, 8], max_new_tokens=40)
    opened: list[Any] = [stream]
    threading.Thread(target=lambda: opened.append(next(stream))).start()
    while len(opened) < 2:
        pass
    with pytest.raises(OptionError, match="paused streams hold all the memory"):
        handle.result()  # the thread that ran the last pass has ended
    stream.close()
    assert handle.result().finish_reason == "length"
    engine.close()


def test_a_turn_of_another_thread_leaves_the_running_one_alone(engine: Engine) -> None:
    whole, chat = engine.chat().send("hello world", **LONG).tokens, engine.chat()
    refused, done = list[str](), list[Any]()

    def other(_ids: Tensor, scores: Tensor) -> Tensor:
        if not refused:

            def asks() -> None:
                for call in (lambda: chat.send("other"), chat.reset):
                    try:
                        call()
                    except OptionError as error:
                        refused.append(str(error))

            thread = threading.Thread(target=asks)
            thread.start()
            thread.join()
        return scores

    done.append(chat.send("hello world", processors=other, **LONG))
    assert ["another thread is reading" in one for one in refused] == [True, True]
    assert done[0].tokens == whole
    assert len(chat.messages) == 2


def test_wrong_options_of_a_turn_leave_the_running_stream_open(engine: Engine) -> None:
    chat = engine.chat()
    stream = chat.stream("hello world", **OPTIONS)
    next(stream)
    with pytest.raises(OptionError, match="temperature"):
        chat.send("other", temprature=1.0)  # type: ignore[call-arg]
    assert len([*stream]) == 11


def test_an_error_of_a_callback_that_closed_its_stream_is_raised(engine: Engine) -> None:
    def closes(_ids: Tensor, scores: Tensor) -> Tensor:
        if stream.result.tokens:
            stream.close()
            raise ValueError("mine")
        return scores

    stream = engine.stream("hello world", processors=closes, **OPTIONS)
    with pytest.raises(Exception, match="mine"):
        list(stream)
    assert [*stream] == []


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=RuntimeError("can't start new thread"))
    with Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", full)
            with pytest.raises(RuntimeError, match="new thread"):
                engine.submit("hello", **OPTIONS)
        assert engine.submit("hello", **OPTIONS).result().tokens


def test_a_result_of_a_running_stream_does_not_change(engine: Engine) -> None:
    stream = engine.stream("hello world", **OPTIONS)
    next(stream)
    early = stream.result
    known = early.stats.tokens
    list(stream)
    assert early.stats.tokens == known < stream.result.stats.tokens


def test_a_history_that_cannot_be_used_may_be_reset(engine: Engine) -> None:
    chat = engine.chat("be brief")
    chat.messages += ["foo", {"content": "x"}]  # type: ignore[list-item]
    chat.reset()
    assert [message["content"] for message in chat.messages] == ["be brief"]
