"""Chat templates of the models in the papers' recorded answers, for bare tokenizer files.

Folders with a chat template of their own do not need these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.errors import PromptError
from draftsmith.lab.bench.records import Message

Piece = str | int
"""A text to encode, or the id of a special token."""

QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True, slots=True)
class Template:
    """Chat format of a model."""

    render: Callable[[Sequence[Message]], list[Piece]]
    """Render the chat up to the beginning of the assistant's answer."""
    end: Piece
    """The token that ends an answer."""
    vocab_size: int = 0
    """Minimum number of ids, if the tokenizer's file lacks special tokens."""


def _qwen2(messages: Sequence[Message]) -> list[Piece]:
    chat = list(messages)
    if chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": QWEN})
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat]
    return ["".join(turns) + "<|im_start|>assistant\n"]


def _vicuna(messages: Sequence[Message]) -> list[Piece]:
    chat = list(messages)
    system = chat.pop(0)["content"] if chat[0]["role"] == "system" else VICUNA
    text = system + " "
    for message in chat:
        if message["role"] == "user":
            text += f"USER: {message['content']} "
        elif message["role"] == "assistant":
            text += f"ASSISTANT: {message['content']}</s>"
        else:
            raise PromptError(f"Vicuna's template has no role {message['role']!r}")
    return [text + "ASSISTANT:"]


BEGIN, HEADER, HEADER_END, TURN_END = 128000, 128006, 128007, 128009


def _llama3(messages: Sequence[Message]) -> list[Piece]:
    pieces: list[Piece] = [BEGIN]
    for message in messages:
        pieces += [HEADER, message["role"], HEADER_END, f"\n\n{message['content']}", TURN_END]
    return [*pieces, HEADER, "assistant", HEADER_END, "\n\n"]


TEMPLATES = {
    "qwen2": Template(_qwen2, "<|im_end|>"),
    "llama2": Template(_vicuna, "</s>"),
    "llama3": Template(_llama3, TURN_END, vocab_size=128_256),
}
"""By the name of the tokenizer's folder. llama2 is Vicuna's, because its answers were recorded."""
