"""Drafting with a trained head: a small module that reads the target's hidden states.

A head has one position for each token x_p except the first. It reads [x_p, g_{p-1}], where g is
computed from the target's hidden states, attends to its own earlier positions, and returns a state
that predicts the token after x_p. In a draft, where the target has no states yet, the head's own
state replaces g_p. `eagle3` and `mtp` differ in the module and in g.

The head runs as a model with its own `Runner`. The key/value cache of a sequence's row contains
positions with states of the target only. Drafted positions are computed as a draft of that row.

Shapes: `n` positions, `d` width of a state, `K` tokens of the head, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, ROOT, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.target import MOST_BESIDE_DRAFT, ModelFacts, Needs
from draftsmith.drafters.draft_model.translation import drafting_distribution
from draftsmith.drafters.options import at_least, switches
from draftsmith.drafters.own_model import OwnModel, OwnRow
from draftsmith.errors import UnsupportedError

if TYPE_CHECKING:
    from draftsmith.model.heads.head import Head

CANDIDATES = 8
"""Candidates after a node; further ones are hardly ever worth their place in a tree."""

LEAST = 0.02
"""Path probability below which a node is not expanded."""


Question = tuple[int, int]
"""Token of a node to expand, and the index of its parent among the expanded nodes, or ROOT."""


@dataclass(frozen=True, eq=False, repr=False)
class BoundHead(OwnModel):
    """A head for its target: drafts trees by path probability, for all sequences at once."""

    config: HeadDrafter
    """The options."""
    head: Head
    wants: Needs
    """The target's states that the head reads."""
    chain: bool
    """Whether the target verifies, or the head computes, chains only."""

    @classmethod
    def of(
        cls, config: HeadDrafter, head: Head, needs: Needs, model: ModelFacts, *, packs: bool = True
    ) -> BoundHead:
        """`packs`: whether the head can use our attention, so that trees of all sequences share its
        passes; otherwise it drafts chains, one sequence after the other."""
        from draftsmith.model.heads.head import runner_of

        runner = runner_of(head, packs)
        chain = not packs or model.shape != "tree"
        return cls(config, runner, head, needs, chain, target=model)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.wants

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        return self.config.sampled

    def reach(self, width: int) -> int:
        return self.config.reach(width)

    def bytes_for(self, positions: int) -> int:
        """Return twice the size of the head's keys and values, which are copied when they grow."""
        return 2 * self.runner.row_bytes(positions)

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Sequence(self)

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        sequences = cast("Sequence[_Sequence]", states)
        with self.lock, torch.inference_mode():
            both = zip(sequences, contexts, strict=True)
            active = drafting = [s for s, ctx in both if s.begin(ctx)]
            while active:
                logits = self.ask([s.entries for s in active], [s.tree.questions() for s in active])
                active = [s for s, own in zip(active, logits, strict=True) if s.grow(own)]
            drafts = {s: s.tree.draft(self.name) for s in drafting}
            return [drafts.get(sequence, EMPTY) for sequence in sequences]

    def ask(
        self, several: Sequence[Entries], questions: Sequence[Sequence[Question]]
    ) -> list[Tensor]:
        """Return logits (m, K) after the m new nodes of each sequence, by one pass of the head.

        The first call of a draft has no nodes: it returns the logits after the last token, m = 1.
        """
        for entries, nodes in zip(several, questions, strict=True):
            entries.nodes += nodes
        self.head.feed(torch.cat([states for entries in several for states in entries.states()]))
        outputs = self.runner.forward([e.row for e in several], [e.inner() for e in several])
        news = [
            entries.take(output.logits)[-max(1, len(nodes)) :]
            for entries, output, nodes in zip(several, outputs, questions, strict=True)
        ]
        return list(torch.split(self.head.logits(torch.cat(news)), [len(new) for new in news]))

    def likeliest(self, logits: Tensor, width: int) -> tuple[Any, Any]:
        """Return (m, width) target ids and probabilities of the highest logits (m, K)."""
        # After an overflow, no token is probable.
        probs, best = logits.float().softmax(-1).nan_to_num(0.0).topk(min(width, logits.shape[-1]))
        return (best if self.head.ids is None else self.head.ids[best]), probs

    def step_seconds(self) -> float:
        """Return the median seconds of the head's step for one token after 256 tokens."""
        head, runner, times = self.head, self.runner, list[float]()
        with self.lock, torch.inference_mode():
            row = runner.open([0] * 256)
            states = head.embeddings.new_zeros((256, head.embeddings.shape[1]))
            head.feed(states)
            runner.prefill(row)
            for _ in range(9):
                begin = perf_counter()
                head.feed(states[-1:])
                [output] = runner.forward([row], [EMPTY])
                tokens, _ = self.likeliest(head.logits(output.logits), CANDIDATES)
                tokens.tolist()  # waits for the device
                times.append(perf_counter() - begin)
            runner.close(row)
        return median(times)


class HeadDrafter(Drafter):
    """Base of drafters with a trained head, which have these three options."""

    nodes: int
    """Nodes of a tree at a fixed budget."""
    depth: int
    """Tokens of a branch at most: so often is the head asked for a draft."""
    sample: bool
    """Where the target samples, draw a chain from the head's distribution instead of guessing a
    tree. Seeds then give other tokens than plain decoding, by the same distribution."""

    def __post_init__(self) -> None:
        at_least(self, 1, "nodes", "depth")
        switches(self)

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        return self.sample

    def preferred_width(self) -> int:
        return self.nodes

    def reach(self, width: int) -> int:
        return min(self.depth, width)

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        raise UnsupportedError(
            f"{self} was not bound to a model with states to read; a host calls "
            "drafter.bind(facts) first, and recordings have no model to bind it to"
        )


@dataclass(slots=True)
class _Node:
    """A candidate for the tree."""

    token: int
    parent: int
    """Index among the candidates, or ROOT."""
    depth: int
    prob: float
    path_prob: float
    place: int = -1
    """Index among the expanded nodes; -1: not expanded."""


class _Tree:
    """The candidates for one draft; the most probable ones are expanded."""

    def __init__(self, limit: int, depth: int, chain: bool) -> None:
        self.limit, self.depth, self.chain = limit, depth, chain
        self.nodes: list[_Node] = []
        self.asked = 0
        """Number of expanded nodes."""
        self.open: list[int] = [ROOT]
        """Candidates that the next pass of the head expands."""
        self.proposals: list[Tensor] = []
        """Distributions (V,) from which the tokens of a sampled chain were drawn."""

    def add(self, parent: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Add candidates after a node."""
        above = None if parent == ROOT else self.nodes[parent]
        depth, reach = (1, 1.0) if above is None else (above.depth + 1, above.path_prob)
        for token, prob in zip(tokens, probs, strict=True):
            self.nodes.append(_Node(token, parent, depth, prob, reach * prob))

    def best(self) -> list[int]:
        """Return the most probable candidates within the limit, parents before children."""
        count = range(len(self.nodes))
        return sorted(nlargest(self.limit, count, key=lambda i: (self.nodes[i].path_prob, -i)))

    def choose(self) -> bool:
        """Choose the candidates to expand next; return False if there are none."""
        best = self.best()
        full = len(best) == self.limit
        least = max(LEAST, min(self.nodes[i].path_prob for i in best) if full else 0.0)
        self.open = [
            i
            for i in best
            if (node := self.nodes[i]).place < 0
            and node.depth < self.depth
            and node.path_prob > least
        ]
        for i in self.open:
            self.nodes[i].place, self.asked = self.asked, self.asked + 1
        return bool(self.open)

    def questions(self) -> list[Question]:
        """Return the nodes to expand next; empty if that is the root."""
        nodes = [self.nodes[i] for i in self.open if i != ROOT]
        return [(n.token, ROOT if n.parent == ROOT else self.nodes[n.parent].place) for n in nodes]

    def draft(self, name: str) -> Draft:
        """Return the most probable candidates as a draft, or the sampled chain."""
        if self.proposals:
            return Draft.chain([n.token for n in self.nodes], name, self.proposals)
        best = self.best()
        places = {ROOT: ROOT} | {i: place for place, i in enumerate(best)}
        return Draft(
            tuple(self.nodes[i].token for i in best),
            tuple(places[self.nodes[i].parent] for i in best),
            (name,) * len(best),
            chances=tuple(self.nodes[i].prob for i in best),
        )


class Entries(OwnRow):
    """The head's positions of one sequence: a row for its tokens, and the expanded nodes."""

    drafter: BoundHead
    nodes: list[Question]
    """Expanded nodes of the draft, in order."""

    def __init__(self, drafter: BoundHead, recent: int | None = None) -> None:
        """`recent`: maximum number of positions of the first text that are read, its last ones."""
        super().__init__(drafter)
        self._recent = recent
        self._unread: list[int] = []
        """Tokens before those that are read."""

    def begin(self, ctx: Context) -> int:
        """Compute all but the last tokens of a long text; return how many nodes may follow.

        It is 0 if the target has no states yet. The caller holds the drafter's lock, also for
        `ask`.
        """
        runner = self.drafter.runner
        self.drafter.close_ended()
        # Position i reads x_{i+1} and g_i, so the last token has a position, too.
        total, g = len(ctx.ids) - 1, ctx.hidden
        if g is None or len(g) != total or not total:
            return 0
        unread = len(self._unread)
        if self._end is not None and (total <= unread or list(ctx.ids[:unread]) != self._unread):
            self.close()
        if self._end is None:
            skipped = 0 if self._recent is None else max(0, total - self._recent)
            self._unread = list(ctx.ids[:skipped])
        first = len(self._unread)
        g = g[first:]
        self.follow(list(ctx.ids[1 + first :]))
        self.drafter.head.feed(g[self.row.cached :])
        runner.prefill(self.row, MOST_BESIDE_DRAFT)
        self.g, self.nodes, self._read = g[self.row.cached :], [], False
        return runner.room(self.row)

    def inner(self) -> Draft:
        """Return the expanded nodes as a draft for the head's runner."""
        tokens, parents = zip(*self.nodes, strict=True) if self.nodes else ((), ())
        return Draft(tokens, parents, ("head",) * len(tokens))

    def states(self) -> list[Tensor]:
        """Return the states (n, d) that the next pass reads, of pending tokens and of nodes."""
        before = [1 + parent for _, parent in self.nodes]  # the root's state is the first
        return [self.g, self._outputs[before]] if before else [self.g]

    def take(self, outputs: Tensor) -> Tensor:
        """Store and return the states (1 + nodes, d) that a pass computed.

        The first pass of a draft also commits all tokens of the row except the last.
        """
        runner, row = self.drafter.runner, self.row
        if not self._read:
            runner.commit([row], [()], [()])
            runner.extend(row, list(row.ids))
            self.g, self._read = self.g[-1:], True
        self._outputs = outputs
        return outputs


class _Sequence(DrafterState):
    """Drafting state of one sequence."""

    tree: _Tree

    def __init__(self, drafter: BoundHead) -> None:
        self.drafter, self.entries = drafter, Entries(drafter)

    def draft(self, ctx: Context) -> Draft:
        return self.drafter.draft([self], [ctx])[0]

    def begin(self, ctx: Context) -> bool:
        """Read new states of the target; return whether anything can be drafted."""
        config = self.drafter.config
        limit = min(ctx.budget, self.entries.begin(ctx))
        depth = min(config.depth, ctx.depth, limit)
        sampled = config.sample and ctx.sampling.temperature > 0
        chain = sampled or self.drafter.chain
        self.context, self.tree = ctx, _Tree(depth if chain else limit, depth, chain)
        self.drawing = drafting_distribution(ctx.sampling) if sampled else None
        return depth > 0

    def grow(self, logits: Tensor) -> bool:
        """Add candidates from the logits (m, K) of a pass; return whether to expand more."""
        tree, ids = self.tree, self.drafter.head.ids
        if self.drawing is not None:
            q = self.drawing.probs(self.drawing.scores(None, logits[0]))
            if tree.proposals and not bool(q.isfinite().all()):
                return False  # an error would drop what was drawn depending on what it was
            if ids is not None:  # some of which may be equal
                q = q.new_zeros(self.context.vocab_size).index_add_(0, ids, q)
            tree.proposals.append(q)
            tree.add(tree.open[0], [self.context.sampler.draw(q)], [1.0])
            return tree.choose()
        tokens, probs = self.drafter.likeliest(logits, 1 if tree.chain else CANDIDATES)
        known = probs.tolist()
        if not tree.nodes and not any(known[0]):
            raise FloatingPointError("the head's logits are not finite")
        for node, *found in zip(list(tree.open), tokens.tolist(), known, strict=True):
            tree.add(node, *found)
        return tree.choose()

    def close(self) -> None:
        self.entries.close()
