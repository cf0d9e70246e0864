"""What fails behind the server reaches its client, its log and its figures."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serving import api_of, client_of, events, idle, until
from starlette.testclient import TestClient

import tiny
from draftsmith.engine.engine import Engine
from draftsmith.server.api import Api

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "the quick brown fox"}]},
    TEXT: {"prompt": "the quick brown fox", "ignore_eos": True},
    RESPONSES: {"input": "the quick brown fox"},
}


def engine_of(**options: Any) -> Engine:
    """An engine over a model of its own, which a test may change."""
    model = copy.deepcopy(tiny.model()).double()
    return Engine.from_pretrained(model, tokenizer=tiny.tokenizer(), **options)


@contextmanager
def asking(engine: Engine, **settings: Any) -> Iterator[tuple[TestClient, Api]]:
    api = api_of(engine, **settings)
    with client_of(api) as client:
        yield client, api


def told(client: TestClient, path: str, stream: bool) -> dict[str, Any]:
    """The error that an answer ends with, in an event where it is streamed."""
    answer = client.post(path, json=ASK[path] | {"stream": stream})
    if not stream or answer.status_code != 200:
        assert answer.status_code >= 400
        found: dict[str, Any] = answer.json()["error"]
        return found
    if path == RESPONSES:
        assert "event: response.failed" in answer.text
        return {"message": answer.text, "code": "internal_error"}
    error: dict[str, Any] = events(answer)[-1]["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize("after", [0, 3])
def test_e1_an_error_of_the_model_is_told_and_logged(
    after: int, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, passes = engine_of(drafter="none"), 0

    def fails(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > after:
            raise ValueError("the layer does not fit")

    engine.model.model.get_output_embeddings().register_forward_hook(fails)
    with asking(engine) as (client, api):
        error = told(client, path, stream)
        until(lambda: idle(api))
    assert error["code"] == "internal_error"
    assert "the server's log says why" in error["message"]
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert ["the layer does not fit" in str(record.exc_info) for record in logged] == [True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASK)
def test_e1_a_request_too_large_for_the_memory_is_told(path: str, stream: bool) -> None:
    with asking(engine_of(memory=10_000)) as (client, _):
        assert "memory=10,000" in told(client, path, stream)["message"]
