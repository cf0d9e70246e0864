"""Clocks begin when a request arrives, and nobody waits while another request is prepared."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from serving import CHAT, TEXT, api_of, client_of, figures, idle, listening, until

import tiny
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.engine.engine import Engine
from draftsmith.server.api import LONG, Api

WAIT = 0.2
"""Seconds that something takes at least; no test asks how long anything takes at most."""


def api_with(held: Callable[[], Any]) -> Api:
    """A server whose tokenizer is held up by texts with the word "wait"."""

    class Slow(type(tiny.tokenizer())):  # type: ignore[misc]
        def __call__(self, text: Any, *given: Any, **named: Any) -> Any:
            if "wait" in text:
                held()
            return super().__call__(text, *given, **named)

    tokenizer = copy.copy(tiny.tokenizer())
    tokenizer.__class__ = Slow
    model = copy.deepcopy(tiny.model(context=2048)).double()
    made = Engine.from_pretrained(model, tokenizer=tokenizer, drafter="none", max_batch=4)
    return api_of(made, allow_drafters=True, queue=16)


@pytest.mark.parametrize("long", [False, True])
def test_e8_nobody_waits_for_another_requests_prompt(long: bool) -> None:
    """Long ones take one thread at most, and others one each."""
    reached, go = threading.Semaphore(0), threading.Event()
    text = "wait " + "so long " * (LONG // 8 if long else 1)

    def held() -> None:
        reached.release()
        assert go.wait(300)

    api = api_with(held)
    with listening(api) as address, ThreadPoolExecutor(4) as threads:

        def post(path: str = TEXT, **body: Any) -> int:
            return httpx2.post(address + path, json=body, timeout=600).status_code

        try:
            going = [threads.submit(post, prompt=text, max_tokens=3) for _ in range(3)]
            until(lambda: api.worker.open == 3)
            for _ in range(1 if long else 3):
                assert reached.acquire(timeout=300)
            assert post(prompt="the quick", max_tokens=3) == 200
            messages = [{"role": "user", "content": "the quick"}]
            assert post(CHAT, messages=messages, max_tokens=3, stream=True) == 200
            assert not reached.acquire(blocking=False)
        finally:
            go.set()
        codes = [one.result() for one in going]
        until(lambda: idle(api))
    assert codes == [400 if long else 200] * 3  # longer than the model's context


def test_e8_clocks_begin_when_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it waits for before it is in line."""

    def pause() -> None:
        threading.Event().wait(WAIT)

    api = api_with(pause)
    monkeypatch.setattr(CopySpec, "bind", lambda self, _model: pause() or self)
    grammars, compile_it = api.engine.model.grammars, api.engine.model.grammars.compile
    monkeypatch.setattr(grammars, "compile", lambda *given: pause() or compile_it(*given))
    with client_of(api) as client:
        for more in (
            {"prompt": "wait"}, {"drafter": "copyspec(gamma=3)"},
            {"response_format": {"type": "regex", "pattern": "[a-c]{2}"}},
        ):  # fmt: skip
            body = {"prompt": "the quick", "return_stats": True, "max_tokens": 3} | more
            before = figures(client)
            stats = client.post(TEXT, json=body).json()["stats"]
            after = figures(client)
            assert stats["wall_seconds"] >= stats["first_token_seconds"] >= WAIT
            for clock in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
                name = f'vllm:{clock}_seconds_sum{{model_name="tiny"}}'
                assert after[name] - before[name] >= WAIT
