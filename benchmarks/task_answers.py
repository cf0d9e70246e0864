"""What recorded answers are worth: GSM8K's are scored, HumanEval's and MBPP's exported.

    python -m benchmarks.task_answers results.jsonl --output answers/

Nothing that a model wrote is ever executed here: programs are exported in their publishers' format,
for their own sandboxes. ROUGE is left out: `rouge-score`, the reference implementation, has had no
release since 2022; the rows hold answer and reference for any other.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftsmith.bench import generations
from draftsmith.bench.generations import Generation
from draftsmith.storage import write_text

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MARK = "####"
"""Stands before the result in GSM8K's own solutions."""


def final_number(text: str) -> float | None:
    """The number that an answer ends with, GSM8K's `#### 42` first; None if there is none."""
    found = _NUMBER.findall(text.rsplit(_MARK, 1)[-1])
    return float(found[-1].replace(",", "")) if found else None


def score(row: Generation) -> float | None:
    """Whether the row's final number is GSM8K's, 0 or 1; None where nothing can be told safely."""
    # A program's result is only known by running it.
    if row.reference is None or _MARK not in row.reference or "```" in row.text:
        return None
    return float(final_number(row.text) == final_number(row.reference))


def scores(rows: Iterable[Generation]) -> dict[str, tuple[float, int]]:
    """Mean score of every arm, and of how many answers."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (one := score(row)) is not None:
            found.setdefault(row.arm, []).append(one)
    return {arm: (sum(values) / len(values), len(values)) for arm, values in found.items()}


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
        write_text(path, "".join(lines))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="results of `draftsmith bench run`")
    parser.add_argument("--output", type=Path, default=Path("answers"))
    args = parser.parse_args()
    rows = generations.read(args.file).entries
    for arm, (mean, count) in scores(rows).items():
        print(f"{arm}: GSM8K's final number in {mean:.1%} of {count} answers")
    args.output.mkdir(parents=True, exist_ok=True)
    for path in export([row for row in rows if row.run == 0], args.output):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
