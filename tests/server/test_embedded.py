"""The endpoints mounted in somebody else's application."""

from __future__ import annotations

import signal

import pytest
import uvicorn
from fastapi import FastAPI
from serving import engine, events
from sse_starlette.sse import AppStatus
from starlette.testclient import TestClient

from draftsmith.errors import OptionError, UnknownName
from draftsmith.server import create_app

USER = {"role": "user", "content": "the quick brown fox"}


def test_an_application_mounts_the_endpoints_beside_its_own() -> None:
    made, outer = engine(), FastAPI()
    outer.mount("/llm", create_app(made, keys=["secret"], name="mine", max_output=8))

    @outer.get("/own")
    def own() -> str:
        return "own"

    ask = {"messages": [USER]}
    with TestClient(outer, headers={"authorization": "Bearer secret"}) as client:
        assert client.get("/own").json() == "own"
        assert [one["id"] for one in client.get("/llm/v1/models").json()["data"]] == ["mine"]
        told = client.post("/llm/v1/chat/completions", json=ask).json()
        expected = made.generate([USER], max_new_tokens=8).text
        assert told["choices"][0]["message"]["content"] == expected
        streamed = client.post("/llm/v1/chat/completions", json=ask | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        message = client.post("/llm/v1/messages", json=ask | {"max_tokens": 8}).json()
        assert message["content"][0]["text"] == expected
        error = client.post("/llm/v1/messages", json={}).json()
        assert error["type"] == "error"
        wrong = client.post("/llm/v1/chat/completions", json=ask, headers={"authorization": "b"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert made.generate([USER], max_new_tokens=8).text == expected  # it stays the caller's


def test_settings_are_those_of_the_command() -> None:
    with pytest.raises(UnknownName, match="max_output"):
        create_app(engine(), max_ouput=5)
    with pytest.raises(UnknownName, match="setting 'host'"):
        create_app(engine(), host="0.0.0.0")
    with pytest.raises(OptionError, match="max_output must be"):
        create_app(engine(), max_output=0)
    with pytest.raises(UnknownName, match="Did you mean 'hermes'"):
        create_app(engine(), tool_format="hermas")


def test_an_application_may_be_started_more_than_once() -> None:
    app = create_app(engine(), keys=None)
    for _ in range(2):
        with TestClient(app) as client:
            body = {"prompt": "hello", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200


def test_a_signal_to_uvicorn_cuts_no_stream_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """sse-starlette notices the signal in any server of the process, and may end the streams."""
    monkeypatch.setattr(AppStatus, "should_exit", False)
    app = create_app(engine())
    uvicorn.Server(uvicorn.Config(app)).handle_exit(signal.SIGTERM, None)
    assert AppStatus.should_exit
    ask = {"messages": [USER], "max_tokens": 20, "ignore_eos": True, "stream": True}
    with TestClient(app) as client:
        streamed = client.post("/v1/chat/completions", json=ask)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert events(streamed)[-1]["choices"][0]["finish_reason"] == "length"
