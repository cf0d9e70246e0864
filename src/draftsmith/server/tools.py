"""Tools of a request: prompts that describe them, and grammars that force a tool call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from draftsmith.server.calls.formats import FORMATS
from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import ChatRequest, Tool
from draftsmith.text.grammar import Grammar, schemas
from draftsmith.text.tokenizer import shows_system

USUAL = "hermes"
"""Format of the tool calls if the chat template has none."""

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
    message if the template has no system messages. Earlier calls and their results become text,
    unless the template has calls.
    """
    known = "tool_calls" in str(getattr(tokenizer, "chat_template", None) or "")
    shown = [*messages] if known else _as_text(messages)
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=listed, example=FORMATS[family].example)
    first = shown[0]
    if first["role"] != "system" and shows_system(tokenizer):
        return [{"role": "system", "content": prompt}, *shown]
    text = f"{first['content']}\n\n{prompt}" if first["role"] == "system" else (
        f"{prompt}\n\n{first['content']}"
    )  # fmt: skip
    return [{**first, "content": text}, *shown[1:]]


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


def forced_call(tools: Sequence[Tool], body: ChatRequest) -> Grammar | None:
    """Return a grammar for one call as a JSON object, if `tool_choice` requires a call."""
    choice = body.tool_choice
    if choice in (None, "auto"):
        return None
    wanted = None if isinstance(choice, str) or choice is None else choice.function.name
    able = [tool for tool in tools if wanted in (None, tool.name)]
    if not able:
        raise Refusal(f"there is no tool {wanted!r:.100}", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": _moved(
                    tool.function.get("parameters") or {"type": "object"},
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
