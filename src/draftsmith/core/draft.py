"""A draft: the token tree that one target pass checks.

Legend used in the whole core: `n` draft nodes, `m` probe nodes, `V` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from draftsmith.errors import DrafterError

ROOT = -1
"""The parent of a first-level node: the last committed token."""


class LazyDistribution(Protocol):
    """A distribution over the target's vocabulary whose values are costly: verification asks for a
    few."""

    draws: int
    """Draws that a residual may take before it asks for every value it can need."""

    def of(self, tokens: Sequence[int]) -> Tensor:
        """(k,) probabilities of these `k` tokens, in float64."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter sampled at one node: the distribution it drew from, and the child carrying the
    draw.

    `q` is (V,), or a `LazyDistribution`: the distribution really sampled from, after temperature,
    truncation and masks. It may sum to less than one: the rest is the probability of proposing
    nothing, and `child` is None when nothing (⊥) was drawn.
    """

    q: Tensor | LazyDistribution
    child: int | None


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree of `n` draft nodes followed by `m` probe nodes; parents precede children.

    A node is a *guess* (copied, looked up, arg-max: no probabilities needed) unless its parent has
    an entry in `proposals`, which then must state the truth: a wrong `q` makes the output wrong
    without any error. Probe nodes ride in the same pass, see only their own ancestors, are never
    accepted; their logits go to `DrafterState.observe`.
    """

    tokens: tuple[int, ...] = ()
    """(n+m,) token ids."""
    parents: tuple[int, ...] = ()
    """(n+m,) index of the parent node, ROOT for children of the last committed token."""
    source: tuple[str, ...] = ()
    """(n+m,) name of the drafter that made each node."""
    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    """Sampled draws by parent node; empty for a draft of guesses."""
    probes: int = 0
    """m: how many of the last nodes are probes."""
    depths: tuple[int, ...] | None = None
    """(n+m,) distance in positions from the root, ROOT's children 1; None: the tree's own depth."""
    origins: tuple[int, ...] | None = None
    """(n+m,) position in the context's ids that each node was copied from; None: nothing was.

    -1 for a node that was not: invented, say, or copied from a `prediction` found nowhere in there.
    """
    chances: tuple[float, ...] | None = None
    """(n+m,) how probable it is that each node is accepted where its parent was; None: unknown.

    Guesses are trimmed by it to what pays in the pass; sampled nodes never are.
    """

    @classmethod
    def chain(
        cls,
        tokens: Iterable[int],
        source: str,
        q: Sequence[Tensor | LazyDistribution] | None = None,
        *,
        origins: Iterable[int] | None = None,
    ) -> Draft:
        """A single branch; with `q`, one distribution per token, the tokens were sampled from it.

        `origins` is where in the context each token was copied from: `range(j, j + n)`, say.
        """
        ids = tuple(tokens)
        if q is not None and len(q) != len(ids):
            raise DrafterError(f"{source}: {len(ids)} sampled tokens but {len(q)} distributions")
        proposals = {i - 1: Proposal(distribution, i) for i, distribution in enumerate(q or ())}
        return cls(
            ids,
            tuple(range(-1, len(ids) - 1)),
            (source,) * len(ids),
            proposals,
            origins=None if origins is None else tuple(origins),
        )

    def __len__(self) -> int:
        """Target positions this draft costs: draft and probe nodes."""
        return len(self.tokens)

    @property
    def size(self) -> int:
        """n: nodes that can be accepted."""
        return len(self.tokens) - self.probes

    @property
    def is_chain(self) -> bool:
        """Whether the pass is an ordinary causal continuation (no branches, no moved positions)."""
        return self.depths is None and all(p == i - 1 for i, p in enumerate(self.parents))

    def node_depths(self) -> tuple[int, ...]:
        """(n+m,) positions after the root, counted from 1."""
        if self.depths is not None:
            return self.depths
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Positions after the root that the deepest draft node has; 0 without draft nodes."""
        return max(self.node_depths()[: self.size], default=0)

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token) → draft node. Equal guess siblings are one: the first is kept."""
        index: dict[tuple[int, int], int] = {}
        for node in range(self.size):
            index.setdefault((self.parents[node], self.tokens[node]), node)
        # The sampled child owns its key: Leviathan's rule speaks about that very node.
        for parent, proposal in self.proposals.items():
            if proposal.child is not None:
                index[parent, self.tokens[proposal.child]] = proposal.child
        return index

    def first_branch(self) -> Draft:
        """One branch alone, without probes: what a chain-only target can verify.

        At a node with a proposal the sampled child is the branch, elsewhere the first child: the
        choice looks at structure only, never at token values, so samples stay exact.
        """
        keep: list[int] = []
        node, depths = ROOT, self.node_depths()
        while True:
            proposal = self.proposals.get(node)
            child = None if proposal is None else proposal.child
            if child is None:
                later = range(node + 1, self.size)
                child = next((c for c in later if self.parents[c] == node), None)
            if child is None or depths[child] != len(keep) + 1:
                return self.select(keep)
            keep.append(child)
            node = child

    def path_probs(self) -> list[float]:
        """Return (n+m,) how probable it is that each node is accepted, from `chances`."""
        found: list[float] = []
        for chance, parent in zip(self.chances or (), self.parents, strict=True):
            found.append(chance if parent == ROOT else chance * found[parent])
        return found

    def clip(self, depth: int) -> Draft:
        """Without the nodes deeper than `depth`, and without the proposals that would lie there.

        Blind to what was drawn: a proposal beyond the cut goes even if it drew nothing, else
        "nothing" would be judged by another distribution than a token.
        """
        if self.depths is None and not self.proposals and len(self) <= depth:
            return self  # no tree is deeper than it has nodes
        depths = self.node_depths()
        cut = {n for n in self.proposals if (0 if n == ROOT else depths[n]) >= depth}
        if not cut and (not depths or max(depths) <= depth):
            return self
        keep: list[int] = []
        kept: set[int] = {ROOT}
        for node, d in enumerate(depths):
            if d <= depth and self.parents[node] in kept:
                kept.add(node)
                keep.append(node)
        return self.select(keep, frozenset(cut))

    def select(self, keep: Sequence[int], without: frozenset[int] = frozenset()) -> Draft:
        """The nodes `keep` in this order, parents first, and their proposals but at `without`."""
        renumber = {ROOT: ROOT, **{old: new for new, old in enumerate(keep)}}
        proposals = {
            renumber[parent]: Proposal(p.q, None if p.child is None else renumber[p.child])
            for parent, p in self.proposals.items()
            if parent not in without
            and parent in renumber
            and (p.child is None or p.child in renumber)
        }
        natural = Draft(
            tuple(self.tokens[i] for i in keep),
            tuple(renumber[self.parents[i]] for i in keep),
            tuple(self.source[i] for i in keep),
            proposals,
            sum(i >= self.size for i in keep),
            origins=None if self.origins is None else tuple(self.origins[i] for i in keep),
            chances=None if self.chances is None else tuple(self.chances[i] for i in keep),
        )
        if self.depths is None:
            return natural
        depths = tuple(self.depths[i] for i in keep)
        return natural if depths == natural.node_depths() else replace(natural, depths=depths)

    def check(self, vocab_size: int, budget: int, length: int | None = None) -> None:
        """Raise DrafterError unless the draft is well formed and costs at most `budget` nodes.

        `length` is how many ids the context has, if known: origins must lie within. Whether they
        carry the tokens they claim is asked by `testing.check_drafter` only, because a wrong one
        misleads but changes no output.
        """
        who = self.source[0] if self.source else "a drafter"
        total = len(self.tokens)
        if not total == len(self.parents) == len(self.source):
            raise DrafterError(f"{who}: tokens, parents and source differ in length")
        if total > budget:
            raise DrafterError(f"{who}: a draft of {total} nodes exceeds the budget of {budget}")
        if not 0 <= self.probes <= total:
            raise DrafterError(f"{who}: {self.probes} probes among {total} nodes")
        if self.depths is not None and (
            len(self.depths) != total or any(d < 1 for d in self.depths)
        ):
            raise DrafterError(f"{who}: depths must be {total} numbers of at least 1")
        if self.chances is not None and (
            len(self.chances) != total or not all(0 <= p <= 1 for p in self.chances)
        ):
            raise DrafterError(f"{who}: chances must be {total} probabilities")
        if self.origins is not None:
            if len(self.origins) != total:
                raise DrafterError(f"{who}: {len(self.origins)} origins for {total} nodes")
            least, most = min(self.origins, default=-1), max(self.origins, default=-1)
            if least < -1 or (length is not None and most >= length):
                raise DrafterError(
                    f"{who}: origins from {least} to {most}; positions in the context count from 0 "
                    f"to its length{'' if length is None else f', {length},'} - 1, -1 is none"
                )
        size = self.size
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                raise DrafterError(f"{who}: token id {token} is outside 0…{vocab_size - 1}")
            if not ROOT <= parent < node:
                raise DrafterError(f"{who}: node {node} has parent {parent}; parents come first")
            if node < size <= parent:
                raise DrafterError(f"{who}: draft node {node} hangs below probe node {parent}")
        for parent, proposal in self.proposals.items():
            child = proposal.child
            if not ROOT <= parent < size:
                raise DrafterError(f"{who}: a proposal names node {parent}, which is no draft node")
            if child is not None and not (0 <= child < size and self.parents[child] == parent):
                raise DrafterError(f"{who}: sampled node {child} is not a child of node {parent}")
            if isinstance(proposal.q, Tensor) and proposal.q.shape != (vocab_size,):
                raise DrafterError(
                    f"{who}: q has shape {tuple(proposal.q.shape)}, the target's is ({vocab_size},)"
                )


EMPTY = Draft()
"""Nothing drafted: the step decodes plainly."""
