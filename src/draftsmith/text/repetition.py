"""Detection of answers that end in a loop, and of edits that lose, repeat or add lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

LOOP_TOKENS = 48
"""Minimum number of tokens at the end, with one passage repeated, that count as a loop."""


def looping(tokens: Sequence[int]) -> int:
    """Return the length of the passage that the end repeats at least three times; 0 if none."""
    if len(tokens) < LOOP_TOKENS:
        return 0
    for passage in range(1, len(tokens) // 3 + 1):
        compared = range(-1, passage - max(LOOP_TOKENS, 3 * passage) - 1, -1)
        if all(tokens[at] == tokens[at - passage] for at in compared):
            return passage
    return 0


def lost_lines(before: str, after: str) -> int:
    """Return the number of lines in `before` that have no counterpart in `after`.

    Only lines that both texts have exactly once are aligned, as in a patience diff; between two of
    them the lines are counted. So texts that repeat lines take no cubic time.
    """
    old, new = before.splitlines(), after.splitlines()
    anchors = _single(old) & _single(new)
    old_at, new_at = (
        [at for at, line in enumerate(lines) if line in anchors] for lines in (old, new)
    )
    compared = SequenceMatcher(None, [old[at] for at in old_at], [new[at] for at in new_at])
    pairs = [(-1, -1)]
    for i, j, size in compared.get_matching_blocks():
        pairs += zip(old_at[i : i + size], new_at[j : j + size], strict=True)
    pairs.append((len(old), len(new)))
    return sum(max(0, (i2 - i1) - (j2 - j1)) for (i1, j1), (i2, j2) in pairwise(pairs))


def _single(lines: Sequence[str]) -> set[str]:
    """Return the lines that occur once."""
    return {line for line, count in Counter(lines).items() if count == 1}


def repeated_lines(before: str, after: str) -> int:
    """Return how many times `after` repeats non-empty lines of `before` more often."""
    lines, more = Counter(before.splitlines()), Counter(after.splitlines())
    return sum(max(0, more[line] - count) for line, count in lines.items() if line.strip())


_FENCE = re.compile(r"\s*(```|~~~)")
_SENTENCE = re.compile(
    r"(Sure|Certainly|Of course)\b.*|[A-Z][\w'’-]*[,!]?( [\w'’`\"(),./:-]+){2,}[.:!]"
)
"""A line addressed to the reader: "Here is the new content of app.py:"."""


def surroundings(before: str, after: str) -> list[str]:
    """Return what surrounds an edited file in an answer: "code fences", "words", or nothing.

    Lines that were in the file before do not count, nor sentences if the file had some.
    """
    previous = {line.strip() for line in before.splitlines()}
    lines = [line for line in after.splitlines() if line.strip()]
    fences = [
        at for at, line in enumerate(lines) if _FENCE.match(line) and line.strip() not in previous
    ]
    if fences:
        outside = [*lines[: fences[0]], *lines[fences[-1] + 1 :]] if len(fences) > 1 else []
    elif any(_SENTENCE.fullmatch(line) for line in previous):
        outside = []
    else:
        outside = [line for line in (*lines[:1], *lines[-1:]) if _SENTENCE.fullmatch(line)]
    words = any(line.strip() not in previous for line in outside)
    return ["code fences"] * bool(fences) + ["words"] * words
