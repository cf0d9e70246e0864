"""Drafters that know the answer, or that draft at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import ModelFacts
from draftsmith.testing import Scripted


def oracle(answer: Sequence[int], width: int = 8) -> Scripted:
    """Always right: drafts the next ids of `answer` (output ids, prompt not included)."""

    def propose(ctx: Context) -> Draft:
        done = len(ctx.ids) - ctx.prompt_length
        return Draft.chain(answer[done : done + min(width, ctx.budget)], "scripted")

    return Scripted(propose)


def adversary(answer: Sequence[int], width: int = 10) -> Scripted:
    """Always wrong: drafts ids that differ from `answer` everywhere."""

    def propose(ctx: Context) -> Draft:
        done = len(ctx.ids) - ctx.prompt_length
        right = [*answer[done : done + width], *[0] * width][:width]
        wrong = [(token + 1) % ctx.vocab_size for token in right]
        return Draft.chain(wrong[: ctx.budget], "scripted")

    return Scripted(propose)


def altered(propose: Callable[[Context], Draft], **methods: Callable[..., object]) -> Scripted:
    """Drafts `propose(ctx)`, with other methods of its states: each is called without the state."""

    class Altered(Scripted):
        def open(self, ctx: Context) -> DrafterState:
            state = super().open(ctx)
            for name, method in methods.items():
                setattr(state, name, method)
            return state

    return Altered(propose)


def binding(act: Callable[[], object]) -> Scripted:
    """Calls `act` whenever it is bound to a model, and drafts nothing."""

    class Binding(Scripted):
        def bind(self, model: ModelFacts) -> Drafter:
            act()
            return super().bind(model)

    return Binding(lambda _: EMPTY)


class Gambler(Scripted):
    """Drafts `width` tokens drawn from q (V,), whatever the target's distribution is."""

    sampled = True

    def __init__(self, q: Tensor, width: int) -> None:
        def propose(ctx: Context) -> Draft:
            drawn = [ctx.sampler.draw(q) for _ in range(min(width, ctx.budget))]
            return Draft.chain(drawn, "gambler", [q] * len(drawn))

        super().__init__(propose)


def random_trees(
    seed: int = 0, nodes: int = 8, probes: int = 0, near: Sequence[int] = ()
) -> Scripted:
    """Random trees; ids come from `near` (an answer, say) half of the time, so some are right."""
    generator = torch.Generator().manual_seed(seed)

    def pick(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    def propose(ctx: Context) -> Draft:
        room = max(0, ctx.budget - probes)
        size = pick(min(nodes, room) + 1) if room else 0
        done = len(ctx.ids) - ctx.prompt_length
        tokens: list[int] = []
        parents: list[int] = []
        places: list[int] = []
        hung = min(probes, ctx.budget - size)
        for node in range(size + hung):
            parent = pick(node + 1) - 1
            place = places[parent] + 1 if parent >= 0 else done
            right = node < size and pick(2) == 0 and place < len(near)
            tokens.append(near[place] if right else pick(ctx.vocab_size))
            parents.append(parent)
            places.append(place)
        return Draft(tuple(tokens), tuple(parents), ("scripted",) * len(tokens), probes=hung)

    return Scripted(propose)
