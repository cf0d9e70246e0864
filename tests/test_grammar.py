"""Answers that follow a grammar: what it allows, the same with drafts and without."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers

import tiny
from at_once import twice_at_once
from draftsmith import Engine, Grammar
from draftsmith.drafters.auto import GRAMMAR
from draftsmith.errors import GenerationInterrupted, OptionError
from draftsmith.text.grammar import Grammars, GrammarState
from draftsmith.text.vocab import Vocabulary
from installed import bare_names
from scripted import oracle, random_trees

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha", "beta"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMA = Grammar.json_schema(PERSON)
LIST = Grammar.json_schema({"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3})
REGEX = "(ab|[0-9]{2}){3,5}(the end)?"
LARK = 'start: "(" item ("," item)* ")"\nitem: /[xyz]/ | start\n'
SIZE = len(tiny.tokenizer())
CHOICES: list[dict[str, Any]] = [{}, {"temperature": 1.3, "seed": 5, "top_p": 0.95}]


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "kind"]
        and len(value["name"]) <= 8
        and value["age"] in range(151)
        and value["kind"] in PERSON["properties"]["kind"]["enum"]
    )


def is_list(text: str) -> bool:
    persons = json.loads(text)
    return 2 <= len(persons) <= 3 and all(map(is_person, persons))


def is_nested(text: str) -> bool:
    return bool(re.fullmatch("[(),xyz]+", text)) and text.count("(") == text.count(")")


KINDS = {
    "list": (LIST, is_list),
    "regex": (Grammar.regex(REGEX), re.compile(REGEX).fullmatch),
    "lark": (Grammar.lark(LARK), is_nested),
}
"""Grammars, and what texts they allow."""


@pytest.mark.parametrize("sampling", CHOICES, ids=["greedy", "seeded"])
@pytest.mark.parametrize(("grammar", "follows"), KINDS.values(), ids=KINDS)
def test_answers_fit_and_are_the_same_with_every_drafter(
    engine: Engine, grammar: Grammar, follows: Any, sampling: dict[str, Any]
) -> None:
    options = {"grammar": grammar, "max_new_tokens": 200, "budget": 8, **sampling}
    plain = engine.generate("hello world", drafter="none", **options)
    assert plain.finish_reason == "stop"
    assert follows(plain.text), plain.text
    for drafter in [*bare_names(), random_trees(1, near=plain.tokens), oracle(plain.tokens)]:
        assert engine.generate("hello world", drafter=drafter, **options).tokens == plain.tokens


def test_an_answer_that_is_cut_is_the_beginning_of_the_whole_one(engine: Engine) -> None:
    whole = engine.generate("hello", drafter="none", max_new_tokens=300, grammar=LIST)
    for most in (1, 7, 20):
        cut = engine.generate("hello", max_new_tokens=most, grammar=LIST)
        assert cut.tokens == whole.tokens[:most]
        assert cut.finish_reason == "length"
    for stop in ('{"', '"age"'):
        for drafter in ("none", "auto", oracle(whole.tokens)):
            cut = engine.generate("hello", stop=stop, drafter=drafter, grammar=LIST)
            assert cut.text == whole.text.split(stop)[0]
            assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_where_all_is_said_only_an_end_token_is_left(engine: Engine) -> None:
    answer = engine.generate("hello", grammar=Grammar.regex("yes"), min_new_tokens=9)
    assert answer.text == "yes"
    assert answer.tokens[-1] == tiny.tokenizer().eos_token_id
    assert len(answer.tokens) <= 4


# ------------------------------------------------------------------- as a source of drafts


@pytest.mark.parametrize("sampling", CHOICES, ids=["greedy", "seeded"])
def test_what_a_grammar_forces_is_drafted_and_saves_passes(
    engine: Engine, sampling: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"grammar": LIST, "max_new_tokens": 300, "budget": 16}
    without = engine.generate("hello", drafter="auto(grammar=False)", **options, **sampling)
    got = engine.generate("hello", **options, **sampling)
    assert got.tokens == without.tokens
    assert got.stats.passes < without.stats.passes
    assert got.sources.count(GRAMMAR) == got.stats.by_source[GRAMMAR].accepted > 20
    assert GRAMMAR not in without.stats.by_source


# ------------------------------------------------------------------------------------ keys

NAMED = {key: {"type": "integer"} for key in ("a", "a/b", "t\tt", 'q"q', "é", "🦊")}
TEXTS = {"type": "string"}
SPELLINGS = [r"\u0061", r"a\/b", r"\u0061\u002fb", r"t\u0009t", r"q\u0022q", r"\u00e9", r"\u00E9",
             r"\ud83e\udd8a", r"\uD83E\uDD8A"]  # fmt: skip


TINY = Grammars(tiny.tokenizer(), SIZE)


def fits(schema: Any, text: str) -> bool:
    """Whether a text is one that a schema's grammar allows from beginning to end."""
    compiled = TINY.compile(Grammar.json_schema(schema), [tiny.tokenizer().eos_token_id])
    scout = GrammarState(compiled, 0).scout([])
    assert scout is not None
    return scout.go(tiny.tokenizer().encode(text)) and scout.matcher.is_accepting()


@pytest.mark.parametrize(
    "rest",
    [
        {"additionalProperties": TEXTS},
        {"additionalProperties": True},
        {"additionalProperties": False, "patternProperties": {"^[^x]": TEXTS}},
        {},
    ],
)
def test_s4_a_key_with_escapes_is_the_key_that_it_spells(rest: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": NAMED} | rest
    inside = {"type": "array", "items": {"$ref": "#/$defs/one"}, "$defs": {"one": schema}}
    pattern = {"type": "object", "patternProperties": {"^[aé]$": {"type": "integer"}},
               "additionalProperties": TEXTS}  # fmt: skip
    for key in SPELLINGS:
        text = f'{{"{key}":"x"}}'
        assert not fits(schema, text), key
        assert not fits(inside, f"[{text}]"), key
    assert not fits(pattern, r'{"\u0061":"x"}')
    for text in ('{"a":1}', '{"b":"y"}', r'{"q\"q":1}', r'{"t\tt":1}', '{"é":1}', r'{"n\n":"y"}'):
        allowed = "patternProperties" not in rest or "1" not in text  # which are strings, too
        assert fits(schema, text) == fits(inside, f"[{text}]") == allowed, text
    for text in ('{"a":"x"}', '{"é":"x"}', '{"🦊":"x"}'):
        assert not fits(schema, text), text


def test_s4_control_characters_stay_where_no_key_can_be_misspelled() -> None:
    closed = {"type": "object", "properties": {"a": TEXTS}, "additionalProperties": False}
    assert fits(closed, r'{"a":"\u001b[0m"}')
    assert fits({"type": "object"}, r'{"a":"\u001b[0m"}')
    assert fits({"const": "\x1b"}, r'"\u001b"')
    with pytest.raises(OptionError, match="additionalProperties: false"):
        fits({"type": "object", "properties": {"a": {"const": "\x1b"}}, "required": ["a"]}, "")
    for name in ("const", "enum", "pattern"):  # as names of properties
        about = {"type": "integer", "description": "\x1b", "default": "\x1b"}
        assert fits({"type": "object", "properties": {name: about}}, f'{{"{name}":1}}')


ATOMS = ["a", ".", r"\x1b", "\x1b", r"\u001b", r"\x{1b}", r"[\x1b]", r"[^\x00-\x1f]", r"[^\]\x1b]",
         r"[\x1b-a]", r"\\x1b", r"\[\x1b\]", r"\n", r"\x0a", r"\x7f", r"\v", "(?:)"]  # fmt: skip
LONE = {r"\x1b", "\x1b", r"\u001b", r"\x{1b}", r"[\x1b]", r"\[\x1b\]", r"\x7f", r"\v"}
WORDS = ["", "a", "b", "aa", "ab", "ba", "\n", "a\n", "\na", r"\x1b", r"a\x1b", r"\x1ba", "[]"]


@pytest.mark.parametrize("first", ATOMS)
def test_s4_a_pattern_with_control_characters_is_followed_or_refused(first: str) -> None:
    """Where they cannot be written, llguidance would read such a character as nothing."""
    neighbours = ("a", r"\x1b", r"[^\]\x1b]", r"\[\x1b\]", r"\n", "(?:)")
    for second, whole in product(neighbours, ("^{}{}$", "^({}|b){}$")):
        pattern = whole.format(first, second)
        meaning = re.sub(r"\\x\{1b\}", r"\\x1b", pattern)
        for schema, key in (
            ({"properties": {"k": {"type": "string", "pattern": pattern}}}, "k"),
            ({"patternProperties": {pattern: {"type": "integer"}},
              "additionalProperties": TEXTS}, None),
        ):  # fmt: skip
            try:
                found = [
                    fits({"type": "object"} | schema, json.dumps(one, separators=(",", ":")))
                    for one in ({key: word} if key else {word: 1} for word in WORDS)
                ]
            except OptionError:
                assert re.search("[\x1b\x7f\v]|1b|7f|v", pattern), pattern
                assert first in LONE or second in LONE, pattern
                continue
            expected = [re.fullmatch(meaning[1:-1], word) is not None for word in WORDS]
            assert found == expected, pattern


@pytest.mark.parametrize(("pattern", "word"), [
    (r"^\d{4}-\d{2}-\d{2}$", "2026-11-28"), (r"^[^\n]+$", "a b"), (r"^[ \t\n\r\f\v]*$", " \n"),
    (r"^[\w.+-]+@[\w-]+\.[\w.]+$", "a@b.de"), (r"^\u{41}$", "A"), (r"^\U00000041$", "A"),
    (r"^[\u{1F600}]$", "😀"), (r"^[\x01a]$", "a"), (r"^[\x00-\x1f]$", "\n"),
    (r"^\\x1b\[$", r"\x1b["),
    (r"^[[:alpha:]&&[^b]]$", "a"), (r"\Aa\z", "a"), (r"^a\[b\]\x09$", "a[b]\t"),
])  # fmt: skip
def test_s4_usual_patterns_are_followed(pattern: str, word: str) -> None:
    schema = {"type": "object", "properties": {"k": {"type": "string", "pattern": pattern}}}
    assert fits(schema, json.dumps({"k": word}, separators=(",", ":"), ensure_ascii=False))


@pytest.mark.parametrize(
    "pattern", [r"^a\x1b$", r"^a[\x00-\x07]b$", "^[\x1b]$", r"^\u{1b}+$", "^\n\x1b$"]
)
def test_s4_a_pattern_that_needs_control_characters_is_refused(pattern: str) -> None:
    one = {"type": "string", "pattern": pattern}
    with pytest.raises(OptionError, match="this JSON schema cannot be used"):
        fits({"type": "object", "properties": {"k": one}, "required": ["k"]}, "")
    closed = {"type": "object", "properties": {"k": one}, "additionalProperties": False}
    assert not fits(closed, '{"k":"a"}')
    for wrong in (5, True, "x", [1]):
        with pytest.raises(OptionError):
            fits({"properties": {"a": {}}, "patternProperties": wrong}, "")


# ------------------------------------------------------------------------------------ users


def test_a_stream_and_a_chat_follow_it(engine: Engine) -> None:
    with engine.stream("hello", grammar=SCHEMA) as stream:
        text = "".join(piece.text for piece in stream)
    assert is_person(json.loads(text))
    chat = engine.chat(grammar=SCHEMA, max_new_tokens=100)
    for message in ("who?", "who else?"):
        assert is_person(json.loads(chat.send(message).text))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json_schema({"type": "strin"}), "strin"),
        (Grammar.json_schema({"if": {"type": "object"}, "then": {}}), "if"),
        (Grammar.json_schema({"$ref": "https://example.com/schema"}), "example"),
        (Grammar.regex("(("), "unclosed"),
        (Grammar.regex(r"[^\s\S]"), "NoExtension"),
        (Grammar.lark("start: %%%"), "lexer error"),
        (Grammar.lark("rule: /x/"), "start"),
        ({"type": "object"}, r"Grammar\.json_schema"),
    ],
    ids=lambda one: getattr(one, "text", None) or "",
)
def test_a_grammar_that_cannot_be_followed_is_refused_before_anything_runs(
    engine: Engine, grammar: Any, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        engine.generate("hello", grammar=grammar)


def test_true_allows_any_json_and_false_none(engine: Engine) -> None:
    for schema in (True, "true"):
        text = engine.generate("hello", grammar=Grammar.json_schema(schema), max_new_tokens=64).text
        assert text[:1] in '{["-0123456789tfn'
    with pytest.raises(OptionError, match="no text fits"):
        Grammar.json_schema(False)


def test_what_is_no_grammar_is_refused() -> None:
    for schema in ("{", "[1]", {"const": {1}}, 7, None):
        with pytest.raises(OptionError, match="JSON schema must be"):
            Grammar.json_schema(schema)
    for make in (Grammar.regex, Grammar.lark):
        for given in (5, b"a"):
            with pytest.raises(OptionError, match="must be a text"):
                make(given)


def test_a_grammar_that_explodes_ends_its_own_request(engine: Engine) -> None:
    """Two thousand keys that may all be left out are beyond what llguidance follows."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    state = GrammarState(engine.model.grammars.compile(Grammar.json_schema(many), [2]), 1)
    scout = state.scout([7])  # they are too many after the brace, and no trouble before it
    assert not scout.go(tiny.tokenizer().encode('{"p1"'))
    assert scout.onward() == ([], [])
    assert state(torch.tensor([[7]]), torch.zeros(1, SIZE)).amax() == 0
    with pytest.raises(GenerationInterrupted, match=r"items.*simplify") as caught:
        engine.generate(["hello", "you"], grammar=Grammar.json_schema(many))
    assert isinstance(caught.value.__cause__, OptionError)
    assert engine.generate("hello", grammar=Grammar.regex("yes")).text == "yes"


def test_a_grammar_is_compiled_once_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tiny.tokenizer(), 400)
    assert grammars.compile(Grammar.regex("once"), [2]) is (
        grammars.compile(Grammar.regex("once"), [2])
    )
    with pytest.raises(OptionError, match="end token"):
        grammars.compile(Grammar.regex("yes"), [])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"pip install 'draftsmith\[grammar\]'"):
        grammars.compile(Grammar.regex("yes"), [2])


def test_threads_compile_a_grammar_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, rule = Grammars(tiny.tokenizer(), 400), Grammar.regex("once")
    built, _ = twice_at_once(monkeypatch, grammars, "_build", lambda: grammars.compile(rule, [2]))
    assert built == 1


def test_a_vocabulary_may_grow_between_requests() -> None:
    model, rule = copy.deepcopy(tiny.model()), Grammar.regex("[a-z]{5}")
    engine = Engine(model, tiny.tokenizer(), drafter="none")
    for width in (model.vocab_size, 450, 400):
        model.resize_token_embeddings(width)
        found = engine.generate("the", grammar=rule, max_new_tokens=9)
        assert re.fullmatch("[a-z]{5}", found.text)


@pytest.mark.slow
def test_a_schema_whose_references_go_deep_ends_no_process() -> None:
    """On the stack that threads have, llguidance ends the process from some hundred on."""
    code = (
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "import tiny\n"
        "from draftsmith.errors import OptionError\n"
        "from draftsmith.text.grammar import Grammar, Grammars\n"
        "grammars = Grammars(tiny.tokenizer(), len(tiny.tokenizer()))\n"
        "for many in (1500, 20_000):\n"
        "    defs = {f'd{n}': {'anyOf': [{'type': 'object', 'properties': {\n"
        "            'a': {'$ref': f'#/$defs/d{n + 1}'}, 'b': {'$ref': f'#/$defs/d{n + 1}'}}},\n"
        "            {'type': 'array', 'items': {'$ref': f'#/$defs/d{n + 1}'}}]}\n"
        "        for n in range(many)} | {f'd{many}': {'type': 'string'}}\n"
        "    schema = {'$defs': defs, '$ref': '#/$defs/d0'}\n"
        "    try:\n"
        "        grammars.compile(Grammar.json_schema(schema), [2])\n"
        "        print('follows', many)\n"
        "    except OptionError as error:\n"
        "        print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert found[0] == "follows 1500"
    assert "it is nested too deeply" in found[1]


def test_texts_that_a_tokenizer_normalizes_are_written_as_the_grammar_says() -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tokenizer)
    name = "re\u0301sume\u0301.txt"
    result = engine.generate("hello", grammar=Grammar.json_schema({"enum": [name]}))
    assert json.loads(result.text) == name
    assert engine.generate("hello", grammar=Grammar.regex("cafe\u0301")).text == "cafe\u0301"


def test_numbers_that_would_get_other_digits_are_refused(engine: Engine) -> None:
    big, long = 1234567890123456789, 0.9042017708477751
    schemas: list[Any] = [
        {"const": big}, {"enum": [1, {"a": [big]}]}, {"minimum": big, "maximum": big},
        {"properties": {"x": {"enum": [long]}}}, {"const": -big},
    ]  # fmt: skip
    for schema in schemas:
        with pytest.raises(OptionError, match="exactly"):
            engine.generate("hello", grammar=Grammar.json_schema(schema))
    for value in (2**53, -5, 0, 0.1, 10**20, 1e30, 123456789.125, 0.30000000000000004, True):
        grammar = Grammar.json_schema({"const": value})
        text = engine.generate("hello", grammar=grammar, max_new_tokens=400).text
        assert type(value)(json.loads(text)) == value
    many = [2**60 + 1024 * n for n in range(2500)]
    assert engine.generate("hello", grammar=Grammar.json_schema({"enum": many})).text
    with pytest.raises(OptionError, match="exactly"):
        engine.generate("hello", grammar=Grammar.json_schema({"enum": [big, *many]}))
    most = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    assert engine.generate("hello", grammar=Grammar.json_schema(most)).text
    with pytest.raises(OptionError, match="cannot be used"):
        engine.generate("hello", grammar=Grammar.json_schema({"const": float("nan")}))


def test_a_long_constant_costs_its_part_in_each_pass() -> None:
    """Its own drafts, and the masks of its answer, read no more than a pass can use."""
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    words = "".join(random.Random(1).choices("the fox says hello ", k=20_000))
    grammar = Grammar.json_schema({"const": words})
    spelt, exactly = list[int](), Vocabulary.encode_exactly

    def counted(self: Vocabulary, data: bytes) -> list[int]:
        spelt.append(len(data))
        return exactly(self, data)

    for drafter in ("none", "auto"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Vocabulary, "encode_exactly", counted)
            found = engine.generate("hello", grammar=grammar, drafter=drafter, max_new_tokens=60)
        assert json.dumps(words).startswith(found.text)
    assert spelt
    assert max(spelt) <= 1024


def test_the_space_before_a_first_word_is_written_if_a_grammar_has_it() -> None:
    """SentencePiece's decoder drops it at the beginning of a text."""
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.sentencepiece())
    ids = tiny.sentencepiece()("once upon")["input_ids"]
    for prompt in (ids, "once upon", [{"role": "user", "content": "once"}]):
        for pattern in (" a| time", "(a| b)+c"):
            result = engine.generate(prompt, grammar=Grammar.regex(pattern), max_new_tokens=60)
            fits = re.fullmatch(pattern, result.text)
            assert fits or result.finish_reason == "length", result.text
    grammar = Grammar.regex(" once upon")
    assert engine.chat().send("a time", grammar=grammar).text == " once upon"
