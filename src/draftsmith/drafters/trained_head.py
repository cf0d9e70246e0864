"""Drafting by a trained head: a small module that goes on where the target's states end.

A head has one entry for each token x_p but the first. It reads [x_p, g_{p-1}], g being what the
target computed at the position before, looks at its own earlier entries, and gives a state from
which the token after x_p follows. That state takes the place of g_p where the target has computed
none yet: in drafts. `eagle3` and `mtp` differ in the module and in g.

The head is run as a model: its entries are a row of its own `Runner`, whose past holds nothing but
entries read from the target's states. Drafted entries are computed beside that row, as a draft is.

Shapes: `n` entries, `d` width of a state, `K` tokens that the head knows, `V` vocabulary.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.core.draft import EMPTY, ROOT, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState
from draftsmith.core.sampling import Distribution, SamplingParams
from draftsmith.core.target import REST, ModelFacts, Needs
from draftsmith.drafters.options import at_least, switches
from draftsmith.errors import UnsupportedError
from draftsmith.model.heads.head import Head, runner_of
from draftsmith.model.runner import Runner

CANDIDATES = 8
"""Tokens that may follow a node: more are hardly ever worth a place in a tree."""

LEAST = 0.02
"""The head is not asked what follows a node that is accepted less often."""


@dataclass(frozen=True, eq=False, repr=False)
class BoundHead(Drafter):
    """A head beside its target: trees by path probability, for all sequences of a step together."""

    config: HeadDrafter
    """What was typed."""
    head: Head
    wants: Needs
    """The states that the head reads."""
    runner: Runner
    chain: bool
    """Whether the target, or the head, takes chains only."""
    lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    """The head is fed and asked in turns."""
    forgotten: list[Any] = field(init=False, default_factory=list)
    """Rows of sequences that nobody closed; given back before the next draft."""

    @classmethod
    def of(
        cls, config: HeadDrafter, head: Head, needs: Needs, model: ModelFacts, *, packs: bool = True
    ) -> BoundHead:
        """`packs`: whether its attention can be ours, so that trees of all sequences share its
        passes; else it drafts chains, one sequence after the other."""
        runner = runner_of(head, packs)
        return cls(config, head, needs, runner, not packs or model.shape != "tree")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.config.name

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.wants

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        return self.config.sampled

    def needs_of(self, model: ModelFacts) -> Needs:  # noqa: ARG002
        return self.wants

    def preferred_width(self) -> int:
        return self.config.preferred_width()

    def reach(self, width: int) -> int:
        return self.config.reach(width)

    def bytes_for(self, positions: int) -> int:
        """Twice the head's own keys and values, which lie beside themselves while they grow."""
        return 2 * self.runner.row_bytes(positions)

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _Sequence(self)

    def draft(self, states: Sequence[DrafterState], contexts: Sequence[Context]) -> list[Draft]:
        sequences = cast("Sequence[_Sequence]", states)
        with self.lock, torch.inference_mode():
            while self.forgotten:
                self.runner.close(self.forgotten.pop())
            both = zip(sequences, contexts, strict=True)
            active = drafting = [s for s, ctx in both if s.begin(ctx)]
            while active:
                active = self._deeper(active)
            drafts = {s: s.tree.draft(self.name) for s in drafting}
            return [drafts.get(sequence, EMPTY) for sequence in sequences]

    def _deeper(self, active: Sequence[_Sequence]) -> list[_Sequence]:
        """Ask the head what follows the open nodes of all trees, in one pass; which go on."""
        self.head.feed(torch.cat([states for s in active for states in s.states()]))
        outputs = self.runner.forward([s.row for s in active], [s.tree.inner() for s in active])
        news = [s.take(output.logits) for s, output in zip(active, outputs, strict=True)]
        logits = torch.split(self.head.logits(torch.cat(news)), [len(new) for new in news])
        return [s for s, own in zip(active, logits, strict=True) if s.grow(own)]

    def __str__(self) -> str:
        return str(self.config)


class HeadDrafter(Drafter):
    """A drafter with a trained head: its dataclass has these three options."""

    nodes: int
    depth: int
    sample: bool

    def __post_init__(self) -> None:
        at_least(self, "nodes", 1)
        at_least(self, "depth", 1)
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
            f"{self} was not bound to a model whose states it reads; a host calls "
            "drafter.bind(facts) first, and recordings have no model to bind it to"
        )


@dataclass(slots=True)
class _Node:
    """A token that may be drafted."""

    token: int
    parent: int
    """Its place among the candidates, or ROOT."""
    depth: int
    prob: float
    path_prob: float
    place: int = -1
    """Its place among the inner nodes, which the head was asked about; -1: it was not."""


class _Tree:
    """Candidates for one draft, the inner ones asked about; grows where it is likeliest."""

    def __init__(self, limit: int, depth: int, chain: bool) -> None:
        self.limit, self.depth, self.chain = limit, depth, chain
        self.nodes: list[_Node] = []
        self.asked: list[int] = []
        """Inner nodes, in the order in which the head was asked about them."""
        self.open: list[int] = [ROOT]
        """What it is asked about in the next pass."""
        self.proposals: list[Tensor] = []
        """Of a sampled chain, the distribution (V,) that each token was drawn from."""

    def add(self, parent: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Add what may follow a node."""
        above = None if parent == ROOT else self.nodes[parent]
        depth, reach = (1, 1.0) if above is None else (above.depth + 1, above.path_prob)
        for token, prob in zip(tokens, probs, strict=True):
            self.nodes.append(_Node(token, parent, depth, prob, reach * prob))

    def best(self) -> list[int]:
        """The likeliest candidates within the limit; parents before children."""
        count = range(len(self.nodes))
        return sorted(nlargest(self.limit, count, key=lambda i: (self.nodes[i].path_prob, -i)))

    def choose(self) -> bool:
        """Choose what to ask about next; False: nothing is worth it."""
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
            self.nodes[i].place = len(self.asked)
            self.asked.append(i)
        return bool(self.open)

    def inner(self) -> Draft:
        """The inner nodes as the head reads them."""
        nodes = [self.nodes[i] for i in self.asked]
        parents = [n.parent if n.parent == ROOT else self.nodes[n.parent].place for n in nodes]
        return Draft(tuple(n.token for n in nodes), tuple(parents), ("head",) * len(nodes))

    def draft(self, name: str) -> Draft:
        """The likeliest candidates, with their probabilities; or the chain that was drawn."""
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


class _Sequence(DrafterState):
    """One sequence: its row of the head's entries, and the tree that grows behind it."""

    row: Any = None
    tree: _Tree

    def __init__(self, drafter: BoundHead) -> None:
        self.drafter = drafter
        self._opened: weakref.finalize[..., _Sequence] | None = None

    def draft(self, ctx: Context) -> Draft:
        return self.drafter.draft([self], [ctx])[0]

    def begin(self, ctx: Context) -> bool:
        """Read what the target has computed meanwhile; whether there is something to draft."""
        runner, config = self.drafter.runner, self.drafter.config
        # Entry i reads x_{i+1} and g_i, so that the last token has one, too.
        entries, g = list(ctx.ids[1:]), ctx.hidden
        if g is None or len(g) != len(entries) or not entries:
            return False
        if self._opened is None:
            self.row = runner.open(entries)
            self._opened = weakref.finalize(self, self.drafter.forgotten.append, self.row)
        else:
            runner.extend(self.row, entries)
        self.drafter.head.feed(g[self.row.cached :])
        runner.prefill(self.row, REST)
        self.context, self.g = ctx, g[self.row.cached :]
        sampled = config.sample and ctx.sampling.temperature > 0
        limit = min(ctx.budget, runner.room(self.row))
        depth = min(config.depth, ctx.depth, limit)
        chain = sampled or self.drafter.chain
        self.tree = _Tree(depth if chain else limit, depth, chain)
        self.drawing = _distribution(ctx.sampling) if sampled else None
        self.read = False
        return depth > 0

    def states(self) -> list[Tensor]:
        """(n, d) what the next pass reads beside the row's pending tokens, and its inner nodes."""
        tree = self.tree
        parents = [tree.nodes[i].parent for i in tree.asked]
        before = [0 if p == ROOT else 1 + tree.nodes[p].place for p in parents]
        return [self.g, self.outputs[before]] if before else [self.g]

    def take(self, outputs: Tensor) -> Tensor:
        """Of the states (1 + inner nodes, d) that a pass gave, those of the nodes just asked about.

        After the first pass all of the row's tokens but the last are in its past.
        """
        runner, row = self.drafter.runner, self.row
        if not self.read:
            runner.commit([row], [()], [()])
            runner.extend(row, list(row.ids))
            self.g, self.read = self.g[-1:], True
        self.outputs = outputs
        return outputs[-len(self.tree.open) :]

    def grow(self, logits: Tensor) -> bool:
        """Add what follows the nodes just asked about, from logits (open, K); whether to go on."""
        tree, ids = self.tree, self.drafter.head.ids
        if self.drawing is not None:
            q = self.drawing.probs(self.drawing.scores(None, logits[0]))
            if ids is not None:
                q = q.new_zeros(self.context.vocab_size).index_copy_(0, ids, q)
            token = self.context.sampler.draw(q)
            tree.proposals.append(q)
            tree.add(tree.open[0], [token], [1.0])
            return tree.choose()
        width = 1 if tree.chain else min(CANDIDATES, logits.shape[-1])
        # A state that overflowed promises nothing.
        probs, best = logits.float().softmax(-1).nan_to_num(0.0).topk(width)
        tokens = (best if ids is None else ids[best]).tolist()
        for node, *found in zip(list(tree.open), tokens, probs.tolist(), strict=True):
            tree.add(node, *found)
        return tree.choose()

    def close(self) -> None:
        if self._opened is not None:
            self._opened()
            self._opened = None


def _distribution(p: SamplingParams) -> Distribution:
    """How the target samples, but for what reads the text."""
    params = SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
    return Distribution.of(params, 0, ())
