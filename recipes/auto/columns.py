"""Recorded answers for fitting and testing the prior, as token ids, by column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftsmith.lab.bench.encoding import Encoding
from draftsmith.lab.bench.records import Record
from draftsmith.lab.bench.suites import evenly, read, task

FILES = (
    "mt_redundant.qwen2.5-72b.jsonl",
    "mt_bench.qwen2.5-72b.jsonl",
    "spec_bench.vicuna-7b.jsonl",
    "humaneval.qwen2.5-coder-32b.jsonl",
    "gsm8k_json.llama-3.1-8b-instruct.jsonl",
    "commit_edits.jsonl.xz",
)
"""Files in `recorded/`. Each is one stream of answers; the memory has the earlier ones."""

TALK = (
    "mt_redundant, turn 1", "mt_redundant, turn 2", "mt_bench, turn 2",
    "spec_bench, mt_bench, turn 1", "spec_bench, mt_bench, turn 2", "gsm8k_json",
)  # fmt: skip
"""The first family: MT-Bench's questions and GSM8K."""
WORK = (
    "spec_bench, summarization", "spec_bench, rag", "spec_bench, math_reasoning", "spec_bench, qa",
    "spec_bench, translation", "humaneval", "commit_edits",
)  # fmt: skip
"""The second family."""
COLUMNS = (*TALK, *WORK)
PICKED = 60
"""Answers of a column for fitting priors; the others are only for tests."""
LONGEST = 2048


@dataclass(slots=True)
class Answer:
    """A recorded answer. `column` is None if it only joins the memory."""

    column: str | None
    prompt: list[int]
    ids: list[int]
    vocab_size: int
    picked: bool = False


def streams(data: Path) -> Iterator[list[Answer]]:
    """Yield the answers of each file, in its order."""
    encoding = Encoding((data / "tokenizers",))
    for file in FILES:
        answers = []
        for record in read(data / "recorded" / file).records:
            encoded = encoding(record)
            ids = list(encoded.answer[:LONGEST])
            answers.append(Answer(column(record), list(encoded.prompt), ids, encoded.vocab_size))
        for name in COLUMNS:
            mine = [answer for answer in answers if answer.column == name]
            for i in evenly(len(mine), PICKED):
                mine[i].picked = True
        yield answers


def column(record: Record) -> str | None:
    """Return an answer's column. First turns of MT-Bench only count in MT-Redundant."""
    turn = f", turn {record.turn}"
    name = record.suite
    if name == "spec_bench":
        name += f", {task(record)}"
    if name.startswith("mt_") or name.endswith("mt_bench"):
        name += turn
    return name if name in COLUMNS else None
