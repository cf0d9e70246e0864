"""A file that remembers finished replays, so that an interrupted run can go on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from draftsmith.bench.records import Record
from draftsmith.bench.replay import Replay
from draftsmith.core.stats import Seconds, SourceStats, Stats
from draftsmith.errors import LoadError


def key_of(record: Record, settings: str) -> str:
    """A fingerprint of everything, but the drafter, that the counts depend on."""
    content = [getattr(record, f.name) for f in fields(record)]
    text = json.dumps([*content, settings], ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


class Journal:
    """Finished replays by (fingerprint, drafter); one JSON line each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[tuple[str, str], Replay] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> Journal:
        if self.path is None:
            return self
        torn = self._load() if self.path.exists() else False
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise LoadError(f"{self.path} cannot be written: {error.strerror}") from error
        if torn:  # The line that was being written when the earlier run was killed.
            self._file.write("\n")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, drafter: str, replay: Replay) -> None:
        """Remember one replay, at once on disk."""
        self.known[key, drafter] = replay
        if self._file is not None:
            passes = [[*place, count] for place, count in sorted(replay.passes.items())]
            entry = {"key": key, "drafter": drafter, "passes": passes}
            self._file.write(json.dumps(entry | {"stats": asdict(replay.stats)}) + "\n")
            self._file.flush()

    def _load(self) -> bool:
        """Read what is there; whether the last line is torn. Raises LoadError for other files."""
        assert self.path is not None
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{self.path} cannot be read: {error}") from error
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                entry = json.loads(line)
                replay = Replay(_stats(entry["stats"]), _passes(entry["passes"]))
                self.known[entry["key"], entry["drafter"]] = replay
            except (ValueError, KeyError, TypeError) as error:
                # A torn line ends at the end of the file, or where a later run went on below it.
                if line.startswith('{"key"'):
                    continue
                raise LoadError(
                    f"{self.path}, line {number}: not written by --resume; give another file"
                ) from error
        return bool(lines[-1])


def _stats(entry: dict[str, Any]) -> Stats:
    sources = {name: SourceStats(**value) for name, value in entry["by_source"].items()}
    return Stats(**{**entry, "by_source": sources, "seconds": Seconds(**entry["seconds"])})


def _passes(entries: list[list[int]]) -> Counter[tuple[int, int]]:
    return Counter({(context, positions): count for context, positions, count in entries})
