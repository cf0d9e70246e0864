"""Translation between the vocabularies of draft model and target: the interface of all algorithms.

T and D are the vocabularies of target and drafter, `V_T` and `V_D` the widths of their logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from draftsmith.core.draft import Draft
from draftsmith.core.drafter import Context
from draftsmith.core.sampling import Distribution, SamplingParams
from draftsmith.core.target import MOST_BESIDE_DRAFT
from draftsmith.core.tree import Continuation, merge
from draftsmith.errors import DrafterError
from draftsmith.text.vocab import Intersection, Vocabulary

if TYPE_CHECKING:
    from draftsmith.drafters.own_model import OwnModel
    from draftsmith.model.rows import SequenceRow

Ids = tuple[int, ...]
"""Ids of the drafter."""

_WIDEST = 256
"""Maximum nodes of a pass that computes several branches."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A target and a draft model with the options of drafting; shared by all sequences."""

    shared: Intersection
    """T ∩ D."""
    target: Vocabulary | None
    """T; None if the target has no tokenizer, which only `standard` allows."""
    drafter: Vocabulary | None
    """D; None if the draft model has no tokenizer."""
    ends: frozenset[int]
    """The drafter's ids that end a text."""
    begins: Ids
    """Ids that the drafter's tokenizer puts before a text."""
    tokens: int
    """Maximum number of drafted tokens per step."""
    confidence: float
    """The draft ends after a token with a smaller probability."""
    reproducible: bool
    source: str
    """Source name of the draft's nodes."""
    psi: Literal["path", "enumerate"] = "path"
    """Rule for the distribution of the proposals of `slrs`."""
    context_length: int | None = None
    """Maximum number of tokens that the draft model can read; None: no limit."""

    def ends_after(self, token: int, confidence: float) -> bool:
        """Return whether a draft ends with this drafter token, for any remaining budget.

        The token itself stays in the draft, so its distribution is q.
        """
        return confidence < self.confidence or token in self.ends


class Mask:
    """Ids of a vocabulary that must not be drawn."""

    def __init__(self, forbidden: Tensor) -> None:
        """`forbidden` is (V_D,) bool."""
        self.forbidden = forbidden if bool(forbidden.any()) else None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return (V_D,) logits with -inf at forbidden ids."""
        if self.forbidden is None:
            return logits
        self.forbidden = self.forbidden.to(logits.device)
        return logits.masked_fill(self.forbidden, -math.inf)


@dataclass(frozen=True, slots=True)
class After:
    """Computes the draft model's logits for other continuations than the one it drafted.

    Valid for one draft, until the next one of the sequence begins.
    """

    drafter: OwnModel
    row: SequenceRow
    ids: Sequence[int]
    """The text as the draft model read it; drafted ids may follow in the same list."""
    length: int
    """Number of ids of the text."""

    def logits(self, before: Ids, branches: Sequence[Ids]) -> dict[Ids, Tensor]:
        """Return (V_D,) logits after the text, the ids `before` and each prefix of each branch.

        The prefixes include the empty one and the whole branch.
        """
        whole = [(*before, *branch) for branch in branches]
        with self.drafter.lock, torch.inference_mode():
            with suppress(Exception):  # such as too little memory: once more, with small passes
                return self._logits(len(before), self._groups(whole))
            try:
                return self._logits(len(before), ([branch] for branch in whole))
            except Exception as error:
                raise DrafterError(
                    "the draft model failed while its draft was verified, and without it no token "
                    f"has the right distribution ({type(error).__name__}: {error})"
                ) from error

    def _logits(self, known: int, groups: Iterable[Sequence[Ids]]) -> dict[Ids, Tensor]:
        """Compute what `logits` returns; `known` is the length of `before`."""
        found: dict[Ids, Tensor] = {}
        runner = self.drafter.runner
        runner.extend(self.row, self.ids[: self.length])
        runner.prefill(self.row, MOST_BESIDE_DRAFT)
        for group in groups:
            draft = merge([Continuation(branch, "after") for branch in group])
            [output] = runner.forward([self.row], [draft])
            paths: list[Ids] = [()]
            for token, parent in zip(draft.tokens, draft.parents, strict=True):
                paths.append((*paths[parent + 1], token))
            for path, logits in zip(paths, output.logits, strict=True):
                if len(path) >= known:  # all branches begin with `before`
                    found[path[known:]] = logits
        return found

    def _groups(self, branches: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        """Yield branches that share a pass; a single one if the model verifies chains only."""
        runner = self.drafter.runner
        most = min(_WIDEST, runner.room(self.row)) if runner.shape == "tree" else 0
        group: list[Ids] = []
        for branch in sorted(branches):
            if group and sum(map(len, group)) + len(branch) > most:
                yield group
                group = []
            group.append(branch)
        yield group


def drafting_distribution(p: SamplingParams) -> Distribution:
    """Return the distribution of these parameters without processors that read the text."""
    params = SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
    return Distribution.of(params, 0, ())


class Translation(ABC):
    """One sequence between two vocabularies, with one algorithm.

    In every step the drafting loop calls `begin`; then `scores`, `draw` and `take` once per drafter
    token until one of them ends the draft; then `draft`.
    """

    distribution: Distribution
    """Distribution of the drafter: greedy, or like the target's without processors of the text."""
    after: After
    """Set by the drafting loop for each draft."""
    limit: int
    """Maximum number of drafter tokens of the draft that `read` begins."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def begin(self, ctx: Context) -> Sequence[int]:
        """Begin a draft with the sampling parameters of `ctx`; return the result of `read`."""
        self.context = ctx
        self.distribution = drafting_distribution(ctx.sampling)
        return self.read(ctx)

    @property
    def reach(self) -> int:
        """Maximum number of drafter tokens per step."""
        return self.pair.tokens

    @abstractmethod
    def read(self, ctx: Context) -> Sequence[int]:
        """Return the drafter's ids of the text, where a new draft begins; empty: do not draft."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Return (V_D,) logits of the next drafter token, -inf for ids that must not be drawn.

        They are masked before temperature, top-k and top-p.
        """

    def draw(self, q: Tensor) -> int | None:
        """Draw a drafter token from the distribution q (V_D,); None ends the draft without one.

        Called only if the target samples.
        """
        return self.context.sampler.draw(q)

    @abstractmethod
    def take(self, token: int, q: Tensor | None, confidence: float) -> bool:
        """Add a drafter token to the draft; return whether to continue.

        q (V_D,) is the distribution it was drawn from, None for the arg-max of a greedy draft.
        `confidence` is its probability.
        """

    @abstractmethod
    def draft(self) -> Draft:
        """Return what was drafted since `read`, in target ids."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Drop all target ids at positions >= `length`."""
