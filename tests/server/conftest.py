"""A model that says what a test tells it to."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving import HIDDEN, SHOWN, Ask, api_of, client_of, loaded, saying
from transformers import AddedToken

import tiny
from draftsmith import Grammar
from draftsmith.engine.engine import Engine
from draftsmith.model.load import load


@pytest.fixture(scope="session")
def tagged() -> Engine:
    """An engine whose tokenizer has tags as tokens: some that its text shows, and others."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_tokens([AddedToken(tag) for tag in SHOWN])
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in HIDDEN])
    model = copy.deepcopy(loaded().model)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return Engine(load(model, tokenizer))


def spelt(engine: Engine, text: str) -> Grammar:
    """A text, its tags as the tokens that they are."""
    ids = engine.model.tokenizer.get_added_vocab()
    tags = "|".join(re.escape(tag) for tag in ids if tag.startswith("<"))
    parts = [part for part in re.split(f"({tags})", text) if part]
    return Grammar.lark("start: " + " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False)
        for part in parts
    ))  # fmt: skip


@pytest.fixture
def ask(tagged: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Ask a model, of a template, for an answer that it then gives word for word."""
    api, answers = api_of(tagged, max_output=1000, allow_drafters=True), list[Grammar | None]()

    def asking(path: str, template: str, answer: str | Grammar | None, **more: Any) -> Any:
        answers.append(spelt(tagged, answer) if isinstance(answer, str) else answer)
        monkeypatch.setattr(api.tokenizer, "chat_template", template)
        response = client.post(path, json=more)
        assert response.status_code == 200, response.text
        return response

    with client_of(api) as client, saying(tagged, lambda: answers[-1]):
        yield asking
