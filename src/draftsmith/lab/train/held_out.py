"""Removes held-out text from the training texts. Source: SDSAT, section 3.1."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

RUN = 30
"""ours: words in a row that two texts share only if they have a common source."""
_JOINED = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_JOINED}]|[^\s{_JOINED}]+")
"""A word; or a character of a script without spaces between words (Chinese, Japanese)."""


class HeldOut:
    """Texts that must not be trained on."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs = {words for text in texts for words in self._of(_WORD.findall(text))}

    def _of(self, words: Sequence[str]) -> Iterator[int]:
        size = min(RUN, len(words)) or 1
        return (hash(tuple(words[i : i + size])) for i in range(len(words) - size + 1))

    def remove(self, text: str) -> list[str]:
        """Return what remains of a text without runs of `RUN` words of a held-out text.

        A text of fewer words counts as one run. Nothing remains of a text that was mostly held-out
        text.
        """
        spans = [match.span() for match in _WORD.finditer(text)]
        known = [False] * len(spans)
        size = min(RUN, len(spans)) or 1
        for start, words in enumerate(self._of([text[a:b] for a, b in spans])):
            if words in self._runs:
                known[start : start + size] = [True] * size
        if not any(known):
            return [text]
        pieces, begin = [], 0
        for (start, end), cut in zip(spans, known, strict=True):
            if cut:
                pieces.append(text[begin:start])
                begin = end
        pieces = [piece for piece in (*pieces, text[begin:]) if piece.strip()]
        return pieces if 2 * sum(map(len, pieces)) >= len(text) else []
