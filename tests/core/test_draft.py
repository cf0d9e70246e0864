"""Draft trees: shape, masks, cutting, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.draft import ROOT, Draft, Proposal
from draftsmith.errors import DrafterError


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 8))
    probes = draw(st.integers(0, 4))
    tokens = tuple(draw(st.integers(0, 9)) for _ in range(size + probes))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size)) + tuple(
        draw(st.integers(-1, node - 1)) for node in range(size, size + probes)
    )
    # Origins tell which node is which, whatever is cut.
    origins = tuple(range(len(tokens))) if draw(st.booleans()) else None
    return Draft(tokens, parents, ("t",) * len(tokens), probes=probes, origins=origins)


@given(drafts(), st.integers(0, 5))
@settings(deadline=None)
def test_clip_keeps_whole_paths(draft: Draft, depth: int) -> None:
    clipped = draft.clip(depth)
    clipped.check(10, len(draft))
    assert all(d <= depth for d in clipped.node_depths())
    kept = [node for node, d in enumerate(draft.node_depths()) if d <= depth]
    assert clipped.tokens == tuple(draft.tokens[node] for node in kept)
    assert clipped.origins == (None if draft.origins is None else tuple(kept))


@given(drafts())
@settings(deadline=None)
def test_first_branch_is_a_chain_of_the_tree(draft: Draft) -> None:
    chain = draft.first_branch()
    assert chain.is_chain
    assert chain.probes == 0
    if draft.origins is not None:
        assert chain.origins is not None
        assert chain.tokens == tuple(draft.tokens[node] for node in chain.origins)
    if draft.size:
        assert chain.tokens[0] == draft.tokens[draft.parents.index(ROOT)]


@pytest.mark.parametrize(
    ("draft", "complaint"),
    [
        (Draft((1,), (ROOT, 0), ("t",)), "must have equal lengths, got 1, 2 and 1"),
        (Draft((1, 2), (ROOT, 1), ("t", "t")), "parents must precede"),
        (Draft((1, 2), (ROOT, -2), ("t", "t")), "parents must precede"),
        (Draft((1, 2), (ROOT, 0), ("t", "t"), depths=(1, 1)), "only probes may have other depths"),
        (Draft((), (), (), {ROOT: Proposal([1.0], None)}), "q must be a tensor"),
        (Draft((77,), (ROOT,), ("t",)), "must be from 0 to 9, got"),
        (Draft((-1,), (ROOT,), ("t",)), "must be from 0 to 9, got"),
        (Draft((5.0,), (ROOT,), ("t",)), "must be integers"),  # type: ignore[arg-type]
        (Draft((5,), (ROOT,), ("t",), depths=(1.0,)), "must be integers"),  # type: ignore[arg-type]
        (Draft.chain([5, 6], "t", origins=(1.5, 2)), "must be integers"),  # type: ignore[arg-type]
        (Draft((5,), (ROOT,), ([],)), "source must be names"),  # type: ignore[arg-type]
        (Draft((1,) * 9, tuple(range(-1, 8)), ("t",) * 9), "exceeds the budget of 8"),
        (Draft((1,), (ROOT,), ("t",), probes=2), "must be from 0 to 1, got 2"),
        (Draft((1,), (ROOT,), ("t",), depths=(0,)), "1 numbers >= 1, got"),
        (Draft((1,), (ROOT,), ("t",), origins=()), "origins must have 1 entries, got 0"),
        (Draft.chain([1, 2], "t", origins=(-2, 3)), "got values from -2 to 3"),
        (Draft.chain([1, 2], "t", origins=(8, 9)), "got values from 8 to 9"),
        (Draft((1,), (ROOT,), ("t",), {ROOT: Proposal(torch.ones(3), 0)}), "q must have shape"),
        (Draft((1, 2), (ROOT, ROOT), ("t",) * 2, {0: Proposal(torch.ones(10), 1)}), "not a child"),
    ],
)
def test_malformed_drafts_are_refused(draft: Draft, complaint: str) -> None:
    with pytest.raises(DrafterError, match=complaint):
        draft.check(10, 8, length=9)


def test_lies_about_the_number_of_distributions_are_refused() -> None:
    with pytest.raises(DrafterError, match="2 sampled tokens but 1 distributions"):
        Draft.chain([1, 2], "t", [torch.ones(3)])
