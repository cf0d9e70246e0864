"""The papers' benchmarks by name, from a folder with `prompts/`, `recorded/` and `tokenizers/`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from draftsmith.bench.records import Record
from draftsmith.bench.suites import TASKS, read, task
from draftsmith.errors import LoadError, UnknownName

NAMED = {
    "mt-bench": "mt_bench.jsonl",
    "mt-redundant": "mt_redundant.jsonl",
    "spec-bench": "spec_bench.jsonl",
    "humaneval": "humaneval.jsonl.gz",
    "mbpp": "mbpp_test.jsonl",
    "gsm8k": "gsm8k_test.jsonl",
    "gsm8k-json": None,
    "commit-edits": None,
    "quotesum": "quotesum_dev.jsonl",
}
"""Named suites and their file under `prompts/`; None: recorded answers only."""


def prompts(name: str, data: str | Path) -> list[Record]:
    """The questions of a named suite, `spec-bench/rag` for one task, from the folder `prompts/`.

    Raises UnknownName, or LoadError if its file is not there.
    """
    suite, _, wanted = name.partition("/")
    file = NAMED.get(suite)
    if suite not in NAMED or (wanted and (suite != "spec-bench" or wanted not in TASKS)):
        raise UnknownName("suite", name, [*NAMED, *(f"spec-bench/{t}" for t in TASKS)])
    if file is None:
        return [replace(r, output=None) for r in recorded(name, data)]
    # One name per suite, however its publisher called the file.
    official = suite.replace("-", "_")
    records = [
        replace(r, suite=official, id=official + r.id[r.id.index("/") :])
        for r in read(Path(data) / "prompts" / file).records
    ]
    return [r for r in records if not wanted or task(r) == wanted]


def recorded(name: str, data: str | Path) -> list[Record]:
    """The recorded answers of a named suite, from the folder `recorded/`; raises as `prompts`."""
    suite, _, wanted = name.partition("/")
    if suite not in NAMED:
        raise UnknownName("suite", name, NAMED)
    folder = Path(data) / "recorded"
    files = sorted(folder.glob(suite.replace("-", "_") + ".*jsonl*"))
    if not files:
        raise LoadError(f"no recorded answers of {name} in {folder}")
    records = [r for file in files for r in read(file).records]
    return [r for r in records if not wanted or task(r) == wanted]
