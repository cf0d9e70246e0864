"""Recorded answers, in ids of Llama 3's vocabulary or of a smaller one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.models import CONTEXT
from benchmarks.shared import recorded
from draftsmith import Engine, builtin
from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.suites import evenly

SUITES = ("mt_redundant", "commit_edits", "humaneval", "gsm8k_json")
MESSAGES = ("Rename item to product", "Rename price to cost", "Rename order to purchase")
LONGEST = CONTEXT // 4
"""Most tokens of a prompt."""


class Text(NamedTuple):
    """A prompt and its answer, in ids."""

    name: str
    prompt: Sequence[int]
    answer: Sequence[int]


def texts(data: Path | None, limit: int, tokens: int) -> list[Text]:
    """Return the recorded answers of the folder, evenly spread, or what the built-in model says."""
    if data is None:
        engine = Engine.from_pretrained("edit-7m", device="cpu", dtype="float32")
        before, _ = builtin.demo()
        results = [
            engine.generate(builtin.edit_messages("shop.py", message, before), temperature=0,
                            max_new_tokens=tokens) for message in MESSAGES[: limit]
        ]  # fmt: skip
        both = zip(MESSAGES, results, strict=False)
        return [Text(message, found.prompt_tokens, found.tokens) for message, found in both]
    encoding, found = Encoding((data / "tokenizers",)), list[list[Text]]()
    for suite in SUITES:
        own = []
        for record in recorded(data, suite):
            encoded = encoding(replace(record, tokenizer="llama3"))
            if len(encoded.prompt) <= LONGEST and len(encoded.answer) >= tokens // 2:
                own.append(Text(record.id, encoded.prompt, encoded.answer[:tokens]))
        most = -(-limit // len(SUITES))
        found.append([own[i] for i in evenly(len(own), min(most, len(own)))])
    return [text for some in zip(*found, strict=False) for text in some][:limit]
