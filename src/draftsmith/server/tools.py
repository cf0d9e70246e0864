"""Tools of a request: prompts that describe them, and grammars that force a tool call."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any

from draftsmith.server.calls.formats import FORMATS
from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import ChatRequest, Tool
from draftsmith.text.grammar import Grammar, schemas
from draftsmith.text.tokenizer import sample

USUAL = "hermes"
"""Format of the tool calls if the chat template has none."""

_SYSTEM = [{"role": "system", "content": "SHOWN"}, {"role": "user", "content": "hello"}]
"""A chat that shows whether a template has system messages."""

_ARGUMENT, _VALUE = "argument_5b1e", "SHOWN_5b1e"
"""An argument of a call that shows how a template writes calls; no tool of a request has them."""

_PROMPT = """You may call functions to help with the request. These are the functions:
<tools>
{tools}
</tools>
To call one, write its name and its arguments like this, and nothing behind it:
{example}"""


def described(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Any], family: str
) -> list[dict[str, Any]]:
    """Return the messages with the tools described as text, for a chat template without tools.

    The description is added to the system message (a new one if there is none), or to the first
    message if the template has no system messages.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=listed, example=FORMATS[family].example)
    first = messages[0]
    if first["role"] != "system" and "SHOWN" in sample(tokenizer, _SYSTEM, {}):
        return [{"role": "system", "content": prompt}, *messages]
    text = f"{first['content']}\n\n{prompt}" if first["role"] == "system" else (
        f"{prompt}\n\n{first['content']}"
    )  # fmt: skip
    return [{**first, "content": text}, *messages[1:]]


def _as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool calls and results converted to text."""
    shown, results = list[dict[str, Any]](), False
    for message in messages:
        text, result = message["content"], message["role"] == "tool"
        if result:
            text = f"<tool_response>\n{text}\n</tool_response>"
        elif "tool_calls" in message:
            calls = (
                json.dumps(one["function"], ensure_ascii=False) for one in message["tool_calls"]
            )
            text = "\n".join([text, *(f"<tool_call>\n{one}\n</tool_call>" for one in calls)])
        if results and (result or message["role"] == "user"):  # templates need alternating roles
            shown[-1]["content"] += "\n" + text
        elif result or "tool_calls" in message:
            shown.append({"role": "user" if result else message["role"], "content": text.lstrip()})
        else:
            shown.append({**message})
        results = result
    return shown


def with_calls(
    tokenizer: Any, messages: Sequence[dict[str, Any]], template: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the messages with earlier calls and results as the chat template shows them.

    Most templates read arguments as an object. DeepSeek's read text, and some of them show a call
    only beside a content of None. Mistral's accept only ids of nine letters and digits. Where a
    template shows no call, calls and results become text. `template`: variables of the template.
    """
    if not any(one["role"] == "tool" or one.get("tool_calls") for one in messages):
        return [*messages]
    call = {"id": "123456789", "type": "function",
            "function": {"name": "f", "arguments": {_ARGUMENT: _VALUE}}}  # fmt: skip
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": call["id"]},
    ]
    written, refused = str(getattr(tokenizer, "chat_template", None) or ""), True
    for empty, as_text in product(("", None), (False, True)):
        text = sample(tokenizer, [_in_form(one, empty, as_text) for one in chat], template)
        # A template that writes an object as Python does needs the text.
        if _VALUE in text and f"{{'{_ARGUMENT}'" not in text:
            *before, last = messages  # a last message may be continued, so its content stays text
            made = [_in_form(one, empty, as_text) for one in before]
            made.append(_in_form(last, last["content"], as_text))
            return [*map(_with_short_ids, made)] if "length != 9" in written else made
        refused &= not text
    if refused and "tool_calls" in written:  # it may take the messages at hand
        return [*messages]
    return _as_text(messages)


def _in_form(message: dict[str, Any], empty: str | None, as_text: bool) -> dict[str, Any]:
    """Return a message with its calls in one form.

    `empty`: the content beside calls where there is no text. `as_text`: arguments are JSON text.
    """
    if not message.get("tool_calls"):
        return message
    made = deepcopy(message) | {"content": message["content"] or empty}
    for call in made["tool_calls"]:
        given = call["function"]["arguments"]
        if as_text and not isinstance(given, str):
            call["function"]["arguments"] = json.dumps(given, ensure_ascii=False)
    return made


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which ids of calls have nine letters and digits."""
    made = deepcopy(message)
    named = [(call, "id") for call in made.get("tool_calls", ())]
    named += [(made, "tool_call_id")] if "tool_call_id" in made else []
    for where, key in named:
        if not re.fullmatch(r"[a-zA-Z0-9]{9}", where[key]):
            where[key] = hashlib.sha256(where[key].encode()).hexdigest()[:9]
    return made


def forced_call(tools: Sequence[Tool], body: ChatRequest) -> Grammar | None:
    """Return a grammar for one call as a JSON object, if `tool_choice` requires a call."""
    choice = body.tool_choice
    if choice in (None, "auto"):
        return None
    wanted = None if isinstance(choice, str) else choice.function.name
    able = [tool for tool in tools if wanted in (None, tool.name)]
    if not able:
        raise Refusal(f"there is no tool {wanted!r:.100}", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": _moved(
                    {"type": "object"} | (tool.function.get("parameters") or {}),
                    f"#/anyOf/{place}/properties/arguments",
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(able)
    ]
    return Grammar.json_schema({"anyOf": calls})


def _moved(schema: Any, place: str) -> Any:
    """Return a schema for use inside another one, with its references moved to `place`."""
    moved = deepcopy(schema)
    for one in schemas(moved):
        if isinstance(target := one.get("$ref"), str) and target.startswith("#"):
            one["$ref"] = place + target[1:]
    return moved
