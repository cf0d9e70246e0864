"""What the model's own logits add to `auto`: python recipes/auto/knowledge.py passes.npz

Replays recorded passes (`passes.py`) with and without the rows, and with the model's bigrams, at
equal nodes. What rows are worth is fitted on one half of the tasks and judged on the other; what
ids are worth, the shipped prior says. With --save the shipped prior is taught by all of them, which
is due after each `fit.py`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from columns import Answer
from fit import FORGETTING, remember
from passes import Passes, bigrams_of, follow, opened, read

from draftsmith.drafters.auto import Mixture
from draftsmith.drafters.mixture.belief import AFTER, VALUES, Belief, banks_of
from draftsmith.drafters.mixture.candidates import CELLS, LARGEST, new_work
from draftsmith.drafters.mixture.compiled import Ints, filled, floats, ints
from draftsmith.drafters.mixture.contexts import ORDERS, Bank, new_bank, put
from draftsmith.drafters.mixture.grow import NOTHING, advance
from draftsmith.drafters.mixture.prior import FILE, adaptable, load, save, untaught
from draftsmith.drafters.mixture.rows import KEPT, KNOWN, WIDTH

RATE, EPOCHS, PASS = 0.002, 3, 2
"""Of the weights; how often all is read; tokens of a pass while it is."""
NODES = (6, 12)
IDS, ACCEPTED, ALL = "ids alone", "rows of accepted nodes", "rows of all nodes"
TUNED = "rows of all nodes, behind bigrams"
UNTUNED = ints(KEPT * WIDTH)
"""No bigrams."""
COSTS = (0.012, 0.022, 0.04)


def teach(belief: Belief, passes: Sequence[Passes], bigrams: Ints, rejected: bool = True) -> None:
    """Let a belief that knows ids learn what rows are worth, and keep what it believes of ids."""
    forget_rows(belief)
    before = Belief(floats(belief.cells), floats(belief.weights))
    nodes = LARGEST if rejected else 0
    for epoch in range(EPOCHS):
        order, memory = [*passes], new_bank()
        random.Random(epoch).shuffle(order)
        for one in order:
            read_on(belief, one, memory, RATE * 0.6**epoch, nodes, bigrams)
            if banks_of(belief) > 1:
                answer = Answer(None, one.ids[: one.prompt], one.ids[one.prompt :], 0)
                memory = remember(memory, answer)
    restore(belief, before)


def read_on(
    belief: Belief, one: Passes, memory: Bank, rate: float, nodes: int, bigrams: Ints
) -> None:
    """Let the belief predict an answer, pass by pass, so that rows come when they would."""
    work = new_work(banks_of(belief))._replace(rows=filled(bigrams))
    bank, length = put(new_bank(), 0, one.ids, 1), one.prompt
    while length < len(one.ids):
        end = min(len(one.ids), length + PASS)
        work = work._replace(new=filled(said(one, length, end, nodes)))
        advance(bank, end, 0, 0, one.prompt, memory, belief, work, rate, FORGETTING, 1.0, NOTHING)
        length = end


def said(one: Passes, start: int, end: int, nodes: int) -> list[int]:
    """Rows of a pass that told ids[start:end] and had so many nodes, as `auto` keeps them.

    Those of rejected nodes are the recorded passes', the first ones where there are more.
    """
    mine = (start <= one.aside[:, 0]) & (one.aside[:, 0] < end) & (one.aside[:, 1] < nodes)
    rejected = one.aside[mine][:, 2:].reshape(-1).tolist()
    accepted = one.rows[start - one.prompt : end - one.prompt].reshape(-1).tolist()
    return [*rejected, *accepted]


def forget_rows(belief: Belief) -> None:
    """As if no row had been seen: they weigh nothing, and whom they name does not matter."""
    inputs, blank = banks_of(belief) * ORDERS, untaught(banks_of(belief))
    belief.cells[inputs * CELLS * VALUES :] = blank.cells[inputs * CELLS * VALUES :]
    for at, named in weights_of(inputs, belief):
        if named:
            belief.weights[at : at + inputs + 2] = belief.weights[at - inputs - 2 : at]
        belief.weights[at + inputs] = 0.0


def restore(belief: Belief, before: Belief) -> None:
    """Where no row names a candidate, all is as before."""
    inputs = banks_of(belief) * ORDERS
    belief.cells[: inputs * CELLS * VALUES] = before.cells[: inputs * CELLS * VALUES]
    for at, named in weights_of(inputs, belief):
        if not named:
            for place in (*range(at, at + inputs), at + inputs + 1):
                belief.weights[place] = before.weights[place]


def weights_of(inputs: int, belief: Belief) -> Iterator[tuple[int, bool]]:
    """Where each row of weights begins, and whether it is for whom the target's row names."""
    for row, at in enumerate(range(0, len(belief.weights), inputs + 2)):
        yield at, row >= AFTER and (row - AFTER) % KNOWN == 1


class Replayed(Mixture):
    """A state that is handed recorded rows."""

    new: Sequence[int] = ()

    def keep(self) -> None:
        self.work = self.work._replace(new=filled(self.new))


def replay(belief: Belief, one: Passes, cost: float, arm: str, bigrams: Ints) -> np.ndarray:
    """Tokens, passes and nodes of one answer."""
    state = Replayed(adaptable(belief), bigrams=bigrams)
    context = opened(one.ids, one.prompt, cost, state)
    found, length = np.zeros(3), one.prompt
    while length < len(one.ids):
        context.depth = len(one.ids) - length
        draft = state.draft(context)
        end, node, children = length + 1, -1, draft.children()
        while end < len(one.ids) and (node, one.ids[end - 1]) in children:
            node, end = children[node, one.ids[end - 1]], end + 1
        if arm != IDS:
            state.new = said(one, length, end, 0 if arm == ACCEPTED else len(draft))
        follow(state, context, one.ids, length, end, cost * len(draft))
        found += end - length, 1, len(draft)
        length = end
    return found


def judge(
    passes: Sequence[Passes], priors: dict[bool, Belief], arm: str, bigrams: Ints
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
        for belief in priors.values():
            teach(belief, passes, bigrams)
        save(FILE, priors)
        return
    base: list[float] = []
    for arm in (IDS, ACCEPTED, ALL, TUNED):
        halves = {half: load(FILE)[1] for half in (False, True)}
        if arm != IDS:
            for half, belief in halves.items():
                mine = [one for one in passes if one.half == half]
                teach(belief, mine, bigrams, arm != ACCEPTED)
        tasks = judge(passes, halves, arm, bigrams if arm == TUNED else UNTUNED)
        found = [at_nodes(sum(tasks.values()), n) for n in NODES]
        base = base or found
        print(arm, [f"{x:.3f} ({x / y:.3f})" for x, y in zip(found, base, strict=True)])
        for task, sums in tasks.items():
            print("   ", task, [f"{at_nodes(sums, n):.3f}" for n in NODES], flush=True)


if __name__ == "__main__":
    main()
