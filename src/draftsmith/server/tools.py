"""Calls of tools in what a model writes: the formats of Hermes and Qwen, Llama 3, and Mistral."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.engine.jobs import Piece

Family = Literal["hermes", "llama", "mistral"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Around a call, as Hermes and Qwen write it."""

_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
"""Special tokens of the others, which the text does not show."""


def family_of(tokenizer: Any) -> Family | None:
    """The format that a chat template tells its model to write; None: it knows no tools."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if "tools" not in template:
        return None
    if OPEN in template:
        return "hermes"
    if "[TOOL_CALLS]" in template or "[AVAILABLE_TOOLS]" in template:
        return "mistral"
    return "llama" if "parameters" in template else None


def markers_of(tokenizer: Any) -> dict[int, str]:
    """Ids of the special tokens that mark a call."""
    added = tokenizer.get_added_vocab()
    return {added[name]: name for name in _MARKERS if name in added}


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is JSON text, as OpenAI's clients expect it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolReader:
    """Parts one answer into what it says and what it calls, as it comes."""

    def __init__(
        self,
        family: Family | None = None,
        names: Collection[str] = (),
        markers: dict[int, str] | None = None,
    ) -> None:
        """Without a family everything is said. `names`: the tools there are."""
        self._family, self._names, self._markers = family, names, markers or {}
        self._held = ""
        """Text that may be a call, or begin one."""
        self._whole = False
        """Whether all that comes is held until the end."""
        self._said = ""
        self._called = False

    def push(self, pieces: Sequence[Piece]) -> tuple[str, list[Call]]:
        """The text to say and the calls that are complete."""
        if self._family is None:
            return "".join(piece.text for piece in pieces), []
        for piece in pieces:
            marker = self._markers.get(piece.token, "")
            self._whole |= bool(marker)
            self._held += marker + piece.text
        if self._family == "hermes":
            return self._between_tags()
        start = (self._said + self._held).lstrip()[:1]
        if self._whole or (not self._said.strip() and start in ("", "{", "[")):
            return "", []
        return self._say(self._held, ""), []

    def end(self) -> tuple[str, list[Call]]:
        """The same of what is still held, now that nothing more comes."""
        held = self._held
        if self._family == "hermes":
            calls = _calls(held.partition(OPEN)[2]) if OPEN in held else []
        else:
            calls = self._whole_answer(held)
        silent = calls or (self._called and not held.strip())
        return self._say("" if silent else held, ""), calls

    def _say(self, text: str, left: str) -> str:
        self._said, self._held = self._said + text, left
        return text

    def _between_tags(self) -> tuple[str, list[Call]]:
        said, calls = "", list[Call]()
        while True:
            before, tag, after = self._held.partition(OPEN)
            inside, closed, rest = after.partition(CLOSE)
            if not closed:
                # White space may stand between two calls, and says nothing there.
                end = len(before.removesuffix("" if tag else _begun(before)).rstrip())
                return said + self._say(self._held[:end], self._held[end:]), calls
            found = _calls(inside)
            calls += found
            self._called |= bool(found)
            said += self._say(before.rstrip() if found else before + tag + inside + closed, rest)

    def _whole_answer(self, held: str) -> list[Call]:
        """Calls that an answer consists of, or that stand behind a marker."""
        before, marker, behind = held.partition("[TOOL_CALLS]")
        if marker and not before.strip():
            each = [_marked(part) for part in behind.split(marker) if part.strip()]
            return [call for calls in each for call in calls] if all(each) else []
        calls = _calls(held.replace("<|python_tag|>", ""))
        # Nothing marks these as calls, and an answer may be JSON for other reasons.
        return calls if all(call.name in self._names for call in calls) else []


def _begun(text: str) -> str:
    """The beginning of a tag at a text's end."""
    return next((OPEN[:n] for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), "")


def _marked(text: str) -> list[Call]:
    """What stands behind Mistral's marker: a list of calls, or in newer models `name{…}`."""
    found = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)", text, re.S)
    if found is None:
        return _calls(text)
    try:
        return [Call(found[1], _json(json.loads(found[2])))]
    except (ValueError, RecursionError):
        return []


def _calls(text: str) -> list[Call]:
    """Calls in JSON objects, or lists of them, one after the other; none if it is anything else."""
    decoder, at, found = json.JSONDecoder(), 0, list[Any]()
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
    calls = []
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return []
        arguments = one.get("arguments", one.get("parameters", {}))
        try:
            one["name"].encode()
            calls.append(Call(one["name"], _json(arguments)))
        except ValueError:
            return []
    return calls


def _json(arguments: Any) -> str:
    """Arguments as JSON text; raises ValueError for what is none: NaN, half of a surrogate pair."""
    told = isinstance(arguments, str)
    text: str = arguments if told else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
