"""Responses to OpenAI's chats and completions, whole or streamed, built from chunks."""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.core.stats import Guess, total
from draftsmith.engine.result import GenerationResult
from draftsmith.server.alternatives import Logprob
from draftsmith.server.calls.source import Call, MoreArguments, Part, TextPart, add, new_id
from draftsmith.server.reader import Reader
from draftsmith.server.refusals import Refusal
from draftsmith.server.schema import ChatRequest, CompletionRequest, arguments_of
from draftsmith.server.worker import Chunk, Job

log = logging.getLogger(__name__)

Event = dict[str, str]
"""A server-sent event in the form that sse-starlette accepts."""

DONE: Event = {"data": "[DONE]"}


def event(value: Any, name: str | None = None) -> Event:
    """Return an event with a JSON value as data."""
    # ASCII only: some clients also end lines at U+0085 and U+2028, which JSON may contain.
    made = {"data": json.dumps(value, allow_nan=False)}
    return made if name is None else made | {"event": name}


@dataclass(slots=True)
class Delta:
    """The part of an answer that one chunk adds, or a whole answer."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    sources: list[list[str]] = field(default_factory=list)
    """Text and source of each token."""
    drafts: list[tuple[Guess, ...]] = field(default_factory=list)
    """Drafted nodes of each pass."""
    offsets: list[int] = field(default_factory=list)
    """Position of each token's text in the whole text."""

    def extend(self, more: Delta) -> None:
        """Append what another delta adds."""
        for part in more.parts:
            add(self.parts, part)
        self.logprobs += more.logprobs
        self.sources += more.sources
        self.drafts += more.drafts
        self.offsets += more.offsets

    @property
    def text(self) -> str:
        """Text without the reasoning."""
        return self._said(thought=False)

    @property
    def thoughts(self) -> str:
        """Text of the reasoning."""
        return self._said(thought=True)

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    def _said(self, *, thought: bool) -> str:
        texts = (part for part in self.parts if isinstance(part, TextPart))
        return "".join(part.text for part in texts if part.thought == thought)


@dataclass(slots=True)
class Choice(Delta):
    """One answer, or the part of it that is generated so far."""

    reader: Reader = field(default_factory=Reader)
    one_call: bool = False
    """Whether calls after the first one are omitted."""
    begun_calls: int = 0
    """Number of calls so far, omitted ones included."""
    echo: Delta | None = None
    """The prompt, if the response must begin with it and it was not sent."""
    result: GenerationResult | None = None
    stop: str | None = None
    """The stop string that ended the answer."""
    shift: int = 0
    """Number of characters of the prompt that was sent."""

    def take(self, chunk: Chunk) -> Delta:
        """Add a chunk to the answer; return its delta."""
        parts = self.reader.push(chunk.pieces)
        if chunk.result is not None:
            parts, self.result, self.stop = parts + self.reader.end(), chunk.result, chunk.stop
        delta = Delta()
        if self.echo is not None:
            delta.extend(self.echo)
            self.shift, self.echo = len(self.echo.text), None
        delta.extend(
            Delta(
                [part for part in parts if self._keeps(part)],
                [*chunk.logprobs],
                [[piece.text, piece.source] for piece in chunk.pieces],
                [*chunk.drafts],
                [self.shift + piece.start for piece in chunk.pieces],
            )
        )
        self.extend(delta)
        return delta

    def _keeps(self, part: Part) -> bool:
        """Count a call; return whether the part belongs to the answer."""
        self.begun_calls += isinstance(part, Call)
        return isinstance(part, TextPart) or not self.one_call or self.begun_calls == 1

    @property
    def finish_reason(self) -> str | None:
        """Finish reason as OpenAI defines it; None while the answer is not complete."""
        if self.result is None:
            return None
        whole = self.calls and self.result.finish_reason == "stop"
        if whole and self.stop is not None:  # it may have cut the last call
            whole = not isinstance(arguments_of(self.calls[-1].arguments), str)
        return "tool_calls" if whole else self.result.finish_reason


@dataclass
class Answer(ABC):
    """All answers to one request; a subclass gives them the form of one interface."""

    job: Job
    body: ChatRequest | CompletionRequest
    model: str
    spell: Callable[[int], bytes]
    """Returns the bytes of a token."""
    choices: list[Choice]
    thinks: bool = False
    """Whether the chat template has reasoning."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = new_id(self.prefix)

    @property
    @abstractmethod
    def prefix(self) -> str:
        """Beginning of the response's id."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    @abstractmethod
    def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        """Yield the events of a streamed response. An error after its start is an event, too."""

    def failure(self, error: Exception) -> Refusal:
        """Log and return the error that a stream ends with, which has begun with status 200."""
        refusal = Refusal.of(error)
        if refusal is not error:
            log.error("a stream failed", exc_info=error)
        fields = {"id": self.id, "status": refusal.status, "code": refusal.code}
        log.info("refused", extra={"fields": fields})
        return refusal

    @property
    def results(self) -> list[GenerationResult]:
        return [choice.result for choice in self.choices if choice.result is not None]

    def usage(self) -> dict[str, Any]:
        """Return the token counts. A prompt with several answers counts once."""
        results = self.results
        firsts = [c.result for c in self.choices[:: self.body.n] if c.result is not None]
        prompt = sum(len(result.prompt_tokens) for result in firsts)
        reused = sum(result.stats.reused_tokens for result in firsts)
        new = sum(len(result.tokens) for result in results)
        usage: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": reused}}
        details: dict[str, int] = {}
        if self.thinks:
            details["reasoning_tokens"] = sum(c.reader.thought_tokens for c in self.choices)
        if self.body.prediction is not None:
            rejected = sum(result.rejected_prediction_tokens for result in results)
            new += rejected
            details |= {
                "accepted_prediction_tokens": sum(r.accepted_prediction_tokens for r in results),
                "rejected_prediction_tokens": rejected,
            }
        usage |= {"completion_tokens_details": details} if details else {}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
        } | usage


class PartAnswer(Answer):
    """An answer in an interface that announces each part and then streams it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._items = list[dict[str, Any]]()
        """The parts so far, in the form of the interface."""
        self._going: TextPart | Call | None = None
        """Beginning of the last part, if it may continue."""

    async def _streamed(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        async for chunk in chunks:
            for one in self._take(self.choices[0].take(chunk).parts):
                yield one

    def _take(self, parts: Sequence[Part]) -> list[Event]:
        """Add parts to the answer; return their events."""
        events = list[Event]()
        for part in parts:
            going = self._going
            if isinstance(part, Call) or (
                isinstance(part, TextPart)
                and not (isinstance(going, TextPart) and going.thought == part.thought)
            ):
                events += self._close()
                self._going = part
                events += self._begin(part)
            events += self._continue(part.arguments if isinstance(part, Call) else part.text)
        return events

    def _close(self) -> list[Event]:
        """Return the events that end the last part, if it may continue."""
        events = [] if self._going is None else self._end()
        self._going = None
        return events

    @abstractmethod
    def _begin(self, part: TextPart | Call) -> list[Event]:
        """Add an empty item for a part; return its events."""

    @abstractmethod
    def _continue(self, text: str) -> list[Event]:
        """Return the events of text, or of a call's arguments, that continues the last item."""

    @abstractmethod
    def _end(self) -> list[Event]:
        """Return the events that end the last item."""


class OpenAIAnswer(Answer):
    """The answers to a chat or a completion."""

    @property
    def prefix(self) -> str:
        return "chatcmpl-" if self.chat else "cmpl-"

    @property
    def chat(self) -> bool:
        """Whether the request is a chat."""
        return isinstance(self.body, ChatRequest)

    def whole(self) -> dict[str, Any]:
        made = list[dict[str, Any]]()
        for index, choice in enumerate(self.choices):
            made.append(self._choice(index, choice, choice.finish_reason))
            if self.chat:
                made[-1]["message"] = _message(choice)
        return self._head("") | {"choices": made, "usage": self.usage()} | self._stats()

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        """Yield the events of a streamed response.

        The finish reason of a choice is a separate event, as in OpenAI's streams. That of choice 0
        comes first, because clients that join the chunks (litellm) use the first one for choice 0.
        """
        options = self.body.stream_options
        usage = options is not None and options.include_usage
        head = self._head(".chunk") | ({"usage": None} if usage else {})
        begun, ended = set[int](), list[int]()

        def sent(index: int, delta: Delta, calls: int, reason: str | None) -> Event:
            choice = self._choice(index, delta, reason)
            if self.chat:
                choice["delta"] = _message_delta(delta, calls, first=index not in begun)
            begun.add(index)
            return event(head | {"choices": [choice]})

        try:
            async for chunk in chunks:
                index, choice = chunk.index, self.choices[chunk.index]
                calls, delta = len(choice.calls), choice.take(chunk)
                # Some clients read only the reasoning of a chunk that has both.
                if delta.thoughts and (delta.text or delta.calls):
                    yield sent(index, Delta([TextPart(delta.thoughts, thought=True)]), calls, None)
                    delta.parts = [
                        p for p in delta.parts if not (isinstance(p, TextPart) and p.thought)
                    ]
                yield sent(index, delta, calls, None)
                ended += [index] if choice.result is not None else []
                if self.choices[0].result is not None:
                    for index in sorted(ended):
                        yield sent(index, Delta(), 0, self.choices[index].finish_reason)
                    ended.clear()
            if usage or self.body.return_stats:
                yield event(head | {"choices": [], "usage": self.usage()} | self._stats())
        except Exception as error:
            yield event(self.failure(error).body)
        yield DONE

    def _stats(self) -> dict[str, Any]:
        if not self.body.return_stats:
            return {}
        return {"stats": total([result.stats for result in self.results]).as_dict()}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" + suffix if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any]:
        """Return a choice without the message of a chat."""
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if not self.chat:
            choice["text"] = delta.text
        if self.body.top is not None:
            choice["logprobs"] = (
                self._chat_logprobs(delta.logprobs)
                if self.chat
                else self._text_logprobs(delta.logprobs) | {"text_offset": delta.offsets}
            )
        if self.body.return_sources:
            choice["sources"] = delta.sources
        if self.body.return_drafts:
            choice["drafts"] = [
                [self._guess(guess) for guess in drafted] for drafted in delta.drafts
            ]
        return choice

    def _guess(self, guess: Guess) -> list[Any]:
        text = self.spell(guess.token).decode(errors="replace")
        return [text, *guess[1:]]

    def _chat_logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        def one(token: int, logprob: float | None) -> dict[str, Any]:
            data = self.spell(token)
            text = data.decode(errors="replace")
            return {"token": text, "logprob": logprob, "bytes": list(data)}

        return {
            "content": [
                one(seen.token, seen.logprob) | {"top_logprobs": [one(*pair) for pair in seen.top]}
                for seen in logprobs
            ],
            "refusal": None,
        }

    def _text_logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        def text(token: int) -> str:
            data = self.spell(token)
            try:
                return data.decode()
            except UnicodeDecodeError:  # a part of a character
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

        def best(seen: Logprob) -> dict[str, float] | None:
            if seen.logprob is None:
                return None
            # The chosen token is always there, so there may be one more than was asked for.
            found = {seen.token: seen.logprob} if seen.token not in dict(seen.top) else {}
            return {text(i): logprob for i, logprob in (found | dict(reversed(seen.top))).items()}

        return {
            "tokens": [text(seen.token) for seen in logprobs],
            "token_logprobs": [seen.logprob for seen in logprobs],
            "top_logprobs": [best(seen) for seen in logprobs],
        }


def _message(choice: Choice) -> dict[str, Any]:
    """Return the whole message of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.thoughts:
        message["reasoning_content"] = choice.thoughts
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_call_body(call) for call in choice.calls]
    return message


def _message_delta(delta: Delta, calls: int, first: bool) -> dict[str, Any]:
    """Return what a chunk adds to the message of a chat; `calls`: number of calls before it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
    if delta.thoughts:
        message["reasoning_content"] = delta.thoughts
    if delta.text:
        message["content"] = delta.text
    if called := _call_deltas(delta.parts, calls):
        message["tool_calls"] = called
    return message


def _call_deltas(parts: Sequence[Part], calls: int) -> list[dict[str, Any]]:
    """Return the `tool_calls` of a chat's delta; `calls`: number of calls in earlier chunks."""
    deltas = list[dict[str, Any]]()
    for part in parts:
        if isinstance(part, Call):
            deltas.append({"index": calls} | _call_body(part))
            calls += 1
        elif isinstance(part, MoreArguments):
            deltas.append({"index": calls - 1, "function": {"arguments": part.text}})
    return deltas


def _call_body(call: Call) -> dict[str, Any]:
    """Return a call in the form of a chat message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
