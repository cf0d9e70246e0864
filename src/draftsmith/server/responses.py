"""POST /v1/responses, stateless: each request contains its whole conversation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response

from draftsmith.server.answers import Event, PartAnswer, event
from draftsmith.server.api import Api
from draftsmith.server.calls.source import Call, TextPart, new_id
from draftsmith.server.chats import translated
from draftsmith.server.ignored import Ignored
from draftsmith.server.refusals import Refusal, hint, renaming
from draftsmith.server.schema import (
    FUNCTION,
    ChatRequest,
    CustomTool,
    Message,
    ResponsesRequest,
    ToolCall,
    arguments_of,
    text_of,
)
from draftsmith.server.worker import Chunk

_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of a chat → their names in this interface."""


async def respond(
    api: Api, body: ResponsesRequest, caller: str, request: Request, ignored: Ignored
) -> Response:
    """Answer a request."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise Refusal(f"this server keeps no responses, so no {name}", param=name)
    with renaming(_FIELDS):
        form = partial(ResponsesAnswer, asked=body)
        return await api.chat(chat_of(body, ignored), caller, request, ignored, form)


def chat_of(body: ResponsesRequest, ignored: Ignored) -> ChatRequest:
    """Translate a request to a chat; raise Refusal if that is not possible."""
    messages, form = _messages(body, ignored), body.text.format
    asked: dict[str, Any] = {
        "model": body.model,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "cache_salt": body.cache_salt,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": _choice(body.tool_choice, ignored),
        "response_format": form.sent() if form else None,
        "reasoning_effort": body.reasoning.effort,
        "thinking_token_budget": body.thinking_token_budget,
        "add_generation_prompt": True,
    }
    return translated(messages, [*flattened(body.tools)], _function, asked, ignored)


def flattened(tools: Sequence[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    """Yield tools, and instead of a namespace its tools, with its name before their names."""
    for tool in tools or ():
        inner, space = tool.get("tools"), tool.get("name")
        if tool.get("type") != "namespace" or not isinstance(inner, list):
            yield tool
            continue
        for one in inner:
            named = one if isinstance(one, dict) else {}
            yield {**named, "namespace": space, "name": _full_name(space, named.get("name"))}


def _full_name(namespace: object, name: object) -> str:
    return f"{namespace}__{name}"


def _choice(choice: str | Mapping[str, Any] | None, ignored: Ignored) -> Any:
    """Return `tool_choice` as a chat has it; raise Refusal for what no chat has."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        ignored.fields(choice, ("type", "namespace", "name"), "tool_choice")
        name, space = choice.get("name"), choice.get("namespace")
        name = name if space is None else _full_name(space, name)
        return {"type": "function", "function": {"name": name}}
    why = f"no tool of the type {kind!r:.100} can be forced"
    if kind == "allowed_tools":
        why = "send the tools that are allowed, and no others"
    raise Refusal(f"tool_choice: {why}", param="tool_choice")


def _function(given: Mapping[str, Any], where: str, ignored: Ignored) -> dict[str, Any] | None:
    """Return a tool as a function of a chat; None for the tools of OpenAI's servers.

    A custom tool becomes a function with one parameter, `input`.
    """
    kind = given.get("type")
    if kind == "function":
        ignored.fields(given, ("type", "namespace", *FUNCTION), where)
        return {name: given[name] for name in given if name not in ("type", "namespace")}
    if kind != "custom":
        return None
    tool = CustomTool.of({n: given[n] for n in given if n != "namespace"}, where)
    ignored.section(tool, where)
    about = [tool.description]
    if tool.format is not None and tool.format.definition:
        about.append(f"The input's grammar:\n{tool.format.definition}")
    return {
        "name": tool.name,
        "description": "\n\n".join(filter(None, about)),
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
    }


def _messages(body: ResponsesRequest, ignored: Ignored) -> list[Message]:
    """Return the conversation as messages of a chat.

    Items that a chat cannot have are left out.
    """
    made = list[Message]()
    if body.instructions:
        made.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*made, Message(role="user", content=body.input)]
    if not any(_known(item) or _kind(item) == "item_reference" for item in body.input):
        found = ", ".join(sorted({f"{_kind(item)!r:.100}" for item in body.input}))
        why = f"no item of a known type: {found}; known are {', '.join(_ITEMS)}"
        raise Refusal(why, param="input")
    thoughts = list[tuple[str, str]]()  # reasoning of the next message, with its places
    for number, item in enumerate(body.input):
        kind, where = _kind(item), f"input[{number}]"
        if kind == "item_reference":
            raise Refusal("this server keeps no items to refer to", param="input")
        known, is_call = _known(item), _is_call(item)
        thought = _thoughts(item, where) if kind == "reasoning" else ""
        if known is None or (kind == "reasoning" and not thought):
            near = hint(kind[:100], _ITEMS) if known is None else ""
            ignored.add(f"{where} of the type {kind!r:.100} was ignored{near}")
            continue
        ignored.fields(item, known, where)
        if thought:
            thoughts.append((where, thought))
            continue
        if not (is_call or item.get("role") == "assistant"):
            _drop(thoughts, ignored)
        if kind == "message":
            ignored.parts(item.get("content"), f"{where}.content")
            given = {name: item[name] for name in _ITEMS[kind] if name in item}
            message, last = Message.of(given, where), made[-1] if made else None
            both = message.role == "assistant" and last is not None and last.role == "assistant"
            within = number + 1 < len(body.input)  # a last message may be continued
            if both and within and last is not None and last.tool_calls and not thoughts:
                texts = text_of(last.content), text_of(message.content)
                last.content = "\n".join(filter(None, texts))
            else:
                made.append(message)
        elif is_call and (thoughts or not made or made[-1].role != "assistant"):
            made.append(Message(role="assistant", content=""))
        if thoughts:
            made[-1].reasoning_content = "".join(text for _, text in thoughts)
            thoughts.clear()
        if is_call:
            call = ToolCall.of(_call_of(item), where)
            if made[-1].tool_calls is None:
                made[-1].tool_calls = []
            made[-1].tool_calls.append(call)  # a copy for each call would take too long
        if kind.endswith("_call_output") or (is_call and _result(item) is not None):
            made.append(Message.of(_result_of(item, where, ignored), where))
    _drop(thoughts, ignored)
    return made


def _drop(thoughts: list[tuple[str, str]], ignored: Ignored) -> None:
    """Drop reasoning, with a warning."""
    for where, _ in thoughts:
        ignored.add(f"the reasoning in {where} was ignored: the next item is not the assistant's")
    thoughts.clear()


def _result_of(item: Mapping[str, Any], where: str, ignored: Ignored) -> dict[str, Any]:
    """Return the result of a call as a message."""
    result = _result(item)
    ignored.parts(result, f"{where}.output")
    named = {"name": item["name"]} if "name" in item and not _is_call(item) else {}
    content = "" if result is None else result
    return {"role": "tool", "content": content, "tool_call_id": _call_id(item)} | named


_RESULT = ("output", "error")
_ITEMS = {
    "message": ("role", "content", "name"),
    "reasoning": ("content",),
    "function_call": ("call_id", "namespace", "name", "arguments", *_RESULT),
    "custom_tool_call": ("call_id", "namespace", "name", "input", *_RESULT),
    "function_call_output": ("call_id", "name", *_RESULT),
    "custom_tool_call_output": ("call_id", "name", *_RESULT),
}
"""Types of items → names of their fields."""
_ABOUT = {"type", "id", "call_id", "status", "name", *_RESULT}
"""Fields of a call of any other tool that are not arguments."""


def _known(item: Mapping[str, Any]) -> Collection[str] | None:
    """Return the fields of an item that are read; None for an unknown type."""
    kind = _kind(item)
    if kind in _ITEMS:
        return ("type", *_ITEMS[kind])
    if kind.endswith("_call_output"):
        return _ABOUT
    if not _is_call(item):
        return None
    return (*_ABOUT, "arguments") if "arguments" in item else item


def _kind(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or "message")


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item."""
    shown = {"role": "assistant", "content": item.get("content")}
    return text_of(Message.of(shown, where).content)


def _call_id(item: Mapping[str, Any]) -> Any:
    return item.get("call_id") or item.get("id") or ""


def _is_call(item: Mapping[str, Any]) -> bool:
    """Return whether an item is a call of a function or custom tool, or of any other tool.

    Calls of other tools need a `call_id`, or their result in `output`.
    """
    kind = _kind(item)
    return kind in ("function_call", "custom_tool_call") or (
        kind.endswith("_call") and ("call_id" in item or "output" in item)
    )


def _call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of any kind of tool as a function call."""
    kind = _kind(item)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
    else:  # its arguments are in `input`, `action` or `operation`
        known = ("input",) if kind == "custom_tool_call" else item.keys() - _ABOUT
        given = {name: item[name] for name in item if name in known and item[name] is not None}
        arguments = item.get("arguments") or json.dumps(given, ensure_ascii=False)
        function = {"name": item.get("name", kind.removesuffix("_call")), "arguments": arguments}
    if item.get("namespace"):
        function["name"] = _full_name(item["namespace"], function["name"])
    return {"id": _call_id(item), "function": function}


def _result(item: Mapping[str, Any]) -> Any:
    """Return the result of a call as content of a message; None if the item has no result."""
    output = item.get("output")
    if output is None:
        output = item.get("error")
    if isinstance(output, dict) and "type" in output:
        output = [output]
    if output is None or isinstance(output, str):
        return output
    parts = isinstance(output, list) and all(
        isinstance(part, dict) and "type" in part for part in output
    )
    return output if parts else json.dumps(output, ensure_ascii=False)


@dataclass(kw_only=True)
class ResponsesAnswer(PartAnswer):
    """One response, or the part generated so far, and its events."""

    asked: ResponsesRequest
    prefix = "resp_"
    _events = 0
    _status = "completed"
    """Status of the item that ends next."""

    def whole(self) -> dict[str, Any]:
        self._take(self.choices[0].parts)
        self._finish()
        return self._body_of(self._status)

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        yield self._event("response.created", response=self._body_of("in_progress"))
        yield self._event("response.in_progress", response=self._body_of("in_progress"))
        try:
            async for one in self._streamed(chunks):
                yield one
        except Exception as reason:
            refusal = self.failure(reason)
            error = {"code": refusal.code or "server_error", "message": str(refusal)}
            failed = self._body_of("failed") | {"error": error}
            yield self._event("response.failed", response=failed)
            return
        for one in self._finish():
            yield one
        yield self._event(f"response.{self._status}", response=self._body_of(self._status))

    def _finish(self) -> list[Event]:
        """Return the events that end the last item; the response may be incomplete."""
        cut = self.choices[0].finish_reason == "length"
        self._status = "incomplete" if cut else "completed"
        return self._close()

    def _begin(self, part: TextPart | Call) -> list[Event]:
        item: dict[str, Any] = {"status": "in_progress"}
        self._items.append(item)
        if isinstance(part, Call):
            tools = flattened(self.asked.tools)
            tool = next((tool for tool in tools if tool.get("name") == part.name), {})
            if tool.get("type") == "custom":
                item |= {"type": "custom_tool_call", "id": new_id("ctc_"), "input": ""}
            else:
                item |= {"type": "function_call", "id": new_id("fc_"), "arguments": ""}
            item |= {"call_id": part.id, "name": part.name}
            if (space := tool.get("namespace")) is not None:
                short = part.name.removeprefix(_full_name(space, ""))
                item |= {"namespace": space, "name": short}
            return [self._item("added")]
        item["content"] = list[Any]()
        if part.thought:
            item |= {"type": "reasoning", "id": new_id("rs_"), "summary": []}
        else:
            item |= {"type": "message", "id": new_id("msg_"), "role": "assistant"}
        text = _part(item["type"])
        events = [self._item("added"), self._part("content_part.added", part=text)]
        item["content"].append(text)
        return events

    def _continue(self, text: str) -> list[Event]:
        item = self._items[-1]
        kind = item["type"]
        if kind == "custom_tool_call":  # sent by `_end`, once the JSON is complete
            item["input"] += text
            return []
        if kind == "function_call":
            item["arguments"] += text
            return [self._about("function_call_arguments.delta", delta=text)] if text else []
        item["content"][0]["text"] += text
        return [self._part(f"{_TEXT[kind]}.delta", delta=text, **_LOGPROBS[kind])]

    def _end(self) -> list[Event]:
        item = self._items[-1]
        kind = item["type"]
        if kind == "function_call":
            given, name = item["arguments"], item["name"]
            ended = [self._about("function_call_arguments.done", arguments=given, name=name)]
        elif kind == "custom_tool_call":
            given = item["input"] = _free_text(item["input"])
            ended = [
                self._about("custom_tool_call_input.delta", delta=given),
                self._about("custom_tool_call_input.done", input=given),
            ]
        else:
            part = item["content"][0]
            ended = [
                self._part(f"{_TEXT[kind]}.done", text=part["text"], **_LOGPROBS[kind]),
                self._part("content_part.done", part=part),
            ]
        item["status"] = self._status
        return [*ended, self._item("done")]

    def _item(self, kind: str) -> Event:
        """Return an event about the whole last item."""
        place = len(self._items) - 1
        item = self._items[place]
        return self._event(f"response.output_item.{kind}", output_index=place, item=item)

    def _about(self, kind: str, **more: Any) -> Event:
        """Return an event about the last item."""
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **at, **more)

    def _part(self, kind: str, **more: Any) -> Event:
        return self._about(kind, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> Event:
        self._events += 1
        return event({"type": kind, "sequence_number": self._events - 1} | more, kind)

    def _body_of(self, status: str) -> dict[str, Any]:
        body, usage = self.asked, self.usage()
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.choices[0].reader.thought_tokens},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self.model,
            "output": [*self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | body.reasoning.sent(),
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | body.text.sent(),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if status in ("in_progress", "failed") else counts,
        }


_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}
_LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}


def _part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _TEXT[kind], "text": ""}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})


def _free_text(arguments: str) -> str:
    """Return the `input` text of a custom tool call; all arguments if there is no such text."""
    given = arguments_of(arguments)
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
