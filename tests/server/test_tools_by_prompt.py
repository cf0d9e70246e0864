"""Tools where the chat template knows none: a prompt describes them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import api_of, client_of, loaded

import tiny
from draftsmith import Grammar
from draftsmith.engine.engine import Engine
from draftsmith.engine.jobs import Piece
from draftsmith.model.load import load
from draftsmith.server.calls.formats import FORMATS
from draftsmith.server.calls.source import Call
from draftsmith.server.reader import Reader
from draftsmith.server.tools import described

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Füge hinzu", "parameters": {
    "type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"],
    "additionalProperties": False}}}  # fmt: skip
FUNCTION = {"name": "add", "arguments": {"x": "é"}}
CALL = {"role": "assistant", "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]}  # fmt: skip
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1"}
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<s>{{ m.role }}: {{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SILENT = (
    "{% for m in messages if m.role != 'system' %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
)
UNKNOWN = "{% if tools %}<some_call>{% endif %}" + tiny.TEMPLATE


def tokenizer_of(template: str) -> Any:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def rendered(template: str, messages: list[dict[str, Any]], tools: list[Any]) -> str:
    tokenizer = tokenizer_of(template)
    text: str = tokenizer.apply_chat_template(
        described(tokenizer, messages, tools, "hermes"), tokenize=False
    )
    return text


def test_s5_tools_are_described_where_the_template_shows_them() -> None:
    told = json.dumps(TOOL, ensure_ascii=False)
    for template, system in ((tiny.TEMPLATE, True), (NO_SYSTEM, False), (SILENT, False)):
        text = rendered(template, [USER], [TOOL])
        assert told in text
        assert FORMATS["hermes"].example in text
        assert text.startswith("<s>system: " if system else "<s>user: ")
        assert text.rstrip().endswith("hello</s>")
    text = rendered(tiny.TEMPLATE, [{"role": "system", "content": "be kind"}, USER], [TOOL])
    assert text.startswith("<s>system: be kind\n\nYou may call")
    assert rendered(tiny.TEMPLATE, [USER], []) == "<s>user: hello</s>"


def test_s5_earlier_calls_and_results_are_text_where_the_template_has_none() -> None:
    history = [USER, CALL, RESULT, {**RESULT, "content": "6"}, USER, CALL, RESULT]
    expected = (
        '<s>user: hello</s><s>assistant: <tool_call>\n{"name": "add", "arguments": {"x": "é"}}\n'
        "</tool_call></s><s>user: <tool_response>\n5\n</tool_response>\n<tool_response>\n6\n"
        '</tool_response>\nhello</s><s>assistant: <tool_call>\n{"name": "add", "arguments": '
        '{"x": "é"}}\n</tool_call></s><s>user: <tool_response>\n5\n</tool_response></s>'
    )
    before = copy.deepcopy(history)
    for template in (tiny.TEMPLATE, NO_SYSTEM):
        assert rendered(template, history, []) == expected
        assert expected.removeprefix("<s>user: hello") in rendered(template, history, [TOOL])
    assert history == before


@pytest.fixture(params=[tiny.TEMPLATE, NO_SYSTEM, UNKNOWN])
def ask(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Ask, with an answer that a grammar makes a certain text, unless a request has its own."""
    engine, said = Engine(load(loaded().model, tokenizer_of(request.param))), list[str]()
    prepare = engine.prepare

    def prepared(options: Any, began: float | None = None) -> Any:
        answer = {"grammar": Grammar.regex(re.escape(said[-1]))} if said else {}
        return prepare({**options, **answer}, began)

    monkeypatch.setattr(engine, "prepare", prepared)
    with client_of(api_of(engine, max_output=400)) as client:

        def post(answer: str | None, **more: Any) -> Any:
            said[:] = [answer] if answer else []
            body = {"messages": [USER], "tools": [TOOL], "max_tokens": 200} | more
            response = client.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            return response

        yield post


def test_s5_a_template_without_tools_gets_them_by_a_prompt(ask: Callable[..., Any]) -> None:
    response = ask('Yes.\n<tool_call>\n{"name": "add", "arguments": {"x": "p"}}\n</tool_call>')
    assert "described in a prompt" in response.headers["warning"]
    (told,) = response.json()["choices"]
    assert told["message"]["content"] == "Yes."
    assert told["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "p"}'
    assert told["finish_reason"] == "tool_calls"
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        (told,) = ask(None, tool_choice=choice).json()["choices"]
        (call,) = told["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({"x": "p"}, {"x": "q"})


def test_s5_tools_that_must_not_be_called_are_not_described(ask: Callable[..., Any]) -> None:
    plain, none = ask("so", tools=None), ask("so", tool_choice="none")
    assert "warning" not in none.headers
    tokens = [one.json()["usage"]["prompt_tokens"] for one in (plain, none, ask("so"))]
    assert tokens[0] == tokens[1] < tokens[2]


def test_the_example_of_every_format_is_a_call() -> None:
    for family, row in FORMATS.items():
        reader = Reader(family, ["NAME"])
        (call,) = reader.push([Piece(row.example, 9, "target", 0.0)]) + reader.end()
        assert isinstance(call, Call)
        assert (call.name, json.loads(call.arguments)) == ("NAME", {"KEY": "VALUE"})


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_s5_best_of_may_be_n_and_else_says_what_to_do(path: str) -> None:
    ask = {"messages": [USER], "prompt": "hello", "max_tokens": 2}
    ask = {name: ask[name] for name in ("max_tokens", "messages" if path == CHAT else "prompt")}
    with client_of() as client:
        for more, n in (({"best_of": 1}, 1), ({"best_of": 2, "n": 2}, 2), ({"best_of": None}, 1)):
            told = client.post(path, json=ask | more)
            assert len(told.json()["choices"]) == n
        for more in ({"best_of": 3}, {"best_of": 3, "n": 2}, {"best_of": 1, "n": 2}):
            error = client.post(path, json=ask | more).json()["error"]
            assert error["param"] == "best_of"
            assert "by n, and choose" in error["message"]
