"""Calls of tools: parsed whatever the chunks are, and forced where that was asked for."""

from __future__ import annotations

import copy
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Ask, api_of, client_of, events, loaded, merged, stream_of, streamed_calls
from starlette.testclient import TestClient

import tiny
from draftsmith import Grammar
from draftsmith.engine.engine import Engine
from draftsmith.engine.sequence import Piece
from draftsmith.model.load import load
from draftsmith.server.answers import Answer, Choice
from draftsmith.server.calls.formats import family_of, markers_of
from draftsmith.server.calls.source import Call, Part, TextPart
from draftsmith.server.ignored import Ignored
from draftsmith.server.reader import Reader
from draftsmith.server.responses import chat_of
from draftsmith.server.schema import ResponsesRequest
from draftsmith.server.worker import Chunk

MARKERS = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "<|python_tag|>"}
NAMES = ["add", "look_up"]
ADD = ("add", {"a": 1, "b": [2, "x"]})
LOOK = ("look_up", {"word": "Ünï </tool_call"})


def spelt(call: tuple[str, Any], key: str = "arguments", indent: int | None = None) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False, indent=indent)


ANSWERS: list[tuple[Any, list[str | int], str, list[tuple[str, Any]]]] = [
    # Hermes and Qwen
    ("hermes", ["just <text> with < and <tool"], "just <text> with < and <tool", []),
    ("hermes", [f"<tool_call>\n{spelt(ADD)}\n</tool_call>"], "", [ADD]),
    ("hermes", ["See.\n<tool_call>", spelt(ADD), "\n</tool_call>\n<tool_call>", spelt(ADD),
                "</tool_call>\n"],
     "See.", [ADD, ADD]),
    ("hermes", [f"<tool_call>\n{spelt(ADD)}\n"], "", [ADD]),
    ("hermes", ["a <tool_call>{no}</tool_call> b"], "a <tool_call>{no}</tool_call> b", []),
    ("hermes", ["a <tool_call>{not"], "a <tool_call>{not", []),
    ("hermes", ["two\n\nparts \n"], "two\n\nparts \n", []),
    # no JSON, or no text
    *((family, [text], text, []) for family, text in (
        ("hermes", '<tool_call>{"name":"sub","arguments":{"t":"\\ud83d"}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"add\\ud83d","arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"add","arguments":"\\ud83d"}</tool_call>'),
        ("llama", '{"name": "add", "parameters": {"x": NaN}}'),
        ("mistral", '[TOOL_CALLS]sub{"x": 1e999}'),
    )),
    # Llama 3
    ("llama", ["no call {here}"], "no call {here}", []),
    ("llama", [spelt(ADD, "parameters")], "", [ADD]),
    ("llama", [3, spelt(ADD, "parameters")], "", [ADD]),
    ("llama", [f"{spelt(ADD, 'parameters', 2)}; {spelt(LOOK, 'parameters')}"], "", [ADD, LOOK]),
    ("llama", ['{"name": "nobody", "parameters": {}}'], '{"name": "nobody", "parameters": {}}', []),
    ("llama", ['{"answer": 42}'], '{"answer": 42}', []),
    ("llama", [' {"name": "add"'], ' {"name": "add"', []),
    # Mistral, with the marker as a special token, and newer
    ("mistral", [1, f" [{spelt(ADD)}, {spelt(LOOK)}]"], "", [ADD, LOOK]),
    ("mistral", [1, "add", 2, json.dumps(ADD[1])], "", [ADD]),
    ("mistral", [1, "add" + json.dumps(ADD[1]), 1, "look_up", 2, json.dumps(LOOK[1])], "",
     [ADD, LOOK]),
    ("mistral", ["plain text"], "plain text", []),
    ("mistral", ["[1, 2]"], "[1, 2]", []),
    (None, [f"<tool_call>{spelt(ADD)}</tool_call>"], f"<tool_call>{spelt(ADD)}</tool_call>", []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("family", "written", "text", "calls"), ANSWERS)
def test_calls_are_found_however_the_text_comes(
    size: int, family: Any, written: list[str | int], text: str, calls: list[tuple[str, Any]]
) -> None:
    reader, parts = Reader(family, NAMES, MARKERS), list[Part]()
    pieces = []
    for part in written:
        if isinstance(part, int):
            pieces.append(Piece("", part, "target", 0.0))
        else:
            cut = [part[i : i + size] for i in range(0, len(part), size)]
            pieces += [Piece(bit, 9, "target", 0.0) for bit in cut]
    for piece in pieces:
        parts += reader.push([piece])
    parts += reader.end()
    found = [part for part in merged(parts) if isinstance(part, Call)]
    assert "".join(part.text for part in parts if isinstance(part, TextPart)) == text
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)


def test_text_before_a_call_does_not_wait_for_it() -> None:
    reader = Reader("hermes", NAMES)
    assert reader.push([Piece("I will add. <to", 9, "target", 0.0)]) == [TextPart("I will add.")]
    assert reader.push([Piece("tal", 9, "target", 0.0)]) == [TextPart(" <total")]


class Template:
    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def get_added_vocab(self) -> dict[str, int]:
        return {"[ARGS]": 7, "<s>": 1}


def test_the_family_is_told_by_the_template() -> None:
    assert family_of(Template(None)) is None
    assert family_of(Template("{{ messages }}")) is None
    assert family_of(Template("{% if tools %}<tool_call>{% endif %}")) == "hermes"
    assert family_of(Template("{% if tools %}[AVAILABLE_TOOLS]{% endif %}")) == "mistral"
    assert family_of(Template('{% if tools %}{"name": f, "parameters": d}{% endif %}')) == "llama"
    assert markers_of(Template("")) == {7: "[ARGS]"}


@pytest.fixture(scope="module")
def client() -> Any:
    """A model whose template knows tools."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = (
        "{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}" + tiny.TEMPLATE
    )
    model = load(loaded().model, tokenizer)
    with client_of(api_of(Engine(model), max_output=400)) as client:
        yield client


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"],
        "additionalProperties": False}}}
    for name in NAMES
]  # fmt: skip
ASK = {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look_up"}}]
)
def test_a_call_can_be_forced(client: TestClient, choice: Any) -> None:
    body = ASK | {"tool_choice": choice}
    (told,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert told["finish_reason"] == "tool_calls"
    assert told["message"]["content"] is None
    (call,) = told["message"]["tool_calls"]
    names = NAMES if choice == "required" else ["look_up"]
    assert call["type"] == "function"
    assert call["function"]["name"] in names
    assert json.loads(call["function"]["arguments"]) in ({"x": "p"}, {"x": "q"})
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    (streamed,) = streamed_calls(chunks)
    assert streamed["index"] == 0
    assert streamed["function"] == call["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_are_shown_to_the_model_unless_they_must_not_be_called(client: TestClient) -> None:
    def prompt(**more: Any) -> int:
        body = ASK | {"max_tokens": 1} | more
        return int(client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    assert prompt() > prompt(tool_choice="none") == prompt(tools=None)


def choice_of(parts: list[str], reason: str, most_calls: int | None = None) -> Choice:
    """An answer in Hermes' format that came in parts and ended for a reason."""
    choice = Choice(reader=Reader("hermes", NAMES), most_calls=most_calls)
    result: Any = SimpleNamespace(finish_reason=reason)
    for number, part in enumerate(parts):
        last = result if number == len(parts) - 1 else None
        choice.take(Chunk(0, (Piece(part, 9, "target", 0.0),), (), (), last))
    return choice


def test_an_answer_that_was_cut_off_behind_a_call_says_so() -> None:
    call = f"<tool_call>{spelt(ADD)}</tool_call>"
    assert choice_of([call], "stop").finish_reason == "tool_calls"
    cut = choice_of([call, "<tool_call>{"], "length")
    assert (len(cut.calls), cut.finish_reason) == (1, "length")


def test_a_prompt_without_an_ended_answer_is_not_counted() -> None:
    """Two answers to each of two prompts; one answer to the second prompt has ended."""
    stats = SimpleNamespace(reused_tokens=2)
    result: Any = SimpleNamespace(prompt_tokens=[5] * 7, tokens=[6], stats=stats)
    choices = [Choice(), Choice(), Choice(), Choice(result=result)]
    usage = Answer("tiny", lambda _: b"", choices, prompts=2).usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 1)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    choices[1].result = choices[2].result = result
    assert Answer("tiny", lambda _: b"", choices, prompts=2).usage()["prompt_tokens"] == 14


def test_of_calls_that_must_not_be_parallel_the_first_is_told(client: TestClient) -> None:
    call = f"<tool_call>{spelt(ADD)}</tool_call>"
    for parts in ([call + call, call], [call, call + call]):
        assert len(choice_of(parts, "stop").calls) == 3
        assert len(choice_of(parts, "stop", 1).calls) == 1
    body = ASK | {"parallel_tool_calls": False, "max_tokens": 2}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    told = respond(client, input="hello", parallel_tool_calls=False).json()
    assert told["parallel_tool_calls"] is False


def test_a_format_that_forbids_every_call_is_refused(client: TestClient) -> None:
    form = {"response_format": {"type": "json_object"}, "max_tokens": 40}
    response = client.post("/v1/chat/completions", json=ASK | form)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
    for choice in ("none", "required"):
        told = client.post("/v1/chat/completions", json=ASK | form | {"tool_choice": choice})
        assert told.status_code == 200, told.text


def test_wrong_tools_are_refused(client: TestClient) -> None:
    for more in (
        {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tools": [{"type": "function", "function": {}}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "always"},
    ):
        response = client.post("/v1/chat/completions", json=ASK | more)
        assert response.status_code == 400, more


# --- /v1/responses ------------------------------------------------------------------------------


def respond(client: TestClient, **body: Any) -> Any:
    response = client.post("/v1/responses", json={"model": "tiny", "max_output_tokens": 8} | body)
    assert response.status_code == 200, response.text
    return response


def test_a_response_is_the_chats_answer(client: TestClient) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8}).json()
    told = respond(client, input="hello", instructions="be kind", metadata={"a": "b"},
                   tools=[{"type": "web_search"}], unknown=[1]).json()  # fmt: skip
    text = chat["choices"][0]["message"]["content"]
    (item,) = told["output"]
    assert item["content"][0] == {
        "type": "output_text", "text": text, "annotations": [], "logprobs": []
    }  # fmt: skip
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert item["status"] == "incomplete"
    assert told["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    streamed = stream_of(respond(client, input="hello", instructions="be kind", stream=True))
    kinds = [event["type"] for event in streamed]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                          "response.output_item.done", "response.incomplete"]  # fmt: skip
    deltas = [event["delta"] for event in streamed if event["type"].endswith("text.delta")]
    assert "".join(deltas) == text
    assert streamed[-1]["response"]["output"][0]["content"] == item["content"]


def test_a_response_calls_tools_and_takes_what_they_gave(client: TestClient) -> None:
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    forced = {"tools": tools, "tool_choice": "required", "max_output_tokens": 300}
    told = respond(client, input="hello", **forced).json()
    (call,) = told["output"]
    assert call["type"] == "function_call"
    assert told["status"] == "completed"
    streamed = stream_of(respond(client, input="hello", stream=True, **forced))
    assert [event["type"].partition(".")[2] for event in streamed] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    history = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
               {"type": "reasoning", "summary": []}, call, result]  # fmt: skip
    answer = respond(client, input=history, tools=tools, tool_choice="auto").json()
    chat = client.post("/v1/chat/completions", json={
        "max_tokens": 1, "tools": TOOLS, "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": ""},
            {"role": "tool", "content": "5"},
        ]}).json()  # fmt: skip
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_turn_that_said_and_called_is_one_message() -> None:
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a"}],
    }
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    history = [{"role": "user", "content": "hello"}, said, call, call | {"call_id": "2"}]
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    body = ResponsesRequest.model_validate({"input": history, "tools": tools})
    asked = chat_of(body, Ignored(body, strict=False))
    assert [message.role for message in asked.messages] == ["user", "assistant"]
    assert [made.id for made in asked.messages[1].tool_calls or ()] == ["1", "2"]
    assert [tool.model_dump() for tool in asked.tools or ()] == TOOLS


def test_a_refused_response_names_its_own_fields(client: TestClient) -> None:
    for more, param in (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"content": "hello"}]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ):
        error = client.post("/v1/responses", json={"input": "hello"} | more).json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param)


def test_a_response_can_follow_a_schema(client: TestClient) -> None:
    schema = {"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}
    form = {"format": {"type": "json_schema", "name": "sevens", "schema": schema}}
    told = respond(client, input="hello", text=form, max_output_tokens=50).json()
    assert told["output"][0]["content"][0]["text"] == "[7,7]"


@pytest.mark.parametrize("more", [
    {"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "c"}, {"input": []},
    {"input": [{"type": "item_reference", "id": "1"}]}, {"input": [{"role": "user", "content": 5}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [{"type": "function_call", "name": 5}]}, {"text": {"format": {"type": "xml"}}},
    {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
     "tools": [{"type": "function", "name": "f"}]},
    {"temperature": 9}, {"tool_choice": "always", "tools": [{"type": "function", "name": "f"}]},
])  # fmt: skip
def test_what_a_response_cannot_be_is_refused(client: TestClient, more: dict[str, Any]) -> None:
    response = client.post("/v1/responses", json={"input": "hello"} | more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


PATCH = {"type": "custom", "name": "patch", "description": "Patches.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}}  # fmt: skip
CALLING = "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}" + tiny.TEMPLATE


def test_a_tool_of_free_text_is_called_with_text(ask: Ask) -> None:
    given = '*** é "a"\n\\ </tool_call>'
    call = json.dumps({"name": "patch", "arguments": {"input": given}}, ensure_ascii=False)
    answer = f"So.\n<tool_call>{call}</tool_call>"
    body = {"input": "hello", "tools": [PATCH], "max_output_tokens": 300}
    told = ask("/v1/responses", CALLING, answer, **body)
    assert "warning" not in told.headers
    message, item = told.json()["output"]
    assert message["content"][0]["text"] == "So."
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", given)
    streamed = stream_of(ask("/v1/responses", CALLING, answer, stream=True, **body))
    kinds = [event["type"].partition(".")[2] for event in streamed]
    assert kinds[-5:] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    done = [event["item"] for event in streamed if event["type"].endswith("output_item.done")]
    assert done == streamed[-1]["response"]["output"]
    about = [event for event in streamed if "item_id" in event or "item" in event]
    ids = [event.get("item_id") or event["item"]["id"] for event in about]
    assert set(ids) == {item["id"] for item in done}
    assert done[1]["input"] == given
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    again = ask(
        "/v1/responses", CALLING, "so", **body | {"input": [*told.json()["output"], output]}
    )
    assert again.json()["output"][0]["content"][0]["text"] == "so"
    forced = {"tool_choice": {"type": "custom", "name": "patch"}, "max_output_tokens": 40}
    (item,) = ask("/v1/responses", CALLING, None, **body | forced).json()["output"]
    assert item["type"] in ("custom_tool_call", "message")  # whose text may be cut


def test_an_operator_may_choose_the_format() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = CALLING
    made = Engine(load(loaded().model, tokenizer))
    text = "[look_up(x='p')]"
    body = ASK | {"max_tokens": 60}
    for family, found in (("pythonic", True), (None, False)):
        api = api_of(made, tool_format=family)
        prepare, grammar = api.engine.prepare, Grammar.regex(re.escape(text))

        def says(options: Any, began: Any = None, prepare: Any = prepare, to: Any = grammar) -> Any:
            return prepare({**options, "grammar": to}, began)

        with client_of(api) as client, pytest.MonkeyPatch.context() as patch:
            patch.setattr(api.engine, "prepare", says)
            message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == found
        assert message["content"] == (None if found else text)
