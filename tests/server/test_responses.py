"""OpenAI's responses: whole answers, their events, tools and reasoning."""

from __future__ import annotations

import json

from serving import CALLING, CHAT, OPENED, RESPONSES, USER, Ask, responded

import tiny

FUNCTION = {"name": "add", "parameters": {
    "type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"],
    "additionalProperties": False}}  # fmt: skip
TOOL = {"type": "function", **FUNCTION}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}}  # fmt: skip


def test_a_response_is_the_chats_answer(ask: Ask) -> None:
    messages = [{"role": "system", "content": "be kind"}, USER]
    chat = ask(CHAT, tiny.TEMPLATE, None, messages=messages, max_tokens=8).json()
    response, kinds = responded(
        ask, tiny.TEMPLATE, None, max_output_tokens=8, instructions="be kind", unknown=[1],
        metadata={"a": "b"}, tools=[{"type": "web_search"}],
    )  # fmt: skip
    text = chat["choices"][0]["message"]["content"]
    (item,) = response["output"]
    assert item["content"] == [
        {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    ]
    assert response["status"] == item["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "output_text.done", "content_part.done", "output_item.done", "incomplete"
    ]  # fmt: skip


def test_a_response_calls_tools_and_takes_what_they_gave(ask: Ask) -> None:
    response, kinds = responded(ask, CALLING, None, tools=[TOOL], tool_choice="required")
    (call,) = response["output"]
    assert (call["type"], response["status"]) == ("function_call", "completed")
    assert json.loads(call["arguments"])["x"] in ("p", "q")
    assert [*dict.fromkeys(kinds)] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    history = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
               {"type": "reasoning", "summary": []}, call, result]  # fmt: skip
    answer = ask(RESPONSES, CALLING, "so", input=history, tools=[TOOL], tool_choice="auto").json()
    given = {"name": call["name"], "arguments": call["arguments"]}
    calls = [{"id": call["call_id"], "type": "function", "function": given}]
    messages = [USER, {"role": "assistant", "tool_calls": calls},
                {"role": "tool", "content": "5", "tool_call_id": call["call_id"]}]  # fmt: skip
    tools = [{"type": "function", "function": FUNCTION}]
    chat = ask(CHAT, CALLING, "so", messages=messages, tools=tools).json()
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_text_between_calls_comes_back_as_one_message(ask: Ask) -> None:
    say = {"type": "message", "role": "assistant"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "5"}
    text = [{"type": "output_text", "text": " and wait."}]
    history = [USER, say | {"content": "I call"}, call, say | {"content": text}, result]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}" \
               "{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"  # fmt: skip
    answer = ask(RESPONSES, template, "so", input=history, tools=[TOOL]).json()
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [USER, {"role": "assistant", "content": "I call\n and wait.", "tool_calls": calls},
                {"role": "tool", "content": "5", "tool_call_id": "1"}]  # fmt: skip
    tools = [{"type": "function", "function": FUNCTION}]
    chat = ask(CHAT, template, "so", messages=messages, tools=tools).json()
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_response_can_follow_a_schema(ask: Ask) -> None:
    schema = {"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}
    form = {"format": {"type": "json_schema", "name": "sevens", "schema": schema}}
    response, _ = responded(ask, tiny.TEMPLATE, None, text=form)
    assert response["output"][0]["content"][0]["text"] == "[7,7]"


def test_a_tool_of_free_text_is_called_with_text(ask: Ask) -> None:
    given = '*** é "a"\n\\ </tool_call>'
    call = json.dumps({"name": "patch", "arguments": {"input": given}}, ensure_ascii=False)
    answer = f"So.\n<tool_call>{call}</tool_call>"
    response, kinds = responded(ask, CALLING, answer, tools=[PATCH])
    message, item = response["output"]
    assert message["content"][0]["text"] == "So."
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", given)
    assert kinds[-5:] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    again, _ = responded(ask, CALLING, "so", tools=[PATCH], input=[*response["output"], output])
    assert again["output"][0]["content"][0]["text"] == "so"
    choice = {"type": "custom", "name": "patch"}
    (item,) = ask(RESPONSES, CALLING, None, tools=[PATCH], tool_choice=choice, input="hello",
                  max_output_tokens=40).json()["output"]  # fmt: skip
    assert item["type"] in ("custom_tool_call", "message")  # whose text may be cut


def test_a_response_has_an_item_of_reasoning(ask: Ask) -> None:
    response, _ = responded(ask, OPENED, "the fox\n</think>\n\nhello")
    items = [(item["type"], item["content"][0]["text"]) for item in response["output"]]
    assert items == [("reasoning", "the fox"), ("message", "hello")]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_tools_of_a_namespace_are_functions(ask: Ask) -> None:
    """Codex sends those of an MCP server so."""
    tools = [{"type": "namespace", "name": "mcp__w", "description": "?", "tools": [TOOL]}]
    response, _ = responded(ask, CALLING, None, tools=tools, tool_choice="required")
    (call,) = response["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__w", "add")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    body = {"input": [{"role": "user", "content": "hello"}, call, result], "tools": tools}
    again = ask(RESPONSES, CALLING, "so", **body)
    assert "Warning" not in again.headers
    plain = {**call, "name": "mcp__w__add"}
    del plain["namespace"]
    flat = {**TOOL, "name": "mcp__w__add"}
    body = {"input": [{"role": "user", "content": "hello"}, plain, result], "tools": [flat]}
    usual = ask(RESPONSES, CALLING, "so", **body)
    assert again.json()["usage"]["input_tokens"] == usual.json()["usage"]["input_tokens"]
    inner = {"type": "namespace", "name": "own", "tools": [TOOL, PATCH]}
    chosen = {"type": "custom", "namespace": "own", "name": "patch"}
    forced = ask(RESPONSES, CALLING, None, input="hello", tools=[inner], tool_choice=chosen)
    (call,) = forced.json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("custom_tool_call", "own", "patch")
    assert "Warning" not in forced.headers
    unreadable = [{"type": "namespace", "name": "w", "tools": [5]}]
    assert "of the type None was ignored" in ask(
        RESPONSES, CALLING, "so", input="hello", tools=unreadable
    ).headers["Warning"]  # fmt: skip
