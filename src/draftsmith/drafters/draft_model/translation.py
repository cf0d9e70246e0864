"""Between a drafter model's vocabulary and the target's: what every algorithm has to decide.

T and D are the vocabularies of target and drafter, `V_T` and `V_D` the widths of their logits.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Distribution, SamplingParams
from draftsmith.core.target import REST, Row, Target
from draftsmith.core.tree import Continuation, merge
from draftsmith.text.vocab import Intersection, Vocabulary

Ids = tuple[int, ...]
"""Ids of the drafter."""

_WIDEST = 256
"""Most nodes of a pass that answers for several branches."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A target and a drafter model with the options they draft by; shared by all sequences."""

    shared: Intersection
    """T ∩ D."""
    target: Vocabulary | None
    """T; None where the model has no tokenizer, which only `standard` can do without."""
    drafter: Vocabulary | None
    """D; None likewise."""
    ends: frozenset[int]
    """The drafter's ids that end a text."""
    begins: Ids
    """What the drafter's tokenizer puts before a text."""
    tokens: int
    """Most drafted tokens per step."""
    confidence: float
    """The draft ends after a token less probable than this."""
    reproducible: bool
    source: str
    """The drafter's name in drafts."""
    psi: Literal["path", "enumerate"] = "path"
    """How `slrs` knows the distribution of its proposals."""
    context_length: int | None = None
    """Tokens that the drafter model can read; None: any number."""

    def ends_after(self, token: int, confidence: float) -> bool:
        """Whether a draft ends with this drafter token, whatever room there is.

        The token itself stays in the draft, so its distribution is what q says.
        """
        return confidence < self.confidence or token in self.ends


class Mask:
    """Ids of one vocabulary that must never be drawn."""

    def __init__(self, forbidden: Tensor) -> None:
        """`forbidden` is (V_D,) bool."""
        self.forbidden = forbidden if bool(forbidden.any()) else None

    def __call__(self, logits: Tensor) -> Tensor:
        """(V_D,) logits with -inf at what must not be drawn."""
        if self.forbidden is None:
            return logits
        self.forbidden = self.forbidden.to(logits.device)
        return logits.masked_fill(self.forbidden, -math.inf)


@dataclass(frozen=True, slots=True)
class After:
    """The drafter model, asked about other continuations of a text than the one it drafted.

    Serves one draft: until the sequence's next one begins.
    """

    runner: Target[Any]
    lock: threading.RLock
    """Held while the runner is used."""
    row: Row
    ids: Sequence[int]
    """The text as the drafter model read it; what is drafted may be written behind it."""
    length: int
    """How many of them the text has."""

    def logits(self, before: Ids, branches: Sequence[Ids]) -> dict[Ids, Tensor]:
        """(V_D,) logits after the text, the ids `before` and each prefix of each branch.

        The empty prefix and the whole branch are among them.
        """
        found: dict[Ids, Tensor] = {}
        with self.lock, torch.inference_mode():
            self.runner.extend(self.row, self.ids[: self.length])
            self.runner.prefill(self.row, REST)
            for group in self._groups([(*before, *branch) for branch in branches]):
                draft = merge([Continuation(branch, "after") for branch in group])
                [output] = self.runner.forward([self.row], [draft])
                paths: list[Ids] = [()]
                for token, parent in zip(draft.tokens, draft.parents, strict=True):
                    paths.append((*paths[parent + 1], token))
                for path, logits in zip(paths, output.logits, strict=True):
                    if path[: len(before)] == before:
                        found[path[len(before) :]] = logits
        return found

    def _groups(self, branches: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        """Branches that share a pass; only one where the drafter model takes chains only."""
        tree = self.runner.shape == "tree"
        most = min(_WIDEST, self.runner.room(self.row)) if tree else 0
        group: list[Ids] = []
        for branch in sorted(branches):
            if group and sum(map(len, group)) + len(branch) > most:
                yield group
                group = []
            group.append(branch)
        yield group


class Translation(ABC):
    """One sequence between two vocabularies, under one algorithm.

    Every step the drafting loop calls `begin`, then `scores`, `draw` and `take` once per drafter
    token until one of them ends the draft, then `draft`.
    """

    distribution: Distribution
    """How the drafter draws: greedy, or like the target, without what reads the text."""
    after: After
    """What the drafting loop gives it for the draft that begins."""
    limit: int
    """Most drafter tokens of the draft that `read` begins."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def begin(self, ctx: Context) -> Sequence[int]:
        """`read`, for a draft under the distribution of `ctx`."""
        p = ctx.sampling
        self.context = ctx
        self.distribution = Distribution.of(
            SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p),
            ctx.prompt_length,
            (),
        )
        return self.read(ctx)

    @property
    def reach(self) -> int:
        """Most drafter tokens per step."""
        return self.pair.tokens

    @abstractmethod
    def read(self, ctx: Context) -> Sequence[int]:
        """The drafter's ids of the text so far, where a new draft begins; empty: draft nothing."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor | None:
        """(V_D,) logits of the next drafter token, -inf where it must not be drawn.

        They are masked before temperature, top-k and top-p. None ends the draft here.
        """

    def draw(self, q: Tensor) -> int | None:
        """A drafter token from the distribution q (V_D,), None to end the draft without one.

        Called where the target samples.
        """
        return self.context.sampler.draw(q)

    @abstractmethod
    def take(self, token: int, q: Tensor | None, confidence: float) -> bool:
        """Book a drafter token, and say whether to draft on.

        q (V_D,) is the distribution it was drawn from, None for the arg-max of a greedy draft;
        `confidence` is its probability.
        """

    @abstractmethod
    def draft(self) -> Draft:
        """What was drafted since `read`, in target ids."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget every target id at or beyond `length`."""
