"""A file that remembers the scores of finished passes, so that a killed build can go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO

from draftsmith.errors import OptionError


class Journal:
    """Scores by pass: a line of JSON each, on disk before the next pass begins.

    The first line says what the scores belong to. What comes after the last whole line in order is
    what was being written when the power failed: it is cut off and computed again.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.scores: list[list[float]] = []
        """Of the passes 0, 1, …"""
        self._file: IO[bytes]
        self._key = key

    def __enter__(self) -> Journal:
        size = self._load()
        self._file = self.path.open("ab")
        try:
            self._file.truncate(size)
            if not size:
                self._write({"build": self._key})
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, scores: list[float]) -> None:
        """Remember the next pass, at once on disk."""
        self._write({"pass": len(self.scores), "log_p": scores})
        self.scores.append(scores)

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _load(self) -> int:
        """Read what is there; how many bytes of it are good."""
        if not self.path.exists():
            return 0
        good = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else {}
            except ValueError:
                break
            if good == 0 and "build" in entry:
                if entry["build"] != self._key:
                    raise OptionError(
                        f"{self.path.parent} holds the scores of another model, or of the same one "
                        "in another dtype; give another folder, or delete this one"
                    )
            elif good and entry.get("pass") == len(self.scores):
                self.scores.append(entry["log_p"])
            else:
                break
            good += len(line)
        return good
