"""How much of the waiting prompts a pass takes beside rows that decode.

A part of a prompt delays who decodes, and rows that wait decode nothing: so a pass may take as much
longer as there are more who wait. What its tokens cost is learnt from the passes that carried some.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from draftsmith.core.loop import LEAST_CHUNK

PATIENCE = 0.6
"""By how much a pass may be longer that carries prompts, in passes of the rows that decode; to
which comes one such pass for as many that wait as decode."""

_RECENT = 7
"""Times of which the median counts: one interrupted by other work says nothing."""
_KNOWN = 64
"""Passes after which what they take without prompts is measured again."""


def _times() -> deque[float]:
    return deque(maxlen=_RECENT)


class Chunks:
    """What passes with and without parts of prompts took, and what follows for the next."""

    def __init__(self) -> None:
        self._alone: dict[int, deque[float]] = defaultdict(_times)
        """Rows that decode → seconds of passes that carried nothing else."""
        self._each = _times()
        """Seconds that a token of a prompt added to a pass."""
        self._widest = 0
        """Tokens of prompts that were ever read beside rows that decode."""
        self._since = _KNOWN
        """Passes since the last that carried no prompt."""

    def room(self, decoding: int, waiting: int, most: int) -> int:
        """Tokens that `waiting` prompts may have in a pass beside so many rows that decode.

        At most `most`; 0 where it has to be found out first what a pass takes without them.
        """
        if not decoding:
            return most
        if self._since >= _KNOWN:
            return 0
        most = max(LEAST_CHUNK, min(most, 2 * self._widest))
        if self._each and (each := median(self._each)):
            longer = (PATIENCE + waiting / decoding) * self._without(decoding)
            most = max(LEAST_CHUNK, min(most, int(longer / each)))
        return most

    def record(self, decoding: int, read: int, seconds: float) -> None:
        """A pass of so many rows that decode took `read` tokens of prompts, and so long."""
        if not decoding:
            return
        if not read:
            self._alone[decoding].append(seconds)
            self._since = 0
            return
        self._since += 1
        self._widest = max(self._widest, read)
        if self._alone:
            self._each.append(max(0.0, seconds - self._without(decoding)) / read)

    def _without(self, rows: int) -> float:
        """Seconds of a pass of so many rows without prompts, or of the nearest number known."""
        return median(self._alone[min(self._alone, key=lambda known: abs(known - rows))])
