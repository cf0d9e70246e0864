"""Suites: files of records, by path or by the name that the papers use, and samples of them."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

from draftsmith.bench.formats import parse
from draftsmith.bench.records import Record, Wrong
from draftsmith.errors import LoadError, UnknownName

OnError = Literal["skip", "fail"]

MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
"""The eight categories that Spec-Bench reports as one task."""

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's six tasks."""

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
    "classeval": "classeval.json",
}
"""Named suites and their file under `prompts/`; None: recorded answers only."""


@dataclass(slots=True)
class Reading:
    """What was read: the records, and a line about each thing that could not be used."""

    records: list[Record] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def task(record: Record) -> str | None:
    """The unit that the record's benchmark reports: its Spec-Bench task, else its category."""
    if record.suite == "spec_bench" and record.category in MT_BENCH:
        return "mt_bench"
    return record.category


def read(path: str | Path, on_error: OnError = "fail") -> Reading:
    """All records of a JSON or JSON-lines file, plain, .gz or .xz.

    Raises LoadError if the file cannot be read or has no records, or, unless `on_error` is `skip`,
    at the first wrong line.
    """
    path = Path(path)
    reading = Reading()
    suite = _stem(path)
    for number, place, text in _items(path):
        try:
            item = json.loads(text) if isinstance(text, str) else text
            reading.records += parse(item, suite, number)
        except (Wrong, json.JSONDecodeError) as error:
            reason = str(error) if isinstance(error, Wrong) else f"not JSON ({error})"
            if on_error == "fail":
                raise LoadError(
                    f"{place}: {reason}; correct it, or leave such lines out with --on-error skip"
                ) from error
            reading.wrong.append(f"{place}: {reason}")
    if not reading.records:
        skipped = f" ({len(reading.wrong)} wrong lines)" if reading.wrong else " (it is empty)"
        raise LoadError(f"{path} has no records{skipped}")
    return reading


def prompts(name: str, data: str | Path) -> list[Record]:
    """The questions of a named suite, `spec-bench/rag` for one task, from the folder `prompts/`.

    Raises UnknownName, or LoadError if its file is not there.
    """
    suite, _, wanted = name.partition("/")
    file = NAMED.get(suite)
    if suite not in NAMED or (wanted and (suite != "spec-bench" or wanted not in TASKS)):
        raise UnknownName("suite", name, [*NAMED, *(f"spec-bench/{t}" for t in TASKS)])
    if file is None:
        return [replace(r, output=None) for r in recorded(name, data).records]
    # One name per suite, however its publisher called the file.
    official = suite.replace("-", "_")
    records = [
        replace(r, suite=official, id=official + r.id[r.id.index("/") :])
        for r in read(Path(data) / "prompts" / file).records
    ]
    return [r for r in records if not wanted or task(r) == wanted]


def recorded(name: str, data: str | Path, on_error: OnError = "fail") -> Reading:
    """The recorded answers of a named suite, from the folder `recorded/`; raises as `prompts`."""
    suite, _, wanted = name.partition("/")
    if suite not in NAMED:
        raise UnknownName("suite or file", name, NAMED)
    folder = Path(data) / "recorded"
    files = sorted(folder.glob(suite.replace("-", "_") + ".*jsonl*"))
    if not files:
        raise LoadError(f"no recorded answers of {name} in {folder}; give a file, or --data DIR")
    reading = Reading()
    for file in files:
        part = read(file, on_error)
        reading.records += [r for r in part.records if not wanted or task(r) == wanted]
        reading.wrong += part.wrong
    return reading


def sample(records: Sequence[Record], limit: int | None) -> list[Record]:
    """At most `limit` conversations of each suite and Spec-Bench task, evenly spread.

    Of n conversations those with index ⌊i·n/limit⌋ for i = 0 … limit−1, all turns of each.
    """
    if limit is None:
        return list(records)
    groups: dict[tuple[str, str | None], list[str]] = {}
    for record in records:
        # Categories are Spec-Bench's way of naming tasks; elsewhere they are subjects.
        part = task(record) if record.suite == "spec_bench" else None
        members = groups.setdefault((record.suite, part), [])
        if not members or members[-1] != record.conversation:
            members.append(record.conversation)
    chosen = {
        (suite, members[i])
        for (suite, _), members in groups.items()
        for i in evenly(len(members), limit)
    }
    return [r for r in records if (r.suite, r.conversation) in chosen]


def evenly(n: int, limit: int) -> list[int]:
    """At most `limit` indices below `n`, evenly spread from the first on."""
    return [i * n // limit for i in range(limit)] if limit < n else list(range(n))


def _items(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(number from 0, place to name in a message, a line's text or an item) of a file."""
    try:
        with open_text(path) as lines:
            if path.name.removesuffix(".gz").removesuffix(".xz").endswith(".json"):
                yield from _array(path, json.load(lines))
                return
            number = 0
            for line, text in enumerate(lines, 1):
                if text.strip():
                    yield number, f"{path}, line {line}", text
                    number += 1
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise LoadError(f"{path} cannot be read: {reason}") from error
    except json.JSONDecodeError as error:
        raise LoadError(f"{path} is not JSON: {error}") from error


def _array(path: Path, items: Any) -> Iterator[tuple[int, str, Any]]:
    if not isinstance(items, list):
        raise LoadError(f"{path} is not a list of objects; one object a line goes into .jsonl")
    for number, item in enumerate(items):
        yield number, f"{path}, item {number + 1}", item


def open_text(path: Path) -> IO[str]:
    """Open a text file by its ending: plain, .gz or .xz."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return cast(IO[str], openers.get(path.suffix, open)(path, "rt", encoding="utf-8"))


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    return name.removesuffix(".jsonl").removesuffix(".json")
