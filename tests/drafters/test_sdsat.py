"""SDSAT on toy targets that answer adaptive tokens, then on models: drafts, distributions,
refusals."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from drafted import same_answers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tiny
from architectures import ALL, build
from draftsmith import builtin
from draftsmith.core.budget import FixedBudget
from draftsmith.core.draft import ROOT, Draft
from draftsmith.core.drafter import Context, Drafter
from draftsmith.core.loop import step
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.target import ModelFacts
from draftsmith.drafters.registry import parse
from draftsmith.drafters.sdsat import SDSAT, likeliest, questions
from draftsmith.engine.engine import Engine
from draftsmith.errors import DrafterError, LoadError, OptionError, UnsupportedError
from draftsmith.model.adaptive import AdaptiveTokens
from draftsmith.model.load import load
from draftsmith.testing import (
    Enumerated,
    ToyTarget,
    assert_same_distribution,
    check_distribution,
    check_drafter,
    enumerate_distribution,
    plain,
)


class Taught(ToyTarget):
    """Never says `a`; behind m of them it gives the exact distribution of the token m places
    further."""

    def __init__(
        self, vocab: int, a: int, name: str, distribution: Tensor | None = None, **of: Any
    ) -> None:
        super().__init__(vocab, order=64, **of)
        if distribution is None:
            generator = torch.Generator().manual_seed(5)
            distribution = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
            distribution = (1.5 * distribution).softmax(-1)
        distribution[:, a] = 0
        self.next = distribution / distribution.sum(-1, keepdim=True)
        self.a, self.name = a, name

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(2, 2, name=self.name, vocab_size=self.vocab_size, shape=self.shape)

    def distribution(self, prefix: Any) -> Tensor:
        ids = list(prefix)
        distribution = torch.eye(self.vocab_size, dtype=torch.float64)[
            next(i for i in reversed(ids) if i != self.a)
        ]
        for _ in range(1 + len(list(itertools.takewhile(self.a.__eq__, reversed(ids))))):
            distribution = distribution @ self.next
        return distribution


def counting(vocab: int, a: int) -> Tensor:
    """(V, V) distribution of a target that counts up, without ever saying `a`."""
    distribution = torch.zeros(vocab, vocab, dtype=torch.float64)
    order = [i for i in range(vocab) if i != a]
    for i, token in enumerate(order):
        distribution[token, order[(i + 1) % len(order)]] = 1
    distribution[a, order[0]] = 1
    return distribution


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a model whose adaptive token is 2."""
    path = tmp_path_factory.mktemp("taught")
    AdaptiveTokens(tokens=(2,), L=3, objective="improved").save(path)
    return str(path)


def bound(spec: str, folder: str) -> Drafter:
    return parse(spec).bind(ModelFacts(layers=2, heads=2, name=folder))


def run(
    target: ToyTarget, drafter: Drafter, budget: int, limit: int = 40
) -> list[tuple[Draft, int]]:
    """The draft of each step, and how many tokens the step gave; output equals plain decoding."""
    seen: list[tuple[Draft, int]] = []
    options = {"params": SamplingParams(), "budget": FixedBudget(budget)}
    sequence = pairs.sequence(target, drafter, [0, 1], limit, Enumerated([]), **options)
    sequence.open_drafter()
    assert sequence.state is not None
    observe = sequence.state.observe
    sequence.state.observe = lambda ctx, outcome: (  # type: ignore[method-assign]
        seen.append((outcome.draft, len(outcome.verification.tokens))),
        observe(ctx, outcome),
    )[1]
    while not sequence.finished:
        step([sequence], target)
    assert sequence.ids[2:] == plain(target, [0, 1], limit)
    return seen


# ------------------------------------------------------------------------------- its drafts


def test_two_passes_ask_then_check(folder: str) -> None:
    target = Taught(7, 2, folder, counting(7, 2))
    (first, one), (second, two), (third, _), *rest = run(target, bound("sdsat(k=4)", folder), 16)
    assert first == Draft((2,) * 4, (-1, 0, 1, 2), ("sdsat",) * 4, probes=4)
    assert one == 1  # the token 3, and drafts for what follows it
    assert second == Draft.chain([4, 5, 6, 0], "sdsat")
    assert two == 5
    assert third == first
    assert [tokens for _, tokens in rest[:4]] == [5, 1, 5, 1]


def test_one_pass_asks_after_every_prefix(folder: str) -> None:
    target = Taught(7, 2, folder, counting(7, 2))
    (first, one), (second, two), *rest = run(target, bound("sdsat(k=2, passes=1)", folder), 8)
    assert (first.tokens, first.probes, one) == ((2, 2), 2, 1)
    assert second.tokens == (4, 5, *(2,) * 6)
    assert second.parents == (ROOT, 0, ROOT, 2, 0, 4, 1, 6)
    assert (second.probes, two) == (6, 3)
    assert {tokens for _, tokens in rest[:-1]} == {3}


def test_one_pass_without_room_takes_turns(folder: str) -> None:
    target = Taught(7, 2, folder, counting(7, 2))
    for budget in (1, 2):
        seen = run(target, bound("sdsat(k=6, passes=1)", folder), budget)
        assert sum(tokens for _, tokens in seen) / len(seen) > 1.3


def test_chain_targets_are_asked_behind_the_draft(folder: str) -> None:
    target = Taught(7, 2, folder, counting(7, 2), shape="chain")
    drafter = parse("sdsat(k=3, passes=1)").bind(target.facts)
    _, _, (draft, tokens), *rest = run(target, drafter, 17)
    assert draft == Draft((5, 6, 0, 2, 2, 2), tuple(range(-1, 5)), ("sdsat",) * 6, probes=3)
    assert {given for _, given in rest[:5]} == {tokens} == {4}


def test_nothing_is_asked_that_cannot_be_emitted(folder: str) -> None:
    target = Taught(7, 2, folder, counting(7, 2))
    seen = run(target, bound("sdsat(k=9)", folder), 16, limit=4)
    # The first of 4 tokens comes now and the last is the target's own: two can be drafted.
    assert [len(draft) for draft, _ in seen] == [2, 2]


def test_diverse_tokens_are_asked_in_order(tmp_path: Path) -> None:
    AdaptiveTokens(tokens=(2, 5, 6), L=3, objective="improved").save(tmp_path)
    drafter = bound("sdsat(k=2)", str(tmp_path))
    first, _ = run(ToyTarget(9), drafter, 16)[0]
    assert first.tokens == (2, 5)
    with pytest.raises(OptionError, match=r"k must be less than 3, got 3"):
        bound("sdsat(k=3)", str(tmp_path))


def test_no_adaptive_token_is_drafted(tmp_path: Path) -> None:
    """Of diverse ones neither those that this k does not ask with."""
    AdaptiveTokens(tokens=(7, 8, 9), L=3, objective="improved").save(tmp_path)
    ctx = Context([0], 1, 10, SamplingParams(), Enumerated([]), budget=4, depth=4)
    state: Any = bound("sdsat(k=1)", str(tmp_path)).open(ctx)
    state.answers, state.length = torch.arange(10.0)[None], 1
    assert state.draft(ctx).tokens == (6,)


def test_a_tree_has_the_likeliest_nodes(folder: str) -> None:
    distribution = torch.zeros(5, 5, dtype=torch.float64)
    distribution[:, 0], distribution[:, 1], distribution[:, 3] = 0.6, 0.3, 0.1
    target = Taught(5, 2, folder, distribution)
    trees = {}
    for tree in ("3", "(2, 1)", "(3, 2)"):
        seen = run(target, bound(f"sdsat(k=2, tree={tree})", folder), 16)
        trees[tree] = seen[1][0]
    assert trees["3"].tokens == (0, 0, 1)  # 0.6, 0.36, 0.3
    assert trees["3"].parents == (ROOT, 0, ROOT)
    assert trees["(2, 1)"].tokens == (0, 0, 1, 0)
    assert trees["(3, 2)"].size == 3 + 3 * 2
    assert {t.probes for t in trees.values()} == {0}


# -------------------------------------------------------------------------------------
# distributions

SETTINGS = [
    "sdsat(k=1)",
    "sdsat(k=5)",
    "sdsat(k=3, passes=1)",
    "sdsat(k=13, passes=1)",
    "sdsat(k=3, tree=12)",
    "sdsat(k=4, tree=(3, 2, 1))",
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SETTINGS)
def test_contract(spec: str, folder: str) -> None:
    check_drafter(bound(spec, folder))
    check_distribution(bound(spec, folder))


@pytest.mark.parametrize("spec", SETTINGS[1:])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=1.3, top_p=0.8)],
    ids=["T=1", "top-p"],
)
def test_the_distribution_is_the_targets(spec: str, sampling: SamplingParams, folder: str) -> None:
    """Of the four tokens that follow, where answers are informed and trees are accepted."""
    target = Taught(4, 2, folder)
    accepted: set[int] = set()

    def answer(drafter: Drafter, sampler: Enumerated) -> tuple[int, ...]:
        options = {"params": sampling, "budget": FixedBudget(8)}
        sequence = pairs.sequence(target, drafter, [0, 1], 4, sampler, **options)
        while not sequence.finished:
            step([sequence], target)
        accepted.add(sequence.stats.accepted)
        return tuple(sequence.ids[2:])

    ours = enumerate_distribution(partial(answer, bound(spec, folder)))
    assert_same_distribution(ours, enumerate_distribution(partial(answer, parse("none"))))
    assert max(accepted) >= 2


# -------------------------------------------------------------------------- its two choices


def test_questions_go_where_drafts_end() -> None:
    assert questions((0.9, 0.9, 0.9), 3, 6, 99) == (0, 0, 0, 3)
    assert questions((0.1, 0.5, 0.5), 1, 3, 99) == (2, 0)
    assert questions((0.5, 0.5, 0.5), 1, 5, 99) == (2, 2)
    # With little room it is the paper's two passes: draft all that was found, or ask.
    assert questions((0.9,) * 13, 13, 13, 99) == (0,) * 14
    assert questions((0.9,) * 13, 0, 13, 99) == (13,)


TWENTIETHS = st.integers(0, 20).map(lambda i: i / 20)


@given(
    p=st.lists(st.lists(TWENTIETHS, min_size=1, max_size=4), min_size=1, max_size=4),
    nodes=st.integers(0, 30),
)
def test_trees_are_likely(p: list[list[float]], nodes: int) -> None:
    p = [sorted(row, reverse=True) for row in p]
    paths = list(itertools.islice(likeliest(p, [3] * len(p)), nodes))

    def reached(path: tuple[int, ...]) -> float:
        return math.prod(p[depth][rank] for depth, rank in enumerate(path))

    for number, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:number]
    every = [
        path
        for length in range(1, len(p) + 1)
        for path in itertools.product(*(range(min(3, len(row))) for row in p[:length]))
        if reached(path) > 0
    ]
    assert len(set(paths)) == len(paths) == min(nodes, len(every))
    best = sorted(map(reached, every), reverse=True)[:nodes]
    assert list(map(reached, paths)) == pytest.approx(best)


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sdsat(k=0)", "k must be an integer >= 1, got 0"),
        ("sdsat(k=3, passes=3)", "passes must be 1 or 2, got 3"),
        ("sdsat(k=3, tree=0)", "tree must be an integer >= 1, got 0"),
        ("sdsat(k=3, tree=())", r"such as \(3, 2, 1\), got \(\)"),
        ("sdsat(k=3, tree=(2, 0))", r"such as \(3, 2, 1\), got \(2, 0\)"),
        ("sdsat(k=3, tree=2.5)", r"such as \(3, 2, 1\), got 2.5"),
        ("sdsat(k=3, passes=1, tree=4)", "tree=4 needs passes=2"),
        ("sdsat", "k"),
    ],
)
def test_options_are_checked(spec: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(spec)


def test_models_must_have_been_taught(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"created in memory was not trained with .*train sdsat"
    ):
        Engine.from_pretrained(tiny.model(), tokenizer=tiny.tokenizer(), drafter="sdsat(k=3)")
    with pytest.raises(UnsupportedError, match="was not trained with adaptive tokens"):
        bound("copyspec+sdsat(k=3)", str(tmp_path))
    (tmp_path / "sdsat.json").write_text("{}", encoding="utf-8")
    with pytest.raises(LoadError, match="has no valid adaptive tokens"):
        bound("sdsat(k=3)", str(tmp_path))
    with pytest.raises(DrafterError, match="bound to a model"):
        SDSAT(3).open(None)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- on models

A = 9
"""The adaptive token of the tiny model, which would love to say it."""
BUILTIN = "edit-7m-sdsat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    made = copy.deepcopy(tiny.model())
    with torch.no_grad():
        made.lm_head.weight[A] = 2 * made.lm_head.weight[40]
    made.generation_config.suppress_tokens = [A]
    made.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    AdaptiveTokens(tokens=(A,), L=5, objective="improved").save(path)
    return str(path)


PROMPTS = [[5, 6, 7, 8] * 5, [12] * 11, [20, 30, 40], list(range(40, 90))]


@pytest.mark.parametrize(
    "spec", ["sdsat(k=5)", "sdsat(k=4, tree=12)", "copyspec+sdsat(k=3, passes=1)"]
)
def test_answers_are_the_plain_ones(spec: str, model: str) -> None:
    engine = Engine.from_pretrained(model, drafter=spec)
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("drafter", {"temperature": 0.0}),
        ("auto", {"temperature": 1.0, "seed": 3}),
        (7, {"temperature": 0.2, "seed": 5, "top_k": 10, "top_p": 0.95}),
    ]
    for budget, sampling in cases:
        answers = same_answers(engine, PROMPTS, spec, max_new_tokens=16, budget=budget, **sampling)
        assert all(A not in a.tokens for a in answers)
        assert sum(a.stats.probes for a in answers) > 0


@pytest.mark.slow
@pytest.mark.skipif(BUILTIN not in builtin.names(), reason=f"{BUILTIN} is not installed")
@pytest.mark.parametrize("spec", ["sdsat(k=3)", "sdsat(k=2, passes=1)", "sdsat(k=5, tree=16)"])
def test_the_built_in_model_that_was_taught_drafts_for_itself(spec: str) -> None:
    engine = Engine.from_pretrained(builtin.path(BUILTIN), dtype="float32")
    before, message = builtin.demo()
    asked = [builtin.edit_messages("shop.py", message, before[:400])]
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        options: dict[str, Any] = {"max_new_tokens": 60, "budget": "drafter", **sampling}
        [found] = same_answers(engine, asked, spec, **options)
        assert found.stats.accepted > 0
        assert 10 not in found.tokens


@pytest.mark.parametrize("architecture", sorted({"lfm2", "mamba2"} & ALL.keys()))
def test_chain_models_answer_the_plain_ones(architecture: str, folder: str) -> None:
    """Recurrent ones compute again what a rejected draft or a question has touched."""
    loaded = load(build(architecture))
    if loaded.capabilities.shape == "plain":
        pytest.skip("; ".join(loaded.capabilities.reasons))
    facts = replace(loaded.facts, name=folder)
    for spec in ("sdsat(k=3)", "sdsat(k=2, passes=1)"):
        engine = Engine(loaded, drafter=parse(spec).bind(facts), budget=6)
        for ids in PROMPTS:
            expected = engine.generate(ids, max_new_tokens=20, drafter="none", temperature=0.0)
            answer = engine.generate(ids, max_new_tokens=20, temperature=0.0)
            assert answer.tokens == expected.tokens
            assert answer.stats.probes > 0 or len(answer.tokens) == 1
