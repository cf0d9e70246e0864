"""Attribution: which spans of an answer were copied, and from where.

Source: PLD+ (Somasundaram et al. 2024), appendix D: an accepted copy points to its source and so
attributes its tokens.

Where the paper is silent, a copy is extended in both directions as far as the text agrees with the
text around its source. It then includes the match that found it (in PLD+, the equal last token),
the target's own token after a fully accepted draft, and tokens decoded while drafting paused. The
place where drafts were cut has no effect. The length is measured after the extension. With drafted
tokens alone, recall on QuoteSum is far below the paper's; with the extension it reaches it
(`benchmarks/quotesum.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from draftsmith.values import number

MIN_LENGTH = 2
"""Minimum length of a copy in tokens; the paper's best of 2, 5 and 8."""


class Span(NamedTuple):
    """Positions `start` to `end - 1` in prompt and output together."""

    start: int
    end: int


class Copy(NamedTuple):
    """A span of the output, and the earlier span with the same tokens from which it was copied.

    In a loop the two may overlap.
    """

    output: Span
    source: Span


def find_copies(
    prompt: Sequence[int],
    output: Sequence[int],
    origins: Sequence[int | None],
    min_length: int = MIN_LENGTH,
) -> list[Copy]:
    """Return the copies in `output` of at least `min_length` tokens, in order, without overlap.

    `origins[i]` is the position in prompt and output from which `output[i]` was copied, or None.
    Raises OptionError for a `min_length` below 1.
    """
    min_length = number("min_length", min_length, int, least=1)
    return runs(spread(prompt, output, origins), len(prompt), min_length)


def runs(origins: Sequence[int | None], first: int, min_length: int) -> list[Copy]:
    """Group consecutive origins into copies; `first` is the position of the first token."""
    distances = [None if o is None else position - o for position, o in enumerate(origins, first)]
    copies: list[Copy] = []
    start = first
    for distance, group in groupby(distances):
        end = start + len(list(group))
        if distance is not None and end - start >= min_length:
            copies.append(Copy(Span(start, end), Span(start - distance, end - distance)))
        start = end
    return copies


def spread(
    prompt: Sequence[int], output: Sequence[int], origins: Sequence[int | None]
) -> list[int | None]:
    """Extend `origins` to neighbours that agree with the neighbours of their source."""
    ids = [*prompt, *output]
    where = list(origins)
    for i in range(1, len(output)):
        before = where[i - 1]
        if where[i] is None and before is not None and ids[before + 1] == output[i]:
            where[i] = before + 1
    for i in range(len(output) - 2, -1, -1):
        after = where[i + 1]
        if where[i] is None and after and ids[after - 1] == output[i]:
            where[i] = after - 1
    return where
