"""Chooses CopySpec's γ for a model, from the model's own answers.

Source: CopySpec, section 5.2 (attempts and accepted tokens) and appendix A (similarity of γ tokens
and the next one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from draftsmith.core.stats import Stats, total
from draftsmith.drafters.copyspec import CopySpec
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, PromptError
from draftsmith.lab.bench.cost import Cost, Slope
from draftsmith.lab.bench.estimate import Estimate, predict
from draftsmith.lab.bench.records import Record
from draftsmith.lab.bench.replay import replay
from draftsmith.lab.bench.run import encoded, filled
from draftsmith.lab.lines import Finished
from draftsmith.lab.tune.pld_plus import check, identity
from draftsmith.model.loaded import LoadedModel
from draftsmith.model.measure import pass_cost
from draftsmith.text.tokenizer import decode

GAMMAS = tuple(range(1, 11))
EPOCHS, BATCH, RATE = 2, 256, 1e-3
"""ours: the paper does not say how embeddings are fine-tuned. Adam, one matrix, both sides."""

Text = tuple[list[int], list[int]]
"""Ids of a prompt and of its answer."""


@dataclass(frozen=True, slots=True)
class Gamma:
    """Result of γ tokens on a model's answers."""

    gamma: int
    similarity: float
    """Mean cosine between the average of γ tokens' embeddings and the next token's."""
    stats: Stats
    estimate: Estimate

    def as_dict(self) -> dict[str, Any]:
        """Return the row as `--json` prints it."""
        attempts = self.stats.attempts
        return {
            "gamma": self.gamma,
            "similarity": None if isnan(self.similarity) else self.similarity,
            "attempts": attempts,
            "accepted_per_attempt": self.stats.accepted / attempts if attempts else 0.0,
            "copied_share": self.stats.accepted_share,
            "tokens_per_pass": self.stats.tokens_per_pass,
            "speedup": self.estimate.speedup,
        }

    def cells(self) -> list[str]:
        """Return one row of the table with `HEADS`."""
        row = self.as_dict()
        return [
            str(self.gamma),
            "" if isnan(self.similarity) else f"{self.similarity:.3f}",
            f"{row['attempts']:,}",
            f"{row['accepted_per_attempt']:.2f}",
            f"{row['copied_share']:.1%}",
            f"{row['tokens_per_pass']:.3f}",
            f"{row['speedup']:.3f}×",
        ]


HEADS = ("γ", "similarity", "attempts", "accepted/attempt", "copied", "tokens per pass",
         "estimated speed")  # fmt: skip


def answers(
    engine: Engine,
    records: Sequence[Record],
    max_new_tokens: int,
    finished: Finished,
    advance: Callable[[int], None],
) -> tuple[list[Text], list[str]]:
    """Generate plain greedy answers, later turns after earlier ones; raises LoadError if none.

    Returns the texts, and a line for each prompt that could not be used.
    """
    model, texts, wrong = engine.model, list[Text](), list[str]()
    check(model)
    known, written = identity(model), dict[tuple[int, str], str]()

    def plain(ids: list[int]) -> list[int]:
        result = engine.generate(ids, temperature=0.0, max_new_tokens=max_new_tokens)
        return list(result.tokens)

    for record in records:
        advance(1)
        try:
            ids = encoded(model, filled(record, 0, written, records))
        except PromptError as error:
            wrong.append(f"{record.id}: {error}")
            continue
        answer = finished.recall(["plain", *known, max_new_tokens, ids], partial(plain, ids))
        written[0, record.id] = decode(model.tokenizer, answer)
        texts.append((ids, answer))
    if not texts:
        raise LoadError(f"no prompt could be used; the first: {wrong[0]}")
    return texts, wrong


def cost_here(model: LoadedModel) -> Slope:
    """Measure the cost of CopySpec's drafts of ten tokens on this machine."""
    costs = pass_cost(model, widths=(1, 11))
    return Slope((costs[11] / costs[1] - 1) / 10, costs[1])


def measured(engine: Engine, texts: Sequence[Text], limit: int, cost: Cost, gamma: int) -> Gamma:
    """Replay the answers with copies of ten tokens after γ equal ones."""
    drafter, vocab_size = CopySpec(gamma=gamma), engine.model.vocab_size
    replays = [replay(*text, drafter, vocab_size, limit=limit) for text in texts]
    embeddings = engine.model.model.get_input_embeddings().weight
    return Gamma(
        gamma,
        similarity(embeddings, texts, gamma),
        total([one.stats for one in replays]),
        predict(replays, cost, None, str(drafter)),
    )


def similarity(embeddings: Tensor, texts: Sequence[Text], gamma: int) -> float:
    """Mean cosine between the average embedding of γ tokens and that of an answer's next one.

    `embeddings` (V, D), the model's own, are first fine-tuned as a left-γ skip-gram on prompts and
    answers, over the ids that occur. Source: appendix A.
    """
    long = [(len(prompt), [*prompt, *answer]) for prompt, answer in texts]
    long = [(begin, ids) for begin, ids in long if len(ids) > gamma]
    if not long:
        return nan
    sequences = [torch.tensor(ids, device="cpu") for _, ids in long]
    windows = torch.cat([ids.unfold(0, gamma + 1, 1) for ids in sequences])
    own = torch.cat([torch.arange(gamma, len(ids), device="cpu") >= begin for begin, ids in long])
    known, windows = torch.unique(windows, return_inverse=True)
    left, right = windows[:, :-1], windows[:, -1]
    E = embeddings.detach()[known.to(embeddings.device)].float().cpu().clone().requires_grad_()  # noqa: N806
    optimizer = torch.optim.Adam([E], lr=RATE)
    order = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        shuffled = torch.randperm(len(windows), generator=order, device="cpu")
        for some in torch.split(shuffled, BATCH):
            optimizer.zero_grad()
            # log P(t | C_left) over the ids that occur
            loss = cross_entropy(E[left[some]].mean(1) @ E.T, right[some])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        return float(cosine_similarity(E[left[own]].mean(1), E[right[own]], dim=-1).mean())


def best(found: Sequence[Gamma]) -> Gamma:
    """Return the γ with the highest predicted speed; of equal ones the largest."""
    return max(found, key=lambda one: (round(one.estimate.speedup, 3), one.gamma))
