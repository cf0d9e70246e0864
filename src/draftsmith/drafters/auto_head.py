"""A trained head inside `auto`: what it holds likely at a node is one more row of the mixture.

The head is asked about nodes of the tree that grows, a few at a time, where that is expected to
bring more tokens than its pass costs. Where contexts are certain, nothing is left for it to bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from draftsmith.core.draft import ROOT
from draftsmith.core.drafter import Context
from draftsmith.drafters.logit_rows import ROW, TOP, WHOLE
from draftsmith.drafters.mixer import ROOT_KEY, Mixer, longer_key, with_head, without_head
from draftsmith.drafters.mixer_prior import head_prior
from draftsmith.drafters.trained_head import BoundHead, Entries
from draftsmith.drafters.tree_search import NO_ROWS

PASS_COST = 0.1
"""What a pass of the head costs, in plain passes, where no cost curve is given."""
HIT = 0.4
"""How often the head's best token comes next, before any was seen."""
PACE = 0.05
"""Weight of the last case in that share."""
MOST = 8
"""Nodes that a pass of the head is asked about."""


class HeadRows:
    """One sequence's head: its entries, and its rows at nodes of the tree that grows."""

    def __init__(self, drafter: BoundHead) -> None:
        self.drafter, self.entries = drafter, Entries(drafter)
        self.hit = HIT
        self._learned: Mixer | None = None
        """Its input of the mixer, while it is parted from it."""
        self.begin(0)

    def begin(self, length: int) -> None:
        """Forget the rows of the last tree; those of the next one follow `length` ids."""
        self.rows: Any = NO_ROWS
        self.base = length
        self.places: dict[int, int] = {}
        """Key of a path that the head was asked about → its place in the head's draft, or ROOT."""

    def joined(self, mixer: Mixer) -> Mixer:
        """Add an input for the head, with what was learned of it."""
        return with_head(mixer, self._learned or head_prior(mixer.indexes))

    def parted(self, mixer: Mixer) -> Mixer:
        """Take the head's input away again, and keep what was learned of it."""
        mixer, self._learned = without_head(mixer)
        return mixer

    def learn(self, ids: Sequence[int]) -> None:
        """Note whether the token that came at the last root was the head's best."""
        if len(self.rows) and len(ids) > self.base:
            right = float(self.rows[0]["tokens"][0] == ids[self.base])
            self.hit += PACE * (right - self.hit)

    def worth(self, nodes: Any, ctx: Context, rate: float, depth: int) -> list[int]:
        """Return the nodes, or ROOT, that are together worth a pass of the head; none if empty.

        Only nodes with parents that it was asked about. `rate`: tokens that the time of a plain
        pass yields at present.
        """
        parents, probs = nodes["parent"].tolist(), nodes["path_prob"].tolist()
        left = [*probs, 1.0]  # what no child of a node has yet; ROOT's is the last
        for parent, prob in zip(parents, probs, strict=True):
            left[parent] -= prob
        keys, depth = self._keys(nodes), min(depth, self.drafter.config.depth)
        asked = [ROOT]
        if self.places:
            # A head that takes chains continues at the node that it was asked about last.
            behind = set(self.places) if not self.drafter.chain else {next(reversed(self.places))}
            asked = [
                i
                for i, parent in enumerate(parents)
                if keys[parent] in behind and keys[i] not in self.places
                and nodes["depth"][i] < depth
            ]  # fmt: skip
        best = sorted(asked, key=left.__getitem__, reverse=True)[:MOST]
        cost = PASS_COST if ctx.cost is None else ctx.cost.drafting(self.drafter, 1)
        return best if self.hit * sum(left[i] for i in best) > rate * cost else []

    def ask(self, nodes: Any, asked: Sequence[int], ctx: Context) -> bool:
        """Add the head's rows at these nodes; False where it cannot be asked."""
        drafter, begin, keys = self.drafter, perf_counter(), self._keys(nodes)
        with drafter.lock, torch.inference_mode():
            if not self.places:
                self.room = self.entries.begin(ctx)
            if self.room < len(self.places) + len(asked):
                return False
            parents = nodes["parent"].tolist()
            questions = [
                (int(nodes["token"][i]), self.places[keys[parents[i]]]) for i in asked if i != ROOT
            ]
            [logits] = drafter.ask([self.entries], [questions])
            tokens, probs = drafter.likeliest(logits, TOP)
        new = np.zeros(len(tokens), ROW)
        width = tokens.shape[-1]
        new["tokens"][:, :width] = tokens.numpy(force=True)
        new["tokens"][:, width:] = new["tokens"][:, :1]
        new["probs"][:, :width] = probs.numpy(force=True) * WHOLE
        for place, i in enumerate(asked, len(self.places) - 1):
            self.places[keys[i]] = place  # the root's is ROOT
        new["after"] = [keys[i] for i in asked]
        self.rows = np.concatenate([self.rows, new])
        if ctx.cost is not None:
            ctx.cost.record_draft(drafter, 1, perf_counter() - begin)
        return True

    def _keys(self, nodes: Any) -> list[int]:
        """The key of each node's path; the last is the root's."""
        keys = [ROOT_KEY] * (len(nodes) + 1)
        both = zip(nodes["token"].tolist(), nodes["parent"].tolist(), strict=True)
        for i, (token, parent) in enumerate(both):
            keys[i] = longer_key(keys[parent], token)
        return keys
