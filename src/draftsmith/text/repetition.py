"""Detection of answers that end in a loop, and of edits that lose, repeat or add lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

LOOP_TOKENS = 48
"""Minimum number of tokens at the end, with one passage repeated, that count as a loop."""


def looping(tokens: Sequence[int]) -> int:
    """Return the length of the passage that the end repeats at least three times; 0 if none."""
    for passage in range(1, len(tokens) // 3 + 1):
        tail = tokens[-max(LOOP_TOKENS, 3 * passage) :]
        if len(tail) >= LOOP_TOKENS and tail[passage:] == tail[:-passage]:
            return passage
    return 0


def lost_lines(before: str, after: str) -> int:
    """Return the number of lines in `before` that have no counterpart in `after`."""
    compared = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    spans = ((i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in compared.get_opcodes())
    return sum(max(0, old - new) for old, new in spans)


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
