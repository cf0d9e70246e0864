"""The table of tool call formats: their marks, their parsers, and the templates that use them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from draftsmith.server.calls import as_channels, as_json
from draftsmith.server.calls.as_python import pythonic
from draftsmith.server.calls.as_tags import Tags
from draftsmith.server.calls.declared import declares
from draftsmith.server.calls.source import CallParser
from draftsmith.text.thoughts import Thoughts


@dataclass(frozen=True, slots=True)
class Format:
    """One way in which models write tool calls."""

    marks: tuple[str, ...]
    """Texts that announce a call; the parser starts after one of them."""
    parse: CallParser
    """Parser of the text after a mark."""
    taught: str
    """Regular expression that matches chat templates with this format."""
    example: str
    """An example of a call."""
    bare: str = ""
    """First characters of answers that may consist of calls without a mark."""
    inside: tuple[str, ...] = ()
    """Tags within calls that a tokenizer may have as special tokens."""
    thinks: bool = False
    """Whether the parser also parses the reasoning before the answer."""


_QWEN3_CODER = Tags(
    "<tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>",
    ("</function>", "</tool_call>"), lines=True,
)  # fmt: skip
_GLM = Tags(
    "<tool_call>", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ("</tool_call>",), lines=False,
)  # fmt: skip

_CALL = '{"name": "NAME", "arguments": {"KEY": "VALUE"}}'

FORMATS = {
    "harmony": Format(
        (f"<|end|>{as_channels.START}", as_channels.START, as_channels.CHANNEL),
        as_channels.channels, r"<\|channel\|>",
        '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"KEY": "VALUE"}',
        bare="t", inside=("<|start|>", "<|constrain|>", "<|message|>", "<|end|>"), thinks=True,
    ),
    "qwen3-coder": Format(
        ("<tool_call>", "<function="), _QWEN3_CODER.parse, r"<parameter=",
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": Format(
        ("<tool_call>",), _GLM.parse, r"<arg_key>",
        "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    ),
    "hermes": Format(
        ("<tool_call>",), as_json.listed("</tool_call>", required=True), r"<tool_call>",
        f"<tool_call>\n{_CALL}\n</tool_call>", inside=("</tool_call>",),
    ),
    "deepseek": Format(
        ("<｜tool▁calls▁begin｜>",), as_json.deepseek, r"<｜tool▁calls▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"KEY": "VALUE"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        inside=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>"),
    ),
    "mistral": Format(
        ("[TOOL_CALLS]",), as_json.mistral, r"\[(TOOL_CALLS|AVAILABLE_TOOLS)\]",
        f"[TOOL_CALLS][{_CALL}]", inside=("[ARGS]", "[CALL_ID]"),
    ),
    "phi4": Format(
        ("<|tool_call|>", "functools"), as_json.listed("<|/tool_call|>", required=False),
        r"<\|/tool_call\|>|functools\[", f"<|tool_call|>[{_CALL}]<|/tool_call|>",
        inside=("<|/tool_call|>",),
    ),
    "granite": Format(
        ("<|tool_call|>", "<tool_call>", "<function_call>"),
        as_json.listed("</tool_call>", "</function_call>", required=False),
        r"<\|tool_call\|>|<function_call>", f"<|tool_call|>[{_CALL}]",
    ),
    "pythonic": Format(
        ("<|python_tag|>",), pythonic, r"\[func_name1\(", '[NAME(KEY="VALUE")]', bare="[",
    ),
    "llama": Format(
        ("<|python_tag|>",), as_json.llama, r'\{"name": [\w ]+, "parameters": ',
        '{"name": "NAME", "parameters": {"KEY": "VALUE"}}', bare="{[",
    ),
}  # fmt: skip
"""Formats by name, in the order in which they are compared with a chat template."""


def family_of(tokenizer: Any) -> str | None:
    """Return the name of the first format that matches the chat template, or None."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return next((name for name, row in FORMATS.items() if re.search(row.taught, template)), None)


def shows_tools(tokenizer: Any) -> bool:
    """Return whether a chat template uses the tools of a request."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return re.search(r"\btools\b", template) is not None


def markers_of(tokenizer: Any) -> dict[int, str]:
    """Return the tags that are special tokens, by id. Decoding removes them from the text."""
    added = tokenizer.get_added_vocab()
    shown = {
        token for token, about in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if not about.special
    }  # fmt: skip
    tags = {tag for row in FORMATS.values() for tag in (*row.marks, *row.inside)}
    if declares(tokenizer):
        tags |= added.keys() - {tokenizer.eos_token}
    thoughts = Thoughts.of(tokenizer)
    tags |= set() if thoughts is None else {thoughts.begin, thoughts.end}
    return {added[tag]: tag for tag in tags if tag in added and added[tag] not in shown}
