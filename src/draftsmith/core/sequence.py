"""Sequence: ids, distribution, random numbers, stop rules and statistics of one sequence."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from traceback import format_tb
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.budget import Budget, FixedBudget
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.sampling import (
    GREEDY,
    Distribution,
    Gumbel,
    Sampler,
    SamplingParams,
    TorchSampler,
)
from draftsmith.core.stats import TARGET, Guess, Stats
from draftsmith.core.target import NO_NEEDS, Needs
from draftsmith.errors import DrafterStalled, OptionError, UnsupportedError, first_line

StopRule = Callable[["Sequence", Tensor | None], "str | None"]
"""Called after each emitted token, which is the last of `sequence.ids`; returns a finish reason or
None."""

DRAFTER_FAILED = "the drafter failed; the rest of the answer is decoded plainly"
TOGETHER = "drafting for several answers at once failed and was repeated for each answer alone"
NOT_CLOSED = "closing the drafter's state failed"
OF_DRAFTER = (DRAFTER_FAILED, TOGETHER, NOT_CLOSED)
"""Notices about errors of drafters, which may be third-party code."""


def end_rule(ids: abc.Iterable[int]) -> StopRule:
    """Return the stop rule for end-of-sequence ids."""
    ends = frozenset(ids)
    return lambda sequence, _scores: "stop" if sequence.ids[-1] in ends else None


@dataclass(slots=True)
class Stalls:
    """Number of answers that skip a drafter which delayed passes: 0, 1, 3, 7, …

    The drafter is always tried again, but one that stays slow delays few of many answers. All
    sequences of a bound drafter share one object. It has no reference to the drafter, so it keeps
    no weights alive.
    """

    in_a_row: int = 0
    """Passes that the drafter has delayed in a row."""
    skips_left: int = 0
    """Answers that skip the drafter before it is used again."""

    def add(self) -> None:
        """Count a delayed pass."""
        self.in_a_row, self.skips_left = self.in_a_row + 1, 2**self.in_a_row - 1

    def skip(self) -> DrafterStalled | None:
        """Return why a new answer must skip the drafter; None: it may use it."""
        if not self.skips_left:
            return None
        self.skips_left -= 1
        return DrafterStalled(
            f"it delayed the last {self.in_a_row} passes that used it; it is used again after "
            f"{self.skips_left} more answers"
        )


class Sequence:
    """State of one sequence between steps."""

    def __init__(
        self,
        ids: abc.Sequence[int],
        *,
        drafter: Drafter,
        budget: Budget,
        vocab_size: int,
        limit: int,
        distribution: Distribution = GREEDY,
        sampler: Sampler | None = None,
        stop_rules: abc.Sequence[StopRule] = (),
        sampling: SamplingParams | None = None,
        prediction: abc.Sequence[int] = (),
        needs: Needs = NO_NEEDS,
        draft_seed: int | None = None,
        device: str | torch.device = "cpu",
        padding: abc.Sequence[int] = (),
        stalls: Stalls | None = None,
    ) -> None:
        self.ids = list(ids)
        self.padding = list(padding)
        """Ids that processors and stop rules see before `ids`: the padding of `generate`."""
        self.prompt_length = len(self.ids)
        self.drafter = drafter
        self.budget = budget
        self.distribution = distribution
        self.sampler = sampler or TorchSampler()
        self.limit = limit
        """Maximum number of new tokens; drafts never exceed it."""
        self.needs = needs
        """Recordings of the target for the drafter (`Drafter.needs_of`)."""
        self.stop_rules = tuple(stop_rules)
        self.device = torch.device(device)
        self.row: Any = None
        """Its row in the target, of the target's row type; None before `start` and after the
        end."""
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        """Error that ended it; None if a stop rule did."""
        self.drafter_error: Exception | None = None
        """Error for which its drafter was disabled."""
        self.failures: dict[tuple[str, str], str] = {}
        """(failure, error type) → notice, for failures that did not end the answer."""
        self.stalls = stalls or Stalls()
        self.drafting_seconds = 0.0
        """Seconds of drafting for the last pass, for all sequences of its drafter together."""
        self.sources: list[str] = []
        """Source of each new token."""
        self.drafts: list[tuple[Guess, ...]] | None = None
        """Drafts of its passes, if the caller collects them; None: they are not recorded."""
        self.logprobs: list[float] | None = None
        self.origins: list[int | None] = []
        """Position in `ids` from which each new token was copied; None: it was not copied."""
        self.stats = Stats(prompt_tokens=self.prompt_length)
        self._tensor = torch.empty((1, 0), dtype=torch.long, device=self.device)
        self._tensor_length = 0
        self.context = Context(
            ids=self.ids,
            prompt_length=self.prompt_length,
            vocab_size=vocab_size,
            sampling=sampling or SamplingParams(),
            # Separate from the target's draws: a seed gives the same tokens with any drafter.
            sampler=TorchSampler.seeded(draft_seed, self.device),
            noise=sampler if isinstance(sampler, Gumbel) else None,
            prediction=tuple(prediction),
            cost=budget.cost,
        )
        self.state: DrafterState | None = None

    @property
    def generated(self) -> int:
        """Number of new tokens; 0 while the prompt is being read."""
        return len(self.ids) - self.prompt_length

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """End with an error; emitted tokens stay."""
        self.error, self.finish_reason = error, "error"

    def note(self, what: str, error: Exception) -> None:
        """Store a notice of a failure, one per kind of error.

        The error itself is not stored: its traceback holds the tensors of the pass.
        """
        kind = type(error).__name__
        self.failures.setdefault((what, kind), f"{what} ({kind}: {first_line(error)})")

    def pass_failed(self, what: str, error: Exception) -> None:
        """Count a pass that is repeated with less of this sequence, and note the reason."""
        self.stats.failed_passes += 1
        self.note(what, error)

    def open_drafter(self) -> None:
        """Open the drafter's state if it is not open; an error disables the drafter.

        An OptionError or UnsupportedError ends the sequence instead, because the caller can fix it.
        """
        if self.state is None and self.drafter_error is None:
            if (stalled := self.stalls.skip()) is not None:
                self.disable_drafter(stalled)
                return
            try:
                self.state = self.drafter.open(self.context)
            except (OptionError, UnsupportedError) as error:
                self.fail(error)
            except Exception as error:
                self.disable_drafter(error)

    def disable_drafter(self, error: Exception) -> None:
        """Disable the drafter after `error`; the sequence decodes plainly from here on."""
        self.stats.drafter_failures += 1
        self.drafter_error = without_frames(error)
        self.note(DRAFTER_FAILED, error)
        self.budget = FixedBudget(0)
        self.close_drafter()

    def end_drafter(self) -> None:
        """Call `end` of the drafter's state, unless the sequence failed."""
        if self.state is not None and self.error is None:
            try:
                self.state.end(self.context)
            except Exception as error:
                self.disable_drafter(error)

    def close_drafter(self) -> None:
        """Close the drafter's state if it is open; count a failure to close it."""
        state, self.state = self.state, None
        if state is not None:
            try:
                state.close()
            except Exception as error:
                self.stats.drafter_failures += 1
                self.drafter_error = self.drafter_error or error
                self.note(NOT_CLOSED, error)

    def settle_failed(self) -> None:
        """Attribute the tokens of a failed pass to the target and count the pass."""
        if self.logprobs is not None:
            del self.logprobs[self.generated :]  # an entry of a token that was not emitted
        missing = self.generated - len(self.sources)
        self.origins += [None] * missing
        self.sources += [TARGET] * missing
        self.stats.passes += missing > 0
        self.stats.tokens += missing

    @torch.inference_mode(False)  # a caller's mode must not decide where it can be written
    def prefix(self) -> Tensor:
        """Return (1, padding + T) ids as a tensor for processors; a view that grows in place."""
        length = len(self.padding) + len(self.ids)
        if self._tensor.shape[1] < length:
            self._tensor = self._tensor.new_empty((1, max(256, 2 * length)))
            self._tensor_length = 0
        if self._tensor_length < length:
            shown = [*self.padding, *self.ids] if self._tensor_length == 0 else self.ids
            news = torch.tensor(shown[self._tensor_length - length :], device=self.device)
            self._tensor[0, self._tensor_length : length] = news
            self._tensor_length = length
        return self._tensor[:, :length]

    def emit(self, token: int, scores: Tensor | None) -> bool:
        """Commit one token and call the stop rules; return whether the sequence ends with it."""
        if self.logprobs is not None and scores is not None:
            self.logprobs.append(float(scores[0].log_softmax(-1)[token]))
        self.ids.append(token)
        reasons = (rule(self, scores) for rule in self.stop_rules)
        self.finish_reason = next((reason for reason in reasons if reason), None)
        if self.finish_reason is None and self.generated >= self.limit:
            self.finish_reason = "length"
        return self.finished


def without_frames(error: Exception) -> Exception:
    """Keep the traceback as a note only: its frames hold the tensors of the pass."""
    if error.__traceback__ is not None:
        error.add_note("".join(format_tb(error.__traceback__)))
    return error.with_traceback(None)
