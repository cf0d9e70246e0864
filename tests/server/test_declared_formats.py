"""Formats that no table has and the tokenizer declares: transformers parses them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from serving import Ask, events, read, streamed_calls

import tiny
from draftsmith.engine.sequence import Piece
from draftsmith.server.calls.declared import declared
from draftsmith.server.calls.source import Call
from draftsmith.server.reader import Reader

TOKENIZER = copy.deepcopy(tiny.tokenizer())
if not hasattr(TOKENIZER, "get_response_parser"):
    pytest.skip("this transformers has no response templates", allow_module_level=True)

FORMAT = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": "((", "close": "))", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*@call:(?P<name>\w+)", "close": "@end", "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {
                "name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "@stop", "content": "text"},
    },
}  # fmt: skip
TOKENIZER.response_template = FORMAT


def reader_of(prompt: str, tokenizer: Any = TOKENIZER, **more: Any) -> Reader:
    own: Callable[..., Any] = lambda source: declared(source, tokenizer, prompt, [])  # noqa: E731
    return Reader(tools={"f": None}, own=own, **more)


@pytest.mark.parametrize(("prompt", "text", "expected"), [
    ("", "((so))hello", ("so", "hello", [])),
    ("assistant: ((", "so))hello", ("so", "hello", [])),
    ("", 'I call.@call:f{"a": "é"}@end@call:f{}@end',
     ("", "I call.", [("f", {"a": "é"}), ("f", {})])),
    ("", '@call:f{"a": 1}@end and more', ("", " and more", [("f", {"a": 1})])),
    ("", 'so @call:f{"a": 1e999}@end more', None),
    ("", 'so @call:f{"a": "\\ud800"}@end more', None),
    ("", 'so @call:f{"a": ' + "[" * 3000 + "@end", None),
    ("", "so @call:f{no}@end more", None), ("", "so @call:f{", None), ("", "", ("", "", [])),
])  # fmt: skip
def test_transformers_finds_thoughts_text_and_calls_in_any_parts(
    prompt: str, text: str, expected: Any
) -> None:
    for size in (1, 2, 3, 7, 100):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        thought, said, calls = read(reader_of(prompt), parts)
        if expected is None:  # what cannot be parsed loses nothing that is no tag
            assert calls == []
            assert said.replace(" ", "").endswith(text.partition("f")[2].replace(" ", ""))
            assert said.startswith("so")
        else:
            made = [(name, json.loads(arguments)) for name, arguments in calls]
            assert (thought, said, made) == expected, size


LOOSE = copy.deepcopy(TOKENIZER)
LOOSE.response_template = FORMAT | {"fields": FORMAT["fields"] | {"tool_calls": {  # type: ignore[operator]
    "open_pattern": r"\s*@call(?::(?P<name>\w+))?", "close": "@end", "repeats": True,
    "content": "json", "transform": {"type": "function", "function": "{content}"},
}}}  # fmt: skip
NAMED = copy.deepcopy(TOKENIZER)
NAMED.response_template = copy.deepcopy(LOOSE.response_template)
NAMED.response_template["fields"]["tool_calls"]["transform"] = FORMAT["fields"]["tool_calls"][  # type: ignore[index]
    "transform"
]


@pytest.mark.parametrize(("tokenizer", "prompt", "text", "said", "calls"), [
    (LOOSE, "", 'so @call{"name": "f", "arguments": {}}@end', "so", 1),
    (LOOSE, "", 'so @call[{"name": "f", "arguments": {}}]@end', None, 0),
    (LOOSE, "", "so @call5@end and more", None, 0),
    (NAMED, "", 'so @call{"a": 1}@end and more', None, 0),
    (LOOSE, "assistant: (", "so it goes", "so it goes", 0),
    (LOOSE, "assistant: so @", "it goes", "it goes", 0),
    (LOOSE, "assistant: \n", "it goes", "it goes", 0),
    (LOOSE, "assistant: ((\n\n))\n\n", "it goes", "it goes", 0),
    (LOOSE, "assistant: ((\n\n))\n\n", '@call{"name": "f", "arguments": {}}@end', "", 1),
    (LOOSE, "assistant: @ca", 'll{"name": "f", "arguments": {}}@end', "", 1),
    (LOOSE, "assistant: I @call{no}@end so", "it goes", "it goes", 0),
])  # fmt: skip
def test_broken_calls_and_what_the_prompt_ends_with(
    tokenizer: Any, prompt: str, text: str, said: str | None, calls: int
) -> None:
    """Nothing of the answer is lost; None: all of it is text."""
    for size in (1, 3, 100):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        _, found, made = read(reader_of(prompt, tokenizer), parts)
        assert len(made) == calls, size
        if said is None:
            rest = text.partition("@call")[2].replace(" ", "")
            assert found.replace(" ", "").startswith("so")
            assert found.replace(" ", "").endswith(rest), size
        else:
            assert found == said, size


def test_a_tag_that_is_a_token_reaches_transformers() -> None:
    reader = reader_of("", markers={5: "@end"})
    found = reader.push([Piece("@call:f{}", 9, "target", 0.0), Piece("", 5, "target", 0.0)])
    assert [part.name for part in found if isinstance(part, Call)] == ["f"]


def test_a_tokenizer_s_own_format_is_served(ask: Ask, tagged: Any) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + tiny.TEMPLATE
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": tools, "max_tokens": 99}
    answer = '((so))I call.@call:f{"a": "é"}@end'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged.model.tokenizer, "response_template", FORMAT, raising=False)
        response = ask("/v1/chat/completions", template, answer, **body)
        message = response.json()["choices"][0]["message"]
        chunks = events(ask("/v1/chat/completions", template, answer, stream=True, **body))
        plain = ask("/v1/chat/completions", template, "so", **body | {"tools": None}).json()
    assert "warning" not in response.headers
    assert (message["reasoning_content"], message["content"]) == ("so", "I call.")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "é"}'}
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "I call."
    (call,) = streamed_calls(chunks)
    assert call["function"]["name"] == "f"
    assert plain["choices"][0]["message"]["content"] == "so"
