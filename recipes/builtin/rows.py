"""Prepared rows, and the choice of a step's rows as a function of seed and step number.

No state is kept between steps, so a resumed run trains on the same rows as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, ID, PAD, SPECIALS, TEXT_END
from numpy.typing import NDArray

# Classes of tokens. Their weights in the loss are set by the training, not by the data.
SKIPPED, COPIED, CHANGED, PROMPT = 0, 1, 2, 3

Masked = tuple[NDArray[np.int64], NDArray[np.uint8]]  # ids, and their classes
Random = np.random.Generator
SPANS = (16, 1024)  # shortest and longest span that is repeated


def save(path: Path, rows: Sequence[tuple[list[int], NDArray[np.uint8]]]) -> int:
    """Write rows of ids and classes; returns their number of tokens."""
    ids, classes = zip(*rows, strict=True)
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    flat = [np.asarray(row, dtype=np.uint16) for row in ids]
    np.savez(path, ids=np.concatenate(flat), classes=np.concatenate(classes), starts=starts)
    return int(starts[-1])


class Rows:
    """Rows by number, and by length."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self.ids, self.classes = stored["ids"], stored["classes"]
            self.starts = stored["starts"]
        lengths = np.diff(self.starts)
        self.order = np.argsort(lengths, kind="stable")
        self.sorted_lengths = lengths[self.order]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, part: int | slice) -> Masked:
        """Return a row by its number, or the tokens of a slice of all rows."""
        if isinstance(part, int):
            part = slice(self.starts[part], self.starts[part + 1])
        return self.ids[part].astype(np.int64), np.array(self.classes[part])

    def fill(self, rng: Random, length: int) -> Masked:
        """Return a row of about `length` tokens, filled with further rows that still fit."""
        ids = np.full(length, ID[PAD], dtype=np.int64)
        classes = np.full(length, SKIPPED, dtype=np.uint8)
        at = 0
        # The first row has at least half the length, so that lengths keep their meaning.
        low = length // 2
        while at < length - 32:
            # Rows with low <= tokens <= length - at, all equally likely.
            left, right = np.searchsorted(self.sorted_lengths, (low, length - at + 1))
            if left < right:
                found = self[int(self.order[rng.integers(left, right)])]
                end = at + len(found[0])
                ids[at:end], classes[at:end] = found
                at, low = end, (length - end) // 2
            elif low == 0:
                break
            else:
                low = low // 2 if low > 16 else 0
        return ids, classes

    def crop(self, rng: Random, length: int) -> Masked:
        """Return a window anywhere in the documents; half of them start at a document's start.

        Tokens after a document's end are padding.
        """
        total = len(self.ids)
        if rng.random() < 0.5:
            start = int(self.starts[rng.integers(len(self))])
        else:
            start = int(rng.integers(total))
        start = max(0, min(start, total - length))
        ids, classes = self[start : start + length]
        end = ids == ID[TEXT_END]
        after = np.cumsum(end) - end > 0
        ids[after], classes[after] = ID[PAD], SKIPPED
        return ids, classes


def repeated(span: NDArray[np.int64], length: int) -> Masked:
    """Repeat one span; only the repetitions count, because the first time cannot be predicted."""
    classes = np.full(length, COPIED, dtype=np.uint8)
    classes[: len(span)] = SKIPPED
    return np.resize(span, length), classes


def infilling(row: Masked, rng: Random) -> Masked:
    """Rewrite a window as prefix, suffix, middle."""
    ids, classes = row[0][:-3], row[1][:-3]
    first, second = sorted(rng.integers(0, len(ids), size=2))
    parts = ((FIM_PREFIX, ids[:first]), (FIM_SUFFIX, ids[second:]), (FIM_MIDDLE, ids[first:second]))
    ids = np.concatenate([piece for marker, part in parts for piece in ([ID[marker]], part)])
    return ids, np.resize(classes, len(ids))


class Sampler:
    """Draws the rows of any step."""

    def __init__(self, data: Path, mixture: dict[str, float], seed: int, vocab: int) -> None:
        self.seed, self.vocab = seed, vocab
        self.names = sorted(mixture)
        odds = np.array([mixture[name] for name in self.names])
        self.odds = odds / odds.sum()
        self.text = Rows(data / "text.npz")
        plain = {"text", "infill", "repeat_text", "repeat_random"}
        self.pairs = {kind: Rows(data / f"{kind}.npz") for kind in mixture.keys() - plain}

    def row(self, kind: str, rng: Random, length: int) -> Masked:
        if kind in self.pairs:
            return self.pairs[kind].fill(rng, length)
        ids, classes = self.plain(kind, rng, length - 1)
        # Plain text begins with the tokenizer's marker.
        return np.append(ID[TEXT_END], ids), np.append(np.uint8(SKIPPED), classes)

    def plain(self, kind: str, rng: Random, length: int) -> Masked:
        if kind == "text":
            return self.text.crop(rng, length)
        if kind == "infill":
            return infilling(self.text.crop(rng, length), rng)
        low, high = SPANS[0], min(SPANS[1], length // 2)
        span = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
        if kind == "repeat_random":
            return repeated(rng.integers(len(SPECIALS), self.vocab, size=span), length)
        ids = self.text.crop(rng, span)[0]
        known = ids[ids > ID[TEXT_END]]
        return repeated(known if len(known) else ids, length)

    def batch(self, step: int, length: int, rows: int) -> Masked:
        """Return `rows` rows of `length` + 1 ids, with kinds drawn from the mixture."""
        rng = np.random.default_rng([self.seed, step])
        kinds = [self.names[i] for i in rng.choice(len(self.names), size=rows, p=self.odds)]
        drawn = [self.row(kind, rng, length + 1) for kind in kinds]
        return np.stack([ids for ids, _ in drawn]), np.stack([classes for _, classes in drawn])
