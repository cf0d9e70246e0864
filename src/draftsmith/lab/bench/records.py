"""Records: a prompt and, if known, its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """One answer to generate or replay. A conversation of k turns is k records."""

    id: str
    suite: str
    category: str | None = None
    turn: int = 1
    messages: tuple[Message, ...] = ()
    """The chat so far. Content None stands for this conversation's answer of an earlier turn."""
    prompt: str | None = None
    """A text to continue as it is, if there are no messages."""
    output: str | None = None
    tokenizer: str | None = None
    """Name of the tokenizer of the model that wrote `output`."""
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    """Ids of a recorded generation, with its ending token. They take precedence over the text."""
    max_new_tokens: int | None = None
    """Limit of the recorded generation's length, if known."""
    lone: bool = False
    """Whether the id is complete: it does not end with a conversation's turn."""
    reference: str | None = None
    """The publisher's right answer; only for scores."""

    @property
    def conversation(self) -> str:
        """Common part of the ids of one conversation's turns."""
        return self.id if self.lone else self.id.removesuffix(f"/{self.turn}")

    @property
    def answered(self) -> bool:
        """Whether there is an answer to replay."""
        return self.output is not None or self.output_ids is not None


class Wrong(Exception):
    """One line or item of a file cannot be used; the message has the reason."""


TOOLS = "it has tool calls or tools, but a record can only contain texts"


def conversation(turns: Sequence[str], **fields: Any) -> list[Record]:
    """Return one record per turn of a chat without known answers."""
    chat: list[Message] = []
    records = []
    identity = fields.pop("id")
    for number, content in enumerate(turns, 1):
        chat.append({"role": "user", "content": content})
        suffix = f"/{number}" if len(turns) > 1 else ""
        records.append(Record(id=identity + suffix, turn=number, messages=tuple(chat), **fields))
        chat.append({"role": "assistant", "content": None})
    return records


def own_line(item: Mapping[str, Any], suite: str, number: int) -> list[Record]:
    """Return the records of one line in our own format: `messages` or `prompt`, maybe `output`.

    If the messages end with an answer, there is a record for every answer among them.
    """
    texts = ("suite", "category", "tokenizer", "reference")
    common: dict[str, Any] = {name: _typed(item, name, str) for name in texts}
    common |= {name: _ids(item, name) for name in ("prompt_ids", "output_ids")}
    common["suite"] = common["suite"] or suite
    common["max_new_tokens"] = limit = _typed(item, "max_new_tokens", int)
    if limit is not None and limit < 0:
        raise Wrong(f"'max_new_tokens' is {limit}; give at least 0")
    if item.get("tools"):
        raise Wrong(TOOLS)
    given = item.get("id")
    identity = f"{suite}/{number}" if given is None else str(given)
    lone = given is None or "turn" not in item
    output = _typed(item, "output", str)
    if output is None:
        output = _typed(item, "completion", str)
    chat = _messages(item["messages"]) if item.get("messages") is not None else []
    if not chat:
        common["prompt"] = _typed(item, "prompt", str)
        if not common["prompt"] and common["prompt_ids"] is None:
            raise Wrong("there is no prompt: give 'messages', 'prompt' or 'prompt_ids'")
    elif output is None and common["output_ids"] is None and chat[-1]["role"] == "assistant":
        return _logged_chat(identity, chat, common)
    asked = sum(message["role"] == "user" for message in chat)
    turn, messages = _typed(item, "turn", int) or max(1, asked), tuple(chat)
    return [Record(identity, turn=turn, messages=messages, output=output, lone=lone, **common)]


def _logged_chat(identity: str, chat: list[Message], common: dict[str, Any]) -> list[Record]:
    ends = [i for i, message in enumerate(chat) if i and message["role"] == "assistant"]
    if not ends:
        raise Wrong("there is no prompt: the only message is an answer")
    return [
        Record(
            identity if len(ends) == 1 else f"{identity}/{turn}",
            turn=turn,
            messages=tuple(chat[:end]),
            output=chat[end]["content"],
            lone=len(ends) == 1,
            **common,
        )
        for turn, end in enumerate(ends, 1)
    ]


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Wrong("'messages' is not a list of messages")
    chat: list[Message] = []
    for message in given:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Wrong("a message has no 'role'")
        if message.get("tool_calls"):
            raise Wrong(TOOLS)
        chat.append({"role": message["role"], "content": _content(message.get("content"))})
    return chat


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # the parts of an API's message
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)  # type: ignore[arg-type]
    raise Wrong("a message's 'content' is not text")


def _ids(item: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    value = item.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise Wrong(f"{name!r} is not a list of token ids")
    return tuple(value)


def _typed(item: Mapping[str, Any], name: str, kind: Callable[..., T]) -> T | None:
    value = item.get(name)
    if value is not None and type(value) is not kind:
        raise Wrong(f"{name!r} is not {'text' if kind is str else 'a number'}")
    return value
