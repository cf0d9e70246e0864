"""Earlier text to copy from, and the index of where every n-gram in it occurred."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, DrafterState
from draftsmith.core.stats import PREDICTION

SEAM = -1
"""Stands between the prediction and the sequence; no id equals it, so no match spans it."""


def common_past(ids: Sequence[int], j: int, t: int, most: int = 64) -> int:
    """How many ids before positions j < t are equal, at most so many."""
    length, limit = 0, min(j, most)
    while length < limit and ids[j - 1 - length] == ids[t - 1 - length]:
        length += 1
    return length


class History:
    """All text a copying drafter may copy from: the prediction, a seam, and the sequence itself.

    `ids` follows the context's ids; `offset` is where they begin; `indexes` are those of n-grams
    of each of the `sizes`.
    """

    def __init__(self, ctx: Context, sizes: Iterable[int]) -> None:
        self.ids: list[int] = [*ctx.prediction, SEAM] if ctx.prediction else []
        self.offset = len(self.ids)
        self.indexes = [NgramIndex(n, self.ids) for n in sizes]
        # Where the prompt holds the whole prediction, too: a file to edit stands in both.
        self._twin = find(ctx.prediction, ctx.ids) if ctx.prediction else None

    def extend(self, ids: Sequence[int]) -> None:
        """Take over what `ids` has gained."""
        self.ids.extend(ids[len(self.ids) - self.offset :])
        for index in self.indexes:
            index.extend()

    def truncate(self, length: int) -> None:
        """Forget the context's ids at and beyond `length`."""
        for index in self.indexes:
            index.truncate(self.offset + length)
        del self.ids[self.offset + length :]
        if self._twin is not None and self._twin + self.offset - 1 > length:
            self._twin = None

    def copy(self, start: int, most: int) -> list[int]:
        """Up to `most` ids from `start` on, ending at the seam."""
        piece = self.ids[start : start + most]
        return piece[: piece.index(SEAM)] if SEAM in piece else piece

    def copy_onward(self, start: int, most: int) -> list[int]:
        """The same, going on into the copy itself where the text ends: a loop stays a loop."""
        piece, period = self.copy(start, most), len(self.ids) - start
        if len(piece) == period:
            while len(piece) < most:
                piece.append(piece[-period])
        return piece

    def origins(self, start: int, count: int) -> Sequence[int] | None:
        """Context positions of a copy of `count` ids from `start` on.

        None for a copy of a prediction that the context does not hold. Where a copy goes on into
        itself, the positions come round again with it.
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
        """A copy from `start` on: a guess of the prediction's, wherever it stands, or `name`'s."""
        origins = self.origins(start, len(copied))
        twin = range(0) if self._twin is None else range(self._twin, self._twin + self.offset - 1)
        places = [None] * len(copied) if origins is None else origins
        sources = (PREDICTION if at is None or at in twin else name for at in places)
        return replace(Draft.chain(copied, name, origins=origins), source=tuple(sources))


class Copier(DrafterState):
    """Drafts what followed an earlier occurrence of the last n ids, for the first n with one.

    `match` says which occurrence. It may not reach into the last n ids themselves by more than
    what `overlap` allows: by all of them but one, or not at all.
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
            if self.match == "first":
                start = index.first(latest)
            else:
                start = next(iter(index.recent(latest)), None)
            if start is not None:
                copied = history.copy(start + index.n, min(self.tokens, ctx.budget))
                if copied:
                    return history.draft(copied, start + index.n, self.source)
        return EMPTY

    def truncate(self, length: int) -> None:
        self.history.truncate(length)


def find(part: Sequence[int], whole: Sequence[int]) -> int | None:
    """Where `part`, not empty, first occurs in `whole`."""
    wanted, ids = list(part), list(whole)
    starts = (at for at in range(len(ids) - len(part) + 1) if ids[at] == wanted[0])
    return next((at for at in starts if ids[at : at + len(part)] == wanted), None)


class NgramIndex:
    """Occurrences of every `n`-gram in a growing list; each id is indexed once, when it is new.

    Source: CopySpec, section 3.1, whose rolling hash is that of Python's tuples here.
    """

    def __init__(self, n: int, ids: list[int]) -> None:
        self.n = n
        self.ids = ids
        self._grams: list[tuple[int, ...]] = []  # by where they start
        self._places: dict[tuple[int, ...], list[int]] = {}  # the newest last

    def extend(self) -> None:
        """Index the ids that are new since the last call."""
        for start in range(len(self._grams), len(self.ids) - self.n + 1):
            gram = tuple(self.ids[start : start + self.n])
            self._grams.append(gram)
            self._places.setdefault(gram, []).append(start)

    def truncate(self, length: int) -> None:
        """Forget the positions at and beyond `length` of the list."""
        while len(self._grams) > max(0, length - self.n + 1):
            self._places[self._grams.pop()].pop()

    @property
    def latest(self) -> int:
        """Where the latest earlier occurrence could start; it may overlap the query."""
        return len(self._grams) - 2

    def first(self, latest: int) -> int | None:
        """The first occurrence of the list's last `n` ids, if it starts at or before `latest`."""
        return next((start for start in self._all()[:1] if start <= latest), None)

    def recent(self, latest: int, most: int = 1) -> list[int]:
        """Up to `most` occurrences that start at or before `latest`, newest first."""
        return list(islice((start for start in reversed(self._all()) if start <= latest), most))

    def _all(self) -> list[int]:
        return self._places[self._grams[-1]] if self._grams else []
