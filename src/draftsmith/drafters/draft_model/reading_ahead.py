"""Reading ahead: a draft model that copies reads several predicted tokens in one pass.

Ours, without a paper. Drafts do not change: a guess that the model does not confirm is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.core.cost import LADDER, CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, Outcome, sync
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.core.target import RowOutput
from draftsmith.core.verify import verify_choices

COST = CostCurve()
"""Assumes that a pass over w more positions costs 1 + w/50. Without measured times, a seed and a
fixed budget give the same drafts again; wide passes round differently, and a draw may depend on
that."""
COST.record(0, 1.0)
COST.record(LADDER[-1], 1 + LADDER[-1] / 50)


class ReadAhead:
    """Guesses of the next drafted tokens of one sequence, in the draft model's ids."""

    def __init__(self, copier: Drafter, vocab_size: int, ids: Sequence[int]) -> None:
        """`ids` is the text so far."""
        self.ids = list(ids)
        self.context = Context(
            self.ids, len(ids), vocab_size, SamplingParams(), TorchSampler.seeded(0)
        )
        self.budget = copier.auto_budget(COST)
        self.state = copier.open(self.context)

    def follow(self, ids: list[int]) -> None:
        """Set the text to `ids`."""
        common = sync(self.state, self.ids, ids)
        self.ids[common:] = ids[common:]

    def guess(self, most: int) -> Draft:
        """Return a chain of up to `most` tokens."""
        if most <= 0:
            return EMPTY
        self.context.budget = self.context.depth = min(most, self.budget.next(1, 0))
        return self.state.draft(self.context) if self.context.budget else EMPTY

    def learn(self, guess: Draft, tokens: Sequence[int], output: RowOutput) -> None:
        """Learn that the draft model drafted `tokens` where `guess` was read."""
        end = len(self.ids) + len(tokens)

        def emit(token: int, _: object) -> bool:
            self.ids.append(token)
            return len(self.ids) == end

        verification = verify_choices(guess, tokens, emit)
        if verification.nodes[-1] is not None:  # the draft ended while the guess was still right
            guess = guess.clip(len(verification.path))
        if guess.tokens:
            self.budget.record(guess.size, len(verification.path))
            self.state.observe(self.context, Outcome(guess, verification, output))
