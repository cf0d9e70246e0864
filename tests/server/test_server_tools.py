"""Calls of tools: parsed whatever the chunks are, and forced where that was asked for."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving import (
    CALLING,
    CHAT,
    USER,
    Ask,
    api_of,
    client_of,
    events,
    loaded,
    parsed,
    saying,
    streamed_calls,
    templated,
)
from starlette.testclient import TestClient

import tiny
from draftsmith import Grammar
from draftsmith.engine.engine import Engine
from draftsmith.engine.sequence import Piece
from draftsmith.model.load import load
from draftsmith.server.calls.source import TextPart
from draftsmith.server.reader import Reader
from draftsmith.server.schema import ChatRequest
from draftsmith.server.tools import forced_call

NAMES = ["add", "look_up"]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"x": {"$ref": "#/$defs/leaf"}}, "required": ["x"],
        "additionalProperties": False, "$defs": {"leaf": {"enum": [f"{name} p", f"{name} q"]}}}}}
    for name in NAMES
]  # fmt: skip
ASK = {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'
CALL = f"<tool_call>{ADD}</tool_call>"


@pytest.mark.parametrize(("family", "text"), [
    ("hermes", '<tool_call>{"name":"sub","arguments":{"t":"\\ud83d"}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"add\\ud83d","arguments":{}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"add","arguments":"\\ud83d"}</tool_call>'),
    ("hermes", '<tool_call>{"name":"sub","arguments":{}} is not closed'),
    ("llama", '{"name": "add", "parameters": {"x": NaN}}'),
    ("llama", '{"name": "nobody", "parameters": {}}'),
    ("llama", '{"answer": 42}'), ("llama", ' {"name": "add"'),
    ("mistral", '[TOOL_CALLS]sub{"x": 1e999}'), ("mistral", "[1, 2]"),
    (None, CALL),
])  # fmt: skip
def test_what_is_no_json_no_text_or_no_call_stays_text(family: Any, text: str) -> None:
    for size in (1, 3, 1000):
        reader = Reader(family, dict.fromkeys(NAMES))
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert parsed(reader, parts) == [TextPart(text)]


def test_references_of_a_forced_call_are_moved_but_not_its_values() -> None:
    """A schema for a call is a part of a larger one; "$ref" in a value is no reference."""
    value = {"$ref": "#/x"}
    leaf = {"anyOf": [{"const": value}, {"$ref": "#/$defs/leaf"}], "default": value}
    schema = {"properties": {"const": leaf, "$ref": {"enum": [value]}}, "$defs": {"leaf": {}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    body = ChatRequest.model_validate(ASK | {"tools": [tool], "tool_choice": "required"})
    grammar = forced_call(body.tools, body)
    assert grammar is not None
    moved = json.loads(grammar.text)["anyOf"][0]["properties"]["arguments"]
    there = {"$ref": "#/anyOf/0/properties/arguments/$defs/leaf"}
    leaf |= {"anyOf": [{"const": value}, there]}
    properties = {"const": leaf, "$ref": {"enum": [value]}}
    assert moved == schema | {"type": "object", "properties": properties}


def test_text_before_a_call_does_not_wait_for_it() -> None:
    reader = Reader("hermes", {"add": None})
    assert reader.push([Piece("I will add. <to", 9, "target", 0.0)]) == [TextPart("I will add.")]
    assert reader.push([Piece("tal", 9, "target", 0.0)]) == [TextPart(" <total")]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A model whose template knows tools."""
    with templated(CALLING, max_output=400) as client:
        yield client


@pytest.mark.parametrize(("choice", "tools"), [
    ("required", TOOLS), ("required", TOOLS[::-1]),  # it takes one and the same
    ({"type": "function", "function": {"name": "look_up"}}, TOOLS),
])  # fmt: skip
def test_a_call_can_be_forced(client: TestClient, choice: Any, tools: Any) -> None:
    body = ASK | {"tool_choice": choice, "tools": tools}
    (told,) = client.post(CHAT, json=body).json()["choices"]
    assert told["finish_reason"] == "tool_calls"
    assert told["message"]["content"] is None
    (call,) = told["message"]["tool_calls"]
    names = NAMES if choice == "required" else ["look_up"]
    assert call["type"] == "function"
    name = call["function"]["name"]
    assert name in names
    assert json.loads(call["function"]["arguments"])["x"] in (f"{name} p", f"{name} q")
    chunks = events(client.post(CHAT, json=body | {"stream": True}))
    (streamed,) = streamed_calls(chunks)
    assert streamed["index"] == 0
    assert streamed["function"] == call["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_a_stop_string_cuts_is_not_reported_as_whole(client: TestClient) -> None:
    schema = {"properties": {"x": {"enum": ["p\nb STOP c"]}}, "required": ["x"],
              "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    asked = ASK | {"tools": [tool], "tool_choice": "required"}
    for stop, reason in ((["STOP"], "stop"), (["never"], "tool_calls")):
        (choice,) = client.post(CHAT, json=asked | {"stop": stop}).json()["choices"]
        assert choice["finish_reason"] == reason
        (call,) = choice["message"]["tool_calls"]
        # A schema without a type still asks for an object.
        assert call["function"]["arguments"].startswith('{"x":')


def test_earlier_calls_without_arguments_have_an_empty_object(ask: Ask) -> None:
    template = CALLING.replace("{{ m", "{% for c in m.tool_calls or [] %}{% for k, v in "
                               "c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}"
                               "{% endfor %}{{ m", 1)  # fmt: skip
    assert template != CALLING
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": ""}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "5", "tool_call_id": "1"}]  # fmt: skip
    ids = ask("/tokenize", template, None, messages=messages).json()
    used = ask(CHAT, template, "so", messages=messages).json()["usage"]
    assert used["prompt_tokens"] == ids["count"]


def test_tools_are_shown_to_the_model_unless_they_must_not_be_called(client: TestClient) -> None:
    def prompt(**more: Any) -> int:
        body = ASK | {"max_tokens": 1} | more
        return int(client.post(CHAT, json=body).json()["usage"]["prompt_tokens"])

    assert prompt() > prompt(tool_choice="none") == prompt(tools=None)


@pytest.mark.parametrize("parallel", [True, False])
def test_of_calls_that_must_not_be_parallel_the_first_is_reported(ask: Ask, parallel: bool) -> None:
    body = ASK | {"parallel_tool_calls": parallel, "max_tokens": 300}
    (choice,) = ask(CHAT, CALLING, CALL + CALL, **body).json()["choices"]
    streamed = streamed_calls(events(ask(CHAT, CALLING, CALL + CALL, **body, stream=True)))
    assert len(choice["message"]["tool_calls"]) == len(streamed) == 1 + parallel
    assert len({call["id"] for call in streamed}) == len(streamed)


def test_a_format_may_stand_beside_tools_that_it_does_not_forbid(client: TestClient) -> None:
    form = {"response_format": {"type": "json_object"}, "max_tokens": 40}
    for choice in ("none", "required"):
        told = client.post(CHAT, json=ASK | form | {"tool_choice": choice})
        assert told.status_code == 200, told.text


def test_an_operator_may_choose_the_format() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = CALLING
    made = Engine(load(loaded().model, tokenizer))
    text = "[look_up(x='p')]"
    answer = Grammar.regex(re.escape(text))
    for family, found in (("pythonic", True), (None, False)):
        with client_of(api_of(made, tool_format=family)) as client, saying(made, lambda: answer):
            told = client.post(CHAT, json=ASK | {"max_tokens": 60}).json()
        message = told["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == found
        assert message["content"] == (None if found else text)
