"""Cascades: who speaks, who learns what, one distribution for all, and what one types."""

from __future__ import annotations

from collections import abc
from typing import Any, ClassVar

import pairs
import pytest
import torch

import tiny
from draftsmith.core.budget import Budget, FixedBudget, OpenBudget
from draftsmith.core.cost import LADDER, CostCurve
from draftsmith.core.draft import EMPTY, Draft, Proposal
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome
from draftsmith.core.loop import propose, step
from draftsmith.core.sampling import Sampler, SamplingParams, TorchSampler
from draftsmith.core.sequence import Sequence
from draftsmith.core.target import NO_NEEDS, ModelFacts, Needs
from draftsmith.drafters.cascade import Cascade, _both
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.pld_plus import PldPlus
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.errors import OptionError, UnknownName
from draftsmith.model.load import load
from draftsmith.testing import (
    Enumerated,
    Scripted,
    ToyTarget,
    assert_same_distribution,
    check_drafter,
    enumerate_distribution,
    exact_distribution,
    plain,
)
from scripted import adversary, oracle


class Sampling(Scripted):
    sampled: ClassVar[bool] = True


def drawn_chain(ctx: Context) -> Draft:
    """Draw each token from a distribution that draws nothing with probability 0.2."""
    q = torch.arange(ctx.vocab_size, 0, -1, dtype=torch.float64)
    q *= 0.8 / q.sum()
    drawn: list[int] = []
    distributions: dict[int, Proposal] = {}
    while len(drawn) < min(2, ctx.budget):
        x = ctx.sampler.draw(torch.cat([q, q.new_tensor([0.2])]))
        distributions[len(drawn) - 1] = Proposal(q, len(drawn) if x < ctx.vocab_size else None)
        if x == ctx.vocab_size:
            break
        drawn.append(x)
    return Draft(tuple(drawn), tuple(range(-1, len(drawn) - 1)), ("s",) * len(drawn), distributions)


def copy_after_zero(ctx: Context) -> Draft:
    """A guess drafter that is silent most of the time."""
    return Draft.chain([1, 2][: ctx.budget], "copy") if ctx.ids[-1] == 0 else EMPTY


COPY = Scripted(copy_after_zero)
SAMPLING = Sampling(drawn_chain)
SILENT = Scripted(lambda _ctx: EMPTY)


class Recording(Scripted):
    """Notes how many sequences it was asked for, and what it was told."""

    name: ClassVar[str] = "recording"

    def __init__(self, *drafts: Draft) -> None:
        super().__init__(lambda ctx: drafts[len(ctx.ids) % len(drafts)])
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "told", [])

    def draft(
        self, states: abc.Sequence[DrafterState], contexts: abc.Sequence[Context]
    ) -> list[Draft]:
        self.asked.append(len(states))  # type: ignore[attr-defined]
        return super().draft(states, contexts)

    def open(self, ctx: Context) -> DrafterState:
        state = super().open(ctx)
        state.observe = lambda _ctx, outcome: self.told.append(outcome)  # type: ignore
        state.truncate = lambda length: self.told.append(length)  # type: ignore
        return state


def sequences(
    target: Any,
    drafter: Drafter,
    *prompts: list[int],
    sampler: Sampler | None = None,
    limit: int = 2,
    budget: Budget | None = None,
) -> list[Sequence]:
    """Sequences that have their rows; greedy without a `sampler`."""
    params = SamplingParams(temperature=0.0 if sampler is None else 1.0)
    options = {"params": params, "budget": budget or FixedBudget(4)}
    chosen = sampler or TorchSampler.seeded(0)
    return [pairs.sequence(target, drafter, ids, limit, chosen, **options) for ids in prompts]


def test_the_first_with_something_to_say_drafts() -> None:
    one, two = Draft.chain([1], "one"), Draft.chain([2], "two")
    first, second = Recording(one, EMPTY), Recording(two)
    target = ToyTarget(11)
    running = sequences(target, Cascade((SILENT, first, second)), [3, 3], [3, 3, 3], [4] * 4)
    step(running, target)
    # The sequences of even length were drafted for by the first, the other one by the second.
    assert (first.asked, second.asked) == ([3], [1])  # type: ignore[attr-defined]
    told: list[Outcome] = first.told  # type: ignore[attr-defined]
    assert [outcome.draft for outcome in told] == [one, EMPTY, one]
    silent = told[1]
    assert silent.verification.path == ()
    assert silent.verification.accepted == 0
    assert silent.verification.tokens == tuple(running[1].ids[3:])
    assert silent.output.logits.shape == (1, 11)
    assert [o.draft for o in second.told] == [EMPTY, two, EMPTY]  # type: ignore[attr-defined]
    assert running[0].state is not None
    running[0].state.truncate(1)
    assert first.told[-1] == second.told[-1] == 1  # type: ignore[attr-defined]


def test_probes_alone_are_sent_where_nobody_speaks() -> None:
    asking, copied = Draft((1,), (-1,), ("ask",), probes=1), Draft.chain([2], "copy")
    first, second, third = Recording(asking), Recording(asking), Recording(copied, EMPTY)
    target = ToyTarget(11)
    running = sequences(target, Cascade((SILENT, first, second, third)), [3, 3], [3, 3, 3])
    step(running, target)
    told = [[outcome.draft for outcome in one.told] for one in (first, second, third)]  # type: ignore[attr-defined]
    assert told == [[EMPTY, asking], [EMPTY, EMPTY], [copied, EMPTY]]
    assert first.told[1].output.logits.shape == (2, 11), "what the probes have asked"  # type: ignore[attr-defined]


PROBING = Scripted(
    lambda ctx: Draft((1,) * ctx.budget, (-1,) * ctx.budget, ("p",) * ctx.budget, probes=ctx.budget)
)


@pytest.mark.parametrize("members", [(COPY, SAMPLING), (SAMPLING, COPY), (PROBING, SAMPLING)])
def test_the_distribution_is_the_targets(members: tuple[Drafter, ...]) -> None:
    drafter = Cascade(members)
    assert drafter.sampled
    check_drafter(drafter, length=6)  # its distribution, too


def test_copies_and_samples_share_a_pass() -> None:
    """In a batch one sequence copies, another samples: each is judged by its own rule."""
    target = ToyTarget(3, order=1)
    drafter = Cascade((COPY, SAMPLING))
    seen: set[tuple[str, ...]] = set()

    def answers(sampler: Enumerated) -> tuple[tuple[int, ...], ...]:
        running = sequences(target, drafter, [1, 0], [1, 1], sampler=sampler)
        while left := [sequence for sequence in running if not sequence.finished]:
            step(left, target)
        seen.add(tuple(s for sequence in running for s in sequence.stats.by_source))
        return tuple(tuple(sequence.ids[2:]) for sequence in running)

    copied, sampled = (exact_distribution(target, prompt, 2) for prompt in ([1, 0], [1, 1]))
    both = {(a, b): p * q for a, p in copied.items() for b, q in sampled.items()}
    assert_same_distribution(enumerate_distribution(answers), both)
    assert ("copy", "s") in seen


def test_who_is_costly_to_open_waits_until_as_much_was_missed() -> None:
    """A first draft that costs five plain passes comes with the sixth pass nobody drafted for."""
    late = Recording(Draft.chain([1], "late"))
    drafter = Cascade((COPY, late))
    cost = CostCurve()
    ctx = Context([3] * 10, 10, 11, SamplingParams(), TorchSampler.seeded(0), budget=4, depth=4)
    cost.record(0, 1.0)
    ctx.cost = cost

    def asked(steps: int) -> int:
        state, before = drafter.open(ctx), len(late.asked)  # type: ignore[attr-defined]
        for _ in range(steps):
            drafter.draft([state], [ctx])
        return len(late.asked) - before  # type: ignore[attr-defined]

    assert asked(1) == 1, "nothing is known yet"
    assert cost.opening(late, 10) > 0
    cost.record_opening(
        late, 10, 10 - 10 * cost._opening[late]
    )  # the mean is now half a pass a token
    assert cost.opening(late, 10) == pytest.approx(5)
    assert asked(5) == 0
    assert asked(6) == 1
    assert asked(9) > 1, "from then on its budget decides"
    ctx.cost = None
    assert asked(1) == 1, "a fixed budget waits for nothing"


def test_each_member_has_an_automatic_budget_of_its_own() -> None:
    """A member that is always wrong falls silent; the one behind it then speaks, ever wider."""
    target = ToyTarget(11)
    answer = plain(target, [1, 2], 300)
    cost = CostCurve()
    for width in (0, *LADDER):
        cost.record(width, 1 + 0.02 * width)
    wrong, right = adversary(answer), oracle(answer, width=16)
    drafter = Cascade((wrong, right))
    widths: dict[int, list[int]] = {0: [], 1: []}
    budget = drafter.auto_budget(cost)
    [sequence] = sequences(target, drafter, [1, 2], budget=budget, limit=300)
    sequence.open_drafter()
    members: Any = sequence.state
    while not sequence.finished:
        draft = propose([sequence], [sequence], target)[0]
        if members.drafted_by is not None:
            widths[members.drafted_by].append(len(draft))
        step([sequence], target)
    assert sequence.ids[2:] == answer
    assert max(widths[1]) == 16
    assert sum(widths[0][10:]) < 0.1 * sum(widths[1])
    # A fixed budget is everybody's.
    assert sequence.context.cost is cost
    assert sequences(target, drafter, [1, 2])[0].context.cost is None


class Weighing(Scripted):
    """Says itself how much it wants, as `auto` does."""

    def auto_budget(self, cost: CostCurve) -> OpenBudget:
        return OpenBudget(cost, 8, self)


def test_a_member_pays_for_the_nodes_of_its_drafts() -> None:
    """Whose drafts cost more than the token that they bring pauses, also inside a cascade."""
    target, cost = ToyTarget(11), CostCurve()
    answer = plain(target, [1, 2], 60)

    def one_right(ctx: Context) -> Draft:
        right, *later = answer[len(ctx.ids) - 2 :]
        wrong = [(token + 1) % 11 for token in later]
        return Draft.chain([right, *wrong][: ctx.budget], "costly")

    member = Weighing(one_right)
    for _ in range(2):
        cost.record_draft(member, 8, 0.1)
        for width in (0, *LADDER):
            cost.record(width, 1 + 0.2 * width)
    # Nothing is learnt from these passes, so that the machine's speed decides nothing.
    cost.record = cost.record_draft = lambda *_: None  # type: ignore
    drafter = Cascade((member, SILENT))
    budget = drafter.auto_budget(cost)
    [sequence] = sequences(target, drafter, [1, 2], budget=budget, limit=60)
    while not sequence.finished:
        step([sequence], target)
    assert sequence.ids[2:] == answer
    assert 0 < sequence.stats.attempts < 15


class Untimed(CostCurve):
    """Learns which passes were made, and takes each to cost what its nodes do."""

    def record(self, width: int, seconds: float) -> None:  # noqa: ARG002
        super().record(width, 1 + 0.01 * width)

    def record_draft(self, *_: Any) -> None:
        pass

    record_opening = record_draft


@pytest.mark.parametrize(
    ("spec", "length"), [("copyspec(gamma=1)+auto", 1200), ("auto+copyspec", 20)]
)
def test_a_fresh_engine_drafts_behind_a_prompt_of_any_length(spec: str, length: int) -> None:
    """Of a long one all plain passes cost what they do behind that context, and no other."""
    model = load(tiny.model(context=2048), tiny.tokenizer())
    engine = Engine(model, drafter=spec, cost=Untimed())
    answer = engine.generate([5, 6, 7, 8] * (length // 4), max_new_tokens=40)
    assert answer.stats.drafted > 0


def test_needs_are_merged() -> None:
    model = ModelFacts(layers=4, heads=2)
    heads = PldPlus("attention", heads=((1, 0),))
    assert parse("copyspec+auto").needs_of(model) == NO_NEEDS
    merged = Cascade((CopySpec(), PldPlus(layer=2), heads, parse("spectra"))).needs_of(model)
    assert merged == Needs(hidden_layers=(2,), attention_heads=((1, 0),), logits=True)
    assert Cascade((PldPlus(layer=2), PldPlus(layer=2, K=9))).needs_of(model).hidden_layers == (2,)
    with pytest.raises(OptionError, match=r"states of layers, but \(2,\) and \(3,\) differ"):
        Cascade((PldPlus(layer=2), PldPlus(layer=3))).needs_of(model)
    with pytest.raises(OptionError, match="fold the states of layers differently"):
        _both(Needs(hidden_layers=(2,), fold=torch.relu), Needs(hidden_layers=(2,)))
    with pytest.raises(OptionError, match=r"one set of heads, but .* differ"):
        Cascade((heads, PldPlus("attention", heads=((0, 0),)))).needs_of(model)


@pytest.mark.parametrize(
    "spec",
    [
        "copyspec+longest_match",
        "cascade(copyspec, longest_match)",
        "cascade(drafters=('copyspec', 'longest_match'))",
        " copyspec() + longest_match(min=1) ",
    ],
)
def test_ways_to_type_it(spec: str) -> None:
    drafter = parse(spec)
    assert drafter == Cascade((parse("copyspec"), parse("longest_match")))
    assert parse(str(drafter)) == drafter
    assert hash(parse(str(drafter))) == hash(drafter)


def test_cascades_nest() -> None:
    drafter = parse("copyspec(gamma=5) + cascade(prompt_lookup, auto + None)")
    assert not drafter.sampled
    assert parse(str(drafter)) == drafter
    assert str(drafter).count("cascade(") == 3
    assert drafter.preferred_width() == 64


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("copyspec+atuo", "unknown drafter 'atuo'. Did you mean 'auto'"),
        (
            "cascade(copyspec, longest_match(mni=2))",
            "unknown option of longest_match 'mni'. Did you mean 'min'",
        ),
        ("copyspec-auto", "cannot be parsed; write it like"),
        ("copyspec+3", "cannot be parsed"),
        ("cascade(3)", "cannot be parsed"),
        ("cascade()", "drafters"),
        ("cascade(drafters=())", "drafters must be at least one drafter"),
        ("cascade(drafters='auto')", "drafters must be at least one drafter"),
        ("copyspec(auto)", "options need names"),
        ("cascade(auto, gamma=3)", "unknown option of cascade 'gamma'"),
        ("cascade(auto, drafters=('copyspec',))", "twice"),
        ("copyspec(gamma=3, gamma=4)", "an option twice"),
        ("copyspec(gamma={[1]: 2})", "must be a literal"),
        ("+".join(["copyspec"] * 5000), "cannot be parsed"),
    ],
)
def test_what_cannot_be_read(spec: str, message: str) -> None:
    with pytest.raises((OptionError, UnknownName)) as caught:
        parse(spec)
    assert message in str(caught.value)


def test_reproducible_and_sampled_do_not_mix() -> None:
    facts = load(tiny.model(), tiny.tokenizer()).facts
    model = DraftModel(tiny.model(layers=1), tokenizer=tiny.tokenizer(), reproducible=True)
    assert Cascade((CopySpec(), model)).bind(facts).shares_noise
    with pytest.raises(OptionError, match="make all members reproducible"):
        Cascade((model, SAMPLING)).bind(facts)
