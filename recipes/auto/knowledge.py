"""What the model's own logits add to `auto`: python recipes/auto/knowledge.py passes.npz

Replays recorded passes (`passes.py`) with and without the rows, and with the model's bigrams, at
equal nodes. What rows are worth is fitted on one half of the tasks and judged on the other; what
ids are worth, the shipped prior says. With --save the shipped prior is taught by all of them, which
is due after each `fit.py`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from columns import Answer
from fit import FORGETTING, remember
from passes import Passes, bigrams_of, follow, opened, read

from draftsmith.drafters.auto import AutoState
from draftsmith.drafters.context_index import ContextIndex, new_index, with_ids
from draftsmith.drafters.logit_rows import ROW, ROWS
from draftsmith.drafters.mixer import AFTER, NAMED, Mixer
from draftsmith.drafters.mixer_prior import FILE, adaptable, load, save, untaught
from draftsmith.drafters.tree_search import LARGEST, NO_DRAFT, START, advance, new_search

RATE, EPOCHS, PASS = 0.002, 3, 2
"""Of the weights; how often all is read; tokens of a pass while it is."""
NODES = (6, 12)
IDS, ACCEPTED, ALL = "ids alone", "rows of accepted nodes", "rows of all nodes"
TUNED = "rows of all nodes, behind bigrams"
UNTUNED = np.zeros(ROWS, ROW)
"""No bigrams."""
COSTS = (0.012, 0.022, 0.04)


def teach(mixer: Mixer, passes: Sequence[Passes], bigrams: Any, rejected: bool = True) -> None:
    """Let a mixer that knows ids learn what rows are worth, and keep what it believes of ids."""
    forget_rows(mixer)
    before, nodes = mixer.copy(), LARGEST if rejected else 0
    for epoch in range(EPOCHS):
        order, answers = [*passes], new_index()
        random.Random(epoch).shuffle(order)
        for one in order:
            read_on(mixer, one, answers, RATE * 0.6**epoch, nodes, bigrams)
            if mixer.indexes > 1:
                answer = Answer(None, one.ids[: one.prompt], one.ids[one.prompt :], 0)
                answers = remember(answers, answer)
    restore(mixer, before)


def read_on(
    mixer: Mixer, one: Passes, answers: ContextIndex, rate: float, nodes: int, bigrams: Any
) -> None:
    """Let the mixer predict an answer, pass by pass, so that rows come when they would."""
    search, rows = new_search(), bigrams.copy()
    text, length = with_ids(new_index(), 0, one.ids, 1), one.prompt
    while length < len(one.ids):
        end = min(len(one.ids), length + PASS)
        new = emitted(one, length, end, nodes)
        advance(
            text, end, 0, 0, one.prompt, answers, rows, new, mixer, search, rate, FORGETTING, 1.0,
            NO_DRAFT, START,
        )  # fmt: skip
        length = end


def emitted(one: Passes, start: int, end: int, nodes: int) -> Any:
    """Rows, (n,) ROW, of a pass that emitted ids[start:end] and had so many nodes, as `auto` keeps
    them.

    Those of rejected nodes are the recorded passes', the first ones where there are more.
    """
    mine = (start <= one.aside[:, 0]) & (one.aside[:, 0] < end) & (one.aside[:, 1] < nodes)
    rows = np.concatenate(
        [one.aside[mine][:, 2:], one.rows[start - one.prompt : end - one.prompt]], dtype=np.int32
    )
    return rows.view(ROW)[:, 0]


def forget_rows(mixer: Mixer) -> None:
    """As if no row had been seen: they weigh nothing, and whom they name does not matter."""
    mixer.cells[-1] = untaught(mixer.indexes).cells[-1]
    mixer.weights[AFTER + 1 :: NAMED] = mixer.weights[AFTER::NAMED]
    mixer.weights[:, -2] = 0.0


def restore(mixer: Mixer, before: Mixer) -> None:
    """Where no row names a candidate, all is as before."""
    mixer.cells[:-1] = before.cells[:-1]
    unnamed = [*range(AFTER), *range(AFTER, len(mixer.weights), NAMED)]
    for column in (*range(mixer.weights.shape[1] - 2), -1):  # but the row's own
        mixer.weights[unnamed, column] = before.weights[unnamed, column]


class Replayed(AutoState):
    """A state that is handed recorded rows."""

    recorded: Any = UNTUNED[:0]

    def keep_logits(self) -> None:
        self.new_rows = self.recorded


def replay(mixer: Mixer, one: Passes, cost: float, arm: str, bigrams: Any) -> np.ndarray:
    """Tokens, passes and nodes of one answer."""
    state = Replayed(adaptable(mixer), bigrams=bigrams)
    context = opened(one.ids, one.prompt, cost, state)
    found, length = np.zeros(3), one.prompt
    while length < len(one.ids):
        context.depth = len(one.ids) - length
        draft = state.draft(context)
        end, node, children = length + 1, -1, draft.children()
        while end < len(one.ids) and (node, one.ids[end - 1]) in children:
            node, end = children[node, one.ids[end - 1]], end + 1
        if arm != IDS:
            state.recorded = emitted(one, length, end, 0 if arm == ACCEPTED else len(draft))
        follow(state, context, one.ids, length, end, cost * len(draft))
        found += end - length, 1, len(draft)
        length = end
    return found


def judge(
    passes: Sequence[Passes], priors: dict[bool, Mixer], arm: str, bigrams: Any
) -> dict[str, np.ndarray]:
    """By task: tokens, passes and nodes for each cost of a node."""
    tasks = {one.task: np.zeros((len(COSTS), 3)) for one in passes}
    for one in passes:
        for i, cost in enumerate(COSTS):
            tasks[one.task][i] += replay(priors[not one.half], one, cost, arm, bigrams)
    return tasks


def at_nodes(sums: np.ndarray, nodes: float) -> float:
    """Tokens per pass at so many nodes, between those measured."""
    points = sorted((drafted / count, tokens / count) for tokens, count, drafted in sums)
    return float(np.interp(nodes, *zip(*points, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passes", type=Path)
    parser.add_argument("--save", action="store_true", help="teach the shipped prior")
    options = parser.parse_args()
    passes, bigrams = read(options.passes), bigrams_of(options.passes)
    if options.save:
        priors = load(FILE)
        for mixer in priors.values():
            teach(mixer, passes, bigrams)
        save(FILE, priors)
        return
    base: list[float] = []
    for arm in (IDS, ACCEPTED, ALL, TUNED):
        halves = {half: load(FILE)[1] for half in (False, True)}
        if arm != IDS:
            for half, mixer in halves.items():
                mine = [one for one in passes if one.half == half]
                teach(mixer, mine, bigrams, arm != ACCEPTED)
        tasks = judge(passes, halves, arm, bigrams if arm == TUNED else UNTUNED)
        found = [at_nodes(sum(tasks.values()), n) for n in NODES]
        base = base or found
        print(arm, [f"{x:.3f} ({x / y:.3f})" for x, y in zip(found, base, strict=True)])
        for task, sums in tasks.items():
            print("   ", task, [f"{at_nodes(sums, n):.3f}" for n in NODES], flush=True)


if __name__ == "__main__":
    main()
