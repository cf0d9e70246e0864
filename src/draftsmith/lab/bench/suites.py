"""Suites: files of records, and samples of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftsmith.errors import LoadError
from draftsmith.lab.bench.formats import parse
from draftsmith.lab.bench.records import Record, Wrong
from draftsmith.storage import open_text, parse_json, reading

OnError = Literal["skip", "fail"]

MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
"""The eight categories that Spec-Bench reports as one task."""

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's six tasks."""


@dataclass(slots=True)
class Reading:
    """The records of a file, and a line for each item that could not be used."""

    records: list[Record] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def task(record: Any) -> str | None:
    """Return the unit that the record's benchmark reports: Spec-Bench task or category."""
    if record.suite == "spec_bench" and record.category in MT_BENCH:
        return "mt_bench"
    category: str | None = record.category
    return category


def parts(records: Sequence[Any]) -> list[str]:
    """Return the heading under which each record or row is reported: `mt_redundant, turn 2`.

    That is its suite, with the task for Spec-Bench and the turn for other conversations.
    """
    turns = {record.suite for record in records if record.turn > 1}
    found = []
    for record in records:
        name = record.suite
        if name == "spec_bench":
            name += f", {task(record)}"
        elif name in turns:
            name += f", turn {record.turn}"
        found.append(name)
    return found


def read(path: str | Path, on_error: OnError | None = None) -> Reading:
    """Read all records of a JSON or JSON lines file, plain, .gz or .xz.

    Raises LoadError if the file cannot be read or has no records, or, unless `on_error` is `skip`,
    at the first wrong line. None fails, too; its message does not suggest the option.
    """
    path = Path(path)
    found = Reading()
    suite = _unpacked(path).removesuffix(".jsonl").removesuffix(".json")
    for number, place, text in _items(path):
        try:
            item = parse_json(text) if isinstance(text, str) else text
            found.records += parse(item, suite, number)
        except (Wrong, ValueError) as error:
            if on_error != "skip":
                advice = ", or leave such lines out with --on-error skip" if on_error else ""
                raise LoadError(f"{place}: {error}; correct it{advice}") from error
            found.wrong.append(f"{place}: {error}")
    if not found.records:
        skipped = f" ({len(found.wrong)} wrong lines)" if found.wrong else " (it is empty)"
        raise LoadError(f"{path} has no records{skipped}")
    return found


def sample(records: Sequence[Record], limit: int | None) -> list[Record]:
    """Return at most `limit` conversations of each suite and Spec-Bench task, evenly spread.

    Of n conversations, those with index ⌊i·n/limit⌋ for i = 0 … limit−1, with all their turns.
    """
    if limit is None:
        return list(records)
    groups: dict[tuple[str, str | None], dict[str, None]] = {}
    for record in records:
        # Spec-Bench's categories are tasks; those of other suites are subjects.
        part = task(record) if record.suite == "spec_bench" else None
        groups.setdefault((record.suite, part), {})[record.conversation] = None
    chosen = {
        (suite, [*members][i])
        for (suite, _), members in groups.items()
        for i in evenly(len(members), limit)
    }
    return [r for r in records if (r.suite, r.conversation) in chosen]


def evenly(n: int, limit: int) -> list[int]:
    """Return at most `limit` indices below `n`, evenly spread from the first on."""
    return [i * n // limit for i in range(limit)] if limit < n else list(range(n))


def _items(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield (number from 0, place for messages, a line's text or an item) of a file."""
    with reading(path), open_text(path, errors="surrogateescape") as lines:
        if _unpacked(path).endswith(".json"):
            places = ((f"item {n}", item) for n, item in enumerate(_array(path, lines.read()), 1))
        else:
            places = ((f"line {n}", text) for n, text in enumerate(lines, 1) if text.strip())
        for number, (place, item) in enumerate(places):
            yield number, f"{path}, {place}", item


def _unpacked(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".xz")


def _array(path: Path, text: str) -> list[Any]:
    try:
        items = parse_json(text)
    except ValueError as error:
        raise LoadError(f"{path} is {error}") from error
    if not isinstance(items, list):
        raise LoadError(f"{path} is not a list of objects; one object a line goes into .jsonl")
    return items
