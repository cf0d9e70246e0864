"""Tools for testing drafters: an exact toy target, exact enumeration, and the drafter contract.

Plugin authors can use them, too:

    from draftsmith.testing import check_drafter
    def test_my_drafter(): check_drafter(MyDrafter())
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import EMPTY, Draft
from draftsmith.core.drafter import Context, Drafter, Scripted, common_prefix
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, Sampler, SamplingParams, TorchSampler
from draftsmith.core.sequence import Sequence, StopRule
from draftsmith.core.target import NO_NEEDS, NO_TAPS, ModelFacts, Needs, RowOutput, Shape, Taps

T = TypeVar("T", bound=Hashable)

MOST_BRANCHES = 2_000_000
"""Maximum number of branches of an enumerated experiment."""
Ids = tuple[int, ...]


# ------------------------------------------------------------------------------- toy target


@dataclass(slots=True)
class ToyRow:
    """A sequence of the toy target; its cache is the list of the ids it has read."""

    pending: list[int]
    ids: list[int] = field(default_factory=list)
    needs: Needs = NO_NEEDS
    taken: int = 0
    draft: Draft = EMPTY

    @property
    def cached(self) -> int:
        return len(self.ids)


class ToyTarget:
    """A target with a distribution that depends on the last `order` ids; exact in float64.

    The distribution is given or random. The target checks the loop: it raises AssertionError for a
    draft that does not fit `shape`, and for committed tokens that are not those of the path. Its
    taps are functions of the prefix, too (`toy_taps`).
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
        """Error of the last pass that failed a check."""

    @property
    def facts(self) -> ModelFacts:
        """Facts about the target for drafters."""
        return ModelFacts(layers=2, heads=2, vocab_size=self.vocab_size, shape=self.shape)

    def distribution(self, prefix: abc.Sequence[int]) -> Tensor:
        """Return (V,) float64 probabilities of the next id after `prefix`."""
        key = tuple(prefix[-self.order :])
        if key not in self._distributions:
            self._distributions[key] = self._distribution(key).double()
        return self._distributions[key]

    def _random(self, key: Ids) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, key)) % 2**31)
        noise = torch.empty(self.vocab_size, dtype=torch.float64, device="cpu")
        scores = noise.normal_(generator=generator)
        return (2 * scores).softmax(-1)

    def logits(self, prefix: abc.Sequence[int]) -> Tensor:
        """Return (V,) log-probabilities; -inf where the distribution is zero."""
        return self.distribution(prefix).log()

    def open(self, ids: abc.Sequence[int], needs: Needs = NO_NEEDS) -> ToyRow:
        return ToyRow(list(ids), needs=needs)

    def prefill(self, row: ToyRow, most: int = 1) -> None:  # noqa: ARG002
        row.ids += row.pending[:-1]
        del row.pending[:-1]

    def room(self, row: ToyRow) -> int:
        return self.context_length - row.cached - len(row.pending)

    def splits(self, row: ToyRow) -> bool:  # noqa: ARG002
        return True

    def forward(
        self,
        rows: abc.Sequence[ToyRow],
        drafts: abc.Sequence[Draft],
        take: abc.Sequence[int] | None = None,
    ) -> list[RowOutput]:
        for row, count in zip(rows, take or [len(row.pending) for row in rows], strict=True):
            row.taken = count
        return [self._forward(row, draft) for row, draft in zip(rows, drafts, strict=True)]

    def _refuse(self, what: str) -> AssertionError:
        """Create an error and keep it, because the loop catches it and continues without drafts."""
        self.refused = AssertionError(what)
        return self.refused

    def _forward(self, row: ToyRow, draft: Draft) -> RowOutput:
        if row.taken < len(row.pending):
            if draft:
                raise self._refuse("a row with pending tokens left must not have a draft")
            return RowOutput(torch.empty((0, self.vocab_size), dtype=torch.float64, device="cpu"))
        if len(draft) and (self.shape == "plain" or (self.shape == "chain" and not draft.is_chain)):
            raise self._refuse(f"a target of the shape {self.shape!r} got another draft")
        row.draft = draft
        prefixes = [[*row.ids, *row.pending]]
        for token, origin in zip(draft.tokens, draft.origins or (), strict=False):
            if origin >= 0 and prefixes[0][origin] != token:
                raise self._refuse(f"origin {origin} of token {token} holds another token")
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            prefixes.append([*prefixes[parent + 1], token])
        return RowOutput(torch.stack([self.logits(prefix) for prefix in prefixes]))

    def taps(self, row: ToyRow) -> Taps:
        return toy_taps([*row.ids, *row.pending], row.needs)

    def commit(
        self,
        rows: abc.Sequence[ToyRow],
        paths: abc.Sequence[abc.Sequence[int]],
        tokens: abc.Sequence[abc.Sequence[int]],
    ) -> None:
        for row, path, emitted in zip(rows, paths, tokens, strict=True):
            rest = row.pending[row.taken :]
            if len(emitted) != (0 if rest else len(path) + 1):
                raise AssertionError(f"{len(emitted)} tokens emitted for a path of {len(path)}")
            if [row.draft.tokens[node] for node in path] != [*emitted[:-1]]:
                raise AssertionError("the emitted tokens are not those of the path")
            row.ids += [*row.pending[: row.taken], *emitted[:-1]]
            row.pending = [*rest, *emitted[-1:]]

    def extend(self, row: ToyRow, ids: abc.Sequence[int], needs: Needs = NO_NEEDS) -> int:
        kept, row.needs = common_prefix(row.ids, ids[:-1]), needs
        row.ids, row.pending = list(ids[:kept]), list(ids[kept:])
        return kept

    def close(self, row: ToyRow) -> None:
        row.ids.clear()


def toy_taps(ids: abc.Sequence[int], needs: Needs) -> Taps:
    """Return hidden states and attention of all ids but the last, as functions of the earlier ids.

    A state mixes the last three ids, so equal pasts have equal states. A head attends to positions
    in proportion to the similarity of their state to the last one.
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


class Enumerated(Sampler):
    """A `Sampler` that replays one branch of all random choices and computes its probability."""

    def __init__(self, script: abc.Sequence[int]) -> None:
        self._script = list(script)
        self.taken: list[tuple[int, list[float]]] = []
        """For each choice, the option taken and the probabilities of all options."""

    def _choose(self, options: list[float]) -> int:
        position = len(self.taken)
        if position < len(self._script):
            pick = self._script[position]
        else:
            pick = next(i for i, weight in enumerate(options) if weight > 0)
        self.taken.append((pick, options))
        return pick

    def draw(self, p: Tensor) -> int:
        if not bool(p.isfinite().all()):  # as `torch.multinomial`
            raise RuntimeError("the probabilities are not finite")
        return self._choose(p.tolist())

    def accept(self, ratio: float) -> bool:
        keep = min(1.0, ratio)
        return self._choose([keep, 1 - keep]) == 0

    @property
    def weight(self) -> float:
        """Probability of the branch."""
        return math.prod(options[pick] for pick, options in self.taken)

    def following(self) -> list[int] | None:
        """Return the script of the next branch in order; None after the last one."""
        for position in range(len(self.taken) - 1, -1, -1):
            pick, options = self.taken[position]
            for other in range(pick + 1, len(options)):
                if options[other] > 0:
                    return [p for p, _ in self.taken[:position]] + [other]
        return None


def enumerate_distribution(experiment: Callable[[Enumerated], T]) -> dict[T, float]:
    """Return the exact distribution of the result of `experiment` over all random choices.

    Raises AssertionError if there are more than `MOST_BRANCHES`.
    """
    distribution: dict[T, float] = {}
    script: list[int] = []
    for _ in range(MOST_BRANCHES):
        sampler = Enumerated(script)
        result = experiment(sampler)
        distribution[result] = distribution.get(result, 0.0) + sampler.weight
        following = sampler.following()
        if following is None:
            return distribution
        script = following
    raise AssertionError(f"the experiment has more than {MOST_BRANCHES} branches; make it smaller")


def exact_distribution(
    target: ToyTarget, prompt: abc.Sequence[int], length: int
) -> dict[Ids, float]:
    """Return the target's own distribution over the next `length` ids (temperature 1)."""
    distributions: dict[Ids, float] = {(): 1.0}
    for _ in range(length):
        distributions = {
            (*ids, token): weight * float(p)
            for ids, weight in distributions.items()
            for token, p in enumerate(target.distribution([*prompt, *ids]))
            if p > 0
        }
    return distributions


# -------------------------------------------------------------------------------- contract


def decode(
    target: ToyTarget,
    drafter: Drafter,
    prompt: abc.Sequence[int],
    length: int,
    *,
    greedy: bool = True,
    seed: int = 0,
    budget: int = 16,
    stop_rules: abc.Sequence[StopRule] = (),
    sampler: Sampler | None = None,
) -> Sequence:
    """Bind `drafter` and decode with it on the toy target; return the finished sequence.

    With `sampler`, all draws come from it, including the drafter's. Raises the error of the
    sequence or of the drafter.
    """
    drafter = drafter.bind(target.facts)
    sequence = Sequence(
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
        sequence.context.sampler = sampler
    start(sequence, target)
    while not sequence.finished:
        step([sequence], target)
    for error in (target.refused, sequence.error, sequence.drafter_error):
        if error is not None:
            raise error
    return sequence


def plain(
    target: ToyTarget, prompt: abc.Sequence[int], length: int, *, greedy: bool = True, seed: int = 0
) -> list[int]:
    """Return the output of plain decoding."""
    silent = Scripted(lambda _ctx: EMPTY)
    return decode(target, silent, prompt, length, greedy=greedy, seed=seed).ids[len(prompt) :]


def contract_prompts(vocab_size: int) -> Iterator[list[int]]:
    """Yield prompts that make drafters act: repetitions, constants, one token, noise."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(vocab_size, (40,), generator=generator, device="cpu").tolist()
    yield [1]
    yield [2] * 30
    yield noise
    yield noise[:12] * 4
    yield [*noise, *noise[5:15]]


def check_drafter(drafter: Drafter, *, length: int = 48) -> None:
    """Check the contract of drafters; raise AssertionError or DrafterError if it is broken.

    - Drafts are well formed, within every budget, and their origins hold the same tokens.
    - Greedy output equals plain decoding.
    - Drafters that only guess give the same tokens for the same seed.
    - Drafters that sample give the exact distribution.
    - A rewound state drafts like a new one.
    - `str(drafter)` starts with the drafter's name.
    """
    assert drafter.name.isidentifier(), f"name must be an identifier, got {drafter.name!r}"
    assert str(drafter).startswith(drafter.name)
    options = {f.name: getattr(drafter, f.name) for f in fields(drafter)}
    if type(drafter).__eq__ is not object.__eq__:  # a class with eq=False compares identities
        twin = type(drafter)(**options)
        assert hash(drafter) == hash(twin), "equal options must give equal hashes"
    bound = drafter.bind(ToyTarget(11).facts)
    assert str(bound) == str(drafter), "a bound drafter must have the same str as the unbound one"
    cases: tuple[tuple[int, Shape], ...] = ((1, "tree"), (2, "tree"), (2, "chain"), (1, "plain"))
    for order, shape in cases:
        target = ToyTarget(11, order=order, shape=shape)
        bound = drafter.bind(target.facts)
        for prompt in contract_prompts(target.vocab_size):
            expected = plain(target, prompt, length)
            for budget in (0, 1, 3, 16):
                # The loop checks the form and the budget of every draft.
                ours = decode(target, bound, prompt, length, budget=budget)
                assert ours.ids[len(prompt) :] == expected, (
                    f"greedy output differs from plain decoding: {drafter} on {prompt}"
                )
                assert ours.stats.tokens == len(ours.ids) - len(prompt)
            if not bound.sampled:
                seeded = decode(target, bound, prompt, length, greedy=False, seed=3)
                expected = plain(target, prompt, length, greedy=False, seed=3)
                assert seeded.ids[len(prompt) :] == expected, (
                    f"the same seed gives other tokens than plain decoding: {drafter} on {prompt}"
                )
    if bound.sampled:
        check_distribution(drafter)
    check_rewind(drafter)


def check_distribution(drafter: Drafter) -> None:
    """Assert that the output distribution is the target's, by enumerating all random choices.

    This covers targets that verify trees, targets that verify chains, and answers so short that
    drafts are longer.
    """
    shapes: tuple[Shape, ...] = ("tree", "chain")
    prompt = [0, 1, 0]
    for shape in shapes:
        target = ToyTarget(3, order=1, shape=shape)
        bound = drafter.bind(target.facts)
        for limit in (1, 2, 3):
            ours = enumerate_distribution(partial(_sampled_answer, target, bound, prompt, limit))
            assert_same_distribution(ours, exact_distribution(target, prompt, limit))


def _sampled_answer(
    target: ToyTarget, drafter: Drafter, prompt: abc.Sequence[int], length: int, sampler: Enumerated
) -> tuple[int, ...]:
    done = decode(target, drafter, prompt, length, greedy=False, budget=3, sampler=sampler)
    return tuple(done.ids[len(prompt) :])


def assert_same_distribution(ours: dict[T, float], exact: dict[T, float]) -> None:
    """Assert that two distributions agree outcome by outcome."""
    worst = max(ours.keys() | exact.keys(), key=lambda k: abs(ours.get(k, 0) - exact.get(k, 0)))
    gap = abs(ours.get(worst, 0) - exact.get(worst, 0))
    assert gap <= 1e-9, (
        f"the distribution differs at {worst}: expected {exact.get(worst, 0):.12f}, got "
        f"{ours.get(worst, 0):.12f}"
    )


def check_rewind(drafter: Drafter) -> None:
    """Assert that a state rewound with `truncate` drafts like a new one, unless it samples."""
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
        same = (again.tokens, again.parents) == (expected.tokens, expected.parents)
        assert same, f"{drafter} uses ids that truncate() removed"


def _context(drafter: Drafter, ids: abc.Sequence[int]) -> Context:
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
