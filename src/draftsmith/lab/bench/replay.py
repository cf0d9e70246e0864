"""Replay: give a recorded answer to a drafter as if the target had just written it.

No model is needed. The counts are exact for drafters that only read token ids, because the loop,
the verifier and the statistics are the real ones.
"""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from draftsmith.core.budget import Budget, FixedBudget
from draftsmith.core.cost import RecordedCost
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.sequence import Sequence
from draftsmith.core.stats import Stats
from draftsmith.core.target import NO_NEEDS, NO_TAPS, Needs, RowOutput, Shape, Taps
from draftsmith.drafters.cascade import members
from draftsmith.errors import UnsupportedError

_NO_LOGITS = torch.empty((0, 0), device="cpu")

CONTEXT_BUCKET = 128
"""Passes are counted by context length in steps of this many tokens."""

Passes = Counter[tuple[int, int]]
"""(cached tokens, rounded to a bucket's middle; positions of the pass) → number of passes."""


_BEYOND = 1 << 20
"""A limit on new tokens that no draft reaches."""


def bucket(context: int) -> int:
    """Return the middle of the bucket of context lengths that contains `context`."""
    return context // CONTEXT_BUCKET * CONTEXT_BUCKET + CONTEXT_BUCKET // 2


@dataclass(slots=True)
class ReplayRow:
    """Progress of a replay."""

    pending: list[int]
    cached: int = 0
    answered: int = 0


class ReplayTarget:
    """A target that answers with a recording; one row."""

    shape: Shape = "tree"

    def __init__(self, answer: abc.Sequence[int], vocab_size: int) -> None:
        self.answer = list(answer)
        self.vocab_size = vocab_size
        self.passes: Passes = Counter()

    def open(self, ids: abc.Sequence[int], needs: Needs = NO_NEEDS) -> ReplayRow:  # noqa: ARG002
        return ReplayRow(list(ids[-1:]), len(ids) - 1)  # the prompt is read at once

    def room(self, row: ReplayRow) -> int:  # noqa: ARG002
        return _BEYOND  # a live target does not know the end either

    def splits(self, row: ReplayRow) -> bool:  # noqa: ARG002
        return False

    def forward(
        self,
        rows: abc.Sequence[ReplayRow],
        drafts: abc.Sequence[Draft],
        take: abc.Sequence[int] | None = None,  # noqa: ARG002  always all
    ) -> list[RowOutput]:
        outputs = []
        for row, draft in zip(rows, drafts, strict=True):
            self.passes[bucket(row.cached), len(row.pending) + len(draft)] += 1
            # A node off the recorded path is never reached, so its choice does not matter.
            depths = (0, *draft.node_depths()[: draft.size])
            last = len(self.answer) - 1
            choices = [self.answer[min(row.answered + depth, last)] for depth in depths]
            outputs.append(RowOutput(_NO_LOGITS, choices))
        return outputs

    def commit(
        self,
        rows: abc.Sequence[ReplayRow],
        paths: abc.Sequence[abc.Sequence[int]],
        tokens: abc.Sequence[abc.Sequence[int]],
    ) -> None:
        for row, path, emitted in zip(rows, paths, tokens, strict=True):
            row.cached += len(row.pending) + len(path)
            row.answered += len(emitted)
            row.pending = [emitted[-1]]

    def taps(self, row: ReplayRow) -> Taps:  # noqa: ARG002
        return NO_TAPS  # `check` refuses drafters that need some

    def close(self, row: ReplayRow) -> None:
        row.pending = []


@dataclass(frozen=True, slots=True)
class ReplayBudget:
    """Nodes per replayed step: a fixed width, or what pays under a cost curve."""

    width: int | None = None
    """Nodes per step; None: the drafter's own width."""
    curve: tuple[tuple[int, float], ...] = ()
    """(draft nodes, seconds of a pass): decide like the engine's automatic budget."""

    def for_drafter(self, drafter: Drafter) -> Budget:
        """Return the budget of one sequence."""
        own = drafter.preferred_width()
        if not self.curve or own == 0:
            return FixedBudget(own if self.width is None else self.width)
        return drafter.auto_budget(RecordedCost(dict(self.curve)))


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of replaying one recorded answer."""

    stats: Stats
    passes: Passes
    """Histogram of passes by context and width, from which their cost follows."""
    origins: abc.Sequence[int | None] = ()
    """Position from which each token of the answer was copied, or None; not in `as_dict`."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        passes = [[*place, count] for place, count in sorted(self.passes.items())]
        return {"passes": passes, "stats": asdict(self.stats)}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Replay:
        """Read what `as_dict` returned."""
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
            f"{drafter} cannot be replayed: it needs the model's {' and '.join(wanted)}, but a "
            "recording has only token ids; measure it with a model"
        )
    for member, name in product(members(drafter), ("bind", "needs_of")):
        if not getattr(type(member), name).__module__.startswith("draftsmith."):
            raise UnsupportedError(
                f"{member} cannot be replayed: its {name} asks a model, but a recording has none; "
                "measure it with a model"
            )


def replay(
    prompt: abc.Sequence[int],
    answer: abc.Sequence[int],
    drafter: Drafter,
    vocab_size: int,
    budget: ReplayBudget | None = None,
    limit: int | None = None,
    earlier: object | None = None,
) -> Replay:
    """Count the passes that `drafter` would have saved on a recorded answer.

    It drafts within `budget`, or at its own width. `limit` is the most new tokens of the recorded
    generation, if known: drafts end there. `earlier` is the memory of answers, to which this one is
    added. Raises UnsupportedError for drafters that need a model.
    """
    check(drafter)
    target = ReplayTarget(answer, vocab_size)
    sequence = Sequence(
        prompt,
        drafter=drafter,
        budget=(budget or ReplayBudget()).for_drafter(drafter),
        distribution=Distribution((), greedy=True),
        sampler=TorchSampler.seeded(0),
        vocab_size=vocab_size,
        # The end of an answer is not known in advance, so a draft may reach beyond it. An answer
        # that was cut at its limit and is encoded again may be longer, because every text gets an
        # end.
        limit=max(len(answer), limit or len(answer) + _BEYOND),
        stop_rules=(lambda own, _: "length" if own.generated >= len(answer) else None,),
    )
    sequence.context.earlier = earlier
    start(sequence, target)
    while not sequence.finished:
        step([sequence], target)
    sequence.end_drafter()
    for error in (sequence.error, sequence.drafter_error):
        if error is not None:
            raise error
    if sequence.ids[sequence.prompt_length :] != list(answer):
        raise AssertionError("the replay did not reproduce the recording")
    return Replay(sequence.stats, target.passes, sequence.origins)
