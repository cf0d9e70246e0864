"""Drafted tokens whose keys and values are not finite, which plain decoding never meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from architectures import ALL, VOCAB, build, prompt
from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.tree import Continuation, merge
from draftsmith.engine.engine import Engine
from draftsmith.integrations.transformers import accelerate
from draftsmith.model.load import load
from draftsmith.testing import Scripted

BAD = 5
"""The id whose embedding is not finite."""


def poison(model: Any, value: float) -> None:
    """Only where it is read: a head that is tied to the embeddings stays what it was."""
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = value


def mask_heads(model: Any, ids: list[int]) -> None:
    """Give ids a logit of -inf, as some models do."""
    bias = torch.zeros(VOCAB)
    bias[ids] = -torch.inf
    model.get_output_embeddings().bias = torch.nn.Parameter(bias)


def careless(answer: list[int], shape: str) -> Scripted:
    """Drafts the right ids with a bad one among them, or beside them, in every second draft."""

    def propose(ctx: Context) -> Draft:
        done = len(ctx.ids) - ctx.prompt_length
        right = answer[done : done + 6]
        if done % 2 or len(right) < 6:
            return Draft.chain(right[: ctx.budget], "careless")
        if shape == "chain":
            return Draft.chain([*right[: done % 3], BAD, *right[done % 3 : 5]], "careless")
        branches = [right[0], BAD], right[:4]
        return merge([Continuation(branch, "careless") for branch in branches])

    return Scripted(propose)


CASES = [(name, torch.nan, False) for name in ALL]
CASES += [(name, 1e38, False) for name in ("gpt2", "gemma2", "bloom", "gpt_neo")]
CASES += [(name, torch.inf, True) for name in ("llama", "gpt2", "bloom", "qwen3_next")]


@pytest.mark.failing_passes
@pytest.mark.filterwarnings("ignore:a pass with drafts failed")
@pytest.mark.parametrize(("name", "value", "sampled"), CASES)
def test_a_token_that_overflows_changes_nothing(name: str, value: float, sampled: bool) -> None:
    model = build(name)
    poison(model, value)
    ids = torch.tensor([prompt(20)])
    ids[ids == BAD] = 6
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "suppress_tokens": [BAD]}
    options |= {"do_sample": sampled, "attention_mask": torch.ones_like(ids), "use_cache": True}
    torch.manual_seed(0)
    expected = model.generate(ids, **options)
    shape = load(model).capabilities.shape
    if shape == "plain":
        pytest.skip("it verifies no drafts")
    answer = expected[0, 20:].tolist()
    with accelerate(model, careless(answer, shape), budget=6) as handle:
        torch.manual_seed(0)
        assert model.generate(ids, **options).tolist() == expected.tolist()
    assert handle.stats.accepted
    assert handle.stats.tokens == handle.stats.passes + handle.stats.accepted


@pytest.mark.failing_passes
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_rows_of_a_batch_recover_alone(name: str) -> None:
    model = build(name)
    engine = Engine(load(model))
    mask_heads(model, [BAD])
    prompts = [prompt(n, seed=n) for n in (5, 17, 9)]
    for ids in prompts:
        ids[:] = [token if token != BAD else 6 for token in ids]
    answers = [engine.generate(ids, max_new_tokens=30, drafter="none").tokens for ids in prompts]
    poison(model, torch.nan)
    by_prompt = dict(zip(map(tuple, prompts), answers, strict=True))

    def propose(ctx: Context) -> Draft:
        answer = by_prompt[tuple(ctx.ids[: ctx.prompt_length])]
        return careless(answer, "tree").propose(ctx)

    found = engine.generate(prompts, max_new_tokens=30, drafter=Scripted(propose), budget=6)
    assert [result.tokens for result in found] == answers
    assert all(result.stats.accepted for result in found)
