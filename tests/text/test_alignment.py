"""Two tokenizations of the same bytes."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from draftsmith.text.alignment import boundaries

pieces = st.lists(st.sampled_from([b"", b"a", b"b", b"ab", b"ba", b"aab"]), max_size=8)


@given(pieces, pieces)
def test_every_common_boundary_is_found(a: list[bytes], b: list[bytes]) -> None:
    found = boundaries(a, b)
    assert found[0] == (0, 0)
    assert found == sorted(set(found))
    alike = [
        (i, j)
        for i, j in product(range(len(a) + 1), range(len(b) + 1))
        if b"".join(a[:i]) == b"".join(b[:j])
    ]
    assert set(found) <= set(alike)
    assert found[-1] == max(alike)
    lengths = {len(b"".join(a[:i])) for i, _ in alike}
    assert {len(b"".join(a[:i])) for i, _ in found} == lengths


def test_tokens_that_cross_are_no_boundary() -> None:
    assert boundaries([b"ab", b"c", b"d"], [b"a", b"bc", b"d"]) == [(0, 0), (2, 2), (3, 3)]


def test_it_ends_where_the_bytes_differ() -> None:
    assert boundaries([b"a", b"b", b"x"], [b"ab", b"y", b"x"]) == [(0, 0), (2, 1)]


def test_tokens_that_write_nothing_belong_to_the_prefix() -> None:
    assert boundaries([b"", b"a", b"", b"b"], [b"a", b"c"]) == [(0, 0), (1, 0), (3, 1)]
