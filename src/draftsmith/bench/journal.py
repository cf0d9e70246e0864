"""A file that remembers finished replays, so that an interrupted run can go on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.bench.records import Record
from draftsmith.bench.replay import Replay
from draftsmith.core.stats import Stats
from draftsmith.storage import JsonLines


def key_of(record: Record, settings: str) -> str:
    """A fingerprint of everything, but the drafter, that the counts depend on."""
    content = [*asdict(record).values(), settings]
    text = json.dumps(content, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


class FinishedReplays:
    """Finished replays by (fingerprint, drafter); with a path, one JSON line each."""

    def __init__(self, path: Path | None) -> None:
        """Raises LoadError for a file that is no journal, WriteError where none can be."""
        self.known: dict[tuple[str, str], Replay] = {}
        self._lines: JsonLines[None] | None = None
        if path is not None:
            hint = "it was not written by --resume; give another file"
            self._lines = JsonLines(path, self._read, begins='{"key"', hint=hint, sync=False)

    def add(self, key: str, drafter: str, replay: Replay) -> None:
        """Remember one replay, at once on disk."""
        self.known[key, drafter] = replay
        if self._lines is not None:
            passes = [[*place, count] for place, count in sorted(replay.passes.items())]
            entry = {"key": key, "drafter": drafter, "passes": passes}
            self._lines.add(entry | {"stats": asdict(replay.stats)})

    def _read(self, entry: dict[str, Any]) -> None:
        passes = {(context, positions): n for context, positions, n in entry["passes"]}
        replay = Replay(Stats.from_dict(entry["stats"]), Counter(passes))
        self.known[entry["key"], entry["drafter"]] = replay
