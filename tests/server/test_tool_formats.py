"""Every format of tool calls, with arguments that look like the format itself."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from serving import CHAT, USER, Ask, merged, parsed, split
from serving import read as read_by

import tiny
from draftsmith import Grammar
from draftsmith.engine.engine import Engine
from draftsmith.engine.sequence import Piece
from draftsmith.server.calls.as_tags import typed
from draftsmith.server.calls.formats import FORMATS, family_of, markers_of
from draftsmith.server.calls.source import Call, MoreArguments, Part, TextPart
from draftsmith.server.reader import Reader

CALLS = 200

PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<|tool_call|>", "<|/tool_call|>", "functools[", "<function=add>", "</function>",
    "<parameter=a>", "<parameter=text>", "</parameter>", "<arg_key>a</arg_key>", "<arg_key>",
    "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>", "```json", "```", '"', "'", '"""', "'''", "\\",
    "\\n", "\\u0061", "{", "}", "[", "]", "(", ")", "{}", "[]",
    '{"name": "add", "arguments": {}}', "add(a=1)", ",", ";", ":", "=", "\n", "\t",
    " ", "  ", "\r\n", "é", "日本", "🦊", "\u2028",
    "\u0085", "\ufffd", "null", "True", "1e9", "NaN", "a", "the end", "\u200d", "\x7f",
]  # fmt: skip

TOOLS: dict[str, Any] = {
    "add": {"type": "object", "properties": {
        "a": {"type": "string"}, "text": {"type": "string"}, "count": {"type": "integer"},
        "ratio": {"type": "number"}, "on": {"type": "boolean"}, "list": {"type": "array"},
        "of": {"type": "object"}}},
    "get.now": {"type": "object", "properties": {}},
    "write_file": {"type": "object", "properties": {
        "path": {"type": "string"}, "text": {"type": ["string", "null"]}}},
}  # fmt: skip

Told = tuple[str, dict[str, Any]]


def text_of(rng: random.Random, most: int = 8) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, most)))


def value_of(rng: random.Random, kind: str, depth: int = 2) -> Any:
    if kind == "integer":
        return rng.choice([0, -7, 12345678901234567890123])
    if kind == "number":
        return rng.choice([0.5, -1e-7, 3])
    if kind == "boolean":
        return rng.random() < 0.5
    kinds = ["string", "integer", "boolean", *(["array", "object"] if depth else [])]
    if kind == "array":
        return [value_of(rng, rng.choice(kinds), depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "object":
        return {text_of(rng, 2): value_of(rng, rng.choice(kinds), depth - 1) for _ in range(2)}
    return text_of(rng)


def call_of(rng: random.Random) -> Told:
    name = rng.choice([*TOOLS])
    chosen = [key for key in TOOLS[name]["properties"].items() if rng.random() < 0.7]
    given = {
        key: value_of(rng, schema["type"] if isinstance(schema["type"], str) else "string")
        for key, schema in chosen
    }
    # Without quotes the word for nothing cannot be told from a text of that word.
    return name, {key: value if value != "null" else "nil" for key, value in given.items()}


# --- how models write them ------------------------------------------------------------------------


def dumped(rng: random.Random, value: Any) -> str:
    indent, plain = rng.choice([None, None, 2]), rng.random() < 0.7
    return json.dumps(value, ensure_ascii=not plain, indent=indent)


def as_object(rng: random.Random, call: Told, key: str = "arguments") -> str:
    return dumped(rng, {"name": call[0], key: call[1]})


def hermes(rng: random.Random, calls: Sequence[Told]) -> str:
    gap = rng.choice(["", "\n"])
    return "\n".join(f"<tool_call>{gap}{as_object(rng, call)}{gap}</tool_call>" for call in calls)


def llama(rng: random.Random, calls: Sequence[Told], mark: str = "<|python_tag|>") -> str:
    return mark + "; ".join(as_object(rng, call, "parameters") for call in calls)


def listed(rng: random.Random, calls: Sequence[Told], open: str, close: str = "") -> str:
    return f"{open}[{', '.join(as_object(rng, call) for call in calls)}]{close}"


def mistral(rng: random.Random, calls: Sequence[Told]) -> str:
    behind = rng.choice(["", "[ARGS]", "[CALL_ID]abc123456[ARGS]"])
    each = (f"[TOOL_CALLS]{name}{behind}{dumped(rng, given)}" for name, given in calls)
    return "".join(each) if rng.random() < 0.6 else listed(rng, calls, "[TOOL_CALLS] ")


def deepseek(rng: random.Random, calls: Sequence[Told]) -> str:
    def one(call: Told) -> str:
        body = f"{call[0]}<｜tool▁sep｜>{dumped(rng, call[1])}"
        if old:
            body = f"function<｜tool▁sep｜>{call[0]}\n```json\n{dumped(rng, call[1])}\n```"
        return f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>"

    old = rng.random() < 0.5
    gap = "\n" if old else ""
    return f"<｜tool▁calls▁begin｜>{gap.join(map(one, calls))}<｜tool▁calls▁end｜>"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(_rng: random.Random, calls: Sequence[Told]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        parts = (f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in given.items())
        return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(_rng: random.Random, calls: Sequence[Told]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        parts = (f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n"
                 for k, v in given.items())  # fmt: skip
        return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def harmony(rng: random.Random, calls: Sequence[Told]) -> str:
    """As the model writes it behind `<|start|>assistant`, which the prompt has."""

    def one(call: Told) -> str:
        to = f"to=functions.{call[0]}"
        header = rng.choice(
            [f"<|channel|>commentary {to} <|constrain|>json", f" {to}<|channel|>commentary json"]
        )
        return f"{header}<|message|>{dumped(rng, call[1])}"

    return "<|call|><|start|>assistant".join(map(one, calls)) + rng.choice(["", "<|call|>"])


def pythonic(rng: random.Random, calls: Sequence[Told], mark: str = "<|python_tag|>") -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={spelt(value)}' for key, value in given.items())})"

    def spelt(value: Any) -> str:
        return repr(value) if rng.random() < 0.7 or "true" in plain(value) else json.dumps(value)

    return f"{mark}[{', '.join(one(*call) for call in calls)}]"


Writer = Callable[[random.Random, Sequence[Told]], str]
WRITERS: dict[str, tuple[str, Writer]] = {
    "harmony, bare": ("harmony", harmony),
    "hermes": ("hermes", hermes),
    "qwen3-coder": ("qwen3-coder", qwen3_coder),
    "glm": ("glm", glm),
    "deepseek": ("deepseek", deepseek),
    "mistral": ("mistral", mistral),
    "granite": ("granite", partial(listed, open="<|tool_call|>")),
    "granite, older": ("granite", partial(listed, open="<function_call> ")),
    "phi4": ("phi4", partial(listed, open="<|tool_call|>", close="<|/tool_call|>")),
    "phi4, functools": ("phi4", partial(listed, open="functools")),
    "llama": ("llama", llama),
    "llama, bare": ("llama", partial(llama, mark="")),
    "pythonic": ("pythonic", pythonic),
    "pythonic, bare": ("pythonic", partial(pythonic, mark="")),
}
assert {family for family, _ in WRITERS.values()} == {*FORMATS}


def read(family: str, parts: Sequence[str], tools: Any = TOOLS) -> tuple[str, list[Told]]:
    """What an answer says, and its calls."""
    _, said, calls = read_by(Reader(family, tools), parts)
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", WRITERS)
def test_s1_no_call_is_lost_or_altered_by_what_its_arguments_hold(name: str) -> None:
    family, write = WRITERS[name]
    rng, done = random.Random(f"calls of {name}"), 0
    while done < CALLS:
        calls = [call_of(rng) for _ in range(rng.randint(1, 3))]
        before = "" if "bare" in name else rng.choice(["", "I will do that.", "two\n\nparts"])
        gap = rng.choice(["", "\n"]) if before else ""
        after = "" if "bare" in name else rng.choice(["", "\n\nThat was it."])
        text = before + gap + write(rng, calls) + after
        expected = before + after, calls
        assert read(family, [text]) == expected, text
        assert read(family, split(rng, text)) == expected, text
        done += len(calls)


@pytest.mark.parametrize("name", [name for name in WRITERS if "bare" not in name])
def test_s1_prose_may_name_a_mark_before_a_call_and_behind_it(name: str) -> None:
    family, write = WRITERS[name]
    rng = random.Random(f"prose of {name}")
    for mark in FORMATS[family].marks:
        for prose in (f"{mark} begins a call.", f"Write {mark} {{…}} first.", f"{mark}{{ or {mark}",
                      f"{mark}{mark}", f"`{mark}` and {mark[:-1]}", f"{mark}[1, 2] {mark}{{}}",
                      f'{mark}{{"name": 5}} {mark}{{"a": "'):  # fmt: skip
            for call in (("add", {"a": f"no {mark} {{"}), ("get.now", {})):
                text = f"{prose} Now:\n{write(rng, [call])}"
                expected = f"{prose} Now:", [call]
                assert read(family, [text]) == expected, text
                assert read(family, split(rng, text)) == expected, text
                behind = f"{text}\n\nThat was {mark}."
                if FORMATS[family].inside or family != "llama":
                    assert read(family, split(rng, behind)) == (
                        f"{prose} Now:\n\nThat was {mark}.", [call]
                    ), behind  # fmt: skip


STREAMED = {name for name, (family, _) in WRITERS.items()
            if family not in ("qwen3-coder", "glm", "pythonic")} - {"llama, bare"}  # fmt: skip
"""Those that send arguments as they come. Without a mark, JSON may be no call at all."""


@pytest.mark.parametrize("name", WRITERS)
def test_s1_what_is_no_call_stays_text(name: str) -> None:
    """An answer that is cut anywhere loses nothing: what is no call is said."""
    family, write = WRITERS[name]
    rng = random.Random(f"cut {name}")
    text = write(rng, [("add", {"a": 'x </tool_call> "y"', "count": 3, "list": [{"b": [True]}]})])
    whole, begin, close = read(family, [text]), len(text), len(text)
    if name in STREAMED:  # from here on it is a call
        begin = text.rindex("{", 0, text.index('"a"'))
        close = json.JSONDecoder().raw_decode(text, begin)[1]
    for end in range(len(text)):
        parts = split(rng, text[:end])
        if end > begin:
            call, *rest = parsed(Reader(family, TOOLS), parts)
            assert isinstance(call, Call)
            assert (call.name, call.arguments) == ("add", text[begin : min(end, close)])
            assert rest in ([], [TextPart(text[close:end])]), text[:end]
            continue
        left = text[:end].lstrip() if family == "harmony" else text[:end]
        assert read(family, parts) in (whole, (left, []), (text[:end], [])), text[:end]
    words = 'plain text, [1, 2], {"a": 1}, <b>bold</b> and `code()`\n'
    assert read(family, split(rng, words)) == (words, [])


@pytest.mark.parametrize("name", sorted(STREAMED))
def test_arguments_are_sent_as_they_come(name: str) -> None:
    family, write = WRITERS[name]
    rng = random.Random(f"streamed {name}")
    for _ in range(5):
        calls = [("add", {"a": "🦊" + text_of(rng), "list": [1, text_of(rng)]})] * 2
        text = write(rng, calls)
        reader, found = Reader(family, TOOLS), list[Part]()
        for place, letter in enumerate(text):
            found += reader.push([Piece(letter, 9, "target", 0.0)])
            sent = [part.arguments for part in merged(found) if isinstance(part, Call)]
            if len(sent) == 1:  # at most an escape is held, or a pair of them
                begin = text.rindex("{", 0, text.index('"a"'))
                close = json.JSONDecoder().raw_decode(text, begin)[1]
                missing = text[begin : min(place + 1, close)].removeprefix(sent[0])
                assert missing == "" or re.fullmatch(r"\\.{0,11}", missing), (missing, text)
        whole = merged(found + reader.end())
        told = [(part.name, part.arguments) for part in whole if isinstance(part, Call)]
        assert [(called, json.loads(arguments)) for called, arguments in told] == calls
        assert len(whole) == 2
        assert sum(isinstance(part, MoreArguments) for part in found) > 10
        assert [part.name for part in found if isinstance(part, Call)] == ["add", "add"]


@pytest.mark.parametrize("name", sorted(STREAMED))
def test_what_cannot_belong_to_the_arguments_ends_a_call(name: str) -> None:
    family, write = WRITERS[name]
    rng = random.Random(f"ended {name}")
    for wrong in ("oops", "NaN", "'x'", '"\\x"', '"\\ud83e"', '"\\ud83e\\u0041"', '"a\nb"'):
        text = write(rng, [("add", {"a": 1, "list": ["HERE"]})]).replace('"HERE"', wrong)
        cuts = [text], [*text], split(rng, text)
        found = [read_by(Reader(family, TOOLS), parts) for parts in cuts]
        assert found == [found[0]] * 3, text
        _, said, ((called, arguments),) = found[0]
        assert called == "add"
        assert text.endswith(arguments + said)
        with pytest.raises(ValueError, match=r"\(char"):
            json.loads(arguments)


UNQUOTED: dict[str, Writer] = {"qwen3-coder": qwen3_coder, "glm": glm}


@pytest.mark.parametrize("family", UNQUOTED)
def test_s1_a_value_without_quotes_is_what_its_schema_says(family: str) -> None:
    """So is `null`, which these formats write for the text and for no value alike."""
    maybe: list[dict[str, Any]] = [
        {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "nullable": True}, {"enum": ["a", None]}, {"$ref": "#/$defs/maybe"},
        {"type": ["integer", "null"]}, {},
    ]  # fmt: skip
    never: list[dict[str, Any]] = [
        {"type": "string"}, {"type": "string", "nullable": False}, {"$ref": "#/$defs/name"},
        {"enum": ["a", "null"]}, {"const": "null"}, {"type": ["string", "integer"]},
    ]  # fmt: skip
    listed = {"anyOf": [{"type": "string"}, {"type": "array"}]}
    values: list[tuple[dict[str, Any], Any, Any]] = [
        *((schema, None, None) for schema in maybe), *((schema, None, "null") for schema in never),
        ({"type": "string"}, "5", "5"), ({"type": "integer"}, 5, 5), ({"type": "number"}, 3, 3),
        ({"type": ["string", "null"]}, "5", "5"), (listed, "{}", "{}"), (listed, [], []),
        ({"enum": ["1", "2"]}, "1", "1"), ({"const": "true"}, "true", "true"),
        ({}, [1], [1]), ({}, "a", "a"),
    ]  # fmt: skip
    properties = {f"p{n}": schema for n, (schema, _, _) in enumerate(values)}
    tools = {"f": {"type": "object", "properties": properties, "$defs": {
        "maybe": {"type": ["null", "string"]}, "name": {"type": "string"}}}}  # fmt: skip
    given, found = ({f"p{n}": row[side] for n, row in enumerate(values)} for side in (1, 2))
    text = UNQUOTED[family](random.Random(), [("f", given)])
    assert read(family, [text], tools) == ("", [("f", found)])


def test_s1_the_closing_tags_may_stand_in_a_value_without_quotes() -> None:
    for family, write, tags in (
        ("qwen3-coder", qwen3_coder, "\n</parameter>\n</function>\n</tool_call>"),
        ("glm", glm, "</arg_value>\n</tool_call>"),
    ):
        calls = [("add", {"text": f"a{tags}b{tags}"}), ("write_file", {"path": tags, "text": "c"})]
        rng = random.Random(family)
        assert read(family, split(rng, write(rng, calls))) == ("", calls)


def test_s1_pythons_escapes_mean_what_they_mean_in_python() -> None:
    for value in (r"'a\'b\"\\\n\x41é\U0001F98A\q\
c'", "'''it's \"\"\" 'here' '''", '"""a"b""c\nd"""', "''", '""""""', "'\\0'", r"'\101\0123'",
                  r"'\N{BULLET} \N{LATIN SMALL LETTER E WITH ACUTE}'", "(1, 2,)", "[-1.5,]",
                  "{'a': {'b': ()}}", "[None, True, 1_000.5]"):  # fmt: skip
        text = f"[add(a={value})]"
        expected = json.loads(json.dumps(eval(value.replace(r"\q", r"\\q"))))
        assert read("pythonic", [text])[1] == [("add", {"a": expected})]
        assert read("pythonic", list(text))[1] == [("add", {"a": expected})]
    assert read("pythonic", ["[add(a={1: 2})]"]) == ("[add(a={1: 2})]", [])


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "family"), [
    ("{% for t in tools %}{% endfor %}<tool_call>{\"name\": <name>}</tool_call>", "hermes"),
    ("{% if tools %}<tool_call>\\n<function=f>\\n<parameter=p>{% endif %}", "qwen3-coder"),
    ("{% if tools %}<tool_call>{name}\\n<arg_key>{% endif %}", "glm"),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek"),
    ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", "mistral"),
    ("{{ '[TOOL_CALLS]' }}", "mistral"),
    ("{% if tools %}respond with <|tool_call|> and a JSON list{% endif %}", "granite"),
    ("{% if tools %}<|tool_call|>{}<|/tool_call|>{% endif %}", "phi4"),
    ("{% if tools %}formatted as functools[{}]{% endif %}", "phi4"),
    ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic"),
    ('{% if tools %}{"name": f, "parameters": d}{% endif %}', "llama"),
    ("{{ messages }}", None), ("the parameters", None),
])  # fmt: skip
def test_the_format_is_the_one_that_the_template_teaches(template: str, family: str | None) -> None:
    assert family_of(SimpleNamespace(chat_template=template)) == family


# --- served ---------------------------------------------------------------------------------------


def taught(text: str) -> str:
    return "{% if tools %}" + text + "{% endif %}" + tiny.TEMPLATE


def asked(**more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}
             for name, schema in TOOLS.items()]  # fmt: skip
    return {"messages": [USER], "tools": tools, "max_tokens": 1000, "seed": 1} | more


def test_s1_a_mark_that_is_a_token_parts_what_a_stop_string_holds_back(
    tagged: Engine, ask: Ask
) -> None:
    """Text that may begin a stop string stands before the mark that comes behind it."""
    ids = {name: i for i, name in markers_of(tagged.model.tokenizer).items()}
    mark, behind = ids["[TOOL_CALLS]"], ids["[ARGS]"]
    answer = Grammar.lark(f'start: "so" <[{mark}]> "add" <[{behind}]> "{{\\"a\\": \\"b\\"}}"')
    for stop in (None, ["odd"], ["ddx"], ["do", "zz"]):
        response = ask(CHAT, taught("[TOOL_CALLS]"), answer, **asked(stop=stop))
        told = response.json()["choices"][0]
        assert told["message"]["content"] == "so", stop
        (call,) = told["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": "b"}'}


@pytest.mark.parametrize("text", [
    "a <|python_tag|> b", "[TOOL_CALLS]", "</tool_call><tool_call>", "</s>é\u2028🦊 \"{}\\",
])  # fmt: skip
def test_s1_a_forced_call_says_what_its_schema_makes_constant(ask: Ask, text: str) -> None:
    schema = {"type": "object", "properties": {"text": {"const": text}}, "required": ["text"],
              "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "write", "parameters": schema}}]
    for drafter in ("none", "auto"):
        body = asked(tools=tools, tool_choice="required", drafter=drafter)
        (told,) = ask(CHAT, taught("<tool_call>"), None, **body).json()["choices"]
        (call,) = told["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"text": text}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": [{"$ref": "#/properties/x"}] * 1000}, 1),
        ({"anyOf": [{"$ref": "#/properties/x"}, {"type": "string"}]}, "1"),
        ({"anyOf": True}, 1),
        ({"type": [{}, "string"]}, "1"),
        ({"oneOf": [{"allOf": [{"type": ["string", "null"]}]}]}, "1"),
    ],
)
def test_any_schema_types_a_parameter(schema: dict[str, Any], value: Any) -> None:
    """References in circles, and what is no schema."""
    assert typed("1", "x", {"properties": {"x": schema}}) == value
