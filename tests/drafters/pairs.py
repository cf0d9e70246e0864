"""Toy pairs of vocabularies: the real drafting loop and algorithms over exact toy models."""

from __future__ import annotations

from collections import abc
from itertools import product
from math import prod
from typing import Any

from draftsmith.core.budget import Budget, FixedBudget
from draftsmith.core.cost import CostCurve
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, Sampler, SamplingParams
from draftsmith.core.sequence import Sequence, end_rule
from draftsmith.core.target import Shape
from draftsmith.drafters.draft_model.draft_model import ALGORITHMS, DraftModel
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.drafters.draft_model.translation import Pair
from draftsmith.testing import (
    Enumerated,
    ToyTarget,
    assert_same_distribution,
    enumerate_distribution,
    exact_distribution,
)
from draftsmith.text.vocab import Vocabulary, intersect

SAMPLED = SamplingParams(temperature=1.0)

DISTRIBUTIONS = {
    "plain": SAMPLED,
    "top_k": SamplingParams(temperature=0.6, top_k=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.7),
}

PAIRS: dict[str, tuple[list[bytes | None], list[bytes | None]]] = {
    "same": ([b"a", b"b", b"c"], [b"a", b"b", b"c"]),
    "permuted": ([b"a", b"b", b"c"], [b"c", b"a", b"b"]),
    "padded": ([b"a", b"b", b"c"], [b"a", b"b", b"c", None, None]),
    "overlapping": ([b"a", b"b", b"ab", b"c"], [b"b", b"d", b"a"]),
    "drafter inside": ([b"a", b"b", b"ab", b"ba"], [b"b", b"a"]),
    "target inside": ([b"a", b"b"], [b"ab", b"b", b"aa", b"a"]),
    "prefixes": ([b"a", b"aa", b"aaa"], [b"aa", b"a", b"aaaa"]),
    "disjoint": ([b"aa", b"bb"], [b"a", b"b"]),
}
"""Tokens of target and drafter."""


class ToyVocabulary(Vocabulary):
    """A vocabulary without a tokenizer; encodes by the longest token that fits."""

    def encode(self, text: str | bytes) -> list[int]:
        data, found = text.encode() if isinstance(text, str) else text, []
        while data:
            longest = max((t for t in self.ids if data.startswith(t)), key=len, default=None)
            if longest is not None:
                found.append(self.ids[longest])
            data = data[len(longest or b"?") :]
        return found


def toy_vocabulary(tokens: abc.Sequence[bytes | str | None]) -> ToyVocabulary:
    """Of tokens in bytes, and control tokens by name."""
    special = {i: name for i, name in enumerate(tokens) if isinstance(name, str)}
    return ToyVocabulary([None if isinstance(t, str) else t for t in tokens], special)


def bound(
    target: abc.Sequence[bytes | str | None],
    drafter: abc.Sequence[bytes | str | None],
    algorithm: str,
    *,
    ends: abc.Sequence[int] = (),
    distribution: Any = None,
    seed: int = 5,
    shape: Shape = "chain",
    order: int = 1,
    **options: Any,
) -> BoundDraftModel:
    """`algorithm` between two toy vocabularies; the drafter model is a `ToyTarget`."""
    options = {"tokens": 2, "confidence": 0.0} | options
    T, D = toy_vocabulary(target), toy_vocabulary(drafter)  # noqa: N806
    pair = pair_of(T, D, ends=frozenset(ends), **options)
    config = DraftModel("toy", algorithm=algorithm, **options)  # type: ignore[arg-type]
    runner = ToyTarget(len(drafter), distribution, order=order, seed=seed, shape=shape)
    translate = ALGORITHMS[algorithm](pair)
    return BoundDraftModel(config, runner, translate, not config.sampled, "", copier=Parrot())


def pair_of(target: Vocabulary, drafter: Vocabulary, **options: Any) -> Pair:
    """Two vocabularies with the options of a draft model."""
    defaults = {"ends": frozenset(), "begins": (), "tokens": 5, "confidence": 0.0}
    defaults |= {"reproducible": False, "source": "draft_model"}
    return Pair(intersect(target, drafter), target, drafter, **defaults | options)


class Parrot(Drafter):
    """Guesses what followed the last id before, right or wrong, else the ids in order."""

    name = "parrot"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Parroting()

    def auto_budget(self, cost: CostCurve) -> Budget:  # noqa: ARG002
        return FixedBudget(3)


class _Parroting(DrafterState):
    def draft(self, ctx: Context) -> Draft:
        ids = list(ctx.ids)
        place = next((i for i in range(len(ids) - 2, -1, -1) if ids[i] == ids[-1]), None)
        said = range(ctx.vocab_size) if place is None else ids[place + 1 :]
        return Draft.chain(said[: ctx.budget], "parrot")


class Processed(ToyTarget):
    """A toy target under `params`: for exact distributions with temperature and truncation."""

    def __init__(self, target: ToyTarget, params: SamplingParams) -> None:
        processed = Distribution.of(params, 0, ())
        super().__init__(
            target.vocab_size,
            lambda key: processed.probs(processed.scores(None, target.logits(key))),
            order=target.order,
        )


def answer(
    target: ToyTarget, drafter: Drafter, prompt: abc.Sequence[int], *options: Any
) -> tuple[int, ...]:
    """What the loop answers (see `sequence`)."""
    return tuple(decoded(target, drafter, prompt, *options).ids[len(prompt) :])


def decoded(target: ToyTarget, *options: Any) -> Sequence:
    """The finished sequence (see `sequence`)."""
    done = sequence(target, *options)
    while not done.finished:
        step([done], target)
    if done.drafter_error is not None:
        raise done.drafter_error
    return done


def sequence(
    target: ToyTarget,
    drafter: Drafter,
    prompt: abc.Sequence[int],
    length: int,
    sampler: Sampler,
    params: SamplingParams = SAMPLED,
    ends: abc.Sequence[int] = (),
    budget: Budget | None = None,
) -> Sequence:
    """A sequence that has its row; one `sampler` for target and drafter, to enumerate its draws."""
    started = Sequence(
        prompt,
        drafter=drafter,
        budget=budget or FixedBudget(3),
        distribution=Distribution.of(params, len(prompt), ()),
        sampler=sampler,
        vocab_size=target.vocab_size,
        limit=length,
        stop_rules=[end_rule(ends)],
        sampling=params,
    )
    started.context.sampler = sampler
    start(started, target)
    return started


def in_a_batch(drafter: Drafter, lengths: abc.Sequence[int]) -> None:
    """Assert the exact distribution of three answers that share every pass, and every draw."""
    target = ToyTarget(2, order=1, seed=1)
    prompts = [[0], [1], [1, 0]]

    def answers(sampler: Enumerated) -> tuple[tuple[int, ...], ...]:
        running = [
            sequence(target, drafter, ids, length, sampler)
            for ids, length in zip(prompts, lengths, strict=True)
        ]
        while left := [one for one in running if not one.finished]:
            step(left, target)
        assert not any(one.drafter_error for one in running)
        return tuple(tuple(one.ids[one.prompt_length :]) for one in running)

    each = [exact(target, ids, length) for ids, length in zip(prompts, lengths, strict=True)]
    expected = {
        ids: prod(one[part] for one, part in zip(each, ids, strict=True)) for ids in product(*each)
    }
    assert_same_distribution(enumerate_distribution(answers), expected)


def exact(
    target: ToyTarget, prompt: abc.Sequence[int], length: int, params: SamplingParams = SAMPLED
) -> dict[tuple[int, ...], float]:
    """The target's own distribution over the next `length` ids under `params`."""
    return exact_distribution(Processed(target, params), prompt, length)


def check(
    drafter: Drafter,
    params: SamplingParams = SAMPLED,
    length: int = 2,
    *,
    size: int,
    ends: abc.Sequence[int] = (),
) -> None:
    """Assert that answers of a target with `size` tokens keep its distribution."""
    target = ToyTarget(size, order=1, seed=1)
    ours = enumerate_distribution(
        lambda sampler: answer(target, drafter, [0, 1], length, sampler, params, ends)
    )
    expected: dict[tuple[int, ...], float] = {}
    for ids, weight in exact(target, [0, 1], length, params).items():
        end = next((i + 1 for i, token in enumerate(ids) if token in ends), length)
        expected[ids[:end]] = expected.get(ids[:end], 0) + weight
    assert_same_distribution(ours, expected)
