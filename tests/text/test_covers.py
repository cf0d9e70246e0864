"""In how many ways tokens write a string."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.exact_covers import PAPER, Covers, count, covers, means, shortest, summary
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from draftsmith.text.vocab import Vocabulary


def paths(data: bytes, tokens: frozenset[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Every cover, spelled out."""
    if not data:
        yield ()
    for end in range(1, len(data) + 1):
        if data[:end] in tokens:
            for rest in paths(data[end:], tokens):
                yield (data[:end], *rest)


strings = st.binary(min_size=1, max_size=7).map(lambda data: bytes(b"ab"[x % 2] for x in data))


@given(strings, st.frozensets(strings, max_size=10))
def test_counting_agrees_with_spelling_out(data: bytes, tokens: frozenset[bytes]) -> None:
    leaves = list(paths(data, tokens))
    inner = {path[:n] for path in leaves for n in range(1, len(path))}
    assert covers(data, tokens) == Covers(len(leaves), len(inner))
    longest = max(map(len, tokens), default=0)
    assert covers(data, tokens, longest) == covers(data, tokens)


@pytest.mark.parametrize("n", [1, 2, 5, 17])
def test_a_complete_vocabulary_is_the_worst_case(n: int) -> None:
    """Lemma 3.1; a node for each proper beginning and each of its covers."""
    data = bytes(range(n))
    tokens = {data[i:j] for i in range(n) for j in range(i + 1, n + 1)}
    assert covers(data, tokens) == Covers(2 ** (n - 1), 2 ** (n - 1) - 1)


def test_what_cannot_be_covered_has_no_cover() -> None:
    assert covers(b"abc", {b"a", b"ab"}) == Covers(0, 0)
    assert covers(b"abc", {b"a", b"ab"}).forwards == 1


@pytest.fixture(scope="module")
def qwen2(shared_data: Path) -> Vocabulary:
    path = shared_data / "tokenizers" / "qwen2" / "tokenizer.json"
    return Vocabulary.of(Tokenizer.from_file(str(path)))


def test_figure_1(qwen2: Vocabulary) -> None:
    found = covers(b"hello", set(shortest(qwen2)))
    assert found == Covers(14, 15)
    assert found.forwards == 16


def test_table_5(qwen2: Vocabulary) -> None:
    tokens = shortest(qwen2)
    lengths = summary([len(data) for data in tokens])
    assert [round(value, 2) for value in lengths] == list(PAPER["length"])
    found = count(tokens)
    mean, deviation, *rest = summary([one.count for one in found])
    assert rest == list(PAPER["covers"][2:])
    assert (round(mean, 2), round(deviation, 2)) == (146.92, 949.78)
    passes = summary([one.forwards for one in found])
    assert (round(passes[0], 2), passes[4], passes[5]) == (164.02, 16, 62)


def test_the_papers_mean_is_another_choice_among_the_longest(qwen2: Vocabulary) -> None:
    (least, expected, greatest), equal, room = means(qwen2)
    assert (equal, room) == (310, 275)
    assert least < PAPER["covers"][0] < expected < 146.92 < greatest
