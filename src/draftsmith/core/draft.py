"""A draft: the token tree that one target pass checks.

Legend for all of `core`: `n` draft nodes, `m` probe nodes, `V` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from draftsmith.errors import DrafterError
from draftsmith.values import integers

ROOT = -1
"""Parent index of first-level nodes: the last committed token."""


class LazyDistribution(Protocol):
    """A distribution over the target's vocabulary with costly values; verification reads a few."""

    draws: int
    """Draws from the residual before all values that it can need are computed."""

    def of(self, tokens: Sequence[int]) -> Tensor:
        """Return the (k,) probabilities of `k` tokens, in float64."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draw at one node: the distribution it was drawn from, and the child with the drawn token.

    `q` is the distribution that was sampled from, after temperature, truncation and masks: a tensor
    (V,) or a `LazyDistribution`. It may sum to less than one; the rest is the probability of
    proposing nothing. `child` is None if nothing (⊥) was drawn.
    """

    q: Tensor | LazyDistribution
    child: int | None


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree of `n` draft nodes followed by `m` probe nodes; parents precede children.

    A node is a *guess* (copied, looked up or arg-max, without probabilities) unless its parent has
    an entry in `proposals`. A proposal must state the true `q`: a wrong `q` changes the output
    without any error. Probe nodes are computed in the same pass and attend to their own ancestors
    only. They are never accepted; `DrafterState.observe` receives their logits.
    """

    tokens: tuple[int, ...] = ()
    """(n+m,) token ids."""
    parents: tuple[int, ...] = ()
    """(n+m,) index of each node's parent; ROOT for children of the last committed token."""
    source: tuple[str, ...] = ()
    """(n+m,) name of the drafter that proposed each node."""
    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    """Sampled draws by parent node; empty for a draft of guesses."""
    probes: int = 0
    """m: number of probe nodes, which are the last ones."""
    depths: tuple[int, ...] | None = None
    """(n+m,) positions after the root, 1 for children of ROOT; None: the depths in the tree.

    Only probes may have other depths than in the tree.
    """
    origins: tuple[int, ...] | None = None
    """(n+m,) position in the context's ids from which each node was copied; None: no copies.

    -1 for a node that was not copied, or copied from a `prediction` that the ids do not contain.
    """
    chances: tuple[float, ...] | None = None
    """(n+m,) probability that each node is accepted if its parent was; None: unknown.

    Guesses that do not pay in the pass are removed by it. Sampled nodes are never removed.
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
        """Build a single branch. With `q`, one distribution per token, the tokens are samples.

        `origins` are the positions in the context from which the tokens were copied, such as
        `range(j, j + n)`. Raises DrafterError if `q` and `tokens` differ in length.
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
        """Number of target positions that this draft costs: draft and probe nodes."""
        return len(self.tokens)

    @property
    def size(self) -> int:
        """n: number of nodes that can be accepted."""
        return len(self.tokens) - self.probes

    @property
    def is_chain(self) -> bool:
        """Whether the draft is an ordinary continuation: no branches, no explicit depths."""
        return self.depths is None and all(p == i - 1 for i, p in enumerate(self.parents))

    def node_depths(self) -> tuple[int, ...]:
        """Return (n+m,) positions after the root, counted from 1."""
        return self.tree_depths() if self.depths is None else self.depths

    def tree_depths(self) -> tuple[int, ...]:
        """Return (n+m,) numbers of nodes from the root to each node, which is counted, too."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Largest depth of a draft node; 0 without draft nodes."""
        return max(self.node_depths()[: self.size], default=0)

    def children(self) -> dict[tuple[int, int], int]:
        """Map (parent, token) to a draft node; of equal guess siblings, to the first one."""
        index: dict[tuple[int, int], int] = {}
        for node in range(self.size):
            index.setdefault((self.parents[node], self.tokens[node]), node)
        # The sampled child takes precedence: Leviathan's rule applies to that node only.
        for parent, proposal in self.proposals.items():
            if proposal.child is not None:
                index[parent, self.tokens[proposal.child]] = proposal.child
        return index

    def first_branch(self) -> Draft:
        """Return one branch without probes, for targets that verify chains only.

        At a node with a proposal, the branch continues with the sampled child, elsewhere with the
        first child. The choice depends on the structure only, never on token values, so samples
        stay exact.
        """
        keep: list[int] = []
        node = ROOT
        while True:
            proposal = self.proposals.get(node)
            child = None if proposal is None else proposal.child
            if child is None:
                later = range(node + 1, self.size)
                child = next((c for c in later if self.parents[c] == node), None)
            if child is None:
                return self.select(keep)
            keep.append(child)
            node = child

    def path_probs(self) -> list[float]:
        """Return (n+m,) probabilities that each node is accepted, computed from `chances`."""
        found: list[float] = []
        for chance, parent in zip(self.chances or (), self.parents, strict=True):
            found.append(chance if parent == ROOT else chance * found[parent])
        return found

    def clip(self, depth: int) -> Draft:
        """Return the draft without nodes deeper than `depth` and without proposals at that depth.

        The cut does not depend on what was drawn: a proposal at the cut is removed even if it drew
        nothing. Otherwise "nothing" and a token would be verified against different distributions.
        """
        if self.depths is None and not self.proposals and len(self) <= depth:
            return self  # a tree of k nodes is at most k deep
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
        """Return the nodes `keep`, parents first, with their proposals except those at
        `without`."""
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
        """Raise DrafterError unless the draft is well formed and has at most `budget` nodes.

        `length` is the number of ids in the context, if known; origins must be smaller. Whether the
        origins hold the same tokens is checked by `testing.check_drafter` only, because a wrong
        origin does not change the output.
        """
        who = self.source[0] if self.source else "a drafter"
        total = len(self.tokens)
        if not total == len(self.parents) == len(self.source):
            raise DrafterError(
                f"{who}: tokens, parents and source must have equal lengths, got {total}, "
                f"{len(self.parents)} and {len(self.source)}"
            )
        numbers = *self.tokens, *self.parents, *(self.depths or ()), *(self.origins or ())
        if {*map(type, numbers)} - {int} and integers(numbers) is None:
            raise DrafterError(f"{who}: tokens, parents, depths and origins must be integers")
        if not all(issubclass(kind, str) for kind in {*map(type, self.source)}):
            raise DrafterError(f"{who}: source must be names")
        if total > budget:
            raise DrafterError(f"{who}: a draft of {total} nodes exceeds the budget of {budget}")
        if not 0 <= self.probes <= total:
            raise DrafterError(f"{who}: probes must be from 0 to {total}, got {self.probes}")
        if self.depths is not None and (
            len(self.depths) != total or any(d < 1 for d in self.depths)
        ):
            raise DrafterError(f"{who}: depths must be {total} numbers >= 1, got {self.depths}")
        if self.chances is not None and (
            len(self.chances) != total or not all(0 <= p <= 1 for p in self.chances)
        ):
            raise DrafterError(
                f"{who}: chances must be {total} numbers from 0 to 1, got {self.chances}"
            )
        if self.origins is not None:
            if len(self.origins) != total:
                raise DrafterError(
                    f"{who}: origins must have {total} entries, got {len(self.origins)}"
                )
            least, most = min(self.origins, default=-1), max(self.origins, default=-1)
            if least < -1 or (length is not None and most >= length):
                raise DrafterError(
                    f"{who}: origins must be positions in the context"
                    f"{'' if length is None else f' (0 to {length - 1})'} or -1 for none, got "
                    f"values from {least} to {most}"
                )
        size = self.size
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                raise DrafterError(
                    f"{who}: token ids must be from 0 to {vocab_size - 1}, got {token}"
                )
            if not ROOT <= parent < node:
                raise DrafterError(
                    f"{who}: parents must precede their children, but node {node} has {parent}"
                )
            if node < size <= parent:
                raise DrafterError(
                    f"{who}: draft node {node} must not have a probe as its parent ({parent})"
                )
        if self.depths is not None and self.depths[:size] != self.tree_depths()[:size]:
            raise DrafterError(
                f"{who}: only probes may have other depths than in the tree, got {self.depths}"
            )
        for parent, proposal in self.proposals.items():
            child = proposal.child
            if not ROOT <= parent < size:
                raise DrafterError(f"{who}: proposals has an entry for {parent}, not a draft node")
            if child is not None and not (0 <= child < size and self.parents[child] == parent):
                raise DrafterError(f"{who}: sampled node {child} is not a child of node {parent}")
            if not isinstance(proposal.q, Tensor):
                if not hasattr(proposal.q, "of"):
                    raise DrafterError(
                        f"{who}: q must be a tensor or a LazyDistribution, got "
                        f"{type(proposal.q).__name__}"
                    )
            elif proposal.q.shape != (vocab_size,):
                raise DrafterError(
                    f"{who}: q must have shape ({vocab_size},), got {tuple(proposal.q.shape)}"
                )


EMPTY = Draft()
"""A draft without nodes: the step decodes plainly."""
