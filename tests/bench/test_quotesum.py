"""The attribution benchmark: finding the quotes again that were taken out of their brackets."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.quotesum import (
    Item,
    Score,
    averages,
    forced,
    items,
    of_file,
    of_model,
    replayed,
    score,
    total,
    unquote,
)  # fmt: skip

import tiny
from draftsmith.engine.engine import Engine
from draftsmith.errors import OptionError

TEXT = "the quick brown fox jumps over the lazy dog and the quick brown fox"


def item() -> Item:
    encode = tiny.tokenizer()
    prompt, answer = (
        encode(TEXT)["input_ids"],
        encode("a quick brown fox over the dog")["input_ids"],
    )
    return Item(prompt, answer, [i > 0 for i in range(len(answer))])


def test_quotes_are_found_in_the_text_without_brackets() -> None:
    text, quotes = unquote("So [ 2 it is ] , says [ 10 the\nother one. ]")
    assert text == "So it is , says the\nother one."
    assert [text[slice(*quote)] for quote in quotes] == ["it is", "the\nother one."]
    assert unquote("no quotes [here]") == ("no quotes [here]", [])


@pytest.mark.parametrize("drafter", ["copyspec(gamma=1)", "prompt_lookup", "auto"])
def test_forcing_a_model_equals_replaying(drafter: str) -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    one = item()
    origins = forced(one, drafter, engine)
    assert origins == replayed(one, drafter, len(tiny.tokenizer()))
    ids = one.prompt + one.answer
    copied = {i: origin for i, origin in enumerate(origins) if origin is not None}
    assert copied
    assert all(ids[origin] == one.answer[i] for i, origin in copied.items())


def test_a_forced_model_shows_its_states() -> None:
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    one = item()
    origins = forced(one, "pld_plus(layer=1)", engine)
    assert any(origin is not None for origin in origins)
    with pytest.raises(OptionError):
        forced(one, "pld_plus(layer=9)", engine)


def test_scores_count_tokens() -> None:
    one = Item([5, 6, 7, 8], [9, 5, 6, 7, 9], [False, True, True, True, True])
    origins = [None, None, 1, 2, None]
    assert score(one, origins, 2, bare=True) == Score(2, 2, 4)
    assert score(one, origins, 2, bare=False) == Score(3, 3, 4)
    assert score(one, origins, 5, bare=False) == Score(0, 0, 4)
    whole = total([Score(3, 3, 4), Score(1, 2, 1)])
    assert (whole.precision, whole.recall, whole.f1) == (0.8, 0.8, 0.8)
    assert averages([Score(0, 0, 4), Score(1, 2, 1)]) == (0.5, 0.5, pytest.approx(1 / 3))


def test_quoted_tokens_of_a_tokenizer(shared_data: Path) -> None:
    path = shared_data / "prompts" / "quotesum_dev.jsonl"
    bare, _ = of_file(shared_data / "tokenizers" / "gpt2" / "tokenizer.json")
    engine = Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer())
    for encode in (bare, of_model(engine)):
        first, second = list(items(path, encode, 2))
        assert first.quoted[0]  # "Denitrification is the process that …"
        assert not first.quoted[-1]
        assert second.quoted[-1]  # "… It can lead to a condition called …"
        assert len(second.quoted) == len(second.answer)


@pytest.mark.slow
def test_figures_of_the_paper(shared_data: Path) -> None:
    """Table 10 of PLD+, with a drafter that looks at ids only and copies one place at a time."""
    path = shared_data / "prompts" / "quotesum_dev.jsonl"
    encode, vocab_size = of_file(shared_data / "tokenizers" / "llama2" / "tokenizer.json")
    data = list(items(path, encode, None))
    origins = [replayed(one, "longest_match", vocab_size) for one in data]
    for length, theirs in ((2, 0.96), (5, 0.90), (8, 0.79)):
        scores = [score(*pair, length, False) for pair in zip(data, origins, strict=True)]
        assert averages(scores)[2] == pytest.approx(theirs, abs=0.03)
