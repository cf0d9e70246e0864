"""Suffix decoding beside `auto`: python recipes/auto/suffixes.py ../shared/data

For each length of the text's end that occurred before, what followed there is a tree with counts;
it grows best first, by how often the way to a node was taken, and the length whose nodes are
expected to hold most is drafted. With memory the earlier answers of the same file are a second
text, and the better of both trees is drafted. No suffix tree is built: counts are the same without
one, only slower. Source: Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975, section 4.
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from columns import Answer, streams
from evaluate import Tally, summary, table

from draftsmith.bench.replay import ReplayBudget, replay
from draftsmith.core.draft import EMPTY, ROOT, Draft
from draftsmith.core.drafter import Context, Drafter, DrafterState, Outcome

LONGEST = 64
"""Of an end that is looked for, and of a tree's depth."""
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Most nodes for each token of the end that was found."""
LEAST = 0.05
"""Chance of a node, below which it is left out."""


class Text:
    """Ids with room to grow; -1 stands between answers."""

    def __init__(self) -> None:
        self.ids = np.full(1 << 16, -1, np.int64)
        self.length = 0
        self.places: dict[int, list[int]] = defaultdict(list)

    def add(self, ids: Sequence[int]) -> None:
        while self.length + len(ids) > len(self.ids):
            self.ids = np.concatenate([self.ids, np.full_like(self.ids, -1)])
        self.ids[self.length : self.length + len(ids)] = ids
        for place, token in enumerate(ids, self.length):
            self.places[token].append(place)
        self.length += len(ids)

    def ends(self, text: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(length, where it ended) of ends of `text` that occurred, as sets shrink."""
        at = np.array(self.places.get(int(text[-1]), ()), np.int64)
        at = at[at < self.length - 1]  # something followed
        found = []
        for length in range(1, min(LONGEST, len(text)) + 1):
            inside = at[at - length + 1 >= 0]
            left = inside[self.ids[inside - length + 1] == text[-length]]
            if len(left) < len(at) and length > 1:
                found.append((length - 1, at))
            at = left
            if not len(at):
                return found
        return [*found, (min(LONGEST, len(text)), at)]


Tree = tuple[float, list[tuple[int, int, float]]]
"""Expected tokens, and (token, parent, chance given the parent) of the nodes."""


def grow(text: Text, at: np.ndarray, most: int, least: float) -> Tree:
    """The likeliest nodes of what followed the places."""
    nodes: list[tuple[int, int, float]] = []
    total, order = 0.0, 0
    heap: list[tuple[float, int, int, int, float, np.ndarray]] = []

    def push(parent: int, reached: float, places: np.ndarray) -> None:
        nonlocal order
        after = places[places < text.length - 1] + 1
        tokens, counts = np.unique(text.ids[after], return_counts=True)
        for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
            chance = count / len(places)
            if token >= 0 and reached * chance >= least:
                own = after[text.ids[after] == token]
                heapq.heappush(heap, (-reached * chance, order, token, parent, chance, own))
                order += 1

    push(ROOT, 1.0, at)
    while heap and len(nodes) < most:
        reached, _, token, parent, chance, own = heapq.heappop(heap)
        nodes.append((token, parent, chance))
        total -= reached
        push(len(nodes) - 1, -reached, own)
    return total, nodes


@dataclass(frozen=True, eq=False, repr=False)
class Suffixes(Drafter):
    """The drafter."""

    factor: float = 1.0
    least: float = 0.1
    earlier: Text | None = None
    tally: Tally | None = None

    name: ClassVar[str] = "suffixes"

    def open(self, ctx: Context) -> DrafterState:  # noqa: ARG002
        return _State(self)


class _State(DrafterState):
    def __init__(self, config: Suffixes) -> None:
        self.config, self.own = config, Text()

    def draft(self, ctx: Context) -> Draft:
        c = self.config
        self.own.add(ctx.ids[self.own.length :])
        end = self.own.ids[max(0, self.own.length - LONGEST) : self.own.length]
        best: Tree = 0.0, []
        for text in (self.own, c.earlier):
            for length, at in text.ends(end) if text is not None else ():
                most = min(ctx.budget, int(c.factor * length))
                best = max(best, grow(text, at, most, c.least), key=lambda tree: tree[0])
        tokens, parents, chances = zip(*best[1], strict=True) if best[1] else ((), (), ())
        if not tokens:
            return EMPTY
        return Draft(tokens, parents, (c.name,) * len(tokens), chances=chances)

    def observe(self, ctx: Context, outcome: Outcome) -> None:  # noqa: ARG002
        if self.config.tally is not None:
            self.config.tally.note(outcome.draft, outcome.verdict.path)

    def truncate(self, length: int) -> None:
        raise NotImplementedError


def judge(
    data: Sequence[Sequence[Answer]], factor: float, least: float, *, memory: bool
) -> dict[str, Tally]:
    """The tally of every column's picked answers."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for stream in data:
        earlier = Text() if memory else None
        for answer in stream:
            if answer.column and answer.picked:
                tally = tallies[answer.column]
                drafter = Suffixes(factor, least, earlier, tally)
                budget = ReplayBudget(LONGEST)
                stats = replay(answer.prompt, answer.ids, drafter, answer.vocab_size, budget).stats
                tally.passes += stats.passes
                tally.nodes += stats.drafted
                tally.tokens += stats.tokens
            if earlier is not None:
                earlier.add([*answer.ids, -1])
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--least", type=float, default=LEAST)
    options = parser.parse_args()
    data = list(streams(options.data))
    for memory in (False, True):
        for factor in options.factors:
            tallies = judge(data, factor, options.least, memory=memory)
            tokens, nodes = summary(tallies)
            name = f"{'with memory' if memory else 'ids alone'}, {factor:g} nodes a token"
            print(f"{name}: {tokens:.3f} at {nodes:.2f}", flush=True)
            print(table({name: tallies}), flush=True)


if __name__ == "__main__":
    main()
