"""What no request can get is refused, and the error says what is wrong with which field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from serving import ASK, CHAT, MESSAGES, RESPONSES, TEXT, USER, templated
from starlette.testclient import TestClient

import tiny
from draftsmith.server import schema
from draftsmith.server.schema import CompletionRequest, Section

TEMPLATE = "{% if tools %}<tool_call>{% endif %}" + tiny.TEMPLATE


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """What fails unexpectedly is a 500, as for users."""
    with templated(TEMPLATE, allow_drafters=True) as made:
        made._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
        yield made


BLOCK = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
TOOL = {"type": "function", "name": "f"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
SCHEMA_TOOL = {"name": "f", "input_schema": {}}
PREFIX = [USER, {"role": "assistant", "content": "a"}]
CALLED = {"role": "assistant", "content": "a", "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    """A message of these parts, as a field."""
    return {"messages": [USER, {"role": role, "content": [*content]}, USER]}


def custom(**more: Any) -> dict[str, Any]:
    """A tool of free text, as a field."""
    return {"tools": [TOOL, {"type": "custom", "name": "x"} | more]}


def unique(form: str) -> dict[str, Any]:
    """A tool with parameters that no grammar can follow."""
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    if form == "function":
        return {"type": "function", "function": {"name": "g", "parameters": schema}}
    return {"name": "g", form: schema}


REFUSED: list[tuple[Any, ...]] = [
    # the options of sampling
    (TEXT, {"n": True}, "n: "), (TEXT, {"n": 0}, "n: "), (TEXT, {"temperature": 3}, "temperature"),
    (TEXT, {"top_p": 0}, "top_p"), (TEXT, {"max_tokens": -1}, "max_tokens: "),
    (TEXT, {"stream_options": {}}, "needs stream=true"),
    (TEXT, {"logit_bias": {"x": 1}}, "token ids"),
    (TEXT, {"logit_bias": {"99999": 1}}, "token ids from 0", "logit_bias"),
    (TEXT, {"stop_token_ids": [-1]}, "token ids from 0", "stop_token_ids"),
    (CHAT, {"max_tokens": "ten"}, "max_tokens: Input should be a valid integer, got 'ten'"),
    (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens: "),
    (CHAT, {"top_logprobs": 2}, "needs logprobs=true"),
    (TEXT, {"drafter": "nobody"}, "drafter", None),
    (CHAT, {"stop": ["a"] * 17}, "at most 16"), (CHAT, {"stop": 5}, "valid string"),
    (TEXT, {"best_of": 3}, "by n, and choose"), (TEXT, {"n": 2, "best_of": 1}, "by n, and choose"),
    (CHAT, {"prediction": {"type": "content", "content": [{"type": "image"}]}}, "text only",
     "content"),
    (CHAT, {"thinking_token_budget": 5}, "thoughts in its chat template"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "must not set"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "must not set"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens: "),
    (RESPONSES, {"temperature": 9}, "temperature"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"), (MESSAGES, {"temperature": 1.5}, "temperature"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    (MESSAGES, {"thinking": {"type": "enabeld"}}, "thinking"),
    # prompts
    (TEXT, {"suffix": "end"}, "gap"), (TEXT, {"echo": True, "suffix": "end"}, "suffix"),
    (TEXT, {"echo": "yes"}, "boolean"),
    (TEXT, {"prompt": [5, None]}, "prompt.1: Input should be a valid integer"),
    (TEXT, {"prompt": 5}, "prompt: Input should be a valid string, got 5"),
    ("/detokenize", {"tokens": [99999]}, "outside"),
    ("/tokenize", {"prompt": None}, "a prompt or messages", None),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "a prompt or messages", None),
    ("/tokenize", {"prompt": None, "messages": []}, "messages: List should have at least 1 item"),
    # formats
    (CHAT, {"response_format": {"type": "json_schem", "json_schema": {"schema": {}}}},
     "got {'type': 'json_schem', 'json_schema': {'schema': {}}}"),
    (TEXT, {"response_format": {"type": "xml"}}, "response_format"),
    (TEXT, {"response_format": {"type": "regex", "pattern": "("}}, "response_format: this regular"),
    (TEXT, {"response_format": {"type": "json_schema", "schema": {"type": "strin"}}}, "strin"),
    (CHAT, {"tools": [FUNCTION, unique("function")], "tool_choice": "required"}, "tools: this",
     "tools"),
    (MESSAGES, {"tools": [unique("input_schema")], "tool_choice": {"type": "any"}}, "tools: this"),
    (CHAT, {"tools": [FUNCTION], "response_format": {"type": "json_object"}}, "forbid every call"),
    (RESPONSES, {"text": {"format": 5}}, "text"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format must be", "text.format"),
    (MESSAGES, {"output_config": {"format": {"type": "xml"}}}, "output_config"),
    # messages
    (CHAT, {"messages": [{"role": "user", "contnet": "hi"}]},
     "messages.0: a message of the role 'user' needs content; send a text, or '' for none; is it "
     "in 'contnet'?"),
    (CHAT, {"messages": [{"rol": "user", "content": "hi"}]},
     "messages.0.role: Field required; is it in 'rol'?"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "txt": "hi"}]}]},
     "a part of the type 'text' needs text; is it in 'txt'?", "content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "type: Field required"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
     "messages.0.content.0.text: "),
    *((CHAT, {"messages": [{"role": role} | more, USER]}, f"{role!r} needs content")
      for role in ("system", "user", "tool") for more in ({}, {"content": None})),
    (CHAT, {"messages": IMAGE}, "text only", "content"),
    (CHAT, {"messages": PREFIX}, "send continue_final_message=true to continue it"),
    (CHAT, {"messages": PREFIX, "add_generation_prompt": True, "continue_final_message": True},
     "remove one of them"),
    (CHAT, {"messages": PREFIX, "add_generation_prompt": False, "continue_final_message": False},
     "set one of them to true"),
    (CHAT, {"continue_final_message": True},
     "needs a last message with the role 'assistant', got 'user'"),
    (CHAT, {"messages": [CALLED], "continue_final_message": True}, "without tool calls"),
    (CHAT, {"chat_template_kwargs": {"continue_final_message": False},
            "continue_final_message": True}, "send one of them"),
    (CHAT, {"messages": PREFIX, "continue_final_message": "yes"}, "valid boolean"),
    (CHAT, {"chat_template_kwargs": {"add_generation_prompt": "no"}}, "must be true or false",
     "add_generation_prompt"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, said(), "messages[1] needs content"),
    (MESSAGES, said({"type": "image", "source": {}}), "text only"),
    (MESSAGES, {"system": "be", **said(BLOCK, RESULT | {"content": 5})},
     "messages[1].content[1].content: "),
    (MESSAGES, said(BLOCK, {"type": "text", "text": 5}), "messages[1].content[1].text: "),
    *((MESSAGES, said(BLOCK, block, role=role),
       f"messages[1].content[1]: a {block['type']} block must be in a message of the {other}")
      for role, other, block in (
          ("user", "assistant", {"type": "tool_use", "id": "c", "name": "f", "input": {}}),
          ("user", "assistant", {"type": "thinking", "thinking": "hm", "signature": ""}),
          ("assistant", "user", RESULT))),
    # items
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"input": []}, "input"), (RESPONSES, {"input": [{"content": "hello"}]}, "input"),
    (RESPONSES, {"input": [{"type": "massage"}]}, "no item of a known type: 'massage'", "input"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "1"}]}, "no items to refer to"),
    (RESPONSES, {"input": [{"role": "user"}]}, "needs content"),
    (RESPONSES, {"input": [{"type": "message", "role": "user", "content": None}]}, "needs content"),
    (RESPONSES, {"input": [{"type": "function_call", "name": 5}]}, "name"),
    (RESPONSES, {"instructions": "be", "input": [USER, USER | {"content": 5}]}, "input[1].content"),
    (RESPONSES, {"input": [USER, USER, {"type": "reasoning", "content": 5}]}, "input[2].content"),
    (RESPONSES, {"input": [{"type": "reasoning", "content": [5]}]}, "content"),
    (RESPONSES, {"input": [CALL | {"arguments": {}}]}, "arguments"),
    (RESPONSES, {"input": [OUTPUT | {"call_id": 5}]}, "call_id"),
    *((RESPONSES, {"input": [USER, OUTPUT | {"output": output}]}, "text only", "content")
      for output in (
           {"type": "computer_screenshot", "image_url": "data:…"},
           [{"type": "computer_screenshot", "image_url": "data:…"}],
           [{"type": "input_image", "image_url": "x"}])),
    # tools
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
     "parameters"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "needs a name"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0"),
    (RESPONSES, custom(format=5), "tools[1].format: "),
    (RESPONSES, custom(format={"definition": 5}), "definition"),
    (RESPONSES, custom(description=5), "description"), (RESPONSES, custom(name=["x"]), "name"),
    (RESPONSES, {"tools": [TOOL | {"description": 5}]}, "description"),
    (RESPONSES, {"tools": [TOOL | {"parameters": 5}]}, "parameters"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "name"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": 5}]}, "input_schema"),
    (MESSAGES, {"tools": [{"name": 5, "input_schema": {}}]}, "name"),
    (MESSAGES, {"tools": [{"name": "f", "inputschema": {}}]},
     "tools[0].input_schema: Field required; is it in 'inputschema'?"),
    # calls that are asked for
    (CHAT, {"tool_choice": "always"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "without functions"),
    *((path, {"tools": tools, "tool_choice": choice}, "tool") for path, tools, choices in (
        (RESPONSES, [TOOL], ("requird", {"type": "functon", "name": "f"}, {"type": ["function"]},
                             {"type": "web_search"}, {"type": "function", "name": "g"})),
        (RESPONSES, [], ("requird", "required", {"type": "function", "name": "f"})),
        (RESPONSES, [{"type": "web_search"}], ("required", {"type": "web_search"})),
        (MESSAGES, [SCHEMA_TOOL], ({"type": "anny"}, {"type": ["any"]}, {"type": "tool"},
                                   {"type": "auto", "disable_parallel_tool_use": "yes"})),
        (MESSAGES, [], ({"type": "any"}, {"type": "tool", "name": "f"}, {"type": "anny"})),
    ) for choice in choices),
    (MESSAGES, {"tools": [SCHEMA_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
     "no tool 'g'"),
    (RESPONSES, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}},
     "send the tools that are allowed"),
]  # fmt: skip
"""Path, fields, a part of the message, and what the error names if that is not the last field."""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[0]} {row[1]}"[:80])
def test_the_error_says_what_is_wrong_with_which_field(
    client: TestClient, row: tuple[Any, ...]
) -> None:
    path, more, message, *other = row
    response = client.post(path, json=ASK[path] | more)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    if path != MESSAGES:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == [None, *more, *other][-1]


BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "there is no body; send a JSON object"),
    (b'{"x": ' * 50_000, 400, "the body is nested too deeply"),
    (b'{"prompt": "\xff"}', 400, "the body is not JSON: 'utf-8' codec"),
    (b'{"prompt": ' + b"9" * 5000 + b"}", 400, "the body is not JSON: Exceeds the limit"),
    (b'{"prompt": "' + b"a" * 4_000_000 + b'"}', 413, ""),
    *((body, 400, "") for body in (
        b"{", b"null", b"[1]", b'"a"', b"[" * 50_000, b'{"prompt": "\\ud800"}', b'{"prompt": 5}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}")),
    *((b'{"prompt": "a", "temperature": 1, "max_tokens": 1, ' + more + b"}", status, "")
      for status, mores in (
          (400, (b'"temperature": NaN', b'"top_p": NaN', b'"min_p": Infinity',
                 b'"presence_penalty": 1e400', b'"logit_bias": {"5": NaN}',
                 b'"logit_bias": {"5": -Infinity}', b'"repetition_penalty": 1e-300',
                 b'"repetition_penalty": 0', b'"repetition_penalty": 1e300')),
          (200, (b'"temperature": 1e-30, "repetition_penalty": 0.01, "logit_bias": {"5": 100}',
                 b'"temperature": 1e-30, "repetition_penalty": 100, "logit_bias": {"5": 100}')),
      ) for more in mores),
]  # fmt: skip
"""Body, status, and how the error begins."""


@pytest.mark.parametrize(("body", "status", "why"), BODIES, ids=range(len(BODIES)))
def test_no_body_is_a_crash(client: TestClient, body: bytes, status: int, why: str) -> None:
    headers = {"content-type": "application/json"}
    response = client.post(TEXT, content=body, headers=headers)
    assert response.status_code == status
    if status == 200:  # unless it is a form, which a foreign page may send without being asked
        form = {"content-type": "text/plain"}
        assert client.post(TEXT, content=body, headers=form).status_code == 400
        return
    message = response.json()["error"]["message"]
    assert message
    assert message.startswith(why)


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_no_answer_could_repeat_are_refused(client: TestClient, stream: bool) -> None:
    schema = '{"type": "object", "properties": {"x": {"type": "number", "maximum": 1e999}}}'
    tool = f'{{"type": "function", "name": "f", "parameters": {schema}}}'
    body = f'{{"input": "a", "stream": {str(stream).lower()}, "tools": [{tool}]}}'
    headers = {"content-type": "application/json"}
    response = client.post(RESPONSES, content=body.encode(), headers=headers)
    assert response.status_code == 400
    assert "not finite" in response.json()["error"]["message"]


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
    headers = {"content-type": "application/json"}
    for depth in (200, 260, *range(880, 1000, 4)):
        more = place.format(value='{"a":' * depth + "{}" + "}" * depth)
        body = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, {more}}}'
        response = client.post(CHAT, content=body, headers=headers)
        assert response.status_code in (200, 400), (depth, response.text)


def test_arguments_of_any_depth_are_taken(client: TestClient) -> None:
    for arguments in ("[" * 100_000, "[" * 900 + "]" * 900, "9" * 5000, "{", ""):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
        response = client.post(CHAT, json=ASK[CHAT] | {"messages": messages})
        assert response.status_code in (200, 400)


def test_other_errors_have_a_status_of_their_own(client: TestClient) -> None:
    for path in (CHAT, TEXT, RESPONSES, MESSAGES):
        response = client.post(path, json=ASK[path] | {"model": "gpt-4"})
        assert response.status_code == 404
        kind = "not_found_error" if path == MESSAGES else "invalid_request_error"
        assert response.json()["error"]["type"] == kind
    for more in ({"prompt": ""}, {"prompt": []}, {"prompt": [5, 99999]}, {"prompt": "a " * 3000}):
        for echo in ({}, {"echo": True, "logprobs": 1}):
            response = client.post(TEXT, json=ASK[TEXT] | more | echo)
            assert response.status_code == 400
            code = "context_length_exceeded" if "a " in more["prompt"] else None
            assert response.json()["error"]["code"] == code
    assert client.get(TEXT).status_code == 405
    for path, near in (("/v1/chat/completion", CHAT), ("/v1/response", RESPONSES), ("/x/y", None)):
        response = client.post(path, json={})
        assert response.status_code == 404
        hint = f"; did you mean {near!r}?" if near else ""
        assert response.json()["error"]["message"] == f"there is no {path}{hint}"


def test_a_request_for_too_much_is_refused_before_anything_is_made(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body may ask for 128 answers to each of half a million prompts."""
    monkeypatch.setattr("draftsmith.server.api.Choice", None)
    response = client.post(TEXT, json={"prompt": ["a"] * 50, "n": 3, "suffix": "b"})
    assert response.status_code == 400
    assert "answers at a time" in response.json()["error"]["message"]


def errors(part: type[Section], name: str, value: Any) -> int:
    """How many errors a field has with this value."""
    try:
        part.model_validate({name: value})
    except ValidationError as wrong:
        return wrong.error_count()
    return 0


def test_a_list_of_wrong_items_makes_few_errors() -> None:
    """A body may have half a million of them, and each error takes memory and time."""
    parts = [one for one in vars(schema).values() if isinstance(one, type)]
    fields = [(part, name) for part in parts if issubclass(part, Section) for name in part.names()]
    assert (CompletionRequest, "prompt") in fields
    for part, name in fields:
        for items in ([None] * 1000, [{}] * 1000, [[None] * 1000] * 1000):
            assert errors(part, name, items) < 20, f"{part.__name__}.{name}"
