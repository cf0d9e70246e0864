"""Thoughts: parted from the answer in every shape that clients read, and counted."""

from __future__ import annotations

import json
import random
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from serving import CHAT, CLOSED, OPENED, TAGGED, USER, Ask, events, read, split

import tiny
from draftsmith.server.reader import Reader
from draftsmith.text.thoughts import Thoughts

HARMONY = "{# <|channel|>analysis #}" + tiny.TEMPLATE.replace(
    "assistant: {{", "<|start|>assistant{{"
)
PARTS = ["<think>", "</think>", "</think", "<|end|>", "<|channel|>final<|message|>", "<|start|>",
         "\n", " ", "a", "so", "é🦊", '{"a": 1}', "<tool_call>", "."]  # fmt: skip
TAGS = Thoughts.of(SimpleNamespace(chat_template=TAGGED))


def written(rng: random.Random, without: str) -> str:
    parts = [part for part in PARTS if without not in part]
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, 9)))


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("called", [True, False])
def test_thoughts_between_tags_are_the_same_in_any_parts(opened: bool, called: bool) -> None:
    rng = random.Random(f"{opened} {called}")
    for _ in range(200):
        thought, said = written(rng, "</think>"), written(rng, "<tool_call>").strip() + "."
        call = (
            '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>' if called else ""
        )
        text = f"\n{thought}\n</think>\n\n{said}{call}"
        expected = thought.strip(), said, [("f", '{"a": "</think>"}')] if called else []
        for parts in ([text], split(rng, text)):
            reader = Reader("hermes", {"f": None}, {}, TAGS, "<think>" if opened else "")
            whole = parts if opened else ["<think>", *parts]
            assert read(reader, whole) == expected, text


def test_what_is_no_thought_stays_text() -> None:
    texts = ("", " \n", "<thin", "<thinking>", "\n\nso </think> it", "so <think>a</think>")
    for text, family in product(texts, ("hermes", None)):
        reader = Reader(family, {}, {}, TAGS)
        assert read(reader, [*text]) == ("", text, [])
        assert reader.thought_tokens == 0 or text in ("", " \n", "<thin")
    reader = Reader(None, {}, {}, TAGS)
    assert read(reader, [*"<think> never ends "]) == ("never ends", "", [])
    assert reader.thought_tokens == len("<think> never ends ")


def test_channels_are_the_same_in_any_parts() -> None:
    rng = random.Random(0)
    for _ in range(200):
        thought, said, last = (written(rng, "<|") for _ in range(3))
        arguments = json.dumps({"a": written(rng, "nothing") + "<|call|>"}, ensure_ascii=False)
        text = (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
            f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant"
        )
        calls = rng.random() < 0.5
        text += (
            f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}<|call|>"
            if calls else f"<|channel|>final<|message|>{last}<|return|>"
        )  # fmt: skip
        expected = thought.strip(), said if calls else said + last, (
            [("f", arguments)] if calls else []
        )  # fmt: skip
        for parts in ([text], split(rng, text)):
            told = read(Reader("harmony", {"f": None}), parts)
            assert (told[0].strip(), *told[1:]) == (expected[0], *expected[1:]), text


# --- served ---------------------------------------------------------------------------------------


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"enum": ["p", "q"]}}, "required": ["a"],
    "additionalProperties": False}}}]  # fmt: skip
ANSWERS = [
    (TAGGED, "<think>\nthe fox\n</think>\n\nhello", "the fox"),
    (OPENED, "the fox\n</think>\n\nhello", "the fox"),
    (CLOSED, "hello", ""),
    (HARMONY, "<|channel|>analysis<|message|>the fox<|end|><|start|>assistant"
     "<|channel|>final<|message|>hello", "the fox"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "answer", "thought"), ANSWERS)
def test_a_chat_parts_thoughts_from_the_answer(
    ask: Ask, template: str, answer: str, thought: str
) -> None:
    body = {"messages": [USER], "max_tokens": 100}
    told = ask(CHAT, template, answer, **body).json()
    message = told["choices"][0]["message"]
    assert message.get("reasoning_content", "") == thought
    assert message["content"] == "hello"
    usage = told["usage"]
    thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
    assert (thoughts > 0) == bool(thought)
    assert thoughts < usage["completion_tokens"]
    for more in ({}, {"prediction": {"type": "content", "content": answer}}):
        chunks = events(ask(CHAT, template, answer, stream=True, **body, **more))
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
        assert "".join(delta.get("content", "") for delta in deltas) == "hello"
        assert not any(delta.get("reasoning_content") and delta.get("content") for delta in deltas)


def test_reasoning_tokens_are_those_up_to_the_closing_tag(ask: Ask) -> None:
    answer = "the fox says hello</think>so"
    told = ask(CHAT, OPENED, answer, messages=[USER], max_tokens=100, logprobs=True).json()
    tokens = [one["token"] for one in told["choices"][0]["logprobs"]["content"]]
    assert (
        tokens.index("</think>") + 1
        == (told["usage"]["completion_tokens_details"]["reasoning_tokens"])
    )


@pytest.mark.parametrize("template", [TAGGED, OPENED, CLOSED, HARMONY])
def test_a_format_and_a_forced_call_come_after_limited_thoughts(ask: Ask, template: str) -> None:
    limit = 0 if template == HARMONY else 4  # this model writes no channels by itself
    body = {"messages": [USER], "max_tokens": 300, "thinking_token_budget": limit}
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red", "blue"]}}}
    told = ask(CHAT, template, None, response_format=form, **body).json()
    message, usage = told["choices"][0]["message"], told["usage"]
    assert json.loads(message["content"]) in ("red", "blue")
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= limit + 20
    called = ask(CHAT, template, None, tools=TOOLS, tool_choice="required", **body)
    message = called.json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert message["content"] is None
    if template == OPENED:
        assert message["reasoning_content"]


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_effort_reaches_templates_that_know_it(ask: Ask, name: str) -> None:
    template = TAGGED + f"{{% if {name} is false %}}none{{% endif %}}"
    efforts: list[Any] = [{}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}]
    asked = [ask(CHAT, template, "x", messages=[USER], **more) for more in efforts]
    usage = [response.json()["usage"]["prompt_tokens"] for response in asked]
    assert usage[0] == usage[1] < usage[2]
