"""Our drafters under another engine's loop, which tells nothing but token ids.

It is `core/loop.py` cut in two: what the host emitted is learnt first, then the next drafts are
made. The host makes the passes, verifies chains, and may run, pause, preempt and drop requests in
any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.core.budget import FixedBudget
from draftsmith.core.cost import RecordedCost
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Drafter, sync
from draftsmith.core.loop import learn, propose
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.session import Session
from draftsmith.core.stats import Stats
from draftsmith.core.target import ModelFacts, RowOutput, Shape
from draftsmith.core.verify import verify_greedy
from draftsmith.drafters.answer_cache import AnswerCache
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.drafters.draft_model.slrs import StringRejection
from draftsmith.drafters.spectra import Spectra
from draftsmith.errors import UnsupportedError, first_line

OVERLAP = 8
"""Known ids that are compared with the host's each step; where they differ, all of them are."""

_NO_LOGITS = torch.empty((0, 0), device="cpu")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

    prompt_length: int
    limit: int
    """Most new tokens."""
    prediction: tuple[int, ...] = ()
    salt: str = ""
    """Earlier answers are shared with requests of the same salt only."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request that got tokens in this step."""

    name: str
    record: object
    """The host's own object for it; another one under this name is another request."""
    ids: Any
    """(T,) all its committed ids, a NumPy array; read before the host goes on, never kept."""
    fresh: int
    """How many of them came with this step."""
    scheduled: Sequence[int]
    """The drafted tokens that were in the pass."""


@dataclass(slots=True)
class Hosted:
    """A request as it is followed here."""

    record: object
    session: Session
    draft: Draft = EMPTY
    """What was drafted last, until it is known what became of it."""
    failed: bool = False
    """Whether it was told that the drafter failed."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A session's row in the host's cache, as far as drafting asks."""

    session: Session

    @property
    def cached(self) -> int:
        return len(self.session.ids) - 1


class _Elsewhere:
    """A target whose passes the host makes; all that `core/loop.py:propose` asks of one."""

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
        """`tokens`: most of a draft. `length`: most of a text, prompt included.

        `cost`: by which automatic budgets decide; None: drafts are as long as drafters like.
        `warn`: is told of drafters that fail. Raises UnsupportedError, OptionError or LoadError for
        a drafter that cannot be hosted.
        """
        refuse(drafter)
        # Without its name: what was learnt of it and kept here is not on every rank's machine.
        self.drafter = drafter.bind(replace(model, name=""))
        refuse(self.drafter)  # what it was bound to decides, too
        self.drafter.needs_of(model)  # raises where its corpus was made for another model
        self.model, self.cost, self.answers, self.warn = model, cost, answers, warn
        self.stats = Stats()
        """Of all requests together."""
        self._target: Any = _Elsewhere(tokens, length)
        self._hosted: dict[str, Hosted] = {}
        # Of a tree one branch is sent, so it may be larger than what the pass takes.
        self._width = max(tokens, self.drafter.preferred_width())

    def keep(self, records: Mapping[str, object]) -> None:
        """End the requests that the host has no more, whether they were answered or aborted."""
        gone = [name for name, one in self._hosted.items() if records.get(name) is not one.record]
        for name in sorted(gone):  # what is remembered of answers must not depend on a set's order
            one = self._hosted.pop(name)
            one.session.end_drafter()
            one.session.close_drafter()
            self._tell(one)

    def draft(self, rows: Sequence[Row], asked: Callable[[Row], Asked]) -> list[list[int]]:
        """Drafts for the requests of a step, each a chain; `asked` is called for new ones."""
        hosted = [self.follow(row, asked) for row in rows]
        sessions = [one.session for one in hosted]
        for one, draft in zip(hosted, propose(sessions, sessions, self._target), strict=True):
            one.draft = draft
            self._tell(one)
        return [list(one.draft.tokens[: one.draft.size]) for one in hosted]

    def _tell(self, one: Hosted) -> None:
        """Warn, once for a request, that the drafter failed."""
        error = one.session.drafter_error or one.session.error
        if error is not None and not one.failed:
            one.failed = True
            self.warn(f"{self.drafter} failed, this request goes on plainly: {first_line(error)}")

    def follow(self, row: Row, asked: Callable[[Row], Asked]) -> Hosted:
        """Learn what became of a request's draft, and which tokens it has got since."""
        one = self._hosted.get(row.name)
        if one is None or one.record is not row.record:
            one = self._hosted[row.name] = Hosted(row.record, self._open(row, asked(row)))
        session, known = one.session, len(one.session.ids)
        draft, one.draft = one.draft.clip(len(row.scheduled)), EMPTY
        if draft.tokens != tuple(row.scheduled):
            draft = EMPTY  # somebody else's: the host makes some up where ours cannot fit
        start = max(0, known - OVERLAP)
        if row.ids[start:known].tolist() != session.ids[start:]:
            now = row.ids.tolist()
            common = 0 if session.state is None else sync(session.state, session.ids, now)
            del session.ids[common:]
            session.ids += now[common:]
        elif len(row.ids) - known == row.fresh:
            _settle(session, draft, row.ids[known:].tolist())
        else:
            session.ids += row.ids[known:].tolist()  # of steps that nobody was asked in
        return one

    def _open(self, row: Row, asked: Asked) -> Session:
        cost, drafter = self.cost, self.drafter
        session = Session(
            row.ids[: asked.prompt_length].tolist(),
            drafter=drafter,
            budget=FixedBudget(self._width) if cost is None else drafter.auto_budget(cost),
            # A guess is a guess: whatever the host samples by, the drafter's best token is sent.
            distribution=Distribution((), greedy=True),
            sampler=TorchSampler.seeded(0),
            vocab_size=self.model.vocab_size,
            limit=asked.limit,
            prediction=asked.prediction,
        )
        session.row = _Place(session)
        session.stats = self.stats
        if self.answers is not None:
            session.context.earlier = self.answers.of(asked.salt)
        session.open_drafter()
        return session


def _settle(session: Session, draft: Draft, tokens: Sequence[int]) -> None:
    """Commit what a pass with `draft` emitted, and learn from it."""
    left = reversed(range(len(tokens)))
    verdict = verify_greedy(draft, tokens, lambda *_: not next(left))
    session.ids += tokens
    learn(session, draft, RowOutput(_NO_LOGITS, tokens), verdict)


def refuse(drafter: Drafter) -> None:
    """Raise UnsupportedError for a drafter that needs more than token ids."""
    why = _why_not(drafter)
    if why is not None:
        raise UnsupportedError(f"{drafter} cannot be hosted by another engine: {why}")


def _why_not(drafter: Drafter) -> str | None:
    if isinstance(drafter, Cascade):
        reasons = (_why_not(one) for one in drafter.drafters)
        return next((why for why in reasons if why is not None), None)
    needs = drafter.needs
    if needs.hidden_layers:
        return "it looks at hidden states, and only token ids are handed over"
    if needs.attention_heads:
        return "it looks at attention weights, and only token ids are handed over"
    if needs.logits:
        hint = "; spectra(pool=False) does without" if isinstance(drafter, Spectra) else ""
        return (
            f"it asks by probe tokens and reads their logits; only token ids are handed over{hint}"
        )
    if drafter.shares_noise:
        return "with reproducible=True the target would have to draw with the drafter's noise"
    translate = getattr(drafter, "translate", None)
    if isinstance(drafter, BoundDraftModel) and getattr(translate, "func", None) is StringRejection:
        return (
            "slrs is about the distribution of its proposals, which is not handed over; "
            "use algorithm='slem'"
        )
    return None
