"""Results of finished pieces of work in a file, so that an interrupted calibration goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.storage import JsonLines, writing


class FinishedWork:
    """JSON results by what they were computed from; with a path, on disk as soon as known."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises LoadError for a file that is something else, WriteError where none can be."""
        self.recalled = 0
        """Results that were already there."""
        self._known: dict[str, Any] = {}
        self._lines: JsonLines[None] | None = None
        if path is not None:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            hint = "it was not written by draftsmith; delete it"
            self._lines = JsonLines(path, self._note, begins='{"key"', hint=hint)

    def recall(self, key: object, compute: Callable[[], Any]) -> Any:
        """The result noted under `key`; computed and noted if there is none."""
        text = json.dumps(key)
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        if digest in self._known:
            self.recalled += 1
            return self._known[digest]
        result = self._known[digest] = json.loads(json.dumps(compute()))
        if self._lines is not None:
            self._lines.add({"key": digest, "result": result})
        return result

    def forget(self) -> None:
        """Delete the file: all is done."""
        if self._lines is not None:
            self._lines.path.unlink(missing_ok=True)

    def _note(self, entry: dict[str, Any]) -> None:
        self._known[entry["key"]] = entry["result"]
