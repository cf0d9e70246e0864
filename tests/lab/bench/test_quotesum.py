"""The attribution benchmark: finding the quotes again that were taken out of their brackets."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.quotes import Item, copied, items, unquote
from benchmarks.quotesum import cell, score
from tokenizers import Tokenizer

from draftsmith.drafters.registry import parse
from draftsmith.lab.bench.replay import replay


def test_quotes_are_found_in_the_text_without_brackets() -> None:
    text, quotes = unquote("So [ 2 it is ] , says [ 10 the\nother one. ]")
    assert text == "So it is , says the\nother one."
    assert [text[slice(*quote)] for quote in quotes] == ["it is", "the\nother one."]
    assert unquote("no quotes [here]") == ("no quotes [here]", [])


def test_scores_count_tokens() -> None:
    one = Item([5, 6, 7, 8], [9, 5, 6, 7, 9], {1, 2, 3, 4})
    origins = [None, None, 1, 2, None]
    assert copied(one, origins, 2, bare=True) == {2, 3}
    assert copied(one, origins, 2, bare=False) == {1, 2, 3}
    assert copied(one, origins, 5, bare=False) == set()
    assert score({1, 2, 3}, one.quoted) == (1.0, 0.75, 6 / 7)
    assert score(set(), one.quoted) == (None, 0.0, 0.0)
    assert cell([score(set(), {1}), score({1, 2}, {1})]) == "0.50 / 0.50 / 0.33"


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
