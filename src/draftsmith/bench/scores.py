"""What answers are worth, where that can be told without running them; and exports for the rest.

Nothing that a model wrote is ever executed here: HumanEval and MBPP answers are exported in their
publishers' format, for their own sandboxes. ROUGE is left out: `rouge-score`, the reference
implementation, has had no release since 2022; the rows hold answer and reference for any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftsmith.bench.generations import Generation
from draftsmith.errors import LoadError

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MARK = "####"
"""Stands before the result in GSM8K's own solutions."""


def final_number(text: str) -> float | None:
    """The number that an answer ends with, GSM8K's `#### 42` first; None if there is none."""
    found = _NUMBER.findall(text.rsplit(_MARK, 1)[-1])
    return float(found[-1].replace(",", "")) if found else None


def score(row: Generation) -> tuple[str, float] | None:
    """Name and value of the row's score, 0 to 1; None where nothing can be told safely."""
    reference = row.reference
    if reference is None:
        return None
    if _MARK in reference:
        if "```" in row.text:  # A program; its result is only known by running it.
            return None
        return "GSM8K final number", float(final_number(row.text) == final_number(reference))
    return None


def scores(rows: Iterable[Generation]) -> dict[str, tuple[float, int]]:
    """Mean and number of every score that the rows have."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (one := score(row)) is not None:
            found.setdefault(one[0], []).append(one[1])
    return {name: (sum(values) / len(values), len(values)) for name, values in found.items()}


def program(text: str) -> str:
    """The code of an answer: its longest code block, or all of it."""
    blocks = _BLOCK.findall(text)
    return max(blocks, key=len) if blocks else text


def export(rows: Sequence[Generation], folder: Path) -> list[Path]:
    """Write the HumanEval and MBPP answers of every arm; the files that were written.

    `completion` is what OpenAI's human-eval reads, `solution` what EvalPlus reads.
    """
    files: dict[Path, list[str]] = {}
    for row in rows:
        if (task := _task(row)) is not None:
            code = program(row.text)
            line = {"task_id": task, "completion": "\n" + code, "solution": code}
            path = folder / f"{_plain(row.suite)}.{_plain(row.arm)}.jsonl"
            files.setdefault(path, []).append(json.dumps(line) + "\n")
    for path, lines in files.items():
        try:
            path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise LoadError(f"{path} cannot be written: {error.strerror}") from error
    return list(files)


def _task(row: Generation) -> str | None:
    """The benchmark's own name of the task."""
    if row.turn != 1:
        return None
    suite, _, number = row.id.partition("/")
    official = {"humaneval": "HumanEval", "mbpp": "Mbpp"}.get(suite.removesuffix("_test"))
    return f"{official}/{number}" if official and number.isdecimal() else None


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=-]+", "_", name).strip("_")
