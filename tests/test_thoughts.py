"""Thoughts before an answer: their limit, and the grammar that applies after them."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from transformers import AddedToken

import tiny
from draftsmith import Engine, Grammar
from draftsmith.core.sampling import only
from draftsmith.errors import OptionError
from draftsmith.model.load import load
from draftsmith.text.thoughts import Thoughts

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["fox", "dog"]}, "of": {"type": "array",
          "items": {"enum": [1, 2]}, "maxItems": 3}}, "required": ["kind", "of"],
          "additionalProperties": False}  # fmt: skip
GRAMMAR = Grammar.json_schema(SCHEMA)
TOKENS = 70
HARMONY = "{# <|channel|>analysis #}"


@cache
def loaded(tokens: bool) -> Any:
    """A model whose tokenizer has tags of thoughts as tokens, or only as texts."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    model = copy.deepcopy(tiny.model(context=2048)).double()
    if tokens:
        tokenizer.add_tokens([AddedToken(tag) for tag in ("<think>", "</think>")])
        hidden = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
        tokenizer.add_tokens([AddedToken(tag, special=True) for tag in hidden])
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = "{# </think> #}" + tiny.TEMPLATE
    return load(model, tokenizer)


@cache
def engine(tokens: bool = True, drafter: str = "none") -> Engine:
    return Engine(loaded(tokens), drafter=drafter)


def answer(prompt: str, tokens: bool = True, drafter: str = "none", **options: Any) -> str:
    """The whole text of an answer, tags included, which drafts leave as it is."""
    made = engine(tokens, drafter)
    result = made.generate(prompt, max_new_tokens=TOKENS, **options)
    text: str = made.model.tokenizer.decode(result.tokens)
    if drafter == "none":
        for given in ({}, {"prediction": result.tokens}):
            again = engine(tokens, "auto").generate(
                prompt, max_new_tokens=TOKENS, **options | given
            )
            assert again.tokens == result.tokens
    return text.removesuffix("</s>")


def thoughts(tokens: bool = True, **options: Any) -> Thoughts:
    found = Thoughts.of(engine(tokens).model.tokenizer)
    assert found is not None
    return Thoughts(found.begin, found.end, found.closing, **options)


@pytest.mark.parametrize(("limit", "temperature"), [(0, 0), (7, 1)])
@pytest.mark.parametrize("tokens", [True, False])
def test_a_grammar_applies_after_thoughts_of_at_most_so_many_tokens(
    limit: int, temperature: int, tokens: bool
) -> None:
    options = {"temperature": temperature, "seed": 3, "thoughts": thoughts(tokens, limit=limit),
               "logit_bias": {2: -100}}  # fmt: skip
    text = answer("hello<think>\n", tokens, grammar=GRAMMAR, **options)
    thought, end, said = text.rpartition("</think>")
    assert end
    assert json.loads(said)["kind"] in ("fox", "dog")
    free = engine(tokens).generate("hello<think>\n", max_new_tokens=limit + 9, **options)
    assert free.text.startswith(thought + end)


def test_the_limit_counts_the_tokens_of_the_thoughts() -> None:
    made = engine()
    end = made.model.tokenizer.convert_tokens_to_ids("</think>")
    for limit in (0, 5, 30):
        result = made.generate("hello<think>", thoughts=thoughts(limit=limit), max_new_tokens=60,
                               logit_bias={2: -100})  # fmt: skip
        assert result.tokens.index(end) == limit
        plain = made.generate("hello<think>", max_new_tokens=limit, logit_bias={2: -100})
        assert result.tokens[:limit] == plain.tokens


def test_a_model_may_begin_its_thoughts_itself_or_answer_at_once() -> None:
    tokenizer = engine().model.tokenizer
    begin, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    options = {"grammar": GRAMMAR, "thoughts": thoughts(limit=9)}
    assert json.loads(answer("hello", **options))
    text = answer("hello", logit_bias={begin: 90}, **options)
    thought, _, said = text.partition("</think>")
    assert thought == "<think>" * 10
    assert json.loads(said)
    # What the limit does not end, the model does; it cannot end the answer before.
    text = answer("hello<think>", logit_bias={end: 10, 2: 100}, grammar=GRAMMAR,
                  thoughts=thoughts())  # fmt: skip
    assert json.loads(text.rpartition("</think>")[2])
    assert "</think>" in text


@pytest.mark.parametrize(("said", "thinks"), [
    ("<think>\nthe quick", True), ("<think>so</think>the quick", False), ("the quick", False),
])  # fmt: skip
def test_a_message_that_is_continued_says_whether_it_thinks(said: str, thinks: bool) -> None:
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said}]
    result = engine().generate(
        chat, thoughts=thoughts(limit=4), grammar=Grammar.regex("[0-9]{3}"), max_new_tokens=20,
        chat_template_kwargs={"continue_final_message": True},
    )  # fmt: skip
    _, end, answered = result.text.rpartition("</think>")
    assert answered.isdecimal()
    assert bool(end) is thinks


def test_a_tag_that_is_no_token_ends_where_a_token_does() -> None:
    """A token that ends the tag and goes on would hide where the grammar begins."""
    made = engine(tokens=False)
    tokenizer = made.model.tokenizer
    spelt = tokenizer("</think", add_special_tokens=False)["input_ids"]
    longer = [
        i for text, i in tokenizer.get_vocab().items() if text.startswith(">") and text != ">"
    ]
    assert thoughts(False).begin == "<think>"
    result = made.generate(
        [*tokenizer("a<think>")["input_ids"]], grammar=Grammar.regex("x+y"), max_new_tokens=20,
        thoughts=thoughts(False, limit=len(spelt) + 4), logit_bias=dict.fromkeys(longer, 50),
    )  # fmt: skip
    assert result.text.rpartition("</think>")[2].startswith("x")


def test_channels_are_thoughts_until_the_last_one() -> None:
    tokenizer = copy.deepcopy(engine().model.tokenizer)
    tokenizer.chat_template = HARMONY
    found = Thoughts.of(tokenizer)
    assert found is not None
    limited = Thoughts(found.begin, found.end, found.closing, limit=6)
    text = answer("hello<|start|>assistant", grammar=GRAMMAR, thoughts=limited)
    thought, end, said = text.partition("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert end, thought
    assert json.loads(said)


@pytest.mark.parametrize("template", [HARMONY, "{# <|channel>thought #}"])
def test_a_chat_keeps_no_thoughts_between_special_tokens(template: str) -> None:
    tokenizer = copy.deepcopy(engine().model.tokenizer)
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in ("<|channel>", "<channel|>")])
    tokenizer.chat_template = template + tiny.TEMPLATE
    model = copy.deepcopy(engine().model.model)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    made = Engine(load(model, tokenizer), drafter="none")
    found = Thoughts.of(tokenizer)
    assert found is not None
    for begin in (f"the lazy dog{found.end}", ""):
        script = tokenizer.encode(f"{begin}hello world", add_special_tokens=False)
        starts = list[int]()

        def forced(ids: Any, scores: Any, script: Any = script, starts: Any = starts) -> Any:
            starts.append(ids.shape[1])
            return only(scores, script[ids.shape[1] - starts[0]])

        chat = made.chat(max_new_tokens=len(script))
        result = chat.send("hello", processors=[forced])
        assert [*result.tokens] == script
        assert chat.messages[-1]["content"] == "hello world"


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(OptionError, match="limit must be an integer >= 0, got -1"):
        Thoughts("a", "b", "b", limit=-1)
    with pytest.raises(OptionError, match="thoughts must be made by"):
        engine().generate("a", thoughts="</think>")  # type: ignore[arg-type]
    assert Thoughts.of(tiny.tokenizer()) is None
