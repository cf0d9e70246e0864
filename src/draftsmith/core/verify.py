"""Verification: the only place where a draft token is accepted.

`verify` handles every distribution and every draft. `verify_choices` is the fast path where the
token after each node is known already: for greedy decoding without processors the arg-max, and for
guesses on an accelerator a draw. One copy to the host provides them for all sequences of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.draft import ROOT, Draft, LazyDistribution, Proposal
from draftsmith.core.sampling import Distribution, Sampler, argmax

Emit = Callable[[int, Tensor | None], bool]
"""(token, its processed scores (1, V) or None) → whether the sequence ends with this token."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of verifying one draft."""

    path: tuple[int, ...]
    """Accepted nodes from the root to a leaf; their keys and values stay in the cache."""
    tokens: tuple[int, ...]
    """Emitted tokens: one per node of `path`, then the last one, which is not cached yet."""
    nodes: tuple[int | None, ...]
    """For each emitted token, the draft node with the same token; None for the target's own."""

    @property
    def accepted(self) -> int:
        """Number of emitted tokens that the draft contained."""
        return sum(node is not None for node in self.nodes)


def verify(
    draft: Draft,
    logits: Callable[[int], Tensor],
    distribution: Distribution,
    sampler: Sampler,
    prefix: Callable[[], Tensor | None],
    emit: Emit,
) -> Verification:
    """Verify `draft` under the target's `distribution`; lossless for guesses, samples and mixtures.

    `logits(0)` returns the logits (V,) after the root, `logits(1 + i)` those after node i; it is
    called once for each emitted token, in order. `prefix()` returns the (1, T) ids so far, with the
    tokens that this call has passed to `emit`. Processors see one position at a time, in the order
    of plain decoding. Guesses cost exactly one draw per emitted token.
    Source: Leviathan et al. 2023, algorithm 1; guesses are accepted if the target draws them.
    """

    def next_token(node: int) -> tuple[int, Tensor]:
        scores = distribution.scores(prefix() if distribution.needs_ids else None, logits(node + 1))
        return choose(scores, distribution, sampler, draft, draft.proposals.get(node)), scores

    return walk(draft, next_token, emit)


def verify_choices(draft: Draft, choices: Sequence[int], emit: Emit) -> Verification:
    """Verify `draft` with the target's tokens `choices` (1+n) after the root and each node."""
    return walk(draft, lambda node: (choices[node + 1], None), emit)


def walk(
    draft: Draft, next_token: Callable[[int], tuple[int, Tensor | None]], emit: Emit
) -> Verification:
    """Follow the draft from the root while a child has the next token; emit each next token.

    `next_token(node)` returns the token that follows a node, and its scores (1, V) or None.
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
        # A token that ends the sequence is not on the path: the cache never holds the last token.
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
    """Choose the token after one node, distributed exactly as the target's distribution p.

    If a child x was sampled from q, keep x with probability min(1, p(x)/q(x)), else draw from
    norm((p−q)₊). A greedy distribution is a single point, so the same rule becomes arg-max.
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
    """Draw from norm((p−q)₊) with few evaluations of q.

    Draw x from p and keep it with probability max(0, 1 − q(x)/p(x)); repeat. After `q.draws`
    attempts, evaluate q wherever p is not zero. An attempt succeeds with probability Σ(p−q)₊, which
    is also the probability that the proposal was rejected. So a verified proposal costs one attempt
    on average.
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
    """Return norm((p−q)₊) for distributions of shape (V,); p if the difference rounds to zero."""
    rest = (p - q).clamp_min(0)
    total = rest.sum()
    return rest / total if total > 0 else p
