"""Which parts of an answer were copied, and from where.

Source: PLD+ (Somasundaram et al. 2024), appendix D: an accepted copy points to its source, so it
attributes its tokens. Decisions where the paper is silent: a copy goes on, in both directions, as
far as the text agrees with that around its source. So it includes the match that it was found by
(in PLD+, the equal last token), the target's own token after a draft that was accepted whole, and
what was decoded while drafting paused; where drafts happened to be cut makes no difference. The
length is measured after that. With the drafted tokens alone, recall on QuoteSum falls far below the
paper's; with their neighbours it meets it (`benchmarks/quotesum.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from draftsmith.values import number

MIN_LENGTH = 2
"""Tokens that a copy must have to count; the paper's best of 2, 5 and 8."""


class Span(NamedTuple):
    """Positions `start` to `end - 1` of prompt and output together."""

    start: int
    end: int


class Copy(NamedTuple):
    """A span of the output, and the span with the same tokens that it was copied from.

    The source begins earlier; in a loop the two may overlap.
    """

    output: Span
    source: Span


def find_copies(
    prompt: Sequence[int],
    output: Sequence[int],
    origins: Sequence[int | None],
    min_length: int = MIN_LENGTH,
) -> list[Copy]:
    """The copies in `output` of at least `min_length` tokens, in order; they do not overlap.

    `origins[i]` is the position in prompt and output that `output[i]` was copied from, None if it
    was not. Raises OptionError for a `min_length` below 1.
    """
    min_length = number("min_length", min_length, int, least=1)
    return runs(spread(prompt, output, origins), len(prompt), min_length)


def runs(origins: Sequence[int | None], first: int, min_length: int) -> list[Copy]:
    """Consecutive origins as copies; `first` is the position of the token that has `origins[0]`."""
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
    """`origins`, also for the neighbours of copies that agree with the neighbours of the source."""
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
