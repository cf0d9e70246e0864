"""A trained head inside `auto`: its probabilities at a node are one more row of the mixture.

The head expands a few nodes of the growing tree at a time, if the expected gain exceeds the cost of
its pass. Where contexts are certain, there is nothing to gain.
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
"""Cost of a pass of the head, in plain passes, if no cost curve is given."""
HIT = 0.4
"""Initial share of cases in which the head's best token comes next."""
PACE = 0.05
"""Weight of the last case in that share."""
MARGIN = 1.5
"""A pass of the head must gain this many times its cost: its nodes cost time in the target's pass,
and some of the tokens that it names are found without it."""
RECENT = 256
"""Positions of a prompt that the head reads. What is further away, contexts copy without it, and
reading it can cost more than the head brings."""
MOST = 8
"""Maximum number of nodes that a pass of the head expands."""


class HeadRows:
    """The head's positions of one sequence, and its rows at nodes of the current tree."""

    def __init__(self, drafter: BoundHead) -> None:
        self.drafter, self.entries = drafter, Entries(drafter, RECENT)
        self.hit = HIT
        self._learned: Mixer | None = None
        """The head's input of the mixer, while it is separate."""
        self.begin(0)

    def begin(self, length: int) -> None:
        """Remove the rows of the last tree; those of the next one follow `length` ids."""
        self.rows: Any = NO_ROWS
        self.base = length
        self.places: dict[int, int] = {}
        """Key of the path to an expanded node → its index in the head's draft, or ROOT."""

    def joined(self, mixer: Mixer) -> Mixer:
        """Add the head's input, with its learned cells and weights."""
        return with_head(mixer, self._learned or head_prior(mixer.indexes))

    def parted(self, mixer: Mixer) -> Mixer:
        """Remove the head's input again, and keep its learned cells and weights."""
        mixer, self._learned = without_head(mixer)
        return mixer

    def learn(self, ids: Sequence[int]) -> None:
        """Update how often the head's best token comes next."""
        if len(self.rows) and len(ids) > self.base:
            right = float(self.rows[0]["tokens"][0] == ids[self.base])
            self.hit += PACE * (right - self.hit)

    def worth(self, nodes: Any, ctx: Context, rate: float) -> list[int]:
        """Return the nodes, or ROOT, to expand in a pass of the head; empty if it does not pay.

        The parents of these nodes are expanded already. `rate`: tokens that decoding currently
        gives in the time of a plain pass.
        """
        parents, probs = nodes["parent"].tolist(), nodes["path_prob"].tolist()
        left = [*probs, 1.0]  # probability that no drafted child comes next; ROOT is the last
        for parent, prob in zip(parents, probs, strict=True):
            left[parent] -= prob
        keys, depth = self._keys(nodes), min(ctx.depth, self.drafter.config.depth)
        asked = [ROOT]
        if self.places:
            # A head that computes chains continues at the last expanded node.
            behind = set(self.places) if not self.drafter.chain else {next(reversed(self.places))}
            asked = [
                i
                for i, parent in enumerate(parents)
                if keys[parent] in behind and keys[i] not in self.places
                and nodes["depth"][i] < depth
            ]  # fmt: skip
        best = sorted(asked, key=left.__getitem__, reverse=True)[:MOST]
        cost = PASS_COST
        if ctx.cost is not None:  # all sequences of the pass wait while this one asks
            cost = ctx.cost.rows * ctx.cost.drafting(self.drafter, 1)
        gain = self.hit * sum(left[i] for i in best)
        return best if gain > MARGIN * rate * cost else []

    def ask(self, nodes: Any, asked: Sequence[int], ctx: Context) -> bool:
        """Add the head's rows at these nodes; return False if there is no room for them."""
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
        """Return the key of the path to each node; the last is the root's."""
        keys = [ROOT_KEY] * (len(nodes) + 1)
        both = zip(nodes["token"].tolist(), nodes["parent"].tolist(), strict=True)
        for i, (token, parent) in enumerate(both):
            keys[i] = longer_key(keys[parent], token)
        return keys
