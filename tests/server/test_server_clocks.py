"""Clocks begin when a request arrives, and nobody waits while another request is prepared."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from serving import api_of, idle, listening, until

import tiny
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.engine.engine import Engine
from draftsmith.server.api import LONG, Api

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WAIT = 0.2
"""Seconds that something takes at least; no test asks how long anything takes at most."""


class Held:
    """Holds up whoever asks for `word`, until it is let go."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.reached, self.go = threading.Semaphore(0), threading.Event()

    def __call__(self, text: str) -> None:
        if self.word in text:
            self.reached.release()
            assert self.go.wait(300)


def reading(held: Held) -> Any:
    """A tokenizer that is held up."""

    class Slow(type(tiny.tokenizer())):  # type: ignore[misc]
        def __call__(self, text: Any, *given: Any, **named: Any) -> Any:
            held(text)
            return super().__call__(text, *given, **named)

    made = copy.copy(tiny.tokenizer())
    made.__class__ = Slow
    return made


@contextmanager
def serving(tokenizer: Any = None, **settings: Any) -> Iterator[tuple[str, Api]]:
    model = copy.deepcopy(tiny.model(context=2048)).double()
    made = Engine.from_pretrained(
        model, tokenizer=tokenizer or tiny.tokenizer(), drafter="none", max_batch=4
    )
    api = api_of(made, allow_drafters=True, queue=16, **settings)
    with listening(api) as address:
        yield address, api
        until(lambda: idle(api))


def post(address: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(address + path, json={"max_tokens": 3} | body, timeout=600)


@pytest.mark.parametrize("long", [False, True])
def test_e8_nobody_waits_for_another_requests_prompt(long: bool) -> None:
    held = Held("wait")
    text = "wait " + "so long " * (LONG // 8 if long else 1)
    with serving(reading(held)) as (address, api), ThreadPoolExecutor(4) as threads:
        try:
            going = [threads.submit(post, address, TEXT, prompt=text) for _ in range(3)]
            assert held.reached.acquire(timeout=300)
            assert post(address, TEXT, prompt="the quick").status_code == 200
            messages = [{"role": "user", "content": "the quick"}]
            assert post(address, CHAT, messages=messages, stream=True).status_code == 200
            until(lambda: api.worker.open == 3)
        finally:
            held.go.set()
        codes = [one.result().status_code for one in going]
    assert codes == [400 if long else 200] * 3  # longer than the model's context


def test_e8_long_prompts_take_one_thread_at_most() -> None:
    held = Held("wait")
    text = "wait " + "so long " * (LONG // 8)
    with serving(reading(held)) as (address, api), ThreadPoolExecutor(4) as threads:
        try:
            going = [threads.submit(post, address, TEXT, prompt=text) for _ in range(3)]
            until(lambda: api.worker.open == 3)
            assert held.reached.acquire(timeout=300)
            assert post(address, TEXT, prompt="the quick").status_code == 200
            assert not held.reached.acquire(blocking=False)
        finally:
            held.go.set()
        assert [one.result().status_code for one in going] == [400] * 3


def test_e8_nobody_waits_for_a_drafter_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held("gamma=3")
    bind = CopySpec.bind

    def slow(self: CopySpec, model: Any) -> Drafter:
        held(str(self))
        return bind(self, model)

    monkeypatch.setattr(CopySpec, "bind", slow)
    with serving() as (address, _), ThreadPoolExecutor(4) as threads:
        try:
            ask = {"prompt": "the quick", "drafter": "copyspec(gamma=3)"}
            going = [threads.submit(post, address, TEXT, **ask) for _ in range(3)]
            assert held.reached.acquire(timeout=300)
            assert post(address, TEXT, prompt="the quick").status_code == 200
            assert post(address, TEXT, prompt="the quick", drafter="none").status_code == 200
        finally:
            held.go.set()
        assert [one.result().status_code for one in going] == [200] * 3


@pytest.mark.parametrize("what", ["prompt", "turn", "drafter", "grammar"])
def test_e8_clocks_begin_when_a_request_arrives(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it waits for before it is in line."""

    def pause(word: str) -> None:
        if "wait" in word:
            threading.Event().wait(WAIT)

    held: Any = Held("wait")
    body: dict[str, Any] = {"prompt": "the quick", "return_stats": True}
    if what == "drafter":
        monkeypatch.setattr(CopySpec, "bind", lambda self, _model: pause("wait") or self)
        body["drafter"] = "copyspec(gamma=3)"
    elif what == "prompt":
        held, body["prompt"] = pause, "wait"
    elif what == "turn":
        body["prompt"] = "the quick"
        body["user"] = "x" * LONG
    with serving(reading(held)) as (address, api), ThreadPoolExecutor(4) as threads:
        if what == "grammar":
            compile_it = api.engine.model.grammars.compile
            monkeypatch.setattr(
                api.engine.model.grammars,
                "compile",
                lambda *given: pause("wait") or compile_it(*given),
            )
            body["response_format"] = {"type": "regex", "pattern": "[a-c]{2}"}
        if what == "turn":
            long = "wait " + "so long " * (LONG // 8)
            before = threads.submit(post, address, TEXT, prompt=long)
            assert held.reached.acquire(timeout=300)
            going = threads.submit(post, address, TEXT, **body)
            until(lambda: api.worker.open == 2)
            pause("wait")
            held.go.set()
            assert before.result().status_code == 400
            answer = going.result().json()
        else:
            answer = post(address, TEXT, **body).json()
        figures = figures_of(httpx2.get(f"{address}/metrics").text)
    stats = answer["stats"]
    assert stats["wall_seconds"] >= stats["first_token_seconds"] >= WAIT
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert figures[f"vllm:{name}_seconds_sum"] >= WAIT
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    (logged,) = (line for line in lines if line.get("id") == answer["id"])
    assert logged["event"] == "answered"
    assert logged["seconds"] >= WAIT


def figures_of(text: str) -> dict[str, float]:
    """The figures of /metrics that belong to the model, by name."""
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in rows}
