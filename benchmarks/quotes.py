"""QuoteSum's answers without the brackets around their quotes, and its quoted and copied tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from draftsmith.engine.attribution import find_copies, runs
from draftsmith.lab.bench.suites import read

Origins = Sequence[int | None]
"""For each token of an answer, the position from which it was copied."""


class Item(NamedTuple):
    """A question with its sources, and an answer with its quoted tokens."""

    prompt: list[int]
    answer: list[int]
    quoted: set[int]


def unquote(summary: str) -> tuple[str, list[tuple[int, int]]]:
    """`A [ 2 b c ] d` → `A b c d`, and the positions of the quotes in it."""
    text, quotes, at = "", [], 0
    for match in re.finditer(r"\[\s*\d+\s+(.*?)\s*\]", summary, re.DOTALL):
        text += summary[at : match.start()]
        quotes.append((len(text), len(text) + len(match[1])))
        text, at = text + match[1], match.end()
    return text + summary[at:], quotes


def items(path: Path, tokenizer: Tokenizer, limit: int) -> Iterator[Item]:
    """Yield the dev set in ids."""
    for record in read(path).records[:limit]:
        text, quotes = unquote(record.reference or "")
        question = f"{record.messages[0]['content']}\nAnswer: "
        asked, said = (tokenizer.encode(one, add_special_tokens=False) for one in (question, text))
        places = enumerate(said.offsets)
        quoted = {i for i, (a, b) in places if any(a < y and b > x for x, y in quotes)}
        yield Item(asked.ids, said.ids, quoted)


def copied(item: Item, origins: Origins, length: int, bare: bool) -> set[int]:
    """Return the tokens of an answer in copies of at least `length`.

    `bare`: only tokens that drafts copied, without neighbours that copies include.
    """
    first = len(item.prompt)
    copies = runs(origins, first, length) if bare else find_copies(*item[:2], origins, length)
    return {position - first for copy in copies for position in range(*copy.output)}
