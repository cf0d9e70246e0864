"""Tools where the chat template knows none: a prompt describes them."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from serving import CHAT, USER, Ask, read

import tiny
from draftsmith.server.calls.formats import FORMATS
from draftsmith.server.reader import Reader
from draftsmith.server.tools import described, with_calls

TOOL = {"type": "function", "function": {"name": "add", "description": "Füge hinzu", "parameters": {
    "type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"],
    "additionalProperties": False}}}  # fmt: skip
FUNCTION = {"name": "add", "arguments": {"x": "é"}}
CALL: dict[str, Any] = {
    "role": "assistant", "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}],
}  # fmt: skip
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


def rendered(template: str, messages: list[dict[str, Any]], tools: list[Any]) -> str:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    shown = described(tokenizer, messages, tools, "hermes") if tools else messages
    text: str = tokenizer.apply_chat_template(with_calls(tokenizer, shown, {}), tokenize=False)
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


CALLS = "{% for c in m.tool_calls or [] %}<f>CALL</f>{% endfor %}"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and CONDITION %}" + CALLS
    + "{% elif m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)  # fmt: skip


def of_calls(call: str, condition: str = "m.tool_calls") -> str:
    return TEMPLATE.replace("CALL</f>", call + "</f>").replace("CONDITION", condition)


@pytest.mark.parametrize(("template", "shown"), [
    (of_calls("{{ c.function.arguments | tojson }}"), '<f>{"x": "é"}</f>'),
    (of_calls("{{ '' + c.function.arguments }}"), '<f>{"x": "é"}</f>'),  # DeepSeek's
    (of_calls("{{ c.function.arguments }}"), '<f>{"x": "é"}</f>'),
    (of_calls("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"),
     "<f>x=é</f>"),
    (of_calls("{% if c.id|length != 9 %}{{ raise_exception('ids') }}{% endif %}{{ c.id }} "
              "{{ c.function.arguments | tojson }}"), '<f>6b86b273f {"x": "é"}</f>'),  # Mistral's
    (of_calls("", "false"), "<tool_call>"),  # it drops calls
])  # fmt: skip
def test_calls_are_written_as_the_template_reads_them(template: str, shown: str) -> None:
    assert shown in rendered(template, [USER, CALL, RESULT], [])
    assert rendered(template, [USER], []) == "<user>hello"


def test_words_of_the_tools_do_not_look_like_a_call() -> None:
    template = "{{ tools }}" + of_calls("{{ '' + c.function.arguments }}")
    tool = {"type": "function", "function": {"name": "f", "description": "It is SHOWN.",
            "parameters": {"type": "object", "properties": {"x": {}}}}}  # fmt: skip
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    shown = with_calls(tokenizer, [USER, CALL, RESULT], {"tools": [tool]})
    assert shown[1]["tool_calls"][0]["function"]["arguments"] == '{"x": "é"}'


TWO = {**CALL, "tool_calls": [
    {"id": one, "type": "function", "function": {"name": name, "arguments": {"x": one}}}
    for one, name in (("a", "f"), ("b", "g"))
]}  # fmt: skip
BOTH = [USER, TWO, *({**RESULT, "content": text, "tool_call_id": one}
                     for one, text in (("b", "B"), ("a", "A"))), USER]  # fmt: skip
ONE_ONLY = TEMPLATE.replace(
    CALLS, "<f>{{ m.tool_calls[0].function.arguments.values() | join }}</f>"
).replace("CONDITION", "m.tool_calls")


@pytest.mark.parametrize("refuses", [False, True])
def test_calls_are_shown_one_by_one_by_templates_that_show_one(refuses: bool) -> None:
    """gpt-oss's shows the first one, Llama 3.1's refuses several."""
    template = ONE_ONLY
    if refuses:
        check = "{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}"
        template = template.replace("%}", "%}" + check, 1)
    shown = "<user>hello<f>a</f><tool>A<f>b</f><tool>B<user>hello"
    assert rendered(template, BOTH, []) == shown
    every = of_calls("{{ c.function.arguments.values() | join }}")
    assert rendered(every, BOTH, []) == "<user>hello<f>a</f><f>b</f><tool>B<tool>A<user>hello"


@pytest.mark.parametrize(("calls", "results", "shown"), [
    ("aa", "aa", "a0a1"), ("ab", "ba", "a1b0"), ("ab", "", "ab"), ("ab", "xa", "a1b0"),
    ("ab", "aab", "a0b21"), ("  ", "  ", " 0 1"), ("ab", "  ", "a0b1"),
])  # fmt: skip
def test_results_follow_their_calls(calls: str, results: str, shown: str) -> None:
    """By id, else in order; a space stands for no id."""
    called = [{"id": one.strip(), "type": "function",
               "function": {"name": "f", "arguments": {"x": one}}} for one in calls]  # fmt: skip
    said = [{"role": "tool", "content": str(n), "tool_call_id": one.strip()}
            for n, one in enumerate(results)]  # fmt: skip
    text = rendered(ONE_ONLY, [USER, {**CALL, "tool_calls": called}, *said, USER], [])
    assert re.sub(r"<.*?>", "", text) == f"hello{shown}hello"


def test_a_last_message_with_calls_stays_one() -> None:
    last = {**TWO, "content": "Let me"}
    assert rendered(ONE_ONLY, [USER, last], []) == "<user>hello<f>a</f>"


def test_results_have_the_names_of_their_calls() -> None:
    template = of_calls("{{ c.function.arguments.values() | join }}").replace(
        "{{ m.content }}", "{{ m.name }}", 1
    )
    assert "<tool>g<tool>f" in rendered(template, BOTH, [])


def test_arguments_that_were_cut_off_are_shown_by_templates_that_read_objects() -> None:
    template = of_calls("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}")
    cut = copy.deepcopy(CALL)
    cut["tool_calls"][0]["function"]["arguments"] = '{"x": "a'
    assert '<f>={"x": "a</f>' in rendered(template, [USER, cut, RESULT], [])
    template = of_calls("{{ c.function.arguments }}")
    assert '<f>{"x": "a</f>' in rendered(template, [USER, cut, RESULT], [])


def test_ids_of_nine_letters_and_digits_stay() -> None:
    template = "{{ 'length != 9' }}" + of_calls("{{ c.id }}{{ c.function.arguments }}")
    call = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "abcDEF123"}]}
    assert "<f>abcDEF123" in rendered(template, [USER, call], [])


@pytest.mark.parametrize("template", [tiny.TEMPLATE, NO_SYSTEM, UNKNOWN])
def test_s5_a_template_without_tools_gets_them_by_a_prompt(ask: Ask, template: str) -> None:
    body = {"messages": [USER], "tools": [TOOL], "max_tokens": 200}
    answer = 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"x": "p"}}\n</tool_call>'
    response = ask(CHAT, template, answer, **body)
    assert "described in a prompt" in response.headers["warning"]
    (told,) = response.json()["choices"]
    assert told["message"]["content"] == "Yes."
    assert told["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "p"}'
    assert told["finish_reason"] == "tool_calls"
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        (told,) = ask(CHAT, template, None, **body, tool_choice=choice).json()["choices"]
        (call,) = told["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({"x": "p"}, {"x": "q"})
    plain = ask(CHAT, template, "so", **body | {"tools": None})
    none = ask(CHAT, template, "so", **body, tool_choice="none")
    assert "warning" not in none.headers
    tokens = [one.json()["usage"]["prompt_tokens"] for one in (plain, none, response)]
    assert tokens[0] == tokens[1] < tokens[2]


def test_the_example_of_every_format_is_a_call() -> None:
    for family, row in FORMATS.items():
        _, text, ((name, arguments),) = read(Reader(family, {"NAME": None}), [row.example])
        assert (text, name, json.loads(arguments)) == ("", "NAME", {"KEY": "VALUE"})
