"""Tools of a request: prompts that describe them, and grammars that force a tool call."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice, product, takewhile
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
    written, refused = str(getattr(tokenizer, "chat_template", None) or ""), True
    for empty, as_text in product(("", None), (False, True)):
        form = partial(_in_form, empty=empty, as_text=as_text)
        text = sample(tokenizer, [*map(form, calling(1))], template)
        # A template that writes an object as Python does needs the text.
        if _VALUE in text and f"{{'{_ARGUMENT}'" not in text:
            named = _with_names(messages)
            if any(len(one.get("tool_calls") or ()) > 1 for one in named):
                text = sample(tokenizer, [*map(form, calling(2))], template)
                named = named if text.count(_VALUE) > 1 else _one_by_one(named)
            *before, last = named  # a last message may be continued, so its content stays text
            made = [*map(form, before), _in_form(last, last["content"], as_text)]
            if "length != 9" in written:
                made = [*map(_with_short_ids, made)]
            for change in (_with_one_text,) if as_text else (_with_objects, _with_one_text):
                changed = [*map(change, made)]
                if changed != made and not sample(tokenizer, made, template):
                    made = changed
            return made
        refused &= not text
    if refused and "tool_calls" in written:  # it may take the messages at hand
        return [*messages]
    return _as_text(messages)


def calling(count: int) -> list[dict[str, Any]]:
    """Return a chat with calls that show how a template writes them."""
    ids = [f"{n}23456789" for n in range(1, 1 + count)]
    function = {"name": "f", "arguments": {_ARGUMENT: _VALUE}}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    results = [{"role": "tool", "content": "1", "name": "f", "tool_call_id": one} for one in ids]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    return [{"role": "user", "content": "hello"}, called, *results]


def _with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in which results have the names of their calls; clients send ids."""
    names, made = dict[str, str](), list[dict[str, Any]]()
    for message in messages:
        own = dict[str, str]()
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            own[call["id"]] = name if own.get(call["id"], name) == name else ""
        names |= own
        given = message.get("tool_call_id")
        name = names.get(given) if given else None
        named = message["role"] == "tool" and name and "name" not in message
        made.append({**message, "name": name} if named else message)
    return made


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a message for each call, followed by its result.

    A last message stays as it is, because its text may be continued.
    """
    made, at = list[dict[str, Any]](), 0
    while at < len(messages):
        message = messages[at]
        calls, at = [*(message.get("tool_calls") or ())], at + 1
        if len(calls) < 2 or at == len(messages):
            made.append(message)
            continue
        results = [*takewhile(lambda one: one["role"] == "tool", islice(messages, at, None))]
        at += len(results)
        for call, own in zip(calls, _paired(calls, results), strict=True):
            begin = message if call is calls[0] else {"role": message["role"], "content": ""}
            made += [{**begin, "tool_calls": [call]}, *own]
    return made


def _paired(
    calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Return the result of each call: the next one with its id, or the next one without a call.

    Further results belong to the last call.
    """
    waiting: dict[str, deque[dict[str, Any]]] = {call["id"]: deque() for call in calls}
    rest = waiting.setdefault("", deque())
    for result in results:
        waiting.get(result.get("tool_call_id") or "", rest).append(result)
    queues = (waiting[call["id"]] or rest for call in calls)
    found = [[queue.popleft()] if queue else [] for queue in queues]
    found[-1] += [one for queue in waiting.values() for one in queue]
    return found


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


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which the arguments of calls are objects, also those that were cut."""
    if not message.get("tool_calls"):
        return message
    made = deepcopy(message)
    for call in made["tool_calls"]:
        given = call["function"]["arguments"]
        call["function"]["arguments"] = given if isinstance(given, dict) else {"": given}
    return made


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with text beside calls at the end of its thoughts, if it has any.

    gpt-oss's template takes either beside a call.
    """
    thought, text = message.get("reasoning_content"), message["content"]
    if not (message.get("tool_calls") and thought and text):
        return message
    return {**message, "content": "", "reasoning_content": f"{thought}\n\n{text}"}


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
