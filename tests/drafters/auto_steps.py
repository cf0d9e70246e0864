"""Random steps of `auto`, printed as JSON: python auto_steps.py COUNT

Compared with another process, and with what was recorded, by test_auto.py.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from drafted import context
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Outcome
from draftsmith.core.target import ModelFacts, RowOutput, Shape
from draftsmith.core.verify import Verification, verify_choices
from draftsmith.drafters.auto import Auto, AutoState
from draftsmith.drafters.mixer_prior import prior
from draftsmith.text.grammar import GrammarState, Scout


def auto_for(shape: Shape) -> Any:
    """`auto` for a model that verifies this."""
    return Auto(tuned=False).bind(ModelFacts(layers=1, heads=1, shape=shape))


def verified(draft: Draft, truth: list[int]) -> Verification:
    """What a target that emits `truth` accepts."""
    depths = (0, *draft.node_depths())
    return verify_choices(draft, [truth[min(d, len(truth) - 1)] for d in depths], lambda *_: False)


def noise(draft: Draft) -> Tensor:
    """Logits of a target that knows 60 tokens."""
    source = random.Random(len(draft))
    return torch.tensor([[6 * source.random() for _ in range(60)] for _ in range(1 + len(draft))])


def opened(ids: list[int], **options: Any) -> tuple[AutoState, Any]:
    """A state that has learned nothing yet, and its context."""
    return AutoState(Auto(), prior(1)), context(ids, **options)


def step(
    state: AutoState,
    ctx: Context,
    truth: list[int],
    logits: Callable[[Draft], Tensor] = lambda _draft: torch.empty((0, 0)),
) -> Draft:
    """One step on a sequence that goes on with `truth`, with or without the target's logits."""
    draft = state.draft(ctx)
    draft.check(ctx.vocab_size, ctx.budget, len(ctx.ids))
    verification = verified(draft, truth)
    ctx.ids = [*ctx.ids, *verification.tokens]
    state.observe(ctx, Outcome(draft, verification, RowOutput(logits(draft))))
    return draft


def texts(source: random.Random) -> list[int]:
    """Phrases that come again, mistakes among them."""
    phrases = [[source.randrange(60) for _ in range(source.randrange(2, 40))] for _ in range(8)]
    text: list[int] = []
    while len(text) < 700:
        text += (
            p if source.random() < 0.95 else source.randrange(60) for p in source.choice(phrases)
        )
    return text


class Odd(GrammarState, Scout):
    """Every seventh token of 60 is forbidden, and some leave no choice for the next three."""

    def __init__(self) -> None:
        self.path: list[int] = []

    def scout(self, ids: Sequence[int]) -> Scout:
        self.path, self.last = [], ids[-1]
        return self

    def go(self, path: Sequence[int]) -> bool:
        self.path = list(path)
        return path[-1] % 7 != 3

    def onward(self) -> tuple[list[int], list[int]]:
        last = self.path[-1] if self.path else self.last
        few = [last, last + 1, last + 3] if last % 3 == 0 else []
        return ([last + 1, last + 2, last + 4] if last % 5 == 0 else []), few


def steps(count: int, seed: int = 0) -> list[Any]:
    """[tokens, parents, sources, origins, chances] of `count` drafts, with all that a drafter may
    be given."""
    source, found = random.Random(seed), []
    while len(found) < count:
        text = texts(source)
        begin = source.randrange(1, 300)
        prediction = tuple(text[begin : begin + 100]) if source.random() < 0.3 else ()
        ctx = context(text[:begin], prediction=prediction)
        shape: Shape = "chain" if source.random() < 0.2 else "tree"
        state = AutoState(auto_for(shape), prior(1))
        logits = [noise] if source.random() < 0.5 else []
        if source.random() < 0.3:
            ctx.grammar = Odd()
        for _ in range(60):
            at = len(ctx.ids)
            if at > len(text) - 70:
                break
            draft = step(state, ctx, text[at : at + 70], *logits)
            found.append(
                [draft.tokens, draft.parents, draft.source, draft.origins, draft.chances or ()]
            )
            if source.random() < 0.03:
                kept = source.randrange(1, len(ctx.ids))
                ctx.ids = ctx.ids[:kept]
                state.truncate(kept)
    return found[:count]


if __name__ == "__main__":
    json.dump(steps(int(sys.argv[1])), sys.stdout)
