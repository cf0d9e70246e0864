"""Which rows a step trains on: a pure function of the seed and the step's number.

Nothing is remembered between steps, so a run that is stopped and resumed sees the same rows as one
that never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from store import COPIED, SKIPPED, Reader

Ids = NDArray[np.int64]
Classes = NDArray[np.uint8]
Row = tuple[Ids, Classes]
Random = np.random.Generator


@dataclass(frozen=True)
class Markers:
    """The ids the sampler itself writes into rows."""

    pad: int
    first: int
    prefix: int
    suffix: int
    middle: int
    first_plain: int
    vocab: int


def crop(text: Reader, marks: Markers, rng: Random, length: int) -> Row:
    """A window anywhere in the documents; every second one starts at a document's start.

    What follows a document's end is padding.
    """
    total = len(text.ids)
    if rng.random() < 0.5:
        start = int(text.starts[rng.integers(len(text))])
    else:
        start = int(rng.integers(total))
    start = max(0, min(start, total - length))
    part = slice(start, start + length)
    ids, classes = text.ids[part].astype(np.int64), np.array(text.classes[part])
    after = np.cumsum(ids == marks.first) - (ids == marks.first) > 0
    ids[after], classes[after] = marks.pad, SKIPPED
    return ids, classes


def repeated(span: Ids, length: int) -> Row:
    """One span again and again: only the repetitions count, the first time is only a surprise."""
    row = np.resize(span, length)
    classes = np.full(length, COPIED, dtype=np.uint8)
    classes[: len(span)] = SKIPPED
    return row, classes


def infilling(row: Row, marks: Markers, rng: Random) -> Row:
    """Rewrite a window as prefix, suffix, middle."""
    ids, classes = row[0][:-3], row[1][:-3]
    first, second = sorted(rng.integers(0, len(ids), size=2))
    ids = np.concatenate(
        (
            [marks.prefix],
            ids[:first],
            [marks.suffix],
            ids[second:],
            [marks.middle],
            ids[first:second],
        )
    )
    return ids, np.resize(classes, len(ids))


class Pairs:
    """Question and answer rows; a row is filled up with further ones that still fit."""

    def __init__(self, reader: Reader, marks: Markers) -> None:
        self.reader = reader
        self.marks = marks
        self.order = np.argsort(reader.lengths, kind="stable")
        self.sorted_lengths = reader.lengths[self.order]

    def pick(self, rng: Random, low: int, high: int) -> Row | None:
        """A row with low <= tokens <= high, all equally likely."""
        left = int(np.searchsorted(self.sorted_lengths, low, "left"))
        right = int(np.searchsorted(self.sorted_lengths, high, "right"))
        if right <= left:
            return None
        return self.reader.row(int(self.order[rng.integers(left, right)]))

    def fill(self, rng: Random, length: int) -> Row:
        ids = np.full(length, self.marks.pad, dtype=np.int64)
        classes = np.full(length, SKIPPED, dtype=np.uint8)
        at = 0
        low = length // 2  # the first row is at least this long, so that lengths keep their meaning
        while at < length - 32:
            found = self.pick(rng, low, length - at)
            if found is None:
                if low == 0:
                    break
                low = low // 2 if low > 16 else 0
                continue
            ids[at : at + len(found[0])] = found[0]
            classes[at : at + len(found[0])] = found[1]
            at += len(found[0])
            low = (length - at) // 2
        return ids, classes


class Sampler:
    """Draws the rows of any step."""

    def __init__(self, folder: Path, marks: Markers, seed: int, kinds: set[str]) -> None:
        self.marks = marks
        self.seed = seed
        self.text = Reader(folder, "text")
        plain = {"text", "infill", "repeat_text", "repeat_random"}
        self.pairs = {kind: Pairs(Reader(folder, kind), marks) for kind in kinds - plain}

    def row(self, kind: str, rng: Random, length: int, spans: list[int]) -> Row:
        marks = self.marks
        if kind in self.pairs:
            return self.pairs[kind].fill(rng, length)
        ids, classes = self.plain(kind, rng, length - 1, spans)
        # Plain text begins with the marker that the tokenizer puts there.
        return np.append(marks.first, ids), np.append(np.uint8(SKIPPED), classes)

    def plain(self, kind: str, rng: Random, length: int, spans: list[int]) -> Row:
        marks = self.marks
        if kind == "text":
            return crop(self.text, marks, rng, length)
        if kind == "infill":
            return infilling(crop(self.text, marks, rng, length), marks, rng)
        low, high = spans[0], min(spans[1], length // 2)
        span = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
        if kind == "repeat_random":
            return repeated(rng.integers(marks.first_plain, marks.vocab, size=span), length)
        if kind == "repeat_text":
            ids = crop(self.text, marks, rng, span)[0]
            return repeated(ids[ids > marks.first] if (ids > marks.first).any() else ids, length)
        raise ValueError(f"unknown kind of row: {kind}")

    def batch(
        self,
        step: int,
        length: int,
        rows: int,
        mixture: dict[str, float],
        spans: list[int],
    ) -> tuple[Ids, Classes, list[str]]:
        """`rows` rows of `length` + 1 ids, the kinds drawn from the mixture."""
        rng = np.random.default_rng([self.seed, step])
        names = sorted(mixture)
        odds = np.array([mixture[name] for name in names])
        kinds = [names[i] for i in rng.choice(len(names), size=rows, p=odds / odds.sum())]
        drawn = [self.row(kind, rng, length + 1, spans) for kind in kinds]
        return (
            np.stack([ids for ids, _ in drawn]),
            np.stack([classes for _, classes in drawn]),
            kinds,
        )
