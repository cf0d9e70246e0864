"""Our drafters in the loop of another engine that shows nothing but token ids.

This is `core/loop.py` in two halves: first it learns what the host emitted, then it makes the next
drafts. The host runs the passes, verifies chains, and may run, pause, preempt and drop requests in
any order.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.core.budget import FixedBudget
from draftsmith.core.cost import RecordedCost
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Drafter, sync
from draftsmith.core.loop import learn, propose
from draftsmith.core.sequence import Sequence
from draftsmith.core.stats import Stats
from draftsmith.core.target import ModelFacts, RowOutput, Shape
from draftsmith.core.verify import verify_choices
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.drafters.cascade import members
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.drafters.draft_model.slrs import StringRejection
from draftsmith.drafters.spectra import Spectra
from draftsmith.errors import UnsupportedError, first_line

OVERLAP = 8
"""Known ids compared with the host's in each step. If they differ, all ids are compared."""

_NO_LOGITS = torch.empty((0, 0), device="cpu")


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of a request."""

    prompt_length: int
    limit: int
    """Most new tokens."""
    prediction: tuple[int, ...] = ()
    salt: str = ""
    """Earlier answers are shared only between requests with the same salt."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request that got tokens in this step."""

    name: str
    record: object
    """The host's own object for the request. Another object under this name is another request."""
    ids: Any
    """(T,) all its committed ids, a NumPy array that is only valid during the call."""
    fresh: int
    """Number of ids that this step added."""
    scheduled: abc.Sequence[int]
    """Drafted tokens that were in the pass."""


@dataclass(slots=True)
class Hosted:
    """State of a request."""

    record: object
    sequence: Sequence
    draft: Draft = EMPTY
    """The last draft, until its verification is known."""
    failed: bool = False
    """Whether a failure of the drafter was reported."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A sequence's row in the host's cache, as far as drafting needs it."""

    sequence: Sequence

    @property
    def cached(self) -> int:
        return len(self.sequence.ids) - 1


class _Elsewhere:
    """Target with passes by the host. It has all that `core/loop.py:propose` reads of a target."""

    shape: Shape = "chain"

    def __init__(self, tokens: int, length: int) -> None:
        self.tokens, self.length = tokens, length

    def room(self, row: _Place) -> int:
        return min(self.tokens, self.length - row.cached - 2)


class Host:
    """The drafting states of all requests of another engine."""

    def __init__(
        self,
        drafter: Drafter,
        model: ModelFacts,
        tokens: int,
        length: int,
        *,
        cost: RecordedCost | None = None,
        answers: AnswerCache | None = None,
        warn: Callable[[str], None] = lambda _message: None,
    ) -> None:
        """Bind the drafter.

        `tokens`: most tokens of a draft. `length`: most tokens of a text, prompt included. `cost`:
        cost curve of automatic budgets; None: drafts are as long as drafters choose. `warn` is
        called with a message when a drafter fails. Raises UnsupportedError, OptionError or
        LoadError for a drafter that cannot be hosted.
        """
        refuse(drafter)
        # Without its name: calibrations by name may not exist on every rank's machine.
        self.drafter = drafter.bind(replace(model, name=""))
        refuse(self.drafter)  # what it was bound to may be unsupported, too
        self.drafter.needs_of(model)  # raises if its corpus was made for another model
        self.model, self.cost, self.answers, self.warn = model, cost, answers, warn
        self.stats = Stats()
        """Statistics of all requests."""
        self._target: Any = _Elsewhere(tokens, length)
        self._hosted: dict[str, Hosted] = {}
        # Only one branch of a tree is sent, so the tree may be wider than the pass allows.
        self._width = max(tokens, self.drafter.preferred_width())

    def keep(self, records: Mapping[str, object]) -> None:
        """End the requests that the host no longer has, whether answered or aborted."""
        gone = [name for name, one in self._hosted.items() if records.get(name) is not one.record]
        # Sorted, because the memory of answers must not depend on the order of a set.
        for name in sorted(gone):
            one = self._hosted.pop(name)
            one.sequence.end_drafter()
            one.sequence.close_drafter()
            self._notify(one)

    def draft(self, rows: abc.Sequence[Row], asked: Callable[[Row], Asked]) -> list[list[int]]:
        """Return a chain for each request of a step; call `keep` before.

        `asked` returns the options of a new request.
        """
        hosted = [self.follow(row, asked) for row in rows]
        sequences = [one.sequence for one in hosted]
        for one, draft in zip(hosted, propose(sequences, sequences, self._target), strict=True):
            one.draft = draft
            self._notify(one)
        return [list(one.draft.tokens[: one.draft.size]) for one in hosted]

    def _notify(self, one: Hosted) -> None:
        """Warn, once per request, that the drafter failed."""
        error = one.sequence.drafter_error or one.sequence.error
        if error is not None and not one.failed:
            one.failed = True
            self.warn(
                f"{self.drafter} failed, this request continues without drafts: {first_line(error)}"
            )

    def follow(self, row: Row, asked: Callable[[Row], Asked]) -> Hosted:
        """Learn the verification of a request's draft and its new tokens."""
        one = self._hosted.get(row.name)
        if one is None:
            one = self._hosted[row.name] = Hosted(row.record, self._open(row, asked(row)))
        sequence, known = one.sequence, len(one.sequence.ids)
        draft, one.draft = one.draft.clip(len(row.scheduled)), EMPTY
        if draft.tokens != tuple(row.scheduled):
            draft = EMPTY  # the host changed the draft
        start = max(0, known - OVERLAP)
        if row.ids[start:known].tolist() != sequence.ids[start:]:
            now, common = row.ids.tolist(), 0
            if sequence.state is not None:
                try:
                    common = sync(sequence.state, sequence.ids, now)
                except Exception as error:
                    sequence.disable_drafter(error)
            del sequence.ids[common:]
            sequence.ids += now[common:]
        elif len(row.ids) - known == row.fresh:
            _settle(sequence, draft, row.ids[known:].tolist())
        else:
            # The host ran steps without asking for drafts.
            sequence.ids += row.ids[known:].tolist()
        return one

    def _open(self, row: Row, asked: Asked) -> Sequence:
        cost, drafter = self.cost, self.drafter
        # Greedy: the host only gets the drafter's best tokens, whatever its sampling.
        sequence = Sequence(
            row.ids[: asked.prompt_length].tolist(),
            drafter=drafter,
            budget=FixedBudget(self._width) if cost is None else drafter.auto_budget(cost),
            vocab_size=self.model.vocab_size,
            limit=asked.limit,
            prediction=asked.prediction,
        )
        sequence.row = _Place(sequence)
        sequence.stats = self.stats
        if self.answers is not None:
            sequence.context.earlier = self.answers.of(asked.salt)
        sequence.open_drafter()
        return sequence


def _settle(sequence: Sequence, draft: Draft, tokens: abc.Sequence[int]) -> None:
    """Commit what a pass with `draft` emitted, and learn from it."""
    left = reversed(range(len(tokens)))
    verification = verify_choices(draft, tokens, lambda *_: not next(left))
    sequence.ids += tokens
    learn(sequence, draft, RowOutput(_NO_LOGITS, tokens), verification)


def refuse(drafter: Drafter) -> None:
    """Raise UnsupportedError for a drafter that needs more than token ids."""
    for member in members(drafter):
        if (why := _why_not(member)) is not None:
            raise UnsupportedError(f"{drafter} cannot be hosted by another engine: {why}")


def _why_not(drafter: Drafter) -> str | None:
    needs = drafter.needs
    if needs.hidden_layers:
        return "it needs hidden states, but the engine provides only token ids"
    if needs.attention_heads:
        return "it needs attention weights, but the engine provides only token ids"
    if needs.logits:
        hint = "; use spectra(pool=False)" if isinstance(drafter, Spectra) else ""
        return f"it reads the logits of probe tokens, but the engine provides only token ids{hint}"
    if drafter.shares_noise:
        return "with reproducible=True the target must sample with the drafter's noise"
    translate = getattr(drafter, "translate", None)
    if isinstance(drafter, BoundDraftModel) and getattr(translate, "func", None) is StringRejection:
        return (
            "slrs passes on the distribution of its proposals, but the engine takes only tokens; "
            "use algorithm='slem'"
        )
    return None
