"""What the loop needs from a target model. `model.runner.Runner` is the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from draftsmith.core.draft import Draft

Shape = Literal["tree", "chain", "plain"]
"""What a target can verify in one pass: any tree, one branch, or nothing but the next token."""


REST = 64
"""A text's end that may share a draft's pass: hardly costlier than that pass alone."""


class Fold(Protocol):
    """Makes hidden states narrower as soon as they are there, so that less is kept."""

    width: int

    def __call__(self, states: Tensor, /) -> Tensor:
        """(n, k·D) outputs of k blocks → (n, width)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks the target to record besides logits; the target records only that."""

    hidden_layers: tuple[int, ...] = ()
    """Outputs of these blocks, counted from 1, side by side for every position; before any final
    norm."""
    attention_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) pairs, both from 0: the attention of the last accepted position."""
    logits: bool = False
    """Logits of the root, the draft nodes and the probes."""
    fold: Fold | None = None
    """Makes of the hidden states what is kept; None: they are kept as they are."""
    why: str = field(default="", compare=False)
    """Where these choices come from, in a sentence for the user; empty: nothing to tell."""

    @property
    def taps(self) -> bool:
        """Whether anything beside logits must be recorded."""
        return bool(self.hidden_layers or self.attention_heads)


NO_NEEDS = Needs()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a drafter may know of a model before anything runs."""

    layers: int
    heads: int
    """Query heads per layer."""
    name: str = ""
    """Hub id or folder that its weights came from; empty for a model made in memory."""
    vocabulary: Callable[[], str | None] = field(default=lambda: None, compare=False)
    """Gives the fingerprint of its vocabulary (`text.vocab`), None where that is unknown.

    A function, since computing it takes a while and few drafters ask.
    """
    tokenizer: Any | None = field(default=None, compare=False)
    """Its Hugging Face tokenizer; None where it was loaded without one."""
    vocab_size: int = 0
    """V: width of its logits, padding ids included."""
    device: str = "cpu"
    """Where its input ids go."""
    shape: Shape = "tree"
    """The drafts that it can verify."""
    model: Any | None = field(default=None, compare=False)
    """The live model, for drafters that use its embeddings or its head; None: there is none."""


Weights = Callable[[Tensor], Tensor]
"""Positions (n,) → attention weights (heads, n) of one query; only what is asked is computed."""


@dataclass(frozen=True, slots=True)
class Taps:
    """What a target recorded for one row of T committed ids, the last of which has no state yet."""

    hidden: Tensor | None = None
    """(T-1, k·D) of k layers, or as wide as `Needs.fold` makes them; None: not asked for, or
    nothing was computed yet."""
    attention: Weights | None = None
    """Of the last position that has a state, which looks at the T-1 positions up to itself."""


NO_TAPS = Taps()


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one row got from a pass over its root, `n` draft nodes and `m` probe nodes."""

    logits: Tensor
    """(1+n+m, V); row 0 follows the root, row 1+i follows node i. (0, V): root not reached."""
    choices: Sequence[int] | None = None
    """(1+n) arg-max of each row, where the target knows it without computing logits."""
    finite: bool = True
    """False where a drafted token overflowed the model, so that no row means anything."""


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

    def open(self, ids: Sequence[int], needs: Needs = NO_NEEDS) -> RowT:
        """Add a sequence; nothing is computed yet. `ids` is not empty."""

    def prefill(self, row: RowT, rest: int = 1) -> None:
        """Compute `row.pending` but for its last token, or a `rest` of so many, in chunks."""

    def room(self, row: RowT) -> int:
        """How many positions beyond the root the next pass of this row may use (0: plain)."""

    def splits(self, row: RowT) -> bool:
        """Whether several passes may take its pending tokens; else one must take them all."""

    def forward(
        self,
        rows: Sequence[RowT],
        drafts: Sequence[Draft],
        take: Sequence[int] | None = None,
    ) -> list[RowOutput]:
        """One pass over each row's pending tokens and draft; the cache then awaits `commit`.

        `take`: of each row's pending tokens only so many, at least 1, where `splits` allows it. One
        that leaves some is a chunk: it has no draft, gives no logits, and is committed with an
        empty path and no tokens.
        """

    def taps(self, row: RowT) -> Taps:
        """What this row's needs recorded; views, valid until its next pass."""

    def wait(self) -> None:
        """Return when the last pass is really done; devices compute behind the program's back."""

    def commit(
        self,
        rows: Sequence[RowT],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Keep the nodes on each path, drop the others; the last emitted token becomes pending.

        `tokens[i]` are the tokens emitted by the step: one per node on `paths[i]`, and one more;
        none of a row whose pass was a chunk.
        """

    def extend(self, row: RowT, ids: Sequence[int], needs: Needs = NO_NEEDS) -> int:
        """Make `ids` the row's committed tokens, keeping the cache of the longest common prefix.

        Positions whose taps `needs` asks for, and nobody recorded, are not kept. Returns how many
        cached positions were.
        """

    def close(self, row: RowT) -> None:
        """Drop a sequence and its cache."""


def ahead(target: Target[Any], row: Row, whole: bool, rest: int) -> int:
    """Pending tokens for passes without a draft, in chunks; 0: a draft's pass takes them all.

    A `rest` of so many rides with a draft where masks are ours, unless the `whole` text is to be
    recorded first: the drafter looks at it.
    """
    riding = 1 if whole or target.shape != "tree" else rest
    left = len(row.pending)
    return left - 1 if left > riding and target.splits(row) else 0
