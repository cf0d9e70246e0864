"""Answers that run away into a loop, and edits that lose or repeat lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

LOOP_TOKENS = 48
"""So many tokens at the end, the same passage again and again, are a loop."""


def looping(tokens: Sequence[int]) -> int:
    """The length of the passage that the end repeats, at least thrice; 0 if it does not."""
    for passage in range(1, len(tokens) // 3 + 1):
        tail = tokens[-max(LOOP_TOKENS, 3 * passage) :]
        if len(tail) >= LOOP_TOKENS and tail[passage:] == tail[:-passage]:
            return passage
    return 0


def lost_lines(before: str, after: str) -> int:
    """Lines of a text that another one has nothing in place of."""
    compared = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    spans = ((i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in compared.get_opcodes())
    return sum(max(0, old - new) for old, new in spans)


def repeated_lines(before: str, after: str) -> int:
    """Lines of a text, but for empty ones, that another one has more often, counted each time."""
    lines, more = Counter(before.splitlines()), Counter(after.splitlines())
    return sum(max(0, more[line] - count) for line, count in lines.items() if line.strip())
