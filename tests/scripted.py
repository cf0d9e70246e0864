"""Drafters that know the answer, or that draft at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
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
