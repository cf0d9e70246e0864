"""Generations: the rows of a live run, one JSON line each, and the file that keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from draftsmith.bench.settings import differences
from draftsmith.bench.suites import open_text
from draftsmith.core.stats import Seconds, SourceStats, Stats
from draftsmith.errors import LoadError, OptionError

FORMAT = 1

Key = tuple[int, str, str]
"""Run, prompt, arm."""


@dataclass(slots=True)
class Generation:
    """One answer of one arm. `draftsmith bench replay` reads these lines, too."""

    id: str
    suite: str
    category: str | None
    turn: int
    run: int
    arm: str
    drafter: str
    budget: int | str | None
    seed: int | None
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    max_new_tokens: int
    """The limit that the answer ran under, context included."""
    seconds: float
    first_token_seconds: float
    peak_bytes: int | None
    """Most memory in use during this generation: of the device, or resident on the CPU."""
    passes: int
    attempts: int | None = None
    """None, as the next fields are, where transformers does not tell."""
    drafted: int | None = None
    probes: int | None = None
    accepted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    phases: dict[str, float] | None = None
    """Seconds of prefill, draft, target, verify and other."""
    reference: str | None = None
    """What was answered before, or by people, where the suite knows."""
    compared: bool = False
    """Whether the answer was compared with plain decoding's."""
    divergence: int | None = None
    """The first token that is not plain decoding's; None if all are, or if not compared."""
    gap: float | None = None
    """How far the model's two best logits are apart there."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.run, self.id, self.arm

    @property
    def stats(self) -> Stats | None:
        """The loop's record again; None for peers."""
        if self.phases is None:
            return None
        seconds = {k: v for k, v in self.phases.items() if k != "other"}
        return Stats(
            prompt_tokens=len(self.prompt_ids),
            passes=self.passes,
            tokens=len(self.output_ids),
            attempts=self.attempts or 0,
            drafted=self.drafted or 0,
            probes=self.probes or 0,
            accepted=self.accepted,
            drafted_by_depth=list(self.drafted_by_depth),
            accepted_by_depth=list(self.accepted_by_depth),
            by_source={name: SourceStats(**entry) for name, entry in self.by_source.items()},
            seconds=Seconds(**seconds),
            first_token_seconds=self.first_token_seconds,
        )

    def line(self) -> str:
        """The row as it is written."""
        return json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False) + "\n"


_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str, "suite": str, "turn": int, "run": int, "arm": str, "output_ids": list,
    "prompt_ids": list, "seconds": (int, float), "first_token_seconds": (int, float),
    "passes": int, "accepted": int, "settings": dict, "text": str, "by_source": dict,
    "drafted_by_depth": list, "accepted_by_depth": list,
}  # fmt: skip


def parse(text: str, place: str) -> Generation:
    """One line again; raises LoadError that names `place`."""
    try:
        item = json.loads(text)
    except json.JSONDecodeError as error:
        raise LoadError(f"{place}: not JSON ({error})") from error
    known = {f.name for f in fields(Generation)}
    if not isinstance(item, dict) or "arm" not in item or "output_ids" not in item:
        raise LoadError(f"{place}: no result of `draftsmith bench run`")
    if item.get("format") != FORMAT:
        raise LoadError(f"{place}: written in format {item.get('format')}, not {FORMAT}")
    try:
        row = Generation(**{name: value for name, value in item.items() if name in known})
    except TypeError as error:
        missing = str(error).split("argument", 1)[-1].lstrip("s: ")
        raise LoadError(f"{place}: incomplete, it has no {missing}") from error
    for name, kind in _TYPES.items():
        if not isinstance(getattr(row, name), kind):
            raise LoadError(f"{place}: {name!r} is a {type(getattr(row, name)).__name__}")
    return row


def read(path: str | Path) -> list[Generation]:
    """All rows of a file of results; raises LoadError with file and line."""
    path = Path(path)
    try:
        with open_text(path) as lines:
            rows = [
                parse(text, f"{path}, line {number}")
                for number, text in enumerate(lines, 1)
                if text.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise LoadError(f"{path} cannot be read: {reason}") from error
    if not rows:
        raise LoadError(f"{path} is empty: it has no results")
    return rows


class ResultFile:
    """Rows that are on disk as soon as they are measured; a killed run can go on."""

    def __init__(
        self, path: Path | None, settings: dict[str, Any] | None = None, resume: bool = False
    ) -> None:
        self.path, self.settings, self.resume = path, settings, resume
        self.rows: list[Generation] = []
        self._file: IO[str] | None = None

    def __enter__(self) -> ResultFile:
        if self.path is None:
            return self
        if self.path.exists() and self.path.stat().st_size:
            if not self.resume:
                raise OptionError(f"{self.path} exists; go on with --resume, or give another --out")
            self._load(self.path)
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise LoadError(f"{self.path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def known(self) -> set[Key]:
        return {row.key for row in self.rows}

    def add(self, row: Generation) -> None:
        """Keep a row, at once on disk."""
        self.rows.append(row)
        if self._file is not None:
            self._file.write(row.line())
            self._file.flush()

    def rewrite(self) -> None:
        """Write all rows anew, after they were completed; the old file stays until that is done."""
        if self.path is None or self._file is None:
            return
        self._file.close()
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text("".join(row.line() for row in self.rows), encoding="utf-8")
        os.replace(fresh, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def _load(self, path: Path) -> None:
        """Rows of the earlier run; a line torn by its end is cut off."""
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            lines = whole.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise LoadError(f"{path} cannot be read: {error}") from error
        self.rows = _parsed(lines, path)
        self._check(path)
        if len(whole) < len(data):
            os.truncate(path, len(whole))

    def _check(self, path: Path) -> None:
        if self.settings is None:
            return
        for row in self.rows:
            if found := differences(row.settings, self.settings):
                raise OptionError(
                    f"{path} was measured with other settings ({'; '.join(found)}); give the same, "
                    "or another --out"
                )


def _parsed(lines: Iterable[str], path: Path) -> list[Generation]:
    return [parse(text, f"{path}, line {n}") for n, text in enumerate(lines, 1) if text.strip()]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position where two answers differ; None if they are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    at = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at
