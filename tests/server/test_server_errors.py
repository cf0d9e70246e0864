"""What fails behind the server reaches its client, its log and its figures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from serving import (
    CHAT,
    MESSAGES,
    RESPONSES,
    TEXT,
    api_of,
    client_of,
    events,
    idle,
    stream_of,
    until,
)
from starlette.testclient import TestClient

import tiny
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.engine.engine import Engine
from draftsmith.server.reader import Reader
from draftsmith.testing import Scripted

ASK: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "the quick brown fox"}]},
    TEXT: {"prompt": "the quick brown fox", "ignore_eos": True},
    RESPONSES: {"input": "the quick brown fox"},
    MESSAGES: {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 60},
}


def engine_of(**options: Any) -> Engine:
    """An engine over a model of its own, which a test may change."""
    model = copy.deepcopy(tiny.model()).double()
    return Engine.from_pretrained(model, tokenizer=tiny.tokenizer(), **options)


def anthropic(body: dict[str, Any]) -> dict[str, Any]:
    """An error in Anthropic's shape, with what OpenAI's calls it."""
    assert body["type"] == "error"
    codes = {"api_error": "internal_error"}
    return {"message": body["error"]["message"], "code": codes.get(body["error"]["type"])}


def told(client: TestClient, path: str, stream: bool, status: int) -> dict[str, Any]:
    """The error that an answer ends with, in an event if the status is 200."""
    answer = client.post(path, json=ASK[path] | {"stream": stream})
    assert answer.status_code == status
    if status != 200:
        found: dict[str, Any] = answer.json()["error"]
        return found if path != MESSAGES else anthropic(answer.json())
    if path == RESPONSES:
        assert "event: response.failed" in answer.text
        return {"message": answer.text, "code": "internal_error"}
    if path == MESSAGES:
        last = stream_of(answer)[-1]
        assert last["type"] == "error"
        return anthropic(last)
    error: dict[str, Any] = events(answer)[-1]["error"]
    return error


@pytest.mark.failing_passes
@pytest.mark.parametrize(("path", "stream", "after"), [
    *((path, stream, 3) for path in ASK for stream in (False, True)), (CHAT, True, 0),
])  # fmt: skip
def test_e1_an_error_of_the_model_is_reported_and_logged(
    path: str, stream: bool, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, passes = engine_of(drafter="none"), 0

    def fails(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > after:
            raise ValueError("the layer does not fit")

    engine.model.model.get_output_embeddings().register_forward_hook(fails)
    api = api_of(engine)
    with client_of(api) as client:
        error = told(client, path, stream, status=200 if stream else 500)
        until(lambda: idle(api))
    assert error["code"] == "internal_error"
    assert "the server's log says why" in error["message"]
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert ["the layer does not fit" in str(record.exc_info) for record in logged] == [True]


@pytest.mark.parametrize("path", ASK)
def test_a_stream_ends_with_an_event_whatever_fails(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushed, own = 0, Reader.push

    def fails(self: Reader, pieces: Any) -> Any:
        nonlocal pushed
        pushed += 1
        if pushed == 2:
            raise ZeroDivisionError("a fault of the parser")
        return own(self, pieces)

    monkeypatch.setattr(Reader, "push", fails)
    api = api_of(engine_of(drafter="none"))
    with client_of(api) as client:
        assert told(client, path, stream=True, status=200)["code"] == "internal_error"
        until(lambda: idle(api))
    assert "a fault of the parser" in caplog.text


def test_a_request_whose_engine_ends_while_it_is_prepared_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(drafter="none")
    own = engine.thread.submit

    def late(*given: Any) -> None:
        engine.thread.close()
        own(*given)

    monkeypatch.setattr(engine.thread, "submit", late)
    with client_of(api_of(engine)) as client:
        answer = client.post(TEXT, json=ASK[TEXT])
    assert answer.status_code == 503
    assert "engine has failed" in answer.json()["error"]["message"]


def test_e1_a_request_too_large_for_the_memory_is_refused_before_its_stream() -> None:
    with client_of(api_of(engine_of(memory=10_000))) as client:
        for path in ASK:
            assert "memory=10,000" in told(client, path, stream=True, status=400)["message"]


@pytest.mark.failing_passes
def test_e2_passes_that_fail_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    wrong = 7

    def drafts(ctx: Context) -> Draft:
        return Draft.chain([wrong][: ctx.budget], "scripted")

    def fails(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        if bool((given["input_ids"] == wrong).any()):
            raise RuntimeError("the kernel knows no mask")

    engine = engine_of(drafter=Scripted(drafts), budget=2)
    engine.model.model.register_forward_pre_hook(fails, with_kwargs=True)
    with client_of(api_of(engine)) as client:
        body = ASK[TEXT] | {"max_tokens": 9, "return_stats": True}
        counts = [client.post(TEXT, json=body).json()["stats"]["failed_passes"] for _ in "ab"]
        figures = client.get("/metrics").text
    assert counts[0] == counts[1] > 0
    assert f'draftsmith:failed_passes_total{{model_name="tiny"}} {float(sum(counts))}' in figures
    (record,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert record.getMessage() == "a pass with drafts failed and was repeated without them"
    assert record.fields["kind"] == "RuntimeError"  # type: ignore[attr-defined]
    assert "the kernel knows no mask" in record.fields["why"]  # type: ignore[attr-defined]


def test_a_drafter_that_fails_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails(ctx: Context) -> Draft:
        raise ValueError(f"no draft after {len(ctx.ids)} tokens")

    body = ASK[TEXT] | {"max_tokens": 9}
    texts = []
    for drafter in ("none", Scripted(fails)):
        with client_of(api_of(engine_of(drafter=drafter))) as client:
            texts += [client.post(TEXT, json=body).json()["choices"][0]["text"]]
            figures = client.get("/metrics").text
    assert texts[0] == texts[1]
    assert 'drafter_failures_total{model_name="tiny"} 1.0' in figures
    (record,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert "the rest of the answer is decoded plainly" in record.getMessage()


def test_a_time_out_of_something_else_is_not_told_as_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a drafter that is downloaded, or of a grammar's compiler."""

    def times_out(*_: Any) -> Any:
        raise TimeoutError("the hub does not answer")

    engine = engine_of(drafter="none")
    api = api_of(engine, allow_drafters=True)
    with client_of(api) as client:
        monkeypatch.setattr(CopySpec, "bind", times_out)
        with pytest.raises(TimeoutError, match="the hub does not answer"):
            client.post(TEXT, json=ASK[TEXT] | {"drafter": "copyspec(gamma=7)"})
        monkeypatch.setattr(engine.model.grammars, "compile", times_out)
        body = ASK[TEXT] | {"response_format": {"type": "regex", "pattern": "[ab]"}}
        with pytest.raises(TimeoutError, match="the hub does not answer"):
            client.post(TEXT, json=body)
        assert api.worker.open == 0


def test_a_model_that_follows_no_grammar_warms_up_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="draftsmith.server")
    model, tokenizer = copy.deepcopy(tiny.model()), copy.deepcopy(tiny.tokenizer())
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    api = api_of(Engine.from_pretrained(model, tokenizer=tokenizer, drafter="none"))
    api.warm_up()
    told = [
        one.fields for one in caplog.records if one.getMessage() == "no grammar can be followed"
    ]
    assert "needs a model with an end token" in told[0]["why"]
