"""What drafters with a model of their own share: a row of its cache for each sequence."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftsmith.core.drafter import Drafter

if TYPE_CHECKING:
    from draftsmith.core.target import ModelFacts
    from draftsmith.model.rows import SequenceRow
    from draftsmith.model.runner import Runner


@dataclass(frozen=True, eq=False, repr=False)
class OwnModel(Drafter):
    """A drafter that is bound to a target and runs a model of its own."""

    config: Drafter
    """The drafter as the user configured it."""
    runner: Runner
    """Its model."""
    target: ModelFacts | None = field(default=None, kw_only=True)
    """The target that it is bound to; None: it suits any."""
    lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    """Held while its model runs, because all sequences share one cache."""
    _ended: list[SequenceRow] = field(init=False, default_factory=list)
    """Rows to close. Garbage collection adds rows at any time, also while the model runs."""

    def bind(self, model: ModelFacts) -> Drafter:
        """Return itself for its target; bind to another one, which may have another vocabulary."""
        own = self.target
        if own is None or (own == model and own.model is model.model):
            return self
        return self.config.bind(model)

    def close_ended(self) -> None:
        """Close the rows of owners that were collected as garbage."""
        with self.lock:
            while self._ended:
                self.runner.close(self._ended.pop())

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.config.name

    def preferred_width(self) -> int:
        return self.config.preferred_width()

    def __str__(self) -> str:
        return str(self.config)


class OwnRow:
    """A row of the drafter's model for one sequence; it is opened when the text is first read."""

    row: SequenceRow

    def __init__(self, drafter: OwnModel) -> None:
        self.drafter = drafter
        self._end: Callable[[], object] | None = None
        """Ends the use of `row`; None: no row is open."""

    def follow(self, ids: Sequence[int]) -> None:
        """Set the text of the row to `ids`."""
        if self._end is None:
            self.row = self.drafter.runner.open(ids)
            # If this object is collected as garbage, the row is closed before the next draft.
            self._end = weakref.finalize(self, self.drafter._ended.append, self.row)
        else:
            self.drafter.runner.extend(self.row, ids)

    def close(self) -> None:
        """Close the row, after the pass that runs."""
        if self._end is not None:
            self._end()
            self._end = None
            self.drafter.close_ended()
