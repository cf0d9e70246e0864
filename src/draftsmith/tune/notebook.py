"""Results of finished pieces of work in a file, so that an interrupted calibration goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.errors import LoadError


class Notebook:
    """JSON results by what they were computed from; with a path, on disk as soon as known."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.recalled = 0
        """Results that were already there."""
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            self._load(path)

    def recall(self, key: object, compute: Callable[[], Any]) -> Any:
        """The result noted under `key`; computed and noted if there is none."""
        text = json.dumps(key)
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        if digest in self._known:
            self.recalled += 1
            return self._known[digest]
        result = self._known[digest] = json.loads(json.dumps(compute()))
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": digest, "result": result}) + "\n")
        return result

    def forget(self) -> None:
        """Delete the file: all is done."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{path} cannot be read ({error}); delete it") from error
        whole, _, torn = text.rpartition("\n")
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError) as error:
                raise LoadError(f"{path} was not written by draftsmith; delete it") from error
        if torn:  # the line that was being written when the earlier run was killed
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
