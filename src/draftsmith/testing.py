"""An exact toy target, exact enumeration of a decoder's distribution, and the contract of every
drafter.

For us and for plugin authors:

    from draftsmith.testing import check_drafter
    def test_my_drafter(): check_drafter(MyDrafter())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, common_prefix
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, Sampler, SamplingParams, TorchSampler
from draftsmith.core.session import Session, StopRule
from draftsmith.core.target import NO_NEEDS, NO_TAPS, ModelFacts, Needs, RowOutput, Shape, Taps

T = TypeVar("T", bound=Hashable)
Ids = tuple[int, ...]


# ------------------------------------------------------------------------------- toy target


@dataclass(slots=True)
class ToyRow:
    """A sequence of the toy target; its cache is the list of ids it has seen."""

    pending: list[int]
    ids: list[int] = field(default_factory=list)
    needs: Needs = NO_NEEDS
    taken: int = 0

    @property
    def cached(self) -> int:
        return len(self.ids)


class ToyTarget:
    """A target whose distribution is a function of the last `order` ids, given or random; exact in
    float64.

    It checks the loop while serving it: a token is only ever fed after its own prefix. Its taps are
    functions of the prefix, too: see `toy_taps`.
    """

    def __init__(
        self,
        vocab_size: int,
        distribution: Callable[[Ids], Tensor] | None = None,
        *,
        order: int = 2,
        seed: int = 0,
        shape: Shape = "tree",
        context_length: int = 10_000,
    ) -> None:
        self.vocab_size = vocab_size
        self.shape: Shape = shape
        self.order = order
        self.context_length = context_length
        self._seed = seed
        self._distribution = distribution or self._random
        self._distributions: dict[Ids, Tensor] = {}
        self.refused: AssertionError | None = None
        """Why a pass could not be computed."""

    @property
    def facts(self) -> ModelFacts:
        """What drafters may know of it."""
        return ModelFacts(layers=2, heads=2, vocab_size=self.vocab_size, shape=self.shape)

    def distribution(self, prefix: Sequence[int]) -> Tensor:
        """(V,) float64 probabilities of the next id after `prefix`."""
        key = tuple(prefix[-self.order :])
        if key not in self._distributions:
            self._distributions[key] = self._distribution(key).double()
        return self._distributions[key]

    def _random(self, key: Ids) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, key)) % 2**31)
        noise = torch.empty(self.vocab_size, dtype=torch.float64, device="cpu")
        scores = noise.normal_(generator=generator)
        return (2 * scores).softmax(-1)

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """(V,) log-probabilities; -inf where the distribution is zero."""
        return self.distribution(prefix).log()

    def open(self, ids: Sequence[int], needs: Needs = NO_NEEDS) -> ToyRow:
        return ToyRow(list(ids), needs=needs)

    def prefill(self, row: ToyRow, rest: int = 1) -> None:  # noqa: ARG002
        row.ids += row.pending[:-1]
        del row.pending[:-1]

    def room(self, row: ToyRow) -> int:
        return self.context_length - row.cached - len(row.pending)

    def splits(self, row: ToyRow) -> bool:  # noqa: ARG002
        return True

    def forward(
        self, rows: Sequence[ToyRow], drafts: Sequence[Draft], take: Sequence[int] | None = None
    ) -> list[RowOutput]:
        for row, count in zip(rows, take or [len(row.pending) for row in rows], strict=True):
            row.taken = count
        return [self._forward(row, draft) for row, draft in zip(rows, drafts, strict=True)]

    def _refuse(self, what: str) -> AssertionError:
        """An error that is kept: the loop would go on without the draft."""
        self.refused = AssertionError(what)
        return self.refused

    def _forward(self, row: ToyRow, draft: Draft) -> RowOutput:
        if row.taken < len(row.pending):
            if draft:
                raise self._refuse("a chunk has no draft")
            return RowOutput(torch.empty((0, self.vocab_size), dtype=torch.float64, device="cpu"))
        prefixes = [[*row.ids, *row.pending]]
        for token, origin in zip(draft.tokens, draft.origins or (), strict=False):
            if origin >= 0 and prefixes[0][origin] != token:
                raise self._refuse(f"{token} is said to be a copy of position {origin}")
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            prefixes.append([*prefixes[parent + 1], token])
        return RowOutput(torch.stack([self.logits(prefix) for prefix in prefixes]))

    def taps(self, row: ToyRow) -> Taps:
        return toy_taps([*row.ids, *row.pending], row.needs)

    def wait(self) -> None:
        pass

    def commit(
        self,
        rows: Sequence[ToyRow],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        for row, path, emitted in zip(rows, paths, tokens, strict=True):
            rest = row.pending[row.taken :]
            if len(emitted) != (0 if rest else len(path) + 1):
                raise AssertionError(f"{len(emitted)} tokens emitted along a path of {len(path)}")
            row.ids += [*row.pending[: row.taken], *emitted[:-1]]
            row.pending = [*rest, *emitted[-1:]]

    def extend(self, row: ToyRow, ids: Sequence[int], needs: Needs = NO_NEEDS) -> int:
        kept, row.needs = common_prefix(row.ids, ids[:-1]), needs
        row.ids, row.pending = list(ids[:kept]), list(ids[kept:])
        return kept

    def close(self, row: ToyRow) -> None:
        row.ids.clear()


def toy_taps(ids: Sequence[int], needs: Needs) -> Taps:
    """Hidden states and attention of all ids but the last: functions of the ids before them.

    A state mixes the last three ids, so that equal pasts have equal states; a head attends to
    positions in proportion to how much their state resembles the last one.
    """
    states = len(ids) - 1
    if not states:
        return NO_TAPS
    now = torch.tensor(ids[:states], dtype=torch.float64, device="cpu")
    waves = torch.arange(1, 5, dtype=torch.float64, device="cpu")
    hidden = now.new_zeros((states, 4))
    for back in range(min(3, states)):
        hidden[back:] += torch.sin((now[: states - back, None] + 1 + back) * waves) / (1 + back)
    likeness = torch.cosine_similarity(hidden, hidden[-1:], dim=-1)
    rows = [(likeness * (2 + layer + head)).softmax(-1) for layer, head in needs.attention_heads]
    outputs = torch.cat([hidden] * max(1, len(needs.hidden_layers)), dim=-1)
    kept = outputs if needs.fold is None else needs.fold(outputs)
    return Taps(
        kept if needs.hidden_layers else None,
        (lambda positions: torch.stack(rows)[:, positions]) if rows else None,
    )


# ------------------------------------------------------------------------ exact enumeration


class Enumerated:
    """A `Sampler` that replays one branch of all random choices and weighs it exactly."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.taken: list[tuple[int, list[float]]] = []
        """Per choice: the option taken, and the probabilities of all options."""

    def _choose(self, options: list[float]) -> int:
        position = len(self.taken)
        if position < len(self._script):
            pick = self._script[position]
        else:
            pick = next(i for i, weight in enumerate(options) if weight > 0)
        self.taken.append((pick, options))
        return pick

    def draw(self, p: Tensor) -> int:
        return self._choose(p.tolist())

    def accept(self, ratio: float) -> bool:
        keep = min(1.0, ratio)
        return self._choose([keep, 1 - keep]) == 0

    @property
    def weight(self) -> float:
        """Probability of this branch."""
        return math.prod(options[pick] for pick, options in self.taken)

    def following(self) -> list[int] | None:
        """The script of the next branch in order, None after the last."""
        for position in range(len(self.taken) - 1, -1, -1):
            pick, options = self.taken[position]
            for other in range(pick + 1, len(options)):
                if options[other] > 0:
                    return [p for p, _ in self.taken[:position]] + [other]
        return None


def enumerate_distribution(
    experiment: Callable[[Enumerated], T], most: int = 2_000_000
) -> dict[T, float]:
    """The exact distribution of what `experiment` returns, over every random choice it makes."""
    distribution: dict[T, float] = {}
    script: list[int] | None = []
    for _ in range(most):
        if script is None:
            return distribution
        sampler = Enumerated(script)
        result = experiment(sampler)
        distribution[result] = distribution.get(result, 0.0) + sampler.weight
        script = sampler.following()
    raise AssertionError(f"more than {most} branches; make the experiment smaller")


def exact_distribution(target: ToyTarget, prompt: Sequence[int], length: int) -> dict[Ids, float]:
    """The target's own distribution over the next `length` ids (temperature 1)."""
    distributions: dict[Ids, float] = {(): 1.0}
    for _ in range(length):
        distributions = {
            (*ids, token): weight * float(p)
            for ids, weight in distributions.items()
            for token, p in enumerate(target.distribution([*prompt, *ids]))
            if p > 0
        }
    return distributions


# -------------------------------------------------------------------------------- drafters


@dataclass(frozen=True, repr=False)
class Scripted(Drafter):
    """A test drafter that drafts whatever `propose(ctx)` says."""

    propose: Callable[[Context], Draft]

    name = "scripted"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _ScriptedState(self)


@dataclass
class _ScriptedState(DrafterState):
    config: Scripted

    def draft(self, ctx: Context) -> Draft:
        return self.config.propose(ctx)


# -------------------------------------------------------------------------------- contract


def decode(
    target: ToyTarget,
    drafter: Drafter,
    prompt: Sequence[int],
    length: int,
    *,
    greedy: bool = True,
    seed: int = 0,
    budget: int = 16,
    stop_rules: Sequence[StopRule] = (),
    sampler: Sampler | None = None,
) -> Session:
    """A finished session of `drafter`, which is bound here, on the toy target.

    With `sampler` all draws are its own, the drafter's, too. Raises what failed, the drafter's
    errors included.
    """
    drafter = drafter.bind(target.facts)
    session = Session(
        prompt,
        drafter=drafter,
        budget=FixedBudget(budget),
        distribution=Distribution((), greedy=greedy),
        sampler=sampler or TorchSampler.seeded(seed),
        vocab_size=target.vocab_size,
        limit=length,
        stop_rules=stop_rules,
        sampling=SamplingParams(temperature=0.0 if greedy else 1.0, max_new_tokens=length),
        needs=drafter.needs_of(target.facts),
        draft_seed=seed + 1,
    )
    if sampler is not None:
        session.context.sampler = sampler
    start(session, target)
    while not session.finished:
        step([session], target)
    for error in (target.refused, session.error, session.drafter_error):
        if error is not None:
            raise error
    return session


def plain(
    target: ToyTarget, prompt: Sequence[int], length: int, *, greedy: bool = True, seed: int = 0
) -> list[int]:
    """What plain decoding answers."""
    silent = Scripted(lambda _ctx: EMPTY)
    return decode(target, silent, prompt, length, greedy=greedy, seed=seed).ids[len(prompt) :]


def contract_prompts(vocab_size: int) -> Iterator[list[int]]:
    """Prompts that make drafters act: repeats, constants, one token, noise."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(vocab_size, (40,), generator=generator, device="cpu").tolist()
    yield [1]
    yield [2] * 30
    yield noise
    yield noise[:12] * 4
    yield [*noise, *noise[5:15]]


def check_drafter(drafter: Drafter, *, length: int = 48) -> None:
    """Assert the contract of every drafter; raises AssertionError or DrafterError.

    Well-formed drafts within every budget, whose origins carry their tokens; greedy output equal to
    plain decoding; for guess drafters the same seed gives the same tokens; for sampled ones the
    exact distribution; a rewound state drafts like a fresh one; `str(drafter)` can be typed.
    """
    assert drafter.name.isidentifier(), f"name {drafter.name!r} cannot be typed"
    assert str(drafter).startswith(drafter.name)
    options = {f.name: getattr(drafter, f.name) for f in fields(drafter)}
    assert hash(drafter) == hash(type(drafter)(**options)), "configuration must hash"
    bound = drafter.bind(ToyTarget(11).facts)
    assert str(bound) == str(drafter), "a bound drafter prints like its configuration"
    cases: tuple[tuple[int, Shape], ...] = ((1, "tree"), (2, "tree"), (2, "chain"), (1, "plain"))
    for order, shape in cases:
        target = ToyTarget(11, order=order, shape=shape)
        for prompt in contract_prompts(target.vocab_size):
            for budget in (0, 1, 3, 16):
                # The loop checks form and budget of every draft on the way.
                ours = decode(target, bound, prompt, length, budget=budget)
                assert ours.ids[len(prompt) :] == plain(target, prompt, length), (
                    f"greedy output differs from plain decoding: {drafter} on {prompt}"
                )
                assert ours.stats.tokens == len(ours.ids) - len(prompt)
            if not bound.sampled:
                seeded = decode(target, bound, prompt, length, greedy=False, seed=3)
                expected = plain(target, prompt, length, greedy=False, seed=3)
                assert seeded.ids[len(prompt) :] == expected, (
                    f"same seed, other tokens: {drafter} on {prompt}"
                )
    if bound.sampled:
        check_distribution(drafter)
    check_rewind(drafter)


def check_distribution(drafter: Drafter, *, length: int = 3, tolerance: float = 1e-9) -> None:
    """Assert that the drafter's output distribution is the target's, by enumerating every random
    choice.

    On targets that verify trees and on those that verify one branch, and with answers so short that
    drafts overshoot them.
    """
    drafter = drafter.bind(ToyTarget(3).facts)
    shapes: tuple[Shape, ...] = ("tree", "chain")
    prompt = [0, 1, 0]
    for shape in shapes:
        target = ToyTarget(3, order=1, shape=shape)
        for limit in range(1, length + 1):
            ours = enumerate_distribution(partial(_sampled_answer, target, drafter, prompt, limit))
            assert_same_distribution(ours, exact_distribution(target, prompt, limit), tolerance)


def _sampled_answer(
    target: ToyTarget, drafter: Drafter, prompt: Sequence[int], length: int, sampler: Enumerated
) -> tuple[int, ...]:
    done = decode(target, drafter, prompt, length, greedy=False, budget=3, sampler=sampler)
    return tuple(done.ids[len(prompt) :])


def assert_same_distribution(
    ours: dict[T, float], exact: dict[T, float], tolerance: float = 1e-9
) -> None:
    """Assert that two distributions agree outcome by outcome."""
    worst = max(ours.keys() | exact.keys(), key=lambda k: abs(ours.get(k, 0) - exact.get(k, 0)))
    gap = abs(ours.get(worst, 0) - exact.get(worst, 0))
    assert gap <= tolerance, (
        f"distribution differs at {worst}: {ours.get(worst, 0):.12f} instead of "
        f"{exact.get(worst, 0):.12f}"
    )


def check_rewind(drafter: Drafter) -> None:
    """Assert that a state rewound with `truncate` drafts like one that never went there."""
    drafter = drafter.bind(ToyTarget(11).facts)
    if drafter.sampled:
        return
    for prompt in contract_prompts(11):
        if len(prompt) < 8:
            continue
        kept, replacement = prompt[: len(prompt) // 2], [3, 3, 5, *prompt[:6]]
        used, fresh = _context(drafter, prompt), _context(drafter, [*kept, *replacement])
        state = drafter.open(used)
        state.draft(used)
        state.truncate(len(kept))
        used.ids, used.hidden, used.attention = fresh.ids, fresh.hidden, fresh.attention
        again, expected = state.draft(used), drafter.open(fresh).draft(fresh)
        assert again.tokens == expected.tokens, f"{drafter} drafts from a past that was rewound"


def _context(drafter: Drafter, ids: Sequence[int]) -> Context:
    taps = toy_taps(ids, drafter.needs_of(ToyTarget(11).facts))
    return Context(
        ids=list(ids),
        prompt_length=len(ids),
        vocab_size=11,
        sampling=SamplingParams(),
        sampler=TorchSampler.seeded(0),
        budget=16,
        depth=16,
        hidden=taps.hidden,
        attention=taps.attention,
    )
