"""Drafting token by token: for equal vocabularies, the union of two, or their intersection (TLI).

"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies", algorithms 5 (standard), 1 (union) and 4 (TLI). `docs/algorithms/draft_model.md`
shows the algorithms beside this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.core.draft import Draft, Proposal
from draftsmith.core.drafter import Context
from draftsmith.drafters.draft_model.translation import Mask, Pair, Translation


class TokenMap:
    """The token maps of a pair, as tensors and lists; shared by its sequences.

    With `beyond` the drafter may draw tokens that the target lacks: algorithm 1, not 4 and 5.
    """

    def __init__(self, pair: Pair, *, beyond: bool = False) -> None:
        self.pair = pair
        self.to_target: list[int] = pair.shared.to_target.tolist()
        self.rows = (pair.shared.to_target >= 0).nonzero()[:, 0]
        """Drafter ids of the tokens in T ∩ D."""
        self.columns = pair.shared.to_target[self.rows]
        """Target ids of the same tokens."""
        self.identity = torch.equal(self.rows, self.columns)
        self._to_drafter: list[int] = pair.shared.to_drafter.tolist()
        allowed = torch.zeros(len(self.to_target), dtype=torch.bool, device="cpu")
        allowed[self.rows] = True
        if beyond and pair.drafter is not None:
            for i, data in enumerate(pair.drafter.tokens):
                allowed[i] |= data is not None or i in pair.drafter.special
        self.mask = Mask(~allowed)
        """Forbids padding and, without `beyond`, tokens outside T."""

    def distribution(self, q: Tensor, vocab_size: int) -> Tensor:
        """Return the distribution q (V_D,) in target ids (V_T,), without tokens outside T."""
        if self.identity and len(self.rows) == vocab_size == len(q):
            return q
        self.rows, self.columns = self.rows.to(q.device), self.columns.to(q.device)
        return q.new_zeros(vocab_size).index_copy_(0, self.columns, q[self.rows])

    def noise(self, of_target: Tensor, like: Tensor) -> Tensor:
        """Return (V_D,) the noise of each token from `of_target` (V_T,); -inf outside T."""
        of_drafter = of_target.new_full((len(self.to_target),), -math.inf)
        noise = of_target[self.columns.cpu()]
        return of_drafter.index_copy_(0, self.rows.cpu(), noise).to(like)

    def spelling(self, token: int) -> Sequence[int]:
        """Return the drafter's ids of one target token: the same token, or its bytes encoded."""
        mapped = self._to_drafter[token]
        target, drafter = self.pair.target, self.pair.drafter
        if mapped >= 0 or target is None or drafter is None:
            return (mapped,) if mapped >= 0 else ()
        return drafter.encode_known(target.tokens[token] or b"")


class TokenLevel(Translation):
    """Drafting of one sequence token by token. Algorithms 5, 1 and 4 differ in their `TokenMap`.

    A token outside T (algorithm 1) is a proposal that the target never accepts: nothing (⊥).
    """

    def __init__(self, maps: TokenMap) -> None:
        super().__init__(maps.pair)
        self.maps = maps
        self.ids: list[int] = []
        self.ends: list[int] = []
        """Number of drafter ids up to each target id."""

    def read(self, ctx: Context) -> Sequence[int]:
        self.limit = min(self.pair.tokens, ctx.budget, ctx.depth)
        self.tokens: list[int] = []
        self.distributions: list[Tensor] = []
        for token in ctx.ids[len(self.ends) :]:
            ids = self.maps.spelling(token)
            if not self.ends and tuple(ids[:1]) != self.pair.begins[:1]:
                self.ids += self.pair.begins
            self.ids += ids
            self.ends.append(len(self.ids))
        return self.ids if self.limit > 0 else ()

    def scores(self, logits: Tensor) -> Tensor:
        return self.maps.mask(logits)

    def draw(self, q: Tensor) -> int | None:
        if not self.pair.reproducible:
            return super().draw(q)
        ctx = self.context
        if ctx.noise is None:  # the host draws without shared noise: any guess is exact
            return int(q.argmax())
        n = len(ctx.ids) - ctx.prompt_length + len(self.tokens)
        return int((q.log() + self.maps.noise(ctx.noise.noise(n, ctx.vocab_size), q)).argmax())

    def take(self, token: int, q: Tensor | None, confidence: float) -> bool:
        if q is not None and not self.pair.reproducible:
            self.distributions.append(self.maps.distribution(q, self.context.vocab_size))
        target_id = self.maps.to_target[token]
        if target_id < 0:
            return False
        self.tokens.append(target_id)
        return len(self.tokens) < self.limit and not self.pair.ends_after(token, confidence)

    def draft(self) -> Draft:
        n = len(self.tokens)
        chain = Draft.chain(
            self.tokens, self.pair.source, self.distributions[:n] if self.distributions else None
        )
        if len(self.distributions) <= n:
            return chain
        return replace(
            chain, proposals={**chain.proposals, n - 1: Proposal(self.distributions[n], None)}
        )

    def truncate(self, length: int) -> None:
        del self.ends[length:]
        del self.ids[self.ends[-1] if self.ends else 0 :]
