"""An engine that hosts our drafters as vLLM does, without a model: its answers are known before."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from draftsmith.core.budget import FixedBudget
from draftsmith.core.loop import start, step
from draftsmith.core.sampling import Distribution, TorchSampler
from draftsmith.core.sequence import Sequence
from draftsmith.core.stats import Stats
from draftsmith.core.target import ModelFacts, Shape
from draftsmith.drafters.registry import parse
from draftsmith.lab.bench.replay import ReplayRow, ReplayTarget

VOCAB, BEYOND = 60, 1 << 20


@dataclass
class Record:
    """A request, with the names that vLLM's own records have."""

    prompt: list[int]
    answer: list[int]
    sampling_params: Any = None
    output: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)


def record(
    seed: int, prompt: int = 40, answer: int = 60, temperature: float = 0.0, **extra: Any
) -> Record:
    """A request whose answer mostly copies its prompt, some of it changed."""
    random = Random(seed)
    ids = [random.randrange(3, VOCAB) for _ in range(prompt)]
    copied = (ids * (1 + answer // prompt))[:answer]
    told = [random.randrange(3, VOCAB) if random.random() < 0.15 else token for token in copied]
    params = SimpleNamespace(extra_args=extra, max_tokens=10 * answer, temperature=temperature)
    return Record(ids, told, params)


class Engine:
    """Steps over some of its requests; greedy verification of their drafts."""

    def __init__(self, requests: dict[str, Record]) -> None:
        self.requests = requests
        self.input_batch: Any = None
        self.scheduled: dict[str, list[int]] = {}
        self.sampled: list[list[int]] = []

    @property
    def open(self) -> list[str]:
        return [name for name, one in self.requests.items() if len(one.output) < len(one.answer)]

    def step(self, names: abc.Sequence[str], reading: abc.Sequence[str] = ()) -> None:
        """One pass over these requests, in this order; those `reading` get no token."""
        self.sampled, self.scheduled = [], {}
        for name in names:
            one, tokens = self.requests[name], list[int]()
            if name not in reading:
                rest, draft = one.answer[len(one.output) :], one.draft
                right = next((i for i, t in enumerate(draft) if [t] != rest[i : i + 1]), len(draft))
                tokens = rest[: right + 1]
                if draft:
                    self.scheduled[name] = draft
            one.draft = []
            one.output += tokens
            self.sampled.append(tokens)
        rows = [self.requests[name].ids for name in names]
        ids = np.full((len(rows), 8 + max(map(len, rows))), -7, np.int32)
        for row, known in zip(ids, rows, strict=True):
            row[: len(known)] = known
        self.input_batch = SimpleNamespace(
            req_ids=list(names), token_ids_cpu=ids, num_tokens_no_spec=np.array([*map(len, rows)])
        )

    def take(self, drafts: abc.Sequence[list[int]]) -> None:
        for name, draft in zip(self.input_batch.req_ids, drafts, strict=True):
            self.requests[name].draft = draft


class _Chains(ReplayTarget):
    """A recording that is read like vLLM reads: chains only, none beside the prompt."""

    shape: Shape = "chain"

    def __init__(self, answer: abc.Sequence[int], vocab_size: int, tokens: int) -> None:
        super().__init__(answer, vocab_size)
        self.tokens = tokens

    def room(self, row: ReplayRow) -> int:
        return self.tokens if row.answered else 0


def replayed(
    prompt: abc.Sequence[int],
    answer: abc.Sequence[int],
    drafter: str,
    vocab_size: int,
    tokens: int,
    limit: int = BEYOND,
    **context: Any,
) -> Stats:
    """What our own loop makes of the same answer, with drafts of so many tokens."""
    model = ModelFacts(layers=2, heads=2, vocab_size=vocab_size, shape="chain")
    bound, target = parse(drafter).bind(model), _Chains(answer, vocab_size, tokens)
    sequence = Sequence(
        prompt, drafter=bound, budget=FixedBudget(max(tokens, bound.preferred_width())),
        distribution=Distribution((), greedy=True), sampler=TorchSampler.seeded(0),
        vocab_size=vocab_size, limit=limit,
        stop_rules=(lambda own, _: "length" if own.generated >= len(answer) else None,),
    )  # fmt: skip
    for name, value in context.items():
        setattr(sequence.context, name, value)
    start(sequence, target)
    while not sequence.finished:
        step([sequence], target)
    sequence.end_drafter()
    assert sequence.drafter_error is None
    return sequence.stats
