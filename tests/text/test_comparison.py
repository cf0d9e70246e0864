"""Two vocabularies beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.vocabularies import (
    LARGEST,
    NAMES,
    PAPER,
    Named,
    articles,
    injectivity,
    overlaps,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import tiny
from draftsmith.drafters.draft_model.slem import beyond
from draftsmith.text.comparison import PIECE, Comparison, Usage, count
from draftsmith.text.vocab import Vocabulary, intersect
from work import calls

TEXT = "hello world, the quick brown fox\njumps over  the lazy dog\n" * 9


def letters(words: str, *, lower: bool = False) -> Vocabulary:
    """A vocabulary of the words, with a space before each, and of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {token: i for i, token in enumerate([*alphabet, *(f"Ġ{w}" for w in words.split())])}
    merges = []
    for word in words.split():
        made = "Ġ"
        for letter in word:
            merges.append((made, letter))
            made += letter
            table.setdefault(made, len(table))
    made_of = Tokenizer(models.BPE(table, merges))
    made_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made_of.decoder = decoders.ByteLevel()
    if lower:
        made_of.normalizer = normalizers.Lowercase()
    return Vocabulary.of(made_of)


def compare(target: Vocabulary, drafter: Vocabulary, text: str = TEXT) -> Comparison:
    return Comparison(Usage(target, text), Usage(drafter, text))


def test_shares_count_different_tokens() -> None:
    target, drafter = letters("a b"), letters("b c")
    found = compare(target, drafter, " a b b c c c")
    assert found.shared.size == 257  # all bytes and " b"
    assert found.of_target == found.of_drafter == 257 / 258
    assert target.bytes_of(found.target.ids) == b" a b b c c c"
    # " a", " b", " ", "c" of the target; " ", "a", " b", " c" of the drafter
    assert found.of_target_text == found.of_drafter_text == 3 / 4
    assert found.target.tokens_per_character == 9 / 12


def test_tokens_that_the_model_lacks_are_none_of_the_text() -> None:
    """A tokenizer may know more ids than its model has logits for."""
    whole = letters("a b")
    small = Vocabulary.of(whole.tokenizer, 257)
    assert whole.encode(" b") == [257]
    assert compare(small, whole, " a b c").of_target_text == 1
    assert beyond(small, b" a", b" b c") == whole.encode(" b c")


def test_padding_is_no_token() -> None:
    tokenizer = tiny.tokenizer()
    assert count(Vocabulary.of(tokenizer, 500)) == count(Vocabulary.of(tokenizer)) == len(tokenizer)


def test_the_advice_follows_table_4() -> None:
    plain, same = letters("hello the"), letters("hello the")
    assert compare(plain, same).advice[0] == "standard"
    algorithm, why = compare(plain, letters("")).advice
    assert algorithm == "slrs"
    assert "single bytes" in why
    assert compare(plain, letters("hello")).advice[0] == "tli"
    many = letters("the quick brown fox over lazy dog world")
    algorithm, why = compare(plain, many).advice
    assert algorithm == "slem"
    assert "the drafter misses" in why
    algorithm, why = compare(many, letters("cat", lower=True), "The lazy dog" + TEXT).advice
    assert algorithm == "slem"
    assert "the target misses" in why
    assert why.endswith("that the drafter cannot write every text will cost acceptance")


def test_what_a_tokenizer_changes_is_told() -> None:
    usage = Usage(letters("the", lower=True), "The end" + "." * 100)
    assert len(usage.pieces) == 2
    ((piece, back),) = usage.changed
    assert piece == "The end" + "." * 93
    assert back == "the end" + "." * 93


@pytest.fixture(scope="module")
def every(shared_data: Path) -> list[Named]:
    return [Named(name, shared_data) for name in NAMES]


@pytest.fixture(scope="module")
def named(every: list[Named]) -> dict[str, Named]:
    return {one.name: one for one in every}


def test_the_papers_overlaps(named: dict[str, Named]) -> None:
    llama3, qwen2, gpt2 = (named[name].vocabulary for name in ("llama3", "qwen2", "gpt2"))
    assert intersect(llama3, qwen2).size == 109_566
    assert 109_566 / count(llama3) == pytest.approx(0.856, abs=5e-4)  # of 128,256 it is 0.854
    assert intersect(gpt2, qwen2).size == 42_257


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_injectivity(name: str, named: dict[str, Named], shared_data: Path) -> None:
    """Llama-2 is injective here: what the paper sees in vicuna is the `<s>` before the text."""
    one, prefixes = named[name], [text[:PIECE] for text in articles(shared_data)]
    assert len(prefixes) == 80
    assert all(map(one.returns, prefixes)) == (name != "t5-small")
    if PAPER.get(name) == "yes":
        assert all(map(one.returns_shown, prefixes))
    if PAPER.get(name, "").startswith("no"):
        assert not any(map(one.returns_shown, prefixes))


def test_where_llama_2_really_is_not_injective(named: dict[str, Named]) -> None:
    llama2 = named["llama2"]
    assert not llama2.returns(" a")
    assert llama2.returns_inside(" a")
    assert not llama2.returns("a▁b")
    assert not llama2.returns_inside("a▁b")


def test_the_largest_pair_takes_a_dozen_calls_per_token(shared_data: Path) -> None:
    """About two seconds; counted, not timed, since other work may run beside this."""
    one, other = (Named(name, shared_data) for name in LARGEST)
    work = calls(lambda: intersect(one.vocabulary, other.vocabulary))
    assert work <= 15 * (count(one.vocabulary) + count(other.vocabulary))


@pytest.mark.slow
def test_the_page_has_these_tables(every: list[Named], shared_data: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "vocabularies.md").read_text(encoding="utf-8")
    for line in (*injectivity(every, articles(shared_data)), *overlaps(every)):
        assert line + "\n" in page
