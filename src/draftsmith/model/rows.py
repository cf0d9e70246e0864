"""A sequence inside a runner, and what every way of remembering it must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.model.taps import RowTaps


@dataclass(eq=False, slots=True)
class SequenceRow:
    """One sequence: `ids` are in the cache, `pending` are committed but not in the cache yet."""

    pending: list[int]
    ids: list[int] = field(default_factory=list)
    taken: int = 0
    """Pending tokens that the last pass took."""
    state: Any = None
    """What it alone owns: keys and values, or a cache of the model's own."""
    rewinds: bool = True
    """Whether `extend` may cut it back: else layers with a sliding window forget what lies behind
    it, and a row that is cut back further is computed again."""
    unfinished: Any = None
    """What undoes a pass over `state` that was not committed; None if there is none."""
    taps: RowTaps | None = None
    """What drafters asked to record; None if nothing."""
    mark: tuple[int, Any] | None = None
    """A number of positions, and what it takes to go on behind them when the row is longer; None
    where the memory needs nothing for that, or was not asked to keep it."""

    @property
    def cached(self) -> int:
        """Positions in the cache."""
        return len(self.ids)

    @property
    def root(self) -> int:
        """Position of the last committed token."""
        return len(self.ids) + len(self.pending) - 1

    @property
    def is_chunk(self) -> bool:
        """Whether the pass leaves pending tokens, and so gives no logits."""
        return self.taken < len(self.pending)


def finite(logits: Tensor) -> list[bool]:
    """Whether all positions of each row (B, Q, V) were computed without overflow.

    A state that is not finite leaves no logit finite, so few columns tell; single ones may well be
    infinite, those of masked ids say.
    """
    sample = logits[..., :: max(1, logits.shape[-1] // 64)]
    found: list[bool] = sample.isfinite().any(-1).all(-1).tolist()
    return found


class KVStore(ABC):
    """How a model's past is kept between passes; here, that there is nothing to keep.

    Rows change `ids` only through the runner.
    """

    copies = False
    """Whether `copy` can be asked."""

    def open(self, row: SequenceRow) -> None:  # noqa: B027  optional by design
        """Make place for a sequence."""

    def close(self, row: SequenceRow) -> None:  # noqa: B027
        """Give its place back."""

    @abstractmethod
    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """One pass over the taken tokens and the drafts; what root, nodes and probes gave."""

    def keep(self, row: SequenceRow, path: Sequence[int]) -> int:
        """After `verify`: keep the taken tokens and the nodes of `path`.

        Returns how many of these positions are now in the cache, 0 if the pass was undone.
        """
        return row.taken + len(path)

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:  # noqa: ARG002
        """Most bytes that rows of so many bytes each take, the moments in which they grow included.

        `kept`: rows that grow no more.
        """
        return 0

    def copy(self, _source: SequenceRow, _row: SequenceRow, _length: int) -> bool:
        """Give a row without a past the first positions of another; False where they are gone."""
        return False

    def part(self, _row: SequenceRow) -> None:  # noqa: B027
        """Let it share no buffer with others: it will stay when they are gone."""

    def mark(self, row: SequenceRow) -> None:  # noqa: B027
        """Keep what `truncate` needs to come back to where the row ends now."""

    def mark_bytes(self, _row: SequenceRow) -> int:
        """Bytes that the mark of a row holds besides the row."""
        return 0

    def reach(self, _row: SequenceRow, length: int) -> int:
        """How many of the first `length` positions `truncate` could keep."""
        return length

    def truncate(self, _row: SequenceRow, length: int) -> int:
        """Forget what lies behind `length` positions; returns how many could be kept."""
        return length
