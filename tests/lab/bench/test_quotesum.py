"""The attribution benchmark: finding the quotes again that were taken out of their brackets."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.quotes import Item, copied, items, unquote
from benchmarks.quotesum import cell, forced, score
from tokenizers import Tokenizer

import tiny
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.lab.bench.replay import replay

TEXT = "the quick brown fox jumps over the lazy dog and the quick brown fox"


def item() -> Item:
    encode = tiny.tokenizer()
    prompt, answer = (
        encode(TEXT)["input_ids"],
        encode("a quick brown fox over the dog")["input_ids"],
    )
    return Item(prompt, answer, set(range(1, len(answer))))


def test_quotes_are_found_in_the_text_without_brackets() -> None:
    text, quotes = unquote("So [ 2 it is ] , says [ 10 the\nother one. ]")
    assert text == "So it is , says the\nother one."
    assert [text[slice(*quote)] for quote in quotes] == ["it is", "the\nother one."]
    assert unquote("no quotes [here]") == ("no quotes [here]", [])


@pytest.mark.parametrize("drafter", ["copyspec(gamma=1)", "auto"])
def test_forcing_a_model_equals_replaying(drafter: str) -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    one = item()
    origins = forced(one, drafter, engine)
    assert origins == replay(one.prompt, one.answer, parse(drafter), len(tiny.tokenizer())).origins
    ids = one.prompt + one.answer
    copied = {i: origin for i, origin in enumerate(origins) if origin is not None}
    assert copied
    assert all(ids[origin] == one.answer[i] for i, origin in copied.items())


def test_scores_count_tokens() -> None:
    one = Item([5, 6, 7, 8], [9, 5, 6, 7, 9], {1, 2, 3, 4})
    origins = [None, None, 1, 2, None]
    assert copied(one, origins, 2, bare=True) == {2, 3}
    assert copied(one, origins, 2, bare=False) == {1, 2, 3}
    assert copied(one, origins, 5, bare=False) == set()
    assert score({1, 2, 3}, one.quoted) == (1.0, 0.75, 6 / 7)
    assert score(set(), one.quoted) == (None, 0.0, 0.0)
    assert cell([score(set(), {1}), score({1, 2}, {1})]) == "0.50 / 0.50 / 0.33"


def test_quoted_tokens_of_a_tokenizer(shared_data: Path) -> None:
    path = shared_data / "prompts" / "quotesum_dev.jsonl"
    bare = Tokenizer.from_file(str(shared_data / "tokenizers" / "gpt2" / "tokenizer.json"))
    for tokenizer in (bare, tiny.tokenizer().backend_tokenizer):
        first, second = items(path, tokenizer, 2)
        assert 0 in first.quoted  # "Denitrification is the process that …"
        assert len(first.answer) - 1 not in first.quoted
        assert len(second.answer) - 1 in second.quoted  # "… It can lead to a condition called …"


@pytest.mark.slow
def test_figures_of_the_paper(shared_data: Path) -> None:
    """Table 10 of PLD+, with a drafter that looks at ids only and copies one place at a time."""
    file = shared_data / "tokenizers" / "llama2" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    path, made = shared_data / "prompts" / "quotesum_dev.jsonl", parse("longest_match")
    data = list(items(path, tokenizer, 265))
    size = tokenizer.get_vocab_size()
    origins = [replay(one.prompt, one.answer, made, size).origins for one in data]
    for length, theirs in ((2, 0.96), (5, 0.90), (8, 0.79)):
        pairs = zip(data, origins, strict=True)
        f1 = [score(copied(*pair, length, False), pair[0].quoted)[2] for pair in pairs]
        assert sum(f1) / len(f1) == pytest.approx(theirs, abs=0.03)
