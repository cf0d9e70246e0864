"""Continuations become a tree: what merges, what goes first, what is left out."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.draft import ROOT, Draft
from draftsmith.core.tree import Continuation, merge

Path = tuple[int, ...]


def paths(draft: Draft) -> list[Path]:
    """The tokens from the root to each node."""
    found: list[Path] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return found


weights = st.floats(0, 1, width=16)


@st.composite
def continuations(draw: st.DrawFn) -> list[Continuation]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        tokens = draw(st.lists(st.integers(0, 2), max_size=5))
        each = st.lists(weights, min_size=len(tokens), max_size=len(tokens))
        worth = draw(st.one_of(st.none(), weights, each))
        origins = draw(st.one_of(st.none(), st.just(range(len(tokens)))))
        found.append(Continuation(tokens, f"s{number}", worth, origins))
    return found


def written_out(given: Sequence[Continuation]) -> dict[Path, tuple[float, str, int]]:
    """Weight, source and origin of every prefix, shorter ones first."""
    found: dict[Path, tuple[float, str, int]] = {}
    for tokens, source, worth, origins in given:
        for at in range(len(tokens)):
            prefix = tuple(tokens[: at + 1])
            first = (0.0, source, -1 if origins is None else origins[at])
            weight, *rest = found.get(prefix, first)
            more = worth[at] if isinstance(worth, list) else worth or 0.0
            found[prefix] = (weight + more, *rest)  # type: ignore[assignment]
    for prefix in sorted(found, key=len):
        if len(prefix) > 1:
            weight, *rest = found[prefix]
            found[prefix] = (min(weight, found[prefix[:-1]][0]), *rest)  # type: ignore[assignment]
    return found


@given(continuations(), st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_a_tree_is_what_taking_the_best_node_again_and_again_gives(
    given: list[Continuation], limit: int
) -> None:
    known = written_out(given)
    order = list(known)
    expected: list[Path] = []
    while len(expected) < min(limit, len(known)):
        reachable = [p for p in order if p not in expected and (len(p) == 1 or p[:-1] in expected)]
        expected.append(max(reachable, key=lambda p: (known[p][0], -order.index(p))))
    tree = merge(given, limit)
    tree.check(3, limit, length=5)
    assert paths(tree) == expected
    assert len(set(expected)) == len(expected), "equal prefixes are one node"
    assert tree.source == tuple(known[p][1] for p in expected)
    if tree.origins is not None:
        assert tree.origins == tuple(known[p][2] for p in expected)
    else:
        assert all(known[p][2] == -1 for p in expected)


@given(continuations(), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_a_tree_has_no_more_leaves_and_levels_than_wanted(
    given: list[Continuation], depth: int, branches: int
) -> None:
    every, tree = merge(given, depth=depth), merge(given, depth=depth, branches=branches)
    tree.check(3, len(every), length=5)
    assert tree.depth <= depth
    assert leaves(tree) <= branches
    assert set(paths(tree)) <= set(paths(every))
    if leaves(every) <= branches:
        assert tree == every
    else:
        assert leaves(tree) == branches


def leaves(draft: Draft) -> int:
    return len(draft) - len(set(draft.parents) - {ROOT})
