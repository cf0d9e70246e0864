"""What the loop needs from a target model. `model.runner.Runner` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from draftsmith.core.draft import Draft

Shape = Literal["tree", "chain", "plain"]
"""What a target can verify in one pass: any tree, one branch, or nothing but the next token."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks the target to record besides logits; the target records only that."""

    hidden_layer: int | None = None
    """Output of this block, counted from 1, for every position."""
    attention_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) pairs, both from 0: the attention row of the last accepted position."""
    logits: bool = False
    """Logits of the root, the draft nodes and the probes."""


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one row got from a pass over its root, `n` draft nodes and `m` probe nodes."""

    logits: Tensor
    """(1+n+m, V); row 0 follows the root, row 1+i follows node i."""
    choices: Sequence[int] | None = None
    """(1+n) arg-max of each row, where the target knows it without computing logits."""
    hidden: Tensor | None = None
    """(1+n+m, D) of the layer asked for."""
    attention: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(layer, head) → (1+n+m, T) attention over the row's T cached positions and the pass."""


class Row(Protocol):
    """One sequence inside a target: its cache holds every committed token but `pending`."""

    pending: list[int]
    """Committed tokens that are not in the cache yet; never empty, the last one is the root."""

    @property
    def cached(self) -> int:
        """Positions in the cache."""


RowT = TypeVar("RowT")
"""A target's own kind of row."""


class Target(Protocol[RowT]):
    """A model with a cache, seen from the loop. Rows may join and leave between steps."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def shape(self) -> Shape: ...

    def open(self, ids: Sequence[int]) -> RowT:
        """Add a sequence; nothing is computed yet. `ids` is not empty."""

    def prefill(self, row: RowT) -> None:
        """Compute `row.pending` but for its last token, or a short rest, in chunks."""

    def room(self, row: RowT) -> int:
        """How many positions beyond the root the next pass of this row may use (0: plain)."""

    def forward(self, rows: Sequence[RowT], drafts: Sequence[Draft]) -> list[RowOutput]:
        """One pass over each row's pending tokens and draft; the cache then awaits `commit`."""

    def wait(self) -> None:
        """Return when the last pass is really done; devices compute behind the program's back."""

    def commit(
        self,
        rows: Sequence[RowT],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Keep the nodes on each path, drop the others; the last emitted token becomes pending.

        `tokens[i]` are the tokens emitted by the step: one per node on `paths[i]`, and one more.
        """

    def extend(self, row: RowT, ids: Sequence[int]) -> int:
        """Make `ids` the row's committed tokens, keeping the cache of the longest common prefix.

        Returns how many cached positions were kept.
        """

    def close(self, row: RowT) -> None:
        """Drop a sequence and its cache."""
