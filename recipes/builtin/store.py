"""Prepared rows on disk: one flat array of ids, one of loss classes, and where each row starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# What a token is to the loss. The weight of each class is the training's choice, not the data's.
SKIPPED, COPIED, CHANGED, PROMPT = 0, 1, 2, 3


@dataclass
class Writer:
    """Collects rows and writes them as three .npy files."""

    ids: list[NDArray[np.uint16]] = field(default_factory=list)
    classes: list[NDArray[np.uint8]] = field(default_factory=list)

    def add(self, ids: list[int], classes: NDArray[np.uint8]) -> None:
        assert len(ids) == len(classes)
        self.ids.append(np.asarray(ids, dtype=np.uint16))
        self.classes.append(np.asarray(classes, dtype=np.uint8))

    def save(self, folder: Path, name: str) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        starts = np.cumsum([0, *(len(row) for row in self.ids)], dtype=np.int64)
        np.save(folder / f"{name}.ids.npy", np.concatenate(self.ids))
        np.save(folder / f"{name}.classes.npy", np.concatenate(self.classes))
        np.save(folder / f"{name}.starts.npy", starts)
        return int(starts[-1])


class Reader:
    """Rows by number, read from disk as they are needed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ids = np.load(folder / f"{name}.ids.npy", mmap_mode="r")
        self.classes = np.load(folder / f"{name}.classes.npy", mmap_mode="r")
        self.starts = np.load(folder / f"{name}.starts.npy")
        self.lengths = np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        part = slice(self.starts[number], self.starts[number + 1])
        return self.ids[part].astype(np.int64), np.asarray(self.classes[part])
