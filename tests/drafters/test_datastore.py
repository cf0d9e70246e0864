"""The suffix array, the look-up and the trie, against the shortest programs that do the same."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.draft import ROOT, Draft
from draftsmith.drafters.corpus import files
from draftsmith.drafters.corpus.datastore import Datastore
from draftsmith.drafters.corpus.files import SEPARATOR
from draftsmith.drafters.corpus.trie import Trie
from draftsmith.errors import LoadError
from draftsmith.lab.corpus.index import write_index

Documents = list[list[int]]

SOME = [[1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 7, 7], [2, 3, 4, 5, 8], [7, 7, 7]]
FACTS = {"vocabulary": "ab" * 32, "examples": 4, "model": "toy"}


def built(folder: Path, documents: Documents = SOME) -> Path:
    write_index(folder, documents, **FACTS)
    return folder


def opened(documents: Documents) -> Datastore:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return Datastore.open(built(Path(folder), documents))


def whole(documents: Documents) -> list[int]:
    return [i for document in documents for i in [*document, SEPARATOR]]


@st.composite
def corpora(draw: st.DrawFn) -> Documents:
    """Few different ids, of one to four bytes, so that long matches are common."""
    ids = draw(st.sampled_from([[0, 1], [0, 1, 2], [3, 254, 255], [65534, 65535], [1, 1 << 24]]))
    document = st.lists(st.sampled_from(ids), min_size=1, max_size=30)
    return draw(st.lists(document, min_size=1, max_size=6))


def longest_match(documents: Documents, query: list[int]) -> tuple[int, list[list[int]]] | None:
    """Length of the longest suffix of the query that occurs, and what follows each occurrence."""
    for length in range(min(16, len(query)), 1, -1):
        tail = query[-length:]
        after = [
            document[at + length : at + length + 10]
            for document in documents
            for at in range(len(document) - length + 1)
            if document[at : at + length] == tail
        ]
        if after:
            return length, sorted(after)
    return None


@st.composite
def queries(draw: st.DrawFn) -> tuple[Documents, list[int]]:
    """A corpus, and something that ends like one of its documents' prefixes, or nearly so."""
    documents = draw(corpora())
    document = draw(st.sampled_from(documents))
    cut = draw(st.integers(0, len(document)))
    noise = st.lists(st.integers(0, 3), max_size=3)
    return documents, draw(noise) + document[:cut] + draw(noise)


def prefixes(tree: Trie | Draft) -> list[tuple[int, ...]]:
    """Tokens from the root to each node; no two nodes have the same."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        above = () if parent == ROOT else found[parent]
        found.append((*above, int(token)))
    assert len(set(found)) == len(found)
    return found


def begun(one: list[int]) -> set[tuple[int, ...]]:
    """All beginnings of a continuation."""
    return {tuple(one[: depth + 1]) for depth in range(len(one))}


@given(queries(), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_a_look_up_finds_the_longest_match(case: tuple[Documents, list[int]], most: int) -> None:
    """Its trie, the heaviest nodes of it, and the branches that add the most weight."""
    documents, query = case
    store, expected = opened(documents), longest_match(documents, query)
    match = store.find(query)
    if expected is None:
        assert match is None
        assert store.follow(query) is None
        return
    length, after = expected
    assert match is not None
    assert (match.length, match.count) == (length, len(after))
    trie = store.trie(match)
    weights = Counter(prefix for one in after for prefix in begun(one))
    assert dict(zip(prefixes(trie), trie.weights, strict=True)) == weights

    draft = trie.draft(most, "r")
    draft.check(1 << 25, most)
    taken = [weights[prefix] for prefix in prefixes(draft)]
    assert taken == sorted(weights.values(), reverse=True)[:most]

    covered: set[tuple[int, ...]] = set()

    def gain(one: list[int]) -> int:
        return sum(weights[prefix] for prefix in begun(one) - covered)

    branches = trie.branches(most)
    assert len(branches) <= most
    for branch in branches:
        assert branch in after
        assert gain(branch) == max(map(gain, after)) > 0
        covered |= begun(branch)
    if len(branches) < most:
        assert covered == weights.keys()


def continued(store: Datastore, ids: list[int], most: int, **options: int) -> list[list[int]]:
    """The best continuations of a text."""
    trie = store.follow(ids, **options)
    return [] if trie is None else trie.branches(most)


def test_of_many_occurrences_a_sample_keeps_the_shares() -> None:
    store = opened([[5, 6, 1]] * 600 + [[5, 6, 2]] * 200 + [[5, 6, 3]])
    match = store.find([5, 6])
    assert match is not None
    assert match.count == 801
    trie = store.trie(match, sample=40)
    assert dict(zip(trie.tokens.tolist(), trie.weights.tolist(), strict=True)) == {1: 30, 2: 10}
    assert continued(store, [5, 6], 2) == [[1], [2]]


def test_the_length_of_matches_can_be_chosen() -> None:
    store = opened(SOME)
    match = store.find([1, 2, 3, 4], longest=3)
    assert match is not None
    assert (match.length, match.count) == (3, 3)
    assert store.find([0, 0, 4]) is None
    match = store.find([0, 0, 4], shortest=1)
    assert match is not None
    assert match.length == 1
    assert continued(store, [1, 2, 3, 4], 9, depth=1, longest=3) == [[5], [7]]


# --- what is refused ------------------------------------------------------------------------------


def test_folders_that_are_not_ours_or_not_finished_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no folder"):
        Datastore.open(tmp_path / "nowhere")
    for made, content, complaint in (
        (None, "", "is not a corpus"),
        (files.HEADER, '{"format": "something else"}', "not the header of a corpus"),
        (files.HEADER, "[1", "cannot be read"),
    ):
        if made is not None:
            (tmp_path / made).write_text(content)
        with pytest.raises(LoadError, match=complaint):
            Datastore.open(tmp_path)
    (tmp_path / files.HEADER).unlink()
    (tmp_path / files.BUILDING).mkdir()
    with pytest.raises(LoadError, match="is not finished"):
        Datastore.open(tmp_path)


@pytest.mark.parametrize("name", [files.TOKENS, files.SUFFIXES])
def test_cut_and_missing_files_are_refused(tmp_path: Path, name: str) -> None:
    path = built(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(LoadError, match="has 92 bytes instead of 96: it was truncated"):
        Datastore.open(tmp_path)
    path.unlink()
    with pytest.raises(LoadError, match="cannot be read: No such file"):
        Datastore.open(tmp_path)


@pytest.mark.parametrize("name", [files.TOKENS, files.SUFFIXES])
def test_every_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    path = built(tmp_path) / name
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(LoadError, match="is damaged"):
            Datastore.open(tmp_path)


def test_a_changed_header_is_noticed(tmp_path: Path) -> None:
    header = built(tmp_path) / files.HEADER
    text = header.read_text()
    for old, new, complaint in (
        ('"tokens": 24', '"tokens": 23', "is damaged"),
        ('"toy"', '"boy"', "is damaged"),
        ('"largest"', '"least"', "is damaged"),
        ('"version": 1', '"version": 2', "format version 2, but this draftsmith reads 1"),
    ):
        assert old in text
        header.write_text(text.replace(old, new))
        with pytest.raises(LoadError, match=complaint):
            Datastore.open(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes")
@pytest.mark.parametrize("name", [files.TOKENS, files.SUFFIXES, files.HEADER])
def test_a_pipe_in_a_corpus_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = built(tmp_path) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LoadError, match=r"is not a regular file|has no corpus"):
        Datastore.open(tmp_path)
