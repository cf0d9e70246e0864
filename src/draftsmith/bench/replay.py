"""Replay: feed a recorded answer to a drafter as if the target had just written it.

No model is needed, and the counts are exact for drafters that only look at token ids: the loop,
the verifier and the statistics are the real ones, only the target is a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Drafter
from draftsmith.core.loop import start, step
from draftsmith.core.result import Stats
from draftsmith.core.sampling import Dice, Law
from draftsmith.core.session import Session
from draftsmith.core.target import RowOutput, Shape

_NO_LOGITS = torch.empty((0, 0))


@dataclass(slots=True)
class ReplayRow:
    """How much of the recording was replayed."""

    pending: list[int]
    cached: int = 0
    answered: int = field(default=0)


class ReplayTarget:
    """A target that answers with a recording; one row."""

    shape: Shape = "tree"

    def __init__(self, answer: Sequence[int], vocab_size: int) -> None:
        self.answer = list(answer)
        self.vocab_size = vocab_size

    def open(self, ids: Sequence[int]) -> ReplayRow:
        return ReplayRow(list(ids))

    def prefill(self, row: ReplayRow) -> None:
        row.cached += len(row.pending) - 1
        del row.pending[:-1]

    def room(self, row: ReplayRow) -> int:
        return len(self.answer) - row.answered

    def forward(self, rows: Sequence[ReplayRow], drafts: Sequence[Draft]) -> list[RowOutput]:
        outputs = []
        for row, draft in zip(rows, drafts, strict=True):
            # A node off the recorded path is never reached, so its answer does not matter.
            depths = (0, *draft.node_depths()[: draft.size])
            last = len(self.answer) - 1
            choices = [self.answer[min(row.answered + depth, last)] for depth in depths]
            outputs.append(RowOutput(_NO_LOGITS, choices))
        return outputs

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

    def extend(self, row: ReplayRow, ids: Sequence[int]) -> int:
        row.cached, row.pending = 0, list(ids)
        return 0

    def close(self, row: ReplayRow) -> None:
        row.pending = []


def replay(
    prompt: Sequence[int], answer: Sequence[int], drafter: Drafter, vocab_size: int
) -> Stats:
    """What `drafter`, at its own width, would have saved on one recorded answer."""
    target = ReplayTarget(answer, vocab_size)
    session = Session(
        prompt,
        drafter=drafter,
        budget=FixedBudget(drafter.preferred_width()),
        law=Law((), greedy=True),
        chance=Dice.seeded(0),
        vocab_size=vocab_size,
        limit=len(answer),
    )
    start(session, target)
    while not session.finished:
        step([session], target)
    if session.ids[session.prompt_length :] != list(answer):
        raise AssertionError("the replay did not reproduce the recording")
    return session.stats
