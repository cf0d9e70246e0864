"""Replay: feed a recorded answer to a drafter as if the target had just written it.

No model is needed, and the counts are exact for drafters that only look at token ids: the loop,
the verifier and the statistics are the real ones, only the target is a recording.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftsmith.core.budget import Budget, FixedBudget
from draftsmith.core.cost import RecordedCost
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.session import Session
from draftsmith.core.stats import Stats
from draftsmith.core.target import NO_NEEDS, NO_TAPS, Needs, RowOutput, Shape, Taps
from draftsmith.errors import UnsupportedError

_NO_LOGITS = torch.empty((0, 0), device="cpu")

CONTEXT_BUCKET = 128
"""Passes are counted by context length in steps of so many tokens."""

Passes = Counter[tuple[int, int]]
"""(cached tokens, rounded to a bucket's middle; positions of the pass) → how many passes."""


_BEYOND = 1 << 20
"""A limit on new tokens that no draft reaches."""


def bucket(context: int) -> int:
    """The middle of the bucket of context lengths that `context` falls into."""
    return context // CONTEXT_BUCKET * CONTEXT_BUCKET + CONTEXT_BUCKET // 2


@dataclass(slots=True)
class ReplayRow:
    """How much of the recording was replayed."""

    pending: list[int]
    cached: int = 0
    answered: int = 0


class ReplayTarget:
    """A target that answers with a recording; one row."""

    shape: Shape = "tree"

    def __init__(self, answer: Sequence[int], vocab_size: int) -> None:
        self.answer = list(answer)
        self.vocab_size = vocab_size
        self.passes: Passes = Counter()

    def open(self, ids: Sequence[int], needs: Needs = NO_NEEDS) -> ReplayRow:  # noqa: ARG002
        return ReplayRow(list(ids))

    def prefill(self, row: ReplayRow, rest: int = 1) -> None:  # noqa: ARG002
        row.cached += len(row.pending) - 1
        del row.pending[:-1]

    def room(self, row: ReplayRow) -> int:  # noqa: ARG002
        return _BEYOND  # A live target does not know the end either.

    def splits(self, row: ReplayRow) -> bool:  # noqa: ARG002
        return False

    def forward(
        self,
        rows: Sequence[ReplayRow],
        drafts: Sequence[Draft],
        take: Sequence[int] | None = None,  # noqa: ARG002  always all
    ) -> list[RowOutput]:
        outputs = []
        for row, draft in zip(rows, drafts, strict=True):
            self.passes[bucket(row.cached), len(row.pending) + len(draft)] += 1
            # A node off the recorded path is never reached, so its answer does not matter.
            depths = (0, *draft.node_depths()[: draft.size])
            last = len(self.answer) - 1
            choices = [self.answer[min(row.answered + depth, last)] for depth in depths]
            outputs.append(RowOutput(_NO_LOGITS, choices))
        return outputs

    def wait(self) -> None:
        pass

    def commit(
        self,
        rows: Sequence[ReplayRow],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        for row, path, emitted in zip(rows, paths, tokens, strict=True):
            row.cached += len(row.pending) + len(path)
            row.answered += len(emitted)
            row.pending = [emitted[-1]]

    def taps(self, row: ReplayRow) -> Taps:  # noqa: ARG002
        return NO_TAPS  # `check` has refused whoever asks for some.

    def extend(self, row: ReplayRow, ids: Sequence[int], needs: Needs = NO_NEEDS) -> int:  # noqa: ARG002
        row.cached, row.pending = 0, list(ids)
        return 0

    def close(self, row: ReplayRow) -> None:
        row.pending = []


@dataclass(frozen=True, slots=True)
class ReplayBudget:
    """How many nodes a replayed step may spend: a fixed width, or what pays under a cost curve."""

    width: int | None = None
    """Nodes per step; None: the drafter's own width."""
    curve: tuple[tuple[int, float], ...] = ()
    """(draft nodes, seconds of a pass): decide like the engine's automatic budget would."""

    def for_drafter(self, drafter: Drafter) -> Budget:
        """The budget of one session."""
        own = drafter.preferred_width()
        if not self.curve or own == 0:
            return FixedBudget(own if self.width is None else self.width)
        return drafter.auto_budget(RecordedCost(dict(self.curve)))


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of one recorded answer."""

    stats: Stats
    passes: Passes
    """The histogram of passes by context and width, from which their cost follows."""
    origins: Sequence[int | None] = ()
    """Position that each token of the answer was copied from, if any; `as_dict` leaves it out."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        passes = [[*place, count] for place, count in sorted(self.passes.items())]
        return {"passes": passes, "stats": asdict(self.stats)}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Replay:
        """What `as_dict` made plain."""
        passes = {(context, positions): n for context, positions, n in entry["passes"]}
        return cls(Stats.from_dict(entry["stats"]), Counter(passes))


def check(drafter: Drafter) -> None:
    """Raise UnsupportedError for a drafter that needs more than token ids."""
    if drafter.needs != Needs():
        asked = {
            "hidden states": drafter.needs.hidden_layers,
            "attention rows": drafter.needs.attention_heads,
            "logits": drafter.needs.logits,
        }
        wanted = [name for name, value in asked.items() if value]
        raise UnsupportedError(
            f"{drafter} cannot be replayed: it looks at the model's {' and '.join(wanted)}, and a "
            "recording has token ids only; measure it with a model"
        )


def replay(
    prompt: Sequence[int],
    answer: Sequence[int],
    drafter: Drafter,
    vocab_size: int,
    budget: ReplayBudget | None = None,
    limit: int | None = None,
    earlier: object | None = None,
) -> Replay:
    """What `drafter`, at its own width or within `budget`, would have saved on a recorded answer.

    `limit` is the most new tokens that the recorded generation was allowed, where it is known:
    drafts end there. `earlier`: what is remembered of answers, which this one then joins. Raises
    UnsupportedError for drafters that need a model.
    """
    check(drafter)
    target = ReplayTarget(answer, vocab_size)
    session = Session(
        prompt,
        drafter=drafter,
        budget=(budget or ReplayBudget()).for_drafter(drafter),
        distribution=Distribution((), greedy=True),
        sampler=TorchSampler.seeded(0),
        vocab_size=vocab_size,
        # Nobody knows beforehand where an answer ends, so a draft may reach beyond it. One that was
        # cut at its limit and is tokenized anew may be longer: an end is put behind every text.
        limit=max(len(answer), limit or len(answer) + _BEYOND),
        stop_rules=(lambda own, _: "length" if own.generated >= len(answer) else None,),
    )
    session.context.earlier = earlier
    start(session, target)
    target.prefill(session.row)
    while not session.finished:
        step([session], target)
    session.end_drafter()
    if session.drafter_error is not None:
        raise session.drafter_error
    if session.ids[session.prompt_length :] != list(answer):
        raise AssertionError("the replay did not reproduce the recording")
    places = range(session.prompt_length, len(session.ids))
    return Replay(session.stats, target.passes, [session.origins.get(i) for i in places])
