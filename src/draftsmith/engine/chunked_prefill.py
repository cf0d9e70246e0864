"""Number of prompt tokens that a pass reads beside decoding rows.

Reading a part of a prompt delays the decoding rows, while waiting prompts decode nothing. So a pass
may take longer if more prompts wait. The cost of a prompt token is measured from the passes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from draftsmith.core.loop import LEAST_CHUNK

PATIENCE = 0.6
"""Accepted delay of a pass by prompts, as a fraction of a pass with the decoding rows alone. One
such pass is added for each waiting prompt per decoding row."""

_RECENT = 7
"""Number of times of which the median is taken, to ignore passes that other work interrupted."""
_KNOWN = 64
"""Passes with prompts after which a pass without prompts is measured again."""


def _times() -> deque[float]:
    return deque(maxlen=_RECENT)


class ChunkedPrefill:
    """Times of passes with and without prompt tokens, and the room for prompts in the next one."""

    def __init__(self) -> None:
        self._alone: dict[int, deque[float]] = defaultdict(_times)
        """Decoding rows → seconds of passes without prompt tokens."""
        self._each = _times()
        """Seconds that a prompt token adds to a pass."""
        self._widest = 0
        """Largest number of prompt tokens that was read beside decoding rows."""
        self._since = _KNOWN
        """Passes with prompt tokens since the last one without."""

    def room(self, decoding: int, waiting: int, most: int) -> int:
        """Return how many tokens of `waiting` prompts a pass with `decoding` rows may read.

        At most `most`; 0 if a pass without prompts must be measured first.
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
        """Record a pass that read `read` prompt tokens beside `decoding` rows."""
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
        """Return the seconds of a pass with `rows` rows, or the nearest measured number of rows."""
        return median(self._alone[min(self._alone, key=lambda measured: abs(measured - rows))])
