"""The only place where a token is ever accepted.

`verify` serves every distribution and every draft. `verify_greedy` is its short cut where no
processor needs the prefix: the arg-max of all rows is taken at once, in one copy to the host for
the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.core.draft import ROOT, Draft, LazyDistribution, Proposal
from draftsmith.core.sampling import Distribution, Sampler, argmax

Emit = Callable[[int, Tensor | None], bool]
"""(token, its processed scores (1, V) or None) → whether the sequence ends with this token."""


class Rows(Protocol):
    """Logits (1+n+m, V), of which a walk asks for one row after the other."""

    def __getitem__(self, row: int, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Verification:
    """What one step decided."""

    path: tuple[int, ...]
    """Accepted nodes, root to leaf; their rows stay in the cache."""
    tokens: tuple[int, ...]
    """Emitted tokens: one per node of `path`, and the last one, which is not cached yet."""
    nodes: tuple[int | None, ...]
    """The draft node that had guessed each emitted token; None for the target's own."""

    @property
    def accepted(self) -> int:
        """Emitted tokens that a drafter had guessed."""
        return sum(node is not None for node in self.nodes)


def verify(
    draft: Draft,
    logits: Rows,
    distribution: Distribution,
    sampler: Sampler,
    prefix: Callable[[], Tensor | None],
    emit: Emit,
) -> Verification:
    """Walk `draft` under the target's `distribution`; lossless for guesses, samples and mixtures.

    logits: (1+n+m, V), row 0 follows the root, row 1+i follows node i. `prefix()` is the (1, T)
    ids so far, including what `emit` was told in this very walk. Processors see one row at a time,
    in the order of plain decoding; guesses cost exactly one draw per emitted token.
    Source: Leviathan et al. 2023, algorithm 1; for guesses, draw and follow.
    """

    def next_token(node: int) -> tuple[int, Tensor]:
        scores = distribution.scores(prefix() if distribution.needs_ids else None, logits[node + 1])
        return choose(scores, distribution, sampler, draft, draft.proposals.get(node)), scores

    return walk(draft, next_token, emit)


def verify_greedy(draft: Draft, choices: Sequence[int], emit: Emit) -> Verification:
    """`verify` for a greedy distribution without processors; `choices` (1+n) is the arg-max of each
    row."""
    return walk(draft, lambda node: (choices[node + 1], None), emit)


def walk(
    draft: Draft, next_token: Callable[[int], tuple[int, Tensor | None]], emit: Emit
) -> Verification:
    """Go down from the root while a child carries the next token; emits that token at each node.

    `next_token(node)` is the token that follows a node, with its scores.
    """
    children = draft.children()
    path: list[int] = []
    tokens: list[int] = []
    nodes: list[int | None] = []
    node = ROOT
    while True:
        token, scores = next_token(node)
        child = children.get((node, token))
        tokens.append(token)
        nodes.append(child)
        ended = emit(token, scores)
        # A token that ends the sequence stays out of the path: the cache never holds the last one.
        if child is None or ended:
            return Verification(tuple(path), tuple(tokens), tuple(nodes))
        path.append(child)
        node = child


def choose(
    scores: Tensor,
    distribution: Distribution,
    sampler: Sampler,
    draft: Draft,
    proposal: Proposal | None,
) -> int:
    """The next token at one node, distributed exactly as the target's distribution p.

    With a sampled child x ~ q: keep x with probability min(1, p(x)/q(x)), else draw from
    norm((p−q)₊). Where the distribution is greedy, p is one point and the same rule is arg-max.
    """
    if distribution.greedy:
        return int(argmax(scores))
    p = distribution.probs(scores)
    if proposal is None:
        return sampler.draw(p)
    q = proposal.q.to(p) if isinstance(proposal.q, Tensor) else proposal.q
    if proposal.child is not None:
        x = draft.tokens[proposal.child]
        ratio = p[x] / (q[x] if isinstance(q, Tensor) else q.of([x])[0].to(p))
        if sampler.accept(float(ratio)):
            return x
    if isinstance(q, Tensor):
        return sampler.draw(residual(p, q))
    return draw_residual(p, q, sampler)


def draw_residual(p: Tensor, q: LazyDistribution, sampler: Sampler) -> int:
    """A draw from norm((p−q)₊) that asks for few values of q.

    Draw x from p, keep it with probability max(0, 1 − q(x)/p(x)), repeat; after `q.draws` of them
    ask for q wherever p is not zero. It takes 1/Σ(p−q)₊ draws on average, and one minus the
    probability of acceptance is that very sum: per verified proposal it is one draw.
    """
    for _ in range(q.draws):
        x = sampler.draw(p)
        if sampler.accept(max(0.0, float(1 - q.of([x])[0].to(p) / p[x]))):
            return x
    possible = p.nonzero()[:, 0]
    whole = torch.zeros_like(p)
    whole[possible] = q.of(possible.tolist()).to(p)
    return sampler.draw(residual(p, whole))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p−q)₊) for (V,) distributions; p itself where rounding left nothing of the
    difference."""
    rest = (p - q).clamp_min(0)
    total = rest.sum()
    return rest / total if total > 0 else p
