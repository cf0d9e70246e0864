"""Answers that run away into a loop, and edits that lose lines, repeat them, or say more."""

from __future__ import annotations

import re
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


_FENCE = re.compile(r"\s*(```|~~~)")
_SENTENCE = re.compile(
    r"(Sure|Certainly|Of course)\b.*|[A-Z][\w'’-]*[,!]?( [\w'’`\"(),./:-]+){2,}[.:!]"
)
"""A line that is said to somebody: "Here is the new content of app.py:"."""


def surroundings(before: str, after: str) -> list[str]:
    """Return what stands around an edited file in an answer: "code fences", "words", or nothing.

    Lines that the file had before do not count, nor sentences in a file that has some itself.
    """
    known = {line.strip() for line in before.splitlines()}
    lines = [line for line in after.splitlines() if line.strip()]
    fences = [
        at for at, line in enumerate(lines) if _FENCE.match(line) and line.strip() not in known
    ]
    if fences:
        outside = [*lines[: fences[0]], *lines[fences[-1] + 1 :]] if len(fences) > 1 else []
    elif any(_SENTENCE.fullmatch(line) for line in known):
        outside = []
    else:
        outside = [line for line in (*lines[:1], *lines[-1:]) if _SENTENCE.fullmatch(line)]
    words = any(line.strip() not in known for line in outside)
    return ["code fences"] * bool(fences) + ["words"] * words
