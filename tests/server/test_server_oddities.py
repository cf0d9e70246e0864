"""Requests that nobody should send, and texts that are hard to send on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from serving import api_of, client_of, events, listening, said, templated
from starlette.testclient import TestClient

import tiny

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 12}
HARD = "é\u0085\u2028🦊\u2029\u200d👩🏽\ud7ff\ufffd"
"""Ends of lines to some, and characters of several tokens."""


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A model whose template shows tools; what fails unexpectedly is a 500, as for users."""
    template = "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}" + tiny.TEMPLATE
    with templated(template, max_output=400) as made:
        made._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
        yield made


def post(client: TestClient, **more: Any) -> httpx2.Response:
    response: httpx2.Response = client.post(CHAT, json=ASK | more)
    return response


def raw(client: TestClient, more: str) -> httpx2.Response:
    """The answer to a body that only a JSON text can be."""
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, {more}}}'
    headers = {"content-type": "application/json"}
    response: httpx2.Response = client.post(CHAT, content=body, headers=headers)
    return response


def test_null_is_what_is_not_said(client: TestClient) -> None:
    nulls = dict.fromkeys(("n", "stream", "logprobs", "ignore_eos", "return_sources", "functions"))
    told = post(client, **nulls).json()
    assert told["choices"] == post(client).json()["choices"]


def test_numbers_that_are_none_are_refused(client: TestClient) -> None:
    for more in (
        '"temperature": NaN', '"temperature": 1, "top_p": NaN', '"presence_penalty": 1e400',
        '"logit_bias": {"5": NaN}', '"temperature": 1, "logit_bias": {"5": -Infinity}',
        '"temperature": 1, "repetition_penalty": 1e-300', '"repetition_penalty": 0',
        '"repetition_penalty": 1e300',
    ):  # fmt: skip
        assert raw(client, more).status_code == 400, more
    extreme = {"temperature": 1e-30, "logit_bias": {"5": 100}, "seed": 1}
    for value in (0.01, 100):
        assert post(client, repetition_penalty=value, **extreme).status_code == 200


@pytest.mark.parametrize("place", [
    '"metadata": {value}',
    '"response_format": {{"type": "json_schema", "schema": {value}}}',
    '"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {value}}}}}]',
    '"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {value}}}}}], '
    '"tool_choice": "required"',
    '"chat_template_kwargs": {{"x": {value}}}',
])  # fmt: skip
def test_no_depth_is_a_crash(client: TestClient, place: str) -> None:
    """At some depths one step on a request's way fails that others have passed."""
    for depth in (200, 260, *range(880, 1000, 4)):
        value = '{"a":' * depth + "{}" + "}" * depth
        response = raw(client, place.format(value=value))
        assert response.status_code in (200, 400), (depth, response.text)


def test_arguments_of_any_depth_are_taken(client: TestClient) -> None:
    for arguments in ("[" * 100_000, "[" * 900 + "]" * 900, "9" * 5000, "{", ""):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]
        assert post(client, messages=messages).status_code in (200, 400)


def test_hard_texts_come_whole() -> None:
    """Also to those who read lines as Python's `str.splitlines` sees them."""
    form = {"response_format": {"type": "regex", "pattern": f"({HARD}){{2}}"}, "max_tokens": 64}
    body = ASK | form | {"stream": True, "logprobs": True, "return_sources": True}
    with listening(api_of()) as address, httpx2.Client(timeout=600) as client:
        whole = client.post(address + CHAT, json=body | {"stream": False}).json()["choices"][0]
        response = client.post(address + CHAT, json=body)
        with client.stream("POST", address + CHAT, json=body) as lines:
            read = [line for line in lines.iter_lines() if line.startswith("data: {")]
    assert whole["message"]["content"] == HARD * 2
    chunks = events(response)
    assert said(chunks) == HARD * 2
    assert said([json.loads(line.removeprefix("data: ")) for line in read]) == HARD * 2
    choices = [chunk["choices"][0] for chunk in chunks]
    told = [token for choice in choices for token in choice["logprobs"]["content"]]
    spelt = bytes(byte for token in told for byte in token["bytes"]).decode()
    assert spelt == HARD * 2 + "</s>"
    assert "".join(text for choice in choices for text, _ in choice["sources"]) == HARD * 2


@pytest.mark.parametrize("stop", ["\u2029\u200d", "a🦊"])
def test_stops_of_several_tokens_are_seen_in_streams(stop: str) -> None:
    form = {"response_format": {"type": "regex", "pattern": HARD}, "max_tokens": 64, "stop": stop}
    with client_of() as client:
        for prediction in ({}, {"prediction": {"type": "content", "content": HARD}}):
            chunks = events(client.post(CHAT, json=ASK | form | prediction | {"stream": True}))
            assert said(chunks) == HARD.partition(stop)[0]
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_of_several_reasons_the_one_that_helps_is_told(client: TestClient) -> None:
    assert "at most 16" in post(client, stop=["a"] * 17).json()["error"]["message"]
    parts = [{"role": "user", "content": [{"text": "a"}]}]
    assert "type: Field required" in post(client, messages=parts).json()["error"]["message"]
    assert "valid string" in post(client, stop=5).json()["error"]["message"]


def test_only_the_assistant_may_say_nothing(client: TestClient) -> None:
    silent = [{"role": role} | more for role in ("system", "user", "tool")
              for more in ({}, {"content": None})]  # fmt: skip
    for message in silent:
        error = post(client, messages=[message, *ASK["messages"]]).json()["error"]
        assert error["param"] == "messages"
        assert f"{message['role']!r} needs content" in error["message"]
    for message in ({"role": "user", "content": ""}, {"role": "assistant", "content": None}):
        assert post(client, messages=[message, *ASK["messages"]]).status_code == 200
    for items in ([{"role": "user"}], [{"type": "message", "role": "user", "content": None}]):
        error = client.post("/v1/responses", json={"input": items}).json()["error"]
        assert error["param"] == "input"
