"""The text of each token, where a text must be shown cut between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.text.tokenizer import StreamDecoder


def token_texts(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> list[str]:
    """The text that each id adds, "" for one that only begins a character; joined, the whole text.

    `special` shows special tokens too. Raises LoadError without a tokenizer.
    """
    decoder = StreamDecoder(tokenizer, special=special)
    texts = [decoder.push(token) for token in ids]
    if texts:
        texts[-1] += decoder.unfinished()
    return texts
