"""The text of each token, where a text must be shown cut between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.text.tokenizer import StreamDecoder


def token_texts(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> list[str]:
    """The text that each id adds, "" for one that only begins a character; joined, the whole text.

    `special` shows special tokens too. Raises LoadError without a tokenizer.
    """
    decoder = _Whole(tokenizer) if special else StreamDecoder(tokenizer)
    texts = [decoder.push(token) for token in ids]
    if texts:
        texts[-1] += decoder.unfinished()
    return texts


class _Whole(StreamDecoder):
    """Shows special tokens."""

    def _decode(self, end: int) -> str:
        text: str = self.tokenizer.decode(
            self._ids[self._window : end],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text
