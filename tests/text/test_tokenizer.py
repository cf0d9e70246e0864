"""Between text and ids."""

from __future__ import annotations

import tiny
from draftsmith.text.tokenizer import opening


def test_what_a_tokenizer_puts_first() -> None:
    class Bos:
        bos_token_id = 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, *map(ord, text)]}

    assert opening(Bos()) == (1,)
    assert opening(tiny.tokenizer()) == ()
