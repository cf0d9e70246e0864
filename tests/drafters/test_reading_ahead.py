"""A draft model that reads ahead what it is expected to copy: same drafts, fewer passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from time import sleep
from typing import Any

import pytest
import torch
from pairs import Parrot

import tiny
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import SamplingParams, TorchSampler
from draftsmith.drafters.draft_model import draft_model
from draftsmith.drafters.draft_model.draft_model import DraftModel
from draftsmith.drafters.draft_model.drafting import BoundDraftModel
from draftsmith.drafters.longest_match import LongestMatch
from draftsmith.engine.engine import Engine
from draftsmith.model.load import load

IDS = [5, 6, 7, 8, 9] * 12
"""A text that a model of it would repeat; the parrot repeats it."""


@pytest.fixture(autouse=True)
def _parrot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses in every pass, whatever that costs."""
    monkeypatch.setattr(draft_model, "LongestMatch", Parrot)


def bound(model: Any = None, **options: Any) -> BoundDraftModel:
    """`model` as a drafter for the tiny model."""
    own = load(tiny.model(), tokenizer=tiny.tokenizer())
    config = DraftModel(
        tiny.model() if model is None else model,
        **{"tokenizer": tiny.tokenizer(), "confidence": 0, "tokens": 12} | options,
    )
    found: Any = config.bind(own.facts)
    return found  # type: ignore[no-any-return]


def drafts(drafter: BoundDraftModel, params: SamplingParams) -> tuple[list[Sequence[int]], int]:
    """Drafts behind a text that grows by each of them and one more id; passes it took."""
    passes, original = 0, drafter.runner.forward

    def counting(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return original(*args)

    drafter.runner.forward = counting  # type: ignore[method-assign]
    size = drafter.runner.vocab_size
    contexts = [
        Context(list(IDS[:n]), n, size, params, TorchSampler.seeded(n), budget=12, depth=12)
        for n in (60, 37)
    ]
    states = [drafter.open(ctx) for ctx in contexts]
    found = []
    for turn in range(6):
        made = drafter.draft(states, contexts)
        for ctx, draft in zip(contexts, made, strict=True):
            found.append(draft.tokens)
            ctx.ids = [*ctx.ids, *draft.tokens[: 3 + turn], 5 + turn % 3]
    for state in states:
        state.close()
    return found, passes


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=1.2, top_p=0.9)],
    ids=["greedy", "nucleus"],
)
@pytest.mark.parametrize("reproducible", [False, True])
def test_drafts_are_those_of_one_pass_per_token(params: SamplingParams, reproducible: bool) -> None:
    with_guesses, passes = drafts(bound(reproducible=reproducible), params)
    without, plain = drafts(bound(reproducible=reproducible, copies=False), params)
    assert with_guesses == without
    assert passes <= plain


def test_a_drafter_that_repeats_needs_a_third_of_the_passes() -> None:
    """Its weights say "the token after the last one": the parrot guesses every one of them."""
    model = copy.deepcopy(tiny.model(layers=1))
    circular(model)
    some, passes = drafts(bound(model), SamplingParams())
    assert some[0] == tuple((IDS * 2)[60:72])
    assert drafts(bound(model, copies=False), SamplingParams()) == (some, 72)
    assert passes < 72 / 3


def circular(model: Any) -> None:
    """5 6 7 8 9 5 6 …, whatever came before: no attention, no MLP, an embedding and a head."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        size = model.config.hidden_size
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        for i in range(5, 10):
            model.model.embed_tokens.weight[i, i % size] = 1
            model.lm_head.weight[5 + (i - 4) % 5, i % size] = 9


def test_how_far_it_reads_is_not_left_to_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide passes round differently in half precision, so a seed would not mean the same again."""
    monkeypatch.setattr(draft_model, "LongestMatch", LongestMatch)
    half = copy.deepcopy(tiny.model()).to(torch.bfloat16)
    config = DraftModel(half, tokenizer=tiny.tokenizer(), confidence=0, tokens=12)
    found = []
    for wait in (0.0, 0.002):  # the second time wide passes are costly
        engine = Engine.from_pretrained(
            tiny.model(), tokenizer=tiny.tokenizer(), drafter=config, budget="drafter"
        )
        widths: list[int] = []
        drafter: Any = engine.drafter
        original = drafter.runner.forward

        def slow(rows: Any, nodes: Any, forward: Any = original, wait: float = wait) -> Any:
            widths.append(len(nodes[0]))  # noqa: B023  read before the next turn
            sleep(wait * len(nodes[0]))
            return forward(rows, nodes)

        drafter.runner.forward = slow
        result = engine.generate(IDS, max_new_tokens=40, temperature=1.2, seed=3)
        found.append((result.tokens, widths))
    assert found[0] == found[1]
    assert max(found[0][1]) > 1
