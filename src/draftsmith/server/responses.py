"""POST /v1/responses, without a memory: each request brings its whole conversation."""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError

from draftsmith.server.answers import Answer, Event, event
from draftsmith.server.api import Api
from draftsmith.server.ignored import Ignored
from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import ChatRequest, ResponsesRequest
from draftsmith.server.tools import Call
from draftsmith.server.worker import Chunk

_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Of a chat, and what they are called here."""


async def respond(
    api: Api, body: ResponsesRequest, salt: str, request: Request, ignored: Ignored
) -> Response:
    """Answer; a chat underneath."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise Refusal(400, f"this server keeps no responses, so no {name}", param=name)
    for told in unread(body):
        ignored.add(told)
    try:
        call, answer = await api.begin_chat(chat_of(body), salt, request, ignored)
    except Refusal as refusal:
        raise refusal.renamed(_FIELDS) from refusal
    reply = Reply(body, answer)
    if body.stream:
        return api.stream(call, answer, reply.events(call.chunks()))
    return await api.whole(call, answer, reply.whole, request)


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The chat that a request means; raises Refusal."""
    asked: dict[str, Any] = {
        "model": body.model,
        "messages": messages_of(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "cache_salt": body.cache_salt,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": (body.text or {}).get("format"),
        "add_generation_prompt": True,
    }
    # Tools that only OpenAI's own servers have are not there, and nothing calls them.
    if functions := [tool for tool in body.tools or () if tool.get("type") == "function"]:
        asked["tools"] = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in functions
        ]
        choice = body.tool_choice
        if isinstance(choice, dict):
            if choice.get("type") == "allowed_tools":
                raise Refusal(400, "tool_choice: send the tools that are allowed, and no others",
                              param="tool_choice")  # fmt: skip
            named = {"type": "function", "function": {"name": choice.get("name")}}
            choice = named if choice.get("type") == "function" else "auto"
        asked["tool_choice"] = choice
    try:
        return ChatRequest.model_validate(asked)
    except ValidationError as error:
        raise Refusal.of_validation(error.errors()) from None


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as a chat has it; without items that `unread` names."""
    told: list[dict[str, Any]] = []
    if body.instructions:
        told.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*told, {"role": "user", "content": body.input}]
    for item in body.input:
        kind = _kind(item)
        if kind == "item_reference":
            raise Refusal(400, "this server keeps no items to refer to", param="input")
        if kind == "message":
            told.append({"role": item.get("role"), "content": item.get("content")})
        elif _is_call(item):
            if not (told and told[-1]["role"] == "assistant"):
                told.append({"role": "assistant", "content": ""})
            told[-1].setdefault("tool_calls", []).append(_call_of(item))
        if kind.endswith("_call_output") or (_is_call(item) and _result(item) is not None):
            result = _result(item)
            content = "" if result is None else result
            told.append({"role": "tool", "content": content, "tool_call_id": _call_id(item)})
    return told


def unread(body: ResponsesRequest) -> list[str]:
    """What `messages_of` and `chat_of` leave out: items and tools that a chat cannot have."""
    told = list[str]()
    for number, item in enumerate(body.input if isinstance(body.input, list) else ()):
        kind = _kind(item)
        if not (kind in _ITEMS or kind.endswith("_call_output") or _is_call(item)):
            near = difflib.get_close_matches(kind, _ITEMS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            told.append(f"input[{number}] of the type {kind!r:.100} was ignored{hint}")
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function":
            told.append(f"tools[{number}] of the type {tool.get('type')!r:.100} was ignored")
    return told


_ITEMS = ("message", "item_reference", "function_call", "function_call_output",
          "custom_tool_call", "custom_tool_call_output")  # fmt: skip
_ABOUT = {"type", "id", "call_id", "status", "name", "output", "error"}
"""Fields of a call's item that are no arguments."""


def _kind(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or "message")


def _call_id(item: Mapping[str, Any]) -> Any:
    return item.get("call_id") or item.get("id") or ""


def _is_call(item: Mapping[str, Any]) -> bool:
    """Whether an item is a call that has its result, or that a result can name."""
    kind = _kind(item)
    return kind in ("function_call", "custom_tool_call") or (
        kind.endswith("_call") and ("call_id" in item or "output" in item)
    )


def _call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call of any kind of tool as one of a function."""
    kind = _kind(item)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
    else:  # which have their `input`, `action` or `operation`
        given = {name: value for name, value in item.items() if name not in _ABOUT}
        arguments = item.get("arguments") or json.dumps(given, ensure_ascii=False)
        function = {"name": item.get("name", kind.removesuffix("_call")), "arguments": arguments}
    return {"id": _call_id(item), "type": "function", "function": function}


def _result(item: Mapping[str, Any]) -> Any:
    """What a call gave, as a message's content; None where there is nothing."""
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


class Reply:
    """One response, as far as it came, and the events that tell of it."""

    def __init__(self, body: ResponsesRequest, answer: Answer) -> None:
        self._body, self._answer = body, answer
        self._id = answer.id = f"resp_{secrets.token_hex(12)}"
        self._items: list[dict[str, Any]] = []
        self._saying = False
        """Whether the last item is a message that may go on."""
        self._events = 0

    def whole(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        choice = self._answer.choices[0]
        self._take(choice.text, choice.calls)
        self._close(self._status)
        return self._body_of(self._status)

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        """The same in events; an error that comes late is one, too."""
        yield self._event("response.created", response=self._body_of("in_progress"))
        yield self._event("response.in_progress", response=self._body_of("in_progress"))
        try:
            async for chunk in chunks:
                delta = self._answer.choices[0].take(chunk)
                for told in self._take(delta.text, delta.calls):
                    yield told
        except Refusal as refusal:
            error = {"code": refusal.code or "server_error", "message": str(refusal)}
            failed = self._body_of("failed") | {"error": error}
            yield self._event("response.failed", response=failed)
            return
        for told in self._close(self._status):
            yield told
        yield self._event(f"response.{self._status}", response=self._body_of(self._status))

    @property
    def _status(self) -> str:
        cut = self._answer.choices[0].finish_reason == "length"
        return "incomplete" if cut else "completed"

    def _take(self, text: str, calls: Sequence[Call]) -> list[Event]:
        """Add what came to the items."""
        told = list[Event]()
        if text and not self._saying:
            self._saying = True
            message: dict[str, Any] = {
                "type": "message",
                "id": f"msg_{secrets.token_hex(12)}",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            told += [self._added(message), self._part("content_part.added", part=_part(""))]
            message["content"] = [_part("")]
        if text:
            self._items[-1]["content"][0]["text"] += text
            told.append(self._part("output_text.delta", delta=text, logprobs=[]))
        for call in calls:
            told += self._close()
            item = {
                "type": "function_call",
                "id": f"fc_{secrets.token_hex(12)}",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            told.append(self._added(item))
            told.append(self._about("function_call_arguments.delta", delta=call.arguments))
            item |= {"arguments": call.arguments, "status": "completed"}
            done = {"arguments": call.arguments, "name": call.name}
            told.append(self._about("function_call_arguments.done", **done))
            told.append(self._done(item))
        return told

    def _close(self, status: str = "completed") -> list[Event]:
        """End the message that is being said."""
        if not self._saying:
            return []
        self._saying = False
        item = self._items[-1]
        item["status"] = status
        part = item["content"][0]
        return [
            self._part("output_text.done", text=part["text"], logprobs=[]),
            self._part("content_part.done", part=part),
            self._done(item),
        ]

    def _added(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        place = len(self._items) - 1
        return self._event("response.output_item.added", output_index=place, item=item)

    def _done(self, item: dict[str, Any]) -> Event:
        place = len(self._items) - 1
        return self._event("response.output_item.done", output_index=place, item=item)

    def _about(self, kind: str, **more: Any) -> Event:
        """An event about the last item."""
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **at, **more)

    def _part(self, kind: str, **more: Any) -> Event:
        return self._about(kind, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> Event:
        self._events += 1
        return event({"type": kind, "sequence_number": self._events - 1} | more, kind)

    def _body_of(self, status: str) -> dict[str, Any]:
        body, usage = self._body, self._answer.usage()
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self._answer.model,
            "output": [*self._items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if status in ("in_progress", "failed") else told,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
