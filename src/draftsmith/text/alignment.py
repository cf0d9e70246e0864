"""Where two tokenizations of the same bytes meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def boundaries(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int]]:
    """(i, j) of every place where both end a token: the first i of `a` write what j of `b` do.

    `a` and `b` are what the tokens of two tokenizations write, b"" for a special token. Begins with
    (0, 0) and ends before the first byte that differs: the last pair is the longest common prefix
    that is aligned, with all the tokens that write nothing there.
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
        met[end] = ends[end], j  # of several tokens that end at one byte the last counts
        before = end
    return [(0, 0), *(pair for pair in met.values() if pair != (0, 0))]
