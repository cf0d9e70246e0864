"""POST /v1/messages: Anthropic's interface, translated to a chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request, Response

from draftsmith.server.answers import Event, PartAnswer, event
from draftsmith.server.api import Api
from draftsmith.server.calls.source import Call, TextPart
from draftsmith.server.chats import Chat, translated
from draftsmith.server.ignored import Ignored
from draftsmith.server.refusals import Refusal, renaming
from draftsmith.server.schema import (
    Block,
    ChatRequest,
    CountRequest,
    Message,
    MessagesRequest,
    SchemaTool,
    Thinking,
    ToolCall,
    Turn,
    arguments_of,
    text_of,
)
from draftsmith.server.worker import Chunk
from draftsmith.text.thoughts import Thoughts
from draftsmith.text.tokenizer import render_chat

_FIELDS = {"stop": "stop_sequences", "response_format": "output_config"}
"""Fields of a chat → their names in this interface."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_ROLES = {"tool_result": "user", "tool_use": "assistant", "thinking": "assistant"}
"""Types of blocks that only the messages of one role may have."""

_BLOCKS = {
    "text": ("text",), "image": ("text", "source"), "document": ("text", "source", "title"),
    "tool_result": ("tool_use_id", "content", "is_error"), "tool_use": ("id", "name", "input"),
    "thinking": ("thinking",),
}  # fmt: skip
"""Types of blocks → names of their fields."""


async def respond(
    api: Api, body: MessagesRequest, caller: str, request: Request, ignored: Ignored
) -> Response:
    """Answer a request."""
    with renaming(_FIELDS):
        chat = chat_of(body, api.tokenizer, ignored)
        chat.stream = body.stream
        return await api.chat(chat, caller, request, ignored, MessagesAnswer)


def count(api: Api, body: CountRequest, ignored: Ignored) -> dict[str, int]:
    """Count the tokens of a prompt."""
    with renaming(_FIELDS):
        asked = chat_of(body, api.tokenizer, ignored)
        chat = Chat.of(asked, api.tokenizer, api.settings.tool_format, ignored)
    return {"input_tokens": len(render_chat(api.tokenizer, chat.messages, chat.template))}


def chat_of(body: CountRequest, tokenizer: Any, ignored: Ignored) -> ChatRequest:
    """Translate a request to a chat; raise Refusal if that is not possible."""
    messages = list[Message]()
    if body.system:
        messages.append(Message(role="system", content=text_of(body.system)))
    for number, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{number}]", ignored)
    output, choice = body.output_config, body.tool_choice
    named = {"type": "function", "function": {"name": choice.name}}
    asked: dict[str, Any] = {
        "model": body.model,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "response_format": output.format.sent() if output.format else None,
        "reasoning_effort": output.effort,
        "tool_choice": named if choice.type == "tool" else _CHOICES[choice.type],
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "continue_final_message": True if body.messages[-1].role == "assistant" else None,
    }
    asked |= _thinking(body.thinking, tokenizer, ignored)
    return translated(messages, body.tools, _function, asked, ignored)


def _thinking(thinking: Thinking | None, tokenizer: Any, ignored: Ignored) -> dict[str, Any]:
    """Return the fields of a chat that configure its reasoning."""
    asked: dict[str, Any] = {}
    if thinking is None:
        return asked
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    if thinking.type == "enabled":
        asked["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True}
    if thinking.budget_tokens is not None:
        asked["thinking_token_budget"] = thinking.budget_tokens
    if asked and Thoughts.of(tokenizer) is None:
        ignored.add("thinking was ignored: the chat template has no thoughts")
        return {}
    return asked


def _function(given: Mapping[str, Any], where: str, ignored: Ignored) -> dict[str, Any] | None:
    """Return a tool as a function of a chat; None for the tools of Anthropic's servers."""
    if given.get("type") not in (None, "custom") and "input_schema" not in given:
        return None
    tool = SchemaTool.of(given, where)
    ignored.section(tool, where)
    about = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **about, "parameters": tool.input_schema}


def _messages(turn: Turn, where: str, ignored: Ignored) -> list[Message]:
    """Return the chat messages of a turn: tool results first, then text and calls."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    results, texts, calls, thoughts = list[Message](), list[str](), list[ToolCall](), ""
    for number, given in enumerate(turn.content):
        place = f"{where}.content[{number}]"
        block = Block.of(given, place)
        kind = block.type
        if kind not in _BLOCKS:
            ignored.add(f"{place} of the type {kind!r:.100} was ignored")
            continue
        ignored.fields(given, ("type", *_BLOCKS[kind]), place)
        if _ROLES.get(kind, turn.role) != turn.role:
            wrong = f"{place}: a {kind} block must be in a message of the {_ROLES[kind]}"
            raise Refusal(wrong, param="messages")
        if kind == "tool_result":
            found = {"tool_call_id": block.tool_use_id, "content": block.content or ""}
            results.append(Message.of({"role": "tool"} | found, place))
            ignored.parts(block.content, f"{place}.content")
            if block.is_error:
                ignored.add(f"is_error of {place} was ignored: no chat template has it")
        elif kind == "tool_use":
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append(ToolCall.of({"id": block.id, "function": function}, place))
        elif kind == "thinking":
            thoughts += block.thinking
        elif block.text is None:
            raise Refusal(f"this server reads text only, no {kind!r}", param="messages")
        else:
            texts.append(block.text)
    if not (results or texts or turn.role == "assistant"):
        raise Refusal(f"{where} needs content; send a text", param="messages")
    if turn.role != "assistant":
        said = [Message(role=turn.role, content="\n".join(texts))] if texts else []
        return [*results, *said]
    message = Message(role="assistant", content="\n".join(texts), tool_calls=calls)
    message.reasoning_content = thoughts or None
    return [message]


class MessagesAnswer(PartAnswer):
    """The message of a response, or the part generated so far, and its events."""

    prefix = "msg_"
    _arguments = ""
    """JSON text of the last call's arguments so far."""

    def whole(self) -> dict[str, Any]:
        self._take(self.choices[0].parts)
        self._close()
        return self._message() | self._reason() | {"usage": self._usage()}

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        # How much of the prompt is cached is not known yet; the last event counts it.
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        usage = {"input_tokens": len(self.job.prompt), "output_tokens": 0} | cached
        started = self._message() | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=started)
        try:
            async for one in self._streamed(chunks):
                yield one
        except Exception as error:
            yield event(self.failure(error).anthropic, "error")
            return
        for one in self._close():
            yield one
        yield _event("message_delta", delta=self._reason(), usage=self._usage())
        yield _event("message_stop")

    def _begin(self, part: TextPart | Call) -> list[Event]:
        if isinstance(part, Call):
            self._arguments = ""
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        elif part.thought:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._items.append(block)
        return [_event("content_block_start", index=len(self._items) - 1, content_block=block)]

    def _continue(self, text: str) -> list[Event]:
        block = self._items[-1]
        kind = block["type"]
        if kind != "tool_use":
            block[kind] += text
            return [self._delta({"type": f"{kind}_delta", kind: text})]
        # A call is not streamed if its arguments are no object.
        if text and not self._arguments and not text.lstrip().startswith("{"):
            text = json.dumps({"": arguments_of(text)})
        self._arguments += text
        return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=len(self._items) - 1, delta=delta)

    def _end(self) -> list[Event]:
        block, signed = self._items[-1], list[Event]()
        if block["type"] == "tool_use":
            given = arguments_of(self._arguments)
            block["input"] = given if isinstance(given, dict) else {"": given}
        elif block["type"] == "thinking":
            signed = [self._delta({"type": "signature_delta", "signature": ""})]
        return [*signed, _event("content_block_stop", index=len(self._items) - 1)]

    def _message(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": [*self._items]}

    def _reason(self) -> dict[str, Any]:
        """Return the fields `stop_reason` and `stop_sequence`."""
        choice, stops = self.choices[0], self.body.stop or []
        reason, stop = choice.finish_reason, choice.stop
        if reason == "stop" and stop is None and choice.result is not None and choice.result.tokens:
            last = self.spell(choice.result.tokens[-1]).decode(errors="replace")
            stop = last if last in stops else None  # a special token, which is not in the text
        why = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason or "", "end_turn")
        if choice.result is not None and len(choice.result.tokens) < (self.body.max_tokens or 0):
            why = "model_context_window_exceeded" if reason == "length" else why
        return {"stop_reason": why if stop is None else "stop_sequence", "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _event(kind: str, **more: Any) -> Event:
    return event({"type": kind} | more, kind)
