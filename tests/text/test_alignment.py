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
