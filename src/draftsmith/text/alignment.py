"""Alignment of two tokenizations of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def boundaries(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return (i, j) for every place where both end a token: the first i and j tokens write the
    same.

    `a` and `b` are the bytes of the tokens of two tokenizations, b"" for a special token. The
    result begins with (0, 0) and ends before the first byte that differs. Its last pair is the
    longest aligned common prefix, including all tokens there that write nothing.
    """
    ends = {end: i for i, end in enumerate(accumulate(map(len, a), initial=0))}
    left, right = b"".join(a), b"".join(b)
    met: dict[int, tuple[int, int]] = {}
    before = 0
    for j, end in enumerate(accumulate(map(len, b), initial=0)):
        if end not in ends:
            continue
        if left[before:end] != right[before:end]:
            break
        met[end] = ends[end], j  # of several tokens that end at the same byte, the last one
        before = end
    return [(0, 0), *(pair for pair in met.values() if pair != (0, 0))]
