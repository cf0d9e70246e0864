"""What a request holds that nobody reads is refused, or named in a header; nothing vanishes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ASK, CHAT, MESSAGES, RESPONSES, TEXT, USER, api_of, client_of, templated
from starlette.testclient import TestClient

import tiny
from draftsmith.server.schema import (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    ResponsesRequest,
)

SHOWING = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.reasoning_content %}"
    "({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}{{ m.tool_call_id }}</s>{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}"
)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with templated(SHOWING) as made:
        yield made


@pytest.fixture(scope="module")
def tolerant() -> Iterator[TestClient]:
    with templated(SHOWING, tolerant=True) as made:
        yield made


def prompt_of(client: TestClient, items: list[Any]) -> tuple[str, str]:
    """A history as the model is shown it, and the header that names what is left out."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        tokenizer = type(tiny.tokenizer())
        apply = tokenizer.apply_chat_template

        def noted(self: Any, *given: Any, **options: Any) -> Any:
            seen.append(apply(self, *given, **options))
            return seen[-1]

        patch.setattr(tokenizer, "apply_chat_template", noted)
        response = client.post(RESPONSES, json={"input": items, "max_output_tokens": 1})
    assert response.status_code == 200, response.text
    return seen[-1], response.headers.get("warning", "")


# --- Responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("items", "shown"), [
    ([{"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "patch",
       "input": "a\n\"b\""},
      {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}],
     r'<c1 patch {"input": "a\n\"b\""}></s><s>tool: donec1</s>'),
    ([{"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed",
       "action": {"type": "exec", "command": ["ls"]}},
      {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"}],
     '<c1 local_shell {"action": {"type": "exec", "command": ["ls"]}}></s>'
     "<s>tool: a.txtc1</s>"),
    ([{"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "é", "stderr": ""}]}],
     '<c1 shell {"action": {"commands": ["ls"]}}></s>'
     '<s>tool: [{"stdout": "é", "stderr": ""}]c1</s>'),
    ([{"type": "apply_patch_call", "call_id": "c1", "operation": {"path": "x"}},
      {"type": "apply_patch_call_output", "call_id": "c1", "status": "completed"}],
     '<c1 apply_patch {"operation": {"path": "x"}}></s><s>tool: c1</s>'),
    ([{"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "roll",
       "arguments": '{"n": 2}', "output": "7"}],
     '<mcp_1 roll {"n": 2}></s><s>tool: 7mcp_1</s>'),
    ([{"type": "mcp_call", "id": "mcp_1", "name": "roll", "arguments": "{}", "output": None,
       "error": "no dice"}], "<mcp_1 roll {}></s><s>tool: no dicemcp_1</s>"),
    ([{"type": "function_call", "call_id": "c1", "name": "f"},
      {"type": "function_call_output", "call_id": "c1",
       "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]}],
     "<c1 f {}></s><s>tool: 4\n2c1</s>"),
])  # fmt: skip
def test_s3_calls_and_their_results_are_kept(
    client: TestClient, items: list[Any], shown: str
) -> None:
    said = {"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": "so"}]}  # fmt: skip
    assert prompt_of(client, [USER, *items]) == (
        f"<s>user: hello</s><s>assistant: {shown}", ""
    )  # fmt: skip
    assert prompt_of(client, [USER, said, *items]) == (
        f"<s>user: hello</s><s>assistant: so{shown}", ""
    )  # fmt: skip


@pytest.mark.parametrize("kind", [
    "web_search_call", "reasoning", "compaction", "mesage", "custom_tool_cal", "neu é\n\"",
])  # fmt: skip
def test_s3_an_item_that_no_chat_has_is_named(client: TestClient, kind: str) -> None:
    item = {"type": kind, "id": "x", "status": "completed", "role": "user", "content": "hidden"}
    prompt, named = prompt_of(client, [USER, item])
    assert prompt == "<s>user: hello</s>"
    assert "input[1]" in named
    assert kind.isascii() is (kind in named)
    assert ("did you mean 'message'" in named) == (kind == "mesage")
    assert ("did you mean 'custom_tool_call'" in named) == (kind == "custom_tool_cal")
    assert named.isascii()
    assert named.startswith('299 draftsmith "')
    streamed = client.post(RESPONSES, json={"input": [USER, item], "stream": True,
                                            "max_output_tokens": 1})  # fmt: skip
    assert streamed.headers["warning"] == named


THOUGHT = {"type": "reasoning", "summary": [],
           "content": [{"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
SAID = {"type": "message", "role": "assistant", "content": "so"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}


@pytest.mark.parametrize(("items", "shown", "lost"), [
    ([USER, THOUGHT, SAID], "<s>user: hello</s><s>assistant: (hm) so</s>", None),
    ([USER, THOUGHT, THOUGHT, SAID], "<s>user: hello</s><s>assistant: (hmhm) so</s>", None),
    ([USER, THOUGHT, CALLED], "<s>user: hello</s><s>assistant: (hm) <c1 f {}></s>", None),
    ([SAID, THOUGHT, CALLED], "<s>assistant: so</s><s>assistant: (hm) <c1 f {}></s>", None),
    ([THOUGHT, USER], "<s>user: hello</s>", 0),
    ([USER, THOUGHT], "<s>user: hello</s>", 1),
    ([USER, THOUGHT, USER, SAID], "<s>user: hello</s><s>user: hello</s><s>assistant: so</s>", 1),
    ([USER, THOUGHT, USER | {"role": "developer"}, SAID],
     "<s>user: hello</s><s>system: hello</s><s>assistant: so</s>", 1),
    ([CALLED, THOUGHT, RESULT, SAID],
     "<s>assistant: <c1 f {}></s><s>tool: 7c1</s><s>assistant: so</s>", 1),
])  # fmt: skip
def test_s3_reasoning_belongs_to_what_the_assistant_said_next(
    client: TestClient, items: list[Any], shown: str, lost: int | None
) -> None:
    prompt, named = prompt_of(client, items)
    assert prompt == shown
    assert (f"the reasoning in input[{lost}] was ignored" in named) == (lost is not None)
    assert bool(named) == (lost is not None)


PARTS = [{"type": "input_text", "text": "hi", "txt": "x", "annotations": [5]}]
BLOCK = {"type": "text", "text": "a"}
ANSWERED = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


@pytest.mark.parametrize(("path", "more", "named"), [
    *((RESPONSES, {"input": [USER, item, SAID]}, named) for item, named in (
        ({"role": "assistant", "contnet": "so"}, "'contnet' of input[1]; content"),
        (CALLED | {"args": "{}"}, "'args' of input[1]"),
        (CALLED | {"argumens": "{}"}, "'argumens' of input[1]; arguments"),
        (RESULT | {"result": "8"}, "'result' of input[1]"),
        (THOUGHT | {"contents": "hm"}, "'contents' of input[1]; content"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "p", "inptu": "x"},
         "'inptu' of input[1]; input"),
        ({"type": "mcp_call_output", "call_id": "c", "content": "x"}, "'content' of input[1]"),
        ({"type": "mcp_call", "call_id": "c", "name": "p", "arguments": "{}", "argument": "{}"},
         "'argument' of input[1]; arguments"))),
    (RESPONSES, {"input": [USER | {"content": PARTS}]}, "'txt' of input[0].content[0]"),
    (RESPONSES, {"input": [RESULT | {"output": PARTS}]}, "'txt' of input[0].output[0]"),
    *((MESSAGES, {"messages": [USER, {"role": role, "content": [BLOCK, block]}, USER]}, named)
      for role, block, named in (
          ("user", ANSWERED | {"content": PARTS}, "'txt' of messages[1].content[1].content[0]"),
          ("user", ANSWERED | {"text": "42"}, "'text' of messages[1].content[1]"),
          ("assistant", {"type": "thinking", "thinking": "hm", "text": "x"},
           "'text' of messages[1].content[1]"),
          ("assistant", {"type": "tool_use", "id": "c", "name": "f", "content": {"a": 1}},
           "'content' of messages[1].content[1]"))),
    (CHAT, {"messages": [USER, {
        "role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"},
        "audio": None, "annotations": [], "refusal": None}, USER]},
     "'function_call' of messages[1]"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": 1}}},
     "'strct' of response_format.json_schema"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f"}],
                 "tool_choice": {"type": "function", "name": "f", "nmae": 1}},
     "'nmae' of tool_choice"),
    (RESPONSES, {"text": {"fromat": {"type": "json_object"}}}, "'fromat' of text"),
    (RESPONSES, {"reasoning": {"efort": "low"}}, "'efort' of reasoning"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "p", "fromat": {"type": "text"}}]},
     "'fromat' of tools[0]"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "p", "format": {"defintion": "x"}}]},
     "'defintion' of tools[0].format"),
    (MESSAGES, {"messages": [USER | {"contents": "x"}]}, "'contents' of messages[0]"),
    (MESSAGES, {"messages": [USER | {"content": [{"type": "text", "text": "a", "txt": "b"}]}]},
     "'txt' of messages[0].content[0]"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "descripton": "x"}]},
     "'descripton' of tools[0]"),
    (CHAT, {"messages": [USER | {"content": [{"type": "text", "text": "a", "txt": "b"}]}]},
     "'txt' of messages[0].content[0]"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, "strct": True}]},
     "'strct' of tools[0]"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "paramters": {"a": 1}}}]},
     "'paramters' of tools[0].function"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "paramters": {"a": 1}}]},
     "'paramters' of tools[0]"),
])  # fmt: skip
def test_s3_a_field_of_a_part_that_is_not_read_is_named(
    client: TestClient, path: str, more: dict[str, Any], named: str
) -> None:
    response = client.post(path, json=ASK[path] | more)
    assert response.status_code == 200, response.text
    where, _, near = named.partition("; ")
    warning = f"the field {where} was ignored" + (f"; did you mean {near!r}" if near else "")
    assert warning in response.headers["warning"]
    assert response.headers["warning"].count("299 draftsmith") == 1


def test_s3_a_field_of_many_tools_is_named_once(client: TestClient) -> None:
    tools = [{"name": f"f{n}", "input_schema": {}, "strict": n != 5, "type": "custom"}
             for n in range(40)]  # fmt: skip
    found = client.post(MESSAGES, json=ASK[MESSAGES] | {"tools": [*tools, {"type": "web_search"}]})
    assert found.headers["warning"] == (
        "299 draftsmith \"tools[40] of the type 'web_search' was ignored\", "
        "299 draftsmith \"the field 'strict' of tools[0] and 38 more was ignored\""
    )


def test_s3_null_is_absent_everywhere(client: TestClient) -> None:
    nulls = dict.fromkeys(("n", "stream", "logprobs", "ignore_eos", "return_sources", "functions"))
    told, plain = (client.post(CHAT, json=ASK[CHAT] | more).json() for more in (nulls, {}))
    assert told["choices"] == plain["choices"]
    silent = [{"role": "user", "content": ""}, {"role": "assistant", "content": None}, USER]
    assert client.post(CHAT, json=ASK[CHAT] | {"messages": silent}).status_code == 200
    block = {"type": "text", "text": "a", "id": None, "input": None, "citations": None}
    body = ASK[MESSAGES] | {
        "messages": [{"role": "user", "content": [ANSWERED | {"is_error": None}, block]}],
        "tools": [{"name": "f", "input_schema": {}, "description": None}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
    }
    response = client.post(MESSAGES, json=body)
    assert response.status_code == 200, response.text
    assert "warning" not in response.headers
    dump = {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x", "caller": None,
            "namespace": None}  # fmt: skip
    shell = {"type": "shell_call", "call_id": "c", "action": {"a": 1}, "environment": None}
    prompt, named = prompt_of(client, [USER, dump, shell])
    assert '<c p {"input": "x"}><c shell {"action": {"a": 1}}>' in prompt
    assert named == ""
    assert prompt_of(client, [USER | {"type": None}]) == ("<s>user: hello</s>", "")


def test_s3_a_name_and_an_id_of_an_item_are_no_warning(client: TestClient) -> None:
    item = SAID | {"id": "msg_1", "status": "completed", "name": "ann", "phase": "final_answer"}
    assert prompt_of(client, [USER | {"name": "bob"}, item])[1] == ""


# --- more tokens than the server gives ------------------------------------------------------------


def test_an_answer_that_would_be_too_long_is_cut_and_the_cut_is_named() -> None:
    def chosen(body: dict[str, Any]) -> Any:
        return body["choices"][0]["finish_reason"]

    cases: list[tuple[str, str, Callable[[dict[str, Any]], Any], Any]] = [
        (CHAT, "max_tokens", chosen, "length"), (CHAT, "max_completion_tokens", chosen, "length"),
        (TEXT, "max_tokens", chosen, "length"),
        (RESPONSES, "max_output_tokens", lambda body: body["incomplete_details"]["reason"],
         "max_output_tokens"),
        (MESSAGES, "max_tokens", lambda body: body["stop_reason"], "max_tokens"),
    ]  # fmt: skip
    with client_of(api_of(max_output=5)) as client:
        for path, name, why, reason in cases:
            ask = {field: value for field, value in ASK[path].items() if "max" not in field}
            told, exact = (client.post(path, json=ask | {name: most}) for most in (32000, 5))
            streamed = client.post(path, json=ask | {name: 32000, "stream": True})
            named = f'299 draftsmith "{name}=32000 was lowered to 5, this server\'s limit"'
            assert told.headers["warning"] == streamed.headers["warning"] == named
            assert "warning" not in exact.headers
            assert why(told.json()) == reason
            usage = told.json()["usage"]
            assert usage.get("completion_tokens", usage.get("output_tokens")) == 5


# --- unknown fields -------------------------------------------------------------------------------

UNKNOWN = {"guided_json": {"type": "object"}, "skip_special_tokens": False, "num_ctx": 4096}


@pytest.mark.parametrize("path", [path for path in ASK if path not in (RESPONSES, MESSAGES)])
def test_s5_unknown_fields_are_refused_or_by_choice_named(
    client: TestClient, tolerant: TestClient, path: str
) -> None:
    plain = client.post(path, json=ASK[path])
    assert plain.status_code == 200
    assert "warning" not in plain.headers
    for name, value in UNKNOWN.items():
        error = client.post(path, json=ASK[path] | {name: value}).json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"unknown field '{name}'")
        assert client.post(path, json=ASK[path] | {name: None}).status_code == 200
    response = tolerant.post(path, json=ASK[path] | UNKNOWN)
    assert response.status_code == 200, response.text
    named = response.headers["warning"]
    assert all(f"'{name}'" in named for name in UNKNOWN)
    assert response.json().keys() == plain.json().keys()
    streamed = {"stream": True} if path in (CHAT, TEXT) else {}
    assert tolerant.post(path, json=ASK[path] | UNKNOWN | streamed).headers["warning"] == named


def test_s5_a_field_of_another_endpoint_is_no_suggestion(client: TestClient) -> None:
    for path, name, near in (
        (CHAT, "echo", None), (CHAT, "suffix", None), (CHAT, "logprob", "logprobs"),
        (TEXT, "message", None), (TEXT, "tempratur", "temperature"), (TEXT, "stop_words", None),
        (TEXT, "tools", None), ("/tokenize", "promt", "prompt"),
        ("/detokenize", "token", "tokens"),
    ):  # fmt: skip
        message = client.post(path, json=ASK[path] | {name: "a"}).json()["error"]["message"]
        assert f"'{name}'" in message
        assert near is None or f"did you mean '{near}'" in message
        assert f"did you mean '{name}'" not in message


def test_s5_what_is_known_is_checked_also_by_a_tolerant_server(tolerant: TestClient) -> None:
    assert tolerant.post(TEXT, json=ASK[TEXT] | {"n": "many", "x": 1}).status_code == 400


def test_s5_names_of_any_length_and_alphabet_fit_a_header(tolerant: TestClient) -> None:
    names = {"é\r\nSet-Cookie: a=b": 1, "a" * 5000: 1} | {f"field_{n}": 1 for n in range(200)}
    named = tolerant.post(TEXT, json=ASK[TEXT] | names).headers["warning"]
    assert len(named) <= 2000
    assert named.isascii()
    assert "\n" not in named


# --- the table of all fields ----------------------------------------------------------------------

COLUMNS = {CHAT: ChatRequest, TEXT: CompletionRequest, RESPONSES: ResponsesRequest,
           MESSAGES: MessagesRequest}  # fmt: skip


def fields() -> Iterator[tuple[str, str, str]]:
    """Endpoint, field, and what the page says becomes of it."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    table = page.partition("## Every field")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1 + len(COLUMNS) and "`" in cells[0]:
            for path, told in zip(COLUMNS, cells[1:], strict=True):
                for name in re.findall("`([a-z_]+)`", cells[0].partition(":")[0]) if told else ():
                    yield path, name, told


def test_every_field_is_treated_as_the_page_says(client: TestClient) -> None:
    found = list(fields())
    assert len(found) > 100
    assert len({(path, name) for path, name, _ in found}) == len(found)
    for path, name, told in found:
        read = name in COLUMNS[path].model_fields
        assert read == (told == "read" or name in ("previous_response_id", "conversation",
                                                   "background")), (path, name)  # fmt: skip
        if told == "read":
            continue
        value = True if name == "background" else "x"
        response = client.post(path, json=ASK[path] | {name: value})
        assert response.status_code == (400 if told == "refused" else 200), (path, name)
        named = f"'{name}'" in response.headers.get("warning", "")
        assert named == (told == "named"), (path, name)
