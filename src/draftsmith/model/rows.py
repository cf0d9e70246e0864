"""A sequence inside a runner, and the interface of the stores that keep its past."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.core.draft import Draft
from draftsmith.core.target import RowOutput
from draftsmith.model.taps import PassTaps, RowTaps


@dataclass(eq=False, slots=True)
class SequenceRow:
    """One sequence: `ids` are cached, `pending` are committed but not cached yet."""

    pending: list[int]
    ids: list[int] = field(default_factory=list)
    taken: int = 0
    """Pending tokens that the last pass computed."""
    state: Any = None
    """Storage of this row: `Slots` of keys and values, or a cache of transformers."""
    rewinds: bool = True
    """Whether `extend` may shorten the row.

    If false, layers with a sliding window drop positions outside it. A row that is shortened
    further than that is computed again.
    """
    unfinished: Any = None
    """Restores `state` after a pass that was not committed; None if nothing is to restore."""
    taps: RowTaps | None = None
    """Recordings for drafters; None if none were requested."""
    mark: tuple[int, Any] | None = None
    """(positions, state) from which the row can continue after it has grown.

    None if the store needs nothing for that, or if nothing was marked.
    """

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
        """Whether the pass leaves pending tokens, and so returns no logits."""
        return self.taken < len(self.pending)


def record(rows: Collection[SequenceRow], blocks: Any, queries: Iterable[slice]) -> PassTaps | None:
    """Return the recorder of a pass with a span for each row; None if no row has needs.

    `queries` are each row's own of the Q positions.
    """
    asking = {
        i: (row.taps, own)
        for i, (row, own) in enumerate(zip(rows, queries, strict=True))
        if row.taps is not None
    }
    if not asking:
        return None
    chunks = {i for i, row in enumerate(rows) if row.is_chunk}
    taps = PassTaps([one.needs for one, _ in asking.values()], blocks, chunks)
    for i, (one, own) in asking.items():
        one.pass_taps = taps, i, own
    return taps


class KVStore(ABC):
    """Keeps a model's past between passes. The default methods suit a store that keeps nothing.

    Only the runner changes `SequenceRow.ids`.
    """

    copies = False
    """Whether `copy` is supported."""
    forgets = False
    """Whether layers drop what their window has left, in rows that are not to `rewind`."""

    def open(self, row: SequenceRow) -> None:  # noqa: B027  optional by design
        """Allocate what a new row needs."""

    def close(self, row: SequenceRow) -> None:  # noqa: B027
        """Free what the row holds."""

    @abstractmethod
    def verify(self, rows: Sequence[SequenceRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        """Run one pass over the taken tokens and the drafts; return logits of roots, nodes and
        probes.
        """

    def keep(self, row: SequenceRow, path: Sequence[int]) -> int:
        """After `verify`: keep the taken tokens and the nodes of `path`.

        Returns how many of these positions are cached now; 0 if the pass was undone.
        """
        return row.taken + len(path)

    def bytes_for(self, rows: Sequence[int], kept: Sequence[int]) -> int:  # noqa: ARG002
        """Return the peak bytes of rows with these sizes in bytes, while they grow.

        `kept` are the sizes of rows that do not grow any more.
        """
        return 0

    def idle_bytes(self) -> int:
        """Return the bytes of buffers that no row uses, and that later rows may."""
        return 0

    def free_idle(self) -> None:  # noqa: B027
        """Free the buffers that no row uses."""

    def copy(self, _source: SequenceRow, _row: SequenceRow, _length: int) -> bool:
        """Copy the first `length` positions to a row that has none; False if they are gone."""
        return False

    def unshare(self, _row: SequenceRow) -> None:  # noqa: B027
        """Copy what the row shares with others, because it will outlive them."""

    def mark(self, row: SequenceRow) -> None:  # noqa: B027
        """Keep what `truncate` needs to return to the current end of the row."""

    def mark_bytes(self, _row: SequenceRow) -> int:
        """Bytes that the mark of a row holds in addition to the row."""
        return 0

    def reach(self, _row: SequenceRow, length: int) -> int:
        """Return how many of the first `length` positions `truncate` could keep."""
        return length

    def truncate(self, _row: SequenceRow, length: int) -> int:
        """Drop the positions from `length` on; return how many positions could be kept."""
        return length
