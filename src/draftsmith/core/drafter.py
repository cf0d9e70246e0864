"""Drafters: configuration (`Drafter`), state of one sequence (`DrafterState`), and their inputs.

A `Drafter` is a frozen dataclass named after its paper; its fields are the paper's symbols. `open`
creates its state for one sequence. Neither depends on our engine: a state follows token ids, so
other engines can use it, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from draftsmith.core.budget import AutoBudget, Budget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import Draft
from draftsmith.core.sampling import Gumbel, Sampler, SamplingParams
from draftsmith.core.target import NO_NEEDS, ModelFacts, Needs, RowOutput, Weights
from draftsmith.core.verify import Verification


@dataclass(slots=True)
class Context:
    """One sequence as its drafter sees it. `ids` only grows, except before a call of `truncate`."""

    ids: Sequence[int]
    """Committed token ids, prompt and output."""
    prompt_length: int
    """Number of `ids` that belong to the prompt."""
    vocab_size: int
    """V, the width of the target's logits: ids of a draft are below it."""
    sampling: SamplingParams
    """How the target's tokens are drawn."""
    sampler: Sampler
    """Random numbers for the drafter, separate from those of the target's draws."""
    noise: Gumbel | None = None
    """The target's sampler, if the drafter shares its noise (`Drafter.shares_noise`); else None.

    Use it to predict the target's draws, never to draw a sampled node. `prompt_length + n` is the
    position of the n-th draw.
    """
    prediction: tuple[int, ...] = ()
    """Ids of a text that the answer is expected to resemble."""
    earlier: object | None = None
    """Store of earlier answers that requests share, for drafters that know its type."""
    grammar: object | None = None
    """State of the grammar that the answer must follow, for drafters that know its type."""
    budget: int = 0
    """Maximum number of nodes for this step, draft and probe nodes together."""
    depth: int = 0
    """Largest useful depth of a node: deeper nodes cannot be emitted."""
    cost: CostCurve | None = None
    """Cost of passes, if the budget is automatic; else None."""
    hidden: Tensor | None = None
    """(T-1, k·D) states of the k `Needs.hidden_layers`, or the result of `Needs.fold`; a view that
    is valid during `draft` only.

    The last of the T ids has no state yet. None if the target has recorded no states.
    """
    attention: Weights | None = None
    """Positions (n,) from 0 to T-2 → attention weights (heads, n) of the last id with a state.

    The heads are those of `Needs.attention_heads`, in that order. None if not recorded.
    """


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a verified draft, for `DrafterState.observe`."""

    draft: Draft
    verification: Verification
    output: RowOutput


class DrafterState(ABC):
    """Drafting state of one sequence."""

    @abstractmethod
    def draft(self, ctx: Context) -> Draft:
        """Return at most `ctx.budget` nodes that may follow `ctx.ids`; an empty draft is
        allowed."""

    def observe(self, ctx: Context, outcome: Outcome) -> None:  # noqa: B027  optional by design
        """Learn from the step; `ctx.ids` already holds the emitted tokens. Optional."""

    def end(self, ctx: Context) -> None:  # noqa: B027
        """Store what later requests may use of the answer, which ended or was cancelled. Optional.

        Not called after an error. The state may continue with the next turn of a chat.
        """

    def truncate(self, length: int) -> None:  # noqa: B027
        """Drop all ids at positions >= `length`: the sequence was rewound."""

    def close(self) -> None:  # noqa: B027
        """Release what the state holds: the sequence has ended."""


@dataclass(frozen=True, eq=False)
class Drafter(ABC):
    """Configuration of a drafter; subclasses are frozen dataclasses and hashable.

    Configurations with eq=False are compared by identity.
    """

    name: ClassVar[str]
    """Name by which users select the drafter: `copyspec`."""
    summary: ClassVar[str] = ""
    """One line for `draftsmith drafters`."""
    needs: ClassVar[Needs] = NO_NEEDS
    """What the target must record; an example if that depends on options (see `needs_of`)."""
    sampled: ClassVar[bool] = False
    """Whether its drafts contain samples (`proposals`). Drafters that only guess keep the tokens of
    a seed."""
    shares_noise: ClassVar[bool] = False
    """Whether the target should draw with noise that the drafter can predict (`Context.noise`)."""
    width: ClassVar[int] = 16
    """`preferred_width` of a drafter without an option for it; 0: it never drafts."""

    def bind(self, model: ModelFacts) -> Drafter:  # noqa: ARG002
        """Return the drafter for this model; a different object if it loads or compares something.

        Hosts call this once per model, before `needs_of` and `open`. The bound drafter has the same
        `str` and the same source names as this one. Raises OptionError, UnsupportedError or
        LoadError if drafter and model do not fit together.
        """
        return self

    @abstractmethod
    def open(self, ctx: Context) -> DrafterState:
        """Create the state for a new sequence with the ids `ctx.ids`."""

    def needs_of(self, model: ModelFacts) -> Needs:  # noqa: ARG002
        """Return what the target must record for this model; override if options decide.

        Raises OptionError if the options do not fit the model.
        """
        return self.needs

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        """Draft for all sequences of a step; override if one model call can serve all."""
        return [state.draft(ctx) for state, ctx in zip(states, contexts, strict=True)]

    def preferred_width(self) -> int:
        """Return the nodes per step for `budget="drafter"`, which are also the most for "auto"."""
        return self.width

    def auto_budget(self, cost: CostCurve) -> Budget:
        """Create the automatic budget of one sequence; override to divide it between drafters."""
        return AutoBudget(cost, self.preferred_width(), reach=self.reach, drafter=self)

    def reach(self, width: int) -> int:
        """Return the maximum depth of a draft with `width` nodes; smaller with branches or probes.

        The automatic budget uses it to estimate the accepted tokens of a width.
        """
        return width

    def bytes_for(self, positions: int) -> int:
        """Return the maximum size, in bytes, of its state for a sequence of `positions` tokens.

        The default is the size of a Python index of the last few n-grams of the text.
        """
        return 1024 * positions

    def __str__(self) -> str:
        """Return the specification that selects this drafter: `copyspec(gamma=3, block=10)`."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{self.name}({options})"

    __repr__ = __str__


@dataclass(eq=False)
class Stateless(DrafterState):
    """State of a drafter that keeps nothing between steps: it drafts `propose(ctx)`."""

    propose: Callable[[Context], Draft]

    def draft(self, ctx: Context) -> Draft:
        return self.propose(ctx)


@dataclass(frozen=True, repr=False)
class Scripted(Drafter):
    """A drafter that drafts `propose(ctx)`, for measurements and tests."""

    propose: Callable[[Context], Draft]

    name: ClassVar[str] = "scripted"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return Stateless(self.propose)

    def bytes_for(self, positions: int) -> int:  # noqa: ARG002
        return 0


def sync(state: DrafterState, before: Sequence[int], now: Sequence[int]) -> int:
    """Rewind `state` after its ids changed from `before` to `now`; return the common prefix length.

    For hosts that pass token ids only.
    """
    common = common_prefix(before, now)
    if common < len(before):
        state.truncate(common)
    return common


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    limit, start, stride = min(len(a), len(b)), 0, 256
    # Slices compare without a Python step per item; long sequences mostly differ near the end.
    while start < limit and a[start : start + stride] == b[start : start + stride]:
        start += stride
    return next((i for i in range(start, limit) if a[i] != b[i]), limit)
