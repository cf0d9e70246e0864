"""What drafters with a model of their own share: a row of its cache for each sequence."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

    def open_row(self, owner: object, ids: Sequence[int]) -> tuple[Any, Callable[[], object]]:
        """Open a row for `owner`, and return it with a function for `close_row`.

        The row is also closed, before the next draft, if `owner` is collected as garbage.
        """
        row = self.runner.open(ids)
        return row, weakref.finalize(owner, self._ended.append, row)

    def close_row(self, end: Callable[[], object]) -> None:
        """Close a row of `open_row`, after the pass that runs."""
        end()
        self.close_ended()

    def close_ended(self) -> None:
        """Close the rows of owners that were collected as garbage."""
        with self.lock:
            while self._ended:
                self.runner.close(self._ended.pop())

    def preferred_width(self) -> int:
        return self.config.preferred_width()

    def __str__(self) -> str:
        return str(self.config)
