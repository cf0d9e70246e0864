"""A file that remembers the scores of finished passes, so that a killed build can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.errors import OptionError
from draftsmith.storage import JsonLines


class KnownScores:
    """Scores by pass: a line of JSON each, on disk before the next pass begins.

    The first line says what the scores belong to. What comes after the last whole line in order is
    what was being written when the power failed: it is cut off and computed again.
    """

    def __init__(self, path: Path, key: str) -> None:
        """Raises OptionError if the scores in the file belong to something else."""
        self.scores: list[list[float]] = []
        """Of the passes 0, 1, …"""
        self._folder, self._key, self._begun = path.parent, key, False
        self._lines = JsonLines(path, self._read, begins='{"build"', hint=None)
        if not self._begun:
            self._lines.add({"build": key})

    def add(self, scores: list[float]) -> None:
        """Remember the next pass, at once on disk."""
        self._lines.add({"pass": len(self.scores), "log_p": scores})
        self.scores.append(scores)

    def _read(self, entry: dict[str, Any]) -> None:
        if self._begun:
            if entry["pass"] != len(self.scores):
                raise ValueError("not the next pass")
            self.scores.append(entry["log_p"])
        elif entry["build"] != self._key:
            raise OptionError(
                f"{self._folder} holds the scores of another model, or of the same one in another "
                "dtype; give another folder, or delete this one"
            )
        self._begun = True
