"""The interface of a target model, as the loop uses it; `model.runner.Runner` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor

from draftsmith.core.draft import Draft

Shape = Literal["tree", "chain", "plain"]
"""Drafts that a target can verify in one pass: any tree, one branch, or none."""


MOST_BESIDE_DRAFT = 64
"""Pending tokens that may share a pass with a draft: the pass then takes hardly any longer."""


class Fold(Protocol):
    """Makes hidden states narrower as soon as they are there, so that less is kept."""

    width: int

    def __call__(self, states: Tensor, /) -> Tensor:
        """(n, k·D) outputs of k blocks → (n, width)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Recordings that a drafter needs from the target."""

    hidden_layers: tuple[int, ...] = ()
    """Record the outputs of these blocks (counted from 1) for every position, side by side, before
    a final norm."""
    attention_heads: tuple[tuple[int, int], ...] = ()
    """Record the attention of the last accepted position for these (layer, head), counted from
    0."""
    logits: bool = False
    """Compute the logits of the root, the draft nodes and the probes."""
    fold: Fold | None = None
    """Makes the recorded states narrower before they are kept; None: they are kept unchanged."""
    why: str = field(default="", compare=False)
    """Origin of these choices, as a sentence for the user; empty if there is nothing to explain."""

    @property
    def taps(self) -> bool:
        """Whether hidden states or attention must be recorded."""
        return bool(self.hidden_layers or self.attention_heads)


NO_NEEDS = Needs()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that a drafter may use before anything runs."""

    layers: int
    heads: int
    """Query heads per layer."""
    name: str = ""
    """Hub id or folder of its weights; empty for a model that was created in memory."""
    vocabulary: Callable[[], str | None] = field(default=lambda: None, compare=False)
    """Returns the fingerprint of its vocabulary (`text.vocab`); None if it is unknown.

    It is a function because the computation takes a while and few drafters need it.
    """
    tokenizer: Any | None = field(default=None, compare=False)
    """Its Hugging Face tokenizer; None if it was loaded without one."""
    vocab_size: int = 0
    """V: width of its logits, padding ids included."""
    device: str = "cpu"
    """Device of its input ids."""
    shape: Shape = "tree"
    """Drafts that it can verify."""
    model: Any | None = field(default=None, compare=False)
    """The live model, for drafters that use its embeddings or its head; None: there is none."""


Weights = Callable[[Tensor], Tensor]
"""Positions (n,) → attention weights (heads, n) of one query, computed when called."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Recorded states and attention of a row with T committed ids; the last id has no state yet."""

    hidden: Tensor | None = None
    """(T-1, k·D) for k layers, or as wide as `Needs.fold` makes them; None: not requested, or
    nothing was computed yet."""
    attention: Weights | None = None
    """Attention of the last position with a state, over the T-1 positions up to itself."""


NO_TAPS = Taps()


class Highest(NamedTuple):
    """The k highest logits of each of N positions, in falling order, as numpy arrays."""

    values: Any
    """(N, k) float32"""
    ids: Any
    """(N, k)"""


@dataclass(frozen=True, slots=True)
class RowOutput:
    """Output of one row for a pass over its root, `n` draft nodes and `m` probe nodes."""

    logits: Tensor
    """(1+n+m, V); row 0 follows the root, row 1+i follows node i. (0, V): the root was not read."""
    choices: Sequence[int] | None = None
    """(1+n) arg-max after the root and each draft node; None if the target has not computed it.
    After `readout.read`, the sequence's next tokens; None if they are chosen one by one."""
    finite: bool = True
    """False if a draft token overflowed the model, so that all logits are invalid."""
    highest: Highest | None = None
    """The highest logits of each row of logits; None if they were not read, as on a CPU."""

    def first(self, count: int) -> RowOutput:
        """Return the output of the first `count` positions."""
        best = self.highest and Highest(*(one[:count] for one in self.highest))
        choices = self.choices and self.choices[:count]
        return RowOutput(self.logits[:count], choices, self.finite, best)


class Row(Protocol):
    """A sequence's place in a target; its cache holds every committed token except `pending`."""

    pending: list[int]
    """Committed tokens that are not in the cache; never empty, the last one is the root."""

    @property
    def cached(self) -> int:
        """Number of positions in the cache."""


RowT = TypeVar("RowT")
"""Row type of a target."""


class Target(Protocol[RowT]):
    """A model with a cache. Rows may join and leave between steps."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def shape(self) -> Shape: ...

    def open(self, ids: Sequence[int], needs: Needs = NO_NEEDS) -> RowT:
        """Add a sequence without computing anything. `ids` must not be empty."""

    def room(self, row: RowT) -> int:
        """Return how many positions after the root the next pass of this row may use (0: plain)."""

    def splits(self, row: RowT) -> bool:
        """Return whether several passes may read its pending tokens; else one must read them
        all."""

    def forward(
        self,
        rows: Sequence[RowT],
        drafts: Sequence[Draft],
        take: Sequence[int] | None = None,
    ) -> list[RowOutput]:
        """Run one pass over each row's pending tokens and draft; `commit` must follow.

        `take` is the number of pending tokens, at least 1, that the pass reads for each row, where
        `splits` allows less than all. A row with tokens left has no draft and gets no logits; it is
        committed with an empty path and no tokens.
        """

    def taps(self, row: RowT) -> Taps:
        """Return what the row's needs have recorded; views that are valid until its next pass."""

    def commit(
        self,
        rows: Sequence[RowT],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Keep the nodes on each path and drop the others; the last emitted token becomes pending.

        `tokens[i]` are the tokens that the step emitted for row i: one per node on `paths[i]`, and
        one more. It is empty for a row with pending tokens left.
        """

    def close(self, row: RowT) -> None:
        """Remove a sequence and its cache."""


def ahead(target: Target[Any], row: Row, whole: bool, most: int) -> int:
    """Return how many pending tokens passes without a draft read first; 0: a draft can join them.

    Up to `most` pending tokens share a pass with a draft if the target verifies trees. With `whole`
    only the last one does, because the drafter reads what the target records of the others.
    """
    sharing = 1 if whole or target.shape != "tree" else most
    left = len(row.pending)
    return left - 1 if left > sharing and target.splits(row) else 0
