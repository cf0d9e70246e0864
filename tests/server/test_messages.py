"""Anthropic's interface: whole answers, their events, tools, thoughts and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import (
    CALLING,
    CHAT,
    MESSAGES,
    OPENED,
    RESPONSES,
    USER,
    Ask,
    api_of,
    client_of,
    events,
    responded,
    stream_of,
    streamed_calls,
    templated,
)

import tiny
from draftsmith.server.schema import arguments_of

COUNT = "/v1/messages/count_tokens"
PLAIN = tiny.TEMPLATE
SHOWING = (
    "{% for m in messages %}<{{ m.role }} {{ m.content }} {{ m.reasoning_content }} "
    "{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}>{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}"
)
TOOL = {"name": "f", "description": "does it", "input_schema": {
    "type": "object", "properties": {"a": {"enum": ["p", "q"]}}, "required": ["a"],
    "additionalProperties": False}}  # fmt: skip
CALL = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> é"}}</tool_call>'


def asked(ask: Ask, template: str, answer: str | None, **more: Any) -> dict[str, Any]:
    """The message, which is the same whole and in events."""
    body = {"model": "tiny", "max_tokens": 300, "messages": [USER]} | more
    whole: dict[str, Any] = ask(MESSAGES, template, answer, **body).json()
    streamed = message_of(stream_of(ask(MESSAGES, template, answer, stream=True, **body)))
    ids = [block.pop("id", None) for block in streamed["content"]]
    assert [block.pop("id", None) is None for block in whole["content"]] == [i is None for i in ids]
    for name in ("content", "stop_reason", "stop_sequence", "role", "type", "model"):
        assert streamed[name] == whole[name], name
    used = [sum(map(one["usage"].get, _INPUT)) for one in (whole, streamed)]
    assert used[0] == used[1]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    return whole


_INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the events."""
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == (
        "message_start", "message_delta", "message_stop"
    )  # fmt: skip
    message: dict[str, Any] = start["message"]
    assert start["message"]["usage"].keys() == delta["usage"].keys()
    assert message["content"] == []
    assert message["stop_reason"] is None
    written = ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            written = ""
            continue
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                given = arguments_of(written)
                block["input"] = given if isinstance(given, dict) else {"": given}
            continue
        told = dict(event["delta"])
        kind = told.pop("type")
        ((name, text),) = told.items()
        if kind == "input_json_delta":
            written += text
        else:
            block[name] += text
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def test_a_message_says_what_a_chat_does(ask: Ask) -> None:
    told = asked(ask, PLAIN, None, max_tokens=8, system="be kind")
    messages = [{"role": "system", "content": "be kind"}, USER]
    chat = ask(CHAT, PLAIN, None, max_tokens=8, messages=messages).json()
    text = chat["choices"][0]["message"]["content"]
    assert told["content"] == [{"type": "text", "text": text}]
    assert told["stop_reason"] == "max_tokens"
    assert told["usage"]["output_tokens"] == 8
    assert told["id"].startswith("msg_")


def test_an_end_says_why(ask: Ask) -> None:
    told = asked(ask, PLAIN, "the fox says hello")
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)
    told = asked(ask, PLAIN, "the fox says hello", stop_sequences=["none", "says"])
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "says")
    assert told["content"][0]["text"] == "the fox "
    told = asked(ask, PLAIN, "the fox <|end|>", stop_sequences=["<|end|>"])
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "<|end|>")


def test_thoughts_and_calls_are_blocks_in_order(ask: Ask) -> None:
    template = "{% if tools %}<tool_call>{% endif %}" + OPENED
    text = f"the fox</think>\n\nI call.\n{CALL}\n{CALL}"
    told = asked(
        ask, template, text, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 9}
    )
    use = {"type": "tool_use", "name": "f", "input": {"a": "</tool_call> é"}}
    assert told["content"] == [
        {"type": "thinking", "thinking": "the fox", "signature": ""},
        {"type": "text", "text": "I call."}, use, use,
    ]  # fmt: skip
    assert told["stop_reason"] == "tool_use"
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(asked(ask, template, text, tools=[TOOL], tool_choice=choice)["content"]) == 3


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_call_can_be_forced(ask: Ask, choice: Any) -> None:
    (block,) = asked(ask, CALLING, None, tools=[TOOL], tool_choice=choice)["content"]
    assert (block["type"], block["name"]) == ("tool_use", "f")
    assert block["input"]["a"] in ("p", "q")


def test_an_answer_can_follow_a_schema(ask: Ask) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["red", "blue"]}}
    told = asked(ask, PLAIN, None, output_config={"format": form})
    assert json.loads(told["content"][0]["text"]) in ("red", "blue")


def test_a_last_message_of_the_assistant_is_continued(ask: Ask) -> None:
    said = {"role": "assistant", "content": "the quick "}
    told = asked(ask, PLAIN, None, messages=[USER, said], max_tokens=6)
    chat = ask(CHAT, PLAIN, None, messages=[USER, said], max_tokens=6,
               continue_final_message=True).json()  # fmt: skip
    assert told["content"][0]["text"] == chat["choices"][0]["message"]["content"]


HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "text", "text": "on"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "so", "signature": "x"}, {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "p"}},
        {"type": "tool_use", "id": "t2", "name": "f", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
         "content": [{"type": "text", "text": "two"}], "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "more"}]},
]  # fmt: skip


def test_a_history_is_the_chats(ask: Ask) -> None:
    chat = [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "go\non"},
        {"role": "assistant", "content": "ok", "reasoning_content": "so", "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": text}}
            for name, text in (("t1", '{"a": "p"}'), ("t2", "{}"))]},
        {"role": "tool", "content": "one", "tool_call_id": "t1"},
        {"role": "tool", "content": "two", "tool_call_id": "t2"},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    system = [{"type": "text", "text": text} for text in "ab"]
    told = asked(ask, SHOWING, "x", messages=HISTORY, system=system, tools=[TOOL])
    used = ask(CHAT, SHOWING, "x", messages=chat, tools=[{"type": "function", "function": {
        "name": "f", "parameters": TOOL["input_schema"]}}]).json()["usage"]  # fmt: skip
    assert sum(map(told["usage"].get, _INPUT)) == used["prompt_tokens"]
    named = ask(MESSAGES, SHOWING, "x", messages=HISTORY, max_tokens=5).headers["warning"]
    assert "is_error of messages[2]" in named
    counted = ask(COUNT, SHOWING, "x", messages=HISTORY, system=system, tools=[TOOL]).json()
    assert counted == {"input_tokens": used["prompt_tokens"]}


def test_what_is_ignored_is_named(ask: Ask) -> None:
    odd = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "so"}]
    named = ask(
        MESSAGES, PLAIN, "x", max_tokens=5, mcp_servers=[], thinking={"type": "enabled"},
        messages=[USER, {"role": "assistant", "content": odd}, USER],
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    ).headers["warning"]  # fmt: skip
    for told in ("'mcp_servers'", "thinking", "redacted_thinking", "tools[0]"):
        assert told in named
    assert "warning" not in ask(MESSAGES, PLAIN, "x", max_tokens=5, messages=[USER],
                                metadata={"user_id": "1"}).headers  # fmt: skip


def test_errors_have_anthropics_shape() -> None:
    with client_of(api_of(keys=("secret",))) as client:

        def told(path: str = MESSAGES, key: str = "secret", **body: Any) -> tuple[int, str, str]:
            sent = {"max_tokens": 5, "messages": [USER]} | body
            response = client.post(path, json=sent, headers={"x-api-key": key})
            error = response.json()
            assert error["type"] == "error"
            return response.status_code, error["error"]["type"], error["error"]["message"]

        assert told(key="wrong")[:2] == (401, "authentication_error")
        for more in ({"max_tokens": None}, {"temperature": 1.5}, {"stop_sequences": [""]}):
            assert told(**more)[:2] == (400, "invalid_request_error")
            assert "".join(more) in told(**more)[2]
        assert told(COUNT, model="other")[:2] == (404, "not_found_error")
        headers = {"authorization": "Bearer secret"}
        body = {"max_tokens": 2, "messages": [USER]}
        assert client.post(MESSAGES, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("arguments", [
    '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', '\n {"a": 1}',
])  # fmt: skip
def test_arguments_that_are_written_as_a_text(ask: Ask, arguments: str) -> None:
    """No response may have a number that is not finite, or half of a surrogate pair."""
    call = json.dumps({"name": "f", "arguments": arguments})
    answer = f"<tool_call>{call}</tool_call>"
    (block,) = asked(ask, CALLING, answer, tools=[TOOL | {"input_schema": {}}])["content"]
    assert block["input"] == ({"a": 1} if "1}" in arguments else {"": arguments})
    tools = [{"type": "custom", "name": "f"}]
    response, _ = responded(ask, CALLING, answer, tools=tools)
    assert response["output"][0]["input"] == arguments


@pytest.mark.parametrize("limit", [4, 30, 60])
def test_a_call_that_is_cut_off_keeps_its_arguments_so_far(ask: Ask, limit: int) -> None:
    """In all interfaces, whole and streamed, as OpenAI and Anthropic do it."""
    given = json.dumps({"a": "word " * 30})
    answer = f'So.\n<tool_call>{{"name": "f", "arguments": {given}}}</tool_call>'
    function = {"name": "f", "parameters": {"type": "object"}}
    tools: Any = [{"type": "function", "function": function}]
    body: dict[str, Any] = {"messages": [USER], "tools": tools, "max_tokens": limit, "seed": 1}
    (choice,) = ask(CHAT, CALLING, answer, **body).json()["choices"]
    assert choice["finish_reason"] == "length"
    calls = choice["message"].get("tool_calls")
    chunks = events(ask(CHAT, CALLING, answer, stream=True, **body))
    if calls is None:  # it is cut off before the arguments
        assert answer.startswith(choice["message"]["content"])
        assert streamed_calls(chunks) == []
        return
    written = calls[0]["function"]["arguments"]
    assert given.startswith(written)
    assert choice["message"]["content"] == "So."
    assert streamed_calls(chunks)[0]["function"] == calls[0]["function"]

    message = asked(ask, CALLING, answer, max_tokens=limit, tools=[TOOL | {"input_schema": {}}])
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][1]["input"] == {"": written}

    tools = [{"type": "function", **function}]
    response, _ = responded(ask, CALLING, answer, max_output_tokens=limit, tools=tools)
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["status"] == "incomplete"
    assert response["output"][1]["arguments"] == written


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }} {{ m.content }}>"
    "{% endfor %}"
)
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "<{{ m.role }} {{ m.content }}>{% endfor %}"
)


DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<{{ m.role }} {{ m.content }}>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "shown", "warned"),
    [
        (tiny.TEMPLATE, None, ""),
        (FIRST, "<system a\n\nb><user c><user d><assistant e><user f>", "after others"),
        (DROPS, "<system a\n\nb><user c><user d><assistant e><user f>", "after others"),
        (STRICT, "<user a\n\nb\n\nc\n\nd><assistant e><user f>", "at all"),
    ],
)
def test_the_order_of_roles_is_one_that_the_template_accepts(
    template: str, shown: str | None, warned: str
) -> None:
    """Codex sends two system messages, and Claude Code sends some between others."""
    roles = ["developer", "developer", "user", "developer", "assistant", "developer"]
    items = [{"role": r, "content": text} for r, text in zip(roles, "abcdef", strict=True)]
    turns = [one | {"role": one["role"].replace("developer", "system")} for one in items]
    with templated(template) as client:
        turned = {"max_tokens": 1, "system": "a", "messages": turns[1:]}
        for path, body in (MESSAGES, turned), (RESPONSES, {"input": items, "max_output_tokens": 1}):
            response = client.post(path, json=body)
            assert response.status_code == 200
            assert warned in response.headers.get("Warning", "")
            if shown is not None:
                usage, wanted = response.json()["usage"], tiny.tokenizer()(shown)["input_ids"]
                assert usage["input_tokens"] == len(wanted)


def test_types_of_thinking(ask: Ask) -> None:
    for kind in ("adaptive", "between_tools", "disabled"):
        body = {"max_tokens": 1, "messages": [USER], "thinking": {"type": kind}}
        assert ask(MESSAGES, PLAIN, None, **body).status_code == 200


def test_a_text_after_results_is_joined_where_the_template_refuses_it() -> None:
    template = SHOWING.replace(
        "<{{",
        "{% if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool' %}"
        "{{ raise_exception('a user after a result') }}{% endif %}<{{", 1,
    )  # fmt: skip
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "p"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "ok"}
    turns = [USER, {"role": "assistant", "content": [use]}]
    last = {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}
    joined = {"role": "user", "content": [result | {"content": "ok\n\ngo on"}]}
    used = []
    with templated(template, max_output=4) as client:
        for turn in (last, joined):
            body = {"messages": [*turns, turn], "tools": [TOOL]}
            response = client.post(COUNT, json=body)
            assert response.status_code == 200, response.text
            used.append(response.json()["input_tokens"])
    assert used[0] == used[1]


def test_what_a_template_refuses_is_adapted_to_it() -> None:
    """Efforts that it does not know, tools without descriptions, text beside thoughts and calls."""
    template = (
        "{% if reasoning_effort and reasoning_effort != 'low' %}{{ raise_exception('unknown') }}"
        "{% endif %}{% for t in tools or [] %}{{ t.function.description + '' }}{% endfor %}"
        "{% for m in messages %}{% if m.tool_calls and m.content and m.reasoning_content %}"
        "{{ raise_exception('both') }}{% endif %}" + SHOWING.partition("%}")[2]
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "p"}'}}
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call]}
    chat = [USER, said, {"role": "tool", "tool_call_id": "1", "content": "ok"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with templated(template) as client:
        for effort, warned in ("low", False), ("high", True):
            body = {"messages": chat, "tools": tools, "max_tokens": 1, "reasoning_effort": effort}
            response = client.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            said_so = response.headers.get("Warning", "")
            assert ("reasoning_effort='high' was ignored" in said_so) is warned
