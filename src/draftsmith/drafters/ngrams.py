"""Earlier text to copy from, and an index of its n-grams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

import numpy as np

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, DrafterState
from draftsmith.core.stats import PREDICTION

SEAM = -1
"""Separates the prediction from the sequence. No id has this value, so no match spans both."""


def common_past(ids: Sequence[int], j: int, t: int, most: int = 64) -> int:
    """Return how many ids before the positions j < t are equal, at most `most`."""
    length, limit = 0, min(j, most)
    while length < limit and ids[j - 1 - length] == ids[t - 1 - length]:
        length += 1
    return length


class History:
    """The text that drafters copy from: the prediction, a seam, and the sequence.

    `ids` are all of it; the context's ids begin at `offset`. `indexes` has an n-gram index for each
    of the `sizes`.
    """

    def __init__(self, ctx: Context, sizes: Iterable[int]) -> None:
        self.ids: list[int] = [*ctx.prediction, SEAM] if ctx.prediction else []
        self.offset = len(self.ids)
        self.indexes = [NgramIndex(n, self.ids) for n in sizes]
        # A file to edit is often in the prompt and in the prediction.
        self._twin = find(ctx.prediction, ctx.ids) if ctx.prediction else None

    def extend(self, ids: Sequence[int]) -> None:
        """Add the new ids of the context."""
        self.ids.extend(ids[len(self.ids) - self.offset :])
        for index in self.indexes:
            index.extend()

    def truncate(self, length: int) -> None:
        """Drop the context's ids at positions >= `length`."""
        for index in self.indexes:
            index.truncate(self.offset + length)
        del self.ids[self.offset + length :]
        if self._twin is not None and self._twin + self.offset - 1 > length:
            self._twin = None

    def copy(self, start: int, most: int) -> list[int]:
        """Return up to `most` ids from `start`, ending at the seam."""
        piece = self.ids[start : start + most]
        return piece[: piece.index(SEAM)] if SEAM in piece else piece

    def copy_onward(self, start: int, most: int) -> list[int]:
        """Like `copy`, but repeat the copy where the text ends, so that a loop continues."""
        piece, period = self.copy(start, most), len(self.ids) - start
        if len(piece) == period:
            while len(piece) < most:
                piece.append(piece[-period])
        return piece

    def origins(self, start: int, count: int) -> Sequence[int] | None:
        """Return the context positions for a copy of `count` ids from `start`.

        None for a copy of a prediction that the context does not contain. Positions of a repeated
        copy are repeated, too.
        """
        first, period = start - self.offset, len(self.ids) - start
        if first < 0:  # the seam keeps such a copy from reaching the context
            if self._twin is None:
                return None
            first = self._twin + start
            return range(first, first + count)
        if count <= period:
            return range(first, first + count)
        return [first + i % period for i in range(count)]

    def draft(self, copied: Sequence[int], start: int, name: str) -> Draft:
        """Build a draft of a copy; nodes copied from the prediction get `PREDICTION` as source."""
        origins = self.origins(start, len(copied))
        twin = range(0) if self._twin is None else range(self._twin, self._twin + self.offset - 1)
        places = [None] * len(copied) if origins is None else origins
        sources = (PREDICTION if at is None or at in twin else name for at in places)
        return replace(Draft.chain(copied, name, origins=origins), source=tuple(sources))


class Copier(DrafterState):
    """Draft what followed an earlier occurrence of the last n ids, for the first n that has one.

    `match` selects the occurrence. With `overlap` it may share up to n-1 ids with the last n ids,
    else none.
    """

    def __init__(
        self,
        ctx: Context,
        source: str,
        sizes: Iterable[int],
        tokens: int,
        match: Literal["first", "last"],
        *,
        overlap: bool,
    ) -> None:
        self.source, self.tokens, self.match, self.overlap = source, tokens, match, overlap
        self.history = History(ctx, sizes)

    def draft(self, ctx: Context) -> Draft:
        history = self.history
        history.extend(ctx.ids)
        for index in history.indexes:
            latest = len(history.ids) - index.n - (1 if self.overlap else index.n)
            starts = (index.oldest if self.match == "first" else index.recent)(latest, most=2)
            for start in starts:
                # Nothing follows an occurrence at the end of the prediction; the next one counts.
                if copied := history.copy(start + index.n, min(self.tokens, ctx.budget)):
                    return history.draft(copied, start + index.n, self.source)
        return EMPTY

    def truncate(self, length: int) -> None:
        self.history.truncate(length)


def find(part: Sequence[int], whole: Sequence[int]) -> int | None:
    """Return the first position of `part`, which must not be empty, in `whole`; None: none."""
    wanted, ids = (np.asarray(one, np.int32).tobytes() for one in (part, whole))
    at = ids.find(wanted)  # in linear time, also where both are repetitions
    while at > 0 and at % 4:
        at = ids.find(wanted, at + 1)
    return at // 4 if at >= 0 else None


def index_bytes(sizes: Iterable[int], positions: int) -> int:
    """Return the most bytes of an index for each size; an n-gram takes eight bytes per id."""
    return sum(300 + 8 * n for n in sizes if n <= positions) * positions


class NgramIndex:
    """Positions of every `n`-gram in a growing list; each id is indexed once.

    Source: CopySpec, section 3.1; the hash of Python's tuples replaces its rolling hash.
    """

    def __init__(self, n: int, ids: list[int]) -> None:
        self.n = n
        self.ids = ids
        self._grams: list[tuple[int, ...]] = []  # by start position
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram → start positions, rising

    def extend(self) -> None:
        """Index the ids since the last call."""
        for start in range(len(self._grams), len(self.ids) - self.n + 1):
            gram = tuple(self.ids[start : start + self.n])
            self._grams.append(gram)
            self._places.setdefault(gram, []).append(start)

    def truncate(self, length: int) -> None:
        """Drop the positions >= `length`."""
        while len(self._grams) > max(0, length - self.n + 1):
            gram = self._grams.pop()
            places = self._places[gram]
            places.pop()
            if not places:
                del self._places[gram]

    def oldest(self, latest: int, most: int = 1) -> list[int]:
        """Return up to `most` first occurrences that start at `latest` or before, oldest first."""
        return [start for start in self._all()[:most] if start <= latest]

    def recent(self, latest: int, most: int = 1) -> list[int]:
        """Return up to `most` occurrences that start at `latest` or before, newest first."""
        return list(islice((start for start in reversed(self._all()) if start <= latest), most))

    def _all(self) -> list[int]:
        return self._places[self._grams[-1]] if self._grams else []
