"""What a drafter is, what it may see, and what it is told.

A drafter's *configuration* is a frozen dataclass (`Drafter`), named after the paper, its fields the
paper's symbols. Its *state* for one sequence (`DrafterState`) is made by `open`. Neither knows
our engine: a state follows token ids, so another host can drive it just as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from draftsmith.core.budget import AutoBudget, Budget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import Draft
from draftsmith.core.sampling import Gumbel, Sampler, SamplingParams
from draftsmith.core.target import NO_NEEDS, ModelFacts, Needs, RowOutput, Weights
from draftsmith.core.verify import Verdict


@dataclass(slots=True)
class Context:
    """What a drafter may see of one sequence. `ids` only ever grows, unless `truncate` says so."""

    ids: Sequence[int]
    """Committed token ids, prompt and output."""
    prompt_length: int
    vocab_size: int
    sampling: SamplingParams
    sampler: Sampler
    """The drafter's own randomness; the target's draws never come from it."""
    noise: Gumbel | None = None
    """What the target draws with, where its drafter shares it (`Drafter.shares_noise`).

    To foresee draws by, and never to draw a sampled node from: `prompt_length + n` is the position
    of the n-th draw.
    """
    prediction: tuple[int, ...] = ()
    """Ids of a text that the answer is expected to resemble."""
    earlier: object | None = None
    """What requests share of earlier answers, for the drafter that knows what it is."""
    grammar: object | None = None
    """What the answer must be, for the drafter that knows what it is."""
    budget: int = 0
    """Target positions this step may spend: draft and probe nodes together."""
    depth: int = 0
    """Nodes deeper than this cannot be emitted any more."""
    cost: CostCurve | None = None
    """What passes cost, for a drafter that divides an automatic budget itself; else None."""
    hidden: Tensor | None = None
    """(T-1, k·D) states of the k `Needs.hidden_layers`, or what `Needs.fold` made of them; a view
    to be read in `draft` only.

    The last of the T ids has none yet. None where the target has recorded none.
    """
    attention: Weights | None = None
    """Positions (n,) from 0 to T-2 → weights (heads, n) of the last id that has a state.

    One row for each of `Needs.attention_heads`, in that order; None as for `hidden`.
    """


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the draft: for `DrafterState.observe`."""

    draft: Draft
    verdict: Verdict
    output: RowOutput


class DrafterState(ABC):
    """One sequence's drafting state."""

    @abstractmethod
    def draft(self, ctx: Context) -> Draft:
        """At most `ctx.budget` nodes that may follow `ctx.ids`; an empty draft decodes plainly."""

    def observe(self, ctx: Context, outcome: Outcome) -> None:  # noqa: B027  optional by design
        """Learn from the step; `ctx.ids` already holds the emitted tokens. Optional."""

    def end(self, ctx: Context) -> None:  # noqa: B027
        """The answer has ended, or was cancelled: keep of it what later requests may use. Optional.

        Not called where something failed. The state may yet serve the next turn of a chat.
        """

    def truncate(self, length: int) -> None:  # noqa: B027
        """Forget every id at or beyond `length`: the host rewound the sequence."""

    def close(self) -> None:  # noqa: B027
        """The sequence ended for good."""


@dataclass(frozen=True, eq=False)
class Drafter(ABC):
    """A drafter's configuration; subclasses are frozen dataclasses and hashable.

    Those that are not, or that say eq=False, are told apart by identity.
    """

    name: ClassVar[str]
    """What one types: `copyspec`."""
    summary: ClassVar[str] = ""
    """One line for `draftsmith drafters`."""
    needs: ClassVar[Needs] = NO_NEEDS
    """What it asks the target to record; where that depends on options, an example of it."""
    sampled: ClassVar[bool] = False
    """Whether its drafts carry distributions (`proposals`); guess drafters keep same-seed
    equality."""
    shares_noise: ClassVar[bool] = False
    """Whether the target shall draw with noise that this drafter can foresee, `Context.noise`."""
    width: ClassVar[int] = 16
    """Nodes it would draft if nobody set a budget."""

    def bind(self, model: ModelFacts) -> Drafter:  # noqa: ARG002
        """The drafter for this very model; another one than itself where it loads or compares.

        Hosts call it once per model, before `needs_of` and `open`. The bound drafter prints, and
        names its drafts, like this one. Raises OptionError, UnsupportedError or LoadError where
        the two do not go together.
        """
        return self

    @abstractmethod
    def open(self, ctx: Context) -> DrafterState:
        """State for a new sequence whose ids so far are `ctx.ids`."""

    def needs_of(self, model: ModelFacts) -> Needs:  # noqa: ARG002
        """What it asks of this very model; overridden where options or calibration decide.

        Raises OptionError where the options do not fit the model.
        """
        return self.needs

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        """Drafts for the sequences of one step; overridden where one model call serves all."""
        return [state.draft(ctx) for state, ctx in zip(states, contexts, strict=True)]

    def preferred_width(self) -> int:
        """Nodes per step at a fixed budget; the paper's block length where there is one."""
        return self.width

    def auto_budget(self, cost: CostCurve) -> Budget:
        """The automatic budget of one sequence; overridden where several drafters share it."""
        return AutoBudget(cost, self.preferred_width(), reach=self.reach, drafter=self)

    def reach(self, width: int) -> int:
        """How deep a draft of `width` nodes goes at most; less where nodes go beside or to probes.

        What the automatic budget weighs the width by.
        """
        return width

    def bytes_for(self, positions: int) -> int:
        """Most bytes that its state of a sequence of so many tokens may hold.

        By default what an index of the text's last few n-grams takes in Python.
        """
        return 1024 * positions

    def __str__(self) -> str:
        """What one types to get this drafter: `copyspec(gamma=3, block=10)`."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{self.name}({options})"

    __repr__ = __str__


def sync(state: DrafterState, before: Sequence[int], now: Sequence[int]) -> int:
    """Tell `state` that the ids changed from `before` to `now`; returns the common prefix.

    For hosts that hand over nothing but token ids.
    """
    common = common_prefix(before, now)
    if common < len(before):
        state.truncate(common)
    return common


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix."""
    limit, start, stride = min(len(a), len(b)), 0, 256
    # Slices compare without a Python step per item: what is long is equal almost to its end.
    while start < limit and a[start : start + stride] == b[start : start + stride]:
        start += stride
    return next((i for i in range(start, limit) if a[i] != b[i]), limit)
