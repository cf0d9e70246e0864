"""A trained head that is simulated: it knows an answer, and is wrong as often as it should be."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.draft import ROOT
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.drafters.auto import AutoState
from draftsmith.drafters.auto_head import HeadRows
from draftsmith.drafters.logit_rows import ROW, TOP, WHOLE
from draftsmith.drafters.mixer_prior import prior
from draftsmith.drafters.tree_search import LARGEST
from draftsmith.lab.bench.generations import Generation

BEST = 64
"""Tokens that the noise may bring to the top."""


class Plain(NamedTuple):
    """A plain answer, with the model's logits and the noise of a head at each of its places."""

    row: Generation
    logits: Tensor
    noise: Tensor

    @classmethod
    def of(cls, row: Generation, model: Any) -> Plain:
        ids, start = torch.tensor([[*row.prompt_ids, *row.output_ids]]), len(row.prompt_ids)
        with torch.inference_mode():
            logits = model(ids).logits[0, start - 1 : -1]
        generator = torch.Generator().manual_seed(start)
        return cls(row, logits, torch.randn((len(logits), BEST), generator=generator))


class Simulated:
    """What `HeadRows` asks, in place of a bound head: it knows an answer in part."""

    config, chain, lock = SimpleNamespace(depth=6), False, nullcontext()

    def __init__(self, answer: list[int], rows: Any) -> None:
        self.answer, self.rows, self.passes = answer, rows, 0

    def begin(self, ctx: Context) -> int:
        """Return how many nodes it can be asked about after this text."""
        self.done, self.paths = len(ctx.ids) - ctx.prompt_length, list[list[int]]()
        return LARGEST

    def close(self) -> None:
        """Nothing is held."""

    def ask(self, _: Any, questions: Any) -> list[list[int]]:
        """Return the place in the answer whose row is given, for each node."""
        self.passes += 1
        above = lambda parent: [] if parent == ROOT else self.paths[parent]  # noqa: E731
        new = [[*above(parent), token] for token, parent in questions[0]]
        self.paths += new
        return [[self._place(path) for path in new or [[]]]]

    def _place(self, path: list[int]) -> int:
        place = self.done + len(path)
        right = self.answer[self.done : place] == path and place < len(self.answer)
        return place if right else sum(path) % len(self.answer)

    def likeliest(self, places: list[int], _: int) -> tuple[Any, Any]:
        """Return the tokens and probabilities of these places."""
        rows = self.rows[places]
        return torch.tensor(rows["tokens"]), torch.tensor(rows["probs"]) / WHOLE


class WithHead(Drafter):
    """`auto` with a simulated head."""

    name = "auto"

    def __init__(self, auto: Any, head: Simulated) -> None:
        self.auto, self.head = auto, HeadRows(cast("Any", head))
        self.head.entries = cast("Any", head)

    def open(self, ctx: Context) -> DrafterState:
        state = AutoState(self.auto, prior(1), head=self.head)
        state.take(ctx)
        state.read()
        return state


class Quality(NamedTuple):
    """How good a simulated head is."""

    strength: float
    """Standard deviation of the noise on its logits."""
    temperature: float
    """What its logits are divided by, so that its probabilities are calibrated."""


def noisy(logits: Tensor, noise: Tensor, quality: Quality) -> Any:
    """Return the rows, (n,) ROW, of a head."""
    probs, ids = logits.softmax(-1).topk(BEST)
    found, places = _probs(probs, noise, quality)[:, :-1].topk(TOP)
    rows = np.zeros(len(found), ROW)
    rows["tokens"], rows["probs"] = ids.gather(-1, places), found * WHOLE
    return rows


def _probs(probs: Tensor, noise: Tensor, quality: Quality) -> Tensor:
    """Probabilities (n, BEST + 1) that a head gives the best tokens, and all others together."""
    rest = (1 - probs.sum(-1, keepdim=True)).clamp_min(1e-6).log()  # without noise
    changed = torch.cat([probs.log() + quality.strength * noise, rest], -1)
    return (changed / quality.temperature).softmax(-1)


def quality_for(share: float, logits: Tensor, noise: Tensor) -> Quality:
    """Return the quality of a head that is right in this share of the places.

    Its temperature gives the model's best tokens the highest likelihood.
    """
    probs = logits.softmax(-1).topk(BEST)[0]

    def right(strength: float) -> float:
        found = _probs(probs, noise, Quality(strength, 1.0))[:, :-1]
        return float((found.argmax(-1) == 0).float().mean())

    def surprise(temperature: float) -> float:
        found = _probs(probs, noise, Quality(low, temperature))[:, 0]
        return float(-found.clamp_min(1e-9).log().mean())

    low, high = 0.0, 64.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if right(middle) > share else (low, middle)
    return Quality(low, min((1 + step / 8 for step in range(33)), key=surprise))
