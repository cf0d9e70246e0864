"""Two vocabularies beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import tiny
from draftsmith.drafters.draft_model.slem import beyond
from draftsmith.text.comparison import Comparison, Usage, count
from draftsmith.text.vocab import Vocabulary, intersect

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
    assert "of the drafter's tokens" in why
    algorithm, why = compare(many, letters("cat", lower=True), "The lazy dog" + TEXT).advice
    assert algorithm == "slem"
    assert "of the target's tokens" in why
    assert why.endswith("the drafter cannot write every text, which reduces acceptance")


NAMES = ("gpt2", "qwen2", "llama2", "llama3", "mistral-v1", "phi-2", "falcon", "t5-small")


@pytest.fixture(scope="module")
def named(shared_data: Path) -> dict[str, Vocabulary]:
    files = {name: shared_data / "tokenizers" / name / "tokenizer.json" for name in NAMES}
    return {name: Vocabulary.of(Tokenizer.from_file(str(file))) for name, file in files.items()}


@pytest.mark.slow
def test_the_page_has_the_overlaps(named: dict[str, Vocabulary]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "vocabularies.md").read_text(encoding="utf-8")
    for target in NAMES:
        cells = [target]
        for drafter in NAMES:
            shared = intersect(named[target], named[drafter]).size
            share = shared / count(named[target])
            cells.append(f"{shared:,} ({share:.2f})" if drafter != target else "")
        assert f"| {' | '.join(cells)} |\n" in page
