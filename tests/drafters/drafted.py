"""What tests of drafters share: contexts, and answers that must be the plain ones."""

from __future__ import annotations

from typing import Any

from draftsmith.core.drafter import Context
from draftsmith.core.sampling import SamplingParams, TorchSampler


def context(ids: list[int], vocab_size: int = 300_000, **options: Any) -> Context:
    """A greedy sequence that is a prompt of `ids`, with a budget and a depth of 64 by default."""
    return Context(
        ids=ids,
        prompt_length=len(ids),
        vocab_size=vocab_size,
        sampling=SamplingParams(),
        sampler=TorchSampler.seeded(0),
        **{"budget": 64, "depth": 64} | options,
    )


def same_answers(engine: Any, prompts: list[Any], drafter: Any, **options: Any) -> list[Any]:
    """Answers with a drafter; their tokens are those of plain decoding."""
    plain = engine.generate(prompts, drafter="none", **options)
    found: list[Any] = engine.generate(prompts, drafter=drafter, **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    return found
