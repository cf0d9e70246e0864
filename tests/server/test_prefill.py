"""Chats whose last message the model continues."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from serving import CHAT, api_of, client_of, engine, events, said, templated
from starlette.testclient import TestClient

import tiny
from draftsmith.engine.engine import Engine
from draftsmith.errors import OptionError, PromptError
from draftsmith.model.load import load
from draftsmith.text.tokenizer import render_chat
from tiers import slow_after

TRIMMING = tiny.TEMPLATE.replace("m['content']", "m['content'] | trim")
THINKING = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.role == 'assistant' and loop.last %}<think>"
    "</think>{% endif %}{{ m.content.split('</think>')[-1].strip() }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TEXTS = ["the quick brown", " two spaces  ", "a line\n\n", "", "\t", "CONTINUED", "é🦊 ", "x</s>"]


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hello CONTINUED"}, {"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with templated(tiny.TEMPLATE) as made:
        yield made


@pytest.mark.parametrize(
    "template", slow_after(2, [TRIMMING, THINKING, tiny.TEMPLATE]), ids=["trim", "think", ""]
)
def test_s2_the_last_message_is_continued_with_its_white_space(template: str) -> None:
    with templated(template) as client:
        for text in TEXTS:
            check_continued(client, text)


def check_continued(client: TestClient, text: str) -> None:
    asked = {"messages": messages(text), "max_tokens": 8, "temperature": 0}
    told = client.post(CHAT, json=asked | {"continue_final_message": True})
    assert told.status_code == 200, told.text
    rendered = client.post("/tokenize", json={"messages": messages(text),
                                              "continue_final_message": True})  # fmt: skip
    ids = rendered.json()["tokens"]
    prompt = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert prompt.startswith("<s>user: hello CONTINUED</s><s>assistant: ")
    assert prompt.endswith(text)
    assert prompt.count("assistant") == 1
    plain = client.post("/v1/completions", json={"prompt": ids, "max_tokens": 8})
    answer = told.json()["choices"][0]["message"]["content"]
    assert answer == plain.json()["choices"][0]["text"]
    assert told.json()["usage"]["prompt_tokens"] == len(ids)
    streamed = client.post(CHAT, json=asked | {"continue_final_message": True, "stream": True})
    assert said(events(streamed)) == answer
    if text != TEXTS[1]:
        return
    for more in ({"add_generation_prompt": False},
                 {"add_generation_prompt": False, "continue_final_message": True},
                 {"chat_template_kwargs": {"continue_final_message": True}}):  # fmt: skip
        again = client.post(CHAT, json=asked | more)
        assert again.json()["choices"][0]["message"]["content"] == answer, more


def test_s2_without_either_field_another_message_is_begun(client: TestClient) -> None:
    def ids(**more: Any) -> list[int]:
        response = client.post("/tokenize", json={"messages": messages("a")} | more)
        return list(response.json()["tokens"])

    assert ids() == ids(add_generation_prompt=True) == ids(continue_final_message=False)
    assert len(ids()) > len(ids(continue_final_message=True))
    user = messages("a")[:1]
    assert len(ids(messages=user)) > len(ids(messages=user, add_generation_prompt=False))


def test_s2_a_word_that_goes_on_keeps_its_space_with_sentencepiece() -> None:
    """As a text that is continued does, and as no new answer does."""
    tokenizer = tiny.sentencepiece()
    says = {tokenizer.convert_tokens_to_ids("▁a"): 100}
    asked = {"max_tokens": 2, "logit_bias": says, "messages": messages("once upon")}
    with client_of(api_of(Engine(load(copy.deepcopy(tiny.model()), tokenizer)))) as client:
        begins = {"add_generation_prompt": True}
        for more, text in (({"continue_final_message": True}, " a a"), (begins, "a a")):
            told = client.post(CHAT, json=asked | more).json()["choices"][0]
            assert told["message"]["content"] == text


def test_s2_programs_continue_messages_by_the_same_words() -> None:
    made, options = engine("none"), {"continue_final_message": True}
    chat = messages("the quick ")
    text = made.generate(chat, max_new_tokens=6, chat_template_kwargs=options).text
    whole = render_chat(made.model.tokenizer, chat, options)
    assert made.generate(whole, max_new_tokens=6).text == text
    with pytest.raises(OptionError, match="needs a last message"):
        made.chat().stream("hello", chat_template_kwargs=options)


def test_s2_a_template_that_changes_the_text_is_not_guessed_at() -> None:
    options = {"continue_final_message": True}
    lowering = copy.deepcopy(tiny.tokenizer())
    lowering.chat_template = tiny.TEMPLATE.replace("m['content']", "m['content'] | lower")
    with pytest.raises(PromptError, match="does not show the last message unchanged"):
        render_chat(lowering, messages("a"), options)
    parts = [*messages("a")[:1], {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    expected = render_chat(tiny.tokenizer(), messages("a"), options)
    assert render_chat(tiny.tokenizer(), parts, options) == expected
    lists = copy.deepcopy(tiny.tokenizer())
    lists.chat_template = tiny.TEMPLATE.replace("m['content']", "m['content'][0].text")
    with pytest.raises(PromptError, match="must have a text"):
        render_chat(lists, parts, options)


def test_thoughts_in_the_message_that_is_continued_are_seen_by_the_template() -> None:
    template = (
        "{% for m in messages %}<s>{{ m.role }}: {% if m.role == 'assistant' and '</think>' not in "
        "m.content %}<think></think>{% endif %}{{ m.content }}</s>{% endfor %}"
    )
    with templated(template) as client:
        for text, shown in ("hi", "<think></think>hi"), ("<think>x</think>hi ", None):
            asked = {"messages": messages(text), "continue_final_message": True}
            ids = client.post("/tokenize", json=asked).json()["tokens"]
            prompt = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
            assert prompt.endswith(f"assistant: {shown or text}")
