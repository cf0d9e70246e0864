"""What a draft model is about to write, where it copies: it then reads several tokens in a pass.

Ours: no paper. Its drafts stay what they are: a guess that it does not make itself is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.core.cost import LADDER, CostCurve
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, Outcome, sync
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.core.target import RowOutput
from draftsmith.core.verify import verify_greedy

COST = CostCurve()
"""A pass over w more places is taken to cost 1 + w/50: with nothing timed, a seed and a fixed
budget give the same drafts again, though wide passes round differently and a draw may show it."""
COST.record(0, 1.0)
COST.record(LADDER[-1], 1 + LADDER[-1] / 50)


class ReadAhead:
    """Guesses of one sequence's next drafted tokens, in the draft model's ids."""

    def __init__(self, copier: Drafter, vocab_size: int, ids: Sequence[int]) -> None:
        """`ids` are the text so far."""
        self.ids = list(ids)
        self.context = Context(
            self.ids, len(ids), vocab_size, SamplingParams(), TorchSampler.seeded(0)
        )
        self.budget = copier.auto_budget(COST)
        self.state = copier.open(self.context)

    def follow(self, ids: list[int]) -> None:
        """Let `ids` be the text."""
        common = sync(self.state, self.ids, ids)
        self.ids[common:] = ids[common:]

    def guess(self, most: int) -> Draft:
        """A chain of up to `most` tokens."""
        if most <= 0:
            return EMPTY
        self.context.budget = self.context.depth = min(most, self.budget.next(1, 0))
        return self.state.draft(self.context) if self.context.budget else EMPTY

    def learn(self, guess: Draft, tokens: Sequence[int], output: RowOutput) -> None:
        """The draft model wrote `tokens` where the guess was, read in the pass of `output`."""
        end = len(self.ids) + len(tokens)

        def emit(token: int, _: object) -> bool:
            self.ids.append(token)
            return len(self.ids) == end

        verification = verify_greedy(guess, tokens, emit)
        if verification.nodes[-1] is not None:  # the draft ended, right so far
            guess = guess.clip(len(verification.path))
        if guess.tokens:
            self.budget.record(guess.size, len(verification.path))
            self.state.observe(self.context, Outcome(guess, verification, output))
