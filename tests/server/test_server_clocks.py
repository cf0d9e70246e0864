"""Clocks begin when a request arrives, and nobody waits while another request is prepared."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from serving import api_of, client_of, idle, listening, until

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


def reading(held: Callable[[str], None]) -> Any:
    """A tokenizer that is held up."""

    class Slow(type(tiny.tokenizer())):  # type: ignore[misc]
        def __call__(self, text: Any, *given: Any, **named: Any) -> Any:
            held(text)
            return super().__call__(text, *given, **named)

    made = copy.copy(tiny.tokenizer())
    made.__class__ = Slow
    return made


def pause(text: str = "wait") -> None:
    """Take a while, like a slow tokenizer, drafter or compiler."""
    if "wait" in text:
        threading.Event().wait(WAIT)


def api_with(tokenizer: Any) -> Api:
    model = copy.deepcopy(tiny.model(context=2048)).double()
    made = Engine.from_pretrained(model, tokenizer=tokenizer, drafter="none", max_batch=4)
    return api_of(made, allow_drafters=True, queue=16)


@contextmanager
def serving(tokenizer: Any) -> Iterator[tuple[str, Api]]:
    api = api_with(tokenizer)
    with listening(api) as address:
        yield address, api
        until(lambda: idle(api))


def post(address: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(address + path, json={"max_tokens": 3} | body, timeout=600)


@pytest.mark.parametrize("long", [False, True])
def test_e8_nobody_waits_for_another_requests_prompt(long: bool) -> None:
    """Long ones take one thread at most, and others one each."""
    held = Held("wait")
    text = "wait " + "so long " * (LONG // 8 if long else 1)
    with serving(reading(held)) as (address, api), ThreadPoolExecutor(4) as threads:
        try:
            going = [threads.submit(post, address, TEXT, prompt=text) for _ in range(3)]
            until(lambda: api.worker.open == 3)
            for _ in range(1 if long else 3):
                assert held.reached.acquire(timeout=300)
            assert post(address, TEXT, prompt="the quick").status_code == 200
            messages = [{"role": "user", "content": "the quick"}]
            assert post(address, CHAT, messages=messages, stream=True).status_code == 200
            assert not held.reached.acquire(blocking=False)
        finally:
            held.go.set()
        codes = [one.result().status_code for one in going]
    assert codes == [400 if long else 200] * 3  # longer than the model's context


def test_e8_nobody_waits_for_a_drafter_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held("gamma=3")
    bind = CopySpec.bind

    def slow(self: CopySpec, model: Any) -> Drafter:
        held(str(self))
        return bind(self, model)

    monkeypatch.setattr(CopySpec, "bind", slow)
    with serving(tiny.tokenizer()) as (address, _), ThreadPoolExecutor(4) as threads:
        try:
            ask = {"prompt": "the quick", "drafter": "copyspec(gamma=3)"}
            going = [threads.submit(post, address, TEXT, **ask) for _ in range(3)]
            assert held.reached.acquire(timeout=300)
            assert post(address, TEXT, prompt="the quick").status_code == 200
            assert post(address, TEXT, prompt="the quick", drafter="none").status_code == 200
        finally:
            held.go.set()
        assert [one.result().status_code for one in going] == [200] * 3


ASK = {"prompt": "the quick", "return_stats": True, "max_tokens": 3}
CLOCKS = ("time_to_first_token", "request_queue_time", "e2e_request_latency")


def test_e8_clocks_begin_when_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it waits for before it is in line."""
    monkeypatch.setattr(CopySpec, "bind", lambda self, _model: pause() or self)
    api = api_with(reading(pause))
    grammars, compile_it = api.engine.model.grammars, api.engine.model.grammars.compile
    monkeypatch.setattr(grammars, "compile", lambda *given: pause() or compile_it(*given))
    with client_of(api) as client:
        for more in (
            {"prompt": "wait"}, {"drafter": "copyspec(gamma=3)"},
            {"response_format": {"type": "regex", "pattern": "[a-c]{2}"}},
        ):  # fmt: skip
            before = figures_of(client.get("/metrics").text)
            stats = client.post(TEXT, json=ASK | more).json()["stats"]
            after = figures_of(client.get("/metrics").text)
            assert stats["wall_seconds"] >= stats["first_token_seconds"] >= WAIT
            for name in (f"vllm:{clock}_seconds_sum" for clock in CLOCKS):
                assert after[name] - before[name] >= WAIT


def test_e8_clocks_count_the_time_until_a_long_prompt_takes_its_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held, long = Held("wait"), "wait " + "so long " * (LONG // 8)
    with serving(reading(held)) as (address, api), ThreadPoolExecutor(4) as threads:
        before = threads.submit(post, address, TEXT, prompt=long)
        assert held.reached.acquire(timeout=300)
        going = threads.submit(post, address, TEXT, **ASK, user="x" * LONG)
        until(lambda: api.worker.open == 2)
        pause()
        held.go.set()
        assert before.result().status_code == 400
        answer = going.result().json()
        figures = figures_of(httpx2.get(f"{address}/metrics").text)
    assert answer["stats"]["first_token_seconds"] >= WAIT
    assert all(figures[f"vllm:{clock}_seconds_sum"] >= WAIT for clock in CLOCKS)
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    (logged,) = (line for line in lines if line.get("id") == answer["id"])
    assert logged["event"] == "answered"
    assert logged["seconds"] >= WAIT


def figures_of(text: str) -> dict[str, float]:
    """The figures of /metrics that belong to the model, by name."""
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in rows}
